"""How a process ends at once, from any thread, and what it still does: say why, note it, let go of the lock.

Also by which errors JAX's runtime tells that a process or a device is gone, and how a start ends that comes to nothing
through no fault of the run.
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

_HOOKS_SECONDS = 5.0
PrintableText = Annotated[str, AfterValidator(printable_lines)]
"""A text that holds nothing a terminal would obey where Pydantic has read it, as from another process."""


@dataclass(frozen=True)
class ExitReason:
    """Why a run ends in this process."""

    kind: str
    """failed (by itself), peer_lost (another process failed or is missing), hang, or interrupted."""
    why: PrintableText
    code: ExitCode
    process: NonNegativeInt | None = None
    """The process at fault, if one is known."""
    host: str | None = None
    by_itself: bool = False
    """Whether the process at fault has said so itself."""


ExitHook = Callable[[ExitReason], None]


class ExitHandler:
    """The last acts of this process. Whoever ends it first decides why; the others wait for the end."""

    def __init__(self, label: str = ""):
        self.exit_reason: ExitReason | None = None
        """Why the main thread is about to end, if it is."""
        self.hurried = False
        """Whether something is left that could keep this process from ending."""
        self._label = label
        self._hooks: list[ExitHook] = []
        self._begun = threading.Lock()

    @contextmanager
    def with_hook(self, act: ExitHook) -> Iterator[None]:
        """Inside, and after an exception from there on, `act` is among the last acts.

        They have five seconds in all, side by side: one on a file system that hangs keeps no other from its own.
        """
        self._hooks.append(act)
        yield
        self._hooks.remove(act)

    def exit_now(self, exit_reason: ExitReason) -> NoReturn:
        """Ends the process. Its exit code is the reason's."""
        self._exit(exit_reason, exit_reason.code, told=False)

    def finish(self, code: int, *, at_once: bool) -> int:
        """Ends the main thread's way: returns `code`, or after a failure ends the process, as it does if `at_once`.

        No thread that a library has left behind, such as one of Orbax in the barrier of a save that failed, may keep a
        process from ending, and no shutdown barrier of JAX its peers.
        """
        if not at_once and not self.hurried and code in (ExitCode.FINISHED, ExitCode.STOPPED):
            return code
        self._exit(self.exit_reason, code, told=True)

    def _exit(self, exit_reason: ExitReason | None, code: int, *, told: bool) -> NoReturn:
        """Whatever may hang, a file system or somebody who does not read what we print, has its time and no more."""
        if not self._begun.acquire(blocking=False):
            threading.Event().wait()
        try:
            acting = threading.Thread(target=self._run_hooks, args=(exit_reason, told), daemon=True)
            acting.start()
            acting.join(_HOOKS_SECONDS)
        finally:
            os._exit(int(code))

    def _run_hooks(self, exit_reason: ExitReason | None, told: bool) -> None:
        hooks = self._hooks if exit_reason is not None else []
        acting = [threading.Thread(target=self._try, args=(hook, exit_reason), daemon=True) for hook in hooks]
        for thread in acting:
            thread.start()
        if exit_reason is not None and not told:
            self._say(exit_reason.why if exit_reason.code == ExitCode.STOPPED else f"error: {exit_reason.why}")
        for stream in (sys.stderr, sys.stdout):
            with suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        for thread in acting:
            thread.join()

    def _try(self, hook: ExitHook, exit_reason: ExitReason) -> None:
        try:
            hook(exit_reason)
        except Exception as error:  # the end comes anyway
            self._say(f"note: {type(error).__name__}: {error}")

    def _say(self, text: str) -> None:
        with suppress(OSError, ValueError):
            print(f"jaxmnt: {named(self._label, text)}", file=sys.stderr, flush=True)


def named(label: str, text: str) -> str:
    """Puts the name of a process before a text, unless there is none or the text begins with it."""
    return text if not label or text.startswith(f"{label} ") else f"{label}: {text}"


def code_for_peers(code: ExitCode) -> ExitCode:
    """What the others end with when a process ends with `code`: a wrong config is wrong for all, and so is a host."""
    return code if code in (ExitCode.CONFIG, ExitCode.PREFLIGHT) else ExitCode.PEER


ABANDONED = "start_abandoned"
"""The event, and the kind of reason."""
STOPPED, PEERS = "stopped", "peers"
_A_DAY_SECONDS = 24 * 3600.0
_TELLING_SECONDS = 3.0
_began = time.monotonic()


class AbsentError(PeerError):
    """Processes of this run have not appeared in time. Where they may still come, that is no failure."""


