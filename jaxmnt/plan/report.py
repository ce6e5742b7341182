"""Makes the report about a compiled step: memory, collectives, times, and notes on what one might not expect."""

import math
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxmnt.config.mesh import REPLICA_AXES
from jaxmnt.distributed.gpu_settings import OUR_MEMORY_FRACTION
from jaxmnt.errors import counted
from jaxmnt.models.adapters import describe_left_out
from jaxmnt.parallel.chunks import halo_length
from jaxmnt.parallel.sharding import RULES
from jaxmnt.plan.chips import Chip
from jaxmnt.plan.estimate import Step, traits_of
from jaxmnt.plan.hlo import HOST_COPY, Collective, Program
from jaxmnt.plan.predict import predict_step
from jaxmnt.plan.rates import Rates, rates_of
from jaxmnt.plan.timeline import CollectiveTime, Round, Timeline, replay_program
from jaxmnt.plan.workload import model_shape, scheme_of
from jaxmnt.training import engine
from jaxmnt.training.build import build_spec
from jaxmnt.training.compile import compile_step, measure_memory
from jaxmnt.training.compiler_options import GpuMemory, scheduled_bytes
from jaxmnt.training.device_step import BACKWARD, EMBED, EMBED_BACKWARD, FORWARD, LOSS, STEADY
from jaxmnt.training.memory_suggestions import find_memory_suggestions, parameters_of
from jaxmnt.training.noise import small_batches
from jaxmnt.training.pipeline_schedule import schedule_table
from jaxmnt.training.spec import StepSpec
from jaxmnt.training.state import abstract_state, bytes_per_device, relayout_bytes
from jaxmnt.units import size


def ideal_state_bytes(spec: StepSpec) -> float:
    """Returns the bytes of parameters and optimizer state that a device would have if all of them were split over every
    axis. Replica axes count only if the rules split parameters over them."""
    state, placement = abstract_state(spec), spec.placement
    replicas = math.prod(placement.sizes[axis] for axis in REPLICA_AXES if axis not in placement.mesh_axes("embed"))
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state["params"], state["optimizer"])))
    return total / (placement.mesh.size / replicas)


def notes(spec: StepSpec) -> list[str]:
    """Lists what one might not expect from the config, such as padding, uneven splits, layouts, and settings without
    effect."""
    model, placement = spec.config.model, spec.placement
    lines = []
    for axis, key, extent in (
        ("vocab", "model.vocab_size", model.vocab_size),
        ("mlp", "model.intermediate_size", model.intermediate_size),
    ):
        if axis in spec.layout.dimensions:
            padded = len(spec.layout.dimensions[axis].slots)
            num_shards = placement.num_shards(axis)
            lines.append(f"{key}: {extent} is padded with zeros to {padded}, to split it among {num_shards} devices")
    assert model.num_kv_heads
    [axis] = RULES["kv_heads"]
    if model.num_kv_heads % placement.sizes[axis]:
        lines.append(
            f"model.num_kv_heads: {model.num_kv_heads} cannot be split evenly by mesh.{axis} {placement.sizes[axis]}: "
            "their weights are stored once, and each device computes the heads that its queries need"
        )
    lines += _wide_window_notes(spec)
    if spec.definition.adapters is not None and (left_out := describe_left_out(spec.definition.adapters)):
        lines.append(left_out)
    if spec.float8:
        in_float8, products = engine.trace_step(spec).products
        lines.append(
            f"train.precision: {in_float8} of the {products} products of the layers' projections are in float8, all "
            f"else in {spec.dtype.name}"
        )
    slots = [unit for rows in spec.slots.values() for row in rows for unit in row]
    if empty := slots.count(None):
        lines.append(f"pipeline: {empty} of {len(slots)} slots for layers are empty, because stages are uneven")
    facts = schedule_facts(spec)
    if facts and facts["chunks"] > 1 and facts["microbatches"] % facts["stages"]:
        lines.append(
            f"pipeline: {facts['microbatches']} microbatches do not fill rounds of {facts['stages']} stages; "
            f"stages idle for {facts['idle_percent']} % of the time; use a multiple of {facts['stages']}"
        )
    extra_bytes = relayout_bytes(spec, abstract_state(spec))
    if extra_bytes:
        lines.append(f"checkpoint: it is stored in another layout; a save needs {size(extra_bytes)} more per device")
    if facts and facts["microbatches"] < facts["stages"]:
        lines.append(
            f"pipeline: {counted(facts['microbatches'], 'microbatch', 'microbatches')} for {facts['stages']} stages; "
            f"stages idle for {facts['idle_percent']} % of the time; lower train.microbatch_size"
        )
    return lines + _without_effect(spec)


