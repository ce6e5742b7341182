"""What is watched while steps are taken: where their time goes, who holds the others up, hosts, the loss, the money.

`BadStepMonitor` watches for steps that change nothing, and ends a run after too many of them.
"""

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from jaxmnt.distributed.coordination import gather
from jaxmnt.errors import PeerError, UserError, remark, summary
from jaxmnt.run.preemption import StopRequest
from jaxmnt.run.probe import TimedProduct
from jaxmnt.run.values import CompiledRun
from jaxmnt.telemetry.events import METRICS, PHASE_LINES, RESOURCES, repair
from jaxmnt.telemetry.loss_spikes import LossSpikeDetector
from jaxmnt.telemetry.phase_log import PhaseLog
from jaxmnt.telemetry.phases import DOING, StepTimer
from jaxmnt.telemetry.resources import ResourceLog, ResourceSampler, reader_of_gpus
from jaxmnt.telemetry.slow_devices import SlowDevice, SlowDeviceDetector
from jaxmnt.telemetry.stragglers import Straggler

_PROBE_WIDTH = {"cpu": 256, "gpu": 4096}
"""Of the matrices that time a device, by its platform: a GPU is busy for less than a millisecond."""
_LAST_SECONDS = 10.0
"""For all to give the times of the last steps."""
_ON_THE_WAY_SECONDS = 2.0
"""For what heartbeats have sent before."""
_LOOK_SECONDS = 0.02
_AGAIN_SECONDS = 3600.0
"""After which the same fault of a host is told again."""


