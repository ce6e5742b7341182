"""Preparing data: every kind of input, the same bytes for any number of workers, and going on after a kill."""

import contextlib
import errno
import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import command, in_tiers

import jaxmnt.prepare
from jaxmnt.config.load import parse_config
from jaxmnt.data.attempts import Attempt
from jaxmnt.data.batches import TrainingData
from jaxmnt.data.preparation import run
from jaxmnt.data.preparation.inputs import ReadOptions, Selection, Settings
from jaxmnt.data.preparation.part import write_record
from jaxmnt.data.preparation.plan import _make_plan, with_stored_sizes
from jaxmnt.data.preparation.run import build
from jaxmnt.data.preparation.text import TEXT_PIECE
from jaxmnt.data.rows import Windows, batch_digest, row_digests
from jaxmnt.data.sources import open_sources
from jaxmnt.data.store import open_prepared
from jaxmnt.data.tokenizer import Bytes, make_tokenizer
from jaxmnt.errors import ConfigError, UserError


def prepare(folder, output, **options):
    selection = Selection([folder] if isinstance(folder, Path) else folder)
    defaults = {"eval_fraction": 0.2, "shard_tokens": 1000, "part_bytes": 2000}
    return build(selection, output, Settings(**defaults | options), lambda *progress: None)


def read_back(path, split="train"):
    """The documents of a split as text, with where they came from."""
    data = open_prepared(path)
    stream, tokenizer = data.stream(split), make_tokenizer(data.tokenizer, path)
    tokens = np.empty(stream.tokens, np.uint32)
    stream.read(0, tokens)
    pieces = np.split(tokens, stream.document_starts[1:])
    texts = [tokenizer.decode(piece[:-1]) for piece in pieces]
    assert all(piece[-1] == stream.end_of_document for piece in pieces)
    return [(text, *data.origin(split, number)) for number, text in enumerate(texts)]


def contents(root):
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(root.rglob("*.*"))}


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "text"
    (folder / "sub").mkdir(parents=True)
    for number in range(30):
        (folder / ("sub" if number % 3 else ".") / f"{number}.txt").write_text(f"file {number} ä " * (number + 1))
    return folder


@pytest.fixture
def lines(tmp_path):
    """Records with the text that they hold; long enough for several parts."""
    records = [{"text": f"record {number} ö\n" * (number % 7 + 1), "id": number} for number in range(200)]
    path = tmp_path / "lines.jsonl"
    path.write_text(
        "".join(json.dumps(record, ensure_ascii=number % 2 == 0) + "\n" for number, record in enumerate(records))
    )
    return path, [record["text"] for record in records]


# -- what goes in comes out


def test_stream_is_the_text(texts, tmp_path):
    summary = prepare(texts, tmp_path / "out")
    found = read_back(tmp_path / "out") + read_back(tmp_path / "out", "eval")
    assert sorted((file, text) for text, file, _ in found) == sorted(
        (f"text/{path.relative_to(texts)}", path.read_text()) for path in texts.rglob("*.txt")
    )
    assert summary.documents["train"] and summary.documents["eval"]
    assert len(open_prepared(tmp_path / "out").manifest["splits"]["train"]["shards"]) > 3


def test_a_long_text_is_read_in_pieces(tmp_path):
    text = "".join(f"line {number} with ä and 漢字\n" for number in range(60_000)) + "漢" * 700_000
    assert len(text.encode()) > 2 * TEXT_PIECE
    (tmp_path / "long.txt").write_text(text)
    prepare(tmp_path / "long.txt", tmp_path / "out", eval_fraction=0.0, shard_tokens=2**20)
    assert read_back(tmp_path / "out") == [(text, "long.txt", 1)]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_records_of_every_kind(lines, tmp_path, kind):
    path, expected = lines
    source = tmp_path / f"records.{kind}"
    if kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": expected, "id": range(200)}), source, row_group_size=17)
    elif kind == "jsonl.zst":
        import zstandard

        source.write_bytes(zstandard.compress(path.read_bytes()))
    else:
        source.write_bytes(path.read_bytes() if kind == "jsonl" else gzip.compress(path.read_bytes()))
    prepare(source, tmp_path / "out")
    found = {record: text for split in ("train", "eval") for text, _, record in read_back(tmp_path / "out", split)}
    assert found == dict(enumerate(expected, 1))


