"""A family outside of the package with all that the contract offers, and its mathematics in float64.

A prefix of one Llama layer; then layers that send each token to one of four scales, by the highest score. A bias that
no gradient touches is added to the scores for the choice alone, and moves once a step towards even loads. A term of the
loss pulls the scores' shares towards even ones.
"""

import jax
import jax.numpy as jnp
import numpy as np
from families import llama_layer, mean_loss, norm
from flax import nnx

from jaxmnt.models.attention import Attention
from jaxmnt.models.contract import Buffer, LayerGroup, LayerOutput
from jaxmnt.models.layers import GatedMLP, RMSNorm, weight
from jaxmnt.models.llama import Block, Llama

CHOICES, PULL, RATE = 4, 0.05, 0.01


class Choosing(nnx.Module):
    """x + (share of the chosen) · norm(x) · (scale of the chosen)."""

    def __init__(self, config, rngs):
        self.norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.router = weight(rngs, (config.hidden_size, CHOICES), ("embed", None), 0.5)
        self.scales = weight(rngs, (CHOICES, config.hidden_size), (None, "embed"), 0.5)
        self.bias = Buffer(jnp.zeros(CHOICES, jnp.float32), axes=("buffer",))

    def __call__(self, x_BSD, context):
        h_BSD = self.norm(x_BSD)
        shares_BSE = jax.nn.softmax(h_BSD @ self.router[...], -1)
        chosen_BS = jnp.argmax(shares_BSE + self.bias[...], -1)
        share_BS1 = jnp.take_along_axis(shares_BSE, chosen_BS[..., None], -1)
        loads_E = jnp.sum(jax.nn.one_hot(chosen_BS, CHOICES), (0, 1))
        loss = PULL * jnp.sum(shares_BSE**2)
        return LayerOutput(x_BSD + share_BS1 * h_BSD * self.scales[...][chosen_BS], loss, {"loads": loads_E})


class Pretend(Llama):
    def groups(self):
        return [LayerGroup("prefix", ("llama",), 1), LayerGroup("layers", ("choosing",), self.config.num_layers - 1)]

    def layer(self, kind, rngs):
        return Block(self.config, Attention, rngs) if kind == "llama" else Choosing(self.config, rngs)

    def metrics(self, sums, tokens):
        loads = sums["layers"]["loads"]
        return {"largest_load": jnp.max(loads / jnp.sum(loads, -1, keepdims=True))}

    def update_buffers(self, buffers, sums):
        loads = sums["layers"]["loads"]
        step = RATE * jnp.sign(jnp.mean(loads, -1, keepdims=True) - loads)
        return {"layers": {"bias": buffers["layers"]["bias"] + step}}


class Silent(Block):
    def __call__(self, x_BSD, context):
        return LayerOutput(x_BSD)


class WithoutPrefix(Pretend):
    """Its first layer does nothing."""

    def layer(self, kind, rngs):
        return Silent(self.config, Attention, rngs) if kind == "llama" else super().layer(kind, rngs)


class Unpulled(Choosing):
    def __call__(self, x_BSD, context):
        return super().__call__(x_BSD, context)._replace(loss=None)


class WithoutTerm(Pretend):
    """Its layers have no term of the loss."""

    def layer(self, kind, rngs):
        return Unpulled(self.config, rngs) if kind == "choosing" else super().layer(kind, rngs)


class WithoutBias(Pretend):
    """Its bias stays as it is."""

    def update_buffers(self, buffers, sums):
        return buffers


