"""Formats a plan as text."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmnt.config.mesh import AXES
from jaxmnt.errors import counted
from jaxmnt.plan.report import Report
from jaxmnt.plan.zero import ZeroChoice
from jaxmnt.telemetry.progress import TableRows, table
from jaxmnt.training.spec import StepSpec
from jaxmnt.units import count, seconds_text, size

_MAX_HOSTS = 8


def plan_text(
    spec: StepSpec, report: Report, hosts: Callable[[jax.Device], int], zero: ZeroChoice | None = None
) -> str:
    """Returns the text of a plan. `hosts` maps a device to its host."""
    blocks = [
        host_map(spec, hosts),
        [
            _kernel_line(report),
            *([] if zero is None else zero.lines()),
            *(f"note    {note}" for note in report["notes"]),
        ],
        _schedule_lines(spec, report),
        parameter_table(report["parameters"]),
        _memory_lines(report),
        _collective_lines(report),
        _timeline_lines(report, spec.dtype.name),
        *map(_round_lines, report["rounds"]),
        _other_work_lines(report),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def host_map(spec: StepSpec, hosts: Callable[[jax.Device], int]) -> list[str]:
    """Returns lines that show which part of the mesh each host has."""
    mesh = spec.placement.mesh
    used_axes = [index for index, axis in enumerate(AXES) if mesh.devices.shape[index] > 1]
    shape = " × ".join(f"{AXES[index]} {mesh.devices.shape[index]}" for index in used_axes) or "one device"
    coordinates: dict[int, list[tuple[int, ...]]] = {}
    for coordinate, device in np.ndenumerate(mesh.devices):
        coordinates.setdefault(hosts(device), []).append(coordinate)
    kind = mesh.devices.flat[0].device_kind
    lines = [f"mesh    {shape}: {mesh.size} {kind} on {len(coordinates)} host{'s' * (len(coordinates) > 1)}"]
    width = max(len(str(host)) for host in coordinates)
    for number, (host, host_coordinates) in enumerate(sorted(coordinates.items())):
        if number == _MAX_HOSTS - 1 and len(coordinates) > _MAX_HOSTS:
            lines.append(f"        … {len(coordinates) - number} more")
            break
        ranges = []
        for index in used_axes:
            positions = sorted({coordinate[index] for coordinate in host_coordinates})
            text = str(positions[0]) if len(positions) == 1 else f"{positions[0]}-{positions[-1]}"
            ranges.append(f"{AXES[index]} {text}")
        lines.append(
            f"        host {str(host).rjust(width)}  [{' '.join('■' * len(host_coordinates))}]  {', '.join(ranges)}"
        )
    return lines


def _kernel_line(report: Report) -> str:
    """Returns a line with the kernels of attention and of experts."""
    return "kernels " + ", ".join(f"{kernel} {name}" for name, kernel in report["kernels"].items())


def _schedule_lines(spec: StepSpec, report: Report) -> list[str]:
    """Returns lines about the pipeline's schedule, with a drawing if it is short; none without a pipeline."""
    facts = report["schedule"]
    if facts is None:
        return []
    most_in_flight = max(facts["in_flight"])
    microbatches = counted(facts["microbatches"], "microbatch", "microbatches")
    lines = [
        f"stages  {facts['name']}: {microbatches} through {facts['stages']} stages"
        + (f" of {facts['chunks']} chunks" if facts["chunks"] > 1 else "")
        + f" in {facts['ticks']} ticks, idle {facts['idle_percent']} % of the time, at most {most_in_flight} in flight",
        f"        embedding and loss are divided by {facts['ends_divided_by']}",
    ]
    if facts["ticks"] <= 30:
        lines += ["        " + line for line in spec.schedule.draw().splitlines()]
    return lines


