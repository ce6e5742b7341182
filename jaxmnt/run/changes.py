"""What it means for a run that has trained that its config has changed, or that something cannot be read."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from jaxmnt.checkpoint.commit import Committed, step_directories
from jaxmnt.checkpoint.refs import CHECKPOINTS
from jaxmnt.config.describe import PLANNED, Change, maths
from jaxmnt.config.load import as_typed
from jaxmnt.config.schema import Config
from jaxmnt.data.batches import skipped_ranges
from jaxmnt.data.order import Skipped
from jaxmnt.data.sources import Sources, open_sources
from jaxmnt.errors import ConfigError, UnreadableError, UserError, remark
from jaxmnt.run.branch import config_of, order_at
from jaxmnt.run.learning_rate import RATE_KEYS, advice, rate_change, steps_make_jump
from jaxmnt.storage import StoragePath, publish, read, storage_path
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.events import event_file, records


def has_trained(config: Config) -> bool:
    """Whether the run has a checkpoint, or an event that tells of a step, as far as these can be read."""
    directory = Path(config.run.dir or "")
    for where in [directory, *([storage_path(config.checkpoint.dir)] if config.checkpoint.dir else [])]:
        with suppress(OSError):
            if step_directories(where / CHECKPOINTS):
                return True
    with suppress(OSError):
        return any(event["kind"] == "started" for event in records(event_file(directory, 0)))
    return False


@contextmanager
def unreadable_is_retryable(config: Config) -> Iterator[None]:
    """Inside, what cannot be read ends a run that has trained with exit code 1, which is tried again, instead of 2."""
    try:
        yield
    except ConfigError as error:
        unreadable = isinstance(error, UnreadableError) or isinstance(error.__cause__, OSError)
        if not unreadable or not has_trained(config):
            raise
        text = f"{error} (this run has read it before; once it is available again, start the run again)"
        raise UserError(text).blaming(hosts=error.hosts, processes=error.processes) from error


ACCEPTED = "accepted.json"
"""In a run's directory: the values of keys of the maths that somebody has accepted, beside the id of the run."""


def with_choices_of(config: Config, before: Config) -> Config:
    """Returns the config with what `auto` came to in the run whose config was `before`, for the keys of `CHOSEN`."""
    mesh = config.mesh
    if mesh.zero != "auto" or (mesh.prefetch and before.mesh.zero != 3):
        return config
    return config.model_copy(update={"mesh": mesh.model_copy(update={"zero": before.mesh.zero})})


def refusal(config: Config, data: Sources, checkpoint: Committed, different: list[Change]) -> str | None:
    """Why this config cannot go on with this run directory whatever a person says, or None."""
    breaking = [change for change in different if change.resume == "breaks"]
    if breaking:
        branch = as_typed("run.fork_from", f"{config.run.dir}@{checkpoint.step}")
        return (
            f"run.dir: {config.run.dir} has a checkpoint of step {checkpoint.step} that cannot be continued with a "
            f"changed {_listed(breaking)}; undo the change, or choose another run.dir (with "
            f"{branch}, where only seed or data settings changed)"
        )
    if words := data_refusal(config, data, checkpoint):
        return words
    if words := skip_refusal(config, checkpoint):
        return words
    if checkpoint.step < config.train.steps and (words := stop_refusal(config, checkpoint, str(config.run.dir))):
        return words
    if checkpoint.step > config.train.steps:
        return (
            f"train.steps: {config.train.steps} is below step {checkpoint.step}, which {config.run.dir} has "
            "already reached; raise it or choose another run.dir"
        )
    return None


def data_refusal(config: Config, data: Sources, checkpoint: Committed) -> str | None:
    """Why a run cannot go on from this checkpoint with this data, or None."""
    different = different_data(checkpoint.manifest.data, data.digests)
    if not different:
        return None
    branch = as_typed("run.fork_from", f"{config.run.dir}@{checkpoint.step}")
    return (
        f"data: {config.run.dir} has a checkpoint of step {checkpoint.step} that cannot be continued with "
        f"other data: {different}; give the same data, or choose another run.dir, with "
        f"{branch} to continue from this checkpoint"
    )


def to_be_accepted(
    config: Config, checkpoint: Committed, different: list[Change], accepted: dict[str, Any]
) -> list[Change]:
    """What alters the maths of a run under way and is not `accepted`, by key, at an earlier start.

    What is planned passes, see `PLANNED`, unless it lets the learning rate jump. So does everything once the run has
    finished, since nothing comes of it.
    """
    if checkpoint.step >= config.train.steps:
        return []
    keys = {change.key for change in different}
    planned = set(PLANNED)
    if "data.weight_changes" in keys and _other_weights_behind(config, checkpoint):
        planned.remove("data.weight_changes")
    if "train.steps" in keys and steps_make_jump(checkpoint, config):
        planned.remove("train.steps")
    found = [change for change in different if change.resume == "maths" and change.key not in planned]
    return [change for change in found if change.key not in accepted or accepted[change.key] != change.now]


