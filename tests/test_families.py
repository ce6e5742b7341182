"""What a family may be, against its mathematics in float64: one outside of the package, other losses, optimizers by
pattern. Those of the package are compared with their reference (test_huggingface.py)."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, in_tiers, metrics
from families import logits_of_row, value_and_gradients
from label_smoothing import SMOOTHING
from routed_families import reference
from routed_scales import BIAS_STEP
from test_parallel import VOCAB, config, gradients, initial, rows

from jaxmnt.checkpoint.commit import newest_valid
from jaxmnt.data.feed import to_devices
from jaxmnt.errors import ConfigError, ExitCode
from jaxmnt.models.contract import define
from jaxmnt.models.registry import build_family
from jaxmnt.parallel.layout import map_with_axes
from jaxmnt.plan.report import parameter_rows
from jaxmnt.plan.show import parameter_table
from jaxmnt.train import train
from jaxmnt.training.build import build_spec
from jaxmnt.training.compile import compile_program
from jaxmnt.training.spec import ControlFlags
from jaxmnt.training.state import abstract_state
from jaxmnt.training.step import _update_buffers, mean_gradients

MESHES = {
    "one device": (1, {}),
    "pipeline 2 x fsdp 2 x model 2": (8, {"pipeline": 2, "fsdp": 2, "model": 2}),
}


def sections(mesh):
    return {
        "model": {"num_layers": 4, "num_kv_heads": 2},
        "data": {"document_mask": True, "global_batch_size": 8},
        "train": {"microbatch_size": 1 if mesh else None},
        "mesh": mesh,
    }


def shaken(tree, seed=1):
    """Parameters with noise: biases that are 0 and scales that are 1 would hide what is wrong with them."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: leaf + 0.1 * rng.standard_normal(leaf.shape).astype(np.float32), tree)


def assert_near(found, wanted, tolerance=2e-5):
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        error = np.abs(a - b).max() / np.abs(b).max()
        assert error <= tolerance, f"{jax.tree_util.keystr(path)}: {error:.2e}"


@pytest.mark.parametrize(
    ("model", "mesh", "words"),
    [
        (
            {"family": "lama"},
            {},
            r"model.family: lama is not known; did you mean llama\? \(for a family of your own, give the dotted path",
        ),
        ({"family": "json.JSONDecoder"}, {}, "json.JSONDecoder is not a subclass of jaxmnt.models.contract.Family"),
        ({"family": "jaxmnt.models.contract.Family"}, {}, "jaxmnt.models.contract.Family lacks the method layer"),
        ({"family": "no.such.place"}, {}, "model.family: no.such.place cannot be imported"),
        ({"sliding_window": 8}, {}, "model.sliding_window: family llama does not support this setting"),
        ({"family": "gpt2"}, {}, "model.max_positions: gpt2 uses learned positions; set model.max_positions"),
        ({"family": "gpt2", "max_positions": 8}, {}, "data.sequence_length: 16 must be at most model.max_positions"),
        (
            {"family": "gemma2", "num_layers": 6},
            {"pipeline": 4},
            "mesh.pipeline: .* 4 pieces .* the 6 layers form only 3 units",
        ),
    ],
)
def test_a_model_that_cannot_be_is_named(model, mesh, words):
    with pytest.raises(ConfigError, match=words):
        build_spec(config(model=model, mesh=mesh), VOCAB, jax.devices()[: mesh.get("pipeline", 1)])


@pytest.mark.parametrize(
    ("family", "model", "words"),
    [
        ("DuplicateGroup", {}, "the name layers of a group of layers is taken"),
        ("NamedLikeAnAxis", {}, "the name bias of a group of layers is taken"),
        ("TooManyLayers", {}, "groups() has 4 layers, but model.num_layers is 3"),
        ("RoutedLlama", {"num_layers": 1}, "the group layers has no layers"),
        (
            "WiderFirstLayer",
            {"intermediate_size": 65},
            "prefix.mlp.down has 130 along mlp, which is padded for this mesh",
        ),
        ("UnknownAxis", {}, "norm.scale has the unknown axis 'odd'"),
        ("BufferOutsideLayers", {}, "the buffer norm.bias must belong to a layer"),
        ("ReturnsArray", {}, "a layer must return a LayerOutput, but returns a"),
        ("ReturnsNoBuffers", {}, "update_buffers must return buffers with the names, shapes and dtypes"),
        ("ReturnsVectors", {}, "metrics must return a scalar for each name; loads is not a scalar"),
    ],
)
def test_what_the_contract_does_not_allow_is_named(family, model, words):
    model = {"family": f"routed_families.{family}", "num_layers": 3, "vocab_size": 1024} | model
    with pytest.raises(ConfigError, match=re.escape(words)):
        compile_program(config(model=model, mesh={"model": 2}), VOCAB, jax.devices()[:2])


