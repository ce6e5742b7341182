"""Monitors a run while it trains: the time of each phase, stragglers, slow devices, hosts, the loss and the cost.

`BadStepMonitor` watches for steps whose loss or gradient is not finite, and ends a run after too many of them in a row.
"""

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from jaxmnt.distributed.coordination import gather
from jaxmnt.errors import PeerError, UserError, remark, summary
from jaxmnt.run.preemption import StopRequest
from jaxmnt.run.probe import TimedProduct
from jaxmnt.run.values import CompiledRun
from jaxmnt.telemetry.events import METRICS, PHASE_LINES, RESOURCES, repair
from jaxmnt.telemetry.loss_spikes import LossSpikeDetector
from jaxmnt.telemetry.phase_log import PhaseLog
from jaxmnt.telemetry.phases import PHASE_ACTIVITIES, StepTimer
from jaxmnt.telemetry.resources import ResourceLog, ResourceSampler, reader_of_gpus
from jaxmnt.telemetry.router_collapse import RouterCollapseDetector
from jaxmnt.telemetry.slow_devices import SlowDevice, SlowDeviceDetector
from jaxmnt.telemetry.stragglers import Straggler

_PROBE_WIDTH = {"cpu": 256, "gpu": 4096}
"""Width of the matrices with which a device is timed, by its platform. A GPU is busy for less than a millisecond."""
_LAST_TIMES_TIMEOUT_SECONDS = 10.0
"""Timeout for all processes to send the times of the last steps."""
_IN_TRANSIT_TIMEOUT_SECONDS = 2.0
"""Timeout for reports that were sent with earlier heartbeats to arrive."""
_POLL_SECONDS = 0.02
_FAULT_REPEAT_SECONDS = 3600.0
"""Interval after which the same fault of a host is reported again."""


