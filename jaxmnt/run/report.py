"""What a run says of itself: at its start, of bad steps and rows passed over, at its end."""

import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import jax

from jaxmnt.checkpoint.refs import CHECKPOINTS
from jaxmnt.config.describe import MEANING
from jaxmnt.config.schema import Config
from jaxmnt.data.batches import TrainingData, WithoutTargets
from jaxmnt.data.grain_source import GrainData
from jaxmnt.data.sources import Sources
from jaxmnt.distributed.gpu_settings import SHOWN
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.malloc import missing_huge_pages
from jaxmnt.distributed.process_group import software
from jaxmnt.errors import UserError
from jaxmnt.plan.budget import notes
from jaxmnt.plan.shapes import expected_step
from jaxmnt.run.learning_rate import advice, rate_change, steps_make_jump
from jaxmnt.run.resume import ResumePoint
from jaxmnt.run.rundir import checkpoint_root
from jaxmnt.run.saves import CheckpointManager
from jaxmnt.run.spending import Spending
from jaxmnt.telemetry.events import METRICS, Events
from jaxmnt.telemetry.flops import CONVENTIONS, peak_flops, token_flops
from jaxmnt.telemetry.metrics import Finished, Rates, TrainLog
from jaxmnt.telemetry.phases import StepTimer
from jaxmnt.telemetry.progress import StatusLine, count, duration, size
from jaxmnt.training.compile import Program
from jaxmnt.training.noise import small_batches

_LIBRARIES = ("flax", "optax", "orbax-checkpoint", "grain", "numpy", "tensorstore")
_BYTES_A_TOKEN = 20
"""Five fields of four bytes."""
_TELLING_SHARE = 0.005
"""Of batches without a target, from which on that is said at the start."""


def run(status: StatusLine, start: ResumePoint, identity: Identity) -> None:
    """Where the run is, and what is different from the last time."""
    where = f"{identity.processes} process{'es' if identity.processes > 1 else ''}"
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
    status.line(f"run     {start.directory}: {begin}, {where}")
    for remark in start.remarks:
        status.line(f"note    {remark}")
    for change in start.changes:
        status.line(f"changed {change.key}: {change.before} → {change.now} ({MEANING[change.resume]})")


def data(status: StatusLine, config: Config, sources: Sources, training: TrainingData, *, writes: bool = True) -> None:
    """What the run reads, source by source. The process that `writes` also looks how many rows have no target."""
    settings = config.data
    without = training.without_targets() if writes else {}
    for name, part in sources.parts.items():
        label = "" if len(sources.parts) == 1 else f"{name}: "
        frequencies = part.unigram_nats("eval") or part.unigram_nats("train")
        known = "" if frequencies is None else f", unigram {frequencies:.3f}"
        status.line(
            f"data    {label}{part.path}: {count(part.tokens('train'))} tokens, {count(part.tokens('eval'))} held "
            f"out ({part.tokenizer['name']}, {part.vocab_size} ids); baseline loss in nats per token: uniform "
            f"{math.log(part.vocab_size):.3f}{known}"
        )
        rows = training.readers[name].rows
        kind = "rows" if isinstance(part, GrainData) and part.holds_rows else settings.rows
        status.line(
            f"rows    {label}{count(rows)} {kind} of {settings.sequence_length} tokens, "
            f"fill {training.fill()[name]:.3f}{_masked(without.get(name))}"
        )
    empty = training.empty_batches(without)
    if empty >= _TELLING_SHARE:
        status.line(
            f"note    about {empty:.0%} of the batches have no target, and their steps will change nothing: set "
            "data.rows: packed, a longer data.sequence_length or a larger data.global_batch_size"
        )


def _masked(without: WithoutTargets | None) -> str:
    """What is said of a source that says which tokens are targets."""
    if without is None:
        return ""
    sampled = f" of {without.read:,} that were read" if without.is_sample else ""
    return f", {without.share:.1%}{sampled} without targets"


