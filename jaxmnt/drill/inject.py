"""python -m jaxmnt.drill.inject PLAN -- [arguments of jaxmnt.train]

Trains like jaxmnt.train, and injects the faults of a plan into this process at the planned moments. The drill writes
the plan, which says what happens in which process.
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

_FULL_DISK_FILE_BYTES = 100_000
"""Maximum size of a file while the disk is "full". Events still fit, but the train state does not."""
_IDLE_SECONDS = 1.0
"""Time for which all processes are idle around a fault that should happen while they are idle."""
_SHORT_DELAY_SECONDS = 0.02
"""Time from the beginning of a restore or a compilation to a fault that should happen during it."""
_EXTRA_STEP_SECONDS = 0.1
"""Time added to each step of the tiny model, so that a checkpoint is written before the next one is due."""
_HANG_SECONDS = 1e6
"""Duration of a hang; longer than any timeout."""
_MAX_EVAL_BATCHES = 2
"""Maximum number of batches in an evaluation."""
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
"""The signal that each of these acts sends to this process."""


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
    injector.slow_down([fault.offset for fault in faults if fault.moment == "idle"])
    for fault in faults:
        if fault.victim in (None, identity.process_id):
            injector.arm(fault)
    return train.command(train_arguments)


class FaultInjector:
    """Injects faults into this process by wrapping functions, whose behaviour stays the same apart from the faults."""

    def __init__(self, identity: Identity, journal: Path, run_dir: Path):
        self._identity, self._journal, self._run_dir = identity, journal, run_dir
        self._staged_step = 0

    def arm(self, fault: Fault) -> None:
        """Arranges for a fault to happen at its moment in this process."""
        from jaxmnt.checkpoint import saver
        from jaxmnt.data.batches import TrainingData
        from jaxmnt.data.feed import Feed
        from jaxmnt.run import compiling, input, starting_state

        def cause_now(*_: Any) -> None:
            self._cause(fault)

        def cause_after(seconds: float) -> Callable[..., None]:
            return lambda *_: threading.Timer(seconds, cause_now).start()

        if fault.moment == "start":
            cause_now()
        elif fault.moment == "batch":
            _wrap(input, "training_feed", call_before=self._set_first_step)
            _wrap(Feed, "stage", call_after=lambda feed: self._poison(fault, feed))
        else:
            owner, name, call_before = {
                "step": (Feed, "take", _on_call(fault.offset, cause_now)),
                # When the next batch is staged, the devices are busy with a step.
                "mid-step": (Feed, "stage", _on_call(fault.offset + 1, cause_now)),
                "idle": (Feed, "take", _on_call(fault.offset, cause_after(_IDLE_SECONDS / 2))),
                "save": (saver, "_wait_until_written", _on_call(fault.offset, cause_now)),
                "restore": (starting_state, "restore", cause_after(_SHORT_DELAY_SECONDS)),
                "compile": (compiling, "compile_program", cause_after(_SHORT_DELAY_SECONDS)),
                "prefetch": (TrainingData, "batch", _on_call(fault.offset, cause_now)),
            }[fault.moment]
            _wrap(owner, name, call_before=call_before)

    def slow_down(self, idle_steps: list[int]) -> None:
        """Slows down all steps, the idle steps most, and shortens evaluations. Must be called in all processes."""
        from jaxmnt.data.batches import EvaluationData
        from jaxmnt.data.feed import Feed

        all_batches = EvaluationData.batches

        def first_batches(*arguments: Any, **keywords: Any) -> Any:
            return islice(all_batches(*arguments, **keywords), _MAX_EVAL_BATCHES)

        setattr(EvaluationData, "batches", first_batches)  # noqa: B010 (mypy does not allow assigning to a method)
        _wrap(Feed, "take", call_before=lambda *_: time.sleep(_EXTRA_STEP_SECONDS))
        for step in idle_steps:
            _wrap(Feed, "take", call_before=_on_call(step, lambda *_: time.sleep(_IDLE_SECONDS)))

    def _cause(self, fault: Fault) -> None:
        """Causes a fault now."""
        if fault.act == "fill":
            self._fill_disk(fault)
            return
        self._write_to_journal(fault)
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

    def _write_to_journal(self, fault: Fault) -> None:
        """Records a fault in the journal of the drill. Must be called just before the fault happens."""
        record = {"kind": "fault", "fault": fault.name, "process": self._identity.process_id, "time": time.time()}
        with self._journal.open("a", encoding="utf-8") as journal:
            journal.write(json_text(record) + "\n")

    def _set_first_step(self, data: Any, program: Any, start_step: int) -> None:
        """Remembers the step after which the first batch is staged; takes the arguments of `training_feed`."""
        self._staged_step = start_step

    def _poison(self, fault: Fault, feed: Any) -> None:
        """Sets the weights of the staged batch to NaN if the batch belongs to the step of the fault.

        All processes must do it, because they share the arrays of the batch. It is the data that is meant to be bad, so
        the batch is poisoned in every start that trains this step.
        """
        self._staged_step += 1
        if self._staged_step != fault.offset:
            return
        self._write_to_journal(fault)
        batch, digest = feed._staged
        feed._staged = batch | {"weights": batch["weights"] * float("nan")}, digest

    def _fill_disk(self, fault: Fault) -> None:
        """Limits the size of the files that this process writes, until a save has failed."""
        from jaxmnt.run.saves import CheckpointManager

        self._write_to_journal(fault)
        _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)

        def limit_file_size(limit: int) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard_limit))

        limit_file_size(_FULL_DISK_FILE_BYTES)
        _wrap(CheckpointManager, "_report_failure", call_before=lambda *_: limit_file_size(hard_limit))


def damage_newest(run_dir: Path) -> None:
    """Flips a bit in the middle of the largest file of the newest valid checkpoint of a run.

    Newer checkpoints are left alone, because they may be incomplete.
    """
    checkpoint = newest_valid(run_dir / "checkpoints")
    assert checkpoint is not None
    folder = Path(str(checkpoint.path))
    largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    raw = bytearray(largest.read_bytes())
    raw[len(raw) // 2] ^= 1
    largest.write_bytes(raw)


def cut_connections(identity: Identity) -> None:
    """Silently drops the packets of all connections of this process, except those to the coordinator.

    This changes routing rules, so the process must run in a separate network namespace.
    """
    _, coordinator_port = identity.address
    _ip("rule", "add", "pref", "100", "lookup", "local")
    _ip("rule", "del", "pref", "0")
    for local, remote in _connection_ports():
        if coordinator_port not in (local, remote):
            for source, target in ((local, remote), (remote, local)):
                ports = ("sport", str(source), "dport", str(target))
                _ip("rule", "add", "pref", "10", "ipproto", "tcp", *ports, "blackhole")


def _connection_ports() -> list[tuple[int, int]]:
    """Returns the local and the remote port of each established TCP connection of this process."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            socket = re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink()))
        except OSError:  # the descriptor has been closed in the meantime
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
    """Runs the command `ip` with the given arguments."""
    subprocess.run(["ip", *arguments], check=True)


def _raise_drill_error() -> None:
    raise DrillError("raised by the drill")


def _on_call(number: int, action: Callable[..., None]) -> Callable[..., None]:
    """Returns a function that calls `action` only when it is itself called for the `number`-th time, counted from 1."""
    call_numbers = count(1)

    def call_on_number(*arguments: Any) -> None:
        if next(call_numbers) == number:
            action(*arguments)

    return call_on_number


def _do_nothing(*_: Any) -> None:
    pass


def _wrap(
    owner: Any,
    name: str,
    *,
    call_before: Callable[..., None] = _do_nothing,
    call_after: Callable[..., None] = _do_nothing,
) -> None:
    """Replaces a function or method of `owner` with one that calls `call_before` first and `call_after` last.

    Both are called with the positional arguments of the function.
    """
    original = getattr(owner, name)

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        call_before(*arguments)
        result = original(*arguments, **keywords)
        call_after(*arguments)
        return result

    setattr(owner, name, wrapped)


if __name__ == "__main__":
    run_command(main)
