"""Writes metrics.jsonl, which has a record of each step and of each evaluation."""

import functools
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from jaxmnt.strict_json import finite
from jaxmnt.telemetry import clock
from jaxmnt.telemetry.events import METRICS
from jaxmnt.telemetry.phases import StepTimer
from jaxmnt.telemetry.progress import StatusLine
from jaxmnt.telemetry.writer import LineWriter
from jaxmnt.units import count, duration


class Rates(NamedTuple):
    """Constants with which the rates of a run are computed."""

    flops_per_token: float
    """Model FLOPs for each real target, forward and backward."""
    hardware_flops_per_token: float | None
    """FLOPs that the devices spend on each token, including padding and recomputation; None if they are not known."""
    peak_flops: float | None
    """Peak FLOP/s of all devices together; None if it is not known."""
    padded_tokens: int
    """Number of tokens in a step, including those that pad rows."""


class EvaluationSums(NamedTuple):
    """Sums over the held-out targets of a source or of an evaluation set."""

    loss: float
    """Sum of the cross-entropies, in nats."""
    tokens: int
    """Number of targets."""
    text_bytes: float | None = None
    """Number of UTF-8 bytes in the targets' text; None if it is not known."""
    reported: Mapping[str, tuple[float, float]] = {}
    """The loss's own metrics, by name: a sum, and the sum by which it is divided."""

    def plus(self, more: "EvaluationSums") -> "EvaluationSums":
        """Adds other sums to these. The number of bytes is known only if both numbers are."""
        text_bytes = None if self.text_bytes is None or more.text_bytes is None else self.text_bytes + more.text_bytes
        reported = dict(self.reported)
        for name, (total, weight) in more.reported.items():
            earlier_total, earlier_weight = reported.get(name, (0.0, 0.0))
            reported[name] = (earlier_total + total, earlier_weight + weight)
        return EvaluationSums(self.loss + more.loss, self.tokens + more.tokens, text_bytes, reported)

    @property
    def mean(self) -> float | None:
        """Mean loss in nats per token; None if there are no tokens."""
        return self.loss / self.tokens if self.tokens else None

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text, which is comparable between models with different tokenizers; None if
        they are not known."""
        return self.loss / math.log(2) / self.text_bytes if self.text_bytes else None


Cost = Callable[[float], str | None]
"""Function that gets the seconds until the end of the run, and returns a text that says what the run has cost so far
and will have cost by then; None if that is not known."""

OnStepFinished = Callable[[int, float, dict[str, Any]], None]

METRICS_OF_TARGETS = ("loss", "grad_norm", "model", "reported", "gradient_squares")
"""Metrics of a step that are undefined if its batch has no target."""


@dataclass(eq=False)
class TrainLog:
    """Keeps each step's metrics as device arrays, and reads them once the next step has been dispatched.

    Only process 0 writes and shows the metrics. All processes read them, because it is through the metrics that they
    agree on stops and saves.
    """

    run_dir: Path
    _: KW_ONLY
    writer: bool
    status: StatusLine
    steps: int
    tokens: int
    """Number of real targets that the run has trained on so far."""
    rates: Rates
    epochs: Callable[[int], dict[str, float]]
    timer: StepTimer
    attempt: int = 0
    log_every: int | None = None
    """Number of steps between two lines if neither the output nor that of `launch local` is a terminal.

    None means a line every few seconds.
    """
    cost: Cost | None = None
    on_step_finished: OnStepFinished = lambda step, seconds, values: None
    """Function that is called with each step, its seconds and its metrics, once the step has finished on the
    devices."""
    on_record_written: Callable[[dict[str, Any]], None] = lambda record: None
    """Function that is called with each record, in the process that writes it."""

    def __post_init__(self) -> None:
        self.stop_seen = False
        """True if some process asked for a stop in the last step that was read."""
        self.save_seen = 0
        """Last step in which some process asked for a checkpoint."""
        self.profile_seen = 0
        """Last step in which some process asked for a profile."""
        self.without_targets = 0
        """Number of steps since this start whose batch had no target."""
        self.latest: dict[str, Any] = {}
        """Record of the last step that was written. Other threads read it, so it must not be modified."""
        self._lines = LineWriter(self.run_dir / METRICS) if self.writer else None
        self._reported_mfu = False
        self._pending: tuple[int, dict[str, Array], float, str | None] | None = None
        self._ready_at = time.perf_counter()
        """Time at which the previous step was found to be finished, plus the pauses since then."""
        self._pace: float | None = None

    def push(self, step: int, metrics: dict[str, Array], wait_seconds: float, digest: str | None) -> None:
        """Keeps the metrics of a step that was just dispatched, and reads those of the step before it."""
        self.flush()
        self._pending = step, metrics, wait_seconds, digest

    def flush(self) -> None:
        """Waits for the end of the step whose metrics are still on the device, and reads them."""
        if self._pending is None:
            return
        (step, metrics, wait_seconds, digest), self._pending = self._pending, None
        with self.timer.during("device"):
            metrics = jax.device_get(metrics)
        values = jax.tree.map(lambda array: np.asarray(array).item(), metrics)
        if not values["tokens"]:
            self.without_targets += 1
            values |= {name: finite(values[name]) for name in METRICS_OF_TARGETS if name in values}

        now = time.perf_counter()
        step_seconds = max(1e-9, now - self._ready_at)
        self._ready_at = now

        self.tokens += int(values["tokens"])
        self.stop_seen = values["stop"] > 0
        if values["save"] > 0:
            self.save_seen = step
        if values["profile"] > 0:
            self.profile_seen = step

        if self._lines is not None:
            with self.timer.during("writing"):
                self._write(step, values, step_seconds, wait_seconds, digest)
        self.on_step_finished(step, step_seconds, values)

    def pause(self, seconds: float) -> None:
        """Excludes time spent on other work than steps (evaluation, a blocking save) from the step's time."""
        self._ready_at += seconds

    def restart_clock(self) -> None:
        """Times the next step from now on."""
        self._ready_at = time.perf_counter()

    def write_eval(
        self,
        step: int,
        sums: Mapping[str, EvaluationSums],
        seconds: float,
        sets: Collection[str] = (),
        exact_match: float | None = None,
        of_average: Mapping[str, EvaluationSums] | None = None,
    ) -> float | None:
        """Writes the mean loss over all held-out tokens, and that of each source. Returns the mean over all.

        A mean is None if there are no tokens. `sets` names the additional evaluation sets, which count toward the
        overall mean only if nothing else is held out. `exact_match` is the share of the samples that expect a text
        and have it; None if no sample expects any. `of_average` are the sums of the averaged parameters, if there are
        any; their mean is `average_loss`.
        """
        total = _held_out(sums, sets)
        if self._lines is None:
            return total.mean
        matches = {} if exact_match is None else {"exact_match": exact_match}
        sources = {name: _losses(source) for name, source in sums.items()}
        average, shown_average = {}, ""
        if of_average is not None:
            average = {"average_loss": _held_out(of_average, sets).mean}
            shown_average = f", of the average {_format_loss(average['average_loss'])}"
        self._record("eval", step, seconds=seconds, **_losses(total), **average, **matches, sources=sources)

        by_source = ""
        if len(sums) > 1:
            by_source = "".join(f", {name} {_format_loss(source.mean)}" for name, source in sums.items())
        bits = "" if total.bits_per_byte is None else f" ({total.bits_per_byte:.4f} bits per byte)"
        self.status.line(
            f"step {step}  held-out loss {_format_loss(total.mean)}{bits}{by_source}{shown_average} over "
            f"{count(total.tokens)} tokens ({duration(seconds)})"
            + ("" if exact_match is None else f", exact match {exact_match:.1%}")
        )
        return total.mean

    def settle(self) -> None:
        """Waits until all lines are written, so that a checkpoint does not get ahead of them, but for at most a few
        seconds."""
        if self._lines is not None:
            self._lines.settle()

    def close(self) -> None:
        """Closes the writer, which has a few seconds to write the pending lines."""
        if self._lines is not None:
            self._lines.close()

    def _write(
        self, step: int, values: dict[str, Any], step_seconds: float, wait_seconds: float, digest: str | None
    ) -> None:
        rate = values["tokens"] / step_seconds
        padded_rate = self.rates.padded_tokens / step_seconds
        mfu = self._share_of_peak(step, rate, self.rates.flops_per_token)
        hfu = self._share_of_peak(step, padded_rate, self.rates.hardware_flops_per_token)
        layer_metrics = values["model"]
        optional = {"model": layer_metrics} if layer_metrics else {}
        optional |= {"reported": values["reported"]} if "reported" in values else {}
        optional |= {"gradient_squares": values["gradient_squares"]} if "gradient_squares" in values else {}
        optional |= {"batch_digest": digest} if digest is not None else {}

        self.latest = self._record(
            "train",
            step,
            loss=values["loss"],
            grad_norm=values["grad_norm"],
            learning_rate=values["learning_rate"],
            tokens=self.tokens,
            tokens_per_second=rate,
            padded_tokens_per_second=padded_rate,
            step_seconds=step_seconds,
            data_wait_seconds=wait_seconds,
            mfu=mfu,
            hfu=hfu,
            epochs=self.epochs(step),
            bad_steps=values["bad_steps"],
            **optional,
        )

        # The ETA uses an exponential mean, since the times of single steps vary.
        self._pace = step_seconds if self._pace is None else 0.9 * self._pace + 0.1 * step_seconds
        every = None if self.status.live else self.log_every
        due = self.status.due if every is None else step % every == 0
        if due or step == self.steps:
            self._show(
                step, values, rate, mfu, min(1.0, wait_seconds / step_seconds), stays=step == self.steps or bool(every)
            )

    def _record(self, kind: str, step: int, **fields: Any) -> dict[str, Any]:
        """Writes a record, and returns it."""
        assert self._lines is not None
        record = {"kind": kind, "step": step, "time": clock.now(), "attempt": self.attempt, **fields}
        self._lines.write(record)
        self.on_record_written(record)
        return record

    def _show(
        self, step: int, values: dict[str, Any], rate: float, mfu: float | None, data_wait: float, *, stays: bool
    ) -> None:
        """Shows a step. On a terminal, shows in place as much as fits. A line that `stays` is the same everywhere."""
        assert self._pace is not None
        loss = "no targets" if values["loss"] is None else f"loss {values['loss']:.4f}"
        eta = f"ETA {duration((self.steps - step) * self._pace)}"
        share = [] if mfu is None else [f"MFU {mfu:.1%}"]
        if self.status.live and not stays:
            norm = [] if values["grad_norm"] is None else [f"grad norm {values['grad_norm']:.3g}"]
            cost = None if self.cost is None else self.cost((self.steps - step) * self._pace)
            parts = [loss, f"{count(rate)} tokens/s", eta, *share, *([cost] if cost else [])]
            parts += [f"lr {values['learning_rate']:.2e}", *norm, f"data wait {data_wait:.1%}"]
            self.status.progress(step, self.steps, parts)
            return
        parts = [loss, f"{count(rate)} tokens/s", *share, f"data wait {data_wait:.1%}", eta]
        (self.status.line if stays else self.status.update)("  ".join([f"step {step}/{self.steps}", *parts]))

    def _share_of_peak(self, step: int, per_second: float, flops: float | None) -> float | None:
        """Returns the share of the devices' peak that `flops` per token make up at this rate, or None if it is not
        known.

        A share above 1 is a bug of ours, which is reported once. Then the share is not returned.
        """
        peak = self.rates.peak_flops
        if peak is None or flops is None:
            return None
        if (share := per_second * flops / peak) <= 1:
            return share
        if not self._reported_mfu:
            self._reported_mfu = True
            self.status.line(
                f"WARNING step {step}: {count(per_second)} tokens/s of {count(flops)}FLOPs are {share:.0%} of the "
                f"devices' peak of {count(peak)}FLOP/s, which is impossible; such an MFU is written as null; please "
                "report this as a bug, with the kind of device"
            )
        return None


def _held_out(sums: Mapping[str, EvaluationSums], sets: Collection[str]) -> EvaluationSums:
    """Returns the sums over all held-out tokens. The evaluation `sets` count only if nothing else is held out."""
    held_out = {name: source for name, source in sums.items() if name not in sets} or sums
    return functools.reduce(EvaluationSums.plus, held_out.values(), EvaluationSums(0.0, 0, 0.0))


def _losses(sums: EvaluationSums) -> dict[str, Any]:
    """Returns the fields that record an evaluation or one of its parts."""
    bits = sums.bits_per_byte
    fields = {"loss": sums.mean, "tokens": sums.tokens} | ({} if bits is None else {"bits_per_byte": bits})
    ratios = {name: total / weight if weight else None for name, (total, weight) in sorted(sums.reported.items())}
    return fields | ({"reported": ratios} if ratios else {})


def _format_loss(loss: float | None) -> str:
    return "none (no targets)" if loss is None else f"{loss:.4f}"
