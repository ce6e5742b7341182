"""Estimates from shapes, without compiling, how much device memory each setting would save.

The estimates count residuals and the train state. They do not count other temporary memory, such as logits and dropout
masks, so halving the rows of a microbatch saves more than the estimate.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jaxmnt.config.mesh import GATHERING_AXES, REPLICA_AXES, axes_that_split
from jaxmnt.config.schema import Config
from jaxmnt.errors import ConfigError
from jaxmnt.parallel.sharding import Axes, named_leaves
from jaxmnt.training import engine
from jaxmnt.training.spec import StepSpec
from jaxmnt.training.state import abstract_state, bytes_per_device, elements_per_device, float32_bytes
from jaxmnt.training.trained import axes_by_name, select_trained
from jaxmnt.units import size


class MemorySuggestion(NamedTuple):
    """A setting that would save memory."""

    setting: str
    """The setting as it is written on the command line."""
    saves: int
    """The number of bytes that the setting saves on each device."""


def find_memory_suggestions(spec: StepSpec, rebuild: Callable[[Config], StepSpec]) -> list[MemorySuggestion]:
    """Returns settings that would save memory compared with those in the spec's config, sorted so that the setting that
    saves the most comes first. `rebuild` returns the spec of another config on the same devices."""
    measures: tuple[Callable[[StepSpec], int], ...] = (residual_bytes, _train_state_bytes)
    current_bytes = {measure: measure(spec) for measure in measures}
    suggestions = [*_suggest_optimizer_changes(spec, current_bytes[residual_bytes]), *_suggest_zero_stage(spec)]
    for setting, changes, measure in _candidate_changes(spec):
        # Skip a candidate that the config or the mesh does not allow.
        with contextlib.suppress(ConfigError):
            changed_bytes = measure(rebuild(spec.config.changed(changes)))
            suggestions.append(MemorySuggestion(setting, current_bytes[measure] - changed_bytes))
    helpful_suggestions = (suggestion for suggestion in suggestions if suggestion.saves > 0)
    return sorted(helpful_suggestions, key=lambda suggestion: (-suggestion.saves, suggestion.setting))


def describe_suggestions(suggestions: Sequence[MemorySuggestion], peak: int, limit: int) -> str:
    """Describes the first three suggestions in words, for a step that needs `peak` bytes on a device that has `limit`
    bytes."""
    descriptions = [f"{suggestion.setting} saves {size(suggestion.saves)}" for suggestion in suggestions[:3]]
    excess = peak - limit
    if any(suggestion.saves >= excess for suggestion in suggestions):
        return "; ".join(descriptions)
    factor = math.ceil(peak / limit)
    advice = f"no single setting makes it fit: make mesh.{GATHERING_AXES[0]} at least {factor} times as large"
    return "; ".join([advice, *descriptions])


def parameters_of(spec: StepSpec) -> list[tuple[str, jax.ShapeDtypeStruct, Axes]]:
    """Returns the name, the shape with dtype and sharding, and the logical axes of each parameter."""
    return named_leaves(abstract_state(spec)["params"], spec.definition.axes)


def residual_bytes(spec: StepSpec) -> int:
    """Returns the peak size in bytes of a device's residuals, without those that are kept in host memory."""
    residuals = jax.tree.leaves(engine.trace_step(spec).residuals)
    on_device = (leaf for leaf in residuals if jax.typeof(leaf).memory_space != jax.memory.Space.Host)
    return sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in on_device)


