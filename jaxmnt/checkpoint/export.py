"""Verifies and exports checkpoints."""

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxmnt.checkpoint import digest
from jaxmnt.checkpoint.arrays import Reader
from jaxmnt.checkpoint.commit import Committed, open_checkpoint
from jaxmnt.checkpoint.manifest import DamagedError
from jaxmnt.data.run_tokenizer import RunTokenizer
from jaxmnt.data.tokenizer import TOKENIZER_FILE
from jaxmnt.errors import ConfigError, printable
from jaxmnt.storage import StoragePath
from jaxmnt.strict_json import json_text


def verify(path: StoragePath, run: str | None, note_array: Callable[[str], None] = lambda name: None) -> Committed:
    """Reads every array of a checkpoint and compares it with its digest. Calls `note_array` with the name of each
    array.

    Raises `DamagedError`, which lists all damaged arrays, and `OtherFormatError`.
    """
    checkpoint = open_checkpoint(path, run)
    reader = Reader(checkpoint)
    problems = []
    for name, array in sorted(checkpoint.manifest.arrays.items()):
        note_array(name)
        try:
            if reader.content_digest(name) != array.content:
                problems.append(f"array {name} is not what was saved: its digest differs")
        except DamagedError as damage:
            problems.append(str(damage))
    if problems:
        raise DamagedError("; ".join(problems))
    return checkpoint


_INDEX_FILE = "model.safetensors.index.json"
_CONFIG_FILE = "jaxmnt-config.json"
_TOKENIZER_INFO_FILE = "jaxmnt-tokenizer.json"
_EXPORTED_NAME = re.compile(
    rf"model(-[0-9]+-of-[0-9]+)?\.safetensors|{_INDEX_FILE}|{_CONFIG_FILE}|{_TOKENIZER_INFO_FILE}|{TOKENIZER_FILE}"
    r"|\.tmp[0-9A-Za-z]+"
)
"""Names of the files that an export writes, including safetensors' temporary files."""


def export(
    checkpoint: Committed,
    folder: Path,
    file_bytes: int,
    note_array: Callable[[str], None] = lambda name: None,
    tokenizer: RunTokenizer | None = None,
) -> list[Path]:
    """Writes the parameters into a new `folder`, in files of about `file_bytes` with an index. No array is split.

    Arrays have their names in the checkpoint without `params/`, joined by dots. Layers stay stacked in the first
    dimension. The folder also contains the config and the tokenizer: its description, and its tokenizer.json if it has
    one. Each array is compared with its digest before it is written. Calls `note_array` with the name of each array.
    Returns the paths of the safetensors files.

    Raises `DamagedError`, and `ConfigError` if the folder exists.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists already; name a new folder")
    manifest = checkpoint.manifest
    names = [name for name in sorted(manifest.arrays) if name.startswith("params/")]
    groups: list[list[str]] = [[]]
    room_bytes = file_bytes
    for name in names:
        if groups[-1] and manifest.arrays[name].bytes > room_bytes:
            groups.append([])
            room_bytes = file_bytes
        groups[-1].append(name)
        room_bytes -= manifest.arrays[name].bytes
    with _temporary_folder(folder) as temporary_folder:
        _write(temporary_folder, checkpoint, groups, note_array, tokenizer)
        temporary_folder.rename(folder)
    return sorted(folder.glob("*.safetensors"))


@contextmanager
def _temporary_folder(folder: Path) -> Iterator[Path]:
    """Yields a new folder that the caller renames to `folder`.

    Removes the new folder if the export fails. If the export is killed, the next export removes it.
    """
    temporary_folder = folder.with_name(f".{folder.name}.building")
    if os.path.lexists(temporary_folder):
        _remove_leftover(temporary_folder)
    temporary_folder.mkdir(parents=True)
    lock = os.open(temporary_folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems do not support locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield temporary_folder
    except BaseException:
        shutil.rmtree(temporary_folder, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _remove_leftover(temporary_folder: Path) -> None:
    """Removes the folder of an export that was killed.

    Raises `ConfigError` if the folder is something else, or if another process is exporting there.
    """
    content = None
    if temporary_folder.is_symlink() or not temporary_folder.is_dir():
        content = "not a folder"
    else:
        names = sorted(path.name for path in temporary_folder.iterdir())
        foreign_name = next((name for name in names if not _EXPORTED_NAME.fullmatch(name)), None)
        if foreign_name is not None:
            content = f"a folder with {printable(foreign_name)}"
    if content is not None:
        raise ConfigError(
            f"{temporary_folder} is in the way: it is {content}, not left by an export; move it, or choose "
            "another folder"
        )
    lock = os.open(temporary_folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"another process is exporting into {temporary_folder}; wait for it, or choose another folder"
        ) from None
    except OSError:
        pass  # a file system without locks
    finally:
        os.close(lock)
    shutil.rmtree(temporary_folder)


def _write(
    temporary_folder: Path,
    checkpoint: Committed,
    groups: list[list[str]],
    note_array: Callable[[str], None],
    tokenizer: RunTokenizer | None,
) -> None:
    """Writes the whole export into `temporary_folder`, with one safetensors file for each group of array names."""
    manifest = checkpoint.manifest
    names = [name for group in groups for name in group]
    reader = Reader(checkpoint, names)
    weight_map = {}
    for number, group in enumerate(groups):
        path = temporary_folder / (
            f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        )
        tensors = {}
        for name in group:
            note_array(name)
            tensors[_dotted(name)] = _read_verified(reader, checkpoint, name)
            weight_map[_dotted(name)] = path.name
        save_file(tensors, path, metadata={"format": "np", "run": manifest.run, "step": str(manifest.step)})
    total = sum(manifest.arrays[name].bytes for name in names)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (temporary_folder / _INDEX_FILE).write_text(json_text(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    (temporary_folder / _CONFIG_FILE).write_text(json_text(manifest.config, indent=1) + "\n", encoding="utf-8")
    if tokenizer is not None:
        info = {"tokenizer": tokenizer.description, "vocab_size": tokenizer.vocab_size}
        (temporary_folder / _TOKENIZER_INFO_FILE).write_text(json_text(info, indent=1) + "\n", encoding="utf-8")
        if tokenizer.text is not None:
            (temporary_folder / TOKENIZER_FILE).write_bytes(tokenizer.text.encode())
    # safetensors makes its files readable by their owner only, whatever the umask: give them the index's permissions.
    for path in sorted(temporary_folder.glob("*.safetensors")):
        path.chmod((temporary_folder / _INDEX_FILE).stat().st_mode & 0o777)


def _read_verified(reader: Reader, checkpoint: Committed, name: str) -> np.ndarray:
    array = reader.read(name)
    content = digest.to_text(digest.block_digest(array, (0,) * array.ndim, array.shape))
    if content != checkpoint.manifest.arrays[name].content:
        raise DamagedError(f"checkpoint {checkpoint.path}: array {name} is not what was saved")
    return array


def _dotted(name: str) -> str:
    return name.removeprefix("params/").replace("/", ".")
