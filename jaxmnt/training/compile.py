"""The training and evaluation steps, compiled before step 0, with their state and the memory that they need."""

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from jaxmnt.models import grouped
from jaxmnt.models.adapters import is_adapter
from jaxmnt.models.contract import Params
from jaxmnt.parallel.sharding import Axes, HostOf, Placement, parameter_name
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
    first_average,
    float32_bytes,
    initial_state,
    map_state_with_axes,
    model_state,
    relayout_bytes,
    saved_state,
)
from jaxmnt.training.step import eval_step, train_step
from jaxmnt.training.trained import select_trained
from jaxmnt.units import size


@dataclass(frozen=True)
class Memory:
    """The memory that a program needs on one device, and the device's limit, in bytes."""

    params: int
    optimizer: int
    temporary: int
    peak: int
    limit: int | None
    base: int = 0
    """The part of `params` that is frozen in a run with adapters."""


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
        """The evaluation step, `evaluate(model, batch)`. It is compiled on first access."""
        spec = self.spec
        step = lambda model, batch: eval_step(spec, model["params"], model.get("buffers", {}), batch)
        evaluate = jax.jit(step, out_shardings=spec.placement.sharding(()))
        return _compile(spec, evaluate, {}, model_state(self.abstract_state), _abstract_batch(spec))

    def init(self, parts: Sequence[str] | None = None) -> State:
        """Returns the state before the first step, or some parts of it. Each device creates its own shards."""
        parts = list(self.abstract_state) if parts is None else parts
        select_parts = lambda state: {part: state[part] for part in parts}
        shardings = jax.tree.map(lambda leaf: leaf.sharding, select_parts(self.abstract_state))
        create = jax.jit(lambda: select_parts(initial_state(self.spec)), out_shardings=shardings)
        return create.lower().compile(compiler_options(self.spec, "1"))()

    def initial_adapters(self) -> Params:
        """Returns the initial values of the adapters, in the checkpoint layout, with None in place of all other
        parameters."""
        spec, abstract = self.spec, self.canonical_abstract_state["params"]
        select = lambda tree: jax.tree.map_with_path(
            lambda path, leaf: leaf if is_adapter(parameter_name(path)) else None, tree
        )
        to_dtype = lambda tree: jax.tree.map(lambda leaf: leaf.astype(spec.params_dtype), select(tree))
        create = lambda: to_dtype(spec.definition.init(jax.random.key(spec.config.seed))[0])
        return jax.jit(create, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, select(abstract)))()

    def first_average(self, params: Params) -> Params:
        """Returns the average that begins with these parameters, which are in the device layout."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state["average"])
        return jax.jit(functools.partial(first_average, self.spec), out_shardings=shardings)(params)

    @property
    def canonical_abstract_state(self) -> State:
        """The shapes, dtypes and shardings of the state in the checkpoint layout. Only the shardings depend on the
        mesh."""
        return canonical_abstract(self.spec, self.abstract_state)

    @property
    def saved_abstract_state(self) -> State:
        """The part of `canonical_abstract_state` that checkpoints contain (`saved_state`)."""
        return saved_state(self.spec, self.canonical_abstract_state)

    def to_canonical(self, state: State) -> State:
        """Converts the state, or some parts of it, to the checkpoint layout. Arrays whose layout does not change are
        returned as they are. In place of an array there may be None."""
        return self._convert_layout(
            state, self.spec.layout.to_checkpoint_layout, self.canonical_abstract_state, keep_input=True
        )

    def from_canonical(self, state: State) -> State:
        """Converts the state, or some parts of it, to the device layout. Deletes the input arrays that it converts."""
        return self._convert_layout(state, self.spec.layout.to_device_layout, self.abstract_state, keep_input=False)

    def _convert_layout(
        self, state: State, convert: Callable[[Any, Axes], Any], target: State, *, keep_input: bool
    ) -> State:
        """Converts the layout array by array, so that at most one array is in memory in both layouts at a time."""
        layout = self.spec.layout

        def convert_array(array: Array | None, axes_leaf: AxesLeaf, target_leaf: Any) -> Array | None:
            if array is None or not layout.changes(axes_leaf.axes):
                return array
            axes = axes_leaf.axes
            key = (convert.__name__, axes, array.shape, array.dtype, target_leaf.sharding)
            if key not in self._converters:
                on_device = array.sharding.with_memory_kind("device")
                function = lambda x: convert(jax.device_put(x, on_device), axes)
                self._converters[key] = jax.jit(function, out_shardings=target_leaf.sharding)
            converted_array = self._converters[key](array)
            # Wait for each array, to save memory, and because CPU devices cannot run several collectives at once.
            jax.block_until_ready(converted_array)
            if not keep_input:
                array.delete()
            return converted_array

        state_axes = map_state_with_axes(self.spec, target, lambda _, axes: AxesLeaf(axes))
        is_none = lambda node: node is None
        return {
            part: jax.tree.map(convert_array, tree, state_axes[part], target[part], is_leaf=is_none)
            for part, tree in state.items()
        }

    @property
    def batch_sharding(self) -> NamedSharding:
        return self.placement.sharding(("batch", "length"))

    @property
    def control_sharding(self) -> NamedSharding:
        return self.placement.sharding(CONTROL_AXES)

    @property
    def eval_rows(self) -> int:
        """The number of rows in a global evaluation batch. It equals that in a training batch, and the rows are split
        into as many microbatches."""
        return self.spec.config.data.global_batch_size


def compile_program(
    config: Config,
    data_vocab_size: int,
    devices: Sequence[jax.Device] | None = None,
    host_of: HostOf | None = None,
    resolve: Callable[[StepSpec], StepSpec] | None = None,
) -> Program:
    """Plans the placement, checks every size against it, and compiles the step. Reads no data. `resolve` decides open
    settings, such as `mesh.zero: auto`, and returns the spec with these decisions.

    Raises `ConfigError` for sizes that do not fit the mesh, the data or the device's memory.
    """
    with attributing_user_errors(config):
        spec = build_spec(config, data_vocab_size, devices, host_of)
        if resolve is not None:
            spec = resolve(spec)
        if spec.expert_method is not None and spec.expert_method.kind == "mosaic" and not is_planned(spec.placement):
            grouped.check(spec.expert_method)
        state = abstract_state(spec)
        started = time.perf_counter()
        step = compile_step(spec, state, _gpu_memory(spec.placement))
    compile_seconds = time.perf_counter() - started
    memory = measure_memory(spec, state, step, _device_limit(spec.placement))
    if memory.limit is not None and memory.peak > memory.limit:
        suggestions = find_memory_suggestions(
            spec, lambda new_config: build_spec(new_config, data_vocab_size, devices, host_of)
        )
        raise ConfigError(
            f"memory: a step needs {size(memory.peak)} on a device that has {size(memory.limit)}; "
            f"{describe_suggestions(suggestions, memory.peak, memory.limit)}"
        )
    return Program(spec, step, state, memory, compile_seconds)


def _abstract_batch(spec: StepSpec) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes, dtypes and shardings of a training or evaluation batch, including its control flags."""
    sharding = spec.placement.sharding(CONTROL_AXES)
    shape = (spec.placement.mesh.size, ControlFlags.COUNT)
    return spec.abstract_rows() | {"control": jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)}


