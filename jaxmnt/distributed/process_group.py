"""Joins the processes of a run into one JAX runtime, and leaves it.

Only this module starts and stops JAX's coordination service.
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
from jaxmnt.distributed.container import text_in_file
from jaxmnt.distributed.coordination import broadcast, gather
from jaxmnt.distributed.heartbeat import Heartbeat
from jaxmnt.distributed.host_table import pack_hosts, unpack_hosts
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.termination import EarlyExit, ExitHandler, is_connection_error, may_mean_a_lost_peer
from jaxmnt.errors import ConfigError, PeerError, UserError, code_of, summary
from jaxmnt.output import never_failing_stream


@contextmanager
def joined_process_group(
    identity: Identity,
    config: Config,
    exit_handler: ExitHandler,
    digest_of_data: Callable[[], str],
    early_exit: EarlyExit | None = None,
) -> Iterator[Heartbeat]:
    """Within this context, the processes of the run form one JAX runtime in which each uses all devices that it sees.

    This process first joins the rendezvous, which may raise the errors of `rendezvous.join`. `digest_of_data` returns
    the digest of the data. If it raises a `UserError`, every process reports that. `early_exit` gets the functions that
    report an early stop to the other processes. After the rendezvous, the heartbeat ends this process when another one
    fails. An exception raised inside the context is reported to the other processes. Without one, all processes leave
    together. A single process skips the rendezvous, and gets a heartbeat without connections.
    """
    cluster = config.cluster
    early_exit = early_exit or EarlyExit(identity, exit_handler)
    silence_seconds = cluster.silence_timeout_seconds
    # This is shorter than JAX's own timeout, after which JAX aborts without naming a process.
    settling_seconds = 0.9 * cluster.heartbeat_timeout_seconds
    if identity.alone:
        if identity.local_devices is not None:
            import jax

            jax.config.update("jax_cuda_visible_devices", ",".join(map(str, identity.local_devices)))
        heartbeat = Heartbeat(identity, {}, exit_handler, silence_seconds, settling_seconds)
        early_exit.fail = heartbeat.end
        with reporting_failures(heartbeat):
            yield heartbeat
        return
    # A process that cannot take part still joins the rendezvous, so that the others report its trouble.
    digest, trouble, log = "", None, os.devnull
    key = secrets.token_bytes()  # this random key matches no other process; process 0 then learns only the address
    try:
        log = str(_native_log(config.run_dir, identity))
        key = authentication.run_key(config.run_dir)
        digest = digest_of_data()
    except UserError as error:
        trouble = error
    with _redirect_native_output(log):
        with early_exit.during_rendezvous():
            facts, limit = _facts(config, digest), cluster.start_timeout_seconds
            peers = rendezvous.join(identity, facts, limit, key, trouble, lambda: early_exit.reason)
            # The heartbeat starts inside this context, so that a request to stop reaches the others at any time.
            heartbeat = Heartbeat(identity, peers, exit_handler, silence_seconds, settling_seconds)
            early_exit.tell, early_exit.fail = heartbeat.announce, heartbeat.end
            heartbeat.start()
        with reporting_failures(heartbeat):
            with _jax_runtime(identity, config):
                yield heartbeat
            heartbeat.leave()


@contextmanager
def _jax_runtime(identity: Identity, config: Config) -> Iterator[None]:
    """Within this context, JAX is connected to all processes.

    They leave it together, since JAX waits for all of them. After an exception, this process does not wait.
    """
    import jax

    # JAX's own handler would swallow SIGTERM. Instead, the request to stop is sent with the batches.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        identity.coordinator,
        identity.processes,
        identity.process_id,
        # JAX's detection would assign one GPU to each task of Slurm, however many GPUs it has.
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
def reporting_failures(heartbeat: Heartbeat) -> Iterator[None]:
    """Reports an exception raised inside the context to the other processes, before any cleanup outside it, and raises
    it again.

    If the exception means that a process is lost, the heartbeat usually knows which, and ends this process with a
    message that names it. Otherwise a `PeerError` is raised.
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
            heartbeat.wait_for_verdict()
            if is_connection_error(raised) and not isinstance(raised, PeerError):
                error = PeerError(f"another process is gone: {str(raised).splitlines()[0]}")
        heartbeat.fail(summary(error), code_of(error))
        if error is raised:
            raise
        raise error from raised


