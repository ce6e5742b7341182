"""Where a branch continues in the data: at the row where its origin stopped, even with another batch size."""

from collections.abc import Sequence
from typing import Any

from jaxmnt.checkpoint.commit import Committed
from jaxmnt.config.schema import Config
from jaxmnt.data.batches import order_of
from jaxmnt.data.order import BranchPoint, Order


def branch_points(lineage: Sequence[dict[str, Any]]) -> list[BranchPoint]:
    """Returns where a run of this lineage, and its origins before it, continued in the data; the newest first.

    Branches made by earlier versions have no row: they counted as if their origin had used their own batch size.
    """
    return [
        BranchPoint(parent["step"], parent["row"], parent["used"])
        for parent in lineage
        if parent.get("row") is not None and parent.get("used") is not None
    ]


def order_at(checkpoint: Committed) -> Order:
    """Returns the order of rows of a checkpoint's run; only its counts of rows are valid, as no data is opened."""
    config = checkpoint.config
    return order_of(config, dict.fromkeys(config.data.named_sources, 1), branch_points(checkpoint.manifest.lineage))


def branch_point(checkpoint: Committed, config: Config) -> BranchPoint:
    """Returns where a branch with this config continues in the data after a checkpoint of its origin.

    If the rows have another length, the row is chosen so that the same number of tokens precedes it.
    """
    manifest, earlier = checkpoint.manifest, checkpoint.config.data
    if not manifest.data:  # converted weights have read nothing
        return BranchPoint(manifest.step, 0, {})
    order = order_at(checkpoint)
    length = config.data.sequence_length
    converted = lambda rows: -(-rows * earlier.sequence_length // length)  # rounded up
    used = {name: converted(rows) for name, rows in order.used(manifest.step).items()}
    return BranchPoint(manifest.step, converted(order.rows_taken(manifest.step)), used)


def branch_remark(checkpoint: Committed, config: Config, point: BranchPoint, different_data: str) -> str | None:
    """Returns a message on how a branch reads other rows than its origin would have; None if it reads the same."""
    earlier, data = checkpoint.config.data, config.data
    rows = f"the branch goes on at row {point.row:,}, where its origin stopped"
    if different_data:
        rows = f"the branch goes on at row {point.row:,} of its own data ({different_data})"
    elif earlier.sequence_length != data.sequence_length:
        rows = (
            f"the branch goes on at row {point.row:,} of {data.sequence_length} tokens, where its origin stopped by "
            f"tokens; rows are cut differently, so the current epoch has read some texts and not others"
        )
    if earlier.global_batch_size != data.global_batch_size:
        return f"{rows}; a step takes {data.global_batch_size} rows instead of {earlier.global_batch_size}"
    return rows if point.row != order_at(checkpoint).rows_taken(point.step) or different_data else None
