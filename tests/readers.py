"""A table of all that jaxmnt reads back, each with a small adapter: how it is read, and what may come of it."""

import contextlib
import hashlib
import io
import json
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxmnt.cluster.environment import Identity
from jaxmnt.config.load import load_config, parse_config
from jaxmnt.config.schema import Config
from jaxmnt.errors import ExitCode, UserError

RUN, STEPS = "0123456789ab", (5, 10)
JOB, BEGAN, NODES = "77", 1000.0, ["n1", "n2"]


@dataclass(frozen=True)
class Reader:
    """One way in which one file is read."""

    name: str
    base: str
    """Of `BASES`: the files around it."""
    file: str
    form: str
    """json, lines, yaml, npy or text."""
    read: Callable[[Path], Any]
    fits: Callable[[Any, Any], str | None]
    """What is wrong with a result, given the one from the undamaged file; None if nothing is."""
    may_change: tuple[str, ...] = ()
    """Patterns of what reading writes or removes on purpose."""
    keeps_lines: Callable[[dict[str, Any]], bool] | None = None
    """Which records of the file must still be in it afterwards, if it may be written."""
    must_go_on: bool = False
    """Nothing depends on this file: no error at all may come of it."""
    on_disk: bool = True
    """Whether it is a file, and not a line from the network."""
    reseal: Callable[[bytes], bytes] | None = None
    names: tuple[str, ...] = ()
    """Words of which a message has to have one, besides the names of the file and its folder."""


# What may come of it.


def same(found: Any, undamaged: Any) -> str | None:
    return None if found == undamaged else f"another result: {_short(found)}"


def _any(found: Any, undamaged: Any) -> str | None:
    return None


def _is_integer(found: Any, undamaged: Any) -> str | None:
    return None if type(found) is int and 0 <= found < 2**63 else f"no number of a step: {_short(found)}"


def _is_history(found: Any, undamaged: Any) -> str | None:
    failures, seconds = found
    good = type(failures) is int and isinstance(seconds, int | float) and 0 <= seconds < math.inf
    return None if good else f"no history: {_short(found)}"


def _are_records(found: Any, undamaged: Any) -> str | None:
    for record in found:
        if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
            return f"no record: {_short(record)}"
    return None


def _is_start(found: Any, undamaged: Any) -> str | None:
    """The same run, from the same checkpoint."""
    wrong = [name for name in ("run", "kind", "step") if found[name] != undamaged[name]]
    if wrong:
        return f"another {wrong[0]}: {_short(found)}"
    lineage = found["lineage"]
    good = isinstance(lineage, list) and all(isinstance(parent, dict) for parent in lineage)
    return None if good else f"no lineage: {_short(lineage)}"


def _is_start_from_a_whole_one(found: Any, undamaged: Any) -> str | None:
    """The newest checkpoint is the damaged one: the one before may be taken, and never none."""
    return _is_start(
        found | {"step": max(found["step"], undamaged["step"])} if found["step"] in STEPS else found, undamaged
    )


def _is_answer(found: Any, undamaged: Any) -> str | None:
    """What the job script goes by: a word and what belongs to it, in one line."""
    line = found.removesuffix("\n")
    good = line.partition(" ")[0] in ("start", "requeue", "again", "end") and line.isprintable()
    return None if good else f"no answer: {_short(found)}"


def _are_rows(found: Any, undamaged: Any) -> str | None:
    """Batches that a model can be trained on, whatever their tokens are."""
    if found["ids"] != undamaged["ids"]:
        return f"another vocabulary: {found['ids']}"
    for name, batch in found["batches"].items():
        like = undamaged["batches"][name]
        for key, array in batch.items():
            if array.dtype != like[key].dtype or array.shape[1:] != like[key].shape[1:]:
                return f"{key} of {name} is {array.dtype}{list(array.shape)}"
            low, high = (array.min(initial=0), array.max(initial=0))
            most = {"tokens": found["ids"] - 1, "targets": found["ids"] - 1, "weights": 1}.get(key, array.shape[-1])
            if low < 0 or high > most:
                return f"{key} of {name} goes from {low} to {high}"
    return None


