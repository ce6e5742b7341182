"""Advice on a run: rules that suggest improvements, each with its evidence in numbers."""

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
    """The observation that triggered the rule."""
    do: str
    """The setting to change, or where to look."""
    share: float
    """Approximate share of the run's time that the problem costs; 0 if unknown."""


@dataclass(frozen=True)
class _RunView:
    """The input of the rules."""

    attempts: Sequence[Attempt]
    config: Mapping[str, Any]
    """The settings, by dotted key."""
    typical: float
    """Median seconds of a step."""
    phases: Mapping[str, float]
    """Seconds that each phase takes in a step, averaged over processes."""
    program: Record
    """The newest compile event, with the expected step time and the memory of the program."""

    @property
    def running(self) -> float:
        """Total seconds of all attempts."""
        return sum(attempt.seconds for attempt in self.attempts)

    @property
    def on_cpu(self) -> bool:
        environment = self.attempts[-1].start.get("environment")
        return isinstance(environment, dict) and environment.get("device kind") == "cpu"


def advise(
    attempts: Sequence[Attempt], config: Mapping[str, Any], typical: float, phase_lines: Sequence[Record]
) -> list[Advice]:
    """Returns the advice of all rules that apply, the most costly first."""
    if not math.isfinite(typical):
        return []
    program = (events_of(attempts, "compile") or [{}])[-1]
    run = _RunView(attempts, config, typical, _mean_phases(phase_lines), program)
    advice = [entry for rule in RULES for entry in rule(run)]
    return sorted(advice, key=lambda entry: (-entry.share, entry.rule, entry.evidence))


def _mean_phases(lines: Sequence[Record]) -> dict[str, float]:
    means = [line["mean"] for line in lines if line["kind"] == "phases" and isinstance(line.get("mean"), dict)]
    names = sorted({name for mean in means for name in mean})
    return {name: statistics.fmean(number(mean, name) for mean in means) for name in names}


EXPOSED_SHARE = 0.15
"""Advice is given if waiting for communication takes a larger share of a step."""
IDLE_SHARE = 0.10
"""Advice is given if pipeline stages are idle for a larger share of a step."""
MEMORY_SHARE = 0.6
"""Memory counts as unused if the peak is a smaller share of the limit."""
_INPUT_SHARE = 0.05
"""Advice is given if waiting for input takes a larger share of a step."""
_SLOWDOWN = 1.2
"""Advice is given if a step takes more than this multiple of the expected time."""
_EVALUATION_SHARE = 0.10
"""Advice is given if evaluations take a larger share of the run."""


def _input_bound(run: _RunView) -> Iterator[Advice]:
    share = run.phases.get("data", 0.0) / run.typical
    if share > _INPUT_SHARE:
        yield Advice(
            "input-bound",
            f"a process waits {1e3 * run.phases['data']:.0f} ms per step for its input, {share:.0%} of the step",
            "raise data.read_threads or data.prefetch; put the data on a local disk (data.stage_dir)",
            share,
        )


def _communication_bound(run: _RunView) -> Iterator[Advice]:
    by_axis = run.program.get("expected_exposed_seconds")
    if not isinstance(by_axis, dict) or not by_axis:
        return
    axis = max(sorted(by_axis), key=lambda name: number(by_axis, name))
    exposed = sum(number(by_axis, name) for name in by_axis)
    step = number(run.program, "expected_step_seconds")
    if step and exposed / step > EXPOSED_SHARE:
        yield Advice(
            "communication-bound",
            f"in an expected step of {step:.3g} s, the devices wait {exposed:.3g} s for communication, most of it "
            f"along mesh.{axis} ({number(by_axis, axis):.3g} s)",
            "python -m jaxmnt.plan searches for a mesh with less waiting",
            exposed / step,
        )


