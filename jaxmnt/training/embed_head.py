"""What lies before the first layer and after the last: embedding, final norm, head and loss, of one microbatch.

The vocabulary is split over `pipeline` and `model` together, so that every stage does a share of the head's work and
none waits for another that has it all; what the stages exchange for it is the microbatch's activations, not the tables.
All functions run on every stage at once.

Shapes: B batch, L length, S a device's piece of the length, D model, V a device's part of the vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmnt.models.decoder import Params, look_up, look_up_gradient
from jaxmnt.parallel import collectives
from jaxmnt.training.loss import LossShape, LossSums, chunk_count, cross_entropy, cross_entropy_and_gradients
from jaxmnt.training.spec import Batch, StepSpec


class EmbedAndHead:
    """The ends of the model with this device's `params`, gathered when they are used unless `whole` already."""

    def __init__(self, spec: StepSpec, params: Params, *, whole: bool):
        self._spec, self._params, self._whole = spec, params, whole
        self._tied = spec.config.model.tie_embeddings
        self.last = ("norm", "embedding" if self._tied else "head")
        """The parameters after the last layer."""

    def embed(self, rows: Batch) -> jax.Array:
        """[B, S, D], the first layer's input."""
        placement = self._spec.placement
        x_BLD = look_up(self._use("embedding")["table"], rows["tokens"], placement)
        # Each part of the vocabulary has the rows of its own tokens, so these sums have one term that is not 0.
        x_BSD = collectives.scatter_sequence(x_BLD, placement, "vocab")
        return collectives.sum_over_stages(x_BSD, placement)

    def embed_gradient(self, x_gradient_BSD: jax.Array, rows: Batch) -> Params:
        """The gradient of `embedding` from that of the first stage's input, which is read from that stage."""
        placement = self._spec.placement
        x_gradient_BSD = collectives.broadcast_from_stage(x_gradient_BSD, 0, placement)
        x_gradient_BLD = collectives.gather_sequence(x_gradient_BSD, placement)
        size = self._params["embedding"]["table"].shape[0]
        return {"embedding": {"table": look_up_gradient(x_gradient_BLD, rows["tokens"], size, placement)}}

    def loss(self, y_BSD: jax.Array, rows: Batch) -> LossSums:
        """Sums of the loss from the last stage's output."""
        x_BSD = self._norm(self._params["norm"], self._last(y_BSD))
        x_BLD = collectives.gather_sequence(x_BSD, self._spec.placement)
        return cross_entropy(x_BLD, self._head(), rows["targets"], rows["weights"], self._shape(rows))

    def loss_and_gradients(self, y_BSD: jax.Array, rows: Batch) -> tuple[LossSums, jax.Array, Params]:
        """`loss`, and its gradients with respect to the last stage's output and to `norm` and the head."""
        placement = self._spec.placement
        x_BSD, norm_backward = jax.vjp(self._norm, self._params["norm"], self._last(y_BSD))
        x_BLD = collectives.gather_sequence(x_BSD, placement)
        sums, gradients = cross_entropy_and_gradients(
            x_BLD, self._head(), rows["targets"], rows["weights"], self._shape(rows)
        )
        x_gradient_BSD = collectives.scatter_sequence(gradients.x, placement, "vocab")
        x_gradient_BSD = collectives.sum_over_stages(x_gradient_BSD, placement)
        norm_gradient, y_gradient_BSD = norm_backward(x_gradient_BSD)
        if placement.stages > 1:  # every stage has computed it: one says it
            last = jax.lax.axis_index("pipeline") == placement.stages - 1
            norm_gradient = jax.tree.map(lambda g: jnp.where(last, g, 0), norm_gradient)
        head = {"table": gradients.head.T} if self._tied else {"kernel": gradients.head}
        return sums, y_gradient_BSD, dict(zip(self.last, (norm_gradient, head), strict=True))

    def logits(self, y_BSD: jax.Array) -> jax.Array:
        """[B, L, V] in float32, from the output of the last layer; without a pipeline."""
        x_BSD = self._norm(self._params["norm"], y_BSD)
        x_BLD = collectives.gather_sequence(x_BSD, self._spec.placement)
        return jnp.dot(x_BLD, self._head(), preferred_element_type=jnp.float32)

    def _use(self, name: str) -> Params:
        spec, params = self._spec, self._params[name]
        if self._whole:
            return params
        axes = spec.definition.axes[name]
        return collectives.unshard(params, axes, spec.placement, spec.dtype)

    def _head(self) -> jax.Array:
        return self._use("embedding")["table"].T if self._tied else self._use("head")["kernel"]

    def _norm(self, params: Any, x_BSD: jax.Array) -> jax.Array:
        return self._spec.definition.part("norm", params)(x_BSD)

    def _last(self, y_BSD: jax.Array) -> jax.Array:
        return collectives.broadcast_from_stage(y_BSD, self._spec.placement.stages - 1, self._spec.placement)

    def _shape(self, rows: Batch) -> LossShape:
        spec, train = self._spec, self._spec.config.train
        vocab = spec.definition.vocab_size
        chunks = chunk_count(rows["targets"].size, vocab, spec.placement, train.loss_chunk_mib)
        return LossShape(chunks, spec.data_vocab_size, train.z_loss, spec.placement)
