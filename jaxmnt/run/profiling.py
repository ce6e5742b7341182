"""A profile of one step, in one process, of one device, when somebody asks for it.

They ask by `telemetry.profile_at`, by the file PROFILE in the run directory, or by the signal SIGUSR2.

On GPUs, ending a trace has crashed processes, and has taken minutes (https://github.com/jax-ml/jax/issues/40260). So a
checkpoint is written first, and the others wait for as long as that takes.
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
"""Holds the number of the process that is to make the profile, or nothing for process 0."""
PROFILES = "profiles"
"""In a run directory: a folder for each profiled step, for XProf and TensorBoard's profile plugin."""
SIGNAL = signal.SIGUSR2

PROFILE_SECONDS = 1800.0
"""For a profile to be made and written."""
_LOOK_SECONDS = 2.0
"""Between two looks for the file."""

Result = TypeVar("Result")


class Profiler:
    """All processes have one, and call `step` for each step: what one of them wishes, all learn through the metrics."""

    def __init__(self, run: CompiledRun):
        """With `telemetry.profile_at`, a profile is made of the first step from then on, once in a run."""
        at = run.config.telemetry.profile_at
        self._run_dir, self._at, self._identity = run.directory, at, run.identity
        self._events, self._status = run.events, run.status
        self._signalled = self.armed = False
        """Whether a signal has come; whether the next step is profiled."""
        if at is not None and self._done_before(at):
            self._at = None
        self.step_seconds = 0.0
        """What the last profiled step took by itself."""
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._handled = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While entered, the file and the signal ask for a profile; the signal in the main thread alone."""
        if self._identity.process_id == 0:
            threading.Thread(target=self._look, name="PROFILE", daemon=True).start()
        before = None
        with suppress(ValueError):  # not the main thread
            before = signal.signal(SIGNAL, self._ask)
        try:
            yield
        finally:
            self._end.set()
            if before is not None:
                signal.signal(SIGNAL, before)

    def _ask(self, *_: object) -> None:
        self._signalled = True

    def _look(self) -> None:
        """In a thread: a file system may hang."""
        while not self._end.is_set():
            with suppress(OSError), self._lock:  # the file system may come back
                self._signalled |= (self._run_dir / PROFILE_FILE).exists()
            self._end.wait(_LOOK_SECONDS)

    def wants(self, step: int) -> bool:
        """Whether this process asks for a profile when `step` is taken. For the file and the config process 0 asks."""
        return self._signalled or (self._at is not None and step >= self._at and self._identity.process_id == 0)

    def due(self, wanted_in: int) -> bool:
        """Whether a profile is to be made of the next step, given the last step in which somebody wished it. A save
        comes first."""
        return wanted_in > self._handled

    def arm(self, saved: bool, step: int) -> None:
        """After that save: the next step is profiled if it succeeded."""
        self.armed, self._handled = saved, step
        if not saved:
            # Or it would ask for saves until the run is given up.
            self._at = None
            self._end.set()
            self._signalled = False
            self._status.line(f"WARNING step {step}: no profile is made, because the checkpoint before it failed")

    def step(self, step: int, take: Callable[[], Result]) -> Result:
        """Takes a step, in one process under a profile, and returns when that is written and all know. All processes
        call this together."""
        self.armed = False
        self._handled = step  # its own flags still have the wish
        process = int(broadcast("who makes the profile", self._chosen(), self._identity))
        folder = self._run_dir / PROFILES / str(step)
        with self._lock:
            if self._identity.process_id == 0:
                self._note_begun(folder)
            self._signalled = False
        timed = lambda: self._timed(take)
        result = self._profiled(step, folder, timed) if self._identity.process_id == process else timed()
        barrier("the profile is written", self._identity, PROFILE_SECONDS)
        return result

    def _note_begun(self, folder: Path) -> None:
        """Before a profile begins, so that a process that does not survive it is not asked again."""
        self._at = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (self._run_dir / PROFILE_FILE).unlink(missing_ok=True)
        except OSError as error:
            self._end.set()
            self._status.line(f"WARNING {printable(str(error))}: the file {PROFILE_FILE} is not looked for any more")

    def _timed(self, take: Callable[[], Result]) -> Result:
        """When the devices have done it."""
        started = time.perf_counter()
        result = jax.block_until_ready(take())
        self.step_seconds = time.perf_counter() - started
        return result

    def _chosen(self) -> str | None:
        """The process that the file names, as process 0 reads it."""
        if self._identity.process_id != 0:
            return None
        try:
            text = (self._run_dir / PROFILE_FILE).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):  # asked for in another way
            text = ""
        known = re.fullmatch("[0-9]{1,9}", text) and int(text) < self._identity.processes
        return text if known else "0"

    def _profiled(self, step: int, folder: Path, take: Callable[[], Result]) -> Result:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.host_tracer_level = 2 if jax.default_backend() == "cpu" else 0  # where CPUs tell of operations
        if jax.default_backend() == "gpu":
            options.advanced_configuration = {"gpu_num_chips_to_profile_per_task": 1}
        started = time.perf_counter()
        try:
            jax.profiler.start_trace(str(folder), profiler_options=options)
        except Exception as error:  # somebody else's trace may be under way
            self._tell(step, folder, None, 0.0, summary(error))
            return take()
        found, trouble = None, "the trace has no operations"
        try:
            result = take()
        finally:
            try:
                jax.profiler.stop_trace()
                found = self._read(folder)
            except Exception as error:  # a profile ends no run
                trouble = summary(error)
        self._tell(step, folder, found, time.perf_counter() - started, "" if found else trouble)
        return result

    def _read(self, folder: Path) -> DeviceProfile | None:
        """The newest trace in a folder, whose summary is written beside it."""
        files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
        found = read_profile(files[-1]) if files else None
        if found is not None:
            publish(folder / "summary.json", json_text(asdict(found), indent=2) + "\n")
        return found

    def _tell(self, step: int, folder: Path, found: DeviceProfile | None, seconds: float, trouble: str) -> None:
        told: dict[str, Any] = {} if found is None else asdict(found)
        told.pop("operations", None)  # they are in the summary
        self._events.write("profile", step=step, file=str(folder), took_seconds=seconds, why=trouble, **told)
        if found is None:
            self._status.line(f"WARNING step {step}: no profile was made: {trouble}")
            return
        share = lambda part: f"{part / max(found.seconds, 1e-12):.0%}"
        self._status.line(
            f"profile step {step}: {found.seconds * 1e3:.1f} ms on a device: computation {share(found.computation)}, "
            f"communication {share(found.communication)}, both at once {share(found.overlap)}, idle "
            f"{share(found.idle)}; {printable(str(folder))}"
        )

    def _done_before(self, at: int) -> bool:
        """Whether a profile was made, or begun, since the step that the config names."""
        folders = (self._run_dir / PROFILES).glob("*")
        return any(folder.name.isdecimal() and int(folder.name) >= at for folder in folders)
