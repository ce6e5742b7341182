"""What XLA is told for a step's program, where XLA_FLAGS does not say otherwise."""

import functools
import math
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmnt.parallel.sharding import named_leaves
from jaxmnt.training.spec import State, StepSpec
from jaxmnt.training.state import abstract_state, bytes_a_device, numbers_a_device


class GpuMemory(NamedTuple):
    """Of a GPU, in bytes: all, and what this process may have of it."""

    total: float
    usable: float


def compiler_options(spec: StepSpec, level: str) -> dict[str, Any]:
    """For XLA, where XLA_FLAGS does not say otherwise.

    On GPUs the weights of a layer are gathered together, since each gather takes a step from device to device for each
    device; those of the ends, which are larger, stay apart. Not so where weights are gathered once a step and layers
    work on halves of the rows: the gathers of both halves would be put together, too. With layers that communicate
    along several axes, one collective may run beside another: by default XLA has one at a time, and a gather between
    hosts would wait for those within them. All devices start collectives in the same order, and groups along two axes
    share one device.
    """
    if spec.placement.on_cpu:
        return cpu_options(spec.dtype, level)
    options: dict[str, Any] = {}
    once = spec.zero < 3
    if (spec.prefetch or (once and spec.placement.overlap != "rows")) and (whole := _whole_layer_bytes(spec)):
        options["xla_gpu_all_gather_combine_threshold_bytes"] = whole
    if spec.placement.axes_of_layers > 1 and _is_known(_AT_ONCE, 4):
        options[_AT_ONCE] = 4
    return _unless_set(options)


def cpu_options(dtype: jnp.dtype, level: str) -> dict[str, Any]:
    """LLVM's level of optimisation is 3 by default. A step compiles in four fifths of the time at 2, and initial
    values, drawn once, in a third at 1. Without the newer emitters of fused loops a step compiles in three quarters of
    the time; in bfloat16 it would be slower."""
    options: dict[str, Any] = {"xla_backend_optimization_level": level}
    if dtype == jnp.float32 and _is_known(_NEWER_EMITTERS):
        options[_NEWER_EMITTERS] = False
    return _unless_set(options)


def memory_options(state: State, memory: GpuMemory | None) -> dict[str, Any]:
    """What XLA's scheduler may fill, which it takes for 95 % of (80 % of the GPU less the step's arguments): beyond
    that it overlaps nothing and computes results a second time, although there is room. Of a state that alone takes
    80 % it cannot be told otherwise."""
    if memory is None:
        return {}
    arguments = bytes_a_device(state)
    assumed, real = 0.8 * memory.total - arguments, 0.95 * (memory.usable - arguments)
    if real <= 0 or assumed <= 0:
        return {}
    return _unless_set({"xla_gpu_memory_limit_slop_factor": round(100 * real / assumed)})


def _unless_set(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in os.environ.get("XLA_FLAGS", "")}


def _whole_layer_bytes(spec: StepSpec) -> int:
    """Of the largest layer's weights, as they are gathered."""
    params, axes, placement = abstract_state(spec)["params"], spec.definition.axes, spec.placement
    largest = 0
    for group in spec.definition.groups:
        for place in range(len(group.pattern)):
            size = 0
            for _, leaf, names in named_leaves(group.at(params[group.name], place), group.at(axes[group.name], place)):
                if (gathered := placement.gathered_axes(names)) is not None:
                    stored = numbers_a_device(leaf) // leaf.shape[0]
                    size += stored * math.prod(placement.sizes[axis] for axis in gathered[1]) * spec.dtype.itemsize
            largest = max(largest, size)
    return largest


_AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"

_NEWER_EMITTERS = "xla_cpu_use_fusion_emitters"
"""Of jaxlib 0.10; 0.12 has no others."""


@functools.cache
def _is_known(option: str, value: Any = False) -> bool:
    """Whether this jaxlib has a compile option, which nothing but trying tells."""
    try:
        jax.jit(lambda: jnp.int32(0)).lower().compile({option: value})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True
