"""Chooses the placement for a config: the rules that its sizes require, what a device does while it communicates, and
what the stages of a pipeline divide among them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax

from jaxmnt.config.mesh import AXES, STAGE_AXIS, TOKEN_AXES, axes_that_split
from jaxmnt.config.schema import Config
from jaxmnt.errors import ConfigError
from jaxmnt.parallel.axes import length_divisor, microbatch_rows, num_microbatches
from jaxmnt.parallel.sharding import RULES, Overlap, Placement

OVERRIDES = {"embed": TOKEN_AXES} | {axis: RULES[axis] for axis in ("heads", "kv_heads", "mlp")}
"""Logical axes that `mesh.rules` may change, and the mesh axes over which each may be split. Others are refused,
because their communication is not implemented."""


def build_placement(config: Config, mesh: jax.sharding.Mesh, stacks: Sequence[str] = ("layers",)) -> Placement:
    """Returns the placement for a config. Its rules are the table with the config's overrides and with the changes that
    the config's sizes require. `stacks` are the logical axes along which layers are stacked.

    Raises `ConfigError` for rules that are not supported and for sizes that cannot be split evenly.
    """
    rules = RULES | dict.fromkeys(stacks, RULES["layers"]) | _overrides(config)
    rules["kv_embed"] = rules["embed"]
    kv_heads = config.model.num_kv_heads
    assert kv_heads
    num_shards = math.prod(mesh.shape[axis] for axis in RULES["kv_heads"])
    if kv_heads % num_shards or not rules["kv_heads"] or not rules["heads"]:
        # A device's share of the key/value heads would not be the heads that its queries need. So the weights are whole
        # where they are used. If heads are split and the width is divisible, they are stored split along the embedding
        # over all these axes.
        rules["kv_heads"] = ()
        storage_axes = (*rules["embed"], *RULES["kv_heads"])
        storage_shards = math.prod(mesh.shape[axis] for axis in storage_axes)
        if rules["heads"] and config.model.hidden_size % storage_shards == 0:
            rules["kv_embed"] = storage_axes
    rules |= _expert_rules(config, mesh)
    placement = Placement(mesh, rules)
    _check_divisible(config, placement)
    placement = replace(placement, overlaps_microbatches=_overlaps_microbatches(config, placement, len(stacks)))
    placement = replace(placement, divides_tokens=divides_tokens(config, placement))
    return replace(placement, overlap=_choose_overlap(config, placement))


def _expert_rules(config: Config, mesh: jax.sharding.Mesh) -> dict[str, tuple[str, ...]]:
    """Returns the rules that differ for the config's experts. If their number is divisible by the axes of experts, but
    not by `model` as well, `model` splits the MLP of each expert.

    Raises `ConfigError` if the experts cannot be divided.
    """
    experts = config.model.num_experts
    expert_axes = axes_that_split("experts")
    sizes = {axis: mesh.shape[axis] for axis in (*expert_axes, *axes_that_split("features"))}
    if experts is None:
        if split := [axis for axis in expert_axes if mesh.shape[axis] > 1]:
            raise ConfigError(
                f"mesh.{split[0]}: {mesh.shape[split[0]]} needs a model with experts, but model.num_experts is not "
                "set; use mesh.fsdp instead"
            )
        return {}
    if experts % math.prod(sizes.values()) == 0:
        return {}
    expert_size = config.model.expert_size or 0
    features = math.prod(mesh.shape[axis] for axis in axes_that_split("features"))
    if experts % math.prod(mesh.shape[axis] for axis in expert_axes) == 0 and expert_size % features == 0:
        return {"experts": expert_axes, "expert_mlp": axes_that_split("features")}
    names = " × ".join(f"mesh.{axis} {size}" for axis, size in sizes.items() if size > 1)
    divisors = ", ".join(str(number) for number in range(1, experts + 1) if experts % number == 0)
    raise ConfigError(f"model.num_experts: {experts} is not divisible by {names}; use one of {divisors} in all")


_MIN_RING_TOKENS, _MIN_RING_WIDTH = 2048, 2048
"""The minimum number of tokens in a piece, and of inputs to the MLP's last product, for which `auto` chooses the ring.
With at least 1,700 inputs (F), a product on an H100 takes longer than the transfer of its piece: it computes
2 · T · D · F FLOPs at 593 TFLOP/s, and the transfer moves 2 · T · D bytes at 350 GB/s. Starting a transfer takes
about 12 µs, which is a small part of its time if the piece has at least about a thousand tokens (T)."""


def _choose_overlap(config: Config, placement: Placement) -> Overlap:
    """Returns the overlap that `model.overlap` sets. `auto` chooses `off` on CPUs, where communication blocks the
    device anyway. Elsewhere it chooses `rows` if a microbatch has several rows. Otherwise it chooses `ring` if the
    pieces are large and no other microbatch computes while they travel."""
    requested_overlap = config.model.overlap
    shards = placement.num_shards("sequence")
    rows = microbatch_rows(config, placement.sizes)
    if shards == 1 or requested_overlap == "off":
        return "off"
    if requested_overlap == "ring" and placement.stages > 1:
        # `ppermute` involves every device of the mesh, but a stage may be idle while another one works.
        raise ConfigError("model.overlap: ring is not supported with a pipeline; set auto or rows")
    if requested_overlap == "rows" and rows == 1:
        raise ConfigError(
            "model.overlap: rows needs at least two rows per microbatch, to compute one while the other is "
            "communicated; set a larger train.microbatch_size, or model.overlap=auto"
        )
    if requested_overlap != "auto":
        return requested_overlap
    if placement.on_cpu:
        return "off"
    if rows > 1:
        return "rows"
    piece_tokens = rows * placement.local_length(config.data.sequence_length)
    mlp_width = config.model.intermediate_size or 0
    is_large = piece_tokens >= _MIN_RING_TOKENS and mlp_width >= _MIN_RING_WIDTH * placement.num_shards("mlp")
    return "ring" if is_large and placement.stages == 1 and not placement.overlaps_microbatches else "off"


_MIN_MICROBATCHES = 8
"""The minimum number of microbatches for which two run side by side by default without a pipeline. With fewer, too
small a part of the step gains."""


def _overlaps_microbatches(config: Config, placement: Placement, groups: int) -> bool:
    """Returns the value of `train.overlap_microbatches`, or its default for a model with this number of groups of
    layers.

    The default is False on CPUs, which do not compute while they communicate. On GPUs it is True in a pipeline, and
    without one if `model` splits the layers. It is False for routed experts, whose step would take longer
    (docs/decisions/0080). Without a pipeline it is also False for several groups, because residuals of two
    microbatches would be stored, and for rows that are divided over `context`, which gain 1 % for 6 % more memory.

    Raises `ConfigError` for settings that need the microbatches one after another.
    """
    requested = config.train.overlap_microbatches
    obstacles = {
        "telemetry.noise_scale": config.telemetry.noise_scale, "train.remat_offload": bool(config.train.remat_offload),
    }  # fmt: skip
    obstacle = next((key for key, is_set in obstacles.items() if is_set and placement.stages == 1), None)
    if requested and obstacle:
        raise ConfigError(
            f"train.overlap_microbatches: {obstacle} needs one microbatch after another; remove one of the two settings"
        )
    if requested is not None:
        return requested
    if placement.on_cpu or (placement.stages == 1 and (obstacle or groups > 1)):
        return False
    return pays_to_overlap_microbatches(config, placement.sizes, num_microbatches(config, placement.sizes))


def pays_to_overlap_microbatches(config: Config, sizes: Mapping[str, int], microbatches: int) -> bool:
    """Returns True if a step on GPUs, on a mesh of these sizes, should run two microbatches side by side."""
    splits = lambda axis: any(sizes[name] > 1 for name in RULES[axis])
    suits_without_pipeline = splits("sequence") and not splits("length") and microbatches >= _MIN_MICROBATCHES
    return config.model.num_experts is None and (sizes[STAGE_AXIS] > 1 or suits_without_pipeline)


def divides_tokens(config: Config, placement: Placement) -> bool:
    """Returns True if the stages of the config's pipeline should divide the tokens of embedding and loss."""
    assert config.model.vocab_size is not None
    gathers_tables = bool(placement.mesh_axes("embed")) and config.mesh.zero != 1
    rows = microbatch_rows(config, placement.sizes)
    tokens = rows * config.data.sequence_length // placement.num_shards("length")
    features = placement.num_shards("sequence")
    return placement.stages > 1 and pays_to_divide_tokens(
        tokens, config.model.vocab_size, features, gathers_tables=gathers_tables
    )


