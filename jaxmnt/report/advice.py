"""Advice on a run: rules suggest improvements, and give the evidence for each in numbers."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmnt.report.history import Attempt, Record, events_of, number
from jaxmnt.report.noise import NOISE_STEPS, noise_scale
from jaxmnt.telemetry.reliability import best_interval, seconds_between_failures
from jaxmnt.units import size, span


@dataclass(frozen=True)
class Advice:
    """One suggested improvement."""

    rule: str
    """The name of the rule that gives the advice."""
    evidence: str
    """The observation that triggered the rule."""
    do: str
    """The suggestion: which setting to change, or where to look."""
    share: float
    """Approximate share of the run's time that is lost to the problem; 0 if unknown."""


@dataclass(frozen=True)
class _RunView:
    """The facts about a run that the rules examine."""

    attempts: Sequence[Attempt]
    config: Mapping[str, Any]
    """The settings, by dotted key."""
    step_seconds: float
    """Median duration of a step."""
    phases: Mapping[str, float]
    """Seconds that each phase takes in a step, averaged over steps and processes."""
    compile_event: Record
    """The newest compile event, with the expected step time and the memory of the program; empty if there is none."""

    @property
    def total_seconds(self) -> float:
        """Sum of the durations of all attempts."""
        return sum(attempt.seconds for attempt in self.attempts)

    @property
    def on_cpu(self) -> bool:
        environment = self.attempts[-1].start.get("environment")
        return isinstance(environment, dict) and environment.get("device kind") == "cpu"


def advise(
    attempts: Sequence[Attempt], config: Mapping[str, Any], step_seconds: float, phase_lines: Sequence[Record]
) -> list[Advice]:
    """Returns the advice of all rules that apply to a run, with the most costly problem first.

    `step_seconds` is the median duration of a step; without a finite one, there is no advice.
    """
    if not math.isfinite(step_seconds):
        return []
    compile_events = events_of(attempts, "compile")
    compile_event = compile_events[-1] if compile_events else {}
    run = _RunView(attempts, config, step_seconds, _mean_phase_seconds(phase_lines), compile_event)
    advice = [entry for rule in RULES for entry in rule(run)]
    return sorted(advice, key=lambda entry: (-entry.share, entry.rule, entry.evidence))


def _mean_phase_seconds(lines: Sequence[Record]) -> dict[str, float]:
    """Returns the seconds of each phase, averaged over the lines of phases."""
    means = [line["mean"] for line in lines if line["kind"] == "phases" and isinstance(line.get("mean"), dict)]
    names = sorted({name for mean in means for name in mean})
    return {name: statistics.fmean(number(mean, name) for mean in means) for name in names}


MAX_EXPOSED_SHARE = 0.15
"""Share of a step above which waiting for communication leads to advice."""
MAX_IDLE_SHARE = 0.10
"""Share of a step above which idle pipeline stages lead to advice."""
MIN_MEMORY_SHARE = 0.6
"""Share of the memory limit below which the peak leads to advice on unused memory."""
_MAX_INPUT_SHARE = 0.05
"""Share of a step above which waiting for input leads to advice."""
_MAX_SLOWDOWN = 1.2
"""Multiple of the expected step time above which a step leads to advice."""
_MAX_EVALUATION_SHARE = 0.10
"""Share of the run above which evaluations lead to advice."""


def _input_bound(run: _RunView) -> Iterator[Advice]:
    share = run.phases.get("data", 0.0) / run.step_seconds
    if share > _MAX_INPUT_SHARE:
        yield Advice(
            "input-bound",
            f"a process waits {1e3 * run.phases['data']:.0f} ms per step for its input, {share:.0%} of the step",
            "raise data.read_threads or data.prefetch; put the data on a local disk (data.stage_dir)",
            share,
        )


def _communication_bound(run: _RunView) -> Iterator[Advice]:
    seconds_by_axis = run.compile_event.get("expected_exposed_seconds")
    if not isinstance(seconds_by_axis, dict) or not seconds_by_axis:
        return
    longest_axis = max(sorted(seconds_by_axis), key=lambda axis: number(seconds_by_axis, axis))
    exposed = sum(number(seconds_by_axis, axis) for axis in seconds_by_axis)
    expected = number(run.compile_event, "expected_step_seconds")
    if expected and exposed / expected > MAX_EXPOSED_SHARE:
        yield Advice(
            "communication-bound",
            f"in an expected step of {expected:.3g} s, the devices wait {exposed:.3g} s for communication, most of it "
            f"along mesh.{longest_axis} ({number(seconds_by_axis, longest_axis):.3g} s)",
            "use python -m jaxmnt.plan to search for a mesh with less waiting",
            exposed / expected,
        )


