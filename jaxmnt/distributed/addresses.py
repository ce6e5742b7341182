"""Resolves host names on this machine, and explains why process 0 does not answer."""

import contextlib
import ipaddress
import os
import socket
import time

from jaxmnt.distributed.authentication import KEY_FILE, RUN_KEY
from jaxmnt.distributed.identity import Identity, is_loopback
from jaxmnt.distributed.local_gpus import gpus_here
from jaxmnt.distributed.termination import AbsentError
from jaxmnt.errors import PeerError, PreflightError, UserError

_KUBERNETES_VARIABLE = "KUBERNETES_SERVICE_HOST"
"""Variable that Kubernetes sets in every container. The name of a pod resolves only once the pod exists."""
_NAME_UPDATE_TIMEOUT_SECONDS = 45.0
"""Time for name servers to stop returning the old address of a pod that was restarted."""
_POLL_SECONDS = 0.5
"""Time between two attempts to resolve the name."""


def resolve(host: str) -> list[str]:
    """Returns the addresses of a host name, in the resolver's order. Raises `OSError` if it has none."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # such as a name with two dots in a row
        raise OSError(None, "it is not the name of a host") from error
    return list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in entries))


def all_loopback(addresses: list[str]) -> bool:
    return bool(addresses) and all(ipaddress.ip_address(address).is_loopback for address in addresses)


def hostname_is_loopback() -> bool:
    """Returns True if Gloo, which advertises the address of this host's own name, would advertise a loopback address.

    NCCL takes addresses from the network cards.
    """
    if gpus_here() and os.environ.get("JAX_PLATFORMS") != "cpu":
        return False
    try:
        return all_loopback(resolve(socket.gethostname()))
    except OSError:  # there is no address at all, which the library that needs one will report
        return False


def check_coordinator_address(identity: Identity, timeout: float) -> None:
    """Raises `PreflightError` in process 0 if the coordinator's address belongs to another machine.

    Retries for a while first: after pods restart, a name server may still return the old address.
    """
    host, _ = identity.address
    deadline = time.monotonic() + min(timeout, _NAME_UPDATE_TIMEOUT_SECONDS)
    while True:
        try:
            addresses = resolve(host)
        except OSError:  # a new name also needs a while; the other processes report if they cannot resolve it
            return
        if any(_is_local_address(address) for address in addresses):
            return
        if time.monotonic() >= deadline:
            raise PreflightError(
                f"cluster.coordinator: {host} is {', '.join(addresses)}, which is not an address of "
                f"{socket.gethostname()}, where process 0 is; give the address of process 0's host"
            )
        time.sleep(_POLL_SECONDS)


def listening_address(identity: Identity) -> tuple[str, str]:
    """Returns the address to which process 0 binds, and a note for the user.

    The address is the coordinator's if its name resolves to a single address of this host. Otherwise it is empty, which
    means all interfaces, and the note says why. A host may resolve its own name to a loopback address or to several
    addresses while other hosts use one.
    """
    host, port = identity.address
    if is_loopback(host):
        return host, ""
    try:
        addresses = resolve(host)
    except OSError as error:
        return "", f"process 0 listens on port {port} of all interfaces: cannot resolve {host} here ({error.strerror})"
    local_addresses = [address for address in addresses if _is_local_address(address)]
    if len(local_addresses) == 1 and not all_loopback(local_addresses):
        return local_addresses[0], ""
    text = ", ".join(addresses)
    note = (
        f"process 0 listens on port {port} of all interfaces: {host} is {text} here, not a single non-loopback address"
    )
    return "", note


def _is_local_address(address: str) -> bool:
    """Returns True if an address belongs to this host, because only then can a socket be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def refused_error(identity: Identity) -> UserError:
    """Returns the error for a process whose run key process 0 has refused."""
    here = socket.gethostname()
    return PreflightError(
        f"process 0 at {identity.coordinator} and {here} have different run keys: share run.dir among all hosts, "
        f"or set {RUN_KEY} to the same value in every process (it takes precedence over run.dir/{KEY_FILE}); if "
        "another run uses that port, choose another port"
    ).blaming(hosts=[here])


def unanswered_error(identity: Identity, reason: str, timeout: float, *, was_reached: bool) -> UserError:
    """Returns the error for a process that got no answer from process 0.

    The message says how this host resolves the coordinator's name, and why the last attempt failed (`reason`).
    `was_reached` is True if process 0 was reached earlier, or if another program answers on its port.
    """
    host, port = identity.address
    here = socket.gethostname()
    problem = f"process 0 did not answer at {identity.coordinator} within {timeout:g} s"
    error_type = PeerError if was_reached else AbsentError
    try:
        addresses = resolve(host)
    except OSError as error:
        text = f"{problem}: {here} cannot resolve {host} ({error.strerror or error})"
        if os.environ.get(_KUBERNETES_VARIABLE):
            return error_type(
                f"{text}; the name resolves once the pod of process 0 exists: check that it was created"
            ).blaming(processes=[0])
        return PreflightError(f"{text}; correct cluster.coordinator, or the names on {here}").blaming(hosts=[here])
    if is_loopback(host):
        return error_type(
            f"{problem} ({reason}); {host} is {here} itself: if process 0 is on another host, correct "
            "cluster.coordinator, else see why it was not started or has stopped"
        ).blaming(processes=[0])
    if all_loopback(addresses):
        return PreflightError(
            f"{problem} ({reason}): {here} resolves {host} to {addresses[0]}, a loopback address of {here} itself; "
            f"correct /etc/hosts on {here}, or cluster.coordinator"
        ).blaming(hosts=[here])
    return error_type(
        f"{problem} ({reason}; {host} is {', '.join(addresses)} on {here}); check cluster.coordinator, that no "
        f"firewall between them blocks port {port}, and that process 0 was started and has not stopped with an error "
        "of its own"
    ).blaming(processes=[0])
