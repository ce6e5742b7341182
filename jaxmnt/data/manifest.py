"""The manifest of prepared data: its seal, and its shape, which is looked at before anything that it says is used.

The seal is a SHA-256 of all the rest. It tells damage, and changes by hand, from what was written; it is no signature.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmnt.errors import ConfigError, printable
from jaxmnt.storage import json_digest, read
from jaxmnt.strict_json import json_text

FORMAT = "jaxmnt-tokens"
VERSION = 3
UNSEALED = 2
"""The version before: without a seal, and always with an end of document. Still read."""

MANIFEST = "manifest.json"
SOURCES = "sources.txt"
TOKENIZER_FILE = "tokenizer.json"
SPLITS = ("train", "eval")
HOW_TO_PREPARE = "make it with: python -m jaxmnt.prepare --input TEXT --output DIR"
LARGEST_VOCABULARY = 2**31

_OPTIONAL = ("largest_id", "bytes_per_target")
"""What manifests of before do not say."""
_UNKNOWN: dict[str, None] = dict.fromkeys(SPLITS)
_TOKENS_AT_MOST = 2**62
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_SHARD = re.compile(r"[0-9]{5,12}-[0-9]{2,12}", re.ASCII)
NAMELESS = "none"
"""The tokenizer of token arrays that nobody has named one for."""

_TOKENIZERS = ("bytes", "huggingface", NAMELESS)


class _OddError(ValueError):
    """A manifest of another shape. The text says what of it."""


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with its seal."""
    return manifest | {"seal": json_digest(manifest)}


def sealed_text(record: dict[str, Any]) -> str:
    """A record with its seal, as a file."""
    return json_text(sealed(record), indent=1, sort_keys=True) + "\n"


def unsealed(record: dict[str, Any]) -> dict[str, Any]:
    """What a record says besides its seal. Raises `ValueError` if the seal does not fit it."""
    content = {name: value for name, value in record.items() if name != "seal"}
    if sealed(content) != record:
        raise _OddError("its seal does not fit what it says")
    return content


def content_digest(manifest: dict[str, Any]) -> str:
    """Identifies the contents, wherever they lie.

    As it was in version 2: data that a later version prepares from the same input is what earlier runs have read.
    """
    content = {name: value for name, value in manifest.items() if name not in ("seal", *_OPTIONAL)}
    return json_digest(content | {"version": UNSEALED})


def read_manifest(directory: Path, key: str) -> dict[str, Any]:
    """The manifest in a directory. Raises `ConfigError` when it is missing, damaged or of another version."""
    path = directory / MANIFEST
    again = "copy it again from where it is whole, or prepare the data again"
    try:
        manifest = json.loads(read(path).decode(), parse_constant=_no_number)
    except FileNotFoundError:
        raise ConfigError(
            f"{key}: {directory} has no {MANIFEST}, so it is not prepared data, or was not finished; {HOW_TO_PREPARE}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        reason = "it is nested too deeply" if deep else getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{key}: {path} is damaged ({printable(reason)}); {again}") from error
    kind, version = (manifest.get("format"), manifest.get("version")) if isinstance(manifest, dict) else (None, None)
    if kind != FORMAT or type(version) is not int or version not in (UNSEALED, VERSION):
        actual = " ".join(_shown(field) for field in (kind, version))
        raise ConfigError(
            f"{key}: {directory} has format {actual}, this version reads {FORMAT} {UNSEALED} and {VERSION}; "
            "prepare it again, or use the jaxmnt that made it"
        )
    try:
        _check_shape(manifest)
        if version != UNSEALED:
            unsealed(manifest)
    except _OddError as error:
        raise ConfigError(f"{key}: {path} is damaged: {error}; {again}") from None
    return manifest


def _no_number(name: str) -> float:
    raise ValueError(f"it holds {name}")


# -- the shape


