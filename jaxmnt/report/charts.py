"""Charts of a run as data: which numbers are drawn over which steps. How they are drawn is for the page and for PNGs.

A long run is drawn by a part of its steps. Of each stretch those stay in which some series is at its lowest and at its
highest, so that a spike of one step among 100,000 is seen.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from jaxmnt.report.goodput import sliding_ettr
from jaxmnt.report.history import Attempt, Record, number
from jaxmnt.report.noise import STEPS, noise_scales
from jaxmnt.telemetry.phases import DOING, PHASES

MOST_POINTS = 1600
"""Of a chart; somewhat more than a screen has pixels across."""

_DIGITS = 6
_GIB = float(1 << 30)


@dataclass(frozen=True)
class Series:
    name: str
    values: list[float | None]
    points: bool = False
    """Drawn as single points: its values are far apart."""


@dataclass(frozen=True)
class Chart:
    id: str
    """The same in every run, so that runs can be laid over each other."""
    title: str
    what: str
    """A sentence on what is seen."""
    unit: str
    steps: list[int]
    series: list[Series]
    style: Literal["lines", "stack"] = "lines"
    """A stack adds its series up."""
    log: bool = False
    """Whether a logarithmic scale is of use."""
    ceiling: float | None = None
    """Up to where a stack is shown at first, if few steps rise far above the others, as evaluations do."""


def charts_of(attempts: Sequence[Attempt], phases: Sequence[Record], resources: Sequence[Record]) -> list[Chart]:
    """What there is to be seen of a run, by its attempts and the lines of its other files."""
    lines = [line for attempt in attempts for line in attempt.steps]
    evals = [line for attempt in attempts for line in attempt.evals]
    found = [
        _loss(lines, evals),
        _of(lines, "rate", "Throughput", "Targets that count in the loss, and all tokens of the batch.", "tokens/s",
            {"real": "tokens_per_second", "with padding": "padded_tokens_per_second"}),
        _of(lines, "mfu", "FLOPs utilisation", "Of what the devices can do at most: model FLOPs of real tokens (MFU), "
            "and all FLOPs of all tokens (HFU).", "%", {"MFU": "mfu", "HFU": "hfu"}, factor=100.0),
        _ettr(attempts, lines),
        _of(lines, "step_seconds", "Step time", "From one finished step to the next, without saves and evaluations.",
            "ms", {"step": "step_seconds", "waiting for input": "data_wait_seconds"}, factor=1e3, log=True),
        _phases(phases),
        _of(lines, "grad_norm", "Gradient norm", "Global norm, before clipping.", "", {"norm": "grad_norm"}, log=True),
        _of(lines, "learning_rate", "Learning rate", "As the schedule has it.", "", {"rate": "learning_rate"}),
        _noise(attempts),
        *_model(lines),
        *_resources(resources),
    ]  # fmt: skip
    return [_drawn(chart) for chart in found if any(value is not None for one in chart.series for value in one.values)]


def _loss(lines: Sequence[Record], evals: Sequence[Record]) -> Chart:
    """Of training, and held out: of all sources together and, where there are several, of each."""
    held_out: dict[int, Record] = {line["step"]: line for line in evals}
    steps = sorted({line["step"] for line in lines} | set(held_out))
    trained = {line["step"]: line["loss"] for line in lines}
    series = [Series("training", [trained.get(step) for step in steps])]
    if held_out:
        told = [held_out.get(step, {}) for step in steps]
        series.append(Series("held out", [one.get("loss") for one in told], points=True))
        names = sorted({name for one in held_out.values() for name in _mapping(one, "sources")})
        for name in names if len(names) > 1 else []:
            of_source = lambda one, name=name: _value(_mapping(_mapping(one, "sources"), name).get("loss"))
            series.append(Series(f"held out: {name}", [of_source(one) for one in told], points=True))
    what = (
        "Mean over the targets of a step, where it has some; the steps at which attempts began are marked, and bad "
        "steps."
    )
    return Chart("loss", "Loss", what, "nats/token", steps, series, log=True)


def _of(
    lines: Sequence[Record], id: str, title: str, what: str, unit: str, fields: dict[str, str], *,
    factor: float = 1.0, log: bool = False,
) -> Chart:  # fmt: skip
    """Fields of the lines of steps, by the name that each series has."""
    series = [Series(name, [_scaled(line.get(field), factor) for line in lines]) for name, field in fields.items()]
    told = series[:1] + [one for one in series[1:] if one.values != series[0].values]
    return Chart(id, title, what, unit, [line["step"] for line in lines], told, log=log)


def _ettr(attempts: Sequence[Attempt], lines: Sequence[Record]) -> Chart:
    shares: list[float | None] = [100 * share for share in sliding_ettr(attempts)]
    what = "Share of the last hour, or of the run so far, that went into steps that count."
    return Chart("ettr", "Goodput (ETTR)", what, "%", [line["step"] for line in lines], [Series("last hour", shares)])


def _phases(lines: Sequence[Record]) -> Chart:
    """Mean seconds of each phase, without those that took no time."""
    means = [_mapping(line, "mean") for line in lines]
    series = [
        Series(DOING[phase], [_scaled(mean.get(phase, 0.0), 1e3) for mean in means])
        for phase in PHASES
        if any(mean.get(phase) for mean in means)
    ]
    what = "Mean over the processes, by the clock of each one's main thread."
    return Chart("phases", "Where each step goes", what, "ms", [line["step"] for line in lines], series, style="stack")


def _noise(attempts: Sequence[Attempt]) -> Chart:
    """Where it was measured: over the steps of an attempt up to each."""
    steps: list[int] = []
    scales = []
    for attempt in attempts:
        compiled = next((record for record in attempt.events if record["kind"] == "compile"), {})
        small, rows = (number(compiled, name) for name in ("rows_of_small_batches", "rows"))
        steps += [line["step"] for line in attempt.steps]
        scales += noise_scales(attempt.steps, small, rows)
    what = f"Rows, by the squares of gradients over {STEPS} steps: of a batch beyond it, more rows are of little use."
    return Chart("noise", "Gradient noise scale", what, "rows", steps, [Series("scale", scales)], log=True)


def _model(lines: Sequence[Record]) -> Iterable[Chart]:
    """Metrics of the model's layers, a chart for each."""
    told = [_mapping(line, "model") for line in lines]
    steps = [line["step"] for line in lines]
    for name in sorted({name for one in told for name in one}):
        values = [one.get(name) for one in told]
        widest = max((len(value) for value in values if isinstance(value, list)), default=0)
        if widest:
            series = [Series(str(place), [_entry(value, place) for value in values]) for place in range(widest)]
        else:
            series = [Series(name, [_value(value) for value in values])]
        yield Chart(f"model.{name}", f"Model: {name}", "A metric of the model's layers.", "", steps, series)