def compile_step(spec: StepSpec, state: State, memory: GpuMemory | None = None) -> Any:
    """Compiles the step. The devices need not exist on this machine. `memory`, if given, is the GPU memory that XLA may
    use.

    Raises `ConfigError` if `train.precision` is float8 and no matrix product would be in float8.
    """
    if spec.float8 is not None:
        _check_float8(spec, spec.float8.min_size)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    offloaded_optimizer = state["optimizer"]

    def on_devices(state: State, batch: Any) -> Any:
        """Fetches offloaded optimizer state for the update. The output shardings send the new state back."""
        if spec.config.optimizer.offload:
            optimizer_on_device = jax.tree.map(
                lambda leaf, offloaded: jax.device_put(leaf, offloaded.sharding.with_memory_kind("device")),
                state["optimizer"],
                offloaded_optimizer,
            )
            state = state | {"optimizer": optimizer_on_device}
        return train_step(spec, state, batch)

    step = jax.jit(on_devices, donate_argnums=0, out_shardings=(shardings, spec.placement.sharding(())))
    return _compile(spec, step, memory_options(state, memory), state, _abstract_batch(spec))


def _check_float8(spec: StepSpec, min_size: int) -> None:
    """Raises `ConfigError` if no matrix product would be in float8, because the results would then be those of another
    precision. Products with fewer than `min_size` inputs or outputs are not in float8."""
    in_float8, products = engine.trace_step(spec).products
    if in_float8 == 0:
        raise ConfigError(
            f"train.precision: none of the {products} matrix products in the layers' projections would be in float8, "
            f"because on a device each has fewer than {min_size} inputs or outputs (train.float8_least) or a dimension "
            f"that is not a multiple of 16; lower train.float8_least, or set train.precision={spec.dtype.name}, which "
            "gives the same results"
        )


def _compile(spec: StepSpec, function: Any, options: dict[str, Any], *arguments: Any) -> Any:
    """Compiles a jitted function with the spec's matmul precision and compiler options."""
    with jax.default_matmul_precision(spec.matmul_precision):
        return function.lower(*arguments).compile({**compiler_options(spec, "2"), **options})


def measure_memory(spec: StepSpec, state: State, step: Any, limit: int | None) -> Memory:
    """Returns the memory that the compiled step needs on a device with `limit` bytes. If a save needs more than the
    step, the peak is that of the save."""
    analysis = step.memory_analysis()
    arguments, temporary = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    params, optimizer = bytes_per_device(state["params"]), bytes_per_device(state["optimizer"])
    peak = arguments + temporary + outputs
    during_save = bytes_per_device(state) + relayout_bytes(spec, state)
    if spec.config.optimizer.offload and is_planned(spec.placement):
        # Planned devices have no host memory, so the program was compiled with the optimizer state on the device. Real
        # devices need that state only for the update, together with parameters and gradients, so this is a bound.
        trained = select_trained(state["params"], spec.trained_axes)
        peak = max(peak - optimizer, params + optimizer + float32_bytes(trained))
        during_save -= optimizer
    return Memory(
        params=params,
        optimizer=optimizer,
        temporary=temporary,
        peak=max(peak, during_save),
        limit=limit,
        base=params - bytes_per_device(saved_state(spec, state)["params"]),
    )


def _gpu_memory(placement: Placement) -> GpuMemory | None:
    """Returns the memory of a GPU, or None on CPUs."""
    usable = _device_limit(placement)
    if usable is None or placement.on_cpu:
        return None
    fraction = float(os.environ.get(MEMORY_FRACTION, JAX_MEMORY_FRACTION))
    return GpuMemory(usable / fraction, usable)


def _device_limit(placement: Placement) -> int | None:
    """Returns the number of bytes that a device may use. This is the GPU allocator's limit, or on CPUs this host's
    memory divided by the number of devices of this process."""
    local_devices = [device for device in placement.mesh.devices.flat if device.process_index == jax.process_index()]
    device = local_devices[0]
    if device.platform == "cpu":
        return host_memory_bytes() // len(local_devices)
    statistics = device.memory_stats() or {}
    return statistics.get("bytes_limit")
