"""Families against the reference implementation: random models that transformers wrote, with its logits, gradients and
continuations (tests/reference/make.py), read as a run reads them, on one device and split in every way."""

import functools
import os
import subprocess
import venv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import in_tiers
from safetensors.numpy import load_file

from jaxmnt import convert
from jaxmnt.config.load import parse_config
from jaxmnt.config.mesh import Mesh
from jaxmnt.data.feed import to_devices
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError
from jaxmnt.huggingface.compatibility import check_compatible, different_settings, folder_origin
from jaxmnt.huggingface.config import read_config
from jaxmnt.huggingface.folder import Folder
from jaxmnt.huggingface.load import load_parameters
from jaxmnt.huggingface.tensors import parts_of
from jaxmnt.parallel.layout import map_with_axes
from jaxmnt.training.build import build_spec, inference_spec
from jaxmnt.training.inference import Generator, Sampling, row_logits, row_scores
from jaxmnt.training.loss import cross_entropy
from jaxmnt.training.state import abstract_state, canonical_abstract
from jaxmnt.training.step import mean_gradients

REFERENCE = Path(__file__).parent / "reference"
NAMES = sorted(path.parent.name for path in REFERENCE.glob("*/expected.safetensors"))
QUICK_NAMES = ("gemma2-a", "gemma3-a", "olmo3-a", "qwen3_moe-a")
LENGTH = 600
ROWS = ((0,), (1, 2), (3,), (4, 5, 6))
"""Which documents share a row."""
GREEDY = Sampling(temperature=0)
MESH = {"fsdp": 2, "model": 2, "pipeline": 2}


@functools.cache
def expected(name):
    return load_file(REFERENCE / name / "expected.safetensors")


def texts(name):
    found = expected(name)
    return np.split(found["tokens"], np.cumsum(found["lengths"])[:-1])


@functools.cache
def chosen(name, **sections):
    folder = Folder(REFERENCE / name, "hf")
    model = read_config(folder.config, "config.json")
    if "num_experts" in model:
        model["balance_loss"] = 0.0  # the reference's losses are cross-entropy alone
    return parse_config(
        {
            "model": model,
            "data": {"sequence_length": LENGTH, "global_batch_size": len(ROWS), "rows": "packed"},
            "train": {"precision": "float32"},
        }
    )


def packed(name):
    """The documents in rows, and zeros behind them."""
    fields = {
        field: np.zeros((len(ROWS), LENGTH), np.int32) for field in ("tokens", "targets", "segments", "positions")
    }
    fields["weights"] = np.zeros((len(ROWS), LENGTH), np.float32)
    documents = texts(name)
    for row, members in enumerate(ROWS):
        at = 0
        for document in members:
            text = documents[document]
            place = (row, slice(at, at + len(text) - 1))
            fields["tokens"][place], fields["targets"][place], fields["weights"][place] = text[:-1], text[1:], 1
            # A segment's id need only be its own in the row: this one is a document's in the whole batch, too.
            fields["segments"][place], fields["positions"][place] = document + 1, np.arange(len(text) - 1)
            at += len(text) - 1
    return fields


def loaded(name, spec):
    """The parameters as a run gets them, on the mesh."""
    stored = canonical_abstract(spec, abstract_state(spec))["params"]
    return load_parameters(REFERENCE / name, spec.definition, stored, Identity()).params


def initial_buffers(spec):
    """The buffers of a new run, on the mesh."""
    return map_with_axes(spec.layout.to_device_layout, spec.definition.initial_buffers(), spec.definition.buffer_axes)


