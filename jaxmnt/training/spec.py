"""The static facts from which the training and evaluation steps are built."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import NamedSharding

from jaxmnt.config.mesh import REPLICA_AXES
from jaxmnt.config.schema import Config
from jaxmnt.data.fields import Field
from jaxmnt.errors import ConfigError
from jaxmnt.models.contract import Definition
from jaxmnt.models.float8 import Float8
from jaxmnt.models.grouped import ProductMethod
from jaxmnt.models.kernels import Kernel, choose_kernel, device_capability
from jaxmnt.parallel.axes import microbatch_rows, num_microbatches
from jaxmnt.parallel.choices import divides_tokens
from jaxmnt.parallel.layout import Layout
from jaxmnt.parallel.sharding import FLOAT32_AXES, Axes, Placement, is_axes
from jaxmnt.training.loss import Loss
from jaxmnt.training.pipeline_schedule import PipelineSchedule

State = dict[str, Any]
Slots = dict[str, list[list[int | None]]]
Batch = dict[str, Array]

CONTROL_AXES = ("devices", None)
"""The logical axes of a batch's control flags."""


@dataclass(frozen=True)
class StepSpec:
    """The static facts of a step: the config, resolved for a mesh."""

    config: Config
    definition: Definition
    placement: Placement
    layout: Layout
    schedule: PipelineSchedule
    slots: Slots
    """The unit in each slot of each stage, by group of layers."""
    trained_axes: Any
    """The tree of logical axes, with None for parameters that do not train."""
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule
    dtype: jnp.dtype
    """The compute dtype."""
    float8: Float8 | None
    """Settings of projections in float8, or None if they multiply in `dtype`."""
    kernel: Kernel
    expert_method: ProductMethod | None
    """The way in which a device multiplies by the weights of experts; None in a model without experts."""
    loss: Loss
    reported: tuple[str, ...]
    """The names of the loss's own metrics (`LossSums.reported`)."""
    data_vocab_size: int
    fields: tuple[Field, ...]
    """The fields of a batch."""

    @property
    def kernels(self) -> dict[str, str]:
        """The kernels of attention and, if there are any, of the experts' products."""
        return {"attention": self.kernel} | ({} if self.expert_method is None else {"experts": self.expert_method.kind})

    @property
    def params_dtype(self) -> jnp.dtype:
        """The dtype of the stored parameters, except the frozen ones of a run with adapters."""
        return jnp.dtype(self.config.train.params_dtype)

    def base_dtype(self, names: Axes) -> jnp.dtype:
        """Returns the dtype on the devices of a frozen parameter with these axes, in a run with adapters. Norm scales
        and routers are always used in float32."""
        lora = self.config.lora
        assert lora is not None
        if FLOAT32_AXES & {*names}:
            return jnp.dtype("float32")
        return self.dtype if lora.base_dtype == "auto" else jnp.dtype(lora.base_dtype)

    @property
    def reduce_dtype(self) -> jnp.dtype:
        """The dtype in which gradients are communicated."""
        return jnp.dtype(self.config.train.reduce_dtype)

    @property
    def matmul_precision(self) -> str:
        """JAX's matmul precision. It is `highest` for float32, which GPUs would otherwise multiply in TF32."""
        return "highest" if self.dtype == jnp.float32 else "default"

    @property
    def zero(self) -> int:
        """The ZeRO stage. It is 3 as long as `mesh.zero` is `auto`, which `plan/zero.py` resolves."""
        return 3 if self.config.mesh.zero == "auto" else self.config.mesh.zero

    @property
    def prefetch(self) -> bool:
        """True if a layer's weights are gathered while the previous layer computes, and its gradients are reduced while
        the layer that follows it in the backward pass computes. On CPUs it is True only if the config requests it,
        because communication blocks the device anyway."""
        mesh, placement = self.config.mesh, self.placement
        if mesh.prefetch is False or self.zero < 3 or placement.stages > 1:
            return False
        enabled = mesh.prefetch or not placement.on_cpu
        stacks = {name: self.definition.axes[name] for name in self.slots}
        layer_axes = jax.tree.leaves(stacks, is_leaf=is_axes)
        communicates = lambda names: placement.gathered_axes(names) or self._is_summed_over_replicas(names)
        return enabled and any(communicates(names) for names in layer_axes)

    def is_reduced_early(self, names: Axes) -> bool:
        """Returns True if the gradient of a parameter with these axes is summed over replicas layer by layer during the
        backward pass of the last microbatch, instead of after it. This applies to the layers' parameters if `prefetch`
        is True."""
        return self.prefetch and bool(names) and names[0] in self.slots and self._is_summed_over_replicas(names)

    def _is_summed_over_replicas(self, names: Axes) -> bool:
        """Returns True if a parameter with these axes is replicated over the replica axes alone. Norm scales, which are
        small, are replicated over more axes."""
        return self.placement.replicated_axes(names) == REPLICA_AXES

    @property
    def row_axes(self) -> dict[str, Axes]:
        """The logical axes of each field of a batch."""
        return {field.name: field.axes for field in self.fields}

    def abstract_rows(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes, dtypes and shardings of a global batch's fields."""
        shape = (self.config.data.global_batch_size, self.config.data.sequence_length)
        sharding_of = lambda field: self.placement.sharding(field.axes)
        return {
            field.name: jax.ShapeDtypeStruct(shape, jnp.dtype(field.dtype), sharding=sharding_of(field))
            for field in self.fields
        }

    def with_zero(self, zero: int) -> "StepSpec":
        """Returns the spec with this ZeRO stage. What the stages of a pipeline divide among them depends on it."""
        config = self.config.changed({"mesh.zero": zero})
        placement = replace(self.placement, divides_tokens=divides_tokens(config, self.placement))
        return replace(self, config=config, placement=placement, layout=replace(self.layout, placement=placement))

    def on_mesh(self, function: Callable[..., Any], array_axes: Sequence[Any], out_axes: Any) -> Callable[..., Any]:
        """Returns a function of global arrays that runs `function(params, buffers, *arrays)` on each device's pieces.
        Parameters and buffers are in the device layout. `array_axes` and `out_axes` are the logical axes of the other
        arguments and of the outputs."""
        partition = lambda axes: jax.tree.map(self.placement.spec, axes, is_leaf=is_axes)
        return jax.shard_map(
            function,
            mesh=self.placement.mesh,
            in_specs=partition((self.definition.axes, self.definition.buffer_axes, *array_axes)),
            out_specs=partition(out_axes),
            # JAX does not check replication, because each collective defines its own transpose.
            check_vma=False,
        )

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches in a step. Without a pipeline, their gradients are accumulated one after
        another."""
        return num_microbatches(self.config, self.placement.sizes)

    @property
    def microbatch_rows(self) -> int:
        """The number of rows in one microbatch on one batch shard."""
        return microbatch_rows(self.config, self.placement.sizes)


def resolve_precision(config: Config, device: jax.Device) -> tuple[jnp.dtype, Float8 | None, Kernel]:
    """Returns the compute dtype, the settings of products in float8 (or None), and the attention kernel for a device.

    Raises `ConfigError` for a precision or kernel that the device does not support.
    """
    precision, float8 = config.train.precision, None
    if precision == "auto":
        precision = "float32" if device.platform == "cpu" else "bfloat16"
    if precision == "float8":
        precision = "bfloat16"
        on_gpu = device.platform != "cpu"
        if on_gpu and device_capability(device) < MIN_FLOAT8_CAPABILITY:
            raise ConfigError(
                f"train.precision: {device.device_kind} does not support float8 matrix products, which need an "
                "Ada, Hopper or newer GPU; set train.precision=bfloat16"
            )
        float8 = Float8(config.train.float8_least, native=on_gpu)
    dtype = jnp.dtype(precision)
    head_dim = config.model.head_dim
    assert head_dim
    kernel = choose_kernel(
        config.model.attention, device.platform, dtype, head_dim, device_capability(device),
        packed=config.data.keeps_documents_apart, divided=config.mesh.context != 1,
        soft_cap=config.model.attention_soft_cap is not None,
    )  # fmt: skip
    return dtype, float8, kernel


MIN_FLOAT8_CAPABILITY = 8.9
"""The lowest CUDA compute capability that has float8 matrix products."""


class ControlFlags:
    """This process's requests to stop, to save and to profile, as an array that travels with a batch. The step adds up
    the flags of all devices.

    All processes see the sums in the metrics of the same step, so they act after the same step. Each device has its own
    flags, because two processes may share a batch shard.
    """

    COUNT = 3

    def __init__(self, sharding: NamedSharding):
        devices = sharding.mesh.size

        def flags(*requested: bool) -> Array:
            device_flags = np.tile(np.array(requested, np.int32), (devices, 1))
            return jax.make_array_from_callback(device_flags.shape, sharding, lambda index: device_flags[index])

        combinations = itertools.product((False, True), repeat=self.COUNT)
        self._arrays = {requested: flags(*requested) for requested in combinations}

    def array(self, *, stop: bool = False, save: bool = False, profile: bool = False) -> Array:
        """Returns the flags as a cached array, int32 [devices, 3]."""
        return self._arrays[stop, save, profile]
