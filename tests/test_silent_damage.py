"""A device that computes wrongly is found: by comparing replicas, and by taking steps again."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import command, events, in_tiers

from jaxmnt.config.mesh import Mesh
from jaxmnt.errors import UserError
from jaxmnt.parallel.sharding import build_mesh
from jaxmnt.run import compiling
from jaxmnt.run.replicas import outvoted_devices
from jaxmnt.train import train


def flipped(array: jax.Array, device: jax.Device) -> jax.Array:
    """The same array, but for one bit of what one device holds of it."""
    pieces = []
    for shard in array.addressable_shards:
        values = np.array(shard.data)
        if shard.device == device:
            position = np.flatnonzero(values)[0]  # what became of 0 would be too small to last
            values.view(np.uint32).reshape(-1)[position] ^= 1 << 22
        pieces.append(jax.device_put(values, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, pieces)


def with_flip(monkeypatch, at_step: int, part: str, number: int) -> None:
    """Lets a bit flip in the device of this number just after a step."""
    original = compiling.compile_program

    def compile_program(*arguments, **named):
        program = original(*arguments, **named)
        taken = iter(range(1, 10_000))

        def step(state, batch):
            state, found = program.step(state, batch)
            if next(taken) == at_step:
                leaves, tree = jax.tree.flatten(state[part])
                largest = max(range(len(leaves)), key=lambda i: leaves[i].size)
                leaves[largest] = flipped(leaves[largest], jax.devices()[number])
                state = state | {part: jax.tree.unflatten(tree, leaves)}
            return state, found

        return dataclasses.replace(program, step=step)

    monkeypatch.setattr(compiling, "compile_program", compile_program)


@pytest.mark.parametrize("part", ["params", "optimizer"])
@pytest.mark.parametrize(
    ("mesh", "odd"),
    in_tiers(
        {1}, [(["mesh.data=4"], [2]), (["mesh.data=2", "mesh.fsdp=2"], [0, 2]), (["mesh.data=4", "mesh.model=2"], [2])]
    ),
    ids=str,
)
def test_a_flipped_bit_is_found_with_the_device_and_the_host(tiny, monkeypatch, mesh, odd, part):
    """Where most replicas agree, the one that does not is named; of two that differ, both."""
    with_flip(monkeypatch, 6, part, 2)
    config = tiny(*mesh, "train.compare_replicas_every=4", "checkpoint.every_steps=2")
    count = 8 if len(odd) == 1 and len(mesh) == 2 else 4
    with pytest.raises(
        UserError, match=r"after step 6 .* differ .* They were equal after step 4, and nothing has been saved since"
    ):
        train(config, devices=jax.devices()[:count])
    (told,) = events(config.run.dir, "replicas_differ")
    assert told["devices"] == odd and told["processes"] == [0] and told["equal_until"] == 4


def test_healthy_replicas_are_the_same(tiny):
    config = tiny("mesh.data=2", "mesh.fsdp=2", "train.compare_replicas_every=3", "train.steps=7")
    assert train(config, devices=jax.devices()[:4]) == 0
    assert not events(config.run.dir, "replicas_differ")


def test_who_is_odd():
    mesh = build_mesh(Mesh(data=4), jax.devices()[:4])
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    find = lambda *sums: [
        device.id for device in outvoted_devices(np.array([[value, 1] for value in sums]), whole, (8,))
    ]
    assert find(7, 7, 7, 7) == []
    assert find(7, 7, 3, 7) == [2]
    assert find(7, 3, 3, 7) == [0, 1, 2, 3], "no side has most"
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    sums = np.array([[value, 1] for value in (1, 2, 3, 4)])
    assert outvoted_devices(sums, split, (8,)) == [], "what is not replicated cannot differ"


@pytest.mark.slow
def test_steps_taken_again_are_the_same(tiny_file, tmp_path):
    run = tmp_path / "run"
    assert command("jaxmnt.train", "--config", str(tiny_file), "train.stop_after=15").returncode == 75
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*") if "native" not in path.parts)
    again = command("jaxmnt.train", "--config", str(tiny_file), "--replay", "10:15")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count(": the same") == 6 and "state of step 15: the same, bit for bit" in again.stdout
    assert before == sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*") if "native" not in path.parts)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    record = json.loads(lines[12])
    lines[12] = json.dumps(record | {"loss": record["loss"] + 1e-6})
    Path(run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    suspect = command("jaxmnt.train", "--config", str(tiny_file), "--replay", "10:14")
    assert suspect.returncode == 1 and suspect.stdout.count("DIFFERENT, loss was") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--replay", "10"], "'10' is not FROM:TO"),
        (["--replay", "15:10"], "is not FROM:TO"),
        (["--replay", "11:12"], "has no checkpoint of step 11; there are: 10, 15, 20"),
        (["--replay", "10:12", "optimizer.beta1=0.5"], "--replay: optimizer.beta1 has changed"),
    ],
)
def test_what_cannot_be_taken_again(tiny_file, whole_run, arguments, words):
    result = command("jaxmnt.train", "--config", str(tiny_file), f"run.dir={whole_run.run.dir}", *arguments)
    assert result.returncode == 2 and words in result.stderr
