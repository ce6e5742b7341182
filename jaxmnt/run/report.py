"""What a run says of itself at its start."""

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import jax

from jaxmnt.config.describe import RESUME_LABELS
from jaxmnt.data.batches import WithoutTargets
from jaxmnt.data.grain_source import GrainData
from jaxmnt.data.sources import Part
from jaxmnt.distributed.gpu_settings import SHOWN
from jaxmnt.distributed.malloc import missing_huge_pages
from jaxmnt.distributed.process_group import software
from jaxmnt.errors import counted
from jaxmnt.plan.budget import notes
from jaxmnt.plan.estimate import expected_step
from jaxmnt.run.changes import rate_change, steps_make_jump
from jaxmnt.run.values import OpenedRun
from jaxmnt.telemetry.progress import StatusLine
from jaxmnt.training.compile import Program
from jaxmnt.training.noise import small_batches
from jaxmnt.units import count, size

_LIBRARIES = ("flax", "optax", "orbax-checkpoint", "grain", "numpy", "tensorstore")
_BYTES_A_TOKEN = 20
"""Five fields of four bytes."""
_FEW_ROWS = 32
"""An evaluation on fewer rows has a noisy loss, which is said at the start."""
_TELLING_SHARE = 0.005
"""Of batches without a target, from which on that is said at the start."""


def run(run: OpenedRun) -> None:
    """Where the run is, and what is different from the last time."""
    start, status = run.start, run.status
    where = f"{run.identity.processes} process{'es' if run.identity.processes > 1 else ''}"
    begin = "from the start"
    if start.checkpoint is not None:
        source = start.checkpoint.path
        begin = {
            "own": f"resuming after step {start.step}",
            "fork": f"a branch of {source} after step {start.step}",
            "init": f"from the start, with the parameters of {source}",
        }[start.kind]
    elif start.weights is not None:
        begin = f"from the start, with the weights of {start.weights}"
    status.line(f"run     {run.directory}: {begin}, {where}")
    for remark in start.remarks:
        status.line(f"note    {remark}")
    for change in start.changes:
        meaning = RESUME_LABELS[change.resume]
        if start.kind == "fork" and change.resume == "breaks":
            meaning = "allowed in a branch"
        elif run.finished and change.resume == "maths":
            meaning = "without effect: the run is finished"
        status.line(f"changed {change.key}: {change.values} ({meaning})")


def data(run: OpenedRun) -> None:
    """What the run reads, source by source. Process 0 also looks how many rows have no target."""
    settings, training, status = run.config.data, run.training_data, run.status
    without = training.without_targets() if run.writes else {}
    for name, part in run.data.parts.items():
        label = "" if len(run.data.parts) == 1 else f"{name}: "
        status.line(
            f"data    {label}{part.path}: {count(part.tokens('train'))} tokens, {count(part.tokens('eval'))} held "
            f"out ({part.tokenizer['name']}, {part.vocab_size} ids); {_baselines(part)}"
        )
        rows = training.readers[name].rows
        kinds = {"windows": "windows", "packed": "packed rows"}
        kind = "rows" if isinstance(part, GrainData) and part.holds_rows else kinds[settings.rows]
        status.line(
            f"rows    {label}{count(rows)} {kind} of {settings.sequence_length} tokens, "
            f"fill {training.readers[name].fill:.3f}{_masked(without.get(name))}"
        )
    _evaluation(run)
    empty = training.empty_batches(without)
    if empty >= _TELLING_SHARE:
        status.line(
            f"note    about {empty:.0%} of the batches have no target, and their steps will change nothing: set "
            "data.rows: packed, a longer data.sequence_length or a larger data.global_batch_size"
        )


def _baselines(part: Part) -> str:
    """The losses of a uniform guess and of the tokens' frequencies; also per byte if the text's bytes are known."""
    split = "eval" if part.unigram_nats("eval") else "train"
    frequencies, bytes_per_target = part.unigram_nats(split), part.bytes_per_target(split)
    losses = {"uniform": math.log(part.vocab_size)} | ({} if frequencies is None else {"unigram": frequencies})
    per_byte = lambda nats: f" ({nats / bytes_per_target / math.log(2):.3f})" if bytes_per_target else ""
    unit = "nats per token" + (" (bits per byte)" if bytes_per_target else "")
    return f"baseline loss in {unit}: " + ", ".join(
        f"{name} {nats:.3f}{per_byte(nats)}" for name, nats in losses.items()
    )


def _evaluation(run: OpenedRun) -> None:
    """How much of what is held out an evaluation reads, and when."""
    held_out = run.data.tokens("eval")
    limit, every = run.config.eval_limit, run.config.train.eval_every
    if not held_out:
        return
    part = f"{count(limit)} of" if limit is not None and limit < held_out else "all"
    when = f"every {every} steps and at the end" if every else "at the end"
    run.status.line(f"eval    on {part} {count(held_out)} held-out tokens, {when} (train.eval_tokens)")
    saves = run.config.checkpoint
    if saves.keep_best and every and saves.every_steps and every % saves.every_steps:
        run.status.line(
            f"note    checkpoint.keep_best compares steps that are evaluated and saved, every "
            f"{math.lcm(every, saves.every_steps)} steps; make train.eval_every a multiple of checkpoint.every_steps"
        )
    if limit is None or limit >= held_out:
        return
    rows = limit // run.config.data.sequence_length
    if rows < _FEW_ROWS:
        run.status.line(
            f"note    {counted(rows, 'row', 'rows')} of held-out tokens tell small differences of the loss from chance "
            "only roughly; train.eval_tokens=null evaluates on all"
        )


