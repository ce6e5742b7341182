"""python -m jaxmnt.drill.inject PLAN -- [arguments of jaxmnt.train]

Trains as jaxmnt.train does, and injects the faults of a plan into this process at their moments. The drill writes the
plan, which says what happens in which process.
"""

import json
import os
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path
from typing import Any

from jaxmnt import train
from jaxmnt.checkpoint.commit import newest_valid
from jaxmnt.commands import run_command
from jaxmnt.config import load_config
from jaxmnt.distributed.identity import Identity, identify
from jaxmnt.drill.faults import Fault
from jaxmnt.run.arguments import parse_arguments
from jaxmnt.strict_json import json_text

_FILE_BYTES = 100_000
"""Largest file while the disk is "full": events still fit, the train state does not."""
_IDLE_SECONDS, _SOON_SECONDS = 1.0, 0.02
_STEP_SECONDS = 0.1
"""Added to each step of the tiny model, so that a checkpoint is written before the next one is due."""
_HANG_SECONDS = 1e6
_EVAL_BATCHES = 2
"""Batches of an evaluation."""
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
"""Acts that send a signal to this process."""


class DrillError(RuntimeError):
    """The exception that the drill raises on purpose."""


def main(arguments: list[str]) -> int:
    plan, _, *train_arguments = arguments
    options = parse_arguments(train_arguments)
    config = load_config(options.config, options.overrides)
    identity = identify(config.cluster)
    content = json.loads(Path(plan).read_text(encoding="utf-8"))
    faults = [Fault(**fault) for fault in content["faults"]]
    injector = FaultInjector(identity, Path(content["journal"]), config.run_dir)
    injector.pace([fault.offset for fault in faults if fault.moment == "idle"])
    for fault in faults:
        if fault.victim in (None, identity.process_id):
            injector.arm(fault)
    return train.main(train_arguments)


class FaultInjector:
    """Injects faults into this process by wrapping functions, which otherwise work as before."""

    def __init__(self, identity: Identity, journal: Path, run_dir: Path):
        self._identity, self._journal, self._run_dir = identity, journal, run_dir
        self._staged_step = 0

    def arm(self, fault: Fault) -> None:
        """Arranges for a fault to happen at its moment."""
        from jaxmnt.checkpoint import saver
        from jaxmnt.data.batches import TrainingData
        from jaxmnt.data.feed import Feed
        from jaxmnt.run import compiling, input, starting_state

        act = lambda *_: self._act(fault)
        later = lambda seconds: lambda *_: threading.Timer(seconds, act).start()
        if fault.moment == "start":
            act()
        elif fault.moment == "batch":
            _wrap(input, "training_feed", before=self._note_first_step)
            _wrap(Feed, "stage", after=lambda feed: self._poison(fault, feed))
        else:
            owner, name, before = {
                "step": (Feed, "take", _on_call(fault.offset, act)),
                # When the next batch is staged, the devices are busy with a step.
                "mid-step": (Feed, "stage", _on_call(fault.offset + 1, act)),
                "idle": (Feed, "take", _on_call(fault.offset, later(_IDLE_SECONDS / 2))),
                "save": (saver, "_wait_until_written", _on_call(fault.offset, act)),
                "restore": (starting_state, "restore", later(_SOON_SECONDS)),
                "compile": (compiling, "compile_program", later(_SOON_SECONDS)),
                "prefetch": (TrainingData, "batch", _on_call(fault.offset, act)),
            }[fault.moment]
            _wrap(owner, name, before=before)

    def pace(self, idle_steps: list[int]) -> None:
        """Slows all steps down, the idle steps by more, and shortens evaluations. Called in all processes."""
        from jaxmnt.data.batches import EvaluationData
        from jaxmnt.data.feed import Feed

        batches = EvaluationData.batches
        first_batches = lambda *arguments, **keywords: islice(batches(*arguments, **keywords), _EVAL_BATCHES)
        setattr(EvaluationData, "batches", first_batches)  # noqa: B010 (mypy allows no method to be assigned)
        _wrap(Feed, "take", before=lambda *_: time.sleep(_STEP_SECONDS))
        for step in idle_steps:
            _wrap(Feed, "take", before=_on_call(step, lambda *_: time.sleep(_IDLE_SECONDS)))

    def _act(self, fault: Fault) -> None:
        """Causes a fault now."""
        if fault.act == "fill":
            self._fill_disk(fault)
            return
        self._note(fault)
        if fault.act in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[fault.act])
        elif fault.act == "exit":
            os._exit(0)
        elif fault.act == "hang":
            time.sleep(_HANG_SECONDS)
        elif fault.act == "raise":
            _raise_drill_error()
        elif fault.act == "raise in a thread":
            threading.Thread(target=_raise_drill_error, name="drill").start()
            time.sleep(_IDLE_SECONDS)
        elif fault.act == "damage":
            damage_newest(self._run_dir)
        elif fault.act == "cut":
            cut_connections(self._identity)
        else:
            raise AssertionError(fault.act)

    def _note(self, fault: Fault) -> None:
        """Writes a fault to the journal, before it happens."""
        record = {"kind": "fault", "fault": fault.name, "process": self._identity.process_id, "time": time.time()}
        with self._journal.open("a", encoding="utf-8") as journal:
            journal.write(json_text(record) + "\n")

    def _note_first_step(self, data: Any, program: Any, start_step: int) -> None:
        self._staged_step = start_step

    def _poison(self, fault: Fault, feed: Any) -> None:
        """Sets the weights of the staged batch to NaN if the batch is that of the fault's step.

        All processes do it, since the batch is one array. The data itself counts as bad, so every start that takes this
        step poisons it.
        """
        self._staged_step += 1
        if self._staged_step != fault.offset:
            return
        self._note(fault)
        batch, digest = feed._staged
        feed._staged = batch | {"weights": batch["weights"] * float("nan")}, digest

    def _fill_disk(self, fault: Fault) -> None:
        """Limits the size of this process's files until a save has failed."""
        from jaxmnt.run.saves import CheckpointManager

        self._note(fault)
        _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        limit_files = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard_limit))
        limit_files(_FILE_BYTES)
        _wrap(CheckpointManager, "_report_failure", before=lambda *_: limit_files(hard_limit))


