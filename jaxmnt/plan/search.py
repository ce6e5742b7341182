"""Finds the best mesh for a config and a number of GPUs: estimates all candidates and compiles the best few."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxmnt.config.schema import Config
from jaxmnt.distributed.gpu_settings import OUR_MEMORY_FRACTION
from jaxmnt.errors import ConfigError
from jaxmnt.models.contract import define
from jaxmnt.models.registry import build_family
from jaxmnt.parallel.sharding import Overlap
from jaxmnt.plan.budget import make_report
from jaxmnt.plan.candidates import Candidate, candidates, precision_setting
from jaxmnt.plan.chips import Chip, Network
from jaxmnt.plan.estimate import Estimate, estimate, uses_float8
from jaxmnt.plan.memory import Memory, ResidualBytes, estimate_memory
from jaxmnt.plan.predict import Prediction
from jaxmnt.plan.rates import Rates
from jaxmnt.plan.targets import gpu_devices
from jaxmnt.plan.workload import Scheme, model_shape, schedule_of
from jaxmnt.plan.zero import ROOM as CLEAR_ROOM
from jaxmnt.training.build import build_spec
from jaxmnt.training.pipeline_schedule import build_schedule
from jaxmnt.units import size

ROOM = 1.06
"""Accept candidates whose estimated peak is at most this multiple of device memory; few estimates are off by more
(`benchmarks/plan_estimates.py`), and the compiler decides."""


@dataclass(frozen=True)
class Guess:
    """A candidate with its estimated time and memory."""

    candidate: Candidate
    scheme: Scheme
    estimate: Estimate
    memory: Memory
    kept_of_row: float
    kept_at_most: float

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
    limit: int
    report: dict[str, Any]

    @property
    def seconds(self) -> float:
        return self.prediction.seconds

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit


class Search:
    """The search for one config and target. Its cached results serve every number of GPUs. `precisions` are tried for
    every mesh; if empty, only the config's own.

    Raises `ConfigError` for a config that cannot be searched.
    """

    def __init__(self, config: Config, chip: Chip, network: Network, rates: Rates, precisions: Sequence[str] = ()):
        assert config.model.vocab_size is not None
        if config.mesh.rules:
            raise ConfigError("mesh.rules: the search is for meshes by the usual rules; leave it out")
        self.config, self.chip, self.network, self.rates = config, chip, network, rates
        self.vocab = config.model.vocab_size
        self.definition = define(build_family(config.model, self.vocab))
        self.shape = model_shape(self.definition)
        self.limit = round(OUR_MEMORY_FRACTION * chip.memory)
        self.precisions = precisions
        self._peaks: dict[Candidate, int] = {}
        """Compiled peaks in bytes."""
        self._kept: dict[str | None, ResidualBytes] = {}
        for precision in precisions or (None,):
            if (dtype := self.dtype(precision)) not in rates.products:
                key = "--precisions" if precisions else "train.precision"
                raise ConfigError(f"{key}: {chip.kind} has no products in {dtype}; choose another")
            setting = precision_setting(precision)
            self._kept[precision] = ResidualBytes(
                config.changed(setting), self.vocab, lambda count: self.devices(count)[:count]
            )
        self._state = next(iter(self._kept.values())).state()

    def devices(self, gpus: int) -> Sequence[jax.Device]:
        """Returns the devices to compile for."""
        return _devices(self.chip, gpus, min(self.network.devices_per_host, gpus))

    def dtype(self, precision: str | None) -> str:
        """Returns the dtype of matrix products on GPUs."""
        precision = precision or self.config.train.precision
        return "bfloat16" if precision == "auto" else precision

    def guesses(self, gpus: int, *, pruned: bool = True) -> list[Guess]:
        """Returns all candidates with their estimates, fastest first."""
        ways = candidates(self.config, gpus, self.network, precisions=tuple(self._kept), pruned=pruned)
        guesses = filter(None, map(self.guess, ways))
        return sorted(guesses, key=lambda guess: (guess.seconds, str(guess.candidate)))

    def may_fit(self, guess: Guess) -> bool:
        """Returns True if it may fit, given the error of estimates."""
        return guess.memory.peak <= ROOM * self.limit

    def peak(self, guess: Guess) -> float:
        """Returns the compiled peak in bytes, or the estimated one if it was not compiled."""
        return self._peaks.get(guess.candidate, guess.memory.peak)

    def fits(self, guess: Guess) -> bool:
        """Returns True if it fits by its compiled peak or, if it was not compiled, by its estimated one."""
        return self.peak(guess) <= self.limit

    def guess(self, one: Candidate) -> Guess | None:
        """Estimates a candidate. Returns None for sizes that cannot be built, and for float8 if no product would use
        it."""
        row, at_most = (self._kept[one.precision].of_row(remat, one.model) for remat in (one.remat, "none"))
        if row is None or at_most is None:
            return None
        scheme = Scheme(
            length=self.config.data.sequence_length, rows=one.rows, microbatches=one.microbatches, zero=one.zero,
            chunks=one.chunks, **_schedule(one.pipeline, one.microbatches, one.chunks) | one.mesh,
            remat=one.remat, dtype=self.dtype(one.precision), float8_least=self.config.train.float8_least,
            overlap=_overlap(one), kept=row * one.rows / one.pipeline,
        )  # fmt: skip
        if scheme.dtype == "float8" and not uses_float8(self.shape, scheme):
            return None
        memory = estimate_memory(
            self.shape, scheme, row, at_most, self._state, loss_chunk=self.config.train.loss_chunk_mib * 2**20
        )
        found = estimate(self.shape, scheme, self.rates, self.network.domain)
        return Guess(one, scheme, found, memory, row, at_most)

    def compiled(self, guess: Guess) -> Plan:
        """Compiles a candidate. Raises `ConfigError` if it cannot be built."""
        one = guess.candidate
        devices, domain = list(self.devices(one.gpus)), self.network.domain
        host = lambda device: device.id // domain
        spec = build_spec(one.applied_to(self.config), self.vocab, devices, lambda device: str(host(device)))
        report = make_report(spec, host, self.chip, self.rates)
        memory = report["memory"]
        self._peaks[one] = memory["peak"]
        return Plan(one, guess, _prediction(report), memory["peak"], memory["limit"], report)

    def distinct(self, guesses: Sequence[Guess]) -> list[Guess]:
        """Returns the guesses that may fit, without those that another one equals."""
        return _distinct([guess for guess in guesses if self.may_fit(guess)])

    def best(
        self,
        guesses: Sequence[Guess],
        count: int,
        told: Callable[[str], None] = lambda text: None,
        begun: Callable[[str], None] = lambda text: None,
    ) -> list[Plan]:
        """Compiles the best of `guesses`, which are sorted by time, and returns the plans that fit, fastest first. It
        compiles `count` of them, and more until one fits. It calls `on_start` before each compilation and `on_compiled`
        with its result."""
        compiled = list[Plan]()
        for guess in self._in_turn(self.distinct(guesses), count, compiled):
            began = time.perf_counter()
            begun(describe(guess.candidate))
            try:
                plan = self.compiled(guess)
            except ConfigError as error:  # what only the whole config shows
                told(f"{describe(guess.candidate)}: {error}")
                continue
            took = f"{time.perf_counter() - began:.0f} s to compile"
            room = size(plan.peak) + ("" if plan.fits else ", which does not fit")
            told(f"{describe(guess.candidate)}: {plan.seconds:.3g} s, {room}, {took}")
            compiled.append(plan)
        fitting = [plan for plan in compiled if plan.fits]
        return sorted(fitting, key=lambda plan: (plan.seconds, str(plan.candidate)))

    def _in_turn(self, guesses: Sequence[Guess], count: int, compiled: Sequence[Plan]) -> Iterator[Guess]:
        """Yields the guesses to compile: the `count` fastest. While none of the plans in `compiled` fits, it goes on
        with at most 2 `count` of the fastest with clear room, then with as many that need least memory."""
        fits = lambda: any(plan.fits for plan in compiled)
        yield from guesses[:count]
        left, tried = guesses[count:], set[Candidate]()
        for guess in left:
            if fits() or len(tried) == 2 * count:
                break
            if guess.memory.peak * _exceeded(compiled) <= CLEAR_ROOM * self.limit:
                tried.add(guess.candidate)
                yield guess
        untried = [guess for guess in left if guess.candidate not in tried]
        for guess in sorted(untried, key=lambda guess: guess.memory.peak)[: 2 * count]:
            if fits():
                return
            yield guess


def _exceeded(compiled: Sequence[Plan]) -> float:
    """Returns the largest ratio of compiled to estimated peak, at least 1."""
    return max([1.0, *(plan.peak / plan.guess.memory.peak for plan in compiled)])


def _prediction(report: dict[str, Any]) -> Prediction:
    parts = report["prediction"]
    return Prediction(**{name: parts[f"{name}_seconds"] for name in Prediction.__dataclass_fields__})


def _distinct(guesses: Sequence[Guess]) -> list[Guess]:
    """Returns the first of all guesses with equal estimates."""
    found: dict[tuple[float, int], Guess] = {}
    for guess in guesses:
        found.setdefault((round(guess.seconds, 6), round(guess.memory.peak)), guess)
    return list(found.values())


def _overlap(one: Candidate) -> Overlap:
    """Approximates what `model.overlap` auto chooses: the ring needs large enough pieces."""
    if one.model == 1:
        return "off"
    return "rows" if one.rows > 1 else "ring" if one.pipeline == 1 else "off"


@functools.cache
def _devices(chip: Chip, gpus: int, per_host: int) -> Sequence[jax.Device]:
    """Returns enough devices for this number of GPUs, in whole hosts."""
    return gpu_devices(chip, -(-gpus // per_host), per_host)


@functools.cache
def _schedule(stages: int, microbatches: int, chunks: int) -> dict[str, Any]:
    """Returns the fields of `Scheme` that depend on a pipeline's schedule."""
    if stages == 1:
        return {"ticks": microbatches}
    schedule = build_schedule("interleaved" if chunks > 1 else "1f1b", stages, microbatches, chunks)
    return schedule_of(schedule)


def describe(one: Candidate) -> str:
    """Describes a candidate in one line."""
    mesh = " × ".join(f"{axis} {size}" for axis, size in one.mesh.items() if size > 1) or "one device"
    rows = f"{one.rows} row{'s' * (one.rows > 1)}"
    stages = f", {one.chunks} chunks a stage" if one.chunks > 1 else ""
    zero = f", ZeRO {one.zero}" if one.fsdp > 1 else ""
    precision = "" if one.precision is None else f", {one.precision}"
    return f"{mesh}, {rows}{stages}, remat {one.remat}{zero}{precision}"
