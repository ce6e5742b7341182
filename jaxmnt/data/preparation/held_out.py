"""Which documents are held out: those of files that are named for it, or a share of all by their contents."""

import re
from dataclasses import replace

from jaxmnt.data.preparation.document import Document
from jaxmnt.data.preparation.inputs import Input
from jaxmnt.data.preparation.settings import Settings

FRACTION = 0.02
"""The share where nothing else is said."""

_EVAL_WORDS = {"val", "valid", "validation", "eval"}


def decide(inputs: list[Input], settings: Settings) -> tuple[list[Input], Settings]:
    """The inputs, with their splits where names tell them, and the settings, with the share of the others.

    A share that was given is what counts. Else token arrays beside one named like val.bin are trained on, and that is
    held out; so are files that were given to be held out; and token arrays that are a document each are not divided.
    """
    if settings.eval_fraction is not None:
        return inputs, settings
    if not any(file.split for file in inputs):
        inputs = _by_name(inputs)
    whole = settings.tokenizer is None and settings.reading.end_id is None
    undivided = all(file.kind == "tokens" for file in inputs) and whole and settings.train_tokenizer is None
    named = any(file.split for file in inputs)
    return inputs, replace(settings, eval_fraction=0.0 if named or undivided else FRACTION)


def _by_name(inputs: list[Input]) -> list[Input]:
    arrays = [file for file in inputs if file.kind == "tokens"]
    held_out = {file.path for file in arrays if _EVAL_WORDS & set(re.split(r"[^a-z]+", file.path.stem.lower()))}
    if not 0 < len(held_out) < len(arrays):
        return inputs
    return [
        file._replace(split="eval" if file.path in held_out else "train") if file.kind == "tokens" else file
        for file in inputs
    ]


def split_of(document: Document, file: Input, fraction: float) -> str:
    """train or eval."""
    return file.split or ("eval" if int.from_bytes(document.key[:8], "big") < fraction * 2**64 else "train")
