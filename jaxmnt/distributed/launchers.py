"""What the environment of a process says about its place in a run: one reader for each kind of launcher.

A reader takes variables and gives a `Claim`, or None where there is nothing of its launcher. It never guesses: what a
launcher should have said and did not is the claim's `trouble`.
"""

import ipaddress
import re
import socket
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from jaxmnt.distributed.hostlist import counts_in, hosts_in
from jaxmnt.distributed.local_gpus import Neighbours
from jaxmnt.errors import ConfigError, printable, shortened

Environment = Mapping[str, str]
_Item = TypeVar("_Item")

DEFAULT_PORT = 12355
_FIRST_PORT, _PORTS = 61440, 4096
"""Above those that Linux gives away by itself (net.ipv4.ip_local_port_range)."""
_LOCALHOST = "127.0.0.1"
_LARGEST = 2**32 - 1
"""No number of a process, host, job or step is larger anywhere."""


@dataclass(frozen=True)
class Machine:
    """What a reader needs to know of this machine."""

    hostname: str
    domain: str
    """What /etc/hosts adds to the host name; empty if nothing."""

    @classmethod
    def this(cls) -> "Machine":
        hostname = socket.gethostname()
        try:
            lines = Path("/etc/hosts").read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        names = (name for line in lines for name in line.partition("#")[0].split()[1:])
        longer = next((name for name in names if name.startswith(f"{hostname}.")), "")
        return cls(hostname, longer.partition(".")[2])


@dataclass(frozen=True)
class Claim:
    """What one launcher says. What is None it did not say."""

    launcher: str
    process_id: int | None = None
    processes: int | None = None
    coordinator: str | None = None
    """HOST:PORT."""
    neighbours: Neighbours = field(default_factory=Neighbours)
    used: dict[str, str] = field(default_factory=dict)
    """The variables that it was read from."""
    trouble: str = ""
    """Why this cannot be gone by, and what to do; empty if it can."""

    def __str__(self) -> str:
        if self.processes is None or self.process_id is None:
            return self.launcher
        return f"{self.launcher} says process {self.process_id} of {self.processes} ({shown(self.used)})"