def damage_newest(run_dir: Path) -> None:
    """Flips a bit in the middle of the largest file of the newest valid checkpoint; newer ones may be incomplete."""
    checkpoint = newest_valid(run_dir / "checkpoints")
    assert checkpoint is not None
    newest = Path(str(checkpoint.path))
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    raw = bytearray(largest.read_bytes())
    raw[len(raw) // 2] ^= 1
    largest.write_bytes(raw)


def cut_connections(identity: Identity) -> None:
    """Silently drops the packets of this process's connections, except those to the coordinator.

    Uses routing rules, so it must run in a separate network namespace.
    """
    _, coordinator = identity.address
    _ip("rule", "add", "pref", "100", "lookup", "local")
    _ip("rule", "del", "pref", "0")
    for local, remote in _connections():
        if coordinator not in (local, remote):
            for source, target in ((local, remote), (remote, local)):
                ports = ("sport", str(source), "dport", str(target))
                _ip("rule", "add", "pref", "10", "ipproto", "tcp", *ports, "blackhole")


def _connections() -> list[tuple[int, int]]:
    """Returns the local and the remote port of each established TCP connection of this process."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            socket = re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink()))
        except OSError:  # the descriptor was closed meanwhile
            continue
        if socket:
            inodes.add(socket[1])
    established = "01"
    pairs = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == established and fields[9] in inodes:
                local, remote = (int(address.rpartition(":")[2], 16) for address in fields[1:3])
                pairs.append((local, remote))
    return pairs


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _raise_drill_error() -> None:
    raise DrillError("raised by the drill")


def _on_call(number: int, act: Callable[..., None]) -> Callable[..., None]:
    """Returns a function that calls `act` only when it is called for the `number`-th time, counted from 1."""
    calls = count(1)

    def counted(*arguments: Any) -> None:
        if next(calls) == number:
            act(*arguments)

    return counted


def _do_nothing(*_: Any) -> None:
    pass


def _wrap(
    owner: Any, name: str, *, before: Callable[..., None] = _do_nothing, after: Callable[..., None] = _do_nothing
) -> None:
    """Makes a function or method of `owner` call `before` and `after` around itself, with its positional arguments."""
    original = getattr(owner, name)

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        before(*arguments)
        result = original(*arguments, **keywords)
        after(*arguments)
        return result

    setattr(owner, name, wrapped)


if __name__ == "__main__":
    run_command(main)
