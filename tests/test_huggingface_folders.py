"""Folders of Hugging Face that contradict themselves: read as transformers 5.23.0 does, or refused with both named.

cases/huggingface/rotary.json: rotary settings of config.json, and those that transformers has then (null: it fails).
cases/huggingface/rotary_scores.json: log-likelihoods of a text by transformers with such settings.
"""

import functools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import in_tiers
from safetensors.numpy import load_file, save_file
from test_huggingface import REFERENCE, near, texts

from jaxmnt import convert
from jaxmnt.checkpoint.refs import find
from jaxmnt.config.load import parse_config
from jaxmnt.config.model import RopeScaling
from jaxmnt.data.manifest import NAMELESS
from jaxmnt.data.run_tokenizer import RunTokenizer, tokenizer_from_json
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError
from jaxmnt.huggingface import export as exports
from jaxmnt.huggingface.companions import match_tokenizer
from jaxmnt.huggingface.config import read_config, write_config
from jaxmnt.huggingface.load import load_parameters
from jaxmnt.training.build import inference_spec
from jaxmnt.training.inference import row_scores
from jaxmnt.training.state import abstract_state

CASES = Path(__file__).parent / "cases" / "huggingface"
ROTARY = json.loads((CASES / "rotary.json").read_text())
SCORES = json.loads((CASES / "rotary_scores.json").read_text())


@pytest.fixture
def folder(tmp_path):
    """Copies a model that tests may spoil."""

    def copy(name):
        shutil.copytree(REFERENCE / name, tmp_path / name, ignore=shutil.ignore_patterns("expected*"))
        return tmp_path / name

    return copy


def config_of(name):
    return json.loads((REFERENCE / name / "config.json").read_text())


def with_rotary(name, rotary):
    """The config.json of a reference model with other rotary settings."""
    return {key: value for key, value in config_of(name).items() if not key.startswith("rope")} | rotary


def scaling_of(parameters):
    """`model.rope_scaling` for one set of rotary parameters of transformers."""
    kind = parameters["rope_type"]
    names = {
        "factor": "factor", "low_freq_factor": "low_frequency_factor", "high_freq_factor": "high_frequency_factor",
        "original_max_position_embeddings": "original_max_positions",
    }  # fmt: skip
    if kind == "default":
        return RopeScaling()
    return RopeScaling(
        type=kind, **{ours: parameters[theirs] for theirs, ours in names.items() if theirs in parameters}
    )


@pytest.mark.parametrize("case", ROTARY, ids=str)
def test_rotary_settings_are_those_of_transformers_or_refused(case):
    tree = with_rotary(f"{case['family']}-a", case["config"])
    try:
        model = parse_config({"model": read_config(tree, "config.json")}).model
    except ConfigError as error:
        assert any(word in str(error) for word in ("rope_parameters.", "rope_type is", "partial_rotary_factor"))
        assert not ("rope_scaling" in tree and case["family"] == "llama"), "a replaced set is read, and not refused"
        return
    expected = case["transformers"]
    full = expected.get("full_attention", expected)
    assert model.rope_theta == full["rope_theta"]
    assert model.rope_scaling == scaling_of(full)
    if "sliding_attention" in expected and case["family"] != "llama":
        assert model.local_rope_theta == expected["sliding_attention"]["rope_theta"]


@pytest.mark.parametrize("case", in_tiers({0}, SCORES), ids=lambda case: case["case"])
def test_a_text_is_as_likely_as_transformers_finds_it(case):
    settings = read_config(with_rotary("llama-b", case["config"]), "config.json")
    config = parse_config({"model": settings, "data": {"sequence_length": 600}, "train": {"precision": "float32"}})
    spec = inference_spec(config, config.model.vocab_size)
    params = load_parameters(REFERENCE / "llama-b", spec.definition, abstract_state(spec)["params"], Identity()).params
    text = texts("llama-b")[0][None]
    scores = jax.jit(functools.partial(row_scores, spec))(params, {}, text[:, :-1], text[:, 1:])
    found = np.sum(np.asarray(scores.log_p_BL), dtype=np.float64)
    near(found, np.float64(case["log_likelihood"]), 1e-5, case["case"])


def test_a_text_model_and_the_model_around_it_must_agree():
    tree = {"model_type": "gemma3", "text_config": config_of("gemma3-b"), "tie_word_embeddings": True}
    words = "tie_word_embeddings is false, but tie_word_embeddings outside of text_config is true"
    with pytest.raises(ConfigError, match=words):
        read_config(tree, "config.json")
    assert read_config(tree | {"tie_word_embeddings": False}, "config.json")["family"] == "gemma3"


