"""Saving the train state in the background. The only module that imports Orbax.

Who does what: the main thread has Orbax copy the state off the devices (on CPU it keeps views of it, and the next
step works in other memory) and starts the digests; a thread of each process waits
for Orbax; then all processes tell process 0 how it went for them, and only if it went well everywhere does process 0
commit, prune what is not to be kept, and tell the others.
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
from jaxmnt.checkpoint.commit import Committed, begin, commit, open_checkpoint, prune, remove_cut_off, valid_checkpoints
from jaxmnt.checkpoint.device_digest import start_digests
from jaxmnt.checkpoint.digest import decode, encode
from jaxmnt.checkpoint.manifest import Array, Manifest
from jaxmnt.checkpoint.names import named, nested
from jaxmnt.checkpoint.retention import SpaceNeeded, comparable_losses, shortage, steps_to_keep
from jaxmnt.config.schema import Checkpoint
from jaxmnt.distributed.coordination import Vote, broadcast
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import PeerError, UserError
from jaxmnt.storage import Address, StoragePath, is_link

State = dict[str, Any]

_SECONDS = 1800.0
"""How long processes wait for each other's writing."""
_POLL_SECONDS = 1.0
_STRAY_SECONDS = 30.0
"""How long a save waits for the writing of one that failed, where that would write into its own files."""
_CHUNK_BYTES = 16 << 20
_ORBAX_WAITED = "/jax/checkpoint/sync_global_devices_duration_sec"


# Orbax logs each failure with tracebacks; here it is reported once, in words.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
# Orbax does not wait for what it has begun when a save fails; that it failed is reported once, in words.
warnings.filterwarnings("ignore", r"coroutine '\w+\.save_checkpointables\..*' was never awaited", RuntimeWarning)


class _Loop(asyncio.SelectorEventLoop):
    """An event loop for Orbax. When a save fails, Orbax closes its loop while TensorStore still writes; TensorStore's
    threads then print a traceback for each write whose end they cannot tell the loop of. Nobody waits for these."""

    # Its type in typeshed is more general than what a caller can use.
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
# The module asyncio as Orbax sees it: new event loops are ours.
_orbax_asyncio.asyncio = SimpleNamespace(**vars(asyncio) | {"new_event_loop": _Loop})


@dataclass(frozen=True)
class SaveResult:
    """How a save went."""

    step: int
    failure: str | None
    """Why there is no checkpoint of this step, in words; None if there is."""
    not_removed: str | None
    """Why older checkpoints could not be removed, in words, as process 0 knows; None if they could."""
    seconds: float
    """From its beginning to its commit."""
    bytes: int


