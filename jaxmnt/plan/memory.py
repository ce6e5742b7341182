"""What a step needs of a device's memory, from shapes alone: without compiling.

The state, what forward keeps for backward, what backward computes again, and the embedding's gradient are counted. What
else XLA has at the peak is estimated: it is some multiples of a layer's weights and activations in backward, or of the
head's weights in the loss, and with ZeRO 1 and 2 the weights and gradients that are whole. The multiples are fitted to
compiled programs by `benchmarks/plan_estimates.py`.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from jaxmnt.config.mesh import Mesh, Pipeline
from jaxmnt.config.schema import Config
from jaxmnt.errors import ConfigError
from jaxmnt.plan.workload import Layer, ModelShape, Scheme
from jaxmnt.training.build import build_spec
from jaxmnt.training.levers import kept_bytes
from jaxmnt.training.spec import StepSpec
from jaxmnt.training.state import abstract_state
from jaxmnt.training.trained import names_of


class Multiples(NamedTuple):
    """Of what is in memory at the peak besides what is counted: in backward or in the loss."""

    weights: float
    """In backward, of a layer's weights in bfloat16, as they are multiplied on a device."""
    wide: float
    """In backward, of the MLP's activations."""
    narrow: float
    """In backward, of the residual stream."""
    kept: float
    """In backward, of what forward has kept of a layer, which is cut out of all that is kept."""
    head: float
    """In the loss, of the head's gradient in float32, if the loss is in chunks, whose gradients are added up."""
    head_at_once: float
    """The same of a loss that is in one."""
    head_tied: float
    """Of that, if the head is the embedding."""
    head_narrow: float
    """In the loss, of the residual stream."""
    head_weights: float
    """In the loss, of a layer's weights."""
    logits: float
    """In the loss, of a chunk's in float32."""


MULTIPLES = {
    "sharded": Multiples(1.19, 1.93, 1.08, 0.98, 0.93, 0.53, 1.01, 2.01, 2.50, 3.21),
    "sharded both ways": Multiples(4.75, 0.00, 0.00, 0.77, 0.90, 0.78, 1.09, 2.84, 3.83, 1.60),
    "whole": Multiples(4.42, 0.06, 1.80, 1.06, 1.80, 0.79, 1.51, 2.91, 0.83, 1.12),
    "stages": Multiples(1.80, 0.00, 3.20, 0.53, 1.36, 0.19, 1.07, 4.13, 0.65, 1.41),
    "chunks": Multiples(0.87, 0.77, 3.49, 0.67, 0.50, 0.00, 2.31, 4.49, 2.05, 1.15),
    "ZeRO 2": Multiples(0.00, 1.92, 1.11, 0.14, 0.58, 0.39, 2.23, 5.32, 2.46, 0.08),
    "ZeRO 1": Multiples(0.00, 1.91, 2.09, 0.03, 0.61, 0.00, 2.28, 4.90, 1.97, 0.82),
}
"""By kind of program, fitted by `benchmarks/plan_estimates.py --fit`. A few programs have copies that none of these
explains, or places that nothing else fits into."""


def kind_of(scheme: Scheme) -> str:
    """Which multiples a scheme has: programs of one kind have the same arrays at their peak."""
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
    state, count = abstract_state(spec), spec.definition.parameter_count
    training, names = names_of(spec.trained_axes), names_of(spec.definition.axes)
    params = jax.tree.leaves(state["params"])
    moments = [leaf for leaf in jax.tree.leaves(state["optimizer"]) if leaf.ndim]
    trained = sum(leaf.size for leaf, name in zip(params, names, strict=True) if name in training)
    whole = lambda leaves: sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    on_device = 0 if spec.config.optimizer.offload else whole(moments)
    return StateBytes(whole(params) / count, on_device / count, 4 * trained / count)


class Kept:
    """Bytes that a row leaves on a device from forward for backward, in all layers. They are counted once for each
    policy and number of devices that share a layer."""

    def __init__(self, config: Config, vocab: int, devices_of: Callable[[int], Sequence[jax.Device]]):
        """`devices_of` gives so many devices of the kind that is planned for."""
        self._config, self._vocab, self._devices_of = config, vocab, devices_of
        self._known: dict[tuple[str, int], int | ConfigError] = {}

    def of_row(self, remat: str, model: int) -> int:
        """Raises `ConfigError` for sizes that so many devices cannot share."""
        if (remat, model) not in self._known:
            try:
                self._known[remat, model] = kept_bytes(self._spec(remat, model))
            except ConfigError as error:
                self._known[remat, model] = error
        found = self._known[remat, model]
        if isinstance(found, ConfigError):
            raise found
        return found

    def state(self) -> StateBytes:
        """Of the config's dtypes, its optimizer, and what does not train. Raises `ConfigError` for a config that no
        mesh could train."""
        return state_bytes(self._spec("full", 1))

    def _spec(self, remat: str, model: int) -> StepSpec:
        """Of one row, on so many devices."""
        config = self._config
        one = config.model_copy(
            update={
                "mesh": Mesh(data=1, model=model, allow_split_hosts=True),
                "pipeline": Pipeline(),
                "data": config.data.model_copy(update={"global_batch_size": 1}),
                "train": config.train.model_copy(
                    update={"remat": remat, "microbatch_size": 1, "remat_save": [], "remat_offload": []}
                ),
                "model": config.model.model_copy(update={"overlap": "off"}),
            }
        )
        return build_spec(one, self._vocab, self._devices_of(model), lambda _: "")


