"""Charts of a run as data: which numbers are drawn over which steps. The page and the PNGs decide how to draw them.

A long run is reduced to some of its steps: in each stretch, those at which a series has its minimum or maximum stay, so
a spike of one step among 100,000 is visible.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from jaxmnt.report.goodput import sliding_ettr
from jaxmnt.report.history import Attempt, Record, number
from jaxmnt.report.noise import STEPS, noise_scales
from jaxmnt.telemetry.phases import PHASE_ACTIVITIES, PHASES

MAX_POINTS = 1600
"""Approximate number of steps drawn in a chart; somewhat more than the pixels across a screen."""

_DIGITS = 6
_GIB = float(1 << 30)


@dataclass(frozen=True)
class Series:
    name: str
    values: list[float | None]
    points: bool = False
    """True if drawn as single points, because its values are far apart."""


@dataclass(frozen=True)
class Chart:
    id: str
    """Identifies the chart; equal in all runs, so that charts of several runs can be overlaid."""
    title: str
    what: str
    """A sentence that explains the chart."""
    unit: str
    steps: list[int]
    series: list[Series]
    style: Literal["lines", "stack"] = "lines"
    """Lines, or series stacked on top of each other."""
    log: bool = False
    """True if a logarithmic scale is useful."""
    ceiling: float | None = None
    """Initial upper limit of a stack in which few steps are far above the others, as evaluations are; else None."""


def charts_of(attempts: Sequence[Attempt], phases: Sequence[Record], resources: Sequence[Record]) -> list[Chart]:
    """Returns the charts of a run that have any value, from its attempts and its lines of phases and resources."""
    lines = [line for attempt in attempts for line in attempt.steps]
    evals = [line for attempt in attempts for line in attempt.evals]
    charts = [
        _loss(lines, evals),
        _chart(lines, "rate", "Throughput", "Targets that count in the loss, and all tokens of the batch.", "tokens/s",
            {"real": "tokens_per_second", "with padding": "padded_tokens_per_second"}),
        _chart(lines, "mfu", "FLOPs utilisation", "Share of the devices' peak FLOPs: model FLOPs of real tokens (MFU), "
            "and all FLOPs of all tokens (HFU).", "%", {"MFU": "mfu", "HFU": "hfu"}, factor=100.0),
        _ettr(attempts, lines),
        _chart(lines, "step_seconds", "Step time", "From one finished step to the next, without saves and evaluations.",
            "ms", {"step": "step_seconds", "waiting for input": "data_wait_seconds"}, factor=1e3, log=True),
        _phases(phases),
        _chart(lines, "grad_norm", "Gradient norm", "Global norm, before clipping.", "",
            {"norm": "grad_norm"}, log=True),
        _chart(lines, "learning_rate", "Learning rate", "Value of the schedule.", "", {"rate": "learning_rate"}),
        _noise(attempts),
        *_model(lines),
        *_resources(resources),
    ]  # fmt: skip
    has_values = lambda chart: any(value is not None for series in chart.series for value in series.values)
    return [_reduce(chart) for chart in charts if has_values(chart)]


def _loss(lines: Sequence[Record], evals: Sequence[Record]) -> Chart:
    """Returns training and held-out loss; held out over all sources and, if there are several, for each."""
    held_out: dict[int, Record] = {line["step"]: line for line in evals}
    steps = sorted({line["step"] for line in lines} | set(held_out))
    trained = {line["step"]: line["loss"] for line in lines}
    series = [Series("training", [trained.get(step) for step in steps])]
    if held_out:
        evaluations = [held_out.get(step, {}) for step in steps]
        series.append(Series("held out", [line.get("loss") for line in evaluations], points=True))
        names = sorted({name for line in held_out.values() for name in _mapping(line, "sources")})
        for name in names if len(names) > 1 else []:
            of_source = lambda line, name=name: _value(_mapping(_mapping(line, "sources"), name).get("loss"))
            series.append(Series(f"held out: {name}", [of_source(line) for line in evaluations], points=True))
    what = "Mean over the targets of a step, if it has any. Starts of attempts and bad steps are marked."
    return Chart("loss", "Loss", what, "nats/token", steps, series, log=True)


def _chart(
    lines: Sequence[Record], id: str, title: str, what: str, unit: str, fields: dict[str, str], *,
    factor: float = 1.0, log: bool = False,
) -> Chart:  # fmt: skip
    """Returns a chart of fields of the lines of steps; `fields` maps the name of each series to its field.

    Series that equal the first one are left out.
    """
    series = [Series(name, [_scaled(line.get(field), factor) for line in lines]) for name, field in fields.items()]
    distinct = series[:1] + [candidate for candidate in series[1:] if candidate.values != series[0].values]
    return Chart(id, title, what, unit, [line["step"] for line in lines], distinct, log=log)


def _ettr(attempts: Sequence[Attempt], lines: Sequence[Record]) -> Chart:
    shares: list[float | None] = [100 * share for share in sliding_ettr(attempts)]
    what = "Share of the last hour, or of the run so far, that went into steps that count."
    return Chart("ettr", "Goodput (ETTR)", what, "%", [line["step"] for line in lines], [Series("last hour", shares)])


def _phases(lines: Sequence[Record]) -> Chart:
    """Returns the mean time of each phase, without phases that took no time."""
    means = [_mapping(line, "mean") for line in lines]
    series = [
        Series(PHASE_ACTIVITIES[phase], [_scaled(mean.get(phase, 0.0), 1e3) for mean in means])
        for phase in PHASES
        if any(mean.get(phase) for mean in means)
    ]
    what = "Mean over the processes, by the clock of each process's main thread."
    return Chart("phases", "Where each step goes", what, "ms", [line["step"] for line in lines], series, style="stack")


def _noise(attempts: Sequence[Attempt]) -> Chart:
    """Returns the gradient noise scale at each step, from the latest steps of the same attempt."""
    steps: list[int] = []
    scales = []
    for attempt in attempts:
        compiled = next((record for record in attempt.events if record["kind"] == "compile"), {})
        small, rows = (number(compiled, name) for name in ("rows_of_small_batches", "rows"))
        steps += [line["step"] for line in attempt.steps]
        scales += noise_scales(attempt.steps, small, rows)
    what = f"In rows, from squared gradient norms over {STEPS} steps; rows beyond it speed up training little."
    return Chart("noise", "Gradient noise scale", what, "rows", steps, [Series("scale", scales)], log=True)


def _model(lines: Sequence[Record]) -> Iterable[Chart]:
    """Yields a chart for each metric of the model's layers."""
    metrics = [_mapping(line, "model") for line in lines]
    steps = [line["step"] for line in lines]
    for name in sorted({name for of_step in metrics for name in of_step}):
        values = [of_step.get(name) for of_step in metrics]
        longest = max((len(value) for value in values if isinstance(value, list)), default=0)
        if longest:
            series = [Series(str(index), [_entry(value, index) for value in values]) for index in range(longest)]
        else:
            series = [Series(name, [_value(value) for value in values])]
        yield Chart(f"model.{name}", f"Model: {name}", "A metric of the model's layers.", "", steps, series)


