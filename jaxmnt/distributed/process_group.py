"""Joining the processes of a run into one JAX runtime, and leaving it.

The only module that touches JAX's coordination service.
"""

import contextlib
import hashlib
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

import jaxmnt
from jaxmnt.config.load import dump_config
from jaxmnt.config.schema import Config
from jaxmnt.distributed import authentication, rendezvous
from jaxmnt.distributed.addresses import listening_address
from jaxmnt.distributed.heartbeat import Lifeline
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.termination import EarlyLeave, Ending, bears_its_sign, may_tell_of_a_lost_peer
from jaxmnt.errors import ConfigError, PeerError, UserError, code_of, error_of, summary
from jaxmnt.output import guarded

BARRIER_SECONDS = 300.0
_LATE = "timed out task names"
"""What JAX's account of a barrier says before those who did not come."""
_HEARING_SECONDS = 10.0
_GOING_LAST_SECONDS = 1.0

_turns: Counter[str] = Counter()
_turns_lock = threading.Lock()


@contextmanager
def joined(
    identity: Identity, config: Config, ending: Ending, find_data: Callable[[], str], leave: EarlyLeave | None = None
) -> Iterator[Lifeline]:
    """Inside, the processes of the run are one JAX runtime in which each uses all the devices it can see.

    Holds the roll call first, whose errors are those of `rendezvous.hold`. `find_data` returns the digest of the data;
    if it raises a `UserError`, every process hears of it. `leave` is told how the others hear of a wish to stop early.
    Afterwards the lifeline ends this process when another fails; what is raised here is told to the others, and all
    leave together when nothing is. A single process has nobody to join and gets a lifeline without connections.
    """
    cluster = config.cluster
    silence, patience = cluster.silence_timeout_seconds, 0.9 * cluster.heartbeat_timeout_seconds
    if identity.alone:
        if identity.local_devices is not None:
            import jax

            jax.config.update("jax_cuda_visible_devices", ",".join(map(str, identity.local_devices)))
        lifeline = Lifeline(identity, {}, ending, silence, patience)
        with telling(lifeline):
            yield lifeline
        return
    assert config.run.dir is not None
    digest, trouble, log = "", None, os.devnull
    key = secrets.token_bytes()  # fits none: without a key it can only say that it was here
    try:
        log = str(_native_log(Path(config.run.dir), identity))
        key = authentication.run_key(Path(config.run.dir))
        digest = find_data()
    except UserError as error:
        trouble = error
    leave = leave or EarlyLeave(identity, ending)
    with _native_output_to(log):
        with leave.meeting():
            facts, limit = _facts(config, digest), cluster.start_timeout_seconds
            peers = rendezvous.hold(identity, facts, limit, key, trouble, leave.wish)
            # Within, so that there is no moment in which a wish to stop is told to nobody.
            lifeline = Lifeline(identity, peers, ending, silence, patience)
            leave.tell = lifeline.stop_early
            lifeline.start()
        with telling(lifeline):
            _initialize(identity, config)
            yield lifeline
            _shut_down(lifeline)


def _initialize(identity: Identity, config: Config) -> None:
    import jax

    # JAX's own handler would swallow SIGTERM; the wish to stop travels with the batches instead.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        identity.coordinator,
        identity.processes,
        identity.process_id,
        # Detection would take "which device is mine" from Slurm: one GPU a task, however many there are.
        cluster_detection_method="deactivate",
        local_device_ids=None if identity.local_devices is None else list(identity.local_devices),
        coordinator_bind_address=_bind_address(identity),
        initialization_timeout=int(max(10, config.cluster.start_timeout_seconds)),
        heartbeat_timeout_seconds=config.cluster.heartbeat_timeout_seconds,
        shutdown_timeout_seconds=config.cluster.heartbeat_timeout_seconds,
    )


def _shut_down(lifeline: Lifeline) -> None:
    """All together: JAX waits for everyone."""
    import jax

    jax.distributed.shutdown()
    lifeline.leave()


