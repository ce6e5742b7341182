"""Which process of how many this is, and which GPUs are its own: from the config, or from what started it."""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxmnt.config.schema import Cluster
from jaxmnt.distributed.launchers import LAUNCHERS, Claim, Machine, claims, is_address, number_of, shown
from jaxmnt.distributed.local_gpus import gpus_here, own_gpus
from jaxmnt.errors import ConfigError, printable, shortened

VARIABLES = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
"""The same names that JAX itself reads."""

_PROCESSES_AT_MOST = 100_000


@dataclass(frozen=True)
class Identity:
    """This process's place in the run. `coordinator` is None when it is alone."""

    process_id: int = 0
    processes: int = 1
    coordinator: str | None = None
    local_devices: tuple[int, ...] | None = None
    """Its GPUs, by their places among those that it sees; None is all of them."""

    @property
    def alone(self) -> bool:
        return self.processes == 1

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of process 0."""
        assert self.coordinator is not None
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def label(self) -> str:
        """`process 1 of 4 on HOST`, or nothing when alone."""
        return "" if self.alone else f"process {self.process_id} of {self.processes} on {socket.gethostname()}"


def is_loopback(host: str) -> bool:
    """Whether a name or an address means the machine that asks."""
    return host in ("localhost", "::1") or host.startswith("127.")


@dataclass(frozen=True)
class Survey:
    """Everything that is said about this process's place, and what comes of it."""

    identity: Identity
    source: str
    """Whose word it is; empty for a process about which nobody says anything."""
    read: dict[str, str]
    """The settings and variables that it came from."""
    ignored: dict[str, str]
    """What else was there, by launcher, and why it was not gone by."""


def identify(cluster: Cluster, gpus: int | None = None) -> Identity:
    """The identity that `survey` finds for this process."""
    return survey(cluster, gpus=gpus).identity


def survey(
    cluster: Cluster,
    environment: Mapping[str, str] = os.environ,
    machine: Machine | None = None,
    gpus: int | None = None,
) -> Survey:
    """The identity from `cluster`, each missing setting from JAX's variables, then from the launcher's, and how it came
    about.

    `gpus` are those of this machine; default is to count them. Raises `ConfigError` when what is said is incomplete or
    contradicts itself.
    """
    chosen = cluster.launcher
    explicit = _explicit(cluster, environment)
    said = claims(environment, machine or Machine.this())
    asked = [claim for claim in said if chosen in ("auto", claim.launcher)]
    heard = [claim for claim in asked if not claim.trouble]
    full = list(filter(_complete, (_over(explicit, claim) for claim in heard)))
    if _complete(explicit):
        full.insert(0, _over(explicit, heard[0]) if heard else explicit)
    trouble = next((claim.trouble for claim in asked if claim.trouble), "")
    if not full:
        _refuse_what_is_incomplete(chosen, explicit, heard, trouble)
    winner = full[0] if full else Claim("")
    _refuse_contradictions([explicit, *heard])
    if trouble and winner.launcher != "explicit" and winner.processes == 1:
        raise ConfigError(trouble)  # this would be a single process where somebody asked for several
    identity = _identity(winner, _devices(cluster, winner, environment, gpus))
    return Survey(identity, winner.launcher, winner.used, _ignored(said, asked, winner))


def _explicit(cluster: Cluster, environment: Mapping[str, str]) -> Claim:
    """What people, and `launch local`, say: the config, then JAX's variables."""
    found, used = {}, {}
    for name, variable in VARIABLES.items():
        setting, text = getattr(cluster, name), environment.get(variable)
        if setting is not None:
            found[name], used[f"cluster.{name}"] = setting, str(setting)
        elif text:
            is_number = name != "coordinator"
            found[name] = number_of(variable, text, least=int(name == "processes")) if is_number else text
            used[variable] = text
    return Claim("explicit", used=used, **found)


def _over(explicit: Claim, claim: Claim) -> Claim:
    """A launcher's claim, with what was said explicitly in the place of what it says."""
    given = {name: value for name in VARIABLES if (value := getattr(explicit, name)) is not None}
    launcher = "explicit" if len(given) == len(VARIABLES) else claim.launcher
    return replace(claim, **given, launcher=launcher, used=explicit.used | claim.used)


def _complete(claim: Claim) -> bool:
    return claim.processes == 1 or None not in (claim.processes, claim.process_id, claim.coordinator)