def _resources(lines: Sequence[Record]) -> Iterable[Chart]:
    """Yields charts of memory, GPUs and network, from lines with each quantity's mean and extremes over processes."""
    steps = [line.get("step", 0) for line in lines]

    def chart(
        id: str, title: str, what: str, unit: str, fields: dict[str, tuple[str, str]], factor: float = 1.0
    ) -> Chart:
        read = lambda line, field, which: _scaled(_statistic(_mapping(line, "of").get(field), which), factor)
        series = [Series(name, [read(line, field, which) for line in lines]) for name, (field, which) in fields.items()]
        all_zero = not any(value for of_field in series for value in of_field.values)
        return Chart(id, title, what, unit, steps, [] if all_zero else series)

    maximum, mean, minimum = "max", "mean", "min"
    yield chart("memory", "Memory", "Maximum over devices and over host processes.", "GiB", {
        "device, in use": ("device_bytes", maximum), "device, peak": ("device_peak_bytes", maximum),
        "host process": ("host_bytes", maximum),
    }, 1 / _GIB)  # fmt: skip
    yield chart("gpu_load", "GPU utilisation", "Share of time in which a kernel ran.", "%", {
        "mean": ("gpu_utilisation", mean), "lowest": ("gpu_utilisation", minimum),
    })  # fmt: skip
    yield chart("gpu_clock", "GPU clock", "Clock of the multiprocessors; the lowest shows a throttled GPU.", "MHz", {
        "mean": ("gpu_clock_mhz", mean), "lowest": ("gpu_clock_mhz", minimum),
    })  # fmt: skip
    yield chart("gpu_heat", "GPU temperature", "Temperature of the chips.", "°C", {
        "mean": ("gpu_celsius", mean), "highest": ("gpu_celsius", maximum),
    })  # fmt: skip
    yield chart("gpu_power", "GPU power", "Power of one GPU.", "W", {
        "mean": ("gpu_watts", mean), "highest": ("gpu_watts", maximum),
    })  # fmt: skip
    for links, title in (("network", "Network"), ("infiniband", "InfiniBand")):
        yield chart(links, title, "Rates at which a host sends and receives, summed over its ports.", "MB/s", {
            "sent, mean": (f"{links}_sent_per_second", mean), "received, mean": (f"{links}_received_per_second", mean),
            "sent, most": (f"{links}_sent_per_second", maximum), "sent, least": (f"{links}_sent_per_second", minimum),
        }, 1e-6)  # fmt: skip


