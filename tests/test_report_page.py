"""The report as a page, as PNGs, as a trace, and of runs of which not all is there."""

import json
import math
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import browser as chromium
import numpy as np
import pytest
from conftest import command, metrics, until
from test_bad_steps import poisoned
from test_report import Log

from jaxmnt.errors import ConfigError, ExitCode
from jaxmnt.report.__main__ import main
from jaxmnt.report.charts import MAX_POINTS
from jaxmnt.report.contents import report_of
from jaxmnt.report.page import as_json, page
from jaxmnt.report.perfetto import trace_of
from jaxmnt.report.watch import LatestReport, server_for
from jaxmnt.telemetry.events import FORMAT
from jaxmnt.telemetry.phases import PHASES
from jaxmnt.train import train

BAD = '<script>alert("&amp;")</script> </SCRIPT><!--'


def synthetic(folder: Path, steps: int, *, spikes: tuple[int, ...] = (), **start) -> Path:
    """A run of so many steps, with a spike of loss and of step time at some of them."""
    log = Log(folder)
    log.start(0, **({"format": FORMAT, "environment": {"jax": BAD}} | start))
    for number in range(1, steps + 1):
        log.step(number, 2.0 if number in spikes else 1.0)
        log.lines[-1] |= {
            "loss": 99.0 if number in spikes else 2.0 + math.sin(number / 1000),
            "learning_rate": 1e-3,
            "tokens_per_second": 100.0,
            "model": {"router": 0.1 * (number % 7)},
        }
    log.event("end", step=steps, finished=True)
    run = log.write()
    with (run / "phases.jsonl").open("w") as file:
        for line in log.lines:
            mean = dict.fromkeys(PHASES, 0.1)
            file.write(json.dumps({"kind": "phases", "step": line["step"], "time": line["time"], "mean": mean}) + "\n")
    (run / "config.yaml").write_text(f"seed: 1\nmodel: {{hidden_size: 8, name: {json.dumps(BAD)}}}\n")
    return run


def chart(report: dict, id: str) -> dict:
    return next(one for one in report["runs"][0]["charts"] if one["id"] == id)


@pytest.mark.slow
def test_a_long_run_fits_and_keeps_its_spikes(tmp_path):
    spikes = (17, 40_123, 99_999)
    report = report_of([str(synthetic(tmp_path / "run", 100_000, spikes=spikes))])
    loss, times = chart(report, "loss"), chart(report, "step_seconds")
    told = dict(zip(loss["steps"], loss["series"][0]["values"], strict=True))
    assert all(told[step] == 99.0 for step in spikes) and {1, 100_000} <= set(told)
    assert dict(zip(times["steps"], times["series"][0]["values"], strict=True))[40_123] == 2000.0
    assert all(len(one["steps"]) <= MAX_POINTS + 2 for one in report["runs"][0]["charts"])
    assert {one["id"] for one in report["runs"][0]["charts"]} >= {"phases", "model.router", "rate", "learning_rate"}
    text = page(report)
    assert len(text.encode()) < 1_000_000, len(text)


def test_what_a_run_says_never_runs(tmp_path):
    """Text from the run directory stays text, and the policy allows nothing but our own scripts and styles."""
    report = report_of([str(synthetic(tmp_path / "run", 3))])
    text = page(report)
    assert BAD not in text and json.loads(json.dumps(report))["runs"][0]["config"]["model.name"] == BAD
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy and "connect-src" not in policy and "http:" not in policy
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(data) == json.loads(as_json(report)), "what the page shows is what --json prints"
    assert text == page(report)


