"""A folder with a model of Hugging Face: its config.json and its safetensors files, checked before anything is used."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxmnt.errors import ConfigError, UserError, listed, nearest, printable
from jaxmnt.huggingface.tensors import Parts, parts_of
from jaxmnt.models.contract import Definition, Family
from jaxmnt.models.huggingface import HuggingFace
from jaxmnt.strict_json import json_text

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""What belongs to a model besides its weights, and is passed on as it is."""

DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
_LARGEST_JSON = 64 << 20
_SAMPLED = 1 << 16
_COMPARED = 1 << 24
"""Numbers of two tensors that are compared at a time."""


class Stored(NamedTuple):
    """A tensor in a file."""

    file: str
    """The file's name in the folder."""
    shape: tuple[int, ...]
    dtype: np.dtype
    begin: int
    """Its first byte in the file."""


class Folder:
    """The model in a folder. Opening reads the headers of all files; nothing is executed.

    Raises `ConfigError` for a folder that has none, and for files that are damaged or contradict each other.
    """

    def __init__(self, path: Path, key: str):
        """`key` names in errors what asked for the folder."""
        self.path, self._key = path, key
        if not path.is_dir():
            raise ConfigError(f"{key}: {path} is not a folder; name one with a config.json and safetensors files")
        self.config = read_json(path / CONFIG, key)
        self._headers: dict[str, dict[str, Any]] = {}
        self._descriptors: dict[str, int] = {}

    def tensors(self, written: HuggingFace) -> dict[str, Stored]:
        """What the files hold, by the names that the family has; without what it leaves out."""
        found: dict[str, Stored] = {}
        left_out = [re.compile(pattern) for pattern in written.left_out]
        for file in self._files():
            opened = self._opened(file)
            for name in sorted(opened):
                here = _renamed(name, written.renamed)
                if any(pattern.fullmatch(one) for pattern in left_out for one in (name, here)):
                    continue
                if here in found:
                    raise ConfigError(f"{self._key}: {here} is in {found[here].file} and in {file}; remove one of them")
                kind = opened[name]["dtype"]
                if kind not in DTYPES:
                    raise ConfigError(
                        f"{self._key}: {printable(name)} in {self.path / file} is of type {kind}; those that are read "
                        f"are {', '.join(DTYPES)}"
                    )
                shape, (begin, _) = tuple(opened[name]["shape"]), opened[name]["data_offsets"]
                found[here] = Stored(file, shape, DTYPES[kind], begin)
        return found

    def check(self, definition: Definition) -> tuple[Parts, dict[str, Stored]]:
        """Returns the model's parameters, by their names in a checkpoint, and the tensors, if they are those of this
        model. Names what is missing, too much or of another shape."""
        parts, written = parts_of(definition), definition.family.hugging_face
        assert written is not None
        found = self.tensors(written)
        wanted = {part.name: part for several in parts.values() for part in several}
        for name, part in wanted.items():
            if name not in found:
                close = nearest(name, sorted(found)) if len(found) < 5000 else ""
                raise ConfigError(f"{self._key}: {self.path} lacks the tensor {name}; {close}".rstrip("; "))
            if found[name].shape != part.whole:
                raise ConfigError(
                    f"{self._key}: {name} in {self.path / found[name].file} is {list(found[name].shape)}, and by "
                    f"{CONFIG} it must be {list(part.whole)}"
                )
        tied = definition.family.config.tie_embeddings
        unused = {written.ends["head.kernel"].name} if tied else set()  # some files have the embedding twice
        if stray := sorted(found.keys() - wanted.keys() - unused):
            raise ConfigError(
                f"{self._key}: {self.path / found[stray[0]].file} has the tensor "
                f"{listed([printable(name) for name in stray], 1)}, which a model of {CONFIG} does not; without it the "
                "model would compute something else"
            )
        by_name = {name.replace(".", "/"): several for name, several in parts.items()}
        return by_name, {name: found[name] for name in wanted}

    def refuse_another_head(self, family: Family) -> None:
        """Raises `ConfigError` if the files have an output head that is not the embedding, for a config that ties both.

        transformers then computes with the head, against the config.
        """
        written = family.hugging_face
        if not family.config.tie_embeddings or written is None:
            return
        found = self.tensors(written)
        names = [written.ends[name].name for name in ("head.kernel", "embedding.table")]
        if any(name not in found or len(found[name].shape) != 2 for name in names):
            return
        head, embedding = (found[name] for name in names)
        if head.shape == embedding.shape and self._hold_the_same(head, embedding):
            return
        raise ConfigError(
            f"{self._key}: {self.path / CONFIG} says tie_word_embeddings, and {names[0]} in {self.path / head.file} "
            f"holds something else than {names[1]}; set tie_word_embeddings to false to use both, or remove {names[0]}"
        )

    def _hold_the_same(self, one: Stored, other: Stored) -> bool:
        """Whether two matrices have the same numbers, compared some rows at a time."""
        rows, columns = one.shape
        step = max(1, _COMPARED // columns)
        for top in range(0, rows, step):
            pieces = [np.empty((min(step, rows - top), columns), stored.dtype) for stored in (one, other)]
            for stored, piece in zip((one, other), pieces, strict=True):
                self.read(stored, (top, 0), piece)
            if not np.array_equal(pieces[0].astype(np.float32), pieces[1].astype(np.float32)):
                return False
        return True

    def fingerprint(self) -> str:
        """Tells copies of one model from those of another: by config, headers, and some of the numbers of each file."""
        found = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for file in self._files():
            found.update(json.dumps([file, self._opened(file)], sort_keys=True).encode())
            descriptor = self._descriptor(file)
            middle = os.fstat(descriptor).st_size // 2
            found.update(os.pread(descriptor, _SAMPLED, middle))
        return found.hexdigest()[:16]

    def read(self, stored: Stored, offset: tuple[int, int], into: np.ndarray) -> int:
        """Fills a contiguous matrix with the rows and columns of a tensor from `offset` on; a vector is one column.
        Returns how many bytes it took."""
        rows, columns = into.shape
        width = stored.shape[1] if len(stored.shape) == 2 else 1
        try:
            if columns != width:
                path, shape = self.path / stored.file, (stored.shape[0], width)
                whole = np.memmap(path, stored.dtype, "r", stored.begin, shape)
                into[...] = whole[offset[0] : offset[0] + rows, offset[1] : offset[1] + columns]
                return into.nbytes
            left, place = memoryview(into.view(np.uint8).reshape(-1)), stored.begin + offset[0] * width * into.itemsize
            while left:
                taken = os.preadv(self._descriptor(stored.file), [left], place)
                if taken == 0:
                    raise OSError("the file has become shorter")
                left, place = left[taken:], place + taken
        except OSError as error:
            raise UserError(
                f"{self._key}: {self.path / stored.file} cannot be read: {error}; check that it is mounted and whole"
            ) from error
        return into.nbytes

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _files(self) -> list[str]:
        """The files with tensors, sorted. All that they hold counts, whether the index names it or not."""
        if (self.path / INDEX).is_file():
            return self._indexed()
        if (self.path / SINGLE).is_file():
            return [SINGLE]
        others = sorted(
            path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in self.path.glob(pattern)
        )
        if others:
            raise ConfigError(
                f"{self._key}: {self.path} has {others[0]}, a pickle, which may run code and is not read; convert "
                "it to safetensors"
            )
        raise ConfigError(f"{self._key}: {self.path} has neither {SINGLE} nor {INDEX}")

    def _indexed(self) -> list[str]:
        """The files that the index names. Raises `ConfigError` if one lacks what the index says it has."""
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
        others = [file for file in files if file != SINGLE]
        if others and (self.path / SINGLE).is_file():
            raise ConfigError(
                f"{self._key}: {self.path} has {SINGLE} and {INDEX}, which names {printable(others[0])}, and programs "
                f"differ in which they read (transformers: {SINGLE}); remove {SINGLE}, or {INDEX} and its files"
            )
        for file in files:
            names = {name for name in index if index[name] == file}
            if missing := sorted(names - set(self._opened(file))):
                raise ConfigError(
                    f"{self._key}: {self.path / file} lacks the tensor {printable(missing[0])}, which {INDEX} says "
                    "is there; copy both again"
                )
        return files

    def _opened(self, file: str) -> dict[str, Any]:
        """The header of a file that the library has found sound, by name; places count from the file's beginning."""
        if file not in self._headers:
            path = self.path / file
            try:
                with safe_open(path, "numpy"):
                    pass
                with path.open("rb") as opened:
                    length = int.from_bytes(opened.read(8), "little")
                    header = json.loads(opened.read(length))
            except (SafetensorError, OSError) as error:
                raise ConfigError(
                    f"{self._key}: {path} is not a whole safetensors file: {printable(str(error))}; copy it again"
                ) from error
            header.pop("__metadata__", None)
            for about in header.values():
                about["data_offsets"] = [8 + length + place for place in about["data_offsets"]]
            self._headers[file] = header
        return self._headers[file]

    def _descriptor(self, file: str) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(self.path / file, os.O_RDONLY)
        return self._descriptors[file]


def read_json(path: Path, key: str) -> dict[str, Any]:
    """The object in a JSON file. Raises `ConfigError` if there is none."""
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise ConfigError(f"{key}: {path} is larger than {_LARGEST_JSON >> 20} MiB, which no such file is")
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{key}: {path} is not there; name a folder that has it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {printable(str(error))}; copy it again") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{key}: {path} must be an object; copy it again")
    return tree


def json_bytes(tree: dict[str, Any], **options: Any) -> bytes:
    """Returns an object as the content of a JSON file, as Hugging Face lays it out; `options` are `json_text`'s."""
    return (json_text(tree, indent=2, sort_keys=True, **options) + "\n").encode()


def _renamed(name: str, renamed: Mapping[str, str]) -> str:
    for theirs, ours in renamed.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
