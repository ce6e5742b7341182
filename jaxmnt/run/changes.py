"""What it means for a run that has trained that its config or its data has changed."""

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
"""A learning rate that changes by more, up or down, without anybody's having named it, has to be accepted."""

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
"""Keys that the schedule of the learning rate follows from."""

_BAD_STEPS = "bad_steps/total"


def with_choices_of(config: Config, before: Config) -> Config:
    """Returns the config with what the run whose config was `before` began with: `ORIGIN_KEYS`, and what `auto` came to
    for the keys of `RESOLVED_AUTO_KEYS`."""
    mesh = config.mesh
    chosen: dict[str, Any] = {"run.fork_from": before.run.fork_from, "run.init_from": before.run.init_from}
    if mesh.zero == "auto" and not (mesh.prefetch and before.mesh.zero != 3):
        chosen["mesh.zero"] = before.mesh.zero
    if config.train.eval_tokens == "auto":
        # A run that still has auto is of a version that evaluated on all that was held out.
        limit = before.train.eval_tokens
        chosen["train.eval_tokens"] = None if limit == "auto" else limit
    return config.changed(chosen)


def refuse_changes(config: Config, digests: dict[str, str], checkpoint: Committed, different: list[Change]) -> None:
    """Raises `ConfigError` if this config cannot go on with this run directory whatever a person says."""
    _refuse_other_origin(config, checkpoint)
    if breaking := [change for change in different if change.resume == "breaks"]:
        other_data = different_data(checkpoint.manifest.data, digests)
        if other_data and all(change.key == "model.vocab_size" for change in breaking):
            raise ConfigError(
                f"data: it has another vocabulary than the data of {config.run.dir} ({breaking[0].values} ids), so "
                "another tokenizer made it; give the data of the run, or choose another run.dir for a new run"
            )
        # A branch keeps the parameters and their optimizer, whatever data they are trained on.
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
    """Raises `ConfigError` if the config names another run to begin with than this run began with."""
    for key in ("fork_from", "init_from"):
        before, now = getattr(checkpoint.config.run, key), getattr(config.run, key)
        if now is not None and now != before:
            began = f"began with {before}" if before else "has begun without it"
            raise ConfigError(
                f"run.{key}: {config.run.dir} {began} and is at step {checkpoint.step}; leave run.{key} out to go on, "
                f"or choose another run.dir to begin with {now}"
            )


def refuse_other_data(config: Config, digests: dict[str, str], checkpoint: Committed) -> None:
    """Raises `ConfigError` if a run cannot go on from its checkpoint with data of these digests."""
    if different := different_data(checkpoint.manifest.data, digests):
        raise ConfigError(
            f"data: {config.run.dir} has a checkpoint of step {checkpoint.step} that cannot be continued with "
            f"other data: {different}; give the same data, or choose another run.dir, with "
            f"{_branch_from(config, checkpoint)} to continue from this checkpoint"
        )


def _branch_from(config: Config, checkpoint: Committed) -> str:
    return as_typed("run.fork_from", f"{config.run.dir}@{checkpoint.step}")


def to_be_accepted(
    config: Config, checkpoint: Committed, different: list[Change], accepted: dict[str, Any]
) -> list[Change]:
    """What alters the maths of a run under way and is not `accepted`, by key, at an earlier start.

    What is planned passes, see `CHANGEABLE_MATHS`, unless it lets the learning rate jump. So does everything once the
    run has finished, since nothing comes of it.
    """
    if checkpoint.step >= config.train.steps:
        return []
    keys = {change.key for change in different}
    planned = set(CHANGEABLE_MATHS)
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
    keep = f"; {rate_advice(checkpoint, rate)}" if rate and "train.steps" in keys else ""
    return (
        f"run.dir: {run} is at step {checkpoint.step} of {config.train.steps}, and these changes alter its maths: "
        f"{listed}; undo them, continue with --accept-changes, or set another run.dir (and "
        f"{_branch_from(config, checkpoint)} for a branch){keep}"
    )


def refuse_stop(config: Config, checkpoint: Committed, where: str) -> None:
    """Raises `ConfigError` if `train.stop_after` leaves nothing to do after this checkpoint, which `where` is at."""
    stop = config.train.stop_after
    if stop is not None and stop <= checkpoint.step:
        raise ConfigError(
            f"train.stop_after: {stop} must be above {checkpoint.step}, the step that {where} has already reached; "
            "raise it or leave it out"
        )


