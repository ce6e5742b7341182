"""The estimate of a step (`jaxmnt/plan/estimate.py`) with what other frameworks do otherwise, from their documents."""

from dataclasses import dataclass, replace

from jaxmnt.config.load import parse_config
from jaxmnt.models.contract import AttentionShape, LayerCosts, Product, define
from jaxmnt.models.registry import build_family
from jaxmnt.plan.estimate import Estimate, Link, ProgramTraits, Step, Work
from jaxmnt.plan.rates import Rates
from jaxmnt.plan.workload import ModelShape, Scheme, model_shape
from jaxmnt.telemetry.flops import RECOMPUTE_SHARES, RecomputeShare

FLASH_2 = {"ampere": 1.0, "hopper": 0.65}
"""FlashAttention 2 in times of the best kernel: 370 of 600 TFLOP/s forward on an H100 (Shah et al. 2024,
arXiv:2407.08608)."""
FLASH_1 = {"ampere": 0.6, "hopper": 0.4}
"""Its predecessor in Triton: 100 to 140 TFLOP/s on an A100, of 190 (Dao 2023, arXiv:2307.08691)."""

UNFUSED, FUSED_SINGLY = 2.7, 1.1
"""Bytes that element-wise work moves in times of a program that fuses all it can. By counting operations: torchtitan
without a compiler has RMSNorm in float32 and rotation of complex numbers, an operation at a time: 84 bytes for each
number of the residual stream instead of 18, 20 for those of queries and keys instead of 4, 10 for the MLP's instead of
6. llm-foundry has kernels of its own for these, in bfloat16."""


SCORE_PASSES = 8
"""Reads and writes of attention's scores that go through memory: for the products, the mask, the softmax, its
dropout."""
LAUNCH_SECONDS = 4e-6
"""For each kernel that the host starts."""
ALL_RECOMPUTE_SHARES = RECOMPUTE_SHARES | {
    "half_the_products": RecomputeShare(0.5, 0, 1),
    "half_the_layers": RecomputeShare(0.5, 0.5, 0.5),
}
"""With torchtitan's selective policies: of operations, and of layers."""


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
) -> ModelShape:
    """A plain decoder: attention and an MLP in each layer, gated as Llama's or not as GPT's."""
    head_dim = hidden // heads
    products = (
        Product(hidden, (heads + 2 * kv_heads) * head_dim, "outputs"),
        Product(heads * head_dim, hidden, "inputs"),
        Product(hidden, (2 if gated else 1) * intermediate, "outputs"),
        Product(intermediate, hidden, "inputs"),
    )
    costs = LayerCosts(products, AttentionShape(heads, head_dim, kv_heads=kv_heads))
    return ModelShape(((layers, costs),), hidden, vocab, tied)


def preset(name: str) -> ModelShape:
    """The shape of a released model."""
    model = parse_config({"model": {"preset": name}}).model
    return model_shape(define(build_family(model, model.vocab_size)))


@dataclass(frozen=True)
class OtherScheme(Scheme):
    """How a step of another framework is spread: also with ZeRO 0, which shards nothing over `fsdp`."""

    @property
    def devices(self) -> int:
        return self.data * self.pipeline * self.fsdp * self.context * self.expert * self.model

    @property
    def step_tokens(self) -> int:
        return self.length * self.rows * self.microbatches * self.data * self.fsdp * self.expert


@dataclass(frozen=True)
class Software(ProgramTraits):
    """What an implementation does of its own. The defaults are nobody's in particular."""

    passes: float = 1.0
    weight_bytes: float = 0.0
    hides_gathers: float = 0.9
    least_exposed: float = 0.0
    hides_ends: float = 1.0
    hides_sum: float = 0.9
    hides_model: float = 0.0
    hides_exchange: float = 0.0
    exposes_stages: float = 0.1
    attention: float = 1.0
    """The rate of its attention, in times of the generation's best kernels; 0: scores go through memory."""
    sequence_parallel: bool = True
    """Whether what lies between tensor-parallel products is split over the length, and gathered and scattered."""
    gradient_bytes: int = 4
    """Of each number that is reduced."""
    head_everywhere: bool = True
    """Whether all stages of a pipeline share the head, or the last one has it."""
    kernels_a_layer: int = 0
    """Kernels forward that the host starts one by one; 0: the program is one."""


