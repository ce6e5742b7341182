"""Makes the state that a run begins with (restored, from another model's parameters, or new), and its saves."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.manifest import Base, DamagedError
from jaxmnt.checkpoint.refs import roots_of
from jaxmnt.checkpoint.restore import restore
from jaxmnt.data.run_tokenizer import (
    RunTokenizer,
    read_tokenizer,
    same_vocabulary,
    tokenizer_of_data,
    write_tokenizer,
)
from jaxmnt.distributed.malloc import return_free_memory
from jaxmnt.errors import ConfigError
from jaxmnt.huggingface import companions
from jaxmnt.huggingface.load import load_parameters
from jaxmnt.lora.base import source_of
from jaxmnt.run.adapters import AdaptedStart, begin_with_adapters, complete_with_base
from jaxmnt.run.replicas import Replicas
from jaxmnt.run.resume import ResumePoint, fall_back
from jaxmnt.run.rundir import run_directories, write_config
from jaxmnt.run.saves import CheckpointManager
from jaxmnt.run.values import CompiledRun
from jaxmnt.storage import StoragePath
from jaxmnt.training.compile import Program
from jaxmnt.training.state import model_state

REQUIRED_PARTS = ("params", "optimizer", "counters")
"""Parts of the state that every checkpoint has. Checkpoints of later versions may have more parts."""


@dataclass
class Progress:
    """The progress of a run: everything that a step changes."""

    step: int
    """Number of steps that the run has taken."""
    state: Any
    loss: float | None = None
    """Held-out loss after the last step; None if it was not evaluated."""
    preempted: bool = False
    """True if the run was asked to stop."""


@dataclass(frozen=True, kw_only=True)
class ReadyRun(CompiledRun):
    """A run with its state, its checkpoint manager and its comparison of replicas."""

    saves: CheckpointManager
    replicas: Replicas
    progress: Progress


def restore_run(compiled: CompiledRun) -> ReadyRun:
    """Restores or creates the state. If the checkpoint of `compiled.start` is damaged, restores an earlier one."""
    limits, config = compiled.config.watchdog, compiled.config
    is_new = compiled.start.checkpoint is None and compiled.start.weights is None
    with compiled.watchdog.during("creating the state" if is_new else "restoring", limits.restore_seconds):
        start, state, base = starting_state(compiled)
    run = replace(compiled, start=start)
    run.clock.lap("restore")
    if run.writes:
        _write_description(run)
    saves = CheckpointManager(run, base)
    saves.check_room()
    replicas = Replicas(config.train.compare_replicas_every, run.hosts, run.events)
    with run.watchdog.during("compiling", limits.compile_seconds):
        saves.prepare(state)
        replicated = replicas.prepare(start.step, state)
    return_free_memory()
    if replicated is not None:
        run.status.line(
            f"note    {replicated:.0%} of the state is held by several devices each, whose copies are compared"
        )
    run.clock.lap("compile")
    return ReadyRun(**vars(run), saves=saves, replicas=replicas, progress=Progress(start.step, state))


def starting_state(run: CompiledRun) -> tuple[ResumePoint, Any, Base | None]:
    """Returns the resume point, the state to begin with, and the description of its base in a run with adapters.

    If the checkpoint of `run.start` is damaged, the resume point is an earlier one.
    """
    start, program = run.start, run.program
    if start.kind == "init" and run.config.lora is not None:
        source = source_of(start.checkpoint, start.weights)
        begun = begin_with_adapters(program, source, run.identity, spread=_should_spread(run))
        _record_base(run, begun)
        return start, with_missing_parts(program, program.from_canonical({"params": begun.params})), begun.base
    while (checkpoint := start.checkpoint) is not None:
        abstract = state_to_restore(program, checkpoint, parameters_only=start.kind == "init")
        verify = run.config.checkpoint.verify
        try:
            restored = restore(checkpoint, abstract, run.identity, verify=verify, spread=_should_spread(run))
        except DamagedError as damage:
            # Every process gets this error and falls back to the same earlier checkpoint.
            run.events.write("checkpoint_damaged", step=checkpoint.step, why=str(damage))
            start = fall_back(start, damage, run.config, run.data, run.identity)
            for remark in start.remarks:
                run.status.line(f"WARNING {remark}")
            position = "from the start" if start.checkpoint is None else f"from step {start.step}"
            run.status.line(f"WARNING going on {position} instead")
            continue
        run.events.write(
            "restore",
            step=checkpoint.step,
            source=start.kind,
            bytes=restored.bytes,
            read_seconds=restored.read_seconds,
            verify_seconds=restored.verify_seconds,
        )
        state, base = restored.state, None
        if run.config.lora is not None:
            spread = _should_spread(run)
            completed = complete_with_base(program, checkpoint, state["params"], run.identity, spread=spread)
            _record_base(run, completed)
            state, base = state | {"params": completed.params}, completed.base
        return start, with_missing_parts(program, program.from_canonical(state)), base
    if start.weights is not None:
        return start, _state_with_weights(run, start.weights), None
    return start, program.init(), None


def _record_base(run: CompiledRun, adapted: AdaptedStart) -> None:
    """Writes an event about the base that has been read."""
    run.events.write("base", source=adapted.base.source, bytes=adapted.bytes, seconds=adapted.seconds)


def _state_with_weights(run: CompiledRun, path: Path) -> dict[str, Any]:
    """Returns a new state with the parameters of a Hugging Face folder."""
    program, abstract = run.program, run.program.canonical_abstract_state["params"]
    loaded = load_parameters(path, program.spec.definition, abstract, run.identity)
    run.events.write(
        "restore", step=0, source="hf", bytes=loaded.bytes, read_seconds=loaded.seconds, verify_seconds=0.0
    )
    return with_missing_parts(program, program.from_canonical({"params": loaded.params}))


def state_to_restore(program: Program, checkpoint: Committed, *, parameters_only: bool = False) -> dict[str, Any]:
    """Returns the abstract state to restore from the checkpoint, by part.

    With `parameters_only`, it has no optimizer state and no counters. Raises `ConfigError` if the checkpoint lacks a
    required part.
    """
    abstract = program.saved_abstract_state
    stored = {name.partition("/")[0] for name in checkpoint.manifest.arrays}
    if parameters_only:
        return {part: tree for part, tree in model_state(abstract).items() if part == "params" or part in stored}
    if missing := sorted(set(REQUIRED_PARTS) - stored):
        raise ConfigError(f"checkpoint {checkpoint.path} lacks {missing[0]}, so it was not written by a training run")
    return {part: tree for part, tree in abstract.items() if part in stored}


def with_missing_parts(program: Program, state: dict[str, Any]) -> dict[str, Any]:
    """Returns `state` with initial values for the parts that it lacks. An average begins with the parameters."""
    if "average" in program.abstract_state and "average" not in state:
        state = state | {"average": program.first_average(state["params"])}
    missing = [part for part in program.abstract_state if part not in state]
    if not missing:
        return state
    state = state | program.init(missing)
    return {part: state[part] for part in program.abstract_state}


def _should_spread(run: CompiledRun) -> bool:
    """Returns True if `checkpoint.read` says that each replica reads a share and gets the rest from the others.

    "auto" means that it does, except on CPUs and with a single process, where the file cache is faster than the
    exchange.
    """
    if run.config.checkpoint.read != "auto":
        return run.config.checkpoint.read == "spread"
    return not run.identity.alone and not run.program.placement.on_cpu


def _tokenizer_of(run: CompiledRun) -> RunTokenizer:
    """Returns the run's tokenizer. If its data has no conversations, the chat template is the one that the run has
    already, or that of the run whose weights it begins with."""
    data, start = run.data, run.start
    tokenizer = tokenizer_of_data(data.tokenizer, data.vocab_size, data.folder, data.chat)
    if tokenizer.chat is not None:
        return tokenizer
    source = run.config.run.fork_from or run.config.run.init_from
    if start.kind != "own" and source is not None and start.checkpoint is not None:
        stored = next(filter(None, map(read_tokenizer, roots_of(source, start.checkpoint))), None)
    else:
        stored = next(filter(None, map(_readable_tokenizer, run_directories(run.config))), None)
    if stored is None or stored.chat is None or not same_vocabulary(stored, tokenizer):
        return tokenizer
    return replace(tokenizer, chat=stored.chat)


def _readable_tokenizer(root: StoragePath) -> RunTokenizer | None:
    """Returns the tokenizer that a run's directory contains; None if there is none, or if it is damaged, because the
    start then writes it again."""
    try:
        return read_tokenizer(root)
    except ConfigError:
        return None


def _write_description(run: CompiledRun) -> None:
    """Writes the config, the tokenizer and a source model's other files into the run's directories.

    Also writes an event for each change of the config.
    """
    config, start, directories = run.config, run.start, run_directories(run.config)
    write_config(run.directory, config)
    tokenizer = _tokenizer_of(run)
    for directory in directories:
        write_tokenizer(directory, tokenizer)
    if start.kind != "own":
        source = config.run.fork_from or config.run.init_from
        files = companions.match_tokenizer(
            companions.read_source_files(start.weights, source, start.checkpoint), tokenizer
        )
        for directory in directories if files else []:
            companions.write_run_files(directory, files)
    for change in start.changes:
        run.events.write("config_change", **change._asdict())