@pytest.mark.parametrize("kind", ["npy", "uint16", "uint32"])
def test_token_arrays(tmp_path, kind):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 500, 9000).astype(np.uint32 if kind == "uint32" else np.uint16)
    path = tmp_path / ("tokens.npy" if kind == "npy" else "tokens.bin")
    np.save(path, tokens) if kind == "npy" else tokens.tofile(path)
    arguments = ["--vocab-size", "500", "--end-id", "499"]
    result = command(
        "jaxmnt.prepare", "--input", str(path), "--output", str(tmp_path / "out"), "--eval-fraction", "0", *arguments,
        "--token-dtype", "uint32" if kind == "uint32" else "uint16",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    stream = open_prepared(tmp_path / "out").stream("train")
    found = np.empty(stream.tokens, np.uint16)
    stream.read(0, found)
    assert (found == tokens).all()
    assert (stream.document_starts == np.concatenate([[0], np.flatnonzero(tokens == 499) + 1])).all()


@pytest.mark.parametrize("rows", ["windows", "packed"])
def test_changing_a_token_changes_just_the_digests_of_the_steps_that_read_it(tmp_path, rows):
    """Documents of arrays are held out by their place, so that the other batches stay what they were."""
    tokens = np.random.default_rng(0).integers(0, 50, 9000).astype(np.uint16)
    settings = {"tokenizer": None, "vocab_size": 51, "reading": ReadOptions(end_id=49)}
    digests, data = [], {}
    for name, change in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        tokens[500] = (tokens[500] + change) % 49
        np.save(tmp_path / name / "t.npy", tokens)
        prepare(tmp_path / name / "t.npy", tmp_path / f"out-{name}", **settings)
        config = parse_config(
            {
                "data": {
                    "path": str(tmp_path / f"out-{name}"), "rows": rows, "sequence_length": 16, "global_batch_size": 4,
                }
            }
        )  # fmt: skip
        data[name] = TrainingData(config, open_sources(config.data))
        batches = [data[name].batch(step, range(4))["tokens"] for step in range(100)]
        digests.append([batch_digest(row_digests(tokens)) for tokens in batches])
    reader = data["a"].readers["data"]
    streams = [data[name].readers["data"].stream for name in "ab"]
    values = [np.empty(stream.tokens, np.uint16) for stream in streams]
    for stream, found in zip(streams, values, strict=True):
        stream.read(0, found)
    (place,) = np.flatnonzero(values[0] != values[1])
    reading = [row for row in range(reader.rows) if place + 1 in reader.offsets(row)]
    for step, (before, after) in enumerate(zip(*digests, strict=True)):
        read = data["a"].order.locate(step, range(4)).row
        assert (before != after) == any(row in reading for row in read), step


# -- whatever the workers, and whatever stops them


def test_same_input_same_bytes_for_any_number_of_workers(texts, lines, tmp_path):
    shutil.copy(lines[0], texts / "lines.jsonl")
    for workers in (1, 2, 3):
        prepare(texts, tmp_path / str(workers), workers=workers, train_tokenizer=400)
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "3")
    (texts / "0.txt").rename(texts / "z.txt")
    prepare(texts, tmp_path / "other")
    prepare(texts, tmp_path / "again")
    assert contents(tmp_path / "other") == contents(tmp_path / "again") != contents(tmp_path / "1")


@pytest.mark.slow
def test_killed_half_way_it_goes_on(tmp_path):
    """By SIGKILL, so nothing can be tidied up; the output is refused until it is whole, and then as if never killed."""
    folder = tmp_path / "text"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(10):
        (folder / f"{number}.txt").write_bytes(rng.integers(32, 127, 5 * 2**20, np.uint8).tobytes())
    arguments = ["--input", str(folder), "--workers", "2", "--output"]
    out, work = tmp_path / "out", tmp_path / "out" / "work"
    process = subprocess.Popen([sys.executable, "-m", "jaxmnt.prepare", *arguments, str(out)])
    deadline = time.monotonic() + 60
    while not list(work.glob("part-*.json")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.005)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = {path.name: path.stat().st_mtime_ns for path in work.glob("part-*.json")}
    assert 0 < len(done) < 10
    with pytest.raises(ConfigError, match=r"has no manifest\.json"):
        open_prepared(out)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() and "Z" not in state_of(child) for child in children):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)
    changed = command("jaxmnt.prepare", *arguments, str(out), "--eval-fraction", "0.5")
    assert changed.returncode == 2 and "unfinished preparation with other settings" in changed.stderr
    again = command("jaxmnt.prepare", *arguments, str(out))
    assert again.returncode == 0, again.stderr
    whole = command("jaxmnt.prepare", *arguments, str(tmp_path / "whole"))
    assert whole.returncode == 0 and contents(out) == contents(tmp_path / "whole")
    assert not work.exists()
    finished = command("jaxmnt.prepare", *arguments, str(out))
    assert finished.returncode == 2 and "is prepared already" in finished.stderr


