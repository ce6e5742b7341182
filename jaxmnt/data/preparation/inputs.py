"""Finds the input files, divides the work into parts, and decides how documents are held out."""

import fnmatch
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np

from jaxmnt.data.chat.template import ChatFormat
from jaxmnt.data.manifest import BYTES
from jaxmnt.errors import ConfigError, how_to_install, printable

SHARD_TOKENS = 2**30
"""Default number of tokens after which a shard ends."""
MAX_PARTS = 2**12
"""Default number of parts of the largest inputs. Each part has shards of its own, so this bounds the number of
files."""
PACKED_LENGTHS = (4096,)
"""Default lengths of packed rows whose plans are written."""


@dataclass(frozen=True)
class ReadOptions:
    """Settings that determine how inputs are read."""

    text_field: str = "text"
    """Field or column that holds the text of a document."""
    chat: bool = False
    """True if records hold conversations."""
    learn: Literal["answers", "last", "all"] = "answers"
    """Targets of a conversation: all answers, the last answer, or the entire text."""
    chat_format: ChatFormat | None = None
    """Chat template that renders conversations; None for ChatML."""
    chat_date: str | None = None
    """The date that a template writes as today's, such as 2026-01-31."""
    ignored_fields: tuple[str, ...] = ()
    """Fields of conversations and their messages that are dropped although they may change the meaning."""
    replace_invalid: bool = False
    """True if bytes that are not UTF-8 are replaced; else they are an error."""
    token_bytes: int = 2
    """Bytes of each token in .bin files."""
    end_id: int | None = None
    """Id that ends documents in token arrays. None: each file is one document."""
    vocab_size: int = 0
    """Vocabulary size; 0 until it is known."""
    max_document: int = 64 * 2**20
    """Maximum number of bytes of a record, because records are held in memory. Text files and token arrays have no
    limit, because they are read in stretches."""
    long_documents: Literal["error", "split", "skip"] = "error"
    """Treatment of longer records: they are an error, or are split or skipped."""


@dataclass(frozen=True)
class Settings:
    """Settings of a preparation. All except `workers` affect the output."""

    tokenizer: str | None = BYTES
    """bytes, the path of a tokenizer.json, or None for token arrays with their own vocabulary."""
    end_token: str | None = None
    """Token that ends a document; None for a common one."""
    train_tokenizer: int | None = None
    """Vocabulary size of a BPE tokenizer to train on the input instead; None to train none."""
    reading: ReadOptions = field(default_factory=ReadOptions)
    """Settings for reading the inputs. The name is a key of the plan that a preparation writes."""
    vocab_size: int | None = None
    """Vocabulary size of token arrays without a tokenizer."""
    eval_fraction: float | None = 0.02
    """Share of documents to hold out; None for the default share, which depends on the inputs."""
    skip_bad: bool = False
    """True if records that cannot be used are skipped; else they are an error."""
    workers: int = 1
    packed_lengths: tuple[int, ...] = PACKED_LENGTHS
    """Lengths of packed rows whose plans are written into the index."""
    shard_tokens: int = SHARD_TOKENS
    max_parts: int | None = MAX_PARTS
    """Number of parts of the largest inputs, whose parts are larger than others; None for parts of up to 256 MiB."""
    part_bytes: int | None = None
    """Bytes of input per part; None to derive them from the total size."""


Kind = Literal["text", "jsonl", "compressed", "parquet", "tokens"]

_NAME_PATTERNS: dict[Kind, str] = {
    "jsonl": r".*\.(jsonl|ndjson)",
    "compressed": r".*\.(json|jsonl|ndjson)\.(gz|zst)",
    "parquet": r".*\.parquet",
    "tokens": r".*\.(npy|bin)",
}
"""Pattern of the file names of each kind. All other files are text."""

_TARGET_PARTS = 64
"""Number of parts into which the input is divided if their size allows it."""
_MIN_PART_BYTES = 2**22
_MAX_PART_BYTES = 2**28


@dataclass(frozen=True)
class Selection:
    """The values of --input, --eval-input, --suffix and --exclude, which select the files."""

    inputs: Sequence[Path]
    suffixes: Sequence[str] = ()
    """If this is not empty, only files whose names end in one of these suffixes are read."""
    excludes: Sequence[str] = ()
    """Files and folders whose names match one of these patterns are left out."""
    eval_inputs: Sequence[Path] = ()
    """Files and folders to hold out, even if they are inside one of the inputs."""


