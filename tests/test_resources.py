"""What a run takes of its hosts: memory, GPUs through a pretend NVML, the network's counters; and slow devices."""

import errno
import hashlib
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pynvml
import pytest
from conftest import until
from hypothesis import given
from hypothesis import strategies as st
from pretend_nvml import PretendNvml

from jaxmnt.data.run_tokenizer import RunTokenizer
from jaxmnt.distributed import container
from jaxmnt.run import monitoring
from jaxmnt.run.probe import TimedProduct
from jaxmnt.telemetry import kernel_counters, status_server
from jaxmnt.telemetry.events import RESOURCES, event_file, read_lines
from jaxmnt.telemetry.nvml import BAD_REASONS, GpuReader, NvmlError
from jaxmnt.telemetry.resources import ResourceLog, ResourceSampler
from jaxmnt.telemetry.slow_devices import CONSECUTIVE_READINGS as COUNT
from jaxmnt.telemetry.slow_devices import SlowDeviceDetector
from jaxmnt.train import train


def test_the_pretend_nvml_is_like_the_real_one():
    own = [name for name in vars(PretendNvml) if name.startswith("nvml")]
    assert own and all(callable(getattr(pynvml, name)) for name in own)
    assert all(hasattr(pynvml, name) for name in BAD_REASONS)


def test_gpus_are_read_by_number_and_by_name():
    nvml = PretendNvml(4)
    nvml.gpus[2].reasons = pynvml.nvmlClocksEventReasonHwThermalSlowdown | pynvml.nvmlClocksEventReasonSwPowerCap
    reader = GpuReader(["2", "GPU-0"], nvml)
    two, zero = reader.read()
    assert (two.clock_mhz, two.utilisation, two.watts, two.celsius) == (1980, 97, 650.0, 61)
    assert two.throttled == ["too hot (hardware)"] and zero.throttled == [], "a power limit is no fault"
    assert reader.faults() == []
    nvml.gpus[0].ecc, nvml.xids = 5, [(2, 79), (2, 48)]
    assert reader.faults() == [(1, "2 uncorrected memory errors (ECC)"), (0, "Xid 79"), (0, "Xid 48")]
    assert reader.faults() == []
    nvml.supported = False
    assert reader.faults() == []
    with pytest.raises(NvmlError):
        GpuReader(["9"], PretendNvml(1))


def counters(root: Path, interface: str, *, device: bool = True, **values: int) -> None:
    folder = root / "class" / "net" / interface / "statistics"
    folder.mkdir(parents=True, exist_ok=True)
    if device:
        (folder.parent / "device").mkdir(exist_ok=True)
    for name, value in values.items():
        (folder / name).write_text(f"{value}\n")


def test_the_kernels_counters(tmp_path):
    assert kernel_counters.ethernet(tmp_path) == kernel_counters.Traffic(), "no such class of devices"
    counters(tmp_path, "lo", tx_bytes=7, rx_bytes=7)
    counters(tmp_path, "docker0", device=False, tx_bytes=5, rx_bytes=5)
    assert set(kernel_counters.ethernet(tmp_path).sent) == {"docker0"}, "in a container"
    counters(tmp_path, "eth0", tx_bytes=100, rx_bytes=200, tx_errors=1, rx_errors=0)
    told = kernel_counters.ethernet(tmp_path)
    assert (told.sent, told.received) == ({"eth0": 100}, {"eth0": 200})
    assert told.errors == {"eth0": {"tx_errors": 1, "rx_errors": 0}}
    port = tmp_path / "class" / "infiniband" / "mlx5_0" / "ports" / "1" / "counters"
    port.mkdir(parents=True)
    for name, value in {"port_xmit_data": 25, "port_rcv_data": 50, "link_downed": 2}.items():
        (port / name).write_text(f"{value}\n")
    told = kernel_counters.infiniband(tmp_path)
    assert (told.sent, told.received) == ({"mlx5_0/1": 100}, {"mlx5_0/1": 200}), "words of four bytes"
    assert told.errors == {"mlx5_0/1": {"link_downed": 2}}
    memory = kernel_counters.host_memory()
    assert 1 << 20 < memory["host_bytes"] < memory["host_available_bytes"] * 1000
    assert kernel_counters.host_memory(tmp_path) == {}


def test_rates_and_new_errors_of_the_network(tmp_path, monkeypatch):
    told = [kernel_counters.Traffic({"eth0": 0}, {"eth0": 0}, {"eth0": {"rx_errors": 4}})]
    monkeypatch.setattr(kernel_counters, "ethernet", lambda: told[0])
    monkeypatch.setattr(kernel_counters, "infiniband", lambda: kernel_counters.Traffic())
    clock = [100.0]
    monkeypatch.setattr("jaxmnt.telemetry.resources.time.monotonic", lambda: clock[0])
    sampler = ResourceSampler([], 1.0)
    assert "network_sent_per_second" not in sampler.read()["of"], "nothing is known of the time before"
    clock[0] += 10
    told[0] = kernel_counters.Traffic(
        {"eth0": 5000, "eth1": 9}, {"eth0": 100}, {"eth0": {"rx_errors": 6}, "eth1": {"rx_errors": 9}}
    )
    sample = sampler.read()
    assert sample["of"]["network_sent_per_second"] == [500.0] and sample["of"]["network_received_per_second"] == [10.0]
    assert sample["faults"] == ["eth0: 2 more rx_errors"]


