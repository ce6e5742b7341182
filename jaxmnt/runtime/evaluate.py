"""Exact evaluation: every held-out token of every source once, whatever the number of hosts."""

from typing import Any, NamedTuple

import jax

from jaxmnt.data.batches import EvaluationData
from jaxmnt.data.feed import process_rows, to_devices
from jaxmnt.data.sources import Sources
from jaxmnt.program.compiled import Program


class Sums(NamedTuple):
    """A sum of cross-entropy in nats over `tokens` held-out targets."""

    loss: float
    tokens: int


class Evaluator:
    """Evaluates on the held-out split of each source that has one; its rows are planned once."""

    def __init__(self, program: Program, data: Sources):
        config = program.setting.config
        self._program = program
        self._parts = {name: EvaluationData(config, part) for name, part in data.parts.items() if part.tokens("eval")}
        self._rows = process_rows(program.batch_sharding, program.eval_rows, config.data.sequence_length)

    def __call__(self, params: dict[str, Any]) -> dict[str, Sums]:
        """The result of each source; all processes get the same. Empty if nothing is held out."""
        results = {name: self._evaluate(params, part) for name, part in self._parts.items()}
        return {name: result for name, result in results.items() if result.tokens}

    def _evaluate(self, params: dict[str, Any], part: EvaluationData) -> Sums:
        program, settings = self._program, self._program.setting.config.data
        batches = part.batches(self._rows, program.eval_rows, prefetch=settings.prefetch, threads=settings.read_threads)
        total, pending = Sums(0.0, 0), None
        for local in batches:
            placed = to_devices(local, self._rows, program.eval_rows, program.batch_sharding)
            dispatched = program.evaluate(params, placed)
            total = _add(total, pending)  # of the batch before, while this one is computed
            pending = dispatched
        return _add(total, pending)


def _add(total: Sums, pending: Any) -> Sums:
    if pending is None:
        return total
    values = jax.device_get(pending)
    return Sums(total.loss + float(values["loss_sum"]), total.tokens + int(values["tokens"]))
