"""The optimizer's updates: Muon against float64 on any mesh, and optimizers that a config names by a dotted path."""

import functools
import re
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
import test_experts
import test_parallel
from conftest import ROOT, check_same_checkpoints, in_tiers
from safetensors.numpy import load_file

from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.names import arrays_by_name
from jaxmnt.config.describe import changes
from jaxmnt.data.feed import to_devices
from jaxmnt.errors import ConfigError
from jaxmnt.parallel.layout import map_with_axes
from jaxmnt.parallel.sharding import is_axes, parameter_name
from jaxmnt.run.changes import changes_outside_config
from jaxmnt.train import train
from jaxmnt.training import optimizer
from jaxmnt.training.build import build_spec
from jaxmnt.training.compile import compile_program
from jaxmnt.training.muon import COEFFICIENTS, matrix_form
from jaxmnt.training.optimizer import parameter_kinds
from jaxmnt.training.spec import ControlFlags
from jaxmnt.training.state import abstract_state
from jaxmnt.training.trained import select_trained

VOCAB = test_parallel.VOCAB
MODEL = {"num_layers": 6, "num_kv_heads": 2, "intermediate_size": 96}
MUON = {"kind": "muon", "learning_rate": 1.0, "schedule": "constant", "weight_decay": 0.0}


# -- Muon


def exact_orthogonal(x, coefficients, margin):
    """The iteration in float64."""
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / max(np.linalg.norm(x) * margin, 1e-7)
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def exact_muon(gradients, names, scale="rms", kind="jordan", beta=0.95):
    """The update of a parameter [stack, …] after these gradients, in float64, matrix by matrix, and its scale."""
    form = matrix_form(names, stacked=True)
    momentum = 0.0
    for gradient in gradients:
        momentum = beta * momentum + (1 - beta) * gradient.astype(np.float64)
    ahead = beta * momentum + (1 - beta) * gradients[-1]
    order = form.order(ahead.ndim)
    moved = ahead.transpose(order)
    sides = ahead.shape[form.residual], np.prod([ahead.shape[index] for index in form.others])
    coefficients = (COEFFICIENTS[kind] * 5)[:5]
    updates = []
    for matrix in moved.reshape(-1, *sides):
        update = exact_orthogonal(matrix, coefficients, 1.02 if kind == "polar_express" else 1.0)
        updates.append(update if update.shape == sides else update.T)
    inputs, outputs = sides if form.reads_residual else sides[::-1]
    factor = 0.2 * max(sides) ** 0.5 if scale == "rms" else max(1, outputs / inputs) ** 0.5
    return np.stack(updates).reshape(moved.shape).transpose(np.argsort(order)), factor


def updates_on(spec, gradients):
    """The last of the updates for these gradients, which are in the checkpoint layout, and the state after it."""
    axes = spec.trained_axes
    place = jax.jit(functools.partial(map_with_axes, spec.layout.to_device_layout, axes=axes))
    restore = jax.jit(functools.partial(map_with_axes, spec.layout.to_checkpoint_layout, axes=axes))
    state_of = abstract_state(spec)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, select_trained(state_of["params"], axes))
    params = jax.device_put(place(gradients[0]), shardings)
    with jax.default_matmul_precision("highest"):
        state = jax.jit(spec.optimizer.init)(params)
        update = jax.jit(spec.optimizer.update)
        for gradient in gradients:
            updates, state = update(jax.device_put(place(gradient), shardings), state, params)
    return jax.device_get(restore(updates)), state


def random_gradients(spec, count=2):
    rng = np.random.default_rng(0)
    draw = lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32)
    shapes = select_trained(spec.definition.abstract, spec.trained_axes)
    return [jax.tree.map(draw, shapes) for _ in range(count)]


def check_muon(spec, most=2e-6, **settings):
    gradients = random_gradients(spec)
    updates, _ = updates_on(spec, gradients)
    kinds = parameter_kinds(spec.config, spec.trained_axes, list(spec.slots))
    paths = jax.tree.leaves_with_path(spec.trained_axes, is_leaf=is_axes)
    columns = zip(paths, *(jax.tree.leaves(tree) for tree in (updates, *gradients)), strict=True)
    checked = []
    for (path, names), update, *series in columns:
        if kinds[parameter_name(path)].name != "muon":
            continue
        expected, factor = exact_muon(series, names, **settings)
        error = np.abs(-update / factor - expected).max()
        assert error <= most, f"{parameter_name(path)}: {error:.1e}"
        checked.append(parameter_name(path))
    return checked


