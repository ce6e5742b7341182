"""The least that a step has to send, by the scheme: what the compiled program is held to.

Bytes that one device sends, with the algorithms that send least: (n - 1) / n of the whole to gather or to scatter it
among n devices, twice that to reduce it everywhere. Written out in docs/parallelism.md.
"""

import math
from collections import defaultdict

import jax

from jaxmnt.placement.rules import is_axes
from jaxmnt.program.setting import Setting
from jaxmnt.program.state import abstract_state

Least = dict[tuple[str, str], float]
"""(kind, axis) → bytes."""

SEQUENCE_COLLECTIVES = {"none": (4, 4), "attention": (4, 4), "dots": (6, 4), "full": (6, 5)}
"""Gathers and scatters of the activations over `model`, for a layer, by remat policy: two of each forward, the other of
each backward; with dots the two gathers again; with full also the scatter between attention and MLP, and with names
at most as much."""


def least(setting: Setting) -> Least:
    """What the scheme needs, by kind of collective and mesh axis. Left out is what is small: single numbers, norm
    scales and the loss's sums over the vocabulary, which `small` bounds."""
    config, placement = setting.config, setting.placement
    passes, stages, shares = setting.passes, placement.stages, placement.sizes
    work = passes * setting.schedule.chunks
    found: Least = defaultdict(float)

    compute, reduce, zero = setting.dtype.itemsize, setting.reduce_dtype.itemsize, config.mesh.zero
    for leaf, names in _weights(setting):
        stored = math.prod(leaf.sharding.shard_shape(leaf.shape))
        gathered = placement.gathered_over(names)
        if gathered is not None:
            over, ways = "×".join(gathered[1]), math.prod(shares[axis] for axis in gathered[1])
            uses = 2 if names[0] == "layers" else 1
            gathers, scatters = passes * uses if zero == 3 else 1, 1 if zero == 1 else passes
            found["all-gather", over] += gathers * stored * (ways - 1) * compute
            found["reduce-scatter", over] += scatters * stored * (ways - 1) * reduce
        if "data" in placement.whole_over(names):
            found["all-reduce", "data"] += 2 * stored * reduce * (1 - 1 / shares["data"])

    rows, length, width = setting.rows_a_pass, config.data.sequence_length, config.model.hidden_size
    whole = rows * length * width * compute
    if shares["model"] > 1:
        part = 1 - 1 / shares["model"]
        gathers, scatters = SEQUENCE_COLLECTIVES.get(config.train.remat, SEQUENCE_COLLECTIVES["full"])
        depth = len(setting.layer_slots[0]) // setting.schedule.chunks
        # Of the ends: the embedding's sum and its gradient, the head's input and its gradient.
        found["all-gather", "model"] += (work * depth * gathers + 2 * passes) * whole * part
        found["reduce-scatter", "model"] += (work * depth * scatters + 2 * passes) * whole * part
    if stages > 1:
        boundary = whole / shares["model"]
        found["collective-permute", "pipeline"] += 2 * setting.schedule.ticks * boundary
        # The ends are split over all stages: embedding, its gradient, the head's input, its gradient.
        found["all-reduce", "pipeline"] += 4 * passes * 2 * boundary * (1 - 1 / stages)
    return dict(found)


def small(setting: Setting) -> float:
    """A bound of what `least` leaves out, in bytes a step: norm scales, and three numbers a token of the loss."""
    norms = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf, names in _leaves(setting) if "norm" in names)
    tokens = setting.passes * setting.rows_a_pass * setting.config.data.sequence_length
    return 2 * 4 * norms + 2 * 3 * 4 * tokens + 4096


def ideal_state_bytes(setting: Setting) -> float:
    """Bytes of parameters and optimizer state on a device if all were split over every axis; over `data` if the rules
    say so."""
    state, placement = abstract_state(setting), setting.placement
    replicas = 1 if "data" in placement.mesh_axes("embed") else placement.sizes["data"]
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state["params"], state["optimizer"])))
    return total / (placement.mesh.size / replicas)


def _weights(setting: Setting) -> list[tuple[jax.ShapeDtypeStruct, tuple[str, ...]]]:
    """All parameters but norm scales, with their logical axes."""
    return [(leaf, names) for leaf, names in _leaves(setting) if "norm" not in names]


def _leaves(setting: Setting) -> list[tuple[jax.ShapeDtypeStruct, tuple[str, ...]]]:
    leaves = jax.tree.leaves(abstract_state(setting)["params"])
    return list(zip(leaves, jax.tree.leaves(setting.definition.axes, is_leaf=is_axes), strict=True))