def test_names_of_groups_are_free():
    """Also those that the parts of a definition have."""
    model = config(model={"family": "routed_families.NamedFirstAndLast", "num_layers": 3, "vocab_size": 1024}).model
    definition = define(build_family(model, 1024))
    assert definition.modules_before == ("embedding",) and definition.modules_after == ("norm", "head")
    assert set(definition.init(jax.random.key(0))[0]) == {"embedding", "first", "last", "norm", "head"}
    assert [definition.abstract[name]["mlp"]["up"].shape[0] for name in ("first", "last")] == [1, 2]


def test_a_plan_lists_axes_without_a_name():
    model = {"family": "routed_scales.RoutedLlama", "num_layers": 3, "vocab_size": 1024}
    listed = parameter_rows(build_spec(config(model=model, mesh={"fsdp": 2}), VOCAB, jax.devices()[:2]))
    (router,) = [line for line in parameter_table(listed) if line.startswith("layers.router")]
    assert "layers embed:fsdp -" in router


def test_a_stage_ends_with_a_whole_pattern():
    chosen = {"model": {"family": "gemma2", "num_layers": 8}, "mesh": {"pipeline": 2}}
    with pytest.raises(ConfigError, match=r"pipeline.layers: \[3, 5\] cuts the pattern of layers after layer 3"):
        build_spec(config(**chosen, pipeline={"layers": [3, 5]}), VOCAB, jax.devices()[:2])
    spec = build_spec(config(**chosen, pipeline={"layers": [2, 6]}), VOCAB, jax.devices()[:2])
    assert spec.slots == {"layers": [[0, None, None], [1, 2, 3]]}


# -- a family outside of the package: a prefix, a term of the loss, a bias without gradient

PREFIX_MESHES = {
    "one device": (1, {}, {}),
    "pipeline 2 x fsdp 2 x model 2": (8, {"pipeline": 2, "fsdp": 2, "model": 2}, {}),
    "uneven stages": (2, {"pipeline": 2}, {"layers": [2, 3]}),
    "interleaved": (2, {"pipeline": 2}, {"schedule": "interleaved", "chunks": 2}),
}


def routed(mesh, pipeline, kind="RoutedLlama"):
    # Padded to so many words that what stays whole over the mesh is a small share of the parameters.
    return {
        "model": {"family": f"routed_families.{kind}", "num_layers": 5, "vocab_size": 1024},
        "data": {"document_mask": True, "global_batch_size": 8},
        "train": {"microbatch_size": 2 if mesh else None, "remat": "full" if len(mesh) > 1 else "none"},
        "mesh": mesh,
        "pipeline": pipeline,
    }


@functools.cache
def routed_step(mesh, kind="RoutedLlama"):
    """Loss, gradients, buffers and metrics after a step from noisy parameters."""
    devices, sizes, pipeline = PREFIX_MESHES[mesh]
    chosen = config(**routed(sizes, pipeline, kind))
    spec = build_spec(chosen, VOCAB, jax.devices()[:devices])
    params, buffers = routed_start(chosen.model)
    batch = rows(chosen)
    axes, layout = spec.definition, spec.layout
    place = lambda tree, names: map_with_axes(layout.to_device_layout, tree, names)
    state = abstract_state(spec)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (state["params"], state["buffers"]))
    placed = jax.jit(
        lambda p, b: (place(p, axes.axes), place(b, axes.buffer_axes)), out_shardings=shardings
    )(params, buffers)  # fmt: skip
    put = jax.device_put(batch, spec.placement.sharding(("batch", "length")))

    def compute(params, buffers, batch):
        found = mean_gradients(spec, params, buffers, batch, jnp.int32(0))
        stored = map_with_axes(layout.to_checkpoint_layout, found.gradients, axes.axes)
        new = map_with_axes(layout.to_checkpoint_layout, _update_buffers(spec, buffers, found.layers), axes.buffer_axes)
        metrics = spec.definition.family.metrics(found.layers, found.tokens)
        return found.sums.loss * found.scale, stored, new, metrics

    return jax.device_get(jax.jit(compute)(*placed, put))


