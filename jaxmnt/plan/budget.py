"""The bytes that a step has to send, which are the budget of a compiled program.

All bytes are per device, for bandwidth-optimal algorithms. To gather or scatter an array among n devices, each sends
(n - 1) / n of the whole array, and twice that to all-reduce it. docs/parallelism.md derives the formulas.
"""

import math
from collections import defaultdict

import jax

from jaxmnt.config.mesh import REPLICA_AXES, STAGE_AXIS
from jaxmnt.models.adapters import is_adapter
from jaxmnt.models.attention import KVHeads
from jaxmnt.models.experts import expert_group
from jaxmnt.parallel.chunks import halo_length
from jaxmnt.parallel.sharding import FLOAT32_AXES, SCALES_AND_BIASES, Axes, Placement
from jaxmnt.training import engine
from jaxmnt.training.memory_suggestions import parameters_of
from jaxmnt.training.muon import Group, group_of
from jaxmnt.training.optimizer import muon_forms
from jaxmnt.training.remat import EXPERT_EXCHANGES, layer_collectives, recomputes_layers
from jaxmnt.training.spec import StepSpec
from jaxmnt.training.state import elements_per_device
from jaxmnt.training.trained import axes_by_name

Traffic = dict[tuple[str, str], float]
"""Bytes sent per device and step, by (kind of collective, mesh axes)."""


def minimum_traffic(spec: StepSpec) -> Traffic:
    """Returns the bytes that a step has to send. It leaves out small arrays, which are scalars, scales, biases, and the
    loss's sums over the vocabulary. `small_traffic_bound` bounds these."""
    config, placement = spec.config, spec.placement
    microbatches = spec.num_microbatches
    stages = placement.stages
    passes = microbatches * spec.schedule.chunks
    traffic: Traffic = defaultdict(float, weight_traffic(spec))

    # Tensor parallelism gathers and scatters activations over the sequence length.
    device_length = placement.local_length(config.data.sequence_length) * placement.num_shards("sequence")
    activation_bytes = spec.microbatch_rows * device_length * config.model.hidden_size * spec.dtype.itemsize
    axes_name = "×".join(placement.mesh_axes("sequence"))
    pieces = placement.num_shards("sequence")
    if pieces > 1:
        sent_share = 1 - 1 / pieces
        gathers = scatters = 0
        for has_experts, depth in _depths(spec).items():
            layer_gathers, layer_scatters = layer_collectives(config.train.remat, has_mlp=not has_experts)
            gathers += depth * layer_gathers
            scatters += depth * layer_scatters
        if placement.overlap == "ring":  # the same bytes, from device to device
            traffic["collective-permute", axes_name] += passes * (gathers + scatters) * activation_bytes * sent_share
            gathers = scatters = 0
        # The 2 stand for the embedding and the head. The embedding's sum is scattered and its gradient gathered, and
        # the head's input is gathered and its gradient scattered. If stages divide tokens, each has a share.
        ends = 2 * microbatches / (stages if placement.divides_tokens else 1)
        traffic["all-gather", axes_name] += (passes * gathers + ends) * activation_bytes * sent_share
        traffic["reduce-scatter", axes_name] += (passes * scatters + ends) * activation_bytes * sent_share

    _add_muon_traffic(spec, traffic)
    _add_expert_traffic(spec, traffic, activation_bytes, passes)
    _add_key_traffic(spec, traffic, passes)

    # Pipeline stages pass activations on, and share the embedding and the head.
    if stages > 1:
        boundary = activation_bytes / pieces
        traffic["collective-permute", STAGE_AXIS] += 2 * spec.schedule.ticks * boundary
        # The 4 stand for the embedding, its gradient, the head's input, and its gradient. If stages divide tokens, two
        # of them are gathered and two are scattered.
        shared = 4 * microbatches * boundary * (1 - 1 / stages)
        if placement.divides_tokens:
            traffic["all-gather", STAGE_AXIS] += shared / 2
            traffic["reduce-scatter", STAGE_AXIS] += shared / 2
        else:
            traffic["all-reduce", STAGE_AXIS] += 2 * shared
    return dict(traffic)


