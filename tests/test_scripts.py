"""What the scripts show while they install."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"

RUN = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); import pip_progress; "
RUN += "sys.exit(pip_progress.run([sys.executable, '-uc', sys.argv[1]]))"


def start(program: str, stream: int) -> subprocess.Popen[bytes]:
    """Runs the program in place of pip, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", RUN, program], stdout=stream, stderr=stream, close_fds=True, start_new_session=True
    )


def read_until_closed(terminal: int) -> str:
    output = b""
    try:
        while piece := os.read(terminal, 1 << 16):
            output += piece
    except OSError:  # how a terminal says that nobody writes to it any more
        pass
    return output.decode()


def test_the_live_line_is_cleared_before_what_pip_says_on_stderr():
    program = """if True:
        import sys, time
        print("Collecting numpy>=2.1")
        time.sleep(0.5)
        print("WARNING: odd", file=sys.stderr)
        time.sleep(0.5)
        print("Collecting grain")
        print("Installing collected packages: numpy")
        sys.exit(3)
    """
    terminal, other = pty.openpty()
    process = start(program, other)
    os.close(other)
    output = read_until_closed(terminal)
    assert process.wait() == 3
    clear = "\r\x1b[K"
    assert output.replace("\r\n", "\n") == (
        f"  1 package: numpy{clear}WARNING: odd\n  2 packages: grain{clear}  unpacking 1 package …\n"
    )
    os.close(terminal)


@pytest.mark.parametrize("reach", [os.killpg, os.kill])
def test_an_interrupted_installation_ends_quietly(reach):
    program = """if True:
        import time
        try:
            print("Collecting numpy")
            time.sleep(60)
        except KeyboardInterrupt:
            raise SystemExit("ERROR: Operation cancelled by user")
    """
    terminal, other = pty.openpty()
    process = start(program, other)
    os.close(other)
    output = os.read(terminal, 1 << 16).decode()
    reach(process.pid, signal.SIGINT)
    output += read_until_closed(terminal)
    assert process.wait() == 130
    assert output == "  1 package: numpy\r\x1b[K"
    os.close(terminal)
