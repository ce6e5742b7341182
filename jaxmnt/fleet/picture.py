"""Draws where the time of simulated runs goes, as an SVG."""

from collections.abc import Sequence
from html import escape

from jaxmnt.fleet.cases import Case
from jaxmnt.fleet.simulation import PARTS

_WIDTH, _LEFT, _RIGHT, _TOP = 900, 250, 150, 78
_BAR, _GAP = 16, 8
"""Height of a bar, and of the space below it."""
_COLORS = {
    "checkpoint": "#0072b2", "again": "#d55e00", "detect": "#999999", "start": "#e69f00", "between": "#cc79a7",
}  # fmt: skip
"""Color of each part but steps."""


def draw(cases: Sequence[Case], title: str) -> str:
    """Returns an SVG with a bar for each case, whose pieces are the parts of the time that do not go into steps."""
    lost = [1 - case.shares["steps"] for case in cases]
    longest = max(lost) or 1.0
    height = _TOP + len(cases) * (_BAR + _GAP) + 24
    parts = [f'<text x="12" y="24" font-size="15">{escape(title)}</text>']
    x = float(_LEFT)
    for name, color in _COLORS.items():
        parts.append(f'<rect x="{x:.0f}" y="40" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 17:.0f}" y="50">{name}</text>')
        x += 30 + 7 * len(name)
    for number, (case, share) in enumerate(zip(cases, lost, strict=True)):
        y = _TOP + number * (_BAR + _GAP)
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(case.name)}</text>')
        x = float(_LEFT)
        for name, color in _COLORS.items():
            width = (_WIDTH - _LEFT - _RIGHT) * case.shares[name] / longest
            tooltip = f"<title>{escape(PARTS[name])}: {case.shares[name]:.2%}</title>"
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{color}">{tooltip}</rect>'
            )
            x += width
        given_up = ", given up" if case.given_up else ""
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 12}">{share:.2%} lost{given_up}</text>')
    contents = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="{_WIDTH}" height="{height}" fill="white"/>\n{contents}\n</svg>\n'
    )