def shown(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={printable(value)}" for name, value in variables.items())


def slurm(environment: Environment, machine: Machine) -> Claim | None:
    """A task of `srun`. What else is in an allocation (a batch script, the shell of salloc) is no process of a run."""
    if not environment.get("SLURM_JOB_ID"):
        return None
    job = number_of("SLURM_JOB_ID", environment["SLURM_JOB_ID"])
    step = environment.get("SLURM_STEP_ID", "")
    if step in _NAMES_OF_SPECIAL_STEPS or number_of("SLURM_STEP_ID", step) >= _FIRST_SPECIAL_STEP:
        return _outside_srun(environment)
    if number_of("SLURM_HET_SIZE", environment.get("SLURM_HET_SIZE") or "1") > 1:
        return Claim("slurm", trouble="a heterogeneous Slurm job has no single list of tasks; set cluster.* by hand")
    read = _Reader("slurm", environment)
    processes, process_id = read.number("SLURM_STEP_NUM_TASKS"), read.number("SLURM_PROCID")
    if processes == 1 and {environment.get(name, "1") for name in ("SLURM_NTASKS", "SLURM_NNODES")} != {"1"}:
        return _outside_srun(environment)  # an interactive shell, in a step that keeps the allocation's variables
    node, local = read.number("SLURM_NODEID"), read.number("SLURM_LOCALID")
    hosts, tasks = read.listed("SLURM_STEP_NODELIST", hosts_in), read.listed("SLURM_STEP_TASKS_PER_NODE", counts_in)
    if len(hosts) != len(tasks) or sum(tasks) != processes or node >= len(hosts) or local >= tasks[node]:
        raise ConfigError(f"the variables of Slurm contradict each other: {shown(read.used)}; start with srun")
    gpus = read.optional_number("SLURM_GPUS_ON_NODE")
    read.optional_number("SLURM_RESTART_COUNT")  # for people: how often the job was requeued
    port = _FIRST_PORT + (job + 509 * int(step)) % _PORTS
    first = hosts[0] if len(hosts) > 1 else _LOCALHOST
    return Claim(
        "slurm", process_id, processes, f"{first}:{port}", Neighbours(local, tasks[node], gpus), read.used
    )  # fmt: skip


_FIRST_SPECIAL_STEP = 2**32 - 16
"""From here on Slurm numbers what is no step of srun's."""
_NAMES_OF_SPECIAL_STEPS = ("", "interactive", "batch", "extern")


def _outside_srun(environment: Environment) -> Claim:
    names = ("SLURM_NTASKS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS_PER_NODE")
    asked = next((text for name in names if (text := environment.get(name, "1")) not in ("", "1")), None)
    job = environment["SLURM_JOB_ID"]
    trouble = (
        f"this process is in Slurm job {job} with {asked} tasks or nodes, but srun did not start it; start it with "
        "srun, or set cluster.launcher=explicit for a single-process run"
    )
    return Claim("slurm", used={"SLURM_JOB_ID": job}, trouble=trouble if asked else "")


def kubernetes(environment: Environment, machine: Machine) -> Claim | None:
    """A pod of an Indexed Job, alone or in a JobSet, with a headless service.

    The index comes from Kubernetes; the name of pod 0 follows from this one's. No right to ask the API server is
    needed. How many pods there are only the manifest knows (`JAX_NUM_PROCESSES`). In a JobSet of several jobs the
    manifest also hands in the label `job-global-index` as `JOB_GLOBAL_INDEX`, the pods of each as `PROCESSES_IN_JOB`,
    and `JAX_COORDINATOR_ADDRESS`.
    """
    if "JOB_COMPLETION_INDEX" not in environment:
        return None
    read = _Reader("kubernetes", environment)
    index, job, pods = (
        read.number("JOB_COMPLETION_INDEX"),
        read.optional_number("JOB_GLOBAL_INDEX"),
        read.optional_number("PROCESSES_IN_JOB"),
    )
    if pods is not None and index >= pods:
        raise ConfigError(
            f"JOB_COMPLETION_INDEX: {index} is beyond the {pods} pods of its job ({shown(read.used)}); set "
            "PROCESSES_IN_JOB to the completions of each job"
        )
    if job is not None and pods is not None:
        return Claim("kubernetes", job * pods + index, used=read.used)
    service = machine.domain.partition(".")[0]
    of_jobset = re.fullmatch(rf"{re.escape(service)}-.+-([0-9]+)-[0-9]+", machine.hostname) if service else None
    if (of_jobset and int(of_jobset[1]) > 0) or job:
        return Claim(
            "kubernetes",
            used=read.used,
            trouble=f"pod {machine.hostname} is in one of several jobs of a JobSet, and how many pods each has is not "
            "known; set JOB_GLOBAL_INDEX (from the label jobset.sigs.k8s.io/job-global-index) and PROCESSES_IN_JOB",
        )
    if not service or not machine.hostname.endswith(f"-{index}"):
        return Claim("kubernetes", index, used=read.used)
    first = machine.hostname.removesuffix(str(index)) + "0"
    used = read.used | {"host name": f"{machine.hostname}.{machine.domain}"}
    return Claim("kubernetes", index, None, f"{first}.{machine.domain}:{DEFAULT_PORT}", used=used)


def mpi(environment: Environment, machine: Machine) -> Claim | None:
    """A process of Open MPI's mpirun, of PRRTE's prun, or of Hydra's mpiexec (MPICH, Intel MPI)."""
    names = next((names for names in _MPI_NAMES if environment.get(names[0])), None)
    if names is None:
        return None
    read = _Reader("mpi", environment)
    process_id = read.number(names[0])
    processes, local, together = map(read.optional_number, names[1:])
    if processes is None:
        return Claim("mpi", process_id, used=read.used)
    _check_local(local, together, read.used)
    found = re.match(r"([0-9]+)\.[0-9]+;tcp6?://(\[[^\]]+\]|[^:,\[]+)", environment.get(_HEAD, ""))
    port = _FIRST_PORT + zlib.crc32(found[1].encode()) % _PORTS if found else DEFAULT_PORT
    coordinator = f"{_LOCALHOST}:{port}" if together == processes else f"{found[2]}:{port}" if found else None
    if found:
        read.used[_HEAD] = environment[_HEAD]
    return Claim("mpi", process_id, processes, coordinator, Neighbours(local or 0, together or 1), read.used)


_MPI_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE"),
)
"""Rank, count, and the same on this machine."""
_HEAD = "OMPI_MCA_orte_hnp_uri"
"""Where mpirun itself runs."""


