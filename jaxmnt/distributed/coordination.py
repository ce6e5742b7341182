"""Lets the processes of a run agree: by a barrier, a broadcast, a gather, a decision of process 0, or a vote.

Uses the key-value store of JAX's coordination service, which process 0 hosts. Each call has a name, and all processes
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

BARRIER_TIMEOUT_SECONDS = 300.0
_LATE_TASKS_PREFIX = "timed out task names"
"""Text in JAX's error at a barrier, after which the tasks that did not arrive are listed."""
_ACKNOWLEDGE_TIMEOUT_SECONDS = 10.0
_EXIT_DELAY_SECONDS = 1.0
_POLL_SECONDS = 1.0

_waits = threading.local()
_name_uses: Counter[str] = Counter()
_name_uses_lock = threading.Lock()


def waited_seconds() -> float:
    """Returns for how many seconds this thread has waited for other processes in the functions of this module so
    far."""
    return getattr(_waits, "seconds", 0.0)


@contextlib.contextmanager
def _count_waiting() -> Iterator[None]:
    """Adds the time spent within this context to `waited_seconds`."""
    started = time.perf_counter()
    try:
        yield
    finally:
        _waits.seconds = waited_seconds() + time.perf_counter() - started


def barrier(name: str, identity: Identity, seconds: float = BARRIER_TIMEOUT_SECONDS) -> None:
    """Waits until every process has reached the barrier of this name.

    Raises `PeerError`, naming the late processes, if that takes longer than `seconds`.
    """
    if identity.alone:
        return
    try:
        with _count_waiting():
            _client().wait_at_barrier(name, int(seconds * 1000))
    except Exception as error:
        late_tasks = str(error).partition(_LATE_TASKS_PREFIX)[2]
        late = sorted({int(number) for number in re.findall(r"task:(\d+)", late_tasks)})
        plural = "es" if len(late) > 1 else ""
        who = f"process{plural} {', '.join(map(str, late))}" if late else "some process"
        raise PeerError(f"{who} did not reach '{name}' within {seconds:g} s: {str(error).splitlines()[0]}") from error


