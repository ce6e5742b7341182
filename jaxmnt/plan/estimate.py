"""Estimates how long a step takes, from shapes alone, without compiling.

`Step` has a method for each term: the work of layers, head and optimizer, and the communication along each mesh axis.
The terms use the same rates as the replay of a compiled program (`rates.py`). `benchmarks/published.py` compares the
estimates with published runs of other frameworks, which a subclass of `Step` models, and fits the rates to these runs.

Symbols in formulas, each per device: t tokens of a microbatch; L tokens of a row, which `context` devices share; D
width of the model; V vocabulary / model; N parameters / (model · pipeline); n parameters of a layer / model; F outputs
of a product that reads D, or inputs of a product that outputs D; c bytes per number; B bytes per second of the memory.
In N and n, parameters of experts are divided by `expert` as well.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxmnt.config.mesh import MESH_AXES
from jaxmnt.models.contract import LayerCosts, Product
from jaxmnt.models.float8 import is_eligible
from jaxmnt.plan.chips import chip_of
from jaxmnt.plan.rates import Rates, rates_of
from jaxmnt.plan.workload import ModelShape, MuonMatrices, Scheme, model_shape, scheme_of
from jaxmnt.telemetry.flops import RECOMPUTE_SHARES, RecomputeShare
from jaxmnt.training.remat import EXPERT_EXCHANGES, layer_collectives
from jaxmnt.training.spec import StepSpec

CONTENTION = 0.10
"""Seconds by which work slows down for each second of communication that runs at the same time, because both need
memory and multiprocessors. Fitted to published runs."""
HOST_SECONDS = 2e-3
"""Seconds that the host takes to launch a step. An assumption, not fitted."""
OPTIMIZER_BYTES_PER_PARAMETER = 30
"""Bytes that AdamW moves per parameter. It reads and writes the weight and both moments, reads the gradient, all in
float32, and writes the weight in bfloat16."""
_BYTES_PER_LOGIT = 20
"""Bytes that are moved per logit. It is written in bfloat16, and read and written in float32 for the loss and its
gradient."""
_GRADIENT_BYTES = 4
"""Bytes of each number of a gradient that is reduced."""
_PADDING_ROWS = 256
"""Rows that grouped products multiply for each expert of a device in addition to its own. They are a tile of XLA's, or
two blocks of Mosaic's kernels, one of which lies between two experts."""
_STREAM_PASSES = 9
"""Reads and writes of the residual stream in a layer's forward if the program fuses all operations that can be fused.
They are counted, not fitted."""
_RESIDUAL_PASSES = 7.25
"""Reads and writes of residuals, as a multiple of their bytes. Fitted to compiled programs, like `ProgramTraits`."""


@dataclass(frozen=True)
class ProgramTraits:
    """Assumptions about a program. The defaults describe jaxmnt's programs on GPUs. They are chosen so that the
    estimates of some fifty compiled programs match their replays. `benchmarks/plan_estimates.py` prints the errors."""

    passes: float = 0.83
    """Memory traffic of element-wise work, as a multiple of that of a program that fuses all operations that can be
    fused."""
    weight_bytes: float = 30.0
    """Bytes read and written per weight of a layer and microbatch by casts, copies and sums, without matrix
    products."""
    hides_gathers: float = 1.0
    """Share of a layer's work that can hide weight gathers and gradient scatters."""
    least_exposed: float = 0.01
    """Minimum share of gathers and scatters that is exposed, however much work there is."""
    hides_ends: float = 0.02
    """Share of the embedding's and the head's gathers and scatters that work hides."""
    hides_sum: float = 0.23
    """Share of the last microbatch's backward that hides the gradient sum over `data`."""
    hides_model: float = 0.13
    """Share of communication over `model` that matrix products hide."""
    hides_exchange: float = 0.13
    """Share of the exchange of tokens between experts that work hides."""
    hides_keys: float = 0.9
    """Share of the exchange of keys and values over `context` that work hides."""
    exposes_stages: float = 0.98
    """Share of transfers between stages that no work hides."""


