"""A scaling study as text and as a picture: the speed of a run as processes are added, and what limits it."""

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
"""Name of the folder of a study in the run directory, and of the file in this folder."""
MIN_EFFICIENCY = 0.8
"""Efficiency below which a study warns."""

Mode = Literal["weak", "strong"]
MODE_DESCRIPTIONS = {"weak": "constant rows per device", "strong": "constant rows in total"}


class _StudyModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Point(_StudyModel):
    """The measurements for one number of processes."""

    processes: PositiveInt
    devices: PositiveInt
    rows: PositiveInt
    """Total number of rows in a step, on all devices together."""
    seconds: tuple[PositiveFloat, ...]
    """Median duration of a step in each round."""
    phases: dict[str, NonNegativeFloat]
    """Seconds that the main thread spends in each phase of a step, averaged over processes and rounds."""
    predicted: PositiveFloat | None = None
    """Predicted duration of a step; None without a prediction."""
    exposed: dict[str, NonNegativeFloat] = {}
    """Predicted seconds of a step in which a device waits for communication along each mesh axis."""

    @property
    def median_seconds(self) -> float:
        """The duration of a step: the median over the rounds."""
        return statistics.median(self.seconds)


class Scaling(_StudyModel):
    """The measurements for increasing numbers of processes, each compared with the first."""

    mode: Mode
    points: tuple[Point, ...]

    def efficiencies(self, point: Point) -> list[float]:
        """Returns the efficiency of a point in each round.

        It is the number of rows per second and device, relative to the first point in the same round.
        """
        rounds = zip(self.points[0].seconds, point.seconds, strict=True)
        return [self._relative_rows(point) * first_seconds / seconds for first_seconds, seconds in rounds]

    def efficiency(self, point: Point) -> float:
        """Returns the efficiency of a point, as the median over the rounds."""
        return statistics.median(self.efficiencies(point))

    def predicted_efficiency(self, point: Point) -> float | None:
        """Returns the efficiency of a point according to the predicted step times; None without predictions."""
        first = self.points[0]
        if first.predicted is None or point.predicted is None:
            return None
        return self._relative_rows(point) * first.predicted / point.predicted

    def describe_cause(self, point: Point) -> str:
        """Describes the phase that accounts for most of the time that a point loses compared with the first point."""
        relative_rows = self._relative_rows(point)
        first_phases = self.points[0].phases
        lost_seconds = {
            name: seconds - relative_rows * first_phases.get(name, 0.0) for name, seconds in point.phases.items()
        }
        if not lost_seconds or max(lost_seconds.values()) <= 0:
            return "no phase takes longer than it should"
        phase = max(sorted(lost_seconds), key=lambda name: lost_seconds[name])
        excess = f"{1e3 * lost_seconds[phase]:,.0f} ms"
        text = f"{PHASE_ACTIVITIES.get(phase, phase)} takes {excess} per step more than it should"
        axis = max(sorted(point.exposed), key=lambda name: point.exposed[name], default=None)
        if phase in ("device", "dispatch") and axis is not None:
            text += f"; the prediction has {1e3 * point.exposed[axis]:,.0f} ms of exposed communication along {axis}"
        return text

    def _relative_rows(self, point: Point) -> float:
        """Returns the number of rows per device at a point, relative to the first point."""
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
                    f"{MIN_EFFICIENCY}: {self.describe_cause(point)}"
                )
        return warnings


