"""Where checkpoints are: the same in a folder and in Google Cloud Storage, and errors that say which of it is wrong."""

import errno
import json
import os
import shutil
from pathlib import Path

import jax
import pytest
from conftest import command, events, launch, losses
from gcs_server import TOKEN, Faults, Server
from safetensors.numpy import load_file

from jaxmnt import convert, storage
from jaxmnt.checkpoint import commit
from jaxmnt.checkpoint.__main__ import main as checkpoint_command
from jaxmnt.checkpoint.manifest import MANIFEST_FILE, Manifest
from jaxmnt.config.load import parse_config
from jaxmnt.distributed.authentication import run_key
from jaxmnt.errors import ConfigError, ExitCode, UserError, report
from jaxmnt.huggingface.config import read_config
from jaxmnt.run import fresh, lock
from jaxmnt.storage import storage_path
from jaxmnt.train import train

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="session")
def cloud():
    """A server in place of Google's, for this process and those that it starts."""
    with Server("bucket") as server:
        os.environ.update(server.environment)
        yield server.cloud


@pytest.fixture
def address(cloud, tmp_path):
    """A place in the bucket that no other test uses. Nothing goes wrong there unless the test says so."""
    cloud.faults = Faults()
    yield f"gs://bucket/{tmp_path.name}/run"
    cloud.faults = Faults()


@pytest.fixture(params=["folder", "address"])
def somewhere(request, tmp_path):
    if request.param == "folder":
        (tmp_path / "run").mkdir()
        return tmp_path / "run"
    return storage_path(request.getfixturevalue("address"))


def whole_manifest() -> Manifest:
    return Manifest("run", 5, {}, {}, 0, {}, None, [])


