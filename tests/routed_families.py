"""Variants of the family in examples/model_family, and its mathematics in float64.

The variants after the comment line break the contract; the others use another part of it each.
"""

import jax
import jax.numpy as jnp
import numpy as np
from families import llama_layer, mean_loss, norm
from flax import nnx
from routed_scales import LOSS_FACTOR, NUM_SCALES, RoutedLlama, RoutedScales

from jaxmnt.models.attention import Attention
from jaxmnt.models.contract import Buffer, LayerGroup, LayerOutput
from jaxmnt.models.layers import GatedMLP, RMSNorm
from jaxmnt.models.llama import Block, Llama


class Identity(Block):
    def __call__(self, x_BSD, context):
        return LayerOutput(x_BSD)


class WithoutPrefix(RoutedLlama):
    """The first layer returns its input."""

    def layer(self, kind, rngs):
        return Identity(self.config, Attention, rngs) if kind == "llama" else super().layer(kind, rngs)


class WithoutLoss(RoutedScales):
    def __call__(self, x_BSD, context):
        return super().__call__(x_BSD, context)._replace(loss=None)


class WithoutTerm(RoutedLlama):
    """The layers have no term of the loss."""

    def layer(self, kind, rngs):
        return WithoutLoss(self.config, rngs) if kind == "routed" else super().layer(kind, rngs)


class WithoutBias(RoutedLlama):
    """The bias never moves."""

    def update_buffers(self, buffers, sums):
        return buffers


class Alternating(RoutedLlama):
    """Two kinds in turn; only the second has buffers."""

    def groups(self):
        return [LayerGroup("layers", ("llama", "routed"), self.config.num_layers // 2)]

    def metrics(self, sums, tokens):
        return super().metrics({"layers": sums["layers"]["1"]}, tokens)

    def update_buffers(self, buffers, sums):
        new = super().update_buffers({"layers": buffers["layers"]["1"]}, {"layers": sums["layers"]["1"]})
        return {"layers": {"1": new["layers"]}}


class NamedFirstAndLast(RoutedLlama):
    """The groups have names that parts of a definition have, too."""

    def groups(self):
        return [LayerGroup("first", ("llama",), 1), LayerGroup("last", ("llama",), self.config.num_layers - 1)]


class TwoGroups(Llama):
    """Llama's layers in two groups, of three layers and of the rest."""

    def groups(self):
        return [LayerGroup("first", ("layer",), 3), LayerGroup("last", ("layer",), self.config.num_layers - 3)]


class TwoMLPs(Block):
    """A Llama layer with a second MLP for the tokens at even positions."""

    def __init__(self, config, rngs):
        super().__init__(config, Attention, rngs)
        self.second = GatedMLP(config.hidden_size, config.intermediate_size, 0.02, rngs)

    def __call__(self, x_BSD, context):
        even_BS1 = (context.positions_BL % 2 == 0)[..., None]  # on a mesh that does not split the length
        second_BSD = self.second(self.mlp_norm(x_BSD), context.placement)
        return LayerOutput(super().__call__(x_BSD, context).x_BSD + jnp.where(even_BS1, second_BSD, 0))


class AllUsed(Llama):
    """Counts the second MLP as used by all tokens, because it has no `costs` of its own."""

    def layer(self, kind, rngs):
        return TwoMLPs(self.config, rngs)


class HalfUsed(AllUsed):
    def costs(self, kind):
        costs = super().costs(kind)
        is_second = lambda product: product.name.startswith("second.")
        products = (p._replace(share=0.5) if is_second(p) else p for p in costs.products)
        return costs._replace(products=tuple(products))


def reference(params, buffers, rows, config, ids):
    """Returns a batch's loss with the terms of its layers, and the loads of each layer (N, E)."""

    def of_row(tokens, positions, segments):
        x = params["embedding"]["table"][tokens]
        first = jax.tree.map(lambda leaf: leaf[0], params["prefix"])
        x = llama_layer(first, x, positions, segments, config)
        terms, loads = 0.0, []
        for layer in range(config.num_layers - 1):
            p = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["layers"])
            h = norm(x, p["norm"]["scale"], config.norm_epsilon)
            probabilities = jax.nn.softmax(h @ p["router"], -1)
            scale_ids = jnp.argmax(probabilities + buffers["layers"]["bias"][layer], -1)
            terms += LOSS_FACTOR * jnp.sum(probabilities**2)
            loads.append(jnp.bincount(scale_ids, length=NUM_SCALES))
            is_selected = jnp.arange(NUM_SCALES) == scale_ids[:, None]
            probability = jnp.max(jnp.where(is_selected, probabilities, 0), -1)[:, None]
            x = x + probability * h * p["scales"][scale_ids]
        x = norm(x, params["norm"]["scale"], config.norm_epsilon)
        return x @ params["head"]["kernel"], terms, jnp.stack(loads)

    logits, terms, loads = jax.vmap(of_row)(rows["tokens"], rows["positions"], rows["segments"])
    loss = mean_loss(logits, rows, ids) + jnp.sum(terms) / np.sum(rows["weights"])
    return loss, jnp.sum(loads, 0)


# -- variants that break the contract


class DuplicateGroup(RoutedLlama):
    def groups(self):
        return [LayerGroup("layers", ("llama",), 1), LayerGroup("layers", ("routed",), self.config.num_layers - 1)]


class NamedLikeAnAxis(RoutedLlama):
    def groups(self):
        return [LayerGroup("bias", ("llama",), self.config.num_layers)]


class TooManyLayers(RoutedLlama):
    def groups(self):
        return [LayerGroup("layers", ("llama",), self.config.num_layers + 1)]


class WiderFirstLayer(RoutedLlama):
    """The first layer has an MLP that is wider than the config says."""

    def layer(self, kind, rngs):
        wider = self.config.model_copy(update={"intermediate_size": 2 * self.config.intermediate_size})
        return Block(wider, Attention, rngs) if kind == "llama" else super().layer(kind, rngs)


class UnknownAxis(RoutedLlama):
    def after(self, rngs):
        return super().after(rngs) | {"norm": NormOnUnknownAxis(self.config.hidden_size, self.config.norm_epsilon)}


class NormOnUnknownAxis(RMSNorm):
    def __init__(self, width, epsilon):
        super().__init__(width, epsilon)
        self.scale = nnx.Param(jnp.ones(width), axes=("odd",))


class BufferOutsideLayers(RoutedLlama):
    def after(self, rngs):
        norm = RMSNorm(self.config.hidden_size, self.config.norm_epsilon)
        norm.bias = Buffer(jnp.zeros(NUM_SCALES), axes=("buffer",))
        return super().after(rngs) | {"norm": norm}


class ArrayBlock(Block):
    def __call__(self, x_BSD, context):
        return x_BSD


class ReturnsArray(Llama):
    def layer(self, kind, rngs):
        return ArrayBlock(self.config, Attention, rngs)


class ReturnsNoBuffers(RoutedLlama):
    def update_buffers(self, buffers, sums):
        return {}


class ReturnsVectors(RoutedLlama):
    def metrics(self, sums, tokens):
        return sums["layers"]


class Raising(RoutedLlama):
    """Has a mistake in a method."""

    def layer(self, kind, rngs):
        return [][kind]
