"""Draws time and cost over the number of GPUs as an SVG."""

import math
from collections.abc import Callable, Sequence
from html import escape

from jaxmnt.plan.answer import Answer, knee
from jaxmnt.units import count

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 420, 70, 70, 46, 52
_TIME, _COST = "#1f77b4", "#d62728"


def draw(answers: Sequence[Answer], chip: str) -> str:
    """Draws days in blue on the left axis and, if there is a price, money in red on the right axis. All axes are
    logarithmic. A vertical line marks the knee."""
    fitting = [answer for answer in answers if answer.priced and math.isfinite(answer.priced[0].goal.seconds)]
    gpus = [float(answer.gpus) for answer in fitting]
    days = [answer.priced[0].goal.days for answer in fitting]
    costs = [answer.priced[0].goal.cost for answer in fitting]
    across = _scale(gpus, _LEFT, _WIDTH - _RIGHT)
    parts = [
        f'<text x="{_LEFT}" y="24" font-size="15">Days to the goal, and what it costs, on {escape(chip)}</text>',
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 12}" text-anchor="middle">GPUs</text>',
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_HEIGHT - _TOP - _BOTTOM}" '
        'fill="none" stroke="#999"/>',
    ]
    for value in gpus:
        parts.append(
            f'<text x="{across(value):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{value:,.0f}</text>'
        )
    if (knee_gpus := knee(answers)) is not None:
        x = across(knee_gpus)
        parts.append(
            f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM}" '
            'stroke="#555" stroke-dasharray="5 4"/>'
        )
        parts.append(f'<text x="{x + 5:.1f}" y="{_TOP + 16}" fill="#555">knee: {knee_gpus:,}</text>')
    parts += _curve(gpus, days, across, _TIME, on_left_axis=True, unit="days")
    if costs and all(costs):
        parts += _curve(gpus, [cost or 0.0 for cost in costs], across, _COST, on_left_axis=False, unit="cost")
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>\n{inside}\n</svg>\n'
    )


def _curve(
    gpus: Sequence[float], values: Sequence[float], across: Callable[[float], float], color: str, *,
    on_left_axis: bool, unit: str,
) -> list[str]:  # fmt: skip
    up = _scale(values, _HEIGHT - _BOTTOM - 14, _TOP + 30)
    points = [(across(x), up(y)) for x, y in zip(gpus, values, strict=True)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts = [f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>']
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in points]
    x, anchor = (_LEFT - 6, "end") if on_left_axis else (_WIDTH - _RIGHT + 6, "start")
    ends = {count(value): value for value in (min(values), max(values))}
    for text, value in ends.items():
        parts.append(f'<text x="{x}" y="{up(value) + 4:.1f}" text-anchor="{anchor}" fill="{color}">{text}</text>')
    parts.append(f'<text x="{x}" y="{_TOP + 8}" text-anchor="{anchor}" fill="{color}">{unit}</text>')
    return parts


_LEAST_RATIO = 2.0
"""Smallest ratio of a scale's ends, so that a difference of a percent does not fill it."""


def _scale(values: Sequence[float], first: float, last: float) -> Callable[[float], float]:
    """Returns a logarithmic scale on which the values fill the span except for a margin."""
    low, high = math.log(min(values)), math.log(max(values))
    missing = max(0.0, math.log(_LEAST_RATIO) - (high - low)) / 2
    low, high = low - missing, high + missing
    margin = 0.06 * (last - first)
    span = (last - first - 2 * margin) / (high - low)
    return lambda value: first + margin + (math.log(value) - low) * span
