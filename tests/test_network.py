"""Three hosts with a network between them: they train, and what is wrong with one is said with its name, in time."""

import os
import re
import sys
import time

import pytest
from conftest import events, losses
from lab import Lab, outcomes, skip_without_namespaces

pytestmark = pytest.mark.slow

HOSTS, PORT = 3, 12355
FROM_A_LAUNCHER = {host: {"JAXMNT_RUN_KEY": "5e" * 32} for host in range(HOSTS)}


@pytest.fixture(scope="module")
def lab():
    skip_without_namespaces()
    made = Lab(HOSTS)
    yield made
    made.close()


@pytest.fixture
def on_all(lab, tiny_file, tmp_path):
    """Starts a command of jaxmnt on each host, and hands over exit codes and outputs.

    `ids` are the process ids by host (None starts nothing there), `settings`, `extra` variables and so on are by host.
    """

    def start(
        module, *arguments, ids=(0, 1, 2), settings=None, hosts=None, private=None, coordinator="h0",
        extra=None, wait=150.0,
    ):  # fmt: skip
        started = []
        for host, process_id in enumerate(ids):
            if process_id is None:
                continue
            command = [
                sys.executable, "-m", f"jaxmnt.{module}", "--config", str(tiny_file),
                "data.global_batch_size=12", f"cluster.coordinator={coordinator}:{PORT}", f"cluster.processes={HOSTS}",
                f"cluster.process_id={process_id}", *arguments, *(settings or {}).get(host, []),
            ]  # fmt: skip
            environment = dict(os.environ, JAX_NUM_CPU_DEVICES="1", **(extra or {}).get(host, {}))
            started.append(
                lab.start(
                    host, *command, hosts=(hosts or {}).get(host), private=(private or {}).get(host), env=environment
                )
            )
        return started if wait == 0 else outcomes(started, wait)

    yield start
    lab.stop()


def test_three_hosts_train(on_all, tmp_path):
    ended = on_all("train", "train.steps=6", "optimizer.warmup_steps=2")
    assert [code for code, _ in ended] == [0, 0, 0], ended
    assert len(losses(tmp_path / "run")) == 6
    assert [events(tmp_path / "run", "start", host)[0]["host"] for host in range(HOSTS)] == ["h0", "h1", "h2"]


@pytest.mark.alone
def test_a_slow_link_is_named(lab, on_all):
    lab.slow_down(1, megabits=100)
    try:
        ended = on_all("preflight")
    finally:
        lab.speed_up(1)
    assert [code for code, _ in ended] == [3, 3, 3], ended
    assert "links: h1: 0.0" in ended[0][1]


@pytest.mark.alone
def test_a_network_that_is_slow_everywhere_is_no_network_of_this_speed(lab, on_all):
    """Compared with what the cards say of themselves: nobody is slower than the others."""
    for host in range(HOSTS):
        lab.slow_down(host, megabits=20)
    try:
        ended = on_all("preflight")
    finally:
        for host in range(HOSTS):
            lab.speed_up(host)
    assert [code for code, _ in ended] == [3, 3, 3], ended
    assert (
        "links: all 3 hosts: 0.00" in ended[0][1] and "the hosts' network cards are rated at 1.25 GB/s" in ended[0][1]
    )


def test_a_blocked_port(lab, on_all):
    lab.block(2, PORT)
    try:
        ended = on_all("preflight", "--wait", "15")
    finally:
        lab.unblock(2)
    assert [code for code, _ in ended] == [4, 4, 4], ended
    assert "process 2 of 3 did not connect within 15 s (connected: 0 on h0, 1 on h1)" in ended[0][1]
    assert f"no firewall between them blocks port {PORT}" in ended[2][1] and "process 2 of 3 on h2" in ended[2][1]


def test_a_coordinator_that_is_another_host(lab, on_all):
    ended = on_all("preflight", "--wait", "4", coordinator="h1")
    assert [code for code, _ in ended] == [3, 4, 4], ended
    assert f"h1 is {lab.address(1)}, which is not an address of h0, where process 0 is" in ended[0][1]


def test_a_coordinators_name_that_means_oneself(lab, on_all):
    ended = on_all("preflight", "--wait", "4", hosts={2: lab.write_hosts("misled", h0="127.0.0.1")})
    assert [code for code, _ in ended] == [4, 4, 3], ended
    assert "h2 resolves h0 to 127.0.0.1, a loopback address of h2 itself; correct /etc/hosts on h2" in ended[2][1]


def test_a_name_that_nobody_has(on_all):
    ended = on_all("preflight", "--wait", "4", coordinator="h9", ids=(None, 1, 2))
    assert [code for code, _ in ended] == [3, 3], ended
    assert "h1 cannot resolve h9" in ended[0][1]


