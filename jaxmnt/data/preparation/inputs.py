"""Finds the input files, divides the work into parts, and decides how documents are held out."""

import fnmatch
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np

from jaxmnt.errors import ConfigError, how_to_install, printable

SHARD_TOKENS = 2**26


@dataclass(frozen=True)
class Reading:
    """Settings for reading records."""

    text_field: str = "text"
    chat: bool = False
    ignored_fields: tuple[str, ...] = ()
    """Fields of conversations and their messages that are dropped although they may change the meaning."""
    replace_invalid: bool = False
    token_bytes: int = 2
    end_id: int | None = None
    """Id that ends documents in token arrays. None: each file is one document."""
    vocab_size: int = 0
    max_document: int = 64 * 2**20
    """Most bytes of a record, which is held in memory. Text files and token arrays are read in stretches."""
    long_documents: Literal["error", "split", "skip"] = "error"
    """Treatment of longer records."""


@dataclass(frozen=True)
class Settings:
    """Settings of a preparation. All but `workers` affect the output."""

    tokenizer: str | None = "bytes"
    """bytes, the path of a tokenizer.json, or None for token arrays with their own vocabulary."""
    end_token: str | None = None
    train_tokenizer: int | None = None
    """Size of a BPE vocabulary to train on the input instead."""
    reading: Reading = field(default_factory=Reading)
    vocab_size: int | None = None
    """Vocabulary size of token arrays without a tokenizer."""
    eval_fraction: float | None = 0.02
    """Share of documents to hold out; None for the default of these inputs."""
    skip_bad: bool = False
    workers: int = 1
    shard_tokens: int = SHARD_TOKENS
    part_bytes: int | None = None
    """Bytes of input per part; by default they depend on the total size."""


Kind = Literal["text", "jsonl", "compressed", "parquet", "tokens"]

_NAMES: dict[Kind, str] = {
    "jsonl": r".*\.(jsonl|ndjson)",
    "compressed": r".*\.(json|jsonl|ndjson)\.(gz|zst)",
    "parquet": r".*\.parquet",
    "tokens": r".*\.(npy|bin)",
}
"""Patterns of file names for each kind; all other files are text."""

_PARTS = 64
_SMALLEST_PART, _LARGEST_PART = 2**22, 2**28


@dataclass(frozen=True)
class Selection:
    """The files that --input, --eval-input, --suffix and --exclude select."""

    inputs: Sequence[Path]
    suffixes: Sequence[str] = ()
    """Keeps files whose name ends in one of them; all if empty."""
    excludes: Sequence[str] = ()
    """Leaves out files and folders whose name matches one of these patterns."""
    eval_inputs: Sequence[Path] = ()
    """Files and folders to hold out, even if they are below one of the inputs."""


class Input(NamedTuple):
    """One input file."""

    number: int
    """Index among all inputs, by which the output refers to the file."""
    name: str
    """Name in the output: relative, so that the output does not depend on the location of the input."""
    path: Path
    kind: Kind
    size: int
    changed: int
    """Modification time in nanoseconds."""
    split: Literal["train", "eval"] | None = None
    """Split of all its documents; None if it is decided for each document."""

    @property
    def shown(self) -> str:
        """The path in printable form."""
        return printable(str(self.path))


class Piece(NamedTuple):
    """A range of one file: bytes of text and JSON lines, row groups of Parquet, elements of a token array."""

    file: Input
    start: int
    stop: int


_NAMED_FILES = 3
"""Most files of a part that an error names."""


class Part(NamedTuple):
    """The unit of work of a worker. Each part becomes shards of its own."""

    number: int
    pieces: tuple[Piece, ...]

    def __str__(self) -> str:
        names = [piece.file.shown for piece in self.pieces]
        return ", ".join(names[:_NAMED_FILES]) + (" …" if len(names) > _NAMED_FILES else "")


