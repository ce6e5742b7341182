"""A plan as text for a person."""

from collections.abc import Callable

import jax
import numpy as np

from jaxmnt.config.schema import AXES
from jaxmnt.plan.budget import Report, counted
from jaxmnt.telemetry.progress import count, size
from jaxmnt.training.spec import StepSpec

Rows = list[tuple[str, ...]]

_HOSTS_SHOWN = 8


def show(spec: StepSpec, report: Report, hosts: Callable[[jax.Device], int]) -> str:
    """The whole plan."""
    blocks = [
        picture(spec, hosts),
        [f"note    {note}" for note in report["notes"]],
        _schedule(spec, report),
        _parameters(report),
        _memory(report),
        _collectives(report),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def picture(spec: StepSpec, hosts: Callable[[jax.Device], int]) -> list[str]:
    """Which part of the mesh each host has."""
    mesh = spec.placement.mesh
    used = [index for index, axis in enumerate(AXES) if mesh.devices.shape[index] > 1]
    shape = " × ".join(f"{AXES[index]} {mesh.devices.shape[index]}" for index in used) or "one device"
    places: dict[int, list[tuple[int, ...]]] = {}
    for place, device in np.ndenumerate(mesh.devices):
        places.setdefault(hosts(device), []).append(place)
    kind = mesh.devices.flat[0].device_kind
    lines = [f"mesh    {shape}: {mesh.size} {kind} on {len(places)} host{'s' * (len(places) > 1)}"]
    width = max(len(str(host)) for host in places)
    for number, (host, inside) in enumerate(sorted(places.items())):
        if number == _HOSTS_SHOWN - 1 and len(places) > _HOSTS_SHOWN:
            lines.append(f"        … {len(places) - number} more")
            break
        ranges = []
        for index in used:
            values = sorted({place[index] for place in inside})
            text = str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}"
            ranges.append(f"{AXES[index]} {text}")
        lines.append(f"        host {str(host).rjust(width)}  [{' '.join('■' * len(inside))}]  {', '.join(ranges)}")
    return lines


def _schedule(spec: StepSpec, report: Report) -> list[str]:
    facts = report["schedule"]
    if facts is None:
        return []
    held = max(facts["in_flight"])
    lines = [
        f"stages  {facts['name']}: {counted(facts['microbatches'])} through {facts['stages']} stages"
        + (f" of {facts['chunks']} chunks" if facts["chunks"] > 1 else "")
        + f" in {facts['ticks']} ticks, idle {facts['idle_percent']} % of the time, at most {held} held at a time"
    ]
    if facts["ticks"] <= 30:
        lines += ["        " + line for line in spec.schedule.draw().splitlines()]
    return lines


def _parameters(report: Report) -> list[str]:
    rows: Rows = [("parameter", "shape", "split over", "a device", "whole over")]
    for entry in report["parameters"]:
        names = [
            f"{axis}:{split}" if split else axis for axis, split in zip(entry["axes"], entry["split"], strict=True)
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
    total = sum(entry["bytes_a_device"] for entry in report["parameters"])
    elements = sum(int(np.prod(entry["shape"])) for entry in report["parameters"])
    rows.append(("all", count(elements), "", size(total), ""))
    return _table(rows, right={3})


def _memory(report: Report) -> list[str]:
    memory = report["memory"]
    rows: Rows = [("memory per device", "")]
    rows += [(name, size(memory[name])) for name in ("params", "optimizer", "temporary", "peak")]
    if memory["limit"]:
        share = memory["peak"] / memory["limit"]
        verdict = "" if share <= 1 else ": it does not fit"
        rows.append(("of the device's", f"{size(memory['limit'])} ({share:.0%}){verdict}"))
    return _table(rows, right=set())


def _collectives(report: Report) -> list[str]:
    rows: Rows = [("collective", "over", "dtype", "times", "sent per device", "between", "asynchronous")]
    for entry in report["collectives"]:
        rows.append(
            (
                entry["kind"],
                entry["axis"],
                entry["dtype"],
                f"{entry['times']:g}",
                size(entry["bytes_sent"]),
                entry["between"],
                f"{entry['asynchronous_share']:.0%}",
            )
        )
    total = sum(entry["bytes_sent"] for entry in report["collectives"])
    if not total:
        return ["no collectives: nothing crosses devices"]
    share = sum(entry["bytes_sent"] * entry["asynchronous_share"] for entry in report["collectives"]) / total
    rows.append(("all", "", "", "", size(total), "", f"{share:.0%}"))
    return _table(rows, right={3, 4, 6})


def _table(rows: Rows, right: set[int]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
