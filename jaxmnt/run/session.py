"""A run in one process: what it consists of, in the order in which it comes to be."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import jax

from jaxmnt.config.schema import Config
from jaxmnt.data.batches import TrainingData, training_rows
from jaxmnt.data.feed import Feed, process_rows
from jaxmnt.data.grain_source import GrainData
from jaxmnt.data.run_tokenizer import keep, of_data
from jaxmnt.data.sources import Sources, fit_to_data, open_sources, stage
from jaxmnt.data.store import PreparedData
from jaxmnt.distributed.coordination import barrier, barrier_or_raise
from jaxmnt.distributed.heartbeat import Heartbeat, heartbeat_alone
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.malloc import return_free_memory
from jaxmnt.distributed.process_group import host_names
from jaxmnt.errors import UserError
from jaxmnt.huggingface import companions
from jaxmnt.plan.zero import resolve_zero
from jaxmnt.run import report
from jaxmnt.run.branch import config_of
from jaxmnt.run.changes import unreadable_is_retryable, with_choices_of
from jaxmnt.run.compile_cache import use_compile_cache
from jaxmnt.run.evaluate import Evaluator
from jaxmnt.run.failed_start import note_exit_reason
from jaxmnt.run.lock import RunLock
from jaxmnt.run.monitoring import Monitoring
from jaxmnt.run.preemption import StopRequest, stop_request
from jaxmnt.run.profiling import Profiler
from jaxmnt.run.replicas import Replicas
from jaxmnt.run.resume import Consent, ResumePoint, open_run, refuse_other_data, starting_state
from jaxmnt.run.rundir import known_run, plain_config, run_directories, write_config
from jaxmnt.run.samples import Sampler
from jaxmnt.run.saves import CheckpointManager
from jaxmnt.run.spending import Spending, check_price
from jaxmnt.run.watchdog import Watchdog
from jaxmnt.telemetry.events import FORMAT, Events, event_file, log_sizes, repair
from jaxmnt.telemetry.metrics import TrainLog
from jaxmnt.telemetry.notify import Notifier
from jaxmnt.telemetry.progress import StartClock, StatusLine, status_line
from jaxmnt.telemetry.sinks import SinkRun, Sinks, packages_of, wanted_sinks
from jaxmnt.telemetry.status_server import StatusServer
from jaxmnt.training.build import build_spec
from jaxmnt.training.compile import Program, compile_program
from jaxmnt.training.spec import ControlFlags, StepSpec

_A_DAY_SECONDS = 86400.0
_READY_SECONDS = 12 * 3600.0
"""Copying or checking terabytes takes hours; the heartbeat finds a host that dies meanwhile."""


class Session:
    """A run, and how far it is. `open`, `compile`, `restore` and `feed` follow each other, then come the steps.

    Used as a context manager, which lets go of all that the run has: locks, files, threads. `--replay` uses the parts
    of these that change nothing in the run directory.
    """

    data: Sources
    training_data: TrainingData
    start: ResumePoint
    program: Program
    state: Any
    batches: Feed
    control: ControlFlags
    evaluator: Evaluator
    sampler: Sampler
    saves: CheckpointManager
    log: TrainLog
    events: Events
    replicas: Replicas
    monitoring: Monitoring
    profiler: Profiler

    def __init__(
        self,
        config: Config,
        identity: Identity | None = None,
        devices: Sequence[jax.Device] | None = None,
        heartbeat: Heartbeat | None = None,
        clock: StartClock | None = None,
        stop: StopRequest | None = None,
    ):
        """`devices` are all of all processes by default; without a `stop` the run hears of signals by itself."""
        assert config.run.dir is not None
        self.config = config
        self.directory = Path(config.run.dir)
        self.identity = identity or Identity()
        self.heartbeat = heartbeat or heartbeat_alone(self.identity)
        self.clock = clock or StartClock()
        self.writes = self.identity.process_id == 0
        """Whether this process writes what is written once for all."""
        self.watchdog = Watchdog(config.watchdog, self.directory, self.identity.process_id, self.heartbeat)
        self.locks: list[RunLock] = []
        self.step = 0
        """Steps that are done."""
        self.loss: float | None = None
        """Held out, after the last step if that was evaluated."""
        self.preempted = False
        self.spending: Spending | None = None
        """Of process 0."""
        self._devices = devices
        self._given_stop = stop
        self._leaves_zero_open = config.mesh.zero == "auto"
        self._zero_lines: list[str] = []
        self._began = time.perf_counter()
        self._held = ExitStack()

    def __enter__(self) -> Self:
        self.stop = self._given_stop or self._held.enter_context(
            stop_request(self.config, self.identity, self.heartbeat.end)
        )
        self._held.enter_context(self.watchdog)
        self.status: StatusLine = self._held.enter_context(status_line(quiet=not self.writes))
        return self

    def __exit__(self, *error: Any) -> None:
        self._held.__exit__(*error)

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.step == self.config.train.steps

    @property
    def seconds(self) -> float:
        """Since this start of the run began."""
        return time.perf_counter() - self._began

    def open(self, consent: Consent, opened: Callable[[], None] = lambda: None) -> None:
        """Reads what the run is about: its data, its directory, and where it goes on. Takes its locks.

        A run that has `finished` has nothing more to do; its config is checked all the same. Else `opened` is called
        before the run's events begin.
        """
        self._notifier = Notifier(self.config.run.notify, self.identity.process_id, str(self.directory.absolute()))
        check_price(self.config)
        wanted_sinks(self.config.telemetry.sinks)
        for where in run_directories(self.config):
            lock = self._held.enter_context(RunLock(where))
            self._held.enter_context(self.heartbeat.exit_handler.with_hook(lock.let_go))
            self.locks.append(lock)
        self.clock.watch_compile_cache()
        self.open_data()
        # To read all documents of a dataset takes long: that is for a run that has its lock and is not refused.
        reads_all = any(isinstance(part, GrainData) and not part.holds_rows for part in self.data.parts.values())
        if not reads_all:
            self.plan_rows()
        self.start = open_run(self.config, self.data, self.identity, self.locks, self.status.line, consent)
        if reads_all:
            self.plan_rows()
            refuse_other_data(self.config, self.data, self.start)
        if self.start.kind == "own" and self.start.checkpoint is not None:
            self.config = with_choices_of(self.config, config_of(self.start.checkpoint))
        self.training_data.branch_at(self.start.branches)
        self.step = self.start.step
        report.run(self.status, self.start, self.identity)
        report.data(self.status, self.config, self.data, self.training_data, writes=self.writes)
        if self.finished:
            build_spec(self.config, self.data.vocab_size, self._devices, self._host_of)
            report.already_finished(self.status, self.config, self.start)
            return
        use_compile_cache(self.config.run.compile_cache, self.directory)
        self.clock.lap("data")
        opened()
        if self.writes:
            devices = len(self._devices or jax.devices())
            self.spending = Spending(self.config, self.directory, devices, self.clock.elapsed)
        self.events = self._begin_events()

    def compile(self) -> None:
        """Compiles the steps, before the first batch is read."""
        self.build_program()
        self.clock.lap("compile")
        self.events.write("compile", seconds=self.program.compile_seconds, **report.about(self.program))

    def restore(self) -> None:
        """Takes over the state to go on from, and readies what saves and compares it."""
        limits, config = self.config.watchdog, self.config
        with self.watchdog.during("restoring", limits.restore_seconds):
            self.start, self.state = starting_state(
                config, self.data, self.program, self.start, self.identity, self.events, self.status
            )
        self.step = self.start.step
        self.clock.lap("restore")
        if self.writes:
            self._note_what_it_is()
        self.saves = CheckpointManager(
            config, self.start, self.program, self.data, self.identity, self.events, self.status, self.locks
        )
        self.saves.check_room()
        with self.watchdog.during("compiling", limits.compile_seconds):
            self.saves.prepare(self.state)
            self.replicas = Replicas(config.train.compare_replicas_every, self.hosts, self.events)
            replicated = self.replicas.prepare(self.step, self.state)
        return_free_memory()
        if replicated is not None:
            self.status.line(f"note    {replicated:.0%} of the state is held by several devices, which are compared")
        self.clock.lap("compile")

    def feed(self) -> None:
        """Opens the log and begins to read rows."""
        monitor = report.BadStepMonitor(self.config, self.training_data, self.events, self.status, writer=self.writes)
        first = self.step + 1

        def finished(step: int, seconds: float, values: dict[str, Any]) -> None:
            self.watchdog.finished_step(seconds)
            monitor.see(step, values)
            self.monitoring.finished(step, values["loss"])
            if step == first:
                self.clock.lap("first_step")
                self.events.write(
                    "started", step=step, seconds=self.clock.seconds, compile_cache=self.clock.compile_cache
                )

        self.monitoring = Monitoring(
            self.directory, self.identity, self.hosts, self.heartbeat, self.events, self.status, self.spending,
            self.config.telemetry, self.program.placement.mesh.local_devices, step=self.step,
        )  # fmt: skip
        self._held.callback(self.monitoring.close)
        self.log = report.train_log(
            self.config, self.program, self.start, self.training_data, self.status, self.monitoring.timer,
            self.spending, attempt=self.events.attempt, writer=self.writes, finished=finished,
            written=self._open_sinks().put,
        )  # fmt: skip
        self._held.callback(self.log.close)
        at = self.config.telemetry.profile_at
        self.profiler = Profiler(self.directory, at, self.identity, self.events, self.status)
        self._held.enter_context(self.profiler.listening())
        self._serve_status()
        self.feed_from(self.step)
        memory = report.input_memory(self.status, self.config, self.training_data, self.batches.local_rows)
        self.events.write("data", digest=self.data.digest, **memory)
        self.evaluator = Evaluator(self.program, self.data)
        self.sampler = Sampler(self.program, self.data)

    def _open_sinks(self) -> Sinks:
        """In process 0. A run that fails does not wait for them."""
        run = SinkRun(
            self.start.run, self.directory, plain_config(self.config), self.config.telemetry.project, self.step,
            self.events.attempt,
        )  # fmt: skip
        names = wanted_sinks(self.config.telemetry.sinks) if self.writes else []
        sinks = Sinks(names, run)
        self.heartbeat.may_fail = packages_of(names)

        def close(error: type[BaseException] | None, *_: object) -> None:
            if not sinks.close(patient=error is None):
                self.heartbeat.exit_handler.hurried = True  # a library's own thread may keep a process for ever

        self._held.push(close)
        return sinks

    def _serve_status(self) -> None:
        settings = self.config.telemetry
        if settings.port is None or not self.writes:
            return
        run = {"run": self.start.run, "steps": self.config.train.steps, "processes": self.identity.processes}
        status = lambda: {**self.log.latest, **self.monitoring.status(), **run, "now": str(self.watchdog.position())}
        server = self._held.enter_context(StatusServer(settings.host, settings.port, status))
        if server.address is not None:
            self.status.line(f"status  {server.url}/status, /metrics, /healthz, /stacks")

    # The parts that change nothing in the run directory.

    def open_data(self) -> None:
        """Opens the data, and fits the config to its vocabulary."""
        self.data = ready_data(self.config, self.identity, self.status)
        self.config = fit_to_data(self.config, self.data)
        self.hosts = host_names(self.identity)

    def plan_rows(self) -> None:
        """Plans which rows there are. Documents of datasets are indexed for that; the run's lock keeps the index."""
        index_documents(self.config, self.data, self.identity, self.status, keeps=bool(self.locks))
        self.training_data = TrainingData(self.config, self.data, None if self._may_be_branch() else ())

    def _may_be_branch(self) -> bool:
        """Whether only `open_run` tells, in all processes, where in the data the run goes on."""
        if self.config.run.fork_from is not None:
            return True
        with suppress(UserError, OSError):
            known = known_run(self.config)
            return known is not None and bool(known.lineage)
        return True

    def build_program(self) -> None:
        """Compiles the steps, all processes together."""
        limit = self.config.watchdog.compile_seconds
        with self.watchdog.during("compiling", limit):
            self.program = compile_program(
                self.config, self.data.vocab_size, self._devices, self._host_of, resolve=self._resolve
            )
            self.config = self.program.spec.config
            # Or those who found it in a cache would count the others' compiling as their own first step.
            barrier("every process has compiled", self.identity, limit or _A_DAY_SECONDS)
        report.program(self.status, self.program, self._zero_lines)

    def _resolve(self, spec: StepSpec) -> Config:
        """Returns the config with a number for `mesh.zero`, and notes what there is to say of it."""
        config, zero = resolve_zero(spec)
        self._zero_lines = [] if zero is None else zero.lines(kept=self._leaves_zero_open and not zero.is_auto)
        return config

    def feed_from(self, step: int) -> None:
        """Begins to read the batches after `step`."""
        self.batches = training_feed(self.config, self.training_data, self.program, step)
        self.watchdog.reads = lambda: self.batches.reading
        self.control = ControlFlags(self.program.control_sharding)

    def _host_of(self, device: jax.Device) -> str:
        return self.hosts[device.process_index]

    def _begin_events(self) -> Events:
        """This process's events, with the start in them. From here on nobody else writes to their file."""
        repair(event_file(self.directory, self.identity.process_id))
        events = Events(self.directory, self.identity.process_id)
        events.written = self._notifier
        for trouble in self.start.damaged if self.writes else []:
            events.write("checkpoint_damaged", why=trouble)
        devices = len(self._devices or jax.devices())
        environment = {"environment": report.environment(self._devices)} if self.writes else {}
        events.write(
            "start", format=FORMAT, run=self.start.run, step=self.step, processes=self.identity.processes,
            devices=devices, began=self.clock.began, cost_per_gpu_hour=self.config.launch.cost_per_gpu_hour,
            clock_ahead=self.heartbeat.clock, log_bytes=log_sizes(self.directory, self.identity.process_id),
            **environment,
        )  # fmt: skip
        self._held.callback(events.close)
        note = lambda exit_reason: note_exit_reason(events, exit_reason)
        self._held.enter_context(self.heartbeat.exit_handler.with_hook(note))
        return events

    def _note_what_it_is(self) -> None:
        """Writes down the config, its changes, and the tokenizer."""
        write_config(self.directory, self.config)
        tokenizer = of_data(self.data.tokenizer, self.data.vocab_size, self.data.folder)
        for where in run_directories(self.config):
            keep(where, tokenizer)
        if self.start.kind != "own":
            source = self.config.run.init_from or self.config.run.fork_from
            files = companions.of_source(self.start.weights, source, self.start.checkpoint)
            files = companions.fitting(files, tokenizer)
            for where in run_directories(self.config) if files else []:
                companions.keep(where, files)
        for change in self.start.changes:
            self.events.write("config_change", **change._asdict())


