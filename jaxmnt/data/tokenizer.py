"""Encodes text as token ids, and decodes token ids."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxmnt.data.manifest import BYTES, TOKENIZER_FILE
from jaxmnt.errors import ConfigError, how_to_install, printable, suggest
from jaxmnt.storage import read
from jaxmnt.strict_json import json_text

END_OF_DOCUMENT = "<|endoftext|>"
"""The end-of-document token of tokenizers that `train_bpe` trains."""

_STRETCH_CHARACTERS = 2**19
"""Approximate number of characters of a text that are encoded at a time."""

_WORD_BOUNDARY = re.compile(r"\S\n(?=\S)|[^\W\d_](?= [^\W\d_])")
_MAX_TRIED_BOUNDARIES = 8
_CHECKED_CHARACTERS = 2**11
"""Number of characters before and after a boundary that are encoded to check whether a long text can be cut there."""

_SAMPLE = "a"
"""A text that is encoded to find the ids that a tokenizer adds before every text."""

_CHECKED_PIECE_CHARACTERS = 64
"""Number of characters before and after a boundary between pieces that are encoded to check whether the text can be cut
there."""

_COMMON_END_TOKENS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[SEP]")


class Form(NamedTuple):
    """Describes a text to encode. The default is a complete document without markup."""

    markup: bool = False
    """True if the name of a special token in the text stands for that token; else such a name is plain text."""
    begins: bool = True
    """True if the text begins a document."""
    ends: bool = True
    """True if the text ends a document."""


WHOLE_DOCUMENT = Form()


class TargetText(NamedTuple):
    """A text in pieces, some of which are targets."""

    pieces: list[str]
    is_target: list[bool]


class TargetTokens(NamedTuple):
    """The tokens of a text, some of which are targets."""

    ids: np.ndarray
    is_target: np.ndarray
    """bool, for each token."""
    crossing: int
    """Number of tokens that cross the boundary between a target and other text."""


class Bytes:
    """Encodes text as UTF-8 bytes with ids 0–255. The id 256 ends a document."""

    vocab_size = 257
    end_of_document: int | None = 256
    special_names: ClassVar[Mapping[int, str]] = {256: "<end of document>"}
    """Names to show for ids without text."""

    @property
    def description(self) -> dict[str, Any]:
        return {"name": BYTES, "end_of_document": self.end_of_document}

    def encode_batch(self, texts: Sequence[str], form: Form = WHOLE_DOCUMENT) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8", errors="replace"), np.uint8) for text in texts]

    def encode_joined(self, texts: Sequence[str], form: Form = WHOLE_DOCUMENT) -> list[np.ndarray]:
        return self.encode_batch(texts, form)

    def encode_with_targets(self, texts: Sequence[TargetText]) -> list[TargetTokens]:
        results = []
        for text in texts:
            pieces = self.encode_batch(text.pieces)
            masks = [np.full(len(ids), target) for ids, target in zip(pieces, text.is_target, strict=True)]
            results.append(TargetTokens(np.concatenate(pieces), np.concatenate(masks), 0))
        return results

    def can_cut(self, before: str, after: str) -> bool:
        return True

    def decode(self, tokens: np.ndarray) -> str:
        byte_ids = np.asarray(tokens)[np.asarray(tokens) < 256]
        return byte_ids.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class HuggingFace:
    """A tokenizer.json of the `tokenizers` library."""

    end_of_document: int | None
    """The id that follows every document, and also precedes the first one; None if there is no such id."""
    end_token: str | None
    """The name of the token with this id."""

    def __init__(self, path: Path, end_token: str | None = None, *, for_text: bool = False, content: str | None = None):
        """If `for_text` is True, documents will be encoded, which requires an end token that cannot occur in them.

        `content` is the content of the file if the caller has already read it.
        """
        library = _library()
        try:
            text = read(path).decode() if content is None else content
            self._plain, self._markup = library.Tokenizer.from_str(text), library.Tokenizer.from_str(text)
        except OSError as error:
            raise ConfigError(f"--tokenizer: {path} cannot be read: {error.strerror}; check its permissions") from error
        except BaseException as error:
            # The library raises Exception itself, but a panic in Rust raises a class that does not derive from it.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ConfigError(f"--tokenizer: {path} is not a tokenizer.json: {printable(str(error)[:200])}") from error
        for tokenizer in (self._plain, self._markup):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._plain.encode_special_tokens = True  # names of special tokens in a document are text
        self._piece_tokenizer = cache(self._make_piece_tokenizer)
        self.end_token = self._find_end_token(end_token, path, required=for_text)
        self.end_of_document = None if self.end_token is None else int(self._plain.token_to_id(self.end_token))
        if for_text and self.end_of_document in self.encode_batch([self.end_token or ""])[0]:
            raise ConfigError(
                f"--end-token: {self.end_token!r} of {path} can occur in text, and would end a document there; "
                "name a special token"
            )
        # Ids may have gaps, so the size is determined by the largest id.
        self.vocab_size = max(self._plain.get_vocab_size(with_added_tokens=True), 1 + max(self.ids.values()))
        self._digest = hashlib.sha256(text.encode()).hexdigest()

    @property
    def start(self) -> list[int]:
        """The ids that the tokenizer itself adds before a text, such as that of <s>. Ids that it appends are left
        out."""
        plain = self._plain.encode(_SAMPLE, add_special_tokens=False).ids
        extended = self._plain.encode(_SAMPLE, add_special_tokens=True).ids
        if not plain:
            return extended
        return next(extended[:at] for at in range(len(extended)) if extended[at : at + len(plain)] == plain)

    @property
    def _added_tokens(self) -> Any:
        """The added tokens, including special tokens."""
        return self._plain.get_added_tokens_decoder().values()

    @property
    def special(self) -> set[str]:
        """Names of the special tokens, which only text with markup is encoded as."""
        return {token.content for token in self._added_tokens if token.special}

    @cached_property
    def _special_name(self) -> re.Pattern[str] | None:
        """Matches the name of any special token, and of several at one place the longest."""
        names = sorted(self.special, key=lambda name: (-len(name), name))
        return re.compile("|".join(map(re.escape, names))) if names else None

    def special_name_in(self, text: str) -> str | None:
        """Returns the first name of a special token in a text; None if there is none."""
        match = self._special_name.search(text) if self._special_name is not None else None
        return None if match is None else match[0]

    @cached_property
    def special_names(self) -> Mapping[int, str]:
        """Names to show for ids without text."""
        return {self.ids[name]: name for name in sorted(self.special)}

    @property
    def ids(self) -> dict[str, int]:
        """The id of each token, by the name of the token."""
        return self._plain.get_vocab(with_added_tokens=True)

    @property
    def description(self) -> dict[str, Any]:
        """The entry for the manifest, from which `make_tokenizer` creates the same tokenizer."""
        return {
            "name": "huggingface",
            "sha256": self._digest,
            "end_token": self.end_token,
            "end_of_document": self.end_of_document,
        }

    def encode_batch(self, texts: Sequence[str], form: Form = WHOLE_DOCUMENT) -> list[np.ndarray]:
        """Returns the token ids of each text, without ends of documents, in an unsigned dtype."""
        if all(len(text) <= _STRETCH_CHARACTERS for text in texts) or self._plain.pre_tokenizer is None:
            return self._encode(texts, form)
        return [np.concatenate(list(self._encode_long(text, form))) for text in texts]

    def encode_joined(self, texts: Sequence[str], form: Form = WHOLE_DOCUMENT) -> list[np.ndarray]:
        """Joins texts, encodes the result, and returns the token ids of each text.

        A token that crosses the boundary between texts belongs to the text that contains its last character.
        """
        encoding = self._tokenizer_for(form).encode("".join(texts), add_special_tokens=False)
        ids = np.array(encoding.ids, np.uint32)
        stops = np.cumsum([len(text) for text in texts])
        last_characters = np.array([max(0, stop - 1) for _, stop in encoding.offsets], np.int64)
        text_of_token = np.searchsorted(stops, last_characters, side="right")
        # A token without characters belongs to the text of the token before it.
        text_of_token = np.maximum.accumulate(text_of_token)
        return [ids[text_of_token == number] for number in range(len(texts))]

    def encode_with_targets(self, texts: Sequence[TargetText]) -> list[TargetTokens]:
        """Joins the pieces of each text, and encodes the result, with names of special tokens as those tokens.

        A token is a target if any of its characters is in a piece that is a target.
        """
        joined = ["".join(text.pieces) for text in texts]
        encodings = self._markup.encode_batch(joined, add_special_tokens=False)
        return [_mark_targets(encoding, text) for encoding, text in zip(encodings, texts, strict=True)]

    def can_cut(self, before: str, after: str) -> bool:
        """Returns True if the two texts, encoded separately, decode to the same text as their concatenation."""
        if self._is_lossless:
            return True
        if self._prefixed_token_in([before, after]) is not None:
            return False
        if "Strip" in self._normalizers and not (before.strip() and after.strip()):
            # Strip removes white space only at the ends of the entire text.
            return False
        before = before[-_CHECKED_PIECE_CHARACTERS:]
        after = after[:_CHECKED_PIECE_CHARACTERS]
        [ids] = self._encode([before + after])
        [ids_before] = self._encode([before], Form(ends=False))
        [ids_after] = self._encode([after], Form(begins=False))
        return self.decode(np.concatenate([ids_before, ids_after])) == self.decode(ids)

    def _encode_long(self, text: str, form: Form) -> Iterator[np.ndarray]:
        """Yields the ids of a long text in stretches, whose concatenation equals the ids of the entire text."""

        def has_same_tokens(before: str, after: str) -> bool:
            inner_form = form._replace(begins=False, ends=False)
            ids_before, ids_after, ids = self._encode([before, after, before + after], inner_form)
            return np.array_equal(np.concatenate([ids_before, ids_after]), ids)

        start = 0
        for stretch in _stretches(text, has_same_tokens):
            stop = start + len(stretch)
            begins = form.begins and start == 0
            ends = form.ends and stop == len(text)
            yield self._encode([stretch], Form(form.markup, begins, ends))[0]
            start = stop

    def _encode(self, texts: Sequence[str], form: Form = WHOLE_DOCUMENT) -> list[np.ndarray]:
        if not form.begins and (token := self._prefixed_token_in(texts, form.markup)) is not None:
            raise ConfigError(
                f"--tokenizer: the added token {token!r} is matched with a space before it, so text in pieces "
                'cannot be encoded with it; set "normalized" of this token to false in tokenizer.json'
            )
        encodings = self._tokenizer_for(form).encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    @cached_property
    def _parts(self) -> dict[str, Any]:
        """The parts of tokenizer.json that determine how the beginning and the end of a text are treated."""
        tree = json.loads(self._plain.to_str())
        return {name: tree[name] for name in ("normalizer", "pre_tokenizer", "decoder")}

    @cached_property
    def _is_lossless(self) -> bool:
        """True if every text decodes to itself wherever it is cut, as with a byte-level tokenizer without a
        normalizer."""
        ordinary_tokens = [token for token in self._added_tokens if not token.special]
        drops_white_space = any(token.lstrip or token.rstrip for token in ordinary_tokens)
        is_byte_level = self._parts["normalizer"] is None and (self._parts["decoder"] or {}).get("type") == "ByteLevel"
        return is_byte_level and not drops_white_space

    @cached_property
    def _normalizers(self) -> set[str]:
        """The types of the tokenizer's normalizers."""

        def types(part: dict[str, Any]) -> set[str]:
            return {part["type"]}.union(*(types(step) for step in part.get("normalizers", [])))

        return set() if self._parts["normalizer"] is None else types(self._parts["normalizer"])

    def _prefixed_token_in(self, texts: Sequence[str], markup: bool = False) -> str | None:
        """Returns an added token in the texts that is matched with the prefix that the normalizer adds; None if there
        is no such token.

        Without markup, names of special tokens are plain text.
        """
        if "Prepend" not in self._normalizers:
            return None
        names = sorted(
            token.content for token in self._added_tokens if token.normalized and (markup or not token.special)
        )
        return next((name for name in names if any(name in text for text in texts)), None)

    def _tokenizer_for(self, form: Form) -> Any:
        """Returns the library's tokenizer for texts of this form."""
        if form.begins and form.ends:
            return self._markup if form.markup else self._plain
        return self._piece_tokenizer(form)

    def _make_piece_tokenizer(self, form: Form) -> Any:
        """Returns the library's tokenizer for pieces of a document, without the steps that apply only to its beginning
        or end."""
        document_tokenizer = self._markup if form.markup else self._plain
        document_parts = {name: self._parts[name] for name in ("normalizer", "pre_tokenizer")}
        parts = {name: _part_for_pieces(part, form) for name, part in document_parts.items()}
        if parts == document_parts:
            return document_tokenizer
        tree = json.loads(document_tokenizer.to_str()) | parts
        piece_tokenizer = _library().Tokenizer.from_str(json_text(tree))
        piece_tokenizer.encode_special_tokens = document_tokenizer.encode_special_tokens
        return piece_tokenizer

    def decode(self, tokens: np.ndarray) -> str:
        """Decodes token ids, without special tokens such as the end of document."""
        return self._plain.decode([int(token) for token in tokens], skip_special_tokens=True)

    def _find_end_token(self, requested: str | None, path: Path, *, required: bool) -> str | None:
        """Returns the requested token, or else a common end token of the vocabulary, or None if it has none.

        Raises `ConfigError` if the requested token does not exist, or if a required one is not found.
        """
        vocabulary = self.ids
        if requested is not None:
            if requested not in vocabulary:
                added = sorted(token.content for token in self._added_tokens)
                raise ConfigError(f"--end-token: {path} has no token {requested!r}; {suggest(requested, added[:20])}")
            return requested
        end_token = next((name for name in _COMMON_END_TOKENS if name in vocabulary), None)
        if end_token is None and required:
            raise ConfigError(
                f"--end-token: {path} has none of {', '.join(_COMMON_END_TOKENS)}; name the token that ends a document"
            )
        return end_token


