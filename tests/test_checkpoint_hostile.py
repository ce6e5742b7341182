"""Checkpoints that somebody has moved, linked, renamed or forged, and locks and ids that were damaged."""

import errno
import fcntl
import json
import math
import os
import shutil
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import events, losses

from jaxmnt import storage
from jaxmnt.checkpoint import arrays, commit, manifest, retention
from jaxmnt.checkpoint import export as exporting
from jaxmnt.checkpoint.__main__ import main as checkpoint_command
from jaxmnt.checkpoint.commit import open_checkpoint
from jaxmnt.checkpoint.manifest import Array, DamagedError, Manifest, OtherFormatError
from jaxmnt.checkpoint.refs import locate
from jaxmnt.data.sources import fit_to_data, open_sources
from jaxmnt.distributed.identity import Identity
from jaxmnt.drill import inject
from jaxmnt.errors import ConfigError, ExitCode, UserError, report
from jaxmnt.run import lock
from jaxmnt.run.resume import ResumeFlags, ResumePoint, resume_point
from jaxmnt.run.rundir import run_directories, write_config
from jaxmnt.storage import json_digest
from jaxmnt.train import main as train_command
from jaxmnt.train import train


def one_device():
    return jax.devices()[:1]


def snapshot(folder: Path) -> dict[str, str]:
    """Everything below a folder: what each file holds, where each link leads."""
    found = {}
    for parent, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(parent, name)
            inside = "folder" if path.is_dir() else repr(path.read_bytes()) if path.is_file() else "away"
            found[str(path.relative_to(folder))] = f"→ {path.readlink()}" if path.is_symlink() else inside
    return found


def committed(path: Path, run: str = "run", **fields) -> Path:
    """A whole checkpoint of one array, made by hand; no arrays are in it."""
    (path / "params").mkdir(parents=True)
    (path / commit.ORBAX_MARKER).write_text("1")
    (path / "params" / "data").write_text(f"of {path.name}")
    arrays = {"params/w": Array((2, 3), "float32", "0" * 16)}
    commit.commit(path, Manifest(run, int(path.name), arrays, {}, 7, {"data": "x"}, None, [], **fields))
    return path


@pytest.fixture
def root(tmp_path) -> Path:
    """The checkpoints 5, 10 and 15 of a run."""
    for step in (5, 10, 15):
        committed(tmp_path / "run" / "checkpoints" / str(step))
    return tmp_path / "run" / "checkpoints"


def on_scratch(root: Path) -> Path:
    """Moves the folder of checkpoints to another disk, and links it back."""
    scratch = root.parents[1] / "scratch"
    root.rename(scratch)
    root.symlink_to(scratch)
    return root


def archived(root: Path, step: int) -> Path:
    """Moves a checkpoint to an archive, and links it back."""
    there = root.parents[1] / "archive" / str(step)
    there.parent.mkdir(exist_ok=True)
    (root / str(step)).rename(there)
    (root / str(step)).symlink_to(there)
    return there


# -- links


def test_an_archived_checkpoint_is_read_and_never_removed(tiny, whole_run, capsys):
    """Each save that follows would prune it, were it the run's own. The folder of checkpoints is a link as well."""
    config = tiny("train.steps=24", "checkpoint.every_steps=1", "checkpoint.keep=2")
    shutil.copytree(whole_run.run.dir, config.run.dir)
    root = on_scratch(Path(config.run.dir) / "checkpoints")
    (root / "17").mkdir()
    (root / "17.unfinished").write_text("being written\n")
    there = [archived(root, step) for step in (10, 15)]
    before = [snapshot(folder) for folder in there]
    assert train(config, devices=one_device(), accept_changes=True) == ExitCode.FINISHED
    assert [snapshot(folder) for folder in there] == before
    assert [found.step for found in commit.valid_checkpoints(root)] == [10, 15, 23, 24], "two of its own, and the links"
    assert not events(config.run.dir, "checkpoint_failed")
    shown = capsys.readouterr().out
    assert shown.count("note    checkpoint 10 is a link: it is read and never removed") == 1
    for step in (23, 24):
        shutil.rmtree(root / str(step))
    assert opened(config).step == 15, "a link counts for reading"
    assert root.is_symlink() and sorted(path.name for path in root.iterdir()) == ["10", "15"]


