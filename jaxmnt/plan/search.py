"""Finds the best mesh for a config and a number of GPUs. It estimates all candidates and compiles the best few."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxmnt.config.schema import Config
from jaxmnt.distributed.gpu_settings import OUR_MEMORY_FRACTION
from jaxmnt.errors import ConfigError
from jaxmnt.models.experts import EXPERT_ROUND
from jaxmnt.models.registry import define_model
from jaxmnt.parallel.choices import pays_to_overlap_microbatches
from jaxmnt.parallel.sharding import Overlap
from jaxmnt.plan.candidates import Candidate, candidates, precision_setting
from jaxmnt.plan.chips import Chip, Network
from jaxmnt.plan.estimate import Estimate, estimate, uses_float8
from jaxmnt.plan.memory import Memory, ResidualBytes, estimate_memory
from jaxmnt.plan.predict import Prediction
from jaxmnt.plan.rates import Rates
from jaxmnt.plan.report import make_report
from jaxmnt.plan.targets import gpu_devices
from jaxmnt.plan.workload import Scheme, model_shape, schedule_of
from jaxmnt.plan.zero import USABLE_SHARE
from jaxmnt.training.build import build_spec
from jaxmnt.training.pipeline_schedule import build_schedule
from jaxmnt.units import size

TOLERANCE = 1.06
"""A candidate may fit if its estimated peak is at most this multiple of the usable memory. Few estimates are off by
more (`benchmarks/plan_estimates.py`), and the compiler decides."""


@dataclass(frozen=True)
class Guess:
    """A candidate with its estimated time and memory."""

    candidate: Candidate
    scheme: Scheme
    estimate: Estimate
    memory: Memory
    row_residuals: float
    """Bytes that forward saves for backward per row, in all layers."""
    row_residuals_without_remat: float
    """Bytes that forward would save per row if backward recomputed nothing."""

    @property
    def seconds(self) -> float:
        return self.estimate.seconds


@dataclass(frozen=True)
class Plan:
    """A candidate that was compiled."""

    candidate: Candidate
    guess: Guess
    prediction: Prediction
    peak: int
    """Bytes that a device needs at the peak of a step, according to the compiler."""
    limit: int
    """Usable bytes of a device."""
    report: dict[str, Any]
    """The report of `report.make_report`."""

    @property
    def seconds(self) -> float:
        return self.prediction.seconds

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit


class Search:
    """A search for one config and target. What it caches is used for every number of GPUs.

    Every mesh is tried with all `precisions`, or with that of the config if there are none. Raises `ConfigError` for a
    config that cannot be searched.
    """

    def __init__(self, config: Config, chip: Chip, network: Network, rates: Rates, precisions: Sequence[str] = ()):
        assert config.model.vocab_size is not None
        if config.mesh.rules:
            raise ConfigError("mesh.rules: the search supports only the default rules; leave it out")
        self.config = config
        self.chip = chip
        self.network = network
        self.rates = rates
        self.vocab = config.model.vocab_size
        self.definition = define_model(config.model, config.lora)
        self.shape = model_shape(self.definition, config)
        self.limit = round(OUR_MEMORY_FRACTION * chip.memory)
        self.precisions = precisions
        self._peaks: dict[Candidate, int] = {}
        """Compiled peaks in bytes, by candidate."""
        self._residuals: dict[str | None, ResidualBytes] = {}
        for precision in precisions or (None,):
            if (dtype := self.dtype(precision)) not in rates.products:
                key = "--precisions" if precisions else "train.precision"
                raise ConfigError(f"{key}: {chip.kind} does not support {dtype}; choose another")
            setting = precision_setting(precision)
            self._residuals[precision] = ResidualBytes(
                config.changed(setting), self.vocab, lambda count: self.devices(count)[:count]
            )
        self._state = next(iter(self._residuals.values())).state()

    def devices(self, gpus: int) -> Sequence[jax.Device]:
        """Returns at least `gpus` devices to compile for."""
        return _compile_devices(self.chip, gpus, min(self.network.devices_per_host, gpus))

    def dtype(self, precision: str | None) -> str:
        """Returns the dtype of matrix products on GPUs. A `precision` of None means that of the config."""
        precision = precision or self.config.train.precision
        return "bfloat16" if precision == "auto" else precision

    def guesses(self, gpus: int, *, pruned: bool = True) -> list[Guess]:
        """Returns all candidates for a number of GPUs with their estimates, fastest first."""
        all_candidates = candidates(self.config, gpus, self.network, precisions=tuple(self._residuals), pruned=pruned)
        guesses = filter(None, map(self.guess, all_candidates))
        return sorted(guesses, key=lambda guess: (guess.seconds, str(guess.candidate)))

    def may_fit(self, guess: Guess) -> bool:
        """Returns True if the candidate may fit, considering that estimates have errors."""
        return guess.memory.peak <= TOLERANCE * self.limit

    def peak(self, guess: Guess) -> float:
        """Returns a candidate's compiled peak in bytes, or the estimated one if the candidate was not compiled."""
        return self._peaks.get(guess.candidate, guess.memory.peak)

    def fits(self, guess: Guess) -> bool:
        """Returns True if the candidate fits, according to its compiled or otherwise its estimated peak."""
        return self.peak(guess) <= self.limit

    def guess(self, candidate: Candidate) -> Guess | None:
        """Estimates a candidate. Returns None if its sizes cannot be built, or if its precision is float8 but no
        product would use float8."""
        residuals = self._residuals[candidate.precision]
        row_residuals = residuals.per_row(candidate.remat, candidate.context, candidate.model)
        row_residuals_without_remat = residuals.per_row("none", candidate.context, candidate.model)
        if row_residuals is None or row_residuals_without_remat is None:
            return None
        overlaps = _guess_overlap_of_microbatches(self.config, candidate)
        schedule_fields = _schedule_fields(candidate.pipeline, candidate.microbatches, candidate.chunks, overlaps)
        scheme = Scheme(
            length=self.config.data.sequence_length, rows=candidate.rows, microbatches=candidate.microbatches,
            zero=candidate.zero, chunks=candidate.chunks, **schedule_fields | candidate.mesh,
            remat=candidate.remat, dtype=self.dtype(candidate.precision),
            float8_least=self.config.train.float8_least, overlap=_guess_overlap(candidate, overlaps),
            residual_bytes=row_residuals * candidate.rows / (candidate.context * candidate.pipeline),
            expert_round=self.config.model.expert_round or EXPERT_ROUND,
        )  # fmt: skip
        if scheme.dtype == "float8" and not uses_float8(self.shape, scheme):
            return None
        memory = estimate_memory(
            self.shape, scheme, row_residuals, row_residuals_without_remat, self._state,
            loss_chunk=self.config.train.loss_chunk_mib * 2**20,
        )  # fmt: skip
        step = estimate(self.shape, scheme, self.rates, self.network.domain)
        return Guess(candidate, scheme, step, memory, row_residuals, row_residuals_without_remat)

    def compile_plan(self, guess: Guess) -> Plan:
        """Compiles a candidate. Raises `ConfigError` if the candidate cannot be built."""
        candidate = guess.candidate
        devices = list(self.devices(candidate.gpus))
        domain_of = lambda device: device.id // self.network.domain
        spec = build_spec(candidate.applied_to(self.config), self.vocab, devices, lambda device: str(domain_of(device)))
        report = make_report(spec, domain_of, self.chip, self.rates)
        memory = report["memory"]
        self._peaks[candidate] = memory["peak"]
        return Plan(candidate, guess, _read_prediction(report), memory["peak"], memory["limit"], report)

    def distinct(self, guesses: Sequence[Guess]) -> list[Guess]:
        """Returns the guesses that may fit. Of several with equal estimates it returns only the first."""
        return _without_equal_estimates([guess for guess in guesses if self.may_fit(guess)])

    def best(
        self,
        guesses: Sequence[Guess],
        count: int,
        on_compiled: Callable[[str], None] = lambda text: None,
        on_start: Callable[[str], None] = lambda text: None,
    ) -> list[Plan]:
        """Compiles the best of `guesses`, which must be sorted by time, and returns the plans that fit, fastest first.

        It compiles `count` guesses, and if none of them fits, more until one fits. It calls `on_start` with a
        description before each compilation, and `on_compiled` with the result after it.
        """
        compiled: list[Plan] = []
        for guess in self._guesses_to_compile(self.distinct(guesses), count, compiled):
            start_seconds = time.perf_counter()
            on_start(describe(guess.candidate))
            try:
                plan = self.compile_plan(guess)
            except ConfigError as error:  # some errors only appear with the whole config
                on_compiled(f"{describe(guess.candidate)}: {error}")
                continue
            compile_text = f"{time.perf_counter() - start_seconds:.0f} s to compile"
            memory_text = size(plan.peak) + ("" if plan.fits else ", which does not fit")
            on_compiled(f"{describe(guess.candidate)}: {plan.seconds:.3g} s, {memory_text}, {compile_text}")
            compiled.append(plan)
        fitting = [plan for plan in compiled if plan.fits]
        return sorted(fitting, key=lambda plan: (plan.seconds, str(plan.candidate)))

    def _guesses_to_compile(self, guesses: Sequence[Guess], count: int, compiled: Sequence[Plan]) -> Iterator[Guess]:
        """Yields the guesses to compile, first the `count` fastest.

        The caller appends each result to `compiled`. As long as no plan there fits, this continues with at most 2
        `count` of the fastest that clearly fit by estimate, and then with the 2 `count` that need the least memory.
        """
        any_fits = lambda: any(plan.fits for plan in compiled)
        yield from guesses[:count]

        # If none fits, correct the estimates by the largest error so far, and try those that still fit clearly.
        remaining = guesses[count:]
        tried: set[Candidate] = set()
        for guess in remaining:
            if any_fits() or len(tried) == 2 * count:
                break
            if guess.memory.peak * _largest_underestimate(compiled) <= USABLE_SHARE * self.limit:
                tried.add(guess.candidate)
                yield guess

        # As a last resort, try those that need the least memory.
        untried = [guess for guess in remaining if guess.candidate not in tried]
        for guess in sorted(untried, key=lambda guess: guess.memory.peak)[: 2 * count]:
            if any_fits():
                return
            yield guess


