"""What a plan says, as plain data: the split, the memory, and what crosses devices in a step."""

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxmnt.placement.rules import is_axes
from jaxmnt.plan.hlo import Collective, collectives
from jaxmnt.plan.notes import notes, schedule_facts
from jaxmnt.program import engine
from jaxmnt.program.compiled import compile_step, measure
from jaxmnt.program.setting import Setting
from jaxmnt.program.state import abstract_state, bytes_a_device

Report = dict[str, Any]


def make_report(setting: Setting, hosts: Callable[[jax.Device], int], memory: int | None) -> Report:
    """Compiles the step for the setting's devices and says all about it. `memory` is what a device has, in bytes."""
    state = abstract_state(setting)
    started = time.perf_counter()
    step = compile_step(setting, state)
    seconds = time.perf_counter() - started
    text = step.as_text()
    needed = measure(setting, state, step, memory)
    return {
        "devices": {
            "kind": setting.placement.mesh.devices.flat[0].device_kind,
            "count": setting.placement.mesh.size,
            "hosts": len({hosts(device) for device in setting.placement.mesh.devices.flat}),
        },
        "mesh": {axis: size for axis, size in setting.placement.sizes.items() if size > 1},
        "notes": notes(setting),
        "schedule": schedule_facts(setting),
        "parameters": parameters(setting),
        "memory": vars(needed),
        "collectives": traffic(setting, text, hosts),
        "compile_seconds": round(seconds, 1),
    }


def parameters(setting: Setting) -> list[dict[str, Any]]:
    """One entry a parameter, as it is placed."""
    placement = setting.placement
    leaves = jax.tree.leaves_with_path(abstract_state(setting)["params"])
    axes = jax.tree.leaves(setting.definition.axes, is_leaf=is_axes)
    return [
        {
            "name": jax.tree_util.keystr(path, simple=True, separator="."),
            "shape": list(leaf.shape),
            "axes": list(names),
            "split": ["×".join(placement.mesh_axes(name)) for name in names],
            "bytes_a_device": bytes_a_device(leaf),
            "whole_over": list(placement.whole_over(names)),
        }
        for (path, leaf), names in zip(leaves, axes, strict=True)
    ]


def traffic(setting: Setting, text: str, hosts: Callable[[jax.Device], int]) -> list[dict[str, Any]]:
    """The collectives of a step by kind, axis and dtype: executions, bytes that a device sends, and how."""
    mesh = setting.placement.mesh
    axis_of = _axis_names(setting)
    host = np.array([hosts(device) for device in mesh.devices.flat])
    merged: dict[tuple[str, str, str], dict[str, Any]] = {}
    for one in collectives(text, mesh.size, _share(setting)):
        key = (one.kind, axis_of(one), one.dtype)
        entry = merged.setdefault(key, {"times": 0.0, "sent": 0.0, "asynchronous": 0.0, "across": False})
        entry["times"] += one.times
        entry["sent"] += one.sent * one.times
        entry["asynchronous"] += one.sent * one.times * one.asynchronous
        entry["across"] |= any(len(set(host[list(group)])) > 1 for group in one.groups)
    return [
        {
            "kind": kind,
            "axis": axis,
            "dtype": dtype,
            "times": round(entry["times"], 3),
            "bytes_sent": round(entry["sent"]),
            "asynchronous_share": round(entry["asynchronous"] / entry["sent"], 3) if entry["sent"] else 0.0,
            "between": "hosts" if entry["across"] else "devices of a host",
        }
        for (kind, axis, dtype), entry in sorted(merged.items(), key=lambda item: (-item[1]["sent"], item[0]))
    ]


def _share(setting: Setting) -> Callable[[str], float]:
    """How often a condition in the loop over ticks is true, by the scope that is under it."""
    schedule = setting.schedule
    work = schedule.microbatches * schedule.chunks / schedule.ticks
    passing = schedule.microbatches / schedule.ticks
    shares = {
        engine.FORWARD: work, engine.BACKWARD: work,
        engine.LOSS: passing, engine.ENTER: passing, engine.LEAVE: passing,
    }  # fmt: skip

    def share(where: str) -> float:
        scopes = where.split("/")
        return next((part for scope, part in shares.items() if scope in scopes), 1.0)

    return share


def _axis_names(setting: Setting) -> Callable[[Collective], str]:
    """Which mesh axes a collective's groups go along."""
    sizes = {axis: size for axis, size in setting.placement.sizes.items() if size > 1}
    ids = np.arange(setting.placement.mesh.size).reshape(list(sizes.values()) or [1])
    known: dict[frozenset[frozenset[int]], str] = {}
    for count in range(1, len(sizes) + 1):
        for chosen in itertools.combinations(range(len(sizes)), count):
            apart = [index for index in range(len(sizes)) if index not in chosen]
            rows = ids.transpose(*apart, *chosen).reshape(-1, math.prod(ids.shape[index] for index in chosen))
            label = "×".join(list(sizes)[index] for index in chosen)
            known[frozenset(frozenset(row.tolist()) for row in rows)] = label
    places = np.stack(np.unravel_index(np.arange(ids.size), ids.shape), axis=1)

    def name(one: Collective) -> str:
        if one.kind == "collective-permute":
            differ = {index for a, b in one.groups for index in np.flatnonzero(places[a] != places[b]).tolist()}
            return "×".join(list(sizes)[index] for index in sorted(differ))
        return known.get(frozenset(map(frozenset, one.groups)), "other groups")

    return name