@functools.cache
def routed_start(model):
    params, buffers = jax.device_get(
        jax.jit(
            define(
                build_family(model.model_copy(update={"family": "routed_scales.RoutedLlama"}), model.vocab_size)
            ).init
        )(jax.random.key(0))
    )
    return shaken(params), shaken(buffers, seed=2)


@functools.cache
def routed_expected():
    chosen = config(**routed({}, {}))
    params, buffers = routed_start(chosen.model)
    batch = rows(chosen)
    value, wanted = value_and_gradients(
        lambda p: reference(p, jax.tree.map(jnp.asarray, buffers), batch, chosen.model, VOCAB)[0], params
    )
    loads = np.asarray(reference(*jax.tree.map(jnp.asarray, (params, buffers)), batch, chosen.model, VOCAB)[1], float)
    bias = buffers["layers"]["bias"] + BIAS_STEP * np.sign(loads.mean(-1, keepdims=True) - loads)
    return value, wanted, bias, (loads / loads.sum(-1, keepdims=True)).max()


def check_routed(mesh, kind="RoutedLlama"):
    value, wanted, bias, largest = routed_expected()
    found_value, found, buffers, metrics = routed_step(mesh, kind)
    assert float(found_value) == pytest.approx(value, rel=1e-5)
    assert_near(found, wanted)
    np.testing.assert_allclose(buffers["layers"]["bias"], bias, rtol=1e-6, atol=1e-7)
    assert float(metrics["largest_load"]) == pytest.approx(largest, rel=1e-6)


@pytest.mark.parametrize("mesh", in_tiers({1}, list(PREFIX_MESHES)))
def test_a_family_with_every_part_is_its_mathematics(mesh):
    check_routed(mesh)


@pytest.mark.slow
def test_kinds_in_turn_of_which_one_has_buffers():
    found = [routed_loss_and_buffers(*case) for case in ((1, {}), (2, {"pipeline": 2}))]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    np.testing.assert_allclose(found[0][1]["1"]["bias"], found[1][1]["1"]["bias"], rtol=1e-6)
    assert np.any(found[0][1]["1"]["bias"])


def routed_loss_and_buffers(devices, mesh):
    """After a step of layers of two kinds in turn."""
    tree = routed(mesh, {}, "Alternating")
    chosen = config(**tree | {"model": tree["model"] | {"num_layers": 4}})
    program = compile_program(chosen, VOCAB, jax.devices()[:devices])
    batch = to_devices(rows(chosen), list(range(8)), 8, program.batch_sharding)
    flags = {"control": ControlFlags(program.control_sharding).array()}
    state, values = program.step(program.init(), batch | flags)
    return float(values["loss"]), jax.device_get(program.to_canonical(state)["buffers"]["layers"])


def test_a_batch_without_targets_changes_nothing_by_its_layers_terms():
    chosen = config(**routed({}, {}))
    program = compile_program(chosen, VOCAB, jax.devices()[:1])
    fields = rows(chosen)
    fields["weights"] *= 0
    batch = to_devices(fields, list(range(8)), 8, program.batch_sharding)
    before = jax.device_get(program.init())
    state, values = program.step(program.init(), batch | {"control": ControlFlags(program.control_sharding).array()})
    for part in ("params", "optimizer", "buffers", "bad_steps"):
        jax.tree.map(np.testing.assert_array_equal, state[part], before[part])
    assert int(state["counters"]["step"]) == 1 and np.isnan(values["grad_norm"])
    assert values["model"] and all(np.isnan(value) for value in values["model"].values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["WithoutPrefix", "WithoutTerm", "WithoutBias"])
