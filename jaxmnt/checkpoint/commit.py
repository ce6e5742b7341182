"""What is on disk under checkpoints/, and which of it is committed. Knows files only, no arrays.

Orbax publishes a step by renaming its directory, and its reader trusts the name alone. A step counts as
committed here when it also holds `jaxmnt.json`, written after Orbax is done, and every file that this lists is
there in its full size.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMIT_FILE = "jaxmnt.json"
ORBAX_MARKER = "commit_success.txt"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Committed:
    """A committed checkpoint: its step, its directory, and what was noted with it."""

    step: int
    path: Path
    notes: dict[str, Any]


def write_commit(path: Path, notes: dict[str, Any]) -> None:
    """Commits a step directory that Orbax has finished: lists its files with their sizes."""
    files = {str(file.relative_to(path)): file.stat().st_size for file in sorted(path.rglob("*")) if file.is_file()}
    record = {"format": FORMAT_VERSION, "notes": notes, "files": files}
    temporary = path / f".{COMMIT_FILE}.{os.getpid()}"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(record, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path / COMMIT_FILE)


def why_not_committed(path: Path) -> str | None:
    """What is wrong with a step directory, or None if it is committed and its files are all there."""
    if not (path / ORBAX_MARKER).is_file():
        return f"it has no commit marker {ORBAX_MARKER}"
    try:
        record = json.loads((path / COMMIT_FILE).read_text(encoding="utf-8"))
        version, files = record["format"], record["files"]
    except FileNotFoundError:
        return f"it has no commit marker {COMMIT_FILE}"
    except (ValueError, KeyError, TypeError):
        return f"its {COMMIT_FILE} is damaged"
    if version != FORMAT_VERSION:
        return f"it has format version {version}, this program reads {FORMAT_VERSION}"
    for name, size in sorted(files.items()):
        file = path / name
        if not file.is_file():
            return f"its file {name} is missing"
        if file.stat().st_size != size:
            return f"its file {name} has {file.stat().st_size} bytes instead of {size}"
    return None


def step_directories(root: Path) -> list[tuple[int, Path]]:
    """(step, directory) of everything that looks like a step, oldest first."""
    if not root.is_dir():
        return []
    return sorted((int(path.name), path) for path in root.iterdir() if path.is_dir() and path.name.isdigit())


def newest_committed(root: Path) -> Committed | None:
    """The newest committed step, passing over whatever is not."""
    for step, path in reversed(step_directories(root)):
        if why_not_committed(path) is None:
            notes = json.loads((path / COMMIT_FILE).read_text(encoding="utf-8"))["notes"]
            return Committed(step, path, notes)
    return None


def set_aside_uncommitted(root: Path) -> list[str]:
    """Renames steps that are not committed so that their numbers are free, and removes unfinished saves.

    Returns a line for people about each.
    """
    lines = []
    for step, path in step_directories(root):
        reason = why_not_committed(path)
        if reason is not None:
            aside = _free_name(path.with_name(f"{step}.uncommitted"))
            path.rename(aside)
            lines.append(f"checkpoint {step} is not used: {reason}; kept as {aside}")
    if root.is_dir():
        for path in sorted(root.glob("*.orbax-checkpoint-tmp*")):
            shutil.rmtree(path)
            lines.append(f"removed {path.name}, a save that was cut off")
        for path in sorted(root.glob(".*.removed")):  # a removal that was cut off
            shutil.rmtree(path)
    return lines


def prune(root: Path, keep: int) -> None:
    """Removes the oldest committed steps beyond `keep`."""
    committed = [path for _, path in step_directories(root) if why_not_committed(path) is None]
    for path in committed[:-keep]:
        going = path.with_name(f".{path.name}.removed")
        path.rename(going)  # at once no longer a step, whatever happens to the removal
        shutil.rmtree(going)


def _free_name(path: Path) -> Path:
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}.{number}")
    return candidate