def test_files_are_whole_listed_moved_and_removed(somewhere):
    tree = somewhere / "7"
    (tree / "d").mkdir(parents=True)
    storage.publish(tree / "a.json", "{}")
    storage.publish(tree / "a.json", '{"b": 1}')
    storage.publish(tree / "d" / "x", "äö")
    assert storage.file_sizes(tree) == {"a.json": 8, "d/x": 4}
    assert storage.read_all(tree, ["a.json", "d/x"]) == {"a.json": b'{"b": 1}', "d/x": "äö".encode()}
    assert [path.name for path in somewhere.iterdir()] == ["7"]
    assert tree.is_dir() and (tree / "d" / "x").is_file() and not (tree / "b").exists()
    storage.move(tree, somewhere / "8")
    assert storage.file_sizes(tree) == {} and set(storage.file_sizes(somewhere / "8")) == {"a.json", "d/x"}
    storage.remove(somewhere / "8")
    storage.remove(somewhere / "8")
    assert list(somewhere.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        storage.read(tree / "a.json")


def test_only_one_can_make_a_file_and_nobody_removes_anothers(somewhere):
    path = somewhere / "lock"
    assert storage.create(path, "mine") and not storage.create(path, "yours")
    assert not storage.remove_if(path, "yours") and storage.read(path) == b"mine"
    assert storage.remove_if(path, "mine") and not path.exists()
    assert not storage.remove_if(path, "mine")


def test_a_removal_that_was_cut_off_is_finished(address):
    path = storage_path(address) / "checkpoints" / "5"
    for name in ("params/d/x", commit.ORBAX_MARKER, MANIFEST_FILE):
        storage.publish(path / name, "x")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(storage, "remove", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        commit.prune([commit.Committed(path, whole_manifest())], set())
    assert set(storage.file_sizes(path)) == {"params/d/x", commit.ORBAX_MARKER}
    removed = f"removed {path}, which was cut off while it was being removed"
    assert commit.clean_up(path.parent, None) == ([removed], [])
    assert list(path.parent.iterdir()) == []


def test_only_marks_that_name_a_step_remove_anything(somewhere):
    """Names that are not written as steps are, and such a step for comparison."""
    root = somewhere / "checkpoints"
    for name in ("mine", "²", "٣", "007", "5"):
        (root / name / "d").mkdir(parents=True)
        storage.publish(root / name / "d" / "x", name)
        storage.publish(root / f"{name}.unfinished", "being removed\n")
    for name in ("...unfinished", "..unfinished", ".unfinished"):
        storage.publish(root / name, "being removed\n")
    before = storage.file_sizes(somewhere)
    assert commit.clean_up(root, "run")[0] == [f"removed {root / '5'}, which was cut off while it was being removed"]
    after = {name: size for name, size in before.items() if "/5" not in name}
    assert storage.file_sizes(somewhere) == after and commit.step_directories(root) == []


def test_a_run_is_set_aside(somewhere):
    for name in ("run.json", "checkpoints/5/params/x", "checkpoints/5.unfinished", "notes.txt"):
        (somewhere / name).parent.mkdir(parents=True, exist_ok=True)
        storage.publish(somewhere / name, name)
    for number in (1, 2):
        storage.publish(somewhere / "run.json", "run.json")
        assert fresh.set_aside([somewhere]) == [
            f"the run that was in {somewhere} is set aside in {somewhere}/aside-{number}"
        ]
    assert set(storage.file_sizes(somewhere)) == {
        "aside-1/run.json", "aside-1/checkpoints/5/params/x", "aside-1/checkpoints/5.unfinished", "aside-2/run.json",
        "notes.txt",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["s3://bucket/a", "gs://bucket", "gs://", "https://x.org/a"])
def test_other_addresses_are_refused(text, tiny):
    with pytest.raises(ConfigError, match="gs://"):
        storage_path(text)
    with pytest.raises(ConfigError, match=r"checkpoint\.dir: .*; give one"):
        tiny(f"checkpoint.dir={text}")


def test_no_credentials_are_said_in_words(tiny, address, monkeypatch):
    from google.auth.exceptions import DefaultCredentialsError
    from google.cloud import storage as google

    def refuse(**_):
        raise DefaultCredentialsError("Your default credentials were not found.")

    monkeypatch.setattr(google, "Client", refuse)
    storage._client.cache_clear()
    try:
        with pytest.raises(UserError, match="gs://: Google Cloud Storage refuses access: Your def") as caught:
            train(tiny(f"checkpoint.dir={address}"), devices=one_device())
        assert caught.value.exit_code == ExitCode.CONFIG
    finally:
        storage._client.cache_clear()


def test_a_run_directory_is_no_address(tiny):
    with pytest.raises(ConfigError, match=r"run\.dir: gs://bucket/a must be a folder.*checkpoint\.dir"):
        tiny("run.dir=gs://bucket/a")


def one_device():
    return jax.devices()[:1]


@pytest.mark.slow
def test_a_run_with_its_checkpoints_in_a_bucket(tiny, tmp_path, address, whole_run, capsys):
    """Stopped, its directory lost with its machine, and resumed on another: as if nothing had been."""
    there = (f"checkpoint.dir={address}", "checkpoint.keep=2")
    assert train(tiny(*there, "train.stop_after=12", f"run.dir={tmp_path / 'first'}"), devices=one_device()) == 75
    config = tiny(*there, f"run.dir={tmp_path / 'second'}")
    assert train(config, devices=one_device()) == ExitCode.FINISHED
    assert losses(tmp_path / "first") + losses(tmp_path / "second") == losses(whole_run.run.dir)
    root = storage_path(address) / "checkpoints"
    found, expected = commit.newest_valid(root), commit.newest_valid(Path(whole_run.run.dir) / "checkpoints")
    assert {name: array.content for name, array in found.manifest.arrays.items()} == {
        name: array.content for name, array in expected.manifest.arrays.items()
    }
    assert [step for step, _ in commit.step_directories(root)] == [15, 20], "the older ones are removed"
    assert not (tmp_path / "second" / "checkpoints").exists()

    capsys.readouterr()
    for run in (address, str(tmp_path / "second")):  # by the address, or by what the run directory says of it
        assert checkpoint_command(["verify", run]) == ExitCode.FINISHED
        assert capsys.readouterr().out.count("valid, ") == 2
    with pytest.raises(
        ConfigError,
        match=r"checkpoint\.dir: gs://.* has the checkpoint of step 20 of .*, but .* step 0",
    ):
        train(tiny(f"run.dir={tmp_path / 'second'}"), devices=one_device())
    words = r"checkpoint\.dir: .*whole.* belongs to run .*, gs://bucket/.* belongs to run "
    with pytest.raises(ConfigError, match=words):
        train(tiny(there[0], f"run.dir={shutil.copytree(whole_run.run.dir, tmp_path / 'whole')}"), devices=one_device())


@pytest.mark.slow
def test_a_checkpoint_in_a_bucket_becomes_a_folder(tiny, tmp_path, address):
    """With what came with the model, and without the run's directory."""
    source = Path(__file__).parent / "reference" / "qwen2-b"
    model = parse_config({"model": read_config(json.loads((source / "config.json").read_text()), "config.json")}).model
    config = tiny("data.path=null", "data.synthetic=53", f"run.init_from=hf:{source}", f"checkpoint.dir={address}",
                  "train.stop_after=1", "optimizer.learning_rate=1e-30", "model.vocab_size=53")  # fmt: skip
    assert train(config.model_copy(update={"model": model}), devices=one_device()) == ExitCode.STOPPED
    shutil.rmtree(config.run.dir)
    assert convert.main(["to-hf", address, str(tmp_path / "out")]) == ExitCode.FINISHED
    wanted, found = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert {key: array.tobytes() for key, array in found.items()} == {key: a.tobytes() for key, a in wanted.items()}
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    assert told["dtype"] == "bfloat16" and told["max_position_embeddings"] == 640, "as the model's own says"


@pytest.mark.slow
def test_damage_in_a_bucket_is_set_aside(tiny, cloud, address, capsys):
    there = f"checkpoint.dir={address}"
    assert train(tiny(there, "train.stop_after=15"), devices=one_device()) == 75
    bucket, root = cloud.buckets["bucket"], f"{address.removeprefix('gs://bucket/')}/checkpoints"
    data = max(
        (name for name in bucket if name.startswith(f"{root}/15/params")), key=lambda name: len(bucket[name].data)
    )
    raw = bytearray(bucket[data].data)
    raw[len(raw) // 3] ^= 1
    bucket[data].data = bytes(raw)
    for name in [name for name in bucket if name.startswith(f"{root}/10/")][:2]:
        bucket[name.replace("/10/", "/17/")] = bucket[name]  # the beginning of a save that was cut off
    storage.publish(storage_path(f"{address}/checkpoints/17.unfinished"), "being written\n")
    capsys.readouterr()
    assert train(tiny(there), devices=one_device()) == ExitCode.FINISHED
    shown = capsys.readouterr().out
    assert f"removed {address}/checkpoints/17, which was cut off while it was being written" in shown
    assert "checkpoint 15 is not used" in shown or "WARNING checkpoint 15 is damaged" in shown
    assert f"{root}/15.damaged/{MANIFEST_FILE}" in bucket
    assert [found.step for found in commit.valid_checkpoints(storage_path(f"{address}/checkpoints"))] == [10, 15, 20]


@pytest.mark.parametrize(
    ("bucket", "faults", "why"),
    [
        ("nowhere", Faults(), "there is no such bucket"),
        ("bucket", Faults(tokens=frozenset({"somebody's"})), "refuses access: .*credentials"),
        ("bucket", Faults(read_only=True), "refuses access: .*does not have storage.objects.create access"),
    ],
    ids=["bucket missing", "wrong credentials", "read-only"],
)
def test_what_is_wrong_with_a_bucket_is_said_at_the_start(tiny, cloud, address, bucket, faults, why):
    cloud.faults = faults
    there = address.replace("gs://bucket/", f"gs://{bucket}/")
    with pytest.raises(ConfigError, match=rf"checkpoint\.dir: {there} cannot be used: .*{why}"):
        train(tiny(f"checkpoint.dir={there}"), devices=one_device())
    if bucket == "nowhere":
        with pytest.raises(UserError, match=why):
            checkpoint_command(["list", there])


@pytest.mark.parametrize("where", ["/checkpoints/", "/ocdbt.process_0/"], ids=["Orbax", "TensorStore"])
def test_a_bucket_that_fails_later_fails_a_save(tiny, cloud, address, capsys, monkeypatch, where):
    """Writing is refused from the second save on: the first stays, and the run ends in words."""
    original = commit.commit

    def then_refuse(path, manifest):
        original(path, manifest)
        cloud.faults.status_of_writes, cloud.faults.where = 403, where

    monkeypatch.setattr("jaxmnt.checkpoint.saver.commit", then_refuse)
    with pytest.raises(UserError, match=r"2 saves in a row failed in gs://bucket/.*: .*as the test wants"):
        train(tiny(f"checkpoint.dir={address}", "checkpoint.max_failed_saves=2"), devices=one_device())
    assert "WARNING checkpoint 10 could not be saved: " in capsys.readouterr().out
    assert [found.step for found in commit.valid_checkpoints(storage_path(f"{address}/checkpoints"))] == [5]


def test_two_jobs_and_one_address(tiny, address, monkeypatch):
    monkeypatch.setattr(lock, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(lock, "_EXIT_TIMEOUT_SECONDS", 0.5)
    config = tiny(f"checkpoint.dir={address}")
    Path(config.run.dir).mkdir()
    for where in (Path(config.run.dir), storage_path(address)):
        with lock.RunLock(where) as ours:
            assert ours.acquire() is None
            with pytest.raises(ConfigError, match=f"{where} is in use by another job"):
                train(config, devices=one_device())
        assert not (where / "lock.json").exists(), "it was given back"


@pytest.mark.slow
def test_processes_save_in_a_bucket_together(tiny_file, tmp_path, address, cloud):
    there = f"checkpoint.dir={address}"
    result = launch(tiny_file, there, "mesh.fsdp=2", "train.stop_after=10", processes=2, devices=1)
    assert result.returncode == ExitCode.STOPPED, result.stderr
    assert [event["step"] for event in events(tmp_path / "run", "checkpoint_commit")] == [5, 10]
    result = command("jaxmnt.train", "--config", str(tiny_file), there)
    assert result.returncode == 0, result.stderr
    assert losses(tmp_path / "run")[10:] and command("jaxmnt.checkpoint", "verify", address).returncode == 0
    cloud.faults.tokens = frozenset({TOKEN})  # TensorStore may, the others not
    assert "refuses access" in command("jaxmnt.checkpoint", "verify", address).stderr


def test_a_full_disk_leaves_no_file_and_is_told_with_its_name(tmp_path, monkeypatch, capsys):
    """Nor a lock of nobody, for which the next start would wait, nor a part of the run's key."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    for write in (lambda: storage.publish(tmp_path / "a", "b"), lambda: storage.create(tmp_path / "lock.json", "b")):
        with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/"):
            write()
        assert report(write) == ExitCode.FAILURE
        shown = capsys.readouterr().err
        assert shown.startswith(f"jaxmnt: error: {tmp_path}/")
        assert shown.endswith("cannot be written: No space left on device; make room\n")
    with pytest.raises(ConfigError, match=rf"cannot read or create the run's key {tmp_path}/run.key: No space left"):
        run_key(tmp_path, {})
    assert list(tmp_path.iterdir()) == []
