"""Stores the plan of a preparation in a work folder, so that it can be resumed, and removes leftovers."""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jaxmnt import storage
from jaxmnt.data.attempts import NAME_OF_ATTEMPT
from jaxmnt.data.index import CONTENTS as INDEX_CONTENTS
from jaxmnt.data.index import FOLDER as INDEX_FOLDER
from jaxmnt.data.manifest import (
    CHAT_TEMPLATE_FILE,
    FORMAT,
    MANIFEST,
    SPLITS,
    TOKENIZER_FILE,
    VERSION,
)
from jaxmnt.data.preparation.inputs import SHARD_TOKENS, Input, Settings
from jaxmnt.data.preparation.part import (
    WORK,
    Job,
    read_record,
    write_record,
)
from jaxmnt.data.tokenizer import file_of_tokenizer
from jaxmnt.errors import ConfigError, printable
from jaxmnt.strict_json import json_text

_PLAN = "plan.json"
_CHAT_VERSION = 2
"""Version of the conversion of conversations to text. Preparations of version 1, which dropped fields, are not
resumed."""

_CHANGEABLE_SETTINGS = ("workers", "skip_bad", "packed_lengths")
"""Settings that may change when a preparation is resumed."""

_SHARD_FILE = r"[0-9]{5,}-[0-9]{2,}\.npy"
_NAMES_BEFORE_PLAN = re.compile(r"lock|\.plan\.json\.tmp", re.ASCII)
_PART_FILES = rf"(part-[0-9]{{5,}}\.json | counts-[0-9]{{5,}}\.npy | (train|eval)-origins-{_SHARD_FILE})"
_SHARD_FILES = rf"(train|eval)-(tokens|documents|learn|origins)-{_SHARD_FILE}"
_PARTS_CONTENTS = re.compile(
    rf"{_PART_FILES} | \.{_PART_FILES}\.tmp | {_SHARD_FILES}\.tmp"
    rf"| ({_PART_FILES} | {_SHARD_FILES} | manifest\.json | sources\.txt | chat_template\.jinja)"
    rf"\.{NAME_OF_ATTEMPT}\.tmp",
    re.ASCII | re.VERBOSE,
)
_WORK_CONTENTS = re.compile(
    rf"lock | plan\.json | \.plan\.json\.tmp | {_PARTS_CONTENTS.pattern}", re.ASCII | re.VERBOSE
)
_SPLIT_CONTENTS = re.compile(rf"(tokens|documents|learn|origins)-{_SHARD_FILE}|\.origins-{_SHARD_FILE}\.tmp", re.ASCII)
"""Names of the files that a preparation writes. Other files are never removed, because the folder may be the user's."""


@contextmanager
def locked_output(output: Path) -> Iterator[None]:
    """Locks an unfinished output, so that no other process prepares it. Raises `ConfigError` if it is locked already.

    If this creates the output folder, and the folder is empty at the end, it is removed again.
    """
    work, is_new = output / WORK, not output.exists()
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--output: another process is preparing {output}; wait for it") from None
        check_output(output)  # again, because another process may have finished since the first check
        try:
            yield
        finally:
            with suppress(OSError):
                if is_new:
                    output.rmdir()


def check_output(output: Path) -> None:
    """Raises `ConfigError` unless the output does not exist, is empty, or is an unfinished preparation."""
    if os.path.lexists(output / MANIFEST):
        if _is_prepared(output):
            remove_work(output)  # an earlier process may have been killed before it could do this
            raise ConfigError(f"--output: {output} is prepared already; choose another folder, or remove it")
        raise ConfigError(f"--output: {output} has a {MANIFEST} that is damaged or not from jaxmnt; use another folder")
    if not output.exists():
        return
    work = output / WORK
    if not output.is_dir() or (not work.is_dir() and any(output.iterdir())):
        raise ConfigError(f"--output: {output} exists already and is not prepared data; choose another folder")
    if work.is_dir():
        _check_work(output)


def remove_work(output: Path) -> None:
    """Removes the work folder of finished data. If it contains files that we did not write, they and the folder are
    kept."""
    work = output / WORK
    with suppress(OSError):  # leftovers are harmless
        if _is_prepared(output):
            _remove(work, _WORK_CONTENTS)
            work.rmdir()


def discard(output: Path) -> bool:
    """Removes the files of an unfinished preparation, and no others. Returns True if the output is then empty."""
    work = output / WORK
    with suppress(OSError):
        # The records come first, because a part that has one would not be prepared again.
        _remove(work, _PARTS_CONTENTS)
        for split in SPLITS:
            _remove(output / split, _SPLIT_CONTENTS)
            (output / split).rmdir()
        if (output / INDEX_FOLDER).exists():
            _remove(output / INDEX_FOLDER, INDEX_CONTENTS)
            (output / INDEX_FOLDER).rmdir()
        for name in (TOKENIZER_FILE, CHAT_TEMPLATE_FILE):
            if _is_own_file(output / name):
                (output / name).unlink()
        _remove(work, _WORK_CONTENTS)
        work.rmdir()
    return not any(output.iterdir())


