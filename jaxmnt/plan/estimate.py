"""Estimates how long a step takes, from shapes alone, without compiling.

`Step` has a method for each term: the work of layers, head and optimizer, and the communication along each mesh axis,
at the rates used for replaying compiled programs (`rates.py`). `benchmarks/published.py` compares it with published
runs of other frameworks, through a subclass of `Step` that models them, and fits the rates.

Symbols in formulas, each per device: t tokens of a microbatch, L tokens of a row; D the model's width, V vocabulary /
model, N parameters / (model · pipeline), n parameters of a layer / model; F the outputs of a product that reads D, or
the inputs of one that outputs D; c bytes per number; B memory bytes per second.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxmnt.config.mesh import AVAILABLE_AXES
from jaxmnt.models.contract import LayerCosts, Product
from jaxmnt.models.float8 import is_eligible
from jaxmnt.plan.chips import chip_of
from jaxmnt.plan.rates import Rates, rates_of
from jaxmnt.plan.workload import ModelShape, Scheme, model_shape, scheme_of
from jaxmnt.telemetry.flops import RECOMPUTE_SHARES, RecomputeShare
from jaxmnt.training.remat import layer_collectives
from jaxmnt.training.spec import StepSpec

CONTENTION = 0.10
"""Seconds by which work slows down per second of communication beside it, since both need memory and multiprocessors.
Fitted to published runs."""
HOST_SECONDS = 2e-3
"""Seconds per step in which the host launches it. Set, not fitted."""
OPTIMIZER_BYTES = 30
"""Bytes per parameter: AdamW reads and writes float32 weights and moments, reads a gradient, writes bfloat16."""
_LOGIT_BYTES = 20
"""Bytes per logit: it is written in bfloat16, and read and written in float32 for the loss and its gradient."""
_GRADIENT_BYTES = 4
_STREAM_PASSES = 9
"""Reads and writes of the residual stream in a layer's forward, by a program that fuses all it can. Counted."""
_RESIDUAL_PASSES = 7.25
"""Reads and writes of residuals, as a multiple of their bytes. Fitted to compiled programs, like `ProgramTraits`."""


@dataclass(frozen=True)
class ProgramTraits:
    """Assumptions about a program. The defaults are this program's on GPUs, chosen so that the estimates of some fifty
    compiled programs match their replays; `benchmarks/plan_estimates.py` prints the errors."""

    passes: float = 0.83
    """Memory traffic of element-wise work, as a multiple of a program that fuses all it can."""
    weight_bytes: float = 30.0
    """Bytes read and written per weight of a layer and microbatch, besides matrix products: casts, copies, sums."""
    hides_gathers: float = 1.0
    """Share of a layer's work that can hide weight gathers and gradient scatters."""
    least_exposed: float = 0.01
    """Share of gathers and scatters that is always exposed, however much work there is."""
    hides_ends: float = 0.02
    """Share of the embedding's and the head's gathers and scatters that work hides."""
    hides_sum: float = 0.23
    """Share of the last microbatch's backward that hides the gradient sum over `data`."""
    hides_model: float = 0.13
    """Share of communication over `model` that matrix products hide."""
    exposes_stages: float = 0.98
    """Share of transfers between stages that no work hides."""


HIDES_MODEL = {"off": 0.13, "ring": 0.6, "rows": 0.31}
"""`ProgramTraits.hides_model` by `model.overlap`."""


def traits_of(scheme: Scheme) -> ProgramTraits:
    """Returns the traits of this program for a scheme."""
    hides_model = HIDES_MODEL[scheme.overlap]
    if scheme.zero == 3 and scheme.pipeline == 1 and scheme.prefetch:
        return ProgramTraits(hides_model=hides_model)
    return ProgramTraits(hides_model=hides_model, hides_sum=0.0, least_exposed=0.13 if scheme.zero == 3 else 0.72)


