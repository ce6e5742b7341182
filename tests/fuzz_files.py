"""The files around what `readers.py` reads back, as a run, a preparation and a launcher leave them."""

import contextlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jaxmnt.config.load import parse_config
from jaxmnt.config.schema import Config
from jaxmnt.distributed.identity import Identity

RUN, STEPS = "0123456789ab", (5, 10)
JOB, BEGAN, NODES = "77", 1000.0, ["n1", "n2"]


def config_of(folder: Path) -> Config:
    """A config of a run in this folder, which reads nothing."""
    return parse_config(
        {
            "run": {"dir": str(folder / "run")},
            "data": {"synthetic": 64, "global_batch_size": 4, "sequence_length": 8},
            "model": {"hidden_size": 8, "num_layers": 1, "num_heads": 1, "intermediate_size": 8},
            "train": {"steps": 20},
        }
    )


def start_run(folder: Path) -> Any:
    """As far as a run comes before it takes devices."""
    from jaxmnt.data.sources import open_sources
    from jaxmnt.run.lock import RunLock
    from jaxmnt.run.resume import resume_point
    from jaxmnt.run.rundir import run_directories

    config = config_of(folder)
    with contextlib.ExitStack() as held:
        locks = [held.enter_context(RunLock(where)) for where in run_directories(config)]
        start = resume_point(config, open_sources(config.data), Identity(), locks)
        for lock in locks:
            lock.confirm()
    return {"run": start.run_id, "step": start.step, "kind": start.kind, "lineage": start.lineage}


