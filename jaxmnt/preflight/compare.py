"""What is wrong with what hosts say of themselves: in preflight, and at each start of a run."""

import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from jaxmnt.config.schema import Config
from jaxmnt.distributed.coordination import broadcast
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import PreflightError
from jaxmnt.preflight.directory import shared_rows
from jaxmnt.preflight.facts import Facts, quick, told_to_all
from jaxmnt.preflight.network import Card, chosen_by_nccl
from jaxmnt.preflight.table import Row, failed, failures, from_json, good, to_json, warning
from jaxmnt.telemetry.progress import size

CLOCK_SECONDS = 1.0
"""How far clocks may be apart: events of several hosts are put in order by them."""
_SHM_BYTES = 1 << 30
_SHM_ADVICE = "NCCL talks through it: enlarge it, or clear it"
_MEMORY_SHARE = 0.2
_HOT_CELSIUS = 85


def quick_rows(all_facts: Sequence[Facts]) -> list[Row]:
    """The rows that the start of each run looks at. The facts are in order of processes."""
    return [
        *_alike(all_facts, "device kind", lambda facts: facts["kind"], failed, "a mesh needs devices of one kind"),
        *_alike(
            all_facts, "devices per process", lambda facts: facts["devices"], failed,
            "see what the launcher gave each task, and CUDA_VISIBLE_DEVICES",
        ),
        *_clocks(all_facts),
    ]  # fmt: skip


def thorough_rows(all_facts: Sequence[Facts]) -> list[Row]:
    """All others."""
    return [
        *_alike(all_facts, "python", lambda facts: facts["python"], warning, "start all from one image"),
        *_alike(all_facts, "packages", lambda facts: facts["environment"], warning, "start all from one image"),
        *_images(all_facts),
        *_alike(
            all_facts,
            "cores",
            lambda facts: facts["cores"],
            warning,
            "use hosts of one kind, or the slowest sets the pace",
        ),
        *_memory(all_facts),
        *_nics(all_facts),
        *_fabric(all_facts),
        *_gpus(all_facts),
    ]


def _hosts(all_facts: Sequence[Facts]) -> list[Facts]:
    """One process's facts for each host name."""
    return list({facts["host"]: facts for facts in reversed(all_facts)}.values())[::-1]


def everywhere(all_facts: Sequence[Facts]) -> str:
    hosts = _hosts(all_facts)
    return hosts[0]["host"] if len(hosts) == 1 else f"all {len(hosts)} hosts"


Judge = Callable[[str, str, str, str], Row]


def _alike(
    all_facts: Sequence[Facts], check: str, value: Callable[[Facts], Hashable], judge: Judge, advice: str
) -> list[Row]:
    """A row for each host that differs from most, or one if none does."""
    values = Counter(value(facts) for facts in all_facts)
    usual = max(values, key=lambda one: (values[one], one == value(all_facts[0])))
    odd = {facts["host"]: value(facts) for facts in all_facts if value(facts) != usual}
    if not odd:
        return [good(check, everywhere(all_facts), str(usual))]
    return [judge(check, host, f"{found}, elsewhere {usual}", advice) for host, found in odd.items()]


def _clocks(all_facts: Sequence[Facts]) -> list[Row]:
    """Whose clock is certainly apart from process 0's; if that is most of them, it is process 0's."""
    apart, widest = {}, 0.0
    for facts in all_facts:
        least, most = facts["clock"]
        widest = max(widest, most - least)
        if least > CLOCK_SECONDS or most < -CLOCK_SECONDS:
            apart[facts["host"]] = least if least > 0 else most
    if not apart:
        return [good("clocks", everywhere(all_facts), f"within {max(CLOCK_SECONDS, widest):.1f} s")]
    if 2 * len(apart) > len(_hosts(all_facts)):
        apart = {all_facts[0]["host"]: -statistics.median(apart.values())}
    advice = "start chrony or ntpd there, and look at its state"
    return [
        failed("clocks", host, f"{abs(by):.1f} s {'ahead of' if by > 0 else 'behind'} the others", advice)
        for host, by in apart.items()
    ]