MESHES = [
    {"fsdp": 4, "model": 2},
    {"pipeline": 2, "fsdp": 2, "model": 2},
    {"fsdp": 8},
    {"model": 8},
    {"data": 8},
    {"data": 2, "fsdp": 2, "model": 2},
    {"fsdp": 2, "context": 2, "model": 2},
    {},
]


@pytest.mark.parametrize("mesh", in_tiers({1}, MESHES), ids=str)
def test_muon_is_that_of_float64_on_any_mesh(mesh):
    """With layers that the devices do not divide, empty slots in stages, padding, and shared key heads."""
    pipeline = {"schedule": "1f1b", "layers": [4, 2]} if "pipeline" in mesh else {}
    devices = 8 if mesh else 1
    # 7 columns a device would be needed for an MLP of 90, so that it is padded.
    model = MODEL | {"intermediate_size": 90}
    chosen = test_parallel.config(model=model, mesh=mesh, pipeline=pipeline, optimizer=MUON)
    checked = check_muon(build_spec(chosen, VOCAB, jax.devices()[:devices]))
    names = {
        "attention.key",
        "attention.output",
        "attention.query",
        "attention.value",
        "mlp.down",
        "mlp.gate",
        "mlp.up",
    }
    assert {f"layers.{name}" for name in names} == set(checked)


@pytest.mark.parametrize(
    "settings",
    in_tiers(set(), [{"coefficients": "polar_express", "scale": "spectral"}, {"scale": "spectral"}]),
    ids=str,
)
def test_settings_of_muon(settings):
    chosen = test_parallel.config(model=MODEL, mesh={"fsdp": 2}, optimizer=MUON | {"muon": settings})
    check_muon(
        build_spec(chosen, VOCAB, jax.devices()[:2]),
        most=1e-5 if "coefficients" in settings else 2e-6,  # the first step of polar_express multiplies by 8
        scale=settings["scale"], kind=settings.get("coefficients", "jordan"),
    )  # fmt: skip


@pytest.mark.parametrize(
    "mesh",
    in_tiers({0}, [{"expert": 2, "fsdp": 2, "model": 2}, {"expert": 4, "fsdp": 2}, {"expert": 2, "pipeline": 2}]),
    ids=str,
)
def test_muon_takes_each_expert_as_a_matrix(mesh):
    chosen = test_experts.config(mesh=mesh, optimizer=MUON)
    devices = int(np.prod(list(mesh.values())))
    checked = check_muon(build_spec(chosen, 64, jax.devices()[:devices]))
    assert "layers.experts.down" in checked and "layers.experts.gate" in checked


@pytest.mark.parametrize("scale", ["rms", "spectral"])
def test_muon_is_that_of_torch(scale):
    """Three steps with decay (tests/reference/muon.py)."""
    arrays = load_file(ROOT / "tests" / "reference" / "muon.safetensors")
    shapes = sorted({name.partition(".")[0] for name in arrays})
    tree = lambda part: {"layers": {shape: arrays[f"{shape}.{part}"][None] for shape in shapes}}
    chosen = test_parallel.config(
        optimizer=MUON | {"learning_rate": 0.02, "weight_decay": 0.1, "muon": {"scale": scale}}
    )
    placement = build_spec(chosen, VOCAB, jax.devices()[:1]).placement
    axes = {"layers": dict.fromkeys(shapes, ("layers", "embed", "mlp"))}
    params = tree("start")
    built, _ = optimizer.build_optimizer(chosen, axes, params, ["layers"], placement, np.dtype("float32"))
    with jax.default_matmul_precision("highest"):
        state = built.init(params)
        for step in range(3):
            gradients = {"layers": {shape: arrays[f"{shape}.gradients"][step][None] for shape in shapes}}
            updates, state = jax.jit(built.update)(gradients, state, params)
            params = optax.apply_updates(params, updates)
    for shape, expected in tree(scale)["layers"].items():
        np.testing.assert_allclose(params["layers"][shape], expected, atol=2e-6, err_msg=shape)


def one_step(**optimizer):
    """The change of each parameter in one step of training."""
    chosen = test_parallel.config(model={"num_layers": 2}, optimizer=MUON | optimizer)
    program = compile_program(chosen, VOCAB, jax.devices()[:1])
    state, count = program.init(), chosen.data.global_batch_size
    before = jax.device_get(state["params"])
    batch = to_devices(test_parallel.rows(chosen), list(range(count)), count, program.batch_sharding)
    state, _ = program.step(state, batch | {"control": ControlFlags(program.control_sharding).array()})
    return jax.tree.map(lambda a, b: a - b, jax.device_get(state["params"]), before), before


