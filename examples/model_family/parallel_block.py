"""A Llama whose attention and MLP read the same norm and are added together, as in PaLM (arXiv:2204.02311, section 2).

The layer also counts how large its activations become, as a metric.
"""

import jax.numpy as jnp

from jaxmnt.models.contract import LayerOutput
from jaxmnt.models.llama import Block, Llama


class ParallelBlock(Block):
    """x + attention(norm(x)) + MLP(norm(x)). Shapes: B batch, S a device's piece of the length, D model."""

    norms = ("attention_norm",)

    def __call__(self, x_BSD, context):
        """Returns the activations, and sums of which `ParallelLlama.metrics` makes numbers."""
        h_BSD = self.attention_norm(x_BSD)
        y_BSD = x_BSD + self.attention(h_BSD, context) + self.mlp(h_BSD, context.placement)
        # Sums are added up over rows, microbatches and devices, so they must be sums over tokens.
        squares = jnp.sum(jnp.square(y_BSD.astype(jnp.float32)))
        return LayerOutput(y_BSD, sums={"squares": squares})


class ParallelLlama(Llama):
    """The family: `model.family: parallel_block.ParallelLlama`."""

    block = ParallelBlock

    def metrics(self, sums, tokens):
        """Returns the largest root mean square of a layer's output; `tokens` is how many tokens there were.

        The sums have an entry for each of the N layers.
        """
        squares_N = sums["layers"]["squares"]
        return {"largest_output_rms": jnp.sqrt(jnp.max(squares_N) / (tokens * self.config.hidden_size))}