class Alternating(Pretend):
    """Kinds in turn, of which one alone has buffers."""

    def groups(self):
        return [LayerGroup("layers", ("llama", "choosing"), self.config.num_layers // 2)]

    def metrics(self, sums, tokens):
        return super().metrics({"layers": sums["layers"]["1"]}, tokens)

    def update_buffers(self, buffers, sums):
        new = super().update_buffers({"layers": buffers["layers"]["1"]}, {"layers": sums["layers"]["1"]})
        return {"layers": {"1": new["layers"]}}


class NamedFirstAndLast(Pretend):
    """Its groups have names that the contract itself could use."""

    def groups(self):
        return [LayerGroup("first", ("llama",), 1), LayerGroup("last", ("llama",), self.config.num_layers - 1)]


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
    """Counts the second MLP as used by all tokens: `costs` is the contract's own."""

    def layer(self, kind, rngs):
        return TwoMLPs(self.config, rngs)


class HalfUsed(AllUsed):
    def costs(self, kind):
        costs = super().costs(kind)
        products = (one._replace(share=0.5) if one.name.startswith("second.") else one for one in costs.products)
        return costs._replace(products=tuple(products))


# What the contract does not allow.


class TwoOfAName(Pretend):
    def groups(self):
        return [LayerGroup("layers", ("llama",), 1), LayerGroup("layers", ("choosing",), self.config.num_layers - 1)]


class NamedLikeAnAxis(Pretend):
    def groups(self):
        return [LayerGroup("bias", ("llama",), self.config.num_layers)]


class OneTooMany(Pretend):
    def groups(self):
        return [LayerGroup("layers", ("llama",), self.config.num_layers + 1)]


class Wider(Pretend):
    """Its first layer has an MLP that is wider than the config says."""

    def layer(self, kind, rngs):
        wider = self.config.model_copy(update={"intermediate_size": 2 * self.config.intermediate_size})
        return Block(wider, Attention, rngs) if kind == "llama" else super().layer(kind, rngs)


class UnknownAxis(Pretend):
    def after(self, rngs):
        return super().after(rngs) | {"norm": Odd(self.config.hidden_size, self.config.norm_epsilon)}


class Odd(RMSNorm):
    def __init__(self, width, epsilon):
        super().__init__(width, epsilon)
        self.scale = nnx.Param(jnp.ones(width), axes=("odd",))


class BufferBefore(Pretend):
    def after(self, rngs):
        norm = RMSNorm(self.config.hidden_size, self.config.norm_epsilon)
        norm.bias = Buffer(jnp.zeros(CHOICES), axes=("buffer",))
        return super().after(rngs) | {"norm": norm}


class BareBlock(Block):
    def __call__(self, x_BSD, context):
        return x_BSD


class Bare(Llama):
    def layer(self, kind, rngs):
        return BareBlock(self.config, Attention, rngs)


class Forgetful(Pretend):
    def update_buffers(self, buffers, sums):
        return {}


class Vectors(Pretend):
    def metrics(self, sums, tokens):
        return sums["layers"]


def reference(params, buffers, rows, config, ids):
    """(The loss with the layers' terms, the loads of each layer) of a batch."""

    def of_row(tokens, positions, segments):
        x = params["embedding"]["table"][tokens]
        first = jax.tree.map(lambda leaf: leaf[0], params["prefix"])
        x = llama_layer(first, x, positions, segments, config)
        terms, loads = 0.0, []
        for number in range(config.num_layers - 1):
            p = jax.tree.map(lambda leaf, n=number: leaf[n], params["layers"])
            h = norm(x, p["norm"]["scale"], config.norm_epsilon)
            shares = jax.nn.softmax(h @ p["router"], -1)
            chosen = jnp.argmax(shares + buffers["layers"]["bias"][number], -1)
            terms += PULL * jnp.sum(shares**2)
            loads.append(jnp.bincount(chosen, length=CHOICES))
            x = (
                x
                + jnp.max(jnp.where(jnp.arange(CHOICES) == chosen[:, None], shares, 0), -1)[:, None]
                * h
                * p["scales"][chosen]
            )
        x = norm(x, params["norm"]["scale"], config.norm_epsilon)
        return x @ params["head"]["kernel"], terms, jnp.stack(loads)

    logits, terms, loads = jax.vmap(of_row)(rows["tokens"], rows["positions"], rows["segments"])
    value = mean_loss(logits, rows, ids) + jnp.sum(terms) / np.sum(rows["weights"])
    return value, jnp.sum(loads, 0)


class Raising(Pretend):
    """The same with a mistake."""

    def layer(self, kind, rngs):
        return [][kind]
