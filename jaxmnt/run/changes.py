"""Judges changes of the config or the data of a run that has already trained."""

from typing import Any, NamedTuple

import numpy as np

from jaxmnt.checkpoint.commit import Committed, step_directories
from jaxmnt.checkpoint.manifest import DamagedError
from jaxmnt.config.describe import CHANGEABLE_MATHS, Change
from jaxmnt.config.load import as_typed
from jaxmnt.config.schema import Config
from jaxmnt.config.schema import Optimizer as OptimizerConfig
from jaxmnt.data.batches import skipped_ranges
from jaxmnt.data.order import SkippedRanges
from jaxmnt.data.sources import open_sources
from jaxmnt.errors import ConfigError
from jaxmnt.run.branch import order_at
from jaxmnt.run.rundir import unreadable_is_retryable

LARGEST_FACTOR = 1.5
"""The learning rate may change by this factor, up or down, as a side effect; a larger jump must be accepted."""

RATE_KEYS = frozenset(
    {
        "train.steps",
        "optimizer.learning_rate",
        "optimizer.warmup_steps",
        "optimizer.schedule",
        "optimizer.final_fraction",
        "optimizer.decay_fraction",
    }
)
"""Keys that determine the learning rate schedule."""

_BAD_STEPS = "bad_steps/total"


def inherit_choices(config: Config, before: Config) -> Config:
    """Returns the config with the choices of the run whose config was `before`: its origin (`ORIGIN_KEYS`), and its
    values for settings that are `auto` (`RESOLVED_AUTO_KEYS`)."""
    mesh = config.mesh
    inherited: dict[str, Any] = {"run.fork_from": before.run.fork_from, "run.init_from": before.run.init_from}
    if mesh.zero == "auto" and not (mesh.prefetch and before.mesh.zero != 3):
        inherited["mesh.zero"] = before.mesh.zero
    if config.train.eval_tokens == "auto":
        # A run whose config still says auto was made by a version that evaluated on all held-out data.
        limit = before.train.eval_tokens
        inherited["train.eval_tokens"] = None if limit == "auto" else limit
    return config.changed(inherited)


def refuse_changes(config: Config, digests: dict[str, str], checkpoint: Committed, different: list[Change]) -> None:
    """Raises `ConfigError` if a run cannot be continued with this config, not even with --accept-changes."""
    _refuse_other_origin(config, checkpoint)
    if breaking := [change for change in different if change.resume == "breaks"]:
        # Another vocabulary has a message of its own: its cause is the data, not the config.
        other_data = different_data(checkpoint.manifest.data, digests)
        if other_data and all(change.key == "model.vocab_size" for change in breaking):
            raise ConfigError(
                f"data: it has another vocabulary than the data of {config.run.dir} ({breaking[0].values} ids), so "
                "another tokenizer made it; give the data of the run, or choose another run.dir for a new run"
            )
        # A branch keeps the parameters and the optimizer's state, so it may change the data but not the model.
        may_branch = all(change.key == "seed" or change.key.startswith("data.") for change in breaking)
        branch = f" with {_branch_from(config, checkpoint)} to branch off here" if may_branch else " for a new run"
        raise ConfigError(
            f"run.dir: {config.run.dir} has a checkpoint of step {checkpoint.step} that cannot be continued with a "
            f"changed {_listed(breaking)}; undo the change, or choose another run.dir{branch}"
        )
    refuse_other_data(config, digests, checkpoint)
    refuse_skips(config, checkpoint)
    if checkpoint.step < config.train.steps:
        refuse_stop(config, checkpoint, str(config.run.dir))
    elif checkpoint.step > config.train.steps:
        raise ConfigError(
            f"train.steps: {config.train.steps} is below step {checkpoint.step}, which {config.run.dir} has "
            "already reached; raise it or choose another run.dir"
        )


def _refuse_other_origin(config: Config, checkpoint: Committed) -> None:
    """Raises `ConfigError` if the config names another origin (fork_from, init_from) than this run began with."""
    for key in ("fork_from", "init_from"):
        before, now = getattr(checkpoint.config.run, key), getattr(config.run, key)
        if now is not None and now != before:
            began = f"began with {before}" if before else "has begun without it"
            raise ConfigError(
                f"run.{key}: {config.run.dir} {began} and is at step {checkpoint.step}; leave run.{key} out to go on, "
                f"or choose another run.dir to begin with {now}"
            )