class Link(NamedTuple):
    """Communication along an axis, in seconds per step."""

    seconds: float
    exposed: float
    """The part of `seconds` that no work hides."""


Links = Mapping[str, Link | None]
"""Links by mesh axis; None for an axis without communication."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step on a device, by component. The step is their sum."""

    products: float
    attention: float
    elementwise: float
    head: float
    """Matrix products of the head, and the loss."""
    optimizer: float
    bubble: float
    contention: float
    host: float
    links: Mapping[str, Link] = field(default_factory=dict)
    """Links by mesh axis. Hidden communication is in no other component."""

    @property
    def exposed(self) -> float:
        return sum(link.exposed for link in self.links.values())

    @property
    def seconds(self) -> float:
        parts = (self.products, self.attention, self.elementwise, self.head, self.optimizer, self.bubble)
        return sum(parts) + self.contention + self.host + self.exposed


class Work(NamedTuple):
    """Seconds of work by kind."""

    products: float
    attention: float
    elementwise: float

    @property
    def seconds(self) -> float:
        return sum(self)

    def plus(self, work: "Work", times: float | RecomputeShare = 1.0) -> "Work":
        """Adds other work, multiplied by `times`, which is a number for all of it or one per part."""
        shares = times if isinstance(times, tuple) else (times, times, times)
        return Work(*(seconds + share * more for seconds, more, share in zip(self, work, shares, strict=True)))


def estimate(model: ModelShape, scheme: Scheme, rates: Rates, domain: int = 8) -> Estimate:
    """Estimates a step of the model by this program. `domain` is the number of neighbouring devices on fast links."""
    return Step(model, scheme, rates, domain, traits_of(scheme)).estimate()


def expected_step(spec: StepSpec) -> Estimate | None:
    """Estimates a step of a run on its devices, by their data sheets and their vendor's own systems. Returns None for
    unknown devices, such as CPUs."""
    if (chip := chip_of(spec.placement.mesh.devices.flat[0].device_kind)) is None:
        return None
    return estimate(model_shape(spec.definition), scheme_of(spec), rates_of(chip), chip.domain)


def uses_float8(model: ModelShape, scheme: Scheme) -> bool:
    """Returns True if a step with precision float8 computes at least one product in float8."""
    tokens = scheme.rows * scheme.length
    return any(_is_in_float8(product, scheme, tokens) for _, layer in model.layers for product in layer.products)


def _is_in_float8(product: Product, scheme: Scheme, tokens: int) -> bool:
    """Returns True if a step with precision float8 computes this product in float8: a device's part must be large
    enough."""
    return is_eligible(round(product.share * tokens), *_sizes(product, scheme.model), scheme.float8_least)


def _sizes(product: Product, parts: int) -> tuple[int, int]:
    """Returns a device's inputs and outputs of a product that tensor parallelism splits into `parts`."""
    inputs = product.inputs // (parts if product.split == "inputs" else 1)
    return inputs, product.outputs // (parts if product.split == "outputs" else 1)