@pytest.mark.slow
def test_gradients_are_clipped_before_they_are_orthogonalized(monkeypatch):
    """So the norm does not change the size of a first update of Muon. A clipped update would be shorter."""
    size = lambda change: np.linalg.norm(change["layers"]["mlp"]["gate"])
    whole = size(one_step(clip_norm=None)[0])
    assert size(one_step(clip_norm=0.1)[0]) == pytest.approx(whole, rel=0.01)
    right = optimizer.scale_by_muon
    clip_after = lambda *given: optax.chain(right(*given), optax.clip_by_global_norm(0.1))
    monkeypatch.setattr(optimizer, "scale_by_muon", clip_after)
    assert size(one_step(clip_norm=None)[0]) < 0.5 * whole


@pytest.mark.slow
def test_a_factor_of_the_rate_does_not_change_the_decay():
    rule = {"pattern": "layers.mlp.up", "learning_rate_factor": 0.0}
    change, before = one_step(learning_rate=0.01, weight_decay=0.1, rules=[rule])
    np.testing.assert_allclose(change["layers"]["mlp"]["up"], -0.001 * before["layers"]["mlp"]["up"], atol=1e-7)


# -- runs of earlier versions


def checkpoint_of(chosen, of_earlier_version):
    """A checkpoint of a run with this config."""
    written = chosen.model_dump()
    if of_earlier_version:
        del written["optimizer"]["muon"]
    return Committed(None, SimpleNamespace(config=written, libraries={}))


def test_a_run_of_an_earlier_version_with_muon_asks():
    rules = [{"pattern": "layers.mlp.*", "kind": "muon", "learning_rate_factor": 20.0}]
    chosen = test_parallel.config(optimizer={"rules": rules})
    old = checkpoint_of(chosen, of_earlier_version=True)
    found = {
        change.key: change.values for change in [*changes(old.config, chosen), *changes_outside_config(old, chosen)]
    }
    assert found == {
        "optimizer.muon.scale": "none → rms",
        "formula of optimizer.muon.momentum": "corrected for bias → as in torch.optim.Muon",
        "formula of optimizer.rules.learning_rate_factor": "of rate and decay → of the rate",
    }
    new = checkpoint_of(chosen, of_earlier_version=False)
    assert [*changes(new.config, chosen), *changes_outside_config(new, chosen)] == []
    plain = test_parallel.config()
    old = checkpoint_of(plain, of_earlier_version=True)
    assert [*changes(old.config, plain), *changes_outside_config(old, plain)] == []


def test_the_state_has_the_names_of_earlier_versions():
    """Of Muon, of AdamW beside it, and of AdamW alone, although a rule says that some parameters use it."""
    adamw = {"pattern": "layers.attention.*", "kind": "adamw"}
    for rules, names in (
        ([{"pattern": "layers.mlp.*", "kind": "muon"}, adamw], ("muon/inner_state/mu", "adam/inner_state/mu")),
        ([adamw], ("adam/mu", "adam/mu")),
    ):
        spec = build_spec(test_parallel.config(optimizer={"rules": rules}), VOCAB, jax.devices()[:1])
        arrays = arrays_by_name(abstract_state(spec))
        assert f"optimizer/{names[0]}/layers/mlp/gate" in arrays
        assert f"optimizer/{names[1]}/layers/attention/query" in arrays
        assert not [name for name in arrays if "-2" in name]


# -- optimizers of one's own


def updates_of(optimizer, mesh, devices):
    chosen = test_parallel.config(
        model=MODEL, mesh=mesh, optimizer={"schedule": "constant", "weight_decay": 0.0, **optimizer}
    )
    spec = build_spec(chosen, VOCAB, jax.devices()[:devices])
    updates, state = updates_on(spec, random_gradients(spec, 3))
    return updates, state


OTHERS = [
    {"kind": "optax.scale_by_lion", "arguments": {"b1": 0.8}},
    {"kind": "own_optimizers.signed"},
    {"kind": "optax.scale_by_adam", "rules": [{"pattern": "layers.mlp.*", "kind": "optax.scale_by_lion"}]},
    {"kind": "optax.scale_by_adan"},
    {"kind": "optax.scale_by_belief"},
    {"kind": "optax.scale_by_rms"},
    {"kind": "own_optimizers.trust"},
    {"kind": "muon", "rules": [{"pattern": "layers.attention.*", "kind": "adamw"}]},
]