def _mark_targets(encoding: Any, text: TargetText) -> TargetTokens:
    """Finds the tokens that have characters of a target."""
    ids = np.array(encoding.ids, np.uint32)
    starts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    lengths = [len(piece) for piece in text.pieces]
    # Characters of targets before each offset.
    before = np.concatenate([[0], np.cumsum(np.repeat(np.array(text.is_target, np.int64), lengths))])
    # Some tokenizers leave the space before a word out of the offsets of its token.
    begins = np.minimum(np.concatenate([[0], stops[:-1]]), starts)
    target_characters = before[stops] - before[starts]
    crosses = (target_characters > 0) & (before[stops] - before[begins] < stops - begins)
    is_target = target_characters > 0
    # A token without characters, such as a part of one, is like the token before it.
    for index in np.flatnonzero(stops == starts).tolist():
        is_target[index] = is_target[index - 1] if index else False
    return TargetTokens(ids, is_target, int(np.count_nonzero(crosses)))


Tokenizer = Bytes | HuggingFace
"""A tokenizer. The classes share the interface that `HuggingFace` documents."""


def _part_for_pieces(part: dict[str, Any] | None, form: Form) -> dict[str, Any] | None:
    """Returns a normalizer or pre-tokenizer without the steps that apply only to a beginning or end that a text of this
    form does not have."""
    kind = None if part is None else part["type"]
    if part is None or (kind == "Prepend" and not form.begins):
        return None
    if kind == "Sequence":
        name = "normalizers" if "normalizers" in part else "pretokenizers"
        steps = (_part_for_pieces(step, form) for step in part[name])
        return part | {name: [step for step in steps if step is not None]}
    if kind == "Strip":
        return part | {
            "strip_left": part["strip_left"] and form.begins,
            "strip_right": part["strip_right"] and form.ends,
        }
    if kind == "Metaspace" and not form.begins:
        return part | {"prepend_scheme": "never"}
    if kind == "ByteLevel" and "add_prefix_space" in part and not form.begins:
        return part | {"add_prefix_space": False}
    return part


