"""A checkpoint as a folder of Hugging Face: on any machine, or on several at a time, without JAX's devices.

Files hold whole tensors, of one parameter after another, so that a checkpoint whose chunks span many layers is read
once. Each process writes some of the files into a folder beside the one that is asked for; whoever finds that all are
there compares what was read with the digests, and publishes the folder by renaming it. So processes need not talk, and
what was interrupted goes on where it was.
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
from typing import Any, NamedTuple

import numpy as np

from jaxmnt.checkpoint import digest
from jaxmnt.checkpoint.arrays import Reader, Shape
from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.manifest import DamagedError
from jaxmnt.config.model import Model
from jaxmnt.data.run_tokenizer import RunTokenizer
from jaxmnt.data.tokenizer import BYTES, TOKENIZER_FILE
from jaxmnt.errors import ConfigError, UserError
from jaxmnt.huggingface.companions import Files, ended, fitting
from jaxmnt.huggingface.config import TOKENIZER_KEY, write_config
from jaxmnt.huggingface.folder import CONFIG, DTYPES, INDEX, SINGLE, json_bytes
from jaxmnt.huggingface.tensors import Part, Parts, parts_of, rounded
from jaxmnt.models.contract import define
from jaxmnt.models.registry import build_family
from jaxmnt.strict_json import json_text

_PIECE_BYTES = 256 << 20
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Work(NamedTuple):
    """Layers of the parameters that share tensors; of one that is not stacked, all of it."""

    parameters: tuple[str, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Export:
    """What becomes of a checkpoint: the files, and what each holds. The same in all processes."""

    checkpoint: Committed
    parts: Parts
    files: dict[str, list[Work]]
    dtype: np.dtype
    about: Files
    """The other files of the folder, by name."""
    untaught_rows: int
    """Of the checkpoint's vocabulary, which are left out."""

    @property
    def id(self) -> str:
        """Tells this export from others into the same folder."""
        manifest = self.checkpoint.manifest
        shapes = {name: [part.whole for part in several] for name, several in sorted(self.parts.items())}
        about = [manifest.run, manifest.step, self.dtype.name, self.files, shapes]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:8]

    def tensors(self, file: str) -> list[Part]:
        """The tensors of a file, each once, in their order."""
        found: dict[str, Part] = {}
        for work in self.files[file]:
            for parameter in work.parameters:
                for part in self.parts[parameter][work.begin : work.end]:
                    found.setdefault(part.name, part)
        return list(found.values())


def plan_export(
    checkpoint: Committed,
    companions: Files,
    tokenizer: RunTokenizer | None,
    dtype: str | None,
    file_bytes: int,
) -> Export:
    """`companions` are files that came with the model, `tokenizer` is the run's own, which counts. Without `dtype` it
    is that of the model that the run came from, else float32.

    Raises `ConfigError` for a family that Hugging Face does not know.
    """
    manifest = checkpoint.manifest
    config = checkpoint.config
    if tokenizer is not None:
        companions = fitting(companions, tokenizer)
        if manifest.tokens > 0 and tokenizer.name != "synthetic":
            companions = ended(companions, tokenizer)
    source = json.loads(companions[CONFIG]) if CONFIG in companions else {}
    model = _with_taught_rows(config.model, source, tokenizer)
    assert model.vocab_size is not None and config.model.vocab_size is not None
    definition = define(build_family(model, model.vocab_size))
    # What is left out would mean a family's usual ids.
    end = None if tokenizer is None else tokenizer.end_of_document
    ids = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None}
    theirs = source.get("text_config", {}) | source
    longest = max(theirs.get("max_position_embeddings") or 0, config.data.sequence_length)
    tree = write_config(model, ids | theirs | {"max_position_embeddings": longest})
    parts = parts_of(definition)
    wanted = dtype or tree.get("dtype") or tree.get("torch_dtype") or "float32"
    known = [dtype.name for dtype in DTYPES.values()]
    if wanted not in known:
        raise ConfigError(f"--dtype: {wanted} is not one of {', '.join(known)}")
    tree |= {"dtype": wanted, "torch_dtype": wanted}
    if tokenizer is not None and tokenizer.name == BYTES:
        tree[TOKENIZER_KEY] = BYTES  # which from-hf reads: bytes need no tokenizer.json
    about = {name: content for name, content in companions.items() if name != CONFIG}
    if tokenizer is not None and tokenizer.text is not None:
        about[TOKENIZER_FILE] = tokenizer.text.encode()
        told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.description.get("end_token")}
        about.setdefault("tokenizer_config.json", (json_text(told, indent=2) + "\n").encode())
    about[CONFIG] = json_bytes(tree)
    files = divided(parts, np.dtype(wanted).itemsize, file_bytes)
    untaught_rows = config.model.vocab_size - model.vocab_size
    export = Export(checkpoint, parts, files, np.dtype(wanted), about, untaught_rows)
    if len(files) > 1:
        tensors = [(part, file) for file in files for part in export.tensors(file)]
        total = sum(_bytes(part, export.dtype) for part, _ in tensors)
        places = {part.name: file for part, file in tensors}
        about[INDEX] = json_bytes({"metadata": {"total_size": total}, "weight_map": places})
    return export