class StoppedError(UserError):
    """A process was asked to stop before the first step."""

    exit_code = ExitCode.STOPPED

    def __init__(self, text: str, asked_by: str | None = None):
        super().__init__(text)
        self.asked_by = asked_by
        """What asked this process; None if another one was asked."""


@dataclass(frozen=True)
class AbandonedStart(ExitReason):
    """The end of such a start."""

    reason: str = STOPPED
    """Or that peers never appeared."""
    asked_by: str | None = None
    waited_seconds: float = 0.0


def exit_reason_of(error: UserError) -> AbandonedStart:
    """How a process ends that has met with one of these errors."""
    process, waited = next(iter(error.processes), None), time.monotonic() - _began
    ended = AbandonedStart(ABANDONED, str(error), ExitCode.STOPPED, process, waited_seconds=waited)
    if isinstance(error, StoppedError):
        return replace(ended, reason=STOPPED, asked_by=error.asked_by)
    return replace(ended, reason=PEERS)


def stopped(reason: str, identity: Identity) -> StoppedError:
    """What is said of this process when it was asked to stop."""
    return StoppedError(
        f"{identity.label or 'this process'} was asked to stop before the first step ({reason})", reason
    ).blaming(processes=[identity.process_id])  # fmt: skip


class EarlyExit:
    """Ends this process when it is asked to stop before its first step: at once, from whatever thread, and so that the
    others know."""

    def __init__(self, identity: Identity, exit_handler: ExitHandler):
        self._identity, self._exit_handler = identity, exit_handler
        self.tell: Callable[[AbandonedStart], object] = lambda exit_reason: None
        """Tells the other processes, once they are connected."""
        self.fail: Callable[[str], object] = lambda why: exit_handler.exit_now(
            ExitReason("failed", why, ExitCode.FAILURE, identity.process_id)
        )
        """Ends the process at once, because it was asked a second time, and tells them of a failure."""
        self.reason: str | None = None
        """What has asked this process to stop, if anything has."""
        self._rendezvous_is_over = threading.Event()
        self._rendezvous_is_over.set()
        self._failed = False

    @contextmanager
    def during_rendezvous(self) -> Iterator[None]:
        """Inside is the rendezvous: it looks for the request to stop, and tells the others itself."""
        self._rendezvous_is_over.clear()
        try:
            yield
        except BaseException:
            self._failed = True
            raise
        finally:
            self._rendezvous_is_over.set()

    def now(self, reason: str) -> None:
        """Because of this. Called in a thread, while the main thread may be in anything.

        Does not return, unless the main thread ends the process itself, as it does after a rendezvous that failed.
        """
        self.reason = reason
        self._rendezvous_is_over.wait(_TELLING_SECONDS)
        if self._failed:
            return
        exit_reason = exit_reason_of(stopped(reason, self._identity))
        self.tell(exit_reason)
        self._exit_handler.exit_now(exit_reason)


def refuse_to_wait_for_ever(records: Sequence[dict[str, Any]], error: AbsentError, now: float) -> None:
    """Raises `ConfigError` if a day has gone by, by this process's own events, in which starts only waited in vain."""
    since: float | None = None
    last = now
    for record in records:
        at = record.get("time")
        if not isinstance(at, (int, float)) or at > now:
            continue
        if record.get("kind") == "start":
            since = None
        elif record.get("kind") == ABANDONED and record.get("reason") == PEERS:
            since = at if since is None or at - last > _A_DAY_SECONDS else since  # else that was another attempt
            last = at
    if since is not None and now - since >= _A_DAY_SECONDS >= now - last:
        raise ConfigError(
            f"{error}; since {time.strftime('%Y-%m-%d %H:%M', time.localtime(since))} no start of this run has "
            "connected all of its processes: find out why they do not start, or set fewer processes, then start "
            "it again"
        ).blaming(processes=error.processes)


_SIGNS = (
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

_OF_A_BROKEN_DEVICE = (
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
"""CUDA's names: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html"""


def is_device_error(why: str) -> bool:
    """Whether the words of an error are those of a device or driver, and not of the program that uses it."""
    return any(sign in why for sign in _OF_A_BROKEN_DEVICE)


def is_connection_error(error: BaseException) -> bool:
    """Whether the words of an error are those of a lost connection."""
    return any(sign in str(error) for sign in _SIGNS)


def may_mean_a_lost_peer(error: BaseException) -> bool:
    """Whether it is worth waiting a moment for the name of who is gone."""
    if isinstance(error, PeerError):
        return True
    import jax

    # A dispatch that finds a connection closed raises ValueError with the same words.
    return isinstance(error, jax.errors.JaxRuntimeError) or (
        isinstance(error, ValueError) and is_connection_error(error)
    )
