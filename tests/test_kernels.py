"""Attention blockwise over keys: exact, forward and backward, without an array of L × L."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_parallel import VOCAB, config
from test_program import equations

from jaxmnt.data.fields import FIELDS
from jaxmnt.errors import ConfigError
from jaxmnt.models import blockwise, cudnn
from jaxmnt.models.kernels import attend, choose_kernel
from jaxmnt.training.build import build_spec
from jaxmnt.training.state import abstract_state
from jaxmnt.training.step import mean_gradients


def plain(q, k, v, sinks, segments, window, soft_cap, scale):
    """The same with all scores at once."""
    length, heads = q.shape[1:3]
    k, v = (jnp.repeat(one, heads // one.shape[2], 2) for one in (k, v))
    scores = jnp.einsum("blhk,bmhk->bhlm", q, k) * scale
    scores = soft_cap * jnp.tanh(scores / soft_cap) if soft_cap else scores
    back = jnp.arange(length)[:, None] - jnp.arange(length)
    seen = ((back >= 0) & (back < (window or length)))[None, None]
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    scores = jnp.where(seen, scores, -jnp.inf)
    if sinks is not None:
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))], -1)
    return jnp.einsum("bhlm,bmhk->blhk", jax.nn.softmax(scores, -1)[..., :length], v)


# length, heads, key/value heads, packed, window, soft cap, sinks. A block has 16: up to 32 is written out, more loops.
CASES = [
    (1, 4, 2, False, None, None, False),
    (7, 3, 3, True, 5, None, False),
    (32, 4, 1, True, None, 2.0, True),
    (31, 4, 2, False, 20, None, True),
    (48, 4, 2, True, None, None, False),
    (50, 4, 4, True, 5, 2.0, True),
    (64, 4, 1, False, 20, None, False),
    (65, 2, 1, False, None, 2.0, True),
]


@pytest.mark.parametrize(("length", "heads", "kv_heads", "packed", "window", "soft_cap", "sinks"), CASES)
def test_blockwise_attention_is_exact(
    length, heads, kv_heads, packed, window, soft_cap, sinks, monkeypatch
):  # fmt: skip
    monkeypatch.setattr(blockwise, "BLOCK", 16)
    rng = np.random.default_rng(length)
    array = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    q, k, v, gradient = (array(2, length, count, 8) for count in (heads, kv_heads, kv_heads, heads))
    segments = jnp.asarray(np.sort(rng.integers(1, 4, (2, length)), axis=1)) if packed else None
    scores = array(heads) if sinks else None

    @jax.jit
    def both(q, k, v, scores):
        blockwise = lambda q, k, v, sinks_H: attend(
            q, k, v, segments, "blockwise", window=window, soft_cap=soft_cap, scale=0.3, sinks_H=sinks_H
        )
        whole = lambda q, k, v, sinks_H: plain(q, k, v, sinks_H, segments, window, soft_cap, 0.3)
        results = []
        for function in (blockwise, whole):
            out, backward = jax.vjp(function, q, k, v, scores)
            results.append((out, backward(gradient)))
        return results

    with jax.default_matmul_precision("highest"):
        found, expected = both(q, k, v, scores)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def pretend_cudnn(monkeypatch):
    """cuDNN's packed form as it is documented: tokens in one line, of each document its length and its offset in
    numbers, statistics by document. What belongs to no document of a call is not written: NaN here."""

    def documents(q, k, lengths, first):
        lengths, _, q_offsets, kv_offsets = cudnn._document_operands(q, k, lengths, first)
        assert q_offsets.shape == kv_offsets.shape == (len(q), lengths.shape[1] + 1)
        for number, size in enumerate(lengths.reshape(-1).tolist()):
            begins = [int(offsets.reshape(-1)[number]) for offsets in (q_offsets, kv_offsets)]
            assert begins[0] % (q.shape[2] * q.shape[3]) == begins[1] % (k.shape[2] * k.shape[3]) == 0
            yield number, begins[0] // (q.shape[2] * q.shape[3]), begins[1] // (k.shape[2] * k.shape[3]), size

    def scores(options, q, k):
        back = np.arange(len(q))[:, None] - np.arange(len(q))
        k = np.repeat(k, q.shape[1] // k.shape[1], 1)
        found = np.einsum("qhk,jhk->hqj", q, k) * options.scale
        return np.where((back >= 0) & (back < (options.window or len(q))), found, -np.inf)

    line = lambda x: x.reshape(-1, *x.shape[2:])

    def forward(options, q, k, v, lengths, first):
        a, statistics = np.full(q.shape, np.nan, q.dtype), np.full((len(lengths), q.shape[2], q.shape[1]), np.nan, "f")
        for number, at, kv_at, size in documents(q, k, lengths, first):
            if size:
                own, other = slice(at, at + size), slice(kv_at, kv_at + size)
                s = scores(options, line(q)[own], line(k)[other])
                statistics[number, :, :size] = np.logaddexp.reduce(s, -1)
                p = np.exp(s - statistics[number, :, :size, None])
                values = np.repeat(line(v)[other], q.shape[2] // v.shape[2], 1)
                line(a)[own] = np.einsum("hqj,jhk->qhk", p, values)
        return a, statistics

    def backward(options, q, k, v, statistics, gradient, a, lengths, first):
        assert not np.isnan(statistics).any()
        gradients = tuple(np.full(one.shape, np.nan, one.dtype) for one in (q, k, v))
        shared = q.shape[2] // k.shape[2]
        grouped = lambda x: x.reshape(len(x), -1, shared, x.shape[-1]).sum(2)
        for number, at, kv_at, size in documents(q, k, lengths, first):
            if size:
                own, other = slice(at, at + size), slice(kv_at, kv_at + size)
                keys, values = (np.repeat(line(one)[other], shared, 1) for one in (k, v))
                p = np.exp(scores(options, line(q)[own], line(k)[other]) - statistics[number, :, :size, None])
                g = line(gradient)[own]
                dot = np.sum(g * line(a)[own], -1).T[..., None]
                slope = p * (np.einsum("qhk,jhk->hqj", g, values) - dot) * options.scale
                line(gradients[0])[own] = np.einsum("hqj,jhk->qhk", slope, keys)
                line(gradients[1])[other] = grouped(np.einsum("hqj,qhk->jhk", slope, line(q)[own]))
                line(gradients[2])[other] = grouped(np.einsum("hqj,qhk->jhk", p, g))
        return gradients

    def called(function, outputs):
        def call(options, *arrays):
            to_numpy = lambda *arrays: function(options, *map(np.array, arrays))
            return jax.pure_callback(to_numpy, outputs(*arrays), *arrays)

        return call

    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    statistics = lambda q, lengths: jax.ShapeDtypeStruct((len(lengths), q.shape[2], q.shape[1]), jnp.float32)
    outputs = lambda q, k, v, lengths, first: (shape(q), statistics(q, lengths))
    monkeypatch.setattr(cudnn, "cudnn_forward", called(forward, outputs))
    monkeypatch.setattr(cudnn, "cudnn_backward", called(backward, lambda q, k, v, *_: tuple(map(shape, (q, k, v)))))


# length, heads, key/value heads, window, tokens of a document on average for which a call is made.
PACKED_CASES = [
    (1, 2, 1, None, 512),
    (40, 4, 2, None, 512),
    (40, 4, 1, 5, 20),
    (48, 2, 2, None, 8),
    (33, 4, 4, 7, 1),
]


@pytest.mark.parametrize(("length", "heads", "kv_heads", "window", "document"), PACKED_CASES)
def test_documents_are_kept_apart_in_cudnns_packed_form(length, heads, kv_heads, window, document, monkeypatch):
    """With a pretend cuDNN: the arithmetic around it. Rows of one document, and of more than a call takes."""
    monkeypatch.setattr(cudnn, "MEAN_DOCUMENT_TOKENS", document)
    pretend_cudnn(monkeypatch)
    rng = np.random.default_rng(length)
    array = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    q, k, v, gradient = (array(4, length, count, 8) for count in (heads, kv_heads, kv_heads, heads))
    own = [
        np.zeros(length),
        np.arange(length),
        np.sort(rng.integers(0, 3, length)),
        np.sort(rng.integers(0, 9, length)),
    ]
    own[2][length * 2 // 3 :] = -1  # the rest of a row, where nothing is
    segments = jnp.asarray(np.stack(own) + 1, jnp.int32)
    calls = -(-int(sum(1 + np.count_nonzero(np.diff(row)) for row in own)) // cudnn.documents_per_call(4, length))
    assert calls == 1 if length == 1 or document == 1 else calls > 1

    def both(q, k, v):
        packed = lambda q, k, v: cudnn.attend_packed(blockwise.ScoreOptions(0.3, window), q, k, v, segments)
        whole = lambda q, k, v: plain(q, k, v, None, segments, window, None, 0.3)
        results = []
        for function in (packed, whole):
            out, backward = jax.vjp(function, q, k, v)
            results.append((out, backward(gradient)))
        return results

    with jax.default_matmul_precision("highest"):
        found, expected = jax.jit(both)(q, k, v)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_more_numbers_than_cudnn_can_count_are_refused():
    q, k = (jax.ShapeDtypeStruct((16, 65536, heads, 128), jnp.bfloat16) for heads in (32, 8))
    attend = lambda q, k, segments: cudnn.attend_packed(blockwise.ScoreOptions(1.0), q, k, k, segments)
    with pytest.raises(ConfigError, match=r"cudnn cannot keep documents apart .* 4,294,967,296 numbers"):
        jax.eval_shape(attend, q, k, jax.ShapeDtypeStruct((16, 65536), jnp.int32))


def test_no_array_of_packed_rows_grows_with_the_square_of_the_length():
    """Read off the program of a step: no array has the length twice."""
    length = 4096
    chosen = config(
        data={"global_batch_size": 2, "sequence_length": length, "document_mask": True}, model={"num_layers": 2}
    )
    spec = build_spec(chosen, VOCAB, jax.devices()[:1])
    batch = {
        name: jax.ShapeDtypeStruct((2, length), dtype)
        for name, dtype in ((field.name, field.dtype) for field in FIELDS)
    }
    jaxpr = jax.make_jaxpr(lambda params, batch: mean_gradients(spec, params, {}, batch, jnp.int32(0)))(
        abstract_state(spec)["params"], batch
    )
    shapes = [variable.aval.shape for equation in equations(jaxpr.jaxpr) for variable in equation.outvars]
    assert any(blockwise.BLOCK in shape for shape in shapes)
    assert not [shape for shape in shapes if sum(size >= length for size in shape) > 1]


def test_kernel_choice():
    bf16, f32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
    choose = lambda platform, dtype, width, capability, wanted="auto", **more: choose_kernel(
        wanted, platform, dtype, width, capability, **more
    )
    assert choose("cpu", bf16, 64, 0) == "blockwise"
    assert choose("gpu", bf16, 64, 8.0) == "cudnn"
    assert choose("gpu", f32, 64, 9.0) == "blockwise"
    assert choose("gpu", bf16, 256, 8.0) == "blockwise"
    assert choose("gpu", bf16, 256, 9.0) == "cudnn"
    assert choose("gpu", bf16, 100, 9.0) == "blockwise"
    assert choose("gpu", bf16, 64, 9.0, "xla") == "blockwise"
    assert choose("gpu", bf16, 64, 9.0, packed=True) == "cudnn"
    assert choose("gpu", bf16, 64, 8.0, packed=True) == "blockwise"
    assert choose("gpu", bf16, 256, 9.0, packed=True) == "blockwise"
    assert choose("gpu", bf16, 64, 9.0, soft_cap=True) == "blockwise"
    with pytest.raises(ConfigError, match="cudnn has no soft cap"):
        choose("gpu", bf16, 64, 9.0, "cudnn", soft_cap=True)
    with pytest.raises(
        ConfigError, match=r"cudnn cannot keep documents of a row apart .* capability 8\.0, only on 9\.0"
    ):
        choose("gpu", bf16, 64, 8.0, "cudnn", packed=True)
    with pytest.raises(ConfigError, match="heads of width 256, only with heads of at most 128"):
        choose("gpu", bf16, 256, 9.0, "cudnn", packed=True)
    with pytest.raises(ConfigError, match="cudnn does not support heads of width 64 in float32"):
        choose("gpu", f32, 64, 9.0, "cudnn")