def _wide_window_notes(spec: StepSpec) -> list[str]:
    """Returns a note if devices share rows, and a window reaches beyond the chunk before a token's own."""
    if spec.placement.num_shards("length") == 1:
        return []
    length = spec.config.data.sequence_length
    chunk = length // spec.placement.row_divisor
    for _, layer in spec.definition.layer_costs():
        window = layer.attention.window
        halo = halo_length(window, chunk, length)
        if halo is not None and halo > chunk:
            return [
                f"mesh.context: a window of {window} tokens is wider than a chunk of {chunk}, so each device computes "
                f"{1 + halo // chunk} times the queries in these layers; set it lower"
            ]
    return []


def _without_effect(spec: StepSpec) -> list[str]:
    """Returns a line for each setting of the config that has no effect on this mesh, with the reason."""
    config, placement = spec.config, spec.placement
    on_cpus = placement.mesh.size > 1 and placement.on_cpu
    has_no_pipeline = placement.stages == 1
    reasons = {
        "mesh.prefetch": bool(config.mesh.prefetch) and not spec.prefetch and "no weights of layers are gathered",
        "model.overlap": config.model.overlap in ("ring", "rows") and placement.overlap == "off" and "mesh.model is 1",
        "train.overlap_microbatches": bool(config.train.overlap_microbatches) and not spec.schedule.steady_ticks
        and "the step has too few microbatches, or its schedule is gpipe",
        "train.layer_unroll": config.train.layer_unroll > 1 and bool(spec.schedule.steady_ticks)
        and "it does not apply where two microbatches run side by side",
        "telemetry.noise_scale": config.telemetry.noise_scale and small_batches(spec) is None
        and "no device has the gradient of some of the rows alone",
        "train.remat_save": bool(config.train.remat_save) and config.train.remat != "names"
        and "it applies only to train.remat names",
        "pipeline.schedule": config.pipeline.schedule != "1f1b" and has_no_pipeline and "there is no pipeline",
        "pipeline.layers": config.pipeline.layers is not None and has_no_pipeline and "there is no pipeline",
        "run.compile_cache": config.run.compile_cache is not None and on_cpus
        and "programs of several CPU devices are not cached",
    }  # fmt: skip
    return [f"{key} has no effect: {reason}" for key, reason in reasons.items() if reason]


def schedule_facts(spec: StepSpec) -> dict[str, Any] | None:
    """Returns numbers that describe the pipeline's schedule, or None without a pipeline. `idle_percent` is the share of
    its time for which a stage is idle."""
    schedule = spec.schedule
    if schedule.stages == 1:
        return None
    idle_share = schedule.idle_share()
    return {
        "name": schedule.name,
        "stages": schedule.stages,
        "chunks": schedule.chunks,
        "microbatches": schedule.microbatches,
        "ticks": schedule.ticks,
        "idle_percent": round(100 * idle_share / (1 + idle_share), 1),
        "in_flight": [schedule.in_flight(stage) for stage in range(schedule.stages)],
        "ends_divided_by": "tokens" if spec.placement.divides_tokens else "vocabulary",
    }


Report = dict[str, Any]


