"""Whose turn it is to write an output, and whether it may be gone on with."""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxmnt import storage
from jaxmnt.data.manifest import FORMAT, MANIFEST, SPLITS, TOKENIZER_FILE, VERSION
from jaxmnt.data.preparation.inputs import Input, is_unchanged
from jaxmnt.data.preparation.settings import Settings
from jaxmnt.data.preparation.shards import read_record, write_record
from jaxmnt.errors import ConfigError, printable

_PLAN = "plan.json"
_SHARD = r"[0-9]{5,}-[0-9]{2,}\.npy"
_BEFORE_THE_PLAN = re.compile(r"lock|\.plan\.json\.tmp", re.ASCII)
_IN_WORK = re.compile(
    rf"lock | (plan|part-[0-9]{{5,}})\.json | counts-[0-9]{{5,}}\.npy | (train|eval)-origins-{_SHARD}"
    rf"| \.((plan|part-[0-9]{{5,}})\.json | counts-[0-9]{{5,}}\.npy | (train|eval)-origins-{_SHARD})\.tmp"
    rf"| (train|eval)-(tokens|documents|learn)-{_SHARD}\.tmp",
    re.ASCII | re.VERBOSE,
)
_IN_SPLIT = re.compile(rf"(tokens|documents|learn|origins)-{_SHARD}|\.origins-{_SHARD}\.tmp", re.ASCII)
"""Names that a preparation writes. Nothing of another name is ever removed: the folder may be a person's own."""


@contextmanager
def claimed(output: Path, work: Path) -> Iterator[None]:
    """Inside, no other process prepares the same output, and it is not finished."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--output: another process is preparing {output}; wait for it") from None
        check_output(output, work)  # another process may have finished just now
        yield


def check_output(output: Path, work: Path) -> None:
    """Raises `ConfigError` if something is there that is neither nothing nor an unfinished preparation."""
    if _has_manifest(output):
        if _is_prepared(output):
            remove_work(output, work)  # in case it was killed after the last step but this
            raise ConfigError(f"--output: {output} is prepared already; choose another folder, or remove it")
        raise ConfigError(f"--output: {output} has a {MANIFEST} that is damaged or none of ours; use another folder")
    if not output.exists():
        return
    if not output.is_dir() or (not work.is_dir() and any(output.iterdir())):
        raise ConfigError(f"--output: {output} exists already and is no prepared data; choose another folder")
    if work.is_dir():
        _check_work(output, work)


def remove_work(output: Path, work: Path) -> None:
    """Takes away what the preparation of finished data needed. Something else in `work` stays, and `work` with it."""
    with suppress(OSError):  # it is only tidying up
        if _is_prepared(output):
            _remove(work, _IN_WORK)
            work.rmdir()


def _check_work(output: Path, work: Path) -> None:
    """Raises `ConfigError` unless this is what we have left there; a person may have a folder of that name."""
    advice = "so it is no unfinished preparation; choose another folder"
    # In this order, since another process may be at work: the plan is written before anything else but the lock.
    beside = sorted(path.name for path in output.iterdir() if path.name != work.name)
    names = sorted(path.name for path in work.iterdir())
    for name in names:
        if not _IN_WORK.fullmatch(name) or (os.path.lexists(work / name) and not _is_own_file(work / name)):
            raise ConfigError(f"--output: {work} holds {printable(name)}, {advice}")
    found = [f"{work.name}/{name}" for name in names if not _BEFORE_THE_PLAN.fullmatch(name)] + beside
    if found and not (work / _PLAN).exists():
        raise ConfigError(f"--output: {output} holds {printable(found[0])} but no {work.name}/{_PLAN}, {advice}")


def _has_manifest(output: Path) -> bool:
    return (output / MANIFEST).exists() or (output / MANIFEST).is_symlink()


def _is_prepared(output: Path) -> bool:
    """Whether a manifest of ours is there, whole or not."""
    try:
        manifest = json.loads(storage.read(output / MANIFEST).decode())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def _remove(folder: Path, names: re.Pattern[str]) -> None:
    """Removes the files of these names, and none through a link."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in folder.iterdir():
        if names.fullmatch(path.name) and _is_own_file(path):
            path.unlink(missing_ok=True)


def _is_own_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _plan(inputs: list[Input], settings: Settings) -> dict[str, Any]:
    """What determines the output. Skipping bad records or not changes no part that is done."""
    given = {name: value for name, value in asdict(settings).items() if name not in ("workers", "skip_bad")}
    path = Path(settings.tokenizer or "")
    path = path / TOKENIZER_FILE if path.is_dir() else path
    plan: dict[str, Any] = {
        "version": VERSION,
        "settings": given | {"tokenizer_sha256": _tokenizer_digest(path)},
        "inputs": [[file.name, str(file.path), file.size, file.changed, file.split] for file in inputs],
    }
    reading = plan["settings"]["reading"]
    plan["long_documents"] = {name: reading.pop(name) for name in ("long_documents", "max_document")}
    return dict(json.loads(json.dumps(plan)))


def check_plan(output: Path, work: Path, inputs: list[Input], settings: Settings) -> None:
    """Writes down what is prepared, or refuses to go on with something else that is half done."""
    plan, path = _plan(inputs, settings), work / _PLAN
    before = read_record(path) if path.exists() else None
    if before is not None and _allows_more(before, plan, work):
        write_record(path, plan)
    elif before != plan:
        if before is not None and any(work.glob("part-*.json")):
            changed = sorted(name for name in plan if before.get(name) != plan[name])
            raise ConfigError(
                f"--output: {output} holds an unfinished preparation with other {' and '.join(changed)}; "
                "give the same command to go on with it, or remove the folder"
            )
        if before is not None:  # else nothing of ours can be there
            (output / TOKENIZER_FILE).unlink(missing_ok=True)
            for split in SPLITS:
                _remove(output / split, _IN_SPLIT)
        write_record(path, plan)
    for split in SPLITS:
        (output / split).mkdir(exist_ok=True)


def _allows_more(before: dict[str, Any], plan: dict[str, Any], work: Path) -> bool:
    """Whether just longer documents are allowed than before, and nothing that is done would be otherwise with them.

    They were an error, so a part that is done has none, unless it left records out. A tokenizer was trained without.
    """
    old, new = before.get("long_documents"), plan["long_documents"]
    return (
        old is not None
        and before | {"long_documents": new} == plan
        and old["long_documents"] == "error"
        and new["max_document"] >= old["max_document"]
        and plan["settings"]["train_tokenizer"] is None
        and not any(read_record(path)["skipped"] for path in work.glob("part-*.json"))
    )


def check_unchanged(inputs: list[Input]) -> None:
    for file in inputs:
        if not is_unchanged(file):
            raise ConfigError(
                f"--input: {file.shown} was changed or taken away while it was being prepared; "
                "remove the output and prepare the data again"
            )


def _tokenizer_digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    except OSError as error:
        raise ConfigError(f"--tokenizer: {path} cannot be read: {error.strerror}") from error
