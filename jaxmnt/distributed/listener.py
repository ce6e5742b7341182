"""Process 0's open port. Who connects must show in time that it has the run's key, before any line from it is read."""

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

_PROOF_SECONDS = 10.0
_STRANGERS_AT_MOST = 64
"""Connections at a time that have not shown the key, beyond one of each process."""
_CHUNK = _LONGEST_HELLO = 2**14
_ADDRESSES_TOLD, _ADDRESSES_COUNTED = 8, 1000
_LOOK_SECONDS, _PAUSE_SECONDS = 1.0, 0.05
_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_GONE_ALREADY = (
    errno.EAGAIN, errno.ECONNABORTED, errno.EINTR, errno.EPROTO,
    # Of the new connection's network, which Linux hands on; EPERM comes from a firewall.
    errno.ENETDOWN, errno.ENOPROTOOPT, errno.EHOSTDOWN, errno.ENONET, errno.EHOSTUNREACH, errno.EOPNOTSUPP,
    errno.ENETUNREACH, errno.EPERM,
)  # fmt: skip


@dataclass
class _Unauthenticated:
    """One who has connected, and has not shown the key yet."""

    address: str
    since: float
    nonce: bytes
    received: bytes = b""


ReceivedMessage = tuple[JsonSocket, dict[str, Any] | None]
"""A message of one who has the key; None if that one has hung up, or says what no process says."""


class Listener:
    """Listens on process 0's port. Strangers cost little, are counted and named, and end nothing."""

    def __init__(self, server: socket.socket, key: bytes, processes: int):
        server.setblocking(False)
        self._server, self._key = server, key
        self._strangers_at_most = processes + _STRANGERS_AT_MOST
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._strangers: dict[socket.socket, _Unauthenticated] = {}
        """In order of coming."""
        self.known: dict[JsonSocket, None] = {}
        """The connections of those who have shown the key and are still here, in order."""
        self._look_again = 0.0
        self.refused: Counter[str] = Counter()
        """Connections without the key, by address."""
        self._told: set[str] = set()
        self.with_another_key: list[str] = []
        """Addresses of those of them that seem to be processes of a run."""

    def wait(self, seconds: float) -> list[ReceivedMessage]:
        """What is said meanwhile. Returns early as soon as something happens."""
        said: list[ReceivedMessage] = []
        for event, _ in self._selector.select(max(0.0, min(seconds, _LOOK_SECONDS))):
            if event.fileobj is self._server:
                self._accept()
            elif event.fileobj in self._strangers:
                self._examine(event.fileobj, self._strangers[event.fileobj])
            elif event.fileobj in self.known:  # else it was dropped a moment ago
                said += self._hear(event.fileobj)
        self._drop_the_slow()
        return said

    def drop(self, connection: JsonSocket) -> None:
        """If it is still here: of several messages that came at once the first may have been reason enough."""
        if connection in self.known:
            del self.known[connection]
            self._forget(connection)

    def close(self, keeping: Collection[JsonSocket] = ()) -> None:
        """Closes the port and all connections but these."""
        for stranger in self._strangers:
            stranger.close()
        for known in self.known.keys() - set(keeping):
            known.close()
        self._selector.close()
        self._server.close()

    @property
    def account(self) -> str:
        """Who came without the key, in words; empty if nobody did."""
        if not self.refused:
            return ""
        addresses, count = listed(list(self.refused), _ADDRESSES_TOLD), self.refused.total()
        return f"{addresses} connected without the run's key ({count} connection{'s' if count > 1 else ''})"

    def _accept(self) -> None:
        try:
            connection, end = self._server.accept()
        except OSError as error:
            if error.errno in _NO_MORE_FILES:
                if not self._drop_a_stranger():
                    time.sleep(_PAUSE_SECONDS)
            elif error.errno not in _GONE_ALREADY:
                raise
            return
        if len(self._strangers) >= self._strangers_at_most:
            self._drop_a_stranger()
        stranger = _Unauthenticated(str(end[0]).removeprefix("::ffff:"), time.monotonic(), authentication.new_nonce())
        connection.setblocking(False)
        self._strangers[connection] = stranger
        self._selector.register(connection, selectors.EVENT_READ)
        if not _sent(connection, authentication.greeting(stranger.nonce)):
            self._refuse(connection, silent=True)

    def _drop_a_stranger(self) -> bool:
        """The oldest of the address that has the most, so that one that connects again and again displaces only
        itself."""
        if not self._strangers:
            return False
        crowd = Counter(stranger.address for stranger in self._strangers.values()).most_common(1)[0][0]
        self._refuse(next(one for one, stranger in self._strangers.items() if stranger.address == crowd))
        return True

    def _drop_the_slow(self) -> None:
        if (now := time.monotonic()) < self._look_again:
            return
        self._look_again = now + _LOOK_SECONDS
        for connection in [one for one, it in self._strangers.items() if now - it.since > _PROOF_SECONDS]:
            self._refuse(connection)

    def _examine(self, connection: socket.socket, stranger: _Unauthenticated) -> None:
        """Whether it has the key, once it has said enough. It must wait for the answer before it says more."""
        chunk = _received(connection)
        if chunk is None:
            return
        stranger.received += chunk
        if chunk and authentication.may_become_a_proof(stranger.received):
            return
        answer = authentication.answer_to(self._key, stranger.nonce, stranger.received)
        if answer is not None:
            del self._strangers[connection]
            known = JsonSocket(connection)
            known.longest_line = _LONGEST_HELLO
            self._selector.unregister(connection)
            self._selector.register(known, selectors.EVENT_READ)
            self.known[known] = None
            if not _sent(connection, answer):
                self.drop(known)
            return
        if authentication.is_proof(stranger.received):
            _sent(connection, authentication.REFUSAL)
            if stranger.address not in self.with_another_key and len(self.with_another_key) < _ADDRESSES_COUNTED:
                self.with_another_key.append(stranger.address)
        self._refuse(connection, silent=not stranger.received)

    def _hear(self, connection: JsonSocket) -> Iterator[ReceivedMessage]:
        try:
            for message in connection.receive():
                yield connection, message
            if connection.has_messages:  # what follows makes no sense
                connection.receive()
        except (OSError, ValueError):
            self.drop(connection)
            yield connection, None

    def _forget(self, connection: socket.socket | JsonSocket) -> None:
        self._selector.unregister(connection)
        connection.close()

    def _refuse(self, connection: socket.socket, *, silent: bool = False) -> None:
        """Those who connect and hang up without a word, as health checks do, are only counted."""
        address = self._strangers[connection].address
        if address not in self.refused and len(self.refused) >= _ADDRESSES_COUNTED:
            address = "other addresses"
        first = address not in self._told and not silent and len(self._told) < _ADDRESSES_TOLD
        self.refused[address] += 1
        del self._strangers[connection]
        self._forget(connection)
        if first:
            self._told.add(address)
            remark(f"note: {address} connected without the run's key; is run.dir shared?")


def _received(connection: socket.socket) -> bytes | None:
    """What has arrived; None if nothing has, nothing if the other end is gone."""
    try:
        return connection.recv(_CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _sent(connection: socket.socket, text: bytes) -> bool:
    """Whether it went out whole, which little text on a new connection does."""
    try:
        return connection.send(text) == len(text)
    except OSError:
        return False