LeftOut = dict[Literal["hidden", "companions", "special"], list[str]]
"""Names of entries of the input folders that are not read, by reason: files and folders whose name begins with a dot,
such as .git and .cache; texts that describe the records in their folder, such as a dataset's README.md; and pipes,
devices and broken links."""

_COMPANION = re.compile(
    r"(readme|licen[cs]e|notice|citation|changelog|contributing|authors|code_of_conduct|security)([._-].*)?"
    r"|(dataset_infos?|dataset_dict|state|croissant)\.json|_.*",
    re.IGNORECASE,
)
"""Names of files that come with a dataset but are not part of it. Spark and others prefix theirs with _."""


def find_inputs(selection: Selection, output: Path) -> tuple[list[Input], LeftOut]:
    """Returns the selected files outside `output`, sorted by name and each once, and the names that are left out.

    A file that is passed explicitly is always read. Raises `ConfigError` if there is no file.
    """
    left_out: LeftOut = {"hidden": [], "companions": [], "special": []}
    trained = _find_files(selection.inputs, selection, output, "--input", left_out)
    held_out = _find_files(selection.eval_inputs, selection, output, "--eval-input", left_out)
    every = sorted((trained | held_out).items(), key=lambda entry: entry[1])
    inputs = [
        _describe(number, name, path, "eval" if real in held_out else None)
        for number, (real, (name, path)) in enumerate(every)
    ]
    return inputs, left_out


def _find_files(
    roots: Sequence[Path], selection: Selection, output: Path, option: str, left_out: LeftOut
) -> dict[Path, tuple[str, Path]]:
    """Returns the name and path of each file below these roots, by real path, because inputs may overlap."""
    names_by_path: dict[Path, tuple[str, Path]] = {}
    folder_of_output = output.resolve()
    requested = {root.resolve() for root in (*selection.inputs, *selection.eval_inputs)}
    for root in roots:
        if root.is_file():
            files = {root: root.name}
        elif root.is_dir():
            files = _files_below(root, selection, requested, left_out)
            _leave_out_companions(files, requested, left_out)
        else:
            raise ConfigError(f"{option}: {_describe_invalid(root)}")
        for path, name in files.items():
            real = path.resolve()
            if folder_of_output not in real.parents:
                names_by_path[real] = min(names_by_path.get(real, (name, path)), (name, path))
    if roots and not names_by_path:
        suffixes = f" ending in {' or '.join(selection.suffixes)}" if selection.suffixes else ""
        ignored = [name for names in left_out.values() for name in names]
        except_for = f" except ignored ones ({', '.join(map(printable, ignored[:3]))})" if ignored else ""
        raise ConfigError(
            f"{option}: found no files{suffixes} in {printable(', '.join(map(str, roots)))}{except_for}; check the "
            "path, --suffix and --exclude"
        )
    return names_by_path


def _files_below(root: Path, selection: Selection, requested: set[Path], left_out: LeftOut) -> dict[Path, str]:
    """Returns the selected regular files below a folder, with their names, except hidden ones."""
    files = {}
    visited = set()  # symbolic links may form cycles
    suffixes, prefix = tuple(selection.suffixes) or "", root.resolve().name
    name_of = lambda path: f"{prefix}/{path.relative_to(root)}"

    def visible(folder: str, names: list[str]) -> list[Path]:
        """Returns the paths of these names, sorted, except hidden and excluded ones."""
        paths = []
        for name in sorted(names):
            path = Path(folder, name)
            if any(fnmatch.fnmatch(name, pattern) for pattern in selection.excludes):
                continue
            if not name.startswith("."):
                paths.append(path)
            elif not any(requested_path.is_relative_to(path.resolve()) for requested_path in requested):
                left_out["hidden"].append(name_of(path))
        return paths

    for folder, folders, names in os.walk(root, onerror=raise_unreadable, followlinks=True):
        if (here := Path(folder).resolve()) in visited:
            folders.clear()
            continue
        visited.add(here)
        folders[:] = [path.name for path in visible(folder, folders)]
        for path in visible(folder, names):
            if not path.is_file():
                left_out["special"].append(name_of(path))
            elif path.name.endswith(suffixes):
                files[path] = name_of(path)
    return files


