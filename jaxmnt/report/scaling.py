"""A scaling study: the speed of a run on rising numbers of processes, and what limits it; as text and as a picture."""

import itertools
import math
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from jaxmnt.telemetry.phases import PHASE_ACTIVITIES
from jaxmnt.telemetry.progress import table
from jaxmnt.units import count, seconds_text

FORMAT = 1
FOLDER, FILE = "scaling", "scaling.json"
"""Folder and file of a study, in the run directory."""
MIN_EFFICIENCY = 0.8
"""A lower efficiency gives a warning."""

Mode = Literal["weak", "strong"]
MODE_MEANING = {"weak": "constant rows per device", "strong": "constant rows in total"}


class _StudyModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Point(_StudyModel):
    """The measurements with one number of processes."""

    processes: PositiveInt
    devices: PositiveInt
    rows: PositiveInt
    """Rows of a step, on all devices."""
    seconds: tuple[PositiveFloat, ...]
    """Median seconds of a step in each round."""
    phases: dict[str, NonNegativeFloat]
    """Seconds of a step in each phase of the main thread, averaged over processes and rounds."""
    predicted: PositiveFloat | None = None
    """Predicted seconds of a step."""
    exposed: dict[str, NonNegativeFloat] = {}
    """Predicted seconds of a step in which a device waits for communication, by mesh axis."""

    @property
    def typical(self) -> float:
        """Median seconds of a step over the rounds."""
        return statistics.median(self.seconds)


class Scaling(_StudyModel):
    """Measurements with rising numbers of processes, compared with the first."""

    mode: Mode
    points: tuple[Point, ...]

    def efficiencies(self, point: Point) -> list[float]:
        """Returns, for each round, the rows per second and device, relative to the first point in the same round."""
        rounds = zip(self.points[0].seconds, point.seconds, strict=True)
        return [self._relative_rows(point) * first / seconds for first, seconds in rounds]

    def efficiency(self, point: Point) -> float:
        """Returns the median efficiency over the rounds."""
        return statistics.median(self.efficiencies(point))

    def predicted(self, point: Point) -> float | None:
        """Returns the efficiency of the predicted step times; None without predictions."""
        first = self.points[0]
        if first.predicted is None or point.predicted is None:
            return None
        return self._relative_rows(point) * first.predicted / point.predicted

    def cause(self, point: Point) -> str:
        """Returns, as text, the phase that accounts for most of the time lost compared with the first point."""
        relative, first = self._relative_rows(point), self.points[0].phases
        lost = {name: seconds - relative * first.get(name, 0.0) for name, seconds in point.phases.items()}
        if not lost or max(lost.values()) <= 0:
            return "no phase takes longer than it should"
        phase = max(sorted(lost), key=lambda name: lost[name])
        text = f"{PHASE_ACTIVITIES.get(phase, phase)} takes {1e3 * lost[phase]:,.0f} ms of a step more than it should"
        axis = max(sorted(point.exposed), key=lambda name: point.exposed[name], default=None)
        if phase in ("device", "dispatch") and axis is not None:
            text += f"; the prediction has {1e3 * point.exposed[axis]:,.0f} ms of exposed communication along {axis}"
        return text

    def _relative_rows(self, point: Point) -> float:
        """Returns the rows per device, relative to the first point."""
        first = self.points[0]
        return (point.rows / point.devices) / (first.rows / first.devices)

    def warnings(self) -> list[str]:
        """Returns a warning for each point whose efficiency is low."""
        warnings = []
        for point in self.points[1:]:
            efficiency = self.efficiency(point)
            if efficiency < MIN_EFFICIENCY:
                warnings.append(
                    f"{self.mode} scaling to {point.processes} processes has an efficiency of {efficiency:.2f}, below "
                    f"{MIN_EFFICIENCY}: {self.cause(point)}"
                )
        return warnings


