"""Writes the index files of prepared data: where documents start, and the plans of packed rows.

Only a holder of the lock of the folder writes. Others wait for it, and then use its files. If a file system has no
locks, two processes may write at the same time: each writes under names of its own, and the first to finish a file
publishes it.
"""

import errno
import fcntl
import os
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from jaxmnt.data.attempts import Attempt, remove_leftovers
from jaxmnt.data.index import FOLDER, FORMAT, VERSION, IndexKey, array_path, description_path, read_index
from jaxmnt.data.manifest import sealed_text
from jaxmnt.data.npy_files import NpyWriter
from jaxmnt.data.packing import WINDOW_DOCUMENTS, plan_window
from jaxmnt.data.store import PreparedData
from jaxmnt.errors import printable

_WINDOWS_AT_A_TIME = 32
"""Number of windows that are planned before their plans are joined, which limits the space of temporary files to 0.5 GB
for short documents."""
_POLL_SECONDS = 0.5
_NO_LOCK_ERRORS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error numbers with which file systems refuse to lock a file."""

Work = Callable[[Any, Callable[[int], None]], object]
"""Function that processes the task that is its first argument, and calls its second argument with each amount of work
that it has done, such as a number of bytes."""


class Window(NamedTuple):
    """Consecutive documents of a split that are packed together."""

    first: int
    """Number of the first document."""
    documents: int

    def __str__(self) -> str:
        return f"documents {self.first} to {self.first + self.documents - 1}"


RunTasks = Callable[[Sequence[Window], Callable[[], Work]], None]
"""Function that makes the work function, and calls it for all windows, in any order and in any process."""


def run_in_process(windows: Sequence[Window], make_work: Callable[[], Work]) -> None:
    """Plans all windows one after another in this process."""
    work = make_work()
    for window in windows:
        work(window, lambda documents: None)


def missing_indices(prepared: PreparedData, keys: Sequence[IndexKey]) -> list[IndexKey]:
    """Returns the keys of the indices that the data needs and does not have yet, in the order in which to write them.

    Plans are made from document starts, so the document starts come first. Raises `ConfigError` for a damaged index.
    """
    plans = [key for key in keys if key.row_length is not None]
    required = dict.fromkeys([*(IndexKey(key.split) for key in keys), *plans])
    return [key for key in required if (index := prepared.index(key.split)).needs_index and index.read(key) is None]


def write_indices(
    prepared: PreparedData,
    keys: Sequence[IndexKey],
    show: Callable[[str], None] = lambda text: None,
    run_tasks: RunTasks = run_in_process,
) -> list[Path]:
    """Writes the indices that the data needs and does not have yet, and returns the paths of their descriptions.

    `show` is called with what this process does, or with the name of the process for which it waits. Raises
    `ConfigError` for damaged data or a damaged index, and `OSError` if the folder cannot be written.
    """
    if not missing_indices(prepared, keys):
        return []
    folder = prepared.path / FOLDER
    written = []
    with _locked(folder, show):
        remove_leftovers(folder)
        for key in missing_indices(prepared, keys):  # again, because another process may just have written some
            show(f"indexing {prepared.path}: {key.name}")
            written.append(_write_index(prepared, key, folder, run_tasks))
    return written


def how_to_index(path: Path, keys: Sequence[IndexKey]) -> str:
    """Returns the command that writes the indices of these keys."""
    lengths = sorted({key.row_length for key in keys if key.row_length is not None})
    plans = f" --lengths {' '.join(map(str, lengths))}" if lengths else ""
    skip = " --long-documents skip" if any(key.skip_long for key in keys) else ""
    return f"python -m jaxmnt.data index --path {shlex.quote(str(path))}{plans}{skip}"


def _write_index(prepared: PreparedData, key: IndexKey, folder: Path, run_tasks: RunTasks) -> Path:
    attempt = Attempt(folder)
    try:
        # Files are replaced, not removed, because another writer may have published them if there are no locks.
        writers = {
            array: NpyWriter(array_path(folder, key.name, array), attempt, dtype, replace=True)
            for array, dtype in key.dtypes.items()
        }
        if key.row_length is None:
            counts = _write_document_starts(prepared, key, writers)
        else:
            counts = _write_plan(prepared, key, writers, attempt, folder, run_tasks)
        arrays = {array: {"length": writer.length, "sha256": writer.close()} for array, writer in writers.items()}
        description = {
            "format": FORMAT,
            "version": VERSION,
            "data": prepared.digest,
            "counts": counts,
            "arrays": arrays,
        }
        # The description comes last, because it marks the index as complete.
        path = description_path(folder, key.name)
        with attempt.writing(path, replace=True) as stream:
            stream.write(sealed_text(description).encode())
        return path
    finally:
        attempt.remove_unpublished()


def _write_document_starts(prepared: PreparedData, key: IndexKey, writers: dict[str, NpyWriter]) -> dict[str, int]:
    for starts in prepared.starts_by_shard(key.split):
        writers["start"].append(starts)
    return {"documents": writers["start"].length}


def _write_plan(
    prepared: PreparedData,
    key: IndexKey,
    writers: dict[str, NpyWriter],
    attempt: Attempt,
    folder: Path,
    run_tasks: RunTasks,
) -> dict[str, int]:
    """Writes the plans of all windows, one after another. `run_tasks` makes them, in any order."""
    documents = prepared.documents(key.split)
    windows = [
        Window(first, min(WINDOW_DOCUMENTS, documents - first)) for first in range(0, documents, WINDOW_DOCUMENTS)
    ]
    make_work = partial(_plan_windows, prepared.path, prepared.digest, prepared.tokens(key.split), key, attempt)
    counts = {"rows": 0, "tokens": 0, "long_documents": 0}
    pieces = 0
    for number, window in enumerate(windows):
        if number % _WINDOWS_AT_A_TIME == 0:
            run_tasks(windows[number : number + _WINDOWS_AT_A_TIME], make_work)
        path = _window_path(folder, key, attempt, window)
        with np.load(path, allow_pickle=False) as plan:
            writers["first_piece"].append(plan["first_piece"][:-1] + pieces)
            for array in ("start", "length", "opens"):
                writers[array].append(plan[array])
            counts["rows"] += len(plan["first_piece"]) - 1
            for name in ("tokens", "long_documents"):
                counts[name] += int(plan[name])
            pieces += len(plan["start"])
        path.unlink()
    writers["first_piece"].append(np.array([pieces]))
    return counts


def _plan_windows(data_path: Path, digest: str, tokens: int, key: IndexKey, attempt: Attempt) -> Work:
    """Returns the function with which a worker plans a window into a file."""
    folder = data_path / FOLDER
    index = read_index(folder, IndexKey(key.split), digest)
    assert index is not None and key.row_length is not None
    starts, row_length = index.arrays["start"], key.row_length

    def plan_into_file(window: Window, advance: Callable[[int], None]) -> None:
        plan = plan_window(starts, tokens, row_length, window.first, window.documents, skip_long=key.skip_long)
        with _window_path(folder, key, attempt, window).open("wb") as stream:
            np.savez(
                stream, first_piece=plan.first_piece, start=plan.start, length=plan.length, opens=plan.opens,
                tokens=np.array(plan.tokens), long_documents=np.array(plan.long_documents),
            )  # fmt: skip
        advance(window.documents)

    return plan_into_file


def _window_path(folder: Path, key: IndexKey, attempt: Attempt, window: Window) -> Path:
    """Returns the temporary path of the plan of a window."""
    return attempt.temporary(folder / f"{key.name}-window-{window.first}.npz")


@contextmanager
def _locked(folder: Path, show: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock of an index folder, which is created. Waits for another holder, whose name it shows."""
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("a+") as lock:
        while not _try_lock(lock):
            lock.seek(0)
            show(f"waiting for the index in {folder}, which {printable(lock.read(200)) or 'another process'} writes")
            time.sleep(_POLL_SECONDS)
        lock.seek(0)
        lock.truncate()
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        yield


def _try_lock(lock: TextIO) -> bool:
    """Returns False if another process holds the lock. Returns True, too, if the file system has no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCK_ERRORS:
            raise
    return True
