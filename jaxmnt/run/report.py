"""Prints the status lines about a run at its start."""

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import jax

from jaxmnt.config.data import Data
from jaxmnt.config.describe import RESUME_LABELS
from jaxmnt.data.batches import RowReader, WithoutTargets
from jaxmnt.data.grain_source import GrainData
from jaxmnt.data.rows import Packed
from jaxmnt.data.sources import Part
from jaxmnt.distributed.gpu_settings import SHOWN_VARIABLES
from jaxmnt.distributed.malloc import missing_huge_pages
from jaxmnt.distributed.process_group import software
from jaxmnt.errors import counted
from jaxmnt.plan.estimate import expected_step
from jaxmnt.plan.report import notes
from jaxmnt.run.changes import rate_change, steps_make_jump
from jaxmnt.run.values import OpenedRun
from jaxmnt.telemetry.progress import StatusLine
from jaxmnt.training.compile import Program
from jaxmnt.training.noise import small_batches
from jaxmnt.training.spec import StepSpec
from jaxmnt.training.trained import select_trained
from jaxmnt.units import count, size

_LIBRARIES = ("flax", "optax", "orbax-checkpoint", "grain", "numpy", "tensorstore")
_BYTES_PER_TOKEN = 20
"""Size of a token in a batch: five fields of four bytes each."""
_MIN_EVALUATION_ROWS = 32
"""If an evaluation reads fewer rows, a note says that the loss is noisy."""
_MIN_NOTED_FRACTION = 0.005
"""Minimum fraction of batches without a target that a note mentions."""


def print_run(run: OpenedRun) -> None:
    """Prints where the run is, where it starts from, and what has changed since the last start."""
    start, status = run.start, run.status
    processes = f"{run.identity.processes} process{'es' if run.identity.processes > 1 else ''}"
    beginning = "from the start"
    if start.checkpoint is not None:
        path = start.checkpoint.path
        beginning = {
            "own": f"resuming after step {start.step}",
            "fork": f"a branch of {path} after step {start.step}",
            "init": f"from the start, with the parameters of {path}",
        }[start.kind]
    elif start.weights is not None:
        beginning = f"from the start, with the weights of {start.weights}"
    status.line(f"run     {run.directory}: {beginning}, {processes}")
    for remark in start.remarks:
        status.line(f"note    {remark}")
    for change in start.changes:
        meaning = RESUME_LABELS[change.resume]
        if start.kind == "fork" and change.resume == "breaks":
            meaning = "allowed in a branch"
        elif run.finished and change.resume == "maths":
            meaning = "without effect: the run is finished"
        status.line(f"changed {change.key}: {change.values} ({meaning})")


def print_data(run: OpenedRun) -> None:
    """Prints what the run reads from each data source. Process 0 also counts the rows without a target."""
    settings, training, status = run.config.data, run.training_data, run.status
    without_targets = training.without_targets() if run.writes else {}
    for name, part in run.data.parts.items():
        label = "" if len(run.data.parts) == 1 else f"{name}: "
        status.line(
            f"data    {label}{part.path}: {count(part.tokens('train'))} tokens, {count(part.tokens('eval'))} held "
            f"out ({part.tokenizer['name']}, {part.vocab_size} ids); {_describe_baselines(part)}"
        )
        rows = training.readers[name].rows
        labels = {"windows": "windows", "packed": "packed rows"}
        kind = "rows" if isinstance(part, GrainData) and part.holds_rows else labels[settings.rows]
        status.line(
            f"rows    {label}{count(rows)} {kind} of {settings.sequence_length} tokens, "
            f"fill {training.readers[name].fill:.3f}{_describe_without_targets(without_targets.get(name))}"
            f"{_describe_long_documents(training.readers[name], settings)}"
        )
    _print_evaluation(run)
    empty_fraction = training.empty_batches(without_targets)
    if empty_fraction >= _MIN_NOTED_FRACTION:
        status.line(
            f"note    about {empty_fraction:.0%} of the batches have no target, so their steps will change "
            "nothing; set data.rows=packed, a longer data.sequence_length or a larger data.global_batch_size"
        )