def _with_taught_rows(model: Model, source: dict[str, Any], tokenizer: RunTokenizer | None) -> Model:
    """Returns the model without the rows of its vocabulary that no id of the data has.

    Training masks their logits, and other programs do not. A model that came with such rows keeps them.
    """
    rows = model.vocab_size
    theirs = (source.get("text_config") or {}).get("vocab_size", source.get("vocab_size"))
    if rows is None or tokenizer is None or tokenizer.vocab_size >= rows or theirs == rows:
        return model
    return model.model_copy(update={"vocab_size": tokenizer.vocab_size})


def write_export(
    export: Export, folder: Path, process: int = 0, processes: int = 1, tell: Callable[[str], None] = lambda name: None
) -> bool:
    """Writes this process's share of the files. Whether the folder is there now: else others are still writing.

    Raises `ConfigError` if it was there before, and `DamagedError` if an array is not what was saved.
    """
    if folder.exists():
        if processes > 1 and _is_whole(export, folder):
            return True  # the others were quicker
        raise ConfigError(f"{folder} exists already; name a new folder")
    building = folder.with_name(f".{folder.name}.{export.id}.building")
    own = sorted(export.files)[process::processes]
    names = {_stored(name) for file in own for work in export.files[file] for name in work.parameters}
    try:
        building.mkdir(parents=True, exist_ok=True)
        reader = Reader(export.checkpoint, sorted(names))
        for file in own:
            if not (building / f"{file}.digests").exists():
                _write_file(export, reader, file, building, tell)
        return _publish(export, building, folder)
    except ConfigError:
        shutil.rmtree(building, ignore_errors=True)  # the same command would fail again
        raise
    except UserError:
        raise
    except OSError as error:
        raise UserError(
            f"{error.filename or building} cannot be written: {error.strerror or error}; fix that and run the same "
            "command again, which goes on"
        ) from error


def _is_whole(export: Export, folder: Path) -> bool:
    """Whether the folder is what this export writes."""
    there = [path.is_file() for path in (folder / name for name in (*export.files, *export.about))]
    return all(there) and (folder / CONFIG).read_bytes() == export.about[CONFIG]


def _publish(export: Export, building: Path, folder: Path) -> bool:
    """Renames the folder if all files are there, whoever wrote them."""
    try:
        told = [json.loads((building / f"{file}.digests").read_text()) for file in sorted(export.files)]
    except FileNotFoundError:
        return folder.exists()
    shares: dict[str, digest.Lanes] = {}
    for one in told:
        for name, lanes in one.items():
            shares[name] = digest.add(shares.get(name, digest.ZERO), (lanes[0], lanes[1]))
    arrays = export.checkpoint.manifest.arrays
    if wrong := sorted(name for name in shares if digest.to_text(shares[name]) != arrays[name].content):
        shutil.rmtree(building, ignore_errors=True)
        raise DamagedError(f"checkpoint {export.checkpoint.path}: array {wrong[0]} is not what was saved")
    with contextlib.suppress(FileNotFoundError):  # another process that saw all files is publishing, too
        for name, content in sorted(export.about.items()):
            (building / name).write_bytes(content)
        for path in sorted(building.glob("*.digests")):
            path.unlink()
        building.rename(folder)
    return True


# -- which file holds what


