"""What preflight makes of what hosts say of themselves, and the command on this machine."""

import json
import os
import socket
import subprocess
import sys

import jax
import pynvml
import pytest
from conftest import command
from hypothesis import given
from hypothesis import strategies as st
from pretend_nvml import PretendNvml

from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import PeerError, PreflightError
from jaxmnt.preflight import facts as own
from jaxmnt.preflight import links, network
from jaxmnt.preflight.compare import quick_rows, thorough_rows
from jaxmnt.preflight.directory import shared_rows
from jaxmnt.preflight.network import Interface
from jaxmnt.preflight.table import Row, Verdict, failures, table, to_json

GIB = 1 << 30


def host(name, **changed):
    facts = {
        "host": name, "clock": [0.0, 0.01], "devices": 8, "kind": "H100", "platform": "gpu", "python": "3.11.7",
        "environment": "abc", "image": "", "cores": 64, "memory": {"all": 900 * GIB, "free": 800 * GIB},
        "shm": 64 * GIB, "nics": [card("eth0", 100_000)], "fabric": [port()], "nccl": {}, "gpus": [gpu()],
        "strangers": [], "xids": [], "links": {}, "boot": name,
    }  # fmt: skip
    assert set(changed) <= set(facts)
    return facts | changed


def card(name, megabits, address="10.0.0.1", default=False):
    return vars(Interface(name, megabits, address, default))


def gpu(**changed):
    return {"index": "0", "celsius": 40, "uncorrected_errors": 0, "throttled": []} | changed


def port(**changed):
    return vars(network.Port("mlx5_0/1", "ACTIVE", 400.0, "InfiniBand")) | changed


def found(check, *facts):
    return [row for row in [*quick_rows(facts), *thorough_rows(facts)] if row.check == check]


def test_hosts_that_are_alike():
    rows = [*quick_rows([host("a"), host("b")]), *thorough_rows([host("a"), host("b")])]
    assert {row.verdict for row in rows} == {Verdict.OK} and {row.where for row in rows} == {"all 2 hosts"}
    plain = thorough_rows([host("a", fabric=[], gpus=[], platform="cpu", links={})])
    assert not {"fabric ports", "GPUs"} & {row.check for row in plain}, "no row about what nobody has"


def test_a_port_that_nobody_uses_is_no_failure():
    spare = vars(network.Port("mlx5_9/1", "DOWN", 100.0, "Ethernet"))
    rows = found("fabric", host("a", fabric=[port(), spare]), host("b", fabric=[port(), spare]))
    assert rows == []


def test_errors_of_hardware_in_the_kernels_log():
    text = (
        "[1.0] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
        "[2.0] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
        "[3.0] NVRM: Xid (PCI:0000:86:00): 13, pid=77, Graphics Exception\n"
    )
    assert own.parse_xids(text) == ["0000:3b:00: Xid 79"], "13 is a program's"


