"""Decides whether and when a run that has failed is restarted, and with how many processes."""

import re
from dataclasses import dataclass

from jaxmnt.config.schema import Config
from jaxmnt.errors import ConfigError, ExitCode
from jaxmnt.fleet.restart_policy import Start, failures_without_gain, reason_to_give_up
from jaxmnt.launch.job import check_batch
from jaxmnt.launch.ledger import Outcome

_MIN_WAIT_SECONDS, _MAX_WAIT_SECONDS = 1.0, 60.0
"""Bounds of the time before a restart, which doubles with each failure."""

_FINAL_CODES = (ExitCode.FINISHED, ExitCode.STOPPED, ExitCode.CONFIG)
"""Exit codes after which a run is not restarted."""


@dataclass(frozen=True)
class Verdict:
    """The decision that is made after a start has ended."""

    processes: int | None = None
    """Number of processes in the next start; None if there is no next start."""
    wait_seconds: float = 0.0
    """Seconds to wait before the next start."""
    why: str = ""
    """Explanation for the user; may be empty."""


class Restarts:
    """Decides about the restarts of one run, of which there are at most `max_restarts`. The time before a restart
    doubles with each failure, until a step is gained."""

    def __init__(self, max_restarts: int, counts: list[int] | None = None):
        """`counts` are the numbers of processes with which the run may continue, if not only with the first number."""
        self._max_restarts, self._counts = max_restarts, sorted(counts or [])
        self._restarts_done = self._absences = 0
        self._starts: list[Start] = []

    def decide(
        self,
        code: int,
        processes: int,
        newest: int,
        outcome: Outcome,
        *,
        devices: int,
        now: float,
        waited: bool = False,
    ) -> Verdict:
        """Decides about the next start after a start with `processes` processes has ended with `code`.

        `newest` is the step of the checkpoint that the run wrote last, or 0 if it has none, and `outcome` says how far
        the start has come and why it ended. `now` is the time in Unix seconds. `waited` is True for a start that was
        abandoned because a process never appeared. It counts neither as a failure nor as a restart.
        """
        if self._max_restarts == 0 or (code in _FINAL_CODES and not waited):
            return Verdict()
        if waited:
            self._absences += 1
            return self._next_start("a process did not appear: started again", processes, newest, self._absences)
        self._absences = 0
        self._starts.append(Start(now, True, outcome.step, outcome.cause, checkpoint=newest))
        if reason := reason_to_give_up(self._starts, devices):
            return Verdict(why=f"given up: {reason}{': ' if outcome.details else ''}{outcome.details}")
        if self._restarts_done >= self._max_restarts:
            return Verdict(why=f"given up after {self._restarts_done} restarts (--max-restarts)")
        self._restarts_done += 1
        has_gained = any(start.step for start in self._starts)
        failures = len(failures_without_gain(self._starts)) + has_gained  # including the one after the last gain
        return self._next_start(f"restart {self._restarts_done} of {self._max_restarts}", processes, newest, failures)

    def _next_start(self, event: str, processes: int, newest: int, attempt: int) -> Verdict:
        """Returns the decision to start again. This is attempt number `attempt` without a step gained. From the
        second attempt on, it has fewer processes if that is allowed."""
        wait = min(_MIN_WAIT_SECONDS * 2 ** min(attempt - 1, 10), _MAX_WAIT_SECONDS)
        fewer_processes = [count for count in self._counts if count < processes]
        next_processes = fewer_processes[-1] if attempt > 1 and fewer_processes else processes
        how = f" with {next_processes} processes instead of {processes}" if next_processes != processes else ""
        return Verdict(next_processes, wait, f"{event} in {wait:g} s{how}, from step {newest}")


def fitting_counts(elastic: str | None, processes: int, devices: int | None, config: Config) -> list[int]:
    """Returns the numbers of processes within `--elastic MIN:MAX` that fit the mesh and the global batch.

    Raises `ConfigError` if the range is malformed, or if `processes` itself does not fit.
    """
    if elastic is None:
        return []
    bounds = re.fullmatch(r"(\d+):(\d+)", elastic)
    if not bounds or not 1 <= int(bounds[1]) <= processes <= int(bounds[2]):
        raise ConfigError(
            f"--elastic: {elastic!r} is not MIN:MAX around --processes {processes}, such as 2:{processes}"
        )
    if devices is None:
        raise ConfigError("--elastic: --devices-per-process is missing, which decides what fits the mesh; give it")
    counts = [count for count in range(int(bounds[1]), processes + 1) if _is_possible(count * devices, config)]
    if counts[-1:] != [processes]:
        raise ConfigError(
            f"--elastic: {processes} processes of {devices} devices do not fit the mesh and a global batch of "
            f"{config.data.global_batch_size} rows; change one of them"
        )
    return counts


def _is_possible(devices: int, config: Config) -> bool:
    """Returns True if `devices` devices can form the mesh and share the global batch evenly."""
    try:
        check_batch(config, devices)
    except ConfigError:
        return False
    return True