class Input(NamedTuple):
    """One input file."""

    number: int
    """Index of the file among all inputs, by which the output refers to the file."""
    name: str
    """Name of the file in the output. It is relative, so that the output does not depend on the location of the
    input."""
    path: Path
    kind: Kind
    size: int
    """Size in bytes."""
    modified_ns: int
    """Modification time in nanoseconds."""
    split: Literal["train", "eval"] | None = None
    """Split of all documents in the file; None if the split is decided for each document."""

    @property
    def printable_path(self) -> str:
        """The path, with unprintable characters as escapes."""
        return printable(str(self.path))


class Piece(NamedTuple):
    """A range of one file: of bytes (text and JSON lines), row groups (Parquet) or elements (token arrays)."""

    file: Input
    start: int
    stop: int


_MAX_NAMED_FILES = 3
"""Maximum number of files of a part that an error names."""


class Part(NamedTuple):
    """A unit of work for a worker. Each part becomes separate shards."""

    number: int
    pieces: tuple[Piece, ...]

    def __str__(self) -> str:
        names = [piece.file.printable_path for piece in self.pieces]
        return ", ".join(names[:_MAX_NAMED_FILES]) + (" …" if len(names) > _MAX_NAMED_FILES else "")


LeftOut = dict[Literal["hidden", "companions", "special"], list[str]]
"""Names of the files and folders in input folders that are not read, by reason.

Hidden files and folders have names that begin with a dot, such as .git and .cache. Companions are texts that describe
the records in their folder, such as a dataset's README.md. Special files are pipes, devices and broken links.
"""

_COMPANION_NAME = re.compile(
    r"(readme|licen[cs]e|notice|citation|changelog|contributing|authors|code_of_conduct|security)([._-].*)?"
    r"|(dataset_infos?|dataset_dict|state|croissant)\.json|_.*",
    re.IGNORECASE,
)
"""Names of files that accompany a dataset but are not part of it. Spark and others begin such names with _."""


def find_inputs(selection: Selection, output: Path) -> tuple[list[Input], LeftOut]:
    """Returns the selected files outside `output`, each once and sorted by name, and the names of what is left out.

    A file that is passed explicitly is always read. Raises `ConfigError` if no file is found.
    """
    left_out: LeftOut = {"hidden": [], "companions": [], "special": []}
    trained = _find_files(selection.inputs, selection, output, "--input", left_out)
    held_out = _find_files(selection.eval_inputs, selection, output, "--eval-input", left_out)
    files = sorted((trained | held_out).items(), key=lambda entry: entry[1])
    inputs = [
        _describe(number, name, path, "eval" if real_path in held_out else None)
        for number, (real_path, (name, path)) in enumerate(files)
    ]
    return inputs, left_out


def _find_files(
    roots: Sequence[Path], selection: Selection, output: Path, option: str, left_out: LeftOut
) -> dict[Path, tuple[str, Path]]:
    """Returns the name and path of each selected file in or below the roots.

    The keys are real paths, so that a file that several roots contain is read only once.
    """
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
            real_path = path.resolve()
            if folder_of_output not in real_path.parents:
                names_by_path[real_path] = min(names_by_path.get(real_path, (name, path)), (name, path))
    if roots and not names_by_path:
        suffixes = f" ending in {' or '.join(selection.suffixes)}" if selection.suffixes else ""
        ignored = [name for names in left_out.values() for name in names]
        exception = f" except ignored ones ({', '.join(map(printable, ignored[:3]))})" if ignored else ""
        raise ConfigError(
            f"{option}: found no files{suffixes} in {printable(', '.join(map(str, roots)))}{exception}; check the "
            "path, --suffix and --exclude"
        )
    return names_by_path


def _files_below(root: Path, selection: Selection, requested: set[Path], left_out: LeftOut) -> dict[Path, str]:
    """Returns the path and name of each selected regular file below a folder, except hidden files."""
    files = {}
    visited = set()  # symbolic links may form cycles
    suffixes = tuple(selection.suffixes) or ""
    root_name = root.resolve().name
    name_of = lambda path: f"{root_name}/{path.relative_to(root)}"

    def selected_paths(folder: str, names: list[str]) -> list[Path]:
        """Returns the sorted paths of files or folders with these names, except hidden and excluded ones."""
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
        real_folder = Path(folder).resolve()
        if real_folder in visited:
            folders.clear()
            continue
        visited.add(real_folder)
        folders[:] = [path.name for path in selected_paths(folder, folders)]
        for path in selected_paths(folder, names):
            if not path.is_file():
                left_out["special"].append(name_of(path))
            elif path.name.endswith(suffixes):
                files[path] = name_of(path)
    return files