def estimate_memory(
    model: ModelShape,
    scheme: Scheme,
    kept_of_row: float,
    kept_at_most: float,
    slots: int = 1,
    state: StateBytes = _ADAMW,
    multiples: Multiples | None = None,
    loss_chunk: float = 2**28,
) -> Memory:
    """A step's peak.

    `kept_of_row` is what a row leaves in all layers (`Kept`), and `kept_at_most` what it would leave if backward
    computed nothing again. A stage keeps at most `slots` microbatches of a chunk.
    `loss_chunk` are the bytes of logits that the loss makes at a time.
    """
    stages, parts = scheme.pipeline, scheme.model
    depth = math.ceil(model.depth / (stages * scheme.chunks))
    padding = depth * stages * scheme.chunks / model.depth
    layers = padding * sum(count * layer.parameters for count, layer in model.layers) / (parts * stages)
    ends = model.vocab * model.hidden * (1 if model.tied else 2) / (parts * stages)
    own = (layers + ends) / scheme.fsdp + model.others / stages
    kept = kept_of_row * scheme.rows * slots * depth / model.depth
    embedding = 0 if model.tied else ends / 2
    gradients, last = state.gradients * own, state.gradients * embedding / scheme.fsdp
    if scheme.fsdp > 1 and scheme.zero == 1:
        gradients, last = state.gradients * (layers + ends), state.gradients * embedding
    of = multiples or MULTIPLES[kind_of(scheme)]
    in_layer = lambda bytes_of_row: bytes_of_row * scheme.rows / model.depth
    again = in_layer(kept_at_most - kept_of_row)  # of a layer, while its backward goes on
    backward = _backward(model, scheme, in_layer(kept_of_row), of) + again
    loss = _loss(model, scheme, of, loss_chunk)
    in_loss = gradients
    if scheme.microbatches == 1:  # Those of layers are made when backward begins, and the embedding's comes last.
        gradients -= last
        in_loss = 0.0
    # The embedding's comes out whole. With ZeRO 1 it is counted so; with ZeRO 2 no more programs would be met by it.
    leave = _head(model, scheme) if stages == 1 and scheme.zero == 3 else 0.0
    rest = max(backward + gradients, loss + in_loss, leave + gradients)
    # A save has a second copy of what lies otherwise than it is stored.
    moves = (layers / padding if scheme.chunks > 1 or padding > 1 else 0) + ends * bool(model.vocab % (parts * stages))
    stored = state.parameters + state.moments
    in_save = stored * moves / scheme.fsdp
    if scheme.fsdp > 1 and scheme.zero < 3:
        rest += scheme.item * (layers + ends)
    return Memory(stored * own, kept, rest, in_save)


def _backward(model: ModelShape, scheme: Scheme, kept: float, of: Multiples) -> float:
    """What is in memory besides state, gradients, what is kept, of a layer `kept`, and what is computed again."""
    largest = _largest(model)
    widest = max(max(one.inputs, one.outputs) for one in largest.products)
    wide = scheme.item * scheme.rows * scheme.length * widest / scheme.model
    narrow = scheme.item * scheme.rows * scheme.length * model.hidden
    return of.weights * _weights(model, scheme) + of.wide * wide + of.narrow * narrow + of.kept * kept


def _loss(model: ModelShape, scheme: Scheme, of: Multiples, chunk: float) -> float:
    """The same in the loss."""
    tokens = scheme.rows * scheme.length
    logits = 4 * tokens * model.vocab / (scheme.model * scheme.pipeline)
    chunks = math.ceil(logits / chunk)
    head = (of.head if chunks > 1 else of.head_at_once) * (of.head_tied if model.tied else 1)
    bytes_ = head * _head(model, scheme) + of.logits * logits / chunks
    return bytes_ + of.head_narrow * scheme.item * tokens * model.hidden + of.head_weights * _weights(model, scheme)


def _largest(model: ModelShape) -> Layer:
    return max((layer for _, layer in model.layers), key=lambda layer: layer.parameters)


def _weights(model: ModelShape, scheme: Scheme) -> float:
    """Bytes of a layer's weights on a device that multiplies them."""
    return scheme.item * _largest(model).parameters / scheme.model


def _head(model: ModelShape, scheme: Scheme) -> float:
    """Bytes of the head's gradient, and of the embedding's, on a device that has all of its part."""
    return 4 * model.vocab * model.hidden / (scheme.model * scheme.pipeline)
