"""What a step takes, from shapes alone: without JAX, and without compiling.

A step is counted from the products, attention and element-wise work of a layer, and from what its scheme sends, at the
rates that the compiled program is played at (`rates.py`). It is as good for other frameworks as for this one: what a
framework does otherwise is a `Software`. `benchmarks/published.py` holds it against published runs, and fits the rates.

Letters in formulas: t tokens of a microbatch on a device, D model, V vocabulary, N parameters.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxmnt.models.float8 import is_fit
from jaxmnt.plan.rates import Rates
from jaxmnt.plan.workload import (
    AGAIN,
    PLAIN,
    Again,
    Layer,
    ModelShape,
    Product,
    Scheme,
    Software,
)
from jaxmnt.training.remat import layer_collectives

CONTENTION = 0.10
"""For a second of communication beside work, seconds by which the work takes longer: both need memory and
multiprocessors."""
HOST_SECONDS, LAUNCH_SECONDS = 2e-3, 4e-6
"""Of a step: what starts it, and for each kernel that the host starts."""
OPTIMIZER_BYTES = 30
"""For each parameter: AdamW reads and writes float32 weights and moments, reads a gradient, writes bfloat16."""


@dataclass(frozen=True)
class Link:
    """Communication along an axis, in seconds of a step."""

    seconds: float
    exposed: float


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step on a device, by what they go into. Their sum is the step."""

    products: float
    attention: float
    elementwise: float
    head: float
    """The head's products and the loss."""
    optimizer: float
    bubble: float
    contention: float
    host: float
    links: Mapping[str, Link] = field(default_factory=dict)
    """By mesh axis. What is hidden is in none of the others."""

    @property
    def exposed(self) -> float:
        return sum(link.exposed for link in self.links.values())

    @property
    def seconds(self) -> float:
        parts = (self.products, self.attention, self.elementwise, self.head, self.optimizer, self.bubble)
        return sum(parts) + self.contention + self.host + self.exposed


class _Work(NamedTuple):
    """Seconds of one layer's, or one head's, work."""

    products: float
    attention: float
    elementwise: float

    @property
    def seconds(self) -> float:
        return sum(self)

    def times(self, share: "float | Again") -> "_Work":
        shares = share if isinstance(share, tuple) else (share, share, share)
        return _Work(*(one * part for one, part in zip(self, shares, strict=True)))

    def plus(self, other: "_Work") -> "_Work":
        return _Work(*map(sum, zip(self, other, strict=True)))


def estimate(model: ModelShape, scheme: Scheme, rates: Rates, domain: int = 8, software: Software = PLAIN) -> Estimate:
    """A step of the model. `domain` is how many neighbouring devices reach each other by the fast links."""
    return _Step(model, scheme, rates, domain, software).estimate()


def uses_float8(model: ModelShape, scheme: Scheme) -> bool:
    """Whether a step that wants float8 makes any product in it."""
    return any(_is_in_float8(product, scheme) for _, layer in model.layers for product in layer.products)


