"""Finds where a branch continues in the data: at the row where its origin stopped, even with another batch size."""

from collections.abc import Sequence
from typing import Any

from jaxmnt.checkpoint.commit import Committed
from jaxmnt.config.schema import Config
from jaxmnt.data.batches import order_of
from jaxmnt.data.order import BranchPoint, Order


def branch_points(lineage: Sequence[dict[str, Any]]) -> list[BranchPoint]:
    """Returns the points in the data at which a run with this lineage, and its origins, branched off; the newest first.

    Branches made by earlier versions record no row. They counted rows as if their origin had used their own batch size.
    """
    return [
        BranchPoint(parent["step"], parent["row"], parent["used"])
        for parent in lineage
        if parent.get("row") is not None and parent.get("used") is not None
    ]


def order_at(checkpoint: Committed) -> Order:
    """Returns the order in which a checkpoint's run reads rows.

    No data is opened, so only the counts of rows that the order returns are valid.
    """
    config = checkpoint.config
    return order_of(config, dict.fromkeys(config.data.named_sources, 1), branch_points(checkpoint.manifest.lineage))


def branch_point(checkpoint: Committed, config: Config) -> BranchPoint:
    """Returns where a branch with this config continues in the data after `checkpoint`, which belongs to its origin.

    If the rows of the branch have another length, the same number of tokens precedes the row (rounded up).
    """
    manifest, origin_data = checkpoint.manifest, checkpoint.config.data
    if not manifest.data:  # a converted model has read no data
        return BranchPoint(manifest.step, 0, {})
    order = order_at(checkpoint)
    length = config.data.sequence_length
    convert_rows = lambda rows: -(-rows * origin_data.sequence_length // length)  # rounded up
    used = {name: convert_rows(rows) for name, rows in order.used(manifest.step).items()}
    return BranchPoint(manifest.step, convert_rows(order.rows_taken(manifest.step)), used)


def branch_remark(checkpoint: Committed, config: Config, point: BranchPoint, different_data: str) -> str | None:
    """Returns a message if a branch continues with other rows than its origin would have; None if with the same."""
    origin_data, data = checkpoint.config.data, config.data
    message = f"the branch continues at row {point.row:,}, where its origin stopped"
    if different_data:
        message = f"the branch continues at row {point.row:,} of its own data ({different_data})"
    elif origin_data.sequence_length != data.sequence_length:
        message = (
            f"the branch continues at row {point.row:,} of {data.sequence_length} tokens, after as many tokens as its "
            f"origin has read; rows are cut differently, so in this epoch some texts are read twice and others never"
        )
    if origin_data.global_batch_size != data.global_batch_size:
        return f"{message}; a step takes {data.global_batch_size} rows instead of {origin_data.global_batch_size}"
    is_other_row = point.row != order_at(checkpoint).rows_taken(point.step)
    return message if different_data or is_other_row else None
