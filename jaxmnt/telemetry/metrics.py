"""metrics.jsonl: what is recorded of each step."""

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
    """What rates of a run are measured by."""

    flops_per_token: float
    """Model FLOPs of a real target, forward and backward."""
    hardware_flops_per_token: float | None
    """Those that the devices take for each token, padding too, with what is computed again; None if not known."""
    peak_flops: float | None
    """Of all devices together; None if it is not known."""
    padded_tokens: int
    """Of a step: real ones, and those that fill rows up."""


class EvaluationSums(NamedTuple):
    """Sums over the held-out targets of a source or set."""

    loss: float
    """Cross-entropy in nats."""
    tokens: int
    """How many targets there are."""
    text_bytes: float | None = None
    """UTF-8 bytes of their text; None if that is not known."""

    def plus(self, other: "EvaluationSums") -> "EvaluationSums":
        known = None if self.text_bytes is None or other.text_bytes is None else self.text_bytes + other.text_bytes
        return EvaluationSums(self.loss + other.loss, self.tokens + other.tokens, known)

    @property
    def mean(self) -> float | None:
        """Nats a token; None over no token."""
        return self.loss / self.tokens if self.tokens else None

    @property
    def bits_per_byte(self) -> float | None:
        """Bits a byte of text: what compares models of different tokenizers."""
        return self.loss / math.log(2) / self.text_bytes if self.text_bytes else None


Cost = Callable[[float], str | None]
"""In words: what is spent, and what will be in so many seconds; None if that is not known."""

Finished = Callable[[int, float, dict[str, Any]], None]

MEANS_OVER_TARGETS = ("loss", "grad_norm", "model", "gradient_squares")
"""Metrics of a step that have no value if its batch has no target."""


