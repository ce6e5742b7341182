"""The public Python interface, and the notebook that shows it."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import metrics

import jaxmnt
from jaxmnt.data.batches import TrainingData
from jaxmnt.data.sources import open_sources
from jaxmnt.errors import ConfigError

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "api.ipynb"


@pytest.fixture(scope="module")
def run(whole_run):
    return jaxmnt.load_run(whole_run.run.dir, 10)


def test_logits_are_those_of_training(run, whole_run):
    """The mean cross-entropy over a step's batch is the loss that the run has recorded for it."""
    batch = run.batch(11)
    logits = jax.nn.log_softmax(run(batch["tokens"]))
    picked = np.take_along_axis(np.asarray(logits), batch["targets"][..., None], axis=-1)[..., 0]
    loss = -(picked * batch["weights"]).sum() / batch["weights"].sum()
    recorded = {line["step"]: line["loss"] for line in metrics(whole_run.run.dir)}
    assert loss == pytest.approx(recorded[11], rel=1e-5)
    assert run.step == 10 and run.config.train.steps == 20


@pytest.mark.parametrize("mesh", [{"fsdp": 2, "model": 2}, {"data": 2, "model": 4}], ids=str)
def test_a_model_on_a_mesh_is_the_same(run, whole_run, mesh):
    tokens = run.batch(1)["tokens"]
    there = jaxmnt.load_run(whole_run.run.dir, 10, mesh=mesh)
    np.testing.assert_allclose(there(tokens), run(tokens), atol=2e-5)
    for one, other in zip(jax.tree.leaves(run.params), jax.tree.leaves(there.params), strict=True):
        np.testing.assert_array_equal(one, other)
    sharded = {leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(there.params["layers"])}
    assert False in sharded


def test_text_to_ids_and_back(run):
    assert run.decode(run.encode("as it was")) == "as it was"
    assert run.decode(run.encode(" was"), run.encode("as it")) == " was"


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([1, 2], r"must be integers \[rows, length\], not int64 \[2\]"),
        ([[1.0]], "must be integers"),
        ([[999]], "must be ids from 0 to"),
        ([[-1]], "must be ids from 0 to"),
        (np.zeros((0, 4), int), "the number of rows must be a positive multiple of 1 .* not 0"),
    ],
)
def test_tokens_that_no_model_takes(run, tokens, words):
    with pytest.raises(ValueError, match=words):
        run(tokens)


def test_rows_that_do_not_divide(whole_run):
    there = jaxmnt.load_run(whole_run.run.dir, mesh={"fsdp": 2, "model": 2})
    with pytest.raises(ValueError, match="the number of rows must be a positive multiple of 2"):
        there(np.zeros((3, 4), int))
    assert there(np.zeros((2, 5), int)).shape[:2] == (2, 5), "a length need not divide"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"step": 11}, "load_run: .* has no checkpoint of step 11; there are: 10, 15, 20"),
        ({"mesh": {"pipeline": 2}}, "mesh.pipeline: inference does not support a pipeline"),
        ({"mesh": {"fsdpp": 2}}, "mesh.fsdpp: unknown key; did you mean mesh.fsdp"),
        ({"mesh": {"fsdp": 99}}, "mesh: it needs 99 devices, but there are 8"),
        ({"mesh": {"model": 3}}, "model.num_heads: 4 is not divisible by mesh.model 3"),
    ],
)
def test_what_cannot_be_loaded(whole_run, arguments, words):
    with pytest.raises(ConfigError, match=words):
        jaxmnt.load_run(whole_run.run.dir, **arguments)


def test_what_is_no_run_and_no_step(run, tmp_path):
    with pytest.raises(ConfigError, match="neither a run directory nor a checkpoint"):
        jaxmnt.load_run(tmp_path)
    with pytest.raises(ConfigError, match="step 21 is not one of this run's"):
        run.batch(21)


def test_rows_of_a_run_directory_are_those_of_its_config(whole_run):
    of_config, of_folder = jaxmnt.load_rows(whole_run), jaxmnt.load_rows(whole_run.run.dir)
    assert len(of_config) == len(of_folder)
    np.testing.assert_array_equal(of_config[5]["tokens"], of_folder[5]["tokens"])


@pytest.mark.parametrize("rows", ["windows", "packed"])
def test_rows_for_a_grain_pipeline(tiny, rows):
    """Two processes' rows, in batches by Grain, are the global batches of the run."""
    config = tiny(f"data.rows={rows}")
    data = open_sources(config.data)
    expected = TrainingData(config, data)
    parts = [jaxmnt.load_rows(config, process=process, processes=2) for process in range(2)]
    half = config.data.global_batch_size // 2
    assert [len(part) for part in parts] == [half * config.train.steps] * 2
    read = [list(part.slice(slice(0, 3 * half)).batch(half).to_iter_dataset()) for part in parts]
    for step in range(3):
        whole = expected.batch(step, np.arange(2 * half))
        for field, values in whole.items():
            np.testing.assert_array_equal(values, np.concatenate([part[step][field] for part in read]))
    late = parts[1][7 * half]  # any item at any time
    np.testing.assert_array_equal(late["tokens"], expected.batch(7, [half])["tokens"][0])


def test_rows_that_cannot_be_shared_out(tiny):
    with pytest.raises(ConfigError, match="process 0 of 3 cannot take an equal share of 16 rows"):
        jaxmnt.load_rows(tiny(), processes=3)


def test_train_is_a_function_and_a_module(tiny):
    """Also where something has imported the module of this name before."""
    from jaxmnt.train import train

    assert jaxmnt.train.train is train
    assert jaxmnt.train(tiny("train.stop_after=1")) == 75
    with pytest.raises(AttributeError, match="no attribute 'trane'"):
        _ = jaxmnt.trane


@pytest.mark.exhaustive
def test_the_notebook(tmp_path):
    """Its cells one after the other, in a process that has imported nothing."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert "from jaxmnt." not in source and "import jaxmnt." not in source, "no internal import is needed"
    done = subprocess.run([sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