def _statistic(quantity: Any, which: str) -> Any:
    """Returns the mean, min or max of a quantity in a line of resources; an extreme is stored with its process."""
    value = quantity.get(which) if isinstance(quantity, dict) else None
    return value[0] if isinstance(value, list) and value else value


def _reduce(chart: Chart) -> Chart:
    """Returns a chart with about `MAX_POINTS` of its steps, and without series that have no value."""
    full = [series for series in chart.series if any(value is not None for value in series.values)]
    values_SN = np.array([[np.nan if value is None else value for value in series.values] for series in full])
    stack = chart.style == "stack"
    indices = _indices_to_draw(values_SN, MAX_POINTS, together=stack)
    reduced = [replace(series, values=[_rounded(series.values[index]) for index in indices]) for series in full]
    ceiling = _ceiling(values_SN) if stack else None
    return replace(chart, steps=[chart.steps[index] for index in indices], series=reduced, ceiling=ceiling)


def _ceiling(values_SN: np.ndarray) -> float | None:
    """Returns an upper limit for a stack of S series of N values, if its highest steps are far above it; else None."""
    sums = np.nansum(values_SN, axis=0)
    limit = 1.3 * float(np.quantile(sums, 0.97))
    return limit if 0 < 3 * limit < float(sums.max()) else None


def _indices_to_draw(values_SN: np.ndarray, max_points: int, *, together: bool) -> list[int]:
    """Returns about `max_points` of the N indices of S series, in order.

    In each stretch, the indices of each series' minimum and maximum and of its first missing value are included; if the
    series are drawn `together`, those of their sum. The first and the last index are always included.
    """
    count = values_SN.shape[1]
    if count <= max_points:
        return list(range(count))
    # Series with few values are kept whole, so that they do not crowd out the others.
    sparse = np.isfinite(values_SN).sum(axis=1) <= max_points // 4
    indices = {0, count - 1, *np.flatnonzero(np.isfinite(values_SN[sparse]).any(axis=0)).tolist()}
    # Each stretch contributes up to two indices for each of the other series.
    dense = values_SN[~sparse]
    if together and len(dense):
        dense = np.nansum(dense, axis=0, keepdims=True)
    stretches = max(2, max_points // (2 * max(1, len(dense))))
    borders = np.linspace(0, count, stretches + 1).astype(int)
    for first, last in pairwise(borders):
        for stretch in dense[:, first:last]:
            missing = np.isnan(stretch)
            if missing.any():
                indices.add(first + int(missing.argmax()))
            if not missing.all():
                indices |= {first + int(np.nanargmin(stretch)), first + int(np.nanargmax(stretch))}
    return sorted(indices)


def _entry(value: Any, index: int) -> float | None:
    return _value(value[index]) if isinstance(value, list) and index < len(value) else None


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
