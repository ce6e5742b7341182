"""Compares the facts of all hosts and reports problems, in a preflight and at each start of a run."""

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxmnt.config.schema import Config
from jaxmnt.distributed.coordination import broadcast
from jaxmnt.distributed.host_table import pack_hosts, unpack_hosts
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import PreflightError
from jaxmnt.preflight.directory import shared_rows
from jaxmnt.preflight.facts import Facts, gather_facts, quick_facts
from jaxmnt.preflight.network import Interface, active_ports, interfaces_up, nccl_interface
from jaxmnt.preflight.table import Row, describe_hosts, failed_row, failures, ok_row, warning_row
from jaxmnt.strict_json import json_text
from jaxmnt.units import size

MAX_CLOCK_DIFFERENCE_SECONDS = 1.0
"""Maximum difference between clocks. It is limited because clocks determine the order of events on several hosts."""
_MIN_SHM_BYTES = 1 << 30
_SHM_ADVICE = "NCCL talks through it: enlarge it, or clear it"
_DEVICES_ADVICE = "see what the launcher gave each task, and CUDA_VISIBLE_DEVICES"
_IMAGE_ADVICE = "start all from one image"
_MIN_AVAILABLE_MEMORY_SHARE = 0.2
_MAX_CELSIUS = 85


def quick_rows(all_facts: Sequence[Facts]) -> list[Row]:
    """Compares the facts that matter at each start of a run. `all_facts` are in the order of the processes."""
    return [
        *_compare_fact(all_facts, "device kind", "kind", failed_row, "a mesh needs devices of one kind"),
        *_compare_fact(all_facts, "devices per process", "devices", failed_row, _DEVICES_ADVICE),
        *_compare_clocks(all_facts),
    ]


def thorough_rows(all_facts: Sequence[Facts]) -> list[Row]:
    """Compares the facts that only a preflight collects. `all_facts` are in the order of the processes."""
    return [
        *_compare_fact(all_facts, "python", "python", warning_row, _IMAGE_ADVICE),
        *_compare_fact(all_facts, "packages", "environment", warning_row, _IMAGE_ADVICE),
        *_compare_images(all_facts),
        *_compare_fact(all_facts, "cores", "cores", warning_row, "use hosts of one kind, or the slowest sets the pace"),
        *_check_memory(all_facts),
        *_check_interfaces(all_facts),
        *_check_fabric(all_facts),
        *_check_gpus(all_facts),
    ]


def _facts_of_hosts(all_facts: Sequence[Facts]) -> list[Facts]:
    """Returns the facts of the first process on each host."""
    return list({facts["host"]: facts for facts in reversed(all_facts)}.values())[::-1]


def process_hosts(all_facts: Sequence[Facts]) -> list[str]:
    """Returns the host name of each process, in the order of `all_facts`."""
    return [facts["host"] for facts in all_facts]


RowMaker = Callable[[str, str, str, str], Row]
"""`warning_row` or `failed_row`."""


def _compare_fact(all_facts: Sequence[Facts], check: str, fact: str, make_row: RowMaker, advice: str) -> list[Row]:
    """Returns a row by `make_row` for each host whose `fact` is not the usual one, or a single row if all agree."""
    counts = Counter(facts[fact] for facts in all_facts)
    usual_fact = max(counts, key=lambda value: (counts[value], value == all_facts[0][fact]))
    unusual_facts = {facts["host"]: facts[fact] for facts in all_facts if facts[fact] != usual_fact}
    if not unusual_facts:
        return [ok_row(check, describe_hosts(process_hosts(all_facts)), str(usual_fact))]
    return [make_row(check, host, f"{value}, elsewhere {usual_fact}", advice) for host, value in unusual_facts.items()]


def _compare_clocks(all_facts: Sequence[Facts]) -> list[Row]:
    """Returns a row for each host whose clock certainly differs from process 0's.

    If most hosts differ, process 0's clock is wrong, and it gets the only row.
    """
    offsets = {}
    widest_interval = 0.0
    for facts in all_facts:
        lower, upper = facts["clock"]
        widest_interval = max(widest_interval, upper - lower)
        if lower > MAX_CLOCK_DIFFERENCE_SECONDS or upper < -MAX_CLOCK_DIFFERENCE_SECONDS:
            offsets[facts["host"]] = lower if lower > 0 else upper
    if not offsets:
        return [
            ok_row(
                "clocks",
                describe_hosts(process_hosts(all_facts)),
                f"within {max(MAX_CLOCK_DIFFERENCE_SECONDS, widest_interval):.1f} s",
            )
        ]
    if 2 * len(offsets) > len(_facts_of_hosts(all_facts)):
        offsets = {all_facts[0]["host"]: -statistics.median(offsets.values())}
    advice = "start chrony or ntpd there, and look at its state"
    return [
        failed_row("clocks", host, f"{abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} the others", advice)
        for host, offset in offsets.items()
    ]