def test_pruning_leaves_links_alone(root):
    there = archived(root, 5)
    before = snapshot(there)
    commit.prune(commit.valid_checkpoints(root), {15})
    assert snapshot(there) == before and (root / "5").is_symlink()
    assert [step for step, _ in commit.step_directories(root)] == [5, 15]
    assert not list(root.glob("*.unfinished"))


def test_what_cannot_be_removed_neither_stops_a_save_nor_a_start(root, monkeypatch):
    """Said, and tried again; what else there is to prune is pruned."""
    remove = storage.remove

    def refuse(path):
        if path.name == "5":
            raise OSError(16, "Device or resource busy", str(path))
        remove(path)

    monkeypatch.setattr(storage, "remove", refuse)
    with pytest.raises(OSError, match="busy"):
        commit.prune(commit.valid_checkpoints(root), {15})
    assert [step for step, _ in commit.step_directories(root)] == [5, 15]
    removed, left = commit.remove_unfinished(root, keep_notes=True)
    assert not removed and "busy" in left[0]
    told, damaged = commit.clean_up(root, "run")
    assert not damaged and told[0].startswith("cannot remove ")
    assert "interrupted save or removal: Device or resource busy" in told[0]
    monkeypatch.undo()
    assert "removed" in commit.clean_up(root, "run")[0][0] and not (root / "5").exists()


def test_a_damaged_link_is_renamed_itself(root):
    there = archived(root, 10)
    (there / "params" / "data").unlink()
    (root / "10.damaged").symlink_to("nowhere")
    (root / "5.unfinished").write_text("being removed\n")
    (archived(root, 5) / manifest.MANIFEST_FILE).unlink()
    before = snapshot(root.parents[1] / "archive")
    _, damaged = commit.clean_up(root, "run")
    assert snapshot(root.parents[1] / "archive") == before
    assert len(damaged) == 2 and {path.name: str(path.readlink()) for path in root.iterdir() if path.is_symlink()} == {
        "5.damaged": str(there.with_name("5")), "10.damaged": "nowhere", "10.damaged.2": str(there)
    }  # fmt: skip
    assert not list(root.glob("*.unfinished"))


def test_a_save_does_not_commit_through_a_link_that_took_its_place(root):
    """Somebody moves a step to an archive and links it back while its save is under way."""
    saved = commit.open_checkpoint(root / "5").manifest
    there = archived(root, 5)
    (there / manifest.MANIFEST_FILE).unlink()
    before = snapshot(there)
    with pytest.raises(UserError, match=r"5 was replaced by a link while it was being saved"):
        commit.commit(root / "5", saved)
    assert snapshot(there) == before and (root / "5").is_symlink()


def test_a_link_that_leads_nowhere_makes_room(root):
    (root / "20").symlink_to("nowhere")
    commit.begin_step(root / "20")
    assert (root / "20.damaged").is_symlink() and (root / "20.unfinished").exists()


def test_a_scratch_disk_that_is_away_does_not_send_the_run_back(tiny, whole_run, tmp_path):
    config = tiny("train.steps=22")
    shutil.copytree(whole_run.run.dir, config.run.dir)
    scratch = on_scratch(Path(config.run.dir) / "checkpoints").resolve()
    scratch.rename(tmp_path / "away")
    with pytest.raises(UserError, match=r"checkpoints is a link to a folder that does not exist") as caught:
        opened(config)
    assert caught.value.exit_code == ExitCode.FAILURE and not scratch.exists()


def test_a_server_of_files_that_fails_is_no_damage(whole_run, tmp_path):
    """Only what the system says of the file itself counts as damage; what a server says, once it is there again, may
    be otherwise."""
    for code, kind in ((errno.ESTALE, UserError), (errno.EIO, UserError), (errno.ENOTCONN, UserError),
                       (errno.ELOOP, DamagedError)):  # fmt: skip
        told = ValueError(f"UNKNOWN: Error reading: {os.strerror(code)} [spec='{{}}'] [os_error_code='{code}']")
        assert type(arrays._explain_error("params/w", told)) is kind
    run = tmp_path / "run"
    shutil.copytree(whole_run.run.dir, run)
    checkpoint = open_checkpoint(run / "checkpoints" / "20")
    for path in (run / "checkpoints" / "20" / "params").rglob("d/*"):
        path.unlink()
        path.symlink_to(path.name)
    with pytest.raises(DamagedError) as caught:
        arrays.Reader(checkpoint).open_all()
    assert f"[os_error_code='{errno.ELOOP}']" in str(caught.value.__cause__), "as TensorStore writes it"