class _Waits:
    """How long Orbax has waited for other processes, as it tells JAX's monitoring."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _ORBAX_WAITED:
            with self._lock:
                self.seconds += max(0.0, duration_secs)  # by a clock that may be set meanwhile


_waits = functools.cache(_Waits)


class Saver:
    """Asynchronous saves, one at a time. A step is on disk when it is committed, see `commit.py`."""

    def __init__(
        self,
        root: StoragePath,
        settings: Checkpoint,
        need: SpaceNeeded,
        identity: Identity,
        confirm: Callable[[], None] = lambda: None,
    ):
        """`confirm` raises `UserError` if this job may not write there any more. Called by process 0."""
        self._root = root.absolute()
        self._settings = settings
        self._need = need
        self._identity = identity
        self._confirm = confirm
        self._thread: threading.Thread | None = None
        self._saved: SaveResult | None = None
        self._lost: BaseException | None = None
        self._not_removed: str | None = None
        self.prepared_seconds = 0.0
        """How long process 0 has worked for all so far, before they could begin."""
        _waits()
        self._stray: Any = None
        """Orbax's part of a save that has failed elsewhere: it may still be writing."""

    @property
    def waited_seconds(self) -> float:
        """How long Orbax has waited for other processes so far."""
        return _waits().seconds

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int, state: State, describe: Callable[[dict[str, Array]], Manifest]) -> None:
        """Starts to save `state` as `step`.

        The state is free to be donated afterwards. `describe` makes the manifest once the digests are known.
        `result` says later how it went. An earlier save must have been waited for.
        """
        assert self._thread is None and self._saved is None, "the result of the save before was not taken"
        started = time.perf_counter()
        self._wait_for_strays()
        preparing = time.perf_counter()
        prepared = self._prepare(step)
        self.prepared_seconds += time.perf_counter() - preparing
        refusal = broadcast("a save may begin", prepared, self._identity)
        if refusal:
            self._saved = SaveResult(step, refusal, None, time.perf_counter() - started, 0)
            return
        arrays = named(state)
        round = Vote("a save", self._identity, _SECONDS)
        response = None
        try:
            with _context():
                response = ocp.save_checkpointables_async(str(self._root / str(step)), nested(arrays))
        except Exception as error:
            round.fail(_in_words(error))
        digests = start_digests(arrays)  # after Orbax: on CPU it would compete with it for the cores
        described = {name: Array(tuple(array.shape), str(array.dtype), "") for name, array in arrays.items()}

        def finish() -> None:
            try:
                if response is not None and _written(response, round):
                    round.answer(encode(digests.wait()))
                else:
                    self._stray = response
                failure = round.conclude(
                    lambda answers: self._commit(step, describe(_with_contents(described, answers)))
                )
                size = sum(array.bytes for array in described.values())
                self._saved = SaveResult(step, failure, self._not_removed, time.perf_counter() - started, size)
            except BaseException as error:  # handed to the main thread, which raises it
                self._lost = error

        self._thread = threading.Thread(target=finish, name=f"save {step}")
        self._thread.start()

    def result(self, *, wait: bool = False) -> SaveResult | None:
        """How the last save went, once; None while it is under way or when there was none.

        Raises `PeerError` if another process was lost over it.
        """
        if self._thread is not None and (wait or not self._thread.is_alive()):
            self._thread.join()
            self._thread = None
        if self._thread is not None:
            return None
        if self._lost is not None:
            lost, self._lost = self._lost, None
            raise lost
        saved, self._saved = self._saved, None
        return saved

    def _wait_for_strays(self) -> None:
        """In a bucket Orbax writes in place, so what it still writes of a failed try would get into the next."""
        if self._stray is not None and isinstance(self._root, Address):
            with contextlib.suppress(Exception):  # that it failed is known
                self._stray.result(timeout=_STRAY_SECONDS)
        self._stray = None

    def _prepare(self, step: int) -> str | None:
        """Clears the way, on process 0: what stands in it (empty: nothing)."""
        if self._identity.process_id != 0:
            return None
        try:
            self._confirm()
            self._root.mkdir(parents=True, exist_ok=True)
            _, left = remove_cut_off(self._root, keep_notes=True)
            self._not_removed = "; ".join(left) or None
            short = shortage(self._root, self._need)
            if not short:
                begin(self._root / str(step))
            return short or ""
        except (OSError, UserError) as error:
            return _in_words(error)

    def _commit(self, step: int, manifest: Manifest) -> str:
        """Commits, then prunes, on process 0. What failed of the commit, or nothing: a checkpoint stands by then."""
        path = self._root / str(step)
        try:
            Reader(Committed(path, manifest)).open_all()  # Orbax may leave some out with no more than a warning
            self._confirm()
            commit(path, manifest)
        except (OSError, UserError) as error:
            if not _stands(path, manifest):  # or only the answer to the last write was lost
                return _in_words(error)
        try:
            own = [found for found in valid_checkpoints(self._root, manifest.run) if not is_link(found.path)]
            prune(own, steps_to_keep(comparable_losses(own), self._settings))
        except OSError as error:
            self._not_removed = "; ".join(filter(None, [self._not_removed, _in_words(error)]))
        return ""


def _written(response: Any, round: Vote) -> bool:
    """Waits until Orbax is done, or until some process has failed. Those that wait for it in Orbax's barrier would
    hear of it after minutes only."""
    while True:
        try:
            response.result(timeout=_POLL_SECONDS)
            return True
        except TimeoutError:
            if round.has_failed():
                return False
        except Exception as error:
            round.fail(_in_words(error))
            return False


def _stands(path: StoragePath, manifest: Manifest) -> bool:
    try:
        return open_checkpoint(path, manifest.run).manifest == manifest
    except (OSError, UserError):
        return False


def _with_contents(arrays: dict[str, Array], answers: list[str]) -> dict[str, Array]:
    contents = decode(sorted(arrays), answers)
    return {name: replace(array, content=contents[name]) for name, array in arrays.items()}


def _in_words(error: BaseException) -> str:
    if isinstance(error, PeerError | jax.errors.JaxRuntimeError):
        raise error  # not the disk: a device or another process
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    system = re.search(r'"([^"]+)": .*: ([^:]+) \[os_error_code=', str(error))
    if system:  # TensorStore's account of an OSError
        return f"{system[2]}: {system[1]}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return ": ".join(lines if isinstance(error, OSError) else lines[:1])[:300]


def _context() -> Any:
    context = ocp.Context()
    # Weights hardly compress (7 % with zstd), and compression makes a save three times as long.
    context.array.saving.use_compression = False
    # A mesh that cuts otherwise reads whole chunks to get a part of one.
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    context.array.saving.enable_write_sharding_file = False  # nobody reads it: a mesh brings its own shardings
    return context
