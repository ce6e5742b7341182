"""Strangers at process 0's port, and in its place: they are named, cost little, and end nothing."""

import contextlib
import itertools
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time

import pytest
from conftest import until
from hypothesis import given
from hypothesis import strategies as st

from jaxmnt.distributed import addresses, authentication, listener, rendezvous
from jaxmnt.distributed.authentication import prove, run_key
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.json_socket import parse
from jaxmnt.distributed.rendezvous import join, retry_pauses
from jaxmnt.errors import ConfigError, PeerError, PreflightError

KEY, ANOTHER = bytes(range(32)), bytes(range(1, 33))
FACTS = {"jaxmnt version": "1", "config digest": "abc"}
HELLO = {"process": 1, "processes": 3, "host": "h", "facts": FACTS}


class Roll:
    """A rendezvous in threads: `come` starts a process, `outcome` waits for what becomes of it."""

    def __init__(self, processes=3):
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
        self.address, self.processes = f"127.0.0.1:{self.port}", processes
        self.threads, self.outcomes, self.peers = {}, {}, []

    def come(self, number, timeout=20.0, key=KEY):
        def one():
            try:
                peers = join(Identity(number, self.processes, self.address), FACTS, timeout, key)
                self.peers += [peer.connection for peer in peers.values()]
                self.outcomes[number] = "here"
            except BaseException as error:
                self.outcomes[number] = error

        self.threads[number] = threading.Thread(target=one, daemon=True)
        self.threads[number].start()
        if number == 0:
            until(lambda: 0 in self.outcomes or listens(self.port))
        return self

    def outcome(self, number):
        self.threads[number].join(30)
        return self.outcomes[number]

    def stranger(self):
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        assert connection.recv(1000).startswith(b"jaxmnt 1 ")
        return connection

    def stranger_with_the_key(self, number):
        """A process that has said hello, and nothing more."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        prove(connection, KEY, 5)
        hello = {"process": number, "processes": self.processes, "host": "h", "facts": FACTS}
        connection.sendall(json.dumps(hello).encode() + b"\n")
        return connection


def listens(port):
    """Without connecting, which would count."""
    with open("/proc/net/tcp") as file:
        return any(f":{port:04X} " in line.split(" ", 5)[4] + " " and " 0A " in line for line in file)


@pytest.fixture
def roll():
    made = []

    def make(**named):
        made.append(Roll(**named))
        return made[-1]

    yield make
    for one in made:
        for connection in one.peers:
            connection.close()


def is_closed(connection):
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1000) in (b"", authentication.REFUSAL)
    return True


ATTACKS = {
    "deep nesting": b"[" * 12_000 + b"\n",
    "infinity": json.dumps(HELLO | {"process": float("inf")}).encode() + b"\n",
    "a huge number": json.dumps(HELLO).encode().replace(b"1,", b"1" + b"0" * 400 + b",", 1) + b"\n",
    "another count, which would end the start with exit code 2": json.dumps(HELLO | {"processes": 9}).encode() + b"\n",
    "in the place of process 1": json.dumps(HELLO).encode() + b"\n",
    "a web browser": b"GET / HTTP/1.1\r\n\r\n",
    "binary": bytes(range(256)),
    "oversize": b"0" * 100_000,
    "nothing, and away": b"",
    "half a proof, and away": b"0" * 100,
    "a proof with something after it": b"0" * 128 + b"\n" + json.dumps(HELLO).encode() + b"\n",
    "a proof by another key": b"0" * 128 + b"\n",
}


def test_whoever_comes_without_the_key_is_counted_named_and_ends_nothing(roll, capfd):
    """And the processes of the run get in meanwhile."""
    start = roll().come(0)
    for name, said in ATTACKS.items():
        with start.stranger() as connection:
            with contextlib.suppress(OSError):  # it may be closed already
                connection.sendall(said)
                connection.shutdown(socket.SHUT_WR)
            assert is_closed(connection), name
        assert start.threads[0].is_alive(), (name, start.outcomes)
    start.come(1).come(2)
    assert [start.outcome(process) for process in range(3)] == ["here"] * 3
    told = capfd.readouterr().err
    assert told.count("jaxmnt: note: 127.0.0.1 connected without the run's key; is run.dir shared?") == 1
    account = f"127.0.0.1 connected without the run's key ({len(ATTACKS)} connections)"
    assert f"all processes are connected; others were refused: {account}" in told
    assert KEY.hex() not in told


def test_who_has_the_key_and_makes_no_sense_is_dropped(roll):
    """As a process of another version may be."""
    start = roll(processes=2).come(0)
    for line in (
        ATTACKS["deep nesting"],
        ATTACKS["infinity"],
        ATTACKS["a huge number"],
        b"[1]\n",
        b"{}\n",
        b"0" * 20_000,
    ):
        with socket.create_connection(("127.0.0.1", start.port), timeout=5) as connection:
            prove(connection, KEY, 5)
            connection.sendall(line)
            assert is_closed(connection)
    assert start.come(1).outcome(1) == start.outcome(0) == "here"


def test_what_was_overheard_or_sent_back_proves_nothing(roll):
    start = roll(processes=2).come(0)
    with start.stranger() as connection:  # the answer to another greeting
        own = authentication.new_nonce()
        overheard = own.hex().encode() + authentication._proof(KEY, b"one who connects", b"n" * 32, own) + b"\n"
        connection.sendall(overheard)
        assert is_closed(connection)
    with socket.create_connection(("127.0.0.1", start.port), timeout=5) as connection:  # its own greeting
        nonce = connection.recv(1000).split()[2]
        connection.sendall(nonce + nonce + b"\n")
        assert is_closed(connection)
    with start.stranger() as one, socket.create_connection(("127.0.0.1", start.port), timeout=5) as other:
        nonce = bytes.fromhex(other.recv(1000).split()[2].decode())  # the proof of process 0 for its own side
        one.sendall(own.hex().encode() + authentication._proof(KEY, b"process 0", nonce, own) + b"\n")
        assert is_closed(one)
    assert start.come(1).outcome(1) == start.outcome(0) == "here"


def test_a_proof_that_comes_byte_by_byte_has_little_time(roll, monkeypatch):
    monkeypatch.setattr(listener, "_PROOF_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(listener, "_POLL_SECONDS", 0.1)
    start = roll(processes=2).come(0)
    with start.stranger() as connection, pytest.raises(OSError):
        for _ in range(100):
            connection.sendall(b"0")
            time.sleep(0.05)
    assert start.come(1).outcome(1) == start.outcome(0) == "here"


def test_the_oldest_of_the_largest_crowd_goes_first(roll, monkeypatch):
    """One who connects again and again displaces himself, and nobody at another address."""
    monkeypatch.setattr(listener, "_MAX_STRANGERS", 3)
    start = roll(processes=2).come(0)
    with contextlib.ExitStack() as scope:
        elsewhere = scope.enter_context(
            socket.create_connection(("127.0.0.1", start.port), source_address=("127.0.0.2", 0), timeout=5)
        )
        crowd = [scope.enter_context(start.stranger()) for _ in range(20)]
        assert is_closed(crowd[0]) and is_closed(crowd[10])
        assert start.come(1).outcome(1) == start.outcome(0) == "here"
        assert elsewhere.recv(1000).startswith(b"jaxmnt 1 ")


FIRST = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.rendezvous import join
print(sorted(join(Identity(0, 2, sys.argv[1]), {}, 30.0, bytes(32))))
"""


