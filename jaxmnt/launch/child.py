"""python -m jaxmnt.launch.child PIPE LOG COLUMNS MODULE …

This is the process that `launch local` starts. It runs MODULE as `python -m MODULE …` would, with a thread that asks it
to stop when the launcher is gone. PIPE is the reading end of a pipe whose writing end only the launcher has, so the
kernel closes the pipe however the launcher ends. From then on, output for the launcher goes to LOG. COLUMNS is the
width of a line of this process on the launcher's terminal, or 0 without a terminal.
"""

import os
import runpy
import signal
import sys
import threading

from jaxmnt.errors import remark
from jaxmnt.telemetry.progress import StatusLine

_MAX_DESCRIPTORS = 256
"""Number of descriptors that are checked for being copies of stdout or stderr."""

_FileId = tuple[int, int] | None
"""Device and inode of a descriptor's file; None if the descriptor is closed."""


def main(arguments: list[str]) -> None:
    pipe, log, columns, module, *module_arguments = arguments
    StatusLine.relay_columns = int(columns)
    os.set_inheritable(int(pipe), False)
    launcher_files = {_file_id(1), _file_id(2)}
    threading.Thread(target=_watch, args=(int(pipe), log, launcher_files), name="launcher", daemon=True).start()
    sys.argv = [module, *module_arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _watch(pipe: int, log: str, launcher_files: set[_FileId]) -> None:
    """Waits until the launcher, which never writes to the pipe, has ended, and then asks this process to stop."""
    while os.read(pipe, 1):
        pass
    StatusLine.relay_columns = 0
    _redirect_output(log, launcher_files)
    remark("the launcher is gone, so this process is asked to stop")
    stop_signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    number = next((candidate for candidate in stop_signals if _is_handled(candidate)), signal.SIGKILL)
    os.killpg(0, number)  # our own process group, which includes all processes that we have started


def _redirect_output(log: str, launcher_files: set[_FileId]) -> None:
    """Redirects each descriptor that leads to the launcher to the log, because writing to a pipe without a reader
    fails."""
    try:
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError:
        file = os.open(os.devnull, os.O_WRONLY)
    for descriptor in range(_MAX_DESCRIPTORS):
        if (file_id := _file_id(descriptor)) is not None and file_id in launcher_files:
            os.dup2(file, descriptor, inheritable=descriptor < 3)


def _file_id(descriptor: int) -> _FileId:
    """Returns the device and inode of a descriptor's file, or None if the descriptor is closed."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_handled(number: int) -> bool:
    """Returns True unless this process ignores the signal."""
    return signal.getsignal(number) != signal.SIG_IGN


if __name__ == "__main__":
    main(sys.argv[1:])