def ready_data(config: Config, identity: Identity, status: StatusLine) -> Sources:
    """The data that the config names, checked and copied to this host where the config asks for it.

    Raises `ConfigError` for data that is missing, damaged or does not fit together.
    """
    settings = config.data
    with unreadable_is_retryable(config):
        data = open_sources(config.data, config.run.dir)
    if not settings.verify and settings.stage_dir is None:
        return data
    with _all_together("the data is ready on every host", config, identity):
        if settings.stage_dir is not None:
            data = _staged(data, Path(settings.stage_dir), status)
        for part in (*data.parts.values(), *data.eval_sets.values()) if settings.verify else []:
            if not isinstance(part, GrainData):
                part.verify(progress=lambda name: status.update(f"data    checking {name}"))
    return data


def index_documents(config: Config, data: Sources, identity: Identity, status: StatusLine, *, keeps: bool) -> None:
    """Makes the indices of datasets known to every process. With `keeps`, process 0 writes them into the run directory.

    Raises `ConfigError` for a dataset that cannot be trained on, and `PreflightError` if the run directory is not
    shared.
    """
    datasets = [part for part in data.parts.values() if isinstance(part, GrainData)]
    if not datasets:
        return
    with _all_together("process 0 has indexed the documents", config, identity):
        for dataset in datasets if keeps and identity.process_id == 0 else []:
            dataset.make_index(lambda name: status.update(f"data    indexing {name}"))
    with _all_together("every process has the index", config, identity):
        for dataset in datasets:
            dataset.load_index(made_elsewhere=keeps and identity.process_id != 0)
            if config.data.verify:
                dataset.verify(progress=lambda name: status.update(f"data    checking {name}"))


@contextmanager
def _all_together(name: str, config: Config, identity: Identity) -> Iterator[None]:
    """What goes wrong inside in one process, goes wrong in all."""
    trouble = None
    try:
        with unreadable_is_retryable(config):
            yield
    except UserError as error:
        trouble = error
    barrier_or_raise(name, trouble, identity, _READY_SECONDS)


def _staged(data: Sources, directory: Path, status: StatusLine) -> Sources:
    show = lambda name: status.update(f"data    copying {name} to {directory}")
    prepared = {name: part for name, part in data.parts.items() if isinstance(part, PreparedData)}
    return data.at({name: stage(part, directory, show) for name, part in prepared.items()})


def training_feed(config: Config, data: TrainingData, program: Program, start_step: int) -> Feed:
    """The feed of this process's rows of every global batch from `start_step` on."""
    settings = config.data
    rows = process_rows(program.batch_sharding, settings.global_batch_size, settings.sequence_length)
    source = training_rows(data, rows, start_step, prefetch=settings.prefetch, threads=settings.read_threads)
    return Feed(source, rows, settings.global_batch_size, program.batch_sharding, digest=settings.log_digest)
