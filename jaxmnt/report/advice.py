"""What a run could do better, by rules, each with its evidence in numbers."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmnt.report.history import Attempt, Record, events_of, number
from jaxmnt.report.noise import STEPS, noise_scale
from jaxmnt.telemetry.reliability import best_interval, seconds_between_failures
from jaxmnt.units import size, span


@dataclass(frozen=True)
class Advice:
    rule: str
    evidence: str
    """What was seen."""
    do: str
    """What to set, or where to look."""
    share: float
    """Of the time of the run, about, that it costs; 0 if that is not known."""


@dataclass(frozen=True)
class _RunView:
    """What the rules look at."""

    attempts: Sequence[Attempt]
    config: Mapping[str, Any]
    """By dotted keys."""
    typical: float
    """Seconds of a step."""
    phases: Mapping[str, float]
    """Seconds of each phase in a step, on average over processes."""
    program: Record
    """The event of the newest compile: what was expected of it, and its memory."""

    @property
    def running(self) -> float:
        """Seconds of all attempts."""
        return sum(attempt.seconds for attempt in self.attempts)

    @property
    def on_cpu(self) -> bool:
        environment = self.attempts[-1].start.get("environment")
        return isinstance(environment, dict) and environment.get("device kind") == "cpu"


def advise(
    attempts: Sequence[Attempt], config: Mapping[str, Any], typical: float, phase_lines: Sequence[Record]
) -> list[Advice]:
    """Those rules that apply, what costs most first."""
    if not math.isfinite(typical):
        return []
    program = (events_of(attempts, "compile") or [{}])[-1]
    seen = _RunView(attempts, config, typical, _mean_phases(phase_lines), program)
    found = [one for rule in RULES for one in rule(seen)]
    return sorted(found, key=lambda one: (-one.share, one.rule, one.evidence))


def _mean_phases(lines: Sequence[Record]) -> dict[str, float]:
    told = [line["mean"] for line in lines if line["kind"] == "phases" and isinstance(line.get("mean"), dict)]
    names = sorted({name for one in told for name in one})
    return {name: statistics.fmean(number(one, name) for one in told) for name in names}


EXPOSED, IDLE, MEMORY = 0.15, 0.10, 0.6
"""Shares of a step, waiting for communication or in an idle stage, from which on a rule speaks; the share of memory
below which it is called unused."""
_INPUT, _SLOWER, _EVALUATION = 0.05, 1.2, 0.10
"""The same of waiting for input, and of evaluations; and times what is expected of a step."""


def _input(seen: _RunView) -> Iterator[Advice]:
    share = seen.phases.get("data", 0.0) / seen.typical
    if share > _INPUT:
        yield Advice(
            "input-bound",
            f"a process waits {1e3 * seen.phases['data']:.0f} ms of a step for its input, {share:.0%} of it",
            "raise data.read_threads or data.prefetch; put the data on a local disk (data.stage_dir)",
            share,
        )


def _communication(seen: _RunView) -> Iterator[Advice]:
    links = seen.program.get("expected_exposed_seconds")
    if not isinstance(links, dict) or not links:
        return
    axis = max(sorted(links), key=lambda name: number(links, name))
    exposed, step = sum(number(links, name) for name in links), number(seen.program, "expected_step_seconds")
    if step and exposed / step > EXPOSED:
        yield Advice(
            "communication-bound",
            f"of an expected step of {step:.3g} s the devices wait {exposed:.3g} s for communication, most of it "
            f"along mesh.{axis} ({number(links, axis):.3g} s)",
            "python -m jaxmnt.plan looks for a mesh that waits less",
            exposed / step,
        )


def _expected(seen: _RunView) -> Iterator[Advice]:
    step = number(seen.program, "expected_step_seconds")
    if step and seen.typical > _SLOWER * step:
        yield Advice(
            "slower than expected",
            f"a step takes {seen.typical:.3g} s, {seen.typical / step:.2f} times what is expected of its devices with "
            f"the network of their vendor's systems ({step:.3g} s)",
            "look for slow hosts and input in the report, and at a profile (telemetry.profile_at)",
            1 - step / seen.typical,
        )


def _bubble(seen: _RunView) -> Iterator[Advice]:
    idle = number(seen.program, "idle_share")
    share = idle / (1 + idle)
    if share > IDLE:
        yield Advice(
            "bubble",
            f"stages of the pipeline are idle for {share:.0%} of a step",
            "have more microbatches (a smaller train.microbatch_size, or a larger batch), fewer stages, or "
            "pipeline.schedule=interleaved",
            share,
        )


def _memory(seen: _RunView) -> Iterator[Advice]:
    memory = seen.program.get("memory")
    if not isinstance(memory, dict) or not number(memory, "limit"):
        return
    used = number(memory, "peak") / number(memory, "limit")
    if used >= MEMORY:
        return
    evidence = f"a step uses {size(number(memory, 'peak'))}, {used:.0%} of a device's memory"
    if seen.config.get("train.remat") in ("full", "dots"):
        if seen.on_cpu:
            return  # computing again is often quicker there than going through memory
        less = "dots" if seen.config["train.remat"] == "full" else "none"
        yield Advice("remat not needed", evidence, f"try train.remat={less}: backward computes less again", 0.0)
    elif number(seen.program, "microbatches") > 1:
        yield Advice("memory unused", evidence, "try a larger train.microbatch_size: larger products attain more", 0.0)


def _checkpoints(seen: _RunView) -> Iterator[Advice]:
    """Too often or too rarely, by what an interval t costs: C / t for saves and t / 2M for steps that are lost."""
    commits = events_of(seen.attempts, "checkpoint_commit")
    blocked = [number(record, "blocked_seconds") for record in commits]
    cost = statistics.fmean(blocked) if blocked else 0.0
    work = sum(number(line, "step_seconds") for attempt in seen.attempts for line in attempt.steps)
    if len(commits) < 3 or not cost or not work:
        return
    config = seen.config
    if config.get("checkpoint.every_minutes") == "auto" and config.get("checkpoint.every_steps") == 0:
        return  # it weighs the same by itself
    failures = sum(attempt.end in ("failed", "hang", "peer_lost", None) for attempt in seen.attempts[:-1])
    mean, known = seconds_between_failures(
        config.get("checkpoint.hours_between_failures"), failures, seen.running, seen.attempts[-1].devices
    )
    best, taken = best_interval(cost, mean), work / len(commits)
    lost = lambda interval: cost / interval + interval / (2 * mean)
    if lost(taken) - lost(best) > 0.005:
        often = "often" if taken < best else "rarely"
        yield Advice(
            f"checkpoints too {often}",
            f"a save every {span(taken)}, which blocks training for {cost:.2g} s, where {span(best)} would lose least "
            f"with a failure about every {span(mean)} ({'by published rates' if known == 'assumed' else known})",
            "set checkpoint.every_minutes: auto and checkpoint.every_steps: 0",
            lost(taken) - lost(best),
        )


def _slow_hosts(seen: _RunView) -> Iterator[Advice]:
    slow = {}
    for record in seen.attempts[-1].events:
        if record["kind"] == "straggler":
            slow[_who(record)] = number(record, "slower_seconds")
        elif record["kind"] == "straggler_over":
            slow.pop(_who(record), None)
    for who, slower in sorted(slow.items()):
        yield Advice(
            "slow host",
            f"process {who[0]} on {who[1]} holds the others up by {1e3 * slower:.0f} ms a step in {who[2]}",
            "see python -m jaxmnt.preflight on it; leave the host out",
            slower / seen.typical,
        )


def _who(record: Record) -> tuple[int, str, str]:
    place = record.get("at_fault")
    return (-1 if place is None else place, str(record.get("at_fault_host")), str(record.get("phase")))


def _recompilations(seen: _RunView) -> Iterator[Advice]:
    # Of another config the program is another one.
    changed = lambda attempt: any(record["kind"] == "config_change" for record in attempt.events)
    laps = [attempt.laps.get("compile", 0.0) for attempt in seen.attempts if not changed(attempt)]
    again = sum(laps[1:])
    if len(laps) > 1 and laps[0] and again / len(laps[1:]) > max(20.0, 0.5 * laps[0]) and seen.running:
        yield Advice(
            "recompilations",
            f"{len(laps) - 1} restarts compiled for {again:.0f} s, though the program was known",
            "set run.compile_cache to a folder that all hosts share and that stays",
            again / seen.running,
        )


def _evaluations(seen: _RunView) -> Iterator[Advice]:
    seconds = sum(number(line, "seconds") for attempt in seen.attempts for line in attempt.evals)
    share = seconds / seen.running if seen.running else 0.0
    if share > _EVALUATION:
        yield Advice("evaluations", f"evaluations take {share:.0%} of the time", "raise train.eval_every", share)


def _learning_rate(seen: _RunView) -> Iterator[Advice]:
    for attempt in seen.attempts:
        changes = {record.get("key"): record for record in attempt.events if record["kind"] == "config_change"}
        batch = changes.get("data.global_batch_size")
        if batch is None or "optimizer.learning_rate" in changes:
            continue
        before, now = number(batch, "before"), number(batch, "now")
        if before and now:
            yield Advice(
                "learning rate",
                f"attempt {attempt.number} went on with {now:g} rows a step instead of {before:g}, at the same rate",
                f"with AdamW, multiply optimizer.learning_rate by {math.sqrt(now / before):.2f}, the root of the ratio "
                "(Malladi et al. 2022, arXiv:2205.10287)",
                0.0,
            )


def _batch(seen: _RunView) -> Iterator[Advice]:
    """Of a batch as large as the noise scale the loss needs twice the tokens that the smallest batches need."""
    rows = number(seen.program, "rows")
    # Of another attempt small batches may have had another size.
    lines = next((one.steps for one in reversed(seen.attempts) if seen.program in one.events), ())
    lines = [line for line in lines if line.get("gradient_squares")]
    scale = noise_scale(lines, number(seen.program, "rows_of_small_batches"), rows)
    if scale is not None and rows > scale and len(lines) >= STEPS:
        yield Advice(
            "batch beyond the critical size",
            f"a step has {rows:g} rows, and the gradient noise scale of the last {STEPS} steps is "
            f"{scale:,.3g} rows: a loss needs about {1 + rows / scale:.1f} times the tokens that small batches need",
            "lower data.global_batch_size for fewer tokens, keep it for fewer steps (McCandlish et al. 2018, "
            "arXiv:1812.06162)",
            0.0,
        )


RULES: tuple[Callable[[_RunView], Iterator[Advice]], ...] = (
    _input, _communication, _expected, _bubble, _memory, _checkpoints, _slow_hosts, _recompilations, _evaluations,
    _learning_rate, _batch,
)  # fmt: skip


def advice_text(report: Mapping[str, Any]) -> str:
    """For a terminal."""
    lines = []
    for run in report["runs"]:
        if not run["advice"]:
            lines.append(f"advice  {run['label']}: nothing that the rules know would make it faster")
        for one in run["advice"]:
            share = f" (about {one['share']:.1%} of the time)" if one["share"] else ""
            lines.append(f"advice  {one['rule']}{share}: {one['evidence']}; {one['do']}")
    return "\n".join(lines)