def _slower_than_expected(run: _RunView) -> Iterator[Advice]:
    expected = number(run.compile_event, "expected_step_seconds")
    if expected and run.step_seconds > _MAX_SLOWDOWN * expected:
        yield Advice(
            "slower than expected",
            f"a step takes {run.step_seconds:.3g} s, which is {run.step_seconds / expected:.2f} times the time "
            f"expected from its devices with the network of their vendor's systems ({expected:.3g} s)",
            "check the report for slow hosts and slow input, and take a profile (telemetry.profile_at)",
            1 - expected / run.step_seconds,
        )


def _pipeline_bubble(run: _RunView) -> Iterator[Advice]:
    # The event relates idle time to busy time.
    idle_per_busy = number(run.compile_event, "idle_share")
    share = idle_per_busy / (1 + idle_per_busy)
    if share > MAX_IDLE_SHARE:
        yield Advice(
            "bubble",
            f"pipeline stages are idle for {share:.0%} of a step",
            "use more microbatches (a smaller train.microbatch_size, or a larger batch), fewer stages, or "
            "pipeline.schedule=interleaved",
            share,
        )


def _unused_memory(run: _RunView) -> Iterator[Advice]:
    memory = run.compile_event.get("memory")
    if not isinstance(memory, dict) or not number(memory, "limit"):
        return
    used_share = number(memory, "peak") / number(memory, "limit")
    if used_share >= MIN_MEMORY_SHARE:
        return
    evidence = f"a step uses {size(number(memory, 'peak'))}, {used_share:.0%} of a device's memory"
    if run.config.get("train.remat") in ("full", "dots"):
        if run.on_cpu:
            return  # on a CPU, recomputing is often faster than reading from memory
        lighter_remat = "dots" if run.config["train.remat"] == "full" else "none"
        suggestion = f"try train.remat={lighter_remat}, with which the backward pass recomputes less"
        yield Advice("remat not needed", evidence, suggestion, 0.0)
    elif number(run.compile_event, "microbatches") > 1:
        suggestion = "try a larger train.microbatch_size, which uses the devices better"
        yield Advice("memory unused", evidence, suggestion, 0.0)


def _checkpoint_interval(run: _RunView) -> Iterator[Advice]:
    """Reports a save interval that is too short or too long.

    If there is a save every t seconds that blocks training for C seconds, and a failure every M seconds, the run loses
    the share C / t of its time to saves, and the share t / 2M to steps that it has to repeat.
    """
    commits = events_of(run.attempts, "checkpoint_commit")
    blocked = [number(record, "blocked_seconds") for record in commits]
    save_seconds = statistics.fmean(blocked) if blocked else 0.0
    work_seconds = sum(number(line, "step_seconds") for attempt in run.attempts for line in attempt.steps)
    if len(commits) < 3 or not save_seconds or not work_seconds:
        return
    config = run.config
    if config.get("checkpoint.every_minutes") == "auto" and config.get("checkpoint.every_steps") == 0:
        return  # the run itself chooses the interval with the same formula
    failures = sum(attempt.end_kind in ("failed", "hang", "peer_lost", None) for attempt in run.attempts[:-1])
    failure_interval, source = seconds_between_failures(
        config.get("checkpoint.hours_between_failures"), failures, run.total_seconds, run.attempts[-1].devices
    )
    best = best_interval(save_seconds, failure_interval)
    interval = work_seconds / len(commits)

    def lost_share(save_interval: float) -> float:
        return save_seconds / save_interval + save_interval / (2 * failure_interval)

    excess = lost_share(interval) - lost_share(best)
    if excess > 0.005:
        frequency = "often" if interval < best else "rarely"
        yield Advice(
            f"checkpoints too {frequency}",
            f"the run saves every {span(interval)}, and each save blocks training for {save_seconds:.2g} s; saving "
            f"every {span(best)} would lose the least time, with a failure about every {span(failure_interval)} "
            f"({'according to published rates' if source == 'assumed' else source})",
            "set checkpoint.every_minutes: auto and checkpoint.every_steps: 0",
            excess,
        )


