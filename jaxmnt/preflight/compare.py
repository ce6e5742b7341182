"""Compares the facts of all hosts and reports problems, in preflight and at each start of a run."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxmnt.config.schema import Config
from jaxmnt.distributed.coordination import broadcast
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import PreflightError
from jaxmnt.preflight.directory import shared_rows
from jaxmnt.preflight.facts import Facts, exchange_facts, quick_facts
from jaxmnt.preflight.network import Card, active_ports, cards_of, nccl_card
from jaxmnt.preflight.table import Row, describe_hosts, failed, failures, from_json, good, to_json, warning
from jaxmnt.units import size

CLOCK_SECONDS = 1.0
"""Most seconds that clocks may differ: they determine the order of events of several hosts."""
_SHM_BYTES = 1 << 30
_SHM_ADVICE = "NCCL talks through it: enlarge it, or clear it"
_DEVICES_ADVICE = "see what the launcher gave each task, and CUDA_VISIBLE_DEVICES"
_IMAGE_ADVICE = "start all from one image"
_MEMORY_SHARE = 0.2
_HOT_CELSIUS = 85


def quick_rows(all_facts: Sequence[Facts]) -> list[Row]:
    """Returns the rows for the checks of each start of a run. The facts are in order of processes."""
    return [
        *_alike(all_facts, "device kind", "kind", failed, "a mesh needs devices of one kind"),
        *_alike(all_facts, "devices per process", "devices", failed, _DEVICES_ADVICE),
        *_clocks(all_facts),
    ]


def thorough_rows(all_facts: Sequence[Facts]) -> list[Row]:
    """Returns the rows for the checks that only preflight makes."""
    return [
        *_alike(all_facts, "python", "python", warning, _IMAGE_ADVICE),
        *_alike(all_facts, "packages", "environment", warning, _IMAGE_ADVICE),
        *_images(all_facts),
        *_alike(all_facts, "cores", "cores", warning, "use hosts of one kind, or the slowest sets the pace"),
        *_memory(all_facts),
        *_nics(all_facts),
        *_fabric(all_facts),
        *_gpus(all_facts),
    ]


def _hosts(all_facts: Sequence[Facts]) -> list[Facts]:
    """Returns the facts of the first process of each host."""
    return list({facts["host"]: facts for facts in reversed(all_facts)}.values())[::-1]


def process_hosts(all_facts: Sequence[Facts]) -> list[str]:
    """Returns the host name of each process."""
    return [facts["host"] for facts in all_facts]


Judge = Callable[[str, str, str, str], Row]


def _alike(all_facts: Sequence[Facts], check: str, fact: str, judge: Judge, advice: str) -> list[Row]:
    """Returns a row for each host whose `fact` differs from the most frequent one, or one good row if none does."""
    counts = Counter(facts[fact] for facts in all_facts)
    usual = max(counts, key=lambda value: (counts[value], value == all_facts[0][fact]))
    unusual = {facts["host"]: facts[fact] for facts in all_facts if facts[fact] != usual}
    if not unusual:
        return [good(check, describe_hosts(process_hosts(all_facts)), str(usual))]
    return [judge(check, host, f"{value}, elsewhere {usual}", advice) for host, value in unusual.items()]


def _clocks(all_facts: Sequence[Facts]) -> list[Row]:
    """Returns a row for each host whose clock certainly differs from process 0's.

    If most hosts differ, process 0's clock is wrong, and it gets the only row.
    """
    offsets, widest = {}, 0.0
    for facts in all_facts:
        least, most = facts["clock"]
        widest = max(widest, most - least)
        if least > CLOCK_SECONDS or most < -CLOCK_SECONDS:
            offsets[facts["host"]] = least if least > 0 else most
    if not offsets:
        return [good("clocks", describe_hosts(process_hosts(all_facts)), f"within {max(CLOCK_SECONDS, widest):.1f} s")]
    if 2 * len(offsets) > len(_hosts(all_facts)):
        offsets = {all_facts[0]["host"]: -statistics.median(offsets.values())}
    advice = "start chrony or ntpd there, and look at its state"
    return [
        failed("clocks", host, f"{abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} the others", advice)
        for host, offset in offsets.items()
    ]


def _images(all_facts: Sequence[Facts]) -> list[Row]:
    """Compares the digests of container images (JAXMNT_IMAGE); returns no row if no process has one."""
    if not any(facts["image"] for facts in all_facts):
        return []
    images = [facts | {"image": facts["image"] or "not told"} for facts in all_facts]
    return _alike(images, "image", "image", warning, _IMAGE_ADVICE)


def _memory(all_facts: Sequence[Facts]) -> list[Row]:
    rows = []
    for facts in _hosts(all_facts):
        host = facts["host"]
        total, free = facts["memory"]["all"], facts["memory"]["free"]
        if total and free < _MEMORY_SHARE * total:
            finding = f"{size(free)} of {size(total)} are available"
            rows.append(warning("host memory", host, finding, "see what else runs there"))
        if facts["shm"] < _SHM_BYTES:
            rows.append(warning("shared memory", host, f"{size(facts['shm'])} are free in /dev/shm", _SHM_ADVICE))
    least = min(facts["memory"]["free"] for facts in all_facts)
    return rows or [good("host memory", describe_hosts(process_hosts(all_facts)), f"{size(least)} available at least")]


def _nics(all_facts: Sequence[Facts]) -> list[Row]:
    """Compares the network interface that NCCL would use on each host with the best one there."""
    rows, speeds, names = [], [], []
    hosts = _hosts(all_facts)
    for facts in hosts:
        ifname, card = nccl_card(facts)
        usable = [card for card in cards_of(facts) if card.for_runs]
        best = max(usable, key=lambda card: (card.megabits, card.default), default=None)
        judge, finding = warning, ""
        advice = f"set NCCL_SOCKET_IFNAME={best.name}" if best else "give the host a network"
        if card is None and ifname and facts["platform"] == "gpu":
            judge, finding = failed, f"NCCL_SOCKET_IFNAME={ifname} matches no interface there"
            advice = f"set it to {best.name}" if best else "correct it"
        elif len(hosts) > 1 and (card is None or not card.for_runs):
            finding = f"NCCL would use {card.name if card else 'no interface'}, which reaches no other host"
        elif card and best and card.megabits and best.megabits > 2 * card.megabits:
            finding = f"NCCL would use {card.name} with {_rate(card)}, and {best.name} has {_rate(best)}"
        if finding:
            rows.append(judge("network interface", facts["host"], finding, advice))
        speeds.append(facts | {"speed": _rate(card) if card else "no interface"})
        names += [card.name] if card else []
    rows = rows or [good("network interface", describe_hosts(process_hosts(hosts)), next(iter(names), "none"))]
    return rows + _alike(speeds, "network speed", "speed", warning, "look at its link and its switch port")


def _rate(card: Card) -> str:
    return f"{card.megabits / 1000:g} Gbit/s" if card.megabits else "an unknown speed"


def _fabric(all_facts: Sequence[Facts]) -> list[Row]:
    """Checks the ports of InfiniBand or RoCE adapters; returns no row if no host has one."""
    if not any(facts["fabric"] for facts in all_facts):
        return []
    rows, described = [], []
    hosts = _hosts(all_facts)
    # A port that is inactive on most hosts is not meant to be used.
    in_use = Counter(port["name"] for facts in hosts for port in active_ports(facts))
    for facts in hosts:
        active = active_ports(facts)
        for port in facts["fabric"]:
            where = f"{facts['host']} {port['name']}"
            if port not in active and 2 * in_use[port["name"]] >= len(hosts):
                rows.append(
                    failed("fabric", where, f"its state is {port['state']}", "look at the cable and the switch")
                )
            elif port in active and port["errors"]:
                counted = ", ".join(f"{name} {count}" for name, count in sorted(port["errors"].items()))
                rows.append(warning("fabric", where, counted, "if they grow, look at the cable"))
        ports = sorted(f"{port['layer']} {port['gigabits']:g} Gbit/s" for port in active)
        described.append(facts | {"ports": ", ".join(ports)})
    return rows + _alike(described, "fabric ports", "ports", failed, "look at its adapters and links")


def _gpus(all_facts: Sequence[Facts]) -> list[Row]:
    """Checks NVML's facts about GPUs; returns no row if no host has a GPU."""
    most_links = max((links for facts in all_facts for links in facts["links"].values()), default=0)
    rows = [row for facts in _hosts(all_facts) for row in _gpus_of_host(facts, most_links)]
    if rows or not any(facts["gpus"] for facts in all_facts):
        return rows
    return [
        good(
            "GPUs", describe_hosts(process_hosts(all_facts)), "no memory errors, no throttling, nobody else's processes"
        )
    ]


