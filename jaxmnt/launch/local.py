"""Several processes of one run on this machine: output prefixed, logs kept, stopped when one fails, started again."""

import argparse
import contextlib
import io
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

from jaxmnt import early_signals
from jaxmnt.config.load import as_override
from jaxmnt.config.schema import Config
from jaxmnt.distributed.authentication import RUN_KEY, RUN_KEY_BYTES
from jaxmnt.distributed.identity import VARIABLES
from jaxmnt.distributed.local_gpus import Neighbours, assigned_gpus, computes_on_cpus, gpus_here, visible_gpus
from jaxmnt.distributed.malloc import huge_pages
from jaxmnt.errors import ConfigError, ExitCode, counted, printable, remark
from jaxmnt.launch.ledger import event_marks, events_since, waited_in_vain
from jaxmnt.launch.restarts import Restarts
from jaxmnt.output import outlive_output
from jaxmnt.run.arguments import parse_arguments
from jaxmnt.telemetry.events import last_commit
from jaxmnt.telemetry.progress import RELAY_MARK, StatusLine, Work, working

_GRACE_SECONDS = 10.0
"""How long the others may take to end by themselves after one has failed."""

_PATIENCE_SECONDS = 2.0
"""How long to look for the process at fault after one has ended because of a peer."""

_NOTICE_SECONDS = 2.0
"""How long the others may take to notice one that failed, and to name it in their events, before they are told to
end."""

_POLL_SECONDS = 0.05

_ERROR = ": error: "
"""What stands between the name of a process and the words of its error, as `errors.report` writes them."""

_LOGGED_SECONDS = 10.0
"""How often a log keeps what the terminal shows in place."""

_FOLLOW_SECONDS = 120.0
"""How long the others may take to end after one has stopped early."""

_ENDED_BY_A_PEER = (ExitCode.PEER, -signal.SIGABRT)


@dataclass(frozen=True)
class Local:
    """What is started, and where."""

    arguments: list[str]
    """Of jaxmnt.train."""
    config: Config
    devices: int | None
    """Virtual CPU devices of each process; None for what it has."""
    module: tuple[str, ...] = ("jaxmnt.train",)
    """What each process runs, with arguments that come before those of jaxmnt.train."""
    cores: int | None = None
    """Of each process; None: on CPUs they share all."""


def launch(local: Local, processes: int, restarts: Restarts) -> int:
    """Runs a config in `processes` processes, again after failures as `restarts` has it; returns the exit code.

    SIGINT, SIGTERM, SIGHUP and SIGUSR1 are passed on; after one nothing is started again. They are ignored from the
    return on: the caller has nothing left but to exit with the code, which a signal must not replace. Raises
    `ConfigError` for arguments that no process could use.
    """
    outlive_output()
    run_dir, log_dir = local.config.run_dir, _log_dir(local)
    with _LocalProcesses(local, log_dir) as crew:
        while True:
            earlier = event_marks(run_dir)
            code, why = crew.run(processes)
            if why:
                remark(why)
            if crew.asked:
                return code
            waited = code == ExitCode.STOPPED and waited_in_vain(events_since(run_dir, earlier))
            verdict = restarts.after(code, processes, last_commit(run_dir), waited=waited)
            if verdict.why:
                remark(verdict.why)
            if verdict.processes is None:
                return code
            _wait(lambda: bool(crew.asked), verdict.wait_seconds)
            if crew.asked:
                return ExitCode.STOPPED  # nothing runs, and nothing is lost
            processes = verdict.processes


