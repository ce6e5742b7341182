"""Rows that are divided among devices (`mesh.context`): attention against float64, and the same numbers on any mesh."""

import functools
import itertools
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pretend_cudnn
import pytest
import test_experts
import test_parallel
from conftest import in_tiers
from hypothesis import given
from hypothesis import strategies as st

from jaxmnt.config.mesh import AXES, Mesh
from jaxmnt.data.feed import to_devices
from jaxmnt.errors import ConfigError
from jaxmnt.models import blockwise, context_parallel
from jaxmnt.models.context_parallel import DividedRows, attend_across_devices
from jaxmnt.models.contract import LayerOutput
from jaxmnt.models.llama import Block, Llama
from jaxmnt.parallel.chunks import device_order, places_in_row, row_order, whole_rows
from jaxmnt.parallel.sharding import Placement, build_mesh
from jaxmnt.plan.hlo import shapes_in
from jaxmnt.plan.report import notes
from jaxmnt.training.build import build_spec, inference_spec
from jaxmnt.training.compile import compile_step
from jaxmnt.training.inference import row_logits
from jaxmnt.training.memory_suggestions import residual_bytes
from jaxmnt.training.state import abstract_state, canonical_abstract

ROWS, LENGTH, HEADS, GROUPS, WIDTH = 2, 96, 4, 2, 8


# -- attention


def segments_of(ends_of_rows, length=LENGTH):
    """Returns rows of segments from the places at which documents end. The last segment of a row is padding, 0."""
    segments = np.zeros((len(ends_of_rows), length), np.int32)
    for row, ends in zip(segments, ends_of_rows, strict=True):
        for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False), 1):
            row[begin:end] = number
    return segments


# With 4 devices a chunk has 12 tokens, and with 8 devices it has 6.
PACKED = {
    "anywhere": segments_of([[5, 37, 38, 81], [96]]),
    "at ends of chunks": segments_of([[12, 36, 48, 84], [6, 12, 18, 24, 90, 96]]),
    "one token": segments_of([list(range(1, 97)), [47, 48, 49, 96]]),
    "much padding": segments_of([[9], [1]]),
}


def attention_inputs(seed=0):
    rng = np.random.default_rng(seed)
    q, gradient = rng.standard_normal((2, ROWS, LENGTH, HEADS, WIDTH))
    k, v = rng.standard_normal((2, ROWS, LENGTH, GROUPS, WIDTH))
    return q, k, v, gradient


