"""Whose turn it is to write an output, and whether it may be gone on with."""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxmnt.data.manifest import MANIFEST, SPLITS, TOKENIZER_FILE, VERSION
from jaxmnt.data.preparation.inputs import Input, is_unchanged
from jaxmnt.data.preparation.settings import Settings
from jaxmnt.data.preparation.shards import read_record, write_record
from jaxmnt.errors import ConfigError


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
    if (output / MANIFEST).exists():
        shutil.rmtree(work, ignore_errors=True)  # in case it was killed after the last step but this
        raise ConfigError(f"--output: {output} is prepared already; choose another folder, or remove it")
    if output.exists() and not work.is_dir() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output: {output} exists already and is no prepared data; choose another folder")


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
    plan, path = _plan(inputs, settings), work / "plan.json"
    before = read_record(path) if path.exists() else None
    if before is not None and _allows_more(before, plan):
        write_record(path, plan)
    elif before != plan:
        if before is not None and any(work.glob("part-*.json")):
            changed = sorted(name for name in plan if before.get(name) != plan[name])
            raise ConfigError(
                f"--output: {output} holds an unfinished preparation with other {' and '.join(changed)}; "
                "give the same command to go on with it, or remove the folder"
            )
        (output / TOKENIZER_FILE).unlink(missing_ok=True)
        for split in SPLITS:
            shutil.rmtree(output / split, ignore_errors=True)
        write_record(path, plan)
    for split in SPLITS:
        (output / split).mkdir(exist_ok=True)


def _allows_more(before: dict[str, Any], plan: dict[str, Any]) -> bool:
    """Whether just longer documents are allowed than before, when they were an error: parts that are done have none."""
    old, new = before.get("long_documents"), plan["long_documents"]
    return (
        old is not None
        and before | {"long_documents": new} == plan
        and old["long_documents"] == "error"
        and new["max_document"] >= old["max_document"]
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
