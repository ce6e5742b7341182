"""Saves the train state in the background. No other module imports Orbax.

The main thread lets Orbax copy the state off the devices and starts the digests. (On CPU, Orbax keeps views of the
state instead, and the next step works in other memory.) A background thread in each process waits for Orbax. Then every
process reports to process 0 whether it succeeded. If all did, process 0 commits, prunes old checkpoints and tells the
other processes.
"""

import asyncio
import contextlib
import functools
import logging
import re
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from jaxmnt.checkpoint.arrays import Reader
from jaxmnt.checkpoint.commit import (
    Committed,
    begin_step,
    commit,
    open_checkpoint,
    prune,
    remove_unfinished,
    valid_checkpoints,
)
from jaxmnt.checkpoint.device_digest import start_digests
from jaxmnt.checkpoint.digest import decode, encode
from jaxmnt.checkpoint.manifest import Array, Manifest
from jaxmnt.checkpoint.names import arrays_by_name, nested_arrays
from jaxmnt.checkpoint.retention import SpaceNeeded, comparable_losses, shortage, steps_to_keep
from jaxmnt.config.schema import Checkpoint
from jaxmnt.distributed.coordination import Vote, broadcast
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import PeerError, UserError
from jaxmnt.storage import Address, StoragePath, is_link

State = dict[str, Any]

_WRITE_TIMEOUT_SECONDS = 1800.0
"""Timeout for the other processes to finish writing."""
_POLL_SECONDS = 1.0
_FAILED_WRITE_TIMEOUT_SECONDS = 30.0
"""Timeout for the writes of a failed save in a bucket, which would otherwise go into the files of the next save."""
_CHUNK_BYTES = 16 << 20
_ORBAX_WAIT_EVENT = "/jax/checkpoint/sync_global_devices_duration_sec"


# Orbax logs each failure with tracebacks; we report it once, as a plain message.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
# Orbax does not await its unfinished coroutines when a save fails; we report the failure once, as a plain message.
warnings.filterwarnings("ignore", r"coroutine '\w+\.save_checkpointables\..*' was never awaited", RuntimeWarning)


class _OrbaxEventLoop(asyncio.SelectorEventLoop):
    """An event loop for Orbax that ignores callbacks after it is closed.

    When a save fails, Orbax closes its loop while TensorStore is still writing. TensorStore's threads would print a
    traceback for each write that they then report to the closed loop, although nothing waits for these writes.
    """

    # typeshed's type is generic in the types of `args`, which mypy cannot match with `Any`. All calls that it allows
    # work here.
    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.Handle:
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        except RuntimeError:
            if not self.is_closed():
                raise
            return asyncio.Handle(callback, args, self, context)


_orbax_asyncio: Any = import_module("orbax.checkpoint._src.asyncio_utils")
# Makes Orbax create our event loops.
_orbax_asyncio.asyncio = SimpleNamespace(**vars(asyncio) | {"new_event_loop": _OrbaxEventLoop})


@dataclass(frozen=True)
class SaveResult:
    """The outcome of a save."""

    step: int
    failure: str | None
    """Why there is no checkpoint of this step; None if there is one."""
    removal_failure: str | None
    """Why older checkpoints could not be removed; None if they were removed. Always None in processes other than 0."""
    seconds: float
    """Seconds from the start of the save to its commit."""
    bytes: int
    """Size of the state in bytes."""


