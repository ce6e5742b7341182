"""A scaling study as lines for a terminal, and as a picture."""

import math
import statistics
from collections.abc import Sequence
from html import escape

from jaxmnt.report.scaling import LEAST, MEANING, Scaling, Study
from jaxmnt.telemetry.phases import DOING
from jaxmnt.telemetry.progress import count, seconds_text, table


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
                f"{statistics.median(own):.2f}",
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
        medians = [(x(one.processes), y(statistics.median(scaling.efficiencies(one)))) for one in scaling.points]
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
