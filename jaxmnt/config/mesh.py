"""The axes of the device mesh, and the settings of the mesh and the pipeline."""

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import model_validator

from jaxmnt.config.section import Section, key

Split = Literal["rows", "length", "layers", "experts", "features"]


@dataclass(frozen=True)
class Axis:
    """A mesh axis and the dimensions that it splits among devices.

    Sums over tokens are reduced over the axes that split rows or length. So are the gradients of parameters that are
    replicated over such an axis.
    """

    name: str
    splits: tuple[Split, ...]
    gathers_weights: bool = False
    """True if the stored parameters are sharded over this axis, and gathered before use."""
    inside_host: bool = False
    """True if communication over this axis should stay within a host, because there is so much of it."""
    parallelism: str = ""
    """Name of this form of parallelism in plans that compare meshes with and without it."""


MESH_AXES = (
    Axis("data", ("rows",)),
    Axis("pipeline", ("layers",), parallelism="a pipeline"),
    Axis("fsdp", ("rows",), gathers_weights=True),
    Axis("context", ("length",), gathers_weights=True, inside_host=True, parallelism="context parallelism"),
    Axis("expert", ("rows", "experts"), gathers_weights=True, inside_host=True, parallelism="expert parallelism"),
    Axis("model", ("features",), inside_host=True, parallelism="tensor parallelism"),
)
"""The axes in mesh order. Axes that can use the slowest network come first."""

AXES = tuple(axis.name for axis in MESH_AXES)


def axes_that_split(*parts: Split) -> tuple[str, ...]:
    """Returns the axes that split at least one of these dimensions, in mesh order."""
    return tuple(axis.name for axis in MESH_AXES if {*parts} & {*axis.splits})


BATCH_AXES = axes_that_split("rows")
"""Axes whose devices hold different rows of a batch."""
TOKEN_AXES = axes_that_split("rows", "length")
"""Axes whose devices hold different tokens of a batch."""
GATHERING_AXES = tuple(axis.name for axis in MESH_AXES if axis.gathers_weights)
"""Axes along which the parameters are stored in shards, and gathered before use."""
REPLICA_AXES = tuple(name for name in BATCH_AXES if name not in GATHERING_AXES)
"""Batch axes along which parameters are replicated, not split."""
[STAGE_AXIS] = axes_that_split("layers")


class Mesh(Section):
    data: int | None = key(
        None, "Replicas of the model. Default: -1 (all remaining devices), unless another axis is -1."
    )
    pipeline: int = key(1, "Number of pipeline stages, each of which holds a part of the layers.")
    fsdp: int = key(1, "Number of shards of parameters, gradients and optimizer state.")
    context: int = key(
        1, "Number of devices that share each row. It also shards parameters as fsdp does. If it is above 1, "
        "data.sequence_length must be a multiple of 2 × context × model.",
    )  # fmt: skip
    expert: int = key(
        1, "Number of parts of the experts. It also splits rows, and shards other parameters as fsdp does."
    )
    model: int = key(
        1,
        "Tensor and sequence parallelism: number of parts of the heads, the MLP and the vocabulary, and of the "
        "sequence between attention and MLP.",
    )
    zero: Literal["auto", 1, 2, 3] = key(
        "auto", "ZeRO stage of fsdp, context and expert. 3: gather parameters layer by layer; 2: gather them once per "
        "step, and scatter gradients once per microbatch; 1: do both once per step; auto: the fastest stage that fits "
        "according to the devices' data sheets, or 3 for devices without one.",
    )  # fmt: skip
    prefetch: bool | None = key(
        None, "Gather a layer's weights, and reduce its gradients, while another layer computes. Default: true on GPUs "
        "with zero 3 and without a pipeline.",
    )  # fmt: skip
    allow_split_hosts: bool = key(False, "Allow the axes context, expert and model to span hosts.")
    rules: dict[str, list[str]] = key(
        {}, "Mesh axes for a logical axis in place of the default ones, such as embed: [data, fsdp]."
    )

    def sizes(self) -> dict[str, int]:
        """Returns the axis sizes by name in mesh order; -1 stands for all remaining devices."""
        return {axis: getattr(self, axis) for axis in AXES}

    @model_validator(mode="after")
    def _check_prefetch(self) -> Self:
        if self.prefetch and (self.zero in (1, 2) or self.pipeline > 1):
            raise ValueError(
                "mesh.prefetch: it requires mesh.zero 3 and no pipeline, because only then are weights gathered layer "
                "by layer; leave it out"
            )
        return self


class Pipeline(Section):
    schedule: Literal["gpipe", "1f1b", "interleaved"] = key("1f1b", "Order in which stages process microbatches.")
    chunks: int = key(1, "Pieces of the model per stage; at least 2 with interleaved, else 1.", ge=1)
    layers: list[int] | None = key(
        None, "Number of layers in each piece, in model order. Default: as even as possible."
    )


def check_pipeline(pipeline: Pipeline, stages: int, layers: int) -> None:
    """Raises `ValueError` if the layers cannot be divided among the stages. -1 or 1 stages accept any layers."""
    if pipeline.chunks > 1 and pipeline.schedule != "interleaved":
        raise ValueError(
            f"pipeline.chunks: schedule {pipeline.schedule} has one chunk per stage; set 1, or schedule interleaved"
        )
    if stages <= 1:
        return
    if pipeline.schedule == "interleaved" and pipeline.chunks == 1:
        raise ValueError("pipeline.chunks: interleaved needs at least 2 chunks per stage; set it, or schedule 1f1b")
    pieces = stages * pipeline.chunks
    if layers < pieces:
        chunks = f" of {pipeline.chunks} chunks" if pipeline.chunks > 1 else ""
        raise ValueError(
            f"mesh.pipeline: {stages} stages{chunks} need at least {pieces} layers, and model.num_layers is {layers}; "
            "change one of them"
        )
    sizes = pipeline.layers
    if sizes is not None and (len(sizes) != pieces or sum(sizes) != layers or min(sizes) < 1):
        raise ValueError(
            f"pipeline.layers: {sizes} does not cut {layers} layers into {pieces} pieces of at least 1; "
            f"give {pieces} numbers whose sum is {layers}"
        )


def complete_mesh(mesh: Mesh) -> Mesh:
    """Checks the axis sizes, and sets `data` to -1 (all remaining devices) unless another axis is -1.

    Raises `ValueError` for invalid sizes.
    """
    sizes = mesh.sizes()
    for axis, size in sizes.items():
        if size is not None and size != -1 and size < 1:
            raise ValueError(
                f"mesh.{axis}: {size} is not a size; give a positive number, or -1 for all remaining devices"
            )
    rest = [axis for axis, size in sizes.items() if size == -1]
    if len(rest) > 1:
        raise ValueError(f"mesh.{rest[1]}: only one axis may be -1, and mesh.{rest[0]} is already; give a number")
    if mesh.data is None:
        mesh = mesh.model_copy(update={"data": 1 if rest else -1})
    return mesh