def pays_to_divide_tokens(tokens: int, vocab_size: int, features: int, *, gathers_tables: bool) -> bool:
    """Returns True if stages should divide so many `tokens` of a microbatch, and not the vocabulary, by the plans of
    docs/decisions/0082.

    For each microbatch, the stages then exchange fewer activations, and fewer are gathered over the devices that split
    `features`. But the gradients of whole tables are added. If every microbatch `gathers_tables`, or scatters their
    gradients, whole tables would also take more communication.
    """
    return not gathers_tables and 2 * tokens * features >= vocab_size


def _overrides(config: Config) -> dict[str, tuple[str, ...]]:
    """Returns the rules in the config, with the mesh axes of each in mesh order. Raises `ConfigError` for a rule that
    is not supported."""
    for axis, names in config.mesh.rules.items():
        if axis not in OVERRIDES:
            raise ConfigError(
                f"mesh.rules: {axis!r} is not a logical axis that can be changed; use one of {', '.join(OVERRIDES)}"
            )
        for name in names:
            if name not in AXES:
                raise ConfigError(f"mesh.rules.{axis}: {name!r} is not a mesh axis; the axes are {', '.join(AXES)}")
            if name not in OVERRIDES[axis]:
                raise ConfigError(
                    f"mesh.rules.{axis}: {axis} cannot be split over {name}; "
                    f"use {', '.join(OVERRIDES[axis])}, or [] to keep it whole"
                )
        if len(set(names)) < len(names):
            raise ConfigError(f"mesh.rules.{axis}: a mesh axis is named twice; name each once")
    return {axis: tuple(name for name in AXES if name in names) for axis, names in config.mesh.rules.items()}


