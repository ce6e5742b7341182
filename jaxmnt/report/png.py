"""The charts of a report as PNGs, drawn by Matplotlib (the extra `report`)."""

from pathlib import Path
from typing import Any

from jaxmnt.errors import ConfigError, how_to_install, printable

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#5d3a9b", "#9a8b00")
"""Okabe and Ito's, which people tell apart who see colours otherwise; also by the kind of line."""
_STYLES = ("-", "--", ":", "-.")

_Of = tuple[str, dict[str, Any], list[Any]]
"""A run that has a chart: its label, the chart, its marks."""


def write_pngs(report: dict[str, Any], folder: Path) -> list[Path]:
    """A file for each chart, of all runs together; a stack of each run by itself.

    Raises `ConfigError` without Matplotlib, and if the folder cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"--png needs Matplotlib; {how_to_install('report')}") from error
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, title, charts in _together(report["runs"]):
            figure = Figure(figsize=(8, 4), dpi=150, layout="constrained")
            FigureCanvasAgg(figure)
            _draw(figure.add_subplot(), title, charts, [run["label"] for run in report["runs"]])
            path = folder / f"{name}.png"
            figure.savefig(path)
            written.append(path)
    except OSError as error:
        raise ConfigError(
            f"--png: {printable(str(folder))} cannot be written: {error.strerror}; give another"
        ) from error
    return written


def _together(runs: list[dict[str, Any]]) -> list[tuple[str, str, list[_Of]]]:
    """File name, title, and the runs that have the chart."""
    found: dict[str, tuple[str, list[_Of]]] = {}
    for place, run in enumerate(runs):
        for chart in run["charts"]:
            apart = chart["style"] == "stack" and len(runs) > 1
            name = f"{chart['id']}-{place}" if apart else chart["id"]
            title = f"{chart['title']}: {run['label']}" if apart else chart["title"]
            found.setdefault(name, (title, []))[1].append((run["label"], chart, run["marks"]))
    safe = lambda name: "".join(sign if sign.isalnum() or sign in "-_." else "_" for sign in name)
    return [(safe(name), title, charts) for name, (title, charts) in found.items()]


def _draw(axes: Any, title: str, charts: list[_Of], labels: list[str]) -> None:
    """`labels` are those of all runs. Of several, each has a colour in all charts, and a line style for each series."""
    several = len(labels) > 1
    first = charts[0][1]
    if first["style"] == "stack":
        values = [[value or 0.0 for value in one["values"]] for one in first["series"]]
        names = [_text(one["name"]) for one in first["series"]]
        axes.stackplot(first["steps"], values, labels=names, colors=_COLORS[: len(values)])
    else:
        lines = [
            (labels.index(run) if several else place, place, run, chart, one)
            for run, chart, _ in charts
            for place, one in enumerate(chart["series"])
        ]
        for color, place, run, chart, one in lines:
            told = [
                (step, value) for step, value in zip(chart["steps"], one["values"], strict=True) if value is not None
            ]
            style = (
                {"linestyle": "", "marker": "o", "markersize": 4}
                if one["points"]
                else {"linestyle": _STYLES[place % 4]}
            )
            label = _text(f"{run}: {one['name']}" if several else one["name"])
            axes.plot(
                *zip(*told, strict=True), label=label, color=_COLORS[color % len(_COLORS)], linewidth=1.3, **style
            )
        for mark in charts[0][2] if not several else []:
            restart = mark["kind"] == "restart"
            axes.axvline(
                mark["step"],
                color="#888888" if restart else "#b3261e",
                linewidth=0.8,
                linestyle="--" if restart else ":",
            )
    axes.set_title(_text(title))
    axes.set_xlabel("step")
    axes.set_ylabel(first["unit"])
    axes.grid(alpha=0.3)
    if first["ceiling"] is not None:
        axes.set_ylim(0, first["ceiling"])
        axes.set_ylabel(f"{first['unit']} (few steps are higher)")
    if first["style"] == "stack":
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True)
    else:
        axes.legend(fontsize=8)


def _text(text: str) -> str:
    """Without what Matplotlib takes for mathematics, or for a label to be hidden."""
    return text.replace("$", r"\$").lstrip("_")