def _resources(lines: Sequence[Record]) -> Iterable[Chart]:
    """Of lines that tell the mean and the extremes over processes of each quantity."""
    steps = [line.get("step", 0) for line in lines]

    def chart(
        id: str, title: str, what: str, unit: str, fields: dict[str, tuple[str, str]], factor: float = 1.0
    ) -> Chart:
        read = lambda line, field, which: _scaled(_extreme(_mapping(line, "of").get(field), which), factor)
        series = [Series(name, [read(line, field, which) for line in lines]) for name, (field, which) in fields.items()]
        quiet = not any(value for one in series for value in one.values)
        return Chart(id, title, what, unit, steps, [] if quiet else series)

    most, mean, least = "max", "mean", "min"
    yield chart("memory", "Memory", "Of devices and of host processes; the most among all.", "GiB", {
        "device, in use": ("device_bytes", most), "device, peak": ("device_peak_bytes", most),
        "host process": ("host_bytes", most),
    }, 1 / _GIB)  # fmt: skip
    yield chart("gpu_load", "GPU utilisation", "Share of time in which a kernel ran.", "%", {
        "mean": ("gpu_utilisation", mean), "lowest": ("gpu_utilisation", least),
    })  # fmt: skip
    yield chart("gpu_clock", "GPU clock", "Of the multiprocessors; the lowest shows a GPU that is throttled.", "MHz", {
        "mean": ("gpu_clock_mhz", mean), "lowest": ("gpu_clock_mhz", least),
    })  # fmt: skip
    yield chart("gpu_heat", "GPU temperature", "Of the chips.", "°C", {
        "mean": ("gpu_celsius", mean), "highest": ("gpu_celsius", most),
    })  # fmt: skip
    yield chart("gpu_power", "GPU power", "A GPU.", "W", {
        "mean": ("gpu_watts", mean), "highest": ("gpu_watts", most),
    })  # fmt: skip
    for links, title in (("network", "Network"), ("infiniband", "InfiniBand")):
        yield chart(links, title, "What a host sends and receives, over all its ports.", "MB/s", {
            "sent, mean": (f"{links}_sent_per_second", mean), "received, mean": (f"{links}_received_per_second", mean),
            "sent, most": (f"{links}_sent_per_second", most), "sent, least": (f"{links}_sent_per_second", least),
        }, 1e-6)  # fmt: skip