def test_a_part_that_is_left_out_is_found(kind):
    with pytest.raises(AssertionError):
        check_routed("one device", kind)


def smoothed(targets, log_p):
    next_token = jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    return -(1 - SMOOTHING) * next_token - SMOOTHING * jnp.mean(log_p, -1)


def entropies(targets, log_p):
    return jnp.sum(jnp.exp(log_p) * log_p, -1)


@pytest.mark.parametrize(
    ("loss", "plain", "mesh"),
    in_tiers(
        {1},
        [("label_smoothing.loss", smoothed, mesh) for mesh in MESHES]
        + [("losses.entropy", entropies, mesh) for mesh in MESHES],
    ),
)
def test_another_loss(loss, plain, mesh, monkeypatch):
    """A function outside the package: its gradient is that of the loss over all logits in float64."""
    monkeypatch.setattr("label_smoothing.IDS", VOCAB)
    devices, sizes = MESHES[mesh]
    chosen = sections(sizes)
    chosen["train"] = chosen["train"] | {"loss": loss}
    params, batch = shaken(initial(config(**sections({})).model)), rows(config(**chosen))
    model = config(**chosen).model

    def of_batch(params):
        of_row = lambda *row: logits_of_row(params, *row, model)
        logits = jax.vmap(of_row)(batch["tokens"], batch["positions"], batch["segments"])
        each = plain(batch["targets"], jax.nn.log_softmax(logits[..., :VOCAB], -1))
        return jnp.sum(each * batch["weights"]) / np.sum(batch["weights"])

    value, wanted = value_and_gradients(of_batch, params)
    found_value, found = gradients(devices, params, **chosen)
    assert found_value == pytest.approx(value, rel=1e-5)
    assert_near(found, wanted)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("returns_mean", r"train\.loss: the function must return .*LossSums\(loss, cross_entropy\), two sums"),
        ("raising", r"train\.loss: .*losses\.py:\d+: TypeError: .*; correct it"),
    ],
)
def test_a_loss_that_is_wrong_is_named_with_its_line(name, words):
    chosen = config(**sections({}))
    chosen = chosen.changed({"train.loss": f"losses.{name}"})
    with pytest.raises(ConfigError, match=words):
        compile_program(chosen, VOCAB, jax.devices()[:1])


def test_a_family_that_raises_is_named_with_its_line():
    chosen = config(**sections({})).changed({"model.family": "routed_families.Raising", "model.num_layers": 3})
    with pytest.raises(ConfigError, match=r"model\.family: .*routed_families\.py:\d+: TypeError: .*; correct it"):
        compile_program(chosen, VOCAB, jax.devices()[:1])


