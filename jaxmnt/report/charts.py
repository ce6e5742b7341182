"""The charts of a run as data: which numbers to draw over which steps. The page and the PNGs decide how to draw them.

The charts of a long run have only some of its steps. From each stretch of steps, these are the ones at which a series
has its minimum or maximum, so that a spike in one step out of 100,000 stays visible.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from jaxmnt.report.goodput import sliding_ettr
from jaxmnt.report.history import Attempt, Record, number
from jaxmnt.report.noise import NOISE_STEPS, noise_scales
from jaxmnt.telemetry.phases import PHASE_ACTIVITIES, PHASES

MAX_POINTS = 1600
"""Approximate maximum number of steps in a chart; somewhat more than the number of pixels across a screen."""

_SIGNIFICANT_DIGITS = 6
_GIB = float(1 << 30)


@dataclass(frozen=True)
class Series:
    """One line or set of points in a chart."""

    name: str
    values: list[float | None]
    """The value at each step of the chart; None where there is none."""
    points: bool = False
    """True if the series is drawn as separate points, because its values are far apart."""


@dataclass(frozen=True)
class Chart:
    """One or more series over the same steps."""

    id: str
    """Identifies the chart. It is the same in all runs, so that charts of several runs can be overlaid."""
    title: str
    what: str
    """A sentence that explains the chart."""
    unit: str
    steps: list[int]
    series: list[Series]
    style: Literal["lines", "stack"] = "lines"
    """`lines` for separate lines, or `stack` for series stacked on top of each other."""
    log: bool = False
    """True if a logarithmic scale makes sense for the values."""
    ceiling: float | None = None
    """Initial upper limit of a stack in which a few steps, such as those with an evaluation, are far above the others.

    None for all other charts.
    """


def charts_of(
    attempts: Sequence[Attempt], phase_lines: Sequence[Record], resource_lines: Sequence[Record]
) -> list[Chart]:
    """Returns those charts of a run that have at least one value.

    `phase_lines` and `resource_lines` are the lines that the run wrote about its phases and its resources.
    """
    lines = [line for attempt in attempts for line in attempt.steps]
    evals = [line for attempt in attempts for line in attempt.evals]
    charts = [
        _loss_chart(lines, evals),
        _field_chart(lines, "rate", "Throughput", "Targets that count in the loss, and all tokens of the batch.",
            "tokens/s", {"real": "tokens_per_second", "with padding": "padded_tokens_per_second"}),
        _field_chart(lines, "mfu", "FLOPs utilisation",
            "Share of the devices' peak FLOPs: model FLOPs of real tokens (MFU), and all FLOPs of all tokens (HFU).",
            "%", {"MFU": "mfu", "HFU": "hfu"}, factor=100.0),
        _ettr_chart(attempts, lines),
        _field_chart(lines, "step_seconds", "Step time",
            "Time from one finished step to the next, without saves and evaluations.", "ms",
            {"step": "step_seconds", "waiting for input": "data_wait_seconds"}, factor=1e3, log=True),
        _phase_chart(phase_lines),
        _field_chart(lines, "grad_norm", "Gradient norm", "Global norm, before clipping.", "",
            {"norm": "grad_norm"}, log=True),
        _field_chart(lines, "learning_rate", "Learning rate", "Value of the schedule.", "", {"rate": "learning_rate"}),
        _noise_chart(attempts),
        *_model_charts(lines),
        *_resource_charts(resource_lines),
    ]  # fmt: skip
    return [_reduce(chart) for chart in charts if any(map(_has_numbers, chart.series))]


def _has_numbers(series: Series) -> bool:
    return any(value is not None for value in series.values)


def _loss_chart(lines: Sequence[Record], evals: Sequence[Record]) -> Chart:
    """Returns the chart of the training loss and the held-out loss.

    If there are several sources, the held-out loss is shown for all sources together and for each of them.
    """
    evals_by_step: dict[int, Record] = {line["step"]: line for line in evals}
    steps = sorted({line["step"] for line in lines} | set(evals_by_step))
    training_losses = {line["step"]: line["loss"] for line in lines}
    series = [Series("training", [training_losses.get(step) for step in steps])]
    if evals_by_step:
        evaluations = [evals_by_step.get(step, {}) for step in steps]
        series.append(Series("held out", [line.get("loss") for line in evaluations], points=True))
        sources = sorted({source for line in evals_by_step.values() for source in _mapping(line, "sources")})
        for source in sources if len(sources) > 1 else []:
            losses = [_source_loss(line, source) for line in evaluations]
            series.append(Series(f"held out: {source}", losses, points=True))
    explanation = "Mean over the targets of a step, if it has any. Starts of attempts and bad steps are marked."
    return Chart("loss", "Loss", explanation, "nats/token", steps, series, log=True)


def _source_loss(evaluation: Record, source: str) -> float | None:
    """Returns the held-out loss of one source in an evaluation."""
    return _as_number(_mapping(_mapping(evaluation, "sources"), source).get("loss"))


def _field_chart(
    lines: Sequence[Record], chart_id: str, title: str, explanation: str, unit: str, fields: dict[str, str], *,
    factor: float = 1.0, log: bool = False,
) -> Chart:  # fmt: skip
    """Returns a chart with one series for each field of `fields`, read from the line of each step.

    `fields` maps the name of each series to its field, and `factor` multiplies all numbers. A series that is equal to
    the first one is left out.
    """
    series = [Series(name, [_scaled(line.get(field), factor) for line in lines]) for name, field in fields.items()]
    distinct_series = series[:1] + [candidate for candidate in series[1:] if candidate.values != series[0].values]
    return Chart(chart_id, title, explanation, unit, [line["step"] for line in lines], distinct_series, log=log)


def _ettr_chart(attempts: Sequence[Attempt], lines: Sequence[Record]) -> Chart:
    percentages: list[float | None] = [100 * share for share in sliding_ettr(attempts)]
    explanation = "Share of the last hour, or of the run so far, that went into steps that count."
    steps = [line["step"] for line in lines]
    return Chart("ettr", "Goodput (ETTR)", explanation, "%", steps, [Series("last hour", percentages)])


def _phase_chart(lines: Sequence[Record]) -> Chart:
    """Returns the chart of the mean time of each phase, without the phases that never took time."""
    means = [_mapping(line, "mean") for line in lines]
    series = [
        Series(PHASE_ACTIVITIES[phase], [_scaled(mean.get(phase, 0.0), 1e3) for mean in means])
        for phase in PHASES
        if any(mean.get(phase) for mean in means)
    ]
    explanation = "Mean over the processes, measured in the main thread of each process."
    steps = [line["step"] for line in lines]
    return Chart("phases", "Where the time of each step goes", explanation, "ms", steps, series, style="stack")


def _noise_chart(attempts: Sequence[Attempt]) -> Chart:
    """Returns the chart of the gradient noise scale, estimated from the latest steps of the same attempt."""
    steps: list[int] = []
    scales = []
    for attempt in attempts:
        compile_event = next((record for record in attempt.events if record["kind"] == "compile"), {})
        small_rows = number(compile_event, "rows_of_small_batches")
        rows = number(compile_event, "rows")
        steps += [line["step"] for line in attempt.steps]
        scales += noise_scales(attempt.steps, small_rows, rows)
    explanation = (
        "Number of rows beyond which a larger batch speeds up training little, estimated from squared gradient norms "
        f"over {NOISE_STEPS} steps."
    )
    return Chart("noise", "Gradient noise scale", explanation, "rows", steps, [Series("scale", scales)], log=True)


def _model_charts(lines: Sequence[Record]) -> Iterable[Chart]:
    """Yields a chart for each metric of the model's layers."""
    metrics = [_mapping(line, "model") for line in lines]
    steps = [line["step"] for line in lines]
    for name in sorted({name for step_metrics in metrics for name in step_metrics}):
        values = [step_metrics.get(name) for step_metrics in metrics]
        max_length = max((len(value) for value in values if isinstance(value, list)), default=0)
        if max_length:
            series = [Series(str(index), [_entry_at(value, index) for value in values]) for index in range(max_length)]
        else:
            series = [Series(name, [_as_number(value) for value in values])]
        yield Chart(f"model.{name}", f"Model: {name}", "A metric of the model's layers.", "", steps, series)


