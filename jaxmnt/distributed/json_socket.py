"""Sends and receives JSON objects as lines over a TCP connection, which a selector may watch together with others."""

import json
import math
import socket
from typing import Any

from jaxmnt.strict_json import json_text

LONGEST_LINE = 2**18
_SEND_SECONDS = 1.0
_DIGITS = 20


def parse(line: bytes) -> dict[str, Any]:
    """Returns the object in a line. Raises `ValueError` for any other content, and for numbers that are too large."""
    try:
        message = json.loads(line.decode(), parse_constant=_finite, parse_int=_integer, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError("no object")
    return message


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError("a number too large")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number too large, or none")
    return number


class JsonSocket:
    """One end of a connection that carries JSON objects as lines.

    The rendezvous hands it to the heartbeat, together with messages that have already arrived. Only one thread may use
    it at a time.
    """

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.longest_line = LONGEST_LINE
        """Most bytes that a line may have; fewer during the rendezvous."""
        self._received = b""
        self._messages: list[dict[str, Any]] = []
        self._error: ValueError | None = None
        """Error in the line that follows `_messages`."""

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: dict[str, Any], seconds: float = _SEND_SECONDS) -> None:
        """Sends a message. Raises `OSError` if the peer is gone, or does not accept it within `seconds`."""
        self.connection.settimeout(seconds)
        self.connection.sendall(json_text(message).encode() + b"\n")

    def receive(self, seconds: float = 0.0) -> list[dict[str, Any]]:
        """Returns messages that have already arrived, else those that arrive within `seconds`; the list may be empty.

        Raises `OSError` if the peer is gone, and `ValueError` if it has sent an invalid line.
        """
        if not self._messages:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            self._read(seconds)
        messages, self._messages = self._messages, []
        return messages

    def receive_one(self, seconds: float) -> dict[str, Any] | None:
        """Returns the first message of `receive`, or None if there is none. Keeps the others for later."""
        messages = self.receive(seconds)
        self._messages = messages[1:]
        return messages[0] if messages else None

    @property
    def has_messages(self) -> bool:
        """True if a message or an error has already been read from the socket, so that a selector does not show it."""
        return bool(self._messages) or self._error is not None

    def is_closed(self) -> bool:
        """Returns True if the peer has closed the connection, and everything that it sent has been read."""
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
            self._error = error  # raised once the messages before it have been received
