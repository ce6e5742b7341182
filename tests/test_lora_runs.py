"""Runs with adapters: what their checkpoints contain, how they resume, and the proof of their base."""

import json
import random
import shutil

import jax
import numpy as np
import pytest
from conftest import TINY, check_legs, events, launch, metrics
from test_average import parameters

from jaxmnt import convert, load_run
from jaxmnt.checkpoint.__main__ import main as checkpoint_command
from jaxmnt.checkpoint.refs import find
from jaxmnt.config.load import apply_overrides, parse_config
from jaxmnt.config.mesh import Mesh
from jaxmnt.errors import ConfigError, ExitCode
from jaxmnt.generate import main as generate
from jaxmnt.lora.host import HostBase
from jaxmnt.models.registry import define_model
from jaxmnt.score import main as score
from jaxmnt.train import train
from jaxmnt.trained_model import AdapterOptions, restore_model

LORA = ("lora={rank: 4, alpha: 8.0}", "train.steps=6", "train.eval_every=3", "checkpoint.every_steps=3")


def config(prepared, run, *overrides):
    tree = {name: dict(section) for name, section in TINY.items()}
    tree["data"]["path"], tree["run"] = str(prepared), {"dir": str(run)}
    tree["model"]["vocab_size"] = 257  # the folder of Hugging Face has no rows that no token uses
    apply_overrides(tree, [*overrides])
    return parse_config(tree)


@pytest.fixture(scope="module")
def base(tmp_path_factory, prepared):
    """A run of five steps, and the folder of Hugging Face that it is exported to."""
    folder = tmp_path_factory.mktemp("base")
    train(config(prepared, folder / "run", "train.steps=5"), devices=jax.devices()[:1])
    assert convert.main(["to-hf", str(folder / "run"), str(folder / "hf")]) == 0
    return folder


@pytest.fixture(scope="module")
def adapted(base, prepared):
    """A run with adapters beside the exported folder, on two devices."""
    run = base / "adapted"
    train(config(prepared, run, f"run.init_from=hf:{base}/hf", "mesh.fsdp=2", *LORA), devices=jax.devices()[:2])
    return run


def array_names(manifest, part):
    return {name for name in manifest.arrays if name.startswith(f"{part}/")}


def test_checkpoints_hold_what_trains(adapted, base):
    manifest = find(str(adapted), "run").manifest
    adapters = array_names(manifest, "params")
    assert len(adapters) == 2 * 7 and all(name.endswith(("_lora_a", "_lora_b")) for name in adapters)
    assert len(array_names(manifest, "optimizer")) == 2 * len(adapters) + 2
    bytes_of = lambda names: sum(manifest.arrays[name].bytes for name in names)
    assert manifest.bytes <= 3 * bytes_of(adapters) + 64
    assert manifest.base.source == f"hf:{base}/hf"
    assert manifest.base.arrays.keys() == array_names(find(str(base / "run"), "run").manifest, "params")
    first, *_, last = (line["loss"] for line in metrics(adapted, "eval"))
    assert last < first


@pytest.mark.slow
def test_it_resumes_on_another_mesh_and_as_a_branch(adapted, base, prepared, tmp_path):
    """From a run as its base, whose parameters are the same: the base is proved by its content, wherever it is."""
    run = tmp_path / "run"
    shutil.copytree(adapted, run)
    shutil.rmtree(run / "checkpoints" / "6")
    moved = f"run.init_from={base}/run"
    assert train(config(prepared, run, moved, "mesh.model=2", *LORA), devices=jax.devices()[:2]) == ExitCode.FINISHED
    expected = parameters(adapted)
    for name, array in parameters(run).items():
        np.testing.assert_allclose(array, expected[name], atol=1e-5)
    assert find(str(run), "run").manifest.base.source == str(base / "run" / "checkpoints" / "5")
    branch = tmp_path / "branch"
    train(config(prepared, branch, f"run.fork_from={adapted}@3", *LORA), devices=jax.devices()[:1])
    assert find(str(branch), "run").manifest.base == find(str(adapted), "run").manifest.base