def parameter_table(parameters: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a table with a line for each entry of `budget.parameter_rows`, and their total."""
    rows: TableRows = [("parameter", "shape", "split over", "a device", "whole over")]
    for entry in parameters:
        names = [
            f"{axis}:{split}" if split else axis or "-"
            for axis, split in zip(entry["axes"], entry["split"], strict=True)
        ]
        rows.append(
            (
                entry["name"],
                "×".join(map(str, entry["shape"])),
                " ".join(names),
                size(entry["bytes_a_device"]),
                ", ".join(entry["replicated_axes"]) or "-",
            )
        )
    total = sum(entry["bytes_a_device"] for entry in parameters)
    elements = sum(int(np.prod(entry["shape"])) for entry in parameters)
    rows.append(("all", count(elements), "", size(total), ""))
    return table(rows, right={3})


def _memory_lines(report: Report) -> list[str]:
    """Returns a table of the memory that a device needs, with ways to save memory if the step does not fit."""
    memory = report["memory"]
    rows: TableRows = [("memory per device", "")]
    parts = {name: size(memory[name]) for name in ("params", "optimizer", "temporary", "peak")}
    if memory["optimizer_in_host_memory"]:
        parts["optimizer"] += ", in host memory except during the update"
    if memory["base"]:
        parts.pop("params")
        parts = {"base": size(memory["base"]), "adapters": size(memory["params"] - memory["base"])} | parts
    rows += parts.items()
    if memory["limit"]:
        share = memory["peak"] / memory["limit"]
        tight = ": too close for XLA to overlap communication" if memory["is_tight"] else ""
        verdict = tight if share <= 1 else ": it does not fit"
        rows.append(("limit", f"{size(memory['limit'])}, of which the peak is {share:.0%}{verdict}"))
    for suggestion in memory["levers"]:
        rows.append(("saves", f"{size(suggestion['saves'])}: {suggestion['setting']}"))
    return table(rows, right=set())


def _collective_lines(report: Report) -> list[str]:
    """Returns a table of the collectives of a step, with their times if the report has times."""
    has_times = report["timeline"] is not None
    rows: TableRows = [("collective", "over", "dtype", "times", "sent per device", "between")]
    rows[0] += ("takes", "exposed", "behind it", "FLOPs") if has_times else ()
    for entry in report["collectives"]:
        row: tuple[str, ...] = (
            entry["kind"], entry["axis"], entry["dtype"], f"{entry['times']:g}", size(entry["bytes_sent"]),
            entry["between"],
        )  # fmt: skip
        if has_times:
            times = (entry[name] for name in ("seconds", "exposed_seconds", "work_seconds_meanwhile"))
            row += (*map(seconds_text, times), f"{entry['flops_meanwhile'] / 1e12:,.0f} T")
        rows.append(row)
    total = sum(entry["bytes_sent"] for entry in report["collectives"])
    if not total:
        return ["no collectives: nothing crosses devices"]
    total_row: tuple[str, ...] = ("all", "", "", "", size(total), "")
    if has_times:
        total_row += (
            *(seconds_text(report["timeline"][f"{name}_seconds"]) for name in ("communication", "exposed")),
            "",
            "",
        )
    return table([*rows, total_row], right={3, 4, 6, 7, 8, 9})


def _timeline_lines(report: Report, dtype: str) -> list[str]:
    """Returns lines about the time of a step and the rates behind it; none if the report has no times."""
    timeline, step = report["timeline"], report["prediction"]
    if timeline is None:
        return []
    rates = timeline["rates"]
    parts = {
        "work": step["work_seconds"],
        "exposed communication": step["exposed_seconds"],
        "idle stages": step["bubble_seconds"],
        "slowdown by communication": step["contention_seconds"],
        "the host": step["host_seconds"],
    }
    breakdown = ", ".join(f"{seconds_text(value)} {name}" for name, value in parts.items() if value)
    waits = []
    if timeline["communication_seconds"]:
        waits.append(
            f"        {seconds_text(timeline['communication_seconds'])} of communication in all; for "
            f"{timeline['exposed_percent']:g} % of the step the device waits for it"
        )
    if timeline["conditions"] and report["devices"]["kind"] != "cpu":
        waits += _conditions_text(report["conditions"])
    return [
        f"step    about {seconds_text(step['step_seconds'])}, between {seconds_text(step['from'])} and "
        f"{seconds_text(step['to'])}: {breakdown}",
        *waits,
        f"        {'as measured' if rates['measured'] else 'by data sheets'}: {_rates_text(rates, dtype)}",
    ]


def _conditions_text(rows: list[dict[str, Any]]) -> list[str]:
    """Returns lines about the conditions of branches and loops, whose values a GPU copies to the host."""
    total = sum(row["times"] for row in rows)
    parts = [f"{count(row['times'])} of {row['kind']} {row['of']}" for row in rows[:4]]
    return [
        f"        the host waits for {count(total)} conditions, about "
        f"{seconds_text(sum(row['seconds'] for row in rows))} beside the step's time: {', '.join(parts)}"
    ]


def _rates_text(rates: dict[str, Any], dtype: str) -> str:
    """Returns the rates of large operations in words."""
    parts = [
        f"large products {rates['products'][dtype] / 1e12:.3g} TFLOP/s in {dtype}",
        f"attention {rates['attention'] / 1e12:.3g}",
        f"memory {rates['memory'] / 1e9:,.0f} GB/s",
    ]
    links = {"within_host": "in a host", "between_hosts": "between hosts", "to_host": "to host memory"}
    sent = [f"{rates[name] / 1e9:.3g} {text}" for name, text in links.items() if name in rates]
    return ", ".join(parts) + (f", links in GB/s: {', '.join(sent)}" if sent else "")


def _other_work_lines(report: Report) -> list[str]:
    """Returns a table of work other than matrix products and attention; empty if the report lists none."""
    if not report["besides"]:
        return []
    rows: TableRows = [("besides products and attention", "in", "array", "times", "takes")]
    for entry in report["besides"]:
        array = f"{entry['dtype']} {'×'.join(map(str, entry['shape']))}"
        rows.append(
            (entry["what"], *(entry["in"] or ["-"]), array, count(entry["times"]), seconds_text(entry["seconds"]))
        )
    return table(rows, right={3, 4})


_BAR_WIDTH = 40
"""Width in characters of the bar that shows when a collective runs."""


def _round_lines(iteration: dict[str, Any]) -> list[str]:
    """Returns lines with a bar for each collective of a round, which shows when it runs and, in dark, when the device
    waits."""
    duration = iteration["seconds"]
    if not duration:
        return []
    rows: TableRows = []
    column = lambda second: max(0, min(_BAR_WIDTH, round(_BAR_WIDTH * second / duration)))
    long_entries = [entry for entry in iteration["collectives"] if entry["ends"] - entry["begins"] >= duration / 100]
    for entry in long_entries:
        begin, end, waited = (column(entry[name]) for name in ("begins", "ends", "waited_for"))
        # Each collective is at least one character wide.
        begin = min(begin, _BAR_WIDTH - 1)
        end = max(end, begin + 1)
        hidden_end = max(begin, min(waited, end))
        bar = " " * begin + "░" * (hidden_end - begin) + "█" * (end - hidden_end)
        exposed = _exposed_seconds(entry)
        waits = f"{seconds_text(exposed)} exposed" if exposed > 1e-6 else "hidden"
        rows.append((
            f"        {entry['kind']}", entry["axis"], entry["dtype"], size(entry["bytes_sent"]),
            f"▕{bar.ljust(_BAR_WIDTH)[:_BAR_WIDTH]}▏", seconds_text(entry["ends"] - entry["begins"]), waits,
        ))  # fmt: skip
    lines = [f"{iteration['of']}: {iteration['times']:g} × {seconds_text(duration)}"]
    lines += table(rows, right={3, 5}) if rows else []
    if short_entries := [entry for entry in iteration["collectives"] if entry not in long_entries]:
        takes = sum(entry["ends"] - entry["begins"] for entry in short_entries)
        exposed = sum(map(_exposed_seconds, short_entries))
        lines.append(
            f"        {len(short_entries)} of less than 1 %: {seconds_text(takes)}, {seconds_text(exposed)} exposed"
        )
    return lines


def _exposed_seconds(entry: dict[str, Any]) -> float:
    """Returns the seconds for which the device waits for a collective."""
    waited: float = entry["ends"] - entry["waited_for"]
    return max(0.0, waited)
