"""python -m jaxmnt.launch.child PIPE LOG COLUMNS MODULE …

What `launch local` starts: MODULE, as `python -m MODULE …` would, and a thread that asks it to stop when the launcher
is gone. PIPE is the reading end of a pipe whose writing end only the launcher has: the kernel closes that, whatever
ends the launcher. From then on, what would have gone to the launcher goes to LOG. COLUMNS is how wide a line of this
process may be on the launcher's terminal, or 0 without a terminal.
"""

import os
import runpy
import signal
import sys
import threading

from jaxmnt.errors import remark
from jaxmnt.telemetry.progress import StatusLine

_DESCRIPTORS = 256
"""Where copies of stdout may be."""

_Place = tuple[int, int] | None
"""What a descriptor leads to, by device and inode; None if it is closed."""


def main(arguments: list[str]) -> None:
    pipe, log, columns, module, *others = arguments
    StatusLine.relay_columns = int(columns)
    os.set_inheritable(int(pipe), False)
    to_launcher = {_place(1), _place(2)}
    threading.Thread(target=_watch, args=(int(pipe), log, to_launcher), name="launcher", daemon=True).start()
    sys.argv = [module, *others]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _watch(pipe: int, log: str, to_launcher: set[_Place]) -> None:
    """Waits for the end of the launcher, which never writes."""
    while os.read(pipe, 1):
        pass
    _lead_output(log, to_launcher)
    remark("the launcher is gone, so this process is asked to stop")
    number = next((one for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if _is_heard(one)), signal.SIGKILL)
    os.killpg(0, number)  # a group of our own, with whatever we have started


def _lead_output(log: str, to_launcher: set[_Place]) -> None:
    """Into the log, wherever it went to the launcher: a write into a pipe that nobody reads fails."""
    try:
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError:
        file = os.open(os.devnull, os.O_WRONLY)
    for descriptor in range(_DESCRIPTORS):
        if (place := _place(descriptor)) is not None and place in to_launcher:
            os.dup2(file, descriptor, inheritable=descriptor < 3)


def _place(descriptor: int) -> _Place:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_heard(number: int) -> bool:
    return signal.getsignal(number) != signal.SIG_IGN


if __name__ == "__main__":
    main(sys.argv[1:])