def state_of(process: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2]
    return "Z"


def test_the_rate_is_shown_only_after_a_second(monkeypatch):
    """The rate of the first milliseconds says nothing about the rest."""
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(jaxmnt.prepare, "time", clock)
    shown = []
    status = SimpleNamespace(due=True, live=False, update=shown.append)
    progress = jaxmnt.prepare._Progress()
    for seconds, done in ((0, 0), (0.001, 2**20), (0.999, 2**21), (2, 2**22)):
        clock.now = 100 + seconds
        progress.show(status, "preparing", done, 2**23)
    assert shown == [
        "preparing  12% of 8 MiB", "preparing  25% of 8 MiB", "preparing  50% of 8 MiB  2 MiB/s  ETA 0:02"
    ]  # fmt: skip
    clock.now += 10
    progress.show(status, "checking", 2**20, 2**23)
    progress.show(status, "checking", 2**21, 2**23)
    assert progress.bytes_read == 2**22 and shown[-1] == "checking  25% of 8 MiB", "each activity is measured by itself"


def test_a_full_disk_leaves_nothing_that_looks_whole(texts, tmp_path):
    """A limit on the size of files stands in for the disk; with more room the same command goes on."""
    arguments = [sys.executable, "-m", "jaxmnt.prepare", "--input", str(texts), "--output", str(tmp_path / "out")]
    limited = ["bash", "-c", 'ulimit -f 2; exec "$@"', "-", *arguments]  # in units of 1,024 bytes
    full = subprocess.run(limited, capture_output=True, text=True)
    assert full.returncode == 1 and "cannot be written: File too large" in full.stderr, full.stderr
    assert "Traceback" not in full.stderr and not (tmp_path / "out" / "manifest.json").exists()
    more = subprocess.run(arguments, capture_output=True, text=True)
    assert more.returncode == 0 and read_back(tmp_path / "out")


