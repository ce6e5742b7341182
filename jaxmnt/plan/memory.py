"""What a step needs of a device's memory, from shapes alone: without compiling.

The state, what forward keeps for backward, what backward computes again, and the embedding's gradient are counted. What
else XLA has at the peak is estimated: it is some multiples of a layer's weights and activations in backward, or of the
head's weights in the loss, and with ZeRO 1 and 2 the weights and gradients that are whole. The multiples are fitted to
compiled programs by `benchmarks/plan_estimates.py`.
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
from jaxmnt.training.memory_suggestions import kept_bytes, parameters_of
from jaxmnt.training.spec import StepSpec
from jaxmnt.training.state import abstract_state
from jaxmnt.training.trained import names_of

_TABLE = read_table("multiples.toml")
KINDS: list[str] = _TABLE["kinds"]
"""Kinds of programs: those of a kind have the same arrays at their peak (`kind_of`)."""
MULTIPLES: dict[str, list[float]] = _TABLE["multiples"]
"""By name and kind. A few programs have copies that none of these explains, or places that nothing else fits into."""

Multiples = Mapping[str, float]


def multiples_of(kind: str) -> Multiples:
    """Returns a column of the table."""
    return {name: row[KINDS.index(kind)] for name, row in MULTIPLES.items()}


def kind_of(scheme: Scheme) -> str:
    """Returns which of `KINDS` the program of a scheme is."""
    if scheme.fsdp > 1 and scheme.zero < 3:
        return f"ZeRO {scheme.zero}"
    if scheme.pipeline > 1:
        return "chunks" if scheme.chunks > 1 else "stages"
    if scheme.fsdp == 1:
        return "whole"
    return "sharded both ways" if scheme.model > 1 else "sharded"


class Memory(NamedTuple):
    """Bytes of a device."""

    state: float
    """Parameters and moments."""
    kept: float
    """From forward for backward."""
    rest: float
    in_save: float
    """Besides the state, in a save."""

    @property
    def peak(self) -> float:
        return self.state + max(self.kept + self.rest, self.in_save)


class StateBytes(NamedTuple):
    """Of each parameter, on average over all."""

    parameters: float = 4.0
    moments: float = 8.0
    """Of the optimizer, on the device."""
    gradients: float = 4.0


_ADAMW = StateBytes()
"""Of AdamW in float32."""


def state_bytes(spec: StepSpec) -> StateBytes:
    """Returns what a step's dtypes, its optimizer, and what does not train make of a parameter."""
    count, training = spec.definition.parameter_count, names_of(spec.trained_axes)
    params = parameters_of(spec)
    trained = sum(leaf.size for name, leaf, _ in params if name in training)
    whole = lambda leaves: sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    moments = [] if spec.config.optimizer.offload else jax.tree.leaves(abstract_state(spec)["optimizer"])
    on_device = whole(leaf for leaf in moments if leaf.ndim)
    return StateBytes(whole(leaf for _, leaf, _ in params) / count, on_device / count, 4 * trained / count)


class ResidualBytes:
    """Bytes that a row leaves on a device from forward for backward, in all layers. They are counted once for each
    policy and number of devices that share a layer."""

    def __init__(self, config: Config, vocab: int, devices_of: Callable[[int], Sequence[jax.Device]]):
        """`devices_of` gives so many devices of the kind that is planned for."""
        self._config, self._vocab, self._devices_of = config, vocab, devices_of
        self._known: dict[tuple[str, int], int | None] = {}

    def of_row(self, remat: str, model: int) -> int | None:
        """Returns None for sizes that so many devices cannot share."""
        if (remat, model) not in self._known:
            self._known[remat, model] = None
            with contextlib.suppress(ConfigError):
                self._known[remat, model] = kept_bytes(self._spec(remat, model))
        return self._known[remat, model]

    def state(self) -> StateBytes:
        """Of the config's dtypes, its optimizer, and what does not train. Raises `ConfigError` for a config that no
        mesh could train."""
        return state_bytes(self._spec("full", 1))

    def _spec(self, remat: str, model: int) -> StepSpec:
        """Of one row, on so many devices."""
        one = Candidate(1, 1, 1, model, 1, 1, 1, remat, 3, splits_hosts=True)
        config = self._config.changed(one.settings | {"data.global_batch_size": 1, "model.overlap": "off"})
        return build_spec(config, self._vocab, self._devices_of(model), lambda _: "")


