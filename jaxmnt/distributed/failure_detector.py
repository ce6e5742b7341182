"""Decides from messages and silence whether the run has failed, and which process is at fault.

Uses no threads, clocks or sockets: each call of `FailureDetector.beat` stands for one second.
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
_ANSWER_BEATS = 4
"""Beats of process 0 within which the other processes must answer an inquiry."""


@dataclass
class Lost:
    """The event that a connection is no longer usable."""

    why: str


Act = Message | ExitReason
"""A message to send to every connected process, or the reason for which this process must exit."""


class FailureDetector:
    """The state of the other processes, as one process knows it. Each event returns the acts to perform, in order."""

    def __init__(
        self,
        identity: Identity,
        hosts: dict[int, str],
        silence: float,
        patience: float,
        position: Callable[[], Position],
    ):
        """`hosts` maps this process and all connected processes to their hosts.

        A connected process counts as lost after `silence` seconds without a message, or after `patience` seconds until
        this process has settled. `position` returns the position of this process.
        """
        self._processes = identity.processes
        self._is_first = identity.process_id == 0
        self._hosts = hosts
        self._silence = silence
        self._patience = patience
        self._position = position
        self._positions = {process: STARTING for process in hosts if process != identity.process_id}
        self._silent_beats = dict.fromkeys(self._positions, 0)
        """Beats since the last message of each connected process. They are counted, not timed, so that a machine that
        was suspended does not blame the others for its own absence."""
        self._inquiry = ""
        """The reason for which process 0 waits for all positions; empty if it does not."""
        self._answered: set[int] = set()
        self._answer_beats = _ANSWER_BEATS

    def on_event(self, process: int, event: Message | Lost) -> list[Act]:
        """Handles a message from a process, or the loss of its connection."""
        self._silent_beats[process] = 0
        match event:
            case Beat(position):
                self._positions[process] = position
            case Here(position):
                self._positions[process] = position
                self._answered.add(process)
            case Inquiry():
                return [Here(self._position())]
            case Halted(why):
                return self._inquire(process, why)
            case Failed(why, code):
                return self._end(self._failed(process, why, code))
            case Stopped(why):
                return self._end(AbandonedStart(ABANDONED, why, ExitCode.STOPPED, process, self._hosts[process]))
            case GaveUp(why):
                return self._end(self._lost(0, f"was declared lost by {self._label(process)}: {why}"))
            case Verdict(exit_reason):
                return [exit_reason]
            case Bye():
                del self._silent_beats[process]
            case Lost(why):
                del self._silent_beats[process]
                return self._give_up(process, why)
        return []

    def beat(self) -> list[Act]:
        """Handles the passing of one second."""
        acts: list[Act] = []
        limit = self._silence if self._position().settled else self._patience
        for process in self._silent_beats:
            self._silent_beats[process] += 1
            if self._silent_beats[process] * BEAT_SECONDS > limit:
                where = f", last seen {self._positions[process]}" if self._is_first else ""
                why = f"has been silent for {limit:g} s: it is stopped, or cut off from the network{where}"
                acts += self._give_up(process, why)
        return acts + (self._await_answers() if self._inquiry else [])

    def halt(self, why: str) -> list[Act]:
        """Handles that this process makes no progress."""
        return self._inquire(0, why) if self._is_first else [Halted(why)]

    def fail(self, exit_reason: ExitReason) -> list[Act]:
        """Handles that this process exits for a reason of its own."""
        why, code = exit_reason.why, exit_reason.code
        if isinstance(exit_reason, AbandonedStart):
            return [Verdict(replace(exit_reason, asked_by=None)) if self._is_first else Stopped(why)]
        return [Verdict(self._failed(0, why, code)) if self._is_first else Failed(why, code)]

    def _inquire(self, process: int, why: str) -> list[Act]:
        if self._inquiry:
            return []
        self._inquiry = f"{self._label(process)}: {why}"
        return [Inquiry()]

    def _await_answers(self) -> list[Act]:
        self._answer_beats -= 1
        silent = sorted(self._silent_beats.keys() - self._answered)
        if silent and self._answer_beats:
            return []
        description, suspect = describe_positions(self._positions | {0: self._position()}, silent, self._label)
        host = None if suspect is None else self._hosts[suspect]
        return self._end(ExitReason("hang", f"{self._inquiry}. {description}", ExitCode.PEER, suspect, host))

    def _give_up(self, process: int, why: str) -> list[Act]:
        # Process 0 may be alive while only its messages do not arrive here: then it tells the others who gave up.
        acts: list[Act] = [GaveUp(why)] if process == 0 else []
        return acts + self._end(self._lost(process, why))

    def _end(self, exit_reason: ExitReason) -> list[Act]:
        return [Verdict(exit_reason), exit_reason] if self._is_first else [exit_reason]

    def _failed(self, process: int, why: str, code: ExitCode) -> ExitReason:
        return replace(self._lost(process, f"failed: {why}", code), by_itself=True)

    def _lost(self, process: int, why: str, code: ExitCode = ExitCode.PEER) -> ExitReason:
        text = f"{self._label(process)} {why}"
        return ExitReason("peer_lost", text, code_for_peers(code), process, self._hosts[process])

    def _label(self, process: int) -> str:
        return f"process {process} of {self._processes} on {self._hosts[process]}"


def describe_positions(
    positions: dict[int, Position], silent: list[int], label: Callable[[int], str]
) -> tuple[str, int | None]:
    """Returns a description of where each process is, and the process at fault.

    A process is at fault if it is the only one that is silent, is behind, or waits for something of its own; else None.
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
        sentences.append("All are at the same place: look at the network between them, and at the slowest device")
    # Silence counts more than being behind, and being behind more than waiting for input.
    steps = [position.step for position in present.values()]
    if silent:
        suspects = silent
    elif len(set(steps)) > 1:
        suspects = [process for process, position in present.items() if position.step == min(steps)]
    else:
        suspects = [process for process, position in present.items() if position.own]
    return ". ".join(sentences), suspects[0] if len(suspects) == 1 else None