def refuse_skips(config: Config, checkpoint: Committed) -> None:
    """Raises `ConfigError` if rows that were trained on are passed over now, or those passed over are taken in."""
    before, now = (SkippedRanges(skipped_ranges(of.data)) for of in (checkpoint.config, config))
    reached = _reached(checkpoint)
    if before.ranges_below(reached) != now.ranges_below(reached):
        raise ConfigError(
            f"data.skip: at step {checkpoint.step} of {checkpoint.path} all rows before {reached} have been "
            "trained on or skipped, so data.skip can no longer change them; list later rows only, or set another "
            "run.dir and run.fork_from to continue from an earlier checkpoint"
        )


def numbering(config: Config) -> Any:
    """What the numbers of rows depend on, besides the data."""
    data = config.data
    return config.seed, data.sequence_length, data.rows, data.shuffle


def _listed(different: list[Change]) -> str:
    return ", ".join(f"{change.key} ({change.values})" for change in different)


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
    behind = lambda one: [change for change in one.data.weight_changes if order.rows_taken(change.from_step) < reached]
    return bool(behind(checkpoint.config) != behind(config))


def _reached(checkpoint: Committed) -> int:
    """The number of the first row that is neither trained on nor passed over."""
    before = SkippedRanges(skipped_ranges(checkpoint.config.data))
    return int(before.row_numbers(np.array([order_at(checkpoint).rows_taken(checkpoint.manifest.step) - 1]))[0]) + 1


def digest_of_data(config: Config) -> str:
    """Of all that `data` names, opened."""
    with unreadable_is_retryable(config):
        return open_sources(config.data).digest


# -- what a change does to the learning rate of the next step


class RateChange(NamedTuple):
    """The learning rate of the next step, before a change of the config and with it."""

    step: int
    before: float
    now: float

    @property
    def is_jump(self) -> bool:
        """Whether the rate changes by more than `LARGEST_FACTOR`."""
        low, high = sorted((self.before, self.now))
        return high > LARGEST_FACTOR * low

    def __str__(self) -> str:
        return f"the learning rate of step {self.step} is {self.now:.3g} instead of {self.before:.3g}"


def rate_change(checkpoint: Committed, config: Config) -> RateChange | None:
    """What this config does to the rate of the step after a checkpoint; None if it stays as it is."""
    earlier = checkpoint.config
    return _between(checkpoint, (earlier.optimizer, earlier.train.steps), (config.optimizer, config.train.steps))


def rate_remarks(checkpoint: Committed, config: Config) -> list[str]:
    """The changed rate of the next step as a line for people, if it changes."""
    change = rate_change(checkpoint, config)
    return [] if change is None else [str(change)]


def steps_make_jump(checkpoint: Committed, config: Config) -> bool:
    """Whether the rate jumps because of another `train.steps`, whatever else has changed as well."""
    earlier = checkpoint.config
    if earlier.train.steps == config.train.steps:
        return False
    # A schedule cannot be shorter than its warm-up.
    fits = config.optimizer.warmup_steps < earlier.train.steps
    before = (config.optimizer if fits else earlier.optimizer, earlier.train.steps)
    change = _between(checkpoint, before, (config.optimizer, config.train.steps))
    return change is not None and change.is_jump


def rate_advice(checkpoint: Committed, change: RateChange) -> str:
    """How a run is trained for longer without a jump of its learning rate, in words."""
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


def _between(
    checkpoint: Committed, before: tuple[OptimizerConfig, int], now: tuple[OptimizerConfig, int]
) -> RateChange | None:
    if before == now:
        return None
    from jaxmnt.training.optimizer import build_lr_schedule  # imports JAX, which most callers do not need

    updates = _updates(checkpoint)
    rates = [float(build_lr_schedule(*schedule)(updates)) for schedule in (before, now)]
    return None if rates[0] == rates[1] else RateChange(checkpoint.step + 1, *rates)


def _updates(checkpoint: Committed) -> int:
    """Updates of the optimizer before a checkpoint, which the schedule counts: bad steps are none."""
    if _BAD_STEPS not in checkpoint.manifest.arrays:  # of an earlier version
        return checkpoint.step
    from jaxmnt.checkpoint.arrays import Reader

    try:
        return checkpoint.step - int(Reader(checkpoint, [_BAD_STEPS]).read(_BAD_STEPS))
    except DamagedError:
        return checkpoint.step  # restoring finds the damage, names it and goes back to an earlier checkpoint