def test_nothing_is_written_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("mine")
    for name in (".run.json.tmp", "run.json"):
        (tmp_path / name).symlink_to("mine")
    storage.publish(tmp_path / "run.json", "{}")
    assert (tmp_path / "mine").read_text() == "mine" and (tmp_path / "run.json").read_text() == "{}"


@pytest.mark.parametrize("loop", ["file", "folder", "two folders", "marker", "manifest"])
def test_loops_of_links_inside_a_checkpoint(root, loop, capsys):
    """A thousand ways around are not walked; what is wanted of it is there, or is not."""
    step = root / "15"
    if loop == "file":
        (step / "params" / "data").unlink()
        (step / "params" / "data").symlink_to("data")
    elif loop == "folder":
        (step / "params" / "round").symlink_to(".")
    elif loop == "two folders":
        for name in ("a", "b"):
            (step / "params" / name).symlink_to("..")
    else:
        name = commit.ORBAX_MARKER if loop == "marker" else manifest.MANIFEST_FILE
        (step / name).unlink()
        (step / name).symlink_to(name)
    harmless, started = "folder" in loop, time.monotonic()
    assert [found.step for found in commit.valid_checkpoints(root)] == ([5, 10, 15] if harmless else [5, 10])
    for arguments in (["list", str(root.parent)], ["show", f"{root.parent}@15"], ["verify", f"{root.parent}@15"]):
        code, said = ran(capsys, *arguments)
        assert code in (0, 1, 2) and "Traceback" not in said and len(said.splitlines()) < 9
    (step / "15.unfinished").write_text("")
    _, damaged = commit.clean_up(root, "run")
    assert len(damaged) == (0 if harmless else 1)
    commit.prune(commit.valid_checkpoints(root), {10})
    assert [path.name for path in sorted(root.iterdir())] == (["10"] if harmless else ["10", "15.damaged"])
    assert time.monotonic() - started < 20


# -- names


def test_only_ascii_digits_are_steps(root, tiny, capsys):
    for name in ("²", "٣", "007", "1" * 30, "5.old", "mine", "+5", "1_0"):
        committed_like(root / name)
    (root / "20").write_text("a file")
    before = snapshot(root)
    assert [step for step, _ in commit.step_directories(root)] == [5, 10, 15]
    assert commit.clean_up(root, "run") == ([], []) and snapshot(root) == before
    inject.damage_newest(root.parent)
    changed = {name for name, held in snapshot(root).items() if before[name] != held}
    assert changed == {f"15/{manifest.MANIFEST_FILE}"}, "its largest file"
    for step in ("²", "٣", "007"):
        with pytest.raises(ConfigError, match=r"run: .* neither a run directory nor a checkpoint"):
            locate(f"{root.parent}@{step}", "run")
    code = report(lambda: train_command(["--config", "x.yaml", "--replay", "²:٣"]))
    assert code == ExitCode.CONFIG and "is not FROM:TO" in capsys.readouterr().err


def test_the_drill_damages_a_checkpoint_that_counts(root):
    """The newest directory may be one that was cut off while it was written."""
    (root / "20").mkdir()
    (root / "20" / "data").write_bytes(bytes(99_999))
    before = snapshot(root)
    inject.damage_newest(root.parent)
    changed = {name for name, held in snapshot(root).items() if before[name] != held}
    assert changed == {f"15/{manifest.MANIFEST_FILE}"}


def committed_like(path: Path) -> None:
    path.mkdir()
    (path / "note.txt").write_text("a person's")


MARKS = ("...unfinished", "..unfinished", ".unfinished", "mine.unfinished", "٣.unfinished", "5.x.unfinished")


