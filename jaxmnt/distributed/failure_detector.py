"""The rules by which a process concludes that the run has failed, and which process is at fault.

Without threads, clocks and sockets: time passes by `FailureDetector.beat`, once a second.
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
"""The beats of process 0 within which the others answer an inquiry."""


@dataclass
class Lost:
    """A connection is of no use any more."""

    why: str


Act = Message | ExitReason
"""A message to send to every connected process, or the reason for which this process has to end."""


class FailureDetector:
    """What one process knows of the others. Each event returns the acts that follow from it, in order."""

    def __init__(
        self,
        identity: Identity,
        hosts: dict[int, str],
        silence: float,
        patience: float,
        position: Callable[[], Position],
    ):
        """`hosts` has this process and those to which it is connected. Such a process is lost after `silence` seconds
        without a message; after `patience` until this process has settled. `position` returns where this process is."""
        self._processes, self._is_first = identity.processes, identity.process_id == 0
        self._hosts, self._silence, self._patience, self._position = hosts, silence, patience, position
        self._positions = {process: STARTING for process in hosts if process != identity.process_id}
        self._unheard = dict.fromkeys(self._positions, 0)
        """For each connected process the beats since its last message. Counted, not timed: a machine that was suspended
        does not blame the others for its own absence."""
        self._inquiry = ""
        """Why process 0 waits for the positions of all."""
        self._answered: set[int] = set()
        self._answer_beats = _ANSWER_BEATS

    def hear(self, process: int, event: Message | Lost) -> list[Act]:
        """A message from a process, or the loss of its connection."""
        self._unheard[process] = 0
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
                del self._unheard[process]
            case Lost(why):
                del self._unheard[process]
                return self._give_up(process, why)
        return []

    def beat(self) -> list[Act]:
        """A second has passed."""
        acts: list[Act] = []
        limit = self._silence if self._position().settled else self._patience
        for process in self._unheard:
            self._unheard[process] += 1
            if self._unheard[process] * BEAT_SECONDS > limit:
                where = f", last seen {self._positions[process]}" if self._is_first else ""
                why = f"has been silent for {limit:g} s: it is stopped, or cut off from the network{where}"
                acts += self._give_up(process, why)
        return acts + (self._await_answers() if self._inquiry else [])

    def halt(self, why: str) -> list[Act]:
        """This process makes no progress."""
        return self._inquire(0, why) if self._is_first else [Halted(why)]

    def fail(self, exit_reason: ExitReason) -> list[Act]:
        """This process ends by itself."""
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
        silent = sorted(self._unheard.keys() - self._answered)
        if silent and self._answer_beats:
            return []
        account, suspect = account_of(self._positions | {0: self._position()}, silent, self._label)
        host = None if suspect is None else self._hosts[suspect]
        return self._end(ExitReason("hang", f"{self._inquiry}. {account}", ExitCode.PEER, suspect, host))

    def _give_up(self, process: int, why: str) -> list[Act]:
        # Perhaps it is only this process that does not hear process 0.
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


def account_of(
    positions: dict[int, Position], silent: list[int], label: Callable[[int], str]
) -> tuple[str, int | None]:
    """Which process is where, in words, and the process at fault if one alone is silent, is behind, or waits for
    something of its own."""
    sentences = [f"No answer from {listed([label(process) for process in silent])}"] if silent else []
    present = {process: position for process, position in sorted(positions.items()) if process not in silent}
    groups: dict[tuple[int, str], list[int]] = {}
    for process, position in present.items():
        groups.setdefault((position.step, str(position)), []).append(process)
    for (_, words), group in sorted(groups.items()):
        sentences.append(f"{label(group[0]) if len(group) == 1 else f'processes {listed(group)}'}: {words}")
    if len(groups) == 1 < len(positions) and not silent:
        sentences.append("All are at the same place: look at the network between them, and at the slowest device")
    steps = [position.step for position in present.values()]
    at_fault = (lambda at: at.step == min(steps)) if len(set(steps)) > 1 else (lambda at: at.own)
    suspects = silent or [process for process, position in present.items() if at_fault(position)]
    return ". ".join(sentences), suspects[0] if len(suspects) == 1 else None