def refuse_other_data(config: Config, digests: dict[str, str], checkpoint: Committed) -> None:
    """Raises `ConfigError` if a run cannot continue from its checkpoint with data of these digests."""
    if different := different_data(checkpoint.manifest.data, digests):
        raise ConfigError(
            f"data: {config.run.dir} has a checkpoint of step {checkpoint.step} that cannot be continued with "
            f"other data: {different}; give the same data, or choose another run.dir, with "
            f"{_branch_from(config, checkpoint)} to continue from this checkpoint"
        )


def _branch_from(config: Config, checkpoint: Committed) -> str:
    return as_typed("run.fork_from", f"{config.run.dir}@{checkpoint.step}")


def unaccepted_changes(
    config: Config, checkpoint: Committed, different: list[Change], accepted: dict[str, Any]
) -> list[Change]:
    """Returns the changes that alter the maths of an unfinished run and were not accepted at an earlier start.

    `accepted` has the accepted values by key. Planned changes (`CHANGEABLE_MATHS`) need no acceptance unless the
    learning rate jumps. Once the run has finished no change needs acceptance, since it has no effect.
    """
    if checkpoint.step >= config.train.steps:
        return []
    keys = {change.key for change in different}
    planned = set(CHANGEABLE_MATHS)
    if "data.weight_changes" in keys and _past_weights_differ(config, checkpoint):
        planned.remove("data.weight_changes")
    if "train.steps" in keys and steps_make_jump(checkpoint, config):
        planned.remove("train.steps")
    unplanned = [change for change in different if change.resume == "maths" and change.key not in planned]
    return [change for change in unplanned if change.key not in accepted or accepted[change.key] != change.now]


def unaccepted_message(config: Config, checkpoint: Committed, unaccepted: list[Change]) -> str:
    """Returns the error message for changes that need --accept-changes."""
    run = config.run.dir
    keys = {change.key for change in unaccepted}
    rate = rate_change(checkpoint, config) if keys & RATE_KEYS else None
    listed = _listed(unaccepted) if rate is None else f"{_listed(unaccepted)}; {rate}"
    keep = f"; {rate_advice(checkpoint, rate)}" if rate and "train.steps" in keys else ""
    return (
        f"run.dir: {run} is at step {checkpoint.step} of {config.train.steps}, and these changes alter its maths: "
        f"{listed}; undo them, continue with --accept-changes, or set another run.dir (and "
        f"{_branch_from(config, checkpoint)} for a branch){keep}"
    )


def refuse_stop(config: Config, checkpoint: Committed, where: str) -> None:
    """Raises `ConfigError` if `train.stop_after` leaves no steps after this checkpoint, the position of `where`."""
    stop = config.train.stop_after
    if stop is not None and stop <= checkpoint.step:
        raise ConfigError(
            f"train.stop_after: {stop} must be above {checkpoint.step}, the step that {where} has already reached; "
            "raise it or leave it out"
        )


def refuse_skips(config: Config, checkpoint: Committed) -> None:
    """Raises `ConfigError` if `data.skip` changes for rows that were already trained on or skipped."""
    before, now = (SkippedRanges(skipped_ranges(settings.data)) for settings in (checkpoint.config, config))
    reached = _first_unread_row(checkpoint)
    if before.ranges_below(reached) != now.ranges_below(reached):
        raise ConfigError(
            f"data.skip: at step {checkpoint.step} of {checkpoint.path} all rows before {reached} have been "
            "trained on or skipped, so data.skip can no longer change them; list later rows only, or set another "
            "run.dir and run.fork_from to continue from an earlier checkpoint"
        )


def row_numbering(config: Config) -> Any:
    """Returns the settings that determine which row has which number, besides the data."""
    data = config.data
    return config.seed, data.sequence_length, data.rows, data.shuffle


def _listed(different: list[Change]) -> str:
    return ", ".join(f"{change.key} ({change.values})" for change in different)


def different_data(before: dict[str, str], now: dict[str, str]) -> str:
    """Describes which sources differ in their content; empty if none does. The same content may have moved.

    `before` and `now` have the digest of each source by name.
    """
    differences = [f"{name} was added" for name in now if name not in before]
    differences += [f"{name} was removed" for name in before if name not in now]
    differences += [
        f"{name} holds something else than before"
        for name in now
        if name in before and not same_digest(before[name], now[name])
    ]
    return ", ".join(differences)


def same_digest(first: str, second: str) -> bool:
    """True if one digest is a prefix of the other: a dataset's digest is short until the dataset is indexed."""
    return first.startswith(second) or second.startswith(first)


