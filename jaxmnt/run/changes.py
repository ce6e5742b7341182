"""Decides which changes of the config or the data a run that has already trained allows."""

from typing import Any, NamedTuple

import numpy as np

from jaxmnt.checkpoint.commit import Committed, valid_checkpoints
from jaxmnt.checkpoint.manifest import DamagedError
from jaxmnt.config.describe import CHANGEABLE_MATHS, Change
from jaxmnt.config.load import as_typed
from jaxmnt.config.own_code import own_modules
from jaxmnt.config.schema import Config
from jaxmnt.config.schema import Optimizer as OptimizerConfig
from jaxmnt.data.batches import skipped_ranges
from jaxmnt.data.order import SkippedRanges
from jaxmnt.data.sources import open_sources
from jaxmnt.errors import ConfigError
from jaxmnt.run.branch import order_at
from jaxmnt.run.rundir import unreadable_is_retryable

MAX_RATE_FACTOR = 1.5
"""Maximum factor by which a change of `train.steps` may raise or lower the learning rate without being accepted."""

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

MODULE_PREFIX = "module "
"""Begins the names of modules of the user's own code among the libraries in a checkpoint's manifest."""

_BAD_STEP_COUNT = "bad_steps/total"


def inherit_choices(config: Config, earlier: Config) -> Config:
    """Returns the config with choices from the run's `earlier` config: its origin (`ORIGIN_KEYS`), and its values for
    settings that are `auto` (`RESOLVED_AUTO_KEYS`)."""
    mesh = config.mesh
    inherited: dict[str, Any] = {"run.fork_from": earlier.run.fork_from}
    if not may_name_moved_base(config):
        inherited["run.init_from"] = earlier.run.init_from
    if mesh.zero == "auto" and not (mesh.prefetch and earlier.mesh.zero != 3):
        inherited["mesh.zero"] = earlier.mesh.zero
    if config.train.eval_tokens == "auto":
        # A run whose config still says auto was made by a version that evaluated on all held-out data.
        limit = earlier.train.eval_tokens
        inherited["train.eval_tokens"] = None if limit == "auto" else limit
    return config.changed(inherited)


def may_name_moved_base(config: Config) -> bool:
    """Returns True if `run.init_from` may differ from that of the run, because it is the base of a run with adapters.
    Each start reads the base again and compares it with its digests."""
    return config.lora is not None and config.run.init_from is not None


