"""Listens on process 0's port. Before any of its lines is read, a client must prove in time that it has the run's
key."""

import errno
import selectors
import socket
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from jaxmnt.distributed import authentication
from jaxmnt.distributed.json_socket import JsonSocket
from jaxmnt.errors import listed, remark

_PROOF_TIMEOUT_SECONDS = 10.0
_MAX_STRANGERS = 64
"""Maximum number of unauthenticated connections at a time, in addition to one for each process."""
_CHUNK_BYTES = _MAX_HELLO_BYTES = 2**14
_MAX_REPORTED_ADDRESSES = 8
_MAX_COUNTED_ADDRESSES = 1000
_POLL_SECONDS, _RETRY_SECONDS = 1.0, 0.05
_RESOURCE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_CLOSED_CONNECTION_ERRORS = (
    errno.EAGAIN, errno.ECONNABORTED, errno.EINTR, errno.EPROTO,
    # Network errors of the new connection, which Linux passes on; EPERM comes from a firewall. See accept(2).
    errno.ENETDOWN, errno.ENOPROTOOPT, errno.EHOSTDOWN, errno.ENONET, errno.EHOSTUNREACH, errno.EOPNOTSUPP,
    errno.ENETUNREACH, errno.EPERM,
)  # fmt: skip


@dataclass
class _Unauthenticated:
    """A client that has connected, but has not yet proved that it has the key."""

    address: str
    connected_at: float
    nonce: bytes
    received: bytes = b""


ReceivedMessage = tuple[JsonSocket, dict[str, Any] | None]
"""An authenticated client, and its message; None if the client has disconnected, or has sent an invalid line."""


