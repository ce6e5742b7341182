"""Estimates a step's device memory from shapes alone, without compiling.

Four parts of XLA's peak are counted: the state, the residuals that forward keeps for backward, recomputed activations,
and the embedding's gradient. The rest is estimated. It consists of multiples of a layer's weights and activations in
backward, or of the head's weights in the loss. With ZeRO 1 and 2, the unsharded weights and gradients are added.
`benchmarks/plan_estimates.py` fits the multiples to compiled programs.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

from jaxmnt.config.schema import Config
from jaxmnt.errors import ConfigError
from jaxmnt.models.adapters import is_adapter
from jaxmnt.models.contract import LayerCosts
from jaxmnt.plan.candidates import Candidate
from jaxmnt.plan.chips import read_table
from jaxmnt.plan.workload import ModelShape, Scheme
from jaxmnt.training.build import build_spec
from jaxmnt.training.memory_suggestions import parameters_of, residual_bytes
from jaxmnt.training.spec import StepSpec
from jaxmnt.training.state import abstract_state
from jaxmnt.training.trained import axes_by_name

_TABLE = read_table("multiples.toml")
KINDS: list[str] = _TABLE["kinds"]
"""Kinds of programs, to which `kind_of` assigns schemes. Programs of one kind have the same arrays at their peak."""
MULTIPLES: dict[str, list[float]] = _TABLE["multiples"]
"""Multiples by name, each in the order of `KINDS`. They do not account for all copies and fragmentation."""

Multiples = Mapping[str, float]
"""Multiples for one kind of program, by name."""


def multiples_of(kind: str) -> Multiples:
    """Returns the multiples for a kind of program."""
    return {name: row[KINDS.index(kind)] for name, row in MULTIPLES.items()}


def kind_of(scheme: Scheme) -> str:
    """Returns the kind of program that a scheme leads to, one of `KINDS`."""
    if scheme.shards > 1 and scheme.zero < 3:
        return f"ZeRO {scheme.zero}"
    if scheme.pipeline > 1:
        return "chunks" if scheme.chunks > 1 else "stages"
    if scheme.shards == 1:
        return "whole"
    return "sharded both ways" if scheme.model > 1 else "sharded"


class Memory(NamedTuple):
    """Bytes per device."""

    state: float
    """Parameters and moments."""
    residuals: float
    """Activations that forward keeps for backward."""
    rest: float
    """All else that is needed at the peak of a step."""
    in_save: float
    """Bytes that a save needs in addition to the state."""

    @property
    def peak(self) -> float:
        """Maximum of the memory during a step and during a save."""
        return self.state + max(self.residuals + self.rest, self.in_save)


class StateBytes(NamedTuple):
    """Bytes per parameter, averaged over all parameters but those of adapters."""

    parameters: float = 4.0
    moments: float = 8.0
    """Optimizer moments on the device."""
    gradients: float = 4.0
    adapters: float = 0.0
    """Bytes of parameters, moments and gradients for each parameter of an adapter."""


_ADAMW_BYTES = StateBytes()
"""Bytes per parameter for AdamW if everything is in float32."""


def state_bytes(spec: StepSpec) -> StateBytes:
    """Returns the bytes per parameter for a step, which depend on its dtypes, its optimizer and its frozen
    parameters."""
    count = spec.definition.base.parameter_count
    trained_names = axes_by_name(spec.trained_axes)
    params = parameters_of(spec)
    trained = sum(leaf.size for name, leaf, _ in params if name in trained_names)
    total_bytes = lambda leaves: sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    state = abstract_state(spec)
    moments = [] if spec.config.optimizer.offload else jax.tree.leaves(state["optimizer"])
    moments += jax.tree.leaves(state.get("average", {}))
    moment_bytes = total_bytes(leaf for leaf in moments if leaf.ndim)
    if spec.definition.adapters is not None:
        adapters = [leaf for name, leaf, _ in params if is_adapter(name)]
        adapter_count = sum(leaf.size for leaf in adapters)
        base_bytes = total_bytes(leaf for name, leaf, _ in params if not is_adapter(name))
        state_of_adapters = (total_bytes(adapters) + moment_bytes) / adapter_count
        return StateBytes(base_bytes / count, 0.0, 0.0, adapters=state_of_adapters + 4)
    return StateBytes(
        parameters=total_bytes(leaf for _, leaf, _ in params) / count,
        moments=moment_bytes / count,
        gradients=4 * trained / count,
    )


class ResidualBytes:
    """Computes the bytes of residuals, which forward saves for backward, per whole row and device in all layers. The
    results are cached by remat policy, and by the numbers of devices that share a row and a layer."""

    def __init__(self, config: Config, vocab: int, devices_of: Callable[[int], Sequence[jax.Device]]):
        """`devices_of` returns as many devices of the target as it is asked for."""
        self._config = config
        self._vocab = vocab
        self._devices_of = devices_of
        self._cache: dict[tuple[str, int, int], int | None] = {}

    def per_row(self, remat: str, context: int, model: int) -> int | None:
        """Returns the bytes on all devices that share a row, if these are `context` and if `model` devices share each
        layer, or None if they cannot."""
        key = (remat, context, model)
        if key not in self._cache:
            self._cache[key] = None
            with contextlib.suppress(ConfigError):
                self._cache[key] = context * residual_bytes(self._spec(remat, context, model))
        return self._cache[key]

    def state(self) -> StateBytes:
        """Returns the bytes per parameter, which depend on the config's dtypes, optimizer and frozen parameters. Raises
        `ConfigError` for a config that cannot train on any mesh."""
        return state_bytes(self._spec("full", 1, 1))

    def _spec(self, remat: str, context: int, model: int) -> StepSpec:
        """Returns the spec of a step with one row on `context` × `model` devices."""
        candidate = Candidate(
            data=1,
            pipeline=1,
            fsdp=1,
            context=context,
            model=model,
            rows=1,
            microbatches=1,
            chunks=1,
            remat=remat,
            zero=3,
            splits_hosts=True,
        )
        config = self._config.changed(candidate.settings | {"data.global_batch_size": 1, "model.overlap": "off"})
        return build_spec(config, self._vocab, self._devices_of(context * model), lambda _: "")


def estimate_memory(
    model: ModelShape,
    scheme: Scheme,
    row_residuals: float,
    row_residuals_without_remat: float,
    state: StateBytes = _ADAMW_BYTES,
    multiples: Multiples | None = None,
    loss_chunk: float = 2**28,
) -> Memory:
    """Estimates the peak of a step's memory, which occurs in the backward pass, the loss, the embedding's gradient, or
    a save.

    `row_residuals` are the bytes that a row saves in all layers (`ResidualBytes`), and `row_residuals_without_remat`
    the bytes that it would save if the backward pass recomputed nothing. `loss_chunk` is the size of a chunk of logits
    in bytes. The default of `multiples` is those of the scheme's kind of program.
    """
    multiples = multiples or multiples_of(kind_of(scheme))
    stages = scheme.pipeline
    devices = scheme.model * stages
    chunks = stages * scheme.chunks
    depth = math.ceil(model.depth / chunks)
    padding = depth * chunks / model.depth

    # Count the parameters per device: those of the layers and the ends before sharding, the stage's piece of the ends,
    # and all as stored.
    experts, others = _stage_parameters(model, scheme, padding)
    layers, ends_of_stage = experts + others, model.end_parameters / devices
    ends = ends_of_stage * scheme.table_stages(model.vocab)
    stored_parameters = (
        experts / scheme.expert_shards + (others + ends_of_stage) / scheme.shards + model.other_parameters / stages
    )
    residuals = row_residuals * scheme.whole_rows * scheme.slots * depth / model.depth

    has_all_gradients = scheme.shards > 1 and scheme.zero == 1
    sharded_parameters = stored_parameters + (ends - ends_of_stage) / scheme.shards
    gradients = state.gradients * (layers + ends if has_all_gradients else sharded_parameters)
    embedding_gradient = state.gradients * (0 if model.tied else ends / 2) / (1 if has_all_gradients else scheme.shards)
    gradients_in_loss = gradients
    if scheme.microbatches == 1:
        # The gradients of layers are allocated when backward begins, and that of the embedding last.
        gradients -= embedding_gradient
        gradients_in_loss = 0.0

    # One layer at a time is recomputed, while its backward runs.
    per_layer = lambda row_bytes: row_bytes * scheme.whole_rows / model.depth
    recomputed = per_layer(row_residuals_without_remat - row_residuals)
    in_backward = _memory_in_backward(model, scheme, per_layer(row_residuals), multiples) + recomputed
    if scheme.steady and stages == 1:
        # A layer of another microbatch runs forward at the same time.
        in_backward += per_layer(row_residuals_without_remat)
    in_loss = _memory_in_loss(model, scheme, multiples, loss_chunk)
    # The embedding's gradient is computed unsharded. With ZeRO 1, `gradients` contains it already. With ZeRO 2,
    # counting it would not improve the estimates.
    has_head_gradient = model.adapters is None
    in_embedding = (
        _head_gradient_bytes(model, scheme) if stages == 1 and scheme.zero == 3 and has_head_gradient else 0.0
    )
    rest = max(in_backward + gradients, in_loss + gradients_in_loss, in_embedding + gradients)
    if scheme.shards > 1 and scheme.zero < 3:
        rest += scheme.itemsize * (layers + ends)
    elif ends > ends_of_stage:
        rest += scheme.itemsize * ends

    # A save copies arrays whose layout in a checkpoint differs from the one in memory.
    copied_layers = layers / padding if scheme.chunks > 1 or padding > 1 else 0
    copied_parameters = copied_layers + ends_of_stage * bool(model.vocab % devices)
    state_of_adapters = 0.0 if model.adapters is None else state.adapters * model.adapters.per_device(scheme)
    state_bytes_per_parameter = state.parameters + state.moments
    return Memory(
        state=state_bytes_per_parameter * stored_parameters + state_of_adapters,
        residuals=residuals,
        rest=rest,
        in_save=state_bytes_per_parameter * copied_parameters / scheme.shards,
    )


def _stage_parameters(model: ModelShape, scheme: Scheme, padding: float) -> tuple[float, float]:
    """Returns a device's parameters of all layers of its stage, before sharding: those of experts, and the others.
    `padding` is the ratio of slots to layers."""
    counts = [(count, scheme.layer_parameters(layer)) for count, layer in model.layers]
    experts = sum(count * parameters[0] for count, parameters in counts)
    others = sum(count * parameters[1] for count, parameters in counts)
    return padding * experts / scheme.pipeline, padding * others / scheme.pipeline


def _memory_in_backward(model: ModelShape, scheme: Scheme, residuals: float, multiples: Multiples) -> float:
    """Estimates the memory that backward needs in addition to state, gradients, residuals and recomputed activations.

    It is weights · c n + wide · c t F / model + narrow · c t D + kept · `residuals`. F is the largest number of inputs
    or outputs of a product, n the weights of the largest layer on a device, t the tokens of a microbatch, D the width
    of the model, and c the bytes per number. `residuals` are the bytes of residuals of one layer.
    """
    layer = _largest_layer(model)
    dense_products = [product for product in layer.products if product.experts == 1]
    widest = max(max(product.inputs, product.outputs) * product.share for product in dense_products)
    stream = scheme.itemsize * scheme.tokens
    arrays = {
        "weights": _layer_weight_bytes(model, scheme),
        "wide": stream * widest / scheme.model,
        "narrow": stream * model.hidden,
        "kept": residuals,
    }
    total = sum(multiples[name] * bytes_ for name, bytes_ in arrays.items())
    return total + max(_expert_bytes(model, scheme, layer), _context_bytes(scheme, layer))


def _context_bytes(scheme: Scheme, layer: LayerCosts) -> float:
    """Returns the bytes of the arrays in the backward pass of attention in divided rows. Without a window these are the
    keys and values of whole rows, their gradients in float32, and a float32 gradient of the queries."""
    if scheme.context == 1:
        return 0.0
    attention = layer.attention
    queries = scheme.tokens * attention.heads * attention.head_dim / scheme.model
    if (halo := scheme.halo(attention)) is None:
        return scheme.row_keys(attention) * (scheme.itemsize + 4) + 4 * queries
    # Rows of chunks and their halos: queries, output and keys, and the gradients of each.
    keys = scheme.row_keys(attention) / scheme.context
    return 2 * scheme.itemsize * (2 * queries + keys) * (1 + halo / scheme.chunk_tokens)


def _expert_bytes(model: ModelShape, scheme: Scheme, layer: LayerCosts) -> float:
    """Returns the bytes of the arrays in the backward pass of a layer of experts; 0 for other layers.

    All tokens of the group, t · expert, are there twice in the compute dtype and once in float32. A round has R rows,
    each with three arrays of the model's width and six of the expert's. The gradients of the device's experts are
    float32.
    """
    if not layer.expert_products:
        return 0.0
    product = layer.expert_products[0]
    per_row = 3 * model.hidden + 6 * product.expert_size
    group_bytes = scheme.tokens * scheme.expert * model.hidden * (2 * scheme.itemsize + 4)
    return group_bytes + scheme.itemsize * scheme.round_rows(product) * per_row + 4 * scheme.layer_parameters(layer)[0]


def _memory_in_loss(model: ModelShape, scheme: Scheme, multiples: Multiples, chunk: float) -> float:
    """Estimates the memory that the loss needs in addition to state, gradients and residuals.

    It is head · 4 V D + logits · 4 t V / chunks + head_narrow · c t D + head_weights · c n. V is a device's part of the
    vocabulary, t the tokens that a stage computes, and `_memory_in_backward` explains the other symbols. `chunk` is the
    size of a chunk of logits in bytes.
    """
    tokens = scheme.tokens / scheme.table_stages(model.vocab)
    logits = 4 * scheme.tokens * model.vocab / (scheme.model * scheme.pipeline)
    chunks = math.ceil(logits / chunk)
    head = multiples["head" if chunks > 1 else "head_at_once"] * (multiples["head_tied"] if model.tied else 1)
    total = head * _head_gradient_bytes(model, scheme) + multiples["logits"] * logits / chunks
    stream = multiples["head_narrow"] * scheme.itemsize * tokens * model.hidden
    return total + stream + multiples["head_weights"] * _layer_weight_bytes(model, scheme)


def _largest_layer(model: ModelShape) -> LayerCosts:
    """Returns the costs of the layer with the most parameters."""
    return max((layer for _, layer in model.layers), key=lambda layer: layer.parameters)


def _layer_weight_bytes(model: ModelShape, scheme: Scheme) -> float:
    """Returns c n, the bytes of the largest layer's weights on a device that multiplies them."""
    return scheme.itemsize * sum(scheme.layer_parameters(_largest_layer(model)))


def _head_gradient_bytes(model: ModelShape, scheme: Scheme) -> float:
    """Returns 4 V D, the bytes of a device's unsharded gradient of the head, or of the embedding."""
    stages = scheme.pipeline / scheme.table_stages(model.vocab)
    return 4 * model.vocab * model.hidden / (scheme.model * stages)
