"""Defines the messages between processes of a run: one dataclass each, sent as one line of JSON."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from jaxmnt.distributed.termination import AbandonedStart, ExitReason, PrintableText
from jaxmnt.errors import ExitCode


@dataclass(frozen=True)
class Position:
    """The step and phase that a process is in."""

    step: int
    """Number of steps that the process has begun."""
    phase: PrintableText
    settled: bool = False
    """True once the process has finished a step, and with it everything that takes long only the first time."""
    own: bool = False
    """True if the process is waiting for local work, such as reading its input data, rather than for the devices or
    another process."""

    def __str__(self) -> str:
        return f"in step {self.step}, {self.phase}" if self.step else self.phase


STARTING = Position(0, "starting")


@dataclass
class Beat:
    """Says that the sender is alive, and where it is."""

    position: Position
    report: list[Any] = field(default_factory=list)
    """Measurements for process 0."""
    kind: Literal["beat"] = "beat"


@dataclass
class Failed:
    """Says that the sender is failing, for a reason of its own."""

    why: PrintableText
    code: ExitCode = ExitCode.PEER
    kind: Literal["failed"] = "failed"


@dataclass
class Stopped:
    """Says that the sender was asked to stop before its first step."""

    why: PrintableText
    code: ExitCode = ExitCode.STOPPED
    kind: Literal["stopped"] = "stopped"


@dataclass
class Halted:
    """Says that the sender makes no progress."""

    why: PrintableText
    kind: Literal["halted"] = "halted"


@dataclass
class Inquiry:
    """Asks every process for its position. Sent by process 0."""

    kind: Literal["inquiry"] = "inquiry"


@dataclass
class Here:
    """Answers an inquiry with the position of the sender."""

    position: Position
    kind: Literal["here"] = "here"


@dataclass
class GaveUp:
    """Says that the sender has lost process 0."""

    why: PrintableText
    kind: Literal["gave_up"] = "gave_up"


@dataclass
class Verdict:
    """Ends the run in every process. Sent by process 0."""

    exit_reason: ExitReason | AbandonedStart
    """Parsed from JSON as whichever of the two classes has all of the fields."""
    kind: Literal["verdict"] = "verdict"


@dataclass
class Bye:
    """Says that the sender is leaving without a failure."""

    kind: Literal["bye"] = "bye"


Message = Beat | Failed | Stopped | Halted | Inquiry | Here | GaveUp | Verdict | Bye
_adapter: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])
parse_message = _adapter.validate_python
"""Converts a JSON object to a message. Raises `ValueError` for an object that no process of this version would send."""
