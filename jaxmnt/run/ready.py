"""How a compiled run gets its state, and what saves and compares that."""

from dataclasses import dataclass, replace
from typing import Any

from jaxmnt.data.run_tokenizer import keep, of_data
from jaxmnt.distributed.malloc import return_free_memory
from jaxmnt.huggingface import companions
from jaxmnt.run.replicas import Replicas
from jaxmnt.run.rundir import run_directories, write_config
from jaxmnt.run.saves import CheckpointManager
from jaxmnt.run.starting_state import starting_state
from jaxmnt.run.values import CompiledRun


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
    with compiled.watchdog.during("restoring", limits.restore_seconds):
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


def _note_what_it_is(run: CompiledRun) -> None:
    """Writes down the config, its changes, and the tokenizer."""
    config, start, places = run.config, run.start, run_directories(run.config)
    write_config(run.directory, config)
    tokenizer = of_data(run.data.tokenizer, run.data.vocab_size, run.data.folder)
    for where in places:
        keep(where, tokenizer)
    if start.kind != "own":
        source = config.run.init_from or config.run.fork_from
        files = companions.fitting(companions.of_source(start.weights, source, start.checkpoint), tokenizer)
        for where in places if files else []:
            companions.keep(where, files)
    for change in start.changes:
        run.events.write("config_change", **change._asdict())