@pytest.mark.parametrize(
    ("check", "odd", "verdict", "words"),
    [
        ("device kind", {"kind": "A100"}, "failed", "A100, elsewhere H100"),
        ("devices per process", {"devices": 7}, "failed", "7, elsewhere 8"),
        ("clocks", {"clock": [4.9, 5.1]}, "failed", "4.9 s ahead of the others"),
        ("clocks", {"clock": [-9.0, -3.0]}, "failed", "3.0 s behind the others"),
        ("python", {"python": "3.12.1"}, "warning", "3.12.1, elsewhere 3.11.7"),
        ("packages", {"environment": "xyz"}, "warning", "xyz, elsewhere abc"),
        ("image", {"image": "sha256:1"}, "warning", "sha256:1, elsewhere not set"),
        ("host memory", {"memory": {"all": 900 * GIB, "free": GIB}}, "warning", "1 GiB of 900 GiB is available"),
        ("shared memory", {"shm": 64 << 20}, "warning", "64 MiB is free in /dev/shm"),
        ("network interface", {"nccl": {"NCCL_SOCKET_IFNAME": "ib0"}}, "failed", "ib0 matches no interface"),
        ("network interface", {"nics": [card("lo", 0, "127.0.0.1")]}, "warning", "NCCL would use lo, which reaches no"),
        (
            "network interface",
            {"nics": [card("eth0", 1000), card("eth1", 100_000)]},
            "warning",
            "NCCL would use eth0 with 1 Gbit/s, and eth1 has 100 Gbit/s",
        ),
        ("network speed", {"nics": [card("eth0", 10_000)]}, "warning", "10 Gbit/s, elsewhere 100 Gbit/s"),
        ("fabric", {"fabric": [port(state="DOWN")]}, "failed", "its state is DOWN"),
        ("fabric", {"fabric": [port(errors={"link_downed": 3})]}, "warning", "link_downed 3"),
        ("fabric ports", {"fabric": []}, "failed", ", elsewhere InfiniBand 400 Gbit/s"),
        ("GPU memory", {"gpus": [gpu(uncorrected_errors=2)]}, "failed", "2 uncorrected memory errors"),
        ("GPU clocks", {"gpus": [gpu(throttled=["heat"])]}, "failed", "kept down by heat"),
        ("GPU heat", {"gpus": [gpu(celsius=91)]}, "warning", "91 °C"),
        ("GPUs in use", {"strangers": ["77 python"]}, "failed", "by 77 python"),
        ("GPU errors", {"xids": ["0000:3b:00: Xid 79"]}, "warning", "since the driver was started"),
        ("NVLink", {"links": {"GPU 0": 17, "GPU 1": 18}}, "failed", "17 links are active, elsewhere 18"),
        ("GPUs", {"gpus": []}, "warning", "NVML reports no GPU there"),
    ],
)
def test_the_host_that_is_not_like_the_others_is_named(check, odd, verdict, words):
    rows = found(check, host("a"), host("b"), host("odd", **odd))
    (row,) = [row for row in rows if row.verdict.value == verdict]
    assert row.where.split()[0] == "odd" and words in row.found and row.advice


def test_a_clock_within_what_the_words_took_is_no_failure():
    (row,) = found("clocks", host("a"), host("b", clock=[-0.2, 7.0]))
    assert row.verdict == Verdict.OK


def test_a_clock_that_all_others_disagree_with_is_the_one_that_is_wrong():
    (row,) = found("clocks", host("a"), host("b", clock=[4.0, 4.1]), host("c", clock=[3.9, 4.2]))
    assert row.where == "a" and row.found == "4.0 s behind the others"


def test_two_hosts_that_differ_are_compared_with_the_first():
    (row,) = found("device kind", host("a"), host("b", kind="A100"))
    assert row.where == "b"


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("", "ib0"), ("eth", "eth0"), ("=eth1", "eth1"), ("^ib,lo", "docker0"), ("^=ib0,docker0", "eth0"),
        ("wlan", None),
    ],
)  # fmt: skip
def test_the_interface_that_nccl_takes(wanted, name):
    cards = [Interface(one, 1000, "10.0.0.1") for one in ("docker0", "eth0", "eth1", "ib0", "lo")]
    chosen = network.select_nccl_interface(cards, wanted)
    assert (chosen and chosen.name) == name


def test_cards_and_ports_are_read_from_sys(tmp_path):
    eth = tmp_path / "class" / "net" / "eth9"
    eth.mkdir(parents=True)
    (eth / "operstate").write_text("up\n")
    (eth / "speed").write_text("25000\n")
    (tmp_path / "class" / "net" / "eth8").mkdir()
    assert network.read_interfaces(tmp_path) == [Interface("eth9", 25000, "")]
    adapter = tmp_path / "class" / "infiniband" / "mlx5_0" / "ports" / "1"
    (adapter / "counters").mkdir(parents=True)
    for name, text in {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}.items():
        (adapter / name).write_text(text + "\n")
    (adapter / "counters" / "link_downed").write_text("2\n")
    (adapter / "counters" / "symbol_error").write_text("0\n")
    expected = network.Port("mlx5_0/1", "ACTIVE", 400.0, "InfiniBand", {"link_downed": 2})
    assert network.fabric_ports(tmp_path) == [expected]