def make_report(
    spec: StepSpec,
    hosts: Callable[[jax.Device], int],
    chip: Chip | None,
    rates: Rates | None = None,
    keep_text: Callable[[str], Any] = lambda text: None,
) -> Report:
    """Compiles the step for the spec's devices and returns a report with everything about it.

    `hosts` maps a device to its host. `chip` determines the memory of the devices and, unless `rates` are given, their
    rates. Without `chip` and `rates`, the report has no times. `keep_text` is called with the text of the compiled
    program.
    """
    if rates is None and chip is not None:
        rates = rates_of(chip)
    state = abstract_state(spec)
    memory = None if chip is None else GpuMemory(chip.memory, OUR_MEMORY_FRACTION * chip.memory)
    start_seconds = time.perf_counter()
    step = compile_step(spec, state, memory)
    compile_seconds = time.perf_counter() - start_seconds
    text = step.as_text()
    keep_text(text)
    needed = measure_memory(spec, state, step, None if memory is None else round(memory.usable))
    timeline = replay_step(spec, text, hosts, rates)
    fits = needed.limit is None or needed.peak <= needed.limit
    is_tight = memory is not None and needed.temporary > scheduled_bytes(state, memory)
    rebuild = lambda config: build_spec(
        config, spec.data_vocab_size, list(spec.placement.mesh.devices.flat), lambda device: str(hosts(device))
    )
    suggestions = [] if fits and not is_tight else find_memory_suggestions(spec, rebuild)
    return {
        "devices": {
            "kind": spec.placement.mesh.devices.flat[0].device_kind,
            "count": spec.placement.mesh.size,
            "hosts": len({hosts(device) for device in spec.placement.mesh.devices.flat}),
        },
        "mesh": {axis: size for axis, size in spec.placement.sizes.items() if size > 1},
        "kernels": spec.kernels,
        "notes": notes(spec) + ([] if rates is None else _exchange_notes(spec, hosts, rates)),
        "schedule": schedule_facts(spec),
        "parameters": parameter_rows(spec),
        "memory": vars(needed)
        | {
            "optimizer_in_host_memory": spec.config.optimizer.offload,
            "is_tight": is_tight,
            "levers": [suggestion._asdict() for suggestion in suggestions],
        },
        "collectives": collective_rows(spec, timeline, hosts),
        "timeline": None if rates is None else step_times(timeline) | {"rates": rates.to_json()},
        "prediction": None if rates is None else predict_step(spec, timeline, rates, needed.temporary).to_json(),
        "rounds": [] if rates is None else round_rows(spec, timeline),
        "besides": [] if rates is None else other_work_rows(timeline),
        "conditions": [] if rates is None else condition_rows(timeline),
        "compile_seconds": round(compile_seconds, 1),
    }


def _exchange_notes(spec: StepSpec, hosts: Callable[[jax.Device], int], rates: Rates) -> list[str]:
    """Returns a note if the devices that share rows take longer to exchange keys and values than to compute attention,
    by estimate, in any of the layers."""
    if spec.placement.num_shards("length") == 1:
        return []
    devices = list(spec.placement.mesh.devices.flat)
    domain = len(devices) // len(set(map(hosts, devices)))
    scheme = scheme_of(spec)
    step = Step(model_shape(spec.definition, spec.config), scheme, rates, domain, traits_of(scheme))
    for _, layer in step.model.layers:
        link = step.keys_link(layer)
        attention = sum(step.attention_seconds(layer, backward=backward) for backward in (False, True))
        if link is not None and link.seconds > attention:
            return [
                f"mesh.context: in a layer and microbatch, {scheme.context} devices exchange keys and values for "
                f"{1000 * link.seconds:.3g} ms, longer than the {1000 * attention:.3g} ms of attention; set it lower, "
                "or keep these devices inside a host"
            ]
    return []


def parameter_rows(spec: StepSpec) -> list[dict[str, Any]]:
    """Returns an entry for each parameter, with its shape and placement."""
    placement = spec.placement
    return [
        {
            "name": name,
            "shape": list(leaf.shape),
            "axes": list(names),
            "split": ["×".join(placement.mesh_axes(name)) for name in names],
            "bytes_a_device": bytes_per_device(leaf),
            "replicated_axes": list(placement.replicated_axes(names)),
        }
        for name, leaf, names in parameters_of(spec)
    ]


def replay_step(spec: StepSpec, text: str, hosts: Callable[[jax.Device], int], rates: Rates | None) -> Timeline:
    """Replays a step of the compiled program, whose text is given, at the rates of its devices, if they are known."""
    devices = list(spec.placement.mesh.devices.flat)
    host_of = [hosts(device) for device in devices].__getitem__
    return replay_program(Program(text), len(devices), rates, host_of, _branch_share(spec))


