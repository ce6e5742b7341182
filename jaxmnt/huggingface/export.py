"""Exports a checkpoint as a Hugging Face folder, on one machine or on several at a time, without JAX's devices.

Files hold whole tensors, one parameter after another, so that a checkpoint whose chunks span many layers is read only
once. Each process writes some of the files into a temporary folder next to the requested one. A process that finds all
files complete compares the digests of the data that was read with those of the checkpoint, and publishes the folder by
renaming it. Processes therefore need not communicate, and an interrupted export can be resumed.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxmnt.checkpoint import digest
from jaxmnt.checkpoint.arrays import Reader, Shape
from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.manifest import DamagedError
from jaxmnt.checkpoint.names import stored_name
from jaxmnt.config.model import Model
from jaxmnt.data.manifest import BYTES, TOKENIZER_FILE
from jaxmnt.data.run_tokenizer import RunTokenizer
from jaxmnt.errors import ConfigError, UserError
from jaxmnt.huggingface.companions import Files, match_tokenizer, with_chat, with_end_token
from jaxmnt.huggingface.config import TOKENIZER_KEY, write_config
from jaxmnt.huggingface.folder import CONFIG, DTYPES, INDEX, SINGLE, json_bytes
from jaxmnt.huggingface.tensors import Part, Parts, parts_of, round_to
from jaxmnt.models.contract import define
from jaxmnt.models.registry import build_family
from jaxmnt.strict_json import json_text

_PIECE_BYTES = 256 << 20
"""Approximate size of the pieces in which arrays are copied."""
_DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}


class LayerRange(NamedTuple):
    """A range of layers, for parameters that share tensors. Parameters that are not stacked count as one layer."""

    parameters: tuple[str, ...]
    begin: int
    end: int


class ArraySource(Protocol):
    """The arrays of a model, by their names in a checkpoint."""

    def shape(self, name: str) -> Shape:
        """Returns the shape of the array."""

    def chunk_shape(self, name: str) -> Shape:
        """Returns the shape of the smallest part of the array that is read at once."""

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        """Returns a part of the array as it is stored."""

    def finish(self, name: str, index: Sequence[slice], piece: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Returns what an export in `dtype` writes for this part of the array, of which `read` has returned `piece`. It
        is not rounded to `dtype`."""

    def content(self, name: str) -> str:
        """Returns the digest of the array as it is stored."""

    def damage(self, name: str) -> UserError:
        """Returns the error for an array with another digest."""


class CheckpointArrays:
    """The arrays of a checkpoint, which an export writes as they are."""

    def __init__(self, checkpoint: Committed):
        self._arrays, self._path = checkpoint.manifest.arrays, checkpoint.path
        self._reader = Reader(checkpoint, [name for name in self._arrays if name.startswith("params/")])

    def shape(self, name: str) -> Shape:
        return self._arrays[name].shape

    def chunk_shape(self, name: str) -> Shape:
        return self._reader.chunk_shape(name)

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        return self._reader.read(name, index)

    def finish(self, name: str, index: Sequence[slice], piece: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return piece

    def content(self, name: str) -> str:
        return self._arrays[name].content

    def damage(self, name: str) -> UserError:
        return DamagedError(f"checkpoint {self._path}: array {name} is not what was saved")


@dataclass(frozen=True)
class Export:
    """The plan of an export: its files and their contents. It is the same in all processes."""

    checkpoint: Committed
    arrays: ArraySource
    parts: Parts
    files: dict[str, list[LayerRange]]
    dtype: np.dtype
    companions: Files
    """The files of the folder without weights, by name."""
    untrained_rows: int
    """Number of rows of the checkpoint's vocabulary that the export leaves out."""

    @property
    def id(self) -> str:
        """A digest that distinguishes this export from other exports into the same folder."""
        manifest = self.checkpoint.manifest
        shapes = {name: [part.tensor_shape for part in parts] for name, parts in sorted(self.parts.items())}
        identity = [manifest.run, manifest.step, self.dtype.name, self.files, shapes]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:8]

    def tensors(self, file: str) -> list[Part]:
        """Returns a part for each tensor in a file, in the order of the file."""
        tensors: dict[str, Part] = {}
        for layer_range in self.files[file]:
            for parameter in layer_range.parameters:
                parts = self.parts[parameter]
                experts = parts[0].experts
                for part in parts[layer_range.begin * experts : layer_range.end * experts]:
                    tensors.setdefault(part.name, part)
        return list(tensors.values())