def test_what_nvml_tells_of_a_host(monkeypatch):
    nvml = PretendNvml(4)
    one, two, _, four = nvml.gpus
    two.celsius, two.ecc = 88, 5
    two.reasons = (
        pynvml.nvmlClocksEventReasonHwSlowdown
        | pynvml.nvmlClocksEventReasonHwThermalSlowdown
        | pynvml.nvmlClocksEventReasonSwThermalSlowdown
    )
    one.links = two.links = [1, 1, 0]
    one.processes = {os.getpid(): "python", 10**8: "/usr/bin/nvidia-cuda-mps-server"}
    two.processes, four.processes = {10**8 + 1: "other"}, {10**8 + 2: "elsewhere"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-1,GPU-2")
    told = own.gpu_facts(nvml)
    assert told["gpus"][:2] == [gpu(index="0", celsius=61, uncorrected_errors=3), gpu(
        index="1", celsius=88, uncorrected_errors=5, throttled=["slowdown", "heat"]
    )]  # fmt: skip
    assert [one["index"] for one in told["gpus"]] == ["0", "1", "2"]
    assert told["strangers"] == [f"{10**8 + 1} other", f"{os.getpid()} python"]
    assert told["links"] == {"GPU 0": 2, "GPU 1": 2}
    nvml.supported = False
    assert {one["uncorrected_errors"] for one in own.gpu_facts(nvml)["gpus"]} == {0}
    monkeypatch.setattr(own, "_belongs_to_preflight", lambda pid: pid == os.getpid())
    assert own.gpu_facts(nvml)["strangers"] == [f"{10**8 + 1} other"]


def test_a_host_without_nvml_has_no_gpus():
    nvml = PretendNvml(1)
    nvml.nvmlInit = lambda: nvml.nvmlDeviceGetHandleByIndex(1)  # raises NVMLError
    assert own.gpu_facts(nvml) == {"gpus": [], "strangers": [], "links": {}}


def test_what_nccl_says_it_uses(tmp_path):
    lines = [
        "n1:52:80 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>",
        "n1:52:80 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>",
        "n1:52:80 [0] NCCL INFO Using network Socket",
    ]
    (tmp_path / "nccl-n1-52.log").write_text("\n".join(lines))
    (row,) = links.nccl_rows(tmp_path, "n1")
    assert row.where == "n1" and row.found == "Socket, Socket [0]eth0:10.0.0.1<0>"
    (nothing,) = links.nccl_rows(tmp_path / "nowhere", "n1")
    assert nothing.verdict == Verdict.WARNING


@given(st.integers(2, 17))
def test_in_a_tournament_each_two_meet_once_and_nobody_plays_twice_a_round(hosts):
    rounds = links._pair_rounds(hosts)
    pairs = [pair for one in rounds for pair in one]
    assert len(set(pairs)) == len(pairs) == hosts * (hosts - 1) // 2
    for one in rounds:
        players = [player for pair in one for player in pair]
        assert len(set(players)) == len(players)


def judged(rates, hosts=4, megabits=0, platform="gpu"):
    names = [f"h{number}" for number in range(hosts)]
    pairs = {(a, b): rates(a, b) for a in range(hosts) for b in range(a + 1, hosts)}
    return links.judge_pairs(names, pairs, [megabits] * hosts, platform)


def test_slow_links():
    assert [row.verdict for row in judged(lambda a, b: 1e9)] == [Verdict.OK]
    (host_row,) = judged(lambda a, b: 1e8 if 2 in (a, b) else 1e9)
    assert (host_row.where, host_row.verdict) == ("h2", Verdict.FAILED)
    (pair_row,) = judged(lambda a, b: 5e8 if (a, b) == (1, 3) else 1e9)
    assert (pair_row.where, pair_row.verdict) == ("h1 – h3", Verdict.WARNING)
    (all_row,) = judged(lambda a, b: 1e9, megabits=400_000)
    assert (all_row.where, all_row.verdict) == ("all 4 hosts", Verdict.FAILED)
    (two_row,) = judged(lambda a, b: 1e9, hosts=2, megabits=10_000)
    assert two_row.verdict == Verdict.OK


def from_json(text: str) -> list[Row]:
    return [Row(**record | {"verdict": Verdict(record["verdict"])}) for record in json.loads(text)]


def test_a_table_says_below_a_line_what_to_do():
    rows = [Row("clocks", Verdict.OK, "all 2 hosts", "fine"), Row("links", Verdict.FAILED, "h1", "slow", "look at it")]
    assert table(rows).splitlines() == [
        "check   verdict  where        found",
        "clocks  ok       all 2 hosts  fine",
        "links   failed   h1           slow",
        "                              → look at it",
    ]
    assert from_json(to_json(rows)) == rows and failures(rows) == rows[1:]


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    (row,) = shared_rows(tmp_path / "file" / "run", Identity(), ["h"])
    assert row.verdict == Verdict.FAILED and "Not a directory" in row.found
    (row,) = shared_rows(tmp_path / "run", Identity(), ["h"])
    assert row.verdict == Verdict.OK and list((tmp_path / "run").iterdir()) == []


def test_explain_says_where_it_came_from():
    environment = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "PMIX_RANK": "3"}
    result = command("jaxmnt.preflight", "--explain", **environment)
    assert result.returncode == 0, result.stderr
    lines = [line.split(maxsplit=1) for line in result.stdout.splitlines()]
    assert ["read", "RANK=3"] in lines and ["coordinator", "h:12355"] in lines
    assert ["ignored", "mpi: says the same (PMIX_RANK=3)"] in lines
    told = json.loads(command("jaxmnt.preflight", "--explain", "--json", **environment).stdout)
    assert told["this process"] == "process 3 of 4" and told["read"]["WORLD_SIZE"] == "4"
    refused = command("jaxmnt.preflight", "--explain", RANK="3")
    assert refused.returncode == 2 and "RANK and WORLD_SIZE belong together" in refused.stderr


