"""Joining the processes of a run into one JAX runtime, and leaving it.

The only module that touches JAX's coordination service.
"""

import hashlib
import os
import re
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

import jaxmnt
from jaxmnt.config.load import dump_config
from jaxmnt.config.schema import Config
from jaxmnt.distributed import authentication, rendezvous
from jaxmnt.distributed.addresses import listening_address
from jaxmnt.distributed.container import kernel_text
from jaxmnt.distributed.coordination import all_gather
from jaxmnt.distributed.heartbeat import Heartbeat
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.termination import EarlyExit, ExitHandler, is_connection_error, may_mean_a_lost_peer
from jaxmnt.errors import ConfigError, PeerError, UserError, code_of, summary
from jaxmnt.output import guarded


@contextmanager
def joined(
    identity: Identity,
    config: Config,
    exit_handler: ExitHandler,
    digest_of_data: Callable[[], str],
    early_exit: EarlyExit | None = None,
) -> Iterator[Heartbeat]:
    """Inside, the processes of the run are one JAX runtime in which each uses all the devices it can see.

    Joins the rendezvous first, whose errors are those of `rendezvous.join`. `digest_of_data` returns the digest of the
    data; if it raises a `UserError`, every process hears of it. `early_exit` is told how the others hear of a request
    to stop early. Afterwards the heartbeat ends this process when another fails; what is raised here is told to the
    others, and all leave together when nothing is. A single process has nobody to join and gets a heartbeat without
    connections.
    """
    cluster, early_exit = config.cluster, early_exit or EarlyExit(identity, exit_handler)
    silence, patience = cluster.silence_timeout_seconds, 0.9 * cluster.heartbeat_timeout_seconds
    if identity.alone:
        if identity.local_devices is not None:
            import jax

            jax.config.update("jax_cuda_visible_devices", ",".join(map(str, identity.local_devices)))
        heartbeat = Heartbeat(identity, {}, exit_handler, silence, patience)
        early_exit.fail = heartbeat.end
        with telling(heartbeat):
            yield heartbeat
        return
    digest, trouble, log = "", None, os.devnull
    key = secrets.token_bytes()  # fits none: without a key it can only say that it was here
    try:
        log = str(_native_log(config.run_dir, identity))
        key = authentication.run_key(config.run_dir)
        digest = digest_of_data()
    except UserError as error:
        trouble = error
    with _native_output_to(log):
        with early_exit.during_rendezvous():
            facts, limit = _facts(config, digest), cluster.start_timeout_seconds
            peers = rendezvous.join(identity, facts, limit, key, trouble, lambda: early_exit.reason)
            # Within, so that there is no moment in which a request to stop is told to nobody.
            heartbeat = Heartbeat(identity, peers, exit_handler, silence, patience)
            early_exit.tell, early_exit.fail = heartbeat.announce, heartbeat.end
            heartbeat.start()
        with telling(heartbeat):
            with _jax_runtime(identity, config):
                yield heartbeat
            heartbeat.leave()


@contextmanager
def _jax_runtime(identity: Identity, config: Config) -> Iterator[None]:
    """Inside, JAX knows all processes. They leave together unless something is raised: JAX waits for everyone."""
    import jax

    # JAX's own handler would swallow SIGTERM; the request to stop travels with the batches instead.
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
    yield
    jax.distributed.shutdown()


@contextmanager
def telling(heartbeat: Heartbeat) -> Iterator[None]:
    """What is raised inside ends the run: the others hear why, before anything is cleaned up outside.

    Where JAX or a wait of ours reports that somebody is gone, the heartbeat mostly knows who, and ends this process
    with that; else it is a `PeerError`.
    """
    try:
        yield
    except BaseException as raised:
        if heartbeat.failing:
            raise
        error: BaseException = raised
        if isinstance(raised, SystemExit):
            error = RuntimeError(f"something called exit({raised.code}) in the middle of the run")
        elif may_mean_a_lost_peer(raised):
            heartbeat.miss()
            if is_connection_error(raised) and not isinstance(raised, PeerError):
                error = PeerError(f"another process is gone: {str(raised).splitlines()[0]}")
        heartbeat.fail(summary(error), code_of(error))
        if error is raised:
            raise
        raise error from raised


def _bind_address(identity: Identity) -> str | None:
    """For process 0. None is JAX's default, all interfaces."""
    host = listening_address(identity)[0] if identity.process_id == 0 else ""
    return f"[{host}]:{identity.address[1]}" if ":" in host else f"{host}:{identity.address[1]}" if host else None


def _facts(config: Config, data_digest: str) -> dict[str, str]:
    """What must be the same in every process."""
    return software() | {"config digest": _digest(dump_config(config)), "data digest": data_digest[:12]}


def host_names(identity: Identity) -> dict[int, str]:
    """The machine of each process, by name. Several processes can be on one.

    Machines are told apart by the boot of their kernel, since containers of one have names of their own and images may
    all have the same.
    """
    if identity.alone:
        return {0: socket.gethostname()}
    of_all = all_gather("every process has named its host", (machine_id(), socket.gethostname()), identity)
    names: dict[str, str] = {}
    for process, (machine, host) in enumerate(of_all):
        names.setdefault(machine, f"{host} (of process {process})" if host in names.values() else host)
    return {process: names[machine] for process, (machine, _) in enumerate(of_all)}


def machine_id() -> str:
    """What tells this machine from others."""
    return kernel_text(Path("/proc/sys/kernel/random/boot_id")) or socket.gethostname()


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
    return _digest("\n".join(sorted({f"{one.metadata['Name']}=={one.version}" for one in distributions()})))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


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
    text = kernel_text(_DRIVER)
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", text)
    return found[1] if found else "unknown" if text else "none"
