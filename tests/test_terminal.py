"""What a person sees on a terminal, and where there is none."""

import io
import os
import re
import signal
import time
import types

import pytest
from conftest import metrics, until

from jaxmnt.telemetry.metrics import Rates, TrainLog
from jaxmnt.telemetry.phases import StepTimer
from jaxmnt.telemetry.progress import StatusLine, working

METRICS = {
    "loss": 2.34567, "grad_norm": 0.5123, "learning_rate": 3e-4, "tokens": 4096, "stop": 0, "save": 0, "bad_steps": 0,
    "profile": 0, "model": {},
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, tmp_path, width: int, *, steps: int = 12, **environment: str) -> list[str]:
    """The lines that steps 1 to `steps` of 1000 put on a terminal of this width, as they are written."""
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_: os.terminal_size((width, 24)))
    monkeypatch.setattr("jaxmnt.telemetry.progress._MIN_UPDATE_SECONDS", 0.0)
    out = Terminal()
    with_log(out, tmp_path, steps)
    return out.getvalue().split("\r\x1b[K")[1:]


def with_log(out, tmp_path, steps: int, log_every: int | None = None) -> None:
    log = TrainLog(
        tmp_path, writer=True, status=StatusLine(out), steps=1000, tokens=0, rates=Rates(1e3, 1e3, 1e12, 4096),
        epochs=lambda step: {}, timer=StepTimer(), log_every=log_every,
    )  # fmt: skip
    for step in range(1, steps + 1):
        log.push(step, METRICS, wait_seconds=0.0, digest=None)
    log.flush()
    log.close()


def test_what_takes_long_is_said_on_a_terminal(monkeypatch):
    """Not over a line of a moment ago, and gone before the next one."""
    monkeypatch.setattr("jaxmnt.telemetry.progress._HOLD_SECONDS", 60.0)
    status = StatusLine(Terminal())
    status.waiting("compiling", 1.0)
    status.progress(1, 2, [])
    status.waiting("evaluating", 2.0)
    status.line("finished")
    assert [part for part in status._out.getvalue().split("\r\x1b[K") if part][::2] == [
        "compiling … 0:01",
        "finished\n",
    ]


def test_where_there_is_no_terminal_a_line_says_now_and_then_what_takes_long(monkeypatch):
    out, quiet = io.StringIO(), io.StringIO()
    lines = [StatusLine(out), StatusLine(quiet, quiet=True)]

    def pass_phase(phase: str, seconds: int) -> None:
        for second in range(1, seconds + 1):
            for line in lines:
                line.waiting(phase, second, "" if phase == "compiling" else f"batch {second} of 20")

    pass_phase("starting", 1)
    pass_phase("compiling", 34)
    pass_phase("evaluating", 2)
    pass_phase("evaluating", 1)
    pass_phase("compiling", 3)
    assert out.getvalue().splitlines() == [
        "compiling … 0:02", "compiling … 0:32", "evaluating, batch 2 of 20 … 0:02", "compiling … 0:02",
    ]  # fmt: skip
    assert quiet.getvalue() == ""


def test_work_is_shown_on_a_terminal_alone_and_never_after_it_has_ended(monkeypatch):
    monkeypatch.setattr("jaxmnt.telemetry.progress._WORK_UPDATE_SECONDS", 0.01)
    for err, shows in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stderr", err)
        with working("starting") as work:
            until(lambda err=err, shows=shows: "starting … 0:00" in err.getvalue() or not shows)
            time.sleep(0.05)
            work.does("")
            shown = err.getvalue()
            time.sleep(0.05)
        assert err.getvalue() == shown and shown.endswith("\r\x1b[K") == shows


def test_what_a_launcher_starts_is_shown_until_the_first_line(monkeypatch, tmp_path):
    """An interrupt's ^C is on a line of its own, and no line of a process is empty."""
    from jaxmnt.launch.local import _Child, _Screen

    asked, out, shown = [], Terminal(), []
    work = types.SimpleNamespace(does=shown.append)
    screen = _Screen(work, asked)
    screen.show(out, 0, "a\n")
    asked += [signal.SIGTERM, signal.SIGINT]
    screen.show(out, 1, "b\n")
    screen.show(out, 0, "c\n")
    assert out.getvalue() == "[0] a\n\n[1] b\n[0] c\n" and shown == ["", "", ""]
    child = types.SimpleNamespace(number=3, _screen=screen, _write_log=shown.append)
    _Child._pass_on(child, io.StringIO("\nd\n  \n"), out)
    assert out.getvalue().endswith("c\n[3] d\n") and shown[3:] == ["\n", "d\n", "", "  \n"], "the log has all"