@pytest.mark.alone
def test_two_processes_on_this_machine(tiny_file, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "jaxmnt.preflight", "--config", str(tiny_file), "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=dict(os.environ, JAX_NUM_CPU_DEVICES="1", RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                     LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)),
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    rows = from_json(outputs[0][0])
    assert outputs[1][0] == "" and not failures(rows)
    checks = {row.check for row in rows}
    assert checks >= {"coordinator", "clocks", "run directory", "writing there", "room", "matrix product", "axis data"}
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".preflight")]


@pytest.mark.slow
def test_a_single_process_and_wrong_arguments(tiny_file):
    alone = command("jaxmnt.preflight", "--config", str(tiny_file))
    assert alone.returncode == 0 and "matrix product" in alone.stdout, alone.stderr
    missing = command("jaxmnt.preflight")
    assert missing.returncode == 2 and "--config: missing" in missing.stderr
    busy = command("jaxmnt.preflight", "--config", str(tiny_file), "run.dir=/proc/nothing")
    assert busy.returncode == 3 and "run directory: " in busy.stderr


@pytest.mark.parametrize("raised", [RuntimeError("Unable to initialize backend 'cuda': no device"), AssertionError()])
def test_a_host_whose_devices_do_not_start_is_named(monkeypatch, raised):
    def local_devices():
        raise raised

    monkeypatch.setattr(jax, "local_devices", local_devices)
    with pytest.raises(PreflightError, match=f"{socket.gethostname()}: .* look at nvidia-smi there") as error:
        own.quick_facts((0.0, 0.0))
    assert error.value.hosts == [socket.gethostname()]


def test_a_host_that_should_have_gpus_does_not_train_on_its_cpu(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    with pytest.raises(PreflightError, match="JAX_PLATFORMS=cuda,cpu, and JAX finds no GPU"):
        own.quick_facts((0.0, 0.0))


def test_a_peers_loss_is_not_taken_for_devices_that_do_not_start(monkeypatch):
    def local_devices():
        raise RuntimeError("DEADLINE_EXCEEDED: the topology of process 1 did not come")

    monkeypatch.setattr(jax, "local_devices", local_devices)
    with pytest.raises(PeerError, match="topology"):
        own.quick_facts((0.0, 0.0))