def _leave_out_companions(files: dict[Path, str], requested: set[Path], left_out: LeftOut) -> None:
    """Removes from `files` the texts that only describe records in or below their folder, and adds their names to
    `left_out`."""
    records = [path for path in files if kind_of_file(path) in ("jsonl", "compressed", "parquet")]
    folders_with_records = {folder for path in records for folder in path.parents}
    for path in list(files):
        if (
            kind_of_file(path) == "text"
            and path.parent in folders_with_records
            and _COMPANION_NAME.fullmatch(path.name)
        ):
            name = files.pop(path)
            if path.resolve() not in requested:
                left_out["companions"].append(name)


def _describe_invalid(path: Path) -> str:
    """Describes why a path that is neither a file nor a folder cannot be read, and what to pass instead."""
    printable_path = printable(str(path))
    if str(path) == "-":
        return "- (standard input) cannot be read twice and in parts; write its contents to a file and give that"
    if path.exists():
        kind = "a pipe" if path.is_fifo() else "neither a file nor a folder"
        return (
            f"{printable_path} is {kind}, and cannot be read twice and in parts; write its contents to a file and give "
            "that"
        )
    if path.is_symlink():
        return f"{printable_path} is a link to {printable(str(path.readlink()))}, which does not exist; check the path"
    return f"{printable_path} does not exist; check the path"


def _describe(number: int, name: str, path: Path, split: Literal["train", "eval"] | None) -> Input:
    status = path.stat()
    return Input(number, name, path, kind_of_file(path), status.st_size, status.st_mtime_ns, split)


def check_unchanged(inputs: Sequence[Input]) -> None:
    """Raises `ConfigError` if an input file has been changed or removed since `find_inputs` returned it."""
    for file in inputs:
        try:
            is_same = _describe(file.number, file.name, file.path, file.split) == file
        except OSError:
            is_same = False
        if not is_same:
            raise ConfigError(
                f"--input: {file.printable_path} was changed or removed while it was being prepared; "
                "remove the output and prepare the data again"
            )