def tensors_of(definition, params):
    """By the reference's names, from our parameters: whole tensors, of which several parameters may be parts."""
    found = {}
    for path, leaf in jax.tree.leaves_with_path(jax.device_get(params)):
        parts = parts_of(definition)[jax.tree_util.keystr(path, simple=True, separator=".")]
        for part, array in zip(parts, leaf.reshape(-1, *parts[0].shape), strict=True):
            whole = found.setdefault(part.name, np.zeros(part.tensor_shape, np.float32))
            matrix = whole[:, None] if whole.ndim == 1 else whole
            (top, left), (rows, columns) = part.offset, part.matrix_shape
            turned = part.tensor.transposed and part.tensor.inputs > 0
            piece = array.reshape(columns, rows).T if turned else array.reshape(rows, columns)
            matrix[top : top + rows, left : left + columns] = piece
    return found


def near(found, wanted, tolerance, what):
    error = np.abs(found - wanted).max() / np.abs(wanted).max()
    assert error <= tolerance, f"{what}: {error:.2e}"


class FirstLogits:
    """Cross-entropy that notes the logits of the first document, whose parts are on several devices."""

    def __init__(self, name):
        self.found = np.full(expected(name)["logits"].shape, np.nan, np.float32)

    def __call__(self, logits, tokens, train):
        jax.debug.callback(self._note, logits.values_CV, logits.ids_V, tokens["segments"], tokens["positions"])
        return cross_entropy(logits, tokens, train)

    def _note(self, values_CV, ids_V, segments_C, positions_C):
        of_C, known_V = np.asarray(segments_C) == 1, np.asarray(ids_V) < self.found.shape[1]
        self.found[np.ix_(positions_C[of_C], ids_V[known_V])] = values_CV[of_C][:, known_V]


@pytest.mark.parametrize("name", in_tiers(set(map(NAMES.index, QUICK_NAMES)), NAMES))
def test_logits_are_those_of_the_reference(name):
    config = chosen(name)
    spec = inference_spec(config, config.model.vocab_size)
    params = loaded(name, spec)
    logits = jax.jit(functools.partial(row_logits, spec))(params, initial_buffers(spec), texts(name)[0][None, :-1])
    near(np.asarray(logits)[0], expected(name)["logits"], 2e-5, name)


LONG = {
    "llama-b": {
        "rope_theta": 500000.0,
        "rope_scaling": {"type": "llama3", "factor": 8.0, "original_max_positions": 640},
    },
    "qwen3-b": {
        "rope_theta": 2e6,
        "rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_positions": 640},
    },
}
"""Settings of `LONG` in tests/reference/make.py."""


@pytest.mark.parametrize("length", [600, 4096])
@pytest.mark.parametrize("name", in_tiers({1}, LONG))
def test_rows_become_longer_with_other_rotary_positions(name, length):
    """A run that begins with the model lists what it changes. Rows of 4,096 tokens are divided among devices."""
    wanted = load_file(REFERENCE / name / "long.safetensors")
    released = chosen(name).model
    model = parse_config({"model": released.model_dump() | LONG[name]}).model
    origin, tokenizer = (
        folder_origin(Folder(REFERENCE / name, "hf"), "run.init_from"),
        SimpleNamespace(text=None, chat=None),
    )
    changes = sorted({key.partition(".")[0] for key in different_settings(released, model)})
    with pytest.raises(ConfigError, match=r"init_from_changes=\[rope_scaling, rope_theta\]"):
        check_compatible(origin, model, tokenizer)
    check_compatible(origin, model, tokenizer, changes)

    config = chosen(name).model_copy(update={"model": model})
    devices = 1 if length == 600 else 4
    mesh = Mesh(data=1, context=devices)
    spec = inference_spec(config, model.vocab_size, mesh, jax.devices()[:devices])
    tokens = wanted["tokens"][None, :length]
    logits = jax.jit(functools.partial(row_logits, spec))(loaded(name, spec), {}, tokens)
    near(np.asarray(logits)[0, wanted[f"places_{length}"]], wanted[f"logits_{length}"], 2e-5, name)


# All models compute on the mesh, and the smaller model of each family on one device as well.
CASES = [(name, mesh) for name in NAMES for mesh in ((MESH, {}) if name.endswith("-b") else (MESH,))]


