"""Checkpoints: digests, manifests, what is kept, what is damaged, whose a run directory is."""

import asyncio
import errno
import itertools
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import command, events, losses, metrics, write_words
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.lru_cache import LRUCache
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint._src import asyncio_utils

from jaxmnt.checkpoint import arrays, commit, digest, manifest, retention, saver
from jaxmnt.checkpoint.__main__ import main as checkpoint_command
from jaxmnt.checkpoint.arrays import Reader, split_array
from jaxmnt.checkpoint.device_digest import start_digests
from jaxmnt.checkpoint.export import verify
from jaxmnt.checkpoint.manifest import Array, DamagedError, Manifest, OtherFormatError
from jaxmnt.checkpoint.names import arrays_by_name, nested_arrays, unflatten_like
from jaxmnt.checkpoint.refs import find
from jaxmnt.checkpoint.restore import restore
from jaxmnt.config.mesh import Mesh
from jaxmnt.config.schema import Checkpoint
from jaxmnt.data.run_tokenizer import tokenizer_of_data
from jaxmnt.data.sources import fit_to_data, open_sources
from jaxmnt.distributed.coordination import Vote
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError, ExitCode, UserError
from jaxmnt.huggingface.compatibility import check_compatible, run_origin
from jaxmnt.parallel.sharding import build_mesh
from jaxmnt.prepare import main as prepare
from jaxmnt.run import compile_cache, lock
from jaxmnt.run.saves import CheckpointManager
from jaxmnt.storage import json_digest
from jaxmnt.telemetry import reliability
from jaxmnt.telemetry.events import history
from jaxmnt.telemetry.progress import StartClock
from jaxmnt.train import train

pytestmark = pytest.mark.usefixtures("shared_programs")

ALONE = Identity()
DTYPES = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.int32), np.dtype(np.int8)]


def one_device():
    return jax.devices()[:1]


def some_array(shape, dtype, seed=0) -> np.ndarray:
    bits = np.random.default_rng(seed).integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8)
    return bits.view(dtype).reshape(shape)


# -- digests

SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=4).map(tuple)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.sampled_from(DTYPES), st.integers(0, 3), st.integers(1, 400))
def test_a_digest_can_be_taken_in_any_pieces(shape, dtype, seed, most):
    array = some_array(shape, dtype, seed)
    whole = digest.block_digest(array, (0,) * len(shape), shape)
    total, elements = digest.ZERO, 0
    for start, index in split_array(Array(shape, dtype.name, ""), most):
        piece = array[index]
        elements += piece.size
        total = digest.add(total, digest.block_digest(piece, start, shape))
    assert total == whole and elements == array.size
    assert digest.from_text(digest.to_text(whole)) == whole


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(DTYPES))
def test_every_single_bit_counts(data, dtype):
    array = some_array((5, 7), dtype)
    before = digest.block_digest(array, (0, 0), array.shape)
    flipped = array.copy()
    words = flipped.view(np.uint8).reshape(-1)
    words[data.draw(st.integers(0, words.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest.block_digest(flipped, (0, 0), array.shape)[0] != before[0]


def test_swapped_elements_rows_and_shapes_have_other_digests():
    array = some_array((6, 8), DTYPES[0])
    whole = lambda x: digest.block_digest(x, (0,) * x.ndim, x.shape)
    rows = array[[1, 0, 2, 3, 4, 5]]
    assert len({whole(array), whole(rows), whole(array.T.copy()), whole(np.zeros_like(array))}) == 4
    first = digest.bound("c", "run", 1, "name", (6, 8), "float32")
    others = [
        digest.bound("d", "run", 1, "name", (6, 8), "float32"), digest.bound("c", "nur", 1, "name", (6, 8), "float32"),
        digest.bound("c", "run", 2, "name", (6, 8), "float32"), digest.bound("c", "run", 1, "eman", (6, 8), "float32"),
        digest.bound("c", "run", 1, "name", (8, 6), "float32"), digest.bound("c", "run", 1, "name", (6, 8), "int32"),
    ]  # fmt: skip
    assert len({first, *others}) == 7


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_a_digest_is_the_same_on_any_sharding(dtype):
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    array = some_array((8, 12, 20), dtype)
    expected = digest.block_digest(array, (0, 0, 0), array.shape)
    specs = [P(), P("a"), P(("a", "c"), "b"), P(None, None, ("b",)), P("c", ("a", "b"))]
    arrays = {str(i): jax.device_put(array, NamedSharding(mesh, spec)) for i, spec in enumerate(specs)}
    under_way = start_digests(arrays)
    for leaf in arrays.values():
        leaf.delete()  # as the next step's donation does
    assert set(under_way.wait().values()) == {expected}


# -- names


def test_names_are_unique_and_come_back():
    state = {"params": {"b": {"c": 1}, "a": [2, (3,)]}, "optimizer": {"count": 4}}
    arrays = arrays_by_name(state)
    assert list(arrays) == ["optimizer/count", "params/a/0", "params/a/1/0", "params/b/c"]
    assert unflatten_like(state, arrays) == state
    assert nested_arrays(arrays) == {"optimizer": {"count": 4}, "params": {"a": {"0": 2, "1": {"0": 3}}, "b": {"c": 1}}}


@pytest.mark.parametrize("tree", [{"a.b": 1}, {"a/b": 1}, {"a": {0: 1, "0": 2}}, {"": 1}], ids=str)
def test_names_that_could_collide_are_no_names(tree):
    with pytest.raises((AssertionError, ValueError)):
        arrays_by_name(tree)


# -- manifests

EXAMPLE = Manifest("run", 5, {"params/w": Array((2, 3), "float32", "0" * 16)}, {"seed": 0}, 7, {"data": "x"}, 1.5, [])


def test_every_bit_of_a_manifest_counts(tmp_path):
    manifest.write(tmp_path, EXAMPLE, {"file": [1, None]})
    assert manifest.read(tmp_path) == (EXAMPLE, {"file": [1, None]})
    path = tmp_path / manifest.MANIFEST_FILE
    original = path.read_bytes()
    for position in range(len(original)):
        damaged = bytearray(original)
        damaged[position] ^= 1 << position % 7
        path.write_bytes(damaged)
        try:
            found = manifest.read(tmp_path)
        except (DamagedError, OtherFormatError):
            continue
        assert found == (EXAMPLE, {"file": [1, None]}), "read, and otherwise than it was written"


def test_a_loss_that_is_no_number_is_null_in_json(tmp_path, capsys):
    """In the file and in what the command prints; a manifest from before, with a bare NaN and its seal, is read."""

    def strictly(text):
        return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    root = tmp_path / "checkpoints"
    for step, loss in ((5, float("nan")), (6, float("inf"))):
        (root / str(step)).mkdir(parents=True)
        (root / str(step) / "commit_success.txt").touch()
        manifest.write(root / str(step), Manifest("r", step, {}, {}, 7, {}, loss, []), {})
        assert strictly((root / str(step) / manifest.MANIFEST_FILE).read_text())["manifest"]["loss"] is None
        assert manifest.read(root / str(step))[0].loss is None
        assert checkpoint_command(["show", "--json", f"{tmp_path}@{step}"]) == 0
        assert strictly(capsys.readouterr().out)["loss"] is None
    record = json.loads((root / "5" / manifest.MANIFEST_FILE).read_text())
    record["manifest"]["loss"] = float("nan")
    record["seal"] = json_digest({name: value for name, value in record.items() if name != "seal"})
    (root / "5" / manifest.MANIFEST_FILE).write_text(json.dumps(record))
    assert math.isnan(manifest.read(root / "5")[0].loss)
    assert checkpoint_command(["show", "--json", f"{tmp_path}@5"]) == 0
    assert strictly(capsys.readouterr().out)["loss"] is None


def test_another_format_is_refused_and_not_taken_for_damage(tmp_path):
    record = {"format": 5, "whatever": "a later version writes"}
    record["seal"] = json_digest(record)
    (tmp_path / manifest.MANIFEST_FILE).write_text(json.dumps(record))
    words = "format version 5, but this jaxmnt .* reads 2 to 4; use a newer jaxmnt"
    with pytest.raises(OtherFormatError, match=words):
        manifest.read(tmp_path)
    (tmp_path / manifest.MANIFEST_FILE).write_text(json.dumps({"format": 1, "notes": {}, "files": {}}))
    with pytest.raises(OtherFormatError, match="use an older jaxmnt"):
        manifest.read(tmp_path)
    assert OtherFormatError.exit_code == ExitCode.CONFIG


# -- what is kept, and when to save


@given(st.sets(st.integers(1, 300), min_size=1), st.integers(2, 5), st.integers(0, 7), st.integers(0, 3))
def test_what_is_kept(steps, keep, every, best):
    known = {step: (None if step % 3 else float(step % 11)) for step in steps}
    stay = retention.steps_to_keep(known, Checkpoint(keep=keep, keep_every_steps=every, keep_best=best))
    assert stay <= steps and max(steps) in stay
    assert set(sorted(steps)[-keep:]) <= stay
    if every:
        assert {step for step in steps if step % every == 0} <= stay
    evaluated = sorted(loss for loss in known.values() if loss is not None)
    for step, loss in known.items():
        if loss is not None and best and loss < evaluated[min(best, len(evaluated)) - 1]:
            assert step in stay
    bound = keep + best + (sum(step % every == 0 for step in steps) if every else 0)
    assert len(stay) <= bound


@settings(max_examples=40, deadline=None)
@given(st.floats(0.01, 600), st.floats(600, 1e6))
def test_the_interval_loses_the_least_time(cost, mean):
    """Against Daly's exact expectation of the time that a unit of work takes, restarting for free."""
    lost = lambda interval: mean * math.expm1((interval + cost) / mean) / interval
    chosen = reliability.best_interval(cost, mean)
    grid = np.geomspace(cost / 10, 20 * mean, 4000)
    with np.errstate(over="ignore"):
        least = float(np.nanmin(mean * np.expm1((grid + cost) / mean) / grid))
    assert lost(chosen) <= least * 1.02


def test_how_often_a_run_fails():
    assert reliability.seconds_between_failures(2.0, 5, 100.0, 8) == (7200.0, "stated")
    assert reliability.seconds_between_failures(None, 5, 100.0, 8) == (20.0, "measured")
    mean, how = reliability.seconds_between_failures(None, 0, 100.0, 16384)
    assert how == "assumed" and mean / 3600 == pytest.approx(54 * 24 / 419)


def test_history_counts_attempts_without_an_end(tmp_path):
    lines = [
        {"kind": "start", "attempt": 0, "time": 100.0}, {"kind": "end", "attempt": 0, "time": 110.0, "finished": False},
        {"kind": "start", "attempt": 1, "time": 50.0}, {"kind": "restore", "attempt": 1, "time": 55.0},
    ]  # fmt: skip
    (tmp_path / "0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert history(tmp_path / "0.jsonl") == (1, 15.0)
    assert history(tmp_path / "none.jsonl") == (0, 0.0)


def test_the_clock():
    never = retention.SaveTimer(None, 100.0, 0.0)
    assert not never.is_due(1e9)
    timed = retention.SaveTimer(2.0, 100.0, 0.0)
    assert not timed.is_due(119.0) and timed.is_due(120.0)
    timed.last_save_time = 120.0
    assert not timed.is_due(230.0)
    auto = retention.SaveTimer("auto", 36000.0, 0.0)
    assert auto.is_due(0.0), "the first save tells what one costs"
    auto.last_save_time = 0.0
    auto.record_cost(0.5, 20.0)
    assert auto.seconds == pytest.approx(math.sqrt(2 * 0.5 * 36000), rel=0.01)
    auto.record_cost(0.5, 500.0)
    assert auto.seconds == 500.0, "not more often than a save takes"


# -- saving and restoring


def mesh_of(data: int, fsdp: int) -> jax.sharding.Mesh:
    axes = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((data, fsdp), ("data", "fsdp"), devices=jax.devices()[: data * fsdp], axis_types=axes)


def abstract_state(mesh: jax.sharding.Mesh) -> dict:
    leaf = lambda shape, dtype, *spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))
    return {
        "params": {"w": leaf((16, 64, 8), jnp.float32, None, "fsdp"), "b": leaf((32,), jnp.bfloat16)},
        "optimizer": {"mu": {"w": leaf((16, 64, 8), jnp.float32, None, "fsdp")}, "count": leaf((), jnp.int32)},
        "counters": {"step": leaf((), jnp.int32)},
    }


def filled(abstract: dict, seed: int) -> dict:
    names = sorted(arrays_by_name(abstract))
    make = lambda name, leaf: jax.device_put(
        some_array(leaf.shape, np.dtype(leaf.dtype), seed * 100 + names.index(name)), leaf.sharding
    )
    return unflatten_like(abstract, {name: make(name, leaf) for name, leaf in arrays_by_name(abstract).items()})


def describe(step: int, run: str = "run"):
    return lambda arrays: Manifest(run, step, arrays, {}, 0, {}, None, [])


def save(root: Path, step: int, state: dict, **options) -> saver.SaveResult:
    one = saver.Saver(root, Checkpoint(**options), retention.space_needed(1 << 16, 1), ALONE)
    one.save(step, state, describe(step))
    saved = one.result(wait=True)
    assert saved is not None
    return saved


def same_bits(a, b) -> bool:
    a, b = arrays_by_name(a), arrays_by_name(b)
    return a.keys() == b.keys() and all(np.asarray(a[n]).tobytes() == np.asarray(b[n]).tobytes() for n in a)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Steps 1 and 2 of a run, saved on data 2 × fsdp 4, and their states. Not to be changed."""
    root = tmp_path_factory.mktemp("saved")
    states = {step: filled(abstract_state(mesh_of(2, 4)), step) for step in (1, 2)}
    for step, state in states.items():
        assert save(root, step, state).failure is None
    return root, states


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize(("data", "fsdp"), [(1, 1), (2, 4), (4, 2), (8, 1)])
def test_what_is_saved_is_restored_anywhere(saved, data, fsdp, spread):
    root, states = saved
    abstract = abstract_state(mesh_of(data, fsdp))
    restored = restore(commit.open_checkpoint(root / "2", "run"), abstract, ALONE, spread=spread)
    assert same_bits(restored.state, states[2])
    for leaf, target in zip(jax.tree.leaves(restored.state), jax.tree.leaves(abstract), strict=True):
        assert leaf.sharding == target.sharding


def test_parts_can_be_restored_alone_and_added_later(saved):
    root, states = saved
    abstract = abstract_state(mesh_of(1, 2))
    params = restore(commit.open_checkpoint(root / "1"), {"params": abstract["params"]}, ALONE).state
    assert same_bits(params, {"params": states[1]["params"]})
    with pytest.raises(ConfigError, match="does not fit this config: it lacks ema/w"):
        restore(commit.open_checkpoint(root / "1"), {"ema": {"w": abstract["params"]["w"]}}, ALONE)


def test_another_model_is_named(saved):
    root, _ = saved
    abstract = abstract_state(mesh_of(1, 2))
    other = abstract["params"]["w"]
    abstract["params"]["w"] = jax.ShapeDtypeStruct((16, 32, 8), other.dtype, sharding=other.sharding)
    with pytest.raises(
        ConfigError, match=r"does not fit this config: its params/w is float32\[16, 64, 8\].*\[16, 32, 8\]"
    ):
        restore(commit.open_checkpoint(root / "1"), abstract, ALONE)


def test_a_flipped_bit_in_the_data_is_found_by_the_digests(saved, tmp_path, monkeypatch):
    """With files too large to be hashed at every look, as all array data of a real model is."""
    monkeypatch.setattr(commit, "SMALL_BYTES", 0)
    root, states = tmp_path / "root", saved[1]
    save(root, 1, states[1])
    data = max((root / "1" / "params").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 4
    data.write_bytes(raw)
    checkpoint = commit.open_checkpoint(root / "1", "run")
    with pytest.raises(DamagedError, match="array params/w is not what was saved"):
        verify(root / "1", "run")
    with pytest.raises(DamagedError, match="array params/w is not what was saved"):
        restore(checkpoint, abstract_state(mesh_of(1, 4)), ALONE)
    restore(checkpoint, abstract_state(mesh_of(1, 4)), ALONE, verify=False)


def test_what_is_not_whole_has_a_reason(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "root")
    root = tmp_path / "root"
    with pytest.raises(DamagedError, match="belongs to run run, but this is run other"):
        commit.open_checkpoint(root / "1", "other")
    (root / "1").rename(root / "3")
    with pytest.raises(DamagedError, match="is a checkpoint of step 1 under the name of another step"):
        commit.open_checkpoint(root / "3")
    (root / "4").mkdir()
    assert commit.why_not_valid(root / "4") == "it has no commit marker commit_success.txt"
    assert [found.step for found in commit.valid_checkpoints(root)] == [2]
    cut_off, damaged = commit.clean_up(root, "run")
    assert (
        not cut_off
        and len(damaged) == 2
        and sorted(path.name for path in root.iterdir()) == ["2", "3.damaged", "4.damaged"]
    )


def test_damage_is_found(tmp_path):
    """A short form of the trial whose table is in docs/checkpoints.md."""
    sys.path.insert(0, str(Path(__file__).parent / "trials"))
    import damage

    originals = damage.prepare(tmp_path, 1)
    cases = damage.cases(originals, flips=8, truncations=3, deletions=3, seed=1)
    rows = damage.run(originals, cases)
    assert rows and all(row.missed == 0 for row in rows), rows


def test_saving_prunes_after_the_commit_only(tmp_path, monkeypatch):
    state = filled(abstract_state(mesh_of(1, 2)), 1)
    for step in (1, 2, 3):
        save(tmp_path, step, state, keep=2)
    assert [step for step, _ in commit.step_directories(tmp_path)] == [2, 3]
    failing = lambda path, manifest: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    monkeypatch.setattr(saver, "commit", failing)
    result = save(tmp_path, 4, state, keep=2)
    assert result.failure is not None and "No space left" in result.failure
    monkeypatch.undo()
    assert [found.step for found in commit.valid_checkpoints(tmp_path)] == [2, 3]
    assert save(tmp_path, 4, state, keep=2).failure is None, "what is left of a failed try is not in the way"
    assert [found.step for found in commit.valid_checkpoints(tmp_path)] == [3, 4]


def test_what_cannot_be_pruned_does_not_undo_a_commit(tmp_path, monkeypatch):
    """Or the retry would set a good checkpoint aside."""
    state = filled(abstract_state(mesh_of(1, 2)), 1)
    failing = lambda *_: (_ for _ in ()).throw(OSError(13, "Permission denied", "1"))
    monkeypatch.setattr(saver, "prune", failing)
    result = save(tmp_path, 1, state)
    assert result.failure is None and result.removal_failure == "Permission denied: 1"
    assert [found.step for found in commit.valid_checkpoints(tmp_path)] == [1]


def test_too_little_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    state = filled(abstract_state(mesh_of(1, 2)), 1)
    real = os.statvfs(tmp_path)

    class Full:
        f_bavail, f_frsize, f_files, f_favail = 10, 4096, real.f_files, real.f_favail

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    assert "40 KiB is free" in (save(tmp_path, 1, state).failure or "")
    Full.f_bavail, Full.f_files, Full.f_favail = 1 << 30, 100, 3
    assert "3 inodes are free" in (save(tmp_path, 1, state).failure or "")
    assert not list(tmp_path.iterdir())


def test_files_honour_the_umask(tmp_path):
    before = os.umask(0o002)
    try:
        save(tmp_path / "root", 1, filled(abstract_state(mesh_of(1, 2)), 1))
    finally:
        os.umask(before)
    for path in [tmp_path / "root", *(tmp_path / "root").rglob("*")]:
        wanted = 0o775 if path.is_dir() else 0o664
        assert path.stat().st_mode & 0o777 == wanted, path


# -- the compile cache


def test_the_compile_cache_is_private(tmp_path, monkeypatch):
    updates = {}
    monkeypatch.setattr(compile_cache.jax.config, "update", updates.__setitem__)
    before = os.umask(0)
    try:
        compile_cache.use_compile_cache(str(tmp_path / "cache"), tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert updates["jax_compilation_cache_dir"] == str(tmp_path / "cache")
    (tmp_path / "cache").chmod(0o770)
    with pytest.raises(ConfigError, match=r"run\.compile_cache: others can write to .* chmod go-w"):
        compile_cache.use_compile_cache(str(tmp_path / "cache"), tmp_path)


@pytest.mark.parametrize(
    ("backend", "told", "folder"),
    [("gpu", None, "compiled"), ("gpu", "/x", None), ("cpu", None, "cache/jaxmnt/compiled-*"), ("cpu", "/x", None)],
)
def test_programs_are_kept_in_the_run_or_in_the_users_cache(tmp_path, monkeypatch, backend, told, folder):
    """Where nothing is told: else a restart on GPUs might choose other kernels."""
    updates = {}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_cache.jax, "default_backend", lambda: backend)
    monkeypatch.setattr(compile_cache, "_jax_cache_folder", lambda: told and str(tmp_path))
    monkeypatch.setattr(compile_cache.jax.config, "update", updates.__setitem__)
    compile_cache.use_compile_cache(None, tmp_path)
    found = [str(path) for path in tmp_path.glob(folder)] if folder else []
    assert updates.get("jax_compilation_cache_dir") == (found[0] if folder else None)
    assert all(Path(path).stat().st_mode & 0o777 == 0o700 for path in found)


def test_programs_of_several_cpus_are_not_kept():
    """Read from a file, their collectives have lost their order, and devices may wait for each other without end."""
    clock = StartClock()
    clock.watch_compile_cache()
    for count, asked in ((1, 1), (2, 1)):
        mesh = build_mesh(Mesh(data=count), jax.devices()[:count])
        split = NamedSharding(mesh, P("data"))
        shape = jax.ShapeDtypeStruct((8,), np.float32, sharding=split)
        jax.jit(lambda x: x.sum() * 0.75).lower(shape).compile()
        assert sum(clock.compile_cache.values()) == asked


@pytest.mark.parametrize("harm", ["emptied", "cut", "a bit", "exchanged", "without a seal"])
def test_an_entry_that_is_not_what_was_written_there_is_named_and_made_again(tmp_path, capfd, harm):
    cache = LRUCache(str(tmp_path), max_size=-1)
    programs = {"jit_a-1-sealed": b"program a", "jit_b-2-sealed": b"program b"}
    for key, program in programs.items():
        cache.put(key, program)
        assert cache.get(key) == program
    paths = sorted(tmp_path.iterdir())
    one, other = (path.read_bytes() for path in paths)
    content = {
        "emptied": b"", "cut": one[:-3], "a bit": bytes([one[0] ^ 1]) + one[1:], "exchanged": other,
        "without a seal": b"program a",
    }  # fmt: skip
    paths[0].write_bytes(content[harm])
    assert cache.get("jit_a-1-sealed") is None and cache.get("jit_b-2-sealed") == b"program b"
    note = f"note: {paths[0]} in the compile cache is damaged, or the entry of another program"
    assert note in capfd.readouterr().err
    cache.put("jit_a-1-sealed", b"program a")
    assert cache.get("jit_a-1-sealed") == b"program a"


def test_programs_have_keys_that_no_other_program_reads(monkeypatch):
    keys = []
    monkeypatch.setattr(LRUCache, "get", lambda cache, key: keys.append(key))
    jax.jit(lambda x: x * 0.875).lower(1.0).compile()
    assert keys and all(key.endswith("-sealed") for key in keys)


def test_another_cpu_has_another_folder(monkeypatch):
    here = compile_cache._cpu_cache_folder()
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **how: read(path, **how).replace("flags\t", "flags\tnew "))
    assert compile_cache._cpu_cache_folder() != here
    monkeypatch.setattr(compile_cache, "version", lambda _: "99")
    assert len({here, compile_cache._cpu_cache_folder()}) == 2

    def missing(path, **how):
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert compile_cache._cpu_cache_folder(), "also where there is no /proc"


# -- the lock


@pytest.fixture
def quick_lock(monkeypatch):
    for name, value in {"_BEAT": 0.02, "_SILENCE_TIMEOUT": 0.5, "_EXIT_TIMEOUT": 0.2, "_POLL": 0.02}.items():
        monkeypatch.setattr(lock, f"{name}_SECONDS", value)


def test_two_jobs_and_one_directory(tmp_path, quick_lock):
    with lock.RunLock(tmp_path) as first:
        assert first.acquire() is None
        with lock.RunLock(tmp_path) as second, pytest.raises(ConfigError, match=f"in use by .* process {os.getpid()}"):
            second.acquire()
        first.check()
    with lock.RunLock(tmp_path) as third:
        assert third.acquire() is None
    assert not list(tmp_path.iterdir())


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path, quick_lock):
    code = "import sys, pathlib; from jaxmnt.run.lock import RunLock; RunLock(pathlib.Path(sys.argv[1])).acquire()"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert (tmp_path / "lock.json").exists()
    with lock.RunLock(tmp_path) as second:
        assert "dead job was taken over: process" in (second.acquire() or "")


@pytest.mark.parametrize("alive", [True, False])
def test_a_holder_elsewhere_is_believed_by_its_signs(tmp_path, quick_lock, alive):
    """Its machine is another, its clock anything: only that the number goes up counts."""
    here = json.loads(lock._describe_this_process())
    holder = here | {"machine": "elsewhere", "host": "far", "since": "2001-01-01 00:00:00"}
    (tmp_path / "lock.json").write_text(json.dumps(holder))
    (tmp_path / "lock.beat").write_text("1")
    end, told = threading.Event(), []

    def beat():
        for number in itertools.count(2):
            if end.wait(0.05):
                return
            (tmp_path / "lock.beat").write_text(str(number))

    thread = threading.Thread(target=beat)
    if alive:
        thread.start()
    try:
        with lock.RunLock(tmp_path) as ours:
            if alive:
                with pytest.raises(ConfigError, match=r"in use by another job, process .* on far"):
                    ours.acquire(told.append)
            else:
                assert "on far" in (ours.acquire(told.append) or "")
    finally:
        end.set()
        if alive:
            thread.join()
    assert "waiting to see whether that job is alive" in told[0]


def test_a_torn_lock_is_nobodys(tmp_path, quick_lock):
    (tmp_path / "lock.json").write_text('{"job": "12')
    with lock.RunLock(tmp_path) as ours:
        assert "dead job" in (ours.acquire() or "")


def test_a_job_whose_lock_was_taken_stops(tmp_path, quick_lock):
    with lock.RunLock(tmp_path) as ours:
        ours.acquire()
        (tmp_path / "lock.json").write_text(lock._describe_this_process())
        deadline = time.monotonic() + 10
        with pytest.raises(UserError, match="another job has taken the lock of"):
            while time.monotonic() < deadline:
                ours.check()
                time.sleep(0.02)
    assert (tmp_path / "lock.json").exists(), "it is the other's"


# -- runs


def test_a_job_that_has_lost_its_lock_commits_nothing(tiny, tmp_path, monkeypatch):
    """Suspended over its next sign of life, it does not know it yet when a save is about to be committed."""
    monkeypatch.setattr(lock, "_BEAT_SECONDS", 600)
    original, others = arrays.Reader.open_all, lock._describe_this_process()

    def lose(opened):
        original(opened)
        (tmp_path / "run" / "lock.json").write_text(others)

    monkeypatch.setattr(arrays.Reader, "open_all", lose)
    with pytest.raises(UserError, match=r"another job has taken the lock of .*run, process"):
        train(tiny(), devices=one_device())
    root = tmp_path / "run" / "checkpoints"
    assert [step for step, _ in commit.step_directories(root)] == [5], "the next save was not begun"
    assert (tmp_path / "run" / "lock.json").read_text() == others


def test_a_lock_that_is_gone_is_lost(tmp_path, quick_lock):
    """A job that was suspended while another came, trained and left must not go on where it was."""
    with lock.RunLock(tmp_path) as ours:
        ours.acquire()
        ours.confirm()
        (tmp_path / "run.json").touch()
        (tmp_path / "lock.json").unlink()
        with pytest.raises(UserError, match=r"another job has taken the lock of .* and has released it"):
            ours.confirm()


def test_a_lock_in_a_directory_that_is_away_for_a_moment_is_kept(tmp_path, quick_lock):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").touch()
    with lock.RunLock(run) as ours:
        ours.acquire()
        run.rename(tmp_path / "away")
        run.mkdir()
        with pytest.raises(UserError, match=r"run has no files of this run now; check that it is mounted"):
            ours.confirm()
        shutil.rmtree(run)
        (tmp_path / "away").rename(run)
        ours.confirm()


def test_a_whole_checkpoint_is_not_saved_over(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "root")
    result = save(tmp_path / "root", 2, saved[1][1])
    assert result.failure is not None and "is already a valid checkpoint, which another job" in result.failure
    assert [found.step for found in commit.valid_checkpoints(tmp_path / "root")] == [1, 2]


def test_a_commit_whose_answer_was_lost_stands(saved, tmp_path, monkeypatch):
    original = saver.commit

    def lose_the_answer(path, manifest):
        original(path, manifest)
        raise OSError(errno.EIO, "the answer was lost", str(path))

    monkeypatch.setattr(saver, "commit", lose_the_answer)
    assert save(tmp_path, 1, saved[1][1]).failure is None
    assert [found.step for found in commit.valid_checkpoints(tmp_path)] == [1]


def test_a_run_directory_in_other_words_is_the_same(tiny, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    config = tiny(f"checkpoint.dir={tmp_path / 'link' / 'run'}", "train.stop_after=5")
    assert train(config, devices=one_device()) == ExitCode.STOPPED


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EDQUOT, errno.ENOSPC], ids=os.strerror)
def test_a_run_directory_that_cannot_be_written_is_a_config_error(tiny, monkeypatch, number):
    opens = os.open

    def refuse(path, *given, **named):
        if "lock" in Path(os.fsdecode(path)).name:
            raise OSError(number, os.strerror(number), str(path))
        return opens(path, *given, **named)

    monkeypatch.setattr(lock.os, "open", refuse)
    config = tiny()
    with pytest.raises(ConfigError, match=rf"run\.dir: .* cannot be used: {os.strerror(number)} .*lock\.json"):
        train(config, devices=one_device())
    assert not (Path(config.run.dir) / "checkpoints").exists()


def test_a_checkpoint_that_cannot_be_reached_is_not_taken_for_damage(tiny, finished, monkeypatch):
    class Refused:
        def result(self):
            raise ValueError("PERMISSION_DENIED: Error opening local file: Permission denied")

    config = tiny()
    shutil.copytree(finished, config.run.dir)
    shutil.rmtree(Path(config.run.dir) / "checkpoints" / "20")
    monkeypatch.setattr(arrays.ts, "open", lambda *_, **__: Refused())
    with pytest.raises(UserError, match="cannot be reached: PERMISSION_DENIED") as caught:
        train(config, devices=one_device())
    assert not isinstance(caught.value, DamagedError)
    assert [found.step for found in commit.valid_checkpoints(Path(config.run.dir) / "checkpoints")] == [10, 15]


def test_what_was_cut_off_is_removed_and_what_was_lost_is_kept(tiny, finished):
    """Killed between Orbax's end and the commit a run does not fill the disk; a lost manifest costs no checkpoint."""
    root = Path(tiny().run.dir) / "checkpoints"
    shutil.copytree(finished, root.parent)
    for step in (10, 15, 20):
        (root / str(step) / manifest.MANIFEST_FILE).unlink()
    (root / "15.unfinished").write_text("being written\n")
    (root / "12.unfinished").write_text("being removed\n")
    cut_off, damaged = commit.clean_up(root, None)
    assert cut_off == [f"removed {root / '15'}, which was cut off while it was being written"]
    assert ["it has no commit marker" in line and "kept as" in line for line in damaged] == [True, True]
    assert sorted(path.name for path in root.iterdir()) == ["10.damaged", "20.damaged"]


@pytest.fixture
def finished(whole_run) -> Path:
    """The directory of a run of 20 steps on one device, with checkpoints 10, 15 and 20."""
    return Path(whole_run.run.dir)


def contents(run: Path, step: int = 20) -> dict[str, str]:
    found = commit.open_checkpoint(run / "checkpoints" / str(step)).manifest
    return {name: array.content for name, array in found.arrays.items()}


def test_a_damaged_checkpoint_is_named_kept_and_replaced_by_the_one_before(tiny, monkeypatch, capsys):
    monkeypatch.setattr(commit, "SMALL_BYTES", 0)
    config = tiny("train.stop_after=15")
    train(config, devices=one_device())
    root = Path(config.run.dir) / "checkpoints"
    data = max((root / "15" / "params").rglob("d/*"), key=lambda path: path.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 3] ^= 1
    data.write_bytes(raw)
    capsys.readouterr()
    assert train(tiny(), devices=one_device()) == ExitCode.FINISHED
    shown = capsys.readouterr().out
    assert "WARNING checkpoint 15 is damaged: array params/" in shown
    assert "WARNING going on from step 10 instead" in shown
    assert (root / "15.damaged").is_dir()
    assert events(config.run.dir, "checkpoint_damaged")[0]["step"] == 15
    assert [line["step"] for line in metrics(config.run.dir)] == list(range(1, 21))


def test_a_failed_save_is_reported_at_once_and_tried_again(tiny, finished, prompt_saves, monkeypatch, capsys):
    original, failed = saver.commit, []

    def fail_once(path, manifest):
        if manifest.step == 10 and not failed:
            failed.append(manifest.step)
            raise OSError(28, "No space left on device", str(path))
        original(path, manifest)

    monkeypatch.setattr(saver, "commit", fail_once)
    config = tiny("checkpoint.keep=9")
    assert train(config, devices=one_device()) == ExitCode.FINISHED
    assert "WARNING checkpoint 10 could not be saved: No space left on device" in capsys.readouterr().out
    assert events(config.run.dir, "checkpoint_failed")[0]["failed_in_a_row"] == 1
    steps = [event["step"] for event in events(config.run.dir, "checkpoint_commit")]
    assert steps[:1] == [5] and steps[-2:] == [15, 20]
    assert any(10 < step < 15 for step in steps), "it was tried again before the next was due"
    assert contents(Path(config.run.dir)) == contents(finished)


def test_too_many_failed_saves_end_the_run(tiny, monkeypatch):
    def fail(path, manifest):
        raise OSError(122, "Disk quota exceeded", str(path))

    monkeypatch.setattr(saver, "commit", fail)
    config = tiny("checkpoint.max_failed_saves=2")
    with pytest.raises(UserError, match=r"2 saves in a row failed in .*: Disk quota exceeded"):
        train(config, devices=one_device())
    assert commit.newest_valid(Path(config.run.dir) / "checkpoints") is None


def test_a_file_that_may_not_grow_is_reported_in_words(tiny, finished, capfd):
    """A real failure of a write in the background: a limit on the size of files, smaller than the parameters."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, before[1]))
    try:
        with pytest.raises(UserError, match=r"2 saves in a row failed in .*: File too large"):
            train(tiny("checkpoint.max_failed_saves=2"), devices=one_device())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    shown = capfd.readouterr()
    assert "WARNING checkpoint 5 could not be saved: File too large" in shown.out
    assert "Traceback" not in shown.err, "Orbax's account of it is not a user's"


def test_a_loop_that_orbax_has_closed_takes_late_calls():
    """TensorStore's threads make them after a failed save, and print a traceback for each that raises."""
    loop = asyncio_utils.asyncio.new_event_loop()
    assert loop.run_until_complete(asyncio.sleep(0, "works")) == "works"
    loop.close()
    called = []
    loop.call_soon_threadsafe(called.append, 1)
    assert called == []
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon(called.append, 1)


@pytest.fixture
def prompt_saves(monkeypatch):
    """Each save is waited for, so that the next can be due however few steps there are."""
    poll = CheckpointManager.poll
    monkeypatch.setattr(CheckpointManager, "poll", lambda saves, wait=True: poll(saves, wait=True))


def test_a_save_that_times_out_has_failed():
    """As with ETIMEDOUT of a network file system. Waits in vain before that are no failure."""
    failure = OSError(errno.ETIMEDOUT, "Connection timed out", "/shared/run")
    assert isinstance(failure, TimeoutError)
    raised = iter([TimeoutError(), TimeoutError(), failure, failure])

    class Response:
        def result(self, timeout):
            raise next(raised)

    vote = Vote("a save", Identity(), 1.0)
    assert not saver._wait_until_written(Response(), vote) and vote.has_failed()
    assert next(raised, None) is None, "it is asked once more, and no further"
    vote.answer("")
    assert vote.conclude(lambda answers: "") == "Connection timed out: /shared/run"


@pytest.mark.slow
def test_saves_by_the_clock(tiny, prompt_saves):
    config = tiny("checkpoint.every_steps=0", "checkpoint.every_minutes=0.0001", "checkpoint.keep=20")
    assert train(config, devices=one_device()) == ExitCode.FINISHED
    assert len(events(config.run.dir, "checkpoint_commit")) >= 3
    automatic = tiny("checkpoint.every_steps=0", "checkpoint.every_minutes=auto", f"run.dir={config.run.dir}-auto")
    assert train(automatic, devices=one_device()) == ExitCode.FINISHED
    commits = events(automatic.run.dir, "checkpoint_commit")
    assert len(commits) == 2 and commits[0]["next_seconds"] >= 60, "one that tells the cost, and the last"


@pytest.mark.slow
def test_a_clock_that_is_set_back_changes_nothing(tiny, finished, monkeypatch, prompt_saves):
    """Each look at the time of day is an hour before the last."""
    hours, now = itertools.count(), time.time()  # not later than now, or Orbax's own time limits would have passed
    monkeypatch.setattr(time, "time", lambda: now - 3600 * next(hours))
    config = tiny("checkpoint.every_steps=0", "checkpoint.every_minutes=0.0001", "checkpoint.keep=20")
    assert train(config, devices=one_device()) == ExitCode.FINISHED
    saved = commit.valid_checkpoints(Path(config.run.dir) / "checkpoints")
    assert len(saved) >= 3 and saved[-1].step == 20, "the clock that says when is another one"
    times = [found.manifest.time for found in saved]
    assert times == sorted(times, reverse=True)
    assert contents(Path(config.run.dir)) == contents(finished)
    assert train(config, devices=one_device()) == ExitCode.FINISHED


def test_losses_over_other_parts_of_what_is_held_out_are_not_compared():
    """Not even with those of a version that evaluated on all."""

    def checkpoint(step: int, loss: float | None, **train: int | None) -> Any:
        return SimpleNamespace(manifest=SimpleNamespace(step=step, loss=loss, eval_tokens=train.get("eval_tokens")))

    all_of_it, small, newest = {}, {"eval_tokens": 100}, {"eval_tokens": None}
    made = [checkpoint(1, 1.0, **small), checkpoint(2, 3.0, **all_of_it), checkpoint(3, 4.0, **newest)]
    made.append(checkpoint(4, None, **small))
    assert retention.comparable_losses(made) == {1: None, 2: 3.0, 3: 4.0, 4: None}
    assert retention.comparable_losses(made[:1]) == {1: 1.0} and retention.comparable_losses([]) == {}


def test_the_best_and_every_nth_are_kept(tiny):
    config = tiny(
        "train.eval_every=2", "checkpoint.every_steps=2", "checkpoint.keep=2", "checkpoint.keep_every_steps=8",
        "checkpoint.keep_best=1",
    )  # fmt: skip
    train(config, devices=one_device())
    kept = {found.step: found.manifest.loss for found in commit.valid_checkpoints(Path(config.run.dir) / "checkpoints")}
    evals = {line["step"]: line["loss"] for line in metrics(config.run.dir, "eval")}
    assert set(kept) == {8, 16, 18, 20, min(evals, key=evals.__getitem__)}
    assert all(kept[step] == evals[step] for step in kept)


def test_a_branch_goes_on_and_remembers_where_from(tiny, finished, capsys):
    config = tiny(f"run.fork_from={finished}@10", "data.on_end=stop")
    assert train(config, devices=one_device()) == ExitCode.FINISHED
    shown = capsys.readouterr().out
    assert f"a branch of {finished}/checkpoints/10 after step 10" in shown
    assert "data.on_end: repeat → stop (changes the maths)" in shown
    own = commit.newest_valid(Path(config.run.dir) / "checkpoints").manifest
    parent = commit.newest_valid(finished / "checkpoints").manifest
    assert own.run != parent.run and own.step == 20
    assert [(line["run"], line["step"]) for line in own.lineage] == [(parent.run, 10)]
    assert [line["step"] for line in metrics(config.run.dir)] == list(range(11, 21))
    assert losses(config.run.dir) == losses(finished)[10:], "nothing that matters was changed"
    assert contents(Path(config.run.dir)) == contents(finished)


def test_a_run_begins_with_the_parameters_of_another(tiny, finished, capsys):
    config = tiny(f"run.init_from={finished}", "train.stop_after=2")
    assert train(config, devices=one_device()) == ExitCode.STOPPED
    assert "from the start, with the parameters of" in capsys.readouterr().out
    assert losses(config.run.dir)[0] < losses(finished)[-1] + 0.3 < losses(finished)[0], "of the first rows again"
    assert metrics(config.run.dir)[0]["learning_rate"] == metrics(finished)[0]["learning_rate"]
    assert commit.newest_valid(Path(config.run.dir) / "checkpoints").manifest.lineage == []
    with pytest.raises(ConfigError, match=r"run\.init_from: .* has no checkpoint of step 7; there are: 10, 15, 20"):
        train(tiny(f"run.init_from={finished}@7", f"run.dir={config.run.dir}2"), devices=one_device())
    with pytest.raises(ConfigError, match=r"--run: hf:there must be a run: make one with .* from-hf there RUN"):
        find("hf:there", "--run")
    with pytest.raises(ConfigError, match=r"run\.fork_from: .* is neither a run directory nor a checkpoint"):
        train(tiny("run.fork_from=nowhere", f"run.dir={config.run.dir}2"), devices=one_device())


@pytest.mark.parametrize("key", ["init_from", "fork_from"])
def test_a_run_of_another_model_or_tokenizer_is_refused(tiny, finished, key):
    """By its settings, not by its shapes, and before anything is compiled; unless the user lists what differs."""

    def begin(*overrides):
        config = tiny(f"run.{key}={finished}@10", *overrides)
        data = open_sources(config.data)
        origin = run_origin(f"{finished}@10", find(f"{finished}@10", key), f"run.{key}")
        tokenizer = tokenizer_of_data(data.tokenizer, data.vocab_size, data.folder)
        check_compatible(origin, fit_to_data(config, data).model, tokenizer, config.run.init_from_changes)

    begin("model.dropout=0.1")
    with pytest.raises(
        ConfigError, match=rf"run\.{key}: the model in .*set model\.rope_theta=10000\.0, or take .*theta\]"
    ):
        begin("model.rope_theta=500000")
    begin("model.rope_theta=500000", "run.init_from_changes=[rope_theta]")
    window = ("model.family=mistral", "model.sliding_window=16")
    with pytest.raises(ConfigError, match=r"set model\.family=llama.*changes=\[family, sliding_window\]"):
        begin(*window)
    with pytest.raises(ConfigError, match=r"init_from_changes: rope_theta is the same in"):
        begin("run.init_from_changes=[rope_theta]")
    with pytest.raises(ConfigError, match=r"init_from_changes: rope_thta is not .*; did you mean rope_theta\?"):
        begin("run.init_from_changes=[rope_thta]")
    with pytest.raises(ConfigError, match=r"init_from_changes: num_kv_heads decides the shapes of parameters"):
        begin("model.num_kv_heads=1", "run.init_from_changes=[num_kv_heads]")


def test_a_branch_onto_data_of_another_tokenizer_is_refused(tiny, finished, tmp_path):
    """Before anything is compiled; a family with other parameters is refused there, too."""
    text = tmp_path / "text"
    text.mkdir()
    write_words(text, files=40, words=150)
    prepare(
        [
            "--input",
            str(text),
            "--output",
            str(tmp_path / "other"),
            "--train-tokenizer",
            "300",
            "--eval-fraction",
            "0.2",
        ]
    )
    other = (f"data.path={tmp_path / 'other'}", "model.vocab_size=320")
    with pytest.raises(
        ConfigError, match=r"run\.fork_from: the data was not made with the tokenizer .* --tokenizer bytes"
    ):
        train(tiny(f"run.fork_from={finished}@10", *other), devices=one_device())
    with pytest.raises(
        ConfigError, match=r"the family qwen2 and .* differ in the parameter .*key_bias; set model.family=llama"
    ):
        train(
            tiny(f"run.init_from={finished}", "model.family=qwen2", "run.init_from_changes=[family]"),
            devices=one_device(),
        )


def test_another_runs_checkpoint_is_not_taken_for_ones_own(tiny, finished, capsys):
    config = tiny("train.stop_after=5")
    train(config, devices=one_device())
    root = Path(config.run.dir) / "checkpoints"
    shutil.copytree(finished / "checkpoints" / "15", root / "15")
    assert train(tiny(), devices=one_device()) == ExitCode.FINISHED
    shown = capsys.readouterr().out
    assert "checkpoint 15 is not used: it belongs to run" in shown and "resuming after step 5" in shown
    assert (root / "15.damaged").is_dir()


def test_a_newer_format_stops_the_run_and_is_left_alone(tiny, finished):
    config = tiny()
    shutil.copytree(finished, config.run.dir)
    path = Path(config.run.dir) / "checkpoints" / "20" / manifest.MANIFEST_FILE
    record = json.loads(path.read_text()) | {"format": 5}
    record.pop("seal")
    path.write_text(json.dumps(record | {"seal": json_digest(record)}))
    with pytest.raises(ConfigError, match="format version 5"):
        train(config, devices=one_device())
    assert path.exists()


def test_a_lost_run_file_is_made_again_from_the_checkpoints(tiny, finished):
    config = tiny()
    shutil.copytree(finished, config.run.dir)
    path = Path(config.run.dir) / "run.json"
    before = json.loads(path.read_text())
    path.unlink()
    train(config, devices=one_device())
    assert json.loads(path.read_text())["run"] == before["run"]


# -- the command


def test_the_command_lists_verifies_shows_and_compares(finished, capsys, tmp_path):
    run = str(finished)
    assert checkpoint_command(["list", run]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[:2] for line in listed.splitlines()[2:]] == [["10", "valid"], ["15", "valid"], ["20", "valid"]]
    assert checkpoint_command(["verify", run]) == 0
    assert capsys.readouterr().out.count(": valid, 41 arrays") == 3
    assert checkpoint_command(["show", f"{run}@15"]) == 0
    shown = capsys.readouterr().out
    assert "step 15 of run" in shown and "params/layers/attention/query" in shown
    assert checkpoint_command(["show", f"{run}@best"]) == 0
    assert "step 20 of run" in capsys.readouterr().out, "10 and 20 were evaluated, and 20 is the better"
    with pytest.raises(ConfigError, match="after @ give a step, or best"):
        find(f"{run}@last", "checkpoint")
    assert checkpoint_command(["diff", f"{run}@15", run]) == 0
    assert "2 arrays are the same bit for bit, 39 are not" in capsys.readouterr().out
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "15" / "commit_success.txt").unlink()
    assert checkpoint_command(["list", "--json", str(tmp_path / "run")]) == 0
    states = [one["state"] for one in json.loads(capsys.readouterr().out)["checkpoints"]]
    assert states == ["whole", "not whole", "whole"]
    assert checkpoint_command(["verify", str(tmp_path / "run")]) == 1
    assert "checkpoints/15: NOT VALID: it has no commit marker" in capsys.readouterr().out
    (tmp_path / "run" / "checkpoints" / "15" / manifest.MANIFEST_FILE).unlink()
    (tmp_path / "run" / "checkpoints" / "15.unfinished").write_text("being removed\n")
    assert checkpoint_command(["list", str(tmp_path / "run")]) == 0
    assert "\n15    being removed" in capsys.readouterr().out
    assert checkpoint_command(["verify", str(tmp_path / "run")]) == 0
    assert "checkpoints/15: not a checkpoint (being removed)" in capsys.readouterr().out
    assert checkpoint_command(["verify", str(tmp_path / "run" / "checkpoints" / "10")]) == 0
    assert checkpoint_command(["verify", f"{tmp_path / 'run'}@15"]) == 1
    for wrong in (["verify", str(tmp_path)], ["show", f"{run}@3"], ["list", str(tmp_path)]):
        with pytest.raises(ConfigError):
            checkpoint_command(wrong)


def test_the_command_exports_parameters(finished, capsys, tmp_path):
    from safetensors.numpy import load_file

    assert checkpoint_command(["export", str(finished), str(tmp_path / "out"), "--file-gb", "0.0002"]) == 0
    files = capsys.readouterr().out.split()
    assert len(files) > 1
    tensors = {name: array for file in files for name, array in load_file(file).items()}
    checkpoint = commit.newest_valid(finished / "checkpoints")
    files = Reader(checkpoint)
    names = [name for name in checkpoint.manifest.arrays if name.startswith("params/")]
    assert {name.removeprefix("params/").replace("/", ".") for name in names} == tensors.keys()
    for name in names:
        np.testing.assert_array_equal(tensors[name.removeprefix("params/").replace("/", ".")], files.read(name))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    with pytest.raises(ConfigError, match="exists already"):
        checkpoint_command(["export", str(finished), str(tmp_path / "out")])


def test_the_command_needs_no_jax(finished):
    code = (
        "import sys; from jaxmnt.checkpoint.__main__ import main; main(['verify', sys.argv[1]]); "
        "assert 'jax' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code, str(finished)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert command("jaxmnt.checkpoint", "--help").returncode == 0


# -- real file systems that refuse, where a private mount is permitted


def in_namespace(script: str, *options: str) -> subprocess.CompletedProcess:
    """Runs a shell script in a user namespace of its own, where nothing that it mounts is seen by others."""
    return subprocess.run(
        ["unshare", "--user", *options, "sh", "-c", script],
        capture_output=True, text=True, timeout=240, check=False,
        env=dict(os.environ, JAX_NUM_CPU_DEVICES="1", PYTHON=sys.executable),
    )  # fmt: skip


def may_mount() -> bool:
    options = ("--map-root-user", "--mount")
    return bool(shutil.which("unshare")) and in_namespace("mount -t tmpfs none /mnt", *options).returncode == 0


if may_mount():

    @pytest.mark.slow
    def test_a_disk_that_fills_up_while_saving(tiny_file, tmp_path):
        """A real one, of 4 MiB, without the look at free space beforehand; then with it; then with more room."""
        disk = tmp_path / "disk"
        disk.mkdir()
        blindly = (
            "import sys, jaxmnt.checkpoint.saver as saver, jaxmnt.train as train; "
            "from jaxmnt.commands import run_command; "
            "saver.shortage = lambda *_: None; run_command(train.main)"
        )
        arguments = f"--config {tiny_file} run.dir={disk}/run checkpoint.keep=2 checkpoint.max_failed_saves=2"
        result = in_namespace(
            f"mount -t tmpfs -o size=4m none {disk} || exit 99\n"
            f'"$PYTHON" -c "{blindly}" {arguments}; echo blind $?\n'
            f'"$PYTHON" -m jaxmnt.checkpoint verify {disk}/run; echo verify $?\n'
            f'"$PYTHON" -m jaxmnt.train {arguments}; echo looking $?\n'
            f"mount -o remount,size=40m {disk}\n"
            f'"$PYTHON" -m jaxmnt.train {arguments}; echo more room $?\n'
            f"cp -r {disk}/run {tmp_path}/kept\n"
            f'"$PYTHON" -m jaxmnt.train --config {tiny_file} run.dir={tmp_path}/undisturbed\n',
            "--map-root-user",
            "--mount",
        )
        assert "WARNING checkpoint 15 could not be saved: No space left on device" in result.stdout, result
        assert "2 saves in a row failed" in result.stderr and "No space left on device" in result.stderr
        assert "blind 1" in result.stdout and result.stdout.count(": valid, ") == 2 and "verify 0" in result.stdout
        assert "looking 1" in result.stdout and "MiB is free in" in result.stderr
        assert "more room 0" in result.stdout
        assert contents(tmp_path / "kept") == contents(tmp_path / "undisturbed")
        assert "Traceback" not in result.stderr

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["read-only", "permission denied"])
    def test_a_directory_that_may_not_be_written(tiny_file, tmp_path, kind):
        (tmp_path / "closed").mkdir()
        run = f'"$PYTHON" -m jaxmnt.train --config {tiny_file} run.dir={tmp_path}/closed/run'
        if kind == "read-only":
            mount = f"mount -t tmpfs -o ro none {tmp_path}/closed || exit 99\n"
            result, why = in_namespace(mount + run, "--map-root-user", "--mount"), "Read-only file system"
        else:
            (tmp_path / "closed").chmod(0o555)  # without --map-root-user its owner has no more rights than these
            result, why = in_namespace(run), "Permission denied"
        assert result.returncode == ExitCode.CONFIG, result
        assert "run.dir: " in result.stderr and why in result.stderr and "Traceback" not in result.stderr
