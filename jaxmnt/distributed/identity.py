"""Determines this process's number, the number of all processes, and its GPUs, from the config or from a launcher."""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxmnt.config.schema import Cluster
from jaxmnt.distributed.launchers import (
    LAUNCHERS,
    IdentityClaim,
    Machine,
    claims,
    format_variables,
    is_address,
    parse_number,
)
from jaxmnt.distributed.local_gpus import assigned_gpus, gpus_here
from jaxmnt.errors import ConfigError, printable, shortened

VARIABLES = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
"""The environment variable of each setting. JAX itself reads the same variables."""

_MAX_PROCESSES = 100_000


@dataclass(frozen=True)
class Identity:
    """The number of this process in the run, and how to reach process 0. `coordinator` is None in a single-process
    run."""

    process_id: int = 0
    processes: int = 1
    coordinator: str | None = None
    local_devices: tuple[int, ...] | None = None
    """Indices of this process's GPUs among the GPUs that it sees; None means all of them."""

    @property
    def alone(self) -> bool:
        return self.processes == 1

    @property
    def address(self) -> tuple[str, int]:
        """The host and port of process 0."""
        assert self.coordinator is not None
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def label(self) -> str:
        """A text such as `process 1 of 4 on HOST`; empty in a run with a single process."""
        return "" if self.alone else f"process {self.process_id} of {self.processes} on {socket.gethostname()}"


def is_loopback(host: str) -> bool:
    """Returns True if a host name or address always means the local machine."""
    return host in ("localhost", "::1") or host.startswith("127.")


@dataclass(frozen=True)
class Survey:
    """The identity of this process, and where it comes from."""

    identity: Identity
    source: str
    """Launcher that the identity comes from, or `explicit`; empty if nothing describes this process."""
    values_read: dict[str, str]
    """Settings and variables that the identity was read from, with their values."""
    ignored_launchers: dict[str, str]
    """For each launcher whose variables were ignored, the reason why."""


def identify(cluster: Cluster, gpus: int | None = None) -> Identity:
    """Returns the identity that `survey` determines for this process."""
    return survey(cluster, gpus=gpus).identity


def survey(
    cluster: Cluster,
    environment: Mapping[str, str] = os.environ,
    machine: Machine | None = None,
    gpus: int | None = None,
) -> Survey:
    """Determines the identity of this process, and where it comes from.

    Each setting comes from `cluster`, or else from JAX's variables, or else from the launcher's. `gpus` is the number
    of GPUs in this machine; None counts them. Raises `ConfigError` if the settings are incomplete or contradict each
    other.
    """
    launcher = cluster.launcher
    explicit = _explicit(cluster, environment)
    all_claims = claims(environment, machine or Machine.this())
    selected = [claim for claim in all_claims if launcher in ("auto", claim.launcher)]
    usable = [claim for claim in selected if not claim.problem]
    # Explicit settings come first, then the launchers in the order of LAUNCHERS.
    complete = list(filter(_is_complete, (_override(explicit, claim) for claim in usable)))
    if _is_complete(explicit):
        complete.insert(0, _override(explicit, usable[0]) if usable else explicit)
    problem = next((claim.problem for claim in selected if claim.problem), "")
    if not complete:
        _require_complete(launcher, explicit, usable, problem)
    winner = complete[0] if complete else IdentityClaim("")
    _check_contradictions([explicit, *usable])
    if problem and winner.launcher != "explicit" and winner.processes == 1:
        raise ConfigError(problem)  # otherwise each of several processes would start a run of its own
    identity = _identity(winner, _devices(cluster, winner, environment, gpus))
    return Survey(identity, winner.launcher, winner.values_read, _ignored_claims(all_claims, selected, winner))


def _explicit(cluster: Cluster, environment: Mapping[str, str]) -> IdentityClaim:
    """Returns the claim that a person or `launch local` makes through the config, or else through JAX's variables."""
    settings, values_read = {}, {}
    for name, variable in VARIABLES.items():
        setting, text = getattr(cluster, name), environment.get(variable)
        if setting is not None:
            settings[name] = setting
            values_read[f"cluster.{name}"] = str(setting)
        elif text:
            is_number = name != "coordinator"
            settings[name] = parse_number(variable, text, minimum=int(name == "processes")) if is_number else text
            values_read[variable] = text
    return IdentityClaim("explicit", values_read=values_read, **settings)


def _override(explicit: IdentityClaim, claim: IdentityClaim) -> IdentityClaim:
    """Returns a launcher's claim in which explicit settings replace its own."""
    overrides = {name: value for name in VARIABLES if (value := getattr(explicit, name)) is not None}
    launcher = "explicit" if len(overrides) == len(VARIABLES) else claim.launcher
    return replace(claim, **overrides, launcher=launcher, values_read=explicit.values_read | claim.values_read)


def _is_complete(claim: IdentityClaim) -> bool:
    return claim.processes == 1 or None not in (claim.processes, claim.process_id, claim.coordinator)


