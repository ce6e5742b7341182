"""Reads the identity of a process from the variables of its launcher: one reader for each kind of launcher.

A reader returns an `IdentityClaim`, or None if no variable of its launcher is set. It never guesses. If information is
missing, the claim's `problem` says which.
"""

import ipaddress
import re
import socket
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from jaxmnt.distributed.hostlist import expand_counts, expand_hostlist
from jaxmnt.distributed.local_gpus import Neighbours
from jaxmnt.errors import ConfigError, printable, shortened

Environment = Mapping[str, str]
_Item = TypeVar("_Item")

DEFAULT_PORT = 12355
_FIRST_PORT, _NUM_PORTS = 61440, 4096
"""The first of the ports above those that Linux assigns by itself (net.ipv4.ip_local_port_range), and how many of them
are used."""
_LOCALHOST = "127.0.0.1"
_MAX_NUMBER = 2**32 - 1
"""Maximum number of a process, host, job or step in any launcher."""


@dataclass(frozen=True)
class Machine:
    """Properties of this machine that readers need."""

    hostname: str
    domain: str
    """Domain of the host name in /etc/hosts; empty if there is none."""

    @classmethod
    def this(cls) -> "Machine":
        hostname = socket.gethostname()
        try:
            lines = Path("/etc/hosts").read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        names = (name for line in lines for name in line.partition("#")[0].split()[1:])
        full_name = next((name for name in names if name.startswith(f"{hostname}.")), "")
        return cls(hostname, full_name.partition(".")[2])


@dataclass(frozen=True)
class IdentityClaim:
    """The identity of this process, as one launcher describes it. Fields that the launcher leaves out are None."""

    launcher: str
    process_id: int | None = None
    processes: int | None = None
    coordinator: str | None = None
    """HOST:PORT."""
    neighbours: Neighbours = field(default_factory=Neighbours)
    values_read: dict[str, str] = field(default_factory=dict)
    """Variables that the claim was read from, with their values."""
    problem: str = ""
    """Why the claim cannot be used, and what to do about it; empty if it can be used."""

    def __str__(self) -> str:
        if self.processes is None or self.process_id is None:
            return self.launcher
        return (
            f"{self.launcher} says process {self.process_id} of {self.processes} ({format_variables(self.values_read)})"
        )


