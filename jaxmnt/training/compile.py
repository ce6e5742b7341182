"""The training and evaluation steps, compiled ahead of step 0; the state they work on, and the memory they need."""

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding

from jaxmnt.config.own_code import attributing_user_errors
from jaxmnt.config.schema import Config
from jaxmnt.distributed.container import host_memory_bytes
from jaxmnt.distributed.gpu_settings import JAX_MEMORY_FRACTION, MEMORY_FRACTION
from jaxmnt.errors import ConfigError
from jaxmnt.parallel.sharding import Axes, Hosts, Placement
from jaxmnt.training import engine
from jaxmnt.training.build import build_spec, is_planned
from jaxmnt.training.compiler_options import GpuMemory, compiler_options, memory_options
from jaxmnt.training.memory_suggestions import describe_suggestions, find_memory_suggestions
from jaxmnt.training.spec import CONTROL_AXES, ControlFlags, State, StepSpec
from jaxmnt.training.state import (
    AxesLeaf,
    abstract_state,
    bytes_per_device,
    canonical_abstract,
    float32_bytes,
    initial_state,
    map_state_with_axes,
    model_state,
    relayout_bytes,
)
from jaxmnt.training.step import eval_step, train_step
from jaxmnt.units import size


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    params: int
    optimizer: int
    temporary: int
    peak: int
    limit: int | None


@dataclass(frozen=True)
class Program:
    """The programs that a run executes. `step(state, batch)` is compiled and donates the state."""

    spec: StepSpec
    step: Any
    abstract_state: State
    memory: Memory
    compile_seconds: float
    _converters: dict[Any, Any] = field(default_factory=dict)

    @property
    def placement(self) -> Placement:
        return self.spec.placement

    @functools.cached_property
    def evaluate(self) -> Any:
        """The evaluation step, `evaluate(model, batch)`, compiled on first access."""
        spec = self.spec
        step = lambda model, batch: eval_step(spec, model["params"], model.get("buffers", {}), batch)
        evaluate = jax.jit(step, out_shardings=spec.placement.sharding(()))
        return _compile(spec, evaluate, {}, model_state(self.abstract_state), _abstract_batch(spec))

    def init(self) -> State:
        """Returns the state before the first step, created in place on its shards."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        create = jax.jit(lambda: initial_state(self.spec), out_shardings=shardings)
        return create.lower().compile(compiler_options(self.spec, "1"))()

    @property
    def canonical_abstract_state(self) -> State:
        """Shapes, dtypes and shardings of the state in the checkpoint layout. Only the shardings depend on the mesh."""
        return canonical_abstract(self.spec, self.abstract_state)

    def to_canonical(self, state: State) -> State:
        """Converts the state to the checkpoint layout. Arrays whose layout does not change are returned as they are."""
        return self._convert_layout(
            state, self.spec.layout.to_checkpoint_layout, self.canonical_abstract_state, keep=True
        )

    def from_canonical(self, state: State) -> State:
        """Converts the state, or some parts of it, to the device layout. Deletes the input arrays that it converts."""
        return self._convert_layout(state, self.spec.layout.to_device_layout, self.abstract_state, keep=False)

    def _convert_layout(self, state: State, convert: Callable[[Any, Axes], Any], target: State, *, keep: bool) -> State:
        """Converts the layout array by array, so that at most one array is in memory in both layouts at a time."""
        layout = self.spec.layout

        def convert_array(array: Array, named: AxesLeaf, goal: Any) -> Array:
            axes = named.axes
            if not layout.changes(axes):
                return array
            key = (convert.__name__, axes, array.shape, array.dtype, goal.sharding)
            if key not in self._converters:
                on_device = array.sharding.with_memory_kind("device")
                function = lambda x: convert(jax.device_put(x, on_device), axes)
                self._converters[key] = jax.jit(function, out_shardings=goal.sharding)
            converted = self._converters[key](array)
            # One array at a time: to save memory, and because CPU devices cannot run several collectives at once.
            jax.block_until_ready(converted)
            if not keep:
                array.delete()
            return converted

        named = map_state_with_axes(self.spec, target, lambda _, axes: AxesLeaf(axes))
        return {part: jax.tree.map(convert_array, tree, named[part], target[part]) for part, tree in state.items()}

    @property
    def batch_sharding(self) -> NamedSharding:
        return self.placement.sharding(("batch", "length"))

    @property
    def control_sharding(self) -> NamedSharding:
        return self.placement.sharding(CONTROL_AXES)

    @property
    def eval_rows(self) -> int:
        """The rows of a global evaluation batch: as many as of a training batch, in as many microbatches."""
        return self.spec.config.data.global_batch_size


def compile_program(
    config: Config,
    data_vocab_size: int,
    devices: Sequence[jax.Device] | None = None,
    hosts: Hosts | None = None,
    resolve: Callable[[StepSpec], Config] | None = None,
) -> Program:
    """Plans the placement, checks every size against it, and compiles the step. Reads no data. `resolve` returns the
    config with its open settings decided, such as `mesh.zero: auto`; the program's spec has that config.

    Raises `ConfigError` for sizes that do not fit the mesh, the data or the device's memory.
    """
    with attributing_user_errors(config):
        spec = build_spec(config, data_vocab_size, devices, hosts)
        if resolve is not None:
            spec = replace(spec, config=resolve(spec))
        state = abstract_state(spec)
        started = time.perf_counter()
        step = compile_step(spec, state, _gpu_memory(spec.placement))
    seconds = time.perf_counter() - started
    memory = measure_memory(spec, state, step, _device_limit(spec.placement))
    if memory.limit is not None and memory.peak > memory.limit:
        memory_suggestions = find_memory_suggestions(
            spec, lambda changed: build_spec(changed, data_vocab_size, devices, hosts)
        )
        raise ConfigError(
            f"memory: a step needs {size(memory.peak)} on a device that has {size(memory.limit)}; "
            f"{describe_suggestions(memory_suggestions, memory.peak, memory.limit)}"
        )
    return Program(spec, step, state, memory, seconds)


def _abstract_batch(spec: StepSpec) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes, dtypes and shardings of a training or evaluation batch. Both carry the control flags."""
    sharding = spec.placement.sharding(CONTROL_AXES)
    shape = (spec.placement.mesh.size, ControlFlags.COUNT)
    return spec.abstract_rows() | {"control": jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)}


