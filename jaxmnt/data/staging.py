"""A copy of prepared data on a local disk, made once a host however many processes ask for it."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from jaxmnt.data.manifest import MANIFEST
from jaxmnt.data.store import PreparedData, open_prepared
from jaxmnt.errors import ConfigError, UserError

_PIECE = 2**22


def stage(data: PreparedData, directory: Path, progress: Callable[[str], None] = lambda text: None) -> Path:
    """Returns a folder below `directory` that holds the data; copies it there unless it is there already.

    Every file is compared with its digest while it is copied, and the manifest is copied last, so that a copy that was
    cut short is no prepared data. Raises `ConfigError` for a damaged file, `UserError` when the disk is full.
    """
    target = directory / data.digest[:16]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / f"{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # other processes of this host wait here, then find the copy
            if not _is_whole(target, data):
                _copy_all(data, target, progress)
    except OSError as error:
        raise UserError(
            f"data.stage_dir: {directory} cannot take the data: {error.strerror or error}; "
            "free space there, choose another folder, or leave data.stage_dir out"
        ) from error
    return target


def _is_whole(target: Path, data: PreparedData) -> bool:
    """Whether the copy is there with all its files. What they hold is `data.verify`'s business."""
    if not (target / MANIFEST).exists():
        return False
    try:
        copy = open_prepared(target, "data.stage_dir")
        copy.check()
    except ConfigError:
        return False
    return copy.digest == data.digest


def _copy_all(data: PreparedData, target: Path, progress: Callable[[str], None]) -> None:
    shutil.rmtree(target, ignore_errors=True)
    for name, expected in data.files():
        progress(name)
        source, copy = data.path / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if _copy(source, copy) != expected:
            raise ConfigError(
                f"data.path: {source} is damaged: its SHA-256 is not the manifest's; "
                "copy it again from where it is whole, or prepare the data again"
            )
    temporary = target / f".{MANIFEST}"
    shutil.copyfile(data.path / MANIFEST, temporary)
    temporary.replace(target / MANIFEST)


def _copy(source: Path, target: Path) -> str:
    """Copies a file and returns the SHA-256 of what was read."""
    digest = hashlib.sha256()
    try:
        reading = source.open("rb")
    except OSError as error:
        raise ConfigError(f"data.path: {source} cannot be read ({error.strerror}); copy or prepare it again") from error
    with reading, target.open("wb") as writing:
        while piece := _read(reading, source):
            digest.update(piece)
            writing.write(piece)
        writing.flush()
        os.fsync(writing.fileno())
    return digest.hexdigest()


def _read(reading: BinaryIO, source: Path) -> bytes:
    try:
        return reading.read(_PIECE)
    except OSError as error:
        raise ConfigError(f"data.path: {source} cannot be read ({error.strerror}); copy or prepare it again") from error
