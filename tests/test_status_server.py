"""What a run tells over HTTP."""

import http.client
import json
import math
import socket
import time
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from conftest import metrics
from prometheus_client.parser import text_string_to_metric_families

from jaxmnt.errors import ExitCode
from jaxmnt.telemetry.status_server import prometheus_text, serving
from jaxmnt.train import train

STATUS = {
    "kind": "train", "step": 7, "steps": 100, "loss": 2.5, "tokens": 4096, "bad_steps": 1, "mfu": None, "hfu": 0.25,
    "tokens_per_second": 1e6, "phases": {"data": 0.25, "device": 1.5}, "stragglers": 1, "spent": math.inf,
    "slow": [{"process": 3, "host": "a", "phase": "data"}], "model": {'router"s load': 0.5},
    "resources": {"gpu_celsius": {"mean": 60.0, "min": [50.0, 2], "max": [70.0, 1]}},
}  # fmt: skip


@pytest.fixture
def server():
    with serving("127.0.0.1", 0, lambda: STATUS) as url:
        yield address_in(url)


def address_in(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname, parts.port


def ask(address, path: str, **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection(*address, timeout=10)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.getheader("Content-Type"), answer.read().decode()


def test_prometheus_can_read_it(server):
    code, kind, text = ask(server, "/metrics")
    assert code == 200 and kind.startswith("text/plain; version=0.0.4")
    found = {
        (sample.name, sample.labels.get("phase")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["jaxmnt_step", None] == 7 and found["jaxmnt_tokens_total", None] == 4096
    assert found["jaxmnt_phase_seconds", "device"] == 1.5 and found["jaxmnt_stragglers", None] == 1
    assert found["jaxmnt_hfu", None] == 0.25 and found["jaxmnt_spent", None] == math.inf
    told = {tuple(one.labels.values()): one.value for family in text_string_to_metric_families(text)
            for one in family.samples if one.labels}  # fmt: skip
    assert told["routers load",] == 0.5 and told["gpu_celsius", "max"] == 70.0
    assert not any(name == "jaxmnt_mfu" for name, _ in found), "what is not known is left out"
    assert list(text_string_to_metric_families(prometheus_text({}))) == []


def test_people_and_probes_can_read_it(server):
    code, kind, text = ask(server, "/status")
    assert (code, kind) == (200, "application/json; charset=utf-8")
    assert json.loads(text) == STATUS | {"spent": None}
    assert ask(server, "/healthz")[::2] == (200, "step 7\n")
    assert "test_people_and_probes_can_read_it" in ask(server, "/stacks")[2]
    assert ask(server, "/secrets")[0] == 404
    assert ask(server, "/status?x=1")[0] == 200


def test_only_who_asks_for_this_host_is_answered(server):
    assert ask(server, "/status", Host="evil.example")[0] == 403
    for name in ("localhost:9100", "127.0.0.1", "[::1]:9100"):
        assert ask(server, "/status", Host=name)[0] == 200


def test_who_does_not_ask_holds_nobody_up(server):
    silent = [socket.create_connection(server) for _ in range(8)]
    began = time.monotonic()
    assert ask(server, "/healthz")[0] == 200
    assert time.monotonic() - began < 5
    for connection in silent:
        connection.close()


def test_a_port_that_is_taken_is_said(capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with serving("127.0.0.1", port, lambda: STATUS) as url:
            assert url is None
    assert "is not available" in capfd.readouterr().err


def test_a_run_answers(tiny, tmp_path, monkeypatch):
    """Asked at its last save, in the middle of the run."""
    from jaxmnt.run import loop, running

    answers, save = [], loop._save

    def asking(run):
        answers.append([ask(told[0], page) for page in ("/status", "/metrics", "/stacks")])
        save(run)

    told = []

    @contextmanager
    def noted(*arguments):
        with serving(*arguments) as url:
            told.append(address_in(url))
            yield url

    monkeypatch.setattr(loop, "_save", asking)
    monkeypatch.setattr(running, "serving", noted)
    assert train(tiny("telemetry.port=0", "train.stop_after=5", "train.steps=20")) == ExitCode.STOPPED
    (status, prometheus, threads), *_ = answers
    line = metrics(tmp_path / "run")[-2]
    said = json.loads(status[2])
    assert (said["step"], said["loss"], said["steps"]) == (line["step"], line["loss"], 20)
    assert said["phases"] and said["slow"] == [] and "taking" in said["now"]
    assert "jaxmnt_loss " in prometheus[2] and "jaxmnt" in threads[2]
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(told[0])
