"""How a process ends at once, from whatever thread, and what it still does: say why, note it, let go of the lock."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

from jaxmnt.errors import ExitCode

_ACTS_SECONDS = 5.0


@dataclass(frozen=True)
class Fate:
    """Why a run ends in this process."""

    kind: str
    """failed (by itself), peer_lost (another process failed or is missing), hang, or interrupted."""
    why: str
    code: int
    process: int | None = None
    """The process at fault, if one is known."""
    host: str | None = None


Act = Callable[[Fate], None]


class Ending:
    """The last acts of this process. Whoever ends it first decides why; the others wait for the end."""

    def __init__(self, label: str = ""):
        self.fate: Fate | None = None
        """Why the main thread is about to end, if it is."""
        self._prefix = f"jaxmnt: {label}: " if label else "jaxmnt: "
        self._acts: list[Act] = []
        self._begun = threading.Lock()

    @contextmanager
    def with_last(self, act: Act) -> Iterator[None]:
        """Inside, and after an exception from there on, `act` is among the last acts.

        They have five seconds in all, side by side: one on a file system that hangs keeps no other from its own.
        """
        self._acts.append(act)
        yield
        self._acts.remove(act)

    def now(self, fate: Fate) -> NoReturn:
        """Ends the process. Its exit code is the fate's."""
        self._begin()
        self._exit(fate, fate.code, told=False)

    def leave(self, code: int, *, at_once: bool) -> int:
        """Ends the main thread's way: returns `code`, or after a failure ends the process, as it does if `at_once`.

        No thread that a library has left behind, such as one of Orbax in the barrier of a save that failed, may keep a
        process from ending, and no shutdown barrier of JAX its peers.
        """
        if not at_once and code in (ExitCode.FINISHED, ExitCode.STOPPED):
            return code
        self._begin()
        self._exit(self.fate, code, told=True)

    def _begin(self) -> None:
        if not self._begun.acquire(blocking=False):
            threading.Event().wait()

    def _exit(self, fate: Fate | None, code: int, *, told: bool) -> NoReturn:
        """Whatever may hang, a file system or somebody who does not read what we print, has its time and no more."""
        try:
            acting = threading.Thread(target=self._act, args=(fate, told), daemon=True)
            acting.start()
            acting.join(_ACTS_SECONDS)
        finally:
            os._exit(int(code))

    def _act(self, fate: Fate | None, told: bool) -> None:
        acting = []
        for act in self._acts if fate is not None else []:
            acting.append(threading.Thread(target=self._try, args=(act, fate), daemon=True))
            acting[-1].start()
        if fate is not None and not told:
            self._say(fate.why if fate.code == ExitCode.STOPPED else f"error: {fate.why}")
        for stream in (sys.stderr, sys.stdout):
            with suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        for thread in acting:
            thread.join()

    def _try(self, act: Act, fate: Fate | None) -> None:
        assert fate is not None
        try:
            act(fate)
        except Exception as error:  # the end comes anyway
            self._say(f"note: {type(error).__name__}: {error}")

    def _say(self, text: str) -> None:
        with suppress(OSError, ValueError):
            print(f"{self._prefix}{text}", file=sys.stderr, flush=True)


def code_for_peers(code: int) -> ExitCode:
    """What the others end with when a process ends with `code`: a wrong config is wrong for all, and so is a host."""
    return ExitCode(code) if code in (ExitCode.CONFIG, ExitCode.PREFLIGHT) else ExitCode.PEER
