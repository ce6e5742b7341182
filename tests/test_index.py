"""The index of data with many documents: written once, mapped by all, the same batches, and each damage a line."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import command
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmnt.config.load import parse_config
from jaxmnt.data import index, index_files
from jaxmnt.data.__main__ import main as data_command
from jaxmnt.data.batches import EvaluationData, TrainingData, index_keys
from jaxmnt.data.index import FOLDER, IndexKey
from jaxmnt.data.index_files import missing_indices, write_indices
from jaxmnt.data.manifest import content_digest, sealed_text, unsealed
from jaxmnt.data.packing import plan_rows
from jaxmnt.data.preparation.inputs import Selection, Settings
from jaxmnt.data.preparation.run import build
from jaxmnt.data.sources import open_sources, stage
from jaxmnt.data.store import PreparedData, open_prepared
from jaxmnt.errors import ConfigError, ExitCode, PreflightError
from jaxmnt.run import data_copies
from jaxmnt.run import input as run_input
from jaxmnt.train import train

LENGTH = 16


@pytest.fixture
def many(monkeypatch):
    """A handful of documents counts as many, of which windows hold seven."""
    monkeypatch.setattr(index, "MAX_DOCUMENTS_WITHOUT_INDEX", 0)
    monkeypatch.setattr(index_files, "WINDOW_DOCUMENTS", 7)


@pytest.fixture
def copy(prepared, tmp_path, many) -> PreparedData:
    shutil.copytree(prepared, tmp_path / "data")
    return open_prepared(tmp_path / "data")


def make_config(data: PreparedData, **settings):
    settings = {"path": str(data.path), "sequence_length": LENGTH, "global_batch_size": 4} | settings
    return parse_config({"data": settings})


def batches(data: PreparedData, **settings) -> list[bytes]:
    config = make_config(data, **settings)
    sources = open_sources(config.data)
    training, evaluation = TrainingData(config, sources), EvaluationData(config, sources.parts["data"])
    read = [training.batch(step, range(4)) for step in range(8)]
    read += evaluation.batches(range(4), 4, prefetch=1, threads=0)
    return [field.tobytes() for batch in read for field in batch.values()]


def write_for(data: PreparedData, **settings) -> list[Path]:
    config = make_config(data, **settings)
    ((part, keys),) = index_keys(config, open_sources(config.data))
    return write_indices(part, keys)


@pytest.mark.parametrize(
    "settings",
    [{"rows": "packed"}, {"rows": "packed", "long_documents": "skip", "sequence_length": 800}, {"document_mask": True}],
    ids=str,
)
def test_a_mapped_index_gives_the_same_batches(copy, monkeypatch, settings):
    """As without an index, if the windows are as small there."""
    monkeypatch.setattr("jaxmnt.data.packing.plan_rows.__defaults__", (7,))
    before = batches(copy, **settings)
    assert write_for(copy, **settings) and write_for(copy, **settings) == []
    assert batches(copy, **settings) == before
    config = make_config(copy, **settings)
    assert TrainingData(config, open_sources(config.data)).index_bytes == 0, "mapped"


@settings(max_examples=40)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(2, 40), st.integers(1, 9), st.booleans())
def test_windows_make_the_plan_of_the_whole(sizes, row_length, window, skip_long):
    starts = np.cumsum([0, *sizes])[:-1]
    plan = plan_rows(starts, sum(sizes), row_length, window, skip_long=skip_long)
    kept = [size for size in sizes if size <= row_length or not skip_long]
    assert plan.tokens == plan.length.sum() == sum(kept)
    assert plan.long_documents == sum(size > row_length for size in sizes)
    rows = [plan.length[first:stop].sum() for first, stop in zip(plan.first_piece, plan.first_piece[1:], strict=False)]
    assert all(0 < row <= row_length for row in rows) and plan.rows == len(rows)


def test_prepare_writes_the_index_and_lists_it(prepared, tmp_path, many):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(30):
        (text / f"{number:02}.txt").write_text(f"document {number} " * (number % 9 + 1))
    outputs = [tmp_path / "one", tmp_path / "two"]
    for output, workers in zip(outputs, (1, 2), strict=True):
        build(Selection([text]), output, Settings(packed_lengths=(64,), workers=workers), lambda *progress: None)
    listed = json.loads((outputs[0] / "manifest.json").read_text())["index"]
    assert (
        sorted(listed)
        == [f"{split}-{what}.json" for split in ("eval", "train") for what in ("documents", "packed-64-cut")][
            (0 if open_prepared(outputs[0]).documents("eval") else 2) :
        ]
    )
    names = sorted(path.name for path in (outputs[0] / FOLDER).iterdir() if path.name != "lock")
    assert names == sorted(path.name for path in (outputs[1] / FOLDER).iterdir() if path.name != "lock")
    assert all((outputs[0] / FOLDER / name).read_bytes() == (outputs[1] / FOLDER / name).read_bytes() for name in names)
    for output in outputs:
        open_prepared(output).verify()
    # The digest of the contents is that of data without an index.
    manifest = open_prepared(outputs[0]).manifest
    assert content_digest(manifest) == content_digest({name: manifest[name] for name in manifest if name != "index"})
    copied = stage(open_prepared(outputs[0]), tmp_path / "local")
    assert sorted(path.name for path in (copied / FOLDER).iterdir()) == names


def change_description(path: Path, **changes) -> None:
    description = unsealed(json.loads(path.read_text()))
    path.write_text(sealed_text(description | changes))


def cut_short(folder: Path) -> None:
    array = folder / f"train-packed-{LENGTH}-cut-start.npy"
    array.write_bytes(array.read_bytes()[:-8])


def without_array(folder: Path) -> None:
    (folder / f"train-packed-{LENGTH}-cut-opens.npy").unlink()


def of_other_data(folder: Path) -> None:
    change_description(folder / f"train-packed-{LENGTH}-cut.json", data="0" * 64)


def of_a_newer_version(folder: Path) -> None:
    change_description(folder / f"train-packed-{LENGTH}-cut.json", version=2)


def edited(folder: Path) -> None:
    path = folder / f"train-packed-{LENGTH}-cut.json"
    path.write_text(path.read_text().replace('"tokens"', '"tokens "'))


def no_json(folder: Path) -> None:
    (folder / f"train-packed-{LENGTH}-cut.json").write_text("[" * 100_000)


def rows_beyond_the_data(folder: Path) -> None:
    path = folder / f"train-packed-{LENGTH}-cut-start.npy"
    starts = np.load(path)
    np.save(path, starts + 10**9)


def pieces_out_of_order(folder: Path) -> None:
    path = folder / f"train-packed-{LENGTH}-cut-first_piece.npy"
    np.save(path, np.load(path)[::-1].copy())


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (cut_short, "start.npy has .* bytes, but its header says|cannot be read"),
        (without_array, "opens.npy cannot be read"),
        (of_other_data, "is the index of other data"),
        (of_a_newer_version, "has version 2, but this jaxmnt reads 1"),
        (edited, "is not intact .its seal does not match"),
        (no_json, "is not intact"),
        (rows_beyond_the_data, "a row holds tokens that are not in the data"),
        (pieces_out_of_order, "the pieces of its rows do not follow one another"),
    ],
)
def test_a_damaged_index_is_one_line_and_can_be_removed(copy, damage, problem):
    write_for(copy, rows="packed")
    before = batches(copy, rows="packed")
    damage(copy.path / FOLDER)
    with pytest.raises(ConfigError, match=f"data.path: .*{FOLDER} cannot be used: .*({problem}).*; remove that folder"):
        batches(copy, rows="packed")
    shutil.rmtree(copy.path / FOLDER)
    write_for(copy, rows="packed")
    assert batches(copy, rows="packed") == before


def test_an_index_that_this_user_may_not_read_is_as_none(copy, monkeypatch, capsys):
    monkeypatch.setattr("jaxmnt.data.packing.plan_rows.__defaults__", (7,))
    before = batches(copy, rows="packed")
    write_for(copy, rows="packed")

    def refuse(path, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(index, "map_array", refuse)
    assert batches(copy, rows="packed") == before
    assert "may not be read by this user, so its contents are computed in memory" in capsys.readouterr().err


def test_verify_compares_the_index(copy, capsys):
    write_for(copy, rows="packed")
    copy.verify()
    path = copy.path / FOLDER / f"train-packed-{LENGTH}-cut-opens.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"the SHA-256 of index/train-packed-16-cut-opens\.npy differs"):
        copy.verify()


def test_two_writers_write_once(copy):
    """The second waits for the first by name, then uses what it wrote. What a killed one left is written again."""
    folder = copy.path / FOLDER
    folder.mkdir()
    (folder / f"train-packed-{LENGTH}-cut-start.npy").write_bytes(b"half")
    keys = [IndexKey("train", LENGTH)]
    shown: list[str] = []
    with (folder / "lock").open("w") as first:
        first.write("process 7 on elsewhere")
        first.flush()
        fcntl.flock(first, fcntl.LOCK_EX)
        written: list[list[Path]] = []
        second = threading.Thread(target=lambda: written.append(write_indices(copy, keys, shown.append)))
        second.start()
        while not shown:
            assert second.is_alive()
        assert "which process 7 on elsewhere writes" in shown[0] and missing_indices(copy, keys)
    second.join()
    assert [path.name for path in written[0]] == ["train-documents.json", f"train-packed-{LENGTH}-cut.json"]
    assert write_indices(copy, keys) == [] and not list(folder.glob("*.tmp"))


def test_a_writer_that_is_killed_leaves_nothing_that_counts(prepared, tmp_path, many):
    """Killed after the document starts and half a plan; the next writer removes what it left."""
    shutil.copytree(prepared, tmp_path / "data")
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from jaxmnt.data import index, index_files\n"
        "from jaxmnt.data.store import open_prepared\n"
        "index.MAX_DOCUMENTS_WITHOUT_INDEX, index_files.WINDOW_DOCUMENTS = 0, 7\n"
        "plan = index_files.plan_window\n"
        "def plan_or_die(*arguments, **options):\n"
        "    if arguments[3] > 7: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return plan(*arguments, **options)\n"
        "index_files.plan_window = plan_or_die\n"
        f"index_files.write_indices(open_prepared(sys.argv[1]), [index.IndexKey('train', {LENGTH})])\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path / "data")], check=False)
    assert killed.returncode == -9
    data, folder = open_prepared(tmp_path / "data"), tmp_path / "data" / FOLDER
    assert [key.name for key in missing_indices(data, [IndexKey("train", LENGTH)])] == [f"train-packed-{LENGTH}-cut"]
    assert list(folder.glob("*.tmp"))
    write_indices(data, [IndexKey("train", LENGTH)])
    assert not list(folder.glob("*.tmp"))
    data.verify()


@pytest.mark.slow
def test_data_that_must_not_be_written_is_trained_on_without_an_index(tiny, copy, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    config = tiny(f"data.path={copy.path}", "data.rows=packed", "train.steps=6")
    monkeypatch.setattr(run_input, "write_indices", refuse)
    assert train(config) == ExitCode.FINISHED
    err = capsys.readouterr().err
    assert f"the index in {copy.path} cannot be written (Read-only file system), so every process computes it" in err
    assert f"write it with: python -m jaxmnt.data index --path {copy.path} --lengths 32" in err
    assert not (copy.path / FOLDER).exists()


@pytest.mark.slow
def test_a_run_writes_the_index_once(tiny, copy, capsys):
    config = tiny(f"data.path={copy.path}", "data.rows=packed", "train.steps=6")
    assert train(config) == ExitCode.FINISHED
    out = capsys.readouterr().out
    assert out.count("wrote the index") == 4 and "input takes 0 bytes of indices" in out
    assert train(config, fresh=True) == ExitCode.FINISHED
    assert "wrote the index" not in capsys.readouterr().out


def test_the_command_writes_other_lengths(copy, capsys):
    assert data_command(["index", "--path", str(copy.path), "--lengths", "16", "24", "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("wrote ") == 6 and "train-packed-24-cut.json" in out
    assert data_command(["index", "--path", str(copy.path), "--lengths", "24"]) == 0
    assert "nothing to write: the data has these indices" in capsys.readouterr().out


def test_the_command_says_what_is_wrong(prepared, tmp_path):
    few = command("jaxmnt.data", "index", "--path", str(prepared), "--lengths", "64")
    assert few.returncode == 0 and "documents need no index" in few.stdout and not (prepared / FOLDER).exists()
    odd = command("jaxmnt.data", "index", "--path", str(prepared), "--lengths", "1")
    assert odd.returncode == 2 and "--lengths: 1 is out of range; give 2 or more" in odd.stderr
    none = command("jaxmnt.data", "index", "--path", str(tmp_path))
    assert none.returncode == 2 and "has no manifest.json" in none.stderr


def test_only_a_host_with_files_of_its_own_checks_them(prepared, tmp_path, monkeypatch):
    shutil.copytree(prepared, tmp_path / "copy")
    said: list[str] = []

    def compare(path: Path) -> bool:
        data = open_sources(parse_config({"data": {"path": str(path)}}).data, check_files=False)
        monkeypatch.setattr(data_copies, "broadcast", lambda name, message, identity: said.append(message) or said[0])
        return data_copies.compare_copies(data, True, FIRST).is_own

    class FIRST:
        process_id = 0

    assert compare(prepared) and compare(prepared) and not compare(tmp_path / "copy")
    shard = sorted((tmp_path / "copy" / "train").glob("tokens-*"))[1]
    shard.unlink()
    data = open_sources(parse_config({"data": {"path": str(tmp_path / "copy")}}).data, check_files=False)
    with pytest.raises(PreflightError, match=f"{shard.name} cannot be read .No such file"):
        data_copies.check_own_copy(data, FIRST)