def test_what_failed_is_told_with_its_lines_and_its_cost(tmp_path, capsys):
    log = Log(tmp_path / "run")
    log.start(0, cost_per_gpu_hour=3.0)
    for number in range(1, 6):
        log.step(number)
    log.event("peer_lost", why="process 1 went away", at_fault=1, at_fault_host="b")
    log.now += 60
    second = log.now
    log.start(3)
    log.event("steps_again", of_attempt=0, steps=2, seconds=20.0, until=second - 61)
    log.step(4)
    log.now += 30
    log.event("hang", why="no progress for 30 s", at_fault=1, at_fault_host="b")
    log.now += 60
    log.start(4)
    log.step(5)
    log.event("end", step=5, finished=True)
    log.lines = [line for line in log.lines if line["attempt"] > 0 or line["step"] <= 3]
    run = log.write()
    began = [event["time"] for event in log.events if event["kind"] == "start"]
    (run / "logs").mkdir()
    (run / "hangs").mkdir()
    first = "".join(f"line {number}\n" for number in range(30)) + "ValueError: bad luck\nbye\n"
    (run / "logs" / "process-1.log").write_text(first + "RuntimeError: of the second attempt\n")
    (run / "hangs" / "1.txt").write_text(
        "\n2026-11-23 10:00:00: in step 5, waiting\nThread 0x1 (most recent call first):\n  File a\n"
        'Current thread 0x2 (most recent call first):\n  File "loop.py", line 3 in wait\n'
    )
    others = [
        {"kind": "start", "attempt": 0},
        {"kind": "failed", "attempt": 0, "why": "ValueError: bad luck", "at_fault": 1, "at_fault_host": "b"},
        {"kind": "start", "attempt": 1, "log_bytes": {"logs/process-1.log": len(first)}},
    ]
    times = [began[0], began[0] + 70, began[1]]
    (run / "events" / "1.jsonl").write_text(
        "".join(
            json.dumps({"process": 1, "host": "b", "time": time} | one) + "\n"
            for one, time in zip(others, times, strict=True)
        )
    )
    (run / "launch").mkdir()
    (run / "launch" / "starts.json").write_text(json.dumps([{"began": began[0] - 12, "code": 1}, "nonsense"]))
    one, two = report_of([str(run)])["runs"][0]["failures"]
    assert (one["kind"], one["why"], one["process"], one["host"]) == ("failed", "ValueError: bad luck", 1, "b")
    assert one["source"] == "logs/process-1.log" and len(one["lines"]) == 10
    assert one["lines"][-1] == "ValueError: bad luck", "not what a later attempt wrote"
    assert (one["exit_code"], one["lost_steps"], one["told_by"]) == (1, 2, 2)
    assert one["cost"] == pytest.approx(8 * 3.0 * one["lost_seconds"] / 3600) and one["lost_seconds"] >= 20
    assert "attempt 1 resumed after step 3" in one["then"] and "repeated 2 steps" in one["then"]
    assert (two["kind"], two["source"]) == ("hang", "hangs/1.txt")
    assert two["lines"] == ["2026-11-23 10:00:00: in step 5, waiting", 'File "loop.py", line 3 in wait']
    assert main([str(run), "--failures"]) == 0
    text = capsys.readouterr().out
    assert "attempt 0: failed after step 5, process 1 on b, exit code 1" in text and "| ValueError: bad luck" in text


def test_stragglers_hosts_and_changes_are_in_the_report(tmp_path):
    run = synthetic(tmp_path / "run", 30)
    with (run / "events" / "0.jsonl").open("a") as file:
        for kind, step in (("straggler", 5), ("straggler_over", 12), ("straggler", 20)):
            told = {"kind": kind, "time": 1100.0 + step, "attempt": 0, "step": step, "at_fault": 2, "phase": "data",
                    "at_fault_host": "c", "slower_seconds": 0.3, "step_seconds": 1.0}  # fmt: skip
            file.write(json.dumps(told) + "\n")
        file.write(json.dumps({"kind": "config_change", "time": 1101.0, "attempt": 0, "key": "seed", "before": 1,
                               "now": 2, "resume": "breaks"}) + "\n")  # fmt: skip
    with (run / "phases.jsonl").open("a") as file:
        for steps, slow in ((100, 0.4), (300, 0.2)):
            own = [[0.01, 0.02, 0.03, 0.1], [0.01, slow, 0.5, 0.9]]
            file.write(json.dumps({"kind": "processes", "step": 1, "time": 1.0, "steps": steps, "own": own}) + "\n")
        file.write('{"kind": "processes", "step": 1, "time": 1.0, "steps": 1, "own": [["x"]]}\n')
    (run / "events" / "1.jsonl").write_text('{"kind": "start", "time": 1.0, "attempt": 0, "host": "b"}\n')
    (told,) = report_of([str(run)])["runs"]
    assert [(one["from_step"], one["to_step"], one["host"]) for one in told["stragglers"]] == [
        (5, 12, "c"),
        (20, None, "c"),
    ]
    assert [mark["step"] for mark in told["marks"] if mark["kind"] == "straggler"] == [5, 20]
    first, second = told["processes"]["of"]
    assert (first["process"], first["host"], second["host"]) == (1, "b", "a")
    assert first["seconds"] == pytest.approx([0.01, 0.25, 0.5, 0.9])
    assert told["changes"] == [{"attempt": 0, "key": "seed", "before": 1, "now": 2, "resume": "breaks"}]


