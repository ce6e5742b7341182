"""Averages of parameters: of a run (`optimizer.average`), and of checkpoints."""

import jax
import numpy as np
import pytest
from conftest import TINY, check_same_checkpoints, command, metrics

from jaxmnt.checkpoint.arrays import Reader
from jaxmnt.checkpoint.refs import find
from jaxmnt.config.load import apply_overrides, parse_config
from jaxmnt.train import train

AVERAGE = ("optimizer.average={decay: 0.75, from_step: 2}", "checkpoint.every_steps=1", "checkpoint.keep_every_steps=1")


def parameters(run, part="params"):
    checkpoint = find(str(run), "run")
    names = [name for name in checkpoint.manifest.arrays if name.startswith(f"{part}/")]
    reader = Reader(checkpoint, names)
    return {name.partition("/")[2]: reader.read(name) for name in names}


SETTINGS = ("train.steps=6", "train.eval_every=3", "optimizer.frozen=[embedding.*]", "mesh.fsdp=2", *AVERAGE)


def config(prepared, run, *overrides):
    tree = {name: dict(section) for name, section in TINY.items()}
    tree["data"]["path"], tree["run"] = str(prepared), {"dir": str(run)}
    apply_overrides(tree, [*SETTINGS, *overrides])
    return parse_config(tree)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory, prepared):
    run = tmp_path_factory.mktemp("averaged") / "run"
    train(config(prepared, run), devices=jax.devices()[:2])
    return run


@pytest.mark.slow
def test_the_average_is_that_of_numpy(averaged):
    """It begins with the parameters after step 2. Frozen parameters have none."""
    expected = parameters(f"{averaged}@2")
    for step in range(3, 7):
        after = parameters(f"{averaged}@{step}")
        expected = {name: 0.75 * value + 0.25 * after[name] for name, value in expected.items()}
    found = parameters(averaged, "average")
    assert found.keys() == {name for name in expected if not name.startswith("embedding")}
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], atol=1e-6)


def test_evaluations_report_the_average(averaged):
    losses = [(line["loss"], line["average_loss"]) for line in metrics(averaged, "eval")]
    assert len(losses) == 2 and all(loss != of_average for loss, of_average in losses)


@pytest.mark.slow
def test_the_average_resumes_bit_for_bit(averaged, prepared, tmp_path):
    """On another mesh too, in which stages have empty slots; and a run that began without one begins it."""
    parts = tmp_path / "parts"
    train(config(prepared, parts, "train.stop_after=3"), devices=jax.devices()[:2])
    train(config(prepared, parts), devices=jax.devices()[:2])
    check_same_checkpoints(parts, averaged)

    late = tmp_path / "late"
    train(config(prepared, late, "optimizer.average=null", "train.stop_after=3"), devices=jax.devices()[:2])
    later = config(
        prepared, late, "optimizer.average={decay: 0.75}", "train.stop_after=4", "mesh.model=2", "mesh.fsdp=1"
    )
    train(later, devices=jax.devices()[:2], accept_changes=True)
    before, after = (parameters(f"{late}@{step}") for step in (3, 4))
    for name, value in parameters(late, "average").items():
        np.testing.assert_allclose(value, 0.75 * before[name] + 0.25 * after[name], atol=1e-6)


@pytest.mark.slow
def test_an_average_of_checkpoints_is_a_run(averaged, tmp_path):
    """And the average of the run itself, whose held-out loss is that of the run's own evaluation."""
    out, own = tmp_path / "out", tmp_path / "own"
    shown = command("jaxmnt.checkpoint", "average", f"{averaged}@2,4,6", str(out))
    assert shown.returncode == 0 and "3 checkpoints averaged" in shown.stdout, shown.stderr
    series = [parameters(f"{averaged}@{step}") for step in (2, 4, 6)]
    for name, value in parameters(out).items():
        np.testing.assert_allclose(value, np.mean([one[name] for one in series], axis=0, dtype=np.float64), atol=1e-7)
    assert command("jaxmnt.checkpoint", "verify", str(out)).returncode == 0
    assert command("jaxmnt.checkpoint", "average", f"{averaged}@6", str(own)).returncode == 0
    for name, value in parameters(averaged, "average").items():
        np.testing.assert_array_equal(parameters(own)[name], value)
    generated = command("jaxmnt.generate", "--run", str(own), "--prompt", "ab", "--tokens", "3")
    assert generated.returncode == 0, generated.stderr
    for wrong, words in (
        (f"{averaged}@6,6", "names a step twice"),
        (f"{out}@6", "has no average, because its run has no optimizer.average"),
        (f"{averaged}@2,9", "has no checkpoint of step 9"),
    ):
        refused = command("jaxmnt.checkpoint", "average", wrong, str(tmp_path / "nothing"))
        assert refused.returncode == 2 and words in refused.stderr, refused.stderr
    again = command("jaxmnt.checkpoint", "average", f"{averaged}@2,4", str(out))
    assert again.returncode == 2 and "exists already" in again.stderr