def test_two_at_once_are_told_apart(texts, tmp_path):
    import fcntl

    (tmp_path / "out" / "work").mkdir(parents=True)
    with (tmp_path / "out" / "work" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is preparing"):
            prepare(texts, tmp_path / "out")


@pytest.mark.parametrize("second", ["goes on before the commit", "goes on after the commit"])
def test_a_part_that_two_attempts_prepare_at_once_is_whole(tmp_path, monkeypatch, second):
    """The second attempt begins when the first is in the middle, and is overtaken by it."""
    path, whole, out = tmp_path / "in.txt", tmp_path / "whole", tmp_path / "out"
    path.write_bytes(b"some text\n" * (4 * TEXT_PIECE // 10))
    options = {"shard_tokens": 2**23, "eval_fraction": 0.0}
    prepare(path, whole, **options)
    begun, go_on = threading.Event(), threading.Event()

    def at_stretch(number, action):
        """Does the action when so many stretches are read, of which all but the last are written."""
        stretches = 0

        def advance(count):
            nonlocal stretches
            stretches += 1
            if stretches == number:
                action()

        return advance

    def pause():
        begun.set()
        go_on.wait(30)

    def second_attempt(work, item):
        with contextlib.suppress(UserError):  # after the commit its folder is gone
            work(item, at_stretch(2, pause))

    def both(items, make_work, *others):
        other = threading.Thread(target=second_attempt, args=(make_work(), items[0]))
        threads.append(other)
        make_work()(items[0], at_stretch(3, lambda: (other.start(), begun.wait(30))))
        if second == "goes on before the commit":
            go_on.set()
            other.join(30)

    threads = []
    monkeypatch.setattr(run, "run", both)
    prepare(path, out, **options)
    open_prepared(out).verify()
    assert contents(out) == contents(whole) and not (out / "work").exists()
    go_on.set()
    threads[0].join(30)
    assert contents(out) == contents(whole)


def test_what_a_killed_worker_was_reading_is_named():
    from killed_worker import make

    with pytest.raises(UserError, match=r"killed; work in progress: .*the bad file.*or leave the file out with"):
        run.run(["the good file", "the bad file"], make, 2, lambda done: None)


def test_two_attempts_that_differ_are_no_data(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    for content in (b"one", b"one"):
        with Attempt(work).writing(tmp_path / "a") as stream:
            stream.write(content)
    different = pytest.raises(UserError, match="a was written by another attempt and holds other bytes")
    with different, Attempt(work).writing(tmp_path / "a") as stream:
        stream.write(b"other")
    assert (tmp_path / "a").read_bytes() == b"one"


def test_without_hard_links_a_file_is_published_all_the_same(texts, tmp_path, monkeypatch):
    def no_links(source, target):
        raise PermissionError(errno.EPERM, "no links here")

    prepare(texts, tmp_path / "with")
    monkeypatch.setattr(os, "link", no_links)
    prepare(texts, tmp_path / "without")
    assert contents(tmp_path / "with") == contents(tmp_path / "without")


def test_leftovers_of_killed_attempts_are_removed(texts, tmp_path, monkeypatch):
    """Those of a process that is still there, or on another host, stay until the data is finished."""
    out, work = tmp_path / "out", tmp_path / "out" / "work"
    (texts / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not valid UTF-8"):
        prepare(texts, out)
    assert not list(work.glob("*.tmp"))  # an attempt that fails removes its own
    host = Attempt(work).temporary(work / "counts-00000.npy").name.split(".")[2]
    dead = subprocess.Popen(["true"])
    dead.wait()
    shard = "train-tokens-00000-00.npy"
    names = {f"{shard}.{host}.{process}.0123abcd.tmp": keep for process, keep in ((dead.pid, False), (1, True))}
    names |= {f"{shard}.another-host.{dead.pid}.0123abcd.tmp": True, f"{shard}.tmp": True}
    for name in names:
        (work / name).write_bytes(b"left over")
    with pytest.raises(ConfigError, match="not valid UTF-8"):
        prepare(texts, out)
    assert {path.name for path in work.glob("*.tmp")} == {name for name, keep in names.items() if keep}
    prepare(texts, out, skip_bad=True)
    assert not work.exists()


# -- tokenizers and masks


def test_a_trained_tokenizer_reads_its_own_text(texts, tmp_path):
    summary = prepare(texts, tmp_path / "out", train_tokenizer=400)
    data = open_prepared(tmp_path / "out")
    assert data.vocab_size <= 400 and summary.tokens["train"] < sum(
        len(text) for text, *_ in read_back(tmp_path / "out")
    )
    found = [text for split in ("train", "eval") for text, *_ in read_back(tmp_path / "out", split)]
    assert sorted(found) == sorted(path.read_text() for path in texts.rglob("*.txt"))
    prepare(texts, tmp_path / "again", tokenizer=str(tmp_path / "out"))
    assert open_prepared(tmp_path / "again").digest == data.digest


def test_a_text_cannot_end_itself(texts, tmp_path):
    (texts / "evil.txt").write_text("before <|endoftext|> after <|im_start|>")
    prepare(texts, tmp_path / "out", train_tokenizer=400, eval_fraction=0.0)
    evil = [text for text, file, _ in read_back(tmp_path / "out") if file == "text/evil.txt"]
    assert evil == ["before <|endoftext|> after <|im_start|>"]


def test_only_answers_are_targets(tmp_path):
    records = [
        {"messages": [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]},
        {"prompt": "2+2=", "completion": "4"},
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    prepare(tmp_path / "chat.jsonl", tmp_path / "out", eval_fraction=0.0, reading=ReadOptions(chat=True))
    stream = open_prepared(tmp_path / "out").stream("train")
    row = Windows(stream, stream.tokens, False).read([0])
    learnt = row["targets"][0][row["weights"][0] > 0]
    assert Bytes().decode(learnt) == "answer<|im_end|>4"
    assert (learnt == 256).sum() == 2  # and to stop
    assert "<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\nanswer" in Bytes().decode(row["targets"][0])


def test_chat_uses_the_tokenizers_own_markup(texts, tmp_path):
    prepare(texts, tmp_path / "tokenizer", train_tokenizer=400)
    record = {"messages": [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "yes"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(record) + "\n")
    settings = {"tokenizer": str(tmp_path / "tokenizer"), "reading": ReadOptions(chat=True), "eval_fraction": 0.0}
    prepare(tmp_path / "chat.jsonl", tmp_path / "out", **settings)
    stream = open_prepared(tmp_path / "out").stream("train")
    tokens = np.empty(stream.tokens, np.uint16)
    stream.read(0, tokens)
    vocabulary = json.loads((tmp_path / "out" / "tokenizer.json").read_text())["added_tokens"]
    end = next(token["id"] for token in vocabulary if token["content"] == "<|im_end|>")
    assert (tokens == end).sum() == 2  # the user's is text


# -- bad input, each with its message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', r"lines\.jsonl:151: not valid JSON"),
        (b'{"text": "\xff"}', r"lines\.jsonl:151: not valid UTF-8 at byte 10"),
        (b'{"body": "x"}', r"lines\.jsonl:151: has no field text; its fields: body \(--text-field"),
        (b'{"text": 5}', r'lines\.jsonl:151: field "text" is a number; it must be a string'),
        (b"[1]", r"lines\.jsonl:151: a record must be an object"),
    ],
)
def test_a_bad_line_is_named_or_skipped(lines, tmp_path, line, message):
    path, expected = lines
    all_lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(all_lines[:150]) + line + b"\n" + b"\n" + b"".join(all_lines[150:]))
    with pytest.raises(ConfigError, match=message):
        prepare(path, tmp_path / "out")
    summary = prepare(path, tmp_path / "out", skip_bad=True)  # as the message says; parts that are done stay
    assert (summary.skipped, summary.empty) == (1, 1) and len(summary.remarks) == 1
    found = {record: text for split in ("train", "eval") for text, _, record in read_back(tmp_path / "out", split)}
    numbers = [*range(1, 151), *range(153, 203)]
    assert found == dict(zip(numbers, expected, strict=True))


def test_odd_text_files(tmp_path):
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "a").write_bytes(b"fine")
    (folder / "b").write_bytes(b"\0\1")
    (folder / "c").write_bytes(b"odd \xff")
    (folder / "d").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"t/c: not valid UTF-8 near byte 4; .*--on-error skip"):
        prepare(folder, tmp_path / "o", eval_fraction=0.0)
    summary = prepare(folder, tmp_path / "o", eval_fraction=0.0, skip_bad=True)
    assert summary.binary_names == ["t/b"]
    assert (summary.skipped, summary.binary, summary.empty, summary.documents["train"]) == (1, 1, 1, 1)
    summary = prepare(folder, tmp_path / "p", eval_fraction=0.0, reading=ReadOptions(replace_invalid=True))
    assert (summary.skipped, summary.replaced, summary.documents["train"]) == (0, 1, 2)
    assert [text for text, *_ in read_back(tmp_path / "p")] == ["fine", "odd \ufffd"]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda p: np.save(p / "t.npy", np.arange(60)), {"vocab_size": 50}, r"t\.npy holds the id 50 at element 50"),
        (lambda p: np.save(p / "t.npy", np.zeros(3)), {"vocab_size": 50}, r"1-dimensional float64; token arrays are"),
        (
            lambda p: np.save(p / "t.npy", np.arange(3)),
            {},
            r"t\.npy is a token array; give --vocab-size \(and --end-id",
        ),
        (lambda p: (p / "t.bin").write_bytes(b"abc"), {"vocab_size": 50}, r"t\.bin cannot be read as a token array"),
        (lambda p: (p / "t.parquet").write_bytes(b"no"), {}, r"t\.parquet cannot be read as Parquet"),
        (lambda p: (p / "t.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 9)[:-9]), {}, r"is damaged after"),
        (
            lambda p: np.save(p / "t.npy", np.arange(3)),
            {"tokenizer": "bytes"},
            r"t\.npy is a token array; give --vocab-si",
        ),
        (
            lambda p: (p / "t").write_text("a"),
            {"end_token": "x"},
            r"--end-token: the tokenizer bytes has its own end of document",
        ),
        (lambda p: (p / "t").write_text("a"), {"reading": ReadOptions(chat=True)}, r"--chat: .*in/t holds no records"),
        (
            lambda p: np.savez((p / "t.npy").open("wb"), a=[1]),
            {"vocab_size": 50},
            r"t\.npy cannot be read as a token array",
        ),
        (lambda p: (p / "t.npy").write_bytes(b""), {"vocab_size": 50}, r"t\.npy cannot be read as a token array"),
        (lambda p: (p / "t.jsonl").write_text(""), {"train_tokenizer": 400}, r"has no text to train on"),
        (
            lambda p: [np.save(p / "t.npy", np.arange(3)), (p / "t").write_text("a")],
            {"train_tokenizer": 400},
            r"token arrays contain tokens of a different tokenizer",
        ),
        (lambda p: (p / "t.jsonl").write_text("[" * 100_000), {}, r"t\.jsonl:1: not valid JSON"),
        (lambda p: (p / "t").write_text(""), {}, r"nothing was found for training"),
        (lambda p: (p / "t").write_text("a"), {"tokenizer": "none.json"}, r"--tokenizer: none\.json does not exist"),
        (
            lambda p: (p / "t").write_text("a"),
            {"train_tokenizer": 100},
            r"--train-tokenizer: 100 leaves too little",
        ),
    ],
)
def test_other_bad_input(tmp_path, make, options, message):
    folder = tmp_path / "in"
    folder.mkdir()
    make(folder)
    if "vocab_size" in options:
        options = options | {"tokenizer": None, "reading": ReadOptions(end_id=0)}
    elif not options and (folder / "t.npy").exists():
        options = {"tokenizer": None}
    with pytest.raises(ConfigError, match=message):
        prepare(folder, tmp_path / "out", **options)
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize(("suffix", "share"), in_tiers({0, 5}, list(product(["gz", "zst"], [0.5, 0.6, 0.99]))))
def test_a_compressed_file_that_was_cut_off_is_named(tmp_path, suffix, share):
    """Also where the cut falls between two lines: what is missing must not go unnoticed."""
    import zstandard

    rng = np.random.default_rng(0)
    raw = b"".join(b'{"text": "%s"}\n' % rng.integers(97, 122, 114, np.uint8).tobytes() for _ in range(4096))
    whole = (
        gzip.compress(raw) if suffix == "gz" else zstandard.compress(raw[: 2**17]) + zstandard.compress(raw[2**17 :])
    )
    (tmp_path / f"t.jsonl.{suffix}").write_bytes(whole)
    assert prepare(tmp_path / f"t.jsonl.{suffix}", tmp_path / "whole", part_bytes=None).skipped == 0
    data = open_prepared(tmp_path / "whole")
    assert data.documents("train") + data.documents("eval") == 4096
    (tmp_path / f"t.jsonl.{suffix}").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ConfigError, match=r"is damaged after line \d+"):
        prepare(tmp_path / f"t.jsonl.{suffix}", tmp_path / "out", skip_bad=True)