def torchrun(environment: Environment, machine: Machine) -> Claim | None:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun and many launchers set them."""
    rank, size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    if not rank and size in ("", "1"):
        return None
    read = _Reader("torchrun", environment)
    if not rank or not size:
        if rank == "0":
            return Claim("torchrun", used={"RANK": "0"})
        return Claim(
            "torchrun",
            used={name: environment[name] for name in ("RANK", "WORLD_SIZE") if environment.get(name)},
            trouble="RANK and WORLD_SIZE belong together, and only one is set; set both, or unset what is left over",
        )
    process_id, processes = read.number("RANK"), read.number("WORLD_SIZE")
    local, together = read.optional_number("LOCAL_RANK"), read.optional_number("LOCAL_WORLD_SIZE")
    host = _master(environment.get("MASTER_ADDR", "").strip())
    port = read.optional_number("MASTER_PORT") or DEFAULT_PORT
    _check_local(local, together, read.used)
    if host:
        read.used["MASTER_ADDR"] = environment["MASTER_ADDR"]
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1  # torchrun's own store listens on that port
    name = f"[{host}]" if host and ":" in host else host
    return Claim(
        "torchrun", process_id, processes, f"{name}:{port}" if name else None,
        Neighbours(local or 0, together or 1), read.used,
    )  # fmt: skip


def _master(text: str) -> str:
    """Returns the host that MASTER_ADDR names, without brackets; empty if it names none."""
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if is_address(host) or re.fullmatch(r"[^\s/:\[\]]*", host):
        return host
    if (found := re.fullmatch(r"(.+):([0-9]+)", text)) and (is_address(found[1].strip("[]")) or ":" not in found[1]):
        better = printable(f"MASTER_ADDR={found[1].strip('[]')} MASTER_PORT={found[2]}")
        raise ConfigError(f"MASTER_ADDR: {shortened(repr(text))} has a port in it; set {better}")
    raise ConfigError(f"MASTER_ADDR: {shortened(repr(text))} must be the name or the address of a host; correct it")


def is_address(text: str) -> bool:
    """Returns whether a text is an IP address, without brackets."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _check_local(rank: int | None, processes: int | None, used: Mapping[str, str]) -> None:
    if rank is not None and processes is not None and rank >= processes:
        raise ConfigError(
            f"process {rank} of {processes} on its host is out of range ({shown(used)}); correct the variables"
        )


LAUNCHERS: dict[str, Callable[[Environment, Machine], Claim | None]] = {
    "slurm": slurm,
    "kubernetes": kubernetes,
    "mpi": mpi,
    "torchrun": torchrun,
}
"""In the order in which they count."""


def claims(environment: Environment, machine: Machine) -> list[Claim]:
    """What all launchers say whose variables are there. A claim whose variables make no sense is in trouble."""
    found = []
    for name, reader in LAUNCHERS.items():
        try:
            claim = reader(environment, machine)
        except ConfigError as error:
            claim = Claim(name, trouble=str(error))
        if claim is not None:
            found.append(_checked(claim))
    return found


def _checked(claim: Claim) -> Claim:
    """A process's number must be below their count."""
    if claim.trouble or claim.processes is None or claim.process_id is None or claim.process_id < claim.processes:
        return claim
    return replace(claim, trouble=f"{claim}, which is out of range; correct the variables or unset them")


class _Reader:
    """Takes variables of one launcher out of an environment, and remembers which.

    Its methods raise `ConfigError` for a variable that is missing or makes no sense.
    """

    def __init__(self, launcher: str, environment: Environment):
        self._launcher, self._environment = launcher, environment
        self.used: dict[str, str] = {}

    def number(self, name: str) -> int:
        found = self.optional_number(name)
        if found is None:
            raise ConfigError(
                f"{name}: missing, though other variables of {self._launcher} are set; set or unset all, or set "
                "cluster.launcher=explicit for a single-process run"
            )
        return found

    def optional_number(self, name: str) -> int | None:
        text = self._environment.get(name, "").strip()
        if not text:
            return None
        number = number_of(name, text)
        self.used[name] = text
        return number

    def listed(self, name: str, parse: Callable[[str], list[_Item]]) -> list[_Item]:
        self.used[name] = text = self._environment.get(name, "")
        try:
            return parse(text)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}; start with srun") from error


def number_of(name: str, text: str, least: int = 0, most: int = _LARGEST) -> int:
    """The number that variable `name` holds. Raises `ConfigError` for anything but ASCII digits, and beyond bounds."""
    text = text.strip()
    if not re.fullmatch(r"[0-9]{1,20}", text):
        raise ConfigError(f"{name}: {shortened(text)!r} is not a number; correct the environment variable")
    if not least <= int(text) <= most:
        raise ConfigError(f"{name}: {text} is not between {least} and {most}; correct the environment variable")
    return int(text)
