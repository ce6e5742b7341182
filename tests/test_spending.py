"""run.budget: what all starts of a run may cost."""

import json
import time
from types import SimpleNamespace

import pytest
from conftest import events

from jaxmnt.errors import ConfigError, ExitCode
from jaxmnt.report.history import attempts_so_far
from jaxmnt.run import running
from jaxmnt.run.spending import SPENT, Spending
from jaxmnt.telemetry import clock as clock_of_records
from jaxmnt.telemetry.events import Events
from jaxmnt.telemetry.progress import StartClock
from jaxmnt.train import train

HOUR = 3600.0


@pytest.fixture
def clock(monkeypatch):
    now = [100_000.0]
    monkeypatch.setattr("jaxmnt.run.spending.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def earlier(tmp_path):
    """A start on 8 devices for an hour at 2, and one for half an hour whose price is not known."""
    (tmp_path / "events").mkdir()
    about = [
        {"kind": "start", "time": 10.0, "attempt": 0, "devices": 8, "began": 0.0, "cost_per_gpu_hour": 2.0},
        {"kind": "end", "time": HOUR, "attempt": 0, "finished": False},
        {"kind": "start", "time": 2 * HOUR, "attempt": 1, "devices": 8},
        {"kind": "failed", "time": 2.5 * HOUR, "attempt": 1, "process": 0},
    ]
    (tmp_path / "events" / "0.jsonl").write_text("".join(json.dumps(one) + "\n" for one in about))
    return tmp_path


class Stop:
    wanted = False

    def ask(self, reason):
        self.wanted, self.reason = True, reason


class Status:
    def __init__(self):
        self.lines = []

    def line(self, text):
        self.lines.append(text)


def test_all_starts_are_counted(earlier, clock):
    log = Events(earlier, 0)
    spending = Spending(2.5, 40.0, earlier, 4, 1000.0)
    before = 8 * 2.0 + 8 * 0.5 * 2.0  # a start that does not know its price has that of the one before
    assert spending.spent == pytest.approx(before + 4 * 2.5 * 1000 / HOUR)
    assert spending.outlook(HOUR) == f"cost {spending.spent:.2f} of {spending.spent + 10:.2f}"
    stop, status = Stop(), Status()
    spending.check(1, stop, log, status)
    assert not status.lines
    clock[0] = 99_000 + (32.5 - before) / 10 * HOUR
    for step in (2, 3):
        spending.check(step, stop, log, status)
    assert len(status.lines) == 1 and "32.50 of run.budget (40.00) is spent" in status.lines[0] and not stop.wanted
    clock[0] = 99_000 + (40.01 - before) / 10 * HOUR
    spending.check(4, stop, log, status)
    assert stop.reason == SPENT
    log.close()
    assert [record["step"] for record in events(earlier, "budget")] == [2, 4]
    with pytest.raises(ConfigError, match=r"run\.budget: 20\.00 is spent, 24\.00 by earlier starts; raise it"):
        Spending(2.5, 20.0, earlier, 4, 1000.0)


def test_a_clock_that_is_set_costs_nothing(tmp_path, monkeypatch):
    """Forward by three hours while a start trains, as its events and its lines tell of it afterwards."""
    log = Events(tmp_path, 0)
    system, began = time.time(), clock_of_records.now()
    log.write("start", run="r", step=0, devices=4, began=began, cost_per_gpu_hour=2.5)
    monkeypatch.setattr(time, "time", lambda: system + 3 * HOUR)
    assert StartClock().elapsed < 1
    log.write("end", step=5, finished=False)
    log.close()
    (attempt,) = attempts_so_far(tmp_path)
    assert 0 <= attempt.seconds < 60
    assert Spending(2.5, 10.0, tmp_path, 4, StartClock().elapsed).spent < 1


@pytest.mark.parametrize("price", [None, 2.5])
def test_without_a_price_there_is_nothing_to_say(tiny, monkeypatch, price):
    outlooks, make = [], running.TrainLog
    monkeypatch.setattr(
        running, "TrainLog", lambda *given, cost, **named: outlooks.append(cost) or make(*given, cost=cost, **named)
    )
    settings = [] if price is None else [f"launch.cost_per_gpu_hour={price}"]
    assert train(tiny("train.stop_after=1", "train.eval_every=0", *settings)) == ExitCode.STOPPED
    assert [outlook is None for outlook in outlooks] == [price is None]


def test_a_budget_needs_a_price(tiny, tmp_path):
    with pytest.raises(ConfigError, match="cost_per_gpu_hour is not set"):
        train(tiny("run.budget=3"))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_stops_at_its_budget_and_does_not_begin_again(tiny, tmp_path):
    """A price of 1 a second, of which compiling alone takes more than the budget."""
    limits = ["launch.cost_per_gpu_hour=3600", "run.budget=1", "train.steps=100000"]
    assert train(tiny(*limits)) == ExitCode.STOPPED
    (asked,) = events(tmp_path / "run", "preempted")
    assert asked["asked_by"] == SPENT
    with pytest.raises(ConfigError, match=r"run\.budget: 1\.00 is spent"):
        train(tiny(*limits))
    assert train(tiny(*limits, "run.budget=1e6", "train.stop_after=10", "train.eval_every=0")) == ExitCode.STOPPED
