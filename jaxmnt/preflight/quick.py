"""The fast form of a preflight, at the start of each run of several processes."""

from pathlib import Path

from jaxmnt.cluster.environment import Identity
from jaxmnt.cluster.runtime import share
from jaxmnt.config.schema import Config
from jaxmnt.errors import PreflightError
from jaxmnt.preflight.compare import quick_rows
from jaxmnt.preflight.directory import shared_rows
from jaxmnt.preflight.facts import Facts, quick, told_to_all
from jaxmnt.preflight.rows import Row, failures, from_json, to_json


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
    return from_json(share("what was found", to_json(rows) if identity.process_id == 0 else None, identity))
