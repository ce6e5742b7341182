"""Builds the spec of a step: everything about the step that is decided before anything is compiled."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxmnt.config.mesh import BATCH_AXES, STAGE_AXIS, Mesh, Pipeline, check_pipeline
from jaxmnt.config.schema import Config
from jaxmnt.data.fields import batch_fields
from jaxmnt.errors import ConfigError, suggest
from jaxmnt.models.adapters import is_adapter
from jaxmnt.models.contract import Definition
from jaxmnt.models.experts import choose_method
from jaxmnt.models.registry import define_model
from jaxmnt.parallel.axes import length_divisor, num_microbatches, resolve_sizes
from jaxmnt.parallel.choices import build_placement
from jaxmnt.parallel.layout import EMPTY_SLOT, Dimension, Layout, pad_dimension
from jaxmnt.parallel.sharding import (
    RULES,
    HostOf,
    Placement,
    build_mesh,
    check_replicated_share,
    named_leaves,
    with_whole_rows,
)
from jaxmnt.training.loss import load_loss, reported_names
from jaxmnt.training.optimizer import build_optimizer
from jaxmnt.training.pipeline_schedule import PipelineSchedule, build_schedule, unit_slots
from jaxmnt.training.remat import NAMES, recomputes_layers
from jaxmnt.training.spec import Slots, StepSpec, resolve_precision
from jaxmnt.training.state import HOST_MEMORY, abstract_state
from jaxmnt.training.trained import select_trained, trained_axes


def inference_spec(
    config: Config, data_vocab_size: int, mesh: Mesh | None = None, devices: Sequence[jax.Device] | None = None
) -> StepSpec:
    """Returns the spec for calling a trained model, by default on one device. The mesh has no pipeline, and each device
    has all tokens of its part of a row between layers, too.

    Raises `ConfigError` for sizes that do not fit the mesh.
    """
    mesh, devices = mesh or Mesh(data=1), devices or jax.local_devices()[:1]
    if mesh.sizes()[STAGE_AXIS] != 1:
        raise ConfigError("mesh.pipeline: inference does not support a pipeline; use fsdp and model instead")
    sizes = resolve_sizes(mesh, len(devices))
    # The smallest batch size and length that the mesh can split. Callers pass arrays of other shapes.
    rows = math.prod(sizes[axis] for axis in BATCH_AXES)
    length = length_divisor(*(math.prod(sizes[axis] for axis in RULES[name]) for name in ("length", "sequence")))
    settings: dict[str, Any] = {
        "data.global_batch_size": rows,
        "data.sequence_length": max(2, length),
        "train.microbatch_size": None,
        "train.loss": None,
        "train.loss_settings": {},
        "model.attention": "xla",
        "model.experts_kernel": "xla",
        "model.overlap": "off",
        "optimizer.offload": False,
        "optimizer.rules": [],  # they may name adapters, and the optimizer is not used
        "optimizer.frozen": [],
    }
    inference_config = config.model_copy(update={"mesh": mesh, "pipeline": Pipeline()}).changed(settings)
    spec = build_spec(inference_config, data_vocab_size, devices)
    placement = with_whole_rows(spec.placement)
    return replace(spec, placement=placement, layout=replace(spec.layout, placement=placement))


def build_spec(
    config: Config, data_vocab_size: int, devices: Sequence[jax.Device] | None = None, host_of: HostOf | None = None
) -> StepSpec:
    """Resolves the config for a mesh, and returns all decisions that precede compilation.

    Raises `ConfigError` for sizes that do not fit the mesh.
    """
    model, vocab = config.model, config.model.vocab_size
    assert vocab is not None, "resolve the vocabulary first"
    if model.max_positions is not None and config.data.sequence_length > model.max_positions:
        raise ConfigError(
            f"data.sequence_length: {config.data.sequence_length} must be at most model.max_positions "
            f"({model.max_positions}), the number of positions that the model has learned; lower it"
        )
    definition = define_model(model, config.lora)
    stacks = [group.name for group in definition.groups]
    placement = build_placement(config, build_mesh(config.mesh, devices, host_of), stacks)
    schedule, slots = _plan_schedule(config, definition, placement)
    layout = _plan_layout(config, slots, placement)
    _check_sizes(definition, layout)
    trained = trained_axes(definition, config.optimizer.frozen)
    dtype, float8, kernel = resolve_precision(config, placement.mesh.devices.flat[0])
    shapes = select_trained(definition.abstract, trained)
    optimizer, learning_rate = build_optimizer(config, trained, shapes, stacks, placement, dtype)
    complete_model = definition.family.config
    expert_method = choose_method(complete_model, placement, dtype) if complete_model.num_experts else None
    loss, fields = load_loss(config.train), batch_fields(config.data)
    names = [field.name for field in fields]
    spec = StepSpec(
        config=config, definition=definition, placement=placement, layout=layout, schedule=schedule, slots=slots,
        trained_axes=trained, optimizer=optimizer, learning_rate=learning_rate, dtype=dtype, float8=float8,
        kernel=kernel, expert_method=expert_method, loss=loss,
        data_vocab_size=min(data_vocab_size, vocab), fields=fields,
        reported=reported_names(loss, config.train, names, placement.mesh.devices.flat[0]),
    )  # fmt: skip
    check_replicated_share(abstract_state(spec)["params"], definition.axes, placement, is_exempt=is_adapter)
    _check_memory_options(config, placement)
    if kernel == "cudnn" and (model.head_dim or 0) > 128 and is_planned(placement):
        raise ConfigError(
            f"model.attention: JAX can compile cuDNN's attention with a head dimension of {model.head_dim} only on a "
            "machine with a GPU; set model.attention=xla to plan without one"
        )
    return spec


def _plan_schedule(config: Config, definition: Definition, placement: Placement) -> tuple[PipelineSchedule, Slots]:
    """Returns the schedule, and the unit of each group of layers in each slot of each stage."""
    stages, pipeline = placement.stages, config.pipeline
    # With one stage there is nothing to schedule, because each microbatch's backward follows its forward.
    name, chunks = (pipeline.schedule, pipeline.chunks) if stages > 1 else ("1f1b", 1)
    try:
        check_pipeline(pipeline, stages, config.model.num_layers)
        slots = unit_slots(definition.groups, stages, chunks, pipeline.layers if stages > 1 else None)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    has_one_group = len(slots) == 1
    schedule = build_schedule(
        name, stages, num_microbatches(config, placement.sizes), chunks,
        side_by_side=placement.overlaps_microbatches, reuses_slots=has_one_group,
    )  # fmt: skip
    return schedule, slots


def _plan_layout(config: Config, slots: Slots, placement: Placement) -> Layout:
    """Returns the dimensions of parameters whose device layout differs from the checkpoint layout."""
    model = config.model
    sizes = {"vocab": model.vocab_size, "mlp": model.intermediate_size, "positions": model.max_positions}
    dimensions = {axis: pad_dimension(size or 0, placement.num_shards(axis)) for axis, size in sizes.items()}
    for stack, stages in slots.items():
        units = tuple(EMPTY_SLOT if unit is None else unit for stage in stages for unit in stage)
        dimensions[stack] = Dimension(units) if units != tuple(range(len(units))) else None
    return Layout(placement, {axis: dimension for axis, dimension in dimensions.items() if dimension is not None})


def _check_sizes(definition: Definition, layout: Layout) -> None:
    """Raises `ConfigError` for the first parameter or buffer that the mesh cannot split along its logical axes."""
    placement = layout.placement
    params = named_leaves(definition.abstract, definition.axes)
    buffers = named_leaves(definition.abstract_buffers, definition.buffer_axes)
    for name, leaf, names in params + buffers:
        for size, axis in zip(leaf.shape, names, strict=True):
            if axis in layout.dimensions:
                expected_size = len(layout.dimensions[axis].canonical_slots)
                if size != expected_size:
                    raise ConfigError(
                        f"model.family: {name} has {size} along {axis}, which is padded for this mesh and therefore "
                        f"must be {expected_size}; choose a size that needs no padding, or another mesh"
                    )
            elif size % placement.num_shards(axis):
                axis_sizes = " × ".join(
                    f"mesh.{mesh_axis} {placement.sizes[mesh_axis]}" for mesh_axis in placement.mesh_axes(axis)
                )
                raise ConfigError(
                    f"model.family: {name} has {size} along {axis}, which is not divisible by {axis_sizes}"
                )


def _check_memory_options(config: Config, placement: Placement) -> None:
    """Raises `ConfigError` for memory settings that these devices or this version do not support."""
    train = config.train
    for key, names in (("remat_save", train.remat_save), ("remat_offload", train.remat_offload)):
        unknown_names = sorted(set(names) - set(NAMES))
        if unknown_names:
            raise ConfigError(
                f"train.{key}: unknown activation {unknown_names[0]}; {suggest(unknown_names[0], list(NAMES))}"
            )
    if train.remat == "names" and not (train.remat_save or train.remat_offload):
        raise ConfigError(f"train.remat_save: train.remat=names requires names to save; set some of {', '.join(NAMES)}")
    if train.remat_offload and not recomputes_layers(train.remat):
        raise ConfigError("train.remat_offload: requires train.remat=dots, names or full; set one of them")
    if train.remat_offload and placement.stages > 1:
        raise ConfigError("train.remat_offload: not supported with a pipeline; remove it")
    if config.optimizer.offload and not (has_host_memory(placement) or is_planned(placement)):
        raise ConfigError("optimizer.offload: these devices do not support host memory; set it to false")


def has_host_memory(placement: Placement) -> bool:
    """Returns True if arrays can be kept in the memory of the devices' hosts."""
    return placement.sharding(()).with_memory_kind(HOST_MEMORY).memory_kind == HOST_MEMORY


def is_planned(placement: Placement) -> bool:
    """Returns True if the devices of the mesh exist only for compilation, not on this machine. Such devices have no
    memory."""
    return not any(device.addressable_memories() for device in placement.mesh.devices.flat)