def _gpus_of_host(facts: Facts, most_links: int) -> Iterator[Row]:
    host = facts["host"]
    for gpu in facts["gpus"]:
        where = f"{host} GPU {gpu['index']}"
        if gpu["uncorrected_errors"]:
            finding = f"{gpu['uncorrected_errors']} uncorrected memory errors"
            yield failed("GPU memory", where, finding, "drain the host; a reset may clear them")
        if gpu["throttled"]:
            finding = f"its clocks are kept down by {', '.join(gpu['throttled'])}"
            yield failed("GPU clocks", where, finding, "look at power and cooling")
        if gpu["celsius"] > _HOT_CELSIUS:
            yield warning("GPU heat", where, f"{gpu['celsius']} °C", "look at cooling")
    if facts["strangers"]:
        yield failed("GPUs in use", host, f"by {', '.join(facts['strangers'][:4])}", "end them, or leave the host out")
    for xid in facts["xids"]:
        yield warning("GPU errors", f"{host} {xid}", "since the driver was started", "look at the kernel's log")
    for gpu, links in sorted(facts["links"].items()):
        if links < most_links:
            finding = f"{links} links are active, elsewhere {most_links}"
            yield failed("NVLink", f"{host} {gpu}", finding, "drain the host and have it repaired")
    if facts["platform"] == "gpu" and not facts["gpus"]:
        yield warning("GPUs", host, "NVML reports no GPU there", "look at nvidia-smi, and install nvidia-ml-py")