def _bind_address(identity: Identity) -> str | None:
    """Returns the address to which JAX's service is bound in process 0. None means JAX's default, all interfaces."""
    host = listening_address(identity)[0] if identity.process_id == 0 else ""
    if not host:
        return None
    port = identity.address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _facts(config: Config, data_digest: str) -> dict[str, str]:
    """Returns the facts that must be the same in every process."""
    return software() | {"config digest": _digest(dump_config(config)), "data digest": data_digest[:12]}


def host_names(identity: Identity) -> dict[int, str]:
    """Returns a name for the machine of each process, which is unique to the machine. Several processes may share one.

    Machines are distinguished by the boot id of their kernel, not by host name, because containers on one machine have
    different host names, and machines started from one image may all have the same host name.
    """
    if identity.alone:
        return {0: socket.gethostname()}
    machines = gather("every process has named its host", (machine_id(), socket.gethostname()), identity)
    if machines is None:
        return unpack_hosts(broadcast("the hosts", None, identity))
    names: dict[str, str] = {}
    used_names: set[str] = set()
    for process, (machine, host) in enumerate(machines):
        if machine not in names:
            names[machine] = f"{host} (of process {process})" if host in used_names else host
            used_names.add(names[machine])
    hosts = [names[machine] for machine, _ in machines]
    broadcast("the hosts", pack_hosts(hosts), identity)
    return dict(enumerate(hosts))


def machine_id() -> str:
    """Returns an identifier of this machine: the boot id of its kernel or, without one, its host name."""
    return text_in_file(Path("/proc/sys/kernel/random/boot_id")) or socket.gethostname()


def _native_log(run_dir: Path, identity: Identity) -> Path:
    """Returns the file for the output of native libraries. Raises `ConfigError` if it cannot be written."""
    path = run_dir / "native" / f"{identity.process_id}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise ConfigError(f"run.dir: cannot write {path}: {error.strerror}; choose another run.dir") from error
    return path


@contextmanager
def _redirect_native_output(path: str) -> Iterator[None]:
    """Redirects the output of native libraries to `path`, while Python's own stdout stays where it is.

    Gloo prints a line for every connection to file descriptor 1, which would spoil progress lines and JSON.
    """
    sys.stdout.flush()
    original = os.dup(1)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.close(log)
    previous_stdout = sys.stdout
    sys.stdout = never_failing_stream(previous_stdout, original, line_buffering=True)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(original, 1)
        os.close(original)
        sys.stdout = previous_stdout


_PACKAGES_OF_SOFTWARE = {
    "jax version": ("jax",),
    "jaxlib version": ("jaxlib",),
    "CUDA plugin version": ("jax-cuda12-plugin", "jax-cuda13-plugin"),
    "NCCL version": ("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
}
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def software() -> dict[str, str]:
    """Returns the versions of all software that a run depends on, and a digest of jaxmnt's own code. The version of
    missing software is `none`."""
    versions = {"jaxmnt version": jaxmnt.__version__, "jaxmnt's code": _code_digest()}
    for name, packages in _PACKAGES_OF_SOFTWARE.items():
        versions[name] = next(filter(None, map(_version, packages)), "none")
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        versions["driver version"] = _driver_version()
    return versions


def environment_digest() -> str:
    """Returns a digest of the names and versions of all Python packages that this process could import."""
    packages = {f"{package.metadata['Name']}=={package.version}" for package in distributions()}
    return _digest("\n".join(sorted(packages)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _code_digest() -> str:
    """Returns a digest of all source files of the package and their names."""
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


def _driver_version() -> str:
    text = text_in_file(_DRIVER_FILE)
    if not text:
        return "none"
    match = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", text)
    return match[1] if match else "unknown"
