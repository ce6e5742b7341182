"""Kills a run of several processes over and over, and sees that nothing committed is lost and the result is the same.

    python tests/trials/kills.py [--kills 40] [--seed 0] [--processes 2] [--write FILE.md]

A tiny run that saves every three steps gets SIGKILL in one of its processes or in all at once, at a random moment about
one of ten: it starts, compiles, restores, takes its first step, another, evaluates, a save begins, is written, is
committed, an older checkpoint is pruned. The same command is then given again, up to ten times, until the run is
finished. After every kill all checkpoints that count as
whole are read and compared with their digests, and the next start must go on from the newest of them. In the end
losses, batches and the last checkpoint must be those of a run that nobody disturbed, bit for bit. Prints a table and
ends with 1 after any failure, whose run directory is kept. For Linux.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conftest import TINY, metrics, write_words
from markdown import write_between

from jaxmnt.checkpoint.commit import NOTE, newest_valid, open_checkpoint, valid_checkpoints
from jaxmnt.checkpoint.export import verify
from jaxmnt.checkpoint.manifest import MANIFEST_FILE, DamagedError
from jaxmnt.data.preparation.inputs import Selection, Settings
from jaxmnt.data.preparation.run import build
from jaxmnt.errors import ExitCode

MOMENTS = ("start", "compile", "restore", "first step", "step", "evaluate", "begin", "write", "commit", "prune")
DELAY_SECONDS = {
    "start": 2.5, "compile": 0.7, "restore": 1.5, "first step": 0.3, "step": 0.5, "evaluate": 0.1,
    "begin": 0.03, "write": 0.3, "commit": 0.04, "prune": 0.02,
}  # fmt: skip
"""The kill comes at a random time up to this after the first sign of the moment."""

STEPS, EVERY, EVALUATE, KEEP = 120, 3, 6, 2
PATIENCE_SECONDS = 300.0
"""For anything that is waited for: a start compiles, and the machine may be busy."""
POLL_SECONDS = 0.001


class FailedError(Exception):
    """What should not have happened."""


@dataclass
class Kill:
    """One kill, and what came of it."""

    moment: str
    victims: tuple[int, ...]
    saves: int
    """It comes in so many saves after the start."""
    delay: float
    """A share of the longest."""
    early: bool
    """For restore: after it was announced, and not when all processes have compiled their programs and begin it."""
    done: bool = False
    unfinished: bool = False
    """Whether it left a save, a commit or a removal half done."""
    resumed: bool = False
    verified: int = 0
    """Checkpoints that were whole after it, all verified."""
    identical: bool = False
    at: float = 0.0
    """When it was, in Unix seconds."""
    gone_seconds: float | None = None
    """Until the last process of that start had ended."""
    back_seconds: float | None = None
    """Until the first new step, if the next start came so far."""


@dataclass
class Trial:
    """One run, killed several times."""

    folder: Path
    kills: list[Kill]
    failure: str | None = None
    starts: int = 0
    started: float = 0.0
    """When it was started last, in Unix seconds."""

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"


@dataclass
class Bench:
    """What all runs have in common."""

    folder: Path
    config: Path
    processes: int
    environment: dict[str, str] = field(default_factory=dict)


def main() -> int:
    options = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.FAILURE))  # by an exception, which ends the run, too
    started = time.monotonic()
    bench = prepare(Path(tempfile.mkdtemp(prefix="jaxmnt-kills-")), options.processes)
    reference = Trial(bench.folder / "reference", [])
    _finish(bench, reference)
    print(f"the undisturbed run took {time.monotonic() - started:.0f} s", flush=True)
    trials = plan(bench, options.kills, options.seed)
    for number, trial in enumerate(trials, 1):
        attempt(bench, trial, reference)
        outcome = trial.failure or "identical"
        print(f"run {number} of {len(trials)}, {time.monotonic() - started:.0f} s: {outcome}", flush=True)
        if trial.failure is None:
            shutil.rmtree(trial.folder)
    text = table([kill for trial in trials for kill in trial.kills])
    print(text)
    if options.write:
        write_between(options.write, "kills", text)
    failed = [trial for trial in trials if trial.failure]
    for trial in failed:
        print(f"FAILED {trial.failure}; see {trial.folder}")
    if not failed:
        shutil.rmtree(bench.folder)
    return 1 if failed else 0


def prepare(folder: Path, processes: int) -> Bench:
    """Writes the data and the config of the runs."""
    text, data, config = folder / "text", folder / "data", folder / "tiny.json"
    text.mkdir()
    write_words(text, files=40, words=150)
    build(Selection([text]), data, Settings(shard_tokens=4096, part_bytes=10_000), lambda *progress: None)
    tree = {name: dict(section) for name, section in TINY.items()}
    tree["data"] |= {"path": str(data), "log_digest": True}
    tree["model"] = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 48}
    tree["train"]["steps"] = STEPS
    tree["train"]["eval_every"] = EVALUATE
    tree["checkpoint"] = {"every_steps": EVERY, "keep": KEEP}
    config.write_text(json.dumps(tree))
    cache = folder / "cache"
    cache.mkdir(mode=0o700)
    quick_starts = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    return Bench(folder, config, processes, dict(os.environ, **quick_starts))


def plan(bench: Bench, kills: int, seed: int) -> list[Trial]:
    """The kills, every moment as often as the others, ten a run in random order."""
    rng = np.random.default_rng(seed)
    victims = [(number,) for number in range(bench.processes)] + [tuple(range(bench.processes))]
    trials = []
    for first in range(0, kills, len(MOMENTS)):
        moments = MOMENTS[: kills - first]
        order = rng.permutation(len(moments))
        while len(moments) > 1 and moments[order[0]] == "restore":  # there is nothing to restore yet
            order = rng.permutation(len(moments))
        chosen = [
            Kill(
                moments[i],
                victims[rng.integers(len(victims))],
                int(rng.integers(1, 4)),
                rng.random(),
                rng.random() < 0.5,
            )
            for i in order
        ]
        trials.append(Trial(bench.folder / f"run-{len(trials) + 1}", chosen))
    return trials


def attempt(bench: Bench, trial: Trial, reference: Trial) -> None:
    """Takes a run through its kills to its end; what is wrong is in `trial.failure`."""
    before: list[Kill] = []
    newest = 0
    try:
        for kill in trial.kills:
            with _started(bench, trial) as launcher:
                at = newest
                if kill.moment != "start":
                    at = _where_it_starts(trial, launcher)
                    _expect(at >= newest, f"start {trial.starts} goes on after step {at}, though {newest} was whole")
                    _resumed(before)
                committed = _kill(bench, trial, kill, launcher, at)
            _note_first_step(trial, before)
            newest = _look(trial, kill, max(newest, committed))
            before.append(kill)
        at = _finish(bench, trial)
        _expect(at >= newest, f"the last start goes on after step {at}, though {newest} was whole")
        _resumed(before)
        _note_first_step(trial, before)
        _compare(trial, reference)
    except FailedError as failure:
        trial.failure = str(failure)
        return
    for kill in trial.kills:
        kill.identical = True


def _resumed(before: list[Kill]) -> None:
    for kill in before:
        kill.resumed = True


def _note_first_step(trial: Trial, before: list[Kill]) -> None:
    """How long after the last kill this start, which has ended, took its first step, if it did."""
    if before and (trial.run / "metrics.jsonl").exists():
        new = [record["time"] for record in metrics(trial.run) if record["time"] >= trial.started]
        if new:
            before[-1].back_seconds = min(new) - before[-1].at


def table(kills: list[Kill]) -> str:
    """As Markdown, with the sum. Times are the median and the worst."""
    heads = (
        "moment", "kills", "left something half done", "resumed", "whole checkpoints verified", "runs identical",
        "all gone after", "first new step after",
    )  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "| --- |" + " ---: |" * 7]
    for moment in (*MOMENTS, "**all**"):
        those = [kill for kill in kills if moment in (kill.moment, "**all**")]
        counts = [
            sum(kill.done for kill in those),
            sum(kill.unfinished for kill in those),
            sum(kill.resumed for kill in those),
            sum(kill.verified for kill in those),
            sum(kill.identical for kill in those),
        ]
        times = [_typical([getattr(kill, name) for kill in those]) for name in ("gone_seconds", "back_seconds")]
        lines.append(f"| {moment} | {' | '.join([*map(str, counts), *times])} |")
    return "\n".join(lines)


def _typical(times: list[float | None]) -> str:
    known = [time for time in times if time is not None]
    return f"{statistics.median(known):.1f} s, {max(known):.1f} s" if known else "–"


# Starting, killing and finishing.


@contextlib.contextmanager
def _started(bench: Bench, trial: Trial) -> Iterator[subprocess.Popen]:
    """The launcher of a run under way; afterwards nothing of it is left. What it says is in start-N.txt."""
    trial.folder.mkdir(exist_ok=True)
    trial.starts, trial.started = trial.starts + 1, time.time()
    with _output(trial).open("w") as output:
        launcher = subprocess.Popen(
            [
                sys.executable, "-m", "jaxmnt.launch", "local", "--processes", str(bench.processes),
                "--devices-per-process", "1", "--", "--config", str(bench.config), f"run.dir={trial.run}",
            ],
            env=bench.environment, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield launcher
    finally:
        if launcher.poll() is None:
            launcher.terminate()  # it ends its processes, and those that do not end, after 10 seconds
            launcher.wait()


def _finish(bench: Bench, trial: Trial) -> int:
    """Runs a trial to its end; the step after which it went on."""
    with _started(bench, trial) as launcher:
        at = _where_it_starts(trial, launcher)
        code = _ended(trial, launcher)
    _expect(code == ExitCode.FINISHED, f"start {trial.starts}, to be the last one, ended with {code}")
    return at


def _where_it_starts(trial: Trial, launcher: subprocess.Popen) -> int:
    """The step after which a start goes on, by its own words."""
    line = re.compile(r"run     .*: (from the start|resuming after step (\d+)),")
    found: list[re.Match[str]] = []

    def announced() -> bool:
        found.extend(line.finditer(_output(trial).read_text(errors="replace")))
        return bool(found)

    _wait(announced, trial, launcher, "going on", poll_seconds=0.01)
    return int(found[0][2] or 0)


def _kill(bench: Bench, trial: Trial, kill: Kill, launcher: subprocess.Popen, at: int) -> int:
    """Waits for the moment, kills, and waits for the end. The newest step whose commit was seen before."""
    _wait(lambda: len(_processes(launcher)) == bench.processes, trial, launcher, "all processes", poll_seconds=0.01)
    processes = _processes(launcher)
    step = _step(trial, kill, at)
    seen = _sign(bench, trial, kill, step)
    _wait(seen, trial, launcher, f"the moment to kill ({kill.moment} of step {step})", poll_seconds=POLL_SECONDS)
    time.sleep(kill.delay * DELAY_SECONDS[kill.moment])
    committed = step if (trial.checkpoints / str(step) / MANIFEST_FILE).exists() else at
    kill.at = time.time()
    for victim in kill.victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[victim], signal.SIGKILL)
    code = _ended(trial, launcher)
    kill.gone_seconds = time.time() - kill.at
    _expect(code == ExitCode.FAILURE, f"start {trial.starts} ended with {code} after SIGKILL")
    kill.done = True
    return committed


def _step(trial: Trial, kill: Kill, at: int) -> int:
    """The step in which to kill, or in whose save: one whose commit removes an older one, if that is the moment."""
    if kill.moment in ("start", "compile", "restore", "first step"):
        return at
    if kill.moment == "step":
        return min(at + kill.saves, STEPS - EVERY)
    if kill.moment == "evaluate":
        return min((at // EVALUATE + 1) * EVALUATE, STEPS - EVALUATE)
    saves = kill.saves
    if kill.moment == "prune":
        saves = max(saves, KEEP + 1 - len(valid_checkpoints(trial.checkpoints)))
    return min(at + saves * EVERY, STEPS - EVERY)


def _sign(bench: Bench, trial: Trial, kill: Kill, step: int) -> Callable[[], bool]:
    """Asks whether the moment has come."""
    path = trial.checkpoints / str(step)
    written = path.with_name(f"{step}.orbax-checkpoint-tmp")
    return {
        "start": lambda: True,
        "compile": lambda: _event(trial, 0, "start"),
        "first step": lambda: _event(trial, 0, "data"),
        "step": lambda: _reached(trial, step),
        "evaluate": lambda: _reached(trial, step),
        "begin": lambda: _event(trial, 0, "checkpoint_begin", step),
        "write": lambda: written.exists() or path.exists(),
        "commit": path.exists,
        "prune": (path / MANIFEST_FILE).exists,
        "restore": lambda: kill.early or all(_event(trial, i, "compile") for i in range(bench.processes)),
    }[kill.moment]


def _event(trial: Trial, process: int, kind: str, step: int | None = None) -> bool:
    """Whether a process has noted such an event since the last start."""
    new = _new_lines(trial, f"events/{process}.jsonl")
    return any(record["kind"] == kind and step in (None, record.get("step")) for record in new)


def _reached(trial: Trial, step: int) -> bool:
    """Whether the metrics of a step have been written since the last start."""
    return any(record["step"] >= step for record in _new_lines(trial, "metrics.jsonl"))


def _new_lines(trial: Trial, name: str) -> Iterator[dict]:
    """What a file of the run holds of the time since the last start, newest first."""
    path = trial.run / name
    for line in reversed(path.read_text().splitlines() if path.exists() else []):
        with contextlib.suppress(ValueError):  # half of a line
            record = json.loads(line)
            if record["time"] < trial.started:
                return
            yield record


def _processes(launcher: subprocess.Popen) -> dict[int, int]:
    """The ids of the launcher's processes by their numbers, from their environments."""
    found = {}
    for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == b"JAX_PROCESS_ID":
                found[int(value)] = int(pid)
    return found


