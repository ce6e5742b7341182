"""Encodes text as token ids, and decodes them."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxmnt.data.manifest import TOKENIZER_FILE
from jaxmnt.errors import ConfigError, how_to_install, printable, suggest
from jaxmnt.storage import read
from jaxmnt.strict_json import json_text

END_OF_DOCUMENT = "<|endoftext|>"
"""The end-of-document token of tokenizers that `train_bpe` trains."""

_STRETCH = 2**19
"""Approximate characters of a text that are encoded at a time."""

_BETWEEN_WORDS = re.compile(r"\S\n(?=\S)|[^\W\d_](?= [^\W\d_])")
_TRIED_PLACES = 8
_CHECKED_CHARACTERS = 2**11
"""Characters on each side of a place that are encoded to check whether a long text can be cut there."""

_SAMPLE = "a"
"""A text that reveals the ids that a tokenizer adds before every text."""

_CHECKED_BESIDE_PIECES = 64
"""Characters on each side of a boundary between pieces that are encoded to check whether it can be cut."""

_KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[SEP]")


class Form(NamedTuple):
    """Describes a text to encode. The default is a whole document without markup."""

    markup: bool = False
    """True if the name of a special token in the text stands for that token; else it is plain text."""
    begins: bool = True
    """True if the text begins a document."""
    ends: bool = True
    """True if the text ends a document."""


WHOLE = Form()


BYTES = "bytes"
"""Name of the `Bytes` tokenizer, which needs no file."""


class Bytes:
    """UTF-8 bytes as ids 0–255, and 256 for the end of a document."""

    vocab_size = 257
    end_of_document: int | None = 256
    names_of_special: ClassVar[Mapping[int, str]] = {256: "<end of document>"}
    """Names that are shown for ids without text."""

    @property
    def description(self) -> dict[str, Any]:
        return {"name": BYTES, "end_of_document": self.end_of_document}

    def encode_batch(self, texts: Sequence[str], form: Form = WHOLE) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8", errors="replace"), np.uint8) for text in texts]

    encode_joined = encode_batch

    def can_cut(self, before: str, after: str) -> bool:
        return True

    def decode(self, tokens: np.ndarray) -> str:
        byte_ids = np.asarray(tokens)[np.asarray(tokens) < 256]
        return byte_ids.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class HuggingFace:
    """A tokenizer.json of the `tokenizers` library."""

    end_of_document: int | None
    """The id that follows every document, and precedes the first one. None if there is no such id."""

    def __init__(self, path: Path, end_token: str | None = None, *, for_text: bool = False, content: str | None = None):
        """`for_text` says that documents will be encoded; this requires an end token that cannot occur in them.

        `content` is the content of the file, if it was read already.
        """
        library = _library()
        try:
            text = read(path).decode() if content is None else content
            self._plain, self._markup = library.Tokenizer.from_str(text), library.Tokenizer.from_str(text)
        except OSError as error:
            raise ConfigError(f"--tokenizer: {path} cannot be read: {error.strerror}; check its permissions") from error
        except BaseException as error:
            # The library raises plain Exception, and a panic in Rust is not even an Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ConfigError(f"--tokenizer: {path} is not a tokenizer.json: {printable(str(error)[:200])}") from error
        for tokenizer in (self._plain, self._markup):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._plain.encode_special_tokens = True  # names of special tokens in a document are text
        self._for_pieces = cache(self._make_for_pieces)
        self._end_token = self._find_end(end_token, path, needed=for_text)
        self.end_of_document = None if self._end_token is None else int(self._plain.token_to_id(self._end_token))
        if for_text and self.end_of_document in self.encode_batch([self._end_token or ""])[0]:
            raise ConfigError(
                f"--end-token: {self._end_token!r} of {path} can occur in text, which would end there; "
                "name a special token"
            )
        # Ids may have gaps, so the size follows from the largest.
        self.vocab_size = max(self._plain.get_vocab_size(with_added_tokens=True), 1 + max(self.ids.values()))
        self._digest = hashlib.sha256(text.encode()).hexdigest()

    @property
    def start(self) -> list[int]:
        """The ids that the tokenizer itself adds before a text, such as that of <s>, without those that it appends."""
        plain = self._plain.encode(_SAMPLE, add_special_tokens=False).ids
        whole = self._plain.encode(_SAMPLE, add_special_tokens=True).ids
        if not plain:
            return whole
        return next(whole[:at] for at in range(len(whole)) if whole[at : at + len(plain)] == plain)

    @property
    def _added(self) -> Any:
        """The added tokens, including special ones."""
        return self._plain.get_added_tokens_decoder().values()

    @property
    def special(self) -> set[str]:
        """Names of the special tokens, which only markup produces."""
        return {token.content for token in self._added if token.special}

    @cached_property
    def names_of_special(self) -> Mapping[int, str]:
        """Names that are shown for ids without text."""
        return {self.ids[name]: name for name in sorted(self.special)}

    @property
    def ids(self) -> dict[str, int]:
        """The id of each token."""
        return self._plain.get_vocab(with_added_tokens=True)

    @property
    def description(self) -> dict[str, Any]:
        """The manifest's entry, from which `make_tokenizer` creates the same tokenizer."""
        return {
            "name": "huggingface",
            "sha256": self._digest,
            "end_token": self._end_token,
            "end_of_document": self.end_of_document,
        }

    def encode_batch(self, texts: Sequence[str], form: Form = WHOLE) -> list[np.ndarray]:
        """Returns the token ids of each text, without ends of documents, in an unsigned dtype."""
        if all(len(text) <= _STRETCH for text in texts) or self._plain.pre_tokenizer is None:
            return self._encode(texts, form)
        return [np.concatenate(list(self._encode_long(text, form))) for text in texts]

    def encode_joined(self, texts: Sequence[str], form: Form = WHOLE) -> list[np.ndarray]:
        """Returns the token ids of the joined text, divided among its parts.

        A token across a boundary belongs to the part that contains its last character.
        """
        encoding = self._tokenizer_for(form).encode("".join(texts), add_special_tokens=False)
        ids, stops = np.array(encoding.ids, np.uint32), np.cumsum([len(text) for text in texts])
        last_characters = np.array([max(0, stop - 1) for _, stop in encoding.offsets], np.int64)
        text_of_token = np.searchsorted(stops, last_characters, side="right")
        # A token without characters belongs to the same text as the token before it.
        text_of_token = np.maximum.accumulate(text_of_token)
        return [ids[text_of_token == number] for number in range(len(texts))]

    def can_cut(self, before: str, after: str) -> bool:
        """Returns True if the two texts, encoded separately, decode to the same text as their concatenation."""
        if self._lossless:
            return True
        if self._prefixed_token_in([before, after]) is not None:
            return False
        if "Strip" in self._normalizers and not (before.strip() and after.strip()):
            # Strip removes blanks only at the ends of the whole text.
            return False
        before, after = before[-_CHECKED_BESIDE_PIECES:], after[:_CHECKED_BESIDE_PIECES]
        (whole,) = self._encode([before + after])
        (first,), (rest,) = self._encode([before], Form(ends=False)), self._encode([after], Form(begins=False))
        return self.decode(np.concatenate([first, rest])) == self.decode(whole)

    def _encode_long(self, text: str, form: Form) -> Iterator[np.ndarray]:
        """Yields the ids of a long text in stretches; together they equal the ids of the whole text."""

        def same_tokens(before: str, after: str) -> bool:
            within = form._replace(begins=False, ends=False)
            first, rest, both = self._encode([before, after, before + after], within)
            return np.array_equal(np.concatenate([first, rest]), both)

        start = 0
        for stretch in _stretches(text, same_tokens):
            stop = start + len(stretch)
            begins, ends = form.begins and start == 0, form.ends and stop == len(text)
            yield self._encode([stretch], Form(form.markup, begins, ends))[0]
            start = stop

    def _encode(self, texts: Sequence[str], form: Form = WHOLE) -> list[np.ndarray]:
        if not form.begins and (token := self._prefixed_token_in(texts, form.markup)) is not None:
            raise ConfigError(
                f"--tokenizer: the added token {token!r} is matched with a blank before it, so a text in pieces cannot "
                'be encoded with it; set "normalized" of this token to false in tokenizer.json'
            )
        encodings = self._tokenizer_for(form).encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    @cached_property
    def _parts(self) -> dict[str, Any]:
        """The parts of tokenizer.json that determine how the beginning and end of a text are treated."""
        tree = json.loads(self._plain.to_str())
        return {name: tree[name] for name in ("normalizer", "pre_tokenizer", "decoder")}

    @cached_property
    def _lossless(self) -> bool:
        """True if every text decodes to itself wherever it is cut: a byte-level tokenizer without a normalizer."""
        ordinary = [token for token in self._added if not token.special]
        drops_blanks = any(token.lstrip or token.rstrip for token in ordinary)
        is_bytes = self._parts["normalizer"] is None and (self._parts["decoder"] or {}).get("type") == "ByteLevel"
        return is_bytes and not drops_blanks

    @cached_property
    def _normalizers(self) -> set[str]:
        """The types of the tokenizer's normalizers."""

        def types(part: dict[str, Any]) -> set[str]:
            return {part["type"]}.union(*(types(inner) for inner in part.get("normalizers", [])))

        return set() if self._parts["normalizer"] is None else types(self._parts["normalizer"])

    def _prefixed_token_in(self, texts: Sequence[str], markup: bool = False) -> str | None:
        """Returns an added token in the texts that is matched together with the prefix that the normalizer adds.

        Without markup, names of special tokens are plain text.
        """
        if "Prepend" not in self._normalizers:
            return None
        names = sorted(token.content for token in self._added if token.normalized and (markup or not token.special))
        return next((name for name in names if any(name in text for text in texts)), None)

    def _tokenizer_for(self, form: Form) -> Any:
        """Returns the library's tokenizer for texts of this form."""
        if form.begins and form.ends:
            return self._markup if form.markup else self._plain
        return self._for_pieces(form)

    def _make_for_pieces(self, form: Form) -> Any:
        """Returns the tokenizer without the steps that apply only at a beginning or end that the text lacks."""
        whole_text = self._markup if form.markup else self._plain
        before = {name: self._parts[name] for name in ("normalizer", "pre_tokenizer")}
        parts = {name: _within_a_text(part, form) for name, part in before.items()}
        if parts == before:
            return whole_text
        changed = _library().Tokenizer.from_str(json_text(json.loads(whole_text.to_str()) | parts))
        changed.encode_special_tokens = whole_text.encode_special_tokens
        return changed

    def decode(self, tokens: np.ndarray) -> str:
        """Decodes token ids. Special tokens, such as the end of document, are left out."""
        return self._plain.decode([int(token) for token in tokens], skip_special_tokens=True)

    def _find_end(self, requested: str | None, path: Path, *, needed: bool) -> str | None:
        vocabulary = self.ids
        if requested is not None:
            if requested not in vocabulary:
                special = sorted(token.content for token in self._added)
                raise ConfigError(f"--end-token: {path} has no token {requested!r}; {suggest(requested, special[:20])}")
            return requested
        end = next((name for name in _KNOWN_ENDS if name in vocabulary), None)
        if end is None and needed:
            raise ConfigError(
                f"--end-token: {path} has none of {', '.join(_KNOWN_ENDS)}; name the token that ends a document"
            )
        return end