def _leave_out_companions(files: dict[Path, str], requested: set[Path], left_out: LeftOut) -> None:
    """Removes texts that only describe the records in or below their own folder."""
    records = [path for path in files if kind_of_file(path) in ("jsonl", "compressed", "parquet")]
    with_records = {folder for path in records for folder in path.parents}
    for path in list(files):
        if kind_of_file(path) == "text" and path.parent in with_records and _COMPANION.fullmatch(path.name):
            name = files.pop(path)
            if path.resolve() not in requested:
                left_out["companions"].append(name)


def _describe_invalid(path: Path) -> str:
    """Describes why a path that is neither a file nor a folder cannot be read, and what to pass instead."""
    shown = printable(str(path))
    if str(path) == "-":
        return "- (standard input) cannot be read twice and in parts; write its contents to a file and give that"
    if path.exists():
        kind = "a pipe" if path.is_fifo() else "neither a file nor a folder"
        return f"{shown} is {kind}, and cannot be read twice and in parts; write its contents to a file and give that"
    if path.is_symlink():
        return f"{shown} is a link to {printable(str(path.readlink()))}, which does not exist; check the path"
    return f"{shown} does not exist; check the path"


def _describe(number: int, name: str, path: Path, split: Literal["train", "eval"] | None) -> Input:
    status = path.stat()
    return Input(number, name, path, kind_of_file(path), status.st_size, status.st_mtime_ns, split)


def check_unchanged(inputs: Sequence[Input]) -> None:
    """Raises `ConfigError` if a file has changed since it was found."""
    for file in inputs:
        try:
            is_same = _describe(file.number, file.name, file.path, file.split) == file
        except OSError:
            is_same = False
        if not is_same:
            raise ConfigError(
                f"--input: {file.shown} was changed or removed while it was being prepared; "
                "remove the output and prepare the data again"
            )


