"""The order of the checks."""

import time
from pathlib import Path

from jaxmnt.commands import write_file
from jaxmnt.config.schema import Config
from jaxmnt.distributed.heartbeat import Heartbeat
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.process_group import host_names
from jaxmnt.parallel.sharding import build_mesh
from jaxmnt.preflight import links
from jaxmnt.preflight.compare import broadcast_rows, process_hosts, quick_checks, shared_directories, thorough_rows
from jaxmnt.preflight.directory import room_rows, write_rate_rows
from jaxmnt.preflight.facts import exchange_facts, quick_facts, thorough_facts
from jaxmnt.preflight.network import megabits
from jaxmnt.preflight.table import Row, describe_hosts, failures, good


def all_rows(
    config: Config, identity: Identity, heartbeat: Heartbeat, nccl: Path | None, calibration: Path | None
) -> list[Row]:
    """Makes every check, in all processes, and returns what was found in all of them. NCCL's logs are in `nccl`;
    measured rates are written to `calibration`."""
    mine = thorough_facts()  # before JAX is on the GPUs
    all_facts = exchange_facts("everything about the hosts", mine | quick_facts(heartbeat.clock), identity)
    hosts, first = process_hosts(all_facts), identity.process_id == 0
    rows = _meeting_rows(identity, describe_hosts(hosts)) + quick_checks(config, identity, all_facts)
    rows += thorough_rows(all_facts) if first else []
    if not failures(
        broadcast_rows(rows, identity)
    ):  # else there is nowhere to write, or the devices are not those of the run
        for directory in shared_directories(config):
            rows += write_rate_rows(directory, identity, hosts)
        machines = host_names(identity)
        host_of = lambda device: machines[device.process_index]
        mesh = build_mesh(config.mesh, hosts=host_of)
        rows += room_rows(config, host_of) if first else []
        rows += links.matmul_rows(identity, hosts)
        rows += links.pair_rows(identity, hosts, {facts["host"]: megabits(facts) for facts in all_facts})
        rows += links.axis_rows(mesh, identity, hosts)
        rows += links.nccl_rows(nccl, hosts[0]) if nccl is not None and first else []
        if calibration is not None and not failures(broadcast_rows(rows, identity)):
            rows += _calibrated(calibration, identity)
    return broadcast_rows(rows, identity)


def _calibrated(path: Path, identity: Identity) -> list[Row]:
    """Measures, and writes the file. Process 0 gets the row."""
    from jaxmnt.plan.calibration import summary, to_text
    from jaxmnt.preflight.calibrate import calibrate

    found = calibrate(identity, time.strftime("%Y-%m-%d"))
    if found is None:
        return []
    write_file(path, to_text(found))
    return [good("calibration", f"all {found.devices} devices", f"{summary(found)}; written to {path}")]


def _meeting_rows(identity: Identity, where: str) -> list[Row]:
    """What the rendezvous has found to be well."""
    if identity.process_id != 0 or identity.alone:
        return []
    reached = f"{identity.coordinator} was reached by all {identity.processes} processes"
    return [
        good("coordinator", where, reached),
        good("software, config, data", where, "the same in all processes"),
    ]