def _same_rows(found: Any, undamaged: Any) -> str | None:
    if found["digest"] != undamaged["digest"] or found["ids"] != undamaged["ids"]:
        return "another digest"
    for name, batch in undamaged["batches"].items():
        if any(not np.array_equal(found["batches"][name][key], array) for key, array in batch.items()):
            return f"other rows of {name}"
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}…"


# Files to begin with.


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


def _run_with_checkpoints(folder: Path) -> None:
    """Steps 5 and 10 are whole, 15 was cut off; the job that had the lock is gone."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxmnt.checkpoint.manifest import Manifest
    from jaxmnt.checkpoint.saver import Saver
    from jaxmnt.checkpoint.space import Need
    from jaxmnt.data.sources import open_sources
    from jaxmnt.runtime.rundir import plain_config, write_config

    config, run = config_of(folder), folder / "run"
    saver = Saver(run / "checkpoints", config.checkpoint, Need(0, 0), Identity())
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
    (run / "checkpoints" / "15" / "params").mkdir(parents=True)
    (run / "checkpoints" / "15" / "params" / "data").write_text("half")
    (run / "checkpoints" / "15.unfinished").write_text("being written\n")
    (run / "run.json").write_text(json.dumps({"run": RUN, "lineage": parents, "time": 1.7e9}, indent=1) + "\n")
    write_config(run, config)
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


def _records(folder: Path) -> None:
    """What a run notes, and what is known of its starts inside an allocation."""
    run, lines, now = folder / "run", [], BEGAN
    for attempt in (1, 2):
        about = lambda kind, attempt=attempt, **more: {
            "kind": kind,
            "time": now,
            "process": 0,
            "host": "n1",
            "attempt": attempt,
            **more,
        }
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
        {"kind": "train", "step": step, "time": BEGAN + step, "loss": 4 - step / 10, "grad_norm": 0.5, "tokens": step * 32,
         "epochs": {"data": 0.1}, "mfu": None, "bad_steps": 0}
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
    from jaxmnt.data.preparation import Selection, Settings, build
    from jaxmnt.data.preparation.document import Reading

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
        tokenizer=None, train_tokenizer=300, reading=Reading(chat=True), eval_fraction=0.3, shard_tokens=400, part_bytes=10**6
    )  # fmt: skip
    build(Selection([folder / "text"]), folder / "data", settings, lambda *progress: None)


def _staged(folder: Path) -> None:
    from jaxmnt.data.staging import stage
    from jaxmnt.data.store import open_prepared

    _prepared(folder)
    copy = stage(open_prepared(folder / "data"), folder / "local")
    copy.rename(folder / "local" / "copy")


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
            _build(text, folder / "data")
    finally:
        run.commit = original
    (folder / "input").symlink_to(text)


class _CutOffError(Exception):
    pass


def _cut_off(*_: Any) -> None:
    raise _CutOffError


def _build(text: Path, output: Path) -> None:
    from jaxmnt.data.preparation import Selection, Settings, build

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
    fate = {"kind": "peer_lost", "why": "process 1 of 3 on n2 failed: x", "code": 4, "process": 1, "host": "n2"}
    abandoned = fate | {
        "kind": "start_abandoned",
        "code": 75,
        "reason": "stopped",
        "asked_by": None,
        "waited_seconds": 1.5,
    }
    (folder / "abandoned").write_text(json.dumps({"kind": "verdict", "fate": abandoned}) + "\n")
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
        {"kind": "verdict", "fate": fate},
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
    "half prepared": _half_prepared,
    "config": _config_file,
    "words": _words,
    "nothing": _nothing,
}


# Reading.


def _start(folder: Path) -> Any:
    """As far as a run comes before it takes devices."""
    from jaxmnt.data.sources import open_sources
    from jaxmnt.runtime.lock import RunLock
    from jaxmnt.runtime.rundir import open_run, places

    config = config_of(folder)
    with contextlib.ExitStack() as held:
        locks = [held.enter_context(RunLock(where)) for where in places(config)]
        start = open_run(config, open_sources(config.data), Identity(), locks)
        for lock in locks:
            lock.confirm()
    return {"run": start.run, "step": start.step, "kind": start.kind, "lineage": start.lineage}


def _start_and_prune(folder: Path) -> Any:
    """And then the older checkpoint is to go."""
    from jaxmnt.checkpoint.commit import prune, whole

    found = _start(folder)
    prune(whole(folder / "run" / "checkpoints", RUN), {STEPS[-1]})
    return found


def _restored_config(folder: Path) -> Any:
    from jaxmnt.runtime.rundir import plain_config, read_config

    return plain_config(read_config(folder / "run"))


def _newest(folder: Path) -> Any:
    from jaxmnt.checkpoint.source import find

    return find(str(folder / "run"), "--run").step


def _checkpoint(*arguments: str) -> Callable[[Path], Any]:
    """python -m jaxmnt.checkpoint …, with RUN for the run."""

    def read(folder: Path) -> Any:
        from jaxmnt.checkpoint.__main__ import main

        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = main([argument.replace("RUN", str(folder / "run")) for argument in arguments])
        text = said.getvalue().replace(str(folder), "")
        return code, "".join(line for line in text.splitlines(keepends=True) if " read in " not in line)

    return read


def _says(found: Any, undamaged: Any) -> str | None:
    code, text = found
    odd = [letter for letter in text if not letter.isprintable() and letter != "\n"]
    if odd:
        return f"prints {odd[0]!r}"
    return None if code in (0, 1) else f"exit code {code}"


def _says_the_same(found: Any, undamaged: Any) -> str | None:
    """All is well only with what was written."""
    return _says(found, undamaged) if found[0] else same(found, undamaged)


def _resealed_checkpoint(content: bytes) -> bytes:
    from jaxmnt.checkpoint.manifest import digest_of

    record = json.loads(content)
    record.pop("seal", None)
    return json.dumps(record | {"seal": digest_of(record)}, indent=1, sort_keys=True).encode()


def _resealed_data(content: bytes) -> bytes:
    from jaxmnt.data.manifest import sealed

    record = json.loads(content)
    record.pop("seal", None)
    return json.dumps(sealed(record), indent=1).encode()


def _lines(name: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        from jaxmnt.telemetry.events import read_lines

        return read_lines(folder / "run" / name)

    return read


def _written_on(folder: Path) -> Any:
    from jaxmnt.telemetry.events import Events

    events = Events(folder / "run", 0)
    events.write("start", step=10)
    return events.attempt


def _history(folder: Path) -> Any:
    from jaxmnt.telemetry.events import history

    return history(folder / "run" / "events" / "0.jsonl")


def _last_commit(folder: Path) -> Any:
    from jaxmnt.launch.restarts import last_commit

    return last_commit(folder / "run")


def _rewound(folder: Path) -> Any:
    from jaxmnt.telemetry.events import read_lines, rewind_metrics

    path = folder / "run" / "metrics.jsonl"
    rewind_metrics(path, 10)
    return read_lines(path)


def _is_rewound(found: Any, undamaged: Any) -> str | None:
    late = [record for record in found if type(record.get("step")) is int and record["step"] > 10]
    return f"a step that will be taken again: {_short(late[0])}" if late else _are_records(found, undamaged)


def _replayed(folder: Path) -> Any:
    from jaxmnt.runtime.replay import _steps_of

    return _steps_of(folder / "run", Identity())


def _are_steps(found: Any, undamaged: Any) -> str | None:
    for step, line in found.items():
        if type(step) is not int or set(line) != {"loss", "grad_norm", "tokens"}:
            return f"no step: {step!r}: {_short(line)}"
    return None


def _evaluated(folder: Path) -> Any:
    from jaxmnt.runtime.training import _was_not_evaluated

    start = SimpleNamespace(kind="own", directory=folder / "run")
    return _was_not_evaluated(SimpleNamespace(start=start, identity=Identity(), step=10))


def _inside(*arguments: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        from jaxmnt.launch.inside import main

        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            main([arguments[0], "--run-dir", str(folder / "run"), *arguments[1:]])
        return said.getvalue()

    return read


_BEFORE = _inside("before", "--wanted", "2", "--usable", "n1 n2 n3")
_AFTER = _inside(
    "after", "--code", "4", "--began", str(BEGAN), "--nodes", ",".join(NODES), "--start", "1", "--restarts", "3",
    "--cancelled", "no", "--job", JOB,
)  # fmt: skip


def _loaded(folder: Path) -> Any:
    load_config(folder / "config.yaml", [])


def _rows(verify: bool) -> Callable[[Path], Any]:
    """All that a run, an evaluation and a person take from prepared data."""

    def read(folder: Path) -> Any:
        from jaxmnt.data.batches import EvaluationData, TrainingData
        from jaxmnt.data.inspection import lengths, mixture_table, sources_table
        from jaxmnt.data.sources import open_sources
        from jaxmnt.data.tokenizer import make_tokenizer

        batches, all_rows = {}, range(4)
        for kind in ("windows", "packed"):
            data = {
                "path": str(folder / "data"),
                "global_batch_size": 4,
                "sequence_length": 32,
                "rows": kind,
                "document_mask": True,
            }
            config = parse_config({"run": {"dir": "x"}, "data": data})
            sources = open_sources(config.data)
            (part,) = sources.parts.values()
            if verify:
                part.verify()
            training = TrainingData(config, sources)
            batches |= {f"{kind} {step}": training.batch(step, all_rows) for step in range(3)}
            held_out = EvaluationData(config, part).batches(all_rows, 4, prefetch=1, threads=0)
            batches |= {f"{kind} held out {number}": rows for number, rows in enumerate(held_out)}
            told = [*sources_table(sources), *mixture_table(config, training), *lengths(sources)]
            assert all(line.isprintable() for line in told), "a table with control characters"
        for split in ("train", "eval"):
            part.unigram_nats(split)
        part.origin("train", 0), part.origin("eval", part.documents("eval") - 1)
        make_tokenizer(sources.tokenizer, sources.folder).encode_batch(["some words"])
        return {"digest": sources.digest, "ids": sources.vocab_size, "batches": batches}

    return read


def _staged_copy(folder: Path) -> Any:
    from jaxmnt.data.staging import stage
    from jaxmnt.data.store import open_prepared

    data = open_prepared(folder / "data")
    (folder / "local" / "copy").rename(folder / "local" / data.digest[:16])
    copy = open_prepared(stage(data, folder / "local"))
    copy.check()
    return copy.digest


def _gone_on_with(folder: Path) -> Any:
    from jaxmnt.data.store import open_prepared

    _build((folder / "input").resolve(), folder / "data")
    data = open_prepared(folder / "data")
    data.check()
    data.verify()
    return data.digest


def _tokenizer(folder: Path) -> Any:
    from jaxmnt.data.tokenizer import choose_tokenizer

    tokenizer = choose_tokenizer(str(folder / "data" / "tokenizer.json"), None)
    ids = tokenizer.encode_batch(["some words, and more"])[0]
    tokenizer.decode(ids)
    return tokenizer.vocab_size, tokenizer.end_of_document, ids.max()


def _is_tokenizer(found: Any, undamaged: Any) -> str | None:
    size, end, largest = found
    return None if 0 <= end < size and largest < size else f"ids beyond the vocabulary: {found}"


def _compile_cache(folder: Path) -> Any:
    import jax

    from jaxmnt.runtime.compile_cache import use_compile_cache

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    try:
        use_compile_cache(str(folder / "compiled"), folder)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


# Lines from the network.


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


def _greeted(name: str, *, key: bytes | None = _KEY) -> Callable[[Path], Any]:
    """Process 0 hears a greeting of one who has the key, or has none, and answers."""

    def read(folder: Path) -> Any:
        from jaxmnt.cluster.desk import Desk
        from jaxmnt.cluster.door import Door

        raw = (folder / name).read_bytes()
        door = Door(socket.create_server(("127.0.0.1", 0)), _KEY, 3)
        desk = Desk(Identity(0, 3, "127.0.0.1:1"), dict(_OWN_HELLO), door)
        over = threading.Event()
        caller = threading.Thread(target=_call, args=(door._server.getsockname(), key, raw, over), daemon=True)
        caller.start()
        outcome, rounds = None, 0
        try:
            while outcome is None and rounds < 2:
                heard = door.wait(0.01)
                rounds += not heard and over.is_set()
                for connection, line in heard:
                    outcome = outcome or desk._hear(connection, line)
            said = f"{desk._missing('still to come')} {desk._present()} {door.account}"
            assert said.isprintable() and len(said) < 20_000, "what is told of those present"
            outcome = outcome or desk._unreachable()
            peers = desk.peers()
            assert all(type(process) is int and isinstance(peer.host, str) for process, peer in peers.items())
            over.set()
            desk.answer(outcome)
        finally:
            door.close()
            over.set()
            caller.join(2)
        if outcome is not None:
            raise outcome
        return "here" if peers else "nobody"

    return read


def _call(address: Any, key: bytes | None, raw: bytes, over: threading.Event) -> None:
    """The other end of such a connection, which stays open until all is over."""
    from jaxmnt.cluster import authentication

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


def _answered(name: str, *, proven: bool = True) -> Callable[[Path], Any]:
    """Another process hears what process 0 has to say, or somebody on its port who is none."""

    def read(folder: Path) -> Any:
        from jaxmnt.cluster import rollcall

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
            caller = rollcall._Caller(Identity(1, 3, "127.0.0.1:1"), hello, _KEY, lambda: None)
            peer = caller.report(time.monotonic() + 0.03, 0.03)
        finally:
            socket.create_connection = original
            here.close(), there.close()
            answering.join(2)
        assert isinstance(peer.host, str) and all(math.isfinite(bound) for bound in peer.clock)
        return peer.host

    return read


def _answer(connection: socket.socket, raw: bytes, proven: bool) -> None:
    """Process 0's end."""
    from jaxmnt.cluster import authentication

    with contextlib.suppress(OSError):
        if proven:
            nonce = authentication.new_nonce()
            connection.sendall(authentication.greeting(nonce))
            said = connection.recv(authentication.PROOF_BYTES, socket.MSG_WAITALL)
            connection.sendall(authentication.answer_to(_KEY, nonce, said) or b"")
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)


