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
from jaxmnt.parallel.sharding import HostOf
from jaxmnt.preflight.table import Row, describe_hosts, failed_row, ok_row, warning_row
from jaxmnt.run.rundir import run_directories
from jaxmnt.training.build import build_spec
from jaxmnt.training.state import abstract_state, canonical_abstract, saved_state, stored_bytes
from jaxmnt.units import size

_VISIBILITY_TIMEOUT_SECONDS = 5.0
"""Time within which a network file system must show a file that another host has written."""
_POLL_SECONDS = 0.1
_TEST_FILE_BYTES = 64 << 20
"""Size of the file that measures how fast a host writes."""
_CHUNK_BYTES = 1 << 20
_SLOW_FRACTION = 0.5
"""Fraction of the fastest host's rate below which a host is slow."""
_CHECK = "run directory"
_ADVICE = (
    "every process must be able to read and write there: check mount, permissions and free space on each "
    "host, or choose another directory that all hosts share"
)


def shared_rows(directory: Path, identity: Identity, hosts: Sequence[str]) -> list[Row]:
    """Checks that all processes share a directory. Process 0 gets the rows; the others get none.

    `hosts` are the host names of the processes. All processes take part. Process 0 writes a file that every process
    must see, and every process writes a file that process 0 must see. Exactly one process must succeed in creating a
    lock file. Finally process 0 renames its file, and every process must see the new name.
    """
    process = identity.process_id
    token = secrets.token_hex(8)
    trouble = ""
    path_with = lambda suffix: directory / f".preflight-{token}{suffix}"
    # Process 0's file must appear in every process, and every process writes a file of its own.
    if process == 0:
        trouble = _error_message(lambda: _write(path_with(""), token))
    token = broadcast("a token in the run directory", token, identity)
    marker = path_with("")
    renamed = path_with("-renamed")
    trouble = trouble or _error_message(lambda: _await_file(marker, token))
    trouble = trouble or _error_message(lambda: _write(path_with(f"-{process}"), token))
    # Exactly one process may create the lock file.
    locked = not trouble and not _error_message(lambda: path_with("-lock").touch(0o600, exist_ok=False))
    reports = gather("the run directory", [trouble, locked], identity)
    if reports is not None:
        # The files of all processes must appear in process 0.
        await_file_of = lambda number: _error_message(lambda: _await_file(path_with(f"-{number}"), token))
        troubles = [process_trouble or await_file_of(number) for number, (process_trouble, _) in enumerate(reports)]
        trouble = trouble or _error_message(lambda: marker.replace(renamed))
    # Process 0's rename must appear in every process.
    broadcast("the token is renamed", "", identity)
    trouble = trouble or _error_message(lambda: _await_file(renamed, token))
    rename_troubles = gather("the renamed token", trouble, identity)
    if reports is None or rename_troubles is None:
        return []
    for path in directory.glob(f"{marker.name}*"):
        with contextlib.suppress(OSError):  # a file that stays is small and hidden
            path.unlink()
    lock_count = sum(locked for _, locked in reports)
    return _sharing_rows(directory, hosts, troubles if any(troubles) else rename_troubles, lock_count)


def _sharing_rows(directory: Path, hosts: Sequence[str], troubles: Sequence[str], lock_count: int) -> list[Row]:
    """Returns rows for the troubles of processes. `lock_count` is how many of them created the lock file."""
    other_troubles = [trouble for host, trouble in zip(hosts, troubles, strict=True) if host != hosts[0]]
    # If all other hosts have trouble, the host of process 0 is the one that has a different directory.
    if len(set(hosts)) > 2 and all(other_troubles) and not troubles[0]:
        return [failed_row(_CHECK, hosts[0], f"{directory}: {other_troubles[0]}, by any host", _ADVICE)]
    trouble_of_host: dict[str, str] = {}
    for host, trouble in zip(hosts, troubles, strict=True):
        if trouble:
            trouble_of_host.setdefault(host, trouble)
    rows = [failed_row(_CHECK, host, f"{directory}: {trouble}", _ADVICE) for host, trouble in trouble_of_host.items()]
    if not rows and lock_count != 1:
        finding = f"{directory}: {lock_count} processes created the same new file, where exactly 1 must succeed"
        rows.append(
            failed_row(_CHECK, "all hosts", finding, "use a file system with atomic creation (NFS 4, Lustre, …)")
        )
    state = "shared by all" if len(hosts) > 1 else "writable"
    return rows or [ok_row(_CHECK, describe_hosts(hosts), f"{directory}: {state}")]