def _slow_hosts(run: _RunView) -> Iterator[Advice]:
    slower_seconds = {}
    for record in run.attempts[-1].events:
        if record["kind"] == "straggler":
            slower_seconds[_straggler_key(record)] = number(record, "slower_seconds")
        elif record["kind"] == "straggler_over":
            slower_seconds.pop(_straggler_key(record), None)
    for (process, host, phase), seconds in sorted(slower_seconds.items()):
        yield Advice(
            "slow host",
            f"process {process} on {host} holds the others up by {1e3 * seconds:.0f} ms per step in {phase}",
            "check the host with python -m jaxmnt.preflight, or leave it out",
            seconds / run.step_seconds,
        )


def _straggler_key(record: Record) -> tuple[int, str, str]:
    """Returns the process (-1 if unknown), host and phase of a straggler event."""
    process = record.get("at_fault")
    return (-1 if process is None else process, str(record.get("at_fault_host")), str(record.get("phase")))


def _recompilations(run: _RunView) -> Iterator[Advice]:
    # Attempts with a changed config do not count, because they compile a different program.
    unchanged_attempts = [attempt for attempt in run.attempts if not events_of([attempt], "config_change")]
    compile_seconds = [attempt.start_phase_seconds.get("compile", 0.0) for attempt in unchanged_attempts]
    if len(compile_seconds) < 2 or not compile_seconds[0] or not run.total_seconds:
        return
    first, *restarts = compile_seconds
    repeated_seconds = sum(restarts)
    if repeated_seconds / len(restarts) > max(20.0, 0.5 * first):
        yield Advice(
            "recompilations",
            f"{len(restarts)} restarts compiled for {repeated_seconds:.0f} s, although the program was unchanged",
            "set run.compile_cache to a persistent folder that all hosts share",
            repeated_seconds / run.total_seconds,
        )


def _evaluations(run: _RunView) -> Iterator[Advice]:
    seconds = sum(number(line, "seconds") for attempt in run.attempts for line in attempt.evals)
    share = seconds / run.total_seconds if run.total_seconds else 0.0
    if share > _MAX_EVALUATION_SHARE:
        yield Advice("evaluations", f"evaluations take {share:.0%} of the time", "raise train.eval_every", share)


def _learning_rate(run: _RunView) -> Iterator[Advice]:
    for attempt in run.attempts:
        changes = {record.get("key"): record for record in attempt.events if record["kind"] == "config_change"}
        batch = changes.get("data.global_batch_size")
        if batch is None or "optimizer.learning_rate" in changes:
            continue
        rows_before = number(batch, "before")
        rows_now = number(batch, "now")
        if rows_before and rows_now:
            yield Advice(
                "learning rate",
                f"attempt {attempt.number} resumed with {rows_now:g} rows per step instead of {rows_before:g}, but "
                "with the same learning rate",
                f"with AdamW, multiply optimizer.learning_rate by {math.sqrt(rows_now / rows_before):.2f}, the square "
                "root of the ratio (Malladi et al. 2022, arXiv:2205.10287)",
                0.0,
            )


def _batch_size(run: _RunView) -> Iterator[Advice]:
    """Reports a batch that is larger than the gradient noise scale.

    With a batch as large as the noise scale, reaching a loss takes twice the tokens that the smallest batches need.
    """
    rows = number(run.compile_event, "rows")
    # Use only the attempt that compiled this program, because the small batches of others may have had another size.
    steps = next((attempt.steps for attempt in reversed(run.attempts) if run.compile_event in attempt.events), ())
    lines = [line for line in steps if line.get("gradient_squares")]
    scale = noise_scale(lines, number(run.compile_event, "rows_of_small_batches"), rows)
    if scale is not None and rows > scale and len(lines) >= NOISE_STEPS:
        yield Advice(
            "batch beyond the critical size",
            f"a step has {rows:g} rows, and the gradient noise scale of the last {NOISE_STEPS} steps is "
            f"{scale:,.3g} rows, so reaching a loss takes about {1 + rows / scale:.1f} times the tokens that small "
            "batches need",
            "lower data.global_batch_size to use fewer tokens, or keep it to take fewer steps (McCandlish et al. 2018, "
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