class Listener:
    """Accepts and authenticates clients on process 0's port.

    Strangers (clients without the key) are counted and reported by address. They cost little, and do not end the run.
    """

    def __init__(self, server: socket.socket, key: bytes, processes: int):
        server.setblocking(False)
        self._server, self._key = server, key
        self._max_strangers = processes + _MAX_STRANGERS
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._strangers: dict[socket.socket, _Unauthenticated] = {}
        """Unauthenticated connections, in order of arrival."""
        self.authenticated: dict[JsonSocket, None] = {}
        """Open connections of authenticated clients, in order of authentication."""
        self._next_check = 0.0
        self.refused: Counter[str] = Counter()
        """Number of connections without the key, by address."""
        self._reported: set[str] = set()
        self.with_another_key: list[str] = []
        """Addresses of refused clients that seem to be processes of a run."""

    def wait(self, seconds: float) -> list[ReceivedMessage]:
        """Waits for messages and returns them. Returns early, perhaps without any, as soon as a connection is ready."""
        messages: list[ReceivedMessage] = []
        for event, _ in self._selector.select(max(0.0, min(seconds, _POLL_SECONDS))):
            if event.fileobj is self._server:
                self._accept()
            elif event.fileobj in self._strangers:
                self._examine(event.fileobj, self._strangers[event.fileobj])
            elif event.fileobj in self.authenticated:  # else it was dropped a moment ago
                messages += self._receive(event.fileobj)
        self._drop_slow_strangers()
        return messages

    def drop(self, connection: JsonSocket) -> None:
        """Closes an authenticated connection, unless an earlier message in the same batch has already caused that."""
        if connection in self.authenticated:
            del self.authenticated[connection]
            self._unregister(connection)

    def close(self, keeping: Collection[JsonSocket] = ()) -> None:
        """Closes the port, and all connections except those in `keeping`."""
        for stranger in self._strangers:
            stranger.close()
        for connection in self.authenticated.keys() - set(keeping):
            connection.close()
        self._selector.close()
        self._server.close()

    @property
    def refusal_summary(self) -> str:
        """A sentence about the clients without the key; empty if there were none."""
        if not self.refused:
            return ""
        addresses = listed(list(self.refused), _MAX_REPORTED_ADDRESSES)
        count = self.refused.total()
        return f"{addresses} connected without the run's key ({count} connection{'s' if count > 1 else ''})"

    def _accept(self) -> None:
        try:
            connection, peer_address = self._server.accept()
        except OSError as error:
            if error.errno in _RESOURCE_ERRORS:
                if not self._drop_a_stranger():
                    time.sleep(_RETRY_SECONDS)
            elif error.errno not in _CLOSED_CONNECTION_ERRORS:
                raise
            return
        if len(self._strangers) >= self._max_strangers:
            self._drop_a_stranger()
        address = str(peer_address[0]).removeprefix("::ffff:")
        stranger = _Unauthenticated(address, time.monotonic(), authentication.new_nonce())
        connection.setblocking(False)
        self._strangers[connection] = stranger
        self._selector.register(connection, selectors.EVENT_READ)
        if not _send_completely(connection, authentication.greeting(stranger.nonce)):
            self._refuse(connection, silent=True)

    def _drop_a_stranger(self) -> bool:
        """Refuses the oldest connection from the address that has the most connections, so that a client that connects
        again and again displaces only itself.

        Returns False if there is no stranger.
        """
        if not self._strangers:
            return False
        busiest = Counter(stranger.address for stranger in self._strangers.values()).most_common(1)[0][0]
        oldest = next(connection for connection, stranger in self._strangers.items() if stranger.address == busiest)
        self._refuse(oldest)
        return True

    def _drop_slow_strangers(self) -> None:
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + _POLL_SECONDS
        slow = [
            connection
            for connection, stranger in self._strangers.items()
            if now - stranger.connected_at > _PROOF_TIMEOUT_SECONDS
        ]
        for connection in slow:
            self._refuse(connection)

    def _examine(self, connection: socket.socket, stranger: _Unauthenticated) -> None:
        """Authenticates or refuses a client once its proof is complete. The client must send nothing else until
        then."""
        chunk = _receive_available(connection)
        if chunk is None:
            return
        stranger.received += chunk
        if chunk and authentication.is_proof_prefix(stranger.received):
            return
        answer = authentication.answer_to(self._key, stranger.nonce, stranger.received)
        if answer is not None:
            del self._strangers[connection]
            client = JsonSocket(connection)
            client.max_line_bytes = _MAX_HELLO_BYTES
            self._selector.unregister(connection)
            self._selector.register(client, selectors.EVENT_READ)
            self.authenticated[client] = None
            if not _send_completely(connection, answer):
                self.drop(client)
            return
        if authentication.is_proof(stranger.received):
            _send_completely(connection, authentication.REFUSAL)
            if stranger.address not in self.with_another_key and len(self.with_another_key) < _MAX_COUNTED_ADDRESSES:
                self.with_another_key.append(stranger.address)
        self._refuse(connection, silent=not stranger.received)

    def _receive(self, connection: JsonSocket) -> Iterator[ReceivedMessage]:
        try:
            for message in connection.receive():
                yield connection, message
            if connection.has_messages:  # the next line is invalid, and this raises its error
                connection.receive()
        except (OSError, ValueError):
            self.drop(connection)
            yield connection, None

    def _unregister(self, connection: socket.socket | JsonSocket) -> None:
        self._selector.unregister(connection)
        connection.close()

    def _refuse(self, connection: socket.socket, *, silent: bool = False) -> None:
        """Closes and counts the connection of a stranger, and reports its address once.

        A `silent` client, which disconnects without sending anything, like a health check, is only counted.
        """
        address = self._strangers[connection].address
        if address not in self.refused and len(self.refused) >= _MAX_COUNTED_ADDRESSES:
            address = "other addresses"
        first = address not in self._reported and not silent and len(self._reported) < _MAX_REPORTED_ADDRESSES
        self.refused[address] += 1
        del self._strangers[connection]
        self._unregister(connection)
        if first:
            self._reported.add(address)
            remark(f"note: {address} connected without the run's key; is run.dir shared?")


def _receive_available(connection: socket.socket) -> bytes | None:
    """Returns the bytes that have arrived: None if there are none yet, and empty if the peer has disconnected."""
    try:
        return connection.recv(_CHUNK_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _send_completely(connection: socket.socket, text: bytes) -> bool:
    """Sends bytes. Returns True if the kernel takes all of them, as it does with a few bytes on a new connection."""
    try:
        return connection.send(text) == len(text)
    except OSError:
        return False