@pytest.mark.parametrize("tokenizer", ["bytes", "trained"])
def test_half_characters_are_bad_records(texts, tmp_path, tokenizer):
    """JSON can spell lone surrogates, and pages from the web do."""
    if tokenizer == "trained":
        prepare(texts, tmp_path / "tokenizer", train_tokenizer=400)
        tokenizer = str(tmp_path / "tokenizer")
    (tmp_path / "t.jsonl").write_text('{"text": "fine"}\n{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude00"}\n')
    options = {"tokenizer": tokenizer, "eval_fraction": 0.0}
    with pytest.raises(ConfigError, match=r"t\.jsonl:2: holds half of a character"):
        prepare(tmp_path / "t.jsonl", tmp_path / "out", **options)
    assert prepare(tmp_path / "t.jsonl", tmp_path / "out", skip_bad=True, **options).skipped == 1
    assert [text for text, *_ in read_back(tmp_path / "out")] == ["fine", "\U0001f600"]
    summary = prepare(tmp_path / "t.jsonl", tmp_path / "r", reading=ReadOptions(replace_invalid=True), **options)
    assert summary.replaced == 1 and read_back(tmp_path / "r")[1][0] == "a\ufffdb"


def test_invalid_text_in_parquet(tmp_path):
    import pyarrow
    from pyarrow import parquet

    column = pyarrow.array([b"fine", b"odd \xff", b"good"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "t.parquet")
    with pytest.raises(ConfigError, match=r"t\.parquet: row 2: not valid UTF-8 at byte 4 of text"):
        prepare(tmp_path / "t.parquet", tmp_path / "out", eval_fraction=0.0)
    assert prepare(tmp_path / "t.parquet", tmp_path / "out", eval_fraction=0.0, skip_bad=True).skipped == 1
    assert [(text, record) for text, _, record in read_back(tmp_path / "out")] == [("fine", 1), ("good", 3)]


def test_input_that_changes_meanwhile_is_noticed(texts, tmp_path):
    def touch(*progress):
        (texts / "0.txt").write_text("something else")

    settings = Settings(part_bytes=2000)
    with pytest.raises(ConfigError, match=r"0\.txt was changed or removed while"):
        build(Selection([texts]), tmp_path / "out", settings, touch)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_the_output_may_lie_in_the_input_and_inputs_may_overlap(texts, tmp_path):
    with pytest.raises(ConfigError, match="no file"):
        build(Selection([texts], suffixes=[".none"]), texts / "out", Settings(), lambda *progress: None)
    (texts / "bad.jsonl").write_text("{\n")
    with pytest.raises(ConfigError, match="not valid JSON"):
        prepare([texts, texts / "sub"], texts / "out")
    prepare([texts, texts / "sub"], texts / "out", skip_bad=True)
    found = [text for split in ("train", "eval") for text, *_ in read_back(texts / "out", split)]
    assert sorted(found) == sorted(path.read_text() for path in texts.rglob("*.txt") if "out" not in path.parts)


def test_a_mistake_before_the_first_part_can_be_mended(texts, tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        prepare(texts, tmp_path / "out", tokenizer="nowhere.json")
    prepare(texts, tmp_path / "out")


def test_what_a_stopped_attempt_with_other_settings_left_is_gone(texts, tmp_path):
    (texts / "z.jsonl").write_text("{\n")
    with pytest.raises(ConfigError, match="not valid JSON"):
        prepare(texts, tmp_path / "out", eval_fraction=0.5, part_bytes=10**9)
    assert list((tmp_path / "out" / "eval").iterdir())
    prepare(texts, tmp_path / "out", eval_fraction=0.0, skip_bad=True)
    prepare(texts, tmp_path / "again", eval_fraction=0.0, skip_bad=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "again")


def test_links_are_followed_and_names_are_told_apart_in_any_case(tmp_path):
    for folder in ("in", "elsewhere"):
        (tmp_path / folder).mkdir()
    (tmp_path / "elsewhere" / "A.JSONL").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "two"}\r\n')
    (tmp_path / "in" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "round").symlink_to(tmp_path / "in")
    prepare(tmp_path / "in", tmp_path / "out", eval_fraction=0.0)
    assert read_back(tmp_path / "out") == [("one", "in/link/A.JSONL", 1), ("two", "in/link/A.JSONL", 2)]


def test_arrays_of_several_types(tmp_path):
    for name, dtype in (("a", np.uint64), ("b", np.int8), ("c", np.dtype(">i4"))):
        np.save(tmp_path / f"{name}.npy", np.arange(100).astype(dtype))
    settings = {"tokenizer": None, "vocab_size": 100, "reading": ReadOptions(end_id=99), "eval_fraction": 0.0}
    prepare([tmp_path / f"{name}.npy" for name in "abc"], tmp_path / "out", shard_tokens=10**6, **settings)
    stream = open_prepared(tmp_path / "out").stream("train")
    found = np.empty(stream.tokens, np.int64)
    stream.read(0, found)
    assert (found == np.tile(np.arange(100), 3)).all() and len(stream.document_starts) == 3


def test_a_tokenizer_whose_end_can_occur_in_text_is_refused(texts, tmp_path):
    prepare(texts, tmp_path / "tokenizer", train_tokenizer=400)
    path = tmp_path / "tokenizer" / "tokenizer.json"
    tree = json.loads(path.read_text())
    for token in tree["added_tokens"]:
        token["special"] = False
    path.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=r"--end-token: '<\|endoftext\|>' of .* can occur in text"):
        prepare(texts, tmp_path / "out", tokenizer=str(path))