def test_runs_are_compared(tmp_path, capsys, monkeypatch):
    one, two = synthetic(tmp_path / "x" / "run", 5), synthetic(tmp_path / "y" / "run", 7)
    (two / "config.yaml").write_text("seed: 2\nmodel: {hidden_size: 16}\n")
    monkeypatch.chdir(tmp_path)
    assert main([str(one), str(two)]) == 0
    text = capsys.readouterr().out
    assert "note    these runs train different models" in text and "differs model.hidden_size: 8 | 16" in text
    assert (tmp_path / "report.html").is_file()
    report = report_of([str(one), str(two)])
    assert [run["label"] for run in report["runs"]] == ["x", "y"]
    assert {"key": "seed", "values": [1, 2]} in report["config_differences"]
    assert [run["label"] for run in report_of([str(one), str(one)])["runs"]] == [f"1 {one}", f"2 {one}"]


def test_what_is_not_there_is_said_and_the_rest_is_shown(tmp_path, capsys):
    run = synthetic(tmp_path / "run", 5, cost_per_gpu_hour=1.0)
    (run / "config.yaml").write_text("a: [1\n")
    (told,) = report_of([str(run)])["runs"]
    assert len(told["notes"]) == 1 and "config.yaml cannot be read" in told["notes"][0] and len(told["charts"]) > 3
    (run / "config.yaml").unlink()
    (run / "events" / "0.jsonl").unlink()
    assert main([str(run)]) == 0
    text = capsys.readouterr().out
    assert "has no start event: only the lines of metrics.jsonl are shown" in text
    assert "config.yaml does not exist" in text and "steps 1 to 5" in text
    with pytest.raises(ConfigError, match=r"such\.html cannot be written"):
        main([str(run), "--output", str(run / "no" / "such.html")])


ODD = (
    {"kind": "phases", "time": 5.0, "mean": {"data": 1.0}},
    {"kind": "straggler", "time": 1100.0, "attempt": 0, "step": 2, "phase": ["data"], "device": {}},
    {"kind": "straggler", "time": 1100.0, "attempt": 0, "step": 2, "phase": "data", "slower_seconds": "much"},
    {"kind": "start", "time": 1.0, "attempt": 9, "devices": 10**400},
    {"kind": "start", "time": 1.0, "attempt": 8, "devices": -3},
    {"kind": "started", "time": 1101.0, "attempt": 0, "seconds": {"import": 10**400}},
    {"kind": "loss_spike", "time": 1e305, "attempt": 0, "step": 2},
    {"kind": "loss_spike", "time": 1795458710123456, "attempt": 0, "step": 2},
    {"kind": "start", "time": 1100.0, "attempt": 0, "step": 0, "clock_ahead": [float("nan"), 1]},
    {"kind": "profile", "time": 1102.0, "attempt": 0},
)


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_a_line_that_makes_no_sense_spoils_nothing(tmp_path, odd, capsys):
    run = synthetic(tmp_path / "run", 5)
    for name in ("events/0.jsonl", "phases.jsonl", "metrics.jsonl", "resources.jsonl", "events/1.jsonl"):
        with (run / name).open("a") as file:
            file.write(json.dumps(odd) + "\n")
    trace = tmp_path / "trace.json"
    assert main([str(run), "--perfetto", str(trace)]) == 0 and json.loads(trace.read_text())
    (told,) = report_of([str(run)])["runs"]
    assert told["summary"]["step"] == 5 and all(0 <= one["time"] < 1e11 for one in told["timeline"])


