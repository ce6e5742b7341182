"""The connections of a process to its peers, as streams of messages."""

import contextlib
import selectors
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict

from jaxmnt.distributed.failure_detector import Lost
from jaxmnt.distributed.json_socket import LONGEST_LINE, JsonSocket
from jaxmnt.distributed.messages import Bye, Message, parse_message

_GONE = "disconnected without a message: it was killed, its host was lost, or it called exit"
_NONSENSE = "sent a message that this version does not know; run the same jaxmnt in every process"


class Link:
    """For one thread, except for `wake`."""

    def __init__(self, connections: dict[int, JsonSocket]):
        self.connections = connections
        # The first messages may have arrived with the end of the rendezvous: a selector does not see those.
        self._ready: Iterable[int | None] = tuple(connections)
        self._wakeup_read, self._wakeup_write = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup_read, selectors.EVENT_READ, None)
        for process, connection in connections.items():
            connection.longest_line = LONGEST_LINE
            self._selector.register(connection, selectors.EVENT_READ, process)

    def wake(self) -> None:
        """Ends the wait in `receive`. From any thread."""
        self._wakeup_write.send(b"!")

    def send(self, message: Message) -> None:
        """To all."""
        record = asdict(message)
        for connection in self.connections.values():
            with contextlib.suppress(OSError):  # its silence reports a peer that cannot receive
                connection.send(record)

    def receive(self, seconds: float) -> Iterator[tuple[int, Message | Lost]]:
        """What arrives from which process; waits for at most so many seconds."""
        ready = self._ready or [event.data for event, _ in self._selector.select(max(0.0, seconds))]
        self._ready = ()
        for process in ready:
            if process is None:
                self._wakeup_read.recv(16)
            elif process in self.connections:
                for event in self._read(process):
                    yield process, event

    def drain(self, seconds: float) -> None:
        """Discards messages until every peer has disconnected, or the seconds are over."""
        until = time.monotonic() + seconds
        while self.connections and time.monotonic() < until:
            for _ in self.receive(0.05):
                pass

    def _read(self, process: int) -> Iterator[Message | Lost]:
        connection, more = self.connections[process], True
        try:
            while more:
                for record in connection.receive():
                    message = parse_message(record)
                    yield message
                    if isinstance(message, Bye):
                        self._drop(process)
                        return
                more = connection.has_messages
        except OSError:
            self._drop(process)
            yield Lost(_GONE)
        except ValueError:
            yield Lost(_NONSENSE)

    def _drop(self, process: int) -> None:
        connection = self.connections.pop(process, None)
        if connection is not None:  # else `drain` has dropped it while `receive` waited for its caller
            self._selector.unregister(connection)
            connection.close()