@contextmanager
def telling(lifeline: Lifeline) -> Iterator[None]:
    """What is raised inside ends the run: the others hear why, before anything is cleaned up outside.

    Where JAX or a wait of ours reports that somebody is gone, the lifeline mostly knows who, and ends this process
    with that; else it is a `PeerError`.
    """
    try:
        yield
    except BaseException as raised:
        if lifeline.failing:
            raise
        error: BaseException = raised
        if isinstance(raised, SystemExit):
            error = RuntimeError(f"something called exit({raised.code}) in the middle of the run")
        elif may_tell_of_a_lost_peer(raised):
            lifeline.miss()
            if bears_its_sign(raised) and not isinstance(raised, PeerError):
                error = PeerError(f"another process is gone: {str(raised).splitlines()[0]}")
        lifeline.fail(summary(error), code_of(error))
        if error is raised:
            raise
        raise error from raised


def _bind_address(identity: Identity) -> str | None:
    """For process 0. None is JAX's default, all interfaces."""
    host = listening_address(identity)[0] if identity.process_id == 0 else ""
    return f"[{host}]:{identity.address[1]}" if ":" in host else f"{host}:{identity.address[1]}" if host else None


def _facts(config: Config, data_digest: str) -> dict[str, str]:
    """What must be the same in every process."""
    digest = hashlib.sha256(dump_config(config).encode()).hexdigest()[:12]
    return software() | {"config digest": digest, "data digest": data_digest[:12]}


def barrier(name: str, identity: Identity, seconds: float = BARRIER_SECONDS) -> None:
    """Waits until every process has reached the barrier of this name.

    Raises `PeerError`, naming those who are late, when time is up.
    """
    if identity.alone:
        return
    try:
        coordination().wait_at_barrier(name, int(seconds * 1000))
    except Exception as error:
        late = sorted({int(number) for number in re.findall(r"task:(\d+)", str(error).partition(_LATE)[2])})
        who = f"process {', '.join(map(str, late))}" if late else "some process"
        raise PeerError(f"{who} did not reach '{name}' within {seconds:g} s: {str(error).splitlines()[0]}") from error


def all_well(name: str, trouble: UserError | None, identity: Identity, seconds: float = BARRIER_SECONDS) -> None:
    """A barrier at which every process learns what went wrong in any. `name` must be new in this run of the processes.

    Raises `trouble`; in the processes that have none, a `UserError` with the words and exit code of the first that has.
    """
    if identity.alone:
        if trouble is not None:
            raise trouble
        return
    client, key = coordination(), f"jaxmnt/trouble/{name}"
    if trouble is not None:
        client.key_value_set(
            f"{key}/{identity.process_id:06d}", f"{int(trouble.exit_code)} {identity.label}: {trouble}"
        )
    barrier(name, identity, seconds)
    try:
        said = [text for _, text in sorted(client.key_value_dir_get(key))]
    except Exception as error:
        raise PeerError(f"process 0 is gone at barrier '{name}': {error}") from error
    if not said:
        return
    # Everyone is about to leave. Process 0 serves the others until they have heard, and goes last.
    with contextlib.suppress(PeerError):
        barrier(f"{name}: heard", identity, _HEARING_SECONDS)
    if identity.process_id == 0:
        time.sleep(_GOING_LAST_SECONDS)
    if trouble is not None:
        raise trouble
    code, _, text = said[0].partition(" ")
    raise error_of(int(code), text)


def share(name: str, value: str | None, identity: Identity, seconds: float = BARRIER_SECONDS) -> str:
    """Process 0 gives a text, every process gets it."""
    if identity.alone:
        assert value is not None
        return value
    client, key = coordination(), f"jaxmnt/share/{turn(name)}"
    if identity.process_id == 0:
        assert value is not None
        client.key_value_set(key, value)
        return value
    try:
        return str(client.blocking_key_value_get(key, int(seconds * 1000)))
    except Exception as error:
        raise PeerError(f"process 0 did not say '{name}' within {seconds:g} s: {error}") from error


