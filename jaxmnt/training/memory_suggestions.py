"""Which setting would save how much memory of a device, counted without compiling: from shapes.

What forward keeps for backward, and what the state takes, is counted. Other temporary memory, such as logits, is not,
nor are the masks of dropout: so a microbatch of half the rows saves more than it is said to here.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jaxmnt.config.mesh import GATHERING_AXES, REPLICA_AXES
from jaxmnt.config.schema import Config
from jaxmnt.errors import ConfigError
from jaxmnt.parallel.sharding import Axes, named_leaves
from jaxmnt.training import engine
from jaxmnt.training.spec import StepSpec
from jaxmnt.training.state import abstract_state, bytes_a_device, float32_bytes, numbers_a_device
from jaxmnt.units import size


class MemorySuggestion(NamedTuple):
    """A setting that would save memory."""

    setting: str
    """As on the command line."""
    saves: int
    """Bytes of each device."""


def find_memory_suggestions(spec: StepSpec, rebuild: Callable[[Config], StepSpec]) -> list[MemorySuggestion]:
    """Settings that differ from the config's, those that would save most first. `rebuild` gives the spec of another
    config on the same devices."""
    measures: tuple[Callable[[StepSpec], int], ...] = (kept_bytes, _state_bytes)
    before = {measure: measure(spec) for measure in measures}
    found = [*_of_the_state(spec, before[kept_bytes]), *_of_zero(spec)]
    for setting, changes, measure in _of_other_configs(spec):
        with contextlib.suppress(ConfigError):  # another size does not divide: no lever
            found.append(MemorySuggestion(setting, before[measure] - measure(rebuild(spec.config.changed(changes)))))
    return sorted((one for one in found if one.saves > 0), key=lambda one: (-one.saves, one.setting))


def summary(memory_suggestions: Sequence[MemorySuggestion], peak: int, limit: int) -> str:
    """The first three in words, of a step that needs `peak` bytes of a device that has `limit`."""
    parts = [f"{suggestion.setting} saves {size(suggestion.saves)}" for suggestion in memory_suggestions[:3]]
    if any(suggestion.saves >= peak - limit for suggestion in memory_suggestions):
        return "; ".join(parts)
    more = f"{GATHERING_AXES[0]} over at least {math.ceil(peak / limit)} times as many devices"
    return "; ".join([f"no single setting makes it fit: raise mesh.{more}", *parts])


def parameters_of(spec: StepSpec) -> list[tuple[str, jax.ShapeDtypeStruct, Axes]]:
    """Returns the name, the shape as it is placed, and the logical axes of each parameter."""
    return named_leaves(abstract_state(spec)["params"], spec.definition.axes)


def kept_bytes(spec: StepSpec) -> int:
    """What forwards leave on a device for their backwards, at most at a time; not what is in host memory."""
    kept = jax.tree.leaves(engine.trace_step(spec).residuals)
    on_device = (one for one in kept if jax.typeof(one).memory_space != jax.memory.Space.Host)
    return sum(one.dtype.itemsize * math.prod(one.shape) for one in on_device)


def _of_the_state(spec: StepSpec, kept: int) -> Iterator[MemorySuggestion]:
    config, state = spec.config, abstract_state(spec)
    optimizer = bytes_a_device([leaf for leaf in jax.tree.leaves(state["optimizer"]) if leaf.ndim])
    if not config.optimizer.offload:
        yield MemorySuggestion(
            "optimizer.offload=true", min(optimizer, kept)
        )  # for the update, when nothing is kept, all is back
        if config.optimizer.state_dtype == "float32":
            yield MemorySuggestion("optimizer.state_dtype=bfloat16", optimizer // 2)


def _of_zero(spec: StepSpec) -> Iterator[MemorySuggestion]:
    """With ZeRO 2 and 1 gathered weights are whole for a step, with 1 their gradients as well."""
    if spec.zero == 3:
        return
    stored = whole = 0
    for _, leaf, names in parameters_of(spec):
        if (gathered := spec.placement.gathered_axes(names)) is not None:
            piece = numbers_a_device(leaf)
            stored += piece
            whole += piece * math.prod(spec.placement.sizes[axis] for axis in gathered[1])
    weights = whole * spec.dtype.itemsize
    gradients = 4 * (whole - stored) if spec.zero == 1 else 0
    yield MemorySuggestion("mesh.zero=3", weights + gradients)
    if spec.zero == 1:
        yield MemorySuggestion("mesh.zero=2", gradients)


def _state_bytes(spec: StepSpec) -> int:
    """Parameters, their gradients, and the optimizer where it is on the device."""
    state = abstract_state(spec)
    optimizer = 0 if spec.config.optimizer.offload else bytes_a_device(state["optimizer"])
    return bytes_a_device(state["params"]) + float32_bytes(state["params"]) + optimizer


def _of_other_configs(spec: StepSpec) -> Iterator[tuple[str, dict[str, Any], Callable[[StepSpec], int]]]:
    """(setting, changes of the config, what they make smaller)."""
    config, offloaded, rows = spec.config, spec.config.train.remat_offload, spec.microbatch_rows
    if config.train.remat != "full":
        yield "train.remat=full", {"train.remat": "full"}, kept_bytes
    elif spec.placement.stages == 1 and "layer_input" not in offloaded:
        yield "train.remat_offload=[layer_input]", {"train.remat_offload": [*offloaded, "layer_input"]}, kept_bytes
    if rows > 1 and rows % 2 == 0 and config.model.overlap != "rows":
        yield f"train.microbatch_size={rows // 2}", {"train.microbatch_size": rows // 2}, kept_bytes
    sizes, replicas, gathering = spec.placement.sizes, REPLICA_AXES[0], GATHERING_AXES[0]
    if sizes[replicas] % 2 == 0 and spec.zero == 3:
        changes = {f"mesh.{replicas}": sizes[replicas] // 2, f"mesh.{gathering}": sizes[gathering] * 2}
        yield " ".join(f"{key}={size}" for key, size in changes.items()), changes, _state_bytes