def test_a_line_has_the_extremes_of_all(tmp_path):
    log = ResourceLog(tmp_path, 3)
    sample = lambda host, *clocks, faults=(): {
        "of": {"host_bytes": [host], "gpu_clock_mhz": list(clocks), "gpu_utilisation": [99.0] * len(clocks)},
        "throttled": {}, "faults": list(faults),
    }  # fmt: skip
    log.add(0, sample(10.0, 1900, 1900), 7)
    log.add(2, json.loads(json.dumps(sample(30.0, 1800, 1900, faults=["eth0: 1 more rx_errors"]))), 7)
    assert log.take_findings() == ([], [(2, "eth0: 1 more rx_errors")])
    log.add(2, sample(30.0), 9)
    log.add(0, sample(11.0), 9)
    log.add(1, sample(20.0), 9)
    log.close()
    first, second = read_lines(tmp_path / RESOURCES)
    assert (first["processes"], first["step"], second["processes"]) == (2, 9, 3), "one that is late holds up no line"
    assert first["of"]["host_bytes"] == {"mean": 20.0, "min": [10.0, 0], "max": [30.0, 2]}
    assert first["of"]["gpu_clock_mhz"] == {"mean": 1875.0, "min": [1800.0, 2], "max": [1900.0, 0]}
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        log.add(0, {"of": {"x": ["y"]}}, 1)