def step_times(timeline: Timeline) -> dict[str, float]:
    """Returns the times of the replayed step, with the part of its communication that no work hides."""
    communication = sum(collective_time.seconds for collective_time in timeline.collectives)
    return {
        "step_seconds": round(timeline.seconds, 4),
        "work_seconds": round(timeline.seconds - timeline.exposed, 4),
        "communication_seconds": round(communication, 4),
        "exposed_seconds": round(timeline.exposed, 4),
        "exposed_percent": round(100 * timeline.exposed / timeline.seconds, 2),
        "flops": round(timeline.flops),
        "conditions": round(sum(condition.times for condition in timeline.conditions), 3),
    }


_DIGITS = {
    "times": 3, "bytes_sent": None, "seconds": 6, "exposed_seconds": 6, "flops_meanwhile": None,
    "work_seconds_meanwhile": 6,
}  # fmt: skip
"""Numbers about a collective in a report, and the decimal places to which each is rounded; None for an integer."""


def collective_rows(spec: StepSpec, timeline: Timeline, hosts: Callable[[jax.Device], int]) -> list[dict[str, Any]]:
    """Sums up the collectives of a step by kind, axis and dtype. An entry has the number of executions, the bytes sent
    per device, the seconds that the collectives take, the seconds for which the device waits for them, and the work and
    the FLOPs of matrix products and attention meanwhile."""
    axis_of = _axis_namer(spec)
    host = np.array([hosts(device) for device in spec.placement.mesh.devices.flat])
    sums: dict[tuple[str, str, str], np.ndarray] = defaultdict(lambda: np.zeros(len(_DIGITS)))
    across_hosts: set[tuple[str, str, str]] = set()
    for collective_time in timeline.collectives:
        collective, times = collective_time.collective, collective_time.times
        key = (collective.kind, axis_of(collective), collective.dtype)
        sums[key] += (
            times,
            collective.sent * times,
            collective_time.seconds,
            collective_time.exposed,
            collective_time.flops,
            collective_time.work_meanwhile,
        )
        if any(len(set(host[list(group)])) > 1 for group in collective.groups):
            across_hosts.add(key)
    rows = []
    # Collectives that send the most come first.
    for key, totals in sorted(sums.items(), key=lambda entry: (-entry[1][1], entry[0])):
        kind, axis, dtype = key
        ends = "hosts" if key in across_hosts else "devices of a host"
        between = "device and host" if kind == HOST_COPY else ends
        numbers = {name: round(value, _DIGITS[name]) for name, value in zip(_DIGITS, totals.tolist(), strict=True)}
        rows.append({"kind": kind, "axis": axis, "dtype": dtype, **numbers, "between": between})
    return rows


def round_rows(spec: StepSpec, timeline: Timeline) -> list[dict[str, Any]]:
    """Returns an entry for each round, with the seconds at which its collectives begin, end, and are waited for."""
    axis_of = _axis_namer(spec)
    return [
        {
            "of": _describe_round(iteration),
            "times": round(iteration.times, 3),
            "seconds": round(iteration.seconds, 6),
            "collectives": [_round_entry(collective_time, axis_of) for collective_time in iteration.collectives],
        }
        for iteration in sorted(timeline.rounds, key=lambda entry: -entry.times * entry.seconds)
    ]


def _round_entry(collective_time: CollectiveTime, axis_of: Callable[[Collective], str]) -> dict[str, Any]:
    """Returns the entry of a collective in a round."""
    collective, times = collective_time.collective, collective_time.times
    begins, ends, waited_for = (round(second, 6) for second in collective_time.span)
    return {
        "kind": collective.kind,
        "axis": axis_of(collective),
        "dtype": collective.dtype,
        "bytes_sent": round(collective.sent),
        "begins": begins,
        "ends": ends,
        "waited_for": waited_for,
        "flops_meanwhile": round(collective_time.flops / times) if times else 0,
    }


_MIN_OTHER_WORK_SHARE = 0.002
"""Minimum share of a step's time for work to be listed by `other_work_rows`."""


