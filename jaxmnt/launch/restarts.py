"""Decides whether a run that has failed is restarted, when, and with how many processes."""

import re
from dataclasses import dataclass

from jaxmnt.config.schema import Config
from jaxmnt.errors import ConfigError, ExitCode
from jaxmnt.launch.job import check_batch

_TRIES = 3
"""Consecutive failed starts without a new checkpoint after which a run is given up."""
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1.0, 60.0
"""Bounds of the exponential back-off."""

_FINAL_CODES = (ExitCode.FINISHED, ExitCode.STOPPED, ExitCode.CONFIG)
"""Exit codes after which a run is not restarted."""


@dataclass(frozen=True)
class Verdict:
    """The decision after a start has ended."""

    processes: int | None = None
    """Number of processes of the next start; None if there is none."""
    wait_seconds: float = 0.0
    """Seconds to wait before it."""
    why: str = ""
    """Explanation for the user; may be empty."""


class Restarts:
    """The restarts of one run: at most `most`, with a back-off that is reset by each new checkpoint."""

    def __init__(self, most: int, counts: list[int] | None = None):
        """`counts` are the numbers of processes with which the run may continue."""
        self._most, self._counts = most, sorted(counts or [])
        self._done = self._failures = self._waits = 0
        self._newest: int | None = None

    def after(self, code: int, processes: int, newest: int, *, waited: bool = False) -> Verdict:
        """Decides about the next start after one of `processes` processes has ended with `code`.

        `newest` is the step of the checkpoint that the run wrote last, 0 if it has none. Any change of it is progress:
        it may be lower than before if the run fell back from a damaged checkpoint and has written others since.
        `waited` marks a start that was abandoned because a process never appeared; it counts neither as a failure nor
        as a restart.
        """
        if self._most == 0 or (code in _FINAL_CODES and not waited):
            return Verdict()
        if waited:
            self._waits += 1
            return self._again("a process did not appear: started again", processes, newest, self._waits)
        gained = self._newest is None or newest != self._newest
        self._newest, self._waits = newest, 0
        self._failures = 1 if gained else self._failures + 1
        if self._failures >= _TRIES:
            return Verdict(why=f"given up: {_TRIES} starts failed without a checkpoint after step {newest}")
        if self._done >= self._most:
            return Verdict(why=f"given up after {self._done} restarts (--max-restarts)")
        self._done += 1
        return self._again(f"restart {self._done} of {self._most}", processes, newest, self._failures)

    def _again(self, what: str, processes: int, newest: int, times: int) -> Verdict:
        """Returns the next start, the `times`th without a new checkpoint: from the second on with fewer processes, if
        that is allowed."""
        wait = min(_FIRST_WAIT_SECONDS * 2 ** min(times - 1, 10), _LONGEST_WAIT_SECONDS)
        fewer = [count for count in self._counts if count < processes]
        next_processes = fewer[-1] if times > 1 and fewer else processes
        how = f" with {next_processes} processes instead of {processes}" if next_processes != processes else ""
        return Verdict(next_processes, wait, f"{what} in {wait:g} s{how}, from step {newest}")


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
    counts = [count for count in range(int(bounds[1]), processes + 1) if _fits(count * devices, config)]
    if counts[-1:] != [processes]:
        raise ConfigError(
            f"--elastic: {processes} processes of {devices} devices do not fit the mesh and a global batch of "
            f"{config.data.global_batch_size} rows; change one of them"
        )
    return counts


def _fits(devices: int, config: Config) -> bool:
    """Returns True if the mesh and the global batch divide over so many devices."""
    try:
        check_batch(config, devices)
    except ConfigError:
        return False
    return True
