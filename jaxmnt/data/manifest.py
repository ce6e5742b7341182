"""Reads the manifest of prepared data, and checks its seal and structure before any of it is used.

The seal is the SHA-256 of all other fields. It detects damage and manual changes, but it is not a signature.
"""

import hashlib
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
"""The previous version, which can still be read. It has no seal, and always has an end of document."""

MANIFEST = "manifest.json"
SOURCES = "sources.txt"
TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
SPLITS = ("train", "eval")
HOW_TO_PREPARE = "make it with: python -m jaxmnt.prepare --input TEXT --output DIR"
HOW_TO_REPAIR = "replace it with an intact copy, or prepare the data again"
MAX_VOCABULARY = 2**31

_DERIVED_FIELDS = ("largest_id", "bytes_per_target")
"""Fields that older manifests lack, and that follow from the contents."""
_OPTIONAL_FIELDS = (*_DERIVED_FIELDS, "chat", "index")
"""Fields that older manifests lack. Manifests of data without conversations lack `chat`, and those of data with few
documents lack `index`, too."""
_UNKNOWN_BY_SPLIT: dict[str, None] = dict.fromkeys(SPLITS)
_MAX_COUNT = 2**62
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_INDEX = re.compile(r"[a-z0-9-]{1,80}\.json", re.ASCII)
_SHARD = re.compile(r"[0-9]{5,12}-[0-9]{2,12}", re.ASCII)
CHATML = "chatml"
"""Name of the chat template that `prepare --chat` uses if the tokenizer came with none."""
BYTES = "bytes"
"""Name of the `Bytes` tokenizer, which needs no file."""
NAMELESS = "none"
"""Name in the manifest for the unknown tokenizer of token arrays that were prepared without one."""

_TOKENIZERS = (BYTES, "huggingface", NAMELESS)


class _ManifestError(ValueError):
    """Raised if a manifest has an invalid structure or seal."""


def sealed(record: dict[str, Any]) -> dict[str, Any]:
    """Returns a record with a seal."""
    return record | {"seal": json_digest(record)}


def sealed_text(record: dict[str, Any]) -> str:
    """Returns the text of a file that holds a record with a seal."""
    return json_text(sealed(record), indent=1, sort_keys=True) + "\n"


def unsealed(record: dict[str, Any]) -> dict[str, Any]:
    """Returns a record without its seal. Raises `ValueError` if the seal does not match."""
    content = {name: value for name, value in record.items() if name != "seal"}
    if sealed(content) != record:
        raise _ManifestError("its seal does not match its contents")
    return content


def content_digest(manifest: dict[str, Any]) -> str:
    """Returns a digest of the contents, independent of their location.

    The digest is computed as in version 2, so that data prepared again from the same input into the same shards has the
    digest that earlier runs stored.
    """
    content = {name: value for name, value in manifest.items() if name not in ("seal", *_OPTIONAL_FIELDS)}
    content["files"] = {name: digest for name, digest in manifest["files"].items() if name != CHAT_TEMPLATE_FILE}
    if "chat" in manifest and manifest["chat"]["source"] != CHATML:
        # The place of the template does not count, and earlier versions did not record ChatML.
        content["chat"] = [manifest["files"][CHAT_TEMPLATE_FILE], manifest["chat"]["special_tokens"]]
    return json_digest(content | {"version": UNSEALED})


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file, in hex. Raises `ConfigError` if the file cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"data.path: {path} cannot be read ({error.strerror}); copy or prepare it again") from error


