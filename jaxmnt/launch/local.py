"""Runs several processes of one run on this machine. Prefixes their output, keeps logs, stops all processes when one
fails, and restarts them."""

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
from jaxmnt.launch.ledger import event_marks, events_since, outcome_of, peers_never_appeared
from jaxmnt.launch.restarts import Restarts
from jaxmnt.output import limit_output_waits
from jaxmnt.run.arguments import parse_arguments
from jaxmnt.telemetry.events import last_commit
from jaxmnt.telemetry.progress import RELAY_MARK, StatusLine, Work, working

_GRACE_SECONDS = 10.0
"""Time for processes to end after SIGTERM, before they get SIGKILL."""

_CULPRIT_TIMEOUT_SECONDS = 2.0
"""Time to find the process at fault after another has ended because of it."""

_NOTICE_TIMEOUT_SECONDS = 2.0
"""Time for the others to notice a failed process, and to name it in their events, before they are told to end."""

_POLL_SECONDS = 0.05

_ERROR_SEPARATOR = ": error: "
"""Separator between a process's name and the text of its error, as `errors.report` writes them."""

_MIN_LOG_INTERVAL_SECONDS = 10.0
"""Minimum time between two log entries for the status line, which the terminal overwrites in place."""

_FOLLOW_TIMEOUT_SECONDS = 120.0
"""Time for the others to end after one process has stopped early."""

_PEER_CODES = (ExitCode.PEER, -signal.SIGABRT)
"""Exit codes of a process that ended because another one failed. SIGABRT is among them because JAX's runtime aborts
such processes."""


@dataclass(frozen=True)
class LocalCommand:
    """The command that each process on this machine runs."""

    arguments: list[str]
    """Arguments of jaxmnt.train."""
    config: Config
    devices: int | None
    """Number of virtual CPU devices of each process; None if each uses the devices that it sees."""
    module: tuple[str, ...] = ("jaxmnt.train",)
    """Module that each process runs, followed by arguments that precede `arguments`."""
    cores: int | None = None
    """Number of CPU cores of each process; None divides all cores evenly if the processes compute on CPUs."""


def launch(local: LocalCommand, processes: int, restarts: Restarts) -> int:
    """Runs a config in `processes` processes, and restarts them after failures as `restarts` decides. Returns the exit
    code.

    SIGINT, SIGTERM, SIGHUP and SIGUSR1 are passed on to the processes, and end the restarts. Once this function has
    returned, they are ignored, because the caller exits with the code, which a signal must not replace. Raises
    `ConfigError` for arguments that no process could use.
    """
    limit_output_waits()
    run_dir, log_dir = local.config.run_dir, _log_dir(local)
    with _LocalProcesses(local, log_dir) as group:
        while True:
            earlier = event_marks(run_dir)
            code, why = group.run(processes)
            if why:
                remark(why)
            if group.signals:
                return code

            events = events_since(run_dir, earlier)
            verdict = restarts.decide(
                code,
                processes,
                last_commit(run_dir),
                outcome_of(run_dir, events),
                devices=processes * (local.devices or 1),
                now=time.time(),
                waited=code == ExitCode.STOPPED and peers_never_appeared(events),
            )
            if verdict.why:
                remark(verdict.why)
            if verdict.processes is None:
                return code

            _wait(lambda: bool(group.signals), verdict.wait_seconds)
            if group.signals:
                return ExitCode.STOPPED  # nothing runs, and nothing is lost
            processes = verdict.processes


