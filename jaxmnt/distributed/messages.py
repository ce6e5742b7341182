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
    """True once a step is finished, and with it everything that takes long only the first time."""
    own: bool = False
    """True if the process waits for something of its own, such as input, not for the devices or another process."""

    def __str__(self) -> str:
        return f"in step {self.step}, {self.phase}" if self.step else self.phase


STARTING = Position(0, "starting")


@dataclass
class Beat:
    """The sender is alive."""

    position: Position
    report: list[Any] = field(default_factory=list)
    """Measurements for process 0."""
    kind: Literal["beat"] = "beat"


@dataclass
class Failed:
    """The sender fails by itself."""

    why: PrintableText
    code: ExitCode = ExitCode.PEER
    kind: Literal["failed"] = "failed"


@dataclass
class Stopped:
    """The sender was asked to stop before its first step."""

    why: PrintableText
    code: ExitCode = ExitCode.STOPPED
    kind: Literal["stopped"] = "stopped"


@dataclass
class Halted:
    """The sender makes no progress."""

    why: PrintableText
    kind: Literal["halted"] = "halted"


@dataclass
class Inquiry:
    """Process 0 asks every process for its position."""

    kind: Literal["inquiry"] = "inquiry"


@dataclass
class Here:
    """The answer to an inquiry."""

    position: Position
    kind: Literal["here"] = "here"


@dataclass
class GaveUp:
    """The sender has lost process 0."""

    why: PrintableText
    kind: Literal["gave_up"] = "gave_up"


@dataclass
class Verdict:
    """Process 0 ends the run."""

    exit_reason: ExitReason | AbandonedStart
    """Parsed from JSON as the class that has all of its fields."""
    kind: Literal["verdict"] = "verdict"


@dataclass
class Bye:
    """The sender leaves without a failure."""

    kind: Literal["bye"] = "bye"


Message = Beat | Failed | Stopped | Halted | Inquiry | Here | GaveUp | Verdict | Bye
_adapter: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])
parse_message = _adapter.validate_python
"""Converts a JSON object to a message. Raises `ValueError` for objects that no process of this version sends."""