def _check_work(output: Path) -> None:
    """Raises `ConfigError` unless a preparation made the work folder; the user may have a folder of the same name."""
    work = output / WORK
    advice = "so it is not an unfinished preparation; choose another folder"
    # List the output first, because another process may be running, which writes only the lock before the plan.
    other_names = sorted(path.name for path in output.iterdir() if path.name != work.name)
    names = sorted(path.name for path in work.iterdir())
    for name in names:
        if not _WORK_CONTENTS.fullmatch(name) or (os.path.lexists(work / name) and not _is_own_file(work / name)):
            raise ConfigError(f"--output: {work} holds {printable(name)}, {advice}")
    unexpected = [f"{work.name}/{name}" for name in names if not _NAMES_BEFORE_PLAN.fullmatch(name)] + other_names
    if unexpected and not (work / _PLAN).exists():
        raise ConfigError(f"--output: {output} holds {printable(unexpected[0])} but no {work.name}/{_PLAN}, {advice}")


def _is_prepared(output: Path) -> bool:
    """Returns True if the output has a manifest of our format, even a damaged one."""
    try:
        manifest = json.loads(storage.read(output / MANIFEST).decode())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def _remove(folder: Path, names: re.Pattern[str]) -> None:
    """Removes the files in a folder whose names match. Symbolic links are neither followed nor removed."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in folder.iterdir():
        if names.fullmatch(path.name) and _is_own_file(path):
            path.unlink(missing_ok=True)


def _is_own_file(path: Path) -> bool:
    """Returns True if a path is a regular file and not a symbolic link, as all files that we write are."""
    return path.is_file() and not path.is_symlink()


def _make_plan(inputs: list[Input], settings: Settings) -> dict[str, Any]:
    """Returns the inputs and settings that determine the output, as JSON values.

    Settings that do not affect parts that are already done are left out.
    """
    output_settings = {name: value for name, value in asdict(settings).items() if name not in _CHANGEABLE_SETTINGS}
    path = file_of_tokenizer(settings.tokenizer or "")
    plan: dict[str, Any] = {
        "version": VERSION,
        "settings": output_settings | {"tokenizer_sha256": _tokenizer_digest(path)},
        "inputs": [[file.name, str(file.path), file.size, file.modified_ns, file.split] for file in inputs],
    }
    reading = plan["settings"]["reading"]
    if reading["chat"]:
        reading["chat"] = _CHAT_VERSION
    # Leave out the defaults of settings that earlier versions did not have, so that their preparations are resumed.
    for name, default in (("learn", "answers"), ("chat_format", None), ("chat_date", None)):
        if reading[name] == default:
            del reading[name]
    if plan["settings"]["max_parts"] is None:
        del plan["settings"]["max_parts"]
    if not reading["ignored_fields"]:
        del reading["ignored_fields"]
    plan["long_documents"] = {name: reading.pop(name) for name in ("long_documents", "max_document")}
    return json.loads(json_text(plan))


def with_stored_sizes(settings: Settings, output: Path) -> Settings:
    """Returns the settings with the sizes of shards and parts of the unfinished preparation in `output`, if there is
    one. Earlier versions made smaller ones."""
    path = output / WORK / _PLAN
    if settings.shard_tokens != SHARD_TOKENS or not path.exists():
        return settings
    stored = read_record(path).get("settings", {})
    shard_tokens = stored.get("shard_tokens", settings.shard_tokens)
    return replace(settings, shard_tokens=shard_tokens, max_parts=stored.get("max_parts"))


def check_plan(job: Job) -> None:
    """Writes the plan of a job. Raises `ConfigError` if parts of a different plan are already done."""
    output, work = job.output, job.work
    plan = _make_plan(job.inputs, job.settings)
    path = work / _PLAN
    stored_plan = read_record(path) if path.exists() else None
    if stored_plan not in (None, plan) and not _only_allows_longer_documents(stored_plan, plan, work):
        if any(work.glob("part-*.json")):
            differences = sorted(name for name in plan if stored_plan.get(name) != plan[name])
            raise ConfigError(
                f"--output: {output} holds an unfinished preparation with other {' and '.join(differences)}; undo "
                "that change and run the command again to continue it, or remove the folder"
            )
        (output / TOKENIZER_FILE).unlink(missing_ok=True)
        _remove(work, _PARTS_CONTENTS)
        _remove(output / INDEX_FOLDER, INDEX_CONTENTS)
        for split in SPLITS:
            _remove(output / split, _SPLIT_CONTENTS)
    if stored_plan != plan:
        write_record(path, plan)
    for split in SPLITS:
        (output / split).mkdir(exist_ok=True)


def _only_allows_longer_documents(stored_plan: dict[str, Any], plan: dict[str, Any], work: Path) -> bool:
    """Returns True if `plan` differs from the stored plan only in allowing longer documents, and if the finished parts
    remain valid.

    With the stored plan, long documents were an error. So finished parts have no long documents, unless they skipped
    records. If a tokenizer was trained without the long documents, they do not remain valid.
    """
    old = stored_plan.get("long_documents")
    new = plan["long_documents"]
    return (
        old is not None
        and stored_plan | {"long_documents": new} == plan
        and old["long_documents"] == "error"
        and new["max_document"] >= old["max_document"]
        and plan["settings"]["train_tokenizer"] is None
        and not any(read_record(path)["skipped"] for path in work.glob("part-*.json"))
    )


def _tokenizer_digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    except OSError as error:
        raise ConfigError(f"--tokenizer: {path} cannot be read: {error.strerror}; check its permissions") from error