def plan_export(
    checkpoint: Committed,
    arrays: ArraySource,
    companions: Files,
    tokenizer: RunTokenizer | None,
    dtype: str | None,
    file_bytes: int,
) -> Export:
    """Returns the plan of an export of the model in `arrays`. `companions` are the files that came with
    the model. The run's own `tokenizer` takes precedence over theirs. If `dtype` is None, the export has the dtype of
    the model that the run came from, or float32 if there is none. Each file has about `file_bytes`.

    Raises `ConfigError` for a family that Hugging Face does not know.
    """
    manifest = checkpoint.manifest
    config = checkpoint.config
    if tokenizer is not None:
        companions = match_tokenizer(companions, tokenizer)
        if manifest.tokens > 0 and tokenizer.name != "synthetic":
            companions = with_end_token(companions, tokenizer)
    source = json.loads(companions[CONFIG]) if CONFIG in companions else {}
    model = _without_untrained_rows(config.model, source, tokenizer)
    assert model.vocab_size is not None and config.model.vocab_size is not None
    definition = define(build_family(model, model.vocab_size))

    # Token ids are always explicit, because transformers replaces missing ones with a family's defaults.
    end_id = None if tokenizer is None else tokenizer.end_of_document
    token_ids = {"bos_token_id": None, "eos_token_id": end_id, "pad_token_id": None}
    source_keys = source.get("text_config", {}) | source
    max_positions = max(source_keys.get("max_position_embeddings") or 0, config.data.sequence_length)
    tree = write_config(model, token_ids | source_keys | {"max_position_embeddings": max_positions})
    parts = parts_of(definition)
    dtype_name = dtype or tree.get("dtype") or tree.get("torch_dtype") or "float32"
    supported = [dtype.name for dtype in DTYPES.values()]
    if dtype_name not in supported:
        raise ConfigError(f"--dtype: {dtype_name} is not one of {', '.join(supported)}")
    tree |= {"dtype": dtype_name, "torch_dtype": dtype_name}
    if tokenizer is not None and tokenizer.name == BYTES:
        tree[TOKENIZER_KEY] = BYTES  # read by from-hf, because bytes need no tokenizer.json
    companions = _export_companions(companions, tokenizer) | {CONFIG: json_bytes(tree)}
    if tokenizer is not None:
        companions = with_chat(companions, tokenizer)

    files = divide_into_files(parts, np.dtype(dtype_name).itemsize, file_bytes)
    untrained_rows = config.model.vocab_size - model.vocab_size
    export = Export(checkpoint, arrays, parts, files, np.dtype(dtype_name), companions, untrained_rows)
    if len(files) > 1:
        tensors = [(part, file) for file in files for part in export.tensors(file)]
        total = sum(_size_in_bytes(part, export.dtype) for part, _ in tensors)
        file_of_tensor = {part.name: file for part, file in tensors}
        companions[INDEX] = json_bytes({"metadata": {"total_size": total}, "weight_map": file_of_tensor})
    return export


def _export_companions(companions: Files, tokenizer: RunTokenizer | None) -> Files:
    """Returns the companions without the config and with the run's tokenizer."""
    files = {name: content for name, content in companions.items() if name != CONFIG}
    if tokenizer is not None and tokenizer.text is not None:
        files[TOKENIZER_FILE] = tokenizer.text.encode()
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.description.get("end_token")}
        files.setdefault("tokenizer_config.json", (json_text(settings, indent=2) + "\n").encode())
    return files


def _without_untrained_rows(model: Model, source: dict[str, Any], tokenizer: RunTokenizer | None) -> Model:
    """Returns the model without the rows of its vocabulary that do not belong to any id of the data.

    Training masks the logits of these rows, but other programs do not. A model that came with such rows keeps them.
    """
    vocab_size = model.vocab_size
    source_vocab_size = (source.get("text_config") or {}).get("vocab_size", source.get("vocab_size"))
    if vocab_size is None or tokenizer is None:
        return model
    if tokenizer.vocab_size >= vocab_size or source_vocab_size == vocab_size:
        return model
    return model.model_copy(update={"vocab_size": tokenizer.vocab_size})