def _resource_charts(lines: Sequence[Record]) -> Iterable[Chart]:
    """Yields charts of memory, GPUs and network.

    Each line has the mean, the minimum and the maximum of each quantity over the processes.
    """
    steps = [line.get("step", 0) for line in lines]

    def chart(
        chart_id: str, title: str, explanation: str, unit: str, fields: dict[str, tuple[str, str]], factor: float = 1.0
    ) -> Chart:
        series = []
        for name, (field, statistic) in fields.items():
            readings = [_read_statistic(_mapping(line, "of").get(field), statistic) for line in lines]
            series.append(Series(name, [_scaled(reading, factor) for reading in readings]))
        all_zero = not any(any(curve.values) for curve in series)
        return Chart(chart_id, title, explanation, unit, steps, [] if all_zero else series)

    maximum, mean, minimum = "max", "mean", "min"
    yield chart("memory", "Memory", "Maximum over devices and over host processes.", "GiB", {
        "device, in use": ("device_bytes", maximum), "device, peak": ("device_peak_bytes", maximum),
        "host process": ("host_bytes", maximum),
    }, 1 / _GIB)  # fmt: skip
    yield chart("gpu_load", "GPU utilisation", "Share of time in which a kernel ran.", "%", {
        "mean": ("gpu_utilisation", mean), "lowest": ("gpu_utilisation", minimum),
    })  # fmt: skip
    yield chart("gpu_clock", "GPU clock", "Clock of the multiprocessors. A low minimum indicates throttling.", "MHz", {
        "mean": ("gpu_clock_mhz", mean), "lowest": ("gpu_clock_mhz", minimum),
    })  # fmt: skip
    yield chart("gpu_heat", "GPU temperature", "Temperature of the chips.", "°C", {
        "mean": ("gpu_celsius", mean), "highest": ("gpu_celsius", maximum),
    })  # fmt: skip
    yield chart("gpu_power", "GPU power", "Power of one GPU.", "W", {
        "mean": ("gpu_watts", mean), "highest": ("gpu_watts", maximum),
    })  # fmt: skip
    for links, title in (("network", "Network"), ("infiniband", "InfiniBand")):
        yield chart(links, title, "Rates at which a host sends and receives, each summed over its ports.", "MB/s", {
            "sent, mean": (f"{links}_sent_per_second", mean), "received, mean": (f"{links}_received_per_second", mean),
            "sent, most": (f"{links}_sent_per_second", maximum), "sent, least": (f"{links}_sent_per_second", minimum),
        }, 1e-6)  # fmt: skip