class _LocalProcesses:
    """The processes of a run, one start of them after the other."""

    def __init__(self, local: Local, log_dir: Path):
        self._local, self._log_dir = local, log_dir
        self._children: list[_Child] = []
        self._run_key = secrets.token_hex(RUN_KEY_BYTES)
        self.asked: list[int] = []
        """The signals that came."""

    def __enter__(self) -> "_LocalProcesses":
        # Only we have the writing end: when we are gone, however that comes, our children read its end.
        self._pipe, self._life = os.pipe()
        early_signals.handle(self.hear)
        return self

    def __exit__(self, *_: object) -> None:
        # Python restores the defaults when it ends, with which one more signal would replace the exit code. It leaves
        # alone what is ignored.
        early_signals.ignore()
        os.close(self._pipe)
        os.close(self._life)

    def hear(self, number: int, _: object) -> None:
        self.asked.append(number)
        _send(self._children, number)

    def run(self, processes: int) -> tuple[int, str]:
        """Makes one start of all processes, to the end of the last. Returns an exit code, and which process ended the
        start, and how, in words; these are empty if none failed.

        The code is that of the first that failed by itself (a death by signal counts as 1), or 75 if any stopped early.
        """
        with working(f"starting {counted(processes, 'process', 'processes')}") as work:
            screen = _Screen(work, self.asked)
            try:
                self._start(processes, screen)
                failed = _watch(self._children, self.asked)
            except BaseException:
                _end(self._children)
                raise
            if failed is not None and not self.asked:
                _wait_for_end(self._children, _NOTICE_SECONDS)
            _end(self._children)
            for child in self._children:
                child.finish()
            screen.clear()
        if failed is None:
            early = any(child.code != ExitCode.FINISHED for child in self._children)
            return int(ExitCode.STOPPED if early else ExitCode.FINISHED), ""
        assert failed.code is not None
        lost = failed.code in _ENDED_BY_A_PEER
        code = int(ExitCode.PEER if lost else failed.code if failed.code > 0 else ExitCode.FAILURE)
        reason = f"process {failed.number} {failed.exit_reason}; its log is {printable(str(failed.log_path))}"
        return code, reason + ("; run the same command again to go on" if failed.code < 0 else "")

    def _start(self, processes: int, screen: "_Screen") -> None:
        """A signal that came before a process was there is handed on to it when it is."""
        local, coordinator = self._local, f"127.0.0.1:{_free_port()}"
        self._children.clear()
        for number in range(processes):
            environment = _environment(number, processes, coordinator, local.devices)
            environment[RUN_KEY] = self._run_key
            arguments = [*local.module, *local.arguments, *_settings(number, processes, environment)]
            self._children.append(_Child(number, arguments, self._log_dir, environment, self._pipe, screen))
            if local.cores is not None or computes_on_cpus(environment):
                _give_cores(self._children[-1].process.pid, number, processes, local.cores)
            for signal_number in self.asked:
                _send(self._children[-1:], signal_number)


class _Screen:
    """Where the lines of the processes of one start are shown."""

    def __init__(self, work: Work, asked: Sequence[int]):
        """What `work` shows ends with the first line; `asked` are the signals so far."""
        self._work, self._asked = work, asked
        self._interrupts = asked.count(signal.SIGINT)
        self._lock = threading.Lock()
        self._status = StatusLine(sys.stdout or io.StringIO())
        self._errors: dict[str, int] = {}

    @property
    def columns(self) -> int:
        """How wide a line may be that is shown in place; 0 where there is no terminal."""
        return shutil.get_terminal_size().columns if self._status.live else 0

    def show(self, sink: TextIO, number: int, line: str) -> None:
        """Writes a line of process `number`. A terminal may have put ^C before it, which is then a line of its own.

        An error that another process has said in the same words is not shown again.
        """
        self._work.does("")
        with self._lock:
            error = line.partition(_ERROR)[2]
            if error and self._errors.setdefault(error, number) != number:
                return
            before, self._interrupts = self._interrupts, self._asked.count(signal.SIGINT)
            interrupted = self._interrupts > before
            self._status.clear()
            sink.write(("\n" if interrupted and sink.isatty() else "") + _prefix(number) + line)
            sink.flush()

    def show_in_place(self, number: int, text: str) -> None:
        """Shows a line of process `number` until there is another; an empty text clears it."""
        self._work.does("")
        with self._lock:
            if text:
                self._status.update(_prefix(number) + text)
            else:
                self._status.clear()

    def clear(self) -> None:
        """Removes what is shown in place."""
        self._status.clear()


def _prefix(number: int) -> str:
    return f"[{number}] "


