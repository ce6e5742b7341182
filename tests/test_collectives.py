"""The transpose of each collective is that of the same mathematics on whole arrays, where nothing is sharded."""

import importlib.util
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


def cases(module: ModuleType, count: int, placement: Placement) -> dict:
    """By name: the mesh axis, the collective on one device, the same of the arrays of all devices, and whether an
    input has the whole length."""
    last = count - 1
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
        "sum_over_stages": (
            "pipeline", lambda x: module.sum_over_stages(x, placement), lambda x: everywhere(x.sum(0), count), 1,
        ),
        "broadcast_from_stage": (
            "pipeline", lambda x: module.broadcast_from_stage(x, last, placement), lambda x: everywhere(x[last], count),
            1,
        ),
        **{
            f"shift_stage forward={forward} circular={circular}": (
                "pipeline",
                lambda x, f=forward, c=circular: module.shift_stage(x, placement, forward=f, circular=c),
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


def check(module: ModuleType, name: str, count: int) -> None:
    axis = cases(module, count, placement_of("model", count))[name][0]
    placement = placement_of(axis, count)
    _, collective, plain, factor = cases(module, count, placement)[name]
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


NAMES = list(cases(collectives, 2, placement_of("model", 2)))


@pytest.mark.parametrize("count", in_tiers({0}, [4, 2, 8]))
@pytest.mark.parametrize("name", NAMES)
def test_transpose_is_that_of_whole_arrays(name, count):
    check(collectives, name, count)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("sum_over", "_with_transpose(psum, psum)", "_with_transpose(psum, lambda x: x)"),
        ("sum_over_stages", "_with_transpose(psum, psum)", "_with_transpose(psum, lambda x: 2 * psum(x))"),
        ("broadcast_from_stage", "_with_transpose(psum, psum)", "_with_transpose(psum, lambda x: x)"),
        ("gather_sequence", "_with_transpose(gather, scatter)", "_with_transpose(gather, lambda x: scatter(x) / 2)"),
        (
            "scatter_sequence of parts",
            "_with_transpose(scatter, gather)",
            "_with_transpose(scatter, lambda x: 2 * gather(x))",
        ),
        ("gather_pieces", "jnp.swapaxes(x_NBS, 0, 1)", "x_NBS.reshape(-1, *x_NBS.shape[:1], *x_NBS.shape[2:])"),
        ("scatter_pieces", "*x_BL.shape[2:]), 0, 1)", "*x_BL.shape[2:]), 0, 0)"),
        ("share_of", "x / placement.num_shards(axis)", "x"),
        ("shift_stage forward=True circular=False", "(send, send_back)", "(send, send)"),
    ],
)
def test_a_wrong_factor_is_found(name, right, wrong, tmp_path):
    """In a copy of the module with one transpose changed."""
    source = Path(collectives.__file__).read_text(encoding="utf-8")
    assert right in source
    copy = tmp_path / "wrong_collectives.py"
    copy.write_text(source.replace(right, wrong), encoding="utf-8")
    specification = importlib.util.spec_from_file_location("wrong_collectives", copy)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    with pytest.raises(AssertionError):
        check(module, name, 4)


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
