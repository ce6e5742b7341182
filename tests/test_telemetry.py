"""Metrics and events on file systems that are slow, full or damaged: no run waits for them, ends or stays away."""

import errno
import fcntl
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest
from conftest import command, events, losses, metrics, until

from jaxmnt.errors import ConfigError
from jaxmnt.launch.inside import Ledger
from jaxmnt.launch.inside import decide_after_start as after
from jaxmnt.run.arguments import replay_range
from jaxmnt.run.replay import replay
from jaxmnt.run.values import run_process
from jaxmnt.telemetry import background, writer
from jaxmnt.telemetry.events import Events, history, last_commit, parse, read_lines, repair
from jaxmnt.telemetry.writer import LineWriter
from jaxmnt.train import train


def kinds(path: Path) -> list[str]:
    return [record["kind"] for record in read_lines(path)]


@pytest.fixture
def hasty(monkeypatch):
    """Waits of seconds are tenths."""
    monkeypatch.setattr(writer, "LINE_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(background, "_OVERTAKING_AGE_SECONDS", 0.1)
    monkeypatch.setattr(writer, "_RETRY_SECONDS", 0.05)


# -- slow


@pytest.mark.slow
def test_a_file_system_that_stalls_is_no_hang(tiny_file, tmp_path):
    """metrics.jsonl is a pipe that takes one page and no more, with a watchdog that gives a step 2 s."""
    run = tmp_path / "run"
    run.mkdir()
    os.mkfifo(run / "metrics.jsonl")
    reader = os.open(run / "metrics.jsonl", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    result = command(
        "jaxmnt.train", "--config", str(tiny_file), "watchdog.step_seconds=2", "watchdog.first_step_seconds=2",
    )  # fmt: skip
    os.close(reader)
    assert result.returncode == 0, result.stderr
    assert events(run, "end")[0]["finished"] and not (run / "hangs").exists()
    assert result.stderr.count("metrics.jsonl lacks ") == 1


def test_decisive_lines_go_first_and_are_waited_for(hasty, tmp_path):
    """A pipe that nobody has opened yet: opening it for writing takes until somebody does."""
    path = tmp_path / "events" / "0.jsonl"
    path.parent.mkdir()
    os.mkfifo(path)
    told = Events(tmp_path, 0)
    began = time.monotonic()
    for _ in range(3):
        told.write("checkpoint_begin", step=1)
    told.write("checkpoint_commit", step=1)
    assert time.monotonic() - began < 0.4, "only what is the last word is waited for"
    told.write("failed", why="x", code=1, at_fault=0, at_fault_host=None)
    assert 0.4 < time.monotonic() - began < 5
    with path.open("rb") as file:
        found = [json.loads(file.readline())["kind"] for _ in range(5)]
    assert found[0] == "checkpoint_begin", "it had begun with that one"
    assert found[1:3] == ["checkpoint_commit", "failed"]


def test_the_queue_is_bounded_and_what_is_missing_is_counted(hasty, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(background, "MAX_WAITING", 10)
    path = tmp_path / "lines"
    os.mkfifo(path)
    lines = LineWriter(path, process=3)
    for number in range(100):
        lines.write({"kind": "x", "number": number})
    lines.write({"kind": "y"}, decisive=True)
    time.sleep(0.6)
    lines.write({"kind": "z"}, decisive=True)
    with path.open("rb") as file:
        found = [json.loads(file.readline()) for _ in range(13)]
        lines.write({"kind": "x", "number": 100})
        assert json.loads(file.readline())["number"] == 100
    assert sorted(record["number"] for record in found if record["kind"] == "x") == list(range(10))
    assert [found[-1][name] for name in ("kind", "process", "lines")] == ["lines_missing", 3, 90]
    err, until = "", time.monotonic() + 5
    while "is written again" not in err and time.monotonic() < until:  # said after the line has been read
        time.sleep(0.01)
        err += capfd.readouterr().err
    lines.close()
    assert err.count("WARNING") == 1 and f"{path} has taken no line for 0.5 s" in err
    assert "is written again" in err


@pytest.mark.slow
def test_one_that_hangs_keeps_no_last_act_from_its_own(tmp_path):
    """A lock on a file system that is away, and events on one that is not."""
    code = (
        "import threading\n"
        "from pathlib import Path\n"
        "from jaxmnt.distributed.termination import ExitHandler, ExitReason\n"
        "from jaxmnt.telemetry.events import Events\n"
        "exit_handler = ExitHandler()\n"
        f"events = Events(Path({str(tmp_path)!r}), 0)\n"
        "with exit_handler.with_hook(lambda exit_reason: threading.Event().wait()):\n"
        "    with exit_handler.with_hook(lambda exit_reason: events.write(exit_reason.kind, why=exit_reason.why)):\n"
        "        exit_handler.exit_now(ExitReason('failed', 'x', 7))\n"
    )
    began = time.monotonic()
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 7
    assert time.monotonic() - began < 30
    assert kinds(tmp_path / "events" / "0.jsonl") == ["failed"]


def test_lines_come_in_order_and_are_there_when_it_is_closed(tmp_path):
    path = tmp_path / "deep" / "lines.jsonl"
    lines = LineWriter(path)
    assert not path.parent.exists(), "nothing is made before there is something to write"
    for number in range(500):
        lines.write({"kind": "x", "time": float(number), "loss": float("nan")}, decisive=number % 7 == 0)
    lines.close()
    assert [record["time"] for record in read_lines(path)] == list(range(500))
    lines.write({"kind": "x", "time": 500.0})
    lines.settle()
    assert len(read_lines(path)) == 501
    lines.close()
    until(lambda: not any(thread.name == "writing lines.jsonl" for thread in threading.enumerate()))


# -- full


def test_a_full_disk_under_the_metrics_ends_no_run(tiny, capfd):
    config = tiny("train.steps=8", "checkpoint.every_steps=4")
    run = Path(config.run.dir)
    run.mkdir()
    (run / "metrics.jsonl").symlink_to("/dev/full")
    assert train(config, devices=jax.devices()[:1]) == 0
    assert events(run, "end")[0]["finished"]
    err = capfd.readouterr().err
    assert err.count(f"WARNING {run}/metrics.jsonl cannot be written: No space left on device") == 1
    assert f"{run}/metrics.jsonl lacks 9 lines that could not be written" in err, "8 steps and an evaluation"


class FillingDisk:
    """Takes so many bytes, torn anywhere, until there is room again."""

    def __init__(self, monkeypatch, room: int):
        self.room, self._write, self.refused = room, os.write, 0
        monkeypatch.setattr(writer.os, "write", self.write)

    def write(self, file: int, data: bytes) -> int:
        if self.room <= 0:
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self._write(file, data[: self.room])
        self.room -= taken
        return taken


@pytest.mark.parametrize("may_truncate", [True, False])
def test_when_there_is_room_again_it_goes_on_with_whole_lines(hasty, tmp_path, monkeypatch, capfd, may_truncate):
    monkeypatch.setattr(background, "MAX_WAITING", 20)
    if not may_truncate:
        monkeypatch.setattr(writer.os, "ftruncate", lambda *_: os.fstat(-1))
    disk, path = FillingDisk(monkeypatch, 333), tmp_path / "lines.jsonl"
    lines = LineWriter(path)
    for number in range(50):
        lines.write({"kind": "x", "time": 0.0, "step": number})
        time.sleep(0.001)
    until(lambda: disk.refused > 2)
    disk.room = 1 << 30
    until(lambda: "lines_missing" in kinds(path))
    lines.write({"kind": "x", "time": 0.0, "step": 50})
    lines.close()
    found = read_lines(path)
    steps = [record["step"] for record in found if record["kind"] == "x"]
    missing = sum(record["lines"] for record in found if record["kind"] == "lines_missing")
    assert steps == sorted(set(steps)) and steps[-1] == 50 and len(steps) + missing == 51 and missing
    torn = [line for line in path.read_bytes().splitlines() if parse(line) is None]
    assert len(torn) == (0 if may_truncate else 1), "a torn line stands alone"
    err = capfd.readouterr().err
    assert err.count("WARNING") == 1 and f"{path} cannot be written: No space left on device" in err


def test_a_torn_line_is_not_glued_to_the_next(tmp_path):
    path = tmp_path / "events" / "1.jsonl"
    path.parent.mkdir()
    path.write_text('{"kind": "start", "time": 1.0, "attempt": 0}\n{"kind": "check')
    told = Events(tmp_path, 1)
    assert told.attempt == 1
    told.write("end", finished=True)
    told.close()
    assert kinds(path) == ["start", "end"]


# -- damaged

ODD_LINES = [
    b"\0" * 4096, b"\xff\xfe\x80", b"[]", b"5", b"null", b'"kind"', b"{}", b"[" * 100_000, b'{"a":' * 50_000,
    b'{"kind": "train"}', b'{"kind": 5, "time": 1.0}', b'{"kind": "train", "time": "x", "step": 3}',
    b'{"kind": "train", "time": 1.0, "step": "3", "loss": 1.0, "grad_norm": 1.0, "tokens": 1}',
    b'{"kind": "train", "time": 1.0, "step": -3, "loss": 1.0, "grad_norm": 1.0, "tokens": 1}',
    b'{"kind": "train", "time": 1e999, "step": 3, "loss": 1.0, "grad_norm": 1.0, "tokens": 1}',
    b'{"kind": "train", "time": NaN, "step": 3, "loss": 1.0, "grad_norm": 1.0, "tokens": 1}',
    b'{"kind": "x", "time": ' + b"9" * 400 + b"}", b'{"kind": "x", "time": ' + b"9" * 5000 + b"}",
    b'{"kind": "start", "time": 1.0}', b'{"kind": "start", "time": 1.0, "attempt": true}',
    b'{"kind": "checkpoint_commit", "time": 1.0, "attempt": 0}', b'{"kind": "checkpoint_commit", "step": 5}',
    b'{"kind": "checkpoint_commit", "time": 1.0, "step": 1.5}', b'{"kind": "preempted", "time": 1.0, "process": 0}',
    b'{"kind": "failed", "time": 1.0, "process": 0, "why": 5}', b'{"kind": "end", "time": 1.0, "finished": 1}',
    b'{"kind": "hang", "time": 1.0, "process": 0, "at_fault": -1}', b'{"kind": "x", "time": 1.0, "host": 7}',
]  # fmt: skip


def record_of_a_run(run: Path) -> None:
    """Events of two processes and metrics, with all kinds that are read back."""
    (run / "events").mkdir(parents=True)
    for process in range(2):
        told = Events(run, process)
        told.write("start", step=0)
        told.write("checkpoint_commit", step=5)
        told.write("preempted", step=5, asked_by="SIGTERM")
        told.write("peer_lost", why="process 1 is gone", code=4, at_fault=1, at_fault_host="n2")
        told.write("end", finished=False)
        told.close()
    lines = LineWriter(run / "metrics.jsonl")
    for step in range(1, 6):
        lines.write({"kind": "train", "step": step, "time": 1.0, "loss": 1.5, "grad_norm": 0.1, "tokens": 7})
    lines.close()


def read_all(run: Path) -> None:
    """Everything that reads what a run has recorded."""
    history(run / "events" / "0.jsonl")
    last_commit(run)
    after(Ledger(run), 4, 0.0, ["n1", "n2"], 0, 9, False, "7")
    Events(run, 0)
    repair(run / "events" / "0.jsonl")
    repair(run / "metrics.jsonl", last_step=3)


def test_no_damage_keeps_anybody_from_reading(tmp_path, capfd):
    """Bits flipped, blocks of NULs and lines of other kinds, at fixed random places."""
    record_of_a_run(tmp_path / "run")
    rng = random.Random(7)
    names = ("events/0.jsonl", "events/1.jsonl", "metrics.jsonl")
    whole = {name: (tmp_path / "run" / name).read_bytes() for name in names}
    for number in range(240):
        for name in names:
            raw = bytearray(whole[name])
            at = rng.randrange(len(raw))
            if number < 180:
                raw[at] ^= 1 << rng.randrange(8)
            elif number < 210:
                raw[at : at + rng.randrange(300)] = b"\0" * rng.randrange(1, 5000)
            else:
                raw = bytearray(b"\n".join([*whole[name].splitlines()[:2], ODD_LINES[number % len(ODD_LINES)], b""]))
                raw += b"".join(whole[name].splitlines(keepends=True)[2:])
            (tmp_path / "run" / name).write_bytes(bytes(raw))
        read_all(tmp_path / "run")
        left = read_lines(tmp_path / "run" / "metrics.jsonl")
        assert all(line.get("step", 0) <= 3 for line in left)
        if number >= 210:
            assert [line["step"] for line in left] == [1, 2, 3]
            assert last_commit(tmp_path / "run") == 5


@pytest.mark.parametrize("line", ODD_LINES, ids=lambda line: line[:60].decode(errors="replace"))
def test_what_is_no_record(line):
    assert parse(line) is None


def test_records_after_a_block_of_nulls_are_read():
    assert parse(b"\0" * 700 + b'{"kind": "x", "time": 1}\r\n') == {"kind": "x", "time": 1}


def test_what_is_damaged_is_kept_beside(tmp_path, capfd):
    path = tmp_path / "metrics.jsonl"
    line = lambda step: json.dumps(
        {"kind": "train", "time": 1.0, "step": step, "loss": None, "grad_norm": 1.0, "tokens": 1}
    )
    path.write_text(f"{line(1)}\nod\x00d\n\n[]\n{line(2)}\n{line(3)}\n" + '{"kind": "tr')
    path.chmod(0o640)
    repair(path, last_step=2)
    assert path.read_text() == f"{line(1)}\n{line(2)}\n" and path.stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == b"od\0d\n[]\n"
    assert f"{path}: 2 lines could not be read and are kept in {path}.damaged" in capfd.readouterr().err
    before = path.stat()
    repair(path, last_step=2)
    assert path.stat().st_ino == before.st_ino, "what is whole is not written again"
    assert sorted(tmp_path.iterdir()) == [path, tmp_path / "metrics.jsonl.damaged"]


def test_a_file_that_cannot_be_replaced_stays(tmp_path, monkeypatch, capfd):
    path = tmp_path / "metrics.jsonl"
    path.write_text("odd\n")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    repair(path, last_step=2)
    assert path.read_text() == "odd\n" and "No space left on device" in capfd.readouterr().err
    loop = tmp_path / "loop.jsonl"
    loop.symlink_to(loop)
    repair(loop)
    assert read_lines(loop) == [] and read_lines(Path("/dev/zero")) == []
    linked = tmp_path / "linked.jsonl"
    linked.symlink_to(path)
    monkeypatch.undo()
    repair(linked)
    assert linked.is_symlink() and path.read_text() == ""


def test_a_run_goes_on_over_damaged_telemetry(tiny, tmp_path):
    config = tiny("train.stop_after=10", "train.eval_every=5", "checkpoint.every_minutes=auto")
    run = Path(config.run.dir)
    train(config, devices=jax.devices()[:1])
    whole = losses(run)
    for name in ("metrics.jsonl", "events/0.jsonl"):
        lines = (run / name).read_bytes().splitlines(keepends=True)
        (run / name).write_bytes(b"".join([*lines[:3], *(odd + b"\n" for odd in ODD_LINES), *lines[3:], b"\0" * 900]))
    assert train(tiny("train.eval_every=5", "checkpoint.every_minutes=auto"), devices=jax.devices()[:1]) == 0
    assert [line["step"] for line in metrics(run)] == list(range(1, 21)) and losses(run)[:10] == whole
    assert [event["attempt"] for event in events(run, "start")] == [0, 1]
    for name in ("metrics.jsonl", "events/0.jsonl"):
        kept = (run / f"{name}.damaged").read_bytes().splitlines()
        assert kept == ODD_LINES and all(parse(line) for line in (run / name).read_bytes().splitlines())


# -- what a replay finds in it


@pytest.mark.parametrize(
    ("first", "last", "words"),
    [
        (
            10,
            99,
            r"10:99 ends after what the run has recorded: step 20 is the last in .*metrics.jsonl; give 10:TO with",
        ),
        (20, 21, r"20:21 ends after .* step 20 is the last in .*metrics.jsonl; name an earlier checkpoint"),
        (11, 12, r"has no checkpoint of step 11; there are: 10, 15, 20"),
    ],
)
def test_a_replay_of_what_there_is_no_record_of(whole_run, first, last, words):
    with pytest.raises(ConfigError, match=words), run_process(whole_run, devices=jax.devices()[:1]) as run:
        replay(run, first, last)


@pytest.mark.parametrize(
    "text", ["10", "\u00b2:\u00b3", "\u0661:\u0662", "15:10", "5:5", "-1:5", "1:" + "9" * 5000, "1:2\n"]
)
def test_what_is_no_range_of_steps(text):
    with pytest.raises(ConfigError, match="is not FROM:TO"):
        replay_range(text)