def _suggest_optimizer_changes(spec: StepSpec, residual_size: int) -> Iterator[MemorySuggestion]:
    """Yields optimizer settings that save memory. `residual_size` is the size in bytes of a
    device's residuals."""
    config, state = spec.config, abstract_state(spec)
    optimizer_bytes = bytes_per_device([leaf for leaf in jax.tree.leaves(state["optimizer"]) if leaf.ndim])
    if not config.optimizer.offload:
        # The update brings all optimizer state back to the device, but the residuals have been freed by then.
        yield MemorySuggestion("optimizer.offload=true", min(optimizer_bytes, residual_size))
        if config.optimizer.state_dtype == "float32":
            yield MemorySuggestion("optimizer.state_dtype=bfloat16", optimizer_bytes // 2)


def _suggest_zero_stage(spec: StepSpec) -> Iterator[MemorySuggestion]:
    """Yields ZeRO stages that need less memory. With ZeRO 1 and 2, gathered weights stay whole during a step. With ZeRO
    1, so do their gradients, and the stages of a pipeline may gather tables from each other."""
    if spec.zero == 3:
        return
    whole_elements = trained_elements = from_stages = 0
    trained_names = axes_by_name(spec.trained_axes)
    for name, leaf, names in parameters_of(spec):
        gathered = spec.placement.gathered_axes(names)
        if gathered is not None:
            piece_elements = elements_per_device(leaf)
            pieces = math.prod(spec.placement.sizes[axis] for axis in gathered[1])
            if spec.placement.dimension_over_stages(names) is not None:
                from_stages += piece_elements * pieces * (spec.placement.stages - 1)
                pieces *= spec.placement.stages
            whole_elements += piece_elements * pieces
            trained_elements += piece_elements * (pieces - 1) * (name in trained_names)
    weight_bytes = whole_elements * spec.dtype.itemsize
    gradient_bytes = 4 * trained_elements if spec.zero == 1 else 0
    yield MemorySuggestion("mesh.zero=3", weight_bytes + gradient_bytes)
    if spec.zero == 1:
        yield MemorySuggestion("mesh.zero=2", gradient_bytes + from_stages * spec.dtype.itemsize)


def _train_state_bytes(spec: StepSpec) -> int:
    """Returns the size in bytes of a device's parameters, their gradients, and the optimizer state unless it is
    offloaded."""
    state = abstract_state(spec)
    optimizer_bytes = 0 if spec.config.optimizer.offload else bytes_per_device(state["optimizer"])
    trained = select_trained(state["params"], spec.trained_axes)
    return bytes_per_device(state["params"]) + float32_bytes(trained) + optimizer_bytes


def _candidate_changes(spec: StepSpec) -> Iterator[tuple[str, dict[str, Any], Callable[[StepSpec], int]]]:
    """Yields candidates as (setting, changes to the config, the measure of memory that the changes reduce)."""
    config, offloaded, rows = spec.config, spec.config.train.remat_offload, spec.microbatch_rows
    if config.train.remat != "full":
        yield "train.remat=full", {"train.remat": "full"}, residual_bytes
    elif spec.placement.stages == 1 and "layer_input" not in offloaded:
        yield "train.remat_offload=[layer_input]", {"train.remat_offload": [*offloaded, "layer_input"]}, residual_bytes
    if rows > 1 and rows % 2 == 0 and config.model.overlap != "rows":
        yield f"train.microbatch_size={rows // 2}", {"train.microbatch_size": rows // 2}, residual_bytes
    sizes, replicas, gathering = spec.placement.sizes, REPLICA_AXES[0], GATHERING_AXES[0]
    [context] = axes_that_split("length")
    if rows == 1 and sizes[gathering] % 2 == 0:
        changes = {f"mesh.{gathering}": sizes[gathering] // 2, f"mesh.{context}": sizes[context] * 2}
        setting = " ".join(f"{key}={axis_size}" for key, axis_size in changes.items())
        yield setting, changes | {"train.microbatch_size": 1}, residual_bytes
    if sizes[replicas] % 2 == 0 and spec.zero == 3:
        changes = {f"mesh.{replicas}": sizes[replicas] // 2, f"mesh.{gathering}": sizes[gathering] * 2}
        yield " ".join(f"{key}={axis_size}" for key, axis_size in changes.items()), changes, _train_state_bytes
