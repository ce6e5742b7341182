"""Output that nobody takes: a reader that has gone, descriptors that are closed, a full disk. Work goes on."""

import fcntl
import os
import pty
import shlex
import subprocess
import sys
import threading
import time

import pytest
from conftest import events, in_tiers, losses

from jaxmnt import output
from jaxmnt.errors import printable

STEPS = 6


@pytest.fixture
def short(tiny_file):
    """The arguments of a run of a few steps."""
    return ["--config", str(tiny_file), f"train.steps={STEPS}", "checkpoint.every_steps=3", "data.log_digest=false"]


def in_shell(line: str, *arguments: str) -> subprocess.CompletedProcess:
    """Runs a line of bash in which JAXMNT is a command of this Python."""
    words = " ".join(map(shlex.quote, arguments))
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line.replace("JAXMNT", f"{shlex.quote(sys.executable)} -m jaxmnt {words}")],
        capture_output=True, text=True, timeout=240, env=dict(os.environ, JAX_NUM_CPU_DEVICES="1"),
    )  # fmt: skip


@pytest.mark.parametrize("where", in_tiers({0}, ["| head -1", ">&- 2>&-"]))
def test_a_run_outlives_its_terminal(short, tmp_path, where):
    result = in_shell(f"JAXMNT {where}", "train", *short)
    run = tmp_path / "run"
    assert result.returncode == 0, result.stderr
    assert len(losses(run)) == STEPS and events(run, "end")[0]["finished"]
    if "head" in where:
        assert result.stdout.count("\n") == 1
        assert result.stderr.count("nothing more is shown (Broken pipe); the work continues") == 1
        assert "Traceback" not in result.stderr
    for path in run.rglob("*"):
        assert path.suffix not in (".json", ".yaml", ".jsonl") or b"step 6/6" not in path.read_bytes(), path


@pytest.mark.slow
def test_the_launcher_outlives_a_full_disk_under_its_output(short, tmp_path):
    launcher = ["launch", "local", "--processes", "1", "--devices-per-process", "1", "--"]
    result = in_shell("JAXMNT > /dev/full 2> /dev/full", *launcher, *short)
    assert result.returncode == 0
    assert len(losses(tmp_path / "run")) == STEPS
    assert "finished in" in (tmp_path / "run" / "logs" / "process-0.log").read_text()


@pytest.mark.parametrize(
    ("line", "arguments", "code", "told"),
    [
        ("JAXMNT | head -1", ["schema"], 0, ""),
        ("JAXMNT > /dev/full", ["schema"], 1, "jaxmnt: error: the output cannot be written: No space left on device\n"),
        ("JAXMNT >&- 2>&-", ["schema"], 0, ""),
        ("JAXMNT 2>&-", ["data"], 2, ""),
        ("JAXMNT | true", ["--help"], 0, ""),
    ],
)
def test_a_command_whose_output_is_its_result(line, arguments, code, told):
    """A reader that has gone has seen enough; a disk that is full is an error. Neither is a traceback."""
    result = in_shell(line, *arguments)
    assert (result.returncode, result.stderr) == (code, told)


def test_closed_descriptors_do_not_become_other_files(tmp_path):
    code = (
        "import os, sys\n"
        "from jaxmnt.commands import run_command\n"
        "def main(arguments):\n"
        f"    kept = open({str(tmp_path / 'kept')!r}, 'w')\n"
        "    print('to nobody', flush=True); print('to nobody', file=sys.stderr, flush=True)\n"
        "    os.system('echo to nobody; echo to nobody >&2')\n"
        "    assert not sys.stdout.isatty() and kept.fileno() > 2\n"
        "    return 7\n"
        "run_command(main)\n"
    )
    shell = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(code)} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", shell], timeout=60).returncode == 7
    assert (tmp_path / "kept").read_text() == ""


@pytest.fixture
def pipe():
    """One that holds no more than a page, and a stream that writes to it."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    stream = output.never_failing_stream(sys.__stdout__, writer, line_buffering=True)
    yield reader, stream
    os.close(reader)
    os.close(writer)


def test_a_reader_that_has_stopped_reading_is_not_waited_for(pipe, monkeypatch):
    """As a terminal after Ctrl-S: lines are dropped until it goes on."""
    monkeypatch.setattr(output, "_READER_TIMEOUT_SECONDS", 0.2)
    reader, stream = pipe
    output._raw(stream).is_optional = True
    began = time.monotonic()
    for number in range(1000):
        print(f"{number:99}", file=stream)
    assert time.monotonic() - began < 5
    os.read(reader, 4096)
    print("the last", file=stream)
    assert os.read(reader, 4096).endswith(b"the last\n")


def test_a_reader_that_takes_its_time_gets_all(pipe):
    """Where the output is the result, it is waited for, also if somebody has made the pipe non-blocking."""
    reader, stream = pipe
    os.set_blocking(stream.fileno(), False)
    text, got = "".join(f"{number:99}\n" for number in range(200)), b""
    writing = threading.Thread(target=lambda: print(text, end="", file=stream, flush=True))
    writing.start()
    while len(got) < len(text):
        time.sleep(0.01)
        got += os.read(reader, 1000)
    writing.join()
    assert got.decode() == text


def test_a_terminal_that_nobody_reads_is_not_waited_for(monkeypatch):
    """It says that it has room as long as it has room for one letter."""
    monkeypatch.setattr(output, "_READER_TIMEOUT_SECONDS", 0.2)
    master, terminal = pty.openpty()
    stream = output.never_failing_stream(None, terminal)
    stream.buffer.raw.is_optional = True
    writing = threading.Thread(
        target=lambda: [print("x" * 79, file=stream, flush=True) for _ in range(2000)], daemon=True
    )
    writing.start()
    writing.join(20)
    assert not writing.is_alive() and os.get_blocking(terminal)
    assert os.read(master, 100).startswith(b"xxx")
    stream.close()
    os.close(master)
    os.close(terminal)


def test_a_library_without_a_stdout(tiny, monkeypatch):
    """train() in a process that has none, such as a daemon."""
    import jax

    from jaxmnt.train import train

    monkeypatch.setattr(sys, "stdout", None)
    assert train(tiny("train.steps=5", "checkpoint.every_steps=0"), devices=jax.devices()[:1]) == 0


def test_what_a_terminal_would_obey_is_shown():
    assert printable("a b-ü.txt") == "a b-ü.txt"
    assert printable("\x1b[2Jx\ny\0\u202e\x9b\udcff") == r"\x1b[2Jx\ny\x00\u202e\x9b\udcff"
