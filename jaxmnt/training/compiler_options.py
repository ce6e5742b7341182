"""XLA compiler options for a step's program; XLA_FLAGS takes precedence."""

import functools
import math
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmnt.parallel.sharding import named_leaves
from jaxmnt.training.spec import State, StepSpec
from jaxmnt.training.state import abstract_state, bytes_per_device, elements_per_device


class GpuMemory(NamedTuple):
    """Bytes of a GPU's memory: the total, and the part that this process may use."""

    total: float
    usable: float


def compiler_options(spec: StepSpec, level: str) -> dict[str, Any]:
    """Returns XLA compiler options for a step, without those that XLA_FLAGS sets.

    On GPUs the weights of a layer are gathered in one all-gather, because each all-gather takes as many ring steps as
    there are devices. The ends' weights are larger and stay separate. The gathers are not combined if weights are
    gathered once per step and layers work on halves of the rows, because the gathers of both halves would be combined,
    too. With layers that communicate along several axes, up to four collectives may run at once: by default XLA runs
    one at a time, and a gather between hosts would block gathers within them. This is safe, because all devices start
    collectives in the same order and groups along two axes share only one device.
    """
    if spec.placement.on_cpu:
        return cpu_options(spec.dtype, level)
    options: dict[str, Any] = {}
    gathered_once = spec.zero < 3
    combine_gathers = spec.prefetch or (gathered_once and spec.placement.overlap != "rows")
    if combine_gathers and (whole := _whole_layer_bytes(spec)):
        options["xla_gpu_all_gather_combine_threshold_bytes"] = whole
    if spec.placement.axes_of_layers > 1 and _is_known(_COLLECTIVE_OVERLAP_LIMIT, 4):
        options[_COLLECTIVE_OVERLAP_LIMIT] = 4
    return _unless_set(options)


def cpu_options(dtype: jnp.dtype, level: str) -> dict[str, Any]:
    """Returns XLA compiler options for CPUs. LLVM's optimisation level is 3 by default. A step compiles in four fifths
    of that time at level 2, and initial values, which are drawn once, in a third of it at level 1. Without the fusion
    emitters a float32 step compiles in three quarters of the time; a bfloat16 step would run slower."""
    options: dict[str, Any] = {"xla_backend_optimization_level": level}
    if dtype == jnp.float32 and _is_known(_FUSION_EMITTERS):
        options[_FUSION_EMITTERS] = False
    return _unless_set(options)


def memory_options(state: State, memory: GpuMemory | None) -> dict[str, Any]:
    """Returns the option that makes XLA's scheduler use 95 % of the free memory. By default it limits itself to 95 % of
    (80 % of the GPU less the step's arguments); beyond that it overlaps nothing and recomputes results although memory
    is free. If the state alone exceeds 80 %, XLA's default limit is kept."""
    if memory is None:
        return {}
    arguments = bytes_per_device(state)
    assumed_free = 0.8 * memory.total - arguments
    real_free = 0.95 * (memory.usable - arguments)
    if real_free <= 0 or assumed_free <= 0:
        return {}
    return _unless_set({"xla_gpu_memory_limit_slop_factor": round(100 * real_free / assumed_free)})


def _unless_set(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that XLA_FLAGS does not set."""
    return {name: value for name, value in options.items() if name not in os.environ.get("XLA_FLAGS", "")}


def _whole_layer_bytes(spec: StepSpec) -> int:
    """Returns the bytes of the largest layer's weights, gathered in the compute dtype."""
    params, axes, placement = abstract_state(spec)["params"], spec.definition.axes, spec.placement
    largest = 0
    for group in spec.definition.groups:
        for pattern_index in range(len(group.pattern)):
            size = 0
            for _, leaf, names in named_leaves(
                group.at(params[group.name], pattern_index), group.at(axes[group.name], pattern_index)
            ):
                if (gathered := placement.gathered_axes(names)) is not None:
                    stored = elements_per_device(leaf) // leaf.shape[0]
                    size += stored * math.prod(placement.sizes[axis] for axis in gathered[1]) * spec.dtype.itemsize
            largest = max(largest, size)
    return largest


_COLLECTIVE_OVERLAP_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"

_FUSION_EMITTERS = "xla_cpu_use_fusion_emitters"
"""An option of jaxlib 0.10; 0.12 removed it, because it has only the newer emitters."""


@functools.cache
def _is_known(option: str, value: Any = False) -> bool:
    """Returns True if this jaxlib has a compile option. The only way to know is to compile with it."""
    try:
        jax.jit(lambda: jnp.int32(0)).lower().compile({option: value})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True