class Monitoring:
    """Measures the step times and host resources of this process.

    Process 0 collects and reports those of all processes.
    """

    def __init__(self, run: CompiledRun):
        settings, identity, start_step = run.config.telemetry, run.identity, run.start.step
        devices = run.program.placement.mesh.local_devices
        self.timer = StepTimer()
        self._spending = run.spending
        self._identity, self._hosts, self._events, self._status = identity, run.hosts, run.events, run.status
        self._settings = settings
        self._probe_every, self._devices = settings.probe_every, devices
        self._timed_product: TimedProduct | None = None
        self._probe_times: list[float] = []
        """Seconds of each device of this process in the last probe, until they are reported to process 0."""
        self._probe_times_by_process: dict[int, list[float]] = {}
        """The probe times that processes have reported to process 0, by process."""
        self._logs: tuple[PhaseLog, ResourceLog] | None = None
        """The logs of steps and of hosts; None in processes other than 0."""
        self._slow_devices = SlowDeviceDetector()
        self._losses = LossSpikeDetector()
        self._routers = RouterCollapseDetector()
        self._reported_faults: dict[tuple[str, str], float] = {}
        """Monotonic time at which each (host, fault) was last reported."""
        self._noted_bad_report = False
        self._step = start_step
        self._sampler: ResourceSampler | None = None
        if settings.resources_every_seconds is not None:
            self._sampler = ResourceSampler(devices, settings.resources_every_seconds, reader_of_gpus(devices))
            self._sampler.start()
        if not run.writes:
            run.heartbeat.report = self._report
            return
        self._record_repeated_steps(repair(run.directory / METRICS, last_step=start_step))
        for name in (PHASE_LINES, RESOURCES):
            repair(run.directory / name, last_step=start_step)
        self._logs = PhaseLog(run.directory, identity.processes), ResourceLog(run.directory, identity.processes)
        run.heartbeat.take_report = self._take_report

    def status(self) -> dict[str, Any]:
        """Returns the findings so far for the status server, in process 0. May be called from any thread."""
        assert self._logs is not None
        phases, resources = self._logs
        stragglers = phases.stragglers
        slow_devices = [*self._slow_devices.current, *resources.slow]
        return {
            "phases": phases.latest,
            "resources": resources.latest,
            "stragglers": len(stragglers),
            "slow": [
                {"process": process, "host": self._hosts[process], "phase": phase} for process, phase in stragglers
            ],
            "slow_devices": [
                {"process": process, "host": self._hosts[process], "device": number, "why": device.why}
                for device in slow_devices
                for process, number in [device.device]
            ],
            "spent": None if self._spending is None else self._spending.spent,
        }

    def probe(self, step: int, wait_until_idle: Callable[[], None]) -> float:
        """Times each device separately if that is due after `step`. Calls `wait_until_idle` first, so that none is
        busy.

        Returns the seconds that the probe took, which do not count as time of a step.
        """
        if not self._probe_every or step % self._probe_every:
            return 0.0
        wait_until_idle()
        started = time.perf_counter()
        with self.timer.during("probe"):
            try:
                if self._timed_product is None:
                    width = _PROBE_WIDTH.get(self._devices[0].platform, _PROBE_WIDTH["cpu"])
                    self._timed_product = TimedProduct(self._devices, width)
                self._probe_times = self._timed_product()
            except Exception as error:  # for example too little memory; no other process waits for the probe
                self._probe_every, self._timed_product = 0, None
                remark(f"note: telemetry.probe_every: devices are no longer timed: {summary(error)}")
        return time.perf_counter() - started

    def check_loss(self, step: int, loss: float | None) -> None:
        """Reports a loss spike, once a step is finished on the devices. `loss` is None if the batch had no target."""
        if self._logs is None or loss is None or not math.isfinite(loss):
            return
        spike = self._losses.see(loss)
        if spike is not None:
            self._events.write("loss_spike", step=step, loss=spike.loss, typical=spike.median)
            self._status.line(
                f"WARNING step {step}: the loss jumped to {spike.loss:.4f}; the median of the previous steps is "
                f"{spike.median:.4f}"
            )

    def check_routers(self, step: int, metrics: Mapping[str, float]) -> None:
        """Reports a router that collapses, from the metrics of the layers in a finished step."""
        if self._logs is None or any(value is None for value in metrics.values()):
            return
        layer = self._routers.see(metrics)
        if layer is not None:
            self._events.write("router_collapse", step=step, layer=layer)
            self._status.line(
                f"WARNING step {step}: the router of layer {layer} sends most tokens to few experts; raise "
                "model.balance_loss, or lower the learning rate"
            )

    def end_step(self, step: int, stop: StopRequest) -> None:
        """Ends the timing of a step in this process. Process 0 also checks the budget and reports new findings."""
        self.timer.end_step(step)
        self._step = step
        if self._logs is None:
            return
        phases, resources = self._logs
        with self.timer.during("writing"):
            self._take_report(0, self._report())
            if self._spending is not None:
                self._spending.check(step, stop, self._events, self._status)
            for straggler in phases.take_findings():
                self._report_straggler(straggler, step)
            slow_by_clock, faults = resources.take_findings()
            for found_by, devices in (("clock", slow_by_clock), ("probe", self._compare_probes())):
                for device in devices:
                    self._report_slow_device(device, found_by, step)
            for process, fault in faults:
                self._report_host_fault(process, fault, step)

    def end(self, step: int) -> None:
        """Collects the times of the last steps, which would otherwise be sent with the next heartbeat.

        All processes must call this after the last step.
        """
        if not self._settings.phases:
            return
        try:
            reports = gather("times of the last steps", self._report(), self._identity, _LAST_TIMES_TIMEOUT_SECONDS)
        except PeerError as error:
            remark(f"note: {PHASE_LINES} lacks the last steps: {error}")
            return
        for process, report in enumerate(reports or []):
            self._take_report(process, report)
        deadline = time.monotonic() + _IN_TRANSIT_TIMEOUT_SECONDS
        while self._logs is not None and not self._logs[0].complete_up_to(step) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _report(self) -> list[Any]:
        """Returns this process's report for process 0: step times, then other values by name. May be called from any
        thread."""
        times = self.timer.take() if self._settings.phases else []
        probe_times, self._probe_times = self._probe_times, []
        named_values = {"resources": None if self._sampler is None else self._sampler.take(), "probe": probe_times}
        return [*times, *({name: value} for name, value in named_values.items() if value)]

    def _take_report(self, process: int, report: list[Any]) -> None:
        """Takes the report of a process. May be called from any thread. An invalid report is noted once, and does not
        end the run."""
        assert self._logs is not None
        phases, resources = self._logs
        try:
            phases.add(process, [row for row in report if not isinstance(row, dict)])
            for values in (row for row in report if isinstance(row, dict)):
                if "resources" in values:
                    resources.add(process, values["resources"], self._step)
                if "probe" in values:
                    self._probe_times_by_process[process] = [float(seconds) for seconds in values["probe"]]
        except Exception as error:
            if not self._noted_bad_report:
                self._noted_bad_report = True
                remark(f"note: process {process} sent an invalid report of its steps: {summary(error)}")

    def _compare_probes(self) -> list[SlowDevice]:
        """Compares the probe times of all devices, once every process has reported them."""
        if len(self._probe_times_by_process) < self._identity.processes:
            return []
        times_by_process, self._probe_times_by_process = self._probe_times_by_process, {}
        seconds = {
            (process, device): device_seconds
            for process, process_seconds in times_by_process.items()
            for device, device_seconds in enumerate(process_seconds)
        }
        return self._slow_devices.see_probe(seconds)

    def close(self) -> None:
        """Closes the logs. Waits a few seconds for lines that are not written yet."""
        if self._sampler is not None:
            self._sampler.close()
        for log in self._logs or ():
            log.close()

    def _report_straggler(self, straggler: Straggler, step: int) -> None:
        """Reports a process that delays the others, or no longer does."""
        host, activity = self._hosts[straggler.process], PHASE_ACTIVITIES[straggler.phase]
        label = f"process {straggler.process} of {self._identity.processes} on {host}"
        if straggler.began:
            share = straggler.seconds / straggler.step_seconds
            line = (
                f"WARNING step {step}: {label} holds the others up: it takes {1e3 * straggler.seconds:.0f} ms more "
                f"than they do for {activity} ({share:.0%} of a step)"
            )
        else:
            line = f"note    step {step}: {label} no longer takes more time than the others for {activity}"
        seconds = {"slower_seconds": straggler.seconds, "step_seconds": straggler.step_seconds}
        self._report_problem(
            "straggler", straggler.began, step, straggler.process, line, phase=straggler.phase, **seconds
        )

    def _report_slow_device(self, slow: SlowDevice, found_by: str, step: int) -> None:
        """Reports a device that is slow, or no longer is. `found_by` is "clock" or "probe"."""
        process, device = slow.device
        label = f"device {device} of process {process} on {self._hosts[process]}"
        if slow.began:
            line, why = f"WARNING step {step}: {label} is slow, and all wait for it: {slow.why}", {"why": slow.why}
        else:
            line, why = f"note    step {step}: {label} is as quick as the others again (judging by its {found_by})", {}
        self._report_problem(
            "slow_device", slow.began, step, process, line, device=device, found_by=found_by, slower=slow.slower, **why
        )

    def _report_host_fault(self, process: int, fault: str, step: int) -> None:
        """Reports a fault of a host, but the same fault at most once an hour.

        A bad cable causes errors all day, and all processes on its host see them.
        """
        host = self._hosts[process]
        key = host, re.sub(r"\b\d+ (more|uncorrected)", r"\1", fault)  # without the number of errors
        if time.monotonic() < self._reported_faults.get(key, -_FAULT_REPEAT_SECONDS) + _FAULT_REPEAT_SECONDS:
            return
        self._reported_faults[key] = time.monotonic()
        line = f"WARNING step {step}: process {process} on {host}: {fault}"
        self._report_problem("host_fault", True, step, process, line, why=fault)

    def _report_problem(self, kind: str, began: bool, step: int, process: int, line: str, **details: Any) -> None:
        """Writes an event that a process has a problem, or (if not `began`) no longer has it, and prints `line`."""
        kind = kind if began else f"{kind}_over"
        self._events.write(kind, step=step, at_fault=process, at_fault_host=self._hosts[process], **details)
        self._status.line(line)

    def _record_repeated_steps(self, repeated: list[dict[str, Any]]) -> None:
        """Writes events about the steps after the checkpoint that the run resumes from, because the run repeats them.

        `repeated` has the lines about these steps in the metrics.
        """
        by_attempt: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        for line in repeated:
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
    """Checks the metrics of every finished step, in all processes. Only the writer, process 0, reports."""

    def __init__(self, run: CompiledRun):
        self._max_bad_in_a_row = run.config.train.max_bad_steps
        self._batch_rows = run.config.data.global_batch_size
        self._order = run.training_data.order
        self._events, self._status, self._writer = run.events, run.status, run.writes
        self._last_good: tuple[int, float] | None = None
        """The number of the last good step and its loss; None if this start has not had a good step."""
        self._without_targets: set[int] = set()
        """Steps without targets since the current row of bad steps began. They neither count as bad nor end the row."""
        self._noted_no_targets = False

    def see(self, step: int, values: dict[str, Any]) -> None:
        """Raises `UserError`, in all processes after the same step, after too many bad steps in a row."""
        if self._writer:
            self._report_skipped_rows(step)
        in_a_row = values["bad_in_a_row"]
        if not values["tokens"]:
            if in_a_row:
                self._without_targets.add(step)
            self._report_no_targets(step)
            return
        if not in_a_row:
            self._last_good = (step, values["loss"])
            self._without_targets = set()
            return
        first, last = self._row_range(step, step)
        bad_value = "the loss" if not math.isfinite(values["loss"]) else "the gradient"
        if self._writer:
            self._events.write("bad_step", step=step, rows=[first, last], bad=bad_value, in_a_row=in_a_row)
            self._status.line(
                f"WARNING step {step}: {bad_value} is not finite (rows {first} to {last}); the model is left unchanged"
            )
        if in_a_row > self._max_bad_in_a_row:
            raise UserError(self._describe_bad_steps(step, in_a_row, bad_value))

    def _report_no_targets(self, step: int) -> None:
        """Reports a step without targets, but only the first of this start, because there may be many."""
        if self._writer and not self._noted_no_targets:
            first, last = self._row_range(step, step)
            self._status.line(
                f"note    step {step}: its rows ({first} to {last}) have no targets, so it changes nothing; the loss "
                f"of such steps is null in {METRICS}"
            )
        self._noted_no_targets = True

    def _report_skipped_rows(self, step: int) -> None:
        """Reports rows that were skipped in this step because of `data.skip`."""
        skipped_before = self._order.rows_skipped(step - 2) if step > 1 else 0
        skipped = self._order.rows_skipped(step - 1) - skipped_before
        if skipped:
            first, last = self._row_range(step, step)
            self._events.write("rows_skipped", step=step, count=skipped, rows=[first, last])
            self._status.line(f"note    rows skipped in step {step}: {skipped}")

    def _row_range(self, first_step: int, last_step: int) -> tuple[int, int]:
        """Returns the numbers of the first and the last row in the batches of these steps."""
        [first] = self._order.numbers(first_step - 1, [0])
        [last] = self._order.numbers(last_step - 1, [self._batch_rows - 1])
        return int(first), int(last)

    def _first_bad_step(self, step: int, in_a_row: int) -> int:
        """Returns the first of the `in_a_row` bad steps in a row of which `step` is the last."""
        first = step
        while in_a_row > 1:
            first -= 1
            in_a_row -= first not in self._without_targets
        return first

    def _describe_bad_steps(self, step: int, in_a_row: int, bad_value: str) -> str:
        """Returns the error message for too many bad steps in a row, with the rows that may have caused them."""
        first_bad = self._first_bad_step(step, in_a_row)
        first, last = self._row_range(first_bad, step)
        last_good = "no step since this start was good"
        if self._last_good is not None:
            good_step, loss = self._last_good
            last_good = f"the last good step was {good_step}, its loss {loss:.4f}"
        return (
            f"{in_a_row} steps in a row, up to step {step}: {bad_value} was infinite or NaN ({last_good}; the rows of "
            f"these steps are {first} to {last}); if these rows are the cause, add {{from_row: {first}, rows: "
            f"{last + 1 - first}}} to data.skip; if there is a checkpoint of step {first_bad} or later, "
            "also set another run.dir and run.fork_from to continue from an earlier one; if these rows are not "
            "the cause, lower optimizer.learning_rate and continue from an earlier checkpoint"
        )
