"""The transpose of each collective is that of the same mathematics on whole arrays, where nothing is sharded."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import in_tiers
from jax.sharding import PartitionSpec as P

from jaxmnt.config.mesh import Mesh
from jaxmnt.parallel import collectives
from jaxmnt.parallel import stages as stage_collectives
from jaxmnt.parallel.sharding import Placement, build_mesh
from jaxmnt.training.loss import Logits

BATCH, PIECE, WIDTH = 2, 3, 4


def pieces(x, count):
    """[devices, B, L, D] of one array [B, L, D]."""
    return jnp.stack(jnp.split(x, count, axis=1))


def joined(x):
    """[B, L, D] from its pieces on all devices."""
    return jnp.concatenate(list(x), axis=1)


def everywhere(x, count):
    return jnp.stack([x] * count)


def handed_on(x, *, forward, circular):
    moved = jnp.roll(x, 1 if forward else -1, axis=0)
    return moved if circular else moved.at[0 if forward else -1].set(0)


def shares(x_BLD, count):
    """[devices, 1, T, D] of one array [B, L, D], whose tokens are divided among the devices."""
    flat = x_BLD.reshape(-1, WIDTH)
    return jnp.pad(flat, ((0, -len(flat) % count), (0, 0))).reshape(count, 1, -1, WIDTH)


def on_stage(x_BLD, stage, count):
    return jnp.zeros((count, *x_BLD.shape)).at[stage].set(x_BLD)


def cases(module: ModuleType, stages: ModuleType, count: int, placement: Placement) -> dict:
    """By name: the mesh axis, the collective on one device, the same of the arrays of all devices, and whether an
    input has the whole length."""
    last = count - 1
    by_tokens = replace(placement, divides_tokens=True)
    length = PIECE * count - 1  # the last share ends with padding
    return {
        "gather_sequence": (
            "model", lambda x: module.gather_sequence(x, placement), lambda x: everywhere(joined(x), count), 1,
        ),
        "scatter_sequence of parts": (
            "model", lambda x: module.scatter_sequence(x, placement, "heads"), lambda x: pieces(x.sum(0), count), count,
        ),
        "gather_pieces": (
            "model", lambda x: module.join_pieces(module.gather_pieces(x, placement), placement),
            lambda x: everywhere(joined(x), count), 1,
        ),
        "scatter_pieces": (
            "model", lambda x: module.scatter_pieces(module.cut_into_pieces(x, placement), placement),
            lambda x: pieces(x.sum(0), count), count,
        ),
        "local_shard": (
            "model", lambda x: module.local_shard(x, placement),
            lambda x: jnp.stack([pieces(one, count)[device] for device, one in enumerate(x)]), count,
        ),
        "sum_over": (
            "model", lambda x: module.sum_over("heads", x, placement), lambda x: everywhere(x.sum(0), count), 1,
        ),
        "share_of": ("model", lambda x: module.share_of("heads", x, placement), lambda x: x / count, 1),
        "distribute_from_stage": (
            "pipeline", lambda x: stages.distribute_from_stage(x, last, placement),
            lambda x: everywhere(x[last], count), 1,
        ),
        "distribute_from_stage by tokens": (
            "pipeline", lambda x: stages.distribute_from_stage(x, last, by_tokens), lambda x: shares(x[last], count), 1,
        ),
        "collect_on_stage": (
            "pipeline", lambda x: stages.collect_on_stage(x, last, x.shape[:2], placement),
            lambda x: on_stage(x.sum(0), last, count), 1,
        ),
        "collect_on_stage by tokens": (
            "pipeline",
            lambda x: stages.collect_on_stage(x.reshape(1, -1, WIDTH), last, (BATCH, length), by_tokens),
            lambda x: on_stage(
                x.reshape(-1, WIDTH)[: BATCH * length].reshape(BATCH, length, WIDTH), last, count
            ), 1,
        ),
        **{
            f"shift_stage forward={forward} circular={circular}": (
                "pipeline",
                lambda x, f=forward, c=circular: stages.shift_stage(x, placement, forward=f, circular=c),
                lambda x, f=forward, c=circular: handed_on(x, forward=f, circular=c), 1,
            )
            for forward in (True, False) for circular in (True, False)
        },
    }  # fmt: skip


def placement_of(axis: str, count: int) -> Placement:
    return Placement(build_mesh(Mesh(data=1, **{axis: count}), jax.devices()[:count]))


def on_each(placement: Placement, axis: str, function):
    """`function` of this device's arrays, for arrays [devices, …]."""

    def local(*arrays):
        return jax.tree.map(lambda out: out[None], function(*jax.tree.map(lambda array: array[0], arrays)))

    return jax.jit(jax.shard_map(local, mesh=placement.mesh, in_specs=P(axis), out_specs=P(axis), check_vma=False))


