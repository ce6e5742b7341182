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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxmnt.errors import ConfigError, how_to_install, nearest, remark, summary
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


_OURS = "jaxmnt.telemetry.sink_adapters"
_CLASSES = {"tensorboard": "TensorBoard", "wandb": "WeightsAndBiases", "trackio": "Trackio", "mlflow": "MLflow"}
"""Sinks by name, which is also that of the package that each needs."""
_WITH_THREADS = frozenset({*_CLASSES, "tensorboardX", "torch", "gradio_client"})


def wanted_sinks(names: Sequence[str] | None) -> list[str]:
    """The sinks of a config: None is TensorBoard where it is installed.

    Raises `ConfigError` for one that there is not.
    """
    if names is None:
        return ["tensorboard"] if _is_installed("tensorboard") else []
    for name in names:
        if name in _CLASSES:
            if not _is_installed(name):
                raise ConfigError(f"telemetry.sinks: {name} needs a package; {how_to_install(name)}")
        elif "." in name:
            _import(name)
        else:
            raise ConfigError(
                f"telemetry.sinks: there is no sink {name!r}; {nearest(name, sorted(_CLASSES))}, or give the dotted "
                "path of a class of your own"
            )
    return list(names)


def packages_of(names: Sequence[str]) -> frozenset[str]:
    """Packages in whose threads an exception is a matter of sinks."""
    return _WITH_THREADS | {name.partition(".")[0] for name in names} if names else frozenset()


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
        self._queues = {
            name: BackgroundQueue(f"sink {name}", partial(_feed, name, run), gather_seconds=_GATHER_SECONDS)
            for name in names
        }
        for queue in self._queues.values():
            queue.start()

    def put(self, record: dict[str, Any]) -> None:
        """A line of metrics.jsonl. Returns at once."""
        for queue in self._queues.values():
            queue.put(record)

    def close(self, *, patient: bool = True) -> bool:
        """Returns when all sinks have written what they have, or after some seconds; if it is not `patient`, one.

        Whether all have ended.
        """
        deadline, all_ended = time.monotonic() + (_CLOSE_SECONDS if patient else 1.0), True
        for queue in self._queues.values():
            queue.end()
        for name, queue in self._queues.items():
            ended = queue.join(max(0.0, deadline - time.monotonic()))
            waiting, dropped = queue.missing()
            if not ended or dropped:
                remark(f"note: {name} lacks up to {waiting + dropped} lines: it took too long to write them")
            all_ended &= ended
        return all_ended


def _feed(name: str, run: SinkRun, records: Iterator[dict[str, Any]]) -> None:
    """Makes a sink, and hands it the lines as they come. In the sink's thread."""
    sink: Sink | None = None
    try:
        sink = _import(f"{_OURS}.{_CLASSES[name]}" if name in _CLASSES else name)(run)
        for record in records:
            sink.write(record["step"], record["time"], scalars(record))
        sink.close()
    except Exception as error:  # whatever a library raises, the run goes on
        remark(f"WARNING {name} gets no more of this run: {summary(error)}")
        with suppress(Exception):  # it has failed already
            if sink is not None:
                sink.close()
        for _ in records:  # nobody wants the others
            pass


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