def check_hosts(config: Config, identity: Identity, clock: tuple[float, float]) -> None:
    """Compares devices and clocks, and checks that all processes share the run directory.

    `clock` has the lower and the upper bound, in seconds, of how far this process's clock is ahead of process 0's.
    Raises `PreflightError` in all processes, naming the host, if a check fails. Takes well under a second, in addition
    to the time that JAX needs to find its devices.
    """
    own_facts = quick_facts(clock)  # raises its errors in a single process, too
    if identity.alone:
        return
    all_facts = exchange_facts("what the start looks at", own_facts, identity)
    failed_rows = failures(broadcast_rows(quick_checks(config, identity, all_facts), identity))
    if failed_rows:
        more = f" (and {len(failed_rows) - 1} more: see jaxmnt.preflight)" if failed_rows[1:] else ""
        hosts = process_hosts(all_facts)
        at_fault = [row.where for row in failed_rows if row.where in hosts]
        raise PreflightError(f"{failed_rows[0]}{more}").blaming(hosts=at_fault)


def quick_checks(config: Config, identity: Identity, all_facts: list[Facts]) -> list[Row]:
    """Makes the checks of each start. All processes take part, with the same `all_facts`; process 0 gets the rows."""
    rows = quick_rows(all_facts) if identity.process_id == 0 else []
    for directory in shared_directories(config):
        rows += shared_rows(directory, identity, process_hosts(all_facts))
    return rows


def shared_directories(config: Config) -> list[Path]:
    """Returns the directories that all processes must share: those of the run and of its checkpoints, if local."""
    assert config.run.dir is not None
    paths = [config.run.dir, config.checkpoint.dir or ""]
    return [Path(path) for path in dict.fromkeys(paths) if path and "://" not in path]


def broadcast_rows(rows: list[Row], identity: Identity) -> list[Row]:
    """Returns process 0's rows in every process."""
    return from_json(broadcast("what was found", to_json(rows) if identity.process_id == 0 else None, identity))