def _key(folder: Path) -> Any:
    from jaxmnt.cluster.authentication import run_key

    return len(run_key(folder / "run", {}))


def _told(name: str, process: int) -> Callable[[Path], Any]:
    """Process 0 hears this of process 1, or the other way round."""

    def read(folder: Path) -> Any:
        from jaxmnt.cluster.ending import Ending
        from jaxmnt.cluster.lifeline import Lifeline
        from jaxmnt.cluster.rollcall import Peer

        class Noted(Ending):
            def now(self, fate: Any) -> Any:
                raise EndedError(fate)

        other = 1 - process
        with _heard((folder / name).read_bytes()) as (here, _):
            lifeline = Lifeline(Identity(process, 3, "n1:1"), {other: Peer("n2", here)}, Noted(), 30.0, 60.0)
            wire = lifeline._wires[other]
            lifeline._selector.register(wire, selectors.EVENT_READ, other)
            try:
                while other in lifeline._wires and lifeline._selector.select(1):
                    lifeline._hear(other)
                str(lifeline._positions[other])
                return "heard"
            except EndedError as ended:
                fate = ended.args[0]
                return {
                    "kind": fate.kind,
                    "why": fate.why,
                    "code": fate.code,
                    "process": fate.process,
                    "host": fate.host,
                }
            finally:
                lifeline._selector.close()
                lifeline._alarm.close(), lifeline._bell.close()

    return read