def test_the_code_of_the_page_trains(tiny, tmp_path, monkeypatch):
    """The family and the loss that docs/models.md shows."""
    family, *loss = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "models.md").read_text(), re.DOTALL)
    (tmp_path / "my_models.py").write_text(family)
    (tmp_path / "my_losses.py").write_text("\n\n".join(loss))
    monkeypatch.syspath_prepend(tmp_path)
    chosen = tiny(
        "model.family=my_models.Parallel", "train.loss=my_losses.focal_with_settings", "mesh.fsdp=2", "mesh.data=1",
        "train.steps=2", "optimizer.warmup_steps=1", "train.loss_settings={power: 1.5}",
    )  # fmt: skip
    assert train(chosen, devices=jax.devices()[:2]) == 0
    assert all(0 < line["loss"] < 6 for line in metrics(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["mesh.data=1", "mesh.pipeline=2"])
def test_a_bias_without_gradient_resumes_bit_for_bit(tiny, tmp_path, mesh):
    own = (
        "model.family=routed_scales.RoutedLlama",
        "model.num_layers=3",
        "train.steps=4",
        "optimizer.warmup_steps=1",
        mesh,
    )
    devices = jax.devices()[: int(mesh[-1])]
    whole = tiny(*own, f"run.dir={tmp_path / 'whole'}")
    assert train(whole, devices=devices) == 0
    parts = tiny(*own, f"run.dir={tmp_path / 'parts'}", "train.stop_after=2")
    assert train(parts, devices=devices) == ExitCode.STOPPED
    assert train(tiny(*own, f"run.dir={tmp_path / 'parts'}"), devices=devices) == 0
    arrays = [newest_valid(tmp_path / name / "checkpoints").manifest.arrays for name in ("whole", "parts")]
    digests = [{name: array.content for name, array in found.items()} for found in arrays]
    assert digests[0] == digests[1]
    assert "buffers/layers/bias" in digests[0]
    assert [line["model"] for line in metrics(tmp_path / "whole")] == [
        line["model"] for line in metrics(tmp_path / "parts")
    ]


def test_a_bad_step_leaves_buffers_alone():
    chosen = config(**routed({}, {}))
    program = compile_program(chosen, VOCAB, jax.devices()[:1])
    state = program.init()
    state["params"]["norm"]["scale"] *= np.nan
    before = np.asarray(state["buffers"]["layers"]["bias"]) + 1
    state["buffers"]["layers"]["bias"] += 1
    count = chosen.data.global_batch_size
    batch = to_devices(rows(chosen), list(range(count)), count, program.batch_sharding)
    state, values = program.step(state, batch | {"control": ControlFlags(program.control_sharding).array()})
    assert int(values["bad_steps"]) == 1
    np.testing.assert_array_equal(state["buffers"]["layers"]["bias"], before)


# -- which parameters train, and how

RULES = {
    "frozen": ["embedding.*", "layers.attention.key"],
    "rules": [
        {"pattern": "layers.mlp.*", "kind": "muon", "learning_rate_factor": 2.0},
        {"pattern": "*attention.output", "weight_decay": 0.0},
    ],
}


def trained(devices, mesh):
    """The parameters before and after three steps, and the names of the optimizer's arrays."""
    chosen = config(model={"num_layers": 2}, mesh=mesh, optimizer=RULES, data={"global_batch_size": 8})
    program = compile_program(chosen, VOCAB, jax.devices()[:devices])
    state = program.init()
    before = jax.device_get(state["params"])
    batch = to_devices(rows(chosen), list(range(8)), 8, program.batch_sharding)
    for _ in range(3):
        state, values = program.step(state, batch | {"control": ControlFlags(program.control_sharding).array()})
        assert int(values["bad_steps"]) == 0
    names = [jax.tree_util.keystr(path, simple=True) for path, _ in jax.tree.leaves_with_path(state["optimizer"])]
    return before, jax.device_get(state["params"]), names


def test_frozen_parameters_and_optimizers_by_pattern():
    before, after, names = trained(1, {})
    same = jax.tree.map(np.array_equal, before, after)
    assert same["embedding"]["table"] and same["layers"]["attention"]["key"]
    assert not any(jax.tree.leaves({**same["layers"]["mlp"], "query": same["layers"]["attention"]["query"]}))
    assert not [name for name in names if "embedding" in name or "key" in name], "frozen ones have no state"
    assert [name for name in names if "muon" in name and "mlpgate" in name]
    assert not [name for name in names if "adam" in name and "mlpgate" in name]
    _, split, _ = trained(4, {"fsdp": 2, "model": 2})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), split, after)


def test_muon_takes_learned_positions():
    """A table outside of layers, whose first axis has the parameter's own name, is a matrix, too."""
    chosen = {"family": "gpt2", "max_positions": 16, "tie_embeddings": True}
    rules = {"rules": [{"pattern": "positions.*", "kind": "muon"}, {"pattern": "embedding.*", "kind": "muon"}]}
    spec = build_spec(config(model=chosen, optimizer=rules), VOCAB, jax.devices()[:1])
    moments = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(abstract_state(spec)["optimizer"])]
    tables = [name for name in moments if "table" in name]
    assert len(tables) == 2 and all("muon" in name for name in tables)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ({"frozen": ["layers.nothing.*"]}, "optimizer.frozen: 'layers.nothing.*' matches no parameter; the param"),
        ({"rules": [{"pattern": "head"}]}, "optimizer.rules: 'head' matches no parameter"),
        ({"rules": [{"pattern": "norm.*", "kind": "muon"}]}, "norm.scale must be a matrix for muon"),
    ],
)
def test_a_pattern_that_matches_nothing_is_named(optimizer, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        build_spec(config(optimizer=optimizer), VOCAB, jax.devices()[:1])
