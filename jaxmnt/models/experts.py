"""A layer of experts: MLPs of which each token uses only some, chosen by a router (Shazeer et al. 2017,
arXiv:1701.06538).

Experts are divided among the devices of the mesh axes `expert` and `model`. These devices gather the tokens of their
group, each computes what its own experts add, and the sums are scattered. No assignment of a token to an expert is ever
dropped: a device takes a bounded number of rows at a time, and takes further rounds if routing asks for more. So the
worst routing takes more time, but not more memory.

The rows of a round lie in tiles (see `models.grouped`). Only gathers move rows to tiles and back, no scatter adds them,
so the order of every sum is the same in each run.

Shapes: B batch, L length, S a device's piece of the length, T tokens, K experts of a token, D model, E this device's
experts, F MLP of an expert, H = 2 F gate and up, N tiles, R rows of a tile.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxmnt.config.model import Model
from jaxmnt.errors import ConfigError
from jaxmnt.models import mosaic
from jaxmnt.models.contract import Buffer, LayerContext, Sums
from jaxmnt.models.grouped import TILE_ROWS, ProductKind, ProductMethod, Tiles, multiply, tiles_of, weight_gradient
from jaxmnt.models.kernels import device_capability
from jaxmnt.models.layers import weight
from jaxmnt.models.routing import Routes, balance_loss, choose_experts, loads_of_rows, router_z_loss
from jaxmnt.parallel.collectives import index_along, local_shard, with_backward
from jaxmnt.parallel.sharding import Placement

EXPERT_ROUND = 1.25
"""The default of `model.expert_round`."""
ROUNDS, CALLS = "rounds", "calls"
"""Names of the sums over devices and microbatches of the rounds that experts took, and of the calls of their layer."""


class Experts(nnx.Module):
    """A router, and a gated MLP for each expert."""

    def __init__(self, config: Model, output_std: float, rngs: nnx.Rngs):
        assert config.num_experts and config.expert_size and config.experts_per_token
        self.config = config
        experts, hidden_size, expert_size = config.num_experts, config.hidden_size, config.expert_size
        into_axes = ("experts", "expert_embed", "expert_mlp")
        self.router = weight(rngs, (hidden_size, experts), ("embed", "router"))
        self.gate = weight(rngs, (experts, hidden_size, expert_size), into_axes)
        self.up = weight(rngs, (experts, hidden_size, expert_size), into_axes)
        self.down = weight(
            rngs, (experts, expert_size, hidden_size), ("experts", "expert_mlp", "expert_embed"), output_std
        )
        even_share = config.experts_per_token / experts
        self.load = Buffer(jnp.full(experts, even_share, jnp.float32), axes=("buffer",))
        """The share of the last step's tokens that used each expert."""
        self.bias = Buffer(jnp.zeros(experts, jnp.float32), axes=("buffer",))
        """Numbers that are added to the scores in the choice of experts alone."""

    def __call__(self, x_BSD: Array, context: LayerContext) -> tuple[Array, Array, Sums]:
        """Returns the output, the layer's terms of the loss, and its sums."""
        config, placement = self.config, context.placement
        is_real_BS = local_shard(context.is_real_BL, placement)
        logits_BSE = jnp.matmul(x_BSD.astype(jnp.float32), self.router[...], precision="highest")
        routes = choose_experts(config, logits_BSE, self.bias[...], is_real_BS)
        y_BSD, rounds = mix(
            expert_group(config, placement, math.prod(x_BSD.shape[:2]), x_BSD.dtype),
            x_BSD, routes.ids_BSK, routes.shares_BSK, self.gate[...], self.up[...], self.down[...],
        )  # fmt: skip
        loss = self._loss(logits_BSE, routes, is_real_BS, context)
        loads_E = jnp.sum(loads_of_rows(routes.ids_BSK, logits_BSE.shape[-1]), axis=0)
        sums = {
            "loads": loads_E,
            "scores": jnp.sum(routes.scores_BSE, axis=(0, 1)),
            ROUNDS: rounds.astype(jnp.float32),
            CALLS: jnp.ones((), jnp.float32),
        }
        return checkpoint_name(y_BSD, "mlp_output"), loss, sums

    def _loss(self, logits_BSE: Array, routes: Routes, is_real_BS: Array, context: LayerContext) -> Array:
        """Returns the balance loss and the z-loss, on the scale of a sum over targets."""
        config, placement = self.config, context.placement
        loss = jnp.zeros((), jnp.float32)
        if config.balance_loss:
            balance = balance_loss(config, routes, self.load[...], context.is_real_BL, placement)
            loss += config.balance_loss * balance
        if config.router_z_loss:
            loss += config.router_z_loss * router_z_loss(logits_BSE, is_real_BS)
        # Layers have equal parts of both losses, so that their factors do not depend on the depth.
        return loss * context.targets_per_token / config.num_layers


