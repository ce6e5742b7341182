"""Decides from messages and from silence whether the run has failed, and which process is at fault.

This module uses no threads, clocks or sockets. Each call of `FailureDetector.beat` stands for one second.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.messages import (
    STARTING,
    Beat,
    Bye,
    Failed,
    GaveUp,
    Halted,
    Here,
    Inquiry,
    Message,
    Position,
    Stopped,
    Verdict,
)
from jaxmnt.distributed.termination import ABANDONED, AbandonedStart, ExitReason, code_for_peers
from jaxmnt.errors import ExitCode, listed

BEAT_SECONDS = 1.0
_ANSWER_TIMEOUT_BEATS = 4
"""Number of process 0's beats within which the other processes must answer an inquiry."""


@dataclass
class ConnectionLost:
    """The event that the connection to a process is no longer usable."""

    why: str


Action = Message | ExitReason
"""Either a message to send to every connected process, or the reason why this process must exit."""


class FailureDetector:
    """Tracks what one process knows about the state of the others. The method for each event returns the actions to
    perform, in order."""

    def __init__(
        self,
        identity: Identity,
        hosts: dict[int, str],
        silence_seconds: float,
        settling_seconds: float,
        position: Callable[[], Position],
    ):
        """`hosts` maps this process and all connected processes to their hosts.

        A connected process counts as lost if it sends no message for `silence_seconds`. Until this process has settled
        (see `Position`), the limit is `settling_seconds` instead. `position` returns the position of this process.
        """
        self._processes = identity.processes
        self._is_process_0 = identity.process_id == 0
        self._hosts = hosts
        self._silence_seconds = silence_seconds
        self._settling_seconds = settling_seconds
        self._position = position
        self._positions = {process: STARTING for process in hosts if process != identity.process_id}
        self._silent_beats = dict.fromkeys(self._positions, 0)
        """Number of beats since the last message of each connected process. Beats are counted instead of seconds, so
        that a machine that was suspended does not blame the others for its own absence."""
        self._inquiry_reason = ""
        """Why process 0 has asked all processes for their positions; empty if it has not asked."""
        self._answered_processes: set[int] = set()
        self._remaining_answer_beats = _ANSWER_TIMEOUT_BEATS

    def on_event(self, process: int, event: Message | ConnectionLost) -> list[Action]:
        """Handles a message from a process, or the loss of its connection."""
        self._silent_beats[process] = 0
        match event:
            case Beat(position):
                self._positions[process] = position
            case Here(position):
                self._positions[process] = position
                self._answered_processes.add(process)
            case Inquiry():
                return [Here(self._position())]
            case Halted(why):
                return self._inquire(process, why)
            case Failed(why, code):
                return self._end_run(self._failure_reason(process, why, code))
            case Stopped(why):
                return self._end_run(AbandonedStart(ABANDONED, why, ExitCode.STOPPED, process, self._hosts[process]))
            case GaveUp(why):
                return self._end_run(self._lost_reason(0, f"was declared lost by {self._label(process)}: {why}"))
            case Verdict(exit_reason):
                if exit_reason.process is not None and exit_reason.process >= self._processes:
                    exit_reason = replace(exit_reason, process=None, host=None)  # no such process
                return [exit_reason]
            case Bye():
                del self._silent_beats[process]
            case ConnectionLost(why):
                del self._silent_beats[process]
                return self._give_up(process, why)
        return []

    def beat(self) -> list[Action]:
        """Handles the passing of one second."""
        actions: list[Action] = []
        limit = self._silence_seconds if self._position().settled else self._settling_seconds
        for process in self._silent_beats:
            self._silent_beats[process] += 1
            if self._silent_beats[process] * BEAT_SECONDS > limit:
                where = f", last seen {self._positions[process]}" if self._is_process_0 else ""
                why = f"has been silent for {limit:g} s: it is stopped, or cut off from the network{where}"
                actions += self._give_up(process, why)
        return actions + (self._await_answers() if self._inquiry_reason else [])

    def halt(self, why: str) -> list[Action]:
        """Handles the event that this process makes no progress, for the reason `why`."""
        return self._inquire(0, why) if self._is_process_0 else [Halted(why)]

    def fail(self, exit_reason: ExitReason) -> list[Action]:
        """Handles the event that this process exits for a reason of its own."""
        why, code = exit_reason.why, exit_reason.code
        if isinstance(exit_reason, AbandonedStart):
            return [Verdict(replace(exit_reason, asked_by=None)) if self._is_process_0 else Stopped(why)]
        return [Verdict(self._failure_reason(0, why, code)) if self._is_process_0 else Failed(why, code)]

    def _inquire(self, process: int, why: str) -> list[Action]:
        if self._inquiry_reason:
            return []
        self._inquiry_reason = f"{self._label(process)}: {why}"
        return [Inquiry()]

    def _await_answers(self) -> list[Action]:
        self._remaining_answer_beats -= 1
        silent = sorted(self._silent_beats.keys() - self._answered_processes)
        if silent and self._remaining_answer_beats:
            return []
        description, suspect = describe_positions(self._positions | {0: self._position()}, silent, self._label)
        host = None if suspect is None else self._hosts[suspect]
        return self._end_run(ExitReason("hang", f"{self._inquiry_reason}. {description}", ExitCode.PEER, suspect, host))

    def _give_up(self, process: int, why: str) -> list[Action]:
        # Process 0 may be alive although its messages do not arrive here. If so, it tells the others who gave up.
        actions: list[Action] = [GaveUp(why)] if process == 0 else []
        return actions + self._end_run(self._lost_reason(process, why))

    def _end_run(self, exit_reason: ExitReason) -> list[Action]:
        return [Verdict(exit_reason), exit_reason] if self._is_process_0 else [exit_reason]

    def _failure_reason(self, process: int, why: str, code: ExitCode) -> ExitReason:
        return replace(self._lost_reason(process, f"failed: {why}", code), by_itself=True)

    def _lost_reason(self, process: int, why: str, code: ExitCode = ExitCode.PEER) -> ExitReason:
        text = f"{self._label(process)} {why}"
        return ExitReason("peer_lost", text, code_for_peers(code), process, self._hosts[process])

    def _label(self, process: int) -> str:
        return f"process {process} of {self._processes} on {self._hosts[process]}"


