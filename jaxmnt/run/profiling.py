"""Profiles one step of one device in one process, on request.

Request a profile by `telemetry.profile_at`, by the file PROFILE in the run directory, or by the signal SIGUSR2.

On GPUs, the end of a trace has crashed processes or taken minutes (https://github.com/jax-ml/jax/issues/40260). So a
checkpoint is written first, and the other processes wait until the trace is written.
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
"""Name of the request file. It contains the number of the process that is to make the profile; if empty, process 0
does."""
PROFILES_FOLDER = "profiles"
"""Folder in a run directory with one folder per profiled step, for XProf and TensorBoard's profile plugin."""
PROFILE_SIGNAL = signal.SIGUSR2

PROFILE_TIMEOUT_SECONDS = 1800.0
"""Timeout for making and writing a profile."""
_POLL_SECONDS = 2.0
"""Interval between two checks for the file."""

Result = TypeVar("Result")


class Profiler:
    """Makes profiles on request.

    Every process has a profiler. The metrics tell all processes of a request in any of them.
    """

    def __init__(self, run: CompiledRun):
        """With `telemetry.profile_at`, profiles the first step at or after it, once in a run."""
        profile_at = run.config.telemetry.profile_at
        self._run_dir, self._profile_at, self._identity = run.directory, profile_at, run.identity
        self._events, self._status = run.events, run.status
        self._signalled = False
        """True if the signal or the file has requested a profile."""
        self.is_armed = False
        """True if the next step is to be profiled."""
        if profile_at is not None and self._was_profiled_since(profile_at):
            self._profile_at = None
        self.step_seconds = 0.0
        """Seconds that the last profiled step took, without the profiler."""
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._handled_step = 0
        """Requests that were made in this step or an earlier one have been handled."""

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Context manager that listens for the file and, in the main thread, for the signal."""
        if self._identity.process_id == 0:
            threading.Thread(target=self._watch_for_file, name="PROFILE", daemon=True).start()
        old_handler = None
        with suppress(ValueError):  # raised outside the main thread
            old_handler = signal.signal(PROFILE_SIGNAL, self._on_signal)
        try:
            yield
        finally:
            self._end.set()
            if old_handler is not None:
                signal.signal(PROFILE_SIGNAL, old_handler)

    def _on_signal(self, *_: object) -> None:
        self._signalled = True

    def _watch_for_file(self) -> None:
        """Watches for the file PROFILE. Runs in its own thread, because a file system may hang."""
        while not self._end.is_set():
            with suppress(OSError), self._lock:  # the file system may be available again later
                self._signalled |= (self._run_dir / PROFILE_FILE).exists()
            self._end.wait(_POLL_SECONDS)

    def wants_profile(self, step: int) -> bool:
        """Returns True if this process requests a profile in `step`. Process 0 does so if the file or the config
        requests one."""
        return self._signalled or (
            self._profile_at is not None and step >= self._profile_at and self._identity.process_id == 0
        )

    def is_due(self, requested_in: int) -> bool:
        """Returns True if the next step is to be profiled, after a save.

        `requested_in` is the last step with a request.
        """
        return requested_in > self._handled_step

    def arm(self, saved: bool, step: int) -> None:
        """Lets the step after `step` be profiled, if the save before it succeeded (`saved`)."""
        self.is_armed, self._handled_step = saved, step
        if not saved:
            # Drop the request. Otherwise it would cause saves that fail until the run gives up.
            self._profile_at = None
            self._end.set()
            self._signalled = False
            self._status.line(f"WARNING step {step}: no profile is made, because the save before it failed")

    def step(self, step: int, take_step: Callable[[], Result]) -> Result:
        """Takes a step, which one of the processes profiles, and returns when the profile is written.

        All processes must call this together.
        """
        self.is_armed = False
        self._handled_step = step  # the flags of this step still contain the request
        process = int(broadcast("who makes the profile", self._requested_process(), self._identity))
        folder = self._run_dir / PROFILES_FOLDER / str(step)
        with self._lock:
            if self._identity.process_id == 0:
                self._mark_begun(folder)
            self._signalled = False
        take_timed = lambda: self._take_timed(take_step)
        is_profiled_here = self._identity.process_id == process
        result = self._take_profiled(step, folder, take_timed) if is_profiled_here else take_timed()
        barrier("the profile is written", self._identity, PROFILE_TIMEOUT_SECONDS)
        return result

    def _mark_begun(self, folder: Path) -> None:
        """Removes the request and makes the folder before a profile begins, so that a crash in it is not repeated."""
        self._profile_at = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (self._run_dir / PROFILE_FILE).unlink(missing_ok=True)
        except OSError as error:
            self._end.set()
            self._status.line(f"WARNING {printable(str(error))}: the file {PROFILE_FILE} is no longer watched")

    def _take_timed(self, take_step: Callable[[], Result]) -> Result:
        """Takes a step, waits until the devices have finished it, and measures how long that took."""
        started = time.perf_counter()
        result = jax.block_until_ready(take_step())
        self.step_seconds = time.perf_counter() - started
        return result

    def _requested_process(self) -> str | None:
        """Returns, in process 0, the number of the process that the file names; "0" if it names no process of the
        run."""
        if self._identity.process_id != 0:
            return None
        try:
            text = (self._run_dir / PROFILE_FILE).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):  # the request came from the config or a signal
            text = ""
        is_process = re.fullmatch("[0-9]{1,9}", text) and int(text) < self._identity.processes
        return text if is_process else "0"

    def _take_profiled(self, step: int, folder: Path, take_step: Callable[[], Result]) -> Result:
        """Takes a step with the profiler and reports the profile. Errors of the profiler do not end the run."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        # On CPU the host tracer traces the operations.
        options.host_tracer_level = 2 if jax.default_backend() == "cpu" else 0
        if jax.default_backend() == "gpu":
            options.advanced_configuration = {"gpu_num_chips_to_profile_per_task": 1}
        started = time.perf_counter()
        try:
            jax.profiler.start_trace(str(folder), profiler_options=options)
        except Exception as error:  # another trace may be running
            self._report(step, folder, None, 0.0, summary(error))
            return take_step()
        profile, trouble = None, "the trace has no operations"
        try:
            result = take_step()
        finally:
            try:
                jax.profiler.stop_trace()
                profile = self._read_newest_profile(folder)
            except Exception as error:
                trouble = summary(error)
        self._report(step, folder, profile, time.perf_counter() - started, "" if profile else trouble)
        return result

    def _read_newest_profile(self, folder: Path) -> DeviceProfile | None:
        """Reads the newest trace in a folder and writes a summary of it into the folder."""
        files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
        profile = read_profile(files[-1]) if files else None
        if profile is not None:
            publish(folder / "summary.json", json_text(asdict(profile), indent=2) + "\n")
        return profile

    def _report(self, step: int, folder: Path, profile: DeviceProfile | None, seconds: float, trouble: str) -> None:
        """Writes the event about a profile, or about its failure if `profile` is None, and prints a line."""
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

    def _was_profiled_since(self, first_step: int) -> bool:
        """Returns True if a profile of `first_step` or a later step was made, or begun."""
        folders = (self._run_dir / PROFILES_FOLDER).glob("*")
        return any(folder.name.isdecimal() and int(folder.name) >= first_step for folder in folders)
