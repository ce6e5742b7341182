"""Verifying a checkpoint, and exporting one."""

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
    """Reads every array of a checkpoint and compares it with its digest; `tell` hears the name of each.

    Raises `DamagedError` with everything that is wrong, and `OtherFormatError`.
    """
    checkpoint = open_checkpoint(path, run)
    reader, wrong = Reader(checkpoint), []
    for name, array in sorted(checkpoint.manifest.arrays.items()):
        tell(name)
        try:
            if reader.content(name) != array.content:
                wrong.append(f"array {name} is not what was saved: its digest is another one")
        except DamagedError as damage:
            wrong.append(str(damage))
    if wrong:
        raise DamagedError("; ".join(wrong))
    return checkpoint


_INDEX = "model.safetensors.index.json"
_CONFIG, _ABOUT_TOKENS = "jaxmnt-config.json", "jaxmnt-tokenizer.json"
_OWN = re.compile(
    rf"model(-[0-9]+-of-[0-9]+)?\.safetensors|{_INDEX}|{_CONFIG}|{_ABOUT_TOKENS}|{TOKENIZER_FILE}|\.tmp[0-9A-Za-z]+"
)
"""Names of what an export writes; safetensors' temporary files among them."""


def export(
    checkpoint: Committed,
    folder: Path,
    file_bytes: int,
    tell: Callable[[str], None] = lambda name: None,
    tokenizer: RunTokenizer | None = None,
) -> list[Path]:
    """Writes the parameters into a new `folder`, in files of about `file_bytes`, each array whole, with their index.

    Names are those of the checkpoint without `params/`, with dots; layers stay stacked in their first dimension. The
    config lies beside them, and the tokenizer: its tokenizer.json, if it has one, and what the run knows of it. Each
    array is compared with its digest first: raises `DamagedError`.
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
    with _building(folder) as building:
        _write(building, checkpoint, groups, tell, tokenizer)
        building.rename(folder)
    return sorted(folder.glob("*.safetensors"))


@contextmanager
def _building(folder: Path) -> Iterator[Path]:
    """The new folder that becomes `folder`. It is gone if the export fails; a kill leaves it for the next to remove."""
    building = folder.with_name(f".{folder.name}.building")
    if os.path.lexists(building):
        _remove_left_over(building)
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


def _remove_left_over(building: Path) -> None:
    """Removes what an export that was killed has left. Raises `ConfigError` if it is something else, or in use."""
    found = None if building.is_symlink() or not building.is_dir() else sorted(path.name for path in building.iterdir())
    foreign = "no folder" if found is None else next((name for name in found if not _OWN.fullmatch(name)), None)
    if foreign is not None:
        what = foreign if found is None else f"a folder with {printable(foreign)}"
        raise ConfigError(f"{building} is in the way: it is {what}, which no export has left; move it, or name another")
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
    """Writes everything into `building`, with a file of arrays for each group of names."""
    manifest, names = checkpoint.manifest, [name for group in groups for name in group]
    reader, places = Reader(checkpoint, names), {}
    for number, group in enumerate(groups):
        path = building / (
            f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        )
        tensors = {}
        for name in group:
            tell(name)
            tensors[_dotted(name)] = _read_verified(reader, checkpoint, name)
            places[_dotted(name)] = path.name
        save_file(tensors, path, metadata={"format": "np", "run": manifest.run, "step": str(manifest.step)})
    total = sum(manifest.arrays[name].bytes for name in names)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (building / _INDEX).write_text(json_text(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    (building / _CONFIG).write_text(json_text(manifest.config, indent=1) + "\n", encoding="utf-8")
    if tokenizer is not None:
        about = {"tokenizer": tokenizer.description, "vocab_size": tokenizer.vocab_size}
        (building / _ABOUT_TOKENS).write_text(json_text(about, indent=1) + "\n", encoding="utf-8")
        if tokenizer.text is not None:
            (building / TOKENIZER_FILE).write_bytes(tokenizer.text.encode())
    for path in sorted(building.glob("*.safetensors")):  # which are made for their owner alone, whatever the umask
        path.chmod((building / _INDEX).stat().st_mode & 0o777)


def _read_verified(reader: Reader, checkpoint: Committed, name: str) -> np.ndarray:
    array = reader.read(name)
    found = digest.to_text(digest.block_digest(array, (0,) * array.ndim, array.shape))
    if found != checkpoint.manifest.arrays[name].content:
        raise DamagedError(f"checkpoint {checkpoint.path}: array {name} is not what was saved")
    return array


def _dotted(name: str) -> str:
    return name.removeprefix("params/").replace("/", ".")