def _run_with_checkpoints(folder: Path) -> None:
    """Steps 5 and 10 are whole, 15 was cut off; the job that had the lock is gone."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxmnt.checkpoint.manifest import Manifest
    from jaxmnt.checkpoint.retention import SpaceNeeded
    from jaxmnt.checkpoint.saver import Saver
    from jaxmnt.data.sources import open_sources
    from jaxmnt.run.rundir import plain_config, write_config

    config, run = config_of(folder), folder / "run"
    saver = Saver(run / "checkpoints", config.checkpoint, SpaceNeeded(0, 0), Identity())
    place = NamedSharding(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]), PartitionSpec())
    parents = [{"run": "ba9876543210", "step": 3, "path": "/runs/earlier/checkpoints/3"}]
    for step in STEPS:
        array = jax.device_put(jnp.arange(step, dtype=jnp.float32), place)
        arrays = {part: {"w": array} for part in ("params", "optimizer", "counters")}
        describe = lambda shapes, step=step: Manifest(
            RUN, step, shapes, plain_config(config), step * 32, open_sources(config.data).digests, 2.5, parents,
            time=1.7e9, libraries={"jax": "1"},
        )  # fmt: skip
        saver.save(step, arrays, describe)
        saved = saver.result(wait=True)
        assert saved is not None and saved.failure is None, saved
    (run / "run.json").write_text(json.dumps({"run": RUN, "lineage": parents, "time": 1.7e9}, indent=1) + "\n")
    write_config(run, config)
    start_run(folder)  # notes what it goes by
    (run / "checkpoints" / "15" / "params").mkdir(parents=True)
    (run / "checkpoints" / "15" / "params" / "data").write_text("half")
    (run / "checkpoints" / "15.unfinished").write_text("being written\n")
    holder = {
        "job": "0" * 16,
        "host": "n1",
        "process": 2**22,
        "started": "1",
        "machine": "elsewhere",
        "since": "2026-01-01 00:00:00",
    }
    (run / "lock.json").write_text(json.dumps(holder))
    (run / "lock.beat").write_text("01234567 8")
    (run / "kept").write_text("a person's own file")


def _event(kind: str, *, time: float, attempt: int, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time, "process": 0, "host": "n1", "attempt": attempt, **more}


def _records(folder: Path) -> None:
    """What a run notes, and what is known of its starts inside an allocation."""
    run, lines, now = folder / "run", [], BEGAN
    for attempt in (1, 2):
        about = partial(_event, time=now, attempt=attempt)
        lines += [about("start", run=RUN, step=0, jax="1", devices=1), about("compile", seconds=1.5)]
        lines += [about("started", step=1, seconds={"compile": 2.5}, compile_cache={"hits": 1, "misses": 0})]
        lines += [about("checkpoint_begin", step=5 * attempt)]
        lines += [about("checkpoint_commit", step=5 * attempt, seconds=0.1, bytes=100, not_removed=None)]
        now += 10
    lines += [about("preempted", step=10, asked_by="SIGTERM"), about("end", step=10, finished=False, peak_host_bytes=1)]
    lines += [about("peer_lost", why="process 1 of 2 on n2 went away", code=4, at_fault=1, at_fault_host="n2")]
    _write_lines(run / "events" / "0.jsonl", lines)
    _write_lines(run / "events" / "1.jsonl", [{**line, "process": 1, "host": "n2"} for line in lines[:4]])
    steps = [
        {"kind": "train", "step": step, "time": BEGAN + step, "loss": 4 - step / 10, "grad_norm": 0.5,
         "tokens": step * 32, "epochs": {"data": 0.1}, "mfu": None, "bad_steps": 0}
        for step in range(1, 13)
    ]  # fmt: skip
    steps.insert(
        10, {"kind": "eval", "step": 10, "time": BEGAN, "loss": 3.0, "tokens": 8, "sources": {"data": {"loss": 3.0}}}
    )
    _write_lines(run / "metrics.jsonl", steps)
    (run / "launch").mkdir()
    bad = [{"node": "n3", "why": "process 2 on n3 is silent", "since": 1.0, "until": 4e9}]
    bad += [{"node": "n4", "why": "lost", "since": 2.0, "until": 4e9}]
    (run / "launch" / "bad_nodes.json").write_text(json.dumps(bad, indent=1) + "\n")
    starts = [
        {"time": now, "began": now - 5, "job": JOB, "start": number, "nodes": NODES, "code": 4, "newest": 5,
         "trained": True, "cancelled": False, "blamed": "n3"}
        for number in range(2)
    ]  # fmt: skip
    (run / "launch" / "starts.json").write_text(json.dumps(starts, indent=1) + "\n")
    (run / "run.key").write_text("0123456789abcdef" * 4 + "\n")
    (run / "run.key").chmod(0o600)
    (run / "kept").write_text("a person's own file")


def _write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _prepared(folder: Path) -> None:
    """Two shards a split, with a tokenizer of its own and a mask of what is learnt."""
    from jaxmnt.data.preparation.inputs import ReadOptions, Selection, Settings
    from jaxmnt.data.preparation.run import build

    (folder / "text").mkdir()
    talk = [
        {
            "messages": [
                {"role": "user", "content": f"what is {n}?"},
                {"role": "assistant", "content": f"{n} of {n * 7}"},
            ]
        }
        for n in range(60)
    ]
    _write_lines(folder / "text" / "talk.jsonl", talk)
    settings = Settings(
        tokenizer=None, train_tokenizer=300, reading=ReadOptions(chat=True), eval_fraction=0.3, shard_tokens=400,
        part_bytes=10**6,
    )  # fmt: skip
    build(Selection([folder / "text"]), folder / "data", settings, lambda *progress: None)


def _staged(folder: Path) -> None:
    from jaxmnt.data.sources import stage
    from jaxmnt.data.store import open_prepared

    _prepared(folder)
    copy = stage(open_prepared(folder / "data"), folder / "local")
    copy.rename(folder / "local" / "copy")


def _kept(folder: Path) -> None:
    """With the tokenizer as a run keeps it."""
    from jaxmnt.data.run_tokenizer import tokenizer_of_data, write_tokenizer
    from jaxmnt.data.store import open_prepared

    _prepared(folder)
    data = open_prepared(folder / "data")
    write_tokenizer(folder, tokenizer_of_data(data.tokenizer, data.vocab_size, data.path))


def _half_prepared(folder: Path) -> None:
    """All parts are done, and nothing is committed."""
    from jaxmnt.data.preparation import run

    text = folder.parent / f"{folder.name}-text"  # outside, since the plan names files by their paths and times
    text.mkdir()
    for number in range(8):
        (text / f"{number}.txt").write_text(f"some words of file {number} " * 8)
    original = run.commit
    try:
        run.commit = _cut_off
        with contextlib.suppress(_CutOffError):
            build_again(text, folder / "data")
    finally:
        run.commit = original
    (folder / "input").symlink_to(text)


class _CutOffError(Exception):
    pass


def _cut_off(*_: Any) -> None:
    raise _CutOffError


def build_again(text: Path, output: Path) -> None:
    from jaxmnt.data.preparation.inputs import Selection, Settings
    from jaxmnt.data.preparation.run import build

    build(Selection([text]), output, Settings(eval_fraction=0.3, part_bytes=600), lambda *progress: None)


def _config_file(folder: Path) -> None:
    (folder / "config.yaml").write_text(
        "run:\n  dir: runs/x\nseed: 1\ndata:\n  path: data/x\n  global_batch_size: 16\n  shuffle: true\n"
        "model:\n  hidden_size: 64\n  num_layers: 2\ntrain:\n  steps: 20\n  precision: float32\n"
        "optimizer:\n  learning_rate: 3.0e-3\ncheckpoint:\n  dir: null\n  every_minutes: auto\n"
    )


def _words(folder: Path) -> None:
    """What processes say to each other, a line each."""
    facts = {"jaxmnt version": "0.1.0", "config digest": "abc", "data digest": "def"}
    hello = {"process": 1, "processes": 3, "host": "n2", "loopback": False, "facts": facts, "trouble": None}
    (folder / "greeting").write_text(json.dumps(hello | {"time": 1.7e9}) + "\n")
    (folder / "trouble").write_text(json.dumps(hello | {"trouble": "no such file", "time": 1.7e9}) + "\n")
    answer = {
        "error": None,
        "code": 0,
        "absent": False,
        "at_fault": None,
        "host": "n1",
        "time": 1.7e9,
        "heard_after": 0.25,
    }
    (folder / "answer").write_text(json.dumps(answer) + "\n")
    (folder / "refusal").write_text(
        json.dumps(answer | {"error": "process 2 is missing", "code": 4, "at_fault": 2}) + "\n"
    )
    position = {"step": 7, "phase": "taking steps", "settled": True, "own": False}
    exit_reason = {"kind": "peer_lost", "why": "process 1 of 3 on n2 failed: x", "code": 4, "process": 1, "host": "n2"}
    abandoned = exit_reason | {
        "kind": "start_abandoned",
        "code": 75,
        "reason": "stopped",
        "asked_by": None,
        "waited_seconds": 1.5,
    }
    (folder / "abandoned").write_text(json.dumps({"kind": "verdict", "exit_reason": abandoned}) + "\n")
    (folder / "stopping").write_text(
        json.dumps(hello | {"time": 1.7e9}) + "\n" + json.dumps({"stopping": "SIGTERM"}) + "\n"
    )
    words = [
        {"kind": "beat", "position": position},
        {"kind": "here", "position": position},
        {"kind": "halted", "why": "in step 7, taking steps"},
        {"kind": "inquiry"},
        {"kind": "gave_up", "why": "silent for 30 s"},
        {"kind": "failed", "why": "ValueError: boom", "code": 1},
        {"kind": "verdict", "exit_reason": exit_reason},
        {"kind": "stopped", "why": "process 1 was asked to stop", "code": 75},
        {"kind": "bye"},
    ]
    for word in words:
        (folder / word["kind"]).write_text(json.dumps(word) + "\n")


def _nothing(folder: Path) -> None:
    (folder / "compiled").write_text("a file where a folder shall be")


BASES: dict[str, Callable[[Path], None]] = {
    "run": _run_with_checkpoints,
    "records": _records,
    "data": _prepared,
    "staged": _staged,
    "tokenizer": _kept,
    "half prepared": _half_prepared,
    "config": _config_file,
    "words": _words,
    "nothing": _nothing,
}