HIDES_MODEL = {"off": 0.13, "ring": 0.6, "rows": 0.31}
"""`ProgramTraits.hides_model` by `model.overlap`, for a microbatch that runs alone."""
HIDES_MODEL_SIDE_BY_SIDE = 0.95
"""`ProgramTraits.hides_model` of a microbatch that runs beside another."""


def traits_of(scheme: Scheme) -> ProgramTraits:
    """Returns the traits of jaxmnt's program for a scheme."""
    hidden_share = lambda overlap: scheme.steady * HIDES_MODEL_SIDE_BY_SIDE + (1 - scheme.steady) * HIDES_MODEL[overlap]
    # The other half of the rows hides the exchange, but rings are only in dense products.
    hides_exchange = hidden_share("off" if scheme.overlap == "ring" else scheme.overlap)
    traits = ProgramTraits(hides_model=hidden_share(scheme.overlap), hides_exchange=hides_exchange)
    if scheme.zero == 3 and scheme.pipeline == 1 and scheme.prefetch:
        return traits
    return replace(traits, hides_sum=0.0, least_exposed=0.13 if scheme.zero == 3 else 0.72)


class Link(NamedTuple):
    """Communication along an axis, in seconds per step."""

    seconds: float
    exposed: float
    """The part of `seconds` that no work hides."""


Links = Mapping[str, Link | None]
"""Links by mesh axis; None for an axis without communication."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step on a device, by component. The time of the step is their sum."""

    products: float
    """Matrix products of layers."""
    attention: float
    elementwise: float
    """Work of layers that is limited by memory traffic."""
    head: float
    """Matrix products of the head, and the loss."""
    optimizer: float
    bubble: float
    """Idle time of a pipeline stage."""
    contention: float
    """Slowdown of work that runs at the same time as communication."""
    host: float
    """Time to launch the step."""
    links: Mapping[str, Link] = field(default_factory=dict)
    """Links by mesh axis. Only their exposed parts count in the sum, because work hides the rest."""

    @property
    def exposed(self) -> float:
        """Communication that no work hides, along all axes."""
        return sum(link.exposed for link in self.links.values())

    @property
    def seconds(self) -> float:
        parts = (self.products, self.attention, self.elementwise, self.head, self.optimizer, self.bubble)
        return sum(parts) + self.contention + self.host + self.exposed


class Work(NamedTuple):
    """Seconds of the work of layers, by kind."""

    products: float
    attention: float
    elementwise: float

    @property
    def seconds(self) -> float:
        return sum(self)

    def plus(self, work: "Work", times: float | RecomputeShare = 1.0) -> "Work":
        """Returns the sum of this and `work`, which is multiplied by `times`: one number, or one for each kind of
        work."""
        factors = times if isinstance(times, tuple) else (times, times, times)
        return Work(*(seconds + factor * added for seconds, added, factor in zip(self, work, factors, strict=True)))


def estimate(model: ModelShape, scheme: Scheme, rates: Rates, domain: int = 8) -> Estimate:
    """Estimates a step of jaxmnt's program for a model. `domain` is the number of devices that share fast links."""
    return Step(model, scheme, rates, domain, traits_of(scheme)).estimate()


def expected_step(spec: StepSpec) -> Estimate | None:
    """Estimates a step of a run on its devices, from their data sheet and the network of the vendor's own systems.
    Returns None for devices without a data sheet, such as CPUs."""
    if (chip := chip_of(spec.placement.mesh.devices.flat[0].device_kind)) is None:
        return None
    return estimate(model_shape(spec.definition, spec.config), scheme_of(spec), rates_of(chip), chip.domain)


def uses_float8(model: ModelShape, scheme: Scheme) -> bool:
    """Returns True if a step with precision float8 computes at least one product in float8."""
    tokens = scheme.tokens
    return any(_is_in_float8(product, scheme, tokens) for _, layer in model.layers for product in layer.products)


def _is_in_float8(product: Product, scheme: Scheme, tokens: int) -> bool:
    """Returns True if a step with precision float8 computes this product in float8. For this a device's part of the
    product must be large enough. Experts are not computed in float8."""
    return product.experts == 1 and is_eligible(
        round(product.share * tokens), *_inputs_and_outputs(product, scheme.model), scheme.float8_least
    )