def divided(parts: Parts, item: int, file_bytes: int) -> dict[str, list[Work]]:
    """Files of about so many bytes."""
    files: list[list[Work]] = [[]]
    room = file_bytes
    for parameters in _bundles(parts):
        layers = len(parts[parameters[0]])
        layer_bytes = sum(math.prod(parts[name][0].shape) for name in parameters) * item
        begin = 0
        while begin < layers:
            fits = min(layers - begin, room // layer_bytes)
            if fits < 1 and files[-1]:
                files.append([])
                room = file_bytes
                continue
            fits = max(1, fits)
            files[-1].append(Work(parameters, begin, begin + fits))
            begin, room = begin + fits, room - fits * layer_bytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{n + 1:05d}-of-{len(files):05d}.safetensors": file for n, file in enumerate(files)}


def _bundles(parts: Parts) -> list[tuple[str, ...]]:
    """The parameters, those together that are parts of the same tensors."""
    by_tensor: dict[str, list[str]] = {}
    for name, several in sorted(parts.items()):
        by_tensor.setdefault(several[0].name, []).append(name)
    return [tuple(names) for names in by_tensor.values()]


def _stored(parameter: str) -> str:
    """Its name in the checkpoint."""
    return f"params/{parameter.replace('.', '/')}"


# -- one file


def _write_file(export: Export, reader: Reader, file: str, building: Path, tell: Callable[[str], None]) -> None:
    """Writes a file beside its place, renames it, and says what was read for it."""
    for left in building.glob(f".{file}.*"):  # by a process that was killed
        left.unlink()
    path = building / f".{file}.{os.getpid()}"
    places = begin_file(path, export.tensors(file), export.dtype)
    shares: dict[str, digest.Lanes] = {}
    for work in export.files[file]:
        for parameter in work.parameters:
            tell(parameter)
            name = _stored(parameter)
            shares[name] = digest.add(
                shares.get(name, digest.ZERO), _copy(export, reader, parameter, work, path, places)
            )
    with path.open("rb+") as written:
        os.fsync(written.fileno())
    path.rename(building / file)
    (building / f"{file}.digests").write_text(json_text(shares))


def begin_file(path: Path, tensors: list[Part], dtype: np.dtype) -> dict[str, int]:
    """Makes a file of the right size with its header; the place of each tensor in it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for part in tensors:
        size = _bytes(part, dtype)
        header[part.name] = {"dtype": _NAMES[dtype], "shape": list(part.whole), "data_offsets": [end, end + size]}
        end += size
    text = json_text(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        # So a full disk is an error here, and not a signal when memory that is mapped to the file is written.
        os.posix_fallocate(file.fileno(), 0, 8 + len(text) + end)
    return {part.name: 8 + len(text) + header[part.name]["data_offsets"][0] for part in tensors}


def _copy(
    export: Export, reader: Reader, parameter: str, work: Work, path: Path, places: dict[str, int]
) -> digest.Lanes:
    """Copies layers of a parameter into their tensors, piece by piece; the share of the array's digest."""
    name, parts = _stored(parameter), export.parts[parameter]
    shape, total = export.checkpoint.manifest.arrays[name].shape, digest.ZERO
    stacked = len(shape) > len(parts[0].shape)
    for start, index in _pieces(reader.chunk(name), shape, (work.begin, work.end) if stacked else None):
        piece = reader.read(name, index)
        total = digest.add(total, digest.block_digest(piece, start, shape))
        layers, inner = (piece, start[1:]) if stacked else (piece[None], start)
        for number, layer in enumerate(layers):
            part = parts[start[0] + number if stacked else 0]
            _put(path, places[part.name], part, inner, layer, export.dtype)
    return total


def _pieces(
    chunk: Sequence[int], shape: Shape, layers: tuple[int, int] | None
) -> Iterator[tuple[Shape, tuple[slice, ...]]]:
    """Pieces of about `_PIECE_BYTES`, where possible of whole chunks: of some of these layers, or of a part of each."""
    bounds = [(0, size) for size in shape]
    if layers is not None:
        bounds[0] = layers
    steps = [end - begin for begin, end in bounds]
    item = np.dtype(np.float32).itemsize
    for dimension, size in enumerate(chunk):
        if math.prod(steps) * item <= _PIECE_BYTES:
            break
        others = math.prod(steps) // steps[dimension] * item
        steps[dimension] = min(steps[dimension], max(1, _PIECE_BYTES // others // size) * size)
    cuts = [range(begin, end, max(1, step)) for (begin, end), step in zip(bounds, steps, strict=True)]
    for start in itertools.product(*cuts):
        yield start, tuple(slice(s, min(s + cut.step, cut.stop)) for s, cut in zip(start, cuts, strict=True))


def _put(path: Path, place: int, part: Part, inner: Sequence[int], layer: np.ndarray, dtype: np.dtype) -> None:
    """Writes a piece of a layer, which begins at the index `inner` of it, into its rows and columns of the tensor."""
    # A vocabulary may have more rows in the checkpoint than in the files.
    layer = layer[tuple(slice(max(0, size - begin)) for size, begin in zip(part.shape, inner, strict=True))]
    if not layer.size:
        return
    (top, left), (rows, columns) = part.offset, part.matrix
    matrix = np.memmap(path, dtype, "r+", place, part.whole).reshape(part.whole[0], -1)
    target = part.to_parameter(matrix[top : top + rows, left : left + columns])  # a view
    index = tuple(slice(begin, begin + size) for begin, size in zip(inner, layer.shape, strict=True))
    target[index] = rounded(layer, dtype, part.name)


def _bytes(part: Part, dtype: np.dtype) -> int:
    return math.prod(part.whole) * dtype.itemsize
