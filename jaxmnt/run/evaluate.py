"""Exact evaluation: every held-out token of every source once, whatever the number of hosts."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from jaxmnt.data.batches import EvaluationData
from jaxmnt.data.feed import process_rows, to_devices
from jaxmnt.data.sources import Sources
from jaxmnt.training.compile import Program
from jaxmnt.training.spec import ControlFlags
from jaxmnt.training.state import model_state


class Sums(NamedTuple):
    """A sum of cross-entropy in nats over `tokens` held-out targets."""

    loss: float
    tokens: int


class Evaluator:
    """Evaluates on the held-out split of each source that has one, and on the sets of the config; rows are planned
    once."""

    def __init__(self, program: Program, data: Sources):
        config = program.spec.config
        self._program = program
        self._wishes = ControlFlags(program.control_sharding)
        self._parts = {name: EvaluationData(config, part) for name, part in data.parts.items() if part.tokens("eval")}
        for name, part in data.eval_sets.items():
            self._parts[name] = EvaluationData(config, part, "eval" if part.tokens("eval") else "train")
        self._rows = process_rows(program.batch_sharding, program.eval_rows, config.data.sequence_length)

    def compile(self) -> None:
        """Compiles what a call executes, if anything is held out. It takes no time when it is done already."""
        if self._parts:
            _ = self._program.evaluate

    def __call__(
        self,
        state: dict[str, Any],
        stop: Callable[[], bool] = lambda: False,
        got_further: Callable[[], None] = lambda: None,
    ) -> dict[str, Sums] | None:
        """The result of each source and set; all processes get the same. Empty if nothing is held out. What has no
        targets has a sum over 0 tokens.

        `stop` asks with each batch whether this process wants to stop, and `got_further` is called after it. None, in
        all processes after the same batch, if one of them did.
        """
        results = {}
        for name, part in self._parts.items():
            total = Sums(0.0, 0)
            for values in self._batches(model_state(state), part, stop):
                got_further()
                if values["stop"]:
                    return None
                total = Sums(total.loss + float(values["loss_sum"]), total.tokens + int(values["tokens"]))
            results[name] = total
        return results

    def _batches(self, model: dict[str, Any], part: EvaluationData, stop: Callable[[], bool]) -> Iterator[Any]:
        """The values of each batch, read while the next one is computed."""
        program, settings = self._program, self._program.spec.config.data
        batches = part.batches(self._rows, program.eval_rows, prefetch=settings.prefetch, threads=settings.read_threads)
        pending = None
        for local in batches:
            placed = to_devices(local, self._rows, program.eval_rows, program.batch_sharding)
            dispatched = program.evaluate(model, placed | {"control": self._wishes.array(stop=stop())})
            if pending is not None:
                yield jax.device_get(pending)
            pending = dispatched
        if pending is not None:
            yield jax.device_get(pending)
