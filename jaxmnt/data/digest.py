"""The digest of a batch: what tells two runs' inputs apart, or shows that they are the same."""

import hashlib

import numpy as np


def row_digests(tokens: np.ndarray) -> np.ndarray:
    """uint8 [R, 32]: SHA-256 of each row's token ids as little-endian int32. `tokens`: [R, L]."""
    digests = [hashlib.sha256(row.astype("<i4").tobytes()).digest() for row in tokens]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)


def batch_digest(digests: np.ndarray) -> str:
    """SHA-256, in hex, over the digests of all rows of the global batch in order."""
    return hashlib.sha256(digests.tobytes()).hexdigest()
