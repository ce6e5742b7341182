"""Averages the parameters of checkpoints, and writes them as a run directory of their own.

Averages of several checkpoints of a stable learning rate are close to what the decay of the rate would give (Izmailov
et al. 2018, arXiv:1803.05407). With one checkpoint, the parameters are those of the run's own average
(`optimizer.average`).
"""

import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxmnt.checkpoint import digest
from jaxmnt.checkpoint.arrays import Reader, Writer, split_array
from jaxmnt.checkpoint.commit import Committed, begin_step, commit
from jaxmnt.checkpoint.manifest import Array, DamagedError, Manifest
from jaxmnt.checkpoint.refs import CHECKPOINTS, HUGGING_FACE_SUBFOLDER, RUN_FILE
from jaxmnt.config.load import dump_config, parse_config
from jaxmnt.config.schema import CLUSTER_SECTIONS, Config
from jaxmnt.data.run_tokenizer import FOLDER as TOKENIZER_SUBFOLDER
from jaxmnt.errors import ConfigError, UserError
from jaxmnt.storage import StoragePath, is_link, publish, publish_bytes, read
from jaxmnt.strict_json import json_text

_PIECE_BYTES = 64 << 20


def write_average(
    checkpoints: Sequence[Committed],
    roots: Sequence[StoragePath],
    out: Path,
    note_array: Callable[[str], None] = lambda name: None,
) -> Path:
    """Writes a new run directory with one checkpoint, and returns the checkpoint's path. Its step, tokens and buffers
    are those of the last of the `checkpoints`.

    `roots` are the directories of the last checkpoint's run, whose tokenizer is copied. Calls `note_array` with the
    name of each parameter. Every array that is read is compared with its digest. Raises `ConfigError` if the
    checkpoints belong to different models, if a single one has no average, or if the folder exists, and `DamagedError`.
    An error leaves no folder.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already; name a new folder")
    last = checkpoints[-1]
    sources = _sources(checkpoints)
    config = _config(last.config, out)
    with _new_folder(out):
        path = out / CHECKPOINTS / str(last.step)
        path.parent.mkdir(parents=True)
        begin_step(path)
        arrays = _write_arrays(path, sources, note_array)
        run, manifest = secrets.token_hex(6), last.manifest
        tree = config.model_dump(exclude=CLUSTER_SECTIONS)
        commit(path, Manifest(run, last.step, arrays, tree, manifest.tokens, manifest.data, loss=None, lineage=[]))
        (out / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        publish(out / RUN_FILE, json_text({"run": run, "lineage": [], "time": time.time()}, indent=1) + "\n")
        for name in (TOKENIZER_SUBFOLDER, HUGGING_FACE_SUBFOLDER):
            _copy_folder(name, roots, out)
    return path


@dataclass(frozen=True)
class _Source:
    """The arrays from which one array of the result is computed, as their mean."""

    name: str
    dtype: str
    arrays: list[tuple[Reader, Array, str]]
    """The reader of each checkpoint, and the entry and the name of the array in it."""


def _sources(checkpoints: Sequence[Committed]) -> list[_Source]:
    """Returns the sources of each array of the result."""
    last = checkpoints[-1].manifest
    averaged = {name.removeprefix("average/") for name in last.arrays if name.startswith("average/")}
    if len(checkpoints) == 1 and not averaged:
        raise ConfigError(
            f"checkpoint: step {last.step} has no average, because its run has no optimizer.average; name several "
            "steps, RUN@STEP,STEP"
        )
    _check_same_model(checkpoints)
    readers = [Reader(checkpoint) for checkpoint in checkpoints]
    sources = []
    for name, array in sorted(last.arrays.items()):
        part, _, rest = name.partition("/")
        if part == "buffers":
            sources.append(_Source(name, array.dtype, [(readers[-1], array, name)]))
        elif part == "params":
            stored_name = f"average/{rest}" if len(checkpoints) == 1 and rest in averaged else name
            arrays = [
                (reader, checkpoint.manifest.arrays[stored_name], stored_name)
                for reader, checkpoint in zip(readers, checkpoints, strict=True)
            ]
            sources.append(_Source(name, array.dtype, arrays))
    return sources


def _check_same_model(checkpoints: Sequence[Committed]) -> None:
    """Raises `ConfigError` if a checkpoint has other model settings or parameters than the last one."""
    parameters = lambda checkpoint: {
        name: array.shape for name, array in checkpoint.manifest.arrays.items() if name.startswith("params/")
    }
    last = checkpoints[-1]
    for checkpoint in checkpoints[:-1]:
        if checkpoint.config.model != last.config.model or parameters(checkpoint) != parameters(last):
            raise ConfigError(
                f"checkpoint: {checkpoint.path} and {last.path} belong to different models; name checkpoints of one "
                "model"
            )


def _write_arrays(path: Path, sources: Sequence[_Source], note_array: Callable[[str], None]) -> dict[str, Array]:
    """Writes the mean of each source, and returns the entries of the manifest."""
    writer = Writer(path)
    for source in sources:
        note_array(source.name)
        shape, dtype = source.arrays[0][1].shape, np.dtype(source.dtype)
        writer.create(source.name, shape, dtype)
        digests = [digest.ZERO for _ in source.arrays]
        for start, index in split_array(source.arrays[0][1], _PIECE_BYTES):
            pieces = [reader.read(name, index) for reader, _, name in source.arrays]
            for number, piece in enumerate(pieces):
                digests[number] = digest.add(digests[number], digest.block_digest(piece, start, shape))
            writer.write(source.name, start, _mean(pieces, dtype))
        for content, (_, array, name) in zip(digests, source.arrays, strict=True):
            if digest.to_text(content) != array.content:
                raise DamagedError(f"array {name} of a checkpoint is not what was saved: its digest differs")
    return writer.finish()


def _mean(pieces: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """Returns the mean of the pieces, which is computed in float64."""
    if len(pieces) == 1:
        return pieces[0].astype(dtype)
    total = pieces[0].astype(np.float64)
    for piece in pieces[1:]:
        total += piece.astype(np.float64)
    return (total / len(pieces)).astype(dtype)


def _config(config: Config, out: Path) -> Config:
    """Returns the config of the result, which has no average of its own."""
    tree: dict[str, Any] = config.model_dump()
    tree["run"] |= {"dir": str(out), "init_from": None, "fork_from": None, "init_from_changes": []}
    tree["checkpoint"]["dir"] = None
    tree["optimizer"]["average"] = None
    return parse_config(tree, str(out))


def _copy_folder(name: str, roots: Sequence[StoragePath], out: Path) -> None:
    """Copies a folder with files from the first of the directories that has it."""
    for root in roots:
        if (root / name).is_dir():
            (out / name).mkdir()
            files: list[StoragePath] = [*(root / name).iterdir()]
            for file in sorted(files, key=lambda path: path.name):
                if not is_link(file):
                    publish_bytes(out / name / file.name, read(file))
            return


@contextmanager
def _new_folder(out: Path) -> Iterator[None]:
    """Removes the folder after an error."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(out, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(
                f"{error.filename or out} cannot be written: {error.strerror or error}; fix that and run the same "
                "command again"
            ) from error
        raise