def _compare_images(all_facts: Sequence[Facts]) -> list[Row]:
    """Compares the digests of container images (JAXMNT_IMAGE). Returns no row if the variable is set in no process."""
    if not any(facts["image"] for facts in all_facts):
        return []
    images = [facts | {"image": facts["image"] or "not set"} for facts in all_facts]
    return _compare_fact(images, "image", "image", warning_row, _IMAGE_ADVICE)


def _check_memory(all_facts: Sequence[Facts]) -> list[Row]:
    """Checks that each host has enough free memory and shared memory."""
    rows = []
    for facts in _facts_of_hosts(all_facts):
        host = facts["host"]
        total, free = facts["memory"]["all"], facts["memory"]["free"]
        if total and free < _MIN_AVAILABLE_MEMORY_SHARE * total:
            finding = f"{size(free)} of {size(total)} is available"
            rows.append(warning_row("host memory", host, finding, "see what else runs there"))
        if facts["shm"] < _MIN_SHM_BYTES:
            rows.append(warning_row("shared memory", host, f"{size(facts['shm'])} is free in /dev/shm", _SHM_ADVICE))
    min_free_bytes = min(facts["memory"]["free"] for facts in all_facts)
    return rows or [
        ok_row("host memory", describe_hosts(process_hosts(all_facts)), f"{size(min_free_bytes)} available at least")
    ]


def _check_interfaces(all_facts: Sequence[Facts]) -> list[Row]:
    """Compares the network interface that NCCL would use on each host with the best one there."""
    rows: list[Row] = []
    speed_facts: list[Facts] = []
    interface_names: list[str] = []
    hosts = _facts_of_hosts(all_facts)
    for facts in hosts:
        ifname, interface = nccl_interface(facts)
        usable = [interface for interface in interfaces_up(facts) if interface.may_connect_hosts]
        best = max(usable, key=lambda interface: (interface.megabits, interface.default), default=None)
        make_row: RowMaker = warning_row
        finding = ""
        advice = f"set NCCL_SOCKET_IFNAME={best.name}" if best else "give the host a network"
        if interface is None and ifname and facts["platform"] == "gpu":
            make_row = failed_row
            finding = f"NCCL_SOCKET_IFNAME={ifname} matches no interface there"
            advice = f"set it to {best.name}" if best else "correct it"
        elif len(hosts) > 1 and (interface is None or not interface.may_connect_hosts):
            finding = f"NCCL would use {interface.name if interface else 'no interface'}, which reaches no other host"
        elif interface and best and interface.megabits and best.megabits > 2 * interface.megabits:
            speeds = _speed_text(interface), _speed_text(best)
            finding = f"NCCL would use {interface.name} with {speeds[0]}, and {best.name} has {speeds[1]}"
        if finding:
            rows.append(make_row("network interface", facts["host"], finding, advice))
        speed_facts.append(facts | {"speed": _speed_text(interface) if interface else "no interface"})
        interface_names += [interface.name] if interface else []
    rows = rows or [
        ok_row("network interface", describe_hosts(process_hosts(hosts)), next(iter(interface_names), "none"))
    ]
    return rows + _compare_fact(
        speed_facts, "network speed", "speed", warning_row, "look at its link and its switch port"
    )


def _speed_text(interface: Interface) -> str:
    """Returns the speed of an interface, for a message."""
    return f"{interface.megabits / 1000:g} Gbit/s" if interface.megabits else "an unknown speed"


def _check_fabric(all_facts: Sequence[Facts]) -> list[Row]:
    """Checks the ports of InfiniBand or RoCE adapters. Returns no row if no host has such an adapter."""
    if not any(facts["fabric"] for facts in all_facts):
        return []
    rows: list[Row] = []
    port_facts: list[Facts] = []
    hosts = _facts_of_hosts(all_facts)
    # A port that is inactive on most hosts is not meant to be used.
    active_counts = Counter(port["name"] for facts in hosts for port in active_ports(facts))
    for facts in hosts:
        active = active_ports(facts)
        for port in facts["fabric"]:
            where = f"{facts['host']} {port['name']}"
            if port not in active and 2 * active_counts[port["name"]] >= len(hosts):
                rows.append(
                    failed_row("fabric", where, f"its state is {port['state']}", "look at the cable and the switch")
                )
            elif port in active and port["errors"]:
                error_counts = ", ".join(f"{name} {count}" for name, count in sorted(port["errors"].items()))
                rows.append(warning_row("fabric", where, error_counts, "if they grow, look at the cable"))
        port_texts = sorted(f"{port['layer']} {port['gigabits']:g} Gbit/s" for port in active)
        port_facts.append(facts | {"ports": ", ".join(port_texts)})
    return rows + _compare_fact(port_facts, "fabric ports", "ports", failed_row, "look at its adapters and links")