def refuse_changes(config: Config, digests: dict[str, str], checkpoint: Committed, changes: list[Change]) -> None:
    """Raises `ConfigError` if a run cannot be continued from `checkpoint` with this config, even with --accept-changes.

    `digests` has the digest of each data source, and `changes` are those of the config.
    """
    _refuse_other_origin(config, checkpoint)
    if breaking := [change for change in changes if change.resume == "breaks"]:
        # Another vocabulary has its own message, because its cause is the data and not the config.
        other_data = different_data(checkpoint.manifest.data, digests)
        if other_data and all(change.key == "model.vocab_size" for change in breaking):
            raise ConfigError(
                f"data: its vocabulary is not that of the data of {config.run.dir} ({breaking[0].values} ids), so "
                "another tokenizer made it; give the data of the run, or choose another run.dir for a new run"
            )
        # A branch keeps the parameters and the optimizer state, so it may change the data but not the model.
        may_branch = all(change.key == "seed" or change.key.startswith("data.") for change in breaking)
        purpose = f" with {_branch_setting(config, checkpoint)} to branch off here" if may_branch else " for a new run"
        raise ConfigError(
            f"run.dir: {config.run.dir} has a checkpoint of step {checkpoint.step} that cannot be continued with a "
            f"changed {_list_changes(breaking)}; undo the change, or choose another run.dir{purpose}"
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
    """Raises `ConfigError` if the config names an origin (fork_from, init_from, lora.init_from) that this run did not
    begin with."""
    began = None if checkpoint.config.lora is None else checkpoint.config.lora.init_from
    adapters = None if config.lora is None else config.lora.init_from
    if adapters is not None and adapters != began:
        raise ConfigError(
            f"lora.init_from: {config.run.dir} began with {began or 'new adapters'} and is at step {checkpoint.step}; "
            "leave it out to continue, or choose another run.dir"
        )
    for key in ("fork_from", "init_from"):
        actual, configured = getattr(checkpoint.config.run, key), getattr(config.run, key)
        if key == "init_from" and may_name_moved_base(config):
            continue
        if configured is not None and configured != actual:
            began = f"began with {actual}" if actual else "began without it"
            raise ConfigError(
                f"run.{key}: {config.run.dir} {began} and is at step {checkpoint.step}; leave run.{key} out to "
                f"continue, or choose another run.dir to begin with {configured}"
            )


def refuse_other_data(config: Config, digests: dict[str, str], checkpoint: Committed) -> None:
    """Raises `ConfigError` if the run cannot continue from its checkpoint because the data has other digests."""
    differences = different_data(checkpoint.manifest.data, digests)
    if differences:
        raise ConfigError(
            f"data: {config.run.dir} has a checkpoint of step {checkpoint.step} that cannot be continued with "
            f"other data: {differences}; give the same data, or choose another run.dir, with "
            f"{_branch_setting(config, checkpoint)} to continue from this checkpoint"
        )


def _branch_setting(config: Config, checkpoint: Committed) -> str:
    return as_typed("run.fork_from", f"{config.run.dir}@{checkpoint.step}")


def unaccepted_changes(
    config: Config, checkpoint: Committed, changes: list[Change], accepted: dict[str, Any]
) -> list[Change]:
    """Returns the changes that alter the maths of an unfinished run and were not accepted at an earlier start.

    `accepted` has the accepted values by key. Changes that are expected during a run (`CHANGEABLE_MATHS`) need not be
    accepted, unless they make the learning rate jump or apply to rows that were already read. Once the run has
    finished, no change needs to be accepted, because it has no effect.
    """
    if checkpoint.step >= config.train.steps:
        return []
    keys = {change.key for change in changes}
    expected_keys = set(CHANGEABLE_MATHS)
    if "data.weight_changes" in keys and _past_weights_differ(config, checkpoint):
        expected_keys.remove("data.weight_changes")
    if "train.steps" in keys and steps_make_jump(checkpoint, config):
        expected_keys.remove("train.steps")
    unexpected = [change for change in changes if change.resume == "maths" and change.key not in expected_keys]
    return [change for change in unexpected if change.key not in accepted or accepted[change.key] != change.now]


def changes_outside_config(checkpoint: Committed, config: Config) -> list[Change]:
    """Returns changes of the maths since a checkpoint that are not changes of the config: of this version's formulas,
    and of the user's own code."""
    return [*_changed_formulas(checkpoint, config), *_changed_code(checkpoint, config)]


def _changed_code(checkpoint: Committed, config: Config) -> list[Change]:
    """Returns a change for each module of the user's own code that differs from the one that the checkpoint's run
    imported. Their keys are the modules' names after `MODULE_PREFIX`, and their values are digests.

    Checkpoints of earlier versions do not have the digests.
    """
    libraries = checkpoint.manifest.libraries.items()
    before = {name.removeprefix(MODULE_PREFIX): digest for name, digest in libraries if name.startswith(MODULE_PREFIX)}
    if not before:
        return []
    now = own_modules(config)
    return [
        Change(f"{MODULE_PREFIX}{name}", before.get(name), now.get(name), "maths")
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def _changed_formulas(checkpoint: Committed, config: Config) -> list[Change]:
    """Returns changes of this version's formulas that alter the maths of a run whose checkpoint an earlier version
    wrote."""
    if "muon" in checkpoint.manifest.config.get("optimizer", {}):
        return []
    rules, changed = config.optimizer.rules, []
    if any(rule.kind == "muon" for rule in rules):
        changed.append(
            Change("formula of optimizer.muon.momentum", "corrected for bias", "as in torch.optim.Muon", "maths")
        )
    if any(rule.learning_rate_factor not in (None, 1.0) for rule in rules):
        key = "formula of optimizer.rules.learning_rate_factor"
        changed.append(Change(key, "of rate and decay", "of the rate", "maths"))
    return changed


def unaccepted_message(config: Config, checkpoint: Committed, unaccepted: list[Change]) -> str:
    """Returns the error message for changes that need --accept-changes."""
    run = config.run.dir
    keys = {change.key for change in unaccepted}
    rate = rate_change(checkpoint, config) if keys & RATE_KEYS else None
    description = _list_changes(unaccepted) if rate is None else f"{_list_changes(unaccepted)}; {rate}"
    advice = f"; {rate_advice(checkpoint, rate)}" if rate and "train.steps" in keys else ""
    return (
        f"run.dir: {run} is at step {checkpoint.step} of {config.train.steps}, and these changes alter its maths: "
        f"{description}; undo them, continue with --accept-changes, or set another run.dir (and "
        f"{_branch_setting(config, checkpoint)} for a branch){advice}"
    )


def refuse_stop(config: Config, checkpoint: Committed, source: str) -> None:
    """Raises `ConfigError` if `train.stop_after` leaves no steps after this checkpoint.

    `source` names the run, or the config key of the run, whose checkpoint it is.
    """
    stop = config.train.stop_after
    if stop is not None and stop <= checkpoint.step:
        raise ConfigError(
            f"train.stop_after: {stop} must be above {checkpoint.step}, the step that {source} has already reached; "
            "raise it or leave it out"
        )


def refuse_skips(config: Config, checkpoint: Committed) -> None:
    """Raises `ConfigError` if `data.skip` has changed for rows that were already trained on or skipped."""
    old_ranges = SkippedRanges(skipped_ranges(checkpoint.config.data))
    new_ranges = SkippedRanges(skipped_ranges(config.data))
    first_unread = _first_unread_row(checkpoint)
    if old_ranges.ranges_below(first_unread) != new_ranges.ranges_below(first_unread):
        raise ConfigError(
            f"data.skip: at step {checkpoint.step} of {checkpoint.path} all rows before {first_unread} have been "
            "trained on or skipped, so data.skip can no longer change them; list later rows only, or set another "
            "run.dir and run.fork_from to continue from an earlier checkpoint"
        )


def row_numbering(config: Config) -> Any:
    """Returns the settings that, together with the data, determine which row has which number."""
    data = config.data
    return config.seed, data.sequence_length, data.rows, data.shuffle


def _list_changes(changes: list[Change]) -> str:
    return ", ".join(f"{change.key} ({change.values})" for change in changes)


def different_data(before: dict[str, str], now: dict[str, str]) -> str:
    """Describes which data sources differ in their content; empty if none does. The same content may have another path.

    `before` and `now` have the digest of each source by its name.
    """
    differences = [f"{name} was added" for name in now if name not in before]
    differences += [f"{name} was removed" for name in before if name not in now]
    differences += [
        f"{name} has other content than before"
        for name in now
        if name in before and not same_digest(before[name], now[name])
    ]
    return ", ".join(differences)


def same_digest(first: str, second: str) -> bool:
    """True if one digest is a prefix of the other, because a dataset's digest is short until the dataset is indexed."""
    return first.startswith(second) or second.startswith(first)


def _past_weights_differ(config: Config, checkpoint: Committed) -> bool:
    """True if weights change for rows that were already read, so that some rows would be read twice and others
    never."""
    order = order_at(checkpoint)
    first_unread = _first_unread_row(checkpoint)

    def past_changes(settings: Config) -> list[Any]:
        return [change for change in settings.data.weight_changes if order.rows_taken(change.from_step) < first_unread]

    return bool(past_changes(checkpoint.config) != past_changes(config))


def _first_unread_row(checkpoint: Committed) -> int:
    """Returns the number of the first row that the run has neither trained on nor skipped at the checkpoint."""
    skipped = SkippedRanges(skipped_ranges(checkpoint.config.data))
    last_taken = order_at(checkpoint).rows_taken(checkpoint.manifest.step) - 1
    return int(skipped.row_numbers(np.array([last_taken]))[0]) + 1


def digest_of_data(config: Config, *, check_files: bool) -> str:
    """Opens the data sources of the config and returns one digest of them all. `check_files` is that of
    `open_sources`."""
    with unreadable_is_retryable(config):
        return open_sources(config.data, check_files=check_files).digest


# -- how a change affects the learning rate of the next step


class RateChange(NamedTuple):
    """The learning rate of the next step with the old config and with the new one."""

    step: int
    old_rate: float
    new_rate: float

    @property
    def is_jump(self) -> bool:
        """True if the rate changes by a factor of more than `MAX_RATE_FACTOR`."""
        low, high = sorted((self.old_rate, self.new_rate))
        return high > MAX_RATE_FACTOR * low

    def __str__(self) -> str:
        return f"the learning rate of step {self.step} is {self.new_rate:.3g} instead of {self.old_rate:.3g}"


def rate_change(checkpoint: Committed, config: Config) -> RateChange | None:
    """Returns how this config changes the learning rate of the step after a checkpoint; None if it does not."""
    earlier_config = checkpoint.config
    old_schedule = (earlier_config.optimizer, earlier_config.train.steps)
    return _compare_schedules(checkpoint, old_schedule, (config.optimizer, config.train.steps))


def rate_remarks(checkpoint: Committed, config: Config) -> list[str]:
    """Returns a message about the learning rate of the next step if this config changes it, or no message."""
    change = rate_change(checkpoint, config)
    return [] if change is None else [str(change)]


def steps_make_jump(checkpoint: Committed, config: Config) -> bool:
    """True if the change of `train.steps` alone, without other changes, makes the learning rate jump."""
    earlier_config = checkpoint.config
    if earlier_config.train.steps == config.train.steps:
        return False
    # A schedule cannot be shorter than its warm-up.
    fits_warmup = config.optimizer.warmup_steps < earlier_config.train.steps
    old_schedule = (config.optimizer if fits_warmup else earlier_config.optimizer, earlier_config.train.steps)
    change = _compare_schedules(checkpoint, old_schedule, (config.optimizer, config.train.steps))
    return change is not None and change.is_jump


def rate_advice(checkpoint: Committed, change: RateChange) -> str:
    """Returns advice on how to train a run for longer without a jump of its learning rate."""
    advice = (
        f"to keep the rate, set optimizer.schedule=constant and optimizer.learning_rate={change.old_rate:.3g} with "
        "--accept-changes"
    )
    root = checkpoint.path.parent
    oldest_step = min((valid.step for valid in valid_checkpoints(root)), default=checkpoint.step)
    if change.new_rate < change.old_rate or oldest_step >= checkpoint.step:
        return advice
    branch = as_typed("run.fork_from", f"{root.parent}@{oldest_step}")
    return (
        f"{advice}; or go back to where the rate was higher: set another run.dir and {branch} (the oldest checkpoint)"
    )


def _compare_schedules(
    checkpoint: Committed, old_schedule: tuple[OptimizerConfig, int], new_schedule: tuple[OptimizerConfig, int]
) -> RateChange | None:
    """Compares the learning rates that two schedules have for the step after a checkpoint; None if they are equal.

    A schedule is an (optimizer, steps) of the config.
    """
    if old_schedule == new_schedule:
        return None
    from jaxmnt.training.optimizer import build_lr_schedule  # imports JAX, which most callers do not need

    updates = _update_count(checkpoint)
    rates = [float(build_lr_schedule(*schedule)(updates)) for schedule in (old_schedule, new_schedule)]
    return None if rates[0] == rates[1] else RateChange(checkpoint.step + 1, *rates)


def _update_count(checkpoint: Committed) -> int:
    """Returns the number of optimizer updates up to a checkpoint, which the schedule counts.

    A bad step makes no update.
    """
    if _BAD_STEP_COUNT not in checkpoint.manifest.arrays:  # written by an earlier version
        return checkpoint.step
    from jaxmnt.checkpoint.arrays import Reader

    try:
        return checkpoint.step - int(Reader(checkpoint, [_BAD_STEP_COUNT]).read(_BAD_STEP_COUNT))
    except DamagedError:
        return checkpoint.step  # the restore will report the damage and go back to an earlier checkpoint