def _largest_underestimate(compiled: Sequence[Plan]) -> float:
    """Returns the largest ratio of a compiled to an estimated peak; 1 if no estimate was too low."""
    return max([1.0, *(plan.peak / plan.guess.memory.peak for plan in compiled)])


def _read_prediction(report: dict[str, Any]) -> Prediction:
    """Returns the prediction that a report contains."""
    parts = report["prediction"]
    return Prediction(**{name: parts[f"{name}_seconds"] for name in Prediction.__dataclass_fields__})


def _without_equal_estimates(guesses: Sequence[Guess]) -> list[Guess]:
    """Returns the guesses, but only the first of several that have equal estimates."""
    first_by_estimate: dict[tuple[float, int], Guess] = {}
    for guess in guesses:
        first_by_estimate.setdefault((round(guess.seconds, 6), round(guess.memory.peak)), guess)
    return list(first_by_estimate.values())


def _guess_overlap_of_microbatches(config: Config, candidate: Candidate) -> bool:
    """Returns about what `train.overlap_microbatches` is for a candidate, whatever other settings and the groups of
    layers are."""
    requested = config.train.overlap_microbatches
    return (
        pays_to_overlap_microbatches(config, candidate.mesh, candidate.microbatches) if requested is None else requested
    )


def _guess_overlap(candidate: Candidate, overlaps_microbatches: bool) -> Overlap:
    """Returns about what `model.overlap: auto` chooses, without checking whether pieces are large enough for the
    ring."""
    if candidate.model == 1:
        return "off"
    if candidate.rows > 1:
        return "rows"
    return "ring" if candidate.pipeline == 1 and not overlaps_microbatches else "off"