def format_variables(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={printable(value)}" for name, value in variables.items())


def slurm(environment: Environment, machine: Machine) -> IdentityClaim | None:
    """Returns what Slurm says about this process's identity, if it is a task of `srun`.

    Other programs in an allocation (a batch script, the shell of salloc) are not processes of a run.
    """
    if not environment.get("SLURM_JOB_ID"):
        return None
    job = parse_number("SLURM_JOB_ID", environment["SLURM_JOB_ID"])
    step = environment.get("SLURM_STEP_ID", "")
    if step in _NAMES_OF_SPECIAL_STEPS or parse_number("SLURM_STEP_ID", step) >= _FIRST_SPECIAL_STEP:
        return _outside_srun(environment)
    if parse_number("SLURM_HET_SIZE", environment.get("SLURM_HET_SIZE") or "1") > 1:
        return IdentityClaim(
            "slurm", problem="a heterogeneous Slurm job has no single list of tasks; set cluster.* by hand"
        )
    reader = _Reader("slurm", environment)
    processes, process_id = reader.number("SLURM_STEP_NUM_TASKS"), reader.number("SLURM_PROCID")
    if processes == 1 and {environment.get(name, "1") for name in ("SLURM_NTASKS", "SLURM_NNODES")} != {"1"}:
        return _outside_srun(environment)  # an interactive shell, in a step that keeps the allocation's variables
    node = reader.number("SLURM_NODEID")
    local_rank = reader.number("SLURM_LOCALID")
    hosts = reader.parsed("SLURM_STEP_NODELIST", expand_hostlist)
    tasks = reader.parsed("SLURM_STEP_TASKS_PER_NODE", expand_counts)
    if len(hosts) != len(tasks) or sum(tasks) != processes or node >= len(hosts) or local_rank >= tasks[node]:
        raise ConfigError(
            f"the variables of Slurm contradict each other: {format_variables(reader.values_read)}; start with srun"
        )
    gpus = reader.optional_number("SLURM_GPUS_ON_NODE")
    reader.optional_number("SLURM_RESTART_COUNT")  # read only to be shown: how often the job was requeued
    # All tasks compute the same port, but different steps of a job compute different ports.
    port = _FIRST_PORT + (job + 509 * int(step)) % _NUM_PORTS
    first = hosts[0] if len(hosts) > 1 else _LOCALHOST
    return IdentityClaim(
        "slurm", process_id, processes, f"{first}:{port}", Neighbours(local_rank, tasks[node], gpus), reader.values_read
    )  # fmt: skip


_FIRST_SPECIAL_STEP = 2**32 - 16
"""First of the step numbers that Slurm gives to steps that srun did not start."""
_NAMES_OF_SPECIAL_STEPS = ("", "interactive", "batch", "extern")


def _outside_srun(environment: Environment) -> IdentityClaim:
    """Returns the claim for a process of a Slurm job that srun did not start. Its `problem` is set if the job has
    several tasks or nodes."""
    names = ("SLURM_NTASKS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS_PER_NODE")
    count = next((text for name in names if (text := environment.get(name, "1")) not in ("", "1")), None)
    job = environment["SLURM_JOB_ID"]
    problem = (
        f"this process is in Slurm job {job} with {count} tasks or nodes, but srun did not start it; start it with "
        "srun, or set cluster.launcher=explicit for a single-process run"
    )
    return IdentityClaim("slurm", values_read={"SLURM_JOB_ID": job}, problem=problem if count else "")


def kubernetes(environment: Environment, machine: Machine) -> IdentityClaim | None:
    """Returns what Kubernetes says about this process's identity, if it is a pod of an Indexed Job.

    The job runs by itself or in a JobSet, with a headless service.

    Kubernetes sets the index, and the name of pod 0 follows from this pod's name. No access to the API server is
    needed. The manifest must provide the number of pods (`JAX_NUM_PROCESSES`). In a JobSet of several jobs it must also
    provide the label `job-global-index` as `JOB_GLOBAL_INDEX`, the pods of each job as `PROCESSES_IN_JOB`, and
    `JAX_COORDINATOR_ADDRESS`.
    """
    if "JOB_COMPLETION_INDEX" not in environment:
        return None
    reader = _Reader("kubernetes", environment)
    index = reader.number("JOB_COMPLETION_INDEX")
    job = reader.optional_number("JOB_GLOBAL_INDEX")
    pods = reader.optional_number("PROCESSES_IN_JOB")
    if pods is not None and index >= pods:
        raise ConfigError(
            f"JOB_COMPLETION_INDEX: {index} is beyond the {pods} pods of its job "
            f"({format_variables(reader.values_read)}); set PROCESSES_IN_JOB to the completions of each job"
        )
    if job is not None and pods is not None:
        return IdentityClaim("kubernetes", job * pods + index, values_read=reader.values_read)
    service = machine.domain.partition(".")[0]
    in_jobset = re.fullmatch(rf"{re.escape(service)}-.+-([0-9]+)-[0-9]+", machine.hostname) if service else None
    if (in_jobset and int(in_jobset[1]) > 0) or job:
        return IdentityClaim(
            "kubernetes",
            values_read=reader.values_read,
            problem=f"pod {machine.hostname} is in one of several jobs of a JobSet, and how many pods each has is not "
            "known; set JOB_GLOBAL_INDEX (from the label jobset.sigs.k8s.io/job-global-index) and PROCESSES_IN_JOB",
        )
    if not service or not machine.hostname.endswith(f"-{index}"):
        return IdentityClaim("kubernetes", index, values_read=reader.values_read)
    first = machine.hostname.removesuffix(str(index)) + "0"
    values_read = reader.values_read | {"host name": f"{machine.hostname}.{machine.domain}"}
    return IdentityClaim("kubernetes", index, None, f"{first}.{machine.domain}:{DEFAULT_PORT}", values_read=values_read)


def mpi(environment: Environment, machine: Machine) -> IdentityClaim | None:
    """Returns what MPI says about this process's identity, if it was started by Open MPI's mpirun, by PRRTE's prun, or
    by Hydra's mpiexec (MPICH, Intel MPI)."""
    names = next((names for names in _MPI_NAMES if environment.get(names[0])), None)
    if names is None:
        return None
    reader = _Reader("mpi", environment)
    process_id = reader.number(names[0])
    processes, local_rank, local_processes = map(reader.optional_number, names[1:])
    if processes is None:
        return IdentityClaim("mpi", process_id, values_read=reader.values_read)
    _check_local(local_rank, local_processes, reader.values_read)
    # The job's number in mpirun's URI gives each job a different port. The address in it is that of mpirun's host,
    # on which process 0 is assumed to run.
    uri = re.match(r"([0-9]+)\.[0-9]+;tcp6?://(\[[^\]]+\]|[^:,\[]+)", environment.get(_MPIRUN_URI, ""))
    port = _FIRST_PORT + zlib.crc32(uri[1].encode()) % _NUM_PORTS if uri else DEFAULT_PORT
    coordinator = None
    if local_processes == processes:
        coordinator = f"{_LOCALHOST}:{port}"
    elif uri:
        coordinator = f"{uri[2]}:{port}"
    if uri:
        reader.values_read[_MPIRUN_URI] = environment[_MPIRUN_URI]
    neighbours = Neighbours(local_rank or 0, local_processes or 1)
    return IdentityClaim("mpi", process_id, processes, coordinator, neighbours, reader.values_read)


_MPI_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE"),
)
"""Variables for the rank and the number of processes in the run, and the same on this machine."""
_MPIRUN_URI = "OMPI_MCA_orte_hnp_uri"
"""Variable with the job's number and the address of mpirun itself."""