class Monitoring:
    """In every process the times of its steps, and what it takes of its host; process 0 hears of all, and
    says what is to be said."""

    def __init__(self, run: CompiledRun):
        settings, identity, step = run.config.telemetry, run.identity, run.start.step
        devices = run.program.placement.mesh.local_devices
        self.timer = StepTimer()
        self._spending = run.spending
        self._identity, self._hosts, self._events, self._status = identity, run.hosts, run.events, run.status
        self._settings = settings
        self._probe_every, self._devices = settings.probe_every, devices
        self._product: TimedProduct | None = None
        self._probed: list[float] = []
        self._probes: dict[int, list[float]] = {}
        self._logs: tuple[PhaseLog, ResourceLog] | None = None
        """The logs of steps and of hosts; None in other processes than 0."""
        self._slow_devices = SlowDeviceDetector()
        self._losses = LossSpikeDetector()
        self._told_faults: dict[tuple[str, str], float] = {}
        self._complained = False
        self._step = step
        self._sampler: ResourceSampler | None = None
        if settings.resources_every_seconds is not None:
            self._sampler = ResourceSampler(devices, settings.resources_every_seconds, reader_of_gpus(devices))
            self._sampler.start()
        if not run.writes:
            run.heartbeat.report = self._report
            return
        self._note_steps_again(repair(run.directory / METRICS, last_step=step))
        for name in (PHASE_LINES, RESOURCES):
            repair(run.directory / name, last_step=step)
        self._logs = PhaseLog(run.directory, identity.processes), ResourceLog(run.directory, identity.processes)
        run.heartbeat.take_report = self._hear

    def status(self) -> dict[str, Any]:
        """What is known at this moment, in process 0. From any thread."""
        assert self._logs is not None
        phases, resources = self._logs
        slow = phases.stragglers
        devices = [*self._slow_devices.known, *resources.slow]
        return {
            "phases": phases.latest,
            "resources": resources.latest,
            "stragglers": len(slow),
            "slow": [{"process": process, "host": self._hosts[process], "phase": phase} for process, phase in slow],
            "slow_devices": [
                {"process": one.device[0], "host": self._hosts[one.device[0]], "device": one.device[1], "why": one.why}
                for one in devices
            ],
            "spent": None if self._spending is None else self._spending.spent,
        }

    def probe(self, step: int, settle: Callable[[], None]) -> float:
        """Times each device by itself if that is due, once all are idle: `settle` waits for their last step.

        Returns the seconds that it took, which are none of a step's.
        """
        if not self._probe_every or step % self._probe_every:
            return 0.0
        settle()
        started = time.perf_counter()
        with self.timer.during("probe"):
            try:
                if self._product is None:
                    width = _PROBE_WIDTH.get(self._devices[0].platform, _PROBE_WIDTH["cpu"])
                    self._product = TimedProduct(self._devices, width)
                self._probed = self._product()
            except Exception as error:  # such as no memory left; no other process waits for it
                self._probe_every, self._product = 0, None
                remark(f"note: telemetry.probe_every: devices are not timed any more: {summary(error)}")
        return time.perf_counter() - started

    def finished(self, step: int, loss: float | None) -> None:
        """A step is finished on the devices. Its loss is None if its batch had no target."""
        if self._logs is None or loss is None or not math.isfinite(loss):
            return
        spike = self._losses.see(loss)
        if spike is not None:
            self._events.write("loss_spike", step=step, loss=spike.loss, typical=spike.typical)
            self._status.line(
                f"WARNING step {step}: the loss jumped to {spike.loss:.4f}; the median of the steps before is "
                f"{spike.typical:.4f}"
            )

    def end_step(self, step: int, stop: StopRequest) -> None:
        """The main thread has done all that there was to do for a step."""
        self.timer.end_step(step)
        self._step = step
        if self._logs is None:
            return
        phases, resources = self._logs
        with self.timer.during("writing"):
            self._hear(0, self._report())
            if self._spending is not None:
                self._spending.check(step, stop, self._events, self._status)
            for found in phases.take_findings():
                self._tell_of(found, step)
            slow, faults = resources.take_findings()
            for found_by, devices in (("clock", slow), ("probe", self._compare_probes())):
                for one in devices:
                    self._tell_of_device(one, found_by, step)
            for process, what in faults:
                self._tell_of_fault(process, what, step)

    def end(self, step: int) -> None:
        """All processes call this after the last step, whose times would else come with the next heartbeat."""
        if not self._settings.phases:
            return
        try:
            rows = gather("times of the last steps", self._report(), self._identity, _LAST_SECONDS)
        except PeerError as error:
            remark(f"note: {PHASE_LINES} lacks the last steps: {error}")
            return
        for process, report in enumerate(rows or []):
            self._hear(process, report)
        deadline = time.monotonic() + _ON_THE_WAY_SECONDS
        while self._logs is not None and not self._logs[0].complete_up_to(step) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)

    def _report(self) -> list[Any]:
        """What process 0 is to know: times of steps, and by name what is known besides. From any thread."""
        times = self.timer.take() if self._settings.phases else []
        probed, self._probed = self._probed, []
        more = {"resources": None if self._sampler is None else self._sampler.take(), "probe": probed}
        return [*times, *({name: value} for name, value in more.items() if value)]

    def _hear(self, process: int, report: list[Any]) -> None:
        """From any thread. Telemetry that makes no sense is said once, and ends no run."""
        assert self._logs is not None
        phases, resources = self._logs
        try:
            phases.heard(process, [row for row in report if not isinstance(row, dict)])
            for told in (row for row in report if isinstance(row, dict)):
                if "resources" in told:
                    resources.heard(process, told["resources"], self._step)
                if "probe" in told:
                    self._probes[process] = [float(seconds) for seconds in told["probe"]]
        except Exception as error:
            if not self._complained:
                self._complained = True
                remark(f"note: what process {process} tells of its steps makes no sense: {summary(error)}")

    def _compare_probes(self) -> list[SlowDevice]:
        """Once all have told of a probe."""
        if len(self._probes) < self._identity.processes:
            return []
        probes, self._probes = self._probes, {}
        seconds = {
            (process, place): one for process, all_of_it in probes.items() for place, one in enumerate(all_of_it)
        }
        return self._slow_devices.see_probe(seconds)

    def close(self) -> None:
        """Lines that are on their way have a few seconds."""
        if self._sampler is not None:
            self._sampler.close()
        for log in self._logs or ():
            log.close()

    def _tell_of(self, found: Straggler, step: int) -> None:
        """Who holds the others up, or does no longer."""
        host, doing = self._hosts[found.process], DOING[found.phase]
        who = f"process {found.process} of {self._identity.processes} on {host}"
        if found.began:
            share = found.seconds / found.step_seconds
            line = (
                f"WARNING step {step}: {who} holds the others up: for {doing} it takes {1e3 * found.seconds:.0f} ms "
                f"more than they do ({share:.0%} of a step)"
            )
        else:
            line = f"note    step {step}: {who} no longer takes more time than the others for {doing}"
        seconds = {"slower_seconds": found.seconds, "step_seconds": found.step_seconds}
        self._blame("straggler", found.began, step, found.process, line, phase=found.phase, **seconds)

    def _tell_of_device(self, slow: SlowDevice, found_by: str, step: int) -> None:
        process, device = slow.device
        who = f"device {device} of process {process} on {self._hosts[process]}"
        if slow.began:
            line, why = f"WARNING step {step}: {who} is slow, and all wait for it: {slow.why}", {"why": slow.why}
        else:
            line, why = f"note    step {step}: {who} is as quick as the others again (by its {found_by})", {}
        self._blame(
            "slow_device", slow.began, step, process, line, device=device, found_by=found_by, slower=slow.slower, **why
        )

    def _tell_of_fault(self, process: int, what: str, step: int) -> None:
        """Once an hour of the same: a bad cable counts errors all day, and all processes of its host see them."""
        host = self._hosts[process]
        same = host, re.sub(r"\b\d+ (more|uncorrected)", r"\1", what)
        if time.monotonic() < self._told_faults.get(same, -_AGAIN_SECONDS) + _AGAIN_SECONDS:
            return
        self._told_faults[same] = time.monotonic()
        line = f"WARNING step {step}: process {process} on {host}: {what}"
        self._blame("host_fault", True, step, process, line, why=what)

    def _blame(self, kind: str, began: bool, step: int, process: int, line: str, **details: Any) -> None:
        """Writes an event about a process, or about its end if it has not begun, and shows a line."""
        kind = kind if began else f"{kind}_over"
        self._events.write(kind, step=step, at_fault=process, at_fault_host=self._hosts[process], **details)
        self._status.line(line)

    def _note_steps_again(self, later: list[dict[str, Any]]) -> None:
        """Lines of steps after the checkpoint that the run goes on from, which are taken again."""
        by_attempt: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        for line in later:
            if line["kind"] == "train":
                by_attempt[line.get("attempt", self._events.attempt - 1)].append(line)
        for attempt, lines in sorted(by_attempt.items()):
            self._events.write(
                "steps_again",
                of_attempt=attempt,
                steps=len(lines),
                seconds=sum(line.get("step_seconds") or 0.0 for line in lines),
                until=max(line["time"] for line in lines),
            )