class _OrbaxWaits:
    """Adds up how long Orbax has waited for other processes, which it reports to JAX's monitoring."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _ORBAX_WAIT_EVENT:
            with self._lock:
                self.seconds += max(0.0, duration_secs)  # negative if the clock was set back during the wait


_orbax_waits = functools.cache(_OrbaxWaits)


class Saver:
    """Saves asynchronously, one save at a time. A checkpoint is valid once it is committed (see `commit.py`)."""

    def __init__(
        self,
        root: StoragePath,
        settings: Checkpoint,
        space_needed: SpaceNeeded,
        identity: Identity,
        confirm: Callable[[], None] = lambda: None,
    ):
        """`confirm` raises `UserError` if this job may no longer write to `root`. Only process 0 calls it."""
        self._root = root.absolute()
        self._settings = settings
        self._space_needed = space_needed
        self._identity = identity
        self._confirm = confirm
        self._thread: threading.Thread | None = None
        self._result: SaveResult | None = None
        self._error: BaseException | None = None
        """An unexpected error in the background thread, which the main thread raises."""
        self._removal_failure: str | None = None
        self.preparation_seconds = 0.0
        """Seconds that process 0 has spent preparing saves so far, while the other processes waited."""
        _orbax_waits()
        self._failed_write: Any = None
        """Orbax's response to a save that failed, which may still be writing."""

    @property
    def waited_seconds(self) -> float:
        """Seconds that Orbax has waited for other processes so far."""
        return _orbax_waits().seconds

    @property
    def is_saving(self) -> bool:
        """True while a save is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int, state: State, describe: Callable[[dict[str, Array]], Manifest]) -> None:
        """Starts to save `state` as `step`. Call `result` for the outcome before the next save.

        The state may be donated once this returns. `describe` makes the manifest from the arrays once their digests are
        known.
        """
        assert self._thread is None and self._result is None, "`result` was not called for the previous save"
        started = time.perf_counter()
        self._wait_for_failed_write()
        preparing = time.perf_counter()
        refusal = self._prepare(step)
        self.preparation_seconds += time.perf_counter() - preparing
        refusal = broadcast("a save may begin", refusal, self._identity)
        if refusal:
            self._result = SaveResult(step, refusal, None, time.perf_counter() - started, 0)
            return
        arrays = arrays_by_name(state)
        vote = Vote("a save", self._identity, _WRITE_TIMEOUT_SECONDS)
        response = None
        try:
            with _orbax_context():
                response = ocp.save_checkpointables_async(str(self._root / str(step)), nested_arrays(arrays))
        except Exception as error:
            vote.fail(_describe_error(error))
        # Start the digests after Orbax's copies, because on CPU both would compete for the cores.
        digests = start_digests(arrays)
        entries = {name: Array(tuple(array.shape), str(array.dtype), "") for name, array in arrays.items()}

        def finish() -> None:
            try:
                if response is not None and _wait_until_written(response, vote):
                    vote.answer(encode(digests.wait()))
                else:
                    self._failed_write = response
                failure = vote.conclude(lambda answers: self._commit(step, describe(_with_digests(entries, answers))))
                size = sum(array.bytes for array in entries.values())
                self._result = SaveResult(step, failure, self._removal_failure, time.perf_counter() - started, size)
            except BaseException as error:  # the main thread raises it in `result`
                self._error = error

        self._thread = threading.Thread(target=finish, name=f"save {step}")
        self._thread.start()

    def result(self, *, wait: bool = False) -> SaveResult | None:
        """Returns the outcome of the last save; None while it is in progress, or if an earlier call returned it.

        Raises `PeerError` if another process was lost during the save.
        """
        if self._thread is not None and (wait or not self._thread.is_alive()):
            self._thread.join()
            self._thread = None
        if self._thread is not None:
            return None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        result, self._result = self._result, None
        return result

    def _wait_for_failed_write(self) -> None:
        """Waits until a failed save writes no more: in a bucket Orbax writes in place, which would damage the next
        save."""
        if self._failed_write is not None and isinstance(self._root, Address):
            with contextlib.suppress(Exception):  # the failure was reported already
                self._failed_write.result(timeout=_FAILED_WRITE_TIMEOUT_SECONDS)
        self._failed_write = None

    def _prepare(self, step: int) -> str | None:
        """Makes room for the save, in process 0. Returns why the save cannot begin, in process 0; empty if it can."""
        if self._identity.process_id != 0:
            return None
        try:
            self._confirm()
            self._root.mkdir(parents=True, exist_ok=True)
            _, removal_failures = remove_unfinished(self._root, keep_notes=True)
            self._removal_failure = "; ".join(removal_failures) or None
            shortage_text = shortage(self._root, self._space_needed)
            if not shortage_text:
                begin_step(self._root / str(step))
            return shortage_text or ""
        except (OSError, UserError) as error:
            return _describe_error(error)

    def _commit(self, step: int, manifest: Manifest) -> str:
        """Commits, then prunes, in process 0. Returns why the commit failed; empty if the checkpoint is committed."""
        path = self._root / str(step)
        try:
            Reader(Committed(path, manifest)).open_all()  # Orbax may omit arrays and only log a warning
            self._confirm()
            commit(path, manifest)
        except (OSError, UserError) as error:
            if not _is_committed(path, manifest):  # it is committed if only the response to the last write was lost
                return _describe_error(error)
        # A failure to prune does not make the save fail.
        try:
            valid = valid_checkpoints(self._root, manifest.run)
            prunable = [checkpoint for checkpoint in valid if not is_link(checkpoint.path)]
            prune(prunable, steps_to_keep(comparable_losses(prunable), self._settings))
        except OSError as error:
            self._removal_failure = "; ".join(filter(None, [self._removal_failure, _describe_error(error)]))
        return ""


def _wait_until_written(response: Any, vote: Vote) -> bool:
    """Waits until Orbax is done, or any process has failed. Returns True if this process has written its part.

    A process that waits in Orbax's barrier would learn only after minutes that another process has failed.
    """
    previous_error: TimeoutError | None = None
    while True:
        try:
            response.result(timeout=_POLL_SECONDS)
            return True
        except TimeoutError as error:
            # Each wait in vain raises an error of its own. An error that comes again is that of the save itself, such
            # as ETIMEDOUT of a network file system.
            if error is previous_error:
                vote.fail(_describe_error(error))
                return False
            previous_error = error
            if vote.has_failed():
                return False
        except Exception as error:
            vote.fail(_describe_error(error))
            return False


def _is_committed(path: StoragePath, manifest: Manifest) -> bool:
    try:
        return open_checkpoint(path, manifest.run).manifest == manifest
    except (OSError, UserError):
        return False


def _with_digests(entries: dict[str, Array], answers: list[str]) -> dict[str, Array]:
    digests = decode(sorted(entries), answers)
    return {name: replace(array, content=digests[name]) for name, array in entries.items()}


def _describe_error(error: BaseException) -> str:
    """Describes a failed write in one line.

    Raises errors of devices and of other processes, because these saves must not be retried.
    """
    if isinstance(error, PeerError | jax.errors.JaxRuntimeError):
        raise error
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    system_error = re.search(r'"([^"]+)": .*: ([^:]+) \[os_error_code=', str(error))
    if system_error:  # TensorStore's message for an OSError
        return f"{system_error[2]}: {system_error[1]}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return ": ".join(lines if isinstance(error, OSError) else lines[:1])[:300]


def _orbax_context() -> Any:
    context = ocp.Context()
    # Compression makes weights hardly smaller (by 7 % with zstd), and a save three times as long.
    context.array.saving.use_compression = False
    # A mesh with other shardings must read whole chunks even if it needs only parts of them.
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    # A restore uses the shardings of its own mesh, so nothing reads the file of shardings.
    context.array.saving.enable_write_sharding_file = False
    return context