def _extreme(told: Any, which: str) -> Any:
    """Of what a line of resources tells of a quantity: its mean, or an extreme, which stands with its process."""
    value = told.get(which) if isinstance(told, dict) else None
    return value[0] if isinstance(value, list) and value else value


def _drawn(chart: Chart) -> Chart:
    """Returns a chart with as many steps as can be told apart, and without series that have no value."""
    series = [one for one in chart.series if any(value is not None for value in one.values)]
    values_SN = np.array([[np.nan if value is None else value for value in one.values] for one in series])
    stack = chart.style == "stack"
    rows = _rows_to_draw(values_SN, MOST_POINTS, together=stack)
    shown = [replace(one, values=[_rounded(one.values[row]) for row in rows]) for one in series]
    ceiling = _ceiling(values_SN) if stack else None
    return replace(chart, steps=[chart.steps[row] for row in rows], series=shown, ceiling=ceiling)


def _ceiling(values_SN: np.ndarray) -> float | None:
    sums = np.nansum(values_SN, axis=0)
    most = 1.3 * float(np.quantile(sums, 0.97))
    return most if 0 < 3 * most < float(sums.max()) else None


def _rows_to_draw(values_SN: np.ndarray, most: int, *, together: bool) -> list[int]:
    """About `most` of the N rows of S series, of which those stay that hold an extreme of a series, or of all their sum
    if they are drawn `together`; the first, the last, and rows at which a value is missing for the first time stay,
    too."""
    count = values_SN.shape[1]
    if count <= most:
        return list(range(count))
    # Series with few values are kept whole, so that they do not crowd out the others.
    sparse = np.isfinite(values_SN).sum(axis=1) <= most // 4
    kept = {0, count - 1, *np.flatnonzero(np.isfinite(values_SN[sparse]).any(axis=0)).tolist()}
    dense = values_SN[~sparse]
    if together and len(dense):
        dense = np.nansum(dense, axis=0, keepdims=True)
    stretches = max(2, most // (2 * max(1, len(dense))))
    borders = np.linspace(0, count, stretches + 1).astype(int)
    for first, last in pairwise(borders):
        for column in dense[:, first:last]:
            missing = np.isnan(column)
            if missing.any():
                kept.add(first + int(missing.argmax()))
            if not missing.all():
                kept |= {first + int(np.nanargmin(column)), first + int(np.nanargmax(column))}
    return sorted(kept)


def _entry(value: Any, place: int) -> float | None:
    return _value(value[place]) if isinstance(value, list) and place < len(value) else None


def _mapping(record: Record, field: str) -> Record:
    value = record.get(field)
    return value if isinstance(value, dict) else {}


def _value(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if is_number else None


def _scaled(value: Any, factor: float) -> float | None:
    number = _value(value)
    return None if number is None else number * factor


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")