def _describe_long_documents(reader: RowReader, settings: Data) -> str:
    """Describes how many documents are longer than a packed row, and what happens to them; empty if none is."""
    if not isinstance(reader, Packed) or not reader.long_documents:
        return ""
    documents = counted(reader.long_documents, "document is", "documents are")
    treatment = "cut" if settings.long_documents == "cut" else "skipped"
    return f"; {documents} longer than a row and {treatment} (data.long_documents)"


def _describe_baselines(part: Part) -> str:
    """Describes the loss of a uniform guess and of a guess by token frequencies; also per byte if the bytes are
    known."""
    split = "eval" if part.unigram_nats("eval") else "train"
    frequencies, bytes_per_target = part.unigram_nats(split), part.bytes_per_target(split)
    losses = {"uniform": math.log(part.vocab_size)} | ({} if frequencies is None else {"unigram": frequencies})
    per_byte = lambda nats: f" ({nats / bytes_per_target / math.log(2):.3f})" if bytes_per_target else ""
    unit = "nats per token" + (" (bits per byte)" if bytes_per_target else "")
    return f"baseline loss in {unit}: " + ", ".join(
        f"{name} {nats:.3f}{per_byte(nats)}" for name, nats in losses.items()
    )


def _print_evaluation(run: OpenedRun) -> None:
    """Prints how much of the held-out data an evaluation reads, and when evaluations take place."""
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
            f"note    checkpoint.keep_best compares only steps that are both evaluated and saved, every "
            f"{math.lcm(every, saves.every_steps)} steps; make train.eval_every a multiple of checkpoint.every_steps"
        )
    if limit is None or limit >= held_out:
        return
    rows = limit // run.config.data.sequence_length
    if rows < _MIN_EVALUATION_ROWS:
        run.status.line(
            f"note    an evaluation reads only {counted(rows, 'row', 'rows')} of held-out tokens, so its loss is "
            "noisy; set train.eval_tokens=null to evaluate on all of them"
        )


def _describe_without_targets(without_targets: WithoutTargets | None) -> str:
    """Describes the fraction of rows without targets.

    Empty for a source that does not mark which tokens are targets.
    """
    if without_targets is None:
        return ""
    sample = f" of {without_targets.rows_read:,} that were read" if without_targets.is_sample else ""
    return f", {without_targets.share:.1%}{sample} without targets"


def input_memory(run: OpenedRun, rows: int) -> dict[str, int]:
    """Prints and returns how many bytes of host memory a process needs for its input if it reads `rows` rows per
    step."""
    settings, index_bytes = run.config.data, run.training_data.index_bytes
    bytes_per_batch = rows * settings.sequence_length * _BYTES_PER_TOKEN
    # The prefetched batches, one batch that each thread is reading, and the batch that is staged on the devices.
    batches = (settings.prefetch if settings.read_threads else 0) + max(1, settings.read_threads) + 1
    batch_bytes = batches * bytes_per_batch
    run.status.line(f"host    input takes {size(index_bytes)} of indices, up to {size(batch_bytes)} of batches")
    return {"index_bytes": index_bytes, "batch_bytes": batch_bytes}


def print_finished(run: OpenedRun) -> None:
    """Prints that the run is finished, how to train for longer, and how that affects the learning rate."""
    config, checkpoint = run.config, run.start.checkpoint
    steps = 2 * config.train.steps
    run.status.line(f"This run is finished: step {run.start.step} of {config.train.steps}.")
    assert checkpoint is not None
    longer_config = config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})
    change = rate_change(checkpoint, longer_config)
    if change is None or not steps_make_jump(checkpoint, longer_config):
        run.status.line(f"longer  raise train.steps, for example train.steps={steps}")
        return
    run.status.line(
        f"longer  at the learning rate that the run has reached: train.steps={steps} optimizer.schedule=constant "
        f"optimizer.learning_rate={change.old_rate:.3g} --accept-changes"
    )
    run.status.line(
        f"longer  from the start, with a schedule of {steps} steps: train.steps={steps} and another run.dir"
    )


