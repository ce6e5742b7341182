"""Profiles one step of one device in one process, on request.

Request a profile by `telemetry.profile_at`, by the file PROFILE in the run directory, or by the signal SIGUSR2.

On GPUs, stopping a trace has crashed processes, and has taken minutes (https://github.com/jax-ml/jax/issues/40260). So
a checkpoint is written first, and the other processes wait until the trace is written.
"""

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxmnt.distributed.coordination import barrier, broadcast
from jaxmnt.errors import printable, summary
from jaxmnt.run.values import CompiledRun
from jaxmnt.storage import publish
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.device_profile import DeviceProfile, read_profile

PROFILE_FILE = "PROFILE"
"""Name of the request file. It contains the number of the process that makes the profile, or nothing for process 0."""
PROFILES = "profiles"
"""Folder in a run directory with one folder per profiled step, for XProf and TensorBoard's profile plugin."""
SIGNAL = signal.SIGUSR2

PROFILE_SECONDS = 1800.0
"""Timeout for making and writing a profile."""
_LOOK_SECONDS = 2.0
"""Interval between two checks for the file."""

Result = TypeVar("Result")


class Profiler:
    """Makes profiles on request. Every process has one; the metrics tell all processes of a request in one of them."""

    def __init__(self, run: CompiledRun):
        """With `telemetry.profile_at`, the first step from that one on is profiled, once in a run."""
        at = run.config.telemetry.profile_at
        self._run_dir, self._at, self._identity = run.directory, at, run.identity
        self._events, self._status = run.events, run.status
        self._signalled = False
        """True if the signal or the file has requested a profile."""
        self.armed = False
        """True if the next step is to be profiled."""
        if at is not None and self._was_profiled_since(at):
            self._at = None
        self.step_seconds = 0.0
        """Seconds that the last profiled step took, without the profiler."""
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._handled_step = 0
        """Requests made in this step or before are handled."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listens for the file and the signal in its context; for the signal only if this is the main thread."""
        if self._identity.process_id == 0:
            threading.Thread(target=self._watch_for_file, name="PROFILE", daemon=True).start()
        before = None
        with suppress(ValueError):  # not the main thread
            before = signal.signal(SIGNAL, self._on_signal)
        try:
            yield
        finally:
            self._end.set()
            if before is not None:
                signal.signal(SIGNAL, before)

    def _on_signal(self, *_: object) -> None:
        self._signalled = True

    def _watch_for_file(self) -> None:
        """Watches for the file PROFILE, in its own thread because a file system may hang."""
        while not self._end.is_set():
            with suppress(OSError), self._lock:  # the file system may come back
                self._signalled |= (self._run_dir / PROFILE_FILE).exists()
            self._end.wait(_LOOK_SECONDS)

    def wants(self, step: int) -> bool:
        """Returns True if this process requests a profile in `step`. Process 0 requests for the file and the config."""
        return self._signalled or (self._at is not None and step >= self._at and self._identity.process_id == 0)

    def due(self, requested_in: int) -> bool:
        """Returns True if the next step is to be profiled, after a save, given the last step with a request."""
        return requested_in > self._handled_step

    def arm(self, saved: bool, step: int) -> None:
        """Makes the next step profiled if the save before it succeeded."""
        self.armed, self._handled_step = saved, step
        if not saved:
            # Drop the request, which would otherwise cause failing saves until the run gives up.
            self._at = None
            self._end.set()
            self._signalled = False
            self._status.line(f"WARNING step {step}: no profile is made, because the checkpoint before it failed")

    def step(self, step: int, take: Callable[[], Result]) -> Result:
        """Takes a step, in one process with the profiler, and returns when the profile is written.

        All processes must call this together.
        """
        self.armed = False
        self._handled_step = step  # the flags of this step still contain the request
        process = int(broadcast("who makes the profile", self._requested_process(), self._identity))
        folder = self._run_dir / PROFILES / str(step)
        with self._lock:
            if self._identity.process_id == 0:
                self._mark_begun(folder)
            self._signalled = False
        timed = lambda: self._take_timed(take)
        result = self._take_profiled(step, folder, timed) if self._identity.process_id == process else timed()
        barrier("the profile is written", self._identity, PROFILE_SECONDS)
        return result

    def _mark_begun(self, folder: Path) -> None:
        """Removes the request and makes the folder before a profile begins: a crash in it must not be repeated."""
        self._at = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (self._run_dir / PROFILE_FILE).unlink(missing_ok=True)
        except OSError as error:
            self._end.set()
            self._status.line(f"WARNING {printable(str(error))}: the file {PROFILE_FILE} is no longer watched")

    def _take_timed(self, take: Callable[[], Result]) -> Result:
        """Takes a step and measures its time, until the devices have finished it."""
        started = time.perf_counter()
        result = jax.block_until_ready(take())
        self.step_seconds = time.perf_counter() - started
        return result

    def _requested_process(self) -> str | None:
        """Reads the process that the file names, in process 0; process 0 itself if it names none."""
        if self._identity.process_id != 0:
            return None
        try:
            text = (self._run_dir / PROFILE_FILE).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):  # the request came from the config or a signal
            text = ""
        exists = re.fullmatch("[0-9]{1,9}", text) and int(text) < self._identity.processes
        return text if exists else "0"

    def _take_profiled(self, step: int, folder: Path, take: Callable[[], Result]) -> Result:
        """Takes a step with the profiler and reports the profile. Errors of the profiler do not end the run."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.host_tracer_level = 2 if jax.default_backend() == "cpu" else 0  # on CPU it traces the operations
        if jax.default_backend() == "gpu":
            options.advanced_configuration = {"gpu_num_chips_to_profile_per_task": 1}
        started = time.perf_counter()
        try:
            jax.profiler.start_trace(str(folder), profiler_options=options)
        except Exception as error:  # another trace may be running
            self._report(step, folder, None, 0.0, summary(error))
            return take()
        profile, trouble = None, "the trace has no operations"
        try:
            result = take()
        finally:
            try:
                jax.profiler.stop_trace()
                profile = self._read(folder)
            except Exception as error:
                trouble = summary(error)
        self._report(step, folder, profile, time.perf_counter() - started, "" if profile else trouble)
        return result

    def _read(self, folder: Path) -> DeviceProfile | None:
        """Reads the newest trace in a folder and writes its summary beside it."""
        files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
        profile = read_profile(files[-1]) if files else None
        if profile is not None:
            publish(folder / "summary.json", json_text(asdict(profile), indent=2) + "\n")
        return profile

    def _report(self, step: int, folder: Path, profile: DeviceProfile | None, seconds: float, trouble: str) -> None:
        """Writes the event about a profile, or about its failure, and prints a line."""
        fields: dict[str, Any] = {} if profile is None else asdict(profile)
        fields.pop("operations", None)  # they are in the summary
        self._events.write("profile", step=step, file=str(folder), took_seconds=seconds, why=trouble, **fields)
        if profile is None:
            self._status.line(f"WARNING step {step}: no profile was made: {trouble}")
            return
        share = lambda part: f"{part / max(profile.seconds, 1e-12):.0%}"
        self._status.line(
            f"profile step {step}: {profile.seconds * 1e3:.1f} ms on a device: computation "
            f"{share(profile.computation)}, communication {share(profile.communication)}, both at once "
            f"{share(profile.overlap)}, idle {share(profile.idle)}; {printable(str(folder))}"
        )

    def _was_profiled_since(self, at: int) -> bool:
        """Returns True if a profile of step `at` or a later one was made, or begun."""
        folders = (self._run_dir / PROFILES).glob("*")
        return any(folder.name.isdecimal() and int(folder.name) >= at for folder in folders)