@dataclass(frozen=True)
class ExpertGroup:
    """A group of devices that share experts."""

    placement: Placement
    token_axes: tuple[str, ...]
    """Mesh axes of the group along which devices have different tokens."""
    other_axes: tuple[str, ...]
    """Mesh axes of the group along which devices have the same tokens, as in generation."""
    method: ProductMethod
    round_rows: int
    """Rows that a device takes in one round."""

    def gather(self, x_TD: Array) -> Array:
        """Gathers the tokens of the group."""
        return jax.lax.all_gather(x_TD, self.token_axes, axis=0, tiled=True) if self.token_axes else x_TD

    def sum_and_scatter(self, x_TD: Array) -> Array:
        """Returns this device's tokens of the sum over the group."""
        if self.other_axes:
            x_TD = jax.lax.psum(x_TD, self.other_axes)
        if self.token_axes:
            x_TD = jax.lax.psum_scatter(x_TD, self.token_axes, scatter_dimension=0, tiled=True)
        return x_TD


def expert_group(config: Model, placement: Placement, device_tokens: int, dtype: jnp.dtype) -> ExpertGroup:
    """Returns how the devices share experts, if each has `device_tokens` tokens of a microbatch. `dtype` is that of
    products."""
    assert config.experts_per_token and config.expert_round
    group_axes = {*placement.mesh_axes("experts"), *placement.mesh_axes("expert_mlp")}
    split_axes = {axis for name in ("batch", "length", "sequence") for axis in placement.mesh_axes(name)}
    in_order = lambda axes: tuple(axis for axis in placement.sizes if axis in axes)
    token_axes = in_order(group_axes & split_axes)
    tokens = device_tokens * math.prod(placement.sizes[axis] for axis in token_axes)
    rows, devices = tokens * config.experts_per_token, placement.num_shards("experts")
    if devices > 1:
        rows = min(rows, math.ceil(config.expert_round * rows / devices))
    method = choose_method(config, placement, dtype)
    return ExpertGroup(placement, token_axes, in_order(group_axes - split_axes), method, rows)


