"""Saving and restoring the train state. The only module that imports Orbax."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from jaxmnt.checkpoint.commit import Committed, prune, write_commit
from jaxmnt.cluster.environment import Identity
from jaxmnt.errors import UserError
from jaxmnt.telemetry.events import Events

State = dict[str, Any]


class Saver:
    """Asynchronous saves, one at a time. A step is on disk when its commit file is, see `commit.py`.

    `save` blocks while the state is copied off the devices (and while an earlier save is unfinished);
    the rest happens in the background. A failure there is raised by the next `poll`, `save` or `wait`.
    """

    def __init__(
        self,
        root: Path,
        keep: int,
        identity: Identity,
        events: Events,
        to_stored: Callable[[State], State] = lambda state: state,
    ):
        """`to_stored` makes of a state what is to be stored, and may block."""
        self._root = root.absolute()
        self._to_stored = to_stored
        self._keep = keep
        self._identity = identity
        self._events = events
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(self, step: int, state: State, notes: dict[str, Any]) -> float:
        """Starts saving `state` as `step` and returns for how many seconds that blocked."""
        started = time.perf_counter()
        self.wait()
        self._events.write("checkpoint_begin", step=step)
        with _context():
            stored = {"state": self._to_stored(state)}
            response = ocp.save_checkpointables_async(str(self._root / str(step)), stored)
        self._thread = threading.Thread(target=self._finish, args=(step, response, notes, started))
        self._thread.start()
        return time.perf_counter() - started

    def poll(self) -> None:
        """Raises the failure of a save in the background, if there was one."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            if isinstance(failure, jax.errors.JaxRuntimeError):  # not the disk: a device or another process
                raise failure
            raise UserError(
                f"a checkpoint in {self._root} could not be saved: {failure}; check space and permissions"
            ) from failure

    def wait(self) -> None:
        """Waits for the save in the background, then polls."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.poll()

    def _finish(self, step: int, response: Any, notes: dict[str, Any], started: float) -> None:
        try:
            response.result()
            if self._identity.process_id == 0:
                write_commit(self._root / str(step), notes)
                self._events.write("checkpoint_commit", step=step, seconds=time.perf_counter() - started)
                prune(self._root, self._keep)
        except BaseException as error:  # handed to the main thread, which raises it
            self._failure = error


def restore(checkpoint: Committed, abstract_state: State) -> State:
    """The state of a committed checkpoint on the shardings of `abstract_state`, whatever wrote it."""
    return _load(checkpoint, abstract_state, _context())


def restore_params(checkpoint: Committed, abstract_params: dict[str, Any]) -> dict[str, Any]:
    """Only the parameters, in float32, on the shardings of `abstract_params`."""
    context = _context()
    context.pytree.loading.partial_load = True
    return _load(checkpoint, {"params": abstract_params}, context)["params"]


def _load(checkpoint: Committed, abstract: State, context: Any) -> State:
    try:
        with context:
            return ocp.load_checkpointables(str(checkpoint.path.absolute()), {"state": abstract})["state"]
    except jax.errors.JaxRuntimeError:  # not the files: a device or another process
        raise
    except Exception as error:
        raise UserError(
            f"checkpoint {checkpoint.path} cannot be restored: {error}; "
            "if it is damaged, move its directory away and start again from the one before"
        ) from error


def _context() -> Any:
    context = ocp.Context()
    # Weights hardly compress (7 % with zstd), and compression makes a save three times as long.
    context.array.saving.use_compression = False
    return context