def write_export(
    export: Export,
    folder: Path,
    process: int = 0,
    processes: int = 1,
    report_progress: Callable[[str], None] = lambda name: None,
) -> bool:
    """Writes this process's share of the files. Returns True if the folder is complete, False if other processes are
    still writing.

    Raises `ConfigError` if the folder existed before, and `DamagedError` if an array differs from what was saved.
    """
    if folder.exists():
        if processes > 1 and _is_complete(export, folder):
            return True  # another process has published it
        raise ConfigError(f"{folder} exists already; name a new folder")
    temporary = folder.with_name(f".{folder.name}.{export.id}.building")
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        for file in sorted(export.files)[process::processes]:
            if not (temporary / f"{file}.digests").exists():
                _write_file(export, file, temporary, report_progress)
        return _publish(export, temporary, folder)
    except ConfigError:
        shutil.rmtree(temporary, ignore_errors=True)  # the same command would fail again
        raise
    except UserError:
        raise
    except OSError as error:
        raise UserError(
            f"{error.filename or temporary} cannot be written: {error.strerror or error}; fix that and run the same "
            "command again, which resumes the export"
        ) from error


def _is_complete(export: Export, folder: Path) -> bool:
    """Returns True if the folder has all files of this export and its config."""
    names = (*export.files, *export.companions)
    if not all((folder / name).is_file() for name in names):
        return False
    return (folder / CONFIG).read_bytes() == export.companions[CONFIG]


def _publish(export: Export, temporary: Path, folder: Path) -> bool:
    """Checks and renames the temporary folder if the files of all processes are complete. Returns True if the folder
    has been published, by this process or another."""
    try:
        file_digests = [json.loads((temporary / f"{file}.digests").read_text()) for file in sorted(export.files)]
    except FileNotFoundError:
        return folder.exists()
    # The digest of an array is the sum of the digests of its pieces, which may be in several files.
    totals: dict[str, digest.Lanes] = {}
    for digests in file_digests:
        for name, lanes in digests.items():
            totals[name] = digest.add(totals.get(name, digest.ZERO), (lanes[0], lanes[1]))
    expected = export.arrays.content
    if damaged := sorted(name for name in totals if digest.to_text(totals[name]) != expected(name)):
        shutil.rmtree(temporary, ignore_errors=True)
        raise export.arrays.damage(damaged[0])
    with contextlib.suppress(FileNotFoundError):  # another process may be publishing as well
        for name, content in sorted(export.companions.items()):
            (temporary / name).write_bytes(content)
        for path in sorted(temporary.glob("*.digests")):
            path.unlink()
        temporary.rename(folder)
    return True


# -- the division into files