@pytest.mark.parametrize(("name", "mesh"), in_tiers({CASES.index(("llama-a", MESH))}, CASES))
def test_loss_logits_and_each_gradient_are_those_of_the_reference(name, mesh):
    config = chosen(name)
    config = config.model_copy(update={"mesh": config.mesh.model_copy(update={"data": 1, **mesh})})
    noted = FirstLogits(name)
    spec = build_spec(config, config.model.vocab_size, jax.devices()[: 8 if mesh else 1])
    spec = replace(spec, loss=noted)
    batch = to_devices(packed(name), list(range(len(ROWS))), len(ROWS), spec.placement.sharding(("batch", "length")))
    axes, shardings = spec.definition.axes, jax.tree.map(lambda leaf: leaf.sharding, abstract_state(spec)["params"])
    place = lambda params: map_with_axes(spec.layout.to_device_layout, params, axes)
    params = jax.jit(place, out_shardings=shardings)(loaded(name, spec))

    def compute(params, batch):
        found = mean_gradients(spec, params, initial_buffers(spec), batch, jnp.int32(0))
        return found.sums.loss * found.scale, found.gradients

    loss, gradients = jax.jit(compute)(params, batch)
    gradients = jax.jit(lambda tree: map_with_axes(spec.layout.to_checkpoint_layout, tree, axes))(gradients)
    wanted = expected(name)
    jax.effects_barrier()
    near(noted.found, wanted["logits"], 2e-5, "logits")
    assert float(loss) == pytest.approx(wanted["losses"].sum() / sum(wanted["lengths"] - 1), rel=1e-5)
    found = tensors_of(spec.definition, gradients)
    named = {key.removeprefix("gradient."): value for key, value in wanted.items() if key.startswith("gradient.")}
    assert found.keys() == named.keys()
    for key, value in named.items():
        near(found[key], value, 2e-5, key)


@functools.cache
def called(name, **mesh):
    """The model on a mesh of one device or several, and its parameters."""
    config = chosen(name)
    sizes = config.mesh.model_copy(update={"data": 1, **mesh})
    devices = int(np.prod(list(mesh.values()), initial=1))
    spec = inference_spec(config, config.model.vocab_size, sizes, jax.devices()[:devices])
    return spec, loaded(name, spec)


def prompts(name):
    found = expected(name)
    return [texts(name)[1][start : start + length] for start, length in zip(found["starts"], (5, 17, 40), strict=True)]


def generated(name, asked, most=64, sampling=GREEDY, **mesh):
    """[prompts, most]"""
    spec, params = called(name, **mesh)
    generator = Generator(spec)
    weights = generator.place(params, initial_buffers(spec))
    return np.stack(list(generator.generate(weights, asked, most, sampling)), axis=1)


@pytest.mark.parametrize("name", in_tiers({NAMES.index("gpt2-a")}, NAMES))
def test_greedy_generation_is_that_of_the_reference(name):
    """Of three prompts of different lengths at once, with a cache; without one, and one by one."""
    wanted = expected(name)["generated"]
    np.testing.assert_array_equal(generated(name, prompts(name)), wanted)
    for prompt, row in zip(prompts(name), wanted, strict=True):
        np.testing.assert_array_equal(generated(name, [prompt])[0], row)
    spec, params = called(name)
    whole = np.concatenate([prompts(name)[1], wanted[1]])
    logits = jax.jit(functools.partial(row_logits, spec))(params, initial_buffers(spec), whole[None, :-1])
    np.testing.assert_array_equal(np.argmax(logits[0, 16:], -1), wanted[1])


@pytest.mark.parametrize("name", in_tiers({2}, [name for name in NAMES if name.endswith("a")]))
def test_generation_on_a_mesh_is_the_same(name):
    """Over heads that divide and heads that do not, and rows that are filled up."""
    np.testing.assert_array_equal(
        generated(name, prompts(name), 24, model=2, fsdp=2), expected(name)["generated"][:, :24]
    )


