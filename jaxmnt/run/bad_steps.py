"""Steps that change nothing: what is said of them, and when they end a run."""

import math
from typing import Any

from jaxmnt.errors import UserError
from jaxmnt.run.values import CompiledRun
from jaxmnt.telemetry.events import METRICS


class BadStepMonitor:
    """Sees the metrics of every finished step, in all processes; one of them, the writer, reports."""

    def __init__(self, run: CompiledRun):
        self._most = run.config.train.max_bad_steps
        self._rows = run.config.data.global_batch_size
        self._order = run.training_data.order
        self._events, self._status, self._writer = run.events, run.status, run.writes
        self._good: tuple[int, float] | None = None
        """The last good step and its loss."""
        self._between: set[int] = set()
        """Steps without targets among the bad steps in a row, which they neither add to nor end."""
        self._told_of_targets = False

    def see(self, step: int, values: dict[str, Any]) -> None:
        """Raises `UserError`, in all processes after the same step, after too many bad steps in a row."""
        if self._writer:
            self._note_passed_over(step)
        in_a_row = values["bad_in_a_row"]
        if not values["tokens"]:
            self._between |= {step} if in_a_row else set()
            self._note_no_targets(step)
            return
        if not in_a_row:
            self._good, self._between = (step, values["loss"]), set()
            return
        first, last = self._range(step, step)
        bad = "the loss" if not math.isfinite(values["loss"]) else "the gradient"
        if self._writer:
            self._events.write("bad_step", step=step, rows=[first, last], bad=bad, in_a_row=in_a_row)
            self._status.line(
                f"WARNING step {step}: {bad} is not finite (rows {first} to {last}); the model is left unchanged"
            )
        if in_a_row > self._most:
            raise UserError(self._diagnosis(step, in_a_row, bad))

    def _note_no_targets(self, step: int) -> None:
        """Says it of the first such step of this start: there may be many."""
        if self._writer and not self._told_of_targets:
            first, last = self._range(step, step)
            self._status.line(
                f"note    step {step}: its rows ({first} to {last}) have no targets, so it changes nothing; the loss "
                f"of such steps is null in {METRICS}"
            )
        self._told_of_targets = True

    def _note_passed_over(self, step: int) -> None:
        """Says when rows of `data.skip` have been passed over."""
        before = self._order.passed_over(step - 2) if step > 1 else 0
        passed = self._order.passed_over(step - 1) - before
        if passed:
            first, last = self._range(step, step)
            self._events.write("rows_skipped", step=step, count=passed, rows=[first, last])
            self._status.line(f"note    rows skipped in step {step}: {passed}")

    def _range(self, first_step: int, last_step: int) -> tuple[int, int]:
        """The numbers of the first and the last row of the batches of these steps."""
        first = self._order.numbers(first_step - 1, [0])
        return int(first[0]), int(self._order.numbers(last_step - 1, [self._rows - 1])[0])

    def _first_bad_step(self, step: int, in_a_row: int) -> int:
        """Returns the first of the bad steps in a row that end with `step`."""
        first = step
        while in_a_row > 1:
            first -= 1
            in_a_row -= first not in self._between
        return first

    def _diagnosis(self, step: int, in_a_row: int, bad: str) -> str:
        since = self._first_bad_step(step, in_a_row)
        first, last = self._range(since, step)
        good = "none was good since this start"
        if self._good is not None:
            good = f"the last good step was {self._good[0]}, its loss {self._good[1]:.4f}"
        return (
            f"{in_a_row} steps in a row, up to step {step}: {bad} was infinite or NaN ({good}; the rows of these "
            f"steps are {first} to {last}); if these rows are the cause, add {{from_row: {first}, rows: "
            f"{last + 1 - first}}} to data.skip; if there is a checkpoint of step {since} or later, "
            "also set another run.dir and run.fork_from to continue from an earlier one; if these rows are not "
            "the cause, lower optimizer.learning_rate and continue from an earlier checkpoint"
        )
