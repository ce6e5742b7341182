"""How the processes of a run agree: barrier, broadcast, gather, a decision of process 0, a vote in the background.

By the key-value store of JAX's coordination service, which is in process 0. Each call has a name, and all processes
make the same calls in the same order.
"""

import contextlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import PeerError, UserError, error_of
from jaxmnt.strict_json import json_text

BARRIER_SECONDS = 300.0
_LATE = "timed out task names"
"""What JAX's account of a barrier says before those who did not come."""
_HEARING_SECONDS = 10.0
_GOING_LAST_SECONDS = 1.0
_POLL_SECONDS = 1.0

_waits = threading.local()
_uses: Counter[str] = Counter()
_uses_lock = threading.Lock()


def waited_seconds() -> float:
    """How long this thread has waited for other processes so far, in this module."""
    return getattr(_waits, "seconds", 0.0)


@contextlib.contextmanager
def _waiting() -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        _waits.seconds = waited_seconds() + time.perf_counter() - started


def barrier(name: str, identity: Identity, seconds: float = BARRIER_SECONDS) -> None:
    """Waits until every process has reached the barrier of this name.

    Raises `PeerError`, naming those who are late, when time is up.
    """
    if identity.alone:
        return
    try:
        with _waiting():
            _client().wait_at_barrier(name, int(seconds * 1000))
    except Exception as error:
        late = sorted({int(number) for number in re.findall(r"task:(\d+)", str(error).partition(_LATE)[2])})
        who = f"process{'es' if len(late) > 1 else ''} {', '.join(map(str, late))}" if late else "some process"
        raise PeerError(f"{who} did not reach '{name}' within {seconds:g} s: {str(error).splitlines()[0]}") from error


def barrier_or_raise(
    name: str, trouble: UserError | None, identity: Identity, seconds: float = BARRIER_SECONDS
) -> None:
    """A barrier at which every process learns what went wrong in any. `name` must be new in this run of the processes.

    Raises `trouble`; in the processes that have none, a `UserError` with the words and exit code of the first that has.
    """
    if identity.alone:
        if trouble is not None:
            raise trouble
        return
    client, key = _client(), f"jaxmnt/trouble/{name}"
    if trouble is not None:
        client.key_value_set(
            f"{key}/{identity.process_id:06d}", f"{int(trouble.exit_code)} {identity.label}: {trouble}"
        )
    barrier(name, identity, seconds)
    try:
        said = [text for _, text in sorted(client.key_value_dir_get(key))]
    except Exception as error:
        raise PeerError(f"process 0 is gone at barrier '{name}': {error}") from error
    if not said:
        return
    # Everyone is about to leave. Process 0 serves the others until they have heard, and goes last.
    with contextlib.suppress(PeerError):
        barrier(f"{name}: heard", identity, _HEARING_SECONDS)
    if identity.process_id == 0:
        time.sleep(_GOING_LAST_SECONDS)
    if trouble is not None:
        raise trouble
    code, _, text = said[0].partition(" ")
    raise error_of(int(code), text)


def broadcast(name: str, value: str | None, identity: Identity, seconds: float = BARRIER_SECONDS) -> str:
    """Process 0 gives a text, every process gets it."""
    if identity.alone:
        assert value is not None
        return value
    client, key = _client(), f"jaxmnt/broadcast/{_unique(name)}"
    if identity.process_id == 0:
        assert value is not None
        client.key_value_set(key, value)
        return value
    try:
        with _waiting():
            return str(client.blocking_key_value_get(key, int(seconds * 1000)))
    except Exception as error:
        raise PeerError(f"process 0 did not answer at '{name}' within {seconds:g} s: {error}") from error


def gather(name: str, value: Any, identity: Identity, seconds: float = BARRIER_SECONDS) -> list[Any] | None:
    """Every process gives a value that JSON can hold; process 0 gets all, in order of processes, the others None.

    Nothing of it stays behind. Raises `PeerError` naming the process that process 0 has waited for in vain.
    """
    text = json_text(value)
    if identity.alone:
        return [json.loads(text)]
    client, key = _client(), f"jaxmnt/gather/{_unique(name)}"
    if identity.process_id != 0:
        client.key_value_set(f"{key}/{identity.process_id:06d}", text)
        return None
    texts, deadline = [text], time.monotonic() + seconds
    for process in range(1, identity.processes):
        left = max(1, int((deadline - time.monotonic()) * 1000))
        try:
            with _waiting():
                texts.append(client.blocking_key_value_get(f"{key}/{process:06d}", left))
        except Exception as error:
            raise PeerError(f"process {process} did not answer at '{name}' within {seconds:g} s: {error}") from error
    client.key_value_delete(f"{key}/")
    return [json.loads(text) for text in texts]