def _images(all_facts: Sequence[Facts]) -> list[Row]:
    """No row where nobody was told its container image's digest (JAXMNT_IMAGE)."""
    if not any(facts["image"] for facts in all_facts):
        return []
    return _alike(all_facts, "image", lambda facts: facts["image"] or "not told", warning, "start all from one image")


def _memory(all_facts: Sequence[Facts]) -> list[Row]:
    rows = []
    for facts in _hosts(all_facts):
        host, everything, free = facts["host"], facts["memory"]["all"], facts["memory"]["free"]
        if everything and free < _MEMORY_SHARE * everything:
            found = f"{size(free)} of {size(everything)} are available"
            rows.append(warning("host memory", host, found, "see what else runs there"))
        if facts["shm"] < _SHM_BYTES:
            found = f"{size(facts['shm'])} are free"
            rows.append(warning("shared memory", host, f"{found} in /dev/shm", _SHM_ADVICE))
    least = min(facts["memory"]["free"] for facts in all_facts)
    return rows or [good("host memory", everywhere(all_facts), f"{size(least)} available at least")]


def _nics(all_facts: Sequence[Facts]) -> list[Row]:
    rows, taken = [], {}
    for facts in _hosts(all_facts):
        cards = [Card(**card) for card in facts["nics"]]
        wanted = facts["nccl"].get("NCCL_SOCKET_IFNAME", "")
        chosen, best = chosen_by_nccl(cards, wanted), _fastest(cards)
        taken[facts["host"]] = chosen
        if chosen is None and wanted and facts["platform"] == "gpu":
            advice = f"set it to {best.name}" if best else "correct it"
            rows.append(
                failed(
                    "network interface",
                    facts["host"],
                    f"NCCL_SOCKET_IFNAME={wanted} matches no interface there",
                    advice,
                )
            )
        elif len(_hosts(all_facts)) > 1 and (chosen is None or not chosen.for_runs):
            found = f"NCCL would use {chosen.name if chosen else 'no interface'}, which reaches no other host"
            advice = f"set NCCL_SOCKET_IFNAME={best.name}" if best else "give the host a network"
            rows.append(warning("network interface", facts["host"], found, advice))
        elif chosen and best and chosen.megabits and best.megabits > 2 * chosen.megabits:
            found = f"NCCL would use {chosen.name} with {_rate(chosen)}, and {best.name} has {_rate(best)}"
            rows.append(warning("network interface", facts["host"], found, f"set NCCL_SOCKET_IFNAME={best.name}"))
    speeds = [facts | {"speed": _speed(taken[facts["host"]])} for facts in _hosts(all_facts)]
    name = next((card.name for card in taken.values() if card), "none")
    return (rows or [good("network interface", everywhere(all_facts), name)]) + _alike(
        speeds, "network speed", lambda facts: facts["speed"], warning, "look at its link and its switch port"
    )


def _fastest(cards: list[Card]) -> Card | None:
    usable = [card for card in cards if card.for_runs]
    return max(usable, key=lambda card: (card.megabits, card.default), default=None)


def _speed(card: Card | None) -> str:
    return _rate(card) if card else "no interface"


def _rate(card: Card) -> str:
    return f"{card.megabits / 1000:g} Gbit/s" if card.megabits else "an unknown speed"


def _fabric(all_facts: Sequence[Facts]) -> list[Row]:
    """Ports of InfiniBand or RoCE adapters; no row where no host has one."""
    rows = []
    active = Counter(port["name"] for facts in _hosts(all_facts) for port in facts["fabric"] if _is_active(port))
    for facts in _hosts(all_facts):
        for port in facts["fabric"]:
            where = f"{facts['host']} {port['name']}"
            if not _is_active(port) and 2 * active[port["name"]] >= len(_hosts(all_facts)):
                rows.append(
                    failed("fabric", where, f"its state is {port['state']}", "look at the cable and the switch")
                )
            elif _is_active(port) and port["errors"]:
                counted = ", ".join(f"{name} {count}" for name, count in sorted(port["errors"].items()))
                rows.append(warning("fabric", where, counted, "if they grow, look at the cable"))
    if not any(facts["fabric"] for facts in all_facts):
        return []
    describe = lambda facts: ", ".join(
        sorted(f"{one['layer']} {one['gigabits']:g} Gbit/s" for one in facts["fabric"] if _is_active(one))
    )
    return rows + _alike(_hosts(all_facts), "fabric ports", describe, failed, "look at its adapters and links")


