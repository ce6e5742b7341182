"""Where the numbers of a run go besides metrics.jsonl: TensorBoard, Weights & Biases, Trackio, MLflow, a class of the
user's own. In process 0 only.

Each sink has a thread and a queue of its own. The run hands over a line and goes on; a sink that fails is said once and
left out, one that blocks loses lines when its queue is full.
"""

import importlib
import importlib.util
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxmnt.errors import ConfigError, nearest, remark, summary
from jaxmnt.telemetry.background import BackgroundQueue

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
        ended = [worker.join(max(0.0, deadline - time.monotonic())) for worker in self._workers]
        return all(ended)


class _Worker:
    def __init__(self, name: str, run: SinkRun):
        self._name, self._run = name, run
        self._records = BackgroundQueue(f"sink {name}", self._work, gather_seconds=_GATHER_SECONDS)
        self._records.start()
        self.put, self.end = self._records.put, self._records.end

    def join(self, seconds: float) -> bool:
        """Returns whether the sink has ended, after so many seconds at most; says what it lacks."""
        ended = self._records.join(seconds)
        waiting, dropped = self._records.missing()
        if not ended or dropped:
            remark(f"note: {self._name} lacks up to {waiting + dropped} lines: it took too long to write them")
        return ended

    # In the thread.

    def _work(self, records: Iterator[dict[str, Any]]) -> None:
        sink: Sink | None = None
        try:
            sink = self._make()(self._run)
            for record in records:
                sink.write(record["step"], record["time"], scalars(record))
            sink.close()
        except Exception as error:  # whatever a library raises, the run goes on
            remark(f"WARNING {self._name} gets no more of this run: {summary(error)}")
            with suppress(Exception):  # it has failed already
                if sink is not None:
                    sink.close()
            for _ in records:  # nobody wants the others
                pass

    def _make(self) -> Callable[[SinkRun], Sink]:
        return _import(f"{_OURS}.{_CLASSES[self._name]}" if self._name in _CLASSES else self._name)


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
