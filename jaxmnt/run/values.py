"""A run in one process, as values that are built from one another.

`RunProcess` has what lasts from the start to the end. `open_run` (`whole.py`) makes an `OpenedRun` of it, and
`compile_run` (`compiling.py`) a `CompiledRun`; `starting_state.py` and `running.py` add what saves and takes steps.
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
    """A process of a run, and the config as far as it is known: values built from this one have a fuller config."""

    config: Config
    directory: Path
    identity: Identity
    heartbeat: Heartbeat
    clock: StartClock
    stop: StopRequest
    status: StatusLine
    watchdog: Watchdog
    held: ExitStack
    """Releases locks, files and threads at the end."""
    zero_is_open: bool
    """Whether the config as it was given leaves `mesh.zero` to the program."""
    given_devices: Sequence[jax.Device] | None = None
    began: float = field(default_factory=time.perf_counter)

    @property
    def writes(self) -> bool:
        """Whether this process writes what is written once for all."""
        return self.identity.process_id == 0

    @property
    def devices(self) -> Sequence[jax.Device]:
        """The devices of all processes that the run trains on."""
        return self.given_devices or jax.devices()


@contextmanager
def run_process(
    config: Config,
    identity: Identity | None = None,
    heartbeat: Heartbeat | None = None,
    clock: StartClock | None = None,
    stop: StopRequest | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Iterator[RunProcess]:
    """Enters a run with this process. By default it is the only one, and hears of signals by itself.

    `devices` are all devices of all processes by default.
    """
    directory, identity = config.run_dir, identity or Identity()
    heartbeat = heartbeat or disconnected_heartbeat(identity)
    watchdog = Watchdog(config.watchdog, directory, identity.process_id, heartbeat)
    with ExitStack() as held:
        stop = stop or held.enter_context(stop_request(config, identity, heartbeat.end))
        held.enter_context(watchdog)
        status = held.enter_context(status_line(quiet=identity.process_id != 0))
        watchdog.tell = status.waiting
        yield RunProcess(
            config,
            directory,
            identity,
            heartbeat,
            clock or StartClock(),
            stop,
            status,
            watchdog,
            held,
            config.mesh.zero == "auto",
            devices,
        )


@dataclass(frozen=True, kw_only=True)
class RunWithData(RunProcess):
    """A process that has opened the run's data; the config fits the data's vocabulary."""

    data: Sources
    hosts: dict[int, str]
    """The machine of each process."""

    def host_of(self, device: jax.Device) -> str:
        return self.hosts[device.process_index]


@dataclass(frozen=True, kw_only=True)
class OpenedRun(RunWithData):
    """A run whose locks this process has, and of which it knows where it goes on."""

    training_data: TrainingData
    notifier: Notifier
    locks: list[RunLock]
    start: ResumePoint

    @property
    def finished(self) -> bool:
        """Whether all steps were done before this start."""
        return self.start.step == self.config.train.steps


@dataclass(frozen=True, kw_only=True)
class CompiledRun(OpenedRun):
    """A run whose step is compiled, and that writes events of its own."""

    events: Events
    spending: Spending | None
    """None in other processes than 0, and if no price is known."""
    program: Program