class Study(_StudyModel):
    """A scaling study of one config."""

    format: PositiveInt = FORMAT
    date: str
    device: str
    length: PositiveInt
    """Number of tokens in a row."""
    environment: dict[str, str]
    """The versions and other properties of the environment that a run recorded."""
    settings: tuple[str, ...]
    """The settings that override those in the config file."""
    scalings: tuple[Scaling, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the study as JSON, together with the efficiencies and warnings derived from it."""
        scalings = [
            scaling.model_dump(mode="json")
            | {
                "meaning": MODE_DESCRIPTIONS[scaling.mode],
                "points": [
                    point.model_dump(mode="json")
                    | {
                        "typical": point.median_seconds,
                        "tokens_per_second": point.rows * self.length / point.median_seconds,
                        "efficiencies": scaling.efficiencies(point),
                        "efficiency": scaling.efficiency(point),
                        "predicted_efficiency": scaling.predicted_efficiency(point),
                    }
                    for point in scaling.points
                ],
            }
            for scaling in self.scalings
        ]
        warnings = [text for scaling in self.scalings for text in scaling.warnings()]
        return self.model_dump(mode="json") | {"scalings": scalings, "warnings": warnings}


def read_study(run_dir: Path) -> tuple[Study | None, str | None]:
    """Returns the scaling study of a run, and a note that says why the file of the study cannot be read.

    The study is None if there is no readable file, and the note is None unless there is an unreadable one.
    """
    file = run_dir / FOLDER / FILE
    try:
        return Study.model_validate_json(file.read_bytes()), None
    except FileNotFoundError:
        return None, None
    except (OSError, ValidationError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a scaling study of this version"
        return None, f"{file} cannot be read: {why}"


def as_text(study: Study) -> str:
    """Returns a study as text for a terminal, with a table for each kind of scaling, and the warnings."""
    blocks = ["\n".join(_table_lines(study, scaling)) for scaling in study.scalings]
    warnings = [f"warning {text}" for scaling in study.scalings for text in scaling.warnings()]
    if warnings:
        blocks.append("\n".join(warnings))
    return "\n\n".join(blocks)


def _table_lines(study: Study, scaling: Scaling) -> list[str]:
    """Returns a heading, a table with a row for each number of processes, and an explanation of its columns."""
    phases = _noticeable_phases(scaling)
    rows = [
        (
            "processes", "devices", "rows", "step", "tokens/s", "efficiency", "over rounds",
            "predicted", "predicted efficiency", "communication", *phases,
        )
    ]  # fmt: skip
    for point in scaling.points:
        efficiencies = scaling.efficiencies(point)
        predicted_efficiency = scaling.predicted_efficiency(point)
        rows.append(
            (
                str(point.processes),
                str(point.devices),
                str(point.rows),
                seconds_text(point.median_seconds),
                count(point.rows * study.length / point.median_seconds),
                f"{scaling.efficiency(point):.2f}",
                f"{min(efficiencies):.2f} to {max(efficiencies):.2f}",
                "-" if point.predicted is None else seconds_text(point.predicted),
                "-" if predicted_efficiency is None else f"{predicted_efficiency:.2f}",
                "-" if point.predicted is None else seconds_text(sum(point.exposed.values())),
                *(seconds_text(point.phases.get(phase, 0.0)) for phase in phases),
            )
        )
    legend = ", ".join(f"{phase}: {PHASE_ACTIVITIES.get(phase, phase)}" for phase in phases)
    return [
        f"{scaling.mode} scaling: {MODE_DESCRIPTIONS[scaling.mode]}",
        *table(rows, right=set(range(len(rows[0])))),
        f"time per step in each phase ({legend}); communication is the predicted time of exposed communication",
    ]


_MIN_PHASE_SHARE = 0.005
"""Share of a step that a phase must exceed to have a column in the table."""


def _noticeable_phases(scaling: Scaling) -> list[str]:
    """Returns the phases that take a noticeable share of a step, with the longest first."""
    names = sorted({name for point in scaling.points for name in point.phases})

    def max_share(name: str) -> float:
        return max(point.phases.get(name, 0.0) / point.median_seconds for point in scaling.points)

    return sorted((name for name in names if max_share(name) > _MIN_PHASE_SHARE), key=lambda name: -max_share(name))


_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 110, 50, 50
"""Margins of the picture."""
_COLORS = {"weak": "#1f77b4", "strong": "#d62728"}


def draw(study: Study) -> str:
    """Returns an SVG picture of the efficiency over the number of processes.

    Each round is a circle, the median is a line, and the prediction is a dashed line.
    """
    counts = [point.processes for point in study.scalings[0].points]
    efficiencies = (
        efficiency
        for scaling in study.scalings
        for point in scaling.points
        for efficiency in scaling.efficiencies(point)
    )
    max_efficiency = max(1.1, *efficiencies)
    min_log, max_log = math.log(counts[0]), math.log(counts[-1])
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x(processes: int) -> float:
        return _LEFT + 20 + (math.log(processes) - min_log) / (max_log - min_log) * (right - _LEFT - 40)

    def y(efficiency: float) -> float:
        return bottom - efficiency / max_efficiency * (bottom - _TOP)

    parts = [
        f'<text x="{_LEFT}" y="24" font-size="15">Efficiency of a device, by the number of processes '
        f"({escape(study.device)})</text>",
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">processes</text>',
        f'<rect x="{_LEFT}" y="{_TOP}" width="{right - _LEFT}" height="{bottom - _TOP}" fill="none" stroke="#999"/>',
    ]
    for processes in counts:
        parts.append(f'<text x="{x(processes):.1f}" y="{bottom + 18}" text-anchor="middle">{processes:,}</text>')
    for efficiency in (0.0, 0.5, MIN_EFFICIENCY, 1.0):
        line_y = y(efficiency)
        parts.append(f'<text x="{_LEFT - 8}" y="{line_y + 4:.1f}" text-anchor="end">{efficiency:g}</text>')
        dash = ' stroke-dasharray="4 4"' if efficiency == MIN_EFFICIENCY else ""
        parts.append(f'<line x1="{_LEFT}" y1="{line_y:.1f}" x2="{right}" y2="{line_y:.1f}" stroke="#ccc"{dash}/>')
    for index, scaling in enumerate(study.scalings):
        color = _COLORS[scaling.mode]
        medians = [(x(point.processes), y(scaling.efficiency(point))) for point in scaling.points]
        parts.append(_polyline(medians, color))
        predictions = [(x(point.processes), scaling.predicted_efficiency(point)) for point in scaling.points]
        predicted_line = [(across, y(efficiency)) for across, efficiency in predictions if efficiency is not None]
        has_prediction = len(predicted_line) > 1
        if has_prediction:
            parts.append(_polyline(predicted_line, color, dashed=True))
        parts += [
            f'<circle cx="{x(point.processes):.1f}" cy="{y(efficiency):.1f}" r="3" fill="{color}" fill-opacity="0.6"/>'
            for point in scaling.points
            for efficiency in scaling.efficiencies(point)
        ]
        parts.append(f'<text x="{right + 10}" y="{_TOP + 14 + 36 * index}" fill="{color}">{scaling.mode}</text>')
        if has_prediction:
            parts.append(
                f'<text x="{right + 10}" y="{_TOP + 30 + 36 * index}" fill="{color}" font-size="11">'
                "dashed: predicted</text>"
            )
    elements = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>\n{elements}\n</svg>\n'
    )


def _polyline(points: Sequence[tuple[float, float]], color: str, *, dashed: bool = False) -> str:
    coordinates = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    return f'<polyline points="{coordinates}" fill="none" stroke="{color}" stroke-width="2"{dash}/>'