def compile_step(spec: StepSpec, state: State, memory: GpuMemory | None = None) -> Any:
    """Compiles the step, also for devices that do not exist on this machine. `memory`, if given, is the memory that XLA
    may fill.

    Raises `ConfigError` for float8 if no product would be in float8.
    """
    if spec.float8 is not None:
        _check_float8(spec, spec.float8.min_size)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    placed_optimizer = state["optimizer"]

    def on_devices(state: State, batch: Any) -> Any:
        """Fetches offloaded state for the update; the output shardings send it back."""
        if spec.config.optimizer.offload:
            fetched = jax.tree.map(
                lambda leaf, placed: jax.device_put(leaf, placed.sharding.with_memory_kind("device")),
                state["optimizer"],
                placed_optimizer,
            )
            state = state | {"optimizer": fetched}
        return train_step(spec, state, batch)

    step = jax.jit(on_devices, donate_argnums=0, out_shardings=(shardings, spec.placement.sharding(())))
    return _compile(spec, step, memory_options(state, memory), state, _abstract_batch(spec))


def _check_float8(spec: StepSpec, least: int) -> None:
    """Raises `ConfigError` if float8 is set and no product would use it: the results would be those of another
    precision."""
    in_float8, products = engine.trace_step(spec).products
    if in_float8 == 0:
        raise ConfigError(
            f"train.precision: none of the {products} products of the layers' projections would be in float8: on a "
            f"device each has fewer than {least} inputs or outputs (train.float8_least), or a dimension that is not a "
            f"multiple of 16; lower train.float8_least, or set train.precision={spec.dtype.name}, which computes the "
            "same"
        )


def _compile(spec: StepSpec, function: Any, options: dict[str, Any], *arguments: Any) -> Any:
    """Compiles a jitted function with the spec's matmul precision and compiler options."""
    with jax.default_matmul_precision(spec.matmul_precision):
        return function.lower(*arguments).compile({**compiler_options(spec, "2"), **options})


def measure_memory(spec: StepSpec, state: State, step: Any, limit: int | None) -> Memory:
    """Returns the memory that the compiled step takes on a device with `limit` bytes, or that a save takes if it is
    more."""
    analysis = step.memory_analysis()
    arguments, temporary = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    params, optimizer = bytes_per_device(state["params"]), bytes_per_device(state["optimizer"])
    peak = arguments + temporary + outputs
    during_save = bytes_per_device(state) + relayout_bytes(spec, state)
    if spec.config.optimizer.offload and is_planned(spec.placement):
        # Devices that are only planned have no host memory, so the program was compiled with the optimizer state on
        # the device. A real one needs it there only for the update, beside parameters and gradients: this is a bound.
        peak = max(peak - optimizer, params + optimizer + float32_bytes(state["params"]))
        during_save -= optimizer
    return Memory(
        params=params,
        optimizer=optimizer,
        temporary=temporary,
        peak=max(peak, during_save),
        limit=limit,
    )


def _gpu_memory(placement: Placement) -> GpuMemory | None:
    """Returns the memory of a GPU; None on CPUs."""
    usable = _device_limit(placement)
    if usable is None or placement.on_cpu:
        return None
    fraction = float(os.environ.get(MEMORY_FRACTION, JAX_MEMORY_FRACTION))
    return GpuMemory(usable / fraction, usable)


def _device_limit(placement: Placement) -> int | None:
    """Returns the bytes that a device may use: the GPU allocator's limit, or on CPUs this host's memory divided by its
    devices."""
    local = [device for device in placement.mesh.devices.flat if device.process_index == jax.process_index()]
    device = local[0]
    if device.platform == "cpu":
        return host_memory_bytes() // len(local)
    statistics = device.memory_stats() or {}
    return statistics.get("bytes_limit")