def _read_statistic(quantity: Any, statistic: str) -> Any:
    """Returns the mean, min or max of a quantity in a line of resources; None if it is missing.

    The line stores an extreme together with the process that has it, which is left out here.
    """
    reading = quantity.get(statistic) if isinstance(quantity, dict) else None
    return reading[0] if isinstance(reading, list) and reading else reading


def _reduce(chart: Chart) -> Chart:
    """Returns a chart with at most about `MAX_POINTS` of its steps, and without the series that have no value."""
    nonempty_series = list(filter(_has_numbers, chart.series))
    values_SN = np.array(
        [[np.nan if value is None else value for value in series.values] for series in nonempty_series]
    )
    is_stack = chart.style == "stack"
    indices = _indices_to_draw(values_SN, MAX_POINTS, are_stacked=is_stack)
    reduced_series = [
        replace(series, values=[_rounded(series.values[index]) for index in indices]) for series in nonempty_series
    ]
    ceiling = _ceiling(values_SN) if is_stack else None
    return replace(chart, steps=[chart.steps[index] for index in indices], series=reduced_series, ceiling=ceiling)


def _ceiling(values_SN: np.ndarray) -> float | None:
    """Returns an upper limit for drawing a stack of S series of N values.

    Returns None unless the highest step is far above that limit.
    """
    sums = np.nansum(values_SN, axis=0)
    limit = 1.3 * float(np.quantile(sums, 0.97))
    return limit if 0 < 3 * limit < float(sums.max()) else None


def _indices_to_draw(values_SN: np.ndarray, max_points: int, *, are_stacked: bool) -> list[int]:
    """Returns about `max_points` of the N indices of S series, in order.

    The indices are divided into stretches. From each stretch, the result has the indices of each series' minimum and
    maximum and of its first missing value, or those of the sum of all series if they are stacked. The first and the
    last index are always included.
    """
    num_indices = values_SN.shape[1]
    if num_indices <= max_points:
        return list(range(num_indices))
    # Series with few values keep all of them. They get no stretches, so that they do not crowd out the other series.
    is_sparse = np.isfinite(values_SN).sum(axis=1) <= max_points // 4
    indices = {0, num_indices - 1, *np.flatnonzero(np.isfinite(values_SN[is_sparse]).any(axis=0)).tolist()}
    # Each stretch contributes up to two indices for each of the other series.
    dense_values = values_SN[~is_sparse]
    if are_stacked and len(dense_values):
        dense_values = np.nansum(dense_values, axis=0, keepdims=True)
    num_stretches = max(2, max_points // (2 * max(1, len(dense_values))))
    borders = np.linspace(0, num_indices, num_stretches + 1).astype(int)
    for begin, end in pairwise(borders):
        for stretch in dense_values[:, begin:end]:
            is_missing = np.isnan(stretch)
            if is_missing.any():
                indices.add(begin + int(is_missing.argmax()))
            if not is_missing.all():
                indices |= {begin + int(np.nanargmin(stretch)), begin + int(np.nanargmax(stretch))}
    return sorted(indices)


def _entry_at(value: Any, index: int) -> float | None:
    """Returns the number at an index of a list; None if there is no such number, or no list."""
    return _as_number(value[index]) if isinstance(value, list) and index < len(value) else None


def _mapping(record: Record, field: str) -> Record:
    """Returns the mapping that a field holds; an empty one if the field holds none."""
    value = record.get(field)
    return value if isinstance(value, dict) else {}


def _as_number(value: Any) -> float | None:
    """Returns a value as a float; None if it is not a number or too large to draw."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if is_number else None


def _scaled(value: Any, factor: float) -> float | None:
    unscaled = _as_number(value)
    return None if unscaled is None else unscaled * factor


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_SIGNIFICANT_DIGITS}g}")
