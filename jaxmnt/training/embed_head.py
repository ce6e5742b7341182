"""The ends of the model for one microbatch: the embedding, and the final norm, head and loss.

All stages share the work of the embedding for the first stage, and of the loss for the last stage, so that no stage
waits for another (`parallel.stages`). All functions run on every stage at once. The family defines what they compute,
and JAX derives the gradients.

Shapes: B batch, L length, S a device's piece of the length, D model, V a device's part of the vocabulary, T tokens of a
stage's share of S. Unless stages divide the tokens, [1, T] stands for [B, S].
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxmnt.models.contract import Params
from jaxmnt.parallel import collectives, stages
from jaxmnt.training.loss import HeadWeights, LossChunks, LossSums, chunk_count, chunked_loss
from jaxmnt.training.spec import Batch, StepSpec
from jaxmnt.training.weights import Weights


class EmbedAndHead:
    """The ends of the model on this device: the embedding, and the final norm, head and loss."""

    def __init__(self, spec: StepSpec, weights: Weights):
        self._spec, self._weights = spec, weights
        self._family = spec.definition.family

    def embed(self, rows: Batch) -> Array:
        """Returns the first layer's input, [B, S, D], on the first stage."""
        return self._embed(self._float32_ends(self._spec.definition.modules_before), rows)

    def embed_gradient(self, x_gradient_BSD: Array, rows: Batch) -> Params:
        """Returns the gradients of the parameters before the first layer, from the gradient of the first stage's input.
        Of `x_gradient_BSD`, only the first stage's is used."""
        params = self._float32_ends(self._spec.definition.modules_before)
        _, backward = jax.vjp(lambda params: self._embed(params, rows), params)
        return backward(x_gradient_BSD)[0]

    def loss(self, y_BSD: Array, rows: Batch) -> LossSums:
        """Returns the loss sums of this stage's tokens of a microbatch, from the last stage's output."""
        return self._loss(self._float32_ends(self._spec.definition.modules_after), y_BSD, rows)

    def loss_and_gradients(self, y_BSD: Array, rows: Batch) -> tuple[LossSums, Array, Params]:
        """Returns the loss sums of this stage's tokens, and the loss's gradients with respect to the last stage's
        output and to the parameters after the last layer."""
        params = self._float32_ends(self._spec.definition.modules_after)
        sums, backward = jax.vjp(lambda params, y_BSD: self._loss(params, y_BSD, rows), params, y_BSD)
        gradients, y_gradient_BSD = backward(sums.gradient_of_loss)
        return sums, y_gradient_BSD, gradients

    def logits(self, y_BSD: Array) -> Array:
        """Returns logits [B, L, V] in float32 from the output of the last layer, without a pipeline."""
        ends = self._spec.definition.ends(self._float32_ends(self._spec.definition.modules_after))
        x_BLD = self._head_input(ends, y_BSD)
        head_DV = self._family.head_weight(ends).astype(self._spec.dtype)
        product_TV = jnp.dot(x_BLD.reshape(-1, x_BLD.shape[-1]), head_DV, preferred_element_type=jnp.float32)
        return self._family.finish_logits(ends, product_TV).reshape(*x_BLD.shape[:-1], -1)

    def _embed(self, params: Params, rows: Batch) -> Array:
        spec = self._spec
        placement, ends = spec.placement, spec.definition.ends(params)
        tokens, positions = (stages.share_of_tokens(rows[name], placement) for name in ("tokens", "positions"))
        x = self._family.embed(ends, tokens, positions, spec.dtype, placement)
        # A device has only the rows for its own part of the vocabulary, so each of these sums has one nonzero term.
        x_1TD = collectives.scatter_sequence(x.astype(spec.dtype), placement, "vocab")
        row_count, length = rows["tokens"].shape
        shape = (row_count, length // placement.num_shards("sequence"))
        return stages.collect_on_stage(x_1TD, 0, shape, placement)

    def _loss(self, params: Params, y_BSD: Array, rows: Batch) -> LossSums:
        spec, definition = self._spec, self._spec.definition
        train, placement = spec.config.train, spec.placement
        ends = definition.ends(params)
        x = self._head_input(ends, stages.distribute_from_stage(y_BSD, placement.stages - 1, placement))
        share = jax.tree.map(lambda field_BL: stages.share_of_tokens(field_BL, placement), rows)
        chunks = LossChunks(
            chunks=chunk_count(share["targets"].size, definition.vocab_size, placement, train.loss_chunk_mib),
            data_vocab_size=spec.data_vocab_size,
            dtype=spec.dtype,
            placement=placement,
            finish=lambda params, logits_CV: self._family.finish_logits(definition.ends(params), logits_CV),
            loss=lambda logits, tokens: spec.loss(logits, tokens, train),
            reported=spec.reported,
        )
        finishing_params = {name: params[name] for name in self._family.finishing}
        return chunked_loss(chunks, x, HeadWeights(self._family.head_weight(ends), finishing_params), share)

    def _head_input(self, ends: dict[str, Any], y_BSD: Array) -> Array:
        """Returns the head's input, [B, L, D] in the compute dtype, from the output of the last layer."""
        x_BSD = self._family.final_norm(ends, y_BSD).astype(self._spec.dtype)
        return collectives.gather_sequence(x_BSD, self._spec.placement)

    def _float32_ends(self, names: tuple[str, ...]) -> Params:
        """Returns the weights of the ends of the model with these names, as float32 so that autodiff gives float32
        gradients. XLA removes the two casts, so the weights are communicated and multiplied in the compute dtype."""
        return jax.tree.map(lambda weight: weight.astype(jnp.float32), self._weights.ends(names))
