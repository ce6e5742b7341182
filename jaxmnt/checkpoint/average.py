"""Averages the parameters of checkpoints, and writes them as a run directory of their own.

Averages of several checkpoints of a stable learning rate are close to what the decay of the rate would give (Izmailov
et al. 2018, arXiv:1803.05407). With one checkpoint, the parameters are those of the run's own average
(`optimizer.average`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxmnt.checkpoint import digest
from jaxmnt.checkpoint.arrays import Reader, Writer, split_array
from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.manifest import Array, DamagedError
from jaxmnt.checkpoint.new_run import begin_checkpoint, commit_run, new_folder
from jaxmnt.checkpoint.refs import HUGGING_FACE_SUBFOLDER
from jaxmnt.config.load import parse_config
from jaxmnt.config.schema import Config
from jaxmnt.data.run_tokenizer import FOLDER as TOKENIZER_SUBFOLDER
from jaxmnt.errors import ConfigError
from jaxmnt.storage import StoragePath, is_link, publish_bytes, read

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
    last = checkpoints[-1]
    with new_folder(out):
        sources = _sources(checkpoints)
        writer = begin_checkpoint(out, last.step)
        for source in sources:
            note_array(source.name)
            _write_mean(writer, source)
        for name in (TOKENIZER_SUBFOLDER, HUGGING_FACE_SUBFOLDER):
            _copy_folder(name, roots, out)
        manifest = last.manifest
        return commit_run(
            out, _config(last.config, out), writer, last.step, tokens=manifest.tokens, data_digests=manifest.data,
            base=manifest.base,
        )  # fmt: skip


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
        same_base = checkpoint.manifest.base == last.manifest.base
        if checkpoint.config.model != last.config.model or parameters(checkpoint) != parameters(last) or not same_base:
            raise ConfigError(
                f"checkpoint: {checkpoint.path} and {last.path} belong to different models; name checkpoints of one "
                "model"
            )


def _write_mean(writer: Writer, source: _Source) -> None:
    """Writes the mean of a source, piece by piece. Raises `DamagedError` if an array is not what was saved."""
    entry, dtype = source.arrays[0][1], np.dtype(source.dtype)
    writer.create(source.name, entry.shape, dtype)
    digests = [digest.ZERO for _ in source.arrays]
    for start, index in split_array(entry, _PIECE_BYTES):
        pieces = [reader.read(name, index) for reader, _, name in source.arrays]
        for number, piece in enumerate(pieces):
            digests[number] = digest.add(digests[number], digest.block_digest(piece, start, entry.shape))
        writer.write(source.name, start, _mean(pieces, dtype))
    for content, (_, array, name) in zip(digests, source.arrays, strict=True):
        if digest.to_text(content) != array.content:
            raise DamagedError(f"array {name} of a checkpoint is not what was saved: its digest differs")


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
    tree["run"] |= {"dir": str(out), "fork_from": None, "init_from_changes": []}
    if config.lora is None:
        tree["run"]["init_from"] = None
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