class OtherStep(Step):
    """A step of another framework."""

    policies = ALL_RECOMPUTE_SHARES
    scheme: OtherScheme
    traits: Software

    def __init__(self, model: ModelShape, scheme: OtherScheme, rates: Rates, domain: int, traits: Software):
        super().__init__(model, scheme, rates, domain, traits)
        self.gradient_bytes = traits.gradient_bytes
        self.shards = scheme.shards if scheme.zero else 1
        if not traits.head_everywhere:
            self.head_stages = 1

    def estimate(self) -> Estimate:
        """With what the host needs longer to start kernels than the device to execute them."""
        found, scheme = super().estimate(), self.scheme
        waiting = found.links["model"].exposed if "model" in found.links else 0.0
        inside = sum((found.products, found.attention, found.elementwise)) + found.head + waiting
        started = 3 * self.traits.kernels_a_layer * self.model.depth * LAUNCH_SECONDS * scheme.microbatches
        return replace(found, host=found.host + max(0.0, started - inside))

    def stream_tokens(self) -> int:
        return super().stream_tokens() if self.traits.sequence_parallel else self.tokens

    def attention_seconds(self, layer: LayerCosts, *, backward: bool) -> float:
        if self.traits.attention:
            return super().attention_seconds(layer, backward=backward) / self.traits.attention
        products = 2 * self.attention_flops(layer) * (4 if backward else 2) / self.rates.products["bfloat16"]
        heads = layer.attention.heads / self.scheme.model
        scores = self.tokens * self.scheme.length * heads * 2 * SCORE_PASSES
        return products + scores * (2 if backward else 1) / self.rates.memory

    def activations_link(self, layer: LayerCosts) -> Link | None:
        if self.traits.sequence_parallel or self.scheme.model == 1:
            return super().activations_link(layer)
        whole = self.scheme.itemsize * self.tokens * self.model.hidden
        seconds = (6 if self.policies[self.scheme.remat].products == 1 else 4) * self.ring_seconds(
            "all-reduce", whole, "model"
        )
        return Link(seconds, seconds * (1 - self.traits.hides_model))

    def dtype_of(self, product: Product) -> str:
        """Experts are in float8 as well."""
        return self.scheme.dtype if product.experts > 1 else super().dtype_of(product)

    def expert_work(self, layer: LayerCosts) -> tuple[Work, Work]:
        """Of Megatron-LM's experts: an even load, and no computation twice. Rows are put in the order of devices, sent,
        put in the order of experts, and back, each time through memory, which moves c R (8 D + 3 F) bytes forward and
        c R (8 D + 5 F) backward. With float8, rows are also padded, quantised and unpadded: 4 D + 2 F and 4 D + 4 F
        more."""
        products = layer.expert_products
        if not products:
            return super().expert_work(layer)
        rows = self.expert_rows(products[0])
        forward, backward = zip(*(self.grouped_seconds(product, rows) for product in products), strict=True)
        hidden, width = self.model.hidden, products[0].expert_size
        in_float8 = self.scheme.dtype == "float8"
        seconds = lambda numbers: self.scheme.itemsize * rows * numbers / self.rates.memory
        wide = (12 if in_float8 else 8) * hidden
        forward_work = Work(sum(forward), 0.0, seconds(wide + (5 if in_float8 else 3) * width))
        return forward_work, Work(sum(backward), 0.0, seconds(wide + (9 if in_float8 else 5) * width))

    def expert_rows(self, product: Product) -> float:
        """Those of an even load, without padding."""
        return product.share * product.experts * self.tokens / self.scheme.model

    def exchange_link(self, layer: LayerCosts) -> Link | None:
        """Each device sends a token once to each device that has an expert of it, forward and backward, and as much
        returns. Traffic within and between hosts goes on at the same time."""
        scheme = self.scheme
        size = scheme.expert * scheme.model
        if not layer.expert_parameters or size == 1:
            return None
        choices = layer.expert_products[0].share * layer.expert_products[0].experts
        sent = scheme.itemsize * self.tokens / scheme.model * self.model.hidden * (1 - (1 - 1 / size) ** choices)
        near = self.devices_per_domain(size, 1)[0]
        seconds = 4 * max(sent * (near - 1) / self.rates.within_host, sent * (size - near) / self.rates.between_hosts)
        return Link(seconds, seconds * (1 - self.traits.hides_exchange))

    def keys_link(self, layer: LayerCosts) -> Link | None:
        """Gathered over `context`, behind attention."""
        link = super().keys_link(layer)
        if link is None:
            return None
        behind = sum(self.attention_seconds(layer, backward=backward) for backward in (False, True))
        return Link(link.seconds, max(0.0, link.seconds - behind))

    def step_weights_link(self, backward: Work) -> Link | None:
        """With ZeRO 0 gradients are summed."""
        if self.scheme.zero or self.scheme.shards == 1:
            return super().step_weights_link(backward)
        seconds = self.ring_seconds("all-reduce", self.gradient_bytes * self.parameters, "fsdp", "context")
        return self.link_behind_backward(seconds, backward)


def software(name: str, generation: str) -> Software:
    """What a framework does otherwise than this one."""
    flash_1, flash_2 = FLASH_1.get(generation, 1.0), FLASH_2.get(generation, 1.0)
    compiled = Software(attention=flash_2, head_everywhere=False)
    return {
        "torchtitan": replace(compiled, passes=UNFUSED, kernels_a_layer=40),
        "torchtitan, compiled": compiled,
        "torchtitan, compiled, async": replace(compiled, hides_model=0.5),
        "llm-foundry": Software(passes=FUSED_SINGLY, attention=flash_1, gradient_bytes=2, kernels_a_layer=40),
        "Megatron 2021": Software(
            attention=0.0, sequence_parallel=False, gradient_bytes=2, head_everywhere=False, hides_gathers=0.0
        ),
        "DeepSpeed 2021": Software(attention=0.0, gradient_bytes=2, hides_gathers=0.0),
        "Megatron, 2024": Software(hides_model=0.5, attention=flash_2, head_everywhere=False),
        "Megatron": Software(hides_model=0.5, head_everywhere=False),
        "MaxText": Software(),
    }[name]
