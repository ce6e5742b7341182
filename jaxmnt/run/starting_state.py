"""The state that a run begins with: restored, of another model's parameters, or new; and what saves and compares it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.manifest import DamagedError
from jaxmnt.checkpoint.restore import restore
from jaxmnt.data.run_tokenizer import tokenizer_of_data, write_to_run
from jaxmnt.distributed.malloc import return_free_memory
from jaxmnt.errors import ConfigError
from jaxmnt.huggingface import companions
from jaxmnt.huggingface.load import load_parameters
from jaxmnt.run.replicas import Replicas
from jaxmnt.run.resume import ResumePoint, fall_back
from jaxmnt.run.rundir import run_directories, write_config
from jaxmnt.run.saves import CheckpointManager
from jaxmnt.run.values import CompiledRun
from jaxmnt.training.compile import Program
from jaxmnt.training.state import model_state

REQUIRED_PARTS = ("params", "optimizer", "counters")
"""Every checkpoint has these parts of the state; others may have been added since it was written."""


@dataclass
class Progress:
    """How far a run is: all of it that a step changes."""

    step: int
    """Steps that are done."""
    state: Any
    loss: float | None = None
    """The held-out loss after the last step; None if that was not evaluated."""
    preempted: bool = False


@dataclass(frozen=True, kw_only=True)
class ReadyRun(CompiledRun):
    """A run that has its state, and what saves and compares it."""

    saves: CheckpointManager
    replicas: Replicas
    progress: Progress


def restore_run(compiled: CompiledRun) -> ReadyRun:
    """Restores the state to go on from, which can be an earlier one than `compiled.start` has."""
    limits, config = compiled.config.watchdog, compiled.config
    is_new = compiled.start.checkpoint is None and compiled.start.weights is None
    with compiled.watchdog.during("creating the state" if is_new else "restoring", limits.restore_seconds):
        start, state = starting_state(compiled)
    run = replace(compiled, start=start)
    run.clock.lap("restore")
    if run.writes:
        _note_what_it_is(run)
    saves = CheckpointManager(run)
    saves.check_room()
    replicas = Replicas(config.train.compare_replicas_every, run.hosts, run.events)
    with run.watchdog.during("compiling", limits.compile_seconds):
        saves.prepare(state)
        replicated = replicas.prepare(start.step, state)
    return_free_memory()
    if replicated is not None:
        run.status.line(f"note    {replicated:.0%} of the state is held by several devices, which are compared")
    run.clock.lap("compile")
    return ReadyRun(**vars(run), saves=saves, replicas=replicas, progress=Progress(start.step, state))


def starting_state(run: CompiledRun) -> tuple[ResumePoint, Any]:
    """The state to go on from, and where that is: before `run.start` if the checkpoint of that is damaged."""
    start, program = run.start, run.program
    while (checkpoint := start.checkpoint) is not None:
        wanted = wanted_of(program, checkpoint, parameters_only=start.kind == "init")
        try:
            restored = restore(
                checkpoint, wanted, run.identity, verify=run.config.checkpoint.verify, spread=_spreads(run)
            )
        except DamagedError as damage:
            run.events.write("checkpoint_damaged", step=checkpoint.step, why=str(damage))
            start = fall_back(start, damage, run.config, run.data, run.identity)
            for remark in start.remarks:
                run.status.line(f"WARNING {remark}")
            found = "from the start" if start.checkpoint is None else f"from step {start.step}"
            run.status.line(f"WARNING going on {found} instead")
            continue
        run.events.write(
            "restore",
            step=checkpoint.step,
            source=start.kind,
            bytes=restored.bytes,
            read_seconds=restored.read_seconds,
            verify_seconds=restored.verify_seconds,
        )
        return start, completed(program, program.from_canonical(restored.state))
    if start.weights is not None:
        return start, _begun_with_weights(run, start.weights)
    return start, program.init()


def _begun_with_weights(run: CompiledRun, path: Path) -> dict[str, Any]:
    """The state at the start of a run, with the parameters of a folder of Hugging Face."""
    program, abstract = run.program, run.program.canonical_abstract_state["params"]
    loaded = load_parameters(path, program.spec.definition, abstract, run.identity)
    run.events.write(
        "restore", step=0, source="hf", bytes=loaded.bytes, read_seconds=loaded.seconds, verify_seconds=0.0
    )
    return completed(program, program.from_canonical({"params": loaded.params}))


def wanted_of(program: Program, checkpoint: Committed, *, parameters_only: bool = False) -> dict[str, Any]:
    """The abstract state of what is taken from the checkpoint, by part."""
    abstract = program.canonical_abstract_state
    stored = {name.partition("/")[0] for name in checkpoint.manifest.arrays}
    if parameters_only:
        return {part: tree for part, tree in model_state(abstract).items() if part == "params" or part in stored}
    if missing := sorted(set(REQUIRED_PARTS) - stored):
        raise ConfigError(f"checkpoint {checkpoint.path} lacks {missing[0]}; it was not written by a training run")
    return {part: tree for part, tree in abstract.items() if part in stored}


def completed(program: Program, state: dict[str, Any]) -> dict[str, Any]:
    """The state with the parts that the checkpoint does not have, as at the start of a run."""
    missing = [part for part in program.abstract_state if part not in state]
    if not missing:
        return state
    fresh = program.init()
    return {part: state.get(part, fresh[part]) for part in program.abstract_state}


def _spreads(run: CompiledRun) -> bool:
    """Whether replicas share the reading. On CPU, and inside a host, the file cache is quicker than the exchange."""
    if run.config.checkpoint.read != "auto":
        return run.config.checkpoint.read == "spread"
    return not run.identity.alone and not run.program.placement.on_cpu


def _note_what_it_is(run: CompiledRun) -> None:
    """Writes down the config, its changes, and the tokenizer."""
    config, start, places = run.config, run.start, run_directories(run.config)
    write_config(run.directory, config)
    tokenizer = tokenizer_of_data(run.data.tokenizer, run.data.vocab_size, run.data.folder)
    for where in places:
        write_to_run(where, tokenizer)
    if start.kind != "own":
        source = config.run.init_from or config.run.fork_from
        files = companions.match_tokenizer(
            companions.read_source_files(start.weights, source, start.checkpoint), tokenizer
        )
        for where in places if files else []:
            companions.write_to_run(where, files)
    for change in start.changes:
        run.events.write("config_change", **change._asdict())