class _LocalProcesses:
    """The processes of a run, in one start after the other."""

    def __init__(self, local: LocalCommand, log_dir: Path):
        self._local, self._log_dir = local, log_dir
        self._children: list[_Child] = []
        self._run_key = secrets.token_hex(RUN_KEY_BYTES)
        self.signals: list[int] = []
        """Signals that were received."""

    def __enter__(self) -> "_LocalProcesses":
        # Only we have the writing end. However we end, our children then read the end of the file.
        self._pipe_reader, self._pipe_writer = os.pipe()
        early_signals.handle(self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        # Python restores default handlers at exit, with which another signal would replace the exit code. It leaves
        # ignored signals ignored.
        early_signals.ignore()
        os.close(self._pipe_reader)
        os.close(self._pipe_writer)

    def _on_signal(self, number: int, _: object) -> None:
        self.signals.append(number)
        _send(self._children, number)

    def run(self, processes: int) -> tuple[int, str]:
        """Starts all processes, and waits until the last has ended. Returns an exit code, and a text that says which
        process ended the start and how, which is empty if none failed.

        The code is that of the first process that failed by itself (or 1 if a signal ended it), or 75 if any process
        stopped early.
        """
        with working(f"starting {counted(processes, 'process', 'processes')}") as work:
            screen = _Screen(work, self.signals)
            try:
                self._start(processes, screen)
                failed = _watch(self._children, self.signals)
            except BaseException:
                _end_all(self._children)
                raise
            if failed is not None and not self.signals:
                _wait_for_end(self._children, _NOTICE_TIMEOUT_SECONDS)
            _end_all(self._children)
            for child in self._children:
                child.finish()
            screen.clear()
        if failed is None:
            stopped_early = any(child.code != ExitCode.FINISHED for child in self._children)
            return int(ExitCode.STOPPED if stopped_early else ExitCode.FINISHED), ""
        assert failed.code is not None
        if failed.code in _PEER_CODES:
            code = int(ExitCode.PEER)
        else:
            code = failed.code if failed.code > 0 else int(ExitCode.FAILURE)
        reason = f"process {failed.number} {failed.exit_reason}; its log is {printable(str(failed.log_path))}"
        return code, reason + ("; run the same command again to go on" if failed.code < 0 else "")

    def _start(self, processes: int, screen: "_Screen") -> None:
        """Starts the processes. Each also gets the signals that arrived before it was started."""
        local = self._local
        coordinator = f"127.0.0.1:{_free_port()}"
        self._children.clear()
        for number in range(processes):
            environment = _environment(number, processes, coordinator, local.devices)
            environment[RUN_KEY] = self._run_key
            arguments = [*local.module, *local.arguments, *_settings(number, processes, environment)]
            self._children.append(_Child(number, arguments, self._log_dir, environment, self._pipe_reader, screen))
            if local.cores is not None or computes_on_cpus(environment):
                _bind_to_cores(self._children[-1].process.pid, number, processes, local.cores)
            for signal_number in self.signals:
                _send(self._children[-1:], signal_number)


class _Screen:
    """Shows the output lines of the processes in one start."""

    def __init__(self, work: Work, signals: Sequence[int]):
        """The first line ends the display of `work`. `signals` is the list to which each received signal is
        appended."""
        self._work, self._signals = work, signals
        self._interrupts = signals.count(signal.SIGINT)
        self._lock = threading.Lock()
        self._status = StatusLine(sys.stdout or io.StringIO())
        self._errors: dict[str, int] = {}

    @property
    def columns(self) -> int:
        """Width of a line that is shown in place; 0 without a terminal."""
        return shutil.get_terminal_size().columns if self._status.live else 0

    def show(self, sink: TextIO, number: int, line: str) -> None:
        """Writes a line of process `number`, on a new line if the terminal has just shown ^C.

        An error that another process has reported in the same words is not repeated.
        """
        self._work.does("")
        with self._lock:
            error = line.partition(_ERROR_SEPARATOR)[2] if line.startswith("jaxmnt: ") else ""
            if error and self._errors.setdefault(error, number) != number:
                return
            previous_interrupts, self._interrupts = self._interrupts, self._signals.count(signal.SIGINT)
            interrupted = self._interrupts > previous_interrupts
            self._status.clear()
            sink.write(("\n" if interrupted and sink.isatty() else "") + _prefix(number) + line)
            sink.flush()

    def show_in_place(self, number: int, text: str) -> None:
        """Shows a line of process `number` until another line is shown. An empty text clears it."""
        self._work.does("")
        with self._lock:
            if text:
                self._status.update(_prefix(number) + text)
            else:
                self._status.clear()

    def clear(self) -> None:
        """Removes the line that is shown in place."""
        self._status.clear()


def _prefix(number: int) -> str:
    return f"[{number}] "


class _Child:
    """A process, with threads that pass on its output line by line."""

    def __init__(
        self, number: int, arguments: list[str], log_dir: Path, environment: dict[str, str], pipe: int, screen: _Screen
    ):
        self.number = number
        self._screen = screen
        self.log_path = log_dir / f"process-{number}.log"
        self._group_killed = False
        self._log = self.log_path.open("a", encoding="utf-8")
        self._logged_in_place = -math.inf
        columns = max(0, screen.columns - len(_prefix(number)))
        child_arguments = [str(pipe), str(self.log_path.absolute()), str(columns)]
        # In a separate session, the child gets the terminal's Ctrl-C only once, from us.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxmnt.launch.child", *child_arguments, *arguments],
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
        """The exit code: None while the process is running, and negative if a signal ended it. Once the process has
        ended, this property kills processes that it has left behind."""
        code = self.process.poll()
        if code is not None and not self._group_killed:
            self._group_killed = True  # at once, because its number may be reused later
            with contextlib.suppress(ProcessLookupError, PermissionError):  # its group is empty
                os.killpg(self.process.pid, signal.SIGKILL)
        return code

    @property
    def exit_reason(self) -> str:
        """A phrase that says how the process ended."""
        assert self.code is not None
        if self.code < 0:
            return f"was ended by {signal.Signals(-self.code).name}"
        if self.code == ExitCode.PEER:
            return f"ended with exit code {self.code}, because of the one that its last lines name"
        return f"failed with exit code {self.code}"

    def finish(self) -> None:
        """Waits for the rest of the output, and closes the log."""
        for thread in self._threads:
            thread.join(timeout=5)
        with contextlib.suppress(OSError):
            self._log.close()

    def _pass_on(self, source: IO[str], sink: TextIO | None) -> None:
        """Writes the lines of `source` to the log and to `sink`, which is None if our own stream was closed."""
        is_shown = sink is not None
        for line in source:  # read to the end, even if log and sink fail, because a full pipe would block it
            if line.startswith(RELAY_MARK):
                self._show_in_place(line.removeprefix(RELAY_MARK))
                continue
            self._write_log(line)
            if sink is not None and is_shown and line.strip():
                try:
                    self._screen.show(sink, self.number, line)
                except (OSError, ValueError) as error:
                    is_shown = False
                    self._write_log(f"(the launcher shows no more of this: {error})\n")
                    _discard(sink)

    def _show_in_place(self, line: str) -> None:
        """Shows a line in place on the terminal, and logs it if the last such line was logged some time ago."""
        now = time.monotonic()
        if line.strip() and now - self._logged_in_place >= _MIN_LOG_INTERVAL_SECONDS:
            self._logged_in_place = now
            self._write_log(line)
        with contextlib.suppress(OSError, ValueError):  # `_pass_on` handles a closed terminal
            self._screen.show_in_place(self.number, line.rstrip())

    def _write_log(self, line: str) -> None:
        with contextlib.suppress(OSError):  # on a full disk the lines are still shown
            self._log.write(line)
            self._log.flush()


def _discard(sink: TextIO) -> None:
    """Redirects to /dev/null a stream whose reader is gone, so that its buffer can be flushed at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sink.fileno())
    os.close(null)


def _watch(children: list[_Child], signals: Sequence[int]) -> _Child | None:
    """Waits until all processes have ended without a failure, or until one has failed by itself. Returns the process
    that failed, or None.

    A process that failed because another one is gone says so with its exit code, or is aborted by JAX's runtime. In
    that case this function waits a little longer for the process at fault to end. Once some processes have stopped
    early, the wait for the others is limited: the ones that stopped either saved together with the others, which should
    therefore stop too, or gave up waiting for them.
    """
    deadlines: dict[float, float] = {}
    while True:
        # Codes are read once in each round, so that a child that ends meanwhile is not judged inconsistently.
        codes = [child.code for child in children]
        failed = [child for child, code in zip(children, codes, strict=True) if _has_failed(code, signals)]
        by_itself = [child for child in failed if child.code not in _PEER_CODES]
        if by_itself:
            return by_itself[0]
        now = time.monotonic()
        if failed:
            deadlines.setdefault(_CULPRIT_TIMEOUT_SECONDS, now + _CULPRIT_TIMEOUT_SECONDS)
        elif any(code not in (None, ExitCode.FINISHED) for code in codes):
            deadlines.setdefault(_FOLLOW_TIMEOUT_SECONDS, now + _FOLLOW_TIMEOUT_SECONDS)
        if None not in codes or now > min(deadlines.values(), default=math.inf):
            return failed[0] if failed else None
        time.sleep(_POLL_SECONDS)


def _has_failed(code: int | None, signals: Sequence[int]) -> bool:
    """Returns True if a process has failed; False if it is still running (None), or was killed by a signal that we
    passed on before the process had installed its handler, when it had no work to lose."""
    if code is None:
        return False
    return code not in (ExitCode.FINISHED, ExitCode.STOPPED) and -code not in signals


def _end_all(children: list[_Child]) -> None:
    """Ends all processes that are still running, with SIGTERM and, after a grace period, with SIGKILL."""
    _send(children, signal.SIGTERM)
    _wait_for_end(children, _GRACE_SECONDS)
    _send(children, signal.SIGKILL)
    for child in children:
        child.process.wait()
        assert child.code is not None


def _wait_for_end(children: list[_Child], seconds: float) -> None:
    """Waits until all processes have ended, but no longer than `seconds`."""
    _wait(lambda: all(child.code is not None for child in children), seconds)


def _wait(is_over: Callable[[], bool], seconds: float) -> None:
    """Waits until `is_over()` is true, but no longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while not is_over() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _send(children: list[_Child], number: int) -> None:
    """Sends a signal to the processes that are still running."""
    for child in children:
        if child.code is None:
            child.process.send_signal(number)


def _environment(number: int, processes: int, coordinator: str, devices: int | None) -> dict[str, str]:
    """Returns the environment of process `number`."""
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    environment[VARIABLES["coordinator"]] = coordinator
    environment[VARIABLES["processes"]] = str(processes)
    environment[VARIABLES["process_id"]] = str(number)
    if devices is not None:
        environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    if computes_on_cpus(environment):
        environment |= huge_pages(environment)
    return environment


def check_cores(processes: int, per_process: int | None) -> None:
    """Raises `ConfigError` if this machine has too few cores to give each process `per_process` of them."""
    if per_process is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("--cores-per-process: this system cannot bind processes to cores; leave it out")
    cores = len(os.sched_getaffinity(0))
    if processes * per_process > cores:
        raise ConfigError(
            f"--cores-per-process: {processes} × {per_process} cores are more than the {cores} here; lower it"
        )


def _bind_to_cores(pid: int, number: int, processes: int, per_process: int | None = None) -> None:
    """Binds a process to a separate share of our cores, if there is at least one core for each process.

    XLA creates a thread for each core that a process may use, so the processes would otherwise compete for cores.
    """
    if not hasattr(os, "sched_setaffinity"):  # macOS
        return
    cores = sorted(os.sched_getaffinity(0))
    if per_process is None:
        begin, end = len(cores) * number // processes, len(cores) * (number + 1) // processes
    else:
        begin, end = number * per_process, (number + 1) * per_process
    if len(cores) >= processes:
        with contextlib.suppress(ProcessLookupError):  # it has ended already, which `_watch` notices
            os.sched_setaffinity(pid, cores[begin:end])


def _settings(number: int, processes: int, environment: dict[str, str]) -> list[str]:
    """Returns the settings that only this launcher knows: those of the launcher itself and the process's GPUs."""
    settings = ["cluster.launcher=explicit"]
    if environment.get("JAX_PLATFORMS") != "cpu":
        machine_gpus = gpus_here()
        num_visible = len(visible_gpus(environment, machine_gpus))
        share = assigned_gpus(Neighbours(number, processes, num_visible), environment, machine_gpus)
        settings += [] if share is None else [as_override("cluster.local_devices", list(share))]
    return settings


def local_run(
    train_arguments: list[str],
    devices: int | None,
    module: tuple[str, ...] = ("jaxmnt.train",),
    parse: Callable[[list[str]], argparse.Namespace] = parse_arguments,
) -> LocalCommand:
    """Returns the command to start. `parse` reads its arguments, which name a config and overrides. They are read here,
    so that a mistake is reported once instead of once per process."""
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
    return LocalCommand(train_arguments, config, devices, module)


def _log_dir(local: LocalCommand) -> Path:
    """Creates the folder for the run's logs, and returns its path."""
    log_dir = local.config.run_dir / "logs"
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run.dir: {printable(str(log_dir))} cannot be created: {error.strerror}; choose another run.dir"
        ) from error
    return log_dir


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
