"""XLA compiler options for a step's program. Options in XLA_FLAGS take precedence."""

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
    """The size of a GPU's memory, in bytes."""

    total: float
    usable: float
    """The part that this process may use."""


def compiler_options(spec: StepSpec, level: str) -> dict[str, Any]:
    """Returns XLA compiler options for a step, without those that XLA_FLAGS sets.

    On GPUs the weights of a layer are gathered in one all-gather, because each all-gather takes as many ring steps as
    there are devices. The weights of the embedding and the head are larger and are gathered separately. The gathers are
    not combined if weights are gathered once per step and layers run side by side, on halves of the rows or on two
    microbatches, because XLA would also combine the gathers of the two layers, which would then wait for each other.
    For the same reason reduce-scatters of activations are not combined for two microbatches. If layers communicate
    along several axes, up to four collectives may run at once, or eight for two microbatches. By default XLA runs one
    at a time, so that a gather between hosts would block gathers within hosts. Running several is safe, because all
    devices start collectives in the same order and groups along two axes share only one device.

    Matrix products are calls of cuBLAS. XLA's scheduler knows that these take long, and fills the time of collectives
    with them. It takes a product in Triton for a short operation. Models with routed experts keep Triton: with cuBLAS
    their step takes 5 % longer.
    """
    if spec.placement.on_cpu:
        return cpu_options(spec.dtype, level)
    options: dict[str, Any] = {}
    if spec.config.model.num_experts is None and _is_supported(_TRITON_PRODUCTS):
        options[_TRITON_PRODUCTS] = False
    gathered_once, overlaps_microbatches = spec.zero < 3, bool(spec.schedule.steady_ticks)
    runs_side_by_side = spec.placement.overlap == "rows" or overlaps_microbatches
    combine_gathers = spec.prefetch or (gathered_once and not runs_side_by_side)
    layer_bytes = _largest_layer_bytes(spec) if combine_gathers else 0
    if layer_bytes:
        options["xla_gpu_all_gather_combine_threshold_bytes"] = layer_bytes
    if overlaps_microbatches:
        options["xla_gpu_reduce_scatter_combine_threshold_bytes"] = _scattered_bytes(spec)
    if spec.placement.num_layer_axes > 1 and _is_supported(_COLLECTIVE_OVERLAP_LIMIT, 4):
        options[_COLLECTIVE_OVERLAP_LIMIT] = 8 if overlaps_microbatches else 4
    return _without_user_flags(options)


def cpu_options(dtype: jnp.dtype, level: str) -> dict[str, Any]:
    """Returns XLA compiler options for CPUs, with LLVM's optimisation `level`, which is 3 by default. Compared with
    level 3, level 2 compiles a step in four fifths of the time, and level 1 compiles the creation of initial values,
    which runs once, in a third of the time. Without the fusion emitters a float32 step compiles in three quarters of
    the time, but a bfloat16 step would run slower."""
    options: dict[str, Any] = {"xla_backend_optimization_level": level}
    if dtype == jnp.float32 and _is_supported(_FUSION_EMITTERS):
        options[_FUSION_EMITTERS] = False
    return _without_user_flags(options)


def memory_options(state: State, memory: GpuMemory | None) -> dict[str, Any]:
    """Returns the option that makes XLA's scheduler use 95 % of the free memory. By default it limits itself to 95 % of
    (80 % of the GPU's memory minus the step's arguments). Beyond that limit it overlaps nothing and recomputes results,
    although memory is free. If the state alone exceeds 80 % of the memory, XLA's default limit is kept."""
    if memory is None or not (usable_free := scheduled_bytes(state, memory)):
        return {}
    assumed_free = _assumed_bytes(state, memory)
    return _without_user_flags({"xla_gpu_memory_limit_slop_factor": round(100 * usable_free / assumed_free)})


def scheduled_bytes(state: State, memory: GpuMemory) -> float:
    """Returns the number of bytes, beside a step's arguments, that XLA's scheduler may use. If a step needs more, XLA
    overlaps no communication and recomputes results."""
    usable_free = 0.95 * (memory.usable - bytes_per_device(state))
    return max(0.0, usable_free) if _assumed_bytes(state, memory) > 0 else 0.0


def _assumed_bytes(state: State, memory: GpuMemory) -> float:
    """Returns the number of free bytes that XLA assumes beside a step's arguments."""
    return 0.8 * memory.total - bytes_per_device(state)


def _without_user_flags(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that XLA_FLAGS does not set."""
    return {name: value for name, value in options.items() if name not in os.environ.get("XLA_FLAGS", "")}


def _scattered_bytes(spec: StepSpec) -> int:
    """Returns the size in bytes of the smallest piece of activations that a layer scatters: a device's piece of the
    length, of all or half of the rows of a microbatch."""
    config, placement = spec.config, spec.placement
    rows = spec.microbatch_rows // (2 if placement.overlap == "rows" else 1)
    length = placement.local_length(config.data.sequence_length)
    assert config.model.hidden_size is not None
    return rows * length * config.model.hidden_size * spec.dtype.itemsize


def _largest_layer_bytes(spec: StepSpec) -> int:
    """Returns the size in bytes of the largest layer's gathered weights, in the compute dtype."""
    params, axes, placement = abstract_state(spec)["params"], spec.definition.axes, spec.placement
    largest = 0
    for group in spec.definition.groups:
        for pattern_index in range(len(group.pattern)):
            layer_params = group.at(params[group.name], pattern_index)
            layer_axes = group.at(axes[group.name], pattern_index)
            layer_bytes = 0
            for _, leaf, names in named_leaves(layer_params, layer_axes):
                gathered = placement.gathered_axes(names)
                if gathered is not None:
                    pieces = math.prod(placement.sizes[axis] for axis in gathered[1])
                    piece_elements = elements_per_device(leaf) // leaf.shape[0]
                    layer_bytes += piece_elements * pieces * spec.dtype.itemsize
            largest = max(largest, layer_bytes)
    return largest


_COLLECTIVE_OVERLAP_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
"""The option that sets how many collectives may run at once."""

_TRITON_PRODUCTS = "xla_gpu_enable_triton_gemm"
"""The option that lets XLA compile matrix products with Triton."""

_FUSION_EMITTERS = "xla_cpu_use_fusion_emitters"
"""An option of jaxlib 0.10. Version 0.12 removed it, because that version has only the newer emitters."""


@functools.cache
def _is_supported(option: str, value: Any = False) -> bool:
    """Returns True if this jaxlib has a compiler option. The only way to find out is to compile with the option."""
    try:
        jax.jit(lambda: jnp.int32(0)).lower().compile({option: value})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True
