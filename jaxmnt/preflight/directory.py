"""Checks that all hosts can use the run directory, and that checkpoints fit into it."""

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxmnt.checkpoint.retention import shortage, space_needed
from jaxmnt.config.schema import Config
from jaxmnt.data.sources import fit_to_data, open_sources
from jaxmnt.distributed.coordination import broadcast, gather
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import counted
from jaxmnt.parallel.sharding import Hosts
from jaxmnt.preflight.table import Row, describe_hosts, failed, good, warning
from jaxmnt.run.rundir import run_directories
from jaxmnt.training.build import build_spec
from jaxmnt.training.state import abstract_state, canonical_abstract, stored_bytes
from jaxmnt.units import size

_APPEARS_SECONDS = 5.0
"""Time within which a network file system shows a file that another host has written."""
_LOOK_SECONDS = 0.1
_WRITTEN_BYTES, _CHUNK_BYTES = 64 << 20, 1 << 20
_SLOW = 0.5
_CHECK = "run directory"
_ADVICE = (
    "every process must be able to read and write there: check mount, permissions and free space on each "
    "host, or choose another directory that all hosts share"
)


def shared_rows(directory: Path, identity: Identity, hosts: Sequence[str]) -> list[Row]:
    """Checks that all processes share a directory. Process 0 gets the rows, the others none.

    `hosts` are the host names of the processes. All processes take part: process 0 writes a file that every process
    must see, every process writes one that process 0 must see, exactly one may create a lock file, and all must see
    that process 0 renames its file.
    """
    process, token, trouble = identity.process_id, secrets.token_hex(8), ""
    path_of = lambda end: directory / f".preflight-{token}{end}"
    # Process 0's file must appear in every process, and each writes one of its own.
    if process == 0:
        trouble = _error_of(lambda: _write(path_of(""), token))
    token = broadcast("a token in the run directory", token, identity)
    mark, renamed = path_of(""), path_of("-renamed")
    trouble = trouble or _error_of(lambda: _await_file(mark, token))
    trouble = trouble or _error_of(lambda: _write(path_of(f"-{process}"), token))
    # Exactly one process may create the lock file.
    locked = not trouble and not _error_of(lambda: path_of("-lock").touch(0o600, exist_ok=False))
    reports = gather("the run directory", [trouble, locked], identity)
    if reports is not None:
        # The files of all processes must appear in process 0.
        error_here = lambda number: _error_of(lambda: _await_file(path_of(f"-{number}"), token))
        troubles = [its_trouble or error_here(number) for number, (its_trouble, _) in enumerate(reports)]
        trouble = trouble or _error_of(lambda: mark.replace(renamed))
    # Process 0's rename must appear in every process.
    broadcast("the token is renamed", "", identity)
    trouble = trouble or _error_of(lambda: _await_file(renamed, token))
    rename_troubles = gather("the renamed token", trouble, identity)
    if reports is None or rename_troubles is None:
        return []
    for path in directory.glob(f"{mark.name}*"):
        with contextlib.suppress(OSError):  # a file that stays is small and hidden
            path.unlink()
    lock_count = sum(locked for _, locked in reports)
    return _rows_of(directory, hosts, troubles if any(troubles) else rename_troubles, lock_count)


def _rows_of(directory: Path, hosts: Sequence[str], troubles: Sequence[str], locked: int) -> list[Row]:
    """Returns rows for the trouble of each process; `locked` is the number of processes that created the lock file."""
    others = [trouble for host, trouble in zip(hosts, troubles, strict=True) if host != hosts[0]]
    # If all other hosts have trouble, the directory of process 0's host is the different one.
    if len(set(hosts)) > 2 and all(others) and not troubles[0]:
        return [failed(_CHECK, hosts[0], f"{directory}: {others[0]}, by any host", _ADVICE)]
    first_of: dict[str, str] = {}
    for host, trouble in zip(hosts, troubles, strict=True):
        if trouble:
            first_of.setdefault(host, trouble)
    rows = [failed(_CHECK, host, f"{directory}: {trouble}", _ADVICE) for host, trouble in first_of.items()]
    if not rows and locked != 1:
        finding = f"{directory}: {locked} processes created the same new file, where exactly 1 must succeed"
        rows.append(failed(_CHECK, "all hosts", finding, "use a file system with atomic creation (NFS 4, Lustre, …)"))
    state = "shared by all" if len(hosts) > 1 else "writable"
    return rows or [good(_CHECK, describe_hosts(hosts), f"{directory}: {state}")]