class _Child:
    """One process, with threads that pass on its output line by line."""

    def __init__(
        self, number: int, arguments: list[str], log_dir: Path, environment: dict[str, str], pipe: int, screen: _Screen
    ):
        self.number = number
        self._screen = screen
        self.log_path = log_dir / f"process-{number}.log"
        self._buried = False
        self._log = self.log_path.open("a", encoding="utf-8")
        self._logged_in_place = -math.inf
        columns = max(0, screen.columns - len(_prefix(number)))
        own_arguments = [str(pipe), str(self.log_path.absolute()), str(columns)]
        # A session of its own: the terminal's Ctrl-C reaches it once, through us.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxmnt.launch.child", *own_arguments, *arguments],
            env=environment,
            pass_fds=(pipe,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._threads = [
            threading.Thread(target=self._pass_on, args=pair, daemon=True)
            for pair in ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def code(self) -> int | None:
        """None while it runs; negative if a signal ended it. What it has started, and left behind, is then ended."""
        code = self.process.poll()
        if code is not None and not self._buried:
            self._buried = True  # now, because its number may be another's later
            with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left in its group
                os.killpg(self.process.pid, signal.SIGKILL)
        return code

    @property
    def exit_reason(self) -> str:
        assert self.code is not None
        if self.code < 0:
            return f"was ended by {signal.Signals(-self.code).name}"
        if self.code == ExitCode.PEER:
            return f"ended with exit code {self.code}, because of the one that its last lines name"
        return f"failed with exit code {self.code}"

    def finish(self) -> None:
        for thread in self._threads:
            thread.join(timeout=5)
        with contextlib.suppress(OSError):
            self._log.close()

    def _pass_on(self, source: IO[str], sink: TextIO | None) -> None:
        shown = sink is not None  # it is None where our own was closed
        for line in source:  # to the end, whatever becomes of log and sink: a full pipe would stop the process
            if line.startswith(RELAY_MARK):
                self._show_in_place(line.removeprefix(RELAY_MARK))
                continue
            self._keep(line)
            if sink is not None and shown and line.strip():
                try:
                    self._screen.show(sink, self.number, line)
                except (OSError, ValueError) as error:
                    shown = False
                    self._keep(f"(the launcher shows no more of this: {error})\n")
                    _discard(sink)

    def _show_in_place(self, line: str) -> None:
        now = time.monotonic()
        if line.strip() and now - self._logged_in_place >= _LOGGED_SECONDS:
            self._logged_in_place = now
            self._keep(line)
        with contextlib.suppress(OSError, ValueError):  # a line that stays finds out that nobody reads
            self._screen.show_in_place(self.number, line.rstrip())

    def _keep(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a full disk: the lines are shown anyway
            self._log.write(line)
            self._log.flush()


def _discard(sink: TextIO) -> None:
    """Lets what is left in the buffer of a stream that has no reader go nowhere, also when we exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sink.fileno())
    os.close(nowhere)


def _watch(children: list[_Child], asked: Sequence[int]) -> _Child | None:
    """Waits for all to end well (None), or for the first to fail by itself.

    A process that failed because another is gone says so with its exit code, or is aborted by JAX's runtime; the
    other one is then given a moment to be found. One that does not follow the others when they have stopped is not
    waited for: they have saved together, or given up waiting for it.
    """
    limits: dict[float, float] = {}
    while True:
        # Asked once a round: a child that ends between two questions must not be judged by half of the answers.
        codes = [child.code for child in children]
        failed = [child for child, code in zip(children, codes, strict=True) if not _ended_well(code, asked)]
        by_itself = [child for child in failed if child.code not in _ENDED_BY_A_PEER]
        if by_itself:
            return by_itself[0]
        now = time.monotonic()
        if failed:
            limits.setdefault(_PATIENCE_SECONDS, now + _PATIENCE_SECONDS)
        elif any(code not in (None, ExitCode.FINISHED) for code in codes):
            limits.setdefault(_FOLLOW_SECONDS, now + _FOLLOW_SECONDS)
        if None not in codes or now > min(limits.values(), default=math.inf):
            return failed[0] if failed else None
        time.sleep(_POLL_SECONDS)


def _ended_well(code: int | None, asked: Sequence[int]) -> bool:
    """None is a process that still runs. A process that was ended by a signal we handed on had no handler for it yet,
    and nothing to lose."""
    return code in (None, ExitCode.FINISHED, ExitCode.STOPPED) or -code in asked


def _end(children: list[_Child]) -> None:
    """Ends whatever still runs: by SIGTERM and, after a grace period, by SIGKILL."""
    _send(children, signal.SIGTERM)
    _wait_for_end(children, _GRACE_SECONDS)
    _send(children, signal.SIGKILL)
    for child in children:
        child.process.wait()
        assert child.code is not None


def _wait_for_end(children: list[_Child], seconds: float) -> None:
    """Waits until all have ended, for no longer than `seconds`."""
    _wait(lambda: all(child.code is not None for child in children), seconds)


def _wait(is_over: Callable[[], bool], seconds: float) -> None:
    """Waits until `is_over` says so, for no longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while not is_over() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _send(children: list[_Child], number: int) -> None:
    for child in children:
        if child.code is None:
            child.process.send_signal(number)


def _environment(number: int, processes: int, coordinator: str, devices: int | None) -> dict[str, str]:
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    environment[VARIABLES["coordinator"]] = coordinator
    environment[VARIABLES["processes"]] = str(processes)
    environment[VARIABLES["process_id"]] = str(number)
    if devices is not None:
        environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    if computes_on_cpus(environment):
        environment |= huge_pages(environment)
    return environment


def check_cores(processes: int, each: int | None) -> None:
    """Raises `ConfigError` if there are not so many cores for each process."""
    if each is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("--cores-per-process: this system cannot bind processes to cores; leave it out")
    cores = len(os.sched_getaffinity(0))
    if processes * each > cores:
        raise ConfigError(f"--cores-per-process: {processes} × {each} cores are more than the {cores} here; lower it")


def _give_cores(pid: int, number: int, processes: int, each: int | None = None) -> None:
    """Its own share of our cores, where there are enough: XLA makes a thread for each core that a process may use, and
    the threads of several would get into each other's way."""
    if not hasattr(os, "sched_setaffinity"):  # macOS
        return
    cores = sorted(os.sched_getaffinity(0))
    begin, end = (len(cores) * count // processes if each is None else count * each for count in (number, number + 1))
    if len(cores) >= processes:
        with contextlib.suppress(ProcessLookupError):  # it has ended already, which is found elsewhere
            os.sched_setaffinity(pid, cores[begin:end])


def _settings(number: int, processes: int, environment: dict[str, str]) -> list[str]:
    """What only this launcher knows: that its own word counts, and which GPUs are whose."""
    settings = ["cluster.launcher=explicit"]
    if environment.get("JAX_PLATFORMS") != "cpu":
        here = gpus_here()
        together = len(visible_gpus(environment, here))
        share = assigned_gpus(Neighbours(number, processes, together), environment, here)
        settings += [] if share is None else [as_override("cluster.local_devices", list(share))]
    return settings


def local_run(
    train_arguments: list[str],
    devices: int | None,
    module: tuple[str, ...] = ("jaxmnt.train",),
    parse: Callable[[list[str]], argparse.Namespace] = parse_arguments,
) -> Local:
    """What is to be started; `parse` reads the arguments, which have a config and overrides. Reading them here also
    finds mistakes once instead of once a process."""
    from jaxmnt.config import load_config

    if not train_arguments:
        raise ConfigError(f"give the arguments of {module[0]} after --, such as: -- --config configs/quickstart.yaml")
    options = parse(train_arguments)
    if options.config is None:
        raise ConfigError("--config: several processes need a config; give its file after --")
    config = load_config(options.config, options.overrides)
    for key in VARIABLES:
        if getattr(config.cluster, key) is not None:
            raise ConfigError(f"cluster.{key}: the launcher sets it for each process; take it out of the config")
    return Local(train_arguments, config, devices, module)


def _log_dir(local: Local) -> Path:
    """Makes the run's folder of logs."""
    log_dir = local.config.run_dir / "logs"
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run.dir: {printable(str(log_dir))} cannot be made: {error.strerror}; choose another run.dir"
        ) from error
    return log_dir


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
