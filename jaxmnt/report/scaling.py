"""A scaling study: how fast a run is on more and more processes, and what keeps it from being faster; in lines for a
terminal, and as a picture."""

import math
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from jaxmnt.telemetry.phases import DOING
from jaxmnt.telemetry.progress import table
from jaxmnt.units import count, seconds_text

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
        seconds = zip(self.points[0].seconds, point.seconds, strict=True)
        return [self._share(point) * one / other for one, other in seconds]

    def efficiency(self, point: Point) -> float:
        """Returns the median over the rounds."""
        return statistics.median(self.efficiencies(point))

    def predicted(self, point: Point) -> float | None:
        """The efficiency that the predictions have."""
        first = self.points[0]
        if first.predicted is None or point.predicted is None:
            return None
        return self._share(point) * first.predicted / point.predicted

    def cause(self, point: Point) -> str:
        """What takes most of the time that is lost against the first point."""
        share, first = self._share(point), self.points[0].phases
        lost = {name: seconds - share * first.get(name, 0.0) for name, seconds in point.phases.items()}
        if not lost or max(lost.values()) <= 0:
            return "no phase takes longer than it should"
        phase = max(sorted(lost), key=lambda name: lost[name])
        text = f"{DOING.get(phase, phase)} takes {1e3 * lost[phase]:,.0f} ms of a step more than it should"
        axis = max(sorted(point.exposed), key=lambda name: point.exposed[name], default=None)
        if phase in ("device", "dispatch") and axis is not None:
            text += f"; a prediction has {1e3 * point.exposed[axis]:,.0f} ms of exposed communication along {axis}"
        return text

    def _share(self, point: Point) -> float:
        """Returns the rows of a device, over those of the first point."""
        first = self.points[0]
        return (point.rows / point.devices) / (first.rows / first.devices)

    def warnings(self) -> list[str]:
        """Of the points whose efficiency is low."""
        found = []
        for point in self.points[1:]:
            efficiency = self.efficiency(point)
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
                        "efficiency": one.efficiency(point),
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


def as_text(study: Study) -> str:
    blocks = [line for scaling in study.scalings for line in ["", *_table(study, scaling)]]
    warnings = [f"warning {text}" for scaling in study.scalings for text in scaling.warnings()]
    return "\n".join([*blocks[1:], *([""] if warnings else []), *warnings])


def _table(study: Study, scaling: Scaling) -> list[str]:
    phases = _shown_phases(scaling)
    head = ["processes", "devices", "rows", "step", "tokens/s", "efficiency", "of rounds"]
    rows = [(*head, "predicted", "its efficiency", "communication", *phases)]
    for point in scaling.points:
        own, expected = scaling.efficiencies(point), scaling.predicted(point)
        rows.append(
            (
                str(point.processes),
                str(point.devices),
                str(point.rows),
                seconds_text(point.typical),
                count(point.rows * study.length / point.typical),
                f"{scaling.efficiency(point):.2f}",
                f"{min(own):.2f} to {max(own):.2f}",
                "-" if point.predicted is None else seconds_text(point.predicted),
                "-" if expected is None else f"{expected:.2f}",
                "-" if point.predicted is None else seconds_text(sum(point.exposed.values())),
                *(seconds_text(point.phases.get(phase, 0.0)) for phase in phases),
            )
        )
    legend = ", ".join(f"{phase}: {DOING.get(phase, phase)}" for phase in phases)
    return [
        f"{scaling.mode} scaling: {MEANING[scaling.mode]}",
        *table(rows, right=set(range(len(rows[0])))),
        f"of a step, {legend}; communication: predicted, behind nothing",
    ]


_LEAST_SHARE = 0.005


def _shown_phases(scaling: Scaling) -> list[str]:
    """Those that take some of a step's time."""
    names = sorted({name for point in scaling.points for name in point.phases})
    longest = lambda name: max(point.phases.get(name, 0.0) / point.typical for point in scaling.points)
    return sorted((name for name in names if longest(name) > _LEAST_SHARE), key=lambda name: -longest(name))


_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 400, 60, 110, 50, 50
_COLORS = {"weak": "#1f77b4", "strong": "#d62728"}


def draw(study: Study) -> str:
    """Efficiency over the number of processes, as an SVG: each round a point, the median a line, predicted dashed."""
    counts = [point.processes for point in study.scalings[0].points]
    values = [one for scaling in study.scalings for point in scaling.points for one in scaling.efficiencies(point)]
    top = max(1.1, *values)
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
    for value in (0.0, 0.5, LEAST, 1.0):
        parts.append(f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
        dash = ' stroke-dasharray="4 4"' if value == LEAST else ""
        parts.append(f'<line x1="{_LEFT}" y1="{y(value):.1f}" x2="{right}" y2="{y(value):.1f}" stroke="#ccc"{dash}/>')
    for place, scaling in enumerate(study.scalings):
        color = _COLORS[scaling.mode]
        medians = [(x(one.processes), y(scaling.efficiency(one))) for one in scaling.points]
        parts.append(_line(medians, color))
        told = [(x(one.processes), scaling.predicted(one)) for one in scaling.points]
        expected = [(across, y(value)) for across, value in told if value is not None]
        if len(expected) > 1:
            parts.append(_line(expected, color, dashed=True))
        parts += [
            f'<circle cx="{x(one.processes):.1f}" cy="{y(value):.1f}" r="3" fill="{color}" fill-opacity="0.6"/>'
            for one in scaling.points
            for value in scaling.efficiencies(one)
        ]
        parts.append(f'<text x="{right + 10}" y="{_TOP + 14 + 36 * place}" fill="{color}">{scaling.mode}</text>')
        if len(expected) > 1:
            parts.append(
                f'<text x="{right + 10}" y="{_TOP + 30 + 36 * place}" fill="{color}" font-size="11">'
                "dashed: predicted</text>"
            )
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>\n{inside}\n</svg>\n'
    )


def _line(points: Sequence[tuple[float, float]], color: str, *, dashed: bool = False) -> str:
    told = " ".join(f"{across:.1f},{up:.1f}" for across, up in points)
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    return f'<polyline points="{told}" fill="none" stroke="{color}" stroke-width="2"{dash}/>'