class BadStepMonitor:
    """Sees the metrics of every finished step, in all processes; one of them, the writer, reports."""

    def __init__(self, run: CompiledRun):
        self._most = run.config.train.max_bad_steps
        self._rows = run.config.data.global_batch_size
        self._order = run.training_data.order
        self._events, self._status, self._writer = run.events, run.status, run.writes
        self._good: tuple[int, float] | None = None
        """The last good step and its loss."""
        self._between: set[int] = set()
        """Steps without targets among the bad steps in a row, which they neither add to nor end."""
        self._told_of_targets = False

    def see(self, step: int, values: dict[str, Any]) -> None:
        """Raises `UserError`, in all processes after the same step, after too many bad steps in a row."""
        if self._writer:
            self._note_passed_over(step)
        in_a_row = values["bad_in_a_row"]
        if not values["tokens"]:
            self._between |= {step} if in_a_row else set()
            self._note_no_targets(step)
            return
        if not in_a_row:
            self._good, self._between = (step, values["loss"]), set()
            return
        first, last = self._range(step, step)
        bad = "the loss" if not math.isfinite(values["loss"]) else "the gradient"
        if self._writer:
            self._events.write("bad_step", step=step, rows=[first, last], bad=bad, in_a_row=in_a_row)
            self._status.line(
                f"WARNING step {step}: {bad} is not finite (rows {first} to {last}); the model is left unchanged"
            )
        if in_a_row > self._most:
            raise UserError(self._diagnosis(step, in_a_row, bad))

    def _note_no_targets(self, step: int) -> None:
        """Says it of the first such step of this start: there may be many."""
        if self._writer and not self._told_of_targets:
            first, last = self._range(step, step)
            self._status.line(
                f"note    step {step}: its rows ({first} to {last}) have no targets, so it changes nothing; the loss "
                f"of such steps is null in {METRICS}"
            )
        self._told_of_targets = True

    def _note_passed_over(self, step: int) -> None:
        """Says when rows of `data.skip` have been passed over."""
        before = self._order.rows_skipped(step - 2) if step > 1 else 0
        passed = self._order.rows_skipped(step - 1) - before
        if passed:
            first, last = self._range(step, step)
            self._events.write("rows_skipped", step=step, count=passed, rows=[first, last])
            self._status.line(f"note    rows skipped in step {step}: {passed}")

    def _range(self, first_step: int, last_step: int) -> tuple[int, int]:
        """The numbers of the first and the last row of the batches of these steps."""
        first = self._order.numbers(first_step - 1, [0])
        return int(first[0]), int(self._order.numbers(last_step - 1, [self._rows - 1])[0])

    def _first_bad_step(self, step: int, in_a_row: int) -> int:
        """Returns the first of the bad steps in a row that end with `step`."""
        first = step
        while in_a_row > 1:
            first -= 1
            in_a_row -= first not in self._between
        return first

    def _diagnosis(self, step: int, in_a_row: int, bad: str) -> str:
        since = self._first_bad_step(step, in_a_row)
        first, last = self._range(since, step)
        good = "none was good since this start"
        if self._good is not None:
            good = f"the last good step was {self._good[0]}, its loss {self._good[1]:.4f}"
        return (
            f"{in_a_row} steps in a row, up to step {step}: {bad} was infinite or NaN ({good}; the rows of these "
            f"steps are {first} to {last}); if these rows are the cause, add {{from_row: {first}, rows: "
            f"{last + 1 - first}}} to data.skip; if there is a checkpoint of step {since} or later, "
            "also set another run.dir and run.fork_from to continue from an earlier one; if these rows are not "
            "the cause, lower optimizer.learning_rate and continue from an earlier checkpoint"
        )