def _check_shape(manifest: dict[str, Any]) -> None:
    """Every key, its type and its range, and whether the parts agree."""
    seal = () if manifest["version"] == UNSEALED else ("seal",)
    names = (
        "format", "version", "tokenizer", "vocab_size", "dtype", "learn_mask", "eval_fraction", "unigram_nats",
        "input", "left_out", "files", "splits", *seal,
    )  # fmt: skip
    _fields(manifest, "it", names, _OPTIONAL)
    for name in seal:
        _text(manifest[name], name, _DIGEST)
    vocab = _whole(manifest["vocab_size"], "vocab_size", 1, LARGEST_VOCABULARY)
    if "largest_id" in manifest:
        _whole(manifest["largest_id"], "largest_id", 0, vocab - 1)
    if manifest["dtype"] != str(np.min_scalar_type(vocab - 1)):
        raise _OddError(f"dtype {_shown(manifest['dtype'])} is not that of {vocab} ids")
    _refuse_unless(isinstance(manifest["learn_mask"], bool), "learn_mask", manifest["learn_mask"])
    _number(manifest["eval_fraction"], "eval_fraction", 1.0)
    for name in ("unigram_nats", "bytes_per_target"):
        for split, value in zip(SPLITS, _fields(manifest.get(name, _UNKNOWN), name, SPLITS), strict=True):
            if value is not None:
                _number(value, f"{name} of {split}", 1e6)
    for name, keys, also in (
        ("input", ("files", "bytes"), ()),
        ("left_out", ("bad", "empty", "binary"), ("long", "without_targets")),
    ):
        _fields(manifest[name], name, keys, also)
        for key, value in manifest[name].items():
            _whole(value, f"{name}.{key}")
    _check_tokenizer(manifest["tokenizer"], vocab, manifest["version"])
    needed = (SOURCES, TOKENIZER_FILE) if manifest["tokenizer"]["name"] == "huggingface" else (SOURCES,)
    _fields(manifest["files"], "files", needed, (TOKENIZER_FILE,))
    for name, digest in manifest["files"].items():
        _text(digest, f"the digest of {name}", _DIGEST)
    for split, entry in zip(SPLITS, _fields(manifest["splits"], "splits", SPLITS), strict=True):
        _check_split(entry, split, manifest["learn_mask"])


def _check_tokenizer(tokenizer: Any, vocab: int, version: int) -> None:
    name, end = _fields(tokenizer, "tokenizer", ("name", "end_of_document"), ("sha256", "end_token"))
    _refuse_unless(name in _TOKENIZERS, "the tokenizer's name", name)
    if end is not None or version == UNSEALED or name == "bytes":
        _whole(end, "the tokenizer's end_of_document", 0, vocab - 1)
    if name == "huggingface":
        digest, token = _fields(tokenizer, "tokenizer", ("sha256", "end_token"), ("name", "end_of_document"))
        _text(digest, "the tokenizer's sha256", _DIGEST)
        agree = (token is None) == (end is None) and isinstance(token, str | None)
        _refuse_unless(agree, "the tokenizer's end_token", token)


def _check_split(split: Any, name: str, learn_mask: bool) -> None:
    documents, tokens, shards = _fields(split, name, ("documents", "tokens", "shards"))
    _whole(documents, f"documents of {name}")
    _whole(tokens, f"tokens of {name}")
    if not isinstance(shards, list):
        raise _OddError(f"shards of {name} is not a list")
    sums, kinds = [0, 0], ("tokens", "documents", "origins", *(("learn",) if learn_mask else ()))
    for number, shard in enumerate(shards):
        where = f"shard {number} of {name}"
        fields = _fields(shard, where, ("name", "documents", "tokens", "sha256"))
        _text(fields[0], f"the name of {where}", _SHARD)
        sums[0] += _whole(fields[1], f"documents of {where}")
        sums[1] += _whole(fields[2], f"tokens of {where}", 1)
        for digest in _fields(fields[3], f"sha256 of {where}", [f"{kind}-{fields[0]}.npy" for kind in kinds]):
            _text(digest, f"a digest of {where}", _DIGEST)
    if sums != [documents, tokens]:
        raise _OddError(f"the shards of {name} hold {sums[0]} documents and {sums[1]} tokens, not what it says in all")


def _fields(value: Any, where: str, names: Sequence[str], also: Sequence[str] = ()) -> list[Any]:
    """The values of these keys of an object that has these, perhaps some of `also`, and no others."""
    _refuse_unless(isinstance(value, dict), where, value)
    if missing := [name for name in names if name not in value]:
        raise _OddError(f"{where} lacks {', '.join(missing)}")
    if foreign := set(value).difference(names, also):
        raise _OddError(f"{where} has a key that does not belong there, {_shown(min(foreign))}")
    return [value[name] for name in names]


def _whole(value: Any, where: str, least: int = 0, most: int = _TOKENS_AT_MOST) -> int:
    _refuse_unless(type(value) is int and least <= value <= most, where, value)
    return value


def _number(value: Any, where: str, most: float) -> None:
    _refuse_unless(type(value) in (int, float) and 0 <= value <= most, where, value)


def _text(value: Any, where: str, form: re.Pattern[str]) -> None:
    _refuse_unless(isinstance(value, str) and form.fullmatch(value) is not None, where, value)


def _refuse_unless(fits: bool, where: str, value: Any) -> None:
    if not fits:
        raise _OddError(f"{where} is {_shown(value)}")


def _shown(value: Any) -> str:
    """A value from outside in a few characters."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    text = printable(value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= 40 else f"{text[:40]}…"