def _stretches(text: str, can_cut: Callable[[str, str], bool]) -> Iterator[str]:
    """Yields a text in stretches that, encoded separately, have the same tokens as the entire text.

    Encoding needs a hundred times the memory of its text. Words are encoded one by one, so the text may be cut between
    two words if `can_cut`, called with the text before and after the boundary, returns True. If no such boundary is
    found, the stretch becomes longer.
    """
    start = 0
    search_start = _STRETCH_CHARACTERS
    while search_start < len(text):
        boundaries = _WORD_BOUNDARY.finditer(text, search_start, search_start + _STRETCH_CHARACTERS)
        for match in islice(boundaries, _MAX_TRIED_BOUNDARIES):
            cut = match.end()
            if can_cut(text[max(0, cut - _CHECKED_CHARACTERS) : cut], text[cut : cut + _CHECKED_CHARACTERS]):
                yield text[start:cut]
                start = search_start = cut
                break
        search_start += _STRETCH_CHARACTERS
    yield text[start:]


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
    """Trains a byte-level BPE tokenizer with `vocab_size` tokens, and returns its tokenizer.json.

    The tokens include the end of document and all 256 bytes. The method is that of Sennrich et al. 2016
    (arXiv:1508.07909), applied to bytes as in GPT-2. The same texts give the same tokenizer.
    """
    library = _library()
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = library.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT, "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The words of ByteLevel end at every boundary that _stretches considers, so the text can be cut at each of them.
    pieces = (piece for text in texts for piece in _stretches(text, lambda before, after: True))
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer.to_str()