@pytest.mark.parametrize("mark", MARKS)
def test_marks_that_name_no_step_remove_nothing(root, mark):
    """`...unfinished` names the folder above, `mine.unfinished` a person's."""
    for name in ("mine", "٣", "20.unfinished"):
        committed_like(root / name)
    (root / mark).write_text("being removed\n")
    before = snapshot(root.parent)
    for keep_notes in (True, False):
        commit.remove_unfinished(root, keep_notes=keep_notes)
        assert snapshot(root.parent) == before


def test_what_orbax_has_left_is_a_folder_named_by_a_step(root):
    for name in ("mine.orbax-checkpoint-tmp", "archive"):
        committed_like(root / name)
    (root / "6.orbax-checkpoint-tmp-1").symlink_to("archive")
    before = snapshot(root.parent)
    (root / "7.orbax-checkpoint-tmp-1").mkdir()
    assert len(commit.remove_unfinished(root)[0]) == 1 and snapshot(root.parent) == before


# -- forged manifests


def _set(*keys, value):
    def change(record):
        for key in keys[:-1]:
            record = record[key]
        record[keys[-1]] = value

    return change


FORGERIES = {
    "no manifest": lambda record: record.pop("manifest"),
    "no files": lambda record: record.pop("files"),
    "a list": _set("manifest", value=[]),
    "a foreign key": _set("manifest", "colour", value="\x1b[31mred"),
    "another foreign key": _set("colour", value=1),
    "no lineage": lambda record: record["manifest"].pop("lineage"),
    "a nested lineage": _set("manifest", "lineage", value=[[[[]]]]),
    "parents without keys": _set("manifest", "lineage", value=[{}]),
    "a text for a number": _set("manifest", "tokens", value="7"),
    "true for a number": _set("manifest", "step", value=True),
    "a huge number": _set("manifest", "tokens", value=10**400),
    "a time that is none": _set("manifest", "time", value=math.inf),
    "a run without a name": _set("manifest", "run", value=""),
    "a shape of halves": _set("manifest", "arrays", "params/w", "shape", value=[1.5]),
    "a shape below zero": _set("manifest", "arrays", "params/w", "shape", value=[-1]),
    "another dtype": _set("manifest", "arrays", "params/w", "dtype", value="complex7"),
    "an array without a digest": lambda record: record["manifest"]["arrays"]["params/w"].pop("digest"),
    "an array elsewhere": _set("manifest", "arrays", "../../x", value={}),
    "a file elsewhere": _set("files", "../x", value=[1, None]),
    "an absolute file": _set("files", "/etc/passwd", value=[1, None]),
    "a file of no bytes": _set("files", "x", value=["1", None]),
    "a file of no kind": _set("files", "x", value={}),
    "a name that is no text": _set("files", "\ud800", value=[1, None]),
    "a format of true": _set("format", value=True),
    "a nested format": _set("format", value=[[2]]),
}


def forge(path: Path, change) -> None:
    """Changes what a manifest says, and seals it again."""
    record = json.loads((path / manifest.MANIFEST_FILE).read_text())
    record.pop("seal")
    change(record)
    (path / manifest.MANIFEST_FILE).write_text(json.dumps(record | {"seal": json_digest(record)}))


def ran(capsys, *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    code = report(lambda: checkpoint_command(list(arguments)))
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_manifests_are_told_in_a_line(root, forgery, capsys, tmp_path):
    forge(root / "15", FORGERIES[forgery])
    with pytest.raises(DamagedError) as caught:
        commit.open_checkpoint(root / "15", "run")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600
    run = str(root.parent)
    for arguments in (["list", run], ["verify", run], ["show", f"{run}@15"], ["diff", f"{run}@15", f"{run}@10"],
                      ["export", f"{run}@15", str(tmp_path / "out")]):  # fmt: skip
        code, said = ran(capsys, *arguments)
        assert "Traceback" not in said and "its jaxmnt.json is damaged" in said, said
        assert all(line.isprintable() for line in said.splitlines()) and len(said.splitlines()) < 9
        assert code == {"list": 0, "verify": 1}.get(arguments[0], 2)
    assert [path.name for path in commit.clean_up(root, "run") and sorted(root.iterdir())] == ["10", "15.damaged", "5"]


@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"", b"3", b"null", b"\0" * 4096])
def test_what_is_no_manifest_at_all(root, raw):
    (root / "15" / manifest.MANIFEST_FILE).write_bytes(raw)
    assert commit.why_not_valid(root / "15") == "its jaxmnt.json is damaged"
    (root / "15" / manifest.MANIFEST_FILE).unlink()
    (root / "15" / manifest.MANIFEST_FILE).mkdir()
    assert "its file" in (commit.why_not_valid(root / "15") or "")