def check(name: str, count: int, module: ModuleType = collectives, stages: ModuleType = stage_collectives) -> None:
    axis = cases(module, stages, count, placement_of("model", count))[name][0]
    placement = placement_of(axis, count)
    _, collective, plain, factor = cases(module, stages, count, placement)[name]
    rng = np.random.default_rng(count)
    x = jnp.asarray(rng.standard_normal((count, BATCH, PIECE * factor, WIDTH)), jnp.float32)
    expected, plain_backward = jax.vjp(plain, x)
    gradient = jnp.asarray(rng.standard_normal(expected.shape), jnp.float32)

    def both(x, gradient):
        y, backward = jax.vjp(collective, x)
        return y, backward(gradient)[0]

    y, x_gradient = on_each(placement, axis, both)(x, gradient)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(x_gradient, plain_backward(gradient)[0], rtol=1e-5, atol=1e-5)


MODULES = {"module": collectives, "stages": stage_collectives}
NAMES = list(cases(collectives, stage_collectives, 2, placement_of("model", 2)))


@pytest.mark.parametrize("count", in_tiers({0}, [4, 2, 8]))
@pytest.mark.parametrize("name", NAMES)
def test_transpose_is_that_of_whole_arrays(name, count):
    check(name, count)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("sum_over", "with_transpose(psum, psum)", "with_transpose(psum, lambda x: x)"),
        ("gather_sequence", "with_transpose(gather, scatter)", "with_transpose(gather, lambda x: scatter(x) / 2)"),
        (
            "scatter_sequence of parts",
            "with_transpose(scatter, gather)",
            "with_transpose(scatter, lambda x: 2 * gather(x))",
        ),
        ("gather_pieces", "jnp.swapaxes(x_NBS, 0, 1)", "x_NBS.reshape(-1, *x_NBS.shape[:1], *x_NBS.shape[2:])"),
        ("scatter_pieces", "*x_BL.shape[2:]), 0, 1)", "*x_BL.shape[2:]), 0, 0)"),
        ("share_of", "x / placement.num_shards_in_use(axis)", "x"),
        ("shift_stage forward=True circular=False", "(send, send_back)", "(send, send)"),
        ("distribute_from_stage", "_mask_other_stages(x_BSD, stage)", "x_BSD"),
        ("distribute_from_stage by tokens", "_mask_other_stages(x_BSD, stage)", "x_BSD"),
        ("collect_on_stage", "collectives.sum_over_axes(x_1TD, _STAGES)", "x_1TD"),
        ("collect_on_stage by tokens", "_mask_other_stages(x_TD.reshape", "(lambda x, stage: x)(x_TD.reshape"),
    ],
)
def test_a_wrong_factor_is_found(name, right, wrong, tmp_path):
    """In a copy of the module with one transpose changed."""
    [parameter] = [key for key, module in MODULES.items() if hasattr(module, name.split()[0])]
    source = Path(MODULES[parameter].__file__).read_text(encoding="utf-8")
    assert right in source
    copy = tmp_path / "wrong_collectives.py"
    copy.write_text(source.replace(right, wrong), encoding="utf-8")
    specification = importlib.util.spec_from_file_location("wrong_collectives", copy)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    with pytest.raises(AssertionError):
        check(name, 4, **{parameter: module})


