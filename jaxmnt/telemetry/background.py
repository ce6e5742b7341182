"""A bounded queue with a consumer thread of its own, so that no run waits for whatever takes its items."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

MOST_WAITING = 10_000
"""Limit of waiting items that are not urgent. Further ones are counted and dropped."""
_LATE_SECONDS = 1.0
"""Age of the oldest waiting item from which urgent items overtake it."""


class _Waiting(NamedTuple):
    item: Any
    urgent: bool
    since: float


class BackgroundQueue:
    """Hands items to `work` in a thread, in order; urgent ones go first once an item has waited for a second.

    An item counts as waiting until `work` asks for the next. The iterator that `work` gets ends after `end`, or when no
    item has arrived for `idle_seconds`. An idle thread lets items gather for `gather_seconds` before it takes them.
    `gap` makes the item that stands for a number of dropped items; it is delivered when no other item waits, and until
    then all further items are dropped. Methods may be called from any thread.
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
        """Starts the thread unless it is running."""
        with self._changed:
            if not self._working:
                thread = threading.Thread(target=lambda: self._work(self._items()), name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads are allowed now; the next call tries again
                    return
                self._thread, self._working, self._ending = thread, True, False

    def put(self, item: Any, *, urgent: bool = False) -> None:
        """Queues an item, or drops it if the queue is full and it is not urgent. Never blocks."""
        with self._changed:
            full = len(self._waiting) - self._urgent >= MOST_WAITING or (self._gap and self._dropped)
            if full and not urgent:
                self._dropped += 1
            else:
                self._add(item, urgent)

    def settle(self, seconds: float, only_urgent: Callable[[], bool]) -> None:
        """Waits until the queue is empty, or until `seconds` have passed since the newest item was put.

        While `only_urgent()` is true, only urgent items are waited for.
        """
        with self._changed:
            while (remaining := self._newest_since(only_urgent()) + seconds - time.monotonic()) > 0:
                self._changed.wait(remaining)

    def end(self) -> None:
        """Ends the iterator of `work` after the items that wait now."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def join(self, seconds: float) -> bool:
        """Waits for the thread for up to `seconds`. Returns True if it has ended."""
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def missing(self) -> tuple[int, int]:
        """Returns how many items wait, and how many were dropped."""
        with self._changed:
            return len(self._waiting), self._dropped

    def _newest_since(self, only_urgent: bool) -> float:
        """Returns when the newest waiting item was put, by `time.monotonic`; -inf if none waits."""
        newest_first = reversed(self._waiting)
        return next((waiting.since for waiting in newest_first if waiting.urgent or not only_urgent), float("-inf"))

    def _add(self, item: Any, urgent: bool) -> None:
        self._waiting.append(_Waiting(item, urgent, time.monotonic()))
        self._urgent += urgent
        if len(self._waiting) == 1:
            self._changed.notify_all()

    # The methods below run in the thread.

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
                # Several items at a time cost the run less than each by itself.
                self._changed.wait_for(lambda: self._ending, self._gather_seconds)
            if not self._waiting:
                self._working = False
                return None
            first = self._waiting[0]
            if self._urgent and time.monotonic() - first.since > _LATE_SECONDS:
                return next(waiting for waiting in self._waiting if waiting.urgent)
            return first