@pytest.mark.parametrize(
    "name", [manifest.MANIFEST_FILE, "../../run.json", "../../config.yaml", "../15.unfinished", "params/data"]
)
def test_a_pipe_is_no_file(root, name, capsys):
    """Reading one would never end."""
    path = root / "15" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    for command in (["list", str(root.parent)], ["verify", f"{root.parent}@15"]):
        code, said = ran(capsys, *command)
        assert code in (0, 1, 2) and "Traceback" not in said
    with pytest.raises(OSError, match=f"it is not a file: '{path}'"):
        storage.read(path)


def test_a_forged_shape_is_no_work(root, capsys):
    """Of an array that the files do not hold: found before it is cut into pieces."""

    def enlarge(record):
        array = Array((10**18, 3), "float32", "0" * 16)
        changed = Manifest(**{**record["manifest"], "arrays": {"params/w": array}})
        record["manifest"] = manifest.to_plain(changed)

    forge(root / "15", enlarge)
    code, said = ran(capsys, "verify", f"{root.parent}@15")
    assert code == 1 and "array params/w cannot be read" in said and "Traceback" not in said


def test_a_format_of_the_future_is_still_left_alone(root):
    forge(root / "15", _set("format", value=5))
    before = snapshot(root)
    with pytest.raises(OtherFormatError):
        commit.clean_up(root, "run")
    assert snapshot(root) == before


RUN_FILES = [
    "[]", "{}", "[" * 9999, '{"run": 5, "lineage": []}', '{"run": "a", "lineage": [1]}', '{"run": "a", "lineage": {}}',
    '{"run": "a", "lineage": [], "begun_by": 3}',
]  # fmt: skip


@pytest.mark.parametrize("text", RUN_FILES)
def test_a_run_file_of_another_shape(root, text, capsys):
    (root.parent / "run.json").write_text(text)
    for command in ("list", "verify"):
        code, said = ran(capsys, command, str(root.parent))
        assert code == ExitCode.CONFIG and "run.json is damaged" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("text", ["[" * 2000, "checkpoint: {dir: [1]}", "checkpoint: {dir: 5}", "\0", "checkpoint: []"])
def test_a_config_file_of_another_shape(root, text, capsys):
    (root.parent / "config.yaml").write_text(text)
    assert ran(capsys, "list", str(root.parent))[0] == ExitCode.FINISHED


# -- a run as its start finds it


def opened(config, **flags) -> ResumePoint:
    """Where a run stands, as its start finds it."""
    data = open_sources(config.data)
    with ExitStack() as held:
        locks = [held.enter_context(lock.RunLock(where)) for where in run_directories(config)]
        return resume_point(fit_to_data(config, data), data, Identity(), locks, flags=ResumeFlags(**flags))


# -- locks


@pytest.fixture
def quick_lock(monkeypatch):
    for name, value in {"_BEAT": 0.02, "_SILENCE_TIMEOUT": 0.06, "_EXIT_TIMEOUT": 0.06, "_POLL": 0.02}.items():
        monkeypatch.setattr(lock, f"{name}_SECONDS", value)


DEAD = {"job": "a" * 16, "host": "n1", "process": 2**22 + 1, "started": "77", "machine": "x y", "since": "2001-01-01"}

HERE = DEAD | {"machine": lock._machine_id()}
UNREADABLE = {
    "cut off": b'{"job": "12',
    "no text": b"\xff\xfe\x80",
    "a block of zeros": b"\0" * 512,
    "empty": b"",
    "nested": b"[" * 99999,
    "a list": b"[1]",
    "lacks a key": json.dumps(HERE).replace("process", "procexs").encode(),
    "another type": json.dumps(HERE | {"process": "77x"}).encode(),
    "never started": json.dumps(HERE | {"started": None}).encode(),
}