class Study(_StudyModel):
    """A scaling study of one config."""

    format: PositiveInt = FORMAT
    date: str
    device: str
    length: PositiveInt
    """Tokens of a row."""
    environment: dict[str, str]
    """Versions and other properties of the environment that a run records."""
    settings: tuple[str, ...]
    """Overrides of settings of the config file."""
    scalings: tuple[Scaling, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the study as JSON, together with the efficiencies and warnings derived from it."""
        scalings = [
            scaling.model_dump(mode="json")
            | {
                "meaning": MODE_MEANING[scaling.mode],
                "points": [
                    point.model_dump(mode="json")
                    | {
                        "typical": point.typical,
                        "tokens_per_second": point.rows * self.length / point.typical,
                        "efficiencies": scaling.efficiencies(point),
                        "efficiency": scaling.efficiency(point),
                        "predicted_efficiency": scaling.predicted(point),
                    }
                    for point in scaling.points
                ],
            }
            for scaling in self.scalings
        ]
        warnings = [text for scaling in self.scalings for text in scaling.warnings()]
        return self.model_dump(mode="json") | {"scalings": scalings, "warnings": warnings}


def read_study(run_dir: Path) -> tuple[Study | None, str | None]:
    """Returns the study of a run, and a note on why its file is unreadable; None for what does not exist."""
    file = run_dir / FOLDER / FILE
    try:
        return Study.model_validate_json(file.read_bytes()), None
    except FileNotFoundError:
        return None, None
    except (OSError, ValidationError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a scaling study of this version"
        return None, f"{file} cannot be read: {why}"


def as_text(study: Study) -> str:
    """Returns a table for each kind of scaling, and the warnings."""
    tables = ["\n".join(_table(study, scaling)) for scaling in study.scalings]
    warnings = [f"warning {text}" for scaling in study.scalings for text in scaling.warnings()]
    return "\n\n".join([*tables, *(["\n".join(warnings)] if warnings else [])])


def _table(study: Study, scaling: Scaling) -> list[str]:
    phases = _shown_phases(scaling)
    head = ["processes", "devices", "rows", "step", "tokens/s", "efficiency", "over rounds"]
    rows = [(*head, "predicted", "predicted efficiency", "communication", *phases)]
    for point in scaling.points:
        efficiencies, expected = scaling.efficiencies(point), scaling.predicted(point)
        rows.append(
            (
                str(point.processes),
                str(point.devices),
                str(point.rows),
                seconds_text(point.typical),
                count(point.rows * study.length / point.typical),
                f"{scaling.efficiency(point):.2f}",
                f"{min(efficiencies):.2f} to {max(efficiencies):.2f}",
                "-" if point.predicted is None else seconds_text(point.predicted),
                "-" if expected is None else f"{expected:.2f}",
                "-" if point.predicted is None else seconds_text(sum(point.exposed.values())),
                *(seconds_text(point.phases.get(phase, 0.0)) for phase in phases),
            )
        )
    legend = ", ".join(f"{phase}: {PHASE_ACTIVITIES.get(phase, phase)}" for phase in phases)
    return [
        f"{scaling.mode} scaling: {MODE_MEANING[scaling.mode]}",
        *table(rows, right=set(range(len(rows[0])))),
        f"seconds of a step, {legend}; communication: predicted exposed communication",
    ]


_MIN_PHASE_SHARE = 0.005
"""Smallest share of a step for which a phase has a column."""


def _shown_phases(scaling: Scaling) -> list[str]:
    """Returns the phases that take a noticeable share of a step, the longest first."""
    names = sorted({name for point in scaling.points for name in point.phases})
    longest = lambda name: max(point.phases.get(name, 0.0) / point.typical for point in scaling.points)
    return sorted((name for name in names if longest(name) > _MIN_PHASE_SHARE), key=lambda name: -longest(name))


_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 400, 60, 110, 50, 50
_COLORS = {"weak": "#1f77b4", "strong": "#d62728"}


def draw(study: Study) -> str:
    """Returns an SVG of efficiency over the number of processes.

    Each round is a point, the median is a line, and the prediction is a dashed line.
    """
    counts = [point.processes for point in study.scalings[0].points]
    measured = [scaling.efficiencies(point) for scaling in study.scalings for point in scaling.points]
    top = max(1.1, *itertools.chain.from_iterable(measured))
    low, high = math.log(counts[0]), math.log(counts[-1])
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    x = lambda processes: _LEFT + 20 + (math.log(processes) - low) / (high - low) * (right - _LEFT - 40)
    y = lambda efficiency: bottom - efficiency / top * (bottom - _TOP)
    parts = [
        f'<text x="{_LEFT}" y="24" font-size="15">Efficiency of a device, by the number of processes '
        f"({escape(study.device)})</text>",
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">processes</text>',
        f'<rect x="{_LEFT}" y="{_TOP}" width="{right - _LEFT}" height="{bottom - _TOP}" fill="none" stroke="#999"/>',
    ]
    for number in counts:
        parts.append(f'<text x="{x(number):.1f}" y="{bottom + 18}" text-anchor="middle">{number:,}</text>')
    for value in (0.0, 0.5, MIN_EFFICIENCY, 1.0):
        parts.append(f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
        dash = ' stroke-dasharray="4 4"' if value == MIN_EFFICIENCY else ""
        parts.append(f'<line x1="{_LEFT}" y1="{y(value):.1f}" x2="{right}" y2="{y(value):.1f}" stroke="#ccc"{dash}/>')
    for index, scaling in enumerate(study.scalings):
        color = _COLORS[scaling.mode]
        medians = [(x(point.processes), y(scaling.efficiency(point))) for point in scaling.points]
        parts.append(_polyline(medians, color))
        predictions = [(x(point.processes), scaling.predicted(point)) for point in scaling.points]
        expected = [(across, y(value)) for across, value in predictions if value is not None]
        if len(expected) > 1:
            parts.append(_polyline(expected, color, dashed=True))
        parts += [
            f'<circle cx="{x(point.processes):.1f}" cy="{y(value):.1f}" r="3" fill="{color}" fill-opacity="0.6"/>'
            for point in scaling.points
            for value in scaling.efficiencies(point)
        ]
        parts.append(f'<text x="{right + 10}" y="{_TOP + 14 + 36 * index}" fill="{color}">{scaling.mode}</text>')
        if len(expected) > 1:
            parts.append(
                f'<text x="{right + 10}" y="{_TOP + 30 + 36 * index}" fill="{color}" font-size="11">'
                "dashed: predicted</text>"
            )
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>\n{inside}\n</svg>\n'
    )


def _polyline(points: Sequence[tuple[float, float]], color: str, *, dashed: bool = False) -> str:
    coordinates = " ".join(f"{across:.1f},{up:.1f}" for across, up in points)
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    return f'<polyline points="{coordinates}" fill="none" stroke="{color}" stroke-width="2"{dash}/>'