def _is_active(port: dict[str, Any]) -> bool:
    return bool(port["state"] == "ACTIVE")


def _gpus(all_facts: Sequence[Facts]) -> list[Row]:
    """What NVML says of GPUs; no row where no host has one."""
    rows = []
    most = max((links for facts in all_facts for links in facts["links"].values()), default=0)
    for facts in _hosts(all_facts):
        host = facts["host"]
        for gpu in facts["gpus"]:
            where = f"{host} GPU {gpu['index']}"
            rows += _one_gpu(where, gpu)
        if facts["strangers"]:
            who = ", ".join(facts["strangers"][:4])
            rows.append(failed("GPUs in use", host, f"by {who}", "end them, or leave the host out"))
        for xid in facts["xids"]:
            rows.append(
                warning("GPU errors", f"{host} {xid}", "since the driver was started", "look at the kernel's log")
            )
        for gpu, links in sorted(facts["links"].items()):
            if links < most:
                found = f"{links} links are active, elsewhere {most}"
                rows.append(failed("NVLink", f"{host} {gpu}", found, "drain the host and have it looked at"))
        if facts["platform"] == "gpu" and not facts["gpus"]:
            rows.append(
                warning("GPUs", host, "NVML tells nothing there", "look at nvidia-smi, and install nvidia-ml-py")
            )
    if not rows and not any(facts["gpus"] for facts in all_facts):
        return []
    return rows or [good("GPUs", everywhere(all_facts), "no memory errors, no throttling, nobody else's processes")]


def _one_gpu(where: str, gpu: dict[str, Any]) -> list[Row]:
    rows = []
    if gpu["uncorrected_errors"]:
        found = f"{gpu['uncorrected_errors']} uncorrected memory errors"
        rows.append(failed("GPU memory", where, found, "drain the host; a reset may clear them"))
    if gpu["throttled"]:
        found = f"its clocks are kept down by {', '.join(gpu['throttled'])}"
        rows.append(failed("GPU clocks", where, found, "look at power and cooling"))
    if gpu["celsius"] > _HOT_CELSIUS:
        rows.append(warning("GPU heat", where, f"{gpu['celsius']} °C", "look at cooling"))
    return rows


def check_hosts(config: Config, identity: Identity, clock: tuple[float, float]) -> None:
    """Compares devices and clocks, and tries whether the run directory is shared. `clock` is how far this process's
    clock is ahead of process 0's: at least, at most.

    Raises `PreflightError` in all processes, naming the host, if something is wrong. Takes well under a second beside
    what JAX needs to find its devices.
    """
    own_facts = quick(clock)
    if identity.alone:
        return
    all_facts = told_to_all("what the start looks at", own_facts, identity)
    bad = failures(agreed(quick_part(config, identity, all_facts), identity))
    if bad:
        more = f" (and {len(bad) - 1} more: see jaxmnt.preflight)" if bad[1:] else ""
        known = {facts["host"] for facts in all_facts}
        raise PreflightError(f"{bad[0]}{more}").blaming(hosts=[row.where for row in bad if row.where in known])


def quick_part(config: Config, identity: Identity, all_facts: list[Facts]) -> list[Row]:
    """All processes take part, process 0 gets the rows. `all_facts` are there in all of them."""
    rows = quick_rows(all_facts) if identity.process_id == 0 else []
    hosts = [facts["host"] for facts in all_facts]
    for directory in shared_places(config):
        rows += shared_rows(directory, identity, hosts)
    return rows


def shared_places(config: Config) -> list[Path]:
    """The folders that all processes have to see."""
    assert config.run.dir is not None
    named = [config.run.dir, config.checkpoint.dir or ""]
    return [Path(place) for place in dict.fromkeys(named) if place and "://" not in place]


def agreed(rows: list[Row], identity: Identity) -> list[Row]:
    """Process 0's rows, in every process."""
    return from_json(broadcast("what was found", to_json(rows) if identity.process_id == 0 else None, identity))