def _check_divisible(config: Config, placement: Placement) -> None:
    """Raises `ConfigError` for the first size that cannot be split evenly over the mesh. Vocabulary and MLP are not
    checked, because they are padded."""
    model = config.model
    _check_length(config.data.sequence_length, placement)
    for key, size, axis in (
        ("model.num_heads", model.num_heads, "heads"),
        ("model.hidden_size", model.hidden_size, "embed"),
    ):
        num_shards = placement.num_shards(axis)
        if size % num_shards:
            names = " × ".join(f"mesh.{name} {placement.sizes[name]}" for name in placement.mesh_axes(axis))
            raise ConfigError(f"{key}: {size} is not divisible by {names}; change one of them")
    # Raises if the global batch cannot be split evenly.
    num_microbatches(config, placement.sizes)


def _check_length(length: int, placement: Placement) -> None:
    """Raises `ConfigError` if rows of this length cannot be divided among the devices."""
    divisor = length_divisor(placement.num_shards("length"), placement.num_shards("sequence"))
    if length % divisor == 0:
        return
    mesh_axes = (*placement.mesh_axes("length"), *placement.mesh_axes("sequence"))
    factors = " × ".join(
        ["2"] * (placement.row_divisor > 1) + [f"mesh.{name} {placement.sizes[name]}" for name in mesh_axes]
    )
    nearest = [str(size) for size in (length // divisor * divisor, -(-length // divisor) * divisor) if size]
    raise ConfigError(
        f"data.sequence_length: {length} is not divisible by {factors}; set {' or '.join(nearest)}, or change the mesh"
    )