def write_rate_rows(directory: Path, identity: Identity, hosts: Sequence[str]) -> list[Row]:
    """Measures how fast hosts write to a directory, all at the same time. The first process on each host writes.

    All processes take part. Process 0 gets the rows; the others get none. `hosts` are the host names of the processes.
    """
    is_first_on_host = hosts.index(hosts[identity.process_id]) == identity.process_id
    path = directory / f".preflight-rate-{identity.process_id}"
    process_rates = gather("how fast hosts write", _measure_write_rate(path) if is_first_on_host else None, identity)
    if process_rates is None:
        return []
    rates = {host: rate for host, rate in zip(hosts, process_rates, strict=True) if rate is not None}
    rows = []
    fastest = max(rates.values())
    for host, rate in rates.items():
        if rate == 0:
            finding = f"{size(_TEST_FILE_BYTES)} could not be written"
            rows.append(failed_row("writing there", host, finding, "look at its quota and free space"))
        elif rate < _SLOW_FRACTION * fastest:
            finding = f"{size(rate)}/s, another host {size(fastest)}/s"
            rows.append(warning_row("writing there", host, finding, "look at its mount and its link"))
    return rows or [
        ok_row("writing there", describe_hosts(rates), f"{size(sum(rates.values()))}/s together, with fsync")
    ]


def _measure_write_rate(path: Path) -> float:
    """Writes a file, including fsync. Returns the rate in bytes per second, or 0 if the file cannot be written."""
    chunk = os.urandom(_CHUNK_BYTES)
    began = time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(_TEST_FILE_BYTES // _CHUNK_BYTES):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        return _TEST_FILE_BYTES / (time.perf_counter() - began)
    except OSError:  # the rows from `shared_rows` have the reason
        return 0.0
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, token: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(token)


def _await_file(path: Path, token: str) -> None:
    """Waits until the file is visible and contains this token. Raises `OSError` if it does not appear in time."""
    deadline = time.monotonic() + _VISIBILITY_TIMEOUT_SECONDS
    while True:
        try:
            list(path.parent.iterdir())  # makes a network file system look again
            if path.read_text() == token:
                return
        except FileNotFoundError:
            pass
        if time.monotonic() > deadline:
            raise OSError(None, "a file that another process has written there is not visible")
        time.sleep(_POLL_SECONDS)


def _error_message(action: Callable[[], object]) -> str:
    """Runs `action`. Returns the message of the `OSError` that it raises, or an empty string if it succeeds."""
    try:
        action()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def room_rows(config: Config, host_of: HostOf) -> list[Row]:
    """Checks that the disk has room for the next checkpoint and for all that are kept. Compiles nothing."""
    import jax

    data = open_sources(config.data, check_files=False)  # `data_rows` has checked them
    spec = build_spec(fit_to_data(config, data), data.vocab_size, jax.devices(), host_of)
    state = stored_bytes(saved_state(spec, canonical_abstract(spec, abstract_state(spec))))
    required = space_needed(state, jax.process_count())
    root = run_directories(config)[-1]
    if finding := shortage(root, required):
        return [failed_row("room", str(root), finding, "make room, or choose another checkpoint.dir")]
    # During a save the new checkpoint exists in addition to all that are kept.
    count = config.checkpoint.keep + 1
    checkpoints = counted(count, "checkpoint", "checkpoints")
    if finding := shortage(root, required, count):
        return [warning_row("room", str(root), finding, f"{checkpoints} will not fit: keep fewer, or make room")]
    return [ok_row("room", str(root), f"for {checkpoints} of {size(required.bytes)}")]
