"""What a step is estimated from: what a model computes, how that is spread over devices, and what an implementation
does of its own. No JAX.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Product(NamedTuple):
    """A weight of a layer that multiplies every token."""

    inputs: int
    outputs: int
    split: str
    """What tensor parallelism splits: `outputs`, `inputs`, or nothing."""


class Layer(NamedTuple):
    """What a layer computes."""

    products: tuple[Product, ...]
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def parameters(self) -> int:
        return sum(one.inputs * one.outputs for one in self.products)


@dataclass(frozen=True)
class ModelShape:
    """What a model computes."""

    layers: tuple[tuple[int, Layer], ...]
    """How many there are of each kind."""
    hidden: int
    vocab: int
    tied: bool = False
    others: int = 0
    """Parameters that multiply nothing, such as scales and learned positions."""

    @property
    def depth(self) -> int:
        return sum(count for count, _ in self.layers)

    @property
    def parameters(self) -> int:
        ends = self.vocab * self.hidden * (1 if self.tied else 2)
        return sum(count * layer.parameters for count, layer in self.layers) + ends + self.others


def decoder(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocab: int,
    *,
    gated: bool = True,
    tied: bool = False,
    head_dim: int | None = None,
) -> ModelShape:
    """Of a plain decoder: attention and an MLP in each layer, gated as Llama's or not as GPT's."""
    head_dim = head_dim or hidden // heads
    products = (
        Product(hidden, (heads + 2 * kv_heads) * head_dim, "outputs"),
        Product(heads * head_dim, hidden, "inputs"),
        Product(hidden, (2 if gated else 1) * intermediate, "outputs"),
        Product(intermediate, hidden, "inputs"),
    )
    return ModelShape(((layers, Layer(products, heads, kv_heads, head_dim)),), hidden, vocab, tied)


@dataclass(frozen=True)
class Scheme:
    """How a step is spread over devices."""

    length: int
    """Of a row, in tokens."""
    rows: int
    """Of a microbatch on a batch shard."""
    microbatches: int
    data: int = 1
    pipeline: int = 1
    fsdp: int = 1
    context: int = 1
    model: int = 1
    zero: int = 3
    """ZeRO stage over `fsdp`."""
    chunks: int = 1
    """Pieces of the model that a stage has."""
    idle: float | None = None
    """A stage's idle time as a share of its work; None: (stages - 1) / (microbatches * chunks)."""
    remat: str = "none"
    """What backward computes again: a key of `AGAIN`."""
    dtype: str = "bfloat16"
    """Of products: also `float8`, of which all else is in bfloat16, and `float32`."""
    float8_least: int = 0
    """Inputs and outputs that a product has at least if it is in float8: `train.float8_least`."""
    ticks: int | None = None
    """Of a pipeline in which all stages hand on at once; None: a stage hands on what it has."""
    kept: float = 0.0
    """Bytes that a microbatch leaves on a device from forward for backward, if they are copied to a place of their
    own, and from it."""

    @property
    def item(self) -> int:
        """Bytes of a number that is no float8."""
        return 4 if self.dtype == "float32" else 2

    @property
    def devices(self) -> int:
        return self.data * self.pipeline * self.fsdp * self.context * self.model

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.length * self.rows * self.microbatches * self.data * self.fsdp

    @property
    def idle_share(self) -> float:
        return (self.pipeline - 1) / (self.microbatches * self.chunks) if self.idle is None else self.idle


class Again(NamedTuple):
    """Shares of a layer's forward that backward computes again."""

    products: float
    attention: float
    elementwise: float


AGAIN = {
    "none": Again(0, 0, 0),
    "attention": Again(0, 0, 0),
    "dots": Again(0, 1, 1),
    "full": Again(1, 1, 1),
    "half_the_products": Again(0.5, 0, 1),
    "half_the_layers": Again(0.5, 0.5, 0.5),
}
"""By policy. The last two are torchtitan's selective ones: of operations, and of layers."""


@dataclass(frozen=True)
class Software:
    """What an implementation does of its own. `shapes.software_of` is this one's."""

    passes: float = 1.0
    """How often element-wise work reads and writes memory, in times of a program that fuses all it can."""
    weight_bytes: float = 0.0
    """Read and written for each weight of a layer in a microbatch, besides products: casts, copies, and the gradient
    that is added up."""
    attention: float = 1.0
    """The rate of its attention, in times of the generation's best kernels; 0: scores go through memory."""
    sequence_parallel: bool = True
    """Whether what lies between tensor-parallel products is split over the length, and gathered and scattered."""
    hides_gathers: float = 0.9
    """The share of a layer's work behind which gathers of weights and scatters of gradients can be."""
    hides_ends: float = 1.0
    """The share of the embedding's and the head's gathers and scatters that is behind work."""
    least_exposed: float = 0.0
    """The share of gathers of weights and scatters of gradients that is behind nothing, however much work there is."""
    hides_sum: float = 0.9
    """The share of the last microbatch's backward behind which gradients are summed over `data`."""
    hides_model: float = 0.0
    """The share of communication over `model` that is behind products."""
    gradient_bytes: int = 4
    """Of each number that is reduced."""
    head_everywhere: bool = True
    """Whether all stages of a pipeline share the head, or the last one has it."""
    exposes_stages: float = 0.1
    """The share of what stages hand to each other that is behind nothing."""
    kernels_a_layer: int = 0
    """Kernels forward that the host starts one by one; 0: the program is one."""


PLAIN = Software()
"""Of nobody in particular."""