def test_windows_that_transformers_does_not_read_are_refused():
    tree = {key: value for key, value in config_of("olmo3-a").items() if key != "layer_types"}
    with pytest.raises(
        ConfigError, match=r"sliding_window_pattern is 2, but transformers ignores this key in .* olmo3"
    ):
        read_config(tree | {"sliding_window_pattern": 2}, "config.json")


def test_gemma_3_has_no_soft_cap_of_attention():
    """transformers gives the same log-likelihood, −2878.0697 for gemma3-b, with and without the key."""
    with pytest.raises(ConfigError, match=r"attn_logit_softcapping is 20.0, but the family gemma3 supports only null"):
        read_config(config_of("gemma3-b") | {"attn_logit_softcapping": 20.0}, "config.json")
    settings = read_config(config_of("gemma3-b"), "config.json") | {"attention_soft_cap": 20.0}
    with pytest.raises(ConfigError, match=r"model.attention_soft_cap: .* transformers ignores it in gemma3_text"):
        write_config(parse_config({"model": settings}).model, {})


# -- weights


def convert_folder(path):
    return convert.main(["from-hf", str(path), str(path.parent / "run")])


def test_a_head_beside_a_tied_embedding_is_refused(folder):
    path = folder("llama-b")
    arrays = load_file(path / "model.safetensors")
    embedding = arrays["model.embed_tokens.weight"]
    save_file(arrays | {"lm_head.weight": embedding.copy()}, path / "model.safetensors")
    assert convert_folder(path) == 0, "the embedding twice says nothing new"
    shutil.rmtree(path.parent / "run")
    head = embedding.copy()
    head[-1, -1] += 1
    save_file(arrays | {"lm_head.weight": head}, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"sets tie_word_embeddings, but lm_head\.weight in .* differs from"):
        convert_folder(path)
    (path / "config.json").write_text(json.dumps(config_of("llama-b") | {"tie_word_embeddings": False}))
    assert convert_folder(path) == 0


def test_one_file_of_weights_beside_an_index_of_others_is_refused(folder):
    path = folder("llama-b")
    arrays = load_file(path / "model.safetensors")
    save_file(arrays, path / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(arrays, "model-00001-of-00001.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ConfigError, match=r"has both model\.safetensors and model\.safetensors\.index\.json, which names mod"
    ):
        convert_folder(path)
    (path / "model.safetensors").unlink()
    assert convert_folder(path) == 0


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("model.norm.weight", r"model\.norm\.weight is in a\.safetensors and in b\.safetensors; remove one"),
        ("model.layers.0.self_attn.q_proj.bias", r"b\.safetensors has the tensor model\.layers\.0\.self_attn\.q_proj"),
    ],
)
def test_a_tensor_that_the_index_does_not_name_counts(folder, extra, words):
    """transformers reads all that the files of an index hold."""
    path = folder("llama-b")
    arrays = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    last = "model.embed_tokens.weight"
    save_file({key: array for key, array in arrays.items() if key != last}, path / "a.safetensors")
    save_file({last: arrays[last], extra: arrays["model.norm.weight"] + 1}, path / "b.safetensors")
    files = {key: "b.safetensors" if key == last else "a.safetensors" for key in arrays}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ConfigError, match=words):
        convert_folder(path)


# -- what an export holds