def _is_text(text: str) -> bool:
    return all(letter.isprintable() or letter in "\n\t" for letter in text)


def _is_fate(found: Any, undamaged: Any) -> str | None:
    if found == "heard":
        return None
    good = (
        isinstance(found["kind"], str) and isinstance(found["why"], str) and _is_text(found["why"])
        and found["code"] in tuple(ExitCode) and found["process"] in (None, 0, 1, 2)
        and isinstance(found["host"], str | None) and len(found["why"]) < 20_000
    )  # fmt: skip
    return None if good else f"no fate: {_short(found)}"


# The table.

_LOCKS = ("run/lock.json", "run/lock.beat", "run/.lock.json.*")
_CUT_OFF = ("run/checkpoints/15", "run/checkpoints/15/*", "run/checkpoints/15.unfinished")
_PRUNED = tuple(
    f"{place}/checkpoints/{name}{below}"
    for place in ("run", "archive")
    for name in (
        "5",
        "15",
        "15.unfinished",
        "7",
        "0",
        "5.unfinished",
        "7.unfinished",
        "0.unfinished",
        "10.unfinished",
        "*.orbax-checkpoint-tmp-[01]",
    )
    for below in ("", "/*")
)
"""The step that is not to be kept, those that notes in ASCII digits say are unfinished, and what Orbax leaves behind.
Where the whole folder of checkpoints lies elsewhere, they are the same there."""
_EVENTS, _METRICS = "run/events/0.jsonl", "run/metrics.jsonl"
_WORDS_TO_0 = ("beat", "here", "halted", "gave_up", "failed", "stopped", "bye")
_WORDS_TO_OTHERS = ("inquiry", "verdict", "abandoned", "bye")
_DATA = {
    "manifest.json": "json", "sources.txt": "text", "tokenizer.json": "json",
    "train/tokens-*": "npy", "train/documents-*": "npy", "train/origins-*": "npy", "train/learn-*": "npy",
    "eval/tokens-*": "npy", "eval/documents-*": "npy",
}  # fmt: skip