def choose_method(config: Model, placement: Placement, dtype: jnp.dtype) -> ProductMethod:
    """Returns how a device multiplies rows by its experts' weights in `dtype`.

    Raises `ConfigError` if Mosaic kernels are requested where they cannot be used.
    """
    assert config.num_experts and config.expert_size
    requested, device = config.experts_kernel, placement.mesh.devices.flat[0]
    if requested != "xla":
        reason = mosaic.obstacle(
            device_capability(device), dtype, config.num_experts // placement.num_shards("experts"),
            (config.hidden_size, config.expert_size // placement.num_shards("expert_mlp")),
        )  # fmt: skip
        if reason is None:
            return ProductMethod("mosaic", TILE_ROWS["mosaic"], device.core_count)
        if requested == "mosaic":
            raise ConfigError(f"model.experts_kernel: mosaic cannot be used {reason}; set auto or xla")
    kind: ProductKind = "loop" if placement.on_cpu else "chunks"
    return ProductMethod(kind, TILE_ROWS[kind])


class _Assignments(NamedTuple):
    """The assignments of the group's tokens to this device's experts, sorted by expert."""

    order_A: Array
    """The number of each assignment; that of choice c of token t is t · K + c. Those of other devices are last."""
    place_TK: Array
    """The place of each assignment in this order."""
    ids_TK: Array
    """The number of the expert among those of this device, or E if it is not one of them."""
    counts_E: Array


class _Round(NamedTuple):
    """A round: a part of the sorted assignments, in tiles."""

    tiles: Tiles
    assignment_NR: Array
    """The assignment of each row of a tile. Rows that are not used have a number past the last assignment."""
    row_TK: Array
    """The row, in all tiles, of each assignment. Assignments outside the round have a number past the last row."""


def _assignments(group: ExpertGroup, ids_TK: Array, experts: int) -> _Assignments:
    first = index_along("experts", group.placement) * experts
    is_own_TK = (ids_TK >= first) & (ids_TK < first + experts)
    own_ids_TK = jnp.where(is_own_TK, ids_TK - first, experts)
    order_A = jnp.argsort(own_ids_TK.reshape(-1), stable=True).astype(jnp.int32)
    numbers_A = jnp.arange(order_A.size, dtype=jnp.int32)
    place_A = jnp.zeros_like(order_A).at[order_A].set(numbers_A, unique_indices=True)
    counts_E = loads_of_rows(own_ids_TK[None], experts)[0].astype(jnp.int32)
    return _Assignments(order_A, place_A.reshape(ids_TK.shape), own_ids_TK, counts_E)


def _round(group: ExpertGroup, assignments: _Assignments, index: Array | int) -> _Round:
    """Returns round `index`, which has the sorted assignments from `index · round_rows` on."""
    first_place, tile_rows = index * group.round_rows, group.method.tile_rows
    end_E = jnp.cumsum(assignments.counts_E)
    inside = lambda place_E: jnp.clip(place_E - first_place, 0, group.round_rows)
    begin_E = inside(end_E - assignments.counts_E)
    counts_E = inside(end_E) - begin_E
    tiles = tiles_of(counts_E, tile_rows, group.round_rows)
    num_tiles, experts = len(tiles.expert_N), len(counts_E)
    # The number of each tile's rows among those of its expert.
    tile_N = jnp.arange(num_tiles) - tiles.first_E[tiles.expert_N]
    number_NR = tile_N[:, None] * tile_rows + jnp.arange(tile_rows)
    place_NR = first_place + begin_E[tiles.expert_N][:, None] + number_NR
    is_used_NR = number_NR < counts_E[tiles.expert_N][:, None]
    order_A = assignments.order_A
    assignment_NR = jnp.where(is_used_NR, order_A[jnp.minimum(place_NR, order_A.size - 1)], order_A.size)
    ids_TK = jnp.minimum(assignments.ids_TK, experts - 1)
    place_TK = assignments.place_TK - first_place
    is_inside_TK = (assignments.ids_TK < experts) & (place_TK >= 0) & (place_TK < group.round_rows)
    row_TK = tiles.first_E[ids_TK] * tile_rows + place_TK - begin_E[ids_TK]
    return _Round(tiles, assignment_NR, jnp.where(is_inside_TK, row_TK, num_tiles * tile_rows))


def _over_rounds(group: ExpertGroup, assignments: _Assignments, add_round: Any, start: Any) -> tuple[Any, Array]:
    """Returns `add_round(index, …)` applied to `start` for each round, and the number of rounds."""
    max_rounds = -(-assignments.order_A.size // group.round_rows)
    if max_rounds == 1:
        return add_round(0, start), jnp.int32(1)
    rounds = jnp.maximum(1, -(-jnp.sum(assignments.counts_E) // group.round_rows))
    # The first round is outside of the loop, so that with an even load the loop's condition is evaluated only once: on
    # GPUs, XLA copies it to the host each time.
    first = add_round(0, start)
    with jax.named_scope("about_0_rounds"):  # the planner reads the number of iterations from this name
        return jax.lax.fori_loop(1, rounds, add_round, first), rounds


def _take(rows: Array, indices: Array) -> Array:
    """Returns the rows at these indices, and zeros for an index past the last row."""
    return rows.at[indices].get(mode="fill", fill_value=0)


def _sum_choices(rows_ND: Array, row_TK: Array, factors_TK: Array | None = None) -> Array:
    """Returns float32 [T, D], the sum of each token's rows, multiplied by factors if there are any."""
    total = jnp.zeros((len(row_TK), rows_ND.shape[-1]), jnp.float32)
    # One choice after another, because an array of all choices would be larger than the tiles.
    for choice in range(row_TK.shape[1]):
        addend_TD = _take(rows_ND, row_TK[:, choice]).astype(jnp.float32)
        total += addend_TD if factors_TK is None else addend_TD * factors_TK[:, choice, None]
    return total


def _joined(gate_EDF: Array, up_EDF: Array) -> Array:
    """Returns the weights of gate and up side by side, so that one product reads x, and another one its gradient."""
    return jnp.concatenate([gate_EDF, up_EDF], axis=-1)


def _hidden(both: Array) -> Array:
    """Returns SwiGLU's hidden activations from those of gate and up."""
    gate, up = jnp.split(both, 2, axis=-1)
    return jax.nn.silu(gate) * up


def _mix_backward(group: ExpertGroup, saved: tuple[Array, ...], gradients: tuple[Array, Array]) -> tuple[Any, ...]:
    """Returns the gradients of x, the shares and the weights. Tokens are gathered and hidden activations computed
    again, because all tokens of the group would take too much memory until here."""
    x_BSD, ids_BSK, shares_BSK, gate_EDF, up_EDF, down_EFD = saved
    method, choices, hidden_size = group.method, ids_BSK.shape[-1], x_BSD.shape[-1]
    x_TD, ids_TK, shares_TK = _gather_tokens(group, x_BSD, ids_BSK, shares_BSK)
    y_gradient_TD = group.gather(gradients[0].reshape(-1, hidden_size))
    assignments, both_EDH = _assignments(group, ids_TK, len(gate_EDF)), _joined(gate_EDF, up_EDF)

    def add_round(index: Array | int, sums: Any) -> Any:
        x_sum_TD, share_sum_TK, weight_sums = sums
        part = _round(group, assignments, index)
        tiles, token_NR = part.tiles, part.assignment_NR // choices
        x_NRD, y_gradient_NRD = _take(x_TD, token_NR), _take(y_gradient_TD, token_NR)
        share_NR1 = _take(shares_TK.reshape(-1), part.assignment_NR)[..., None]
        hidden_NRF, hidden_backward = jax.vjp(_hidden, multiply(method, x_NRD, both_EDH, tiles))
        # The gradient of a share is ⟨down(hidden), gradient⟩ = ⟨hidden, gradient · downᵀ⟩, which needs no output.
        unscaled_NRF = multiply(method, y_gradient_NRD, down_EFD, tiles, transposed=True).astype(jnp.float32)
        share_gradient_NR = jnp.sum(hidden_NRF.astype(jnp.float32) * unscaled_NRF, axis=-1)
        (both_gradient_NRH,) = hidden_backward((unscaled_NRF * share_NR1).astype(hidden_NRF.dtype))
        scaled_NRD = (y_gradient_NRD.astype(jnp.float32) * share_NR1).astype(x_TD.dtype)
        x_gradient_NRD = multiply(method, both_gradient_NRH, both_EDH, tiles, transposed=True)
        weight_gradients = (
            weight_gradient(method, x_NRD, both_gradient_NRH, tiles),
            weight_gradient(method, hidden_NRF, scaled_NRD, tiles),
        )
        return (
            x_sum_TD + _sum_choices(x_gradient_NRD.reshape(-1, hidden_size), part.row_TK),
            share_sum_TK + _take(share_gradient_NR.reshape(-1), part.row_TK),
            jax.tree.map(jnp.add, weight_sums, weight_gradients),
        )

    zeros = lambda array: jnp.zeros(array.shape, jnp.float32)
    start = (zeros(x_TD), zeros(shares_TK), (zeros(both_EDH), zeros(down_EFD)))
    (x_sum_TD, share_sum_TK, (both_sum_EDH, down_sum_EFD)), _ = _over_rounds(group, assignments, add_round, start)
    x_gradient = group.sum_and_scatter(x_sum_TD.astype(x_BSD.dtype)).reshape(x_BSD.shape)
    share_gradient = group.sum_and_scatter(share_sum_TK).reshape(shares_BSK.shape)
    weight_sums = (*jnp.split(both_sum_EDH, 2, axis=-1), down_sum_EFD)
    return x_gradient, None, share_gradient, *(total.astype(gate_EDF.dtype) for total in weight_sums)


@with_backward(_mix_backward, static=1)
def mix(
    group: ExpertGroup,
    x_BSD: Array,
    ids_BSK: Array,
    shares_BSK: Array,
    gate_EDF: Array,
    up_EDF: Array,
    down_EFD: Array,
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    """Returns the sum of the outputs of each token's experts, times their shares, and the number of rounds of this
    device.

    `ids_BSK` are numbers among all experts; numbers past the last stand for no expert. The weights are those of this
    device's experts, in the dtype of x. Sums over experts are float32.
    """
    method, choices, hidden_size = group.method, ids_BSK.shape[-1], x_BSD.shape[-1]
    x_TD, ids_TK, shares_TK = _gather_tokens(group, x_BSD, ids_BSK, shares_BSK)
    assignments, both_EDH = _assignments(group, ids_TK, len(gate_EDF)), _joined(gate_EDF, up_EDF)

    def add_round(index: Array | int, y_TD: Array) -> Array:
        part = _round(group, assignments, index)
        x_NRD = _take(x_TD, part.assignment_NR // choices)
        hidden_NRF = _hidden(multiply(method, x_NRD, both_EDH, part.tiles))
        y_NRD = multiply(method, hidden_NRF, down_EFD, part.tiles)
        return y_TD + _sum_choices(y_NRD.reshape(-1, hidden_size), part.row_TK, shares_TK)

    y_TD, rounds = _over_rounds(group, assignments, add_round, jnp.zeros(x_TD.shape, jnp.float32))
    y_BSD = group.sum_and_scatter(y_TD.astype(x_BSD.dtype)).reshape(x_BSD.shape)
    return (y_BSD, rounds), (x_BSD, ids_BSK, shares_BSK, gate_EDF, up_EDF, down_EFD)


def _gather_tokens(group: ExpertGroup, x_BSD: Array, ids_BSK: Array, shares_BSK: Array) -> tuple[Array, Array, Array]:
    """Returns the tokens of the group, [T, D], with their experts and shares, [T, K]."""
    choices = ids_BSK.shape[-1]
    x_TD = group.gather(x_BSD.reshape(-1, x_BSD.shape[-1]))
    # Ids and shares travel together. Float32 holds every id exactly.
    routes_TJ = jnp.concatenate([ids_BSK.astype(jnp.float32), shares_BSK], axis=-1).reshape(-1, 2 * choices)
    routes_TJ = group.gather(routes_TJ)
    return x_TD, routes_TJ[:, :choices].astype(jnp.int32), routes_TJ[:, choices:]