def _refuse_what_is_incomplete(chosen: str, explicit: Claim, heard: list[Claim], trouble: str) -> None:
    """Raises `ConfigError` unless nothing at all is said."""
    if trouble:
        raise ConfigError(trouble)
    if chosen in LAUNCHERS and not heard:
        raise ConfigError(
            f"cluster.launcher: {chosen} is set, but none of its environment variables are; start "
            f"with {chosen}, or set auto"
        )
    claim = next((_over(explicit, one) for one in heard if one.process_id is not None), explicit)
    whose = f" ({shown(claim.used)})" if claim.used else ""
    if claim.processes is None and (claim.coordinator or claim.process_id is not None):
        raise ConfigError(
            f"cluster.processes: missing, although a coordinator or process id is set{whose}; set it or "
            f"{VARIABLES['processes']} (1 for a single-process run)"
        )
    if claim.processes is not None and claim.process_id is None:
        raise ConfigError(
            f"cluster.process_id: missing, with {claim.processes} processes{whose}; set it or {VARIABLES['process_id']}"
        )
    if claim.processes is not None and not claim.coordinator:
        raise ConfigError(
            f"cluster.coordinator: missing, with {claim.processes} processes{whose}; "
            f"set it or {VARIABLES['coordinator']} to HOST:PORT of process 0"
        )


def _refuse_contradictions(said: list[Claim]) -> None:
    """Raises `ConfigError` if two say different things: the number of this process, or of all."""
    for name in ("processes", "process_id"):
        known = [claim for claim in said if getattr(claim, name) is not None]
        for claim in known[1:]:
            one, other = getattr(known[0], name), getattr(claim, name)
            if one != other:
                raise ConfigError(
                    f"cluster.{name}: {known[0].launcher} says {_with_source(one, known[0])}, {claim.launcher} "
                    f"says {_with_source(other, claim)}; unset what is stale, or set "
                    f"cluster.launcher={known[0].launcher} or {claim.launcher} to ignore the other"
                )


def _with_source(value: int, claim: Claim) -> str:
    return f"{value} ({shown({name: text for name, text in claim.used.items() if text == str(value)})})"


def _devices(
    cluster: Cluster, winner: Claim, environment: Mapping[str, str], gpus: int | None
) -> tuple[int, ...] | None:
    if cluster.local_devices is not None:
        return tuple(cluster.local_devices)
    if environment.get("JAX_PLATFORMS") == "cpu":
        return None
    return own_gpus(winner.neighbours, environment, gpus_here() if gpus is None else gpus)


def _identity(winner: Claim, devices: tuple[int, ...] | None) -> Identity:
    processes, process_id = winner.processes or 1, winner.process_id or 0
    if process_id >= processes:
        raise ConfigError(
            f"cluster.process_id: {process_id} is out of range for {processes} processes "
            f"(0 to {processes - 1}); correct it or cluster.processes"
        )
    if processes > _PROCESSES_AT_MOST:
        raise ConfigError(f"cluster.processes: {processes} are more than {_PROCESSES_AT_MOST}; correct it")
    if processes == 1:
        return Identity(local_devices=devices)
    assert winner.coordinator is not None
    found = re.fullmatch(r"([^\s/]{1,255}):([0-9]{1,5})", winner.coordinator)
    if not found or not _names_a_host(found[1]) or is_address(winner.coordinator) or not 0 < int(found[2]) < 65536:
        shown = shortened(winner.coordinator)
        raise ConfigError(f"cluster.coordinator: {shown!r} is not HOST:PORT, such as node0:12355 or [::1]:12355")
    return Identity(process_id, processes, winner.coordinator, devices)


def _names_a_host(text: str) -> bool:
    """Returns whether a text is a name or an address of a host; an IPv6 address may have brackets, and nothing else."""
    inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return text.isprintable() and (is_address(inside) or (inside == text and not set(text) & set(":[]")))


def _ignored(said: list[Claim], asked: list[Claim], winner: Claim) -> dict[str, str]:
    ignored = {}
    for claim in said:
        if claim not in asked:
            ignored[claim.launcher] = f"another launcher was chosen ({shown(claim.used)})"
        elif claim.trouble:
            ignored[claim.launcher] = claim.trouble
        elif claim.launcher != winner.launcher:
            what = "does not say which process this is"
            if claim.process_id is not None:
                what = "says the same"
                if claim.coordinator not in (None, winner.coordinator):
                    what += f", but that process 0 is at {printable(str(claim.coordinator))}"
            ignored[claim.launcher] = f"{what} ({shown(claim.used)})"
    return ignored