class Step:
    """The terms of a step, in seconds on one device."""

    policies: Mapping[str, RecomputeShare] = RECOMPUTE_SHARES

    def __init__(self, model: ModelShape, scheme: Scheme, rates: Rates, domain: int, traits: ProgramTraits):
        self.model, self.scheme, self.rates, self.domain, self.traits = model, scheme, rates, domain, traits
        self.sizes = {axis.name: getattr(scheme, axis.name) for axis in AVAILABLE_AXES}
        """Devices by axis; axes further right are closer together."""
        self.tokens, self.shards = scheme.rows * scheme.length, scheme.fsdp
        self.parameters = model.parameters / (scheme.model * scheme.pipeline)
        self.gradient_bytes, self.head_stages = _GRADIENT_BYTES, scheme.pipeline

    def estimate(self) -> Estimate:
        """Adds up all terms."""
        scheme, microbatches = self.scheme, self.scheme.microbatches

        # Layers, for each microbatch: a stage has its share of them.
        forward, backward = Work(0, 0, 0), Work(0, 0, 0)
        links: dict[str, Link] = {}
        share = 1 / scheme.pipeline
        for count, layer in self.model.layers:
            layer_forward, layer_backward = self.layer(layer)
            forward = forward.plus(layer_forward, count * share)
            backward = backward.plus(layer_backward, count * share)
            _add(links, self.layer_links(layer, layer_forward, layer_backward), count * share * microbatches)

        # Communication once per step, then communication of each microbatch outside the layers.
        _add(links, {"fsdp": self.gathers_once(backward), "data": self.sums(backward)}, 1.0)
        _add(links, {"pipeline": self.stages(), "fsdp": self.ends()}, microbatches)
        work = Work(0, 0, 0).plus(forward.plus(backward), microbatches)
        waiting = links["model"].exposed if "model" in links else 0.0
        return Estimate(
            *work,
            head=microbatches * self.head(),
            optimizer=self.optimizer(),
            bubble=scheme.idle * (work.seconds + waiting),
            contention=CONTENTION * sum(link.seconds - link.exposed for link in links.values()),
            host=HOST_SECONDS,
            links=links,
        )

    # Work terms.

    def layer(self, layer: LayerCosts) -> tuple[Work, Work]:
        """Returns the forward and backward work of a layer for one microbatch.

        Each product costs three of its size, one forward and two backward. Element-wise work moves c (9 t D / model + t
        Σ F) bytes forward and twice that backward. Backward also copies the residuals, moves
        `ProgramTraits.weight_bytes` per weight, and recomputes a part of forward.
        """
        scheme, traits, memory = self.scheme, self.traits, self.rates.memory
        forward_products, backward_products, wide = 0.0, 0.0, 0.0
        for product in layer.products:
            tokens = product.share * self.tokens
            k, n = _sizes(product, scheme.model)
            dtype = self.dtype_of(product)
            forward_products += self.product(tokens, n, k, dtype)
            backward_products += self.product(tokens, k, n, dtype) + self.product(k, n, tokens, dtype)
            wide += product.share * (n if product.split == "outputs" else k)  # Σ F of the formula
        stream = _STREAM_PASSES * self.stream_tokens() * self.model.hidden
        elementwise = scheme.itemsize * (stream + self.tokens * wide) * traits.passes / memory
        copied = _RESIDUAL_PASSES * scheme.residual_bytes / self.model.depth * scheme.pipeline / memory
        copied += traits.weight_bytes * layer.parameters / scheme.model / memory
        quantized = self.quantization(layer)
        forward = Work(forward_products, self.attention(layer, backward=False), elementwise + quantized)
        backward = Work(
            backward_products, self.attention(layer, backward=True), 2 * elementwise + 2 * quantized + copied
        )
        return forward, backward.plus(forward, self.policies[scheme.remat])

    def stream_tokens(self) -> int:
        """Returns t / model, the tokens per device between attention and MLP."""
        return self.tokens // self.scheme.model

    def dtype_of(self, product: Product) -> str:
        """Returns the dtype of a layer's product."""
        dtype = self.scheme.dtype
        return dtype if dtype != "float8" or _is_in_float8(product, self.scheme, self.tokens) else "bfloat16"

    def product(self, m: float, n: float, k: float, dtype: str) -> float:
        """Returns the time of [m, k] × [k, n]: by its FLOPs, or by the bytes c (m k + k n + m n) if that is longer."""
        width = 1 if dtype == "float8" else self.scheme.itemsize
        moved = width * (m * k + k * n) + self.scheme.itemsize * m * n
        return max(self.rates.product(m, n, k, dtype), moved / self.rates.memory)

    def quantization(self, layer: LayerCosts) -> float:
        """Returns 2 t (inputs + outputs) / B for products in float8, whose operands are read, and written in both
        orders."""
        if self.scheme.dtype != "float8":
            return 0.0
        numbers = sum(
            product.share * sum(_sizes(product, self.scheme.model))
            for product in layer.products
            if self.dtype_of(product) == "float8"
        )
        return 2 * self.tokens * numbers / self.rates.memory

    def attention(self, layer: LayerCosts, *, backward: bool) -> float:
        """Returns the time of products of queries with keys or values, two forward and five backward, each of 2 t W
        heads / model · head_dim FLOPs. A token sees W = w - w² / 2L keys of a window w, which is at most L."""
        if not layer.attention.heads:
            return 0.0
        flops = self.attention_flops(layer) * (5 if backward else 2)
        return self.rates.attention_seconds(flops, self.scheme.length, backward=backward)

    def attention_flops(self, layer: LayerCosts) -> float:
        """Returns the FLOPs of one of attention's products."""
        length, shape = self.scheme.length, layer.attention
        window = min(shape.window or length, length)
        pairs = self.tokens * (window - window * window / (2 * length))
        return 2.0 * pairs * (shape.heads / self.scheme.model) * shape.head_dim

    def head(self) -> float:
        """Returns the time of the head and the loss for one microbatch: three products of t, D and V, and 20 t V bytes,
        divided by the number of stages that share the head."""
        t, hidden, vocab = self.tokens, self.model.hidden, self.model.vocab // self.scheme.model
        dtype = self.scheme.dtype.replace("float8", "bfloat16")
        shapes = ((t, vocab, hidden), (t, hidden, vocab), (hidden, vocab, t))
        products = sum(self.product(*shape, dtype) for shape in shapes)
        return (products + t * vocab * _LOGIT_BYTES / self.rates.memory) / self.head_stages

    def optimizer(self) -> float:
        """Returns 30 N / (fsdp B)."""
        return self.parameters / self.shards * OPTIMIZER_BYTES / self.rates.memory

    # Communication terms. Each returns None where nothing is sent.

    def ring(self, kind: str, payload: float, axis: str) -> float:
        """Returns the time of one collective along an axis."""
        names = list(self.sizes)
        inner = math.prod(self.sizes[name] for name in names[names.index(axis) + 1 :])
        return self.rates.ring(kind, payload, self.spread(self.sizes[axis], inner))

    def spread(self, size: int, inner: int) -> list[int]:
        """Returns how many of `size` devices each domain has if neighbours among them are `inner` devices apart."""
        near = max(1, min(size, self.domain // inner))
        full, rest = divmod(size, near)
        return [near] * full + [rest] * (rest > 0)

    def layer_links(self, layer: LayerCosts, forward: Work, backward: Work) -> Links:
        """Returns the communication of one microbatch in a layer."""
        return {"fsdp": self.gathers(layer, forward, backward), "model": self.activations()}

    def gathers(self, layer: LayerCosts, forward: Work, backward: Work) -> Link | None:
        """Returns the gathers and scatters over `fsdp` for a layer and microbatch: with ZeRO 3 two gathers of c n bytes
        and a scatter of 4 n, with ZeRO 2 the scatter alone. The layer's work hides them except a share, the first
        gather and the last scatter."""
        scheme, traits = self.scheme, self.traits
        if self.shards == 1 or scheme.zero < 2:
            return None
        weights = layer.parameters / scheme.model
        gather = self.ring("all-gather", scheme.itemsize * weights, "fsdp") if scheme.zero == 3 else 0.0
        scatter = self.ring("reduce-scatter", self.gradient_bytes * weights, "fsdp")
        exposed = max(0.0, gather - traits.hides_gathers * forward.seconds)
        exposed += max(0.0, gather + scatter - traits.hides_gathers * backward.seconds)
        seconds = 2 * gather + scatter
        return Link(seconds, max(exposed, (gather + scatter) / self.model.depth, traits.least_exposed * seconds))

    def activations(self) -> Link | None:
        """Returns a layer's gathers and scatters of c t D bytes over the sequence length."""
        if self.scheme.model == 1:
            return None
        gathers, scatters = layer_collectives(self.scheme.remat)
        whole = self.scheme.itemsize * self.tokens * self.model.hidden
        seconds = gathers * self.ring("all-gather", whole, "model")
        seconds += scatters * self.ring("reduce-scatter", whole, "model")
        return Link(seconds, seconds * (1 - self.traits.hides_model))

    def gathers_once(self, backward: Work) -> Link | None:
        """Returns the communication over `fsdp` that happens once per step: with ZeRO 2 a gather of c N bytes, with
        ZeRO 1 also a scatter of 4 N."""
        if self.shards == 1 or self.scheme.zero == 3:
            return None
        seconds = self.ring("all-gather", self.scheme.itemsize * self.parameters, "fsdp")
        if self.scheme.zero == 1:
            seconds += self.ring("reduce-scatter", self.gradient_bytes * self.parameters, "fsdp")
        return self.hidden_by_backward(seconds, backward)

    def hidden_by_backward(self, seconds: float, backward: Work) -> Link:
        """Returns a link over `fsdp` that a microbatch's backward hides, except for a tenth or more."""
        least = max(0.1, self.traits.least_exposed) * seconds
        return Link(seconds, max(least, seconds - self.traits.hides_gathers * backward.seconds))

    def sums(self, backward: Work) -> Link | None:
        """Returns the sum of 4 N / fsdp bytes over `data`, array by array. The last microbatch's backward hides it
        except for a twentieth or more."""
        if self.scheme.data == 1:
            return None
        arrays = sum(count * len(layer.products) for count, layer in self.model.layers) / self.scheme.pipeline
        payload = self.gradient_bytes * (self.parameters / self.shards) / arrays
        seconds = self.ring("all-reduce", payload, "data") * arrays
        return Link(seconds, max(0.05 * seconds, seconds - self.traits.hides_sum * backward.seconds))

    def ends(self) -> Link | None:
        """Returns the communication of the embedding and the head over `fsdp` in every microbatch: with ZeRO 3 a gather
        of c V D / pipeline bytes and a scatter of 4 V D / pipeline for each, with ZeRO 2 the scatter alone."""
        scheme = self.scheme
        if self.shards == 1 or scheme.zero < 2:
            return None
        table = self.model.vocab * self.model.hidden / (scheme.model * scheme.pipeline)
        seconds = self.ring("reduce-scatter", self.gradient_bytes * table, "fsdp")
        seconds += self.ring("all-gather", scheme.itemsize * table, "fsdp") if scheme.zero == 3 else 0.0
        seconds *= 1 if self.model.tied else 2
        return Link(seconds, seconds * (1 - self.traits.hides_ends))

    def stages(self) -> Link | None:
        """Returns the communication of stages for one microbatch: c t D / model bytes between stages in each tick,
        forward and backward, and four sums of as much over the stages, which share embedding and head."""
        scheme = self.scheme
        if scheme.pipeline == 1:
            return None
        payload = scheme.itemsize * self.tokens * self.model.hidden / scheme.model
        replica = math.prod(self.sizes.values()) // scheme.data
        seconds = 2 * scheme.ticks / scheme.microbatches * self.rates.send(payload, between_hosts=replica > self.domain)
        sums = 4 * self.ring("all-reduce", payload, "pipeline") if self.head_stages > 1 else 0.0
        return Link(seconds + sums, seconds * self.traits.exposes_stages + sums)


def _add(links: dict[str, Link], more: Links, times: float) -> None:
    """Adds communication to `links`, multiplied by `times`."""
    for axis, link in more.items():
        if link is not None:
            total = links.get(axis, Link(0.0, 0.0))
            links[axis] = Link(total.seconds + times * link.seconds, total.exposed + times * link.exposed)