def _require_complete(launcher: str, explicit: IdentityClaim, usable: list[IdentityClaim], problem: str) -> None:
    """Raises `ConfigError` if any setting is present. Called if no claim is complete."""
    if problem:
        raise ConfigError(problem)
    if launcher in LAUNCHERS and not usable:
        raise ConfigError(
            f"cluster.launcher: {launcher} is set, but none of its environment variables are; start "
            f"with {launcher}, or set auto"
        )
    with_id = (_override(explicit, claim) for claim in usable if claim.process_id is not None)
    claim = next(with_id, explicit)
    source = f" ({format_variables(claim.values_read)})" if claim.values_read else ""
    if claim.processes is None and (claim.coordinator or claim.process_id is not None):
        raise ConfigError(
            f"cluster.processes: missing, although a coordinator or process id is set{source}; set it or "
            f"{VARIABLES['processes']} (1 for a single-process run)"
        )
    if claim.processes is not None and claim.process_id is None:
        raise ConfigError(
            f"cluster.process_id: missing, with {claim.processes} processes{source}; set it or "
            f"{VARIABLES['process_id']}"
        )
    if claim.processes is not None and not claim.coordinator:
        raise ConfigError(
            f"cluster.coordinator: missing, with {claim.processes} processes{source}; "
            f"set it or {VARIABLES['coordinator']} to HOST:PORT of process 0"
        )


def _check_contradictions(claims: list[IdentityClaim]) -> None:
    """Raises `ConfigError` if two claims differ in this process's number or in the number of all processes."""
    for name in ("processes", "process_id"):
        with_setting = [claim for claim in claims if getattr(claim, name) is not None]
        for claim in with_setting[1:]:
            first = with_setting[0]
            if getattr(first, name) != getattr(claim, name):
                raise ConfigError(
                    f"cluster.{name}: {first.launcher} says {_with_source(getattr(first, name), first)}, "
                    f"{claim.launcher} says {_with_source(getattr(claim, name), claim)}; unset what is stale, or set "
                    f"cluster.launcher={first.launcher} or {claim.launcher} to ignore the other"
                )


def _with_source(number: int, claim: IdentityClaim) -> str:
    sources = {name: text for name, text in claim.values_read.items() if text == str(number)}
    return f"{number} ({format_variables(sources)})"


def _devices(
    cluster: Cluster, winner: IdentityClaim, environment: Mapping[str, str], gpus: int | None
) -> tuple[int, ...] | None:
    """Returns the indices of this process's GPUs among those that it sees; None means all of them."""
    if cluster.local_devices is not None:
        return tuple(cluster.local_devices)
    if environment.get("JAX_PLATFORMS") == "cpu":
        return None
    return assigned_gpus(winner.neighbours, environment, gpus_here() if gpus is None else gpus)


def _identity(winner: IdentityClaim, devices: tuple[int, ...] | None) -> Identity:
    """Converts a claim to an identity. Raises `ConfigError` if its numbers or its coordinator are invalid."""
    processes = winner.processes or 1
    process_id = winner.process_id or 0
    if process_id >= processes:
        raise ConfigError(
            f"cluster.process_id: {process_id} is out of range for {processes} processes "
            f"(0 to {processes - 1}); correct it or cluster.processes"
        )
    if processes > _MAX_PROCESSES:
        raise ConfigError(f"cluster.processes: {processes} is more than the maximum of {_MAX_PROCESSES}; correct it")
    if processes == 1:
        return Identity(local_devices=devices)
    assert winner.coordinator is not None
    match = re.fullmatch(r"([^\s/]{1,255}):([0-9]{1,5})", winner.coordinator)
    if not match or not _is_host(match[1]) or is_address(winner.coordinator) or not 0 < int(match[2]) < 65536:
        text = shortened(winner.coordinator)
        raise ConfigError(f"cluster.coordinator: {text!r} is not HOST:PORT, such as node0:12355 or [::1]:12355")
    return Identity(process_id, processes, winner.coordinator, devices)


def _is_host(text: str) -> bool:
    """Returns True if a text is a host name or an IP address; only an IPv6 address may have brackets."""
    without_brackets = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    is_name = without_brackets == text and not set(text) & set(":[]")
    return text.isprintable() and (is_address(without_brackets) or is_name)


def _ignored_claims(
    all_claims: list[IdentityClaim], selected: list[IdentityClaim], winner: IdentityClaim
) -> dict[str, str]:
    """Returns the reason why each ignored claim was ignored, by launcher."""
    ignored = {}
    for claim in all_claims:
        if claim not in selected:
            ignored[claim.launcher] = f"another launcher was chosen ({format_variables(claim.values_read)})"
        elif claim.problem:
            ignored[claim.launcher] = claim.problem
        elif claim.launcher != winner.launcher:
            reason = "does not say which process this is"
            if claim.process_id is not None:
                reason = "says the same"
                if claim.coordinator not in (None, winner.coordinator):
                    reason += f", but that process 0 is at {printable(str(claim.coordinator))}"
            ignored[claim.launcher] = f"{reason} ({format_variables(claim.values_read)})"
    return ignored
