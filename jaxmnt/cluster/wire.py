"""Objects as lines of JSON over a TCP connection that is watched with others by a selector."""

import json
import socket
from typing import Any

_LONGEST_LINE = 2**20
_SEND_SECONDS = 1.0


class Wire:
    """One end of a connection. A peer that cannot take what is sent within a second counts as gone."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(_SEND_SECONDS)
        self._connection = connection
        self._received = b""

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: dict[str, Any]) -> bool:
        """Whether it went out."""
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """What has arrived, when the selector says that something has; None if the peer is gone."""
        try:
            chunk = self._connection.recv(2**16)
        except OSError:
            chunk = b""
        if not chunk or len(self._received) > _LONGEST_LINE:
            return None
        *lines, self._received = (self._received + chunk).split(b"\n")
        try:
            return [json.loads(line) for line in lines]
        except ValueError:
            return None

    def close(self) -> None:
        self._connection.close()
