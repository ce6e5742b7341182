"""A start and a failure of many processes: bytes and time of process 0, whose peers are a load generator.

    python benchmarks/control_plane.py [--processes 64 1024 4096] [--kills 10]

Process 0 runs jaxmnt's own code. The others are played by two programs that only send and receive, each with a
connection for every process that it plays, so the machine needs no thousand cores. Three things are measured for each
number of processes:

- the exchange of facts and hosts at a start, over JAX's coordination service: bytes that process 0 sends, and seconds
- the heartbeat: processor time of process 0 for each process and second
- a kill: the time until all other processes are told, with all cores busy; the median and the worst of several

Prints a JSON line for each number of processes, and the exponents of a power law over these numbers.
"""

import argparse
import json
import math
import os
import platform
import re
import resource
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise

from jaxmnt.distributed.container import cores
from jaxmnt.distributed.heartbeat import Heartbeat
from jaxmnt.distributed.identity import Identity
from jaxmnt.distributed.json_socket import JsonSocket, encode_line
from jaxmnt.distributed.messages import Beat, Position
from jaxmnt.distributed.rendezvous_server import Peer
from jaxmnt.distributed.termination import ExitHandler
from jaxmnt.telemetry.phases import PHASES

PROGRAMS = 2
BEATS = 5
"""Seconds for which heartbeats are measured."""
BOOT = "0b0f1c2d-3e4f-5a6b-7c8d-9e0f1a2b3c4d"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[64, 1024, 4096])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--play", nargs=4, metavar="PART", help=argparse.SUPPRESS)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.play:
        part, port, first, last = options.play
        {"start": play_start, "beats": play_beats}[part](int(port), int(first), int(last))
        return
    if len(options.processes) == 1:
        print(json.dumps(measure(options.processes[0], options.kills)))
        return
    results = []
    for processes in options.processes:
        # Process 0 counts its exchanges, and the players play the first: each measurement is a program of its own.
        command = [sys.executable, __file__, "--processes", str(processes), "--kills", str(options.kills)]
        line = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        print(line, end="", flush=True)
        results.append(json.loads(line))
    names = ("start_bytes", "start_cpu_seconds", "beat_cpu_seconds_per_second")
    print(json.dumps({f"exponent_of_{name}": exponent(results, name) for name in names}))


def measure(processes: int, kills: int) -> dict:
    result = {"processes": processes} | measure_start(processes) | measure_beats(processes, kills)
    return result | {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "cores": cores()}


