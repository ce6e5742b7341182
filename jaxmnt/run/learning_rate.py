"""What a changed config does to the learning rate of the step that a run goes on with."""

from typing import NamedTuple

from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.manifest import DamagedError
from jaxmnt.config.load import as_typed
from jaxmnt.config.schema import Config
from jaxmnt.config.schema import Optimizer as OptimizerConfig

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


def advice(checkpoint: Committed, change: RateChange) -> str:
    """How a run is trained for longer without a jump of its learning rate, in words."""
    origin = as_typed("run.fork_from", f"{checkpoint.path.parent.parent}@STEP")
    return (
        f"to keep the rate, set optimizer.schedule=constant and optimizer.learning_rate={change.before:.3g} with "
        f"--accept-changes; or go back to before the rate fell, with another run.dir and {origin}"
    )


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
