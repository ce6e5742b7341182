"""Runs `pip install` with these arguments, its output shortened to a line for each package as it arrives.

What pip writes to stderr is passed on whole. Ends with pip's exit code; with 130 after Ctrl-C, and says nothing then.
"""

import re
import signal
import subprocess
import sys
import threading
from typing import IO

_CLEAR = "\r\x1b[K"
_INTERRUPTED = 130
_OF_CTRL_C = "Operation cancelled by user"
_PATIENCE_SECONDS = 2


class Screen:
    """The terminal, or where its output goes: on a terminal, the last line may be one that is replaced."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._lock = threading.Lock()
        self._has_live_line = False
        self._is_closed = False

    def replace(self, text: str) -> None:
        """Shows a line that the next one replaces; nothing of it where there is no terminal."""
        if self._is_terminal:
            self._write(sys.stdout, text, live=True)

    def add(self, text: str, stream: IO[str] = sys.stdout) -> None:
        self._write(stream, f"{text}\n", live=False)

    def close(self) -> None:
        """Clears the live line. Nothing is shown from now on."""
        self._write(sys.stdout, "", live=False)
        self._is_closed = True

    def _write(self, stream: IO[str], text: str, *, live: bool) -> None:
        with self._lock:
            if self._is_closed:
                return
            if self._has_live_line:
                print(_CLEAR, end="", flush=True)
            self._has_live_line = live
            print(text, end="", file=stream, flush=True)


def counted(number: int) -> str:
    """Returns so many packages, in words."""
    return f"{number} package{'' if number == 1 else 's'}"


def shorten(lines: IO[str], screen: Screen) -> None:
    """Shows what a person wants to see of pip's output."""
    packages = 0
    for line in lines:
        if match := re.match(r"Collecting ([\w.\-]+)", line):
            packages += 1
            screen.replace(f"  {counted(packages)}: {match[1]}")
        elif match := re.match(r"\s+Downloading (\S+?)(?:-\d\S*)? \((\S+ MB)\)", line):
            screen.add(f"  downloading {match[1]} ({match[2]})")
        elif line.startswith("Installing collected"):
            screen.add(f"  unpacking {counted(line.count(',') + 1)} …")
        elif line.startswith("ERROR"):
            screen.add(line.rstrip("\n"))


def pass_on(lines: IO[str], screen: Screen) -> None:
    """Shows each line on stderr, but for what pip says of Ctrl-C."""
    for line in lines:
        if _OF_CTRL_C not in line:
            screen.add(line.rstrip("\n"), sys.stderr)


def run(command: list[str]) -> int:
    """Runs a command that writes as pip does, and returns its exit code."""
    screen = Screen()
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, errors="replace") as pip:
        try:
            code = _watch(pip, screen)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            screen.close()
            code = _INTERRUPTED
            _end(pip)
        finally:
            screen.close()
    return code if code >= 0 else 128 - code


def _watch(pip: subprocess.Popen[str], screen: Screen) -> int:
    assert pip.stdout is not None and pip.stderr is not None
    errors = threading.Thread(target=pass_on, args=(pip.stderr, screen), daemon=True)
    errors.start()
    shorten(pip.stdout, screen)
    errors.join()
    return pip.wait()


def _end(pip: subprocess.Popen[str]) -> None:
    """Waits for pip, which a terminal interrupts as well, and ends it if it was not."""
    try:
        pip.wait(_PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        pip.terminate()


if __name__ == "__main__":
    arguments = ["--disable-pip-version-check", *sys.argv[1:]]
    sys.exit(run([sys.executable, "-m", "pip", "install", *arguments]))