def _add_muon_traffic(spec: StepSpec, traffic: Traffic) -> None:
    """Adds the bytes that devices exchange for Muon, once per step, to `traffic` (`training.muon`)."""
    forms = muon_forms(spec.config, spec.trained_axes, list(spec.slots))
    counts: dict[Group, int] = defaultdict(int)
    for name, leaf, names in parameters_of(spec):
        if name in forms:
            group, count = group_of(forms[name], names, leaf.sharding.shard_shape(leaf.shape), spec.placement)
            counts[group] += count
    for group, count in counts.items():
        if group.axes:
            sent_bytes = group.sent_elements(count, spec.placement) * spec.dtype.itemsize
            traffic["all-to-all", "×".join(group.axes)] += sent_bytes


def _depths(spec: StepSpec) -> dict[bool, int]:
    """Returns the number of layers in a chunk of a stage, without experts (False) and with experts (True)."""
    depths = {False: 0, True: 0}
    for group in spec.definition.groups:
        for kind in group.pattern:
            has_experts = spec.definition.family.costs(kind).expert_parameters > 0
            depths[has_experts] += len(spec.slots[group.name][0]) // spec.schedule.chunks
    return depths


def _add_expert_traffic(spec: StepSpec, traffic: Traffic, activation_bytes: float, passes: int) -> None:
    """Adds the bytes that layers of experts exchange to `traffic`: activations, experts' ids and shares, and the
    gradients of the shares. `activation_bytes` is the size of a microbatch's activations on a batch shard."""
    model, placement = spec.definition.family.config, spec.placement
    depth = _depths(spec)[True]
    if not depth:
        return
    assert model.experts_per_token
    group = expert_group(model, placement, 1, spec.dtype)
    if not group.token_axes:
        return
    devices = math.prod(placement.sizes[axis] for axis in group.token_axes)
    axes_name = "×".join(group.token_axes)
    device_bytes = activation_bytes / placement.num_shards("sequence")
    device_tokens = device_bytes / (model.hidden_size * spec.dtype.itemsize)
    route_bytes = 4 * model.experts_per_token * device_tokens
    gathers, scatters = EXPERT_EXCHANGES
    # Forward and backward gather ids and shares, and backward scatters the gradients of shares.
    gathered_bytes, scattered_bytes = gathers * device_bytes + 4 * route_bytes, scatters * device_bytes + route_bytes
    traffic["all-gather", axes_name] += passes * depth * (devices - 1) * gathered_bytes
    traffic["reduce-scatter", axes_name] += passes * depth * (devices - 1) * scattered_bytes


def _add_key_traffic(spec: StepSpec, traffic: Traffic, passes: int) -> None:
    """Adds the bytes that are sent for keys and values of divided rows, and their gradients, to `traffic`. Forward and
    backward gather keys and values. In a layer with a window of at most a chunk, only a window of each chunk is sent,
    and its gradients are not summed in `train.reduce_dtype`, because only one device has any. Backward does not gather
    for a window if forward keeps what it gathered."""
    placement, length = spec.placement, spec.config.data.sequence_length
    devices = placement.num_shards("length")
    if devices == 1:
        return
    axes_name = "×".join(placement.mesh_axes("length"))
    family, chunk = spec.definition.family, length // placement.row_divisor
    for group in spec.definition.groups:
        units = len(spec.slots[group.name][0]) // spec.schedule.chunks
        for kind in group.pattern:
            shape = family.attention_shape(kind)
            heads = KVHeads(shape.heads, shape.kv_heads or shape.heads, placement).attended_heads
            halo = halo_length(shape.window, chunk, length)
            gathers = 2 if halo is None or recomputes_layers(spec.config.train.remat) else 1
            sends_tails = halo is not None and halo <= chunk
            tokens = halo if halo is not None and halo <= chunk else chunk
            sent_numbers = (devices - 1) * 2 * tokens * spec.microbatch_rows * 2 * heads * shape.head_dim
            gradient_bytes = spec.dtype.itemsize if sends_tails else spec.reduce_dtype.itemsize
            traffic["all-gather", axes_name] += passes * units * gathers * sent_numbers * spec.dtype.itemsize
            traffic["reduce-scatter", axes_name] += passes * units * sent_numbers * gradient_bytes


