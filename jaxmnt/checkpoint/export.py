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


def verify(path: StoragePath, run: str | None, tell: Callable[[str], None] = lambda name: None) -> Committed:
    """Reads every array of a checkpoint and compares it with its digest; calls `tell` with the name of each array.

    Raises `DamagedError` with everything that is wrong, and `OtherFormatError`.
    """
    checkpoint = open_checkpoint(path, run)
    reader = Reader(checkpoint)
    wrong = []
    for name, array in sorted(checkpoint.manifest.arrays.items()):
        tell(name)
        try:
            if reader.content(name) != array.content:
                wrong.append(f"array {name} is not what was saved: its digest differs")
        except DamagedError as damage:
            wrong.append(str(damage))
    if wrong:
        raise DamagedError("; ".join(wrong))
    return checkpoint


_INDEX = "model.safetensors.index.json"
_CONFIG = "jaxmnt-config.json"
_TOKENIZER_INFO = "jaxmnt-tokenizer.json"
_EXPORTED_NAME = re.compile(
    rf"model(-[0-9]+-of-[0-9]+)?\.safetensors|{_INDEX}|{_CONFIG}|{_TOKENIZER_INFO}|{TOKENIZER_FILE}|\.tmp[0-9A-Za-z]+"
)
"""Names of the files that an export writes, including safetensors' temporary files."""


def export(
    checkpoint: Committed,
    folder: Path,
    file_bytes: int,
    tell: Callable[[str], None] = lambda name: None,
    tokenizer: RunTokenizer | None = None,
) -> list[Path]:
    """Writes the parameters into a new `folder`, in files of about `file_bytes` with an index. No array is split.

    Names are those of the checkpoint without `params/`, joined by dots; layers stay stacked in their first dimension.
    The folder also gets the config and the tokenizer: its description, and its tokenizer.json if it has one. Each
    array is compared with its digest first. Returns the safetensors files.

    Raises `DamagedError`, and `ConfigError` if the folder exists.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists already; name a new folder")
    manifest = checkpoint.manifest
    names = [name for name in sorted(manifest.arrays) if name.startswith("params/")]
    groups: list[list[str]] = [[]]
    room = file_bytes
    for name in names:
        if groups[-1] and manifest.arrays[name].bytes > room:
            groups.append([])
            room = file_bytes
        groups[-1].append(name)
        room -= manifest.arrays[name].bytes
    with _temporary_folder(folder) as building:
        _write(building, checkpoint, groups, tell, tokenizer)
        building.rename(folder)
    return sorted(folder.glob("*.safetensors"))


@contextmanager
def _temporary_folder(folder: Path) -> Iterator[Path]:
    """Yields a new folder that the caller renames to `folder`.

    Removes it if the export fails. If the export is killed, the next export removes it.
    """
    building = folder.with_name(f".{folder.name}.building")
    if os.path.lexists(building):
        _remove_leftover(building)
    building.mkdir(parents=True)
    lock = os.open(building, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield building
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _remove_leftover(building: Path) -> None:
    """Removes the folder of an export that was killed. Raises `ConfigError` if it is something else, or in use."""
    what = None
    if building.is_symlink() or not building.is_dir():
        what = "no folder"
    else:
        names = sorted(path.name for path in building.iterdir())
        foreign = next((name for name in names if not _EXPORTED_NAME.fullmatch(name)), None)
        if foreign is not None:
            what = f"a folder with {printable(foreign)}"
    if what is not None:
        raise ConfigError(f"{building} is in the way: it is {what}, not left by an export; move it, or name another")
    lock = os.open(building, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{building}: another process is exporting there; wait for it, or name another") from None
    except OSError:
        pass  # a file system without locks
    finally:
        os.close(lock)
    shutil.rmtree(building)


def _write(
    building: Path,
    checkpoint: Committed,
    groups: list[list[str]],
    tell: Callable[[str], None],
    tokenizer: RunTokenizer | None,
) -> None:
    """Writes everything into `building`, with one file of arrays for each group of names."""
    manifest = checkpoint.manifest
    names = [name for group in groups for name in group]
    reader = Reader(checkpoint, names)
    weight_map = {}
    for number, group in enumerate(groups):
        path = building / (
            f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        )
        tensors = {}
        for name in group:
            tell(name)
            tensors[_dotted(name)] = _read_verified(reader, checkpoint, name)
            weight_map[_dotted(name)] = path.name
        save_file(tensors, path, metadata={"format": "np", "run": manifest.run, "step": str(manifest.step)})
    total = sum(manifest.arrays[name].bytes for name in names)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (building / _INDEX).write_text(json_text(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    (building / _CONFIG).write_text(json_text(manifest.config, indent=1) + "\n", encoding="utf-8")
    if tokenizer is not None:
        info = {"tokenizer": tokenizer.description, "vocab_size": tokenizer.vocab_size}
        (building / _TOKENIZER_INFO).write_text(json_text(info, indent=1) + "\n", encoding="utf-8")
        if tokenizer.text is not None:
            (building / TOKENIZER_FILE).write_bytes(tokenizer.text.encode())
    # safetensors makes its files readable by their owner only, whatever the umask: give them the index's permissions.
    for path in sorted(building.glob("*.safetensors")):
        path.chmod((building / _INDEX).stat().st_mode & 0o777)


def _read_verified(reader: Reader, checkpoint: Committed, name: str) -> np.ndarray:
    array = reader.read(name)
    content = digest.to_text(digest.block_digest(array, (0,) * array.ndim, array.shape))
    if content != checkpoint.manifest.arrays[name].content:
        raise DamagedError(f"checkpoint {checkpoint.path}: array {name} is not what was saved")
    return array


def _dotted(name: str) -> str:
    return name.removeprefix("params/").replace("/", ".")