@dataclass(eq=False)
class TrainLog:
    """Takes each step's metrics as device arrays and reads them when the next step has been dispatched.

    Only process 0 writes and shows; all processes read, because stops and saves are agreed on through the metrics.
    """

    run_dir: Path
    _: KW_ONLY
    writer: bool
    status: StatusLine
    steps: int
    tokens: int
    """Real targets trained on so far."""
    rates: Rates
    epochs: Callable[[int], dict[str, float]]
    timer: StepTimer
    attempt: int = 0
    log_every: int | None = None
    """Steps between two lines of output that is not a terminal; by default some seconds."""
    cost: Cost | None = None
    finished: Finished = lambda step, seconds, values: None
    """Called with each step that is found finished on the devices, its seconds and its metrics."""
    written: Callable[[dict[str, Any]], None] = lambda record: None
    """Called with each line, by the one that writes."""

    def __post_init__(self) -> None:
        self.stop_seen = False
        """Whether some process wished to stop in the last step that was read."""
        self.save_seen = 0
        """The last step in which some process wished to save."""
        self.profile_seen = 0
        """The last step in which some process wished for a profile."""
        self.without_targets = 0
        """Steps since this start whose batch had no target."""
        self.latest: dict[str, Any] = {}
        """The record of the last step that was written. Not to be changed; for other threads to read."""
        self._lines = LineWriter(self.run_dir / METRICS) if self.writer else None
        self._refused_mfu = False
        self._pending: tuple[int, dict[str, Array], float, str | None] | None = None
        self._ready_at = time.perf_counter()
        """When the step before was found finished, but for pauses since."""
        self._pace: float | None = None

    def push(self, step: int, metrics: dict[str, Array], wait_seconds: float, digest: str | None) -> None:
        """Notes the metrics of a step just dispatched, and reads those of the step before it."""
        self.flush()
        self._pending = step, metrics, wait_seconds, digest

    def flush(self) -> None:
        """Reads the metrics that are still on the device, waiting for their step to end."""
        if self._pending is None:
            return
        (step, metrics, wait_seconds, digest), self._pending = self._pending, None
        with self.timer.during("device"):
            metrics = jax.device_get(metrics)
        values = jax.tree.map(lambda value: np.asarray(value).item(), metrics)
        if not values["tokens"]:
            self.without_targets += 1
            values |= {name: finite(values[name]) for name in MEANS_OVER_TARGETS if name in values}
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
        self.finished(step, step_seconds, values)

    def pause(self, seconds: float) -> None:
        """Time spent on something else than steps (evaluation, a blocking save): not part of a step's time."""
        self._ready_at += seconds

    def restart_clock(self) -> None:
        """Steps are timed from now on."""
        self._ready_at = time.perf_counter()

    def write_eval(
        self, step: int, sums: Mapping[str, EvaluationSums], seconds: float, sets: Collection[str] = ()
    ) -> float | None:
        """Writes the mean loss over all held-out tokens, which it returns, and of each source. Means over no token are
        None.

        `sets` are the names of those that are evaluated besides, and count into the mean only if nothing else is held
        out.
        """
        own = {name: one for name, one in sums.items() if name not in sets} or sums
        total = functools.reduce(EvaluationSums.plus, own.values())
        if self._lines is None:
            return total.mean
        self._record("eval", step, seconds=seconds, **_losses(total), sources={n: _losses(s) for n, s in sums.items()})
        each = "".join(f", {name} {_shown(one.mean)}" for name, one in sums.items()) if len(sums) > 1 else ""
        bits = "" if total.bits_per_byte is None else f" ({total.bits_per_byte:.4f} bits per byte)"
        self.status.line(
            f"step {step}  held-out loss {_shown(total.mean)}{bits}{each} over {count(total.tokens)} tokens "
            f"({duration(seconds)})"
        )
        return total.mean

    def settle(self) -> None:
        """Waits until lines are written, or a few seconds: what a checkpoint has trained on shall be in them."""
        if self._lines is not None:
            self._lines.settle()

    def close(self) -> None:
        """Lines that are on their way have a few seconds."""
        if self._lines is not None:
            self._lines.close()

    def _write(
        self, step: int, values: dict[str, Any], step_seconds: float, wait_seconds: float, digest: str | None
    ) -> None:
        rate = values["tokens"] / step_seconds
        padded_rate = self.rates.padded_tokens / step_seconds
        mfu = self._share_of_peak(step, rate, self.rates.flops_per_token)
        hfu = self._share_of_peak(step, padded_rate, self.rates.hardware_flops_per_token)
        optional = {"model": values["model"]} if values["model"] else {}
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
        self._pace = step_seconds if self._pace is None else 0.9 * self._pace + 0.1 * step_seconds
        every = None if self.status.live else self.log_every
        due = self.status.due if every is None else step % every == 0
        if due or step == self.steps:
            self._show(
                step, values, rate, mfu, min(1.0, wait_seconds / step_seconds), stays=step == self.steps or bool(every)
            )

    def _record(self, kind: str, step: int, **fields: Any) -> dict[str, Any]:
        """Writes a line, and returns it."""
        assert self._lines is not None
        record = {"kind": kind, "step": step, "time": clock.now(), "attempt": self.attempt, **fields}
        self._lines.write(record)
        self.written(record)
        return record

    def _show(
        self, step: int, values: dict[str, Any], rate: float, mfu: float | None, data_wait: float, *, stays: bool
    ) -> None:
        """On a terminal what fits there, in place; a line that stays is the same everywhere."""
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
        """What so many FLOPs for each are of the devices' peak. More than all of it is a mistake of ours."""
        peak = self.rates.peak_flops
        if peak is None or flops is None:
            return None
        if (share := per_second * flops / peak) <= 1:
            return share
        if not self._refused_mfu:
            self._refused_mfu = True
            self.status.line(
                f"WARNING step {step}: {count(per_second)} tokens/s of {count(flops)}FLOPs are {share:.0%} of the "
                f"devices' peak of {count(peak)}FLOP/s, which cannot be; such an MFU is written as null; please "
                "report this as a bug, with the devices' kind"
            )
        return None


def _losses(sums: EvaluationSums) -> dict[str, Any]:
    """Returns what a line says of an evaluation or of one of its parts."""
    bits = sums.bits_per_byte
    return {"loss": sums.mean, "tokens": sums.tokens} | ({} if bits is None else {"bits_per_byte": bits})


def _shown(loss: float | None) -> str:
    return "none (no targets)" if loss is None else f"{loss:.4f}"