def test_small_files_share_a_part(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02d}.jsonl").write_text(json.dumps({"text": f"record {number}"}) + "\n")
    prepare(folder, tmp_path / "out", part_bytes=None, eval_fraction=0.0)
    assert len(list((tmp_path / "out" / "train").iterdir())) == 3
    found = read_back(tmp_path / "out")
    assert found == [(f"record {number}", f"in/{number:02d}.jsonl", 1) for number in range(60)]


def test_masked_windows_of_arrays_without_ends_do_not_leak(tmp_path):
    """A document's first input is an end of document, also where the tokens that were given have none."""
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", np.arange(1, 41, dtype=np.uint16))
    settings = {"tokenizer": None, "vocab_size": 50, "reading": ReadOptions(end_id=0), "eval_fraction": 0.0}
    prepare([tmp_path / "a.npy", tmp_path / "b.npy"], tmp_path / "out", **settings)
    batch = Windows(open_prepared(tmp_path / "out").stream("train"), 16, document_mask=True).read(range(5))
    inputs, targets = batch["tokens"].ravel(), batch["targets"].ravel()
    assert (targets == np.tile(np.arange(1, 41), 2)).all()
    assert (inputs == np.tile(np.arange(40), 2)).all() and batch["positions"].ravel()[40] == 0