def divide_into_files(parts: Parts, itemsize: int, file_bytes: int) -> dict[str, list[LayerRange]]:
    """Returns the contents of files of about `file_bytes` each, by file name."""
    files: list[list[LayerRange]] = [[]]
    space_left = file_bytes
    for parameters in _group_by_tensor(parts):
        layers = len(parts[parameters[0]]) // parts[parameters[0]][0].experts
        layer_bytes = sum(parts[name][0].experts * math.prod(parts[name][0].shape) for name in parameters) * itemsize
        begin = 0
        while begin < layers:
            count = min(layers - begin, space_left // layer_bytes)
            if count < 1 and files[-1]:
                files.append([])
                space_left = file_bytes
                continue
            count = max(1, count)  # a layer larger than a file has a file of its own
            files[-1].append(LayerRange(parameters, begin, begin + count))
            begin += count
            space_left -= count * layer_bytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{number:05d}-of-{len(files):05d}.safetensors": file for number, file in enumerate(files, 1)}


def _group_by_tensor(parts: Parts) -> list[tuple[str, ...]]:
    """Returns the names of the parameters, grouped by the tensors that they share."""
    by_tensor: dict[str, list[str]] = {}
    for name, layer_parts in sorted(parts.items()):
        by_tensor.setdefault(layer_parts[0].name, []).append(name)
    return [tuple(names) for names in by_tensor.values()]


# -- one file


def _write_file(export: Export, file: str, temporary: Path, report_progress: Callable[[str], None]) -> None:
    """Writes a file under a temporary name, renames it, and writes the digests of the data that was read for it."""
    for leftover in temporary.glob(f".{file}.*"):  # from a process that was killed
        leftover.unlink()
    path = temporary / f".{file}.{os.getpid()}"
    offsets = begin_file(path, export.tensors(file), export.dtype)
    totals: dict[str, digest.Lanes] = {}
    for layer_range in export.files[file]:
        for parameter in layer_range.parameters:
            report_progress(parameter)
            name = stored_name(parameter)
            lanes = _copy_layers(export, parameter, layer_range, path, offsets)
            totals[name] = digest.add(totals.get(name, digest.ZERO), lanes)
    with path.open("rb+") as opened:
        os.fsync(opened.fileno())
    path.rename(temporary / file)
    (temporary / f"{file}.digests").write_text(json_text(totals))


def begin_file(path: Path, tensors: list[Part], dtype: np.dtype) -> dict[str, int]:
    """Creates a file of the right size with its header, and returns the offset of each tensor in it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for part in tensors:
        size = _size_in_bytes(part, dtype)
        header[part.name] = {
            "dtype": _DTYPE_CODES[dtype],
            "shape": list(part.tensor_shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json_text(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        # A full disk raises an error here, instead of a signal on writing to the mapped file.
        os.posix_fallocate(file.fileno(), 0, 8 + len(text) + end)
    return {part.name: 8 + len(text) + header[part.name]["data_offsets"][0] for part in tensors}


def _copy_layers(
    export: Export, parameter: str, layer_range: LayerRange, path: Path, offsets: dict[str, int]
) -> digest.Lanes:
    """Copies layers of a parameter into their tensors, piece by piece, and returns the digest of these layers, which is
    their part of the array's digest."""
    name = stored_name(parameter)
    parts = export.parts[parameter]
    shape = export.arrays.shape(name)
    total = digest.ZERO
    stack_dimensions = len(shape) - len(parts[0].shape)
    layer_bounds = (layer_range.begin, layer_range.end) if stack_dimensions else None
    for start, slices in _pieces(export.arrays.chunk_shape(name), shape, layer_bounds):
        piece = export.arrays.read(name, slices)
        total = digest.add(total, digest.block_digest(piece, start, shape))
        piece = export.arrays.finish(name, slices, piece, export.dtype)
        # The piece has a part for each index in the stack, which is (layer,), (layer, expert) or empty.
        for index in np.ndindex(piece.shape[:stack_dimensions]):
            layer, expert, *_ = *map(int, np.add(index, start[:stack_dimensions])), 0, 0
            part = parts[layer * parts[0].experts + expert]
            _write_piece(path, offsets[part.name], part, start[stack_dimensions:], piece[index], export.dtype)
    return total


def _pieces(
    chunk: Sequence[int], shape: Shape, layers: tuple[int, int] | None
) -> Iterator[tuple[Shape, tuple[slice, ...]]]:
    """Yields the first index and the slices of each piece of an array, or of its `layers` if it is stacked. Pieces have
    about `_PIECE_BYTES` and consist of whole chunks where possible. A piece has one or more layers, or the same part of
    each of them."""
    bounds = [(0, size) for size in shape]
    if layers is not None:
        bounds[0] = layers
    steps = [end - begin for begin, end in bounds]
    itemsize = np.dtype(np.float32).itemsize
    # Divide the first dimensions until a piece is small enough.
    for dimension, chunk_size in enumerate(chunk):
        if math.prod(steps) * itemsize <= _PIECE_BYTES:
            break
        bytes_per_index = math.prod(steps) // steps[dimension] * itemsize
        chunks = max(1, _PIECE_BYTES // bytes_per_index // chunk_size)
        steps[dimension] = min(steps[dimension], chunks * chunk_size)
    starts = [range(begin, end, max(1, step)) for (begin, end), step in zip(bounds, steps, strict=True)]
    for start in itertools.product(*starts):
        ends = [min(first + extent.step, extent.stop) for first, extent in zip(start, starts, strict=True)]
        yield start, tuple(map(slice, start, ends))


def _write_piece(
    path: Path, file_offset: int, part: Part, start: Sequence[int], piece: np.ndarray, dtype: np.dtype
) -> None:
    """Writes a piece of a layer into the tensor at `file_offset`. `start` is the index in the layer at which the piece
    begins."""
    # A vocabulary may have more rows in the checkpoint than in the files.
    piece = piece[tuple(slice(max(0, size - begin)) for size, begin in zip(part.shape, start, strict=True))]
    if not piece.size:
        return
    first_row, first_column = part.offset
    rows, columns = part.matrix_shape
    matrix = np.memmap(path, dtype, "r+", file_offset, part.tensor_shape).reshape(part.tensor_shape[0], -1)
    block = matrix[first_row : first_row + rows, first_column : first_column + columns]
    target = part.to_parameter(block)  # a view
    index = tuple(slice(begin, begin + size) for begin, size in zip(start, piece.shape, strict=True))
    target[index] = round_to(piece, dtype, part.name)


def _size_in_bytes(part: Part, dtype: np.dtype) -> int:
    """Returns the size in bytes of the whole tensor."""
    return math.prod(part.tensor_shape) * dtype.itemsize