def estimate_memory(
    model: ModelShape,
    scheme: Scheme,
    kept_of_row: float,
    kept_at_most: float,
    state: StateBytes = _ADAMW,
    multiples: Multiples | None = None,
    loss_chunk: float = 2**28,
) -> Memory:
    """Estimates a step's peak: the greatest of what backward, the loss, the embedding's gradient and a save need.

    `kept_of_row` is what a row leaves in all layers (`ResidualBytes`), and `kept_at_most` what it would leave if
    backward computed nothing again. `loss_chunk` are the bytes of logits that the loss makes at a time.
    """
    stages, of = scheme.pipeline, multiples or multiples_of(kind_of(scheme))
    devices, chunks = scheme.model * stages, stages * scheme.chunks
    depth = math.ceil(model.depth / chunks)
    padding = depth * chunks / model.depth
    layers, ends = padding * model.layer_parameters / devices, model.end_parameters / devices
    own = (layers + ends) / scheme.fsdp + model.others / stages
    kept = kept_of_row * scheme.rows * scheme.slots * depth / model.depth
    has_all_gradients = scheme.fsdp > 1 and scheme.zero == 1
    gradients = state.gradients * (layers + ends if has_all_gradients else own)
    last = state.gradients * (0 if model.tied else ends / 2) / (1 if has_all_gradients else scheme.fsdp)
    in_layer = lambda bytes_of_row: bytes_of_row * scheme.rows / model.depth
    again = in_layer(kept_at_most - kept_of_row)  # of a layer, while its backward goes on
    backward = _in_backward(model, scheme, in_layer(kept_of_row), of) + again
    in_loss = gradients
    if scheme.microbatches == 1:  # Those of layers are made when backward begins, and the embedding's comes last.
        gradients, in_loss = gradients - last, 0.0
    # The embedding's comes out whole. With ZeRO 1 it is counted so; with ZeRO 2 no more programs would be met by it.
    leave = _head(model, scheme) if stages == 1 and scheme.zero == 3 else 0.0
    rest = max(backward + gradients, _in_loss(model, scheme, of, loss_chunk) + in_loss, leave + gradients)
    # A save has a second copy of what lies otherwise than it is stored.
    moves = (layers / padding if scheme.chunks > 1 or padding > 1 else 0) + ends * bool(model.vocab % devices)
    stored = state.parameters + state.moments
    if scheme.fsdp > 1 and scheme.zero < 3:
        rest += scheme.item * (layers + ends)
    return Memory(stored * own, kept, rest, stored * moves / scheme.fsdp)


def _in_backward(model: ModelShape, scheme: Scheme, kept: float, of: Multiples) -> float:
    """Estimates what is in memory in backward besides state, gradients, what is kept (`kept` bytes of a layer) and what
    is computed again: weights · c n + wide · c t F / model + narrow · c t D + kept · `kept`, where F is the largest
    number of inputs or outputs of a product, n the weights of the largest layer on a device, t a microbatch's tokens
    and c the bytes of a number."""
    widest = max(product.share * max(product.inputs, product.outputs) for product in _largest(model).products)
    stream = scheme.item * scheme.rows * scheme.length
    arrays = {
        "weights": _weights(model, scheme), "wide": stream * widest / scheme.model, "narrow": stream * model.hidden,
        "kept": kept,
    }  # fmt: skip
    return sum(of[name] * bytes_ for name, bytes_ in arrays.items())


def _in_loss(model: ModelShape, scheme: Scheme, of: Multiples, chunk: float) -> float:
    """Estimates the same in the loss: head · 4 V D + logits · 4 t V / chunks + head_narrow · c t D +
    head_weights · c n, where V is a device's part of the vocabulary."""
    tokens = scheme.rows * scheme.length
    logits = 4 * tokens * model.vocab / (scheme.model * scheme.pipeline)
    chunks = math.ceil(logits / chunk)
    head = of["head" if chunks > 1 else "head_at_once"] * (of["head_tied"] if model.tied else 1)
    bytes_ = head * _head(model, scheme) + of["logits"] * logits / chunks
    stream = of["head_narrow"] * scheme.item * tokens * model.hidden
    return bytes_ + stream + of["head_weights"] * _weights(model, scheme)


def _largest(model: ModelShape) -> LayerCosts:
    return max((layer for _, layer in model.layers), key=lambda layer: layer.parameters)


def _weights(model: ModelShape, scheme: Scheme) -> float:
    """Returns the bytes c n of a layer's weights on a device that multiplies them."""
    return scheme.item * _largest(model).parameters / scheme.model


def _head(model: ModelShape, scheme: Scheme) -> float:
    """Returns the bytes 4 V D of the head's gradient, and of the embedding's, on a device that has all of its part."""
    return 4 * model.vocab * model.hidden / (scheme.model * scheme.pipeline)