def read_manifest(directory: Path, key: str) -> dict[str, Any]:
    """Reads the manifest in a directory. Raises `ConfigError` if it is missing, damaged or of another version."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(read(path).decode(), parse_constant=_reject_constant)
    except FileNotFoundError:
        raise ConfigError(
            f"{key}: {directory} has no {MANIFEST}, so it is not prepared data, or was not finished; {HOW_TO_PREPARE}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, RecursionError):
            reason = "it is nested too deeply"
        raise ConfigError(f"{key}: {path} is damaged ({printable(reason)}); {HOW_TO_REPAIR}") from error
    name = version = None
    if isinstance(manifest, dict):
        name, version = manifest.get("format"), manifest.get("version")
    if name != FORMAT or type(version) is not int or version not in (UNSEALED, VERSION):
        actual = f"{_describe_value(name)} {_describe_value(version)}"
        raise ConfigError(
            f"{key}: {directory} has format {actual}, but this version reads {FORMAT} {UNSEALED} and {VERSION}; "
            "prepare it again, or use the jaxmnt that made it"
        )
    try:
        _check_structure(manifest)
        if version != UNSEALED:
            unsealed(manifest)
    except _ManifestError as error:
        raise ConfigError(f"{key}: {path} is damaged: {error}; {HOW_TO_REPAIR}") from None
    return manifest


def _reject_constant(name: str) -> float:
    """Raises `ValueError` for NaN and infinities, which the JSON reader would accept."""
    raise ValueError(f"it holds {name}")


# -- checks of the structure


def _check_structure(manifest: dict[str, Any]) -> None:
    """Checks the type and range of every field, and that the fields agree. Raises `_ManifestError`."""
    seal = () if manifest["version"] == UNSEALED else ("seal",)
    names = (
        "format", "version", "tokenizer", "vocab_size", "dtype", "learn_mask", "eval_fraction", "unigram_nats",
        "input", "left_out", "files", "splits", *seal,
    )  # fmt: skip
    _check_fields(manifest, "it", names, _OPTIONAL_FIELDS)
    for name in seal:
        _check_text(manifest[name], name, _DIGEST)
    vocab = _check_integer(manifest["vocab_size"], "vocab_size", 1, MAX_VOCABULARY)
    if "largest_id" in manifest:
        _check_integer(manifest["largest_id"], "largest_id", 0, vocab - 1)
    if manifest["dtype"] != str(np.min_scalar_type(vocab - 1)):
        raise _ManifestError(f"dtype {_describe_value(manifest['dtype'])} is not that of {vocab} ids")
    _require(isinstance(manifest["learn_mask"], bool), "learn_mask", manifest["learn_mask"])
    _check_number(manifest["eval_fraction"], "eval_fraction", 1.0)
    for name in ("unigram_nats", "bytes_per_target"):
        for split, value in zip(
            SPLITS, _check_fields(manifest.get(name, _UNKNOWN_BY_SPLIT), name, SPLITS), strict=True
        ):
            if value is not None:
                _check_number(value, f"{name} of {split}", 1e6)
    for name, keys, optional in (
        ("input", ("files", "bytes"), ()),
        ("left_out", ("bad", "empty", "binary"), ("long", "without_targets")),
    ):
        _check_fields(manifest[name], name, keys, optional)
        for key, value in manifest[name].items():
            _check_integer(value, f"{name}.{key}")
    _check_tokenizer(manifest["tokenizer"], vocab, manifest["version"])
    needed = (SOURCES, TOKENIZER_FILE) if manifest["tokenizer"]["name"] == "huggingface" else (SOURCES,)
    _check_fields(manifest["files"], "files", needed, (TOKENIZER_FILE, CHAT_TEMPLATE_FILE))
    if "chat" in manifest:
        _check_chat(manifest["chat"], CHAT_TEMPLATE_FILE in manifest["files"])
    for name, digest in manifest["files"].items():
        _check_text(digest, f"the digest of {name}", _DIGEST)
    index = manifest.get("index", {})
    _require(isinstance(index, dict), "index", index)
    for name, digest in index.items():
        _check_text(name, "a name of index", _INDEX)
        _check_text(digest, f"the digest of {name}", _DIGEST)
    for split, entry in zip(SPLITS, _check_fields(manifest["splits"], "splits", SPLITS), strict=True):
        _check_split(entry, split, manifest["learn_mask"])


def _check_tokenizer(tokenizer: Any, vocab: int, version: int) -> None:
    name, end = _check_fields(tokenizer, "tokenizer", ("name", "end_of_document"), ("sha256", "end_token"))
    _require(name in _TOKENIZERS, "the tokenizer's name", name)
    if end is not None or version == UNSEALED or name == BYTES:
        _check_integer(end, "the tokenizer's end_of_document", 0, vocab - 1)
    if name == "huggingface":
        digest, token = _check_fields(tokenizer, "tokenizer", ("sha256", "end_token"), ("name", "end_of_document"))
        _check_text(digest, "the tokenizer's sha256", _DIGEST)
        is_consistent = (token is None) == (end is None) and isinstance(token, str | None)
        _require(is_consistent, "the tokenizer's end_token", token)


def _check_chat(chat: Any, has_template: bool) -> None:
    source, tokens, ends = _check_fields(chat, "chat", ("source", "special_tokens", "end_tokens"))
    _require(isinstance(source, str), "the source of chat", source)
    _require(has_template, "the file of the chat template", None)
    is_mapping = isinstance(tokens, dict) and all(isinstance(name, str) for name in tokens.values())
    _require(is_mapping, "special_tokens of chat", tokens)
    _require(isinstance(ends, list) and all(isinstance(name, str) for name in ends), "end_tokens of chat", ends)


def _check_split(split: Any, name: str, learn_mask: bool) -> None:
    documents, tokens, shards = _check_fields(split, name, ("documents", "tokens", "shards"))
    _check_integer(documents, f"documents of {name}")
    _check_integer(tokens, f"tokens of {name}")
    if not isinstance(shards, list):
        raise _ManifestError(f"shards of {name} is not a list")
    kinds = ("tokens", "documents", "origins", *(("learn",) if learn_mask else ()))
    total_documents = total_tokens = 0
    for number, shard in enumerate(shards):
        where = f"shard {number} of {name}"
        fields = _check_fields(shard, where, ("name", "documents", "tokens", "sha256"))
        _check_text(fields[0], f"the name of {where}", _SHARD)
        total_documents += _check_integer(fields[1], f"documents of {where}")
        total_tokens += _check_integer(fields[2], f"tokens of {where}", 1)
        for digest in _check_fields(fields[3], f"sha256 of {where}", [f"{kind}-{fields[0]}.npy" for kind in kinds]):
            _check_text(digest, f"a digest of {where}", _DIGEST)
    if (total_documents, total_tokens) != (documents, tokens):
        raise _ManifestError(
            f"the shards of {name} hold {total_documents} documents and {total_tokens} tokens, which differs from the "
            "totals"
        )


def _check_fields(value: Any, where: str, names: Sequence[str], optional: Sequence[str] = ()) -> list[Any]:
    """Returns the values of the keys `names` of an object.

    Raises `_ManifestError` if `value` is not an object, lacks one of these keys, or has a key that is neither in
    `names` nor in `optional`.
    """
    _require(isinstance(value, dict), where, value)
    if missing := [name for name in names if name not in value]:
        raise _ManifestError(f"{where} lacks {', '.join(missing)}")
    if unknown := set(value).difference(names, optional):
        raise _ManifestError(f"{where} has the unknown key {_describe_value(min(unknown))}")
    return [value[name] for name in names]


def _check_integer(value: Any, where: str, minimum: int = 0, maximum: int = _MAX_COUNT) -> int:
    _require(type(value) is int and minimum <= value <= maximum, where, value)
    return value


def _check_number(value: Any, where: str, maximum: float) -> None:
    _require(type(value) in (int, float) and 0 <= value <= maximum, where, value)


def _check_text(value: Any, where: str, pattern: re.Pattern[str]) -> None:
    _require(isinstance(value, str) and pattern.fullmatch(value) is not None, where, value)


def _require(is_valid: bool, where: str, value: Any) -> None:
    if not is_valid:
        raise _ManifestError(f"{where} is {_describe_value(value)}")


def _describe_value(value: Any) -> str:
    """Describes an untrusted value in a few printable characters."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    text = printable(value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= 40 else f"{text[:40]}…"
