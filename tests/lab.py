"""Several hosts on this machine: network namespaces with a card, a name and an /etc/hosts each, behind one switch.

Needs root and iproute2. A slow link is a token bucket on both its ends, as not every kernel has netem.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest


class Lab:
    """Hosts h0, h1, … of a network of their own. Everything is gone after `close`."""

    def __init__(self, hosts: int, net: str = "10.203.7"):
        self.count, self._net = hosts, net
        self._tag = f"jm{os.getpid() % 100000}"
        self.folder = Path(tempfile.mkdtemp(prefix="jaxmnt-lab-"))
        self._started: list[subprocess.Popen] = []
        self.write_hosts()
        try:
            self._wire()
        except BaseException:
            self.close()
            raise

    def _wire(self) -> None:
        run("ip", "netns", "add", self._space("switch"))
        self.switch("ip", "link", "add", "br0", "type", "bridge")
        self.switch("ip", "link", "set", "br0", "up")
        for host in range(self.count):
            run("ip", "netns", "add", self._space(host))
            far = ("type", "veth", "peer", "name", "eth0", "netns", self._space(host))
            self.switch("ip", "link", "add", f"port{host}", *far)
            self.switch("ip", "link", "set", f"port{host}", "master", "br0", "up")
            self.inside(host, "ip", "link", "set", "lo", "up")
            self.inside(host, "ip", "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            self.inside(host, "ip", "link", "set", "eth0", "up")

    def address(self, host: int) -> str:
        return f"{self._net}.{10 + host}"

    def write_hosts(self, name: str = "hosts", **changed: str) -> Path:
        """An /etc/hosts; `changed` gives some names other addresses."""
        known = {"localhost": "127.0.0.1"} | {f"h{host}": self.address(host) for host in range(self.count)} | changed
        path = self.folder / name
        path.write_text("".join(f"{address} {host}\n" for host, address in known.items()))
        return path

    def switch(self, *command: str) -> None:
        run("ip", "netns", "exec", self._space("switch"), *command)

    def inside(self, host: int, *command: str) -> None:
        run("ip", "netns", "exec", self._space(host), *command)

    def start(
        self, host: int, *command: str, hosts: Path | None = None, private: Path | None = None, cards: bool = True,
        quiet: bool = False, **options,
    ):  # fmt: skip
        """A command on a host; `private` is a folder that the others do not share. With `cards` it sees its own
        network cards under /sys, and no cgroups."""
        script = (
            'hostname "$1"; mount --bind "$2" /etc/hosts; '
            + ("mount -t sysfs sysfs /sys; " if cards else "")
            + '[ -z "$3" ] || mount -t tmpfs tmpfs "$3"; shift 3; exec "$@"'
        )
        arguments = [f"h{host}", str(hosts or self.folder / "hosts"), str(private or "")]
        process = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{self._space(host)}", "unshare", "--uts", "--mount",
             "sh", "-ec", script, "lab", *arguments, *command],
            stdout=subprocess.DEVNULL if quiet else subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options,
        )  # fmt: skip
        self._started.append(process)
        return process

    def slow_down(self, host: int, megabits: int) -> None:
        bucket = ("root", "tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "50ms")
        self.switch("tc", "qdisc", "replace", "dev", f"port{host}", *bucket)
        self.inside(host, "tc", "qdisc", "replace", "dev", "eth0", *bucket)

    def speed_up(self, host: int) -> None:
        self.switch("tc", "qdisc", "del", "dev", f"port{host}", "root")
        self.inside(host, "tc", "qdisc", "del", "dev", "eth0", "root")

    def block(self, host: int, port: int) -> None:
        """What that host sends to this port anywhere is lost without a word, sent to nobody."""
        nobody = f"{self._net}.99"
        self.inside(
            host, "ip", "neigh", "add", nobody, "lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent"
        )
        self.inside(host, "ip", "route", "add", "default", "via", nobody, "dev", "eth0", "table", "77")
        self.inside(host, "ip", "rule", "add", "pref", "9", "ipproto", "tcp", "dport", str(port), "lookup", "77")

    def unblock(self, host: int) -> None:
        self.inside(host, "ip", "rule", "del", "pref", "9")
        self.inside(host, "ip", "route", "flush", "table", "77")

    def unplug(self, host: int) -> None:
        self.switch("ip", "link", "set", f"port{host}", "down")

    def plug_in(self, host: int) -> None:
        self.switch("ip", "link", "set", f"port{host}", "up")

    def stop(self) -> None:
        """Ends what still runs."""
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate()
        self._started.clear()

    def close(self) -> None:
        self.stop()
        for name in ("switch", *range(self.count)):
            subprocess.run(["ip", "netns", "del", self._space(name)], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _space(self, name: str | int) -> str:
        return f"{self._tag}-{name}"


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def outcomes(processes: list[subprocess.Popen], seconds: float) -> list[tuple[int, str]]:
    """Exit code and output of each, all of which must have ended by then."""
    deadline = time.monotonic() + seconds
    return [
        (process.returncode, text)
        for process in processes
        for text, _ in [process.communicate(timeout=max(0.1, deadline - time.monotonic()))]
    ]


def skip_without_namespaces() -> None:
    """Says why, where hosts cannot be made."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("nsenter"):
        pytest.skip("hosts are network namespaces, which need root and iproute2")
    probe = f"jmprobe{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode != 0:
        pytest.skip("network namespaces are not permitted here")
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
