"""Prepared data and the rows that training and evaluation read from it."""

import hashlib
import json
import shutil

import numpy as np
import pytest
from conftest import command
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmnt.data.batches import Windows, evaluation_rows, training_rows
from jaxmnt.data.build import build, find_files
from jaxmnt.data.store import open_prepared
from jaxmnt.data.tokenizer import Bytes
from jaxmnt.errors import ConfigError


def prepare(folder, output, **options):
    settings = {"eval_fraction": 0.2, "shard_tokens": 1000} | options
    return build(find_files([folder], [], []), output, Bytes(), progress=lambda done, total: None, **settings)


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "text"
    (folder / "sub").mkdir(parents=True)
    for number in range(30):
        (folder / ("sub" if number % 3 else ".") / f"{number}.txt").write_text(f"file {number} ä " * (number + 1))
    return folder


def test_stream_is_the_text(texts, tmp_path):
    """Read back, the shards are the documents in order of their names, each with its end."""
    prepare(texts, tmp_path / "out")
    data = open_prepared(str(tmp_path / "out"))
    streams = {split: data.stream(split) for split in ("train", "eval")}
    tokenizer = Bytes()
    for split, stream in streams.items():
        tokens = stream.rows([0], stream.tokens)[0]
        assert (tokens == tokenizer.end_of_document).sum() == data.manifest["splits"][split]["documents"]
        assert list(stream.document_starts) == [0, *(np.flatnonzero(tokens == 256)[:-1] + 1)]
    together = "".join(tokenizer.decode(s.rows([0], s.tokens)[0]) for s in streams.values())
    names = [path for _, path in find_files([texts], [], [])]
    assert sorted(together) == sorted("".join(path.read_text() for path in names))
    assert data.tokens("train") and data.tokens("eval")


def test_same_input_same_bytes_and_split_ignores_names(texts, tmp_path):
    prepare(texts, tmp_path / "a")
    prepare(texts, tmp_path / "b")
    digests = [
        {p.relative_to(root): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(root.rglob("*.*"))}
        for root in (tmp_path / "a", tmp_path / "b")
    ]
    assert digests[0] == digests[1]
    (texts / "0.txt").rename(texts / "z.txt")
    prepare(texts, tmp_path / "c")
    a, c = (open_prepared(str(tmp_path / name)) for name in "ac")
    assert a.tokens("eval") == c.tokens("eval") and a.digest != c.digest


def test_files_of_the_same_name_are_all_kept(tmp_path):
    for folder in ("a/src", "b/src"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "x.txt").write_text(folder)
    found = find_files([tmp_path / "a/src", tmp_path / "b/src"], [], [])
    assert [path.read_text() for _, path in found] == ["a/src", "b/src"]


def test_binary_files_are_left_out_and_odd_bytes_replaced(tmp_path):
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "a").write_bytes(b"fine")
    (folder / "b").write_bytes(b"\0\1")
    (folder / "c").write_bytes(b"odd \xff")
    summary = prepare(folder, tmp_path / "o", eval_fraction=0.0)
    assert (summary.binary_files, summary.replaced_files, summary.documents["train"]) == (1, 1, 2)


def test_unigram_is_the_entropy_of_the_text(tmp_path):
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "a").write_text("ab" * 50_000)
    prepare(folder, tmp_path / "o", eval_fraction=0.0)
    assert open_prepared(str(tmp_path / "o")).manifest["unigram_nats"]["train"] == pytest.approx(np.log(2), rel=0.02)


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(2, 300),
    rows=st.integers(1, 8),
    mask=st.booleans(),
)
def test_every_token_is_a_target_once(prepared, length, rows, mask):
    """Over all windows the real targets are the stream, and each input is the token before its target."""
    stream = open_prepared(str(prepared)).stream("eval")
    windows = Windows(stream, length, mask)
    seen = []
    for first in range(0, windows.all, rows):
        batch = windows.read(range(first, first + rows))
        real = batch["weights"] > 0
        seen.append(batch["targets"][real])
        assert (batch["tokens"][:, 1:] == batch["targets"][:, :-1]).all()
        assert (batch["positions"] >= 0).all() and (batch["positions"] < length).all()
        if mask:
            starts_document = np.isin(np.flatnonzero(real.ravel()) + first * length, stream.document_starts)
            assert (batch["positions"][real][starts_document] == 0).all()
            same = batch["segments"][:, 1:] == batch["segments"][:, :-1]
            assert ((np.diff(batch["positions"]) == 1) == same)[real[:, 1:]].all()
    everything = stream.rows([0], stream.tokens)[0]
    assert (np.concatenate(seen) == everything).all()


