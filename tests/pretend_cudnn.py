"""cuDNN's attention as it is documented, computed on a CPU.

Documents are spans of tokens in one line. For each, cuDNN is given its lengths, and its offsets in numbers, and it
returns statistics by document. Tokens that belong to no document of a call are not written: they are NaN here.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmnt.models import cudnn


def install(monkeypatch):
    """Makes `jaxmnt.models.cudnn` call these functions."""

    def called(function, outputs):
        def call(options, *arrays):
            to_numpy = lambda *arrays: function(options, *jax.tree.map(np.array, arrays))
            return jax.pure_callback(to_numpy, outputs(*arrays), *arrays)

        return call

    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)

    def forward_outputs(q, k, v, spans):
        documents = len(q) if spans is None else len(spans.query_lengths_C)
        return shape(q), jax.ShapeDtypeStruct((documents, q.shape[2], q.shape[1]), jnp.float32)

    monkeypatch.setattr(cudnn, "cudnn_forward", called(forward, forward_outputs))
    monkeypatch.setattr(cudnn, "cudnn_backward", called(backward, lambda q, k, v, *_: tuple(map(shape, (q, k, v)))))


def forward(options, q, k, v, spans):
    spans = spans or rows_as_documents(q, k)
    a, statistics = np.full(q.shape, np.nan, q.dtype), np.full((len(spans[0]), q.shape[2], q.shape[1]), np.nan, "f")
    for number, own, other in documents(q, k, spans):
        s = scores(options, line(q)[own], line(k)[other])
        size = own.stop - own.start
        statistics[number, :, :size] = np.logaddexp.reduce(s, -1)
        p = np.exp(s - statistics[number, :, :size, None])
        values = np.repeat(line(v)[other], q.shape[2] // v.shape[2], 1)
        line(a)[own] = np.einsum("hqj,jhk->qhk", p, values)
    return a, statistics


def backward(options, q, k, v, statistics, gradient, a, spans):
    assert not np.isnan(statistics).any()
    spans = spans or rows_as_documents(q, k)
    gradients = tuple(np.full(array.shape, np.nan, array.dtype) for array in (q, k, v))
    shared = q.shape[2] // k.shape[2]
    grouped = lambda x: x.reshape(len(x), -1, shared, x.shape[-1]).sum(2)
    for number, own, other in documents(q, k, spans):
        size = own.stop - own.start
        keys, values = (np.repeat(line(array)[other], shared, 1) for array in (k, v))
        p = np.exp(scores(options, line(q)[own], line(k)[other]) - statistics[number, :, :size, None])
        g = line(gradient)[own]
        dot = np.sum(g * line(a)[own], -1).T[..., None]
        slope = p * (np.einsum("qhk,jhk->hqj", g, values) - dot) * options.scale
        line(gradients[0])[own] = np.einsum("hqj,jhk->qhk", slope, keys)
        line(gradients[1])[other] = grouped(np.einsum("hqj,qhk->jhk", slope, line(q)[own]))
        line(gradients[2])[other] = grouped(np.einsum("hqj,qhk->jhk", p, g))
    return gradients


def rows_as_documents(q, k):
    """Returns the spans of a call in which each row is a document."""
    lengths = lambda x: np.full(len(x), x.shape[1])
    first = lambda x: np.arange(len(x) + 1) * x.shape[1]
    return cudnn.DocumentSpans(lengths(q), first(q), lengths(k), first(k))


def documents(q, k, spans):
    """Yields the number of each document that is not empty, and the slices of its queries and keys."""
    *lengths, q_offsets, kv_offsets = map(np.array, cudnn._document_operands(q, k, cudnn.DocumentSpans(*spans)))
    assert q_offsets.shape == kv_offsets.shape == (len(q), lengths[0].shape[1] + 1)
    for number, sizes in enumerate(zip(*(sizes.reshape(-1).tolist() for sizes in lengths), strict=True)):
        if all(sizes):
            yield (
                number,
                *(
                    tokens(offsets.reshape(-1)[number], size, x)
                    for offsets, size, x in zip((q_offsets, kv_offsets), sizes, (q, k), strict=True)
                ),
            )


def tokens(offset, size, like):
    """Returns the slice of `size` tokens of an array like this one that begins at an offset in numbers."""
    numbers = like.shape[2] * like.shape[3]
    assert offset % numbers == 0
    first = int(offset) // numbers
    return slice(first, first + size)


def scores(options, q, k):
    k = np.repeat(k, q.shape[1] // k.shape[1], 1)
    all_scores = np.einsum("qhk,jhk->hqj", q, k) * options.scale
    if not options.causal:
        return all_scores
    back = np.arange(len(q))[:, None] - np.arange(len(k))
    return np.where((back >= 0) & (back < (options.window or len(q))), all_scores, -np.inf)


def line(x):
    return x.reshape(-1, *x.shape[2:])