@pytest.mark.parametrize("name", in_tiers({NAMES.index("llama-a")}, NAMES))
def test_log_likelihoods_are_those_of_the_reference(name):
    spec, params = called(name)
    found = functools.partial(jax.jit(functools.partial(row_scores, spec)), params, initial_buffers(spec))
    for text, loss in zip(texts(name), expected(name)["losses"], strict=True):
        padded = np.zeros((1, LENGTH + 1), np.int32)
        padded[0, : len(text)] = text
        scores = found(padded[:, :-1], padded[:, 1:])
        near(-np.sum(np.asarray(scores.log_p_BL)[0, : len(text) - 1], dtype=np.float64), loss, 1e-5, name)


@pytest.mark.slow
def test_a_sample_depends_on_its_seed_and_number_alone():
    sampling = Sampling(temperature=1.3, top_k=20, top_p=0.9, seed=3)
    together = generated("llama-b", prompts("llama-b"), 12, sampling)
    np.testing.assert_array_equal(together, generated("llama-b", prompts("llama-b"), 12, sampling, fsdp=2))
    assert (together != generated("llama-b", prompts("llama-b"), 12, Sampling(1.3, 20, 0.9, seed=4))).any()


def test_tokens_are_drawn_as_often_as_they_are_likely():
    """Of those that top-k and top-p leave."""
    spec, params = called("llama-b")
    prompt = prompts("llama-b")[0]
    logits = np.asarray(jax.jit(functools.partial(row_logits, spec))(params, {}, prompt[None]))[0, -1]
    drawn = generated("llama-b", [prompt] * 4000, 1, Sampling(2.0, 6, 0.8))[:, 0]
    p = np.exp(logits / 2 - np.max(logits / 2))
    order = np.argsort(-p)[:6]
    p = p[order] / p[order].sum()
    kept = np.concatenate([[True], np.cumsum(p)[:-1] < 0.8])
    assert set(drawn) == set(order[kept])
    shares = np.array([np.mean(drawn == token) for token in order[kept]])
    np.testing.assert_allclose(shares, p[kept] / p[kept].sum(), atol=0.03)


@pytest.mark.exhaustive
def test_the_reference_makes_the_same_numbers_again(tmp_path):
    """With the versions of requirements.txt, in an environment of their own (REFERENCE_PYTHON: one that is there)."""
    python = os.environ.get("REFERENCE_PYTHON")
    if python is None:
        venv.create(tmp_path / "venv", with_pip=True)
        python = str(tmp_path / "venv" / "bin" / "python")
        wanted = ["-r", str(REFERENCE / "requirements.txt")]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
    subprocess.run([python, str(REFERENCE / "make.py"), str(tmp_path / "made")], check=True)
    for name in NAMES:
        convert.main(["from-hf", str(REFERENCE / name), str(tmp_path / "runs" / name)])
        convert.main(["to-hf", str(tmp_path / "runs" / name), str(tmp_path / "back" / name), "--file-gb", "1e-4"])
    subprocess.run([python, str(REFERENCE / "make.py"), "check", str(tmp_path / "back")], check=True)
    for name in ("about.json", "presets.json"):
        assert (tmp_path / "made" / name).read_text() == (REFERENCE / name).read_text()
    for name in NAMES:
        for file in ("expected.safetensors", "model.safetensors", "long.safetensors"):
            if not (REFERENCE / name / file).exists():
                continue
            found, wanted = load_file(tmp_path / "made" / name / file), load_file(REFERENCE / name / file)
            assert found.keys() == wanted.keys()
            for key, array in wanted.items():
                if file == "model.safetensors" or array.dtype.kind == "i":
                    assert found[key].tobytes() == array.tobytes(), f"{name}: {key}"
                else:  # products may be added up in another order elsewhere
                    near(found[key], array, 1e-5, f"{name}: {key}")
