"""What processes say to each other, heard by the code that hears it in a run: for `readers.py`."""

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ExitCode


class EndedError(Exception):
    """Stands for the end of the process."""


@contextlib.contextmanager
def _heard(raw: bytes) -> Any:
    """A connection on which these bytes arrive, and then nothing more."""
    here, there = socket.socketpair()

    def send() -> None:
        with contextlib.suppress(OSError):
            there.sendall(raw)
            there.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        yield here, there
    finally:
        for end in (here, there):
            end.close()
        sender.join(2)


_KEY = bytes(range(32))
_OWN_HELLO = {
    "process": 0, "processes": 3, "host": "n1", "loopback": False, "trouble": None, "time": 1.7e9,
    "facts": {"jaxmnt version": "0.1.0", "config digest": "abc", "data digest": "def"},
}  # fmt: skip


def greeted(name: str, *, proven: bool = True) -> Callable[[Path], Any]:
    """Process 0 hears a greeting of one who has the key, or has none, and answers."""

    def read(folder: Path) -> Any:
        from jaxmnt.distributed.listener import Listener
        from jaxmnt.distributed.rendezvous_server import RendezvousServer

        raw = (folder / name).read_bytes()
        listener = Listener(socket.create_server(("127.0.0.1", 0)), _KEY, 3)
        server = RendezvousServer(Identity(0, 3, "127.0.0.1:1"), dict(_OWN_HELLO), listener)
        over = threading.Event()
        caller = threading.Thread(
            target=_call, args=(listener._server.getsockname(), _KEY if proven else None, raw, over), daemon=True
        )
        caller.start()
        outcome, rounds = None, 0
        try:
            while outcome is None and rounds < 2:
                heard = listener.wait(0.01)
                rounds += not heard and over.is_set()
                for connection, message in heard:
                    outcome = outcome or server._handle(connection, message)
            absent = server._describe_absent("not connected yet")
            said = f"{absent} {server._describe_present()} {listener.refusal_summary}"
            assert said.isprintable() and len(said) < 20_000, "what is told of those present"
            outcome = outcome or server._loopback_error()
            peers = server.peers()
            assert all(type(process) is int and isinstance(peer.host, str) for process, peer in peers.items())
            over.set()
            server.answer(outcome)
        finally:
            listener.close()
            over.set()
            caller.join(2)
        if outcome is not None:
            raise outcome
        return "here" if peers else "nobody"

    return read


def _call(address: Any, key: bytes | None, raw: bytes, over: threading.Event) -> None:
    """The other end of such a connection, which stays open until all is over."""
    from jaxmnt.distributed import authentication

    with contextlib.suppress(OSError, ValueError), socket.create_connection(address, 2) as connection:
        if key is not None:
            authentication.prove(connection, key, 2)
        sender = threading.Thread(target=_sent, args=(connection, raw), daemon=True)
        sender.start()
        sender.join(0.5)
        time.sleep(0.005)
        over.set()
        connection.settimeout(0.05)
        with contextlib.suppress(OSError):
            connection.recv(1)


def _sent(connection: socket.socket, raw: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(raw)


def answered(name: str, *, proven: bool = True) -> Callable[[Path], Any]:
    """Another process hears what process 0 has to say, or somebody on its port who is none."""

    def read(folder: Path) -> Any:
        from jaxmnt.distributed import rendezvous

        raw = (folder / name).read_bytes()
        here, there = socket.socketpair()
        tries = iter([here])

        def connect(*_: Any, **__: Any) -> socket.socket:
            connection = next(tries, None)
            if connection is None:
                raise ConnectionRefusedError(111, "Connection refused")
            return connection

        answering = threading.Thread(target=_answer, args=(there, raw, proven), daemon=True)
        original, hello = socket.create_connection, _OWN_HELLO | {"process": 1}
        try:
            socket.create_connection = connect
            answering.start()
            caller = rendezvous._Client(Identity(1, 3, "127.0.0.1:1"), hello, _KEY, lambda: None)
            peer = caller.connect(time.monotonic() + 0.03, 0.03)
        finally:
            socket.create_connection = original
            here.close(), there.close()
            answering.join(2)
        assert isinstance(peer.host, str) and all(math.isfinite(bound) for bound in peer.clock)
        return peer.host

    return read


def _answer(connection: socket.socket, raw: bytes, proven: bool) -> None:
    """Process 0's end."""
    from jaxmnt.distributed import authentication

    with contextlib.suppress(OSError):
        if proven:
            nonce = authentication.new_nonce()
            connection.sendall(authentication.greeting(nonce))
            said = connection.recv(authentication.PROOF_BYTES, socket.MSG_WAITALL)
            connection.sendall(authentication.answer_to(_KEY, nonce, said) or b"")
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)


def told(name: str, process: int) -> Callable[[Path], Any]:
    """Process 0 hears this of process 1, or the other way round."""

    def read(folder: Path) -> Any:
        from jaxmnt.distributed.heartbeat import Heartbeat
        from jaxmnt.distributed.json_socket import JsonSocket
        from jaxmnt.distributed.rendezvous import Peer
        from jaxmnt.distributed.termination import ExitHandler

        class Noted(ExitHandler):
            def exit_now(self, exit_reason: Any) -> Any:
                raise EndedError(exit_reason)

        other = 1 - process
        with _heard((folder / name).read_bytes()) as (here, _):
            heartbeat = Heartbeat(
                Identity(process, 3, "n1:1"), {other: Peer("n2", JsonSocket(here))}, Noted(), 30.0, 60.0
            )
            link = heartbeat._link
            try:
                while other in link.connections:
                    heartbeat._receive(1)
                str(heartbeat._detector._positions[other])
                return "heard"
            except EndedError as ended:
                exit_reason = ended.args[0]
                return {
                    "kind": exit_reason.kind,
                    "why": exit_reason.why,
                    "code": exit_reason.code,
                    "process": exit_reason.process,
                    "host": exit_reason.host,
                }
            finally:
                link._selector.close()
                link._wakeup_read.close(), link._wakeup_write.close()

    return read


def _is_text(text: str) -> bool:
    return all(letter.isprintable() or letter in "\n\t" for letter in text)


def is_fate(found: Any, undamaged: Any) -> str | None:
    if found == "heard":
        return None
    good = (
        isinstance(found["kind"], str) and isinstance(found["why"], str) and _is_text(found["why"])
        and found["code"] in tuple(ExitCode) and found["process"] in (None, 0, 1, 2)
        and isinstance(found["host"], str | None) and len(found["why"]) < 20_000
    )  # fmt: skip
    return None if good else f"no exit_reason: {repr(found)[:200]}"
