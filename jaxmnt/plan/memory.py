"""Estimates a step's device memory from shapes alone, without compiling.

The state, the residuals that forward keeps for backward, recomputed activations, and the embedding's gradient are
counted. The rest of XLA's peak is estimated: multiples of a layer's weights and activations in backward, or of the
head's weights in the loss, and with ZeRO 1 and 2 the unsharded weights and gradients. `benchmarks/plan_estimates.py`
fits the multiples to compiled programs.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

from jaxmnt.config.schema import Config
from jaxmnt.errors import ConfigError
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
"""Kinds of programs. Programs of one kind have the same arrays at their peak (`kind_of`)."""
MULTIPLES: dict[str, list[float]] = _TABLE["multiples"]
"""Multiples by name and kind. They do not explain all copies and all fragmentation of every program."""

Multiples = Mapping[str, float]


def multiples_of(kind: str) -> Multiples:
    """Returns the column of the table for a kind."""
    return {name: row[KINDS.index(kind)] for name, row in MULTIPLES.items()}


def kind_of(scheme: Scheme) -> str:
    """Returns the kind of a scheme's program, one of `KINDS`."""
    if scheme.fsdp > 1 and scheme.zero < 3:
        return f"ZeRO {scheme.zero}"
    if scheme.pipeline > 1:
        return "chunks" if scheme.chunks > 1 else "stages"
    if scheme.fsdp == 1:
        return "whole"
    return "sharded both ways" if scheme.model > 1 else "sharded"


class Memory(NamedTuple):
    """Bytes per device."""

    state: float
    """Parameters and moments."""
    residuals: float
    """Saved by forward for backward."""
    rest: float
    in_save: float
    """Extra bytes during a save, besides the state."""

    @property
    def peak(self) -> float:
        return self.state + max(self.residuals + self.rest, self.in_save)


class StateBytes(NamedTuple):
    """Bytes per parameter, averaged over all parameters."""

    parameters: float = 4.0
    moments: float = 8.0
    """Optimizer moments on the device."""
    gradients: float = 4.0


_ADAMW = StateBytes()
"""Bytes of AdamW in float32."""


def state_bytes(spec: StepSpec) -> StateBytes:
    """Returns the bytes per parameter, from a step's dtypes, its optimizer, and its frozen parameters."""
    count, trained_names = spec.definition.parameter_count, axes_by_name(spec.trained_axes)
    params = parameters_of(spec)
    trained = sum(leaf.size for name, leaf, _ in params if name in trained_names)
    bytes_of = lambda leaves: sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    moments = [] if spec.config.optimizer.offload else jax.tree.leaves(abstract_state(spec)["optimizer"])
    on_device = bytes_of(leaf for leaf in moments if leaf.ndim)
    return StateBytes(
        parameters=bytes_of(leaf for _, leaf, _ in params) / count,
        moments=on_device / count,
        gradients=4 * trained / count,
    )


class ResidualBytes:
    """Bytes of residuals per row and device in all layers, that forward saves for backward. Computed once for each
    remat policy and number of devices that share a layer."""

    def __init__(self, config: Config, vocab: int, devices_of: Callable[[int], Sequence[jax.Device]]):
        """`devices_of` returns a number of devices of the planned kind."""
        self._config, self._vocab, self._devices_of = config, vocab, devices_of
        self._cache: dict[tuple[str, int], int | None] = {}

    def of_row(self, remat: str, model: int) -> int | None:
        """Returns None if this number of devices cannot share the model."""
        if (remat, model) not in self._cache:
            self._cache[remat, model] = None
            with contextlib.suppress(ConfigError):
                self._cache[remat, model] = residual_bytes(self._spec(remat, model))
        return self._cache[remat, model]

    def state(self) -> StateBytes:
        """Returns the bytes per parameter, from the config's dtypes, its optimizer, and its frozen parameters. Raises
        `ConfigError` for a config that cannot train on any mesh."""
        return state_bytes(self._spec("full", 1))

    def _spec(self, remat: str, model: int) -> StepSpec:
        """Builds the step for one row on `model` devices."""
        candidate = Candidate(1, 1, 1, model, 1, 1, 1, remat, 3, splits_hosts=True)
        config = self._config.changed(candidate.settings | {"data.global_batch_size": 1, "model.overlap": "off"})
        return build_spec(config, self._vocab, self._devices_of(model), lambda _: "")


