"""A bounded queue with its own consumer thread, so that a run never waits for a slow consumer."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

MAX_WAITING = 10_000
"""Maximum number of waiting items that are not urgent. Further ones are counted and dropped."""
_OVERTAKING_AGE_SECONDS = 1.0
"""Age of the oldest waiting item at which urgent items begin to overtake it."""


class _WaitingItem(NamedTuple):
    item: Any
    urgent: bool
    since: float


class BackgroundQueue:
    """Passes items to `work` in a thread, in order. Once an item has waited for a second, urgent items overtake it.

    An item counts as waiting until `work` asks for the next one. The iterator that `work` gets ends after a call of
    `end`, or when no item has arrived for `idle_seconds`. An idle thread lets items gather for `gather_seconds` before
    it takes them. With `gap`, once an item was dropped, all further ones that are not urgent are dropped until no item
    is waiting. Then `gap` makes an item that stands for the number of dropped items, and that item is delivered.
    Methods may be called from any thread.
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
        self._waiting: deque[_WaitingItem] = deque()
        self._num_urgent = self._dropped = 0
        self._working = self._ending = False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    def start(self) -> None:
        """Starts the thread unless it is already running."""
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
            full = len(self._waiting) - self._num_urgent >= MAX_WAITING or (self._gap and self._dropped)
            if full and not urgent:
                self._dropped += 1
            else:
                self._add(item, urgent)

    def settle(self, seconds: float, only_urgent: Callable[[], bool]) -> None:
        """Waits until the queue is empty, or until `seconds` have passed since the newest item was put into it.

        While `only_urgent()` is true, only urgent items are taken into account.
        """
        with self._changed:
            while (remaining := self._newest_put_time(only_urgent()) + seconds - time.monotonic()) > 0:
                self._changed.wait(remaining)

    def end(self) -> None:
        """Ends the iterator that `work` gets after the items that are waiting now."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def join(self, seconds: float) -> bool:
        """Waits for the thread for up to `seconds`. Returns True if it has ended."""
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def waiting_and_dropped(self) -> tuple[int, int]:
        """Returns how many items are waiting, and how many were dropped."""
        with self._changed:
            return len(self._waiting), self._dropped

    def _newest_put_time(self, only_urgent: bool) -> float:
        """Returns the time (of `time.monotonic`) at which the newest waiting item was put; -inf if none is waiting."""
        newest_first = reversed(self._waiting)
        return next((waiting.since for waiting in newest_first if waiting.urgent or not only_urgent), float("-inf"))

    def _add(self, item: Any, urgent: bool) -> None:
        self._waiting.append(_WaitingItem(item, urgent, time.monotonic()))
        self._num_urgent += urgent
        if len(self._waiting) == 1:
            self._changed.notify_all()

    # The methods below run in the thread.

    def _items(self) -> Iterator[Any]:
        while (waiting := self._next()) is not None:
            yield waiting.item
            with self._changed:
                self._waiting.remove(waiting)
                self._num_urgent -= waiting.urgent
                if self._dropped and self._gap and not self._waiting:
                    lost, self._dropped = self._dropped, 0
                    self._add(self._gap(lost), urgent=False)
                self._changed.notify_all()

    def _next(self) -> _WaitingItem | None:
        with self._changed:
            if not self._waiting and not self._ending:
                self._changed.wait_for(lambda: self._waiting or self._ending, self._idle_seconds)
                # Taking several items at a time costs the run less than taking each by itself.
                self._changed.wait_for(lambda: self._ending, self._gather_seconds)
            if not self._waiting:
                self._working = False
                return None
            first = self._waiting[0]
            if self._num_urgent and time.monotonic() - first.since > _OVERTAKING_AGE_SECONDS:
                return next(waiting for waiting in self._waiting if waiting.urgent)
            return first
