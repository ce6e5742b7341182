"""Describes what a model multiplies and how a step is spread over devices. Estimates are computed from this."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxmnt.config.mesh import MESH_AXES
from jaxmnt.config.schema import Config, Train
from jaxmnt.models.adapters import is_adapter
from jaxmnt.models.blockwise import ATTENTION
from jaxmnt.models.contract import AttentionShape, Definition, LayerCosts, Product
from jaxmnt.models.experts import EXPERT_ROUND
from jaxmnt.parallel.choices import pays_to_divide_tokens
from jaxmnt.parallel.chunks import halo_length
from jaxmnt.parallel.sharding import GATHERED, Overlap, named_leaves
from jaxmnt.training.memory_suggestions import residual_bytes
from jaxmnt.training.optimizer import muon_forms
from jaxmnt.training.pipeline_schedule import PipelineSchedule
from jaxmnt.training.remat import recomputes_layers
from jaxmnt.training.spec import StepSpec
from jaxmnt.training.trained import trained_axes


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that determine its computation."""

    layers: tuple[tuple[int, LayerCosts], ...]
    """For each kind of layer, the number of layers and the costs of one."""
    hidden: int
    """Width of the residual stream."""
    vocab: int
    """Vocabulary size."""
    tied: bool = False
    """True if the head is tied to the embedding."""
    other_parameters: int = 0
    """Parameters that multiply nothing, such as scales and learned positions."""
    muon: tuple["MuonMatrices", ...] = ()
    """The matrices that Muon updates."""
    adapters: "AdapterShape | None" = None
    """The adapters beside frozen weights; None if the weights train themselves."""

    @property
    def depth(self) -> int:
        """Number of layers."""
        return sum(count for count, _ in self.layers)

    @property
    def layer_parameters(self) -> int:
        """Number of weights in all layers."""
        return sum(count * layer.parameters for count, layer in self.layers)

    @property
    def end_parameters(self) -> int:
        """Number of weights in the embedding and the head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layer_parameters + self.end_parameters + self.other_parameters


class AdapterShape(NamedTuple):
    """The adapters of a model."""

    rank: int
    products: frozenset[str]
    """The names of the products whose weights have adapters, such as mlp.gate."""
    split: int
    """Number of adapters' parameters that have the model's width, which `fsdp` splits."""
    whole: int
    """Number of all others, which tensor parallelism splits, but not `fsdp`."""

    def per_device(self, scheme: "Scheme") -> float:
        """Returns the number of parameters that a device stores, and whose state and gradients it has."""
        return (self.split / scheme.shards + self.whole / scheme.model) / scheme.pipeline


class MuonMatrices(NamedTuple):
    """Matrices with equal sides that Muon updates (`training.muon`)."""

    total: int
    """The number of matrices in the whole model."""
    least: int
    """The shorter side."""
    most: int
    of_experts: bool
    steps: int
    """Steps of the iteration (`optimizer.muon.steps`)."""


def muon_matrices(config: Config, definition: Definition) -> tuple[MuonMatrices, ...]:
    """Returns the matrices that Muon updates."""
    trained = trained_axes(definition, config.optimizer.frozen)
    stacks = [group.name for group in definition.groups]
    forms = muon_forms(config, trained, stacks)
    counts: Counter[tuple[int, int, bool]] = Counter()
    for name, leaf, names in named_leaves(definition.abstract, definition.axes):
        if name in forms:
            least, most = sorted(forms[name].size(leaf.shape))
            counts[least, most, "experts" in names] += math.prod(leaf.shape) // (least * most)
    steps = config.optimizer.muon.steps
    return tuple(MuonMatrices(count, *sides, steps) for sides, count in sorted(counts.items()))


def model_shape(definition: Definition, config: Config | None = None) -> ModelShape:
    """Returns the shape of a model, from `Family.costs` and its config. With the `config` of a run, it has the matrices
    that Muon updates."""
    muon = () if config is None else muon_matrices(config, definition)
    layers = tuple(definition.layer_costs())
    model = definition.family.config
    ends = (model.hidden_size, definition.vocab_size, model.tie_embeddings)
    others = definition.base.parameter_count - ModelShape(layers, *ends).parameters
    return ModelShape(layers, *ends, others, muon, _adapter_shape(definition))


def _adapter_shape(definition: Definition) -> AdapterShape | None:
    """Returns the shape of the adapters, or None if there are none."""
    adapters = definition.adapters
    if adapters is None:
        return None
    names = {name for _, layer in definition.layer_costs() for name in (product.name for product in layer.products)}
    adapted = frozenset(name for name in names if any(target.endswith(f".{name}") for target in adapters.names))
    leaves = [
        (leaf, axes) for name, leaf, axes in named_leaves(definition.abstract, definition.axes) if is_adapter(name)
    ]
    split = sum(leaf.size for leaf, axes in leaves if {*GATHERED} & {*axes})
    return AdapterShape(adapters.rank, adapted, split, sum(leaf.size for leaf, _ in leaves) - split)


@dataclass(frozen=True)
class Scheme:
    """The way in which a step is spread over devices."""

    length: int
    """Tokens per row."""
    rows: int
    """Rows of a microbatch on one batch shard."""
    microbatches: int
    data: int = 1
    pipeline: int = 1
    fsdp: int = 1
    context: int = 1
    model: int = 1
    expert: int = 1
    expert_round: float = EXPERT_ROUND
    """Rows of a round of experts, relative to an even load (`model.expert_round`)."""
    zero: int = 3
    """ZeRO stage over `fsdp`, `context` and, for all but experts, `expert`."""
    chunks: int = 1
    """Chunks of the model per stage."""
    idle: float = 0.0
    """A stage's idle time as a share of its work."""
    steady: float = 0.0
    """Share of the microbatches whose forward and backward run in steady ticks, beside another microbatch."""
    ticks: int = 0
    """Number of ticks of the pipeline. After each tick all stages pass their results on."""
    slots: int = 1
    """Maximum number of microbatches of a chunk that a stage keeps at the same time."""
    remat: str = "none"
    """The part of forward that backward recomputes, as a key of `flops.RECOMPUTE_SHARES`."""
    keeps_attention: bool = False
    """True if forward saves the outputs of attention, although `remat` says that backward recomputes it."""
    dtype: str = "bfloat16"
    """Dtype of matrix products: `bfloat16`, `float32`, or `float8`, in which case all else is in bfloat16."""
    float8_least: int = 0
    """Minimum number of inputs and outputs of a product in float8 (`train.float8_least`)."""
    overlap: Overlap = "off"
    """The way in which tensor parallelism overlaps communication with products (`model.overlap`)."""
    prefetch: bool = True
    """True if a layer's weights are gathered while another layer computes, as far as possible."""
    residual_bytes: float = 0.0
    """Bytes per device that a microbatch's forward saves for its backward."""

    @property
    def tokens(self) -> int:
        """Number of tokens of a microbatch on a device."""
        return self.rows * self.length // self.context

    @property
    def whole_rows(self) -> float:
        """Number of whole rows that have as many tokens as a microbatch on a device."""
        return self.rows / self.context

    @property
    def shards(self) -> int:
        """Number of shards of a parameter that does not belong to experts."""
        return self.fsdp * self.context * self.expert

    def table_stages(self, vocab: int) -> int:
        """Returns the number of stages from which a step gathers the tables of a vocabulary. It is 1 unless the stages
        divide tokens."""
        gathers_tables = self.shards > 1 and self.zero != 1
        divides = pays_to_divide_tokens(self.tokens, vocab, self.model, gathers_tables=gathers_tables)
        return self.pipeline if divides else 1

    @property
    def expert_shards(self) -> int:
        """Number of shards of an expert's parameter, in addition to the division of the experts."""
        return self.fsdp * self.context

    def layer_parameters(self, layer: LayerCosts) -> tuple[float, float]:
        """Returns a device's parameters of a layer, before sharding: those of experts, and the others."""
        others = layer.parameters - layer.expert_parameters
        return layer.expert_parameters / (self.model * self.expert), others / self.model

    @property
    def chunk_tokens(self) -> int:
        """Number of tokens in each of a device's two chunks of a row, if rows are divided."""
        return self.length // (2 * self.context)

    def halo(self, attention: AttentionShape) -> int | None:
        """Returns the number of tokens before each chunk that are computed with it, because the layer has a window and
        rows are divided; None if these do not apply (`models.context_parallel`)."""
        return None if self.context == 1 else halo_length(attention.window, self.chunk_tokens, self.length)

    @property
    def keeps_halos(self) -> bool:
        """True if forward keeps the rows of chunks and their halos for backward."""
        return not recomputes_layers(self.remat)

    def row_keys(self, attention: AttentionShape) -> float:
        """Returns the number of numbers in the keys and values of a device's heads, in all tokens of a microbatch's
        rows."""
        heads = max(1.0, (attention.kv_heads or attention.heads) / self.model)
        return 2 * self.rows * self.length * heads * attention.head_dim

    def round_rows(self, product: Product) -> float:
        """Returns the number of rows that a device multiplies by the weights of its experts in a round."""
        devices = self.expert * self.model
        slack = min(self.expert_round, devices) if devices > 1 else 1.0
        group_tokens = self.tokens * self.expert
        return slack * product.share * product.experts * group_tokens / devices

    @property
    def itemsize(self) -> int:
        """Bytes of a number that is not in float8."""
        return 4 if self.dtype == "float32" else 2