def describe_positions(
    positions: dict[int, Position], silent: list[int], label: Callable[[int], str]
) -> tuple[str, int | None]:
    """Describes where each process is, and identifies the process at fault.

    If any process is silent, that is the only silent one. Otherwise, if the steps differ, it is the only one that is
    behind, and if they do not, the only one that waits for something of its own. It is None if there is no such
    process, or if there are several.
    """
    sentences = [f"No answer from {listed([label(process) for process in silent])}"] if silent else []
    present = {process: position for process, position in sorted(positions.items()) if process not in silent}
    # One sentence for all processes at the same position.
    groups: dict[tuple[int, str], list[int]] = {}
    for process, position in present.items():
        groups.setdefault((position.step, str(position)), []).append(process)
    for (_, where), group in sorted(groups.items()):
        who = label(group[0]) if len(group) == 1 else f"processes {listed(group)}"
        sentences.append(f"{who}: {where}")
    if len(groups) == 1 < len(positions) and not silent:
        sentences.append("All are at the same position: check the network between them, and the slowest device")
    # Silence counts more than being behind, and being behind more than waiting for input.
    steps = [position.step for position in present.values()]
    if silent:
        suspects = silent
    elif len(set(steps)) > 1:
        suspects = [process for process, position in present.items() if position.step == min(steps)]
    else:
        suspects = [process for process, position in present.items() if position.own]
    return ". ".join(sentences), suspects[0] if len(suspects) == 1 else None
