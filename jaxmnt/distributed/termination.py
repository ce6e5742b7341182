"""Ends a process at once, from any thread, after it has printed and recorded the reason and has released the lock.

This module also recognises errors with which JAX's runtime reports a lost process or device, and ends a start that was
abandoned without counting it as a failure.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, NonNegativeInt

from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError, ExitCode, PeerError, UserError, printable_lines

_HOOKS_TIMEOUT_SECONDS = 5.0
PrintableText = Annotated[str, AfterValidator(printable_lines)]
"""A text without terminal control characters, if Pydantic has validated it, as it does in messages from processes."""


@dataclass(frozen=True)
class ExitReason:
    """The reason why a run ends in this process."""

    kind: str
    """failed (this process failed), peer_lost (another process failed or is missing), hang, or interrupted."""
    why: PrintableText
    code: ExitCode
    process: NonNegativeInt | None = None
    """The process at fault, if one is known."""
    host: str | None = None
    by_itself: bool = False
    """True if the process at fault has reported the failure itself."""


ExitHook = Callable[[ExitReason], None]


class ExitHandler:
    """Runs the exit hooks of this process, and ends it. The first caller decides the reason; others wait for the
    end."""

    def __init__(self, label: str = ""):
        self.exit_reason: ExitReason | None = None
        """The reason why the main thread is about to exit, or None."""
        self.must_exit_now = False
        """True if a thread is left that could keep this process from exiting."""
        self._label = label
        self._hooks: list[ExitHook] = []
        self._exiting = threading.Lock()

    @contextmanager
    def with_hook(self, hook: ExitHook) -> Iterator[None]:
        """Adds an exit hook within this context. If an exception is raised inside, the hook stays.

        All hooks run in parallel and have five seconds in total, so one that hangs does not affect the others.
        """
        self._hooks.append(hook)
        yield
        self._hooks.remove(hook)

    def exit_now(self, exit_reason: ExitReason) -> NoReturn:
        """Prints the reason and ends the process with its exit code."""
        self._exit(exit_reason, exit_reason.code, is_reported=False)

    def finish(self, code: int, *, at_once: bool) -> int:
        """Returns `code` to the main thread. After a failure, or if `at_once` or `must_exit_now`
        is set, ends the process with that code instead.

        So this process can exit even if a library has left a thread behind, such as one of Orbax's in the barrier of a
        failed save, and its peers can exit without JAX's shutdown barrier.
        """
        if not at_once and not self.must_exit_now and code in (ExitCode.FINISHED, ExitCode.STOPPED):
            return code
        self._exit(self.exit_reason, code, is_reported=True)

    def _exit(self, exit_reason: ExitReason | None, code: int, *, is_reported: bool) -> NoReturn:
        """Runs the hooks with a time limit, since file systems and readers of our output may hang, and then exits."""
        if not self._exiting.acquire(blocking=False):
            threading.Event().wait()
        try:
            thread = threading.Thread(target=self._run_hooks, args=(exit_reason, is_reported), daemon=True)
            thread.start()
            thread.join(_HOOKS_TIMEOUT_SECONDS)
        finally:
            os._exit(int(code))

    def _run_hooks(self, exit_reason: ExitReason | None, is_reported: bool) -> None:
        hooks = self._hooks if exit_reason is not None else []
        threads = [threading.Thread(target=self._run_hook, args=(hook, exit_reason), daemon=True) for hook in hooks]
        for thread in threads:
            thread.start()
        if exit_reason is not None and not is_reported:
            self._print(exit_reason.why if exit_reason.code == ExitCode.STOPPED else f"error: {exit_reason.why}")
        for stream in (sys.stderr, sys.stdout):
            with suppress(OSError, ValueError):  # its reader is gone
                stream.flush()
        for thread in threads:
            thread.join()

    def _run_hook(self, hook: ExitHook, exit_reason: ExitReason) -> None:
        try:
            hook(exit_reason)
        except Exception as error:  # the process exits in any case
            self._print(f"note: {type(error).__name__}: {error}")

    def _print(self, text: str) -> None:
        with suppress(OSError, ValueError):
            print(f"jaxmnt: {with_label(self._label, text)}", file=sys.stderr, flush=True)


def with_label(label: str, text: str) -> str:
    """Puts the label of a process before a text, unless there is no label or the text already begins with it."""
    return text if not label or text.startswith(f"{label} ") else f"{label}: {text}"


def code_for_peers(code: ExitCode) -> ExitCode:
    """Returns the exit code of the other processes if one exits with `code`. Errors in the config or a host apply to
    all."""
    return code if code in (ExitCode.CONFIG, ExitCode.PREFLIGHT) else ExitCode.PEER


ABANDONED = "start_abandoned"
"""Kind of the event that records an abandoned start, and of its exit reason."""
STOPPED, PEERS = "stopped", "peers"
_DAY_SECONDS = 24 * 3600.0
_NOTIFY_TIMEOUT_SECONDS = 3.0
_process_start = time.monotonic()


class AbsentError(PeerError):
    """Raised when processes of this run have not connected in time, which is not a failure if they may still start."""


class StoppedError(UserError):
    """Raised when a process was asked to stop before the first step."""

    exit_code = ExitCode.STOPPED

    def __init__(self, text: str, asked_by: str | None = None):
        super().__init__(text)
        self.asked_by = asked_by
        """The source of the request to this process; None if another process was asked."""


@dataclass(frozen=True)
class AbandonedStart(ExitReason):
    """The exit reason of a start that was stopped before the first step, or whose peers never appeared."""

    reason: str = STOPPED
    """STOPPED or PEERS."""
    asked_by: str | None = None
    waited_seconds: float = 0.0


def exit_reason_of(error: UserError) -> AbandonedStart:
    """Returns the exit reason of a start that has raised `StoppedError` or `AbsentError`."""
    process = next(iter(error.processes), None)
    waited = time.monotonic() - _process_start
    exit_reason = AbandonedStart(ABANDONED, str(error), ExitCode.STOPPED, process, waited_seconds=waited)
    if isinstance(error, StoppedError):
        return replace(exit_reason, reason=STOPPED, asked_by=error.asked_by)
    return replace(exit_reason, reason=PEERS)


def stopped_error(reason: str, identity: Identity) -> StoppedError:
    """Returns the error for a process that was asked to stop, for `reason`, before its first step."""
    return StoppedError(
        f"{identity.label or 'this process'} was asked to stop before the first step ({reason})", reason
    ).blaming(processes=[identity.process_id])  # fmt: skip


class EarlyExit:
    """Ends this process, and tells the others, when it is asked to stop before its first step. Works in any thread."""

    def __init__(self, identity: Identity, exit_handler: ExitHandler):
        self._identity, self._exit_handler = identity, exit_handler
        self.tell: Callable[[AbandonedStart], object] = lambda exit_reason: None
        """Function that tells the other processes. It does nothing until they are connected."""
        self.fail: Callable[[str], object] = lambda why: exit_handler.exit_now(
            ExitReason("failed", why, ExitCode.FAILURE, identity.process_id)
        )
        """Function that ends the process as a failure, because it was asked to stop a second time, and tells the
        others."""
        self.reason: str | None = None
        """The source of the request to stop, or None."""
        self._rendezvous_is_over = threading.Event()
        self._rendezvous_is_over.set()
        self._failed = False

    @contextmanager
    def during_rendezvous(self) -> Iterator[None]:
        """Within this context, the rendezvous itself handles a request to stop and tells the other processes."""
        self._rendezvous_is_over.clear()
        try:
            yield
        except BaseException:
            self._failed = True
            raise
        finally:
            self._rendezvous_is_over.set()

    def exit_early(self, reason: str) -> None:
        """Ends the process because of `reason`. Called in a thread, whatever the main thread is doing.

        Returns only if the main thread ends the process itself, as it does after a failed rendezvous.
        """
        self.reason = reason
        self._rendezvous_is_over.wait(_NOTIFY_TIMEOUT_SECONDS)
        if self._failed:
            return
        exit_reason = exit_reason_of(stopped_error(reason, self._identity))
        self.tell(exit_reason)
        self._exit_handler.exit_now(exit_reason)


def check_abandoned_starts(records: Sequence[dict[str, Any]], error: AbsentError, now: float) -> None:
    """Raises `ConfigError` if, according to this process's own events, all starts during the last day were abandoned
    because peers were missing."""
    since: float | None = None
    last = now
    for record in records:
        at = record.get("time")
        if not isinstance(at, (int, float)) or at > now:
            continue
        if record.get("kind") == "start":
            since = None
        elif record.get("kind") == ABANDONED and record.get("reason") == PEERS:
            # A gap of more than a day separates attempts that have nothing to do with each other.
            since = at if since is None or at - last > _DAY_SECONDS else since
            last = at
    if since is not None and now - since >= _DAY_SECONDS >= now - last:
        raise ConfigError(
            f"{error}; since {time.strftime('%Y-%m-%d %H:%M', time.localtime(since))} no start of this run has "
            "connected all of its processes: find out why they do not start, or set fewer processes, then start "
            "it again"
        ).blaming(processes=error.processes)


_CONNECTION_ERROR_SIGNS = (
    "Gloo",
    "Connection closed by peer",
    "Connection reset by peer",
    "heartbeat",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "NCCL",
    "remote process exited",
    "Connection closed by remote peer",
)

_DEVICE_ERROR_SIGNS = (
    "CUDA_ERROR_CONTAINED",
    "CUDA_ERROR_DEVICE_UNAVAILABLE",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_NO_DEVICE",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    "CUDA_ERROR_SYSTEM_NOT_READY",
    "fallen off the bus",
    "GPU is lost",
    "uncorrectable ECC",
)
"""CUDA's error names, and texts from drivers; see
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html"""


def is_device_error(why: str) -> bool:
    """Returns True if an error message comes from a broken device or driver, not from the program that uses it."""
    return any(sign in why for sign in _DEVICE_ERROR_SIGNS)


def is_connection_error(error: BaseException) -> bool:
    """Returns True if the message of an error reports a lost connection."""
    return any(sign in str(error) for sign in _CONNECTION_ERROR_SIGNS)


def may_mean_a_lost_peer(error: BaseException) -> bool:
    """Returns True if an error may be due to a lost process, which the heartbeat may identify a moment later."""
    if isinstance(error, PeerError):
        return True
    import jax

    # A dispatch over a closed connection raises ValueError with the same message.
    return isinstance(error, jax.errors.JaxRuntimeError) or (
        isinstance(error, ValueError) and is_connection_error(error)
    )