def test_a_library_that_is_missing_is_named(lines, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r'install it with: pip install -c constraints\.txt -e "\.\[data\]"$'):
        prepare(lines[0], tmp_path / "out", train_tokenizer=400)


def test_files_of_the_same_name_are_all_kept(tmp_path):
    for folder in ("a/src", "b/src"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "x.txt").write_text(folder)
    prepare([tmp_path / "a/src", tmp_path / "b/src"], tmp_path / "out", eval_fraction=0.0)
    assert [text for text, *_ in read_back(tmp_path / "out")] == ["a/src", "b/src"]


def test_unigram_is_the_entropy_of_the_text(tmp_path):
    (tmp_path / "a").write_text("ab" * 50_000)
    prepare(tmp_path / "a", tmp_path / "o", eval_fraction=0.0)
    assert open_prepared(tmp_path / "o").unigram_nats("train") == pytest.approx(np.log(2), rel=0.02)


def test_the_bytes_of_a_target_are_those_of_the_text_that_is_learnt(tmp_path):
    """By hand; each document has an end, which is a target. Of token arrays the text is not known."""
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hé"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": turns}))
    (tmp_path / "a.txt").write_text("é" * 10)
    (tmp_path / "b.jsonl").write_text('{"text": "abcd"}\n{"text": "ef"}\n')
    np.save(tmp_path / "c.npy", np.arange(4, dtype=np.uint8))
    prepare([tmp_path / "a.txt", tmp_path / "b.jsonl"], tmp_path / "text", eval_fraction=0.0)
    prepare(tmp_path / "chat.jsonl", tmp_path / "chat", eval_fraction=0.0, reading=ReadOptions(chat=True))
    prepare(tmp_path / "c.npy", tmp_path / "arrays", eval_fraction=0.0, tokenizer=None, vocab_size=8)
    known = [open_prepared(tmp_path / name).bytes_per_target("train") for name in ("text", "chat", "arrays")]
    end = len("<|im_end|>") + 1  # bytes as tokens have no markup of their own
    assert known == [26 / 29, 3 / (3 + end), None]
    assert open_prepared(tmp_path / "text").bytes_per_target("eval") is None


