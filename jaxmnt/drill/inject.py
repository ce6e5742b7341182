"""python -m jaxmnt.drill.inject PLAN -- [arguments of jaxmnt.train]

Trains as jaxmnt.train does, and causes the faults of a plan in this process at their moments. A plan is written by the
drill, and says in which process what happens.
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
"""With a full disk a file can be no larger: events still fit, the state does not."""
_IDLE_SECONDS, _SOON_SECONDS = 1.0, 0.02
_STEP_SECONDS = 0.1
"""A tiny model's steps are slowed down to this, so that between two checkpoints there is time to write one."""
_FOR_EVER_SECONDS = 1e6
_EVALUATED = 2
"""Batches of an evaluation."""
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
"""Acts that are a signal to this process."""


class DrillError(RuntimeError):
    """Raised on purpose."""


def main(arguments: list[str]) -> int:
    plan, _, *train_arguments = arguments
    options = parse_arguments(train_arguments)
    config = load_config(options.config, options.overrides)
    identity = identify(config.cluster)
    told = json.loads(Path(plan).read_text(encoding="utf-8"))
    faults = [Fault(**fault) for fault in told["faults"]]
    injector = FaultInjector(identity, Path(told["journal"]), config.run_dir)
    injector.pace([fault.offset for fault in faults if fault.moment == "idle"])
    for fault in faults:
        if fault.victim in (None, identity.process_id):
            injector.arm(fault)
    return train.main(train_arguments)


class FaultInjector:
    """Causes faults in this process. Everything it touches it wraps: what is wrapped goes on as before."""

    def __init__(self, identity: Identity, journal: Path, run_dir: Path):
        self._identity, self._journal, self._run_dir = identity, journal, run_dir
        self._staged_step = 0

    def arm(self, fault: Fault) -> None:
        """Prepares a fault for its moment."""
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
                "step": (Feed, "take", _nth(fault.offset, act)),
                # The devices are busy with a step when the next batch is staged.
                "mid-step": (Feed, "stage", _nth(fault.offset + 1, act)),
                "idle": (Feed, "take", _nth(fault.offset, later(_IDLE_SECONDS / 2))),
                "save": (saver, "_written", _nth(fault.offset, act)),
                "restore": (starting_state, "restore", later(_SOON_SECONDS)),
                "compile": (compiling, "compile_program", later(_SOON_SECONDS)),
                "prefetch": (TrainingData, "batch", _nth(fault.offset, act)),
            }[fault.moment]
            _wrap(owner, name, before=before)

    def pace(self, idle_steps: list[int]) -> None:
        """Slows steps down, and some of them by more, and makes evaluations short. In all processes."""
        from jaxmnt.data.batches import EvaluationData
        from jaxmnt.data.feed import Feed

        batches = EvaluationData.batches
        some = lambda *given, **named: islice(batches(*given, **named), _EVALUATED)
        setattr(EvaluationData, "batches", some)  # noqa: B010 (mypy allows no method to be assigned)
        _wrap(Feed, "take", before=lambda *_: time.sleep(_STEP_SECONDS))
        for step in idle_steps:
            _wrap(Feed, "take", before=_nth(step, lambda *_: time.sleep(_IDLE_SECONDS)))

    def _act(self, fault: Fault) -> None:
        if fault.act == "fill":
            self._fill_disk(fault)
            return
        self._note(fault)
        if fault.act in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[fault.act])
        elif fault.act == "exit":
            os._exit(0)
        elif fault.act == "hang":
            time.sleep(_FOR_EVER_SECONDS)
        elif fault.act == "raise":
            _raise()
        elif fault.act == "raise in a thread":
            threading.Thread(target=_raise, name="drill").start()
            time.sleep(_IDLE_SECONDS)
        elif fault.act == "damage":
            damage_newest(self._run_dir)
        elif fault.act == "cut":
            cut_connections(self._identity)
        else:
            raise AssertionError(fault.act)

    def _note(self, fault: Fault) -> None:
        """Into the journal, before it happens."""
        record = {"kind": "fault", "fault": fault.name, "process": self._identity.process_id, "time": time.time()}
        with self._journal.open("a", encoding="utf-8") as journal:
            journal.write(json_text(record) + "\n")

    def _note_first_step(self, data: Any, program: Any, start_step: int) -> None:
        self._staged_step = start_step

    def _poison(self, fault: Fault, feed: Any) -> None:
        """Makes the weights of the batch just staged no numbers, if it is that step's. In all processes: it is one
        array. It is the data that is bad, so whoever takes that step finds it so."""
        self._staged_step += 1
        if self._staged_step != fault.offset:
            return
        self._note(fault)
        batch, digest = feed._staged
        feed._staged = batch | {"weights": batch["weights"] * float("nan")}, digest

    def _fill_disk(self, fault: Fault) -> None:
        """Lets no file of this process grow, until a save has failed over it."""
        from jaxmnt.run.saves import CheckpointManager

        self._note(fault)
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        allow = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
        allow(_FILE_BYTES)
        _wrap(CheckpointManager, "_report_failure", before=lambda *_: allow(most))


def damage_newest(run_dir: Path) -> None:
    """Flips a bit in the middle of the largest file of the newest checkpoint that is whole: another may be cut off."""
    whole = newest_valid(run_dir / "checkpoints")
    assert whole is not None
    newest = Path(str(whole.path))
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    raw = bytearray(largest.read_bytes())
    raw[len(raw) // 2] ^= 1
    largest.write_bytes(raw)


def cut_connections(identity: Identity) -> None:
    """Drops, without a word to either side, what this process exchanges with others but not with the coordinator.

    By routing rules, in a network of our own only.
    """
    _, coordinator = identity.address
    _ip("rule", "add", "pref", "100", "lookup", "local")
    _ip("rule", "del", "pref", "0")
    for here, there in _connections():
        if coordinator not in (here, there):
            for source, target in ((here, there), (there, here)):
                ports = ("sport", str(source), "dport", str(target))
                _ip("rule", "add", "pref", "10", "ipproto", "tcp", *ports, "blackhole")


def _connections() -> list[tuple[int, int]]:
    """The ports, here and there, of the established TCP connections of this process."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found = re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink()))
        except OSError:  # closed meanwhile
            continue
        if found:
            inodes.add(found[1])
    established, pairs = "01", []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == established and fields[9] in inodes:
                here, there = (int(address.rpartition(":")[2], 16) for address in fields[1:3])
                pairs.append((here, there))
    return pairs


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _raise() -> None:
    raise DrillError("raised by the drill")


def _nth(number: int, act: Callable[..., None]) -> Callable[..., None]:
    """Acts at one call of many, counted from 1."""
    calls = count(1)

    def counted(*arguments: Any) -> None:
        if next(calls) == number:
            act(*arguments)

    return counted


def _nothing(*_: Any) -> None:
    pass


def _wrap(
    owner: Any, name: str, *, before: Callable[..., None] = _nothing, after: Callable[..., None] = _nothing
) -> None:
    """Has a function or method of `owner` call these around itself, with its own arguments."""
    original = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        before(*arguments)
        result = original(*arguments, **named)
        after(*arguments)
        return result

    setattr(owner, name, wrapped)


if __name__ == "__main__":
    run_command(main)