def _masked(without: WithoutTargets | None) -> str:
    """What is said of a source that says which tokens are targets."""
    if without is None:
        return ""
    sampled = f" of {without.read:,} that were read" if without.is_sample else ""
    return f", {without.share:.1%}{sampled} without targets"


def input_memory(run: OpenedRun, rows: int) -> dict[str, int]:
    """Bytes of host memory that a process takes for its input, of which it reads `rows` rows a step."""
    settings, indices = run.config.data, run.training_data.index_bytes
    batch = rows * settings.sequence_length * _BYTES_A_TOKEN
    # Besides those read ahead: one in the making by each thread, and one staged.
    batches = (settings.prefetch if settings.read_threads else 0) + max(1, settings.read_threads) + 1
    run.status.line(f"host    input takes {size(indices)} of indices, up to {size(batches * batch)} of batches")
    return {"index_bytes": indices, "batch_bytes": batches * batch}


def already_finished(run: OpenedRun) -> None:
    """Also says how to train longer, and what the learning rate would do then."""
    config, checkpoint = run.config, run.start.checkpoint
    steps = 2 * config.train.steps
    run.status.line(f"This run is finished: step {run.start.step} of {config.train.steps}.")
    assert checkpoint is not None
    longer = config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})
    change = rate_change(checkpoint, longer)
    if change is None or not steps_make_jump(checkpoint, longer):
        run.status.line(f"longer  raise train.steps, for example train.steps={steps}")
        return
    run.status.line(
        f"longer  at the learning rate that it has reached: train.steps={steps} optimizer.schedule=constant "
        f"optimizer.learning_rate={change.before:.3g} --accept-changes"
    )
    run.status.line(f"longer  from the start, by a schedule of {steps} steps: train.steps={steps} and another run.dir")


def environment(devices: Sequence[jax.Device]) -> dict[str, str]:
    """What a run trains with: versions, the kind of its devices, and what changes XLA's programs."""
    packages = {name: version(name) for name in _LIBRARIES}
    python = {"Python": platform.python_version(), "system": platform.platform()}
    return software() | python | {"device kind": devices[0].device_kind} | packages | _flags()


def _flags() -> dict[str, str]:
    """Returns the variables that change XLA's programs, as far as they are set."""
    return {name: os.environ[name] for name in SHOWN if os.environ.get(name)}


def program(status: StatusLine, program: Program, zero_lines: Sequence[str] = ()) -> None:
    """The mesh, the model and the memory of a device. `zero_lines` tell of `mesh.zero`."""
    spec, memory = program.spec, program.memory
    device = program.placement.mesh.devices.flat[0]
    mesh = " × ".join(f"{axis} {n}" for axis, n in program.placement.sizes.items() if n > 1) or "one device"
    total = program.placement.mesh.size
    precision = spec.dtype.name if spec.float8 is None else f"float8 and {spec.dtype.name}"
    status.line(f"mesh    {mesh}: {total} {device.device_kind} device{'s' if total > 1 else ''}")
    status.line(
        f"model   {count(spec.definition.parameter_count)} parameters, {precision} compute, "
        f"{spec.kernel} attention, "
        f"{spec.num_microbatches} microbatch{'es' if spec.num_microbatches > 1 else ''} per step"
    )
    for line in zero_lines:
        status.line(line)
    for note in notes(spec):
        status.line(f"note    {note}")
    if device.platform != "cpu":
        status.line("environ " + " ".join(f"{name}={value}" for name, value in _flags().items()))
    if device.platform == "cpu" and (variable := missing_huge_pages()):
        status.line(f"note    steps on a CPU are quicker with huge pages: set {variable} before the command")
    limit = f" of {size(memory.limit)}" if memory.limit else ""
    status.line(
        f"memory  per device: parameters {size(memory.params)}, optimizer {size(memory.optimizer)}, temporary "
        f"{size(memory.temporary)}, peak {size(memory.peak)}{limit}"
    )
    status.line(f"compile {program.compile_seconds:.1f} s")


def about(program: Program) -> dict[str, Any]:
    """What advice on a run is held against: the memory of a step, how long stages are idle, and what a step is expected
    to take on devices whose rates are known."""
    spec = program.spec
    told: dict[str, Any] = {"memory": asdict(program.memory), "microbatches": spec.num_microbatches}
    told["idle_share"] = spec.schedule.idle_share() if spec.placement.stages > 1 else 0.0
    small = small_batches(spec)
    if small is not None:
        told["rows"] = spec.config.data.global_batch_size
        told["rows_of_small_batches"] = small.share * told["rows"]
    expected = expected_step(spec)
    if expected is not None:
        told["expected_step_seconds"] = expected.seconds
        told["expected_exposed_seconds"] = {axis: link.exposed for axis, link in sorted(expected.links.items())}
    return told