# -- damage to what was prepared


@pytest.mark.parametrize("damage", ["manifest", "shard", "short", "flip", "boundaries"])
def test_damaged_data_is_refused(prepared, tmp_path, damage):
    copy = tmp_path / "copy"
    shutil.copytree(prepared, copy)
    shard = next(iter(sorted((copy / "train").glob("tokens-*"))))
    if damage == "manifest":
        (copy / "manifest.json").unlink()
    elif damage == "shard":
        shard.unlink()
    elif damage == "short":
        np.save(shard, np.zeros(3, np.uint16))
    elif damage == "boundaries":
        shard.with_name(shard.name.replace("tokens", "documents")).write_bytes(b"")
    else:
        raw = bytearray(shard.read_bytes())
        raw[-1] ^= 1
        shard.write_bytes(raw)
    with pytest.raises(ConfigError, match=r"data\.path: .*(no manifest|cannot be read|has 3 tokens|SHA-256)"):
        data = open_prepared(copy)
        _ = data.stream("train").document_starts
        data.verify()
    assert damage != "flip" or open_prepared(copy).stream("train")  # found only when asked for


def test_prepare_command(texts, tmp_path):
    out = tmp_path / "out"
    result = command("jaxmnt.prepare", "--input", str(texts), "--output", str(out), "--suffix", ".txt")
    assert result.returncode == 0, result.stderr
    assert json.loads((out / "manifest.json").read_text())["vocab_size"] == 257
    assert f"data.path={out}" in result.stdout
    (out / "work").mkdir()  # as if it had been killed just before it took this away
    again = command("jaxmnt.prepare", "--input", str(texts), "--output", str(out))
    assert not (out / "work").exists()
    assert again.returncode == 2 and "is prepared already" in again.stderr
    nothing = command("jaxmnt.prepare", "--input", str(texts), "--output", str(tmp_path / "o2"), "--suffix", ".md")
    assert nothing.returncode == 2 and "no files ending in .md" in nothing.stderr
    wrong = command("jaxmnt.prepare", "--input", str(texts), "--output", str(texts))
    assert wrong.returncode == 2 and "is not prepared data" in wrong.stderr


def test_an_unfinished_preparation_of_an_earlier_version_keeps_its_sizes(tmp_path):
    """It has smaller shards, and does not say into how many parts the largest inputs are cut."""
    (tmp_path / "work").mkdir()
    assert with_stored_sizes(Settings(), tmp_path) == Settings()
    plan = _make_plan([], Settings(shard_tokens=2**26, max_parts=None))
    assert "max_parts" not in plan["settings"], "as an earlier version wrote it"
    write_record(tmp_path / "work" / "plan.json", plan)
    assert with_stored_sizes(Settings(), tmp_path) == Settings(shard_tokens=2**26, max_parts=None)
    write_record(tmp_path / "work" / "plan.json", _make_plan([], Settings()))
    assert with_stored_sizes(Settings(), tmp_path) == Settings()