@pytest.mark.slow
def test_a_branch_whose_base_has_moved_goes_on_twice(adapted, base, prepared, tmp_path):
    shutil.copytree(base / "hf", tmp_path / "hf")
    branch = (f"run.fork_from={adapted}@3", *LORA, "checkpoint.every_steps=1")
    moved = f"run.init_from=hf:{tmp_path}/hf"
    run = tmp_path / "run"
    for steps, settings in ((4, branch), (5, (*branch, moved)), (6, branch)):
        train(config(prepared, run, *settings, f"train.stop_after={steps}"), devices=jax.devices()[:1])
        assert find(str(run), "run").step == steps
    assert find(str(run), "run").manifest.base.source == f"hf:{tmp_path}/hf"
    fewer = config(prepared, tmp_path / "fewer", *branch, "lora.targets=[layers.attention.query]")
    with pytest.raises(
        ConfigError, match=r"run\.fork_from: .* has other lora\.targets; set \[layers\.attention\.key, "
    ):
        train(fewer, devices=jax.devices()[:1])
    without = config(prepared, tmp_path / "without", f"run.fork_from={adapted}@3", *LORA[1:])
    with pytest.raises(ConfigError, match=r"run\.fork_from: .* has adapters; give the branch the section lora"):
        train(without, devices=jax.devices()[:1])


@pytest.mark.exhaustive
def test_it_moves_over_meshes_and_numbers_of_processes(tiny_file, base, tmp_path):
    """Each start, of two and of four processes, reads the base again, and proves it. A base that is not there ends all
    processes with a message."""
    settings = (f"run.init_from=hf:{base}/hf", *LORA[:1], "model.vocab_size=257")
    legs = [
        (2, "mesh.pipeline=2 mesh.fsdp=2 mesh.model=2 train.microbatch_size=1", 9),
        (4, "mesh.context=2 mesh.fsdp=2 mesh.data=2", None),
    ]
    run = check_legs(tiny_file, tmp_path, settings, legs)
    bases = events(run, "base")
    assert len(bases) == 2 and all(line["source"] == f"hf:{base}/hf" for line in bases)
    gone = (*settings[1:], f"run.init_from=hf:{tmp_path}/gone", f"run.dir={run}", "train.steps=30", "--accept-changes")
    result = launch(tiny_file, *gone, processes=2, devices=4)
    assert result.returncode == ExitCode.CONFIG and "is not there; name the place" in result.stderr


