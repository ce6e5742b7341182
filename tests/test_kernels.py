"""Attention blockwise over keys: exact, forward and backward, without an array of L × L."""

import jax
import jax.numpy as jnp
import numpy as np
import pretend_cudnn
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


def plain(q, k, v, sinks, segments, window, soft_cap, scale, bias_HD=None):
    """The same with all scores at once."""
    length, heads = q.shape[1:3]
    k, v = (jnp.repeat(one, heads // one.shape[2], 2) for one in (k, v))
    scores = jnp.einsum("blhk,bmhk->bhlm", q, k) * scale
    scores = soft_cap * jnp.tanh(scores / soft_cap) if soft_cap else scores
    back = jnp.arange(length)[:, None] - jnp.arange(length)
    if bias_HD is not None:
        scores += bias_HD[:, jnp.clip(back, 0, bias_HD.shape[1] - 1)]
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


@pytest.mark.parametrize(
    ("length", "kv_heads", "entries", "window", "soft_cap"),
    [
        (1, 2, 1, None, None),
        (32, 4, 32, None, None),
        (31, 1, 5, 7, None),
        (65, 2, 65, None, 2.0),
        (50, 1, 20, 24, None),
    ],
)
def test_biases_of_distances_are_exact(length, kv_heads, entries, window, soft_cap, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK", 16)
    rng = np.random.default_rng(length)
    array = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    q, k, v, gradient = (array(2, length, count, 8) for count in (4, kv_heads, kv_heads, 4))
    segments = jnp.asarray(np.sort(rng.integers(1, 4, (2, length)), axis=1))
    options = {"window": window, "soft_cap": soft_cap, "scale": 0.3}

    @jax.jit
    def both(q, k, v, bias_HD):
        ours = lambda q, k, v, bias_HD: attend(q, k, v, segments, "cudnn", bias_HD=bias_HD, **options)
        whole = lambda q, k, v, bias_HD: plain(q, k, v, None, segments, window, soft_cap, 0.3, bias_HD)
        results = (jax.vjp(function, q, k, v, bias_HD) for function in (ours, whole))
        return [(out, backward(gradient)) for out, backward in results]

    with jax.default_matmul_precision("highest"):
        results, expected = both(q, k, v, array(4, entries))
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


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
    pretend_cudnn.install(monkeypatch)
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


def test_kernel_choice(monkeypatch):
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
    assert choose("gpu", bf16, 256, 9.0, divided=True) == "cudnn"
    monkeypatch.setattr("jaxmnt.models.kernels.has_packed_form", lambda: False)
    assert choose("gpu", bf16, 64, 9.0, divided=True) == "blockwise"
    with pytest.raises(ConfigError, match=r"cudnn cannot divide rows \(mesh.context\) with JAX"):
        choose("gpu", bf16, 64, 9.0, "cudnn", divided=True)
    monkeypatch.undo()
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
