"""Everything static that the steps are built from."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from jaxmnt.models.kernels import Kernel, choose_kernel, device_capability
from jaxmnt.parallel.axes import num_microbatches
from jaxmnt.parallel.layout import Layout
from jaxmnt.parallel.sharding import Axes, Placement, is_axes
from jaxmnt.training.loss import Loss
from jaxmnt.training.pipeline_schedule import PipelineSchedule

State = dict[str, Any]
Slots = dict[str, list[list[int | None]]]
Batch = dict[str, Array]

CONTROL_AXES = ("devices", None)


@dataclass(frozen=True)
class StepSpec:
    """The config, resolved for a mesh."""

    config: Config
    definition: Definition
    placement: Placement
    layout: Layout
    schedule: PipelineSchedule
    slots: Slots
    """For each group of layers, which of its units lies in each slot of each stage."""
    trained_axes: Any
    """The tree of logical axes without the parameters that do not train."""
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule
    dtype: jnp.dtype
    """Of computation."""
    float8: Float8 | None
    """How the products of projections are made in float8; None: they are in `dtype`."""
    kernel: Kernel
    loss: Loss
    data_vocab_size: int
    fields: tuple[Field, ...]
    """Of a batch."""

    @property
    def params_dtype(self) -> jnp.dtype:
        """Of the stored parameters."""
        return jnp.dtype(self.config.train.params_dtype)

    @property
    def reduce_dtype(self) -> jnp.dtype:
        """In which gradients cross devices."""
        return jnp.dtype(self.config.train.reduce_dtype)

    @property
    def matmul_precision(self) -> str:
        """float32 means float32: by JAX's default, GPUs would multiply in TF32."""
        return "highest" if self.dtype == jnp.float32 else "default"

    @property
    def zero(self) -> int:
        """The ZeRO stage. Where nobody has resolved `mesh.zero: auto` (`plan/zero.py` does), it is 3."""
        return 3 if self.config.mesh.zero == "auto" else self.config.mesh.zero

    @property
    def prefetch(self) -> bool:
        """Whether a layer's weights are gathered while the one before it computes, and its gradients reduced while the
        next one does. On CPUs, where communication holds the device up all the same, only if that is asked for."""
        mesh, placement = self.config.mesh, self.placement
        if mesh.prefetch is False or self.zero < 3 or placement.stages > 1:
            return False
        wanted = mesh.prefetch or not placement.on_cpu
        stacks = {name: self.definition.axes[name] for name in self.slots}
        each = jax.tree.leaves(stacks, is_leaf=is_axes)
        return wanted and any(placement.gathered_axes(names) or self._is_copied(names) for names in each)

    def is_reduced_early(self, names: Axes) -> bool:
        """Whether the gradient of a parameter with these axes is summed over replicas in the backward of the last
        microbatch, layer by layer, and not after it: with `prefetch` those of layers."""
        return self.prefetch and bool(names) and names[0] in self.slots and self._is_copied(names)

    def _is_copied(self, names: Axes) -> bool:
        """Over replicas alone: scales are over more axes, and small."""
        return self.placement.replicated_axes(names) == REPLICA_AXES

    @property
    def row_axes(self) -> dict[str, Axes]:
        """The logical axes of each field of a batch."""
        return {field.name: field.axes for field in self.fields}

    def abstract_rows(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of the fields of a global batch."""
        shape = (self.config.data.global_batch_size, self.config.data.sequence_length)
        place = lambda field: self.placement.sharding(field.axes)
        return {
            field.name: jax.ShapeDtypeStruct(shape, jnp.dtype(field.dtype), sharding=place(field))
            for field in self.fields
        }

    def on_mesh(self, function: Callable[..., Any], arrays: Sequence[Any], out: Any) -> Callable[..., Any]:
        """Returns `function(params, buffers, *arrays)` on each device's pieces: of parameters and buffers as they are
        placed, and of arrays with these logical axes. `out` has the logical axes of what the function returns."""
        split = lambda axes: jax.tree.map(self.placement.spec, axes, is_leaf=is_axes)
        return jax.shard_map(
            function,
            mesh=self.placement.mesh,
            in_specs=split((self.definition.axes, self.definition.buffer_axes, *arrays)),
            out_specs=split(out),
            # JAX does not check what is replicated: each collective has its own transpose.
            check_vma=False,
        )

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step, which without a pipeline are accumulated one after another."""
        return num_microbatches(self.config, self.placement.sizes)

    @property
    def microbatch_rows(self) -> int:
        """Rows of one microbatch on one batch shard."""
        return self.config.data.global_batch_size // self.placement.batch_shards // self.num_microbatches


def resolve_precision(config: Config, device: jax.Device) -> tuple[jnp.dtype, Float8 | None, Kernel]:
    """The compute dtype, the products in float8, and the attention kernel for a device.

    Raises `ConfigError` for what the device does not have.
    """
    precision, float8 = config.train.precision, None
    if precision == "auto":
        precision = "float32" if device.platform == "cpu" else "bfloat16"
    if precision == "float8":
        precision, on_gpu = "bfloat16", device.platform != "cpu"
        if on_gpu and device_capability(device) < LEAST_FLOAT8:
            raise ConfigError(
                f"train.precision: {device.device_kind} has no products in float8, which came with Ada and Hopper; set "
                "bfloat16"
            )
        float8 = Float8(config.train.float8_least, native=on_gpu)
    dtype = jnp.dtype(precision)
    head_dim = config.model.head_dim
    assert head_dim
    kernel = choose_kernel(
        config.model.attention, device.platform, dtype, head_dim, device_capability(device),
        packed=config.data.keeps_documents_apart, soft_cap=config.model.attention_soft_cap is not None,
    )  # fmt: skip
    return dtype, float8, kernel


LEAST_FLOAT8 = 8.9
"""The CUDA capability from which on GPUs multiply float8."""


class ControlFlags:
    """Whether this process asks to stop, to save, and for a profile, as an array that travels with a batch: the step
    adds up all flags.

    So all processes learn of them in the metrics of the same step, and act after the same step. There are flags for
    each device, because two processes may share a batch shard.
    """

    COUNT = 3

    def __init__(self, sharding: NamedSharding):
        devices = sharding.mesh.size

        def flags(*asked: bool) -> Array:
            whole = np.tile(np.array(asked, np.int32), (devices, 1))
            return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

        self._arrays = {asked: flags(*asked) for asked in itertools.product((False, True), repeat=self.COUNT)}

    def array(self, *, stop: bool = False, save: bool = False, profile: bool = False) -> Array:
        """int32 [devices, 3], made once."""
        return self._arrays[stop, save, profile]