def _is_in_float8(product: Product, scheme: Scheme) -> bool:
    """Of a product of a step that wants float8, whether a device's part of it is fit for that."""
    return is_fit(scheme.rows * scheme.length // scheme.context, *_sizes(product, scheme.model), scheme.float8_least)


def _sizes(product: Product, parts: int) -> tuple[int, int]:
    """Inputs and outputs on a device, if tensor parallelism splits the product into so many parts."""
    inputs = product.inputs // (parts if product.split == "inputs" else 1)
    return inputs, product.outputs // (parts if product.split == "outputs" else 1)


class _Step:
    def __init__(self, model: ModelShape, scheme: Scheme, rates: Rates, domain: int, software: Software):
        self.model, self.scheme, self.rates, self.domain, self.software = model, scheme, rates, domain, software
        self.tokens = scheme.rows * scheme.length // scheme.context

    def estimate(self) -> Estimate:
        scheme, software = self.scheme, self.software
        forward, backward = _Work(0, 0, 0), _Work(0, 0, 0)
        share = 1 / scheme.pipeline
        links: dict[str, Link] = {}
        for count, layer in self.model.layers:
            own = count * share
            ahead, back = self._layer(layer)
            forward, backward = forward.plus(ahead.times(own)), backward.plus(back.times(own))
            self._add(links, self._gathers(layer, ahead.seconds, back.seconds), own * scheme.microbatches)
            self._add(links, self._between_layers(layer, back), own * scheme.microbatches)
        head = self._head()
        if scheme.pipeline > 1 and software.head_everywhere:
            head /= scheme.pipeline
        self._add(links, self._once(backward.seconds), 1.0)
        self._add(links, self._pipeline(), scheme.microbatches)
        self._add(links, self._ends(), scheme.microbatches)
        work = forward.plus(backward).times(scheme.microbatches)
        waiting = links["model"].exposed if "model" in links else 0.0
        inside = work.seconds + scheme.microbatches * head + waiting
        hidden = sum(link.seconds - link.exposed for link in links.values())
        started = 3 * software.kernels_a_layer * self.model.depth * LAUNCH_SECONDS * scheme.microbatches
        return Estimate(
            products=work.products,
            attention=work.attention,
            elementwise=work.elementwise,
            head=scheme.microbatches * head,
            optimizer=self._optimizer(),
            bubble=scheme.idle_share * (work.seconds + waiting),
            contention=CONTENTION * hidden,
            host=HOST_SECONDS + max(0.0, started - inside),
            links=links,
        )

    # Work.

    def _layer(self, layer: Layer) -> tuple[_Work, _Work]:
        """Forward and backward of a microbatch."""
        scheme, rates, t, parts = self.scheme, self.rates, self.tokens, self.scheme.model
        ahead = back = 0.0
        wide = 0
        for product in layer.products:
            k, n = _sizes(product, parts)
            dtype = self._dtype_of(product)
            ahead += self._product(t, n, k, dtype)
            back += self._product(t, k, n, dtype) + self._product(k, n, t, dtype)
            wide += n if product.split == "outputs" else k
        between = t // parts if self.software.sequence_parallel else t
        moved = scheme.item * (9 * between * self.model.hidden + t * wide) * self.software.passes
        elementwise = moved / rates.memory
        copied = _KEPT_PASSES * scheme.kept / self.model.depth * scheme.pipeline / rates.memory
        copied += self.software.weight_bytes * layer.parameters / parts / rates.memory
        quantized = self._quantized(layer)
        forward = _Work(ahead, self._attention(layer, backward=False), elementwise + quantized)
        again = forward.times(AGAIN[scheme.remat])
        backward = _Work(back, self._attention(layer, backward=True), 2 * elementwise + 2 * quantized + copied)
        return forward, backward.plus(again)

    def _dtype_of(self, product: Product) -> str:
        """In which a product of the layers is made."""
        dtype = self.scheme.dtype
        return dtype if dtype != "float8" or _is_in_float8(product, self.scheme) else "bfloat16"

    def _product(self, m: int, n: int, k: int, dtype: str) -> float:
        width = 1 if dtype == "float8" else self.scheme.item
        moved = width * (m * k + k * n) + self.scheme.item * m * n
        return max(self.rates.product(m, n, k, dtype), moved / self.rates.memory)

    def _quantized(self, layer: Layer) -> float:
        """Forward: inputs and outputs are read, and written in float8 in both orders."""
        if self.scheme.dtype != "float8":
            return 0.0
        in_float8 = [product for product in layer.products if _is_in_float8(product, self.scheme)]
        numbers = sum(sum(_sizes(product, self.scheme.model)) for product in in_float8)
        return 2 * self.tokens * numbers / self.rates.memory

    def _attention(self, layer: Layer, *, backward: bool) -> float:
        """Two products of queries with keys or values forward, five backward."""
        if not layer.heads:
            return 0.0
        scheme, rates = self.scheme, self.rates
        length, heads = scheme.length, layer.heads / scheme.model
        window = min(layer.window or length, length)
        pairs = self.tokens * (window - window * window / (2 * length))
        flops = 2.0 * pairs * heads * layer.head_dim
        if self.software.attention:
            return rates.attend(flops * (5 if backward else 2), length, backward=backward) / self.software.attention
        # Scores go through memory: written and read for the products, the mask, the softmax and its dropout.
        scores = self.tokens * length * heads * 2 * _SCORE_PASSES
        products = 2 * flops * (4 if backward else 2) / rates.products["bfloat16"]
        return products + scores * (2 if backward else 1) / rates.memory

    def _head(self) -> float:
        """Of a microbatch: three products, and the logits that are written and read."""
        t, hidden, vocab = self.tokens, self.model.hidden, self.model.vocab // self.scheme.model
        products = sum(
            self._product(*shape, self.scheme.dtype.replace("float8", "bfloat16"))
            for shape in ((t, vocab, hidden), (t, hidden, vocab), (hidden, vocab, t))
        )
        return products + t * vocab * _LOGIT_BYTES / self.rates.memory

    def _optimizer(self) -> float:
        scheme = self.scheme
        own = self.model.parameters / (scheme.model * scheme.pipeline)
        if scheme.zero:
            own /= scheme.fsdp * scheme.context
        return own * OPTIMIZER_BYTES / self.rates.memory

    # Communication.

    def _hosts(self, axis: str) -> list[int]:
        """How many of an axis' group each domain has: axes further right lie closer together."""
        sizes = {name: getattr(self.scheme, name) for name in ("data", "pipeline", "fsdp", "context", "model")}
        names = list(sizes)
        inner = math.prod(sizes[name] for name in names[names.index(axis) + 1 :])
        return self._spread(sizes[axis], inner)

    def _spread(self, size: int, inner: int) -> list[int]:
        """How many of `size` devices each domain has, if `inner` others lie between each two."""
        near = max(1, min(size, self.domain // inner))
        full, rest = divmod(size, near)
        return [near] * full + [rest] * (rest > 0)

    def _ring(self, kind: str, payload: float, axis: str) -> float:
        return self.rates.ring(kind, payload, self._hosts(axis))

    def _gathers(self, layer: Layer, ahead: float, back: float) -> dict[str, Link]:
        """Of a layer's weights and gradients in every microbatch, with ZeRO 3; with 2 gradients alone."""
        scheme, software = self.scheme, self.software
        if scheme.fsdp * scheme.context == 1 or scheme.zero < 2:
            return {}
        weights = layer.parameters / scheme.model
        gather = self._sharded("all-gather", scheme.item * weights) if scheme.zero == 3 else 0.0
        scatter = self._sharded("reduce-scatter", software.gradient_bytes * weights)
        exposed = max(0.0, gather - software.hides_gathers * ahead)
        exposed += max(0.0, gather + scatter - software.hides_gathers * back)
        seconds = 2 * gather + scatter
        # Of all layers the first gather and the last scatter are behind nothing.
        exposed = max(exposed, (gather + scatter) / self.model.depth, software.least_exposed * seconds)
        return {"fsdp": Link(seconds, exposed)}

    def _sharded(self, kind: str, payload: float) -> float:
        """Among all devices that weights are split over: `fsdp`, and `context` where there is one."""
        scheme = self.scheme
        return self.rates.ring(kind, payload, self._spread(scheme.fsdp * scheme.context, scheme.model))

    def _between_layers(self, layer: Layer, back: _Work) -> dict[str, Link]:
        """Activations over `model`, and keys and values over `context`."""
        scheme, found = self.scheme, {}
        if scheme.model > 1:
            whole = scheme.item * self.tokens * self.model.hidden
            gathers, scatters = layer_collectives(scheme.remat)
            if self.software.sequence_parallel:
                seconds = gathers * self._ring("all-gather", whole, "model")
                seconds += scatters * self._ring("reduce-scatter", whole, "model")
            else:
                seconds = (6 if AGAIN[scheme.remat].products == 1 else 4) * self._ring("all-reduce", whole, "model")
            found["model"] = Link(seconds, seconds * (1 - self.software.hides_model))
        if scheme.context > 1:
            own = scheme.item * self.tokens * 2 * layer.kv_heads * layer.head_dim / scheme.model
            seconds = 3 * self._ring("all-gather", own * scheme.context, "context")
            behind = self._attention(layer, backward=False) + back.attention
            found["context"] = Link(seconds, max(0.0, seconds - behind))
        return found

    def _once(self, backward: float) -> dict[str, Link]:
        """Once a step: sums over `data`; with ZeRO 2 the gather of weights, with 1 also the scatter of gradients."""
        scheme, software, found = self.scheme, self.software, {}
        weights = self.model.parameters / (scheme.model * scheme.pipeline)
        if scheme.fsdp * scheme.context > 1 and scheme.zero < 3:
            if scheme.zero == 0:
                seconds = self._sharded("all-reduce", software.gradient_bytes * weights)
            else:
                seconds = self._sharded("all-gather", scheme.item * weights)
                if scheme.zero == 1:
                    seconds += self._sharded("reduce-scatter", software.gradient_bytes * weights)
            behind = software.hides_gathers * backward
            found["fsdp"] = Link(seconds, max(max(0.1, software.least_exposed) * seconds, seconds - behind))
        if scheme.data > 1:
            own = weights / (scheme.fsdp * scheme.context) if scheme.zero else weights
            arrays = sum(count * len(layer.products) for count, layer in self.model.layers) / scheme.pipeline
            seconds = self._ring("all-reduce", software.gradient_bytes * own / arrays, "data") * arrays
            found["data"] = Link(seconds, max(0.05 * seconds, seconds - software.hides_sum * backward))
        return found

    def _ends(self) -> dict[str, Link]:
        """With ZeRO 3, the weights and gradients of embedding and head in every microbatch; with 2 the gradients."""
        scheme, software = self.scheme, self.software
        if scheme.fsdp * scheme.context == 1 or scheme.zero < 2:
            return {}
        table = self.model.vocab * self.model.hidden / (scheme.model * scheme.pipeline)
        seconds = self._sharded("reduce-scatter", software.gradient_bytes * table)
        seconds += self._sharded("all-gather", scheme.item * table) if scheme.zero == 3 else 0.0
        seconds *= 1 if self.model.tied else 2
        return {"fsdp": Link(seconds, seconds * (1 - software.hides_ends))}

    def _pipeline(self) -> dict[str, Link]:
        """What stages hand to each other, of a microbatch."""
        scheme, software = self.scheme, self.software
        if scheme.pipeline == 1:
            return {}
        payload = scheme.item * self.tokens * self.model.hidden / scheme.model
        inner = scheme.fsdp * scheme.context * scheme.model
        sends = 2 * scheme.chunks if scheme.ticks is None else 2 * scheme.ticks / scheme.microbatches
        seconds = sends * self.rates.send(payload, between_hosts=scheme.pipeline * inner > self.domain)
        exposed = seconds * software.exposes_stages
        if software.head_everywhere:  # the ends are split over all stages: four sums over them
            sums = 4 * self._ring("all-reduce", payload, "pipeline")
            seconds, exposed = seconds + sums, exposed + sums
        return {"pipeline": Link(seconds, exposed)}

    @staticmethod
    def _add(links: dict[str, Link], more: Mapping[str, Link], times: float) -> None:
        for axis, link in more.items():
            old = links.get(axis, Link(0.0, 0.0))
            links[axis] = Link(old.seconds + times * link.seconds, old.exposed + times * link.exposed)


_SCORE_PASSES = 8
_LOGIT_BYTES = 20
"""For each logit: written in bfloat16, read and written in float32 for the loss and its gradient."""
_KEPT_PASSES = 7.25
"""Reads and writes of what is kept, in its bytes."""