def _inputs_and_outputs(product: Product, parts: int) -> tuple[int, int]:
    """Returns the numbers of inputs and outputs of a device's part if tensor parallelism splits a product into
    `parts`."""
    inputs = product.inputs // (parts if product.split == "inputs" else 1)
    return inputs, product.outputs // (parts if product.split == "outputs" else 1)


class Step:
    """The terms of a step, in seconds on one device."""

    policies: Mapping[str, RecomputeShare] = RECOMPUTE_SHARES
    """Shares of forward that backward recomputes, by `Scheme.remat`."""

    def __init__(self, model: ModelShape, scheme: Scheme, rates: Rates, domain: int, traits: ProgramTraits):
        self.model = model
        self.scheme = scheme
        self.rates = rates
        self.domain = domain
        self.traits = traits
        self.sizes = {axis.name: getattr(scheme, axis.name) for axis in MESH_AXES}
        """Number of devices along each mesh axis. Neighbours along a later axis are closer together."""
        self.tokens = scheme.tokens
        self.shards = scheme.shards
        """Number of shards of each parameter that does not belong to experts."""
        experts = sum(count * layer.expert_parameters for count, layer in model.layers)
        self.parameters = (model.parameters - experts) / (scheme.model * scheme.pipeline)
        self.expert_parameters = experts / (scheme.model * scheme.expert * scheme.pipeline)
        self.gradient_bytes = _GRADIENT_BYTES
        self.head_stages = scheme.pipeline
        """Number of stages that share the head."""

    def estimate(self) -> Estimate:
        """Returns the estimate of a step with all of its terms."""
        scheme = self.scheme
        microbatches = scheme.microbatches

        # Add up the layers of a stage, which has its share of all layers, for one microbatch.
        forward, backward = Work(0, 0, 0), Work(0, 0, 0)
        links: dict[str, Link] = {}
        share = 1 / scheme.pipeline
        for count, layer in self.model.layers:
            layer_forward, layer_backward = self.layer_work(layer)
            forward = forward.plus(layer_forward, count * share)
            backward = backward.plus(layer_backward, count * share)
            _add_links(links, self.layer_links(layer, layer_forward, layer_backward), count * share * microbatches)

        # Add communication that happens once per step, then that of each microbatch outside the layers.
        _add_links(links, {"fsdp": self.step_weights_link(backward), "data": self.gradient_sums_link(backward)}, 1.0)
        _add_links(links, {"fsdp": self.muon_link()}, 1.0)
        _add_links(links, {"pipeline": self.stages_link(), "fsdp": self.ends_link()}, microbatches)
        work = Work(0, 0, 0).plus(forward.plus(backward), microbatches)
        exposed_in_layers = sum(links[axis].exposed for axis in ("context", "model", "expert") if axis in links)
        return Estimate(
            *work,
            head=microbatches * self.head_seconds(),
            optimizer=self.optimizer_seconds(),
            bubble=scheme.idle * (work.seconds + exposed_in_layers),
            contention=CONTENTION * sum(link.seconds - link.exposed for link in links.values()),
            host=HOST_SECONDS,
            links=links,
        )

    # Work terms.

    def layer_work(self, layer: LayerCosts) -> tuple[Work, Work]:
        """Returns the forward and backward work of a layer for one microbatch.

        Each product is computed once forward, and takes two products of the same size backward. Element-wise work moves
        c (9 t D / model + t Σ F) bytes forward and twice as many backward. Backward also copies the residuals, moves
        `ProgramTraits.weight_bytes` per weight, and recomputes a part of forward.
        """
        scheme, traits = self.scheme, self.traits
        memory = self.rates.memory
        forward_products = backward_products = 0.0
        widths = 0.0  # Σ F of the formula
        for product in layer.products:
            if product.experts > 1:
                continue
            k, n = _inputs_and_outputs(product, scheme.model)
            tokens, dtype = product.share * self.tokens, self.dtype_of(product)
            forward_products += self.product_seconds(tokens, n, k, dtype)
            backward_products += self.product_seconds(tokens, k, n, dtype)
            if self.model.adapters is None:
                backward_products += self.product_seconds(k, n, tokens, dtype)
            elif product.name in self.model.adapters.products:
                adapter = self.adapter_seconds(tokens, k, n, self.model.adapters.rank)
                forward_products += adapter
                backward_products += 2 * adapter
            widths += product.share * (n if product.split == "outputs" else k)
        stream = _STREAM_PASSES * self.stream_tokens() * self.model.hidden
        elementwise = scheme.itemsize * (stream + self.tokens * widths) * traits.passes / memory
        copy_seconds = _RESIDUAL_PASSES * scheme.residual_bytes / self.model.depth * scheme.pipeline / memory
        copy_seconds += traits.weight_bytes * sum(scheme.layer_parameters(layer)) / memory
        quantization = self.quantization_seconds(layer)
        forward = Work(forward_products, self.attention_seconds(layer, backward=False), elementwise + quantization)
        backward = Work(
            backward_products,
            self.attention_seconds(layer, backward=True),
            2 * elementwise + 2 * quantization + copy_seconds,
        )
        expert_forward, expert_backward = self.expert_work(layer)
        recomputed = self.policies[scheme.remat]
        if scheme.keeps_attention:
            recomputed = recomputed._replace(attention=0)
        backward = backward.plus(forward, recomputed).plus(expert_backward)
        return forward.plus(expert_forward), backward

    def adapter_seconds(self, tokens: float, inputs: int, outputs: int, rank: int) -> float:
        """Returns the time of the two forward products of an adapter, and of reading and writing its output."""
        dtype = self.scheme.dtype.replace("float8", "bfloat16")
        products = self.product_seconds(tokens, rank, inputs, dtype) + self.product_seconds(
            tokens, outputs, rank, dtype
        )
        return products + self.scheme.itemsize * tokens * outputs / self.rates.memory

    def expert_work(self, layer: LayerCosts) -> tuple[Work, Work]:
        """Returns the forward and backward work of a layer's experts for one microbatch, if there are any.

        A device multiplies R rows, which are `Scheme.expert_round` times those of an even load. Backward computes gate
        and up again, under every remat policy. Forward moves c R (3 D + 3 F) + T D (8 + c) bytes, of which the second
        part is the sum, in float32, of the rows of the group's T tokens. Backward moves c R (7 D + 6 F) + T D (8 + c).
        """
        products = layer.expert_products
        if not products:
            return Work(0, 0, 0), Work(0, 0, 0)
        scheme, hidden = self.scheme, self.model.hidden
        forward_products = backward_products = 0.0
        for product in products:
            forward, backward = self.grouped_seconds(product, self.expert_rows(product))
            forward_products += forward
            backward_products += backward + (forward if product.split == "outputs" else 0.0)
        rows = self.expert_rows(products[0])
        width = products[0].expert_size
        sums = self.tokens * scheme.expert * hidden * (8 + scheme.itemsize)
        seconds = lambda numbers: (scheme.itemsize * rows * numbers + sums) / self.rates.memory
        return (
            Work(forward_products, 0.0, seconds(3 * hidden + 3 * width)),
            Work(backward_products, 0.0, seconds(7 * hidden + 6 * width)),
        )

    def expert_rows(self, product: Product) -> float:
        """Returns the number of rows that a device multiplies by the weights of its experts, for one microbatch, with
        those that fill tiles."""
        return self.scheme.round_rows(product) + _PADDING_ROWS * self.device_experts(product)

    def device_experts(self, product: Product) -> float:
        """Returns the number of a device's experts."""
        return product.experts / (self.scheme.expert * self.scheme.model)

    def grouped_seconds(self, product: Product, rows: float) -> tuple[float, float]:
        """Returns the forward and the backward time of a product of `rows` rows with the weights of a device's experts,
        each of which has an equal part of them."""
        k, n = product.expert_sides
        dtype, experts = self.dtype_of(product), self.device_experts(product)
        forward = self.product_seconds(rows, n, k, dtype, experts)
        backward = self.product_seconds(rows, k, n, dtype, experts)
        return forward, backward + self.product_seconds(experts * k, n, rows / experts, dtype, experts)

    def stream_tokens(self) -> int:
        """Returns t / model, the number of tokens that a device has between attention and MLP."""
        return self.tokens // self.scheme.model

    def dtype_of(self, product: Product) -> str:
        """Returns the dtype in which a product of a layer is computed."""
        dtype = self.scheme.dtype
        return dtype if dtype != "float8" or _is_in_float8(product, self.scheme, self.tokens) else "bfloat16"

    def product_seconds(self, m: float, n: float, k: float, dtype: str, weights: float = 1.0) -> float:
        """Returns the time of a product [m, k] × [k, n], for its FLOPs or its c (m k + k n + m n) bytes if that is
        longer. There are `weights` matrices [k, n], each of which multiplies a part of the m rows."""
        width = 1 if dtype == "float8" else self.scheme.itemsize
        moved_bytes = width * (m * k + weights * k * n) + self.scheme.itemsize * m * n
        return max(self.rates.product_seconds(m, n, k, dtype), moved_bytes / self.rates.memory)

    def quantization_seconds(self, layer: LayerCosts) -> float:
        """Returns 2 t (inputs + outputs) / B, the time to quantize the operands of products in float8. They are read,
        and written in both orders."""
        if self.scheme.dtype != "float8":
            return 0.0
        numbers = sum(
            product.share * sum(_inputs_and_outputs(product, self.scheme.model))
            for product in layer.products
            if self.dtype_of(product) == "float8"
        )
        return 2 * self.tokens * numbers / self.rates.memory

    def attention_seconds(self, layer: LayerCosts, *, backward: bool) -> float:
        """Returns the time of attention in a layer, for one microbatch. There are two products of queries with keys or
        values forward and five backward, each of 2 t W · heads / model · head_dim FLOPs. With a window of w tokens,
        which is at most L, a token sees W = w - w² / 2L keys on average."""
        if not layer.attention.heads:
            return 0.0
        flops = self.attention_flops(layer) * (5 if backward else 2)
        seconds = self.rates.attention_seconds(flops, self.attended_length(layer), backward=backward)
        return seconds + self.merge_seconds(layer, backward=backward)

    def attended_length(self, layer: LayerCosts) -> int:
        """Returns the number of tokens in the rows, or in the parts of rows, that a call of attention computes."""
        scheme = self.scheme
        if scheme.context == 1:
            return scheme.length
        return scheme.chunk_tokens + (scheme.halo(layer.attention) or 0)

    def merge_seconds(self, layer: LayerCosts, *, backward: bool) -> float:
        """Returns the time to merge the results of attention to parts of the keys, if rows are divided. There are
        `context` merges for C = L / (2 context) queries each, which read and write a float32 sum and read an addend.
        Backward adds the gradients of keys and values of 2 context - 1 chunks as well."""
        scheme, shape = self.scheme, layer.attention
        if scheme.context == 1 or scheme.halo(shape) is not None:
            return 0.0
        bytes_per_number = 8 + scheme.itemsize
        queries = scheme.rows * scheme.chunk_tokens * shape.heads * shape.head_dim / scheme.model
        moved_bytes = scheme.context * queries * bytes_per_number
        if backward:
            moved_bytes += scheme.row_keys(shape) * bytes_per_number * (2 * scheme.context - 1) / (2 * scheme.context)
        return moved_bytes / self.rates.memory

    def attention_flops(self, layer: LayerCosts) -> float:
        """Returns the FLOPs of one of attention's products in a layer, for one microbatch."""
        length, shape, tokens = self.scheme.length, layer.attention, float(self.tokens)
        if halo := self.scheme.halo(shape):  # a chunk is computed as the end of a row that begins with its halo
            tokens *= 1 + halo / self.scheme.chunk_tokens
            length = halo + self.scheme.chunk_tokens
        window = min(shape.window or length, length)
        pairs = tokens * (window - window * window / (2 * length))
        return 2.0 * pairs * (shape.heads / self.scheme.model) * shape.head_dim

    def head_seconds(self) -> float:
        """Returns the time of the head and the loss for one microbatch. They compute three products of sizes t, D and
        V, and move 20 t V bytes. The stages that share the head divide the time among them."""
        t, hidden, vocab = self.tokens, self.model.hidden, self.model.vocab // self.scheme.model
        dtype = self.scheme.dtype.replace("float8", "bfloat16")
        shapes = [(t, vocab, hidden), (t, hidden, vocab), (hidden, vocab, t)]
        if self.model.adapters is not None:
            shapes.pop()  # the gradient of the frozen head is not computed
        products = sum(self.product_seconds(*shape, dtype) for shape in shapes)
        return (products + t * vocab * _BYTES_PER_LOGIT / self.rates.memory) / self.head_stages

    def optimizer_seconds(self) -> float:
        """Returns 30 N / (shards B), the time of the optimizer's update, and the time of Muon's products. A device
        orthogonalises whole matrices, one after another."""
        seconds = self.trained_parameters() * OPTIMIZER_BYTES_PER_PARAMETER / self.rates.memory
        dtype = self.scheme.dtype.replace("float8", "bfloat16")
        for matrices in self.model.muon:
            least, most = matrices.least, matrices.most
            products = (least, least, most), (least, least, least), (least, most, least)
            step = sum(self.product_seconds(*sides, dtype) for sides in products)
            seconds += matrices.steps * self.muon_rounds(matrices)[0] * step
        return seconds

    def muon_rounds(self, matrices: MuonMatrices) -> tuple[int, int]:
        """Returns the number of matrices that a device orthogonalises, and the number of devices that share each."""
        scheme = self.scheme
        if matrices.of_experts:
            devices = scheme.expert_shards
            count = matrices.total / (scheme.pipeline * scheme.expert * scheme.model)
        else:
            devices, count = scheme.shards * scheme.model, matrices.total / scheme.pipeline
        return math.ceil(count / devices), devices

    def muon_link(self) -> Link | None:
        """Returns the exchange of whole matrices for Muon (`training.muon`), once per step: pieces of matrices, and the
        pieces of their updates. Nothing hides it."""
        seconds = 0.0
        for matrices in self.model.muon:
            rounds, devices = self.muon_rounds(matrices)
            payload = rounds * matrices.least * matrices.most * self.scheme.itemsize
            if devices > 1:
                shares = self.devices_per_domain(devices, self.scheme.model if matrices.of_experts else 1)
                seconds += 2 * self.rates.all_to_all_seconds(payload, shares)
        return Link(seconds, seconds) if seconds else None

    def stored_parameters(self) -> float:
        """Returns the number of parameters that a device stores."""
        return self.parameters / self.shards + self.expert_parameters / self.scheme.expert_shards

    def trained_parameters(self) -> float:
        """Returns the number of parameters that a device stores and updates."""
        adapters = self.model.adapters
        return self.stored_parameters() if adapters is None else adapters.per_device(self.scheme)

    @property
    def scattered_bytes(self) -> int:
        """Bytes of each number of the weights' gradients that is scattered; 0 for frozen weights."""
        return self.gradient_bytes if self.model.adapters is None else 0

    # Communication terms. Each is None if nothing is sent.

    def ring_seconds(self, kind: str, payload: float, *axes: str) -> float:
        """Returns the time of one collective of `payload` bytes along neighbouring axes."""
        names = list(self.sizes)
        size = math.prod(self.sizes[axis] for axis in axes)
        if size == 1:
            return 0.0
        distance = math.prod(self.sizes[name] for name in names[names.index(axes[-1]) + 1 :])
        return self.rates.ring_seconds(kind, payload, self.devices_per_domain(size, distance))

    def weights_seconds(self, kind: str, bytes_per_number: int, experts: float, others: float) -> float:
        """Returns the time to gather weights or scatter their gradients: those of experts over `fsdp` and `context`,
        and all others over `expert` as well."""
        seconds = self.ring_seconds(kind, bytes_per_number * others, "fsdp", "context", "expert")
        return seconds + (self.ring_seconds(kind, bytes_per_number * experts, "fsdp", "context") if experts else 0.0)

    def devices_per_domain(self, size: int, distance: int) -> list[int]:
        """Returns how many of `size` devices are in each domain if neighbours among them are `distance` devices
        apart."""
        in_domain = max(1, min(size, self.domain // distance))
        full_domains, rest = divmod(size, in_domain)
        return [in_domain] * full_domains + [rest] * (rest > 0)

    def layer_links(self, layer: LayerCosts, forward: Work, backward: Work) -> Links:
        """Returns the communication of one microbatch in a layer."""
        return {
            "fsdp": self.layer_weights_link(layer, forward, backward),
            "context": self.keys_link(layer),
            "model": self.activations_link(layer),
            "expert": self.exchange_link(layer),
        }

    def layer_weights_link(self, layer: LayerCosts, forward: Work, backward: Work) -> Link | None:
        """Returns the gathers and scatters of a layer's weights and gradients over `fsdp`, for one microbatch. With
        ZeRO 3 there are two gathers of c n bytes and a scatter of 4 n bytes, with ZeRO 2 only the scatter. The layer's
        work hides all but a share of them, the first gather and the last scatter. It hides nothing if experts exchange
        tokens between hosts, because then the exchange, which delays the layer, occupies the same link."""
        scheme, traits = self.scheme, self.traits
        if self.shards == 1 or scheme.zero < 2:
            return None
        weights = scheme.layer_parameters(layer)
        gather = self.weights_seconds("all-gather", scheme.itemsize, *weights) if scheme.zero == 3 else 0.0
        scatter = self.weights_seconds("reduce-scatter", self.scattered_bytes, *weights)
        exposed = max(0.0, gather - traits.hides_gathers * forward.seconds)
        exposed += max(0.0, gather + scatter - traits.hides_gathers * backward.seconds)
        seconds = 2 * gather + scatter
        if layer.expert_parameters and self.exchange_leaves_domain():
            exposed = seconds
        return Link(seconds, max(exposed, (gather + scatter) / self.model.depth, traits.least_exposed * seconds))

    def keys_link(self, layer: LayerCosts) -> Link | None:
        """Returns the exchange of keys and values over `context`, for one microbatch: two gathers of c bytes for each
        of their numbers in whole rows, and a scatter of their gradients in 4 bytes. In a layer with a window of at most
        a chunk, devices exchange only the last tokens of each chunk, the gradients in c bytes. If forward keeps what it
        gathered for a window (`Scheme.keeps_halos`), backward does not gather it again."""
        scheme = self.scheme
        if scheme.context == 1 or not layer.attention.heads:
            return None
        halo = scheme.halo(layer.attention)
        share = 1.0 if halo is None else min(1.0, halo / scheme.chunk_tokens)
        gradient_bytes = self.gradient_bytes if halo is None or halo > scheme.chunk_tokens else scheme.itemsize
        numbers = share * scheme.row_keys(layer.attention)
        gathers = 1 if halo is not None and scheme.keeps_halos else 2
        seconds = gathers * self.ring_seconds("all-gather", scheme.itemsize * numbers, "context")
        seconds += self.ring_seconds("reduce-scatter", gradient_bytes * numbers, "context")
        return Link(seconds, seconds * (1 - self.traits.hides_keys))

    def activations_link(self, layer: LayerCosts) -> Link | None:
        """Returns a layer's gathers and scatters of c t D bytes of activations over `model`, for one microbatch."""
        if self.scheme.model == 1:
            return None
        gathers, scatters = layer_collectives(self.scheme.remat, has_mlp=not layer.expert_parameters)
        payload = self.scheme.itemsize * self.tokens * self.model.hidden
        seconds = gathers * self.ring_seconds("all-gather", payload, "model")
        seconds += scatters * self.ring_seconds("reduce-scatter", payload, "model")
        return Link(seconds, seconds * (1 - self.traits.hides_model))

    def exchange_leaves_domain(self) -> bool:
        """Returns True if devices without a fast link to each other share experts."""
        return self.scheme.expert > 1 and self.scheme.expert * self.scheme.model > self.domain

    def exchange_link(self, layer: LayerCosts) -> Link | None:
        """Returns the exchange of a layer of experts over `expert` and `model`, for one microbatch: gathers and
        scatters of c t expert D bytes of activations."""
        scheme = self.scheme
        if not layer.expert_parameters or scheme.expert * scheme.model == 1:
            return None
        payload = scheme.itemsize * self.tokens * scheme.expert * self.model.hidden
        gathers, scatters = EXPERT_EXCHANGES
        seconds = gathers * self.ring_seconds("all-gather", payload, "expert", "model")
        seconds += scatters * self.ring_seconds("reduce-scatter", payload, "expert", "model")
        return Link(seconds, seconds * (1 - self.traits.hides_exchange))

    def step_weights_link(self, backward: Work) -> Link | None:
        """Returns the communication over `fsdp` that happens once per step. With ZeRO 2 and 1 it is a gather of c N
        bytes of weights, with ZeRO 1 also a scatter of 4 N bytes of gradients."""
        if self.shards == 1 or self.scheme.zero == 3:
            return None
        weights = (self.expert_parameters, self.parameters)
        seconds = self.weights_seconds("all-gather", self.scheme.itemsize, *weights)
        if self.scheme.zero == 1:
            seconds += self.weights_seconds("reduce-scatter", self.scattered_bytes, *weights)
        return self.link_behind_backward(seconds, backward)

    def link_behind_backward(self, seconds: float, backward: Work) -> Link:
        """Returns a link over `fsdp` of which the backward of a microbatch hides at most nine tenths."""
        least = max(0.1, self.traits.least_exposed) * seconds
        return Link(seconds, max(least, seconds - self.traits.hides_gathers * backward.seconds))

    def gradient_sums_link(self, backward: Work) -> Link | None:
        """Returns the all-reduce of 4 N / shards bytes of gradients over `data`, array by array. The last microbatch's
        backward hides at most 19 in 20 parts of it."""
        if self.scheme.data == 1:
            return None
        arrays = sum(count * len(layer.products) for count, layer in self.model.layers) / self.scheme.pipeline
        payload = self.gradient_bytes * self.trained_parameters() / arrays
        seconds = self.ring_seconds("all-reduce", payload, "data") * arrays
        return Link(seconds, max(0.05 * seconds, seconds - self.traits.hides_sum * backward.seconds))

    def ends_link(self) -> Link | None:
        """Returns the communication over `fsdp` for the embedding and the head, for one microbatch. With ZeRO 3 each of
        the two has a gather of c V D / pipeline bytes and a scatter of 4 V D / pipeline bytes, with ZeRO 2 only the
        scatter."""
        scheme = self.scheme
        if self.shards == 1 or scheme.zero < 2:
            return None
        table = self.model.vocab * self.model.hidden / (scheme.model * scheme.pipeline)
        seconds = self.weights_seconds("reduce-scatter", self.scattered_bytes, 0.0, table)
        seconds += self.weights_seconds("all-gather", scheme.itemsize, 0.0, table) if scheme.zero == 3 else 0.0
        seconds *= 1 if self.model.tied else 2
        return Link(seconds, seconds * (1 - self.traits.hides_ends))

    def stages_link(self) -> Link | None:
        """Returns the communication over `pipeline` for one microbatch. In each tick, c t D / model bytes are sent
        between stages, forward and backward. As the stages share embedding and head, as many bytes are also summed four
        times or, if stages divide tokens, gathered twice and scattered twice."""
        scheme = self.scheme
        if scheme.pipeline == 1:
            return None
        payload = scheme.itemsize * self.tokens * self.model.hidden / scheme.model
        replica = math.prod(self.sizes.values()) // scheme.data
        transfer = self.rates.send_seconds(payload, between_hosts=replica > self.domain)
        seconds = 2 * scheme.ticks / scheme.microbatches * transfer
        shared = 0.0
        if self.head_stages > 1:
            divides_tokens = scheme.table_stages(self.model.vocab) > 1
            kinds = ("all-gather", "reduce-scatter") if divides_tokens else ("all-reduce", "all-reduce")
            shared = 2 * sum(self.ring_seconds(kind, payload, "pipeline") for kind in kinds)
        return Link(seconds + shared, seconds * self.traits.exposes_stages + shared)


def _add_links(links: dict[str, Link], more: Links, times: float) -> None:
    """Adds `more` communication to `links`, multiplied by `times`."""
    for axis, link in more.items():
        if link is not None:
            total = links.get(axis, Link(0.0, 0.0))
            links[axis] = Link(total.seconds + times * link.seconds, total.exposed + times * link.exposed)