def other_work_rows(timeline: Timeline) -> list[dict[str, Any]]:
    """Returns entries for the slowest work that reads and writes arrays, but is no matrix product or attention."""
    return [
        {
            "what": work.instruction.op_name.rsplit("/", 1)[-1] or work.instruction.opcode,
            "in": [scope for scope in _SCOPES if scope in work.instruction.op_name.split("/")][-1:],
            "dtype": work.instruction.arrays[0][0],
            "shape": list(work.instruction.arrays[0][1]),
            "times": round(work.times, 3),
            "seconds": round(work.seconds, 6),
        }
        for work in timeline.other_work[:8]
        if work.seconds > _MIN_OTHER_WORK_SHARE * timeline.seconds
    ]


HOST_WAIT_SECONDS = 12e-6
"""Time of a condition on a GPU: copying its value to the host takes 5 to 7 µs (Wu et al. 2026, arXiv:2602.21548,
section 5.2), and launching the next work is assumed to take as long. No GPU has measured it here."""


def condition_rows(timeline: Timeline) -> list[dict[str, Any]]:
    """Sums up the conditions of a step by what they control. The seconds, for which the host waits, are not part of the
    step's time."""
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for condition in timeline.conditions:
        sums["loop" if condition.is_loop else "branch", _describe_scopes(condition.scopes) or "the step"] += (
            condition.times
        )
    return [
        {"kind": kind, "of": source, "times": round(times, 3), "seconds": round(times * HOST_WAIT_SECONDS, 6)}
        for (kind, source), times in sorted(sums.items(), key=lambda entry: (-entry[1], entry[0]))
    ]


_SCOPES = (EMBED, FORWARD, LOSS, BACKWARD, EMBED_BACKWARD)


def _describe_round(iteration: Round) -> str:
    """Returns what a round computes, such as a layer or the loss."""
    return (_describe_scopes(iteration.scopes) if iteration.times > 1 else None) or "the step"


def _describe_scopes(scopes: tuple[str, ...]) -> str | None:
    """Returns what instructions with these scopes compute, judged by the engine's scopes, or None without any."""
    names = {
        BACKWARD: "a layer backward", FORWARD: "a layer forward", LOSS: "the loss", EMBED: "the embedding",
        EMBED_BACKWARD: "the embedding backward",
    }  # fmt: skip
    computed = [name for scope, name in names.items() if scope in scopes]
    if computed == [names[BACKWARD], names[FORWARD]]:
        return "a layer backward and one forward"
    return computed[0] if len(computed) == 1 else "a microbatch" if computed else None


def _branch_share(spec: StepSpec) -> Callable[[str], float | None]:
    """Returns a function that maps an operation's scope to the share of ticks, steady ones or others, in which its
    branch is taken."""
    arrays = schedule_table(spec.schedule).arrays
    is_steady = np.isin(np.arange(spec.schedule.ticks), spec.schedule.steady_ticks)
    has_work = {FORWARD: arrays["forward"][..., 0] >= 0, BACKWARD: arrays["backward"][..., 0] >= 0}
    has_work |= {scope: arrays[scope] >= 0 for scope in (LOSS, EMBED, EMBED_BACKWARD)}

    def share_of(op_name: str) -> float | None:
        scopes = op_name.split("/")
        ticks = is_steady if STEADY in scopes else ~is_steady
        return next((float(active[ticks].mean()) for scope, active in has_work.items() if scope in scopes), None)

    return share_of


def _axis_namer(spec: StepSpec) -> Callable[[Collective], str]:
    """Returns a function from a collective to the names of the mesh axes along which it runs."""
    sizes = {axis: size for axis, size in spec.placement.sizes.items() if size > 1}
    count = spec.placement.mesh.size
    coordinates = np.stack(np.unravel_index(np.arange(count), list(sizes.values()) or [1]), axis=1)

    def name(collective: Collective) -> str:
        if collective.kind == HOST_COPY:
            return "-"
        # A collective runs along the axes in which the coordinates of a group's devices differ.
        groups = collective.groups
        differing = np.any(
            [np.any(coordinates[list(group)] != coordinates[group[0]], axis=0) for group in groups], axis=0
        )
        axes = [axis for axis, differs in zip(sizes, differing, strict=False) if differs]
        # The collective has the name of these axes only if each group has all devices along them.
        together = math.prod(sizes[axis] for axis in axes)
        is_complete = len(groups) * together == count and all(len(group) == together for group in groups)
        return "×".join(axes) if is_complete or collective.kind == "collective-permute" else "other groups"

    return name
