"""Objects as lines of JSON over a TCP connection that is watched with others by a selector."""

import json
import math
import socket
from typing import Any

from jaxmnt.strict_json import json_text

LONGEST_LINE = 2**18
_SEND_SECONDS = 1.0
_DIGITS = 20


def parse(line: bytes) -> dict[str, Any]:
    """The object in a line. Raises `ValueError` for anything else, and for numbers that no process says."""
    try:
        found = json.loads(line.decode(), parse_constant=_finite, parse_int=_whole, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("no object")
    return found


def _whole(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError("a number too large")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number too large, or none")
    return number


class JsonSocket:
    """One end of a connection that carries objects as lines.

    It goes from the rendezvous to the heartbeat as a whole, with what has arrived. For one thread at a time.
    """

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.longest_line = LONGEST_LINE
        """Bytes of a line that are taken; less, as long as little is to be said."""
        self._received = b""
        self._messages: list[dict[str, Any]] = []
        self._nonsense: ValueError | None = None
        """What is wrong with the line after these."""

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: dict[str, Any], seconds: float = _SEND_SECONDS) -> None:
        """Raises `OSError` if the peer is gone, or cannot take it within so many seconds."""
        self.connection.settimeout(seconds)
        self.connection.sendall(json_text(message).encode() + b"\n")

    def receive(self, seconds: float = 0.0) -> list[dict[str, Any]]:
        """What arrives within so many seconds, or has arrived before; perhaps nothing.

        Raises `OSError` if the peer is gone, and `ValueError` if it says what no process says.
        """
        if not self._messages:
            if self._nonsense is not None:
                nonsense, self._nonsense = self._nonsense, None
                raise nonsense
            self._read(seconds)
        messages, self._messages = self._messages, []
        return messages

    def receive_one(self, seconds: float) -> dict[str, Any] | None:
        """The first message of `receive`, if there is one. The rest is left for later."""
        messages = self.receive(seconds)
        self._messages = messages[1:]
        return messages[0] if messages else None

    @property
    def has_messages(self) -> bool:
        """Whether there is something to receive, or wrong, of which a selector does not know."""
        return bool(self._messages) or self._nonsense is not None

    def is_over(self) -> bool:
        """Whether the peer has closed it, and all that it said has been read."""
        self.connection.settimeout(0.0)
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self.connection.close()

    def _read(self, seconds: float) -> None:
        self.connection.settimeout(seconds)
        try:
            chunk = self.connection.recv(2**16)
        except (BlockingIOError, TimeoutError):
            return
        if not chunk:
            raise ConnectionResetError("it closed the connection without an answer")
        *lines, self._received = (self._received + chunk).split(b"\n")
        try:
            for line in (*lines, self._received):
                if len(line) > self.longest_line:
                    raise ValueError("a line without an end")
            for line in lines:
                self._messages.append(parse(line))
        except ValueError as error:
            if not self._messages:
                raise
            self._nonsense = error