def _check_gpus(all_facts: Sequence[Facts]) -> list[Row]:
    """Checks the facts about GPUs that NVML reports. Returns no row if no host has a GPU."""
    max_links = max((links for facts in all_facts for links in facts["links"].values()), default=0)
    rows = [row for facts in _facts_of_hosts(all_facts) for row in _check_gpus_of_host(facts, max_links)]
    if rows or not any(facts["gpus"] for facts in all_facts):
        return rows
    return [
        ok_row(
            "GPUs", describe_hosts(process_hosts(all_facts)), "no memory errors, no throttling, nobody else's processes"
        )
    ]


def _check_gpus_of_host(facts: Facts, max_links: int) -> Iterator[Row]:
    """Yields a row for each problem of the GPUs of a host. `max_links` is the largest number of NVLinks of any GPU."""
    host = facts["host"]
    for gpu in facts["gpus"]:
        where = f"{host} GPU {gpu['index']}"
        if gpu["uncorrected_errors"]:
            finding = f"{gpu['uncorrected_errors']} uncorrected memory errors"
            yield failed_row("GPU memory", where, finding, "drain the host; a reset may clear them")
        if gpu["throttled"]:
            finding = f"its clocks are kept down by {', '.join(gpu['throttled'])}"
            yield failed_row("GPU clocks", where, finding, "look at power and cooling")
        if gpu["celsius"] > _MAX_CELSIUS:
            yield warning_row("GPU heat", where, f"{gpu['celsius']} °C", "look at cooling")
    if facts["strangers"]:
        yield failed_row(
            "GPUs in use", host, f"by {', '.join(facts['strangers'][:4])}", "end them, or leave the host out"
        )
    for xid in facts["xids"]:
        yield warning_row("GPU errors", f"{host} {xid}", "since the driver was started", "look at the kernel's log")
    for gpu, links in sorted(facts["links"].items()):
        if links < max_links:
            finding = f"{links} links are active, elsewhere {max_links}"
            yield failed_row("NVLink", f"{host} {gpu}", finding, "drain the host and have it repaired")
    if facts["platform"] == "gpu" and not facts["gpus"]:
        yield warning_row("GPUs", host, "NVML reports no GPU there", "look at nvidia-smi, and install nvidia-ml-py")


def check_hosts(config: Config, identity: Identity, clock: tuple[float, float]) -> None:
    """Compares devices and clocks, and checks that all processes share the run directory.

    `clock` holds a lower and an upper bound, in seconds, on how far this process's clock is ahead of process 0's. If a
    check fails, raises a `PreflightError` that names the host, in all processes. Takes well under a second, in addition
    to the time that JAX needs to find its devices.
    """
    own_facts = quick_facts(clock)  # may raise, also if there is only one process
    if identity.alone:
        return
    # Process 0 compares the facts and answers with one verdict, so that a start sends few bytes on any number of hosts.
    all_facts = gather_facts("what the start looks at", own_facts, identity)
    failed_rows = failures(quick_checks(config, identity, all_facts))
    verdict = None if all_facts is None else _verdict(failed_rows, process_hosts(all_facts))
    message, hosts_at_fault = json.loads(broadcast("what was found", verdict, identity))
    if message:
        raise PreflightError(message).blaming(hosts=hosts_at_fault)


def _verdict(failed_rows: Sequence[Row], hosts: Sequence[str]) -> str:
    """Returns the answer of process 0 to all processes: a message, which is empty if no row failed, and the hosts at
    fault."""
    if not failed_rows:
        return json_text(["", []])
    more_failures = f" (and {len(failed_rows) - 1} more: see jaxmnt.preflight)" if failed_rows[1:] else ""
    hosts_at_fault = [row.where for row in failed_rows if row.where in hosts]
    return json_text([f"{failed_rows[0]}{more_failures}", hosts_at_fault])


def quick_checks(config: Config, identity: Identity, all_facts: list[Facts] | None) -> list[Row]:
    """Runs the checks of each start. All processes take part, and process 0, which needs `all_facts`, gets the rows."""
    rows = quick_rows(all_facts) if all_facts is not None and identity.process_id == 0 else []
    hosts = [] if all_facts is None else process_hosts(all_facts)
    for directory in shared_directories(config):
        rows += shared_rows(directory, identity, hosts)
    return rows


def shared_directories(config: Config) -> list[Path]:
    """Returns the local directories that all processes must share: the run's and, if separate, the checkpoints'."""
    assert config.run.dir is not None
    paths = [config.run.dir, config.checkpoint.dir or ""]
    return [Path(path) for path in dict.fromkeys(paths) if path and "://" not in path]


def broadcast_hosts(all_facts: list[Facts] | None, identity: Identity) -> list[str]:
    """Returns the host name of each process, in every process. Process 0 needs `all_facts`."""
    packed = None if all_facts is None else pack_hosts(process_hosts(all_facts))
    return list(unpack_hosts(broadcast("the hosts of the checks", packed, identity)).values())


def any_failed(rows: list[Row], identity: Identity) -> bool:
    """Returns, in every process, whether process 0 has a row that failed."""
    failed = json_text(bool(failures(rows))) if identity.process_id == 0 else None
    return bool(json.loads(broadcast("whether a check failed", failed, identity)))
