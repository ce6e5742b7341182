"""Exact evaluation: every held-out token once, whatever the number of hosts."""

from typing import Any, NamedTuple

import jax

from jaxmnt.data.batches import evaluation_rows
from jaxmnt.data.feed import process_rows, to_devices
from jaxmnt.data.store import PreparedData
from jaxmnt.program.compiled import Program


class Evaluation(NamedTuple):
    """Mean cross-entropy in nats a token, over `tokens` held-out tokens."""

    loss: float
    tokens: int


def evaluate(program: Program, params: dict[str, Any], data: PreparedData) -> Evaluation | None:
    """Evaluates on the whole held-out split; None if the data has none. All processes get the same result."""
    if not data.tokens("eval"):
        return None
    settings = program.setting.config.data
    total_rows, sharding = program.eval_rows, program.batch_sharding
    rows = process_rows(sharding, total_rows, settings.sequence_length)
    source = evaluation_rows(
        data,
        rows=rows,
        global_rows=total_rows,
        length=settings.sequence_length,
        document_mask=settings.document_mask,
        prefetch=settings.prefetch,
    )
    loss, tokens = 0.0, 0
    pending = None
    for local in source:
        dispatched = program.evaluate(params, to_devices(local, rows, total_rows, sharding))
        if pending is not None:
            loss, tokens = _add(loss, tokens, pending)
        pending = dispatched
    loss, tokens = _add(loss, tokens, pending)
    return Evaluation(loss / tokens, tokens)


def _add(loss: float, tokens: int, sums: Any) -> tuple[float, int]:
    values = jax.device_get(sums)
    return loss + float(values["loss_sum"]), tokens + int(values["tokens"])