def write_rate_rows(directory: Path, identity: Identity, hosts: Sequence[str]) -> list[Row]:
    """Measures how fast the first process of each host writes to a directory, all at the same time.

    All processes take part; process 0 gets the rows, the others none. `hosts` are the host names of the processes.
    """
    is_first_on_host = hosts.index(hosts[identity.process_id]) == identity.process_id
    path = directory / f".preflight-rate-{identity.process_id}"
    process_rates = gather("how fast hosts write", _rate(path) if is_first_on_host else None, identity)
    if process_rates is None:
        return []
    rates = {host: rate for host, rate in zip(hosts, process_rates, strict=True) if rate is not None}
    rows = []
    fastest = max(rates.values())
    for host, rate in rates.items():
        if rate == 0:
            finding = f"{size(_WRITTEN_BYTES)} could not be written"
            rows.append(failed("writing there", host, finding, "look at its quota and free space"))
        elif rate < _SLOW * fastest:
            finding = f"{size(rate)}/s, another host {size(fastest)}/s"
            rows.append(warning("writing there", host, finding, "look at its mount and its link"))
    return rows or [good("writing there", describe_hosts(rates), f"{size(sum(rates.values()))}/s together, with fsync")]


def _rate(path: Path) -> float:
    """Returns the bytes per second of writing a new file, including fsync; 0 if it cannot be written."""
    chunk = os.urandom(_CHUNK_BYTES)
    began = time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(_WRITTEN_BYTES // _CHUNK_BYTES):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        return _WRITTEN_BYTES / (time.perf_counter() - began)
    except OSError:  # the rows of `shared_rows` tell the reason
        return 0.0
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, token: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(token)


def _await_file(path: Path, token: str) -> None:
    """Waits until the file with this token is visible. Raises `OSError` if it does not appear."""
    deadline = time.monotonic() + _APPEARS_SECONDS
    while True:
        try:
            list(path.parent.iterdir())  # makes a network file system look again
            if path.read_text() == token:
                return
        except FileNotFoundError:
            pass
        if time.monotonic() > deadline:
            raise OSError(None, "a file that another process has written there is not visible")
        time.sleep(_LOOK_SECONDS)


def _error_of(act: Callable[[], object]) -> str:
    """Runs `act`. Returns the message of its `OSError`, or an empty text if it succeeds."""
    try:
        act()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def room_rows(config: Config, hosts: Hosts) -> list[Row]:
    """Checks that the next checkpoint, and all that are kept, fit on the disk. Compiles nothing."""
    import jax

    data = open_sources(config.data)
    spec = build_spec(fit_to_data(config, data), data.vocab_size, jax.devices(), hosts)
    state = stored_bytes(canonical_abstract(spec, abstract_state(spec)))
    required = space_needed(state, jax.process_count())
    root = run_directories(config)[-1]
    if finding := shortage(root, required):
        return [failed("room", str(root), finding, "make room, or choose another checkpoint.dir")]
    # During a save the new checkpoint exists beside all that are kept.
    count = config.checkpoint.keep + 1
    checkpoints = counted(count, "checkpoint", "checkpoints")
    if finding := shortage(root, required, count):
        return [warning("room", str(root), finding, f"{checkpoints} will not fit: keep fewer, or make room")]
    return [good("room", str(root), f"for {checkpoints} of {size(required.bytes)}")]