def torchrun(environment: Environment, machine: Machine) -> IdentityClaim | None:
    """Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun and many other launchers set them."""
    rank, size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    if not rank and size in ("", "1"):
        return None
    reader = _Reader("torchrun", environment)
    if not rank or not size:
        if rank == "0":
            return IdentityClaim("torchrun", values_read={"RANK": "0"})
        return IdentityClaim(
            "torchrun",
            values_read={name: environment[name] for name in ("RANK", "WORLD_SIZE") if environment.get(name)},
            problem="RANK and WORLD_SIZE belong together, but only one is set; set both, or unset the other",
        )
    process_id = reader.number("RANK")
    processes = reader.number("WORLD_SIZE")
    local_rank = reader.optional_number("LOCAL_RANK")
    local_processes = reader.optional_number("LOCAL_WORLD_SIZE")
    host = _parse_master(environment.get("MASTER_ADDR", "").strip())
    port = reader.optional_number("MASTER_PORT") or DEFAULT_PORT
    _check_local(local_rank, local_processes, reader.values_read)
    if host:
        reader.values_read["MASTER_ADDR"] = environment["MASTER_ADDR"]
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1  # torchrun's own store listens on that port
    name = f"[{host}]" if host and ":" in host else host
    return IdentityClaim(
        "torchrun", process_id, processes, f"{name}:{port}" if name else None,
        Neighbours(local_rank or 0, local_processes or 1), reader.values_read,
    )  # fmt: skip


def _parse_master(text: str) -> str:
    """Returns the host in MASTER_ADDR, without brackets; empty if there is none."""
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if is_address(host) or re.fullmatch(r"[^\s/:\[\]]*", host):
        return host
    match = re.fullmatch(r"(.+):([0-9]+)", text)
    if match and (is_address(match[1].strip("[]")) or ":" not in match[1]):
        correction = printable(f"MASTER_ADDR={match[1].strip('[]')} MASTER_PORT={match[2]}")
        raise ConfigError(f"MASTER_ADDR: {shortened(repr(text))} has a port in it; set {correction}")
    raise ConfigError(f"MASTER_ADDR: {shortened(repr(text))} must be the name or the address of a host; correct it")


def is_address(text: str) -> bool:
    """Returns True if a text is an IP address, without brackets."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _check_local(rank: int | None, processes: int | None, values_read: Mapping[str, str]) -> None:
    if rank is not None and processes is not None and rank >= processes:
        raise ConfigError(
            f"process {rank} of {processes} on its host is out of range ({format_variables(values_read)}); correct the "
            "variables"
        )


LAUNCHERS: dict[str, Callable[[Environment, Machine], IdentityClaim | None]] = {
    "slurm": slurm,
    "kubernetes": kubernetes,
    "mpi": mpi,
    "torchrun": torchrun,
}
"""The reader of each launcher, in order of precedence."""


def claims(environment: Environment, machine: Machine) -> list[IdentityClaim]:
    """Returns the claims of all launchers whose variables are set. A claim with invalid variables has a `problem`."""
    all_claims = []
    for name, read_claim in LAUNCHERS.items():
        try:
            claim = read_claim(environment, machine)
        except ConfigError as error:
            claim = IdentityClaim(name, problem=str(error))
        if claim is not None:
            all_claims.append(_check_range(claim))
    return all_claims


def _check_range(claim: IdentityClaim) -> IdentityClaim:
    """Returns the claim. If the process's number is not below the number of processes, the claim gets a `problem`."""
    if claim.problem or claim.processes is None or claim.process_id is None or claim.process_id < claim.processes:
        return claim
    return replace(claim, problem=f"{claim}, which is out of range; correct the variables or unset them")


class _Reader:
    """Reads variables of one launcher, and records in `values_read` which it has read.

    The methods raise `ConfigError` for a variable that is missing or invalid.
    """

    def __init__(self, launcher: str, environment: Environment):
        self._launcher, self._environment = launcher, environment
        self.values_read: dict[str, str] = {}

    def number(self, name: str) -> int:
        number = self.optional_number(name)
        if number is None:
            raise ConfigError(
                f"{name}: missing, though other variables of {self._launcher} are set; set or unset all, or set "
                "cluster.launcher=explicit for a single-process run"
            )
        return number

    def optional_number(self, name: str) -> int | None:
        text = self._environment.get(name, "").strip()
        if not text:
            return None
        number = parse_number(name, text)
        self.values_read[name] = text
        return number

    def parsed(self, name: str, parse: Callable[[str], list[_Item]]) -> list[_Item]:
        self.values_read[name] = text = self._environment.get(name, "")
        try:
            return parse(text)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}; start with srun") from error


def parse_number(name: str, text: str, minimum: int = 0, maximum: int = _MAX_NUMBER) -> int:
    """Returns the number in `text`, which is the content of the variable `name`.

    Raises `ConfigError` for anything but ASCII digits, and for a number that is not between `minimum` and `maximum`.
    """
    text = text.strip()
    if not re.fullmatch(r"[0-9]{1,20}", text):
        raise ConfigError(f"{name}: {shortened(text)!r} is not a number; correct the environment variable")
    if not minimum <= int(text) <= maximum:
        raise ConfigError(f"{name}: {text} is not between {minimum} and {maximum}; correct the environment variable")
    return int(text)
