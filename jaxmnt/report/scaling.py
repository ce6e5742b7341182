"""A scaling study as data: how fast a run is on more and more processes, and what keeps it from being faster."""

import statistics
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from jaxmnt.errors import ConfigError
from jaxmnt.telemetry.phases import DOING

FORMAT = 1
FOLDER, FILE = "scaling", "scaling.json"
"""Where a study of a run is kept, in its run directory."""
LEAST = 0.8
"""An efficiency below it is worth a look."""

Mode = Literal["weak", "strong"]
MEANING = {"weak": "as many rows a device", "strong": "as many rows in all"}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Point(_Part):
    """So many processes."""

    processes: PositiveInt
    devices: PositiveInt
    rows: PositiveInt
    """Of a step, on all devices."""
    seconds: tuple[PositiveFloat, ...]
    """Of a step, in each round."""
    phases: dict[str, NonNegativeFloat]
    """Seconds of a step by what the main thread does, on average over processes and rounds."""
    predicted: PositiveFloat | None = None
    """Seconds of a step."""
    exposed: dict[str, NonNegativeFloat] = {}
    """Seconds of a step in which a device waits for communication, by mesh axis, as predicted."""

    @property
    def typical(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)


class Scaling(_Part):
    """Rising numbers of processes, compared with the first."""

    mode: Mode
    points: tuple[Point, ...]

    def efficiencies(self, point: Point) -> list[float]:
        """In each round: rows a second and device, over those of the first point."""
        first = self.points[0]
        share = (point.rows / point.devices) / (first.rows / first.devices)
        return [share * one / other for one, other in zip(first.seconds, point.seconds, strict=True)]

    def predicted(self, point: Point) -> float | None:
        """The efficiency that the predictions have."""
        first = self.points[0]
        if first.predicted is None or point.predicted is None:
            return None
        return (point.rows / point.devices) / (first.rows / first.devices) * first.predicted / point.predicted

    def cause(self, point: Point) -> str:
        """What takes most of the time that is lost against the first point."""
        first = self.points[0]
        share = (point.rows / point.devices) / (first.rows / first.devices)
        lost = {name: seconds - share * first.phases.get(name, 0.0) for name, seconds in point.phases.items()}
        if not lost or max(lost.values()) <= 0:
            return "no phase takes longer than it should"
        phase = max(sorted(lost), key=lambda name: lost[name])
        text = f"{DOING.get(phase, phase)} takes {1e3 * lost[phase]:,.0f} ms of a step more than it should"
        axis = max(sorted(point.exposed), key=lambda name: point.exposed[name], default=None)
        if phase in ("device", "dispatch") and axis is not None:
            text += f"; a prediction has {1e3 * point.exposed[axis]:,.0f} ms of exposed communication along {axis}"
        return text

    def warnings(self) -> list[str]:
        """Of the points whose efficiency is low."""
        found = []
        for point in self.points[1:]:
            efficiency = statistics.median(self.efficiencies(point))
            if efficiency < LEAST:
                found.append(
                    f"{self.mode} scaling to {point.processes} processes has an efficiency of {efficiency:.2f}, below "
                    f"{LEAST}: {self.cause(point)}"
                )
        return found


class Study(_Part):
    format: PositiveInt = FORMAT
    date: str
    device: str
    length: PositiveInt
    """Tokens of a row."""
    environment: dict[str, str]
    """Versions, and what else a run says of where it was."""
    settings: tuple[str, ...]
    """Over those of the config file."""
    scalings: tuple[Scaling, ...]

    def to_json(self) -> dict[str, Any]:
        """With what follows from it: efficiencies, and warnings."""
        scalings = [
            one.model_dump(mode="json")
            | {
                "meaning": MEANING[one.mode],
                "points": [
                    point.model_dump(mode="json")
                    | {
                        "typical": point.typical,
                        "tokens_per_second": point.rows * self.length / point.typical,
                        "efficiencies": one.efficiencies(point),
                        "efficiency": statistics.median(one.efficiencies(point)),
                        "predicted_efficiency": one.predicted(point),
                    }
                    for point in one.points
                ],
            }
            for one in self.scalings
        ]
        warnings = [text for one in self.scalings for text in one.warnings()]
        return self.model_dump(mode="json") | {"scalings": scalings, "warnings": warnings}


def read_study(run_dir: Path) -> tuple[Study | None, str | None]:
    """That of a run, and what is wrong with its file; None where there is none."""
    file = run_dir / FOLDER / FILE
    try:
        return Study.model_validate_json(file.read_bytes()), None
    except FileNotFoundError:
        return None, None
    except (OSError, ValidationError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no scaling study of this version"
        return None, f"{file} cannot be read: {why}"


def check_counts(counts: tuple[int, ...]) -> None:
    """Raises `ConfigError` for numbers of processes that cannot be compared."""
    if len(counts) < 2 or list(counts) != sorted(set(counts)) or counts[0] < 1:
        told = ",".join(map(str, counts))
        raise ConfigError(f"--processes: {told} must be two or more rising numbers from 1 up, such as 1,2,4")