@pytest.mark.parametrize("settings", in_tiers({1}, OTHERS), ids=lambda settings: settings["kind"])
def test_an_optimizer_of_ones_own_is_the_same_on_any_mesh(settings):
    expected, _ = updates_of(settings, {}, 1)
    found, state = updates_of(settings, {"pipeline": 2, "fsdp": 2, "model": 2}, 8)
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max(), path
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim > 1]
    assert all(not leaf.sharding.is_fully_replicated for leaf in moments if leaf.size > 4096)


KINDS = {
    "embedding.*": "muon",
    "layers.attention.query": "optax.scale_by_lion",
    "layers.attention.key": "optax.scale_by_adan",
    "layers.attention.value": "optax.scale_by_yogi",
    "layers.attention.output": "optax.scale_by_radam",
    "layers.mlp.gate": "optax.scale_by_belief",
    "layers.mlp.up": "optax.scale_by_rss",
    "layers.mlp.down": "optax.contrib.scale_by_ademamix",
    "layers.mlp_norm.*": "optax.contrib.scale_by_adopt",
    "layers.attention_norm.*": "optax.scale_by_rms",
    "norm.*": "own_optimizers.trust",
    "head.*": "own_optimizers.signed",
}


@pytest.mark.slow
def test_each_optimizer_resumes_bit_for_bit(tiny, tmp_path):
    """All of them in one run: each parameter has another."""
    rules = ", ".join(f"{{pattern: '{pattern}', kind: {kind}}}" for pattern, kind in KINDS.items())
    settings = ("train.steps=6", f"optimizer.rules=[{rules}]", "optimizer.kind=muon")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(tiny(*settings, f"run.dir={whole}", "mesh.fsdp=2"), devices=jax.devices()[:2])
    train(tiny(*settings, f"run.dir={parts}", "mesh.fsdp=2", "train.stop_after=3"), devices=jax.devices()[:2])
    train(tiny(*settings, f"run.dir={parts}", "mesh.fsdp=2"), devices=jax.devices()[:2])
    check_same_checkpoints(parts, whole)


def test_arguments_of_an_optimizer_reach_it():
    """A number, and a list."""
    sizes, _ = updates_of({"kind": "own_optimizers.of_sizes", "arguments": {"sizes": [1.0, 2.0]}}, {}, 1)
    jax.tree.map(lambda update: np.testing.assert_allclose(np.abs(update), 3.0, rtol=1e-6), sizes)
    given, _ = updates_of({"kind": "own_optimizers.signed", "arguments": {"size": 2.0}}, {}, 1)
    default, _ = updates_of({"kind": "own_optimizers.signed"}, {}, 1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 2 * b, atol=1e-6), given, default)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "optax.lion"}, "optimizer.kind: optax.lion has a learning rate of its own; use optax.scale_by_lion"),
        (
            {"kind": "optax.scale_by_lion", "arguments": {"bata": 1}},
            "optimizer.arguments.bata: optax.scale_by_lion has",
        ),
        (
            {"kind": "optax.scale_by_lion", "arguments": {"b1": "x"}},
            "optimizer.kind: optax.scale_by_lion does not comp",
        ),
        ({"kind": "optax.nothing"}, "optimizer.kind: optax.nothing cannot be imported"),
        ({"kind": "optax.__version__"}, "optimizer.kind: optax.__version__ must be a function, but is a str"),
        ({"kind": "own_optimizers.number"}, "must return an optax.GradientTransformation, but returns a int"),
        (
            {"kind": "optax.scale_by_factored_rms", "arguments": {"min_dim_size_to_factor": 8}},
            "optimizer.kind: optax.scale_by_factored_rms keeps",
        ),
        ({"kind": "optax.scale_by_sm3"}, "optimizer.kind: optax.scale_by_sm3"),
        ({"kind": "own_optimizers.with_table"}, "keeps an array [100, 100] that belongs to no parameter"),
        ({"kind": "own_optimizers.of_loss"}, "does not compute an update from gradients, its state and parameters"),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
def test_an_optimizer_that_does_not_fit_is_refused(settings, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        build_spec(test_parallel.config(optimizer=settings), VOCAB, jax.devices()[:1])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "adam"}, "optimizer.kind: 'adam' is not known; set adamw or muon, or give the dotted path"),
        ({"arguments": {"b1": 1.0}}, "optimizer.arguments: only an optimizer that is named by a dotted path has"),
        ({"rules": [{"pattern": "*", "kind": "lion"}]}, "optimizer.rules.0.kind: 'lion' is not known"),
    ],
)
def test_an_unknown_kind_is_refused(settings, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        test_parallel.config(optimizer=settings)