def estimate_memory(
    model: ModelShape,
    scheme: Scheme,
    row_residuals: float,
    row_residuals_without_remat: float,
    state: StateBytes = _ADAMW,
    multiples: Multiples | None = None,
    loss_chunk: float = 2**28,
) -> Memory:
    """Estimates a step's peak: the maximum over backward, the loss, the embedding's gradient, and a save.

    `row_residuals` are the bytes that a row saves in all layers (`ResidualBytes`), `row_residuals_without_remat` those
    that it would save if backward recomputed nothing. `loss_chunk` is the size of a chunk of logits in bytes.
    """
    stages, multiples = scheme.pipeline, multiples or multiples_of(kind_of(scheme))
    devices, chunks = scheme.model * stages, stages * scheme.chunks
    depth = math.ceil(model.depth / chunks)
    padding = depth * chunks / model.depth

    # Parameters per device: of the layers and the ends before sharding over `fsdp`, and all as they are stored.
    layers, ends = padding * model.layer_parameters / devices, model.end_parameters / devices
    stored_parameters = (layers + ends) / scheme.fsdp + model.other_parameters / stages
    residuals = row_residuals * scheme.rows * scheme.slots * depth / model.depth

    has_all_gradients = scheme.fsdp > 1 and scheme.zero == 1
    gradients = state.gradients * (layers + ends if has_all_gradients else stored_parameters)
    embedding_gradient = state.gradients * (0 if model.tied else ends / 2) / (1 if has_all_gradients else scheme.fsdp)
    gradients_in_loss = gradients
    if scheme.microbatches == 1:
        # Layer gradients are allocated when backward begins, and the embedding's comes last.
        gradients, gradients_in_loss = gradients - embedding_gradient, 0.0

    # One layer at a time is recomputed, while its backward runs.
    per_layer = lambda row_bytes: row_bytes * scheme.rows / model.depth
    recomputed = per_layer(row_residuals_without_remat - row_residuals)
    in_backward = _in_backward(model, scheme, per_layer(row_residuals), multiples) + recomputed
    in_loss = _in_loss(model, scheme, multiples, loss_chunk)
    # The embedding's gradient is computed unsharded. With ZeRO 1 that is counted above; with ZeRO 2, counting it would
    # not improve the estimates.
    in_embedding = _head(model, scheme) if stages == 1 and scheme.zero == 3 else 0.0
    rest = max(in_backward + gradients, in_loss + gradients_in_loss, in_embedding + gradients)
    if scheme.fsdp > 1 and scheme.zero < 3:
        rest += scheme.itemsize * (layers + ends)

    # A save holds a second copy of arrays whose stored layout differs from the one in memory.
    moved = (layers / padding if scheme.chunks > 1 or padding > 1 else 0) + ends * bool(model.vocab % devices)
    state_per_parameter = state.parameters + state.moments
    return Memory(
        state=state_per_parameter * stored_parameters,
        residuals=residuals,
        rest=rest,
        in_save=state_per_parameter * moved / scheme.fsdp,
    )


def _in_backward(model: ModelShape, scheme: Scheme, residuals: float, multiples: Multiples) -> float:
    """Estimates the memory during backward besides state, gradients, residuals (`residuals` bytes per layer) and
    recomputed activations: weights · c n + wide · c t F / model + narrow · c t D + kept · `residuals`, where F is the
    largest number of inputs or outputs of a product, n the weights of the largest layer on a device, t the tokens of a
    microbatch and c the bytes per number."""
    widest = max(product.share * max(product.inputs, product.outputs) for product in _largest(model).products)
    stream = scheme.itemsize * scheme.rows * scheme.length
    arrays = {
        "weights": _weights(model, scheme), "wide": stream * widest / scheme.model, "narrow": stream * model.hidden,
        "kept": residuals,
    }  # fmt: skip
    return sum(multiples[name] * bytes_ for name, bytes_ in arrays.items())


def _in_loss(model: ModelShape, scheme: Scheme, multiples: Multiples, chunk: float) -> float:
    """Estimates the same memory during the loss: head · 4 V D + logits · 4 t V / chunks + head_narrow · c
    t D + head_weights · c n, where V is a device's part of the vocabulary."""
    tokens = scheme.rows * scheme.length
    logits = 4 * tokens * model.vocab / (scheme.model * scheme.pipeline)
    chunks = math.ceil(logits / chunk)
    head = multiples["head" if chunks > 1 else "head_at_once"] * (multiples["head_tied"] if model.tied else 1)
    bytes_ = head * _head(model, scheme) + multiples["logits"] * logits / chunks
    stream = multiples["head_narrow"] * scheme.itemsize * tokens * model.hidden
    return bytes_ + stream + multiples["head_weights"] * _weights(model, scheme)


def _largest(model: ModelShape) -> LayerCosts:
    return max((layer for _, layer in model.layers), key=lambda layer: layer.parameters)


def _weights(model: ModelShape, scheme: Scheme) -> float:
    """Returns c n, the bytes of a layer's weights on a device when it multiplies them."""
    return scheme.itemsize * _largest(model).parameters / scheme.model


def _head(model: ModelShape, scheme: Scheme) -> float:
    """Returns 4 V D, the bytes of a device's full gradient of the head, or of the embedding."""
    return 4 * model.vocab * model.hidden / (scheme.model * scheme.pipeline)
