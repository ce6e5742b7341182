"""What names of hosts mean on this machine, and what is wrong when process 0 does not answer."""

import contextlib
import ipaddress
import os
import socket
import time

from jaxmnt.cluster.environment import Identity, is_loopback
from jaxmnt.cluster.gpus import gpus_here
from jaxmnt.errors import PeerError, PreflightError, UserError

_NEW_NAME_SECONDS, _LOOK_SECONDS = 45.0, 0.5


def resolved(host: str) -> list[str]:
    """The addresses of a name, in the resolver's order. Raises `OSError` if it has none."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found))


def all_loopback(addresses: list[str]) -> bool:
    return bool(addresses) and all(ipaddress.ip_address(address).is_loopback for address in addresses)


def own_name_misleads() -> bool:
    """Whether Gloo, which gives others the address of this host's own name, would give them a loopback address.

    NCCL takes addresses from the network cards.
    """
    if gpus_here() and os.environ.get("JAX_PLATFORMS") != "cpu":
        return False
    try:
        return all_loopback(resolved(socket.gethostname()))
    except OSError:  # no address at all: whoever needs it says so
        return False


def check_own(identity: Identity, timeout: float) -> None:
    """Raises `PreflightError` in process 0 if the coordinator's address is another machine's, and stays so: after a
    restart of pods it takes a name server a while to forget an old one."""
    host, _ = identity.address
    deadline = time.monotonic() + min(timeout, _NEW_NAME_SECONDS)
    while True:
        try:
            addresses = resolved(host)
        except OSError:  # a new name, too, takes a while; the others will say whether they find it
            return
        if any(_is_ours(address) for address in addresses):
            return
        if time.monotonic() >= deadline:
            raise PreflightError(
                f"cluster.coordinator: {host} is {', '.join(addresses)}, which is no address of "
                f"{socket.gethostname()}, where process 0 is; give the address of process 0's host"
            )
        time.sleep(_LOOK_SECONDS)


def _is_ours(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def unanswered(identity: Identity, reason: str, timeout: float) -> UserError:
    """Why another process could not speak to process 0: what this host makes of its name, and how it failed last."""
    host, port = identity.address
    here, what = socket.gethostname(), f"process 0 did not answer at {identity.coordinator} within {timeout:g} s"
    try:
        addresses = resolved(host)
    except OSError as error:
        return PreflightError(
            f"{what}: {here} finds no address of {host} ({error.strerror or error}); correct cluster.coordinator, or "
            f"the names on {here}"
        ).blaming(hosts=[here])
    if is_loopback(host):
        return PeerError(
            f"{what} ({reason}); {host} is {here} itself: if process 0 is on another host, correct "
            "cluster.coordinator, else see why it was not started or has stopped"
        )
    if all_loopback(addresses):
        return PreflightError(
            f"{what} ({reason}): {here} takes {host} for {addresses[0]}, a loopback address, which is {here} itself; "
            f"correct /etc/hosts on {here}, or cluster.coordinator"
        ).blaming(hosts=[here])
    return PeerError(
        f"{what} ({reason}; {host} is {', '.join(addresses)} on {here}); check cluster.coordinator, that no firewall "
        f"between them blocks port {port}, and that process 0 was started and has not stopped with an error of its own"
    ).blaming(processes=[0])