def scheme_of(spec: StepSpec) -> Scheme:
    """Returns the scheme of a step on its mesh, with the residuals of a microbatch."""
    config, sizes, schedule = spec.config, spec.placement.sizes, spec.schedule
    fields = schedule_of(schedule) | {axis.name: sizes[axis.name] for axis in MESH_AXES}
    return Scheme(
        length=config.data.sequence_length,
        rows=spec.microbatch_rows,
        microbatches=spec.num_microbatches,
        zero=spec.zero,
        chunks=schedule.chunks,
        expert_round=config.model.expert_round or EXPERT_ROUND,
        remat=config.train.remat if config.train.remat != "names" else "full",
        keeps_attention=ATTENTION in _saved_names(config.train),
        dtype=spec.dtype.name if spec.float8 is None else "float8",
        float8_least=config.train.float8_least,
        overlap=spec.placement.overlap,
        residual_bytes=residual_bytes(spec) * schedule.chunks / fields["slots"],
        **fields,
    )


def _saved_names(train: Train) -> list[str]:
    """Returns the names of the activations that the config saves, on the device or in host memory."""
    return train.remat_offload + (train.remat_save if train.remat == "names" else [])


def schedule_of(schedule: PipelineSchedule) -> dict[str, Any]:
    """Returns the fields of `Scheme` that a schedule determines. Without a pipeline a stage keeps one microbatch."""
    slots = max(map(schedule.in_flight, range(schedule.stages))) if schedule.stages > 1 else 1
    steady = len(schedule.steady_ticks) / (schedule.microbatches * schedule.chunks)
    return {"idle": schedule.idle_share(), "ticks": schedule.ticks, "slots": slots, "steady": steady}
