"""Sends and receives JSON objects as lines over a TCP connection, which a selector can watch together with others."""

import json
import math
import socket
from typing import Any

from jaxmnt.strict_json import json_text

MAX_LINE_BYTES = 2**18
_SEND_TIMEOUT_SECONDS = 1.0
_MAX_DIGITS = 20


def parse(line: bytes) -> dict[str, Any]:
    """Returns the JSON object in a line. Raises `ValueError` for any other content, and for numbers that are too
    large."""
    try:
        message = json.loads(line.decode(), parse_constant=_number, parse_int=_integer, parse_float=_number)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError("a number too large")
    return int(text)


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number too large, or not a number")
    return number


def encode_line(message: dict[str, Any]) -> bytes:
    """Returns a message as a line of JSON."""
    return json_text(message).encode() + b"\n"


class JsonSocket:
    """One end of a connection that carries JSON objects as lines.

    The rendezvous hands it to the heartbeat, together with messages that have already arrived. Only one thread may use
    it at a time.
    """

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.max_line_bytes = MAX_LINE_BYTES
        """Maximum number of bytes in a line, which is lower during the rendezvous."""
        self._received = b""
        self._unsent = b""
        self._messages: list[dict[str, Any]] = []
        self._error: ValueError | None = None
        """Error in the line that follows those of `_messages`."""

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: dict[str, Any], seconds: float = _SEND_TIMEOUT_SECONDS) -> None:
        """Sends a message. Raises `OSError` if the peer is gone, or does not accept it within `seconds`."""
        self.connection.settimeout(seconds)
        self.connection.sendall(encode_line(message))

    def queue_line(self, line: bytes) -> None:
        """Queues a message that `encode_line` encoded, for `flush`."""
        self._unsent += line

    def flush(self) -> bool:
        """Sends as much of the queue as the peer accepts without waiting. Returns True if the queue is empty.

        Raises `OSError` if the peer is gone.
        """
        self.connection.settimeout(0.0)
        try:
            while self._unsent:
                self._unsent = self._unsent[self.connection.send(self._unsent) :]
        except BlockingIOError:
            return False
        return True

    def receive(self, seconds: float = 0.0) -> list[dict[str, Any]]:
        """Returns the messages that have already arrived, or else those that arrive within `seconds`, if any.

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
        """True if a message or an error has already been read from the socket, where a selector no longer sees it."""
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
                if len(line) > self.max_line_bytes:
                    raise ValueError("a line without an end")
            for line in lines:
                self._messages.append(parse(line))
        except ValueError as error:
            if not self._messages:
                raise
            self._error = error  # raised once the messages before it have been received