def _slower_than_expected(run: _RunView) -> Iterator[Advice]:
    step = number(run.program, "expected_step_seconds")
    if step and run.typical > _SLOWDOWN * step:
        yield Advice(
            "slower than expected",
            f"a step takes {run.typical:.3g} s, {run.typical / step:.2f} times the time expected of its devices "
            f"with the network of their vendor's systems ({step:.3g} s)",
            "check the report for slow hosts and slow input, and take a profile (telemetry.profile_at)",
            1 - step / run.typical,
        )


def _pipeline_bubble(run: _RunView) -> Iterator[Advice]:
    idle = number(run.program, "idle_share")
    share = idle / (1 + idle)
    if share > IDLE_SHARE:
        yield Advice(
            "bubble",
            f"stages of the pipeline are idle for {share:.0%} of a step",
            "use more microbatches (a smaller train.microbatch_size, or a larger batch), fewer stages, or "
            "pipeline.schedule=interleaved",
            share,
        )


def _unused_memory(run: _RunView) -> Iterator[Advice]:
    memory = run.program.get("memory")
    if not isinstance(memory, dict) or not number(memory, "limit"):
        return
    used = number(memory, "peak") / number(memory, "limit")
    if used >= MEMORY_SHARE:
        return
    evidence = f"a step uses {size(number(memory, 'peak'))}, {used:.0%} of a device's memory"
    if run.config.get("train.remat") in ("full", "dots"):
        if run.on_cpu:
            return  # on a CPU recomputing is often faster than reading from memory
        cheaper = "dots" if run.config["train.remat"] == "full" else "none"
        yield Advice("remat not needed", evidence, f"try train.remat={cheaper}: the backward pass recomputes less", 0.0)
    elif number(run.program, "microbatches") > 1:
        yield Advice("memory unused", evidence, "try a larger train.microbatch_size: it uses the devices better", 0.0)


def _checkpoint_interval(run: _RunView) -> Iterator[Advice]:
    """Reports a save interval that is too short or too long.

    An interval t costs the share C / t for saves that take C, and t / 2M for lost steps with a failure every M.
    """
    commits = events_of(run.attempts, "checkpoint_commit")
    blocked = [number(record, "blocked_seconds") for record in commits]
    cost = statistics.fmean(blocked) if blocked else 0.0
    work = sum(number(line, "step_seconds") for attempt in run.attempts for line in attempt.steps)
    if len(commits) < 3 or not cost or not work:
        return
    config = run.config
    if config.get("checkpoint.every_minutes") == "auto" and config.get("checkpoint.every_steps") == 0:
        return  # the run chooses the interval by the same formula
    failures = sum(attempt.end in ("failed", "hang", "peer_lost", None) for attempt in run.attempts[:-1])
    mean, source = seconds_between_failures(
        config.get("checkpoint.hours_between_failures"), failures, run.running, run.attempts[-1].devices
    )
    best = best_interval(cost, mean)
    interval = work / len(commits)
    lost_share = lambda interval: cost / interval + interval / (2 * mean)
    excess = lost_share(interval) - lost_share(best)
    if excess > 0.005:
        often = "often" if interval < best else "rarely"
        yield Advice(
            f"checkpoints too {often}",
            f"a save every {span(interval)}, which blocks training for {cost:.2g} s, where {span(best)} would "
            f"lose least with a failure about every {span(mean)} "
            f"({'by published rates' if source == 'assumed' else source})",
            "set checkpoint.every_minutes: auto and checkpoint.every_steps: 0",
            excess,
        )


def _slow_hosts(run: _RunView) -> Iterator[Advice]:
    slow = {}
    for record in run.attempts[-1].events:
        if record["kind"] == "straggler":
            slow[_straggler_key(record)] = number(record, "slower_seconds")
        elif record["kind"] == "straggler_over":
            slow.pop(_straggler_key(record), None)
    for (process, host, phase), slower in sorted(slow.items()):
        yield Advice(
            "slow host",
            f"process {process} on {host} holds the others up by {1e3 * slower:.0f} ms a step in {phase}",
            "check the host with python -m jaxmnt.preflight, or leave it out",
            slower / run.typical,
        )