def exported(checkpoint, companions, tokenizer, folder, dtype=None):
    export = exports.plan_export(
        checkpoint, exports.CheckpointArrays(checkpoint), companions, tokenizer, dtype, 1 << 30
    )
    assert exports.write_export(export, folder)
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The checkpoint of a run made of qwen2-a, whose head is not tied."""
    run = tmp_path_factory.mktemp("converted") / "run"
    convert.main(["from-hf", str(REFERENCE / "qwen2-a"), str(run)])
    return find(str(run), "run")


def test_rows_that_no_id_has_are_not_exported(converted, tmp_path):
    """Training masks them. Rows that came with a model stay, bit for bit."""
    rows = config_of("qwen2-a")["vocab_size"]
    tokenizer = RunTokenizer({"name": NAMELESS, "end_of_document": 3}, rows - 5, None)
    arrays, config = exported(converted, {}, tokenizer, tmp_path / "taught")
    before = load_file(REFERENCE / "qwen2-a" / "model.safetensors")
    assert config["vocab_size"] == rows - 5
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        np.testing.assert_array_equal(arrays[name], before[name][: rows - 5])
    assert arrays["model.norm.weight"].shape == before["model.norm.weight"].shape
    companions = {"config.json": (REFERENCE / "qwen2-a" / "config.json").read_bytes()}
    arrays, config = exported(converted, companions, tokenizer, tmp_path / "all")
    assert (config["vocab_size"], len(arrays["lm_head.weight"])) == (rows, rows)


def test_the_end_of_documents_is_exported(converted, tmp_path):
    """What the run was trained to end with counts beside what ended a text before, as in generate."""
    tokenizer = RunTokenizer({"name": NAMELESS, "end_of_document": 3, "end_token": "<end>"}, 40, None)
    files = {
        "config.json": json.dumps(config_of("qwen2-a") | {"eos_token_id": 7}).encode(),
        "generation_config.json": b'{"eos_token_id": [7, 8], "top_k": 5}',
        "tokenizer_config.json": b'{"eos_token": {"content": "</s>"}}',
    }
    trained = replace(converted, manifest=replace(converted.manifest, tokens=100))
    _, config = exported(trained, files, tokenizer, tmp_path / "out")
    assert config["eos_token_id"] == [3, 7]
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [3, 7, 8], "top_k": 5}
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["eos_token"] == "<end>"
    _, config = exported(converted, files, tokenizer, tmp_path / "untrained")
    assert config["eos_token_id"] == 7, "nothing was trained"


def test_files_of_another_tokenizer_are_not_exported(converted, tmp_path):
    text = json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": []})
    files = {
        "config.json": json.dumps(config_of("qwen2-a") | {"eos_token_id": 7, "bos_token_id": 1}).encode(),
        "tokenizer.json": text.encode(), "tokenizer_config.json": b"{}", "chat_template.jinja": b"{{ messages }}",
    }  # fmt: skip
    other = RunTokenizer({"name": "bytes", "end_of_document": 256}, 257, None)
    _, config = exported(converted, files, other, tmp_path / "out")
    assert (config["eos_token_id"], config["bos_token_id"]) == (256, None)
    assert not {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} & {
        path.name for path in (tmp_path / "out").iterdir()
    }
    assert match_tokenizer(files, tokenizer_from_json(text + "\n", 1)) == files


def test_a_folder_of_bytes_does_not_say_so_of_another_tokenizer():
    config = config_of("qwen2-a") | {"eos_token_id": 256, "jaxmnt_tokenizer": "bytes"}
    files = {"config.json": json.dumps(config).encode()}
    assert match_tokenizer(files, RunTokenizer({"name": "bytes", "end_of_document": 256}, 257, None)) == files
    other = tokenizer_from_json(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": []}), 1)
    left = json.loads(match_tokenizer(files, other)["config.json"])
    assert "jaxmnt_tokenizer" not in left
    assert "eos_token_id" not in left


@pytest.mark.parametrize(
    ("value", "dtype", "words"),
    [
        (
            70000.0,
            "float16",
            "model.norm.weight holds 70000, but the largest number of float16 is 65504; choose bfloat16",
        ),
        (
            3.4e38,
            "bfloat16",
            "model.norm.weight holds 3.4e+38, but the largest number of bfloat16 is 3.38953e+38; choose float32",
        ),
    ],
)
def test_a_number_that_a_dtype_cannot_hold_is_named(folder, value, dtype, words):
    path = folder("qwen2-a")
    arrays = load_file(path / "model.safetensors")
    arrays["model.norm.weight"] = arrays["model.norm.weight"].astype(np.float32)
    arrays["model.norm.weight"][1] = value
    save_file(arrays, path / "model.safetensors")
    assert convert_folder(path) == 0
    out = path.parent / "out"
    with pytest.raises(ConfigError, match=re.escape(words)):
        convert.main(["to-hf", str(path.parent / "run"), str(out), "--dtype", dtype])
    assert not [path for path in out.parent.iterdir() if "out" in path.name], "nothing is left of it"
    if dtype == "bfloat16":
        with pytest.raises(ConfigError, match=r"params/norm/scale holds 3\.4e\+38"):
            convert.main(["from-hf", str(path), str(path.parent / "again"), "--dtype", dtype])
        assert not (path.parent / "again").exists()