def test_odd_configs_are_shown_or_said(tmp_path):
    run = synthetic(tmp_path / "run", 2)
    (run / "config.yaml").write_text("a: [2024-01-01, {2024-01-02: [x]}]\nb: .nan\n")
    assert json.loads(as_json(report_of([str(run)])))["runs"][0]["config"]["b"] is None
    (run / "config.yaml").write_text("a: &x {b: *x}\n")
    assert "contains itself" in report_of([str(run)])["runs"][0]["notes"][0]
    for place in (".", "/"):
        with pytest.raises(ConfigError, match="cannot be written"):
            main([str(run), "--output", place])


def test_a_start_that_came_to_nothing_is_no_reason_of_the_attempt_before(tmp_path):
    log = Log(tmp_path / "run")
    log.start(0)
    log.step(1)
    log.now += 60
    log.event("hang", why="no progress", at_fault=1)
    first = log.now
    log.event("start_failed", why="process 3 did not connect", attempt=1, time=first + 340)
    log.now += 400
    log.attempt += 1
    log.start(1)
    log.step(2)
    log.now += 5
    log.event("peer_lost", why="process 1 went away", at_fault=1)
    run = log.write()
    began = [event["began"] for event in log.events if event["kind"] == "start"]
    (run / "launch").mkdir()
    starts = [{"began": began[0] - 3, "code": 137}, {"began": began[1] - 3, "code": 4}]
    (run / "launch" / "starts.json").write_text(json.dumps(starts))
    one, two = report_of([str(run)])["runs"][0]["failures"]
    assert (one["kind"], one["exit_code"], two["kind"], two["exit_code"]) == ("hang", 137, "peer_lost", 4)


def test_a_newer_format_is_said(tmp_path):
    run = synthetic(tmp_path / "run", 5, format=FORMAT + 1)
    (told,) = report_of([str(run)])["runs"]
    assert "was written by a later version of jaxmnt" in told["notes"][0] and told["charts"]


def test_a_run_that_goes_on_is_under_way(tmp_path):
    log = Log(tmp_path / "run")
    log.now = time.time()
    log.start(0)
    log.step(1)
    run = log.write()
    assert report_of([str(run)])["runs"][0]["state"] == "under way"
    assert report_of([str(run)])["runs"][0]["failures"] == []
    for path in run.rglob("*.jsonl"):
        os.utime(path, (1.0, 1.0))
        path.write_text(path.read_text().replace(str(int(log.now))[:6], "100000"))
        os.utime(path, (1.0, 1.0))
    (told,) = report_of([str(run)])["runs"]
    assert told["state"] == "ended abruptly"
    assert [one["kind"] for one in told["failures"]] == ["killed"]


def test_a_trace_has_all_processes_on_one_clock(tmp_path):
    run = synthetic(tmp_path / "run", 3)
    with (run / "phases.jsonl").open("a") as file:
        each = [[0.1] * len(PHASES), [0.2] * len(PHASES)]
        file.write(
            json.dumps({"kind": "phases", "step": 3, "time": 2000.0, "mean": {"data": 0.1}, "each": each}) + "\n"
        )
    start = {
        "kind": "start",
        "time": 1007.0,
        "attempt": 0,
        "process": 1,
        "host": "b",
        "clock_ahead": [4.0, 6.0],
        "began": 1005.0,
    }
    started = {"kind": "started", "time": 1045.0, "attempt": 0, "process": 1, "host": "b", "seconds": {"import": 3.0}}
    (run / "events" / "1.jsonl").write_text(json.dumps(start) + "\n" + json.dumps(started) + "\n")
    trace = json.loads(trace_of([str(run)]))["traceEvents"]
    of = lambda process, name: [one for one in trace if one["pid"] == process and one["name"] == name]
    assert of(1, "start")[0]["ts"] == pytest.approx(1e6 * (1007.0 - 5.0)), "its clock is 5 s ahead"
    assert (of(1, "start: import")[0]["ts"], of(1, "start: import")[0]["dur"]) == (1e6 * 1000.0, 3e6)
    assert (
        sum(one["dur"] for one in trace if one["pid"] == 1 and one.get("tid") == 2 and one["ph"] == "X")
        == len(PHASES) * 2e5
    )
    assert [one["name"] for one in trace if one["name"].startswith("step ")] == ["step 1", "step 2", "step 3"]
    assert all(one["ph"] in "XiCM" and ("ts" in one or one["ph"] == "M") for one in trace)


