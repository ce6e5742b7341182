"""A real Slurm on this machine: a controller and some nodes, each a host of a `Lab` with processes of its own.

Needs root, and Debian's slurmctld, slurmd, slurm-client and munge. Nothing outside its folder is changed.
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from lab import Lab, skip_without_namespaces

_NEEDED = ("slurmctld", "slurmd", "sbatch", "munged", "runuser")
_CONFIG = """
ClusterName=lab
SlurmctldHost=h0({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SlurmdTimeout={missed_after}
KillWait=5
MessageTimeout=5
TCPTimeout=2
ReturnToService=2
JobRequeue=1
AccountingStorageType=accounting_storage/none
NodeName=h[1-{nodes}] CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def skip_without_slurm() -> None:
    skip_without_namespaces()
    if missing := [name for name in _NEEDED if not shutil.which(name)]:
        pytest.skip(f"a real Slurm needs {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge")


class SlurmLab:
    """h0 is where the controller runs and jobs are submitted, h1, h2, … are the nodes."""

    def __init__(self, nodes: int):
        self.nodes = nodes
        self.lab = Lab(nodes + 1, "10.203.8")
        self._folder = self.lab.folder
        self._daemons: dict[int, subprocess.Popen] = {}
        self._munge: Path | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self._configure(missed_after=10)
        (self._folder / "state").mkdir()
        self._folder.chmod(0o755)
        self._start_munge()
        self._daemons[0] = self._on(0, "slurmctld", "-D")
        for node in range(1, self.nodes + 1):
            (self._folder / f"spool-h{node}").mkdir()
            self.boot(node)
        self.wait(lambda: self.idle() == self.nodes, 30, "all nodes are idle")

    def _configure(self, missed_after: int) -> None:
        config = _CONFIG.format(
            controller=self.lab.address(0), folder=self._folder, nodes=self.nodes, missed_after=missed_after
        )
        (self._folder / "slurm.conf").write_text(config)

    def miss_after(self, seconds: int) -> None:
        """When Slurm gives up a node that does not answer: here after 10 s, on a cluster mostly after 300."""
        self._configure(missed_after=seconds)
        self.call("scontrol", "reconfigure")

    def _start_munge(self) -> None:
        """With a key of its own. Its socket crosses network namespaces."""
        folder = self._folder / "munge"
        folder.mkdir(mode=0o755)
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o400)
        shutil.chown(folder, "munge", "munge")
        shutil.chown(folder / "key", "munge", "munge")
        names = {"key-file": "key", "seed-file": "seed", "socket": "socket", "pid-file": "pid", "log-file": "log"}
        options = [f"--{option}={folder / name}" for option, name in names.items()]
        subprocess.run(["runuser", "-u", "munge", "--", "munged", "--force", *options], check=True)
        self._munge = folder / "pid"

    def _on(self, host: int, *command: str, own_processes: bool = False) -> subprocess.Popen:
        inner = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"] if own_processes else []
        return self.lab.start(host, *inner, *command, cards=False, quiet=True, env=self._environment())

    def _environment(self) -> dict[str, str]:
        return dict(os.environ, SLURM_CONF=str(self._folder / "slurm.conf"))

    def boot(self, node: int) -> None:
        self._daemons[node] = self._on(node, "slurmd", "-D", "-N", f"h{node}", own_processes=True)

    def crash(self, node: int) -> None:
        """All processes of a node are gone at once: Slurm's, and those of its jobs."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()

    def call(self, *command: str, directory: Path | None = None) -> str:
        """A command on h0, such as sbatch or squeue; what it prints."""
        started = self.lab.start(0, *command, cards=False, env=self._environment(), cwd=directory)
        try:
            text, _ = started.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            started.kill()
            raise
        assert started.returncode == 0, text
        return text

    def idle(self) -> int:
        """How many nodes answer and have nothing left to clear away: Slurm calls others `idle*` or `completing`."""
        return self.call("sinfo", "-h", "-N", "-o", "%T").split().count("idle")

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        text = self.call("scontrol", "show", "job", number)
        return dict(part.split("=", 1) for part in text.split() if "=" in part)

    def nodes_of(self, number: str) -> list[int]:
        """The numbers of a running job's nodes."""
        names = self.call("scontrol", "show", "hostnames", self.job(number)["NodeList"]).split()
        return [int(name.removeprefix("h")) for name in names]

    def wait(self, ready, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{self._all()}"
            time.sleep(0.5)

    def _all(self) -> str:
        jobs = self.call("squeue", "--states=all", "-o", "%.5i %.12T %.10N %.20S %.20e %r")
        return f"{jobs}\n{self.call('sinfo', '-N', '-o', '%N %T')}"

    def close(self) -> None:
        try:
            if self._munge is not None and self._munge.exists():
                os.kill(int(self._munge.read_text()), signal.SIGTERM)
        finally:
            self.lab.close()
