"""Feeding real runs: mixtures, packing, staging, damage, and other numbers of processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import TINY, command, in_tiers, launch, losses, metrics, write_words

import jaxmnt
from jaxmnt.checkpoint.refs import find
from jaxmnt.config.load import apply_overrides, parse_config
from jaxmnt.data.__main__ import main as data_command
from jaxmnt.data.batches import TrainingData
from jaxmnt.data.inspection import mixture_table
from jaxmnt.data.preparation.inputs import Selection, Settings
from jaxmnt.data.preparation.run import build
from jaxmnt.data.rows import batch_digest, row_digests
from jaxmnt.data.sources import open_sources, stage
from jaxmnt.data.store import open_prepared
from jaxmnt.errors import ConfigError, ExitCode
from jaxmnt.run.branch import branch_point, branch_points
from jaxmnt.run.evaluate import Evaluator
from jaxmnt.run.replay import replay
from jaxmnt.run.values import run_process
from jaxmnt.train import train
from jaxmnt.training.build import inference_spec
from jaxmnt.training.compile import compile_program
from jaxmnt.training.embed_head import EmbedAndHead
from jaxmnt.training.stage import Layers, Pass, always_run, microbatch_rows
from jaxmnt.training.state import abstract_state
from jaxmnt.training.weights import Weights

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """Prepared data of another text with the same tokenizer."""
    folder = tmp_path_factory.mktemp("other")
    write_words(folder, files=20, words=120, seed=5)
    output = tmp_path_factory.mktemp("data") / "other"
    build(Selection([folder]), output, Settings(eval_fraction=0.15, shard_tokens=3000), lambda *progress: None)
    return output


@pytest.fixture(scope="module")
def mixture(prepared, other):
    """Makes a config that mixes two sources into packed rows; arguments are overrides."""

    def make(folder: Path, *overrides: str) -> Path:
        tree = {name: dict(section) for name, section in TINY.items()}
        tree["data"] |= {
            "rows": "packed",
            "sources": {"words": {"path": str(prepared), "weight": 3.0}, "other": {"path": str(other)}},
            "weight_changes": [{"from_step": 7, "weights": {"other": 3.0}}],
        }
        tree["train"] |= {"steps": 10, "eval_every": 5}
        tree["run"] = {"dir": str(folder / "run")}
        apply_overrides(tree, list(overrides))
        path = folder / "mixture.yaml"
        path.write_text(json.dumps(tree))
        return path

    return make


def parse(path: Path):
    return parse_config(json.loads(path.read_text()))


@pytest.fixture(scope="module")
def reference(mixture, tmp_path_factory) -> Path:
    """Ten steps in this process that were never stopped."""
    config = mixture(tmp_path_factory.mktemp("reference"))
    assert train(parse(config), devices=jax.devices()[:1]) == ExitCode.FINISHED
    return config.parent / "run"


def digests(run: Path) -> list[str]:
    return [line["batch_digest"] for line in metrics(run)]


# -- the same batches on any number of processes


def assert_same_batches(run, reference):
    """The run has the batches of the reference, and so its losses and the held-out losses of each source."""
    assert digests(run) == digests(reference)
    np.testing.assert_allclose(losses(run), losses(reference), rtol=1e-5)
    ours, theirs = (metrics(each, "eval")[-1]["sources"] for each in (run, reference))
    for name in ("words", "other"):
        assert ours[name]["tokens"] == theirs[name]["tokens"]
        assert ours[name]["loss"] == pytest.approx(theirs[name]["loss"], rel=1e-5)


@pytest.mark.parametrize("processes", in_tiers({1}, [1, 2]))
def test_processes_read_the_same_batches(mixture, tmp_path, reference, processes):
    config = mixture(tmp_path)
    result = launch(config, f"data.read_threads={processes - 1}", processes=processes, devices=4 // processes)
    assert result.returncode == 0, result.stderr
    assert_same_batches(tmp_path / "run", reference)


@pytest.mark.exhaustive
def test_four_processes_stop_and_two_go_on(mixture, tmp_path, reference):
    config = mixture(tmp_path)
    stopped = launch(config, "train.stop_after=5", "data.read_threads=3", processes=4, devices=1)
    assert stopped.returncode == 75, stopped.stderr
    resumed = launch(config, processes=2, devices=1)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_batches(tmp_path / "run", reference)


@pytest.mark.slow
def test_the_digest_is_that_of_the_rows_that_inspection_shows(mixture, tmp_path, reference):
    config = parse(mixture(tmp_path))
    data = TrainingData(config, open_sources(config.data))
    for step in (0, 6, 9):
        tokens = data.batch(step, range(config.data.global_batch_size))["tokens"]
        assert batch_digest(row_digests(tokens)) == digests(reference)[step]
    shown = command("jaxmnt.data", "--config", str(tmp_path / "mixture.yaml"), "--batch", "7", "--verify")
    assert shown.returncode == 0, shown.stderr
    assert f"batch of step 7: 16 rows, batch_digest {digests(reference)[6]}" in shown.stdout
    assert shown.stdout.count("\nrow ") == 16 and "text0/" in shown.stdout and "epochs" not in shown.stdout
    assert "all match the manifest" in shown.stderr
    assert any("75.0 % → 50.0 %" in line for line in mixture_table(config, data))


def test_epochs_are_reported(reference, mixture, tmp_path):
    config = parse(mixture(tmp_path))
    data = TrainingData(config, open_sources(config.data))
    last = metrics(reference)[-1]["epochs"]
    assert last == {name: data.order.used(10)[name] / data.readers[name].rows for name in ("other", "words")}
    assert sum(data.order.used(10).values()) == 10 * 16


# -- other sources on resume


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sources: sources.pop("other"), "other was removed"),
        (lambda sources: sources.update(third=dict(sources["other"])), "third was added"),
        (lambda sources: sources["other"].update(path=sources["words"]["path"]), "other has other content"),
    ],
)
def test_other_sources_are_named(mixture, tmp_path, reference, change, message):
    path = mixture(tmp_path, "train.steps=11", "data.weight_changes=[]")
    shutil.copytree(reference, tmp_path / "run")
    tree = json.loads(path.read_text())
    change(tree["data"]["sources"])
    with pytest.raises(ConfigError, match=message):
        train(parse_config(tree), devices=jax.devices()[:1])


def test_other_weights_go_through_and_are_named(mixture, tmp_path, reference, capsys):
    path = mixture(tmp_path, "train.steps=11", "data.sources.other.weight=2.0")
    shutil.copytree(reference, tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"these changes alter its maths: data\.sources\.other\.weight \(1\.0 → 2\.0\)"
    ):
        train(parse(path), devices=jax.devices()[:1])
    assert train(parse(path), devices=jax.devices()[:1], accept_changes=True) == ExitCode.FINISHED
    assert "changed data.sources.other.weight: 1.0 → 2.0 (changes the maths)" in capsys.readouterr().out


def test_different_tokenizers_do_not_mix(mixture, tmp_path, prepared):
    folder = tmp_path / "text"
    folder.mkdir()
    write_words(folder, files=3, words=100)
    settings = Settings(train_tokenizer=300, eval_fraction=0.0)
    build(Selection([folder]), tmp_path / "bpe", settings, lambda *progress: None)
    config = parse(mixture(tmp_path, f"data.sources.other.path={tmp_path / 'bpe'}"))
    with pytest.raises(ConfigError, match="other and words were prepared with different tokenizers"):
        train(config, devices=jax.devices()[:1])


# -- packing


def test_a_packed_document_sees_itself_alone(mixture, tmp_path):
    """Logits of each document between others equal those of the document alone, at the start of a row."""
    config = parse(mixture(tmp_path, "data.sequence_length=64"))
    rng = np.random.default_rng(0)
    pieces = [rng.integers(0, 256, size).astype(np.int32) for size in (20, 30, 9)]

    def batch(documents):
        fields = {name: np.zeros((1, 64), np.int32) for name in ("tokens", "segments", "positions")}
        place = 0
        for number, tokens in enumerate(documents, 1):
            here = slice(place, place + len(tokens))
            fields["tokens"][0, here], fields["segments"][0, here] = tokens, number
            fields["positions"][0, here] = np.arange(len(tokens))
            place += len(tokens)
        return fields

    tree = {"model": TINY["model"] | {"vocab_size": 257}, "data": {"rows": "packed"}}
    spec = inference_spec(parse_config(tree), 257)
    assert config.data.keeps_documents_apart
    params, _ = spec.definition.init(jax.random.key(0))
    shapes = lambda tree: jax.tree.map(lambda leaf: leaf.shape, tree)
    assert shapes(params) == shapes(abstract_state(spec)["params"])

    @jax.jit
    def logits(fields):
        weights, (group,) = Weights(spec, params), spec.definition.groups
        embed_head, order = EmbedAndHead(spec, weights), jax.numpy.arange(group.units)
        layers = Layers(spec, group, weights, {}, order, group.units)
        whole = Pass(0, 0, microbatch_rows(spec, fields, None), always_run)
        return embed_head.logits(layers.evaluate(embed_head.embed(fields), whole))[0]

    together, place = logits(batch(pieces)), 0
    for tokens in pieces:
        alone = logits(batch([tokens]))[: len(tokens)]
        np.testing.assert_allclose(together[place : place + len(tokens)], alone, rtol=1e-5, atol=1e-5)
        place += len(tokens)


@pytest.mark.slow
def test_evaluation_of_packed_rows_counts_every_token_once(mixture, tmp_path, prepared, other):
    """The same sums for batches of 16 rows and of 6, over 1 device and over 2."""
    results = []
    for devices, overrides in ((1, ()), (2, ("train.microbatch_size=4", "mesh.data=2"))):
        config = parse(mixture(tmp_path, *overrides, "model.vocab_size=320"))
        program = compile_program(config, 257, jax.devices()[:devices])
        sources = open_sources(config.data)
        results.append(Evaluator(program, sources)(program.init()))
    for name, path in (("words", prepared), ("other", other)):
        one, two = (result[name] for result in results)
        assert one.tokens == two.tokens == open_prepared(path).tokens("eval")
        assert one.loss == pytest.approx(two.loss, rel=1e-6)


# -- staging, checking, synthetic data


def test_staged_data_is_the_same_and_copied_once(prepared, tmp_path):
    data = open_prepared(prepared)
    copies = []
    target = stage(data, tmp_path / "disk", copies.append)
    assert open_prepared(target).digest == data.digest and len(copies) == len(list(data.files()))
    assert stage(data, tmp_path / "disk", copies.append) == target and len(copies) == len(list(data.files()))
    (target / "manifest.json").unlink()  # as if it had been killed half-way
    assert stage(data, tmp_path / "disk", copies.append) == target and len(copies) == 2 * len(list(data.files()))


def test_a_run_reads_its_staged_copy(tiny, prepared, tmp_path):
    shutil.copytree(prepared, tmp_path / "data")
    settings = (f"data.path={tmp_path / 'data'}", f"data.stage_dir={tmp_path / 'disk'}", "train.steps=5")
    assert train(tiny(*settings, "optimizer.warmup_steps=1"), devices=jax.devices()[:1]) == ExitCode.FINISHED
    copies = sorted((tmp_path / "disk").glob("*/manifest.json"))
    assert len(copies) == 1


@pytest.mark.parametrize("how", ["data.verify=true", "data.stage_dir={}"])
def test_a_flipped_byte_is_found_at_the_start(tiny, prepared, tmp_path, how):
    shutil.copytree(prepared, tmp_path / "data")
    shard = sorted((tmp_path / "data" / "eval").glob("tokens-*"))[-1]
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 4
    shard.write_bytes(raw)
    with pytest.raises(ConfigError, match=rf"{shard.name} is damaged: its SHA-256"):
        train(tiny(f"data.path={tmp_path / 'data'}", how.format(tmp_path / "disk")), devices=jax.devices()[:1])
    assert not list((tmp_path / "disk").glob("*/manifest.json"))


def test_a_staged_copy_is_what_is_checked(tiny, prepared, tmp_path):
    """A shard that is gone is copied again; one that has rotted is found where the run reads it."""
    target = stage(open_prepared(prepared), tmp_path / "disk")
    shard = sorted((target / "train").glob("tokens-*"))[0]
    shard.unlink()
    assert stage(open_prepared(prepared), tmp_path / "disk") == target and shard.exists()
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 4
    shard.write_bytes(raw)
    config = tiny(f"data.stage_dir={tmp_path / 'disk'}", "data.verify=true")
    with pytest.raises(ConfigError, match=rf"disk.*{shard.name} is damaged"):
        train(config, devices=jax.devices()[:1])


def test_a_stage_dir_that_cannot_be_written_is_named(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match=r"data\.stage_dir: .*file cannot take the data"):
        train(tiny(f"data.stage_dir={tmp_path / 'file'}"), devices=jax.devices()[:1])


@pytest.mark.parametrize(
    ("damage", "process"),
    in_tiers({0, 2, 4}, [("missing", 1), ("missing", 0), ("boundaries", 1), ("flipped", 1), ("flipped", 0)]),
)
def test_damage_on_one_host_is_named_to_all(tiny_file, prepared, tmp_path, damage, process):
    """Each process stands in a folder of its own, where `data` is that host's copy; one is not whole."""
    for host in ("a", "b"):
        shutil.copytree(prepared, tmp_path / host / "data")
    kind = "documents" if damage == "boundaries" else "tokens"
    shard = sorted((tmp_path / "ab"[process] / "data" / "train").glob(f"{kind}-*"))[2]
    if damage == "flipped":
        raw = bytearray(shard.read_bytes())
        raw[-1] ^= 1
        shard.write_bytes(raw)
    else:
        shard.unlink()
    coordinator, started = f"127.0.0.1:{free_port()}", []
    for number, host in enumerate("ab"):
        environment = dict(
            os.environ, JAX_NUM_CPU_DEVICES="1", JAX_COORDINATOR_ADDRESS=coordinator,
            JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(number),
        )  # fmt: skip
        settings = ["data.path=data", "data.rows=packed", "cluster.start_timeout_seconds=30"]
        settings += ["data.verify=true"] if damage == "flipped" else []
        arguments = [sys.executable, "-m", "jaxmnt.train", "--config", str(tiny_file), *settings]
        started.append(
            subprocess.Popen(
                arguments,
                cwd=tmp_path / host,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    results = [(process.communicate(timeout=50)[1], process.returncode) for process in started]
    what = "is damaged: its SHA-256" if damage == "flipped" else "cannot be read (No such file"
    expected = 3 if process == 1 and damage != "flipped" else 2  # what process 0 can read is that host's matter
    for err, code in results:
        assert code == expected and f"data/train/{shard.name} {what}" in err, err
    assert all(f"process {process}" in err for err, _ in results)


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_synthetic_data_needs_no_files(tiny):
    config = tiny("data.path=null", "data.synthetic=500", "train.steps=3", "optimizer.warmup_steps=1")
    assert train(config, devices=jax.devices()[:1]) == ExitCode.FINISHED
    assert losses(config.run.dir)[0] == pytest.approx(np.log(500), abs=0.1)
    shown = command("jaxmnt.data", "--config", os.devnull, "data.synthetic=500", "data.rows=packed")
    assert shown.returncode == 0 and "synthetic document " in shown.stdout, shown.stderr


# -- branches


@pytest.fixture
def halved(tiny, whole_run):
    """Makes configs of a branch of the whole run after step 10, with half the batch; arguments are overrides."""
    return lambda *overrides: tiny("data.global_batch_size=8", f"run.fork_from={whole_run.run.dir}@10", *overrides)


@pytest.mark.slow
def test_a_branch_with_another_batch_size_trains_on_the_next_rows_of_its_origin(tiny, halved, capsys):
    """Also after a restart; and its steps can be taken again."""
    for stop in (12, 13):
        config = halved(f"train.stop_after={stop}", "checkpoint.every_steps=0")
        assert train(config, devices=jax.devices()[:1]) == ExitCode.STOPPED
        words = "continues at row 160, where its origin stopped; a step takes 8 rows instead of 16"
        assert (words in capsys.readouterr().out) == (stop == 12), "when it begins"
    origin = tiny()
    data, lines = TrainingData(origin, open_sources(origin.data)), metrics(config.run.dir)
    for number, line in enumerate(lines):
        step, first = divmod(160 + 8 * number, 16)
        rows = data.batch(step, range(first, first + 8))["tokens"]
        assert line["batch_digest"] == batch_digest(row_digests(rows))
        assert line["epochs"] == {"data": (168 + 8 * number) / data.readers["data"].rows}
    assert [line["step"] for line in lines] == [11, 12, 13]
    with run_process(config, devices=jax.devices()[:1]) as run:
        assert replay(run, 12, 13) == ExitCode.FINISHED
    digests = [line["batch_digest"] for line in lines]
    assert digests == [digest_of(jaxmnt.load_run(config.run.dir).batch(step)) for step in (11, 12, 13)]


def digest_of(rows) -> str:
    return batch_digest(row_digests(rows["tokens"]))


def test_what_people_are_shown_of_a_branch_is_what_it_will_train_on(tiny, halved, capsys, tmp_path):
    """Before it has begun; a step before it is of its origin."""
    config, origin = halved(), tiny()
    rows = TrainingData(origin, open_sources(origin.data)).batch(10, range(8))
    path = tmp_path / "branch.yaml"
    path.write_text(json.dumps(config.model_dump()))
    assert data_command(["--config", str(path), "--batch", "11", "--rows", "1"]) == ExitCode.FINISHED
    assert f"batch of step 11: 8 rows, batch_digest {digest_of(rows)}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"--batch: 10 is out of range; give 11 or more, .* this one branches off"):
        data_command(["--config", str(path), "--batch", "10"])
    items = jaxmnt.load_rows(config)
    assert len(items) == 8 * (config.train.steps - 10)
    np.testing.assert_array_equal(items[3]["tokens"], rows["tokens"][3])


def test_a_branch_with_longer_rows_goes_on_after_as_many_tokens(tiny, whole_run):
    point = branch_point(find(f"{whole_run.run.dir}@10", "it"), tiny("data.sequence_length=64"))
    assert (point.step, point.row, point.used) == (10, 80, {"data": 80})
    assert branch_points([{"run": "r", "step": 10, "path": "p"}]) == [], "of an earlier version, which counted steps"


def test_a_branch_that_its_data_does_not_last_for_is_refused(tiny, halved):
    """By the rows that are left where it goes on."""
    data = TrainingData(tiny(), open_sources(tiny().data))
    last = (data.readers["data"].rows - 160) // 8 + 10
    with pytest.raises(ConfigError, match=rf"train\.steps: data ends after step {last} and must not repeat"):
        train(halved("data.on_end=stop", f"train.steps={last + 1}"), devices=jax.devices()[:1])