def cut_into_parts(inputs: Sequence[Input], settings: Settings) -> list[Part]:
    """Divides the input into parts of about equal size. Small files share a part, and large files are cut.

    The result depends only on the settings and on the sizes of files, and of row groups in Parquet.
    """
    part_bytes = settings.part_bytes
    if part_bytes is None:
        total = sum(file.size for file in inputs)
        largest = max(_MAX_PART_BYTES, total // settings.max_parts if settings.max_parts else 0)
        part_bytes = min(max(total // _TARGET_PARTS, _MIN_PART_BYTES), largest)
    groups: list[list[Piece]] = [[]]
    bytes_in_part = 0
    # Fill each part until it reaches part_bytes. An empty file counts as one byte.
    for file in inputs:
        for piece, size in _pieces(file, settings.reading.token_bytes, part_bytes):
            groups[-1].append(piece)
            bytes_in_part += max(size, 1)
            if bytes_in_part >= part_bytes:
                groups.append([])
                bytes_in_part = 0
    parts = [Part(number, tuple(group)) for number, group in enumerate(groups) if group]
    assert all(len({piece.file.number for piece in part.pieces}) == len(part.pieces) for part in parts)
    return parts


def raise_unreadable(error: OSError) -> NoReturn:
    raise ConfigError(
        f"--input: {printable(str(error.filename))} cannot be read: {error.strerror}; check its permissions"
    ) from error


def open_tokens(file: Input, dtype: str) -> np.ndarray:
    """Memory-maps the token array in a .npy or raw .bin file. Raises `ConfigError` unless it holds 1-D integers."""
    try:
        if file.path.suffix.lower() == ".npy":
            array: np.ndarray = np.lib.format.open_memmap(file.path, mode="r")
        else:
            array = np.memmap(file.path, np.dtype(dtype), "r") if file.size else np.zeros(0, dtype)
    except Exception as error:  # NumPy may raise any exception for a damaged header
        raise ConfigError(
            f"--input: {file.printable_path} cannot be read as a token array: {printable(str(error)[:200])}; "
            "replace the file, or leave it out with --exclude"
        ) from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(
            f"--input: {file.printable_path} holds {array.ndim}-dimensional {array.dtype}; "
            "token arrays are 1-dimensional integers"
        )
    return array


def open_parquet(file: Input) -> Any:
    """Opens a file as pyarrow.parquet.ParquetFile. Raises `ConfigError` if pyarrow is missing or the file is
    damaged."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(f"--input: {file.printable_path} needs pyarrow; {how_to_install('data')}") from error
    try:
        # With the default settings, an entire column of a row group would be held in memory.
        opened = parquet.ParquetFile(file.path, pre_buffer=False, buffer_size=2**20)
        _ = opened.schema_arrow.names  # access decodes the names, which may fail
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        raise damaged_parquet(file, error) from error
    return opened


def damaged_parquet(file: Input, error: Exception) -> ConfigError:
    """Returns the error for a Parquet file that pyarrow cannot read."""
    return ConfigError(
        f"--input: {file.printable_path} cannot be read as Parquet: {printable(str(error)[:200])}; replace "
        "the file, or leave it out with --exclude"
    )


def _pieces(file: Input, token_bytes: int, part_bytes: int) -> list[tuple[Piece, int]]:
    """Cuts a file into pieces, and returns them with their sizes in bytes. All except the last have at least
    `part_bytes`."""
    if file.kind in ("text", "compressed"):
        return [(Piece(file, 0, file.size), file.size)]
    if file.kind == "parquet":
        return _parquet_pieces(file, part_bytes)
    element_bytes = 1
    length = file.size
    if file.kind == "tokens":
        array = open_tokens(file, f"u{token_bytes}")
        element_bytes = array.dtype.itemsize
        length = len(array)
    elements_per_piece = -(-part_bytes // element_bytes)
    pieces = [
        Piece(file, start, min(start + elements_per_piece, length)) for start in range(0, length, elements_per_piece)
    ]
    return [(piece, (piece.stop - piece.start) * element_bytes) for piece in pieces]


def _parquet_pieces(file: Input, part_bytes: int) -> list[tuple[Piece, int]]:
    """Cuts a Parquet file between row groups, as `_pieces` does."""
    metadata = open_parquet(file).metadata
    pieces = []
    first = 0
    bytes_in_piece = 0
    for group in range(metadata.num_row_groups):
        bytes_in_piece += metadata.row_group(group).total_byte_size
        if bytes_in_piece >= part_bytes or group == metadata.num_row_groups - 1:
            pieces.append((Piece(file, first, group + 1), bytes_in_piece))
            first = group + 1
            bytes_in_piece = 0
    return pieces


def kind_of_file(path: Path) -> Kind:
    """Returns the kind of a file, which its name determines."""
    name = path.name.lower()
    return next((kind for kind, pattern in _NAME_PATTERNS.items() if re.fullmatch(pattern, name, re.DOTALL)), "text")


DEFAULT_FRACTION = 0.02
"""Default share of documents to hold out."""

_HELD_OUT_WORDS = {"val", "valid", "validation", "eval"}


def decide_held_out(inputs: list[Input], settings: Settings) -> tuple[list[Input], Settings]:
    """Decides which files are held out, and which share of the documents in the other files.

    Returns the updated inputs and settings. An explicit share is not changed. Otherwise, if there are files of
    --eval-input, or token arrays with names such as val.bin, these are held out and all other files are trained on. If
    all inputs are token arrays that are one document each, nothing else is held out.
    """
    if settings.eval_fraction is not None:
        return inputs, settings
    if not any(file.split for file in inputs):
        inputs = _split_by_name(inputs)
    has_tokenizer = settings.tokenizer is not None or settings.train_tokenizer is not None
    has_documents = has_tokenizer or settings.reading.end_id is not None
    are_whole_arrays = not has_documents and all(file.kind == "tokens" for file in inputs)
    has_held_out_files = any(file.split for file in inputs)
    eval_fraction = 0.0 if has_held_out_files or are_whole_arrays else DEFAULT_FRACTION
    return inputs, replace(settings, eval_fraction=eval_fraction)


def _split_by_name(inputs: list[Input]) -> list[Input]:
    """Returns the inputs with splits for token arrays, if the names of some, but not all, say that they are held
    out."""
    arrays = [file for file in inputs if file.kind == "tokens"]
    held_out = {file.path for file in arrays if _HELD_OUT_WORDS & set(re.split(r"[^a-z]+", file.path.stem.lower()))}
    if not 0 < len(held_out) < len(arrays):
        return inputs
    return [
        file._replace(split="eval" if file.path in held_out else "train") if file.kind == "tokens" else file
        for file in inputs
    ]