def input_memory(status: StatusLine, config: Config, training: TrainingData, rows: int) -> dict[str, int]:
    """Bytes of host memory that a process takes for its input, of which it reads `rows` rows a step."""
    settings = config.data
    batch = rows * settings.sequence_length * _BYTES_A_TOKEN
    # Besides those read ahead: one in the making by each thread, and one staged.
    batches = (settings.prefetch if settings.read_threads else 0) + max(1, settings.read_threads) + 1
    status.line(
        f"host    input takes {size(training.index_bytes)} of indices, up to {size(batches * batch)} of batches"
    )
    return {"index_bytes": training.index_bytes, "batch_bytes": batches * batch}


def already_finished(status: StatusLine, config: Config, start: ResumePoint) -> None:
    """Also says how to train longer, and what the learning rate would do then."""
    steps, checkpoint = 2 * config.train.steps, start.checkpoint
    status.line(
        f"This run is finished: step {start.step} of {config.train.steps}. "
        f"To train longer, raise train.steps, for example train.steps={steps}."
    )
    assert checkpoint is not None
    longer = config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})
    change = rate_change(checkpoint, longer)
    if change is not None and steps_make_jump(checkpoint, longer):
        status.line(
            f"note    with train.steps={steps} {change}, which needs --accept-changes; {advice(checkpoint, change)}"
        )


def environment(devices: Sequence[jax.Device] | None) -> dict[str, str]:
    """What a run trains with: versions, the kind of its devices, and what changes XLA's programs."""
    packages = {name: version(name) for name in _LIBRARIES}
    flags = {name: os.environ[name] for name in SHOWN if os.environ.get(name)}
    kind = (devices or jax.devices())[0].device_kind
    python = {"Python": platform.python_version(), "system": platform.platform()}
    return software() | python | {"device kind": kind} | packages | flags


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
        status.line("environ " + " ".join(f"{name}={os.environ[name]}" for name in SHOWN if os.environ.get(name)))
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


def train_log(
    config: Config,
    program: Program,
    start: ResumePoint,
    training: TrainingData,
    status: StatusLine,
    timer: StepTimer,
    spending: Spending | None,
    *,
    attempt: int,
    writer: bool,
    finished: Finished,
    written: Callable[[dict[str, Any]], None],
) -> TrainLog:
    """The log of a run that goes on from `start`.

    `finished` is called with each step when it is finished.
    """
    return TrainLog(
        start.directory,
        writer=writer,
        status=status,
        steps=config.train.steps,
        tokens=start.tokens,
        rates=rates(program),
        epochs=training.order.epochs,
        timer=timer,
        attempt=attempt,
        log_every=config.train.log_every,
        cost=None if spending is None else spending.outlook,
        finished=finished,
        written=written,
    )


def rates(program: Program) -> Rates:
    """What the rates of a program's steps are measured by, in the convention of `telemetry.flops`."""
    spec, mesh = program.spec, program.placement.mesh
    config, data = spec.config, spec.config.data
    flops = token_flops(spec.definition, data.sequence_length)
    again = flops.recomputed(config.train.remat)
    peak = peak_flops(mesh.devices.flat[0].device_kind, spec.dtype)
    return Rates(
        flops_per_token=CONVENTIONS[config.telemetry.flops](flops),
        hardware_flops_per_token=None if again is None else CONVENTIONS["causal"](flops) + again,
        peak_flops=None if peak is None else peak * mesh.size,
        padded_tokens=data.global_batch_size * data.sequence_length,
    )


def end(
    status: StatusLine,
    config: Config,
    start: ResumePoint,
    log: TrainLog,
    saves: CheckpointManager,
    step: int,
    seconds: float,
) -> None:
    """Where everything is, and what to do next."""
    directory = start.directory
    done = "finished" if step == config.train.steps else f"stopped after step {step} of {config.train.steps}"
    status.line(f"{done} in {duration(seconds)}, {count(log.tokens)} tokens in all")
    status.line(
        f"metrics {directory}/metrics.jsonl, config {directory}/config.yaml, "
        f"checkpoints {checkpoint_root(config) / CHECKPOINTS}"
    )
    saved = f"{saves.count} checkpoint{'' if saves.count == 1 else 's'}"
    status.line(f"saved   {saved}, for which training waited {saves.blocked_seconds:.1f} s")
    if log.without_targets:
        steps = f"{log.without_targets} step{'' if log.without_targets == 1 else 's'}"
        status.line(f"note    {steps} of this start had no targets and changed nothing")
    if step == config.train.stop_after and step < config.train.steps:
        status.line("to go on, raise train.stop_after or leave it out")
    elif step < config.train.steps:
        status.line(f"run the same command again{' without --fresh' if start.fresh else ''} to go on")