def exact(q, k, v, gradient, segments, window=None, soft_cap=None, sinks_H=None, bias_HD=None):
    """Attention and its gradients with all scores at once, in float64."""

    def attend(q, k, v, sinks_H, bias_HD):
        k, v = (jnp.repeat(x, HEADS // GROUPS, 2) for x in (k, v))
        scores = jnp.einsum("blhk,bmhk->bhlm", q, k) * WIDTH**-0.5
        scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
        distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
        scores += bias_HD[:, np.clip(distance, 0, bias_HD.shape[1] - 1)]
        seen = ((distance >= 0) & (distance < (window or LENGTH)))[None]
        if segments is not None:
            seen = seen & (segments[:, :, None] == segments[:, None])
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        sinks = jnp.broadcast_to(sinks_H[:, None, None], (*scores.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sinks], -1), -1)[..., :-1]
        return jnp.einsum("bhlm,bmhk->blhk", weights, v)

    with jax.enable_x64(True):
        sinks_H = np.full(HEADS, -np.inf) if sinks_H is None else sinks_H
        bias_HD = np.zeros((HEADS, 1)) if bias_HD is None else bias_HD
        out, backward = jax.vjp(attend, *(jnp.asarray(x, jnp.float64) for x in (q, k, v, sinks_H, bias_HD)))
        return [np.asarray(x) for x in (out, *backward(jnp.asarray(gradient, jnp.float64)))]


def across_devices(devices, q, k, v, gradient, segments, kernel="blockwise", sinks_H=None, bias_HD=None, **options):
    """The same on devices that share the rows, in the order of the rows."""
    placement = Placement(build_mesh(Mesh(data=1, context=devices), jax.devices()[:devices]))
    columns, places = device_order(LENGTH, devices), row_order(LENGTH, devices)
    sinks_H = np.full(HEADS, -1e30, np.float32) if sinks_H is None and bias_HD is not None else sinks_H
    per_head = (sinks_H, bias_HD)
    has_extras = any(x is not None for x in per_head)

    def run(q, k, v, gradient, segments, per_head):
        rows = DividedRows(
            placement, jnp.dtype("float32"), None if segments is None else whole_rows(segments, placement)
        )

        def attend(q, k, v, per_head):
            sinks_H, bias_HD = per_head
            return attend_across_devices(q, k, v, rows, kernel, sinks_H=sinks_H, bias_HD=bias_HD, **options)

        out, backward = jax.vjp(attend, q, k, v, per_head)
        *gradients, of_heads = backward(gradient)
        return out, *gradients, jax.lax.psum(of_heads, "context") if has_extras else of_heads

    in_rows, whole = placement.spec((None, "length")), placement.spec(())
    segments_spec = None if segments is None else in_rows
    heads_spec = jax.tree.map(lambda _: whole, per_head)
    specs = (in_rows, in_rows, in_rows, in_rows, segments_spec, heads_spec)
    function = jax.shard_map(
        run, mesh=placement.mesh, in_specs=specs, out_specs=(*specs[:4], heads_spec), check_vma=False
    )
    arrays = [jnp.asarray(x[:, columns], jnp.float32) for x in (q, k, v, gradient)]
    segments = None if segments is None else jnp.asarray(segments[:, columns])
    with jax.default_matmul_precision("highest"):
        *results, of_heads = jax.jit(function)(*arrays, segments, per_head)
    return [np.asarray(x)[:, places] for x in results] + [np.asarray(x) for x in jax.tree.leaves(of_heads)]


def check_attention(devices, segments, kernel="blockwise", **options):
    inputs = attention_inputs()
    expected = exact(*inputs, segments, **options)
    results = across_devices(devices, *inputs, segments, kernel, **options)
    for name, result, value in zip(("out", "q", "k", "v", "sinks", "bias"), results, expected, strict=False):
        error = np.abs(result - value).max() / max(np.abs(value).max(), 1e-30)
        assert error <= 2e-6, f"{name}: {error:.1e}"


ATTENTION = list(itertools.product((4, 2, 8, 3), (None, *PACKED), ("blockwise", "cudnn")))


@pytest.mark.parametrize(("devices", "rows", "kernel"), in_tiers(set(range(10)), ATTENTION))
def test_attention_across_devices_is_exact(devices, rows, kernel, monkeypatch):
    if kernel == "cudnn":
        pretend_cudnn.install(monkeypatch)
    check_attention(devices, PACKED.get(rows), kernel)


# Within a chunk, a chunk, wider than a chunk, and of nearly the whole row.
WINDOWS = list(
    itertools.product(((4, 6), (4, 30), (4, 12), (8, 3), (8, 95), (2, 96), (3, 9)), (None, "anywhere", "one token"))
)


@pytest.mark.parametrize(("sizes", "rows"), in_tiers({1, 3}, WINDOWS))
def test_windows_across_devices_are_exact(sizes, rows):
    devices, window = sizes
    check_attention(devices, PACKED.get(rows), window=window)


@pytest.mark.slow
def test_scores_that_change_are_exact_across_devices(monkeypatch):
    """Soft caps, sinks, and the loops over blocks of long rows."""
    sinks_H = np.linspace(-2, 2, HEADS).astype(np.float32)
    check_attention(4, PACKED["anywhere"], soft_cap=1.5, sinks_H=sinks_H)
    check_attention(4, PACKED["anywhere"], window=6, soft_cap=1.5, sinks_H=sinks_H)
    monkeypatch.setattr(blockwise, "BLOCK", 4)
    check_attention(2, PACKED["anywhere"], sinks_H=sinks_H)
    monkeypatch.setattr(blockwise, "BLOCK", 3)
    check_attention(4, PACKED["at ends of chunks"])
    check_attention(4, None)


@pytest.mark.parametrize(
    ("devices", "rows", "entries", "window"),
    in_tiers({0}, [(4, "anywhere", LENGTH, None), (2, None, 9, None), (3, "one token", 40, None), (4, None, 96, 9)]),
)
def test_biases_of_distances_are_exact_across_devices(devices, rows, entries, window):
    bias_HD = np.random.default_rng(0).standard_normal((HEADS, entries)).astype(np.float32)
    check_attention(devices, PACKED.get(rows), bias_HD=bias_HD, window=window)


def test_a_halo_is_a_part_of_all_keys(monkeypatch):
    """The tokens that a window reaches, from the last tokens of each chunk or from whole rows."""
    inputs = attention_inputs()
    halo = across_devices(4, *inputs, PACKED["anywhere"], window=6)
    monkeypatch.setattr(context_parallel._Halo, "_tail", None)  # is not called
    init = context_parallel._Halo.__init__

    def gather_all(self, rows, chunk_length, window):
        init(self, rows, chunk_length, chunk_length + 1)  # two chunks before each

    monkeypatch.setattr(context_parallel._Halo, "__init__", gather_all)
    whole = across_devices(4, *inputs, PACKED["anywhere"], window=6)
    for a, b in zip(halo, whole, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def use_a_stale_chunk(monkeypatch):
    """Backward takes another chunk's keys and values than forward."""
    gathers = []
    gather, keys = context_parallel.gather_chunks, context_parallel._Step.keys
    monkeypatch.setattr(context_parallel, "gather_chunks", lambda *arguments: gathers.append(1) or gather(*arguments))

    def stale(step, x_2BLGK):
        in_backward, half = len(gathers) > 2, x_2BLGK.shape[2]
        if in_backward and step.num_keys < half:
            step = step._replace(first_key=(step.first_key + step.num_keys) % half)
        return keys(step, x_2BLGK)

    monkeypatch.setattr(context_parallel._Step, "keys", stale)


def send_gradients_twice(monkeypatch):
    add = context_parallel._Step.add_keys
    twice = lambda step, total, new: (
        add(step, total, 2 * new) if step.num_keys < total.shape[2] else add(step, total, new)
    )
    monkeypatch.setattr(context_parallel._Step, "add_keys", twice)


def end_documents_early(monkeypatch):
    """The first key of a document that ends in a later chunk is missing."""
    shared = context_parallel.RowPart._shared_document

    def early(row, later, earlier, chunks):
        document = shared(row, later, earlier, chunks)
        return document and document._replace(first_key_B=document.first_key_B + 1)

    monkeypatch.setattr(context_parallel.RowPart, "_shared_document", early)


@pytest.mark.parametrize("damage", [use_a_stale_chunk, send_gradients_twice, end_documents_early])
def test_wrong_chunks_are_seen(damage, monkeypatch):
    damage(monkeypatch)
    with pytest.raises(AssertionError, match=r"^(q|k|out): "):
        check_attention(4, PACKED["anywhere"])


def test_all_devices_visit_equally_many_blocks(monkeypatch, record_property):
    """Of whole rows. The documents of packed rows do not divide evenly."""
    monkeypatch.setattr(blockwise, "BLOCK", 4)
    visits = Counter()
    add = blockwise.Softmax.add

    def counted(softmax, options, block, q_NRQK, keys):
        jax.debug.callback(lambda rank: visits.update([int(rank)]), jax.lax.axis_index("context"))
        return add(softmax, options, block, q_NRQK, keys)

    monkeypatch.setattr(blockwise.Softmax, "add", counted)
    across_devices(2, *attention_inputs(), None)
    jax.effects_barrier()
    assert set(visits) == {0, 1} and max(visits.values()) <= 1.05 * min(visits.values())
    # Both chunks to themselves at once, the late one to the first half, and one chunk to another.
    blocks = LENGTH // 4 // 4
    assert visits[0] == blocks * (blocks + 1) // 2 + 2 * blocks**2 + blocks**2

    rng = np.random.default_rng(0)
    length, devices = 131072, 8
    worst = []
    for _ in range(20):
        ends = np.cumsum(rng.geometric(1 / 16384, 100))
        segments = np.searchsorted(ends, np.arange(length), side="right")
        begins = np.concatenate([[0], ends])[segments]
        pairs_by_device = (np.arange(length) - begins + 1)[device_order(length, devices)].reshape(devices, -1).sum(1)
        worst.append(pairs_by_device.max() / pairs_by_device.mean())
    record_property("packed rows, worst over mean", round(float(np.mean(worst)), 2))
    assert np.mean(worst) < 2


# -- rows on devices


@given(st.integers(1, 9), st.integers(1, 8))
def test_columns_are_put_in_order_and_back(devices, chunk):
    length = 2 * devices * chunk
    columns = device_order(length, devices)
    assert sorted(columns) == list(range(length))
    assert (columns[row_order(length, devices)] == np.arange(length)).all()
    of_devices = columns.reshape(devices, 2, chunk)
    assert (np.diff(of_devices.reshape(devices, -1), axis=1) > 0).all(), "tokens are in rising order"
    assert (of_devices[:, 0, 0] + of_devices[:, 1, -1] == length - 1).all(), "chunks are mirrored"


def test_devices_get_their_chunks_of_the_rows():
    """Of rows that a process reads, which are not all. Whole rows are the same again."""
    placement = Placement(build_mesh(Mesh(data=2, context=2, model=2), jax.devices()))
    rows = np.arange(4 * 8).reshape(4, 8)
    batch = to_devices({"tokens": rows}, [0, 1, 2, 3], 4, placement.sharding(("batch", "length")))["tokens"]
    assert (np.asarray(batch)[:, row_order(8, 2)] == rows).all()
    places = jax.jit(
        jax.shard_map(
            lambda x: places_in_row(x.shape[1] // 2, placement)[None],
            mesh=placement.mesh, in_specs=placement.spec(("batch", "length")),
            out_specs=jax.sharding.PartitionSpec(None, ("context", "model")), check_vma=False,
        )
    )(batch)  # fmt: skip
    assert (np.asarray(places)[0] == device_order(8, 2)).all()


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"mesh": {"context": 4, "data": 2}, "data": {"sequence_length": 20}},
            "data.sequence_length: 20 is not divisible by 2 × mesh.context 4; set 16 or 24, or change the mesh",
        ),
        (
            {"mesh": {"context": 2, "model": 4}, "data": {"sequence_length": 8}},
            "8 is not divisible by 2 × mesh.context 2 × mesh.model 4; set 16, or change the mesh",
        ),
    ],
)
def test_lengths_that_do_not_divide_are_refused(sections, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        build_spec(test_parallel.config(**sections), test_parallel.VOCAB)


def test_context_across_hosts_is_refused():
    sections = {"mesh": {"context": 8}, "data": {"sequence_length": 32}}
    with pytest.raises(ConfigError, match=r"mesh.context: 8 devices would span the hosts 0, 1, .*allow_split_hosts"):
        build_spec(test_parallel.config(**sections), 60, host_of=lambda device: str(device.id // 4))


class OwnBlock(Block):
    """A layer that does not call `LayerContext.attend`."""

    def __call__(self, x_BSD, context):
        return LayerOutput(x_BSD)


class OwnAttention(Llama):
    """A family of such layers."""

    block = OwnBlock


def test_layers_with_their_own_attention_are_refused():
    sections = {"model": {"family": f"{__name__}.OwnAttention"}, "mesh": {"context": 2}}
    with pytest.raises(ConfigError, match=r"a layer of \S*OwnAttention does not call LayerContext.attend"):
        test_parallel.gradients(2, **sections)
    test_parallel.gradients(1, model=sections["model"])


def test_a_window_wider_than_a_chunk_is_noted():
    sections = KINDS["windows"] | {"mesh": {"context": 4, "data": 2}}
    assert [note for note in notes(build_spec(test_parallel.config(**sections), 60)) if "mesh.context" in note] == [
        "mesh.context: a window of 5 tokens is wider than a chunk of 4, so each device computes 3 times the queries in "
        "these layers; set it lower"
    ]
    sections["mesh"] = {"context": 2, "data": 4}
    assert not [note for note in notes(build_spec(test_parallel.config(**sections), 60)) if "mesh.context" in note]


# -- a step on any mesh

KINDS = {
    "packed": {
        "data": {"sequence_length": 32, "document_mask": True},
        "model": {"num_layers": 4, "num_kv_heads": 2, "dropout": 0.1},
    },
    "whole": {"data": {"sequence_length": 32}, "model": {"num_layers": 4, "num_kv_heads": 2}},
    # Halos of several chunks with 4 and more devices.
    "windows": {
        "data": {"sequence_length": 32, "document_mask": True},
        "model": {"family": "gemma3", "sliding_window": 5, "sliding_window_pattern": 2, "num_layers": 8},
    },
    "soft caps": {
        "data": {"sequence_length": 32},
        "model": {
            "family": "gemma2", "sliding_window": 7, "num_layers": 8, "num_kv_heads": 4, "attention_soft_cap": 3.0,
            "logit_soft_cap": 5.0,
        },
    },
}  # fmt: skip
STEPS = [
    ("packed", {"mesh": {"context": 2, "fsdp": 2, "model": 2}, "train": {"microbatch_size": 1}}),
    ("windows", {"mesh": {"context": 2, "pipeline": 2, "data": 2}, "train": {"microbatch_size": 2}}),
    ("whole", {"mesh": {"context": 8}, "train": {"remat": "full"}}),
    ("packed", {"mesh": {"context": 4, "data": 2}}),
    ("whole", {"mesh": {"context": 2, "data": 4, "zero": 2}, "train": {"microbatch_size": 1}}),
    ("soft caps", {"mesh": {"context": 2, "pipeline": 4}}),
    ("packed", {"mesh": {"context": 4, "pipeline": 2}, "train": {"remat": "dots"}}),
    ("windows", {"mesh": {"context": 4, "fsdp": 2, "prefetch": True}, "train": {"microbatch_size": 2}}),
    ("packed", {"mesh": {"context": 2, "fsdp": 4, "zero": 1}, "train": {"microbatch_size": 1}}),
    ("packed", {"mesh": {"context": 2, "model": 4}, "model": {"overlap": "ring"}}),
    ("soft caps", {"mesh": {"context": 4, "model": 2}, "model": {"overlap": "rows"}}),
    (
        "windows",
        {"mesh": {"context": 2, "pipeline": 2, "model": 2}, "pipeline": {"schedule": "interleaved", "chunks": 2}},
    ),
    ("packed", {"mesh": {"context": 8}, "train": {"remat": "names", "remat_save": ["attention"]}}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "sections"), in_tiers({0, 2}, STEPS), ids=str)
def test_a_step_with_divided_rows_is_that_of_one_device(kind, sections):
    devices = math.prod(sections["mesh"].get(axis, 1) for axis in AXES)
    test_parallel.check(devices, KINDS[kind], **sections)


@pytest.mark.slow
def test_learned_positions_are_those_of_the_rows():
    """The loss alone: the gradient of a key's bias is zero but for roundings."""
    sections = {
        "data": {"sequence_length": 32},
        "model": {"family": "gpt2", "max_positions": 32, "num_layers": 2, "vocab_size": 4096},
    }
    divided, _ = test_parallel.gradients(8, mesh={"context": 2, "fsdp": 2, "model": 2}, **sections)
    whole, _ = test_parallel.gradients(1, **sections)
    assert divided == pytest.approx(whole, rel=1e-6)


EXPERT_STEPS = [
    ({"context": 2, "expert": 2, "model": 2}, 1),
    ({"context": 4, "expert": 2}, 0),
    ({"context": 2, "expert": 4}, 2),
    ({"context": 2, "expert": 2, "pipeline": 2}, 1),
]


@pytest.mark.parametrize(("mesh", "variant"), in_tiers({0}, EXPERT_STEPS), ids=str)
def test_a_step_of_experts_with_divided_rows_is_that_of_one_device(mesh, variant):
    test_experts.check_step(8, test_experts.VARIANTS[variant], mesh=mesh, train={"microbatch_size": 1})


def gradients_of_long_rows(context):
    data = {"global_batch_size": 1, "sequence_length": 8192, "document_mask": True}
    model = LONG_MODEL | {"num_layers": 1}
    return test_parallel.gradients(context, data=data, model=model, mesh={"data": 1, "context": context})


# With the proportions of Llama 3 8B.
LONG_MODEL = {
    "vocab_size": 512, "hidden_size": 256, "num_layers": 2, "num_heads": 8, "num_kv_heads": 2, "intermediate_size": 896,
}  # fmt: skip


def memory_of_long_rows(context, length, remat):
    """The temporary memory of a step, the bytes of residuals, and the shapes of arrays in the program."""
    chosen = test_parallel.config(
        data={"global_batch_size": 1, "sequence_length": length, "document_mask": True},
        model=LONG_MODEL,
        mesh={"data": 1, "context": context},
        train={"precision": "float32", "remat": remat, "loss_chunk_mib": 16},
    )
    spec = build_spec(chosen, 512, jax.devices()[:context])
    compiled = compile_step(spec, abstract_state(spec))
    shapes = {shape for _, shape in shapes_in(compiled.as_text())}
    return compiled.memory_analysis().temp_size_in_bytes, residual_bytes(spec), shapes


@pytest.mark.parametrize("remat", in_tiers(set(), ["none", "full"]))
def test_the_memory_of_long_rows_is_divided(remat, record_property):
    """Of rows of 131,072 tokens among 8 devices. Keys and values of whole rows are there twice, with their gradients,
    and a sum for the queries; all of it is float32 on a CPU."""
    length, devices = 131072, 8
    part, _, _ = memory_of_long_rows(1, length // devices, remat)
    whole, whole_residuals, _ = memory_of_long_rows(1, length, remat)
    divided, divided_residuals, shapes = memory_of_long_rows(devices, length, remat)
    keys, queries = length * LONG_MODEL["num_kv_heads"] * 32 * 4, length // devices * LONG_MODEL["hidden_size"] * 4
    formula = part + 2 * keys + 2 * keys + queries
    record_property("temporary MiB", [round(x / 2**20) for x in (divided, formula, whole)])
    assert divided <= 1.1 * formula
    assert divided <= whole / 6 and divided_residuals <= whole_residuals / 6
    assert not [shape for shape in shapes if sum(size >= length // devices for size in shape) > 1]


@pytest.mark.slow
def test_no_device_holds_the_logits_of_whole_rows():
    """Not while they are put in the row's own order, either."""
    length, vocab = 4096, 3000
    chosen = test_parallel.config(model=LONG_MODEL | {"vocab_size": vocab}, train={"precision": "float32"})
    spec = inference_spec(chosen, vocab, Mesh(data=1, context=8), jax.devices())
    state = canonical_abstract(spec, abstract_state(spec))
    tokens = jax.ShapeDtypeStruct((1, length), np.int32)
    program = jax.jit(functools.partial(row_logits, spec)).lower(state["params"], {}, tokens).compile()
    shapes = {shape for _, shape in shapes_in(program.as_text())}
    assert max(math.prod(shape) for shape in shapes if vocab in shape) == length // 8 * vocab


@pytest.mark.exhaustive
def test_long_rows_are_computed_block_by_block():
    loss, found = gradients_of_long_rows(8)
    wanted_loss, wanted = gradients_of_long_rows(1)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()
