"""A table of all that jaxmnt reads back, each with a small adapter: how it is read, and what may come of it."""

import contextlib
import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from fuzz_files import BEGAN, JOB, NODES, RUN, STEPS, build_again, start_run
from fuzz_network import answered, greeted, is_fate, told

from jaxmnt.config.load import load_config, parse_config
from jaxmnt.distributed.identity import Identity


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
    may_be_a_pipe: bool = False
    """Whoever names one may be writing into it."""
    on_disk: bool = True
    """Whether it is a file, and not a line from the network."""
    reseal: Callable[[bytes], bytes] | None = None
    writes_on: bool = False
    """A thread may still write to the files afterwards."""
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
    if (
        found["ids"] < undamaged["ids"]
    ):  # a larger vocabulary holds all ids, and nothing shows that it is not the right one
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


# Reading.


def _start_and_prune(folder: Path) -> Any:
    """And then the older checkpoint is to go."""
    from jaxmnt.checkpoint.commit import prune, valid_checkpoints

    found = start_run(folder)
    prune(valid_checkpoints(folder / "run" / "checkpoints", RUN), {STEPS[-1]})
    return found


def _kept_tokenizer(folder: Path) -> Any:
    """The one that a run keeps; none is as in a run from before there was that."""
    from jaxmnt.data.run_tokenizer import read_tokenizer

    found = read_tokenizer(folder)
    return None if found is None else (found.description, found.vocab_size, found.text)


def _same_or_none(found: Any, undamaged: Any) -> str | None:
    return None if found is None else same(found, undamaged)


def _key(folder: Path) -> Any:
    from jaxmnt.distributed.authentication import run_key

    return len(run_key(folder / "run", {}))


def _restored_config(folder: Path) -> Any:
    from jaxmnt.run.rundir import plain_config, read_config

    return plain_config(read_config(folder / "run"))


def _newest(folder: Path) -> Any:
    from jaxmnt.checkpoint.refs import find

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
    from jaxmnt.storage import json_digest

    record = json.loads(content)
    record.pop("seal", None)
    return json.dumps(record | {"seal": json_digest(record)}, indent=1, sort_keys=True).encode()


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
    """As by the next start of the process."""
    from jaxmnt.telemetry.events import Events, event_file, repair

    repair(event_file(folder / "run", 0))
    events = Events(folder / "run", 0)
    events.write("end", step=10, finished=True)
    events.close()
    return events.attempt


def _history(folder: Path) -> Any:
    from jaxmnt.telemetry.events import history

    return history(folder / "run" / "events" / "0.jsonl")


def _last_commit(folder: Path) -> Any:
    from jaxmnt.telemetry.events import last_commit

    return last_commit(folder / "run")


def _rewound(folder: Path) -> Any:
    from jaxmnt.telemetry.events import read_lines, repair

    path = folder / "run" / "metrics.jsonl"
    repair(path, last_step=10)
    return read_lines(path)


def _is_rewound(found: Any, undamaged: Any) -> str | None:
    late = [record for record in found if type(record.get("step")) is int and record["step"] > 10]
    return f"a step that will be taken again: {_short(late[0])}" if late else _are_records(found, undamaged)


def _replayed(folder: Path) -> Any:
    from jaxmnt.run.replay import _recorded_steps

    return _recorded_steps(SimpleNamespace(directory=folder / "run", identity=Identity()), 0, 12)


def _are_steps(found: Any, undamaged: Any) -> str | None:
    for step, line in found.items():
        if type(step) is not int or set(line) != {"loss", "grad_norm", "tokens"}:
            return f"no step: {step!r}: {_short(line)}"
    return None


def _evaluated(folder: Path) -> Any:
    from jaxmnt.run.loop import is_evaluation_missing

    start, directory = SimpleNamespace(kind="own", step=10), folder / "run"
    return is_evaluation_missing(SimpleNamespace(start=start, directory=directory, identity=Identity()))


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
        from jaxmnt.data.inspection import length_lines, mixture_table, sources_table
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
            told = [*sources_table(sources), *mixture_table(config, training), *length_lines(sources)]
            assert all(line.isprintable() for line in told), "a table with control characters"
        for split in ("train", "eval"):
            part.unigram_nats(split)
        part.origin("train", 0), part.origin("eval", part.documents("eval") - 1)
        make_tokenizer(sources.tokenizer, sources.folder).encode_batch(["some words"])
        return {"digest": sources.digest, "ids": sources.vocab_size, "batches": batches}

    return read


def _staged_copy(folder: Path) -> Any:
    from jaxmnt.data.sources import stage
    from jaxmnt.data.store import open_prepared

    data = open_prepared(folder / "data")
    (folder / "local" / "copy").rename(folder / "local" / data.digest[:16])
    copy = open_prepared(stage(data, folder / "local"))
    copy.check()
    return copy.digest


def _gone_on_with(folder: Path) -> Any:
    from jaxmnt.data.store import open_prepared

    build_again((folder / "input").resolve(), folder / "data")
    data = open_prepared(folder / "data")
    data.check()
    data.verify()
    return data.digest


def _tokenizer(folder: Path) -> Any:
    from jaxmnt.data.tokenizer import choose_tokenizer

    tokenizer = choose_tokenizer(str(folder / "data" / "tokenizer.json"), for_text=True)
    ids = tokenizer.encode_batch(["some words, and more"])[0]
    tokenizer.decode(ids)
    return tokenizer.vocab_size, tokenizer.end_of_document, ids.max()


def _is_tokenizer(found: Any, undamaged: Any) -> str | None:
    size, end, largest = found
    return None if 0 <= end < size and largest < size else f"ids beyond the vocabulary: {found}"