def test_an_own_name_that_is_a_loopback_address(lab, on_all):
    """Gloo would give the others that address, and all would wait for ever."""
    ended = on_all("preflight", hosts={2: lab.write_hosts("debian", h2="127.0.1.1")})
    assert [code for code, _ in ended] == [3, 3, 3], ended
    assert all("h2 resolves its own name to a loopback address" in text for _, text in ended)


def test_a_doubled_id(on_all):
    ended = on_all("preflight", "--wait", "20", ids=(0, 1, 1))
    assert [code for code, _ in ended] == [2, 2, 2], ended
    assert "cluster.process_id: 1 was given twice, to processes on h" in ended[0][1]


def test_a_missing_host(on_all):
    ended = on_all("preflight", "--wait", "15", ids=(0, 1, None))
    assert [code for code, _ in ended] == [4, 4], ended
    assert "jaxmnt: process 2 of 3 not connected yet (connected: 0 on h0, 1 on h1)" in ended[0][1]
    assert all("process 2 of 3 did not connect within 15 s" in text for _, text in ended)


def test_another_config(on_all):
    ended = on_all("preflight", "--wait", "20", settings={1: ["seed=1"]})
    assert [code for code, _ in ended] == [2, 2, 2], ended
    assert all("config digest differs: " in text and "in process 1 on h1" in text for _, text in ended)


def test_another_version_of_a_package(on_all, tmp_path):
    information = tmp_path / "other" / "jaxlib-0.0.1.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: jaxlib\nVersion: 0.0.1\n")
    path = f"{information.parent}:{os.environ.get('PYTHONPATH', '')}"
    ended = on_all("preflight", "--wait", "20", extra={1: {"PYTHONPATH": path}})
    assert [code for code, _ in ended] == [3, 3, 3], ended
    assert all("jaxlib version differs: 0.0.1 in process 1 on h1, " in text for _, text in ended)


@pytest.mark.exhaustive
def test_a_run_directory_that_is_not_shared(on_all, tmp_path):
    (tmp_path / "run").mkdir()
    ended = on_all("preflight", private={2: tmp_path / "run"}, extra=FROM_A_LAUNCHER)
    assert [code for code, _ in ended] == [3, 3, 3], ended
    assert (
        f"run directory: h2: {tmp_path / 'run'}: a file that another process has written there is not visible"
        in ended[0][1]
    )


@pytest.mark.exhaustive
def test_without_a_launchers_key_a_run_directory_that_is_not_shared_is_seen_by_its_key(lab, on_all, tmp_path):
    (tmp_path / "run").mkdir()
    ended = on_all("preflight", "--wait", "20", private={2: tmp_path / "run"})
    assert [code for code, _ in ended] == [3, 3, 3], ended
    assert f"process 0 at h0:{PORT} and h2 have different run keys: share run.dir among all hosts" in ended[2][1]
    for _, text in ended[:2]:
        missing = "process 2 of 3 did not connect within 20 s (connected: 0 on h0, 1 on h1)"
        assert f"{missing}, and {lab.address(2)} " in text
        assert "connected without the run's key" in text


@pytest.mark.exhaustive
def test_a_clock_that_is_wrong(on_all, tmp_path):
    """Set in Python: libfaketime holds a process of several threads for ever now and then."""
    (tmp_path / "ahead").mkdir()
    (tmp_path / "ahead" / "sitecustomize.py").write_text(
        "import time\nreal = time.time\ntime.time = lambda: real() + 5\n"
    )
    path = f"{tmp_path / 'ahead'}:{os.environ.get('PYTHONPATH', '')}"
    ended = on_all("preflight", extra={1: {"PYTHONPATH": path}})
    assert [code for code, _ in ended] == [3, 3, 3], ended
    assert re.search(r"clocks: h1: (4\.\d|5\.\d) s ahead of the others; start chrony", ended[0][1])


def test_a_run_starts_with_the_fast_form(on_all, tmp_path):
    (tmp_path / "run").mkdir()
    ended = on_all("train", private={1: tmp_path / "run"}, extra=FROM_A_LAUNCHER)
    assert [code for code, _ in ended] == [3, 3, 3], ended
    assert all("run directory: h1: " in text for _, text in ended)


def test_a_cut_link_ends_in_a_named_failure_on_every_host(lab, on_all, tmp_path):
    limit = 10
    started = on_all(
        "train", "train.steps=100000", "cluster.silence_timeout_seconds=6", f"watchdog.step_seconds={limit}", wait=0
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert time.monotonic() < deadline, outcomes(started, 60)
        time.sleep(0.2)
    lab.unplug(1)
    try:
        ended = outcomes(started, limit + 5)
    finally:
        lab.plug_in(1)
    assert [code for code, _ in ended] == [4, 4, 4], ended
    for host, (_, text) in enumerate(ended):
        culprit = "process 1 of 3 on h1" if host != 1 else "process 0 of 3 on h0"
        assert f"error: {culprit} has been silent for 6 s" in text or "no progress" in text, text
