"""What a document consists of until it is encoded."""

from typing import NamedTuple

import numpy as np


class Segment(NamedTuple):
    """A stretch of a document."""

    content: str | np.ndarray
    """Text, or tokens as they are."""
    learn: bool = True
    """Whether its tokens are targets."""
    markup: bool = False
    """Whether names of special tokens in the text stand for those tokens. Only for text of our own."""


class BadRecordError(Exception):
    """A record that cannot be used. The text says which and why."""