def test_charts_as_pngs(tmp_path, capsys):
    run = synthetic(tmp_path / "run", 50, spikes=(20,))
    assert main([str(run), "--text", "--png", str(tmp_path / "png")]) == 0
    written = sorted(path.name for path in (tmp_path / "png").iterdir())
    assert {"loss.png", "phases.png", "model.router.png"} <= set(written)
    image = chromium.pixels((tmp_path / "png" / "loss.png").read_bytes())
    line = np.abs(image.astype(int) - [0, 0x72, 0xB2]).sum(axis=2) < 30
    assert line.sum() > 300 and image.shape[1] == 1200
    assert f"PNGs    {len(written)}" in capsys.readouterr().out


def test_served_live(tmp_path):
    run = synthetic(tmp_path / "run", 3)
    with server_for(LatestReport([str(run)], None), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        assert "connect-src 'self'" in urllib.request.urlopen(address + "/").read().decode()
        answer = urllib.request.urlopen(address + "/data.json")
        version, report = answer.headers["ETag"], json.loads(answer.read())
        assert report["watch_seconds"] > 0 and report["runs"][0]["summary"]["step"] == 3
        again = urllib.request.Request(address + "/data.json", headers={"If-None-Match": version})
        with pytest.raises(urllib.error.HTTPError, match="304"):
            urllib.request.urlopen(again)
        with (run / "metrics.jsonl").open("a") as file:
            file.write((run / "metrics.jsonl").read_text().splitlines()[-1].replace('"step": 3', '"step": 4') + "\n")
        until(
            lambda: (
                json.loads(urllib.request.urlopen(address + "/data.json").read())["runs"][0]["summary"]["step"] == 4
            ),
            30,
        )
        elsewhere = urllib.request.Request(address + "/", headers={"Host": "elsewhere.example"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(elsewhere)
        server.shutdown()
    with pytest.raises(ConfigError, match="--port"):
        server_for(LatestReport([str(run)], None), 1 << 20)
    bad = command("jaxmnt.report", str(run), "--watch", "--port", "70000")
    assert bad.returncode == ExitCode.CONFIG and "must be a port" in bad.stderr


@pytest.fixture(scope="module")
def page_reader(tmp_path_factory):
    with chromium.browser(tmp_path_factory.mktemp("browser")) as one:
        yield one


@pytest.fixture
def rough_run(tiny, tiny_file, tmp_path, monkeypatch) -> Path:
    """A real run with a bad step, that is stopped once, killed once, and finished."""
    with monkeypatch.context() as patch:
        poisoned(patch, 6)
        assert train(tiny("train.steps=60", "train.eval_every=20", "train.stop_after=12")) == ExitCode.STOPPED
    arguments = ["-m", "jaxmnt.train", "--config", str(tiny_file), "train.steps=60", "train.eval_every=20"]
    start = lambda *more: subprocess.Popen(
        [sys.executable, *arguments, *more],
        env=dict(os.environ, JAX_NUM_CPU_DEVICES="1"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    killed = start()
    until(lambda: len(metrics(tmp_path / "run")) >= 25, 60)
    killed.kill()
    killed.wait()
    assert start().wait(120) == ExitCode.FINISHED
    return tmp_path / "run"


DRAWN = """
[...document.querySelectorAll("article.chart")].map((card) => {
  const canvas = card.querySelector("canvas");
  const color = getComputedStyle(document.documentElement).getPropertyValue("--c0").trim();
  const [red, green, blue] = [1, 3, 5].map((place) => parseInt(color.slice(place, place + 2), 16));
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let found = 0;
  for (let at = 0; at < pixels.length; at += 4) {
    const far = Math.abs(pixels[at] - red) + Math.abs(pixels[at + 1] - green) + Math.abs(pixels[at + 2] - blue);
    if (pixels[at + 3] > 200 && far < 24) found += 1;
  }
  return [card.dataset.chart, found];
})
"""
"""Of each chart, how many pixels have the colour of its first series."""

OVERLAPS = """
[...document.querySelectorAll("h1, h2, h3, p, td, th, button, b")].filter((one) => {
  const box = one.getBoundingClientRect();
  return box.width && !one.closest(".scroll") && box.right > document.documentElement.clientWidth + 1;
}).map((one) => one.textContent)
"""
"""Texts that reach beyond the page."""


@pytest.mark.slow
def test_a_real_run_in_a_real_browser(rough_run, page_reader, tmp_path):
    assert main([str(rough_run), "--price", "2"]) == 0
    address = (rough_run / "report.html").as_uri()
    for width, height, dark in ((1400, 900, False), (390, 844, False), (390, 844, True)):
        page_reader.look(width, height, dark=dark)
        page_reader.open(address)
        assert page_reader.said == [] and page_reader.requests == [address]
        drawn = dict(page_reader.evaluate(DRAWN))
        assert {"loss", "rate", "step_seconds", "phases", "grad_norm", "learning_rate"} <= set(drawn)
        assert all(count > 20 for count in drawn.values()), drawn
        assert page_reader.evaluate("document.documentElement.scrollWidth") <= width
        assert page_reader.evaluate(OVERLAPS) == []
        seen = chromium.pixels(page_reader.picture())
        assert (seen[:, 0].mean() < 60) == dark, "the page is dark where one wants it dark"
    text = page_reader.evaluate("document.body.innerText")
    for words in ("ended abruptly", "bad step", "Goodput", "steps that a later attempt repeated", "finished"):
        assert words in text, words
    assert page_reader.evaluate("document.querySelectorAll('svg circle').length") > 5


@pytest.mark.slow
def test_the_page_by_keyboard(page_reader, tmp_path):
    assert main([str(synthetic(tmp_path / "run", 400, spikes=(300,)))]) == 0
    page_reader.look(1400, 900)
    page_reader.open((tmp_path / "run" / "report.html").as_uri())
    page_reader.evaluate("document.querySelector('[data-chart=loss] .plot').focus()")
    readout = "document.querySelector('[data-chart=loss] .readout').textContent"
    page_reader.press("Home")
    assert page_reader.evaluate(readout).startswith("step 1: training 2")
    page_reader.press("ArrowRight")
    assert page_reader.evaluate(readout).startswith("step 2: ")
    page_reader.press("End")
    assert page_reader.evaluate(readout).startswith("step 400: ")
    before = page_reader.picture()
    page_reader.press("+", "+")
    page_reader.evaluate("new Promise((done) => setTimeout(done, 200))")
    assert page_reader.picture() != before, "zoomed"
    page_reader.press("0", "0")
    button = "document.querySelector('[data-chart=loss] .legend button')"
    page_reader.evaluate(f"{button}.focus(); {button}.click()")
    assert page_reader.evaluate(f"{button}.getAttribute('aria-pressed')") == "false"
    assert dict(page_reader.evaluate(DRAWN))["loss"] < 20, "a series that is switched off is not drawn"
    label = page_reader.evaluate("document.querySelector('[data-chart=loss] .plot').getAttribute('aria-label')")
    assert "highest 99 at 300" in label, "the chart in words"
    assert page_reader.said == []


@pytest.mark.slow
def test_a_hundred_thousand_steps_open_at_once(page_reader, tmp_path):
    assert main([str(synthetic(tmp_path / "run", 100_000, spikes=(50_001,)))]) == 0
    page_reader.look(1400, 900)
    assert page_reader.open((tmp_path / "run" / "report.html").as_uri()) < 2.0
    assert all(count > 20 for _, count in page_reader.evaluate(DRAWN)) and page_reader.said == []


@pytest.mark.slow
def test_a_live_page_follows_the_run(page_reader, tmp_path):
    run = synthetic(tmp_path / "run", 3)
    with server_for(LatestReport([str(run)], None), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page_reader.look(1400, 900)
        page_reader.open(f"http://127.0.0.1:{server.server_address[1]}/")
        with (run / "metrics.jsonl").open("a") as file:
            file.write((run / "metrics.jsonl").read_text().splitlines()[-1].replace('"step": 3', '"step": 77') + "\n")
        until(lambda: "77" in page_reader.evaluate("document.querySelector('.tiles').innerText"), 30)
        assert page_reader.said == []
        server.shutdown()