def _past_weights_differ(config: Config, checkpoint: Committed) -> bool:
    """True if weights change for rows that were already read: some rows would be read twice, and others never."""
    reached, order = _first_unread_row(checkpoint), order_at(checkpoint)
    is_past = lambda change: order.rows_taken(change.from_step) < reached
    past = lambda settings: [change for change in settings.data.weight_changes if is_past(change)]
    return bool(past(checkpoint.config) != past(config))


def _first_unread_row(checkpoint: Committed) -> int:
    """Returns the number of the first row that is neither trained on nor skipped at the checkpoint."""
    skipped = SkippedRanges(skipped_ranges(checkpoint.config.data))
    last_taken = order_at(checkpoint).rows_taken(checkpoint.manifest.step) - 1
    return int(skipped.row_numbers(np.array([last_taken]))[0]) + 1


def digest_of_data(config: Config) -> str:
    """Opens the sources of the config and returns their common digest."""
    with unreadable_is_retryable(config):
        return open_sources(config.data).digest


# -- how a change affects the learning rate of the next step


class RateChange(NamedTuple):
    """The learning rate of the next step, without a change of the config and with it."""

    step: int
    before: float
    now: float

    @property
    def is_jump(self) -> bool:
        """True if the rate changes by more than `LARGEST_FACTOR`."""
        low, high = sorted((self.before, self.now))
        return high > LARGEST_FACTOR * low

    def __str__(self) -> str:
        return f"the learning rate of step {self.step} is {self.now:.3g} instead of {self.before:.3g}"


def rate_change(checkpoint: Committed, config: Config) -> RateChange | None:
    """Returns how this config changes the rate of the step after a checkpoint; None if it does not."""
    earlier = checkpoint.config
    before = (earlier.optimizer, earlier.train.steps)
    return _compare_schedules(checkpoint, before, (config.optimizer, config.train.steps))


def rate_remarks(checkpoint: Committed, config: Config) -> list[str]:
    """Returns a message on the changed rate of the next step, if it changes."""
    change = rate_change(checkpoint, config)
    return [] if change is None else [str(change)]


def steps_make_jump(checkpoint: Committed, config: Config) -> bool:
    """True if the change of `train.steps` makes the rate jump, regardless of other changes."""
    earlier = checkpoint.config
    if earlier.train.steps == config.train.steps:
        return False
    # A schedule cannot be shorter than its warm-up.
    fits = config.optimizer.warmup_steps < earlier.train.steps
    before = (config.optimizer if fits else earlier.optimizer, earlier.train.steps)
    change = _compare_schedules(checkpoint, before, (config.optimizer, config.train.steps))
    return change is not None and change.is_jump


def rate_advice(checkpoint: Committed, change: RateChange) -> str:
    """Returns advice on how to train a run for longer without a jump of its learning rate."""
    keep = (
        f"to keep the rate, set optimizer.schedule=constant and optimizer.learning_rate={change.before:.3g} with "
        "--accept-changes"
    )
    root = checkpoint.path.parent
    oldest = min((step for step, _ in step_directories(root)), default=checkpoint.step)
    if change.now < change.before or oldest >= checkpoint.step:
        return keep
    origin = as_typed("run.fork_from", f"{root.parent}@{oldest}")
    return f"{keep}; or go back to where the rate was higher, with another run.dir and {origin} (its oldest checkpoint)"


def _compare_schedules(
    checkpoint: Committed, before: tuple[OptimizerConfig, int], now: tuple[OptimizerConfig, int]
) -> RateChange | None:
    """Compares the rates that two schedules, (optimizer, steps), give the step after a checkpoint."""
    if before == now:
        return None
    from jaxmnt.training.optimizer import build_lr_schedule  # imports JAX, which most callers do not need

    updates = _update_count(checkpoint)
    rates = [float(build_lr_schedule(*schedule)(updates)) for schedule in (before, now)]
    return None if rates[0] == rates[1] else RateChange(checkpoint.step + 1, *rates)


def _update_count(checkpoint: Committed) -> int:
    """Returns the number of optimizer updates before a checkpoint, which the schedule counts, without bad steps."""
    if _BAD_STEPS not in checkpoint.manifest.arrays:  # written by an earlier version
        return checkpoint.step
    from jaxmnt.checkpoint.arrays import Reader

    try:
        return checkpoint.step - int(Reader(checkpoint, [_BAD_STEPS]).read(_BAD_STEPS))
    except DamagedError:
        return checkpoint.step  # the restore will report the damage and go back to an earlier checkpoint