@pytest.mark.slow
def test_it_resumes_bit_for_bit(adapted, base, prepared, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(adapted, run)
    shutil.rmtree(run / "checkpoints" / "6")
    train(config(prepared, run, "mesh.fsdp=2", *LORA), devices=jax.devices()[:2])
    assert find(str(run), "run").manifest.arrays == find(str(adapted), "run").manifest.arrays


def test_a_flipped_bit_in_the_base_is_named(adapted, base, tmp_path):
    """In any of twenty places; a base of other numbers is refused at a start as well."""
    checkpoint = find(str(adapted), "run")
    shutil.copytree(base / "hf", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    content = path.read_bytes()
    header = int.from_bytes(content[:8], "little")
    tensors = json.loads(content[8 : 8 + header])
    rng = random.Random(0)
    model = define_model(checkpoint.config.model)
    for _ in range(20):
        place = rng.randrange(8 + header, len(content))
        damaged = bytearray(content)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        [name] = [
            name for name, entry in tensors.items()
            if name != "__metadata__" and place - 8 - header - entry["data_offsets"][0] >= 0
            and place - 8 - header < entry["data_offsets"][1]
        ]  # fmt: skip
        part = {"q_proj": "query", "o_proj": "output", "embed_tokens": "embedding.table"}.get(name.split(".")[-2], "")
        with pytest.raises(ConfigError, match=rf"--base: .*{part}.* is not what this run was trained on") as error:
            restore_model(
                checkpoint, checkpoint.config, 257, Mesh(data=1), jax.devices()[:1],
                AdapterOptions(f"hf:{tmp_path}/hf"),
            )  # fmt: skip
        [array] = [
            array for array, entry in checkpoint.manifest.base.arrays.items()
            if HostBase(f"hf:{tmp_path}/hf", model, None, "test").describe(array).content != entry.content
        ]  # fmt: skip
        assert array.removeprefix("params/").replace("/", ".") in str(error.value)


@pytest.mark.slow
def test_a_start_with_another_base_is_refused(adapted, base, prepared, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(adapted, run)
    shutil.rmtree(run / "checkpoints" / "6")
    other = tmp_path / "other"
    train(config(prepared, other, "train.steps=5", "seed=1"), devices=jax.devices()[:1])
    with pytest.raises(ConfigError, match=r"run\.init_from: .* is not what this run was trained on \(its digest"):
        train(config(prepared, run, f"run.init_from={other}", *LORA), devices=jax.devices()[:1])
    with pytest.raises(ConfigError, match=r"run\.init_from: the base hf:.*gone is not there; name the place to which"):
        train(config(prepared, run, f"run.init_from=hf:{tmp_path}/gone", *LORA), devices=jax.devices()[:1])


@pytest.mark.slow
def test_models_are_loaded_with_their_base(adapted, base, tmp_path, capsys):
    """With adapters, without them, from a base that has moved, and merged."""
    whole, plain = load_run(adapted), load_run(base / "run")
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12)
    without = load_run(adapted, adapters=False)
    np.testing.assert_array_equal(without(tokens), plain(tokens))
    assert np.abs(whole(tokens) - plain(tokens)).max() > 1e-3
    shutil.copytree(base / "hf", tmp_path / "hf")
    np.testing.assert_array_equal(load_run(adapted, base=f"hf:{tmp_path}/hf")(tokens), whole(tokens))
    assert convert.main(["to-hf", str(adapted), str(tmp_path / "merged")]) == 0
    assert "rounding" not in capsys.readouterr().out
    assert convert.main(["to-hf", str(adapted), str(tmp_path / "rounded"), "--dtype", "bfloat16"]) == 0
    assert "% of the weights that the adapters change are as before" in capsys.readouterr().out
    assert convert.main(["from-hf", str(tmp_path / "merged"), str(tmp_path / "merged-run")]) == 0
    np.testing.assert_allclose(load_run(tmp_path / "merged-run")(tokens), whole(tokens), atol=1e-5)

    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "abcdef"}\n')
    outputs = []
    for options in ([], ["--without-adapters"], ["--base", str(base / "run")]):
        assert score(["--run", str(adapted), "--input", str(lines), *options, "mesh.fsdp=8"]) == 0
        outputs.append(json.loads(capsys.readouterr().out.splitlines()[-1])["log_likelihood"])
    assert outputs[0] == outputs[2] != outputs[1]
    assert generate(["--run", str(adapted), "--prompt", "a", "--tokens", "4", "mesh.fsdp=8"]) == 0
    with pytest.raises(ConfigError, match=r"--without-adapters: .* has no adapters; leave it out"):
        score(["--run", str(base / "run"), "--input", str(lines), "--without-adapters"])


@pytest.mark.exhaustive
def test_adapters_go_on_in_another_run(adapted, base, prepared, tmp_path):
    """`lora.init_from` of a run and of PEFT's files; averages of adapters; replays."""
    assert convert.main(["to-peft", str(adapted), str(tmp_path / "peft")]) == 0
    starts = []
    for number, source in enumerate((str(adapted), f"peft:{tmp_path}/peft")):
        run = tmp_path / str(number)
        settings = (f"run.init_from={base}/run", *LORA, f"lora.init_from={source}", "optimizer.average={decay: 0.5}")
        train(config(prepared, run, *settings), devices=jax.devices()[:1])
        starts.append(metrics(run, "train")[0]["loss"])
    assert starts[0] == starts[1] < metrics(adapted, "train")[0]["loss"]
    assert find(f"{tmp_path}/0", "run").manifest.arrays == find(f"{tmp_path}/1", "run").manifest.arrays
    assert checkpoint_command(["average", f"{tmp_path}/0", str(tmp_path / "average")]) == 0
    averaged, last = load_run(tmp_path / "average"), load_run(tmp_path / "0")
    tokens = np.arange(12, dtype=np.int32)[None]
    assert 0 < np.abs(averaged(tokens) - last(tokens)).max() < 0.5
    rules = ("optimizer.rules=[{pattern: '*_lora_b', learning_rate_factor: 16}]",)
    plus = tmp_path / "plus"
    train(config(prepared, plus, f"run.init_from={base}/run", *LORA, *rules), devices=jax.devices()[:1])
    np.testing.assert_array_equal(load_run(plus, adapters=False)(tokens), load_run(base / "run")(tokens))
    with pytest.raises(ConfigError, match=r"lora\.init_from: .* began with .*; leave it out to continue"):
        train(config(prepared, plus, *LORA, "train.steps=9", f"lora.init_from={adapted}"), devices=jax.devices()[:1])
    train(config(prepared, tmp_path / "b", "train.steps=5", "seed=1"), devices=jax.devices()[:1])
    beside = config(prepared, tmp_path / "run", f"run.init_from={tmp_path}/b", *LORA, f"lora.init_from={adapted}")
    with pytest.raises(ConfigError, match=r"is not what the run .*adapted was trained on"):
        train(beside, devices=jax.devices()[:1])
    other = config(prepared, tmp_path / "run", f"run.init_from={base}/run", *LORA, "lora.alpha=16.0",
                   f"lora.init_from={adapted}")  # fmt: skip
    with pytest.raises(ConfigError, match=r"lora\.init_from: .* has lora\.alpha=8\.0, not 16\.0; set"):
        train(other, devices=jax.devices()[:1])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["lora={rank: 4}"], r"lora: without run\.init_from the adapters would train beside random weights"),
        (["run.init_from=BASE/adapted"], r"run\.init_from: .* has adapters only; merge them with their base"),
        (
            ["run.init_from=BASE/run", "lora={targets: [q_projj]}"],
            r"lora\.targets: 'q_projj' matches no parameter; set",
        ),
        (["run.init_from=BASE/run", "lora={targets: [embedding.*]}"], r"embedding\.table is outside of the layers, so"),
        (["run.init_from=BASE/run", "lora={rank: 64}"], r"lora\.rank: 64 must be below the sides of layers\.attention"),
        (["run.init_from=BASE/run", "lora={also_train: [layers.mlp.up]}"], r"lora\.also_train: layers\.mlp\.up has an"),
        (["run.init_from=BASE/run", "lora={also_train: [hed.*]}"], r"lora\.also_train: 'hed\.\*' matches no parameter"),
        (
            ["run.init_from=BASE/run", "lora={rank: 4, init_from: BASE/run}"],
            r"lora\.init_from: .* has no adapters; name",
        ),
    ],
    ids=str,
)
def test_mistakes_are_named(settings, words, base, adapted, prepared, tmp_path):
    overrides = [setting.replace("BASE", str(base)) for setting in settings]
    with pytest.raises(ConfigError, match=words):
        train(config(prepared, tmp_path / "run", *overrides), devices=jax.devices()[:1])


def test_a_run_keeps_its_adapters(adapted, prepared, base, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(adapted, run)
    init = f"run.init_from=hf:{base}/hf"
    changes = (*LORA[1:], "train.steps=8")
    for setting, words in (
        ("lora={rank: 8, alpha: 8.0}", r"lora\.rank \(4 → 8\)"),
        ("train.steps=8", r"cannot be continued with a changed lora"),
    ):
        with pytest.raises(ConfigError, match=words):
            train(config(prepared, run, init, *changes, setting), devices=jax.devices()[:1])
    with pytest.raises(ConfigError, match=r"optimizer\.frozen: with lora, all parameters but the adapters are frozen"):
        config(prepared, run, "lora={rank: 4}", "optimizer.frozen=[head.*]")