def make_tokenizer(description: dict[str, Any], folder: Path, content: str | None = None) -> Tokenizer:
    """Returns the tokenizer that a manifest describes. Its file is read from `folder`, unless `content` is given.

    Raises `ConfigError` if the tokenizer is unknown, or if the file is that of a different tokenizer.
    """
    name = description.get("name")
    if name == BYTES:
        return Bytes()
    if name == "huggingface":
        tokenizer = HuggingFace(folder / TOKENIZER_FILE, description["end_token"], content=content)
        if tokenizer.description != description:
            raise ConfigError(f"data.path: {folder / TOKENIZER_FILE} is not the tokenizer that encoded the data")
        return tokenizer
    raise ConfigError(
        f"--tokenizer: {folder} holds tokens of an unknown tokenizer ({printable(str(name))}); give "
        "--tokenizer bytes, or --tokenizer with the path of the tokenizer.json that encoded them"
    )


def choose_tokenizer(name: str, end_token: str | None = None, *, for_text: bool = False) -> Tokenizer:
    """Returns the tokenizer that the command line names: bytes, or the path of a tokenizer.json or of its folder.

    If `for_text` is True, documents will be encoded, which requires an end of document. Token arrays do not need one.
    """
    if name == BYTES:
        if end_token is not None:
            raise ConfigError("--end-token: the tokenizer bytes has its own end of document; leave --end-token out")
        return Bytes()
    path = file_of_tokenizer(name)
    if not path.exists():
        if path.with_name("tokenizer.model").exists():
            raise ConfigError(
                f"--tokenizer: {path.parent} holds a tokenizer.model, which is not supported; convert it to a "
                f"{TOKENIZER_FILE} first, with save_pretrained of transformers' AutoTokenizer"
            )
        if path.parent.joinpath("tokenizer", TOKENIZER_FILE).exists():
            raise ConfigError(f"--tokenizer: {name} is a run; give {path.parent / 'tokenizer'}")
        raise ConfigError(f"--tokenizer: {name} does not exist; give bytes or the path of a tokenizer.json")
    return HuggingFace(path, end_token, for_text=for_text)


def file_of_tokenizer(path: str) -> Path:
    """Returns the path of a tokenizer.json, given that path or its folder."""
    return Path(path) / TOKENIZER_FILE if Path(path).is_dir() else Path(path)


def _library() -> Any:
    try:
        import tokenizers.models  # not just tokenizers, because any folder of that name can be imported
    except ImportError as error:
        raise ConfigError(f"this needs the tokenizers library; {how_to_install('data')}") from error
    return tokenizers
