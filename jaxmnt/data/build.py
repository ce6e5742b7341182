"""Preparing data: files of text to tokenized shards. Data flows files → documents → split → shards."""

import fnmatch
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np

from jaxmnt.data.store import FORMAT, MANIFEST, SPLITS, VERSION, SplitWriter
from jaxmnt.data.tokenizer import Tokenizer
from jaxmnt.errors import ConfigError

Progress = Callable[[int, int], None]
"""Called with (files done, files in all)."""


@dataclass
class Summary:
    """What was prepared, for the person who asked."""

    documents: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    binary_files: int = 0
    replaced_files: int = 0


def find_files(inputs: list[Path], suffixes: list[str], excludes: list[str]) -> list[tuple[str, Path]]:
    """(name, path) of each text file below the inputs, by name in order.

    `suffixes` keeps files whose name ends in one of them (all if empty); a file or folder whose name matches
    one of the `excludes` patterns is left out. Raises `ConfigError` if nothing is found.
    """
    found: set[tuple[str, Path]] = set()
    for root in inputs:
        if root.is_file():
            found.add((root.name, root))
            continue
        if not root.is_dir():
            raise ConfigError(f"--input: there is no file or folder {root}")
        for folder, folders, files in os.walk(root, onerror=_unreadable):
            folders[:] = sorted(name for name in folders if not _matches(name, excludes))
            for name in sorted(files):
                path = Path(folder) / name
                wanted = not suffixes or name.endswith(tuple(suffixes))
                if wanted and not _matches(name, excludes) and path.is_file():
                    found.add((f"{root.name}/{path.relative_to(root)}", path))
    if not found:
        what = f" ending in {' or '.join(suffixes)}" if suffixes else ""
        raise ConfigError(f"--input: no file{what} below {', '.join(map(str, inputs))}")
    return sorted(found)


def _unreadable(error: OSError) -> NoReturn:
    raise ConfigError(f"--input: {error.filename} cannot be read: {error.strerror}") from error


def build(
    files: list[tuple[str, Path]],
    output: Path,
    tokenizer: Tokenizer,
    eval_fraction: float,
    progress: Progress,
    shard_tokens: int | None = None,
) -> Summary:
    """Writes prepared data to `output`, which must not exist; it appears whole or not at all.

    A document is held out for evaluation by a hash of its text, so the split does not depend on order or name.
    """
    if output.exists():
        raise ConfigError(f"--output: {output} exists already; choose another folder or remove it")
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    try:
        summary = _write(files, partial, tokenizer, eval_fraction, progress, shard_tokens)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return summary


def _write(
    files: list[tuple[str, Path]],
    directory: Path,
    tokenizer: Tokenizer,
    eval_fraction: float,
    progress: Progress,
    shard_tokens: int | None,
) -> Summary:
    summary = Summary()
    sizes = {} if shard_tokens is None else {"shard_tokens": shard_tokens}
    writers = {split: SplitWriter(directory / split, tokenizer, **sizes) for split in SPLITS}
    for text in _read_documents(files, summary, progress):
        split = "eval" if _held_out(text, eval_fraction) else "train"
        writers[split].add(tokenizer.encode(text))
    splits = {split: writer.close() for split, writer in writers.items()}
    if not splits["train"]["tokens"]:
        raise ConfigError("--input: no text was found for training; give more text or lower --eval-fraction")
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": {"name": tokenizer.name, "end_of_document": tokenizer.end_of_document},
        "vocab_size": tokenizer.vocab_size,
        "dtype": str(writers["train"].dtype),
        "eval_fraction": eval_fraction,
        "unigram_nats": {split: _unigram_nats(writers["train"].counts, writers[split].counts) for split in SPLITS},
        "splits": splits,
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    summary.documents = {split: entry["documents"] for split, entry in splits.items()}
    summary.tokens = {split: entry["tokens"] for split, entry in splits.items()}
    return summary


def _read_documents(files: list[tuple[str, Path]], summary: Summary, progress: Progress) -> Iterator[str]:
    """The text of each file that has any; binary files are counted and left out."""
    for done, (_, path) in enumerate(files):
        progress(done, len(files))
        try:
            raw = path.read_bytes()
        except OSError as error:
            _unreadable(error)
        if b"\0" in raw:
            summary.binary_files += 1
            continue
        text = raw.decode("utf-8", errors="replace")
        summary.replaced_files += "\ufffd" in text
        if text:
            yield text
    progress(len(files), len(files))


def _held_out(text: str, fraction: float) -> bool:
    digest = hashlib.sha256(text.encode("utf-8", errors="replace")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def _unigram_nats(train: np.ndarray, counted: np.ndarray) -> float | None:
    """Nats a token that the training text's token frequencies (plus one each) cost on the counted text."""
    if not counted.sum():
        return None
    smoothed = (train + 1) / (train + 1).sum()
    return float(-(counted * np.log(smoothed)).sum() / counted.sum())


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
