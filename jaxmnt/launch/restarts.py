"""Whether a run that has failed is started again, when, and with how many processes."""

import re
from dataclasses import dataclass

from jaxmnt.config.schema import Config
from jaxmnt.errors import ConfigError, ExitCode
from jaxmnt.launch.job import check_batch

_TRIES = 3
"""Starts in a row that may fail without a new checkpoint."""
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1.0, 60.0

_NOT_AGAIN = (ExitCode.FINISHED, ExitCode.STOPPED, ExitCode.CONFIG)


@dataclass(frozen=True)
class Verdict:
    """What happens after a start has ended."""

    processes: int | None = None
    """With how many it is started again; None if it is not."""
    wait_seconds: float = 0.0
    why: str = ""
    """A line for people; empty if there is nothing to say."""


class Restarts:
    """The restarts of one run: so many at most, with a back-off that begins anew with each new checkpoint."""

    def __init__(self, most: int, counts: list[int] | None = None):
        """`counts` are the numbers of processes that it may go on with."""
        self._most, self._counts = most, sorted(counts or [])
        self._done = self._in_vain = self._waits = 0
        self._newest: int | None = None

    def after(self, code: int, processes: int, newest: int, *, waited: bool = False) -> Verdict:
        """`newest` is the step of the checkpoint that the run wrote last, 0 if it has none. It may be lower than
        before: a run that fell back from a damaged checkpoint has gained those that it wrote since.

        `waited` is a start that came to nothing because a process never appeared: neither a failure nor a restart.
        """
        if self._most == 0 or (code in _NOT_AGAIN and not waited):
            return Verdict()
        if waited:
            self._waits += 1
            return self._again("a process did not appear: started again", processes, newest, self._waits)
        gained = self._newest is None or newest != self._newest
        self._newest, self._waits = newest, 0
        self._in_vain = 1 if gained else self._in_vain + 1
        if self._in_vain >= _TRIES:
            return Verdict(why=f"given up: {_TRIES} starts failed without a checkpoint after step {newest}")
        if self._done >= self._most:
            return Verdict(why=f"given up after {self._done} restarts (--max-restarts)")
        self._done += 1
        return self._again(f"restart {self._done} of {self._most}", processes, newest, self._in_vain)

    def _again(self, what: str, processes: int, newest: int, times: int) -> Verdict:
        """With fewer processes, where it may, when that is not the first time without a step gained."""
        wait = min(_FIRST_WAIT_SECONDS * 2 ** min(times - 1, 10), _LONGEST_WAIT_SECONDS)
        fewer = [count for count in self._counts if count < processes]
        chosen = fewer[-1] if times > 1 and fewer else processes
        how = f" with {chosen} processes instead of {processes}" if chosen != processes else ""
        return Verdict(chosen, wait, f"{what} in {wait:g} s{how}, from step {newest}")


def fitting_counts(elastic: str | None, processes: int, devices: int | None, config: Config) -> list[int]:
    """The numbers of processes within `--elastic MIN:MAX` that the mesh and the global batch divide over.

    Raises `ConfigError` if the range makes no sense, or if its largest is not possible.
    """
    if elastic is None:
        return []
    found = re.fullmatch(r"(\d+):(\d+)", elastic)
    if not found or not 1 <= int(found[1]) <= processes <= int(found[2]):
        raise ConfigError(
            f"--elastic: {elastic!r} is not MIN:MAX around --processes {processes}, such as 2:{processes}"
        )
    if devices is None:
        raise ConfigError("--elastic: needs --devices-per-process, to know what divides; give it")
    counts = [count for count in range(int(found[1]), processes + 1) if _fits(count * devices, config)]
    if counts[-1:] != [processes]:
        raise ConfigError(
            f"--elastic: {processes} processes of {devices} devices do not fit the mesh and a global batch of "
            f"{config.data.global_batch_size} rows; change one of them"
        )
    return counts


def _fits(devices: int, config: Config) -> bool:
    try:
        check_batch(config, devices)
    except ConfigError:
        return False
    return True