class BadStepMonitor:
    """Sees the metrics of every finished step, in all processes; one of them, the writer, reports."""

    def __init__(self, config: Config, data: TrainingData, events: Events, status: StatusLine, *, writer: bool):
        self._most = config.train.max_bad_steps
        self._rows = config.data.global_batch_size
        self._order = data.order
        self._events, self._status, self._writer = events, status, writer
        self._good: tuple[int, float] | None = None
        """The last good step and its loss."""
        self._between: set[int] = set()
        """Steps without targets among the bad steps in a row, which they neither add to nor end."""
        self._told_of_targets = False

    def see(self, step: int, values: dict[str, Any]) -> None:
        """Raises `UserError`, in all processes after the same step, after too many bad steps in a row."""
        if self._writer:
            self._note_passed_over(step)
        in_a_row = values["bad_in_a_row"]
        if not values["tokens"]:
            self._between |= {step} if in_a_row else set()
            self._note_no_targets(step)
            return
        if not in_a_row:
            self._good, self._between = (step, values["loss"]), set()
            return
        first, last = self._range(step, step)
        bad = "the loss" if not math.isfinite(values["loss"]) else "the gradient"
        if self._writer:
            self._events.write("bad_step", step=step, rows=[first, last], bad=bad, in_a_row=in_a_row)
            self._status.line(
                f"WARNING step {step}: {bad} is not finite (rows {first} to {last}); the model is left unchanged"
            )
        if in_a_row > self._most:
            raise UserError(self._diagnosis(step, in_a_row, bad))

    def _note_no_targets(self, step: int) -> None:
        """Says it of the first such step of this start: there may be many."""
        if self._writer and not self._told_of_targets:
            first, last = self._range(step, step)
            self._status.line(
                f"note    step {step}: its rows ({first} to {last}) have no targets, so it changes nothing; the loss "
                f"of such steps is null in {METRICS}"
            )
        self._told_of_targets = True

    def _note_passed_over(self, step: int) -> None:
        """Says when rows of `data.skip` have been passed over."""
        before = self._order.passed_over(step - 2) if step > 1 else 0
        passed = self._order.passed_over(step - 1) - before
        if passed:
            first, last = self._range(step, step)
            self._events.write("rows_skipped", step=step, count=passed, rows=[first, last])
            self._status.line(f"note    rows skipped in step {step}: {passed}")

    def _range(self, first_step: int, last_step: int) -> tuple[int, int]:
        """The numbers of the first and the last row of the batches of these steps."""
        first = self._order.numbers(first_step - 1, [0])
        return int(first[0]), int(self._order.numbers(last_step - 1, [self._rows - 1])[0])

    def _first_bad_step(self, step: int, in_a_row: int) -> int:
        """Returns the first of the bad steps in a row that end with `step`."""
        first = step
        while in_a_row > 1:
            first -= 1
            in_a_row -= first not in self._between
        return first

    def _diagnosis(self, step: int, in_a_row: int, bad: str) -> str:
        since = self._first_bad_step(step, in_a_row)
        first, last = self._range(since, step)
        good = "none was good since this start"
        if self._good is not None:
            good = f"the last good step was {self._good[0]}, its loss {self._good[1]:.4f}"
        return (
            f"{in_a_row} steps in a row, up to step {step}: {bad} was infinite or NaN ({good}; the rows of these "
            f"steps are {first} to {last}); if these rows are the cause, add {{from_row: {first}, rows: "
            f"{last + 1 - first}}} to data.skip; if there is a checkpoint of step {since} or later, "
            "also set another run.dir and run.fork_from to continue from an earlier one; if these rows are not "
            "the cause, lower optimizer.learning_rate and continue from an earlier checkpoint"
        )
