"""Evaluates a run's model between steps: the held-out loss.

An evaluation is exact: each token of a fixed part of every source's held-out data counts once, regardless of the number
of hosts. `train.eval_tokens` sets the size of that part.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxmnt.data.batches import EvaluationData
from jaxmnt.data.feed import process_rows, to_devices
from jaxmnt.data.sources import Sources
from jaxmnt.telemetry.metrics import EvaluationSums
from jaxmnt.training.average import averaged_model
from jaxmnt.training.compile import Program
from jaxmnt.training.spec import ControlFlags
from jaxmnt.training.state import model_state


class Evaluator:
    """Evaluates on the held-out split of each source that has one, and on the config's evaluation sets.

    The rows are planned once, so every evaluation of a run reads the same rows.
    """

    def __init__(self, program: Program, data: Sources):
        config = program.spec.config
        self._program = program
        self._control = ControlFlags(program.control_sharding)
        self._parts = {name: EvaluationData(config, part) for name, part in data.parts.items() if part.tokens("eval")}
        for name, part in data.eval_sets.items():
            self._parts[name] = EvaluationData(config, part, "eval" if part.tokens("eval") else "train")
        self._limit_rows(config.eval_limit, config.data.sequence_length)
        self._rows = process_rows(program.batch_sharding, program.eval_rows, config.data.sequence_length)

    def _limit_rows(self, tokens: int | None, length: int) -> None:
        """Limits an evaluation to `tokens`, in rows of `length`, divided among the sources and sets in proportion to
        their sizes. Each gets at least one row."""
        if tokens is None:
            return
        row_limit = -(-tokens // length)  # rounded up
        total_rows = sum(part.row_count for part in self._parts.values())
        for part in self._parts.values():
            part.limit_rows(max(1, round(part.row_count * row_limit / total_rows)))

    def compile(self) -> None:
        """Compiles the evaluation if any data is held out and it is not compiled yet."""
        if self._parts:
            _ = self._program.evaluate  # compiled at the first access

    def __call__(
        self,
        state: dict[str, Any],
        should_stop: Callable[[], bool] = lambda: False,
        note_progress: Callable[[str], None] = lambda done: None,
        *,
        averaged: bool = False,
    ) -> dict[str, EvaluationSums] | None:
        """Returns the result of each source and set, equal in all processes. Empty if no data is held out. With
        `averaged`, the results are those of the averaged parameters.

        The result of a source without targets is a sum over 0 tokens. Calls `should_stop` before each batch to ask
        whether this process wants to stop, and `note_progress` after each batch. If any process wants to stop, returns
        None in all processes after the same batch.
        """
        spec = self._program.spec
        model = averaged_model(spec, state) if averaged else model_state(state)
        results = {}
        batches_done = 0
        batch_count = sum(-(-part.row_count // self._program.eval_rows) for part in self._parts.values())
        for name, part in self._parts.items():
            sums = EvaluationSums(0.0, 0, None)
            for values in self._evaluate_batches(model, part, should_stop):
                batches_done += 1
                note_progress(f"batch {batches_done} of {batch_count}")
                if values["stop"]:
                    return None
                reported = {name: (float(total), float(weight)) for name, (total, weight) in values["reported"].items()}
                sums = sums.plus(EvaluationSums(float(values["loss_sum"]), int(values["tokens"]), None, reported))
            target_bytes = part.bytes_per_target and sums.tokens * part.bytes_per_target
            results[name] = sums._replace(text_bytes=target_bytes)
        return results

    def _evaluate_batches(
        self, model: dict[str, Any], part: EvaluationData, should_stop: Callable[[], bool]
    ) -> Iterator[Any]:
        """Yields the results of each batch, which are fetched while the devices evaluate the next batch."""
        program, settings = self._program, self._program.spec.config.data
        batches = part.batches(self._rows, program.eval_rows, prefetch=settings.prefetch, threads=settings.read_threads)
        pending = None
        for local_batch in batches:
            device_batch = to_devices(local_batch, self._rows, program.eval_rows, program.batch_sharding)
            dispatched = program.evaluate(model, device_batch | {"control": self._control.array(stop=should_stop())})
            if pending is not None:
                yield jax.device_get(pending)
            pending = dispatched
        if pending is not None:
            yield jax.device_get(pending)