@pytest.mark.parametrize("how", UNREADABLE)
def test_a_lock_that_cannot_be_read_is_judged_by_its_signs(tmp_path, quick_lock, how):
    path = tmp_path / "lock.json"
    path.write_bytes(UNREADABLE[how])
    (tmp_path / "lock.beat").write_bytes(b"\xff 1")
    told: list[str] = []
    with lock.RunLock(tmp_path) as ours:
        remark = ours.acquire(told.append) or ""
        assert "the lock of a dead job was taken over" in remark and "waiting to see" in told[0]
        if how != "never started":
            assert "whose lock.json cannot be read, written 20" in remark and " by " in remark
        ours.confirm()
    path.write_bytes(UNREADABLE[how])
    ended = threading.Event()

    def beat():
        for number in range(10_000):
            if ended.wait(0.01):
                return
            (tmp_path / "lock.beat").write_text(str(number))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with lock.RunLock(tmp_path) as ours, pytest.raises(ConfigError, match="in use by another job"):
            ours.acquire()
    finally:
        ended.set()
        thread.join()
    assert path.read_bytes() == UNREADABLE[how], "it gives signs of life"


def test_every_flip_in_a_dead_jobs_lock(tmp_path, quick_lock, monkeypatch):
    monkeypatch.setattr(lock.RunLock, "_watch", lambda *_: None)  # nobody gives signs
    raw = json.dumps(HERE).encode()
    for position in range(len(raw)):
        flipped = bytearray(raw)
        flipped[position] ^= 1 << position % 8
        (tmp_path / "lock.json").write_bytes(flipped)
        assert lock._is_alive_here(flipped.decode(errors="surrogateescape")) is not True
        with lock.RunLock(tmp_path) as ours:
            assert (ours.acquire() or "").isprintable()


# -- room


def test_what_could_be_removed_is_named(root, monkeypatch):
    (root / "5").rename(root / "5.damaged")
    (root / "20").mkdir()  # not whole: the newest that is must not be named
    archived(root, 10)
    committed(root / "12")
    real = os.statvfs(root)

    class Full:
        f_bavail, f_frsize, f_files, f_favail = 3, 1024, real.f_files, real.f_favail

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    told = retention.shortage(root, retention.SpaceNeeded(5000, 3)) or ""
    short, _, removable = told.partition("; these could be removed: ")
    assert short == f"3 KiB is free in {root}, but 4.88 KiB is needed (1.88 KiB short)"
    assert [name.partition(" ")[0] for name in removable.split(", ")] == ["5.damaged", "12"]


# -- a run that has trained, and what is away for a moment


@pytest.fixture
def own_data(tiny, whole_run, prepared, tmp_path):
    """The config of a run of 20 steps, to go on to 22, whose data lies in a folder of its own; and that folder."""
    shutil.copytree(prepared, tmp_path / "data")
    config = tiny("train.steps=22", f"data.path={tmp_path / 'data'}")
    shutil.copytree(whole_run.run.dir, config.run.dir)
    write_config(Path(config.run.dir), config)  # the start before has read that folder
    return config, tmp_path / "data"


@pytest.mark.parametrize("away", ["gone", "empty", "a shard", "cut short", "not connected"])
def test_data_that_is_away_for_a_moment_is_no_wrong_config(own_data, tiny, away, monkeypatch):
    config, data = own_data
    shard = sorted((data / "train").glob("tokens-*"))[1]
    if away == "gone":
        data.rename(data.with_name("elsewhere"))
    elif away == "empty":  # a mount point without its mount
        data.rename(data.with_name("elsewhere"))
        data.mkdir()
    elif away == "a shard":
        shard.unlink()
    elif away == "cut short":
        os.truncate(shard, 1000)
    else:
        is_dir = Path.is_dir
        lost = OSError(107, "Transport endpoint is not connected", str(data))
        monkeypatch.setattr(Path, "is_dir", lambda path: throw(lost) if path == data else is_dir(path))
    before = snapshot(Path(config.run.dir))
    with pytest.raises(UserError, match="this run has read it before") as caught:
        train(config, devices=one_device())
    assert caught.value.exit_code == ExitCode.FAILURE and snapshot(Path(config.run.dir)) == before
    new = tiny(f"run.dir={config.run.dir}-new", f"data.path={data}")
    with pytest.raises(ConfigError) as caught:
        train(new, devices=one_device())
    assert caught.value.exit_code == ExitCode.CONFIG, "nobody has trained there"
    with pytest.raises(ConfigError, match="is not a directory") as caught:
        train(tiny("train.steps=22", "data.path=data/typo"), devices=one_device())
    assert caught.value.exit_code == ExitCode.CONFIG, "the run has never read this path"