def readings(detector: SlowDeviceDetector, clocks: list[float], reasons: dict | None = None, busy: float = 99.0):
    of = {(place // 2, place % 2): value for place, value in enumerate(clocks)}
    return detector.see_clocks(of, dict.fromkeys(of, busy), reasons or {})


def test_a_gpu_with_low_clocks_is_named_and_one_without_work_is_not():
    detector = SlowDeviceDetector()
    slow = [1980.0] * 5 + [1200.0] + [1980.0] * 2
    found = [readings(detector, slow) for _ in range(COUNT + 1)]
    assert [len(one) for one in found] == [0] * (COUNT - 1) + [1, 0]
    assert found[COUNT - 1][0].device == (2, 1) and "1200 MHz, the others' 1980" in found[COUNT - 1][0].why
    (over,) = readings(detector, [1980.0] * 8)
    assert over.device == (2, 1) and not over.began and detector.current == []
    assert not any(readings(detector, slow, busy=3.0) for _ in range(9)), "who waits clocks down"
    hot = [readings(detector, [1900.0], {(0, 0): ["power brake"]}) for _ in range(COUNT)]
    assert "power brake" in hot[-1][0].why, "one alone, by its own reasons"


def test_a_device_that_is_slow_in_the_probe_is_named():
    detector = SlowDeviceDetector()
    random = np.random.default_rng(0)
    for number in range(COUNT):
        seconds = {(process, place): 1e-3 * (1 + 0.01 * random.random()) for process in range(4) for place in range(2)}
        found = detector.see_probe(seconds | {(3, 0): 1.3e-3})
        assert [one.device for one in found] == ([(3, 0)] if number == COUNT - 1 else [])
    assert "1.29 times" in detector.current[0].why and detector.current[0].slower == pytest.approx(0.3, abs=0.02)
    two = SlowDeviceDetector()
    assert [len(two.see_probe({(0, 0): 1.0, (1, 0): 1.2})) for _ in range(COUNT)][-1] == 1, "of two the slower"


@given(st.integers(0, 2**32), st.integers(2, 64), st.floats(0.001, 0.03))
def test_nobody_is_named_for_noise(seed, devices, noise):
    random, detector = np.random.default_rng(seed), SlowDeviceDetector()
    for _ in range(6):
        seconds = 1 + noise * random.random(devices)
        assert detector.see_probe({(0, place): float(one) for place, one in enumerate(seconds)}) == []


def test_a_run_says_what_it_takes_and_names_a_slow_device(tiny, monkeypatch, capsys, tmp_path):
    """One of eight devices takes its time over the product; one of two pretend GPUs is too hot, and fails."""
    nvml = PretendNvml(2)
    nvml.gpus[1].reasons = pynvml.nvmlClocksEventReasonHwThermalSlowdown
    nvml.gpus[1].clock = 900
    slow = [True]

    def times(self):
        return [1e-3 * (2 if slow[0] and place == 3 else 1) for place in range(len(self._matrices))]

    monkeypatch.setattr(TimedProduct, "__call__", times)
    monkeypatch.setattr(monitoring, "reader_of_gpus", lambda devices: lambda: GpuReader(["0", "1"], nvml))
    check_loss = monitoring.Monitoring.check_loss

    def see(self, step, loss):
        if step == 10:
            slow[0], nvml.xids = False, [(1, 79)]
        check_loss(self, step, loss)
        if step in range(11, 19):  # readings go on meanwhile
            read = nvml.readings
            until(lambda: nvml.readings > read + 2 and not nvml.xids, 20)

    monkeypatch.setattr(monitoring.Monitoring, "check_loss", see)
    assert train(tiny("train.steps=20", "telemetry.probe_every=2", "telemetry.resources_every_seconds=0.1")) == 0
    told = read_lines(event_file(tmp_path / "run", 0))
    probed = [one for one in told if one["kind"].startswith("slow_device") and one["device"] == 3]
    assert [one["kind"] for one in probed] == ["slow_device", "slow_device_over"]
    assert probed[0]["step"] == 6 and probed[0]["at_fault"] == 0 and "2.00 times" in probed[0]["why"]
    (hot,) = [one for one in told if one["kind"] == "slow_device" and one["device"] == 1]
    assert "too hot" in hot["why"]
    assert [one["why"] for one in told if one["kind"] == "host_fault"] == ["GPU 1: Xid 79"]
    lines = read_lines(tmp_path / "run" / RESOURCES)
    assert len(lines) >= 3 and lines[-1]["of"]["gpu_clock_mhz"]["min"] == [900.0, 0]
    assert lines[-1]["of"]["host_bytes"]["mean"] > 1 << 20
    out = capsys.readouterr().out
    assert "WARNING step 6: device 3 of process 0" in out and "is as quick as the others again" in out
    phases = read_lines(tmp_path / "run" / "phases.jsonl")
    assert any(line.get("mean", {}).get("probe") for line in phases)


@pytest.mark.slow
def test_all_of_it_can_be_turned_off(tiny, tmp_path):
    off = ("telemetry.phases=false", "telemetry.resources_every_seconds=null", "telemetry.probe_every=0")
    assert train(tiny("train.steps=5", *off)) == 0
    assert not (tmp_path / "run" / RESOURCES).exists() and not (tmp_path / "run" / "phases.jsonl").exists()


def _cgroups(root, membership: str, files: dict[str, str]):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(membership)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def test_the_least_limit_of_a_container_and_of_what_it_is_in_counts(tmp_path):
    two = _cgroups(tmp_path / "2", "0::/pod/train\n", {
        "pod/train/memory.max": "max", "pod/train/cpu.max": "max 100000", "pod/train/memory.current": "900",
        "pod/memory.max": "4096000", "pod/memory.current": "3000000", "pod/memory.stat": "inactive_file 1000000",
        "pod/cpu.max": "50000 100000",
    })  # fmt: skip
    assert container.host_memory_bytes(two) == 4_096_000
    assert container.available_bytes(10**12, two) == 2_096_000 and container.available_bytes(5, two) == 5
    assert container.cores(two) == 1
    # In a container of version 1 the path is that of the host, and is not there.
    one = _cgroups(tmp_path / "1", "4:memory:/kubepods/x\n2:cpu,cpuacct:/kubepods/x\n0::/\n", {
        "memory/memory.limit_in_bytes": "5000000", "memory/memory.usage_in_bytes": "1000000",
        "cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000",
    })  # fmt: skip
    assert container.host_memory_bytes(one) == 5_000_000 and container.available_bytes(10**12, one) == 4_000_000
    assert container.cores(one) == 1
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    unlimited = {"memory/memory.limit_in_bytes": "9223372036854771712", "cpu/cpu.cfs_quota_us": "-1"}
    free = _cgroups(tmp_path / "free", "4:memory:/\n2:cpu,cpuacct:/\n", unlimited)
    for root in (free, tmp_path / "no linux"):
        assert container.host_memory_bytes(root) == physical and container.available_bytes(7, root) == 7
        assert container.cores(root) == len(os.sched_getaffinity(0))


def test_a_run_needs_no_temporary_folder(monkeypatch):
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", none)
    library = pytest.importorskip("tokenizers")
    text = library.Tokenizer(library.models.WordLevel({"a": 0, "<|endoftext|>": 1}, unk_token="a")).to_str()
    digest = hashlib.sha256(text.encode()).hexdigest()
    description = {"name": "huggingface", "sha256": digest, "end_token": "<|endoftext|>", "end_of_document": 1}
    assert RunTokenizer(description, 2, text).open().encode_batch(["a"])[0].tolist() == [0]
    assert RunTokenizer({"name": "bytes"}, 257, None).open().decode(np.array([97])) == "a"
    assert "Main thread" in status_server.stacks()