def gather(name: str, value: str, identity: Identity, seconds: float = BARRIER_SECONDS) -> list[str] | None:
    """Every process gives a text; process 0 gets all, in order of processes, the others None.

    Nothing of it stays behind. Raises `PeerError` naming the process that process 0 has waited for in vain.
    """
    if identity.alone:
        return [value]
    client, key = coordination(), f"jaxmnt/gather/{turn(name)}"
    if identity.process_id != 0:
        client.key_value_set(f"{key}/{identity.process_id:06d}", value)
        return None
    values, deadline = [value], time.monotonic() + seconds
    for process in range(1, identity.processes):
        left = max(1, int((deadline - time.monotonic()) * 1000))
        try:
            values.append(str(client.blocking_key_value_get(f"{key}/{process:06d}", left)))
        except Exception as error:
            raise PeerError(f"process {process} did not say '{name}' within {seconds:g} s: {error}") from error
    client.key_value_delete(f"{key}/")
    return values


def hosts(identity: Identity) -> dict[int, str]:
    """The machine of each process, by name. Several processes can be on one.

    Machines are told apart by the boot of their kernel, since containers of one have names of their own and images may
    all have the same.
    """
    if identity.alone:
        return {0: socket.gethostname()}
    client, key = coordination(), "jaxmnt/host"
    client.key_value_set(f"{key}/{identity.process_id:06d}", f"{machine_id()} {socket.gethostname()}")
    barrier("every process has named its host", identity)
    told = {int(name.rsplit("/", 1)[-1]): str(text).split(" ", 1) for name, text in client.key_value_dir_get(key)}
    names: dict[str, str] = {}
    for process, (boot, host) in sorted(told.items()):
        names.setdefault(boot, f"{host} (of process {process})" if host in names.values() else host)
    return {process: names[boot] for process, (boot, _) in sorted(told.items())}


def machine_id() -> str:
    """What tells this machine from others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()


def turn(name: str) -> str:
    """The name with how often this process has used it: keys cannot be set twice. All processes take the same turns."""
    with _turns_lock:
        _turns[name] += 1
        return f"{name} {_turns[name]}"


def coordination() -> Any:
    """JAX's coordination service, for which there is no public interface yet."""
    from jax._src import distributed

    return distributed.global_state.client


def _native_log(run_dir: Path, identity: Identity) -> Path:
    """Where what libraries print below Python goes. Raises `ConfigError` if nothing can be written there."""
    path = run_dir / "native" / f"{identity.process_id}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise ConfigError(f"run.dir: {path} cannot be written: {error.strerror}; choose another run.dir") from error
    return path


@contextmanager
def _native_output_to(path: str) -> Iterator[None]:
    """Sends what libraries print below Python to `path`, while Python's own stdout goes on as before.

    Gloo announces every connection on file descriptor 1, which would spoil progress lines and JSON.
    """
    sys.stdout.flush()
    original = os.dup(1)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.close(log)
    before = sys.stdout
    sys.stdout = guarded(before, original, line_buffering=True)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(original, 1)
        os.close(original)
        sys.stdout = before


_PACKAGES = {
    "jax version": ("jax",),
    "jaxlib version": ("jaxlib",),
    "CUDA plugin version": ("jax-cuda12-plugin", "jax-cuda13-plugin"),
    "NCCL version": ("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
}
_DRIVER = Path("/proc/driver/nvidia/version")


def software() -> dict[str, str]:
    """Versions, and a digest of jaxmnt's own code. What is not there is `none`."""
    found = {"jaxmnt version": jaxmnt.__version__, "jaxmnt's code": _code_digest()}
    for name, packages in _PACKAGES.items():
        found[name] = next(filter(None, map(_version, packages)), "none")
    return found if os.environ.get("JAX_PLATFORMS") == "cpu" else found | {"driver version": _driver()}


def environment_digest() -> str:
    """A digest of the names and versions of all Python packages that this process could import."""
    names = sorted({f"{one.metadata['Name']}=={one.version}" for one in distributions()})
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]


def _code_digest() -> str:
    """Of all source files of the package, with their names."""
    root = Path(jaxmnt.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str:
    try:
        found = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", _DRIVER.read_text())
    except OSError:
        return "none"
    return found[1] if found else "unknown"