def throw(error: Exception):
    raise error


@pytest.mark.parametrize(
    "override", ["data.path=null", "model.vocab_size=200", "seed=1", "mesh.data=3", "train.steps=12"]
)
def test_a_wrong_config_stays_wrong(own_data, tiny, override):
    _, data = own_data
    with pytest.raises(ConfigError) as caught:
        train(tiny("train.steps=22", f"data.path={data}", override), devices=one_device())
    assert caught.value.exit_code == ExitCode.CONFIG


def test_a_folder_of_checkpoints_that_is_away_is_not_begun_anew(tiny, tmp_path):
    config = tiny(f"checkpoint.dir={tmp_path / 'mount' / 'a'}", "train.stop_after=5")
    assert train(config, devices=one_device()) == ExitCode.STOPPED
    shutil.move(tmp_path / "mount", tmp_path / "away")
    later = tiny(f"checkpoint.dir={tmp_path / 'mount' / 'a'}")
    with pytest.raises(UserError, match=r"checkpoint\.dir: .*mount/a has no files of run .* pass --fresh") as caught:
        opened(later)
    assert caught.value.exit_code == ExitCode.FAILURE and not (tmp_path / "mount").exists()
    shutil.move(tmp_path / "away", tmp_path / "mount")
    assert len(losses(config.run.dir)) == 5 and opened(later).step == 5


def test_a_directory_that_refuses_for_a_moment(own_data, monkeypatch):
    config, _ = own_data
    monkeypatch.setattr(lock, "create", lambda path, text: throw(OSError(13, "Permission denied", str(path))))
    with pytest.raises(UserError, match=r"run\.dir: .* cannot be used: Permission denied") as caught:
        opened(config)
    assert caught.value.exit_code == ExitCode.FAILURE


# -- exports that did not come to their end


@pytest.fixture
def export(root, monkeypatch, tmp_path):
    """Exports a checkpoint whose array is zeros."""
    monkeypatch.setattr(exporting, "Reader", lambda *given: None)
    monkeypatch.setattr(exporting, "_read_verified", lambda *given: np.zeros((2, 3), np.float32))
    return lambda: exporting.export(commit.open_checkpoint(root / "15", "run"), tmp_path / "out", 10**9)


def test_an_export_that_fails_leaves_nothing_and_one_that_was_killed_is_no_obstacle(export, monkeypatch, tmp_path):
    building = tmp_path / ".out.building"

    def interrupted(*given, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(exporting, "save_file", interrupted)
        export()
    assert not building.exists() and not (tmp_path / "out").exists()
    building.mkdir()
    for name in (".tmpFe4FDf", "model-00001-of-00003.safetensors", "model.safetensors.index.json"):
        (building / name).write_text("cut off")
    files = export()
    assert not building.exists() and [path.name for path in files] == ["model.safetensors"]
    names = {"model.safetensors", "model.safetensors.index.json", "jaxmnt-config.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names


def test_an_export_removes_nothing_that_is_not_its_own(export, tmp_path):
    building, mine = tmp_path / ".out.building", tmp_path / "mine"
    mine.mkdir()
    (mine / "model.safetensors").write_text("mine")
    building.symlink_to(mine)
    with pytest.raises(ConfigError, match="building is in the way: it is not a folder"):
        export()
    building.unlink()
    building.mkdir()
    (building / "thesis").write_text("mine")
    with pytest.raises(ConfigError, match="building is in the way: it is a folder with thesis"):
        export()
    assert (building / "thesis").exists() and (mine / "model.safetensors").read_text() == "mine"
    (building / "thesis").unlink()
    lock = os.open(building, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="another process is exporting into"):
        export()
    os.close(lock)
    assert export()