@pytest.mark.parametrize("count", [2, 8])
def test_gathered_weights_and_their_gradients(count):
    """`reshard` is the transpose of `unshard`."""
    placement, axes = placement_of("fsdp", count), {"weight": ("embed", "mlp"), "scale": ("norm",)}
    rng = np.random.default_rng(count)
    array = lambda *shape: jnp.asarray(rng.standard_normal((count, *shape)), jnp.float32)
    stored = {"weight": array(3, 4), "scale": array(5)}
    gradient = {"weight": array(3 * count, 4), "scale": array(5)}

    def local(stored, gradient):
        f32 = jnp.dtype("float32")
        used = collectives.unshard(stored, axes, placement, f32)
        return used, collectives.reshard(gradient, axes, placement, f32)

    used, found = on_each(placement, "fsdp", local)(stored, gradient)
    plain = lambda tree: {
        "weight": everywhere(jnp.concatenate(list(tree["weight"])), count), "scale": tree["scale"],
    }  # fmt: skip
    expected, backward = jax.vjp(plain, stored)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), used, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, backward(gradient)[0])


@pytest.mark.parametrize("count", [2, 4, 8])
def test_what_a_loss_asks_of_the_vocabulary(count):
    """Value and gradient of the partition function and of weighted logits, by a gradient that comes in parts."""
    placement, size, tokens = placement_of("model", count), 3, 5
    rng = np.random.default_rng(count)
    logits = jnp.asarray(rng.standard_normal((tokens, count * size)), jnp.float32)
    weights = jnp.asarray(rng.random((tokens, count * size)), jnp.float32)
    parts = jnp.asarray(rng.standard_normal((count, 2, tokens)), jnp.float32)
    split = lambda x: jnp.stack(jnp.split(x, count, axis=1))

    def local(logits, weights, part):
        ids = jax.lax.axis_index("model") * size + jnp.arange(size)

        def asked(values):
            of = Logits(values, ids, placement)
            return jnp.stack([of.log_sum_exp(), of.weighted(weights)])

        value, backward = jax.vjp(asked, logits)
        return value, backward(part)[0]

    plain = lambda x: jnp.stack([jax.nn.logsumexp(x, axis=1), (x * weights).sum(1)])
    expected, backward = jax.vjp(plain, logits)
    value, found = on_each(placement, "model", local)(split(logits), split(weights), parts)
    for one in value:
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(joined(found), backward(parts.sum(0))[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("stages", "model"), [(2, 4), (4, 2), (3, 2), (5, 1)])
def test_a_stage_has_the_fields_of_its_share(stages, model):
    """Those of the tokens whose activations it gets, with zeros for padding, in the same order."""
    mesh = Mesh(data=1, pipeline=stages, model=model)
    placement = Placement(build_mesh(mesh, jax.devices()[: stages * model]), divides_tokens=True)
    rows, length = 3, 8
    tokens_BL = jnp.arange(1, 1 + rows * length).reshape(rows, length)

    def local():
        piece_BSD = collectives.local_shard(tokens_BL, placement).astype(jnp.float32)[..., None]
        share_1TD = stage_collectives.distribute_from_stage(piece_BSD, stages - 1, placement)
        activations = collectives.gather_sequence(share_1TD, placement)[..., 0]
        return activations[None], stage_collectives.share_of_tokens(tokens_BL, placement)[None]

    out = P(("pipeline", "model"))
    run = jax.jit(jax.shard_map(local, mesh=placement.mesh, in_specs=(), out_specs=(out, out), check_vma=False))
    activations, fields = run()
    np.testing.assert_array_equal(activations, fields)
    real = np.asarray(fields[::model]).ravel()
    assert sorted(real[real > 0]) == list(range(1, 1 + rows * length))