def _ended(trial: Trial, launcher: subprocess.Popen) -> int:
    try:
        return launcher.wait(PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        raise FailedError(f"start {trial.starts} did not end within {PATIENCE_SECONDS:g} s") from None


def _wait(
    seen: Callable[[], bool], trial: Trial, launcher: subprocess.Popen, what: str, *, poll_seconds: float
) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not seen():
        _expect(launcher.poll() is None, f"start {trial.starts} ended with {launcher.poll()} before {what}")
        _expect(time.monotonic() < deadline, f"start {trial.starts} did not come to {what}")
        time.sleep(poll_seconds)


def _output(trial: Trial) -> Path:
    return trial.folder / f"start-{trial.starts}.txt"


# Looking at what is left.


def _look(trial: Trial, kill: Kill, committed: int) -> int:
    """Verifies all that is whole after a kill; the newest step of it, which nothing committed may be newer than."""
    run = _run_id(trial)
    names = [path.name for path in trial.checkpoints.iterdir()] if trial.checkpoints.exists() else []
    bare = [name for name in names if name.isdigit() and not (trial.checkpoints / name / MANIFEST_FILE).exists()]
    kill.unfinished = bool(bare) or any("tmp" in name or name.endswith(NOTE) for name in names)
    for name in names:
        if name.isdigit() and name not in bare:
            _verify(trial, int(name), run)
            kill.verified += 1
    newest = newest_valid(trial.checkpoints, run)
    step = 0 if newest is None else newest.step
    _expect(step >= committed, f"step {committed} was committed, and after the kill the newest is {step}")
    return step


def _verify(trial: Trial, step: int, run: str) -> None:
    """A checkpoint that has our commit marker must be one: a kill damages nothing that is committed."""
    try:
        verify(trial.checkpoints / str(step), run)
    except DamagedError as damage:
        raise FailedError(f"checkpoint {step} is damaged after start {trial.starts}: {damage}") from damage


def _compare(trial: Trial, reference: Trial) -> None:
    """Raises `FailedError` unless a finished run has come to the same as the undisturbed one."""
    ours, theirs = (
        [(record["step"], record["loss"], record["batch_digest"]) for record in metrics(one.run)]
        for one in (trial, reference)
    )
    _expect([step for step, *_ in ours] == list(range(1, STEPS + 1)), "the steps in the metrics are not one to last")
    different = [a[0] for a, b in zip(ours, theirs, strict=True) if a != b]
    _expect(not different, f"losses or batches differ first in step {different[:1]}")
    last, wanted = (open_checkpoint(one.checkpoints / str(STEPS)).manifest for one in (trial, reference))
    wrong = [name for name, array in wanted.arrays.items() if last.arrays.get(name) != array]
    _expect(not wrong and len(last.arrays) == len(wanted.arrays), f"the last checkpoint differs: {wrong}")
    left = sorted(path.name for path in trial.checkpoints.iterdir())
    kept = [str(STEPS - EVERY), str(STEPS)]
    extra = [name for name in left if name not in kept]
    _expect(not extra and set(kept) <= set(left), f"the run has left {left}")
    _expect(not (trial.run / "lock.json").exists(), "the finished run has left its lock")


def _run_id(trial: Trial) -> str:
    return str(json.loads((trial.run / "run.json").read_text())["run"])


def _expect(well: bool, otherwise: str) -> None:
    if not well:
        raise FailedError(otherwise)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="of each run, with one device each")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="put the table between the file's markers")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
