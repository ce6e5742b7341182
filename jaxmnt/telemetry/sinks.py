"""Where the numbers of a run go besides metrics.jsonl: TensorBoard, Weights & Biases, Trackio, MLflow, a class of the
user's own. In process 0 only.

Each sink has a thread and a queue of its own. The run hands over a line and goes on; a sink that fails is said once and
left out, one that blocks loses lines when its queue is full.
"""

import importlib
import importlib.util
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxmnt.errors import ConfigError, nearest, remark, summary

_MOST_WAITING = 10_000
"""Lines for one sink. Of more, the newest are dropped, and said."""
_GATHER_SECONDS = 1.0
"""For which lines are gathered before a sink gets them."""
_CLOSE_SECONDS = 15.0
"""For all sinks together to write what they have when the run ends."""

_LEFT_OUT = frozenset({"kind", "time", "attempt", "step", "batch_digest"})
_PERFORMANCE = frozenset({
    "tokens_per_second", "padded_tokens_per_second", "step_seconds", "data_wait_seconds", "mfu", "hfu", "seconds",
})  # fmt: skip


class SinkRun(NamedTuple):
    """What a sink is told of the run when it is made."""

    id: str
    """The same after a restart."""
    directory: Path
    config: dict[str, Any]
    project: str
    """`telemetry.project`"""
    step: int
    """After which the run goes on."""
    attempt: int


class Sink(Protocol):
    """What a class that is named by its dotted path has to have. All is called from one thread, which is not the
    run's."""

    def __init__(self, run: SinkRun): ...

    def write(self, step: int, time: float, values: dict[str, float]) -> None:
        """Numbers of a step by name, such as train/loss; `time` in unix seconds."""

    def close(self) -> None:
        """The run ends."""


_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}
"""Sinks by name, and the package that each needs."""
_WITH_THREADS = frozenset({*_PACKAGES.values(), "tensorboardX", "torch", "gradio_client"})
_OURS = "jaxmnt.telemetry.sink_adapters"
_CLASSES = {"tensorboard": "TensorBoard", "wandb": "WeightsAndBiases", "trackio": "Trackio", "mlflow": "MLflow"}


def wanted_sinks(names: Sequence[str] | None) -> list[str]:
    """The sinks of a config: None is TensorBoard where it is installed.

    Raises `ConfigError` for one that there is not.
    """
    if names is None:
        return ["tensorboard"] if _is_installed("tensorboard") else []
    for name in names:
        if name in _PACKAGES:
            if not _is_installed(_PACKAGES[name]):
                raise ConfigError(f"telemetry.sinks: {name} needs a package: pip install 'jaxmnt[{name}]'")
        elif "." in name:
            _import(name)
        else:
            raise ConfigError(
                f"telemetry.sinks: there is no sink {name!r}; {nearest(name, sorted(_PACKAGES))}, or give the dotted "
                "path of a class of your own"
            )
    return list(names)


def packages_of(names: Sequence[str]) -> frozenset[str]:
    """Packages in whose threads an exception is a matter of sinks."""
    return _WITH_THREADS | {name.partition(".")[0] for name in names if "." in name} if names else frozenset()


def _is_installed(package: str) -> bool:
    """Returns whether a package can be imported. A folder of its name that holds no package, such as the runs that
    wandb keeps in the working directory, has no file that would be run."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _import(path: str) -> Callable[[SinkRun], Sink]:
    """The class that a dotted path names. Raises `ConfigError` if there is none."""
    module, _, name = path.rpartition(".")
    try:
        found: Callable[[SinkRun], Sink] = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(f"telemetry.sinks: {path} cannot be imported: {error}; correct the path") from error
    except AttributeError:
        raise ConfigError(f"telemetry.sinks: {module} has no {name}; correct the path") from None
    except Exception as error:  # of the user's module
        raise ConfigError(f"telemetry.sinks: {path} cannot be imported: {summary(error)}; correct it") from error
    missing = [method for method in ("write", "close") if not callable(getattr(found, method, None))]
    if missing:
        raise ConfigError(f"telemetry.sinks: {path} must be a class with the methods write and close")
    return found


class Sinks:
    """Hands lines over to all sinks of a run. From any thread."""

    def __init__(self, names: Sequence[str], run: SinkRun):
        self._workers = [_Worker(name, run) for name in names]

    def put(self, record: dict[str, Any]) -> None:
        """A line of metrics.jsonl. Returns at once."""
        for worker in self._workers:
            worker.put(record)

    def close(self, *, patient: bool = True) -> bool:
        """Returns when all sinks have written what they have, or after some seconds; if it is not `patient`, one.

        Whether all have ended.
        """
        deadline = time.monotonic() + (_CLOSE_SECONDS if patient else 1.0)
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        return not any(worker.alive for worker in self._workers)


class _Worker:
    def __init__(self, name: str, run: SinkRun):
        self._name, self._run = name, run
        self._waiting: deque[dict[str, Any]] = deque()
        self._dropped = 0
        self._ending = self._failed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)
        self._thread.start()

    def put(self, record: dict[str, Any]) -> None:
        with self._changed:
            if self._failed:
                return
            if len(self._waiting) < _MOST_WAITING:
                self._waiting.append(record)
            else:
                self._dropped += 1
            if len(self._waiting) == 1:
                self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        with self._changed:
            left = len(self._waiting) + self._dropped
            if self._thread.is_alive() or self._dropped:
                remark(f"note: {self._name} lacks up to {left} lines: it took too long to write them")

    # In the thread.

    def _work(self) -> None:
        sink: Sink | None = None
        try:
            sink = self._make()(self._run)
            while (record := self._next()) is not None:
                sink.write(record["step"], record["time"], scalars(record))
                self._written()
            sink.close()
        except Exception as error:  # whatever a library raises, the run goes on
            with self._changed:
                self._failed = True
                self._waiting.clear()
            remark(f"WARNING {self._name} gets no more of this run: {summary(error)}")
            with suppress(Exception):  # it has failed already
                if sink is not None:
                    sink.close()

    def _make(self) -> Callable[[SinkRun], Sink]:
        return _import(f"{_OURS}.{_CLASSES[self._name]}" if self._name in _CLASSES else self._name)

    def _next(self) -> dict[str, Any] | None:
        with self._changed:
            if not self._waiting and not self._ending:
                self._changed.wait_for(lambda: self._waiting or self._ending)
                # More at a time cost the run less than each by itself.
                self._changed.wait_for(lambda: self._ending, _GATHER_SECONDS)
            return self._waiting[0] if self._waiting else None

    def _written(self) -> None:
        with self._changed:
            self._waiting.popleft()


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl, by names such as train/loss, performance/mfu, eval/SOURCE/loss."""
    found: dict[str, float] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                add(f"{name}/{key}", item)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[re.sub(r"[^\w./ -]", "_", name)] = float(value)

    kind = record["kind"]
    for field, value in record.items():
        if field in _LEFT_OUT:
            continue
        if field == "sources":  # of an evaluation
            add(kind, value)
        elif field in ("model", "epochs"):
            add(field, value)
        else:
            add(f"performance/{field}" if kind == "train" and field in _PERFORMANCE else f"{kind}/{field}", value)
    return found