def _start_reader(file: str, form: str, fits: Any = _is_start, **more: Any) -> Reader:
    return Reader(f"start: {file}", "run", f"run/{file}", form, _start, fits, (*_LOCKS, *_CUT_OFF), **more)


def _of_events(name: str, read: Any, fits: Any, **more: Any) -> Reader:
    return Reader(f"events: {name}", "records", _EVENTS, "lines", read, fits, **{"must_go_on": True, **more})


def _readers() -> list[Reader]:
    sealed = {"reseal": _resealed_checkpoint}
    commands = {
        "list": ("list", "RUN"), "show": ("show", "RUN@10"), "verify": ("verify", "RUN@10"), "diff": ("diff", "RUN@5", "RUN@10"),
    }  # fmt: skip
    launch = {"may_change": ("run/launch/*",)}
    pruned = (*_LOCKS, *_CUT_OFF, *_PRUNED)
    found = [
        Reader("names in checkpoints", "run", "run/checkpoints", "folder", _start_and_prune, _is_start, pruned),
        _start_reader("run.json", "json"),
        _start_reader("config.yaml", "yaml"),
        _start_reader("lock.json", "json"),
        _start_reader("lock.beat", "text"),
        _start_reader("checkpoints/15.unfinished", "text"),
        _start_reader("checkpoints/10/jaxmnt.json", "json", _is_start_from_a_whole_one, **sealed),
        _start_reader("checkpoints/5/jaxmnt.json", "json", **sealed),
        _start_reader("checkpoints/10/commit_success.txt", "text", _is_start_from_a_whole_one),
        *(
            Reader(f"checkpoint {name}", "run", "run/checkpoints/10/jaxmnt.json", "json", _checkpoint(*given), _says, **sealed)
            for name, given in commands.items()
        ),
        Reader("checkpoint list: run.json", "run", "run/run.json", "json", _checkpoint("list", "RUN"), _says),
        Reader("checkpoint list: config.yaml", "run", "run/config.yaml", "yaml", _checkpoint("list", "RUN"), _says),
        Reader("checkpoint list: note", "run", "run/checkpoints/15.unfinished", "text", _checkpoint("list", "RUN"), _says),
        Reader("config of a run", "run", "run/config.yaml", "yaml", _restored_config, _any),
        Reader("newest of a run: config.yaml", "run", "run/config.yaml", "yaml", _newest, same),
        Reader("config file", "config", "config.yaml", "yaml", _loaded, _any),
        _of_events("lines", _lines("events/0.jsonl"), _are_records),
        _of_events("written on", _written_on, _is_integer, may_change=(_EVENTS,), keeps_lines=lambda record: True),
        _of_events("history", _history, _is_history),
        _of_events("last commit", _last_commit, _is_integer),
        _of_events("after a start in an allocation", _AFTER, _is_answer, **launch),
        Reader("metrics: rewound", "records", _METRICS, "lines", _rewound, _is_rewound, (_METRICS,),
               lambda record: record.get("step", 0) <= 10, must_go_on=True),
        Reader("metrics: evaluated", "records", _METRICS, "lines", _evaluated, _any, must_go_on=True),
        Reader("metrics: replay", "records", _METRICS, "lines", _replayed, _are_steps),
        Reader("bad_nodes.json: before", "records", "run/launch/bad_nodes.json", "json", _BEFORE, _is_answer, **launch),
        Reader("bad_nodes.json: after", "records", "run/launch/bad_nodes.json", "json", _AFTER, _is_answer, **launch),
        Reader("starts.json: after", "records", "run/launch/starts.json", "json", _AFTER, _is_answer, **launch),
        *(Reader(f"data: {file}", "data", f"data/{file}", form, _rows(False), _are_rows, reseal=_seal_of(file))
          for file, form in _DATA.items()),
        *(Reader(f"verified data: {file}", "data", f"data/{file}", form, _rows(True), _same_rows)
          for file, form in _DATA.items() if file in ("manifest.json", "sources.txt", "train/tokens-*")),
        Reader("staged data", "staged", "local/copy/manifest.json", "json", _staged_copy, same, ("local/*",)),
        Reader("preparation: plan.json", "half prepared", "data/work/plan.json", "json", _gone_on_with, same, ("data/*",)),
        Reader("preparation: record", "half prepared", "data/work/part-00000.json", "json", _gone_on_with, _any, ("data/*",)),
        Reader("preparation: counts", "half prepared", "data/work/counts-00000.npy", "npy", _gone_on_with, _any, ("data/*",)),
        Reader("tokenizer", "data", "data/tokenizer.json", "json", _tokenizer, _is_tokenizer),
        Reader("folder of compiled programs", "nothing", "compiled", "text", _compile_cache, same),
        *(Reader(f"roll call: {name}", "words", name, form, _greeted(name), _any, on_disk=False, names=_GREETING_NAMES)
          for name, form in (("greeting", "json"), ("trouble", "json"), ("stopping", "lines"))),
        Reader("roll call: a stranger", "words", "greeting", "json", _greeted("greeting", key=None), same, on_disk=False,
               must_go_on=True),
        *(Reader(f"roll call: {name}", "words", name, "json", _answered(name), _any, on_disk=False, names=("process",))
          for name in ("answer", "refusal")),
        Reader("roll call: a stranger's answer", "words", "refusal", "json", _answered("answer", proven=False), _any,
               on_disk=False, names=("process",)),
        Reader("run.key", "records", "run/run.key", "text", _key, same),
        *(Reader(f"lifeline of process 0: {name}", "words", name, "lines", _told(name, 0), _is_fate, on_disk=False, must_go_on=True)
          for name in _WORDS_TO_0),
        *(Reader(f"lifeline of another: {name}", "words", name, "lines", _told(name, 1), _is_fate, on_disk=False, must_go_on=True)
          for name in _WORDS_TO_OTHERS),
    ]  # fmt: skip
    return found


_GREETING_NAMES = ("process", "cluster.", "version", "digest")


def _seal_of(file: str) -> Callable[[bytes], bytes] | None:
    return _resealed_data if file == "manifest.json" else None


READERS = {reader.name: reader for reader in _readers()}
