"""Objects as lines of JSON over a TCP connection that is watched with others by a selector."""

import json
import math
import socket
from typing import Any

_LONGEST_LINE = 2**18
_SEND_SECONDS = 1.0
_DIGITS = 20


def parse(line: bytes) -> dict[str, Any]:
    """The object in a line. Raises `ValueError` for anything else, and for numbers that no process says."""
    try:
        found = json.loads(line.decode(), parse_constant=_no_number, parse_int=_whole, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("no object")
    return found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _whole(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError("a number too large")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number too large")
    return number


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
        *lines, self._received = (self._received + chunk).split(b"\n")
        if not chunk or len(self._received) > _LONGEST_LINE:
            return None
        try:
            return [parse(line) for line in lines]
        except ValueError:
            return None

    def close(self) -> None:
        self._connection.close()
