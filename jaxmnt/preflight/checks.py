"""Runs all checks of a preflight, in order."""

import time
from pathlib import Path

from jaxmnt.commands import write_file
from jaxmnt.config.schema import Config
from jaxmnt.data.sources import open_sources
from jaxmnt.distributed.coordination import gather
from jaxmnt.distributed.heartbeat import Heartbeat
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.process_group import host_names
from jaxmnt.errors import PreflightError, counted
from jaxmnt.parallel.sharding import build_mesh
from jaxmnt.preflight import links
from jaxmnt.preflight.compare import any_failed, broadcast_hosts, quick_checks, shared_directories, thorough_rows
from jaxmnt.preflight.directory import room_rows, write_rate_rows
from jaxmnt.preflight.facts import gather_facts, quick_facts, thorough_facts
from jaxmnt.preflight.network import megabits
from jaxmnt.preflight.table import Row, describe_hosts, failed_row, ok_row
from jaxmnt.run.data_copies import check_own_copy, compare_copies


def run_all_checks(
    config: Config, identity: Identity, heartbeat: Heartbeat, nccl_logs: Path | None, calibration: Path | None
) -> tuple[list[Row], bool]:
    """Runs every check. All processes take part. Returns the rows, in process 0 only, and whether any check failed.

    `nccl_logs` is the folder to which NCCL writes its logs, and `calibration` the file for measured rates. Each
    may be None: then NCCL writes no logs, or no rates are measured.
    """
    own_facts = thorough_facts()  # before JAX uses the GPUs
    all_facts = gather_facts("everything about the hosts", own_facts | quick_facts(heartbeat.clock), identity)
    hosts = broadcast_hosts(all_facts, identity)
    is_first = identity.process_id == 0
    rows = _rendezvous_rows(identity, describe_hosts(hosts)) + quick_checks(config, identity, all_facts)
    rows += [] if all_facts is None else thorough_rows(all_facts)
    # After a failure there may be no directory to write to, or the devices may not be those of the run.
    if not any_failed(rows, identity):
        for directory in shared_directories(config):
            rows += write_rate_rows(directory, identity, hosts)
        machines = host_names(identity)
        host_of = lambda device: machines[device.process_index]
        mesh = build_mesh(config.mesh, host_of=host_of)
        rows += _data_rows(config, identity, hosts)
        rows += room_rows(config, host_of) if is_first else []
        rows += links.matmul_rows(identity, hosts)
        rows += links.pair_rows(identity, hosts, {facts["host"]: megabits(facts) for facts in all_facts or []})
        rows += links.axis_rows(mesh, identity, hosts)
        rows += links.nccl_rows(nccl_logs, hosts[0]) if nccl_logs is not None and is_first else []
        if calibration is not None and not any_failed(rows, identity):
            rows += _calibration_rows(calibration, identity)
    return rows, any_failed(rows, identity)


def _data_rows(config: Config, identity: Identity, hosts: list[str]) -> list[Row]:
    """Checks the files of the data on hosts that do not read those of process 0. Only process 0 gets rows."""
    sources = open_sources(config.data, check_files=identity.alone)
    problem = ""
    is_own = compare_copies(sources, True, identity).is_own
    if not is_own:
        try:
            check_own_copy(sources, identity)
        except PreflightError as error:
            problem = str(error)
    answers = gather("the files of the data", [is_own, problem], identity)
    if answers is None:
        return []
    failed = [
        failed_row("data", host, problem, "") for host, (_, problem) in zip(hosts, answers, strict=True) if problem
    ]
    copies = sum(not is_own for is_own, _ in answers)
    finding = f"complete, also in the copies of {counted(copies, 'process', 'processes')}" if copies else "complete"
    return failed or [ok_row("data", describe_hosts(hosts), finding)]


def _calibration_rows(path: Path, identity: Identity) -> list[Row]:
    """Measures rates in all processes. Process 0 writes them to a file and gets the row."""
    from jaxmnt.plan.calibration import summary, to_text
    from jaxmnt.preflight.calibrate import calibrate

    calibration = calibrate(identity, time.strftime("%Y-%m-%d"))
    if calibration is None:
        return []
    write_file(path, to_text(calibration))
    return [ok_row("calibration", f"all {calibration.devices} devices", f"{summary(calibration)}; written to {path}")]


def _rendezvous_rows(identity: Identity, where: str) -> list[Row]:
    """Returns rows for what the rendezvous has checked. Only process 0 of several gets them."""
    if identity.process_id != 0 or identity.alone:
        return []
    finding = f"{identity.coordinator} was reached by all {identity.processes} processes"
    return [
        ok_row("coordinator", where, finding),
        ok_row("software, config, data", where, "the same in all processes"),
    ]
