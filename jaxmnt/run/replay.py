"""Replays steps of a run from a checkpoint without changing the run, and compares them with the recorded steps."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from jaxmnt.checkpoint.commit import open_checkpoint
from jaxmnt.checkpoint.manifest import DamagedError
from jaxmnt.checkpoint.names import arrays_by_name
from jaxmnt.checkpoint.refs import CHECKPOINTS, locate
from jaxmnt.checkpoint.restore import mismatched_arrays, restore
from jaxmnt.config.describe import changes
from jaxmnt.distributed.coordination import broadcast
from jaxmnt.errors import ConfigError, ExitCode, listed
from jaxmnt.run.adapters import complete_with_base
from jaxmnt.run.branch import branch_points
from jaxmnt.run.changes import inherit_choices
from jaxmnt.run.compile_cache import use_compile_cache
from jaxmnt.run.compiling import compile_steps
from jaxmnt.run.input import begin_feed, plan_rows, read_data
from jaxmnt.run.rundir import checkpoint_root
from jaxmnt.run.starting_state import state_to_restore, with_missing_parts
from jaxmnt.run.values import RunProcess
from jaxmnt.strict_json import finite, json_text
from jaxmnt.telemetry.events import METRICS, records
from jaxmnt.telemetry.progress import StatusLine
from jaxmnt.training.spec import ControlFlags
from jaxmnt.training.state import saved_state

_COMPARED_METRICS = ("loss", "grad_norm", "tokens")


def replay(process: RunProcess, first: int, last: int) -> int:
    """Repeats the steps after the checkpoint of step `first` up to step `last`, and writes nothing.

    Returns 0 if the loss, gradient norm and tokens of each step equal those in metrics.jsonl, and the state equals the
    checkpoint of step `last` if there is one; otherwise returns 1. Steps without a line in metrics.jsonl are not
    compared. Raises `ConfigError` for a config with other maths, and for steps that the run has not taken.
    """
    run = read_data(process)
    training_data = plan_rows(run, write_index=False)
    path = locate(f"{checkpoint_root(run.config)}@{first}", "--replay")
    assert path is not None
    expected = _recorded_steps(run, first, last)
    try:
        checkpoint = open_checkpoint(path)
    except DamagedError as damage:
        raise ConfigError(
            f"--replay: checkpoint {path} is not valid: {damage}; begin at another checkpoint"
        ) from damage
    # Only changes without effect on the numbers are allowed.
    earlier_config = checkpoint.config
    run = replace(run, config=inherit_choices(run.config, earlier_config))
    config_changes = changes(earlier_config, run.config)
    other_maths = [change.key for change in config_changes if change.resume != "harmless"]
    if other_maths:
        raise ConfigError(f"--replay: {other_maths[0]} has changed since these steps were taken; undo the change")
    # Compile and restore as the run did.
    training_data.branch_at(branch_points(checkpoint.manifest.lineage))
    use_compile_cache(run.config.run.compile_cache, run.directory)
    program = compile_steps(run)
    state = restore(checkpoint, state_to_restore(program, checkpoint), run.identity).state
    if run.config.lora is not None:
        state = state | {"params": complete_with_base(program, checkpoint, state["params"], run.identity).params}
    state = with_missing_parts(program, program.from_canonical(state))
    feed = begin_feed(run, training_data, program, first)
    control = ControlFlags(program.control_sharding)
    all_equal = True
    tokens = checkpoint.manifest.tokens
    for step in range(first + 1, last + 1):
        batch, _ = feed.take()
        state, metrics = program.step(state, batch | {"control": control.array()})
        actual = {name: jax.device_get(metrics[name]).item() for name in _COMPARED_METRICS}
        # metrics.jsonl counts tokens since the start of the run, but a step's metrics count only its own targets.
        targets = actual["tokens"]
        tokens += targets
        all_equal &= _compare_step(
            run.status, step, actual | {"tokens": tokens, "targets": targets}, expected.get(step)
        )
    all_equal &= _compare_state(run, last, lambda: program.to_canonical(saved_state(program.spec, state)))
    if not all_equal:
        changed_keys = ", ".join(change.key for change in config_changes)
        hint = f"; these settings have changed since: {changed_keys}" if config_changes else ""
        run.status.line(
            "The last digits may also differ on another mesh, with other devices, versions or memory settings, or "
            f"after a change of the config (see config.yaml and the events){hint}. If none of these applies, a "
            "device computes wrong results."
        )
    return ExitCode.FINISHED if all_equal else ExitCode.FAILURE


def _recorded_steps(run: RunProcess, first: int, last: int) -> dict[int, dict[str, Any]]:
    """Returns the lines of metrics.jsonl about the steps after `first` up to `last`, by step, equal in all processes.

    Raises `ConfigError` if the run has not taken the last of these steps.
    """
    path = run.directory / METRICS
    message = None
    if run.identity.process_id == 0:
        newest, lines = 0, {}
        for line in records(path):
            if line["kind"] == "train":
                newest = max(newest, line["step"])
                if first < line["step"] <= last:
                    lines[line["step"]] = {name: line[name] for name in _COMPARED_METRICS}
        message = json_text([newest, lines])
    newest, lines = json.loads(broadcast("what steps were", message, run.identity))
    if last > newest:
        reason = f"step {newest} is the last in {path}" if newest else f"there are no steps in {path}"
        hint = f"give {first}:TO with TO at most {newest}" if newest > first else "name an earlier checkpoint"
        raise ConfigError(f"--replay: {first}:{last} ends after what the run has recorded: {reason}; {hint}")
    return {int(step): line for step, line in lines.items()}


def _compare_step(status: StatusLine, step: int, actual: dict[str, float], expected: dict[str, Any] | None) -> bool:
    """Compares a step with its line in metrics.jsonl and prints the result. Returns False if they differ."""
    step_text = f"step {step}  loss {actual['loss']:.6f}" if actual["targets"] else f"step {step}  no targets"
    if expected is None:
        status.line(f"{step_text}: not compared, because metrics.jsonl lacks this step")
        return True
    # In metrics.jsonl the values of a step that is bad or has no targets are null.
    as_written = finite(actual)
    wrong_names = [name for name in _COMPARED_METRICS if as_written[name] != expected[name]]
    differences = ", ".join(f"{name} was {expected[name]} and is {as_written[name]}" for name in wrong_names)
    status.line(f"{step_text}: {'DIFFERENT, ' + differences if wrong_names else 'the same'}")
    return not wrong_names


def _compare_state(run: RunProcess, last: int, get_state: Callable[[], Any]) -> bool:
    """Compares the state with the checkpoint of step `last`, if there is one. Returns False if they differ."""
    path = checkpoint_root(run.config) / CHECKPOINTS / str(last)
    try:
        manifest = open_checkpoint(path).manifest
    except (DamagedError, OSError):
        run.status.line(f"There is no valid checkpoint of step {last} to compare the state with.")
        return True
    mismatched = mismatched_arrays(f"replay to {last}", manifest, arrays_by_name(get_state()), run.identity)
    result = f"DIFFERENT in {listed(mismatched, 3)}" if mismatched else "the same, bit for bit"
    run.status.line(f"state of step {last}: {result}")
    return not mismatched