def _straggler_key(record: Record) -> tuple[int, str, str]:
    """Returns the process (-1 if unknown), host and phase of a straggler event."""
    process = record.get("at_fault")
    return (-1 if process is None else process, str(record.get("at_fault_host")), str(record.get("phase")))


def _recompilations(run: _RunView) -> Iterator[Advice]:
    # A changed config compiles to a different program, so such attempts do not count.
    changed = lambda attempt: any(record["kind"] == "config_change" for record in attempt.events)
    compile_seconds = [attempt.laps.get("compile", 0.0) for attempt in run.attempts if not changed(attempt)]
    if len(compile_seconds) < 2 or not compile_seconds[0] or not run.running:
        return
    first, restarts = compile_seconds[0], compile_seconds[1:]
    again = sum(restarts)
    if again / len(restarts) > max(20.0, 0.5 * first):
        yield Advice(
            "recompilations",
            f"{len(restarts)} restarts compiled for {again:.0f} s, although the program was unchanged",
            "set run.compile_cache to a persistent folder that all hosts share",
            again / run.running,
        )


def _evaluations(run: _RunView) -> Iterator[Advice]:
    seconds = sum(number(line, "seconds") for attempt in run.attempts for line in attempt.evals)
    share = seconds / run.running if run.running else 0.0
    if share > _EVALUATION_SHARE:
        yield Advice("evaluations", f"evaluations take {share:.0%} of the time", "raise train.eval_every", share)


def _learning_rate(run: _RunView) -> Iterator[Advice]:
    for attempt in run.attempts:
        changes = {record.get("key"): record for record in attempt.events if record["kind"] == "config_change"}
        batch = changes.get("data.global_batch_size")
        if batch is None or "optimizer.learning_rate" in changes:
            continue
        before, now = number(batch, "before"), number(batch, "now")
        if before and now:
            yield Advice(
                "learning rate",
                f"attempt {attempt.number} resumed with {now:g} rows per step instead of {before:g}, but the same rate",
                f"with AdamW, multiply optimizer.learning_rate by {math.sqrt(now / before):.2f}, the root of the ratio "
                "(Malladi et al. 2022, arXiv:2205.10287)",
                0.0,
            )


def _batch_size(run: _RunView) -> Iterator[Advice]:
    """Reports a batch above the gradient noise scale.

    A batch as large as the noise scale needs twice the tokens of the smallest batches to reach the same loss.
    """
    rows = number(run.program, "rows")
    # Only the attempt with this program: in another one the small batches may have had another size.
    lines = next((attempt.steps for attempt in reversed(run.attempts) if run.program in attempt.events), ())
    lines = [line for line in lines if line.get("gradient_squares")]
    scale = noise_scale(lines, number(run.program, "rows_of_small_batches"), rows)
    if scale is not None and rows > scale and len(lines) >= STEPS:
        yield Advice(
            "batch beyond the critical size",
            f"a step has {rows:g} rows, and the gradient noise scale of the last {STEPS} steps is "
            f"{scale:,.3g} rows: a loss takes about {1 + rows / scale:.1f} times the tokens that small batches take",
            "lower data.global_batch_size for fewer tokens, keep it for fewer steps (McCandlish et al. 2018, "
            "arXiv:1812.06162)",
            0.0,
        )


RULES: tuple[Callable[[_RunView], Iterator[Advice]], ...] = (
    _input_bound, _communication_bound, _slower_than_expected, _pipeline_bubble, _unused_memory, _checkpoint_interval,
    _slow_hosts, _recompilations, _evaluations, _learning_rate, _batch_size,
)  # fmt: skip


def advice_text(report: Mapping[str, Any]) -> str:
    """Returns the advice as lines for a terminal."""
    lines = []
    for run in report["runs"]:
        if not run["advice"]:
            lines.append(f"advice  {run['label']}: no rule found an improvement")
        for advice in run["advice"]:
            share = f" (about {advice['share']:.1%} of the time)" if advice["share"] else ""
            lines.append(f"advice  {advice['rule']}{share}: {advice['evidence']}; {advice['do']}")
    return "\n".join(lines)
