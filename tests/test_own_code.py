"""Parts of one's own: their settings, and what a start says if their code has changed."""

import re
import sys
from dataclasses import dataclass

import jax
import pytest
import test_parallel
from conftest import ROOT, in_tiers, losses, metrics

from jaxmnt.checkpoint.refs import find
from jaxmnt.config.load import load_config
from jaxmnt.data.feed import to_devices
from jaxmnt.errors import ConfigError
from jaxmnt.models.llama import Llama
from jaxmnt.train import train
from jaxmnt.training.build import build_spec
from jaxmnt.training.compile import compile_program
from jaxmnt.training.spec import ControlFlags

LOSS = """
from dataclasses import dataclass

import jax.numpy as jnp

from jaxmnt.training.loss import LossSums
from {package}.helper import FACTOR


@dataclass(frozen=True)
class Smoothing:
    amount: float = 0.1
    rounds: int = 1


def smooth(logits, tokens, train, settings: Smoothing):
    cross_entropy = jnp.sum((logits.log_sum_exp() - logits.pick(tokens["targets"])) * tokens["weights"])
    return LossSums(FACTOR * (1 + settings.amount) * cross_entropy, cross_entropy)


def plain(logits, tokens, train):
    return smooth(logits, tokens, train, Smoothing(0.0))
"""


@dataclass(frozen=True)
class Options:
    gain: float
    kind: str = "plain"


class WithOptions(Llama):
    Options = Options


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The name of a package with a loss and a helper."""
    name = f"own_{tmp_path.name}".replace("-", "_")
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "helper.py").write_text("FACTOR = 1.0\n")
    (folder / "loss.py").write_text(LOSS.format(package=name))
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for module in [module for module in sys.modules if module.split(".")[0] == name]:
        del sys.modules[module]


def spec_of(**sections):
    return build_spec(test_parallel.config(**sections), test_parallel.VOCAB, jax.devices()[:1])


def test_settings_reach_a_loss_and_a_family(package):
    train_section = {"precision": "float32", "loss": f"{package}.loss.smooth"}
    spec = spec_of(train=train_section | {"loss_settings": {"amount": 0.5}})
    settings = spec.loss.keywords["settings"]
    assert (settings.amount, settings.rounds) == (0.5, 1)
    assert spec_of(train=train_section).loss.keywords["settings"].amount == 0.1
    family = spec_of(model={"family": "test_own_code.WithOptions", "options": {"gain": 2}}).definition.family
    assert family.options == Options(2, "plain")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train": {"loss": "PACKAGE.loss.smooth", "loss_settings": {"amont": 1.0}}},
         "train.loss_settings.amont: PACKAGE.loss.smooth has amount, rounds; did you mean amount?"),
        ({"train": {"loss": "PACKAGE.loss.smooth", "loss_settings": {"rounds": 1.5}}},
         "train.loss_settings.rounds: 1.5: input should be a valid integer"),
        ({"train": {"loss": "PACKAGE.loss.plain", "loss_settings": {"amount": 1.0}}},
         "train.loss_settings: PACKAGE.loss.plain has none; give it a parameter settings that is annotated"),
        ({"train": {"loss_settings": {"amount": 1.0}}}, "train.loss_settings: cross-entropy has none; remove it"),
        ({"model": {"options": {"gain": 1.0}}}, "model.options: Llama has none; remove it"),
        ({"model": {"family": "test_own_code.WithOptions"}}, "model.options.gain: not set; WithOptions needs it"),
        ({"model": {"family": "test_own_code.WithOptions", "options": {"gain": "much"}}},
         "model.options.gain: 'much': input should be a valid number"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_named(settings, words, package):
    sections = {
        section: {
            key: value.replace("PACKAGE", package) if isinstance(value, str) else value for key, value in keys.items()
        }
        for section, keys in settings.items()
    }
    with pytest.raises(ConfigError, match=re.escape(words.replace("PACKAGE", package))):
        spec_of(**sections)


@pytest.mark.parametrize(
    ("mesh", "train"),
    in_tiers({0}, [({"pipeline": 2, "fsdp": 2, "model": 2}, {"microbatch_size": 2}), ({"fsdp": 4, "model": 2}, {})]),
)
def test_metrics_of_a_loss_are_counted_exactly(mesh, train):
    """In a vocabulary that devices share, over microbatches, chunks of tokens and stages."""
    reported = {}
    for devices, sections in ((8, {"mesh": mesh}), (1, {})):
        settings = {"precision": "float32", "loss": "losses.with_metrics", **(train if sections else {})}
        chosen = test_parallel.config(train=settings, model={"num_layers": 2}, **sections)
        program = compile_program(chosen, test_parallel.VOCAB, jax.devices()[:devices])
        count = chosen.data.global_batch_size
        rows = test_parallel.rows(chosen)
        batch = to_devices(rows, list(range(count)), count, program.batch_sharding)
        _, values = program.step(program.init(), batch | {"control": ControlFlags(program.control_sharding).array()})
        reported[devices] = {name: float(ratio) for name, ratio in values["reported"].items()}
    counts = rows["weights"] > 0
    assert reported[8]["target"] == pytest.approx(rows["targets"][counts].mean(), rel=1e-6)
    assert reported[8]["accuracy"] == reported[1]["accuracy"]
    assert 0 < round(reported[1]["accuracy"] * counts.sum(), 3) < counts.sum()


@pytest.mark.slow
def test_the_digits_are_the_same_on_any_mesh(tmp_path, monkeypatch):
    """The family's shares, the loss and the optimizer of the example."""
    monkeypatch.syspath_prepend(ROOT / "examples" / "digits")
    recorded = {}
    for name, mesh, devices in (("one", "mesh.data=1", 1), ("many", "mesh={pipeline: 2, fsdp: 2, model: 2}", 8)):
        overrides = [f"run.dir={tmp_path / name}", "train.steps=3", "optimizer.warmup_steps=0", mesh]
        chosen = load_config(ROOT / "examples" / "digits" / "digits.yaml", overrides)
        train(chosen, devices=jax.devices()[:devices])
        recorded[name] = [(line["loss"], line["reported"]["accuracy"]) for line in metrics(tmp_path / name)]
    # Signs of gradients near zero differ by rounding, so only the first loss is the same to the last digits.
    assert recorded["one"][0] == pytest.approx(recorded["many"][0], rel=1e-6)
    assert recorded["one"] == [pytest.approx(pair, rel=1e-2) for pair in recorded["many"]]


@pytest.mark.slow
def test_changed_code_asks(package, tmp_path, tiny):
    """Of the module that the config names, and of a module that it imports."""
    settings = ("train.steps=4", "optimizer.warmup_steps=0", f"train.loss={package}.loss.smooth")
    train(tiny(*settings, "train.stop_after=1"))
    recorded = find(str(tmp_path / "run"), "run").manifest.libraries
    assert {f"module {package}{rest}" for rest in ("", ".loss", ".helper")} <= recorded.keys()
    train(tiny(*settings, "train.stop_after=2"))

    (tmp_path / package / "helper.py").write_text("FACTOR = 2.0\n")
    words = rf"these changes alter its maths: module {package}\.helper \(\w+ → \w+\); undo them"
    with pytest.raises(ConfigError, match=words):
        train(tiny(*settings))
    train(tiny(*settings, "train.stop_after=3"), accept_changes=True)
    train(tiny(*settings))
    assert len(losses(tmp_path / "run")) == 4
