"""How long a start takes, phase by phase, from the birth of the process to its first step."""

import os
import time
from pathlib import Path


class StartClock:
    """Laps, one after the other, in seconds. The first goes from when the kernel made the process to now."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"process": _age()}
        self._last = time.perf_counter()
        self._asked = self._found = 0

    def lap(self, phase: str) -> None:
        """What was done since the last lap was this phase."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def watch_compile_cache(self) -> None:
        """Counts from now on which programs JAX finds in its compile cache, and which it has to compile."""
        from jax import monitoring

        def count(event: str, **_: object) -> None:
            self._asked += event == "/jax/compilation_cache/compile_requests_use_cache"
            self._found += event == "/jax/compilation_cache/cache_hits"

        monitoring.register_event_listener(count)

    @property
    def compile_cache(self) -> dict[str, int]:
        """Programs that were found there and that were not: hits and misses."""
        return {"hits": self._found, "misses": self._asked - self._found}


def _age() -> float:
    """Seconds since this process was started; 0 where the kernel does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