def cut_into_parts(inputs: Sequence[Input], settings: Settings) -> list[Part]:
    """Divides the input into parts of about equal bytes; small files share a part. Depends only on the files' sizes."""
    part_bytes = settings.part_bytes
    if part_bytes is None:
        total = sum(file.size for file in inputs)
        part_bytes = min(max(total // _PARTS, _SMALLEST_PART), _LARGEST_PART)
    groups: list[list[Piece]] = [[]]
    gathered = 0
    # Fill each part until it reaches part_bytes; a file without bytes counts as one byte.
    for file in inputs:
        for piece, size in _pieces(file, settings.reading.token_bytes, part_bytes):
            groups[-1].append(piece)
            gathered += max(size, 1)
            if gathered >= part_bytes:
                groups.append([])
                gathered = 0
    parts = [Part(number, tuple(group)) for number, group in enumerate(groups) if group]
    assert all(len({piece.file.number for piece in part.pieces}) == len(part.pieces) for part in parts)
    return parts


def raise_unreadable(error: OSError) -> NoReturn:
    raise ConfigError(
        f"--input: {printable(str(error.filename))} cannot be read: {error.strerror}; check its permissions"
    ) from error


def open_tokens(file: Input, dtype: str) -> np.ndarray:
    """Memory-maps the token array of a .npy or raw .bin file. Raises `ConfigError` unless it is 1-D integers."""
    try:
        if file.path.suffix.lower() == ".npy":
            array: np.ndarray = np.lib.format.open_memmap(file.path, mode="r")
        else:
            array = np.memmap(file.path, np.dtype(dtype), "r") if file.size else np.zeros(0, dtype)
    except Exception as error:  # NumPy may raise any exception for a damaged header
        raise ConfigError(
            f"--input: {file.shown} cannot be read as a token array: {printable(str(error)[:200])}; "
            "replace the file, or leave it out with --exclude"
        ) from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(
            f"--input: {file.shown} holds {array.ndim}-dimensional {array.dtype}; "
            "token arrays are 1-dimensional integers"
        )
    return array


def open_parquet(file: Input) -> Any:
    """Returns a pyarrow.parquet.ParquetFile. Raises `ConfigError` if pyarrow is missing or the file is damaged."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(f"--input: {file.shown} needs pyarrow; {how_to_install('data')}") from error
    try:
        # The defaults would hold a whole column of a row group in memory.
        opened = parquet.ParquetFile(file.path, pre_buffer=False, buffer_size=2**20)
        _ = opened.schema_arrow.names  # names are decoded on access, which may fail
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        raise damaged_parquet(file, error) from error
    return opened


def damaged_parquet(file: Input, error: Exception) -> ConfigError:
    return ConfigError(
        f"--input: {file.shown} cannot be read as Parquet: {printable(str(error)[:200])}; replace "
        "the file, or leave it out with --exclude"
    )


def _pieces(file: Input, token_bytes: int, part_bytes: int) -> list[tuple[Piece, int]]:
    """Cuts a file into pieces, all but the last of at least `part_bytes`. Returns them with their sizes in bytes."""
    if file.kind in ("text", "compressed"):
        return [(Piece(file, 0, file.size), file.size)]
    if file.kind == "parquet":
        return _row_groups(file, part_bytes)
    unit, length = 1, file.size
    if file.kind == "tokens":
        array = open_tokens(file, f"u{token_bytes}")
        unit, length = array.dtype.itemsize, len(array)
    elements_per_piece = -(-part_bytes // unit)
    pieces = [
        Piece(file, start, min(start + elements_per_piece, length)) for start in range(0, length, elements_per_piece)
    ]
    return [(piece, (piece.stop - piece.start) * unit) for piece in pieces]


def _row_groups(file: Input, part_bytes: int) -> list[tuple[Piece, int]]:
    metadata = open_parquet(file).metadata
    pieces, first, gathered = [], 0, 0
    for group in range(metadata.num_row_groups):
        gathered += metadata.row_group(group).total_byte_size
        if gathered >= part_bytes or group == metadata.num_row_groups - 1:
            pieces.append((Piece(file, first, group + 1), gathered))
            first, gathered = group + 1, 0
    return pieces


def kind_of_file(path: Path) -> Kind:
    """Returns the kind of a file by its name."""
    name = path.name.lower()
    return next((kind for kind, pattern in _NAMES.items() if re.fullmatch(pattern, name, re.DOTALL)), "text")


DEFAULT_FRACTION = 0.02
"""Default share of documents to hold out."""

_EVAL_WORDS = {"val", "valid", "validation", "eval"}


def decide_held_out(inputs: list[Input], settings: Settings) -> tuple[list[Input], Settings]:
    """Decides the held-out files and the held-out share of the others. Returns the updated inputs and settings.

    An explicit share is kept. Otherwise files of --eval-input and token arrays named like val.bin are held out and all
    other files are trained on; and token arrays that are one document each are not divided.
    """
    if settings.eval_fraction is not None:
        return inputs, settings
    if not any(file.split for file in inputs):
        inputs = _split_by_name(inputs)
    whole = settings.tokenizer is None and settings.reading.end_id is None
    undivided = all(file.kind == "tokens" for file in inputs) and whole and settings.train_tokenizer is None
    named = any(file.split for file in inputs)
    return inputs, replace(settings, eval_fraction=0.0 if named or undivided else DEFAULT_FRACTION)


def _split_by_name(inputs: list[Input]) -> list[Input]:
    arrays = [file for file in inputs if file.kind == "tokens"]
    held_out = {file.path for file in arrays if _EVAL_WORDS & set(re.split(r"[^a-z]+", file.path.stem.lower()))}
    if not 0 < len(held_out) < len(arrays):
        return inputs
    return [
        file._replace(split="eval" if file.path in held_out else "train") if file.kind == "tokens" else file
        for file in inputs
    ]