def agree(
    name: str,
    value: Any,
    decide: Callable[[list[Any]], str],
    identity: Identity,
    seconds: float = BARRIER_SECONDS,
) -> str:
    """Every process gives a value, process 0 decides by all of them, and every process gets the decision."""
    values = gather(name, value, identity, seconds)
    return broadcast(f"{name}: decided", None if values is None else decide(values), identity, seconds)


def all_gather(name: str, value: Any, identity: Identity) -> list[Any]:
    """Every process gives a value, and gets those of all, in order of processes."""
    values: list[Any] = json.loads(agree(name, value, json_text, identity))
    return values


class Vote:
    """One round. All processes make it, under the same name, in the same order."""

    def __init__(self, name: str, identity: Identity, seconds: float):
        """Process 0 waits `seconds` for answers, the others for the conclusion."""
        self._name = name
        self._identity = identity
        self._seconds = seconds
        self._key = f"jaxmnt/vote/{_unique(name)}"
        self._answers: dict[int, str] = {}
        self._failed: str | None = None

    def answer(self, text: str) -> None:
        if self._identity.process_id == 0:
            self._answers[0] = text
        else:
            _client().key_value_set(f"{self._key}/answer/{self._identity.process_id:06d}", text)

    def fail(self, text: str) -> None:
        """Says that the round has failed here. The first that process 0 hears of is the reason for all."""
        text = f"{self._identity.label}: {text}" if self._identity.label else text
        if self._identity.process_id == 0:
            self._failed = text
        else:
            _client().key_value_set(f"{self._key}/failed", text, allow_overwrite=True)

    def over(self) -> bool:
        """Whether the round is known to have failed, here or elsewhere."""
        if self._identity.alone:
            return self._failed is not None
        key = "failed" if self._identity.process_id == 0 else "conclusion"
        return self._failed is not None or _value_if_set(f"{self._key}/{key}") is not None

    def conclude(self, judge: Callable[[list[str]], str]) -> str | None:
        """Waits for the answers, lets `judge` (on process 0, returning what failed or nothing) act on them.

        Returns in every process why the round failed, or None. Raises `PeerError` if a process does not answer.
        """
        if self._identity.process_id == 0:
            reason = self._collect() or judge([text for _, text in sorted(self._answers.items())])
            if not self._identity.alone:
                _client().key_value_set(f"{self._key}/conclusion", reason)
                _client().key_value_delete(f"{self._key}/answer/")
        else:
            try:
                reason = _client().blocking_key_value_get(f"{self._key}/conclusion", int(self._seconds * 1000))
            except Exception as error:
                raise self._missing("process 0", error) from error
        return reason or None

    def _collect(self) -> str:
        """Why the round failed, or nothing once all have answered."""
        for process in range(1, self._identity.processes):
            deadline = time.monotonic() + self._seconds
            while process not in self._answers and not self._failure():
                try:
                    key = f"{self._key}/answer/{process:06d}"
                    self._answers[process] = _client().blocking_key_value_get(key, int(_POLL_SECONDS * 1000))
                except Exception as error:
                    if "DEADLINE_EXCEEDED" not in str(error) or time.monotonic() > deadline:
                        raise self._missing(f"process {process}", error) from error
        return self._failure()

    def _failure(self) -> str:
        if self._failed is None and not self._identity.alone:
            self._failed = _value_if_set(f"{self._key}/failed")
        return self._failed or ""

    def _missing(self, who: str, error: Exception) -> PeerError:
        return PeerError(f"{who} did not answer in '{self._name}' within {self._seconds:g} s: {error}")


def _value_if_set(key: str) -> str | None:
    """The value of a key, if it is set."""
    try:
        return str(_client().key_value_try_get(key))
    except Exception as error:
        if "NOT_FOUND" in str(error):
            return None
        raise PeerError(f"process 0 is gone: {error}") from error


def _unique(name: str) -> str:
    """The name with how often this process has used it: keys cannot be set twice. All processes take the same turns."""
    with _uses_lock:
        _uses[name] += 1
        return f"{name} {_uses[name]}"


def _client() -> Any:
    """JAX's coordination service, for which there is no public interface yet."""
    from jax._src import distributed

    return distributed.global_state.client
