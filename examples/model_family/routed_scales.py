"""A Llama in which each token selects one of four scales: a layer of another kind with every part of the contract.

The first layer is Llama's. Each layer after it has a router, as a mixture of experts has, but the experts are vectors.
Two things keep the loads of the scales even: a term of the loss that is smallest for even probabilities, and a bias
without a gradient, which each step moves towards the scales that were selected too rarely (arXiv:2408.15664).

Shapes: B batch, S a device's piece of the length, D model, E scales, N layers.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmnt.models.attention import Attention
from jaxmnt.models.contract import Buffer, LayerGroup, LayerOutput
from jaxmnt.models.layers import RMSNorm, weight
from jaxmnt.models.llama import Block, Llama

NUM_SCALES = 4
LOSS_FACTOR = 0.05
BIAS_STEP = 0.01


class RoutedScales(nnx.Module):
    """x + probability · norm(x) · scale, for the scale that the token selects."""

    def __init__(self, config, rngs):
        self.norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        # Logical axes decide how the mesh divides a parameter. An axis without a name is never divided.
        self.router = weight(rngs, (config.hidden_size, NUM_SCALES), ("embed", None), 0.5)
        self.scales = weight(rngs, (NUM_SCALES, config.hidden_size), (None, "embed"), 0.5)
        self.bias = Buffer(jnp.zeros(NUM_SCALES, jnp.float32), axes=("buffer",))

    def __call__(self, x_BSD, context):
        """Returns the activations, the layer's term of the loss (a sum over tokens) and the loads."""
        h_BSD = self.norm(x_BSD)
        probabilities_BSE = jax.nn.softmax(h_BSD @ self.router[...], -1)
        # The bias takes part in the selection alone, so that it needs no gradient.
        scale_ids_BS = jnp.argmax(probabilities_BSE + self.bias[...], -1)
        probability_BS1 = jnp.take_along_axis(probabilities_BSE, scale_ids_BS[..., None], -1)
        y_BSD = x_BSD + probability_BS1 * h_BSD * self.scales[...][scale_ids_BS]
        loads_E = jnp.sum(jax.nn.one_hot(scale_ids_BS, NUM_SCALES), (0, 1))
        return LayerOutput(y_BSD, LOSS_FACTOR * jnp.sum(probabilities_BSE**2), {"loads": loads_E})


class RoutedLlama(Llama):
    """The family: `model.family: routed_scales.RoutedLlama`."""

    def groups(self):
        """Returns the groups of layers, in the model's order: their names, kinds of layers and repeats."""
        return [LayerGroup("prefix", ("llama",), 1), LayerGroup("layers", ("routed",), self.config.num_layers - 1)]

    def layer(self, kind, rngs):
        """Returns a new layer of a kind."""
        return Block(self.config, Attention, rngs) if kind == "llama" else RoutedScales(self.config, rngs)

    def metrics(self, sums, tokens):
        """Returns the largest share of a layer's tokens that selected the same scale."""
        loads_NE = sums["layers"]["loads"]
        return {"largest_load": jnp.max(loads_NE / jnp.sum(loads_NE, -1, keepdims=True))}

    def update_buffers(self, buffers, sums):
        """Returns the biases of the next step, from the loads of all tokens of this step."""
        loads_NE = sums["layers"]["loads"]
        towards_even_NE = jnp.sign(jnp.mean(loads_NE, -1, keepdims=True) - loads_NE)
        return {"layers": {"bias": buffers["layers"]["bias"] + BIAS_STEP * towards_even_NE}}