def not_accepted(config: Config, checkpoint: Committed, asked: list[Change]) -> str:
    """A refusal to go on with these changes."""
    run, keys = config.run.dir, {change.key for change in asked}
    rate = rate_change(checkpoint, config) if keys & RATE_KEYS else None
    listed = _listed(asked) if rate is None else f"{_listed(asked)}; {rate}"
    keep = f"; {advice(checkpoint, rate)}" if rate and "train.steps" in keys else ""
    branch = as_typed("run.fork_from", f"{run}@{checkpoint.step}")
    return (
        f"run.dir: {run} is at step {checkpoint.step} of {config.train.steps}, and these changes alter its maths: "
        f"{listed}; undo them, or pass --accept-changes to continue with them{keep}; "
        f"for a new run set another run.dir, and to branch off here set {branch} as well"
    )


def read_accepted(places: Sequence[StoragePath]) -> dict[str, Any]:
    """What was accepted, by key, at earlier starts. What a damaged file says was not, which is said."""
    accepted: dict[str, Any] = {}
    for where in places:
        with suppress(FileNotFoundError):
            try:
                content = json.loads(read(where / ACCEPTED).decode())
            except (ValueError, RecursionError):
                content = None
            if not isinstance(content, dict):
                remark(f"note: {where / ACCEPTED} is damaged: what was accepted at earlier starts is not known from it")
            accepted |= content if isinstance(content, dict) else {}
    return accepted


def note_accepted(places: Sequence[StoragePath], config: Config, asked: list[Change]) -> None:
    """That this config goes on with what was `asked` about, also when this start comes to nothing.

    What was accepted before stays noted as long as the config says the same: a checkpoint from before may be needed.
    """
    values, before = maths(config), read_accepted(places)
    now = {key: value for key, value in before.items() if key in values and values[key] == value}
    now |= {change.key: change.now for change in asked}
    for where in places if now != before else []:
        publish(where / ACCEPTED, json_text(now, indent=1) + "\n")


def stop_refusal(config: Config, checkpoint: Committed, where: str) -> str | None:
    """Why `train.stop_after` leaves nothing to do after this checkpoint, at which `where` stands, or None."""
    stop = config.train.stop_after
    if stop is None or stop > checkpoint.step:
        return None
    return (
        f"train.stop_after: {stop} must be above {checkpoint.step}, the step that {where} has already reached; "
        "raise it or leave it out"
    )


def skip_refusal(config: Config, checkpoint: Committed) -> str | None:
    """Rows that were trained on cannot be passed over any more, nor those passed over be taken in."""
    before, now = (Skipped(skipped_ranges(one.data)) for one in (config_of(checkpoint), config))
    reached = _reached(checkpoint)
    if before.below(reached) == now.below(reached):
        return None
    return (
        f"data.skip: at step {checkpoint.manifest.step} of {checkpoint.path} all rows before {reached} have been "
        "trained on or skipped, so data.skip can no longer change them; list later rows only, or set another "
        "run.dir and run.fork_from to continue from an earlier checkpoint"
    )


def numbering(config: Config) -> Any:
    """What the numbers of rows depend on, besides the data."""
    data = config.data
    return config.seed, data.sequence_length, data.rows, data.shuffle


def _listed(different: list[Change]) -> str:
    return ", ".join(f"{change.key} ({change.before} → {change.now})" for change in different)


def different_data(before: dict[str, str], now: dict[str, str]) -> str:
    """Which sources differ in what they hold, in words; empty if none does. A folder may have moved."""
    found = [f"{name} was added" for name in now if name not in before]
    found += [f"{name} was removed" for name in before if name not in now]
    found += [
        f"{name} holds something else than before"
        for name in now
        if name in before and not same_digest(before[name], now[name])
    ]
    return ", ".join(found)


def same_digest(one: str, other: str) -> bool:
    """Whether two digests of a source agree as far as both go: that of a dataset is short until it is indexed."""
    return one.startswith(other) or other.startswith(one)


def _other_weights_behind(config: Config, checkpoint: Committed) -> bool:
    """Whether weights are changed for rows that were read already: then others would be read twice, and some never."""
    reached, order = _reached(checkpoint), order_at(checkpoint)
    behind = lambda one: [change for change in one.data.weight_changes if order.taken(change.from_step) < reached]
    return bool(behind(config_of(checkpoint)) != behind(config))


def _reached(checkpoint: Committed) -> int:
    """The number of the first row that is neither trained on nor passed over."""
    before = Skipped(skipped_ranges(config_of(checkpoint).data))
    return int(before.nth(np.array([order_at(checkpoint).taken(checkpoint.manifest.step) - 1]))[0]) + 1


def digest_of_data(config: Config) -> str:
    """Of all that `data` names, opened."""
    with unreadable_is_retryable(config):
        return open_sources(config.data).digest
