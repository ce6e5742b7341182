"""Draws the charts of a report as PNGs with Matplotlib (the extra `report`)."""

from pathlib import Path
from typing import Any

from jaxmnt.errors import ConfigError, how_to_install, printable

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#5d3a9b", "#9a8b00")
"""The colours of Okabe and Ito, which colour-blind readers can tell apart, and two more colours."""
_STYLES = ("-", "--", ":", "-.")

_RunChart = tuple[str, dict[str, Any], list[Any]]
"""A chart of one run, as a tuple of the run's label, the chart and the run's marks."""


def write_pngs(report: dict[str, Any], folder: Path) -> list[Path]:
    """Writes one PNG for each chart, with all runs overlaid, and returns the paths of the files.

    A stacked chart has one file for each run. Raises `ConfigError` if Matplotlib is not installed or the folder cannot
    be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"--png needs Matplotlib; {how_to_install('report')}") from error
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, title, charts in _pictures(report["runs"]):
            figure = Figure(figsize=(8, 4), dpi=150, layout="constrained")
            FigureCanvasAgg(figure)
            _draw(figure.add_subplot(), title, charts, [run["label"] for run in report["runs"]])
            path = folder / f"{name}.png"
            figure.savefig(path)
            written.append(path)
    except OSError as error:
        raise ConfigError(
            f"--png: {printable(str(folder))} cannot be written: {error.strerror}; give another folder"
        ) from error
    return written


def _pictures(runs: list[dict[str, Any]]) -> list[tuple[str, str, list[_RunChart]]]:
    """Returns the file name without its suffix, the title and the charts of each picture."""
    titles: dict[str, str] = {}
    charts_by_name: dict[str, list[_RunChart]] = {}
    for index, run in enumerate(runs):
        for chart in run["charts"]:
            is_separate = chart["style"] == "stack" and len(runs) > 1
            name = f"{chart['id']}-{index}" if is_separate else chart["id"]
            title = f"{chart['title']}: {run['label']}" if is_separate else chart["title"]
            titles.setdefault(name, title)
            charts_by_name.setdefault(name, []).append((run["label"], chart, run["marks"]))
    return [(_as_file_name(name), titles[name], charts) for name, charts in charts_by_name.items()]


def _as_file_name(name: str) -> str:
    return "".join(character if character.isalnum() or character in "-_." else "_" for character in name)


def _draw(axes: Any, title: str, charts: list[_RunChart], labels: list[str]) -> None:
    """Draws the same chart of one or more runs. `labels` are the labels of all runs in the report.

    If there are several runs, each run has one colour in all charts, and each of its series has its own line style.
    """
    has_several_runs = len(labels) > 1
    first = charts[0][1]
    if first["style"] == "stack":
        values = [[value or 0.0 for value in series["values"]] for series in first["series"]]
        names = [_escaped(series["name"]) for series in first["series"]]
        axes.stackplot(first["steps"], values, labels=names, colors=_COLORS[: len(values)])
    else:
        for run, chart, _ in charts:
            for index, series in enumerate(chart["series"]):
                color = _COLORS[(labels.index(run) if has_several_runs else index) % len(_COLORS)]
                label = _escaped(f"{run}: {series['name']}" if has_several_runs else series["name"])
                _draw_series(axes, chart["steps"], series, label=label, color=color, linestyle=_STYLES[index % 4])
        if not has_several_runs:
            _draw_marks(axes, charts[0][2])
    axes.set_title(_escaped(title))
    axes.set_xlabel("step")
    axes.set_ylabel(first["unit"])
    axes.grid(alpha=0.3)
    if first["ceiling"] is not None:
        axes.set_ylim(0, first["ceiling"])
        axes.set_ylabel(f"{first['unit']} (a few steps are higher)")
    if first["style"] == "stack":
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True)
    else:
        axes.legend(fontsize=8)


def _draw_series(
    axes: Any, steps: list[int], series: dict[str, Any], *, label: str, color: str, linestyle: str
) -> None:
    points = [(step, value) for step, value in zip(steps, series["values"], strict=True) if value is not None]
    style = {"linestyle": "", "marker": "o", "markersize": 4} if series["points"] else {"linestyle": linestyle}
    axes.plot(*zip(*points, strict=True), label=label, color=color, linewidth=1.3, **style)


def _draw_marks(axes: Any, marks: list[Any]) -> None:
    """Draws a vertical line at the step of each mark."""
    for mark in marks:
        restart = mark["kind"] == "restart"
        axes.axvline(
            mark["step"],
            color="#888888" if restart else "#b3261e",
            linewidth=0.8,
            linestyle="--" if restart else ":",
        )


def _escaped(text: str) -> str:
    """Returns text that Matplotlib interprets neither as mathematics nor, because of a leading _, as a hidden label."""
    return text.replace("$", r"\$").lstrip("_")
