"""What is said of rows: those whose step was bad, and those that were passed over."""

import math
from typing import Any

from jaxmnt.config.schema import Config
from jaxmnt.data.batches import TrainingData
from jaxmnt.errors import UserError
from jaxmnt.telemetry.events import Events
from jaxmnt.telemetry.progress import StatusLine


class RowWatch:
    """Sees the metrics of every finished step, in all processes; one of them, the writer, reports."""

    def __init__(self, config: Config, data: TrainingData, events: Events, status: StatusLine, *, writer: bool):
        self._most = config.train.max_bad_steps
        self._rows = config.data.global_batch_size
        self._order = data.order
        self._events, self._status, self._writer = events, status, writer
        self._good: tuple[int, float] | None = None
        """The last good step and its loss."""

    def see(self, step: int, values: dict[str, Any]) -> None:
        """Raises `UserError`, in all processes after the same step, after too many bad steps in a row."""
        if self._writer:
            self._note_passed_over(step)
        in_a_row = values["bad_in_a_row"]
        if not in_a_row:
            self._good = step, values["loss"]
            return
        first, last = self._range(step, step)
        bad = "the loss" if not math.isfinite(values["loss"]) else "the gradient"
        if self._writer:
            self._events.write("bad_step", step=step, rows=[first, last], bad=bad, in_a_row=in_a_row)
            self._status.line(f"WARNING step {step}: {bad} of rows {first} to {last} is not finite; it changes nothing")
        if in_a_row > self._most:
            raise UserError(self._diagnosis(step, in_a_row, bad))

    def _note_passed_over(self, step: int) -> None:
        """Says when rows of `data.skip` have been passed over."""
        before = self._order.passed_over(step - 2) if step > 1 else 0
        passed = self._order.passed_over(step - 1) - before
        if passed:
            first, last = self._range(step, step)
            self._events.write("rows_skipped", step=step, count=passed, rows=[first, last])
            self._status.line(f"note    step {step} passes over {passed} rows")

    def _range(self, first_step: int, last_step: int) -> tuple[int, int]:
        """The numbers of the first and the last row of the batches of these steps."""
        first = self._order.numbers(first_step - 1, [0])
        return int(first[0]), int(self._order.numbers(last_step - 1, [self._rows - 1])[0])

    def _diagnosis(self, step: int, in_a_row: int, bad: str) -> str:
        first, last = self._range(step - in_a_row + 1, step)
        good = "none was good since this start"
        if self._good is not None:
            good = f"the last good step was {self._good[0]}, its loss {self._good[1]:.4f}"
        return (
            f"{in_a_row} steps in a row, to step {step}, had {bad} infinite or no number ({good}; their rows are "
            f"{first} to {last}); if it is the rows, add {{from_row: {first}, rows: {last + 1 - first}}} to data.skip, "
            f"branching off before step {step - in_a_row + 1} with run.fork_from if there is a later checkpoint; if it "
            "is not, lower optimizer.learning_rate and go on from an earlier checkpoint"
        )