def exponent(results: list[dict], name: str) -> float:
    """The slope of a straight line through the logarithms."""
    sizes = [math.log(result["processes"]) for result in results]
    return statistics.linear_regression(sizes, [math.log(result[name]) for result in results]).slope


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def players(part: str, port: int, processes: int) -> list[subprocess.Popen]:
    """Starts the programs that play all processes but 0."""
    cuts = [1 + (processes - 1) * number // PROGRAMS for number in range(PROGRAMS + 1)]
    return [
        subprocess.Popen(
            [sys.executable, __file__, "--play", part, str(port), str(first), str(last)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        for first, last in pairwise(cuts)
    ]  # fmt: skip


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


# -- the facts and hosts of a start, over JAX's coordination service


def connect_jax(port: int, process: int):
    from jax._src.lib import _jax

    client = _jax.get_distributed_runtime_client(
        f"127.0.0.1:{port}", process, init_timeout=250, use_compression=True, heartbeat_timeout=100,
        shutdown_on_destruction=False,
    )  # fmt: skip
    client.connect()
    return client


def facts_of(process: int) -> dict:
    return {"host": f"gke-pool-{process:08x}", "boot": f"{process:08x}{BOOT[8:]}", "clock": (-0.001, 0.001),
            "devices": 8, "kind": "NVIDIA H100 80GB HBM3", "platform": "gpu"}  # fmt: skip


def measure_start(processes: int) -> dict:
    """Runs the exchanges of a start in process 0, with jaxmnt's own functions."""
    from jax._src import distributed
    from jax._src.lib import _jax

    from jaxmnt.distributed.coordination import broadcast
    from jaxmnt.distributed.process_group import host_names
    from jaxmnt.preflight.compare import _verdict, process_hosts, quick_rows
    from jaxmnt.preflight.facts import gather_facts
    from jaxmnt.preflight.table import failures

    port = free_port()
    identity = Identity(0, processes, f"127.0.0.1:{port}")
    service = _jax.get_distributed_runtime_service(
        f"127.0.0.1:{port}", processes, heartbeat_timeout=100, shutdown_timeout=10
    )
    programs = players("start", port, processes)
    distributed.global_state.client = connect_jax(port, 0)
    for program in programs:
        assert program.stdout.readline() == "connected\n"
    before, cpu, began = bytes_sent(port), cpu_seconds(), time.perf_counter()
    for program in programs:
        program.stdin.write("go\n")
        program.stdin.flush()
    all_facts = gather_facts("what the start looks at", facts_of(0), identity)
    broadcast("what was found", _verdict(failures(quick_rows(all_facts)), process_hosts(all_facts)), identity)
    host_names(identity)
    for program in programs:
        assert program.stdout.readline() == "done\n"
    result = {
        "start_bytes": bytes_sent(port) - before,
        "start_cpu_seconds": cpu_seconds() - cpu,
        "start_seconds": time.perf_counter() - began,
    }
    end(programs)
    distributed.global_state.client = None
    del service
    return result


def play_start(port: int, first: int, last: int) -> None:
    threading.stack_size(256 * 1024)
    with ThreadPoolExecutor(last - first) as pool:
        clients = dict(
            zip(range(first, last), pool.map(lambda p: connect_jax(port, p), range(first, last)), strict=True)
        )
        print("connected", flush=True)
        sys.stdin.readline()

        def play(process: int) -> None:
            client = clients[process]
            own = f"{process:06d}"
            client.key_value_set(f"jaxmnt/gather/what the start looks at 1/{own}", json.dumps(facts_of(process)))
            client.blocking_key_value_get("jaxmnt/broadcast/what was found 1", 200_000)
            machine = json.dumps([facts_of(process)["boot"], facts_of(process)["host"]])
            client.key_value_set(f"jaxmnt/gather/every process has named its host 1/{own}", machine)
            client.blocking_key_value_get("jaxmnt/broadcast/the hosts 1", 200_000)

        list(pool.map(play, clients))
        print("done", flush=True)
        sys.stdin.read()
        os._exit(0)


def bytes_sent(port: int) -> int:
    """The bytes that this process has sent from a port, by the kernel."""
    text = subprocess.run(["ss", "-tinH", f"sport = :{port}"], capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"bytes_sent:(\d+)", text)))


# -- heartbeats, and a kill


class Ending(ExitHandler):
    """Notes that this process would end."""

    def __init__(self):
        super().__init__()
        self.ended = threading.Event()

    def exit_now(self, exit_reason):
        self.exit_reason = exit_reason
        self.ended.set()


def measure_beats(processes: int, kills: int) -> dict:
    told, result = [], {}
    for number in range(kills):
        heartbeat, connections, programs = begin_beats(processes)
        if number == 0:
            heartbeat.take_report = lambda process, report: None
            time.sleep(1.0)
            cpu = cpu_seconds()
            time.sleep(BEATS)
            result["beat_cpu_seconds_per_second"] = (cpu_seconds() - cpu) / BEATS
        else:
            time.sleep(1.5)
        with busy_cores():
            time.sleep(0.5)
            programs[0].stdin.write("kill\n")
            programs[0].stdin.flush()
            times = [json.loads(program.stdout.readline()) for program in programs]
        told.append(max(answer["told"] for answer in times) - times[0]["killed"])
        assert sum(answer["heard"] for answer in times) == processes - 2
        end(programs)
        heartbeat.leave()
        for connection in connections:
            connection.close()
    return result | {"told_seconds_median": statistics.median(told), "told_seconds_worst": max(told), "kills": kills}


def begin_beats(processes: int) -> tuple[Heartbeat, list[JsonSocket], list[subprocess.Popen]]:
    """Starts process 0's heartbeat, connected to all others. Returns it with its connections, and the programs."""
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as server:
        programs = players("beats", server.getsockname()[1], processes)
        server.settimeout(60.0)  # a program that has failed must not be waited for
        peers = {}
        for _ in range(processes - 1):
            connection, _ = server.accept()
            own = JsonSocket(connection)
            hello = own.receive_one(30.0)
            peers[hello["process"]] = Peer(f"node-{hello['process']}", own)
    heartbeat = Heartbeat(Identity(0, processes, "127.0.0.1:1"), peers, Ending(), 900.0, 900.0)
    heartbeat.position = lambda: Position(5, "taking steps", settled=True)
    heartbeat.start()
    return heartbeat, [peer.connection for peer in peers.values()], programs


def play_beats(port: int, first: int, last: int) -> None:
    """Sends a beat with phases for each process every second. At `kill`, closes the first connection and notes when the
    verdict has reached the last."""
    selector, connections = selectors.DefaultSelector(), {}
    for process in range(first, last):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(encode_line({"process": process}))
        selector.register(connection, selectors.EVENT_READ, process)
        connections[process] = connection
    os.set_blocking(0, False)
    selector.register(0, selectors.EVENT_READ, None)
    killed, told, step = 0.0, {}, 0
    next_beat = time.monotonic()
    expected = len(connections)
    while len(told) < expected:
        for key, _ in selector.select(max(0.0, next_beat - time.monotonic())):
            if key.data is None:
                if os.read(0, 100):
                    killed, expected = time.time(), expected - 1
                    selector.unregister(connections[first])
                    connections.pop(first).close()
                else:
                    return
            elif not (received := key.fileobj.recv(1 << 16)) or b'"verdict"' in received:
                told.setdefault(key.data, time.time())
                selector.unregister(key.fileobj)
        if time.monotonic() >= next_beat and not told:
            next_beat += 1.0
            step += 1
            report = [[step, [0.001] * len(PHASES)]]
            line = encode_line(asdict(Beat(Position(step, "taking steps", settled=True), report)))
            for connection in connections.values():
                connection.sendall(line)
    print(json.dumps({"killed": killed, "told": max(told.values()), "heard": len(told)}), flush=True)
    os.set_blocking(0, True)
    sys.stdin.read()


@contextmanager
def busy_cores() -> Iterator[None]:
    """Within this context, all cores compute."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores())]
    try:
        yield
    finally:
        end(programs)


def end(programs: list[subprocess.Popen]) -> None:
    for program in programs:
        program.kill()
        program.wait()


if __name__ == "__main__":
    main()