def _compile_cache(folder: Path) -> Any:
    import jax

    from jaxmnt.run.compile_cache import use_compile_cache

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    try:
        use_compile_cache(str(folder / "compiled"), folder)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


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
    may_change = (*_LOCKS, *_CUT_OFF, *((f"run/{file}",) if file == "run.json" else ()))
    return Reader(f"start: {file}", "run", f"run/{file}", form, start_run, fits, may_change, **more)


def _of_events(name: str, read: Any, fits: Any, **more: Any) -> Reader:
    return Reader(f"events: {name}", "records", _EVENTS, "lines", read, fits, **{"must_go_on": True, **more})


def _readers() -> list[Reader]:
    sealed = {"reseal": _resealed_checkpoint}
    commands = {
        "list": ("list", "RUN"), "show": ("show", "RUN@10"), "verify": ("verify", "RUN@10"),
        "diff": ("diff", "RUN@5", "RUN@10"),
    }  # fmt: skip
    launch = {"may_change": ("run/launch/*",)}
    pruned = (*_LOCKS, *_CUT_OFF, *_PRUNED)
    network = {"on_disk": False}
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
        *(Reader(f"checkpoint {name}", "run", "run/checkpoints/10/jaxmnt.json", "json", _checkpoint(*given), _says,
                 **sealed)
          for name, given in commands.items()),
        *(Reader(f"checkpoint list: {file}", "run", f"run/{file}", form, _checkpoint("list", "RUN"), _says)
          for file, form in (("run.json", "json"), ("config.yaml", "yaml"), ("checkpoints/15.unfinished", "text"))),
        Reader("config of a run", "run", "run/config.yaml", "yaml", _restored_config, _any),
        Reader("newest of a run: config.yaml", "run", "run/config.yaml", "yaml", _newest, same),
        Reader("config file", "config", "config.yaml", "yaml", _loaded, _any, may_be_a_pipe=True),
        _of_events("lines", _lines("events/0.jsonl"), _are_records),
        _of_events("written on", _written_on, _is_integer, may_change=(_EVENTS,), keeps_lines=lambda record: True,
                   writes_on=True),
        _of_events("history", _history, _is_history),
        _of_events("last commit", _last_commit, _is_integer),
        _of_events("after a start in an allocation", _AFTER, _is_answer, **launch),
        Reader("metrics: rewound", "records", _METRICS, "lines", _rewound, _is_rewound, (_METRICS,),
               lambda record: record.get("step", 0) <= 10, must_go_on=True),
        Reader("metrics: evaluated", "records", _METRICS, "lines", _evaluated, _any, must_go_on=True),
        Reader("metrics: replay", "records", _METRICS, "lines", _replayed, _are_steps),
        *(Reader(f"{file}: {when}", "records", f"run/launch/{file}", "json", read, _is_answer, **launch)
          for file, when, read in (("bad_nodes.json", "before", _BEFORE), ("bad_nodes.json", "after", _AFTER),
                                   ("starts.json", "after", _AFTER))),
        *(Reader(f"data: {file}", "data", f"data/{file}", form, _rows(False), _are_rows, reseal=_seal_of(file))
          for file, form in _DATA.items()),
        *(Reader(f"verified data: {file}", "data", f"data/{file}", form, _rows(True), _same_rows)
          for file, form in _DATA.items() if file in ("manifest.json", "sources.txt", "train/tokens-*")),
        Reader("staged data", "staged", "local/copy/manifest.json", "json", _staged_copy, same, ("local/*",)),
        *(Reader(f"preparation: {file}", "half prepared", f"data/work/{file}", form, _gone_on_with, fits, ("data/*",))
          for file, form, fits in (("plan.json", "json", same), ("part-00000.json", "json", _any),
                                   ("counts-00000.npy", "npy", _any))),
        Reader("tokenizer", "data", "data/tokenizer.json", "json", _tokenizer, _is_tokenizer),
        *(Reader(f"kept tokenizer: {file}", "tokenizer", f"tokenizer/{file}", "json", _kept_tokenizer, fits,
                 names=("tokenizer",))
          for file, fits in (("manifest.json", _same_or_none), ("tokenizer.json", same))),
        Reader("folder of compiled programs", "nothing", "compiled", "text", _compile_cache, same),
        Reader("run.key", "records", "run/run.key", "text", _key, same),
        *(Reader(f"rendezvous: {name}", "words", name, form, greeted(name), _any, names=_GREETING_NAMES, **network)
          for name, form in (("greeting", "json"), ("trouble", "json"), ("stopping", "lines"))),
        Reader("rendezvous: a stranger", "words", "greeting", "json", greeted("greeting", proven=False), same,
               must_go_on=True, **network),
        Reader("rendezvous: answer", "words", "answer", "json", answered("answer"), _any, names=("process",),
               **network),
        # Its words are the message, whatever they are.
        Reader("rendezvous: refusal", "words", "refusal", "json", answered("refusal"), _any, names=("",), **network),
        Reader("rendezvous: a stranger's answer", "words", "refusal", "json", answered("refusal", proven=False), _any,
               names=("process",), **network),
        *(Reader(f"heartbeat of process {to}: {name}", "words", name, "lines", told(name, to), is_fate, must_go_on=True,
                 **network)
          for to, names in enumerate((_WORDS_TO_0, _WORDS_TO_OTHERS)) for name in names),
    ]  # fmt: skip
    return found


_GREETING_NAMES = ("process", "cluster.", "version", "digest")


def _seal_of(file: str) -> Callable[[bytes], bytes] | None:
    return _resealed_data if file == "manifest.json" else None


READERS = {reader.name: reader for reader in _readers()}