Tokenizer = Bytes | HuggingFace
"""The tokenizers share the interface that `HuggingFace` documents."""


def _within_a_text(part: dict[str, Any] | None, form: Form) -> dict[str, Any] | None:
    """Returns a normalizer or pre-tokenizer without the steps that apply only to a document's beginning or end."""
    kind = None if part is None else part["type"]
    if part is None or (kind == "Prepend" and not form.begins):
        return None
    if kind == "Sequence":
        name = "normalizers" if "normalizers" in part else "pretokenizers"
        changed = (_within_a_text(inner, form) for inner in part[name])
        return part | {name: [inner for inner in changed if inner is not None]}
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
    """Yields a text in stretches that give the tokens of the whole. Encoding takes a hundred times a text's memory.

    Words are encoded one by one, so the text may be cut between two. `can_cut` checks a place with the text around it.
    If no such place is found, the stretch becomes longer.
    """
    start, reach = 0, _STRETCH
    while reach < len(text):
        for match in islice(_BETWEEN_WORDS.finditer(text, reach, reach + _STRETCH), _TRIED_PLACES):
            place = match.end()
            if can_cut(text[max(0, place - _CHECKED_CHARACTERS) : place], text[place : place + _CHECKED_CHARACTERS]):
                yield text[start:place]
                start = reach = place
                break
        reach += _STRETCH
    yield text[start:]


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
    """Trains a byte-level BPE and returns its tokenizer.json of `vocab_size` tokens.

    The tokens include the end of document and all 256 bytes. See Sennrich et al. 2016 (arXiv:1508.07909), on bytes as
    in GPT-2. The same texts give the same tokenizer.
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
    # The words of ByteLevel end at every place that _stretches considers, so each can be cut.
    pieces = (piece for text in texts for piece in _stretches(text, lambda before, after: True))
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer.to_str()


def make_tokenizer(description: dict[str, Any], folder: Path, content: str | None = None) -> Tokenizer:
    """Returns the tokenizer that a manifest describes. Its file is in `folder`, unless `content` is given.

    Raises `ConfigError` for an unknown tokenizer.
    """
    name = description.get("name")
    if name == BYTES:
        return Bytes()
    if name == "huggingface":
        tokenizer = HuggingFace(folder / TOKENIZER_FILE, description["end_token"], content=content)
        if tokenizer.description != description:
            raise ConfigError(f"data.path: {folder / TOKENIZER_FILE} is not the tokenizer that the data was made with")
        return tokenizer
    raise ConfigError(
        f"--tokenizer: {folder} holds tokens that were made elsewhere ({printable(str(name))}); "
        "give bytes, or the tokenizer.json that made them"
    )


def choose_tokenizer(name: str, end_token: str | None = None, *, for_text: bool = False) -> Tokenizer:
    """Returns the tokenizer that the command line names: bytes, or the path of a tokenizer.json or of its folder.

    `for_text` says that documents will be encoded, which requires an end of document. Token arrays do not.
    """
    if name == BYTES:
        if end_token is not None:
            raise ConfigError("--end-token: bytes have an end of document of their own; leave it out")
        return Bytes()
    path = file_of_tokenizer(name)
    if not path.exists():
        if path.with_name("tokenizer.model").exists():
            raise ConfigError(
                f"--tokenizer: {path.parent} holds a tokenizer.model, which is not read; save it as a {TOKENIZER_FILE} "
                "first, as transformers' AutoTokenizer does with save_pretrained"
            )
        raise ConfigError(f"--tokenizer: {name} does not exist; give bytes, or the path of a tokenizer.json")
    return HuggingFace(path, end_token, for_text=for_text)


def file_of_tokenizer(path: str) -> Path:
    """Returns the path of a tokenizer.json, given that path or its folder."""
    return Path(path) / TOKENIZER_FILE if Path(path).is_dir() else Path(path)


def _library() -> Any:
    try:
        import tokenizers.models  # not just tokenizers: any folder of that name is importable, but lacks models
    except ImportError as error:
        raise ConfigError(f"this needs the tokenizers library; {how_to_install('data')}") from error
    return tokenizers
