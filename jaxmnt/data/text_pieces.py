"""Encodes a text in pieces, and decodes tokens that follow a context, with the same result as for the entire text.

Many tokenizers treat the beginning of a text in a special way. For example, those of Llama 2 and Mistral insert a space
before it, and their decoders remove the space again. A piece in the middle of a text must not get such a space, and the
text after a context must not lose one. The functions here ensure this: The pieces that `encode_pieces` or
`encode_stretches` encode decode, joined, to the same text as the ids of the entire text. `decode_after` returns
decode(context + tokens) without the prefix decode(context).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np

from jaxmnt.data.tokenizer import WHOLE_DOCUMENT, Form, Tokenizer

_CONTEXT_TOKENS = 128
"""Number of context tokens that are decoded together with the tokens after them. More would not change the text."""

_MAX_CHARACTER_BYTES = 4
"""Maximum number of bytes of a character in UTF-8. Each of them may be a token."""

MAX_CONTEXT = _CONTEXT_TOKENS + _MAX_CHARACTER_BYTES
"""Maximum number of context tokens that `decode_after` uses, if one of the first of them begins a character."""

_REPLACEMENT = "\ufffd"
"""The character to which decoders map invalid UTF-8."""


class Piece(NamedTuple):
    """A part of a text that is encoded separately, for example because only some parts are targets."""

    text: str
    markup: bool = False
    """True if names of special tokens in the text stand for those tokens."""


def encode_pieces(tokenizer: Tokenizer, texts: Sequence[Sequence[Piece]]) -> list[list[np.ndarray]]:
    """Returns the token ids of each piece of each text.

    Pieces are encoded separately, so that no token crosses the boundary between two pieces. If the text cannot be cut
    at a boundary (for example because the tokenizer composes the two characters there, or drops one of two spaces),
    the pieces are encoded as one text, and a token that crosses the boundary belongs to the later piece.
    """
    encoded = [[np.empty(0, np.uint32) for _ in pieces] for pieces in texts]
    separate_pieces = defaultdict(list)
    for number, pieces in enumerate(texts):
        nonempty = [index for index, piece in enumerate(pieces) if piece.text]
        for group in _groups(tokenizer, pieces, nonempty):
            form = Form(pieces[group[0]].markup, begins=group[0] == nonempty[0], ends=group[-1] == nonempty[-1])
            if len(group) == 1:
                separate_pieces[form].append((number, group[0]))
                continue
            ids_of_group = tokenizer.encode_joined([pieces[index].text for index in group], form)
            for index, ids in zip(group, ids_of_group, strict=True):
                encoded[number][index] = ids
    for form, indices in separate_pieces.items():
        ids_of_texts = tokenizer.encode_batch([texts[number][index].text for number, index in indices], form)
        for (number, index), ids in zip(indices, ids_of_texts, strict=True):
            encoded[number][index] = ids
    return encoded


def encode_stretches(tokenizer: Tokenizer, stretches: Iterable[str]) -> Iterator[np.ndarray]:
    """Yields the token ids of a text whose stretches arrive one after another.

    Stretches between which the text cannot be cut are encoded together.
    """
    pending_text = ""
    form = WHOLE_DOCUMENT
    for stretch in stretches:
        if pending_text and stretch and tokenizer.can_cut(pending_text, stretch):
            yield tokenizer.encode_batch([pending_text], form._replace(ends=False))[0]
            pending_text = stretch
            form = Form(begins=False)
        else:
            pending_text += stretch
    if pending_text:
        yield tokenizer.encode_batch([pending_text], form)[0]


def decode_after(tokenizer: Tokenizer, context: Any, tokens: Any) -> str:
    """Returns the text that `tokens` add to the text of `context`: decode(context + tokens) without decode(context).

    A character that begins in the context and ends in the tokens belongs to the tokens.
    """
    tail, text_of_tail = _tail(tokenizer, np.asarray(context, np.int64))
    text = tokenizer.decode(np.concatenate([tail, np.asarray(tokens, np.int64)]))
    common_prefix = takewhile(lambda pair: pair[0] == pair[1], zip(text_of_tail, text, strict=False))
    return text[len(list(common_prefix)) :]


def _tail(tokenizer: Tokenizer, context: np.ndarray) -> tuple[np.ndarray, str]:
    """Returns the last tokens of a context, and their text, which begins with a complete character."""
    last_start = len(context) - _CONTEXT_TOKENS
    for start in range(last_start, max(0, last_start - _MAX_CHARACTER_BYTES), -1):
        text = tokenizer.decode(context[start:])
        if text and not text.startswith(_REPLACEMENT):
            return context[start:], text
    return context, tokenizer.decode(context)


def _groups(tokenizer: Tokenizer, pieces: Sequence[Piece], nonempty: Sequence[int]) -> Iterator[list[int]]:
    """Yields, in order, groups of the indices of pieces that are encoded as one text. Most groups have one piece.

    Pieces with markup are always encoded separately from pieces without markup.
    """
    for _, same_markup in groupby(nonempty, lambda index: pieces[index].markup):
        indices = list(same_markup)
        if all(tokenizer.can_cut(pieces[first].text, pieces[second].text) for first, second in pairwise(indices)):
            yield from ([index] for index in indices)
        else:
            yield indices
