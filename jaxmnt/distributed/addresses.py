"""What names of hosts mean on this machine, and what is wrong when process 0 does not answer."""

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

_IN_A_POD = "KUBERNETES_SERVICE_HOST"
"""Set by Kubernetes, where a pod has a name only from when it is there."""
_NEW_NAME_SECONDS, _LOOK_SECONDS = 45.0, 0.5


def resolved(host: str) -> list[str]:
    """The addresses of a name, in the resolver's order. Raises `OSError` if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # such as a name with two dots in a row
        raise OSError(None, "it is not the name of a host") from error
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
                f"cluster.coordinator: {host} is {', '.join(addresses)}, which is not an address of "
                f"{socket.gethostname()}, where process 0 is; give the address of process 0's host"
            )
        time.sleep(_LOOK_SECONDS)


def listening_address(identity: Identity) -> tuple[str, str]:
    """Where process 0 listens: at the coordinator's address if this host has it, else at all, with a note why.

    A host may take its own name for a loopback address, or for several, where others know it by one of them.
    """
    host, port = identity.address
    if is_loopback(host):
        return host, ""
    try:
        addresses = resolved(host)
    except OSError as error:
        return "", f"process 0 listens on port {port} of all interfaces: {host} is not known here ({error.strerror})"
    ours = [address for address in addresses if _is_ours(address)]
    if len(ours) == 1 and not all_loopback(ours):
        return ours[0], ""
    shown = ", ".join(addresses)
    return "", f"process 0 listens on port {port} of all interfaces: {host} is {shown} here, which is not one address"


def _is_ours(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def refused(identity: Identity) -> UserError:
    """Why process 0, which answers, will not have this process."""
    here = socket.gethostname()
    return PreflightError(
        f"process 0 at {identity.coordinator} and {here} have different run keys: share run.dir among all hosts, "
        f"or set {RUN_KEY} to the same value in every process (it takes precedence over run.dir/{KEY_FILE}); if "
        "another run uses that port, choose another port"
    ).blaming(hosts=[here])


def unanswered(identity: Identity, reason: str, timeout: float, *, met: bool) -> UserError:
    """Why another process could not speak to process 0: what this host makes of its name, and how it failed last.

    With `met` it was there for a while, or somebody else is in its place.
    """
    host, port = identity.address
    here, what = socket.gethostname(), f"process 0 did not answer at {identity.coordinator} within {timeout:g} s"
    kind = PeerError if met else AbsentError
    try:
        addresses = resolved(host)
    except OSError as error:
        text = f"{what}: {here} cannot resolve {host} ({error.strerror or error})"
        if os.environ.get(_IN_A_POD):
            return kind(
                f"{text}; the name resolves once the pod of process 0 exists: check that it was created"
            ).blaming(processes=[0])
        return PreflightError(f"{text}; correct cluster.coordinator, or the names on {here}").blaming(hosts=[here])
    if is_loopback(host):
        return kind(
            f"{what} ({reason}); {host} is {here} itself: if process 0 is on another host, correct "
            "cluster.coordinator, else see why it was not started or has stopped"
        ).blaming(processes=[0])
    if all_loopback(addresses):
        return PreflightError(
            f"{what} ({reason}): {here} resolves {host} to {addresses[0]}, a loopback address of {here} itself; "
            f"correct /etc/hosts on {here}, or cluster.coordinator"
        ).blaming(hosts=[here])
    return kind(
        f"{what} ({reason}; {host} is {', '.join(addresses)} on {here}); check cluster.coordinator, that no firewall "
        f"between them blocks port {port}, and that process 0 was started and has not stopped with an error of its own"
    ).blaming(processes=[0])
