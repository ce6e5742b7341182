"""Sinks that receive the numbers of a run in addition to metrics.jsonl: TensorBoard, Weights & Biases, Trackio, MLflow,
or a class of the user's own. They exist only in process 0.

Each sink has its own thread and queue, so a run never waits for a sink. A sink that fails is reported once and then
dropped. A sink that blocks loses lines when its queue is full.
"""

import importlib
import importlib.util
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxmnt.errors import ConfigError, how_to_install, remark, suggest, summary
from jaxmnt.telemetry.background import BackgroundQueue

_GATHER_SECONDS = 1.0
"""Time for which lines gather before a sink gets them."""
_CLOSE_TIMEOUT_SECONDS = 15.0
"""Time for all sinks together to write their pending lines when the run ends."""

_OMITTED_FIELDS = frozenset({"kind", "time", "attempt", "step", "batch_digest"})
_PERFORMANCE_FIELDS = frozenset({
    "tokens_per_second", "padded_tokens_per_second", "step_seconds", "data_wait_seconds", "mfu", "hfu", "seconds",
})  # fmt: skip


class SinkRun(NamedTuple):
    """Properties of the run, with which a sink is constructed."""

    id: str
    """Identifier of the run, which stays the same after a restart."""
    directory: Path
    config: dict[str, Any]
    project: str
    """Project name, from `telemetry.project`."""
    step: int
    """Step after which the run starts or resumes."""
    attempt: int


class Sink(Protocol):
    """Interface of a sink class that the config names by its dotted path. All methods are called from one thread, which
    is not the main thread of the run."""

    def __init__(self, run: SinkRun): ...

    def write(self, step: int, time: float, values: dict[str, float]) -> None:
        """Writes the numbers of a step, by names such as train/loss; `time` is in Unix seconds."""

    def close(self) -> None:
        """Called once, when the run ends."""


_ADAPTERS_MODULE = "jaxmnt.telemetry.sink_adapters"
_CLASSES = {
    "tensorboard": "TensorBoard",
    "wandb": "WeightsAndBiases",
    "trackio": "Trackio",
    "mlflow": "MLflow",
}
"""The class of each built-in sink, by the sink's name, which is also the name of the package that the sink needs."""
_PACKAGES_WITH_THREADS = frozenset({*_CLASSES, "tensorboardX", "torch", "gradio_client"})


def resolve_sinks(names: Sequence[str] | None) -> list[str]:
    """Returns the names of a config's sinks. None stands for TensorBoard if it is installed, or else for no sink.

    Raises `ConfigError` for a sink that does not exist or is not installed.
    """
    if names is None:
        return ["tensorboard"] if _is_installed("tensorboard") else []
    for name in names:
        if name in _CLASSES:
            if not _is_installed(name):
                raise ConfigError(f"telemetry.sinks: {name} needs a package; {how_to_install(name)}")
        elif "." in name:
            _import_sink(name)
        else:
            raise ConfigError(
                f"telemetry.sinks: unknown sink {name!r}; {suggest(name, sorted(_CLASSES))}, or give the dotted path "
                "of a class of your own"
            )
    return list(names)


def packages_of(names: Sequence[str]) -> frozenset[str]:
    """Returns the packages whose threads belong to sinks, so that an exception in one does not end the run."""
    return _PACKAGES_WITH_THREADS | {name.partition(".")[0] for name in names} if names else frozenset()


def _is_installed(package: str) -> bool:
    """Returns True if a package can be imported.

    A plain folder of that name, such as the one where wandb keeps runs in the working directory, is a namespace package
    without an origin and does not count.
    """
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _import_sink(path: str) -> Callable[[SinkRun], Sink]:
    """Returns the class at a dotted path. Raises `ConfigError` if there is none."""
    module, _, name = path.rpartition(".")
    try:
        sink_class: Callable[[SinkRun], Sink] = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(f"telemetry.sinks: {path} cannot be imported: {error}; correct the path") from error
    except AttributeError:
        raise ConfigError(f"telemetry.sinks: {module} has no {name}; correct the path") from None
    except Exception as error:  # the user's module may raise anything
        raise ConfigError(f"telemetry.sinks: {path} cannot be imported: {summary(error)}; correct it") from error
    missing = [method for method in ("write", "close") if not callable(getattr(sink_class, method, None))]
    if missing:
        raise ConfigError(f"telemetry.sinks: {path} must be a class with the methods write and close")
    return sink_class


class Sinks:
    """Passes lines on to all sinks of a run. Methods may be called from any thread."""

    def __init__(self, names: Sequence[str], run: SinkRun):
        # Before 3.11.8, CPython raises SystemError when two threads build syntax trees at once, as the import of wandb
        # does, so packages are imported before threads exist (https://github.com/python/cpython/issues/106905).
        if sys.version_info < (3, 11, 8):
            for name in names:
                with suppress(Exception):  # the sink's thread imports it again, and reports the error
                    importlib.import_module(name if name in _CLASSES else name.rpartition(".")[0])
        self._queues = {
            name: BackgroundQueue(f"sink {name}", partial(_feed, name, run), gather_seconds=_GATHER_SECONDS)
            for name in names
        }
        for queue in self._queues.values():
            queue.start()

    def put(self, record: dict[str, Any]) -> None:
        """Queues a record of metrics.jsonl for all sinks. Never blocks."""
        for queue in self._queues.values():
            queue.put(record)

    def close(self, *, patient: bool = True) -> bool:
        """Waits until all sinks have written their pending lines, for up to 15 seconds, or one second if not `patient`.

        Returns True if all sinks have ended.
        """
        deadline = time.monotonic() + (_CLOSE_TIMEOUT_SECONDS if patient else 1.0)
        all_ended = True
        for queue in self._queues.values():
            queue.end()
        for name, queue in self._queues.items():
            ended = queue.join(max(0.0, deadline - time.monotonic()))
            waiting, dropped = queue.waiting_and_dropped()
            if not ended or dropped:
                remark(f"note: {name} lacks up to {waiting + dropped} lines: it was too slow to write them")
            all_ended &= ended
        return all_ended


def _feed(name: str, run: SinkRun, records: Iterator[dict[str, Any]]) -> None:
    """Constructs a sink, and passes it the records as they arrive. Runs in the sink's thread."""
    sink: Sink | None = None
    try:
        sink = _import_sink(f"{_ADAPTERS_MODULE}.{_CLASSES[name]}" if name in _CLASSES else name)(run)
        for record in records:
            sink.write(record["step"], record["time"], scalars(record))
        sink.close()
    except Exception as error:  # the run continues, whatever a library raises
        remark(f"WARNING {name} gets no more numbers from this run: {summary(error)}")
        with suppress(Exception):  # it has failed already
            if sink is not None:
                sink.close()
        for _ in records:  # discards the rest
            pass


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers in a record of metrics.jsonl, by names such as train/loss, performance/mfu or
    eval/SOURCE/loss."""
    numbers: dict[str, float] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, nested in value.items():
                add(f"{name}/{key}", nested)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[re.sub(r"[^\w./ -]", "_", name)] = float(value)

    kind = record["kind"]
    for field, value in record.items():
        if field in _OMITTED_FIELDS:
            continue
        if field in ("sources", "reported"):  # losses of an evaluation by source, and the loss's own metrics
            add(kind, value)
        elif field in ("model", "epochs"):
            add(field, value)
        else:
            add(
                f"performance/{field}" if kind == "train" and field in _PERFORMANCE_FIELDS else f"{kind}/{field}", value
            )
    return numbers
