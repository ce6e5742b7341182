"""Encodes a text in pieces, and decodes the tokens after a context, as if the text were whole.

Many tokenizers treat the beginning of a text in a special way: those of Llama 2's and Mistral's kind insert a blank
before it, and their decoders remove it again. A piece in the middle of a text must not get such a blank, and the text
after a context must not lose one. So the pieces of a text, encoded by `encode_pieces` or `encode_stretches`, together
decode to the same text as the ids of the whole text; and `decode_after` is decode(context + tokens) minus
decode(context).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np

from jaxmnt.data.tokenizer import WHOLE, Form, Tokenizer

_CONTEXT_TOKENS = 128
"""Context tokens that are decoded with the following tokens. More would take longer and give the same text."""

_LONGEST_CHARACTER = 4
"""Most bytes of a character in UTF-8; each may be a token."""

LONGEST_CONTEXT = _CONTEXT_TOKENS + _LONGEST_CHARACTER
"""Most context tokens that `decode_after` uses, if one of them begins a character."""

_INCOMPLETE = "\ufffd"
"""The character to which decoders map invalid UTF-8."""


class Piece(NamedTuple):
    """A part of a text that is encoded separately, for instance because only some parts are targets."""

    text: str
    markup: bool = False
    """True if names of special tokens in the text stand for those tokens."""


def encode_pieces(tokenizer: Tokenizer, texts: Sequence[Sequence[Piece]]) -> list[list[np.ndarray]]:
    """Returns the token ids of each piece of each text.

    Pieces are encoded apart, so that the boundary between two of them is also one between tokens. Where a tokenizer
    cannot be cut (it composes two characters, say, or drops a blank beside another), the pieces are encoded as one
    text, and a token across the boundary belongs to the later piece.
    """
    encoded = [[np.empty(0, np.uint32) for _ in pieces] for pieces in texts]
    apart = defaultdict(list)
    for number, pieces in enumerate(texts):
        filled = [index for index, piece in enumerate(pieces) if piece.text]
        for group in _groups(tokenizer, pieces, filled):
            form = Form(pieces[group[0]].markup, begins=group[0] == filled[0], ends=group[-1] == filled[-1])
            if len(group) == 1:
                apart[form].append((number, group[0]))
                continue
            ids_of_group = tokenizer.encode_joined([pieces[index].text for index in group], form)
            for index, ids in zip(group, ids_of_group, strict=True):
                encoded[number][index] = ids
    for form, indices in apart.items():
        ids_of_texts = tokenizer.encode_batch([texts[number][index].text for number, index in indices], form)
        for (number, index), ids in zip(indices, ids_of_texts, strict=True):
            encoded[number][index] = ids
    return encoded


def encode_stretches(tokenizer: Tokenizer, stretches: Iterable[str]) -> Iterator[np.ndarray]:
    """Yields the token ids of a text that comes in stretches, a stretch at a time.

    Where the tokenizer cannot be cut between two stretches, they are encoded as one.
    """
    waiting, form = "", WHOLE
    for stretch in stretches:
        if waiting and stretch and tokenizer.can_cut(waiting, stretch):
            yield tokenizer.encode_batch([waiting], form._replace(ends=False))[0]
            waiting, form = stretch, Form(begins=False)
        else:
            waiting += stretch
    if waiting:
        yield tokenizer.encode_batch([waiting], form)[0]


def decode_after(tokenizer: Tokenizer, context: Any, tokens: Any) -> str:
    """Returns the text that `tokens` add to the text of `context`: decode(context + tokens) minus decode(context).

    A character that the context begins and the tokens end belongs to the tokens.
    """
    context, tokens = np.asarray(context, np.int64), np.asarray(tokens, np.int64)
    tail, before = _tail(tokenizer, context)
    whole = tokenizer.decode(np.concatenate([tail, tokens]))
    in_both = takewhile(lambda pair: pair[0] == pair[1], zip(before, whole, strict=False))
    return whole[len(list(in_both)) :]


def _tail(tokenizer: Tokenizer, context: np.ndarray) -> tuple[np.ndarray, str]:
    """Returns the last tokens of a context, and their text, which begins with a whole character."""
    latest = len(context) - _CONTEXT_TOKENS
    for start in range(latest, max(0, latest - _LONGEST_CHARACTER), -1):
        text = tokenizer.decode(context[start:])
        if text and not text.startswith(_INCOMPLETE):
            return context[start:], text
    return context, tokenizer.decode(context)


def _groups(tokenizer: Tokenizer, pieces: Sequence[Piece], filled: Sequence[int]) -> Iterator[list[int]]:
    """Yields groups of indices of pieces that are encoded as one text, in order; most groups have one piece.

    Pieces with and without markup are always encoded apart.
    """
    for _, run in groupby(filled, lambda index: pieces[index].markup):
        indices = list(run)
        if all(tokenizer.can_cut(pieces[before].text, pieces[after].text) for before, after in pairwise(indices)):
            yield from ([index] for index in indices)
        else:
            yield indices
