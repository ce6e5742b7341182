"""A Grain dataset of documents: arithmetic tables, made when they are read."""

import grain
import numpy as np

END_OF_DOCUMENT = 256
"""The id that ends a document; bytes have the ids below it."""


def _document(number: int) -> dict[str, np.ndarray]:
    """Returns the token ids of a table, such as "7 x 1 = 7, 7 x 2 = 14, …"."""
    factor = number % 97
    text = ", ".join(f"{factor} x {other} = {factor * other}" for other in range(1, 13))
    return {"tokens": np.append(np.frombuffer(text.encode(), np.uint8).astype(np.int32), END_OF_DOCUMENT)}


def training() -> grain.MapDataset:
    """Returns the documents that the run trains on."""
    return grain.MapDataset.range(900).map(_document)


def held_out() -> grain.MapDataset:
    """Returns other documents, for evaluation."""
    return grain.MapDataset.range(900, 960).map(_document)