def weight_traffic(spec: StepSpec) -> Traffic:
    """Returns the bytes that are sent for weights and their gradients. Weights are gathered, and their gradients are
    scattered, or summed over replicas (docs/parallelism.md)."""
    traffic: Traffic = defaultdict(float)
    placement, microbatches = spec.placement, spec.num_microbatches
    compute_bytes, reduce_bytes = spec.dtype.itemsize, spec.reduce_dtype.itemsize
    zero = spec.zero
    trained = set(axes_by_name(spec.trained_axes))
    in_float8 = gathered_in_float8(spec)
    for name, leaf, names in _weights(spec):
        stored_elements = elements_per_device(leaf)
        used_elements = stored_elements
        if placement.dimension_over_stages(names) is not None:
            # Tables at the ends of the model are gathered from the stages once, and their gradients are scattered once.
            from_others = stored_elements * (placement.stages - 1)
            used_elements += from_others
            traffic["all-gather", STAGE_AXIS] += from_others * compute_bytes
            traffic["reduce-scatter", STAGE_AXIS] += (name in trained) * from_others * reduce_bytes
        gathered_dimension = placement.gathered_axes(names)
        if gathered_dimension is not None:
            _, gathering_axes = gathered_dimension
            axes_name = "×".join(gathering_axes)
            num_shards = math.prod(placement.sizes[axis] for axis in gathering_axes)
            uses = 2 if names[0] in spec.slots else 1
            gathers = microbatches * uses if zero == 3 else 1
            scatters = 1 if zero == 1 else microbatches
            gathered_bytes = 1 if name in in_float8 else 4 if FLOAT32_AXES & {*names} else compute_bytes
            traffic["all-gather", axes_name] += gathers * used_elements * (num_shards - 1) * gathered_bytes
            traffic["reduce-scatter", axes_name] += (
                (name in trained) * scatters * used_elements * (num_shards - 1) * reduce_bytes
            )
        for axes in _summed_axes(placement, name, names) if name in trained else ():
            devices = math.prod(placement.sizes[axis] for axis in axes)
            traffic["all-reduce", "×".join(axes)] += 2 * stored_elements * reduce_bytes * (1 - 1 / devices)
    return dict(traffic)


def _summed_axes(placement: Placement, name: str, names: Axes) -> list[tuple[str, ...]]:
    """Returns the sets of mesh axes over which the gradient of a parameter is summed, each in one collective. Ranks of
    adapters are whole, so their gradients are summed over more axes than those of other weights."""
    replicated_axes = placement.replicated_axes(names)
    if is_adapter(name):
        return [replicated_axes] if replicated_axes else []
    return [(axis,) for axis in REPLICA_AXES if axis in replicated_axes]


def gathered_in_float8(spec: StepSpec) -> set[str]:
    """Returns the names of the parameters that are gathered in float8."""
    if not spec.float8:
        return set()
    all_names = axes_by_name(spec.definition.axes)
    flags_by_group = engine.trace_step(spec).gathered_in_float8
    in_float8: set[str] = set()
    for group in spec.definition.groups:
        for position, flags in enumerate(flags_by_group[group.name]):
            prefix = f"{group.name}." if len(group.pattern) == 1 else f"{group.name}.{position}."
            names = [name for name in all_names if name.startswith(prefix)]
            in_float8.update(name for name, is_float8 in zip(names, flags, strict=True) if is_float8)
    return in_float8


def small_traffic_bound(spec: StepSpec) -> float:
    """Returns an upper bound, in bytes per step, on what `minimum_traffic` leaves out. This is scales, biases, the sums
    of routers' gradients over `model`, the segments of divided rows, and the three numbers per token that each device
    sends to all that share the vocabulary for the cross-entropy, in every tick of a pipeline."""
    small = [leaf for _, leaf, names in parameters_of(spec) if (SCALES_AND_BIASES | {"router"}) & {*names}]
    elements = sum(map(elements_per_device, small))
    devices_per_row = spec.placement.num_shards("length")
    row_tokens = spec.schedule.ticks * spec.microbatch_rows * spec.config.data.sequence_length
    tokens = row_tokens // devices_per_row
    # Devices that share rows gather the segments of the other parts, forward and backward.
    segment_bytes = 2 * 4 * (row_tokens - tokens) if spec.config.data.keeps_documents_apart else 0
    loss_tokens = tokens / spec.placement.stages if spec.placement.divides_tokens else tokens
    loss_bytes = 3 * 4 * loss_tokens * (spec.placement.num_shards_in_use("vocab") - 1)
    return segment_bytes + 2 * 4 * elements + loss_bytes + 4096


def _weights(spec: StepSpec) -> list[tuple[str, jax.ShapeDtypeStruct, Axes]]:
    """Returns all parameters except scales and biases, with their names and logical axes."""
    return [(name, leaf, names) for name, leaf, names in parameters_of(spec) if not SCALES_AND_BIASES & {*names}]
