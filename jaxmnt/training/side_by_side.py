"""Runs the forward pass of one microbatch beside the backward pass of another.

An iteration runs one unit forward and one unit backward. Neither needs the other, so the compiler can let one of them
communicate while the other computes.

Shapes: B rows of a microbatch, S a device's piece of the length, D model.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxmnt.models.contract import Params
from jaxmnt.training.remat import Residuals
from jaxmnt.training.stage import BackwardCarry, ForwardCarry, Layers, Pass


class BothPasses(NamedTuple):
    """The results of two passes through a chunk so far. The dicts are by group of layers."""

    x_BSD: Array
    """The activations of the forward pass."""
    x_gradient_BSD: Array
    """The gradient of the backward pass."""
    residuals: dict[str, Residuals]
    sums: dict[str, Any]
    gradients: Params


class Stretch(NamedTuple):
    """Iterations in which the forward pass is in one group of layers, and the backward pass in one group."""

    forward_group: str
    forward_start: int
    """Offset of the first unit in its chunk."""
    backward_group: str
    backward_start: int
    """Offset of the first unit in its chunk. The next units come before it."""
    length: int


def stretches(depths: Mapping[str, int]) -> Iterator[Stretch]:
    """Yields the stretches of two passes through a chunk with this number of units of each group."""
    units = [(name, offset) for name, depth in depths.items() for offset in range(depth)]
    pairs = zip(units, reversed(units), strict=True)
    for (forward_group, backward_group), run in itertools.groupby(pairs, key=lambda pair: (pair[0][0], pair[1][0])):
        offsets = [(forward_offset, backward_offset) for (_, forward_offset), (_, backward_offset) in run]
        forward_start, backward_start = offsets[0]
        yield Stretch(forward_group, forward_start, backward_group, backward_start, len(offsets))


def forward_beside_backward(
    layers: Mapping[str, Layers], forward: Pass, backward: Pass, both: BothPasses
) -> BothPasses:
    """Returns the result of a forward pass and a backward pass through a chunk, of two microbatches. They may have the
    same slot if the forward reverses it: then it writes each unit's residuals where backward has read some already."""
    x_BSD, x_gradient_BSD, residuals, sums, gradients = both
    for stretch in stretches({name: group.depth for name, group in layers.items()}):
        name, other_name = stretch.forward_group, stretch.backward_group
        group, other_group = layers[name], layers[other_name]
        if stretch.forward_start == 0:
            forward_carry = group.start_forward(forward, x_BSD, sums[name])
        if stretch.backward_start == other_group.depth - 1:
            backward_carry = other_group.start_backward(backward, x_gradient_BSD, gradients[other_name])
        forward_carry, backward_carry, residuals = _run_stretch(
            stretch, layers, forward, backward, (forward_carry, backward_carry, residuals)
        )
        if stretch.forward_start + stretch.length == group.depth:
            x_BSD, sums = forward_carry.x_BSD, sums | {name: forward_carry.sums}
        if stretch.backward_start + 1 == stretch.length:
            x_gradient_BSD = backward_carry.x_gradient_BSD
            gradients = gradients | {other_name: other_group.finish_backward(backward, backward_carry)}
    return BothPasses(x_BSD, x_gradient_BSD, residuals, sums, gradients)


State = tuple[ForwardCarry, BackwardCarry, dict[str, Residuals]]
"""The carries of both passes, and the residuals by group."""


def _run_stretch(stretch: Stretch, layers: Mapping[str, Layers], forward: Pass, backward: Pass, state: State) -> State:
    """Returns the state after one stretch."""
    name, other_name = stretch.forward_group, stretch.backward_group
    group, other_group = layers[name], layers[other_name]

    def write(residuals: dict[str, Residuals], unit_residuals: Residuals, offset: Array) -> dict[str, Residuals]:
        return residuals | {name: group.write(residuals[name], unit_residuals, offset, forward)}

    def body(carry: tuple[State, Residuals], index: Array) -> tuple[tuple[State, Residuals], None]:
        (forward_carry, backward_carry, residuals), unwritten = carry
        offset, other_offset = stretch.forward_start + index, stretch.backward_start - index
        # The residuals of the previous unit are written before backward reads any. If an iteration wrote its own beside
        # these reads, XLA would copy the whole buffer first.
        residuals = write(residuals, unwritten, jnp.maximum(offset - 1, 0))
        forward_carry, unit_residuals = group.forward_at(offset, forward, forward_carry, residuals[name])
        read = lambda: other_group.read(residuals[other_name], other_offset, backward)
        backward_carry = other_group.backward_at(other_offset, backward, read, backward_carry)
        return ((forward_carry, backward_carry, residuals), unit_residuals), None

    # The first iteration writes what is there already.
    unwritten = group.read(state[2][name], jnp.int32(max(stretch.forward_start - 1, 0)), forward)
    # `train.layer_unroll` does not apply: with two units of each pass in an iteration, XLA would copy all residuals.
    (state, unwritten), _ = jax.lax.scan(body, (state, unwritten), jnp.arange(stretch.length))
    forward_carry, backward_carry, residuals = state
    last_offset = jnp.int32(stretch.forward_start + stretch.length - 1)
    return forward_carry, backward_carry, write(residuals, unwritten, last_offset)
