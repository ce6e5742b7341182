"""Rounds: each process gives an answer, process 0 draws the conclusion, and any failure ends the round at once.

For work in the background, where a process that waits for the others must hear that one of them has failed.
"""

import time
from collections.abc import Callable

from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.process_group import coordination, turn
from jaxmnt.errors import PeerError

_GLANCE_SECONDS = 1.0


class Round:
    """One round. All processes make it, under the same name, in the same order."""

    def __init__(self, name: str, identity: Identity, seconds: float):
        """Process 0 waits `seconds` for answers, the others for the conclusion."""
        self._name = name
        self._identity = identity
        self._seconds = seconds
        self._key = f"jaxmnt/round/{turn(name)}"
        self._answers: dict[int, str] = {}
        self._failed: str | None = None

    def answer(self, text: str) -> None:
        if self._identity.process_id == 0:
            self._answers[0] = text
        else:
            coordination().key_value_set(f"{self._key}/answer/{self._identity.process_id:06d}", text)

    def fail(self, text: str) -> None:
        """Says that the round has failed here. The first that process 0 hears of is the reason for all."""
        text = f"{self._identity.label}: {text}" if self._identity.label else text
        if self._identity.process_id == 0:
            self._failed = text
        else:
            coordination().key_value_set(f"{self._key}/failed", text, allow_overwrite=True)

    def over(self) -> bool:
        """Whether the round is known to have failed, here or elsewhere."""
        if self._identity.alone:
            return self._failed is not None
        key = "failed" if self._identity.process_id == 0 else "conclusion"
        return self._failed is not None or _glance(f"{self._key}/{key}") is not None

    def conclude(self, judge: Callable[[list[str]], str]) -> str | None:
        """Waits for the answers, lets `judge` (on process 0, returning what failed or nothing) act on them.

        Returns in every process why the round failed, or None. Raises `PeerError` if a process does not answer.
        """
        if self._identity.process_id == 0:
            reason = self._collect() or judge([text for _, text in sorted(self._answers.items())])
            if not self._identity.alone:
                coordination().key_value_set(f"{self._key}/conclusion", reason)
                coordination().key_value_delete(f"{self._key}/answer/")
        else:
            reason = self._wait(f"{self._key}/conclusion", "process 0", self._seconds)
        return reason or None

    def _collect(self) -> str:
        """Why the round failed, or nothing once all have answered."""
        for process in range(1, self._identity.processes):
            deadline = time.monotonic() + self._seconds
            while process not in self._answers and not self._failure():
                try:
                    key = f"{self._key}/answer/{process:06d}"
                    text = coordination().blocking_key_value_get(key, int(_GLANCE_SECONDS * 1000))
                    self._answers[process] = str(text)
                except Exception as error:
                    if "DEADLINE_EXCEEDED" not in str(error) or time.monotonic() > deadline:
                        raise self._missing(f"process {process}", error) from error
        return self._failure()

    def _failure(self) -> str:
        if self._failed is None and not self._identity.alone:
            self._failed = _glance(f"{self._key}/failed")
        return self._failed or ""

    def _wait(self, key: str, who: str, seconds: float) -> str:
        try:
            return str(coordination().blocking_key_value_get(key, int(seconds * 1000)))
        except Exception as error:
            raise self._missing(who, error) from error

    def _missing(self, who: str, error: Exception) -> PeerError:
        return PeerError(f"{who} did not answer in '{self._name}' within {self._seconds:g} s: {error}")


def _glance(key: str) -> str | None:
    """The value of a key, if it is set."""
    try:
        return str(coordination().key_value_try_get(key))
    except Exception as error:
        if "NOT_FOUND" in str(error):
            return None
        raise PeerError(f"process 0 is gone: {error}") from error
