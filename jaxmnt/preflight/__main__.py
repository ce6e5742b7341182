"""The command that checks the hosts of a run: see `arguments.py` for its help."""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmnt.commands import run_command, write_file
from jaxmnt.config import Config, load_config
from jaxmnt.config.load import as_override
from jaxmnt.config.schema import Cluster
from jaxmnt.distributed.gpu_settings import prepare
from jaxmnt.distributed.identity import Identity, identify, survey
from jaxmnt.errors import ConfigError, ExitCode, UserError, report
from jaxmnt.output import checked
from jaxmnt.preflight.arguments import parse_arguments
from jaxmnt.preflight.table import Row, Verdict, failed, failures, table, to_json
from jaxmnt.strict_json import json_text

if TYPE_CHECKING:
    from jaxmnt.distributed.heartbeat import Heartbeat


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    if options.explain:
        cluster = load_config(options.config, options.overrides).cluster if options.config else Cluster()
        return explain(cluster, as_json=options.json)
    if options.config is None:
        raise ConfigError("--config: missing; give the config of the run")
    waits = as_override("cluster.start_timeout_seconds", options.wait)
    config = load_config(options.config, [*options.overrides, waits])
    identity = identify(config.cluster)
    prepare(config)

    from jaxmnt.data.sources import open_sources
    from jaxmnt.distributed.process_group import joined
    from jaxmnt.distributed.termination import ExitHandler
    from jaxmnt.run.compile_cache import keep_programs_of_one_cpu_alone

    keep_programs_of_one_cpu_alone()
    exit_handler = ExitHandler(identity.label)
    if options.nccl_debug:
        from jaxmnt.preflight.links import write_logs_to

        write_logs_to(_nccl_folder(config))

    def run() -> int:
        try:
            with joined(identity, config, exit_handler, lambda: open_sources(config.data).digest) as heartbeat:
                rows = _all_rows(config, identity, heartbeat, options)
        except UserError as error:
            if identity.process_id == 0 and options.json:
                print(to_json([failed("roll call", identity.label or "this host", str(error), "")]), flush=True)
            raise
        return _concluded(rows, identity, as_json=options.json)

    return exit_handler.finish(
        checked(report(run, debug=options.debug, where=identity.label)), at_once=not identity.alone
    )


def _all_rows(config: Config, identity: Identity, heartbeat: "Heartbeat", options: argparse.Namespace) -> list[Row]:
    """Every check, in all processes; what was found, in all of them."""
    from jaxmnt.distributed.process_group import host_names as machine_names
    from jaxmnt.parallel.sharding import build_mesh
    from jaxmnt.preflight import links
    from jaxmnt.preflight.compare import agreed, everywhere, quick_part, shared_places, thorough_rows
    from jaxmnt.preflight.directory import room_rows, write_rate_rows
    from jaxmnt.preflight.facts import quick, thorough, told_to_all

    mine = thorough()  # before JAX is on the GPUs
    all_facts = told_to_all("everything about the hosts", mine | quick(heartbeat.clock), identity)
    hosts = [facts["host"] for facts in all_facts]
    first = identity.process_id == 0
    rows = _meeting_rows(identity, everywhere(all_facts)) + quick_part(config, identity, all_facts)
    rows += thorough_rows(all_facts) if first else []
    if not failures(agreed(rows, identity)):  # else there is nowhere to write, or the devices are not those of the run
        for directory in shared_places(config):
            rows += write_rate_rows(directory, identity, hosts)
        machines = machine_names(identity)
        host_of = lambda device: machines[device.process_index]
        mesh = build_mesh(config.mesh, hosts=host_of)
        rows += room_rows(config, host_of) if first else []
        rows += links.matmul_rows(identity, hosts)
        rows += links.pair_rows(identity, hosts, _megabits(all_facts))
        rows += links.axis_rows(mesh, identity, hosts)
        rows += links.nccl_rows(_nccl_folder(config), hosts[0]) if options.nccl_debug and first else []
        if options.calibrate is not None and not failures(agreed(rows, identity)):
            rows += _calibrated(options.calibrate, identity)
    return agreed(rows, identity)


def _calibrated(path: Path, identity: Identity) -> list[Row]:
    """Measures, and writes the file. Process 0 gets the row."""
    from jaxmnt.plan.calibration import summary, to_text
    from jaxmnt.preflight.calibrate import calibrate

    found = calibrate(identity, time.strftime("%Y-%m-%d"))
    if found is None:
        return []
    write_file(path, to_text(found))
    return [Row("calibration", Verdict.OK, f"all {found.devices} devices", f"{summary(found)}; written to {path}")]


def _meeting_rows(identity: Identity, where: str) -> list[Row]:
    """What the rendezvous has found to be well."""
    if identity.process_id != 0 or identity.alone:
        return []
    found = {
        "coordinator": f"{identity.coordinator} was reached by all {identity.processes} processes",
        "software, config, data": "the same in all processes",
    }
    return [Row(check, Verdict.OK, where, text) for check, text in found.items()]


def _megabits(all_facts: list[dict]) -> dict[str, int]:
    """The speed of the network card that NCCL would use for a GPU, by host; 0 if it is not known."""
    from jaxmnt.preflight.network import Card, chosen_by_nccl

    chosen = {
        facts["host"]: chosen_by_nccl(
            [Card(**card) for card in facts["nics"]], facts["nccl"].get("NCCL_SOCKET_IFNAME", "")
        )
        for facts in all_facts
    }
    sockets = {host: card.megabits if card else 0 for host, card in chosen.items()}
    for facts in all_facts:
        ports = [port["gigabits"] for port in facts["fabric"] if port["state"] == "ACTIVE"]
        if ports and facts["platform"] == "gpu":
            sockets[facts["host"]] = int(1000 * max(ports))
    return sockets


def _concluded(rows: list[Row], identity: Identity, *, as_json: bool) -> int:
    bad = failures(rows)
    if identity.process_id == 0:
        print(to_json(rows) if as_json else table(rows), flush=True)
    if not bad:
        return ExitCode.FINISHED
    if identity.process_id == 0:
        print(f"jaxmnt: error: {len(bad)} of {len(rows)} checks failed. {bad[0]}", file=sys.stderr, flush=True)
    return ExitCode.PREFLIGHT


def _nccl_folder(config: Config) -> Path:
    return config.run_dir / "preflight"


def explain(cluster: Cluster, *, as_json: bool = False) -> int:
    """Prints which process this is, and why."""
    found = survey(cluster, os.environ)
    identity = found.identity
    devices = "all that it sees" if identity.local_devices is None else ", ".join(map(str, identity.local_devices))
    place = "alone" if identity.alone else f"process {identity.process_id} of {identity.processes}"
    lines = {"this process": place, "according to": found.source or "nobody: a single process"}
    if not identity.alone:
        lines["coordinator"] = str(identity.coordinator)
    lines["GPUs"] = devices
    if as_json:
        print(json_text(lines | {"read": found.read, "ignored": found.ignored}, indent=1))
        return ExitCode.FINISHED
    for name, text in lines.items():
        print(f"{name:<13} {text}")
    for name, text in found.read.items():
        print(f"{'read':<13} {name}={text}")
    for launcher, text in found.ignored.items():
        print(f"{'ignored':<13} {launcher}: {text}")
    return ExitCode.FINISHED


if __name__ == "__main__":
    run_command(main)