@functools.cache
def _compile_devices(chip: Chip, gpus: int, per_host: int) -> Sequence[jax.Device]:
    """Returns at least `gpus` devices, in full hosts of `per_host`."""
    hosts = -(-gpus // per_host)
    return gpu_devices(chip, hosts, per_host)


@functools.cache
def _schedule_fields(stages: int, microbatches: int, chunks: int, side_by_side: bool) -> dict[str, Any]:
    """Returns the fields of `Scheme` that depend on the schedule."""
    name = "interleaved" if chunks > 1 else "1f1b"
    return schedule_of(build_schedule(name, stages, microbatches, chunks, side_by_side=side_by_side))


def describe(candidate: Candidate) -> str:
    """Describes a candidate in one line."""
    mesh = " × ".join(f"{axis} {size}" for axis, size in candidate.mesh.items() if size > 1) or "one device"
    rows = f"{candidate.rows} row{'s' * (candidate.rows > 1)}"
    stages = f", {candidate.chunks} chunks a stage" if candidate.chunks > 1 else ""
    zero = f", ZeRO {candidate.zero}" if candidate.fsdp * candidate.context * candidate.expert > 1 else ""
    precision = "" if candidate.precision is None else f", {candidate.precision}"
    return f"{mesh}, {rows}{stages}, remat {candidate.remat}{zero}{precision}"