def barrier_or_raise(
    name: str, trouble: UserError | None, identity: Identity, seconds: float = BARRIER_TIMEOUT_SECONDS
) -> None:
    """Waits at a barrier at which every process learns if one of them has trouble. `name` must not have been used
    before.

    Raises `trouble` if this process has any. If only others have, raises a `UserError` with the message and exit code
    of the first of them.
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
        troubles = [text for _, text in sorted(client.key_value_dir_get(key))]
    except Exception as error:
        raise PeerError(f"process 0 is gone at barrier '{name}': {error}") from error
    if not troubles:
        return
    # All processes are about to exit. Process 0 hosts the store, so it exits last, after the others have read it.
    with contextlib.suppress(PeerError):
        barrier(f"{name}: heard", identity, _ACKNOWLEDGE_TIMEOUT_SECONDS)
    if identity.process_id == 0:
        time.sleep(_EXIT_DELAY_SECONDS)
    if trouble is not None:
        raise trouble
    code, _, text = troubles[0].partition(" ")
    raise error_of(int(code), text)


def broadcast(name: str, value: str | None, identity: Identity, seconds: float = BARRIER_TIMEOUT_SECONDS) -> str:
    """Sends a text from process 0 to every process, and returns it in all of them."""
    if identity.alone:
        assert value is not None
        return value
    client, key = _client(), f"jaxmnt/broadcast/{_unique(name)}"
    if identity.process_id == 0:
        assert value is not None
        client.key_value_set(key, value)
        return value
    try:
        with _count_waiting():
            return str(client.blocking_key_value_get(key, int(seconds * 1000)))
    except Exception as error:
        raise PeerError(f"process 0 did not answer at '{name}' within {seconds:g} s: {error}") from error


def gather(name: str, value: Any, identity: Identity, seconds: float = BARRIER_TIMEOUT_SECONDS) -> list[Any] | None:
    """Collects a JSON value from every process. Process 0 gets all values, in the order of the processes; others get
    None.

    Leaves no keys in the store. Raises `PeerError`, naming the process that did not answer process 0.
    """
    text = json_text(value)
    if identity.alone:
        return [json.loads(text)]
    client, key = _client(), f"jaxmnt/gather/{_unique(name)}"
    if identity.process_id != 0:
        client.key_value_set(f"{key}/{identity.process_id:06d}", text)
        return None
    texts = [text]
    deadline = time.monotonic() + seconds
    for process in range(1, identity.processes):
        remaining_ms = max(1, int((deadline - time.monotonic()) * 1000))
        try:
            with _count_waiting():
                texts.append(client.blocking_key_value_get(f"{key}/{process:06d}", remaining_ms))
        except Exception as error:
            raise PeerError(f"process {process} did not answer at '{name}' within {seconds:g} s: {error}") from error
    client.key_value_delete(f"{key}/")
    return [json.loads(text) for text in texts]


def agree(
    name: str,
    value: Any,
    decide: Callable[[list[Any]], str],
    identity: Identity,
    seconds: float = BARRIER_TIMEOUT_SECONDS,
) -> str:
    """Collects a value from every process, and returns what `decide` returns for all values in process 0."""
    values = gather(name, value, identity, seconds)
    return broadcast(f"{name}: decided", None if values is None else decide(values), identity, seconds)


class Vote:
    """One round of voting. All processes create their votes with the same names in the same order."""

    def __init__(self, name: str, identity: Identity, seconds: float):
        """Process 0 waits up to `seconds` for each answer, and the others wait up to `seconds` for the conclusion."""
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
        """Reports that the round has failed here. The first failure that process 0 sees is the reason for all."""
        text = f"{self._identity.label}: {text}" if self._identity.label else text
        if self._identity.process_id == 0:
            self._failed = text
        else:
            _client().key_value_set(f"{self._key}/failed", text, allow_overwrite=True)

    def has_failed(self) -> bool:
        """Returns True if the round is known to have failed, here or in another process."""
        if self._identity.alone:
            return self._failed is not None
        key = "failed" if self._identity.process_id == 0 else "conclusion"
        return self._failed is not None or _value_if_set(f"{self._key}/{key}") is not None

    def conclude(self, judge: Callable[[list[str]], str]) -> str | None:
        """Waits for the conclusion. In process 0, waits for all answers; `judge` acts on them, and returns why the
        round failed, or an empty text.

        Returns the reason for the failure in every process, or None if there was none. Raises `PeerError` if a process
        does not answer.
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
                raise self._no_answer_error("process 0", error) from error
        return reason or None

    def _collect(self) -> str:
        """Waits for all answers in process 0. Returns why the round failed, or an empty string."""
        for process in range(1, self._identity.processes):
            deadline = time.monotonic() + self._seconds
            while process not in self._answers and not self._failure():
                try:
                    key = f"{self._key}/answer/{process:06d}"
                    self._answers[process] = _client().blocking_key_value_get(key, int(_POLL_SECONDS * 1000))
                except Exception as error:
                    if "DEADLINE_EXCEEDED" not in str(error) or time.monotonic() > deadline:
                        raise self._no_answer_error(f"process {process}", error) from error
        return self._failure()

    def _failure(self) -> str:
        if self._failed is None and not self._identity.alone:
            self._failed = _value_if_set(f"{self._key}/failed")
        return self._failed or ""

    def _no_answer_error(self, who: str, error: Exception) -> PeerError:
        return PeerError(f"{who} did not answer in '{self._name}' within {self._seconds:g} s: {error}")


def _value_if_set(key: str) -> str | None:
    """Returns the value of a key, or None if it is not set."""
    try:
        return str(_client().key_value_try_get(key))
    except Exception as error:
        if "NOT_FOUND" in str(error):
            return None
        raise PeerError(f"process 0 is gone: {error}") from error


def _unique(name: str) -> str:
    """Returns the name with the number of its uses in this process, since a key cannot be set twice.

    The number is the same in all processes, because they all make the same calls in the same order.
    """
    with _name_uses_lock:
        _name_uses[name] += 1
        return f"{name} {_name_uses[name]}"


def _client() -> Any:
    """Returns the client of JAX's coordination service, which has no public interface yet."""
    from jax._src import distributed

    return distributed.global_state.client
