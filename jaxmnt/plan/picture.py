"""Draws time and cost over the number of GPUs as an SVG."""

import math
from collections.abc import Callable, Sequence
from html import escape

from jaxmnt.plan.answer import Answer, knee
from jaxmnt.units import count

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 70, 46, 52
"""Margins around the axes."""
_TIME_COLOR, _COST_COLOR = "#1f77b4", "#d62728"


def draw(answers: Sequence[Answer], chip: str) -> str:
    """Returns an SVG with the days in blue on the left axis and, if there is a price, the cost in red on the right
    axis. All axes are logarithmic. A vertical line marks the knee."""
    fitting = [answer for answer in answers if answer.priced and math.isfinite(answer.priced[0].goal.seconds)]
    gpus = [float(answer.gpus) for answer in fitting]
    days = [answer.priced[0].goal.days for answer in fitting]
    costs = [answer.priced[0].goal.cost for answer in fitting]
    x_of = _scale(gpus, _LEFT, _WIDTH - _RIGHT)
    parts = [
        f'<text x="{_LEFT}" y="24" font-size="15">Days to the goal, and what it costs, on {escape(chip)}</text>',
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 12}" text-anchor="middle">GPUs</text>',
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_HEIGHT - _TOP - _BOTTOM}" '
        'fill="none" stroke="#999"/>',
    ]
    for number in gpus:
        parts.append(
            f'<text x="{x_of(number):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{number:,.0f}</text>'
        )
    if (knee_gpus := knee(answers)) is not None:
        x = x_of(knee_gpus)
        parts.append(
            f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM}" '
            'stroke="#555" stroke-dasharray="5 4"/>'
        )
        parts.append(f'<text x="{x + 5:.1f}" y="{_TOP + 16}" fill="#555">knee: {knee_gpus:,}</text>')
    parts += _curve(gpus, days, x_of, _TIME_COLOR, on_left_axis=True, unit="days")
    if costs and all(costs):
        parts += _curve(gpus, [cost or 0.0 for cost in costs], x_of, _COST_COLOR, on_left_axis=False, unit="cost")
    contents = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>\n{contents}\n</svg>\n'
    )


def _curve(
    gpus: Sequence[float], values: Sequence[float], x_of: Callable[[float], float], color: str, *,
    on_left_axis: bool, unit: str,
) -> list[str]:  # fmt: skip
    """Returns the elements of a curve, and the labels of its axis."""
    y_of = _scale(values, _HEIGHT - _BOTTOM - 14, _TOP + 30)
    points = [(x_of(x), y_of(y)) for x, y in zip(gpus, values, strict=True)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts = [f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>']
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in points]
    x, anchor = (_LEFT - 6, "end") if on_left_axis else (_WIDTH - _RIGHT + 6, "start")
    labels = {count(number): number for number in (min(values), max(values))}
    for text, number in labels.items():
        parts.append(f'<text x="{x}" y="{y_of(number) + 4:.1f}" text-anchor="{anchor}" fill="{color}">{text}</text>')
    parts.append(f'<text x="{x}" y="{_TOP + 8}" text-anchor="{anchor}" fill="{color}">{unit}</text>')
    return parts


_MIN_RATIO = 2.0
"""Minimum ratio of the ends of a scale, which keeps a difference of a percent from filling it."""


def _scale(values: Sequence[float], first: float, last: float) -> Callable[[float], float]:
    """Returns a function that maps numbers to coordinates on a logarithmic scale. The values fill the scale from
    `first` to `last` except for a margin."""
    low, high = math.log(min(values)), math.log(max(values))
    widening = max(0.0, math.log(_MIN_RATIO) - (high - low)) / 2
    low, high = low - widening, high + widening
    margin = 0.06 * (last - first)
    span = (last - first - 2 * margin) / (high - low)
    return lambda number: first + margin + (math.log(number) - low) * span