def test_an_error_that_all_processes_say_is_shown_once():
    from jaxmnt.launch.local import _Screen

    out = io.StringIO()
    screen = _Screen(types.SimpleNamespace(does=str), [])
    error = "jaxmnt: process {0} of 2 on h: error: {1}\n".format
    for number, words in ((0, "no data"), (1, "no data"), (1, "no room"), (0, "no data")):
        screen.show(out, number, error(number, words))
    for number in range(2):
        screen.show(out, number, "warning: error: of a library\n")
    shown = f"[0] {error(0, 'no data')}[1] {error(1, 'no room')}[0] {error(0, 'no data')}"
    assert out.getvalue() == f"{shown}[0] warning: error: of a library\n[1] warning: error: of a library\n"


def test_a_launcher_shows_in_place_what_a_process_of_its_own_does(monkeypatch, tmp_path):
    """The log has the first of what is shown in place, and all lines that stay."""
    from jaxmnt.launch.local import _Child, _Screen

    said, out = io.StringIO(), Terminal()
    monkeypatch.setattr("jaxmnt.telemetry.progress._MIN_UPDATE_SECONDS", 0.0)
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr(StatusLine, "relay_columns", 60)
    with_log(said, tmp_path, 3)
    monkeypatch.setattr(StatusLine, "relay_columns", 0)
    status, kept = StatusLine(said), []
    status.line("finished")
    status._relayed = True
    status._show("nothing of this, because the launcher is gone")
    status.clear()
    lines = said.getvalue()
    assert "nothing" not in lines
    assert "\r" not in lines and "\x1b[3" not in lines and max(map(len, lines.splitlines())) < 64
    child = types.SimpleNamespace(number=1, _write_log=kept.append, _logged_in_place=-60.0)
    child._screen = _Screen(types.SimpleNamespace(does=str), [])
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_: os.terminal_size((60, 24)))
    assert child._screen.columns == 60
    child._show_in_place = types.MethodType(_Child._show_in_place, child)
    _Child._pass_on(child, io.StringIO(lines), out)
    in_place = out.getvalue().split("\r\x1b[K")
    assert re.findall(r"(\d)/1000", out.getvalue()) == ["1", "2", "3"]
    assert all(part.startswith("[1] ") for part in in_place if part) and in_place[-1] == "[1] finished\n"
    assert len(kept) == 2 and " 1/1000" in kept[0] and kept[1] == "finished\n"


def test_a_step_without_targets_is_shown_as_such(monkeypatch, tmp_path):
    none = {"loss": float("nan"), "grad_norm": float("nan"), "tokens": 0, "model": {"load": float("nan")}}
    monkeypatch.setattr("test_terminal.METRICS", METRICS | none)
    parts = re.sub("\x1b\\[\\d+m", "", shown(monkeypatch, tmp_path, 200)[-1]).split("  ")
    assert "no targets" in parts and not any("loss" in part or "grad norm" in part or "nan" in part for part in parts)
    written = metrics(tmp_path)[-1]
    assert (written["loss"], written["grad_norm"], written["model"]) == (None, None, {"load": None})


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120, 200])
def test_a_line_fits_and_nothing_is_cut(monkeypatch, tmp_path, width):
    line = re.sub("\x1b\\[\\d+m", "", shown(monkeypatch, tmp_path, width)[-1])
    assert len(line) < width
    bar, *parts = line.split("  ")
    assert re.fullmatch(r"[█░]+ 12/1000", bar)
    whole = [
        r"loss 2\.3457", r"\S+ tokens/s", r"ETA \d+:\d\d(:\d\d)?", r"MFU \d+\.\d%", r"lr 3\.00e-04",
        r"grad norm 0\.512", r"data wait 0\.0%",
    ]  # fmt: skip
    assert all(re.fullmatch(pattern, part) for pattern, part in zip(whole, parts, strict=False)), line
    assert len(parts) == {20: 0, 200: 7}.get(width, len(parts))
    assert width < 80 or len(parts) >= 4, "at 80 columns there is room for loss, rate, ETA and MFU"


def test_colour_only_where_it_is_wanted(monkeypatch, tmp_path):
    assert "\x1b[36m" in shown(monkeypatch, tmp_path / "a", 80)[-1]
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        lines = shown(monkeypatch, tmp_path / "b", 80, **environment)
        assert lines and not any("\x1b" in line for line in lines)


def test_a_line_every_so_many_steps_where_there_is_no_terminal(tmp_path):
    out = io.StringIO()
    with_log(out, tmp_path, 12, log_every=5)
    assert re.findall(r"^step (\d+)/1000  loss 2\.3457", out.getvalue(), re.MULTILINE) == ["5", "10"]
    out = io.StringIO()
    with_log(out, tmp_path, 12)
    assert out.getvalue().count("step ") == 1, "by default the next comes after 10 s"