def environment(devices: Sequence[jax.Device]) -> dict[str, str]:
    """Returns software versions, the kind of the devices, and the environment variables that change XLA's programs."""
    packages = {name: version(name) for name in _LIBRARIES}
    python = {"Python": platform.python_version(), "system": platform.platform()}
    return software() | python | {"device kind": devices[0].device_kind} | packages | _xla_variables()


def _xla_variables() -> dict[str, str]:
    """Returns the environment variables that are set and change XLA's programs, with their values."""
    return {name: os.environ[name] for name in SHOWN_VARIABLES if os.environ.get(name)}


def print_program(status: StatusLine, program: Program, zero_lines: Sequence[str] = ()) -> None:
    """Prints the mesh, the model, the memory that a device needs and the compile time.

    `zero_lines` has lines that explain the choice of `mesh.zero`.
    """
    spec, memory = program.spec, program.memory
    device = program.placement.mesh.devices.flat[0]
    axes = [f"{axis} {axis_size}" for axis, axis_size in program.placement.sizes.items() if axis_size > 1]
    mesh = " × ".join(axes) or "one device"
    devices = program.placement.mesh.size
    precision = spec.dtype.name if spec.float8 is None else f"float8 and {spec.dtype.name}"
    status.line(f"mesh    {mesh}: {devices} {device.device_kind} device{'s' if devices > 1 else ''}")
    kernels = "".join(f"{kernel} {name}, " for name, kernel in spec.kernels.items())
    status.line(
        f"model   {_parameters(spec)}, {precision} compute, "
        f"{kernels}"
        f"{spec.num_microbatches} microbatch{'es' if spec.num_microbatches > 1 else ''} per step"
    )
    for line in zero_lines:
        status.line(line)
    for note in notes(spec):
        status.line(f"note    {note}")
    if device.platform != "cpu":
        status.line("environ " + " ".join(f"{name}={value}" for name, value in _xla_variables().items()))
    if device.platform == "cpu" and (variable := missing_huge_pages()):
        status.line(
            f"note    steps on a CPU are faster with huge pages; set {variable} in the environment of the command"
        )
    limit = f" of {size(memory.limit)}" if memory.limit else ""
    parameters = f"parameters {size(memory.params)}"
    if memory.base:
        parameters = f"base {size(memory.base)}, adapters {size(memory.params - memory.base)}"
    status.line(
        f"memory  per device: {parameters}, optimizer {size(memory.optimizer)}, temporary {size(memory.temporary)}, "
        f"peak {size(memory.peak)}{limit}"
    )
    status.line(f"compile {program.compile_seconds:.1f} s")


def _parameters(spec: StepSpec) -> str:
    """Describes the number of parameters, and how many of them train in a run with adapters."""
    total = spec.definition.parameter_count
    lora = spec.config.lora
    if lora is None:
        return f"{count(total)} parameters"
    trained = sum(leaf.size for leaf in jax.tree.leaves(select_trained(spec.definition.abstract, spec.trained_axes)))
    kinds = "adapters" if not lora.also_train else "adapters and lora.also_train"
    share = f"{count(trained)} ({trained / total:.1%})"
    return f"{count(total)} parameters, of which {share} train ({kinds} of rank {lora.rank})"


def program_summary(program: Program) -> dict[str, Any]:
    """Returns what the advice on a run needs: the memory of a step, the fraction of time for which pipeline stages are
    idle, and the expected time of a step if the rates of the devices are known."""
    spec = program.spec
    fields: dict[str, Any] = {"memory": asdict(program.memory), "microbatches": spec.num_microbatches}
    fields["idle_share"] = spec.schedule.idle_share() if spec.placement.stages > 1 else 0.0
    small = small_batches(spec)
    if small is not None:
        fields["rows"] = spec.config.data.global_batch_size
        fields["rows_of_small_batches"] = small.share * fields["rows"]
    expected = expected_step(spec)
    if expected is not None:
        fields["expected_step_seconds"] = expected.seconds
        fields["expected_exposed_seconds"] = {axis: link.exposed for axis, link in sorted(expected.links.items())}
    return fields
