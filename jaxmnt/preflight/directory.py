"""Can all hosts use the run directory, and is there room for checkpoints in it?"""

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxmnt.checkpoint.retention import need, shortage
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
"""A network file system may show what another host has written only after a while."""
_LOOK_SECONDS = 0.1
_WRITTEN_BYTES, _CHUNK_BYTES = 64 << 20, 1 << 20
_SLOW = 0.5
_CHECK = "run directory"
_ADVICE = (
    "every process must be able to read and write there: check mount, permissions and free space on each "
    "host, or choose another directory that all hosts share"
)


def shared_rows(directory: Path, identity: Identity, hosts: Sequence[str]) -> list[Row]:
    """All processes take part; process 0 gets the rows, the others none. `hosts` are the processes' host names."""
    process, token, trouble = identity.process_id, secrets.token_hex(8), ""
    path_of = lambda end: directory / f".preflight-{token}{end}"
    if process == 0:
        trouble = _tried(lambda: _write(path_of(""), token))
    token = broadcast("a token in the run directory", token, identity)
    mark, renamed = path_of(""), path_of("-renamed")
    trouble = trouble or _tried(lambda: _appears(mark, token)) or _tried(lambda: _write(path_of(f"-{process}"), token))
    locked = not trouble and not _tried(lambda: path_of("-lock").touch(0o600, exist_ok=False))
    said = gather("the run directory", [trouble, locked], identity)
    if said is not None:
        seen_here = lambda number: _tried(lambda: _appears(path_of(f"-{number}"), token))
        troubles = [its_trouble or seen_here(number) for number, (its_trouble, _) in enumerate(said)]
        trouble = trouble or _tried(lambda: mark.replace(renamed))
    broadcast("the token is renamed", "", identity)
    trouble = trouble or _tried(lambda: _appears(renamed, token))
    later = gather("the renamed token", trouble, identity)
    if said is None or later is None:
        return []
    for path in directory.glob(f"{mark.name}*"):
        with contextlib.suppress(OSError):  # it is small and hidden
            path.unlink()
    return _judged(directory, hosts, troubles if any(troubles) else later, sum(locked for _, locked in said))


def _judged(directory: Path, hosts: Sequence[str], troubles: Sequence[str], locked: int) -> list[Row]:
    """Rows about the trouble of each process; `locked` is how many of them made the same new file."""
    others = [trouble for host, trouble in zip(hosts, troubles, strict=True) if host != hosts[0]]
    if len(set(hosts)) > 2 and all(others) and not troubles[0]:  # then it is process 0's that is another
        return [failed(_CHECK, hosts[0], f"{directory}: {others[0]}, by any host", _ADVICE)]
    first_of: dict[str, str] = {}
    for host, trouble in zip(hosts, troubles, strict=True):
        if trouble:
            first_of.setdefault(host, trouble)
    rows = [failed(_CHECK, host, f"{directory}: {trouble}", _ADVICE) for host, trouble in first_of.items()]
    if not rows and locked != 1:
        found = f"{directory}: {locked} processes created the same new file, where exactly 1 must succeed"
        rows.append(failed(_CHECK, "all hosts", found, "use a file system with atomic creation (NFS 4, Lustre, …)"))
    state = "shared by all" if len(hosts) > 1 else "writable"
    return rows or [good(_CHECK, describe_hosts(hosts), f"{directory}: {state}")]


def write_rate_rows(directory: Path, identity: Identity, hosts: Sequence[str]) -> list[Row]:
    """How fast the first process of each host writes there, all at the same time. As `shared_rows`."""
    first = hosts.index(hosts[identity.process_id]) == identity.process_id
    path = directory / f".preflight-rate-{identity.process_id}"
    said = gather("how fast hosts write", _rate(path) if first else None, identity)
    if said is None:
        return []
    rates = {host: rate for host, rate in zip(hosts, said, strict=True) if rate is not None}
    fastest, rows = max(rates.values()), []
    for host, rate in rates.items():
        if rate == 0:
            found = f"{size(_WRITTEN_BYTES)} could not be written"
            rows.append(failed("writing there", host, found, "look at its quota and at the room"))
        elif rate < _SLOW * fastest:
            found = f"{size(rate)}/s, another host {size(fastest)}/s"
            rows.append(warning("writing there", host, found, "look at its mount and its link"))
    return rows or [good("writing there", describe_hosts(rates), f"{size(sum(rates.values()))}/s together, with fsync")]


def _rate(path: Path) -> float:
    """Bytes a second of a new file, until it is on the disk; 0 if it cannot be written."""
    chunk = os.urandom(_CHUNK_BYTES)
    began = time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(_WRITTEN_BYTES // _CHUNK_BYTES):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        return _WRITTEN_BYTES / (time.perf_counter() - began)
    except OSError:  # the rows of the directory itself say why
        return 0.0
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, token: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(token)


def _appears(path: Path, token: str) -> None:
    """Returns when the file is there. Raises `OSError` if it does not appear."""
    deadline = time.monotonic() + _APPEARS_SECONDS
    while True:
        try:
            list(path.parent.iterdir())  # makes a network file system look again
            if path.read_text() == token:
                return
        except FileNotFoundError:
            pass
        if time.monotonic() > deadline:
            raise OSError(None, "what another process has written there is not to be seen")
        time.sleep(_LOOK_SECONDS)


def _tried(act: Callable[[], object]) -> str:
    """What went wrong, in words; empty if nothing did."""
    try:
        act()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def room_rows(config: Config, hosts: Hosts) -> list[Row]:
    """For the next checkpoint, and for all that are kept. Nothing is compiled."""
    import jax

    data = open_sources(config.data)
    spec = build_spec(fit_to_data(config, data), data.vocab_size, jax.devices(), hosts)
    state = stored_bytes(canonical_abstract(spec, abstract_state(spec)))
    wanted, keep = need(state, jax.process_count()), config.checkpoint.keep + 1
    root = run_directories(config)[-1]
    if one := shortage(root, wanted):
        return [failed("room", str(root), one, "make room, or choose another checkpoint.dir")]
    if several := shortage(root, wanted, keep):
        return [
            warning(
                "room",
                str(root),
                several,
                f"{counted(keep, 'checkpoint', 'checkpoints')} will not fit: keep fewer, or make room",
            )
        ]
    return [good("room", str(root), f"for {counted(keep, 'checkpoint', 'checkpoints')} of {size(wanted.bytes)}")]
