"""A bounded queue with a thread of its own, so that no run waits for whatever takes its items."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

MOST_WAITING = 10_000
"""Items that are not urgent. Further ones are counted and not kept."""
_LATE_SECONDS = 1.0


class _Waiting(NamedTuple):
    item: Any
    urgent: bool
    since: float


class BackgroundQueue:
    """Hands items to `work` in a thread, in order; urgent ones go first once an item has waited for a second.

    An item waits until `work` asks for the next. Items end after `end`, or when none has come for `idle_seconds`.
    A thread without work lets items gather for `gather_seconds`. `gap` makes the item that stands for a number of
    items that were not kept; it comes when no other waits, and until then no more are kept. From any thread.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Iterator[Any]], None],
        *,
        idle_seconds: float | None = None,
        gather_seconds: float = 0.0,
        gap: Callable[[int], Any] | None = None,
    ):
        self._name, self._work, self._gap = name, work, gap
        self._idle_seconds, self._gather_seconds = idle_seconds, gather_seconds
        self._waiting: deque[_Waiting] = deque()
        self._urgent = self._dropped = 0
        self._working = self._ending = False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    def start(self) -> None:
        """Starts the thread unless it is at work."""
        with self._changed:
            if not self._working:
                thread = threading.Thread(target=lambda: self._work(self._items()), name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads are allowed now; the next call tries again
                    return
                self._thread, self._working, self._ending = thread, True, False

    def put(self, item: Any, *, urgent: bool = False) -> None:
        """Returns at once."""
        with self._changed:
            full = len(self._waiting) - self._urgent >= MOST_WAITING or (self._gap and self._dropped)
            if full and not urgent:
                self._dropped += 1
            else:
                self._add(item, urgent)

    def settle(self, seconds: float, only_urgent: Callable[[], bool]) -> None:
        """Returns when no item waits, or so long after the newest was put; at times only urgent ones are waited for."""
        with self._changed:
            while (left := self._newest(only_urgent()) + seconds - time.monotonic()) > 0:
                self._changed.wait(left)

    def end(self) -> None:
        """Ends the items after those that wait."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def join(self, seconds: float) -> bool:
        """Returns whether the thread has ended, after so many seconds at most."""
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def missing(self) -> tuple[int, int]:
        """Returns how many items wait, and how many were not kept."""
        with self._changed:
            return len(self._waiting), self._dropped

    def _newest(self, only_urgent: bool) -> float:
        return next((one.since for one in reversed(self._waiting) if one.urgent or not only_urgent), float("-inf"))

    def _add(self, item: Any, urgent: bool) -> None:
        self._waiting.append(_Waiting(item, urgent, time.monotonic()))
        self._urgent += urgent
        if len(self._waiting) == 1:
            self._changed.notify_all()

    # In the thread.

    def _items(self) -> Iterator[Any]:
        while (waiting := self._next()) is not None:
            yield waiting.item
            with self._changed:
                self._waiting.remove(waiting)
                self._urgent -= waiting.urgent
                if self._dropped and self._gap and not self._waiting:
                    lost, self._dropped = self._dropped, 0
                    self._add(self._gap(lost), urgent=False)
                self._changed.notify_all()

    def _next(self) -> _Waiting | None:
        with self._changed:
            if not self._waiting and not self._ending:
                self._changed.wait_for(lambda: self._waiting or self._ending, self._idle_seconds)
                # More at a time cost the run less than each by itself.
                self._changed.wait_for(lambda: self._ending, self._gather_seconds)
            if not self._waiting:
                self._working = False
                return None
            first = self._waiting[0]
            if self._urgent and time.monotonic() - first.since > _LATE_SECONDS:
                return next(one for one in self._waiting if one.urgent)
            return first