def take(data, rows, global_rows, start, count, seed=3):
    source = training_rows(
        data,
        seed=seed,
        rows=rows,
        global_rows=global_rows,
        length=16,
        document_mask=False,
        start_step=start,
        prefetch=2,
    )
    return [next(source)["tokens"] for _ in range(count)]


def test_batches_do_not_depend_on_hosts_or_start(prepared):
    data = open_prepared(str(prepared))
    whole = take(data, range(12), 12, 0, 6)
    for hosts in (2, 3, 4, 12):
        each = 12 // hosts
        parts = [take(data, range(h * each, (h + 1) * each), 12, 4, 2) for h in range(hosts)]
        for step in range(2):
            assert (np.concatenate([part[step] for part in parts]) == whole[4 + step]).all()
    assert not (take(data, range(12), 12, 0, 1, seed=4)[0] == whole[0]).all()


def test_an_epoch_holds_every_window_once_and_the_next_is_shuffled_anew(prepared):
    data = open_prepared(str(prepared))
    windows = Windows(data.stream("train"), 16, False)
    rows = [bytes(row) for batch in take(data, range(1), 1, 0, 2 * windows.whole) for row in batch]
    expected = sorted(bytes(row) for row in windows.read(range(windows.whole))["tokens"])
    first, second = rows[: windows.whole], rows[windows.whole :]
    assert sorted(first) == expected == sorted(second)
    assert first != second


def test_evaluation_fills_up_with_rows_without_targets(prepared):
    data = open_prepared(str(prepared))
    batches = list(evaluation_rows(data, rows=range(8), global_rows=8, length=100, document_mask=False, prefetch=2))
    assert sum(batch["weights"].sum() for batch in batches) == data.tokens("eval")
    assert {len(batch["tokens"]) for batch in batches} == {8}


@pytest.mark.parametrize("damage", ["manifest", "shard", "short"])
def test_damaged_data_is_refused(prepared, tmp_path, damage):
    copy = tmp_path / "copy"
    shutil.copytree(prepared, copy)
    if damage == "manifest":
        (copy / "manifest.json").unlink()
    elif damage == "shard":
        (copy / "train" / "tokens-00001.npy").unlink()
    else:
        np.save(copy / "train" / "tokens-00000.npy", np.zeros(3, np.uint16))
    with pytest.raises(ConfigError, match=r"data\.path"):
        open_prepared(str(copy)).stream("train")


def test_prepare_command(texts, tmp_path):
    out = tmp_path / "out"
    result = command("jaxmnt.prepare", "--input", str(texts), "--output", str(out), "--suffix", ".txt")
    assert result.returncode == 0, result.stderr
    assert json.loads((out / "manifest.json").read_text())["vocab_size"] == 257
    assert f"data.path={out}" in result.stdout
    again = command("jaxmnt.prepare", "--input", str(texts), "--output", str(out))
    assert again.returncode == 2 and "exists already" in again.stderr
    nothing = command("jaxmnt.prepare", "--input", str(texts), "--output", str(tmp_path / "o2"), "--suffix", ".md")
    assert nothing.returncode == 2 and "no file ending in .md" in nothing.stderr
    assert not list(tmp_path.glob(".*partial*"))