def test_more_idle_connections_than_process_0_may_have_files(roll):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    start = roll(processes=2)
    process = subprocess.Popen(
        [sys.executable, "-c", FIRST, start.address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: process.poll() is not None or listens(start.port))
        with contextlib.ExitStack() as scope:
            for _ in range(1100):
                scope.enter_context(socket.create_connection(("127.0.0.1", start.port), timeout=20))
            (peer,) = join(Identity(1, 2, start.address), {}, 20.0, bytes(32)).values()
            out, err = process.communicate(timeout=20)
            peer.connection.close()
        assert process.returncode == 0 and out == "[1]\n", err
        assert len(err.splitlines()) == 2 and "connected without the run's key (10" in err, "told once, and how many"
    finally:
        process.kill()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def in_the_place_of_process_0(answer):
    """Greets as process 0 does; `answer` is what it says to the answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(ConnectionError):
                        connection.sendall(authentication.greeting(b"x" * 32))
                        connection.sendall(answer(connection.recv(authentication.PROOF_BYTES)))
                        connection.recv(1000)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


VERDICT = json.dumps({"error": "go away", "code": 2, "host": "h", "time": 0.0, "heard_after": 0.0}).encode() + b"\n"


@pytest.mark.parametrize(
    "answer", [lambda said: VERDICT, lambda said: b"0" * 64 + b"\n" + VERDICT, lambda said: said[64:] + VERDICT]
)
def test_nobody_stands_in_for_process_0(answer):
    """Without the key he cannot end a start with exit code 2: a verdict, any proof, the caller's own proof."""
    with in_the_place_of_process_0(answer) as address, pytest.raises(PeerError, match="does not have the run's key"):
        join(Identity(1, 2, address), FACTS, 0.5, KEY)


def test_keys_that_differ_are_told_as_that_on_both_sides(roll, monkeypatch, capfd):
    """As a run directory that is not shared is: exit code 3."""
    monkeypatch.setattr(rendezvous, "_REFUSAL_TIMEOUT_SECONDS", 0.2)
    start = roll(processes=2).come(0, timeout=2.5).come(1, key=ANOTHER)
    advice = "share run.dir among all hosts, or set JAXMNT_RUN_KEY to the same value in every process"
    refused, waited = start.outcome(1), start.outcome(0)
    assert isinstance(refused, PreflightError) and "have different run keys" in str(refused) and advice in str(refused)
    assert refused.hosts == [socket.gethostname()]
    assert isinstance(waited, PreflightError) and "127.0.0.1 connected without the run's key" in str(waited)
    assert advice in str(waited) and waited.processes == [1]
    told = capfd.readouterr().err + str(refused) + str(waited)
    assert KEY.hex() not in told and ANOTHER.hex() not in told


def test_a_greeting_is_no_word_of_a_stranger_that_anybody_parses():
    for line in (
        b"[1]",
        b'{"a": Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"1" * 400 + b"}",
        b"[" * 10**5,
        b"\xff",
        b"",
    ):
        with pytest.raises(ValueError):
            parse(line)
    assert parse('{"a": [1, 2.5, "ä"]}'.encode()) == {"a": [1, 2.5, "ä"]}


# The key.


def test_the_first_to_come_makes_the_key_for_all(tmp_path):
    keys = []
    threads = [threading.Thread(target=lambda: keys.append(run_key(tmp_path / "run", {}))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8 and len(set(keys)) == 1 and len(keys[0]) == 32
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.key"]
    assert (tmp_path / "run" / "run.key").stat().st_mode & 0o777 == 0o600


def test_a_file_system_without_links_has_a_key_as_well(tmp_path, monkeypatch):
    def link(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    assert run_key(tmp_path, {}) == run_key(tmp_path, {})
    assert [path.name for path in tmp_path.iterdir()] == ["run.key"]


def test_the_launchers_key_counts_more(tmp_path):
    assert run_key(tmp_path, {"JAXMNT_RUN_KEY": f" {KEY.hex().upper()}\n"}) == KEY
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="JAXMNT_RUN_KEY: must be 64 hexadecimal digits") as raised:
        run_key(tmp_path, {"JAXMNT_RUN_KEY": "secret"})
    assert "secret" not in str(raised.value)


def test_a_key_that_others_may_read_is_kept_from_them(tmp_path, capfd):
    key = run_key(tmp_path, {})
    (tmp_path / "run.key").chmod(0o644)
    assert run_key(tmp_path, {}) == key
    assert (tmp_path / "run.key").stat().st_mode & 0o777 == 0o600
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("what", ["empty", "pipe", "folder", "link", "no folder"])
def test_what_is_no_key_is_said_with_its_place(tmp_path, monkeypatch, what):
    monkeypatch.setattr(authentication, "_FILE_TIMEOUT_SECONDS", 0.0)
    run = tmp_path / "run"
    path = run / "run.key"
    if what == "no folder":
        run.write_text("")
    else:
        run.mkdir()
        make = {
            "empty": path.touch,
            "pipe": lambda: os.mkfifo(path),
            "folder": path.mkdir,
            "link": lambda: path.symlink_to("/dev/zero"),
        }
        make[what]()
    with pytest.raises(ConfigError, match=r"^run.dir: .*run/run\.key"):
        run_key(run, {})


# Where process 0 listens.


@pytest.mark.parametrize(
    ("coordinator", "known", "ours", "where", "note"),
    [
        ("127.0.0.1:9", [], [], "127.0.0.1", ""),
        ("n0:9", ["10.0.0.7"], ["10.0.0.7"], "10.0.0.7", ""),
        ("n0:9", ["10.0.0.7", "10.1.0.7"], ["10.1.0.7"], "10.1.0.7", ""),
        ("n0:9", ["127.0.1.1"], ["127.0.1.1"], "", "port 9 of all interfaces: n0 is 127.0.1.1 here"),
        ("n0:9", ["10.0.0.7", "fd00::7"], ["10.0.0.7", "fd00::7"], "", "n0 is 10.0.0.7, fd00::7 here"),
        ("n0:9", None, [], "", "cannot resolve n0 here"),
    ],
)
def test_process_0_listens_where_the_others_look_for_it(monkeypatch, coordinator, known, ours, where, note):
    def resolved(host):
        if known is None:
            raise OSError(None, "no such name")
        return known

    monkeypatch.setattr(addresses, "resolve", resolved)
    monkeypatch.setattr(addresses, "_is_local_address", ours.__contains__)
    found = addresses.listening_address(Identity(0, 2, coordinator))
    assert found[0] == where and note in found[1] and bool(found[1]) == bool(note)


def test_a_name_that_is_none_is_an_error_of_the_network():
    with pytest.raises(OSError, match="not the name of a host"):
        addresses.resolve("a..b")


def test_what_connects_and_never_greets_is_no_process_0():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
        pytest.raises(authentication.StrangerError, match="sends no greeting"),
    ):
        prove(connection, KEY, 0.1)


@given(process=st.integers(0, 10_000), processes=st.integers(2, 20_000))
def test_attempts_to_connect_grow_apart(process, processes):
    """Small runs keep trying ten times a second; all processes of a large one together stay below a rate."""
    pauses = list(itertools.islice(retry_pauses(process, processes), 40))
    assert 0.05 <= pauses[0] <= 0.1 and max(pauses) <= 2.0
    longest = max(0.1, min(2.0, processes / 2000))
    assert all(longest / 2 <= pause <= longest for pause in pauses[20:])
    assert pauses != list(itertools.islice(retry_pauses(process + 1, processes), 40))
