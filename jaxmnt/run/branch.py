"""Where a branch goes on in the data: at the row where its origin stopped, also with another number of rows a step."""

from collections.abc import Sequence
from typing import Any

from jaxmnt.checkpoint.commit import Committed
from jaxmnt.config.schema import Config
from jaxmnt.data.batches import order_of
from jaxmnt.data.order import BranchPoint, Order


def branch_points(lineage: Sequence[dict[str, Any]]) -> list[BranchPoint]:
    """Where a run of this lineage, and before that its origin, went on in the data; the newest first.

    Branches of earlier versions have no row there: they counted as if their origin had had their own batch size.
    """
    return [
        BranchPoint(parent["step"], parent["row"], parent["used"])
        for parent in lineage
        if parent.get("row") is not None and parent.get("used") is not None
    ]


def order_at(checkpoint: Committed) -> Order:
    """The order of rows of a checkpoint's run, of which only the numbers of rows are asked."""
    config = checkpoint.config
    return order_of(config, dict.fromkeys(config.data.named_sources, 1), branch_points(checkpoint.manifest.lineage))


def branch_point(checkpoint: Committed, config: Config) -> BranchPoint:
    """Where a branch with this config goes on after a checkpoint of its origin.

    Rows of another length are counted so that as many tokens lie before the branch.
    """
    manifest, earlier = checkpoint.manifest, checkpoint.config.data
    if not manifest.data:  # converted weights have read nothing
        return BranchPoint(manifest.step, 0, {})
    order, length = order_at(checkpoint), config.data.sequence_length
    counted = lambda rows: -(-rows * earlier.sequence_length // length)
    used = {name: counted(rows) for name, rows in order.used(manifest.step).items()}
    return BranchPoint(manifest.step, counted(order.rows_taken(manifest.step)), used)


def branch_remark(checkpoint: Committed, config: Config, point: BranchPoint, different_data: str) -> str | None:
    """What a branch reads otherwise than its origin would have, in a line for people; None if nothing."""
    earlier, data = checkpoint.config.data, config.data
    rows = f"the branch goes on at row {point.row:,}, where its origin stopped"
    if different_data:
        rows = f"the branch goes on at row {point.row:,} of its own data ({different_data})"
    elif earlier.sequence_length != data.sequence_length:
        rows = (
            f"the branch goes on at row {point.row:,} of {data.sequence_length} tokens, where its origin stopped by "
            f"tokens; rows are cut otherwise, so the epoch under way has read some texts and not others"
        )
    if earlier.global_batch_size != data.global_batch_size:
        return f"{rows}; a step takes {data.global_batch_size} rows instead of {earlier.global_batch_size}"
    return rows if point.row != order_at(checkpoint).rows_taken(point.step) or different_data else None
