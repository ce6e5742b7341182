"""The states of a run in one process from its start to its first step, each of which adds fields to the previous one.

`RunProcess` has what exists from start to end, and `RunWithData` adds the data. `open_run` (`training_run.py`) returns
an `OpenedRun`, and `compile_run` (`compiling.py`) a `CompiledRun`. Then `starting_state.py` adds the train state and
its saves, and `running.py` all that taking steps requires.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import jax

from jaxmnt.config.schema import Config
from jaxmnt.data.batches import TrainingData
from jaxmnt.data.sources import Sources
from jaxmnt.distributed.heartbeat import Heartbeat, disconnected_heartbeat
from jaxmnt.distributed.identity import Identity
from jaxmnt.run.lock import RunLock
from jaxmnt.run.preemption import StopRequest, stop_request
from jaxmnt.run.resume import ResumePoint
from jaxmnt.run.spending import Spending
from jaxmnt.run.watchdog import Watchdog
from jaxmnt.telemetry.events import Events
from jaxmnt.telemetry.notify import Notifier
from jaxmnt.telemetry.progress import StartClock, StatusLine, status_line
from jaxmnt.training.compile import Program


@dataclass(frozen=True)
class RunProcess:
    """A process of a run. The config is only partly resolved; the classes derived from this one resolve it further."""

    config: Config
    directory: Path
    identity: Identity
    heartbeat: Heartbeat
    clock: StartClock
    stop: StopRequest
    status: StatusLine
    watchdog: Watchdog
    resources: ExitStack
    """Releases locks, files and threads at the end."""
    zero_is_auto: bool
    """True if the user's config has `mesh.zero: auto`."""
    device_override: Sequence[jax.Device] | None = None
    """The devices of all processes to train on; None means all that JAX finds."""
    began: float = field(default_factory=time.perf_counter)
    """The value of `time.perf_counter` at the start."""

    @property
    def writes(self) -> bool:
        """True in process 0, which writes the files that exist once per run."""
        return self.identity.process_id == 0

    @property
    def devices(self) -> Sequence[jax.Device]:
        """The devices of all processes that the run trains on."""
        return self.device_override or jax.devices()


@contextmanager
def run_process(
    config: Config,
    identity: Identity | None = None,
    heartbeat: Heartbeat | None = None,
    clock: StartClock | None = None,
    stop: StopRequest | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Iterator[RunProcess]:
    """Makes this process a process of a run, in a context.

    By default it is the only process, handles signals itself, and uses all devices of all processes.
    """
    directory, identity = config.run_dir, identity or Identity()
    heartbeat = heartbeat or disconnected_heartbeat(identity)
    watchdog = Watchdog(config.watchdog, directory, identity.process_id, heartbeat)
    with ExitStack() as resources:
        stop = stop or resources.enter_context(stop_request(config, identity, heartbeat.end))
        resources.enter_context(watchdog)
        status = resources.enter_context(status_line(quiet=identity.process_id != 0))
        watchdog.show_wait = status.waiting
        yield RunProcess(
            config,
            directory,
            identity,
            heartbeat,
            clock or StartClock(),
            stop,
            status,
            watchdog,
            resources,
            config.mesh.zero == "auto",
            devices,
        )


@dataclass(frozen=True, kw_only=True)
class RunWithData(RunProcess):
    """A process that has opened the run's data. The vocabulary size in the config is that of the data."""

    data: Sources
    hosts: dict[int, str]
    """The host name of each process."""

    def host_of(self, device: jax.Device) -> str:
        return self.hosts[device.process_index]


@dataclass(frozen=True, kw_only=True)
class OpenedRun(RunWithData):
    """A run whose locks this process holds, and whose resume point is known."""

    training_data: TrainingData
    notifier: Notifier
    locks: list[RunLock]
    start: ResumePoint

    @property
    def finished(self) -> bool:
        """True if all steps were done before this start."""
        return self.start.step == self.config.train.steps


@dataclass(frozen=True, kw_only=True)
class CompiledRun(OpenedRun):
    """A run whose step is compiled, and that writes its own events."""

    events: Events
    spending: Spending | None
    """None in processes other than 0, and if no price is set."""
    program: Program
