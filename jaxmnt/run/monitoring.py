"""What is watched while steps are taken: where their time goes, who holds the others up, the loss, the money."""

import json
import math
import time
from pathlib import Path
from typing import Any

from jaxmnt.distributed.coordination import gather
from jaxmnt.distributed.heartbeat import Heartbeat
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import PeerError, remark, summary
from jaxmnt.run.preemption import StopRequest
from jaxmnt.run.spending import Spending
from jaxmnt.telemetry.events import METRICS, PHASE_LINES, Events, repair
from jaxmnt.telemetry.loss_spikes import LossSpikeDetector
from jaxmnt.telemetry.phase_log import PhaseLog
from jaxmnt.telemetry.phases import DOING, StepTimer
from jaxmnt.telemetry.progress import StatusLine
from jaxmnt.telemetry.stragglers import Straggler

_LAST_SECONDS = 10.0
"""For all to give the times of the last steps."""
_ON_THE_WAY_SECONDS = 2.0
"""For what heartbeats have sent before."""
_LOOK_SECONDS = 0.02


class Monitoring:
    """In every process the times of its steps; process 0 hears those of all, and says what is to be said."""

    def __init__(
        self,
        run_dir: Path,
        identity: Identity,
        hosts: dict[int, str],
        heartbeat: Heartbeat,
        events: Events,
        status: StatusLine,
        spending: Spending | None,
        *,
        step: int,
    ):
        """The run goes on after `step`. Process 0 has the `spending`."""
        self.timer = StepTimer()
        self._spending = spending
        self._identity, self._hosts, self._events, self._status = identity, hosts, events, status
        self._phases: PhaseLog | None = None
        self._losses = LossSpikeDetector()
        self._complained = False
        if identity.process_id != 0:
            heartbeat.report = self.timer.take
            return
        self._note_steps_again(repair(run_dir / METRICS, last_step=step))
        repair(run_dir / PHASE_LINES, last_step=step)
        self._phases = PhaseLog(run_dir, identity.processes)
        heartbeat.hear_reports(self._hear)

    def status(self) -> dict[str, Any]:
        """What is known at this moment, in process 0. From any thread."""
        assert self._phases is not None
        slow = self._phases.stragglers
        spent = None if self._spending is None else self._spending.spent
        return {
            "phases": self._phases.latest,
            "stragglers": len(slow),
            "slow": [{"process": process, "host": self._hosts[process], "phase": phase} for process, phase in slow],
            "spent": spent,
        }

    def finished(self, step: int, loss: float) -> None:
        """A step is finished on the devices."""
        spike = self._losses.see(loss) if self._phases is not None and math.isfinite(loss) else None
        if spike is not None:
            self._events.write("loss_spike", step=step, loss=spike.loss, typical=spike.typical)
            self._status.line(
                f"WARNING step {step}: the loss jumped to {spike.loss:.4f}; the median of the steps before is "
                f"{spike.typical:.4f}"
            )

    def end_step(self, step: int, stop: StopRequest) -> None:
        """The main thread has done all that there was to do for a step."""
        self.timer.end_step(step)
        if self._phases is None:
            return
        with self.timer.during("writing"):
            self._hear(0, self.timer.take())
            if self._spending is not None:
                self._spending.check(step, stop, self._events, self._status)
            for found in self._phases.take_findings():
                self._tell_of(found, step)

    def end(self, step: int) -> None:
        """All processes call this after the last step, whose times would else come with the next heartbeat."""
        try:
            rows = gather("times of the last steps", json.dumps(self.timer.take()), self._identity, _LAST_SECONDS)
        except PeerError as error:
            remark(f"note: {PHASE_LINES} lacks the last steps: {error}")
            return
        for process, text in enumerate(rows or []):
            self._hear(process, json.loads(text))
        deadline = time.monotonic() + _ON_THE_WAY_SECONDS
        while self._phases is not None and not self._phases.complete_up_to(step) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)

    def _hear(self, process: int, rows: list[Any]) -> None:
        """From any thread. Telemetry that makes no sense is said once, and ends no run."""
        assert self._phases is not None
        try:
            self._phases.heard(process, rows)
        except Exception as error:
            if not self._complained:
                self._complained = True
                remark(f"note: what process {process} tells of its steps makes no sense: {summary(error)}")

    def close(self) -> None:
        """Lines that are on their way have a few seconds."""
        if self._phases is not None:
            self._phases.close()

    def _tell_of(self, found: Straggler, step: int) -> None:
        """Who holds the others up, or does no longer."""
        host = self._hosts[found.process]
        self._events.write(
            "straggler" if found.began else "straggler_over",
            step=step,
            at_fault=found.process,
            at_fault_host=host,
            phase=found.phase,
            slower_seconds=found.seconds,
            step_seconds=found.step_seconds,
        )
        who, doing = f"process {found.process} of {self._identity.processes} on {host}", DOING[found.phase]
        if found.began:
            share = found.seconds / found.step_seconds
            self._status.line(
                f"WARNING step {step}: {who} holds the others up: for {doing} it takes {1e3 * found.seconds:.0f} ms "
                f"more than they do ({share:.0%} of a step)"
            )
        else:
            self._status.line(f"note    step {step}: {who} no longer takes more time than the others for {doing}")

    def _note_steps_again(self, later: list[dict[str, Any]]) -> None:
        """Lines of steps after the checkpoint that the run goes on from, which are taken again."""
        lines = [line for line in later if line["kind"] == "train"]
        for attempt in sorted({line.get("attempt", self._events.attempt - 1) for line in lines}):
            own = [line for line in lines if line.get("attempt", self._events.attempt - 1) == attempt]
            self._events.write(
                "steps_again",
                of_attempt=attempt,
                steps=len(own),
                seconds=sum(line.get("step_seconds") or 0.0 for line in own),
                until=max(line["time"] for line in own),
            )
