"""Estimates how much device memory each setting would save, from shapes and without compiling.

Residuals and the train state are counted. Other temporary memory, such as logits and dropout masks, is not, so halving
the rows of a microbatch saves more than the estimate.
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
from jaxmnt.training.state import abstract_state, bytes_per_device, elements_per_device, float32_bytes
from jaxmnt.units import size


class MemorySuggestion(NamedTuple):
    """A setting that would save memory."""

    setting: str
    """The setting as on the command line."""
    saves: int
    """The bytes saved on each device."""


def find_memory_suggestions(spec: StepSpec, rebuild: Callable[[Config], StepSpec]) -> list[MemorySuggestion]:
    """Returns settings that differ from the config's, those that save most first. `rebuild` returns the spec of another
    config on the same devices."""
    measures: tuple[Callable[[StepSpec], int], ...] = (residual_bytes, _train_state_bytes)
    before = {measure: measure(spec) for measure in measures}
    suggestions = [*_suggest_optimizer_changes(spec, before[residual_bytes]), *_suggest_zero_stage(spec)]
    for setting, changes, measure in _candidate_changes(spec):
        # A candidate whose sizes do not divide is no suggestion.
        with contextlib.suppress(ConfigError):
            after = measure(rebuild(spec.config.changed(changes)))
            suggestions.append(MemorySuggestion(setting, before[measure] - after))
    helpful = (suggestion for suggestion in suggestions if suggestion.saves > 0)
    return sorted(helpful, key=lambda suggestion: (-suggestion.saves, suggestion.setting))


def describe_suggestions(memory_suggestions: Sequence[MemorySuggestion], peak: int, limit: int) -> str:
    """Describes the first three suggestions in words, for a step that needs `peak` bytes on a device with `limit`
    bytes."""
    parts = [f"{suggestion.setting} saves {size(suggestion.saves)}" for suggestion in memory_suggestions[:3]]
    if any(suggestion.saves >= peak - limit for suggestion in memory_suggestions):
        return "; ".join(parts)
    factor = math.ceil(peak / limit)
    advice = f"no single setting makes it fit: make mesh.{GATHERING_AXES[0]} at least {factor} times as large"
    return "; ".join([advice, *parts])


def parameters_of(spec: StepSpec) -> list[tuple[str, jax.ShapeDtypeStruct, Axes]]:
    """Returns each parameter's name, its shape as it is placed, and its logical axes."""
    return named_leaves(abstract_state(spec)["params"], spec.definition.axes)


def residual_bytes(spec: StepSpec) -> int:
    """Returns the peak bytes of residuals on a device, without those in host memory."""
    residuals = jax.tree.leaves(engine.trace_step(spec).residuals)
    on_device = (leaf for leaf in residuals if jax.typeof(leaf).memory_space != jax.memory.Space.Host)
    return sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in on_device)


def _suggest_optimizer_changes(spec: StepSpec, residuals: int) -> Iterator[MemorySuggestion]:
    """Yields settings of the optimizer that save memory. `residuals` are the bytes of residuals on a device."""
    config, state = spec.config, abstract_state(spec)
    optimizer = bytes_per_device([leaf for leaf in jax.tree.leaves(state["optimizer"]) if leaf.ndim])
    if not config.optimizer.offload:
        # The update brings all optimizer state back to the device, when the residuals are already freed.
        yield MemorySuggestion("optimizer.offload=true", min(optimizer, residuals))
        if config.optimizer.state_dtype == "float32":
            yield MemorySuggestion("optimizer.state_dtype=bfloat16", optimizer // 2)


def _suggest_zero_stage(spec: StepSpec) -> Iterator[MemorySuggestion]:
    """Yields lower-memory ZeRO stages. Gathered weights are whole for a step with ZeRO 1 and 2, and their gradients as
    well with ZeRO 1."""
    if spec.zero == 3:
        return
    stored = whole = 0
    for _, leaf, names in parameters_of(spec):
        if (gathered := spec.placement.gathered_axes(names)) is not None:
            piece = elements_per_device(leaf)
            stored += piece
            whole += piece * math.prod(spec.placement.sizes[axis] for axis in gathered[1])
    weights = whole * spec.dtype.itemsize
    gradients = 4 * (whole - stored) if spec.zero == 1 else 0
    yield MemorySuggestion("mesh.zero=3", weights + gradients)
    if spec.zero == 1:
        yield MemorySuggestion("mesh.zero=2", gradients)


def _train_state_bytes(spec: StepSpec) -> int:
    """Returns the bytes of parameters, their gradients, and the optimizer state if it is on the device."""
    state = abstract_state(spec)
    optimizer = 0 if spec.config.optimizer.offload else bytes_per_device(state["optimizer"])
    return bytes_per_device(state["params"]) + float32_bytes(state["params"]) + optimizer


def _candidate_changes(spec: StepSpec) -> Iterator[tuple[str, dict[str, Any], Callable[[StepSpec], int]]]:
    """Yields (setting, changes of the config, the measure of memory that they reduce)."""
    config, offloaded, rows = spec.config, spec.config.train.remat_offload, spec.microbatch_rows
    if config.train.remat != "full":
        yield "train.remat=full", {"train.remat": "full"}, residual_bytes
    elif spec.placement.stages == 1 and "layer_input" not in offloaded:
        yield "train.remat_offload=[layer_input]", {"train.remat_offload": [*offloaded, "layer_input"]}, residual_bytes
    if rows > 1 and rows % 2 == 0 and config.model.overlap != "rows":
        yield f"train.microbatch_size={rows // 2}", {"train.microbatch_size": rows // 2}, residual_bytes
    sizes, replicas, gathering = spec.placement.sizes, REPLICA_AXES[0], GATHERING_AXES[0]
    if sizes[replicas] % 2 == 0 and spec.zero == 3:
        changes = {f"mesh.{replicas}": sizes[replicas] // 2, f"mesh.{gathering}": sizes[gathering] * 2}
        yield " ".join(f"{key}={size}" for key, size in changes.items()), changes, _train_state_bytes
