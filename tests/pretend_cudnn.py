"""cuDNN's attention as it is documented, computed on a CPU.

It is given lengths of rows, or documents, which are spans of tokens in one line, by their lengths and their offsets in
numbers. It returns statistics by document. Tokens that a call does not use are not written: they are NaN here.
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

    def forward_outputs(q, k, v, used):
        documents = len(used.lengths_C) if isinstance(used, cudnn.DocumentSpans) else len(q)
        return shape(q), jax.ShapeDtypeStruct((documents, q.shape[2], q.shape[1]), jnp.float32)

    monkeypatch.setattr(cudnn, "cudnn_forward", called(forward, forward_outputs))
    monkeypatch.setattr(cudnn, "cudnn_backward", called(backward, lambda q, k, v, *_: tuple(map(shape, (q, k, v)))))


def forward(options, q, k, v, used):
    number_of_documents = sum(1 for _ in documents(q, k, used))
    a, statistics = (
        np.full(q.shape, np.nan, q.dtype),
        np.full((number_of_documents, q.shape[2], q.shape[1]), np.nan, "f"),
    )
    for number, own, other in documents(q, k, used):
        s = scores(options, line(q)[own], line(k)[other])
        size = own.stop - own.start
        if not size:
            continue
        statistics[number, :, :size] = np.logaddexp.reduce(s, -1)
        p = np.exp(s - statistics[number, :, :size, None])
        values = np.repeat(line(v)[other], q.shape[2] // v.shape[2], 1)
        line(a)[own] = np.einsum("hqj,jhk->qhk", p, values)
    return a, statistics


def backward(options, q, k, v, statistics, gradient, a, used):
    assert not np.isnan(statistics).any()
    gradients = tuple(np.full(array.shape, np.nan, array.dtype) for array in (q, k, v))
    shared = q.shape[2] // k.shape[2]
    grouped = lambda x: x.reshape(len(x), -1, shared, x.shape[-1]).sum(2)
    for number, own, other in documents(q, k, used):
        size = own.stop - own.start
        if not size:
            continue
        keys, values = (np.repeat(line(array)[other], shared, 1) for array in (k, v))
        p = np.exp(scores(options, line(q)[own], line(k)[other]) - statistics[number, :, :size, None])
        g = line(gradient)[own]
        dot = np.sum(g * line(a)[own], -1).T[..., None]
        slope = p * (np.einsum("qhk,jhk->hqj", g, values) - dot) * options.scale
        line(gradients[0])[own] = np.einsum("hqj,jhk->qhk", slope, keys)
        line(gradients[1])[other] = grouped(np.einsum("hqj,qhk->jhk", slope, line(q)[own]))
        line(gradients[2])[other] = grouped(np.einsum("hqj,qhk->jhk", p, g))
    return gradients


def documents(q, k, used):
    """Yields the number of each document, and the slices of its queries and keys in the lines of all rows."""
    query_lengths, key_lengths, query_offsets, key_offsets = map(np.array, cudnn._length_operands(q, k, used))
    rows = [np.arange(len(x)) * x.shape[1] for x in (q, k)]
    if used is None:
        lengths, first = [np.full(len(x), x.shape[1]) for x in (q, k)], rows
    elif query_offsets.ndim < 2 or query_offsets.shape[1] == 2:  # JAX does not pass on the offsets of one document
        assert query_lengths.shape == key_lengths.shape == (len(q),) and min(*query_lengths, *key_lengths) > 0
        lengths, first = (query_lengths, key_lengths), rows
    else:
        assert query_offsets.shape == key_offsets.shape == (len(q), query_lengths.shape[1] + 1)
        lengths = [sizes.reshape(-1) for sizes in (query_lengths, key_lengths)]
        first = [tokens_of(offsets, x) for offsets, x in ((query_offsets, q), (key_offsets, k))]
    for number in range(len(lengths[0])):
        yield number, *(slice(at[number], at[number] + size[number]) for at, size in zip(first, lengths, strict=True))


def tokens_of(offsets, like):
    """Returns offsets in tokens, from offsets in numbers of an array like this one."""
    numbers = like.shape[2] * like.shape[3]
    assert (offsets % numbers == 0).all()
    return offsets.reshape(-1) // numbers


def scores(options, q, k):
    k = np.repeat(k, q.shape[1] // k.shape[1], 1)
    all_scores = np.einsum("qhk,jhk->hqj", q, k) * options.scale
    if not options.causal:
        return all_scores
    back = np.arange(len(q))[:, None] - np.arange(len(k))
    return np.where((back >= 0) & (back < (options.window or len(q))), all_scores, -np.inf)


def line(x):
    return x.reshape(-1, *x.shape[2:])
