"""A folder with a Hugging Face model: its config.json and its safetensors files, which are checked before use."""

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxmnt.errors import ConfigError, UserError, listed, printable, suggest
from jaxmnt.huggingface.tensors import Parts, parts_of
from jaxmnt.models.contract import Definition, Family
from jaxmnt.models.huggingface import HuggingFace
from jaxmnt.strict_json import json_text

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Files of a model other than its config and weights, which are copied unchanged."""

DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
_MAX_JSON_BYTES = 64 << 20
_SAMPLE_BYTES = 1 << 16
"""Size of the sample of each file that a fingerprint covers."""
_COMPARISON_SIZE = 1 << 24
"""Maximum number of elements of each of two tensors that are compared at a time."""


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    file: str
    """The file's name in the folder."""
    shape: tuple[int, ...]
    dtype: np.dtype
    begin: int
    """Offset of the tensor's first byte in the file."""


class Folder:
    """The model in a folder. Only its config, headers and numbers are read, and nothing is executed.

    Raises `ConfigError` for a folder without a model, and for files that are damaged or contradict each other.
    """

    def __init__(self, path: Path, key: str):
        """`key` is the setting or command that names the folder, for error messages."""
        self.path, self._key = path, key
        if not path.is_dir():
            raise ConfigError(f"{key}: {path} is not a folder; name one with a config.json and safetensors files")
        self.config = read_json(path / CONFIG, key)
        self._headers: dict[str, dict[str, Any]] = {}
        self._descriptors: dict[str, int] = {}

    def tensors(self, hf_format: HuggingFace) -> dict[str, StoredTensor]:
        """Returns the tensors in the files by the names that the family has for them, without those that it ignores."""
        tensors: dict[str, StoredTensor] = {}
        left_out = [re.compile(pattern) for pattern in hf_format.left_out]
        for file in self._file_names():
            header = self._header(file)
            for name in sorted(header):
                our_name = _rename(name, hf_format.renamed)
                if any(pattern.fullmatch(name) or pattern.fullmatch(our_name) for pattern in left_out):
                    continue
                if our_name in tensors:
                    raise ConfigError(
                        f"{self._key}: {our_name} is in {tensors[our_name].file} and in {file}; remove one of them"
                    )
                dtype_code = header[name]["dtype"]
                if dtype_code not in DTYPES:
                    raise ConfigError(
                        f"{self._key}: {printable(name)} in {self.path / file} is of type {dtype_code}; supported "
                        f"types are {', '.join(DTYPES)}"
                    )
                shape = tuple(header[name]["shape"])
                begin, _ = header[name]["data_offsets"]
                tensors[our_name] = StoredTensor(file, shape, DTYPES[dtype_code], begin)
        return self._split_joined(tensors, hf_format.joined)

    def _split_joined(
        self, tensors: dict[str, StoredTensor], joined: Mapping[str, tuple[str, ...]]
    ) -> dict[str, StoredTensor]:
        """Returns the tensors, with those of `joined` replaced by their parts, which are consecutive rows. Raises
        `ConfigError` if a part is in the files as well."""
        patterns = {re.compile(re.escape(name).replace(r"\{\}", r"(\d+)")): names for name, names in joined.items()}
        result: dict[str, StoredTensor] = {}

        def add(name: str, stored: StoredTensor) -> None:
            if name in result:
                raise ConfigError(f"{self._key}: {self.path} has {printable(name)} twice; remove one of them")
            result[name] = stored

        for name, stored in tensors.items():
            matches = ((pattern.fullmatch(name), names) for pattern, names in patterns.items())
            layer, names = next(((match[1], names) for match, names in matches if match), ("", ()))
            if not names or len(stored.shape) not in (2, 3) or stored.shape[-2] % len(names):
                add(name, stored)
                continue
            *experts, rows, columns = stored.shape
            shape = (rows // len(names), columns)
            part_bytes = math.prod(shape) * stored.dtype.itemsize
            parts = itertools.product(range(math.prod(experts)), names)
            for number, (expert, part_name) in enumerate(parts):
                part = stored._replace(shape=shape, begin=stored.begin + number * part_bytes)
                add(part_name.format(layer, expert=expert), part)
        return result

    def match_tensors(self, definition: Definition) -> tuple[Parts, dict[str, StoredTensor]]:
        """Returns the tensors of each parameter, by its name in a checkpoint, and where the files store each tensor, by
        the tensor's name. Raises `ConfigError` for a tensor that is missing, unexpected or of another shape."""
        parts = parts_of(definition)
        hf_format = definition.family.hugging_face
        assert hf_format is not None
        tensors = self.tensors(hf_format)
        expected = {part.name: part for tensor_parts in parts.values() for part in tensor_parts}
        for name, part in expected.items():
            if name not in tensors:
                suggestion = suggest(name, sorted(tensors)) if len(tensors) < 5000 else ""
                raise ConfigError(f"{self._key}: {self.path} lacks the tensor {name}; {suggestion}".rstrip("; "))
            tensor = tensors[name]
            if tensor.shape != part.tensor_shape:
                raise ConfigError(
                    f"{self._key}: {name} in {self.path / tensor.file} has the shape {list(tensor.shape)}, but "
                    f"{CONFIG} requires {list(part.tensor_shape)}"
                )
        tied = definition.family.config.tie_embeddings
        unused = {hf_format.ends["head.kernel"].name} if tied else set()  # some files store a tied head as well
        if unexpected := sorted(tensors.keys() - expected.keys() - unused):
            raise ConfigError(
                f"{self._key}: {self.path / tensors[unexpected[0]].file} has the tensor "
                f"{listed([printable(name) for name in unexpected], 1)}, which the model of {CONFIG} does not have; "
                "without it the model would compute something else"
            )
        by_name = {name.replace(".", "/"): tensor_parts for name, tensor_parts in parts.items()}
        return by_name, {name: tensors[name] for name in expected}

    def check_tied_head(self, family: Family) -> None:
        """Raises `ConfigError` if the config ties head and embedding, but the files have a head that differs from the
        embedding.

        In that case, transformers uses the head, contrary to the config.
        """
        hf_format = family.hugging_face
        if not family.config.tie_embeddings or hf_format is None:
            return
        tensors = self.tensors(hf_format)
        names = [hf_format.ends[name].name for name in ("head.kernel", "embedding.table")]
        if any(name not in tensors or len(tensors[name].shape) != 2 for name in names):
            return
        head, embedding = (tensors[name] for name in names)
        if head.shape == embedding.shape and self._have_equal_numbers(head, embedding):
            return
        raise ConfigError(
            f"{self._key}: {self.path / CONFIG} sets tie_word_embeddings, but {names[0]} in {self.path / head.file} "
            f"differs from {names[1]}; set tie_word_embeddings to false to use both, or remove {names[0]}"
        )

    def _have_equal_numbers(self, first: StoredTensor, second: StoredTensor) -> bool:
        """Returns True if two matrices of the same shape have equal numbers. A limited number of rows is in memory at a
        time."""
        rows, columns = first.shape
        max_rows = max(1, _COMPARISON_SIZE // columns)
        for first_row in range(0, rows, max_rows):
            shape = (min(max_rows, rows - first_row), columns)
            pieces = []
            for stored in (first, second):
                piece = np.empty(shape, stored.dtype)
                self.read(stored, (first_row, 0), piece)
                pieces.append(piece.astype(np.float32))
            if not np.array_equal(pieces[0], pieces[1]):
                return False
        return True

    def fingerprint(self) -> str:
        """Returns a digest that is the same for all copies of a model. It covers the config and, of each file, the
        header and a sample of the numbers."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for file in self._file_names():
            digest.update(json.dumps([file, self._header(file)], sort_keys=True).encode())
            descriptor = self._descriptor(file)
            middle = os.fstat(descriptor).st_size // 2
            digest.update(os.pread(descriptor, _SAMPLE_BYTES, middle))
        return digest.hexdigest()[:16]

    def read(self, stored: StoredTensor, offset: tuple[int, int], matrix: np.ndarray) -> int:
        """Fills a contiguous matrix with rows and columns of a tensor, which begin at the row and column `offset`. A
        vector is treated as one column. Returns the number of bytes read."""
        rows, columns = matrix.shape
        width = stored.shape[1] if len(stored.shape) == 2 else 1
        try:
            # If only some columns are read, they are not contiguous in the file.
            if columns != width:
                shape = (stored.shape[0], width)
                tensor = np.memmap(self.path / stored.file, stored.dtype, "r", stored.begin, shape)
                matrix[...] = tensor[offset[0] : offset[0] + rows, offset[1] : offset[1] + columns]
                return matrix.nbytes
            # Whole rows are contiguous. One call may read fewer bytes than requested.
            remaining = memoryview(matrix.view(np.uint8).reshape(-1))
            position = stored.begin + offset[0] * width * matrix.itemsize
            while remaining:
                count = os.preadv(self._descriptor(stored.file), [remaining], position)
                if count == 0:
                    raise OSError("the file has become shorter")
                remaining = remaining[count:]
                position += count
        except OSError as error:
            raise UserError(
                f"{self._key}: {self.path / stored.file} cannot be read: {error}; check that its file system is "
                "mounted and the file complete"
            ) from error
        return matrix.nbytes

    def map_matrix(self, stored: StoredTensor) -> np.ndarray:
        """Returns a tensor as a memory-mapped matrix; a vector as one column."""
        return np.memmap(self.path / stored.file, stored.dtype, "r", stored.begin, stored.shape).reshape(
            stored.shape[0], -1
        )

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _file_names(self) -> list[str]:
        """Returns the sorted names of the files with tensors. All of their tensors count, even if the index does not
        have them."""
        if (self.path / INDEX).is_file():
            return self._indexed_file_names()
        if (self.path / SINGLE).is_file():
            return [SINGLE]
        pickles = sorted(
            path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in self.path.glob(pattern)
        )
        if pickles:
            raise ConfigError(
                f"{self._key}: {self.path} has {pickles[0]}, a pickle, which may run code and is not read; convert it "
                "to safetensors"
            )
        raise ConfigError(f"{self._key}: {self.path} has neither {SINGLE} nor {INDEX}; name a folder with a model")

    def _indexed_file_names(self) -> list[str]:
        """Returns the sorted names of the files in the index. Raises `ConfigError` if a file lacks a tensor of the
        index."""
        index = read_json(self.path / INDEX, self._key).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise ConfigError(f"{self._key}: {self.path / INDEX} has no weight_map of files; copy it again")
        files = sorted(set(index.values()))
        for file in files:
            if Path(file).name != file or file in ("", ".", ".."):
                raise ConfigError(f"{self._key}: {self.path / INDEX} names {printable(file)}, not a file of the folder")
            if not file.endswith(".safetensors"):
                raise ConfigError(
                    f"{self._key}: {self.path / INDEX} names {printable(file)}; only safetensors are read"
                )
            if not (self.path / file).is_file():
                raise ConfigError(
                    f"{self._key}: {self.path / INDEX} names {printable(file)}, which is not there; copy it"
                )
        other_files = [file for file in files if file != SINGLE]
        if other_files and (self.path / SINGLE).is_file():
            raise ConfigError(
                f"{self._key}: {self.path} has both {SINGLE} and {INDEX}, which names {printable(other_files[0])}, and "
                f"programs differ in which of them they read (transformers: {SINGLE}); remove {SINGLE}, or {INDEX} and "
                "its files"
            )
        for file in files:
            names = {name for name in index if index[name] == file}
            if missing := sorted(names - set(self._header(file))):
                raise ConfigError(
                    f"{self._key}: {self.path / file} lacks the tensor {printable(missing[0])}, which {INDEX} says "
                    "is there; copy both again"
                )
        return files

    def _header(self, file: str) -> dict[str, Any]:
        """Returns the entry of each tensor in the header of a file, with offsets from the beginning of the file. Raises
        `ConfigError` if the safetensors library does not accept the file."""
        if file not in self._headers:
            self._headers[file] = read_header(self.path / file, self._key)
        return self._headers[file]

    def _descriptor(self, file: str) -> int:
        """Returns the descriptor of a file, which stays open until `close`."""
        if file not in self._descriptors:
            self._descriptors[file] = os.open(self.path / file, os.O_RDONLY)
        return self._descriptors[file]


def read_header(path: Path, key: str) -> dict[str, Any]:
    """Returns the entry of each tensor in the header of a safetensors file, with offsets from the beginning of the
    file. Raises `ConfigError` if the safetensors library does not accept the file."""
    try:
        with safe_open(path, "numpy"):
            pass  # raises for a damaged file
        with path.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header: dict[str, Any] = json.loads(opened.read(length))
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{key}: {path} is not a complete safetensors file: {printable(str(error))}; copy it again"
        ) from error
    header.pop("__metadata__", None)
    for entry in header.values():
        entry["data_offsets"] = [8 + length + offset for offset in entry["data_offsets"]]
    return header


def map_tensor(path: Path, entry: dict[str, Any], key: str) -> np.ndarray:
    """Returns a tensor of a safetensors file, memory-mapped. `entry` is that of `read_header`. Raises `ConfigError` for
    a dtype that is not supported."""
    if entry["dtype"] not in DTYPES:
        raise ConfigError(
            f"{key}: {path} has a tensor of type {entry['dtype']}; supported types are {', '.join(DTYPES)}"
        )
    return np.memmap(path, DTYPES[entry["dtype"]], "r", entry["data_offsets"][0], tuple(entry["shape"]))


def read_json(path: Path, key: str) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises `ConfigError` if the file is missing or has no object."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ConfigError(
                f"{key}: {path} is larger than {_MAX_JSON_BYTES >> 20} MiB, too large for such a file; copy it again"
            )
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{key}: {path} does not exist; name a folder that has it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {printable(str(error))}; copy it again") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{key}: {path} must be a JSON object; copy it again")
    return tree


def json_bytes(tree: dict[str, Any], **options: Any) -> bytes:
    """Returns an object as the content of a JSON file in Hugging Face's layout. `options` are passed to `json_text`."""
    return (json_text(tree, indent=2, sort_keys=True, **options) + "\n").encode()


def _rename(name: str, renamed: Mapping[str, str]) -> str:
    """Returns the name with a prefix of `renamed` replaced, if it has one."""
    for prefix, our_prefix in renamed.items():
        if name.startswith(prefix):
            return our_prefix + name.removeprefix(prefix)
    return name
