"""Steps of a run taken again from a checkpoint, beside it, and compared with what they were."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxmnt.checkpoint.commit import open_checkpoint
from jaxmnt.checkpoint.manifest import DamagedError
from jaxmnt.checkpoint.names import named
from jaxmnt.checkpoint.refs import FOLDER, locate
from jaxmnt.checkpoint.restore import differing, restore
from jaxmnt.config.describe import changes
from jaxmnt.config.load import parse_config
from jaxmnt.config.schema import Config
from jaxmnt.data.batches import TrainingData
from jaxmnt.data.feed import ControlFlags
from jaxmnt.data.sources import fit_to_data
from jaxmnt.distributed.coordination import broadcast
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.process_group import host_names
from jaxmnt.errors import ConfigError, ExitCode
from jaxmnt.run import report
from jaxmnt.run.compile_cache import use_compile_cache
from jaxmnt.run.inputs import ready_data, training_feed
from jaxmnt.run.resume import completed, wanted_of
from jaxmnt.run.rundir import home
from jaxmnt.telemetry.events import records
from jaxmnt.telemetry.progress import StatusLine
from jaxmnt.training.compile import compile_program

_COMPARED = ("loss", "grad_norm", "tokens")


def replay(
    config: Config,
    identity: Identity,
    first: int,
    last: int,
    status: StatusLine,
    devices: Sequence[jax.Device] | None = None,
) -> int:
    """Takes the steps after the checkpoint of step `first` up to `last`, and writes nothing.

    Returns 0 if loss, gradient norm and tokens of each are those in metrics.jsonl, and the state that of the checkpoint
    of step `last` if there is one; else 1. Steps whose line is lost are not compared. Raises `ConfigError` for a config
    that cannot lead to the same, and for steps that the run has not taken.
    """
    data = ready_data(config, identity, status)
    config = fit_to_data(config, data)
    run_dir = Path(config.run.dir or "")
    path = locate(f"{home(config)}@{first}", "--replay")
    assert path is not None
    expected = _steps_of(run_dir, first, last, identity)
    try:
        checkpoint = open_checkpoint(path)
    except DamagedError as damage:
        raise ConfigError(f"--replay: checkpoint {path} is not whole: {damage}; begin at another") from damage
    before = parse_config(checkpoint.manifest.config, f"the config in {path}")
    different = changes(before, config)
    other_maths = [change.key for change in different if change.resume != "harmless"]
    if other_maths:
        raise ConfigError(f"--replay: {other_maths[0]} is not what it was when these steps were taken; undo the change")
    use_compile_cache(config.run.compile_cache, run_dir)
    names = host_names(identity)
    program = compile_program(config, data.vocab_size, devices, lambda device: names[device.process_index])
    report.program(status, program)
    restored = restore(checkpoint, wanted_of(program, checkpoint), identity, verify=True)
    state = completed(program, program.from_canonical(restored.state))
    feed = training_feed(config, TrainingData(config, data), program, first)
    control = ControlFlags(program.control_sharding)
    same, tokens = True, checkpoint.manifest.tokens
    for step in range(first + 1, last + 1):
        batch, _ = feed.take()
        state, metrics = program.step(state, batch | {"control": control.array()})
        found = {name: jax.device_get(metrics[name]).item() for name in ("loss", "grad_norm", "tokens")}
        tokens += found["tokens"]
        same &= _compare(status, step, found | {"tokens": tokens}, expected.get(step))
    same &= _compare_state(status, config, identity, last, program.to_canonical(state))
    if not same:
        changed = f"; changed since are {', '.join(change.key for change in different)}" if different else ""
        status.line(
            "Last digits also differ on another mesh, other devices or versions, with other memory settings, and where "
            f"the config was changed meanwhile (see config.yaml and the events){changed}. If nothing of this is so, a "
            "device computes wrongly."
        )
    return ExitCode.FINISHED if same else ExitCode.FAILURE


def _steps_of(run_dir: Path, first: int, last: int, identity: Identity) -> dict[int, dict[str, Any]]:
    """The lines of metrics.jsonl after step `first` up to `last`, by step, the same in all processes.

    Raises `ConfigError` if the last of these steps was not taken yet.
    """
    path, told = run_dir / "metrics.jsonl", None
    if identity.process_id == 0:
        newest, found = 0, {}
        for line in records(path):
            if line["kind"] == "train":
                newest = max(newest, line["step"])
                if first < line["step"] <= last:
                    found[line["step"]] = {name: line[name] for name in _COMPARED}
        told = json.dumps([newest, found])
    newest, found = json.loads(broadcast("what steps were", told, identity))
    if last > newest:
        there = f"step {newest} is the last in {path}" if newest else f"there are no steps in {path}"
        hint = f"give {first}:TO with TO up to {newest}" if newest > first else "name an earlier checkpoint"
        raise ConfigError(f"--replay: {first}:{last} ends after what the run has recorded: {there}; {hint}")
    return {int(step): line for step, line in found.items()}


def _compare(status: StatusLine, step: int, found: dict[str, float], expected: dict[str, Any] | None) -> bool:
    if expected is None:
        status.line(f"step {step}  loss {found['loss']:.6f}: not compared, metrics.jsonl lacks this step")
        return True
    finite = {name: value if math.isfinite(value) else None for name, value in found.items()}
    wrong = [name for name in _COMPARED if finite[name] != expected[name]]
    told = ", ".join(f"{name} was {expected[name]} and is {finite[name]}" for name in wrong)
    status.line(f"step {step}  loss {found['loss']:.6f}: {'DIFFERENT, ' + told if wrong else 'the same'}")
    return not wrong


def _compare_state(status: StatusLine, config: Config, identity: Identity, last: int, canonical: Any) -> bool:
    """With the checkpoint of the last step, if it is there. Whether it is the same, or not there."""
    path = home(config) / FOLDER / str(last)
    try:
        manifest = open_checkpoint(path).manifest
    except (DamagedError, OSError):
        status.line(f"There is no whole checkpoint of step {last} to compare the state with.")
        return True
    wrong = differing(f"replay to {last}", manifest, named(canonical), identity)
    listed = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
    status.line(f"state of step {last}: {f'DIFFERENT in {listed}' if wrong else 'the same, bit for bit'}")
    return not wrong
