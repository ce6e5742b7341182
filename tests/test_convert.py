"""From and to the files of Hugging Face: the same bits there and back, what a config.json means, and bad folders."""

import functools
import json
import shutil
import struct

import jax
import numpy as np
import pytest
from conftest import events, in_tiers, launch
from safetensors.numpy import load_file, save_file
from test_huggingface import NAMES, REFERENCE, expected, near, texts

from jaxmnt import convert
from jaxmnt.checkpoint.export import verify
from jaxmnt.checkpoint.manifest import DamagedError
from jaxmnt.checkpoint.refs import find
from jaxmnt.config.load import parse_config
from jaxmnt.config.model import presets
from jaxmnt.data.run_tokenizer import tokenizer_of_data
from jaxmnt.data.tokenizer import HuggingFace
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError, ExitCode, UserError
from jaxmnt.huggingface import export as exports
from jaxmnt.huggingface.compatibility import check_compatible, different_settings, folder_origin
from jaxmnt.huggingface.config import read_config, write_config
from jaxmnt.huggingface.folder import Folder
from jaxmnt.huggingface.load import load_parameters
from jaxmnt.huggingface.tensors import Part
from jaxmnt.models.contract import define
from jaxmnt.models.huggingface import Tensor
from jaxmnt.models.registry import build_family
from jaxmnt.train import train
from jaxmnt.training.build import inference_spec
from jaxmnt.training.inference import row_logits
from jaxmnt.training.state import abstract_state


@pytest.fixture
def folder(tmp_path):
    """A copy of a model that tests may spoil."""

    def copy(name):
        shutil.copytree(REFERENCE / name, tmp_path / name, ignore=shutil.ignore_patterns("expected*"))
        return tmp_path / name

    return copy


def tree(name):
    return json.loads((REFERENCE / name / "config.json").read_text())


# -- there and back


QUICK_NAMES = ("gemma2-a", "gpt2-a", "gpt2-b", "qwen3-a", "qwen3_moe-a")


@pytest.mark.parametrize("name", in_tiers(set(map(NAMES.index, QUICK_NAMES)), NAMES))
def test_there_and_back_the_files_hold_the_same_bits(name, tmp_path, monkeypatch):
    monkeypatch.setattr(exports, "_PIECE_BYTES", 2000)
    assert convert.main(["from-hf", str(REFERENCE / name), str(tmp_path / "run")]) == ExitCode.FINISHED
    verify(tmp_path / "run" / "checkpoints" / "0", None)
    written = ["to-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--file-gb", "6e-5", "--processes", "3"]
    for process in (2, 0, 1):
        assert not (tmp_path / "out").exists(), "one share is not all"
        assert convert.main([*written, "--process-id", str(process)]) == ExitCode.FINISHED
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    found = {key: load_file(tmp_path / "out" / file)[key] for key, file in index.items()}
    before = load_file(REFERENCE / name / "model.safetensors")
    assert found.keys() == before.keys()
    for key, array in before.items():
        assert (found[key].dtype, found[key].tobytes()) == (array.dtype, array.tobytes()), key
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    models = [parse_config({"model": read_config(one, "config.json")}).model for one in (after, tree(name))]
    assert different_settings(*models) == []
    told = {key: value for key, value in tree(name).items() if value is not None}
    assert {key: after.get(key, value) for key, value in told.items()} == told, "nothing is told otherwise"


def test_an_export_that_was_interrupted_goes_on(tmp_path, monkeypatch):
    convert.main(["from-hf", str(REFERENCE / "qwen2-b"), str(tmp_path / "run"), "--dtype", "bfloat16"])
    command = ["to-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--file-gb", "6e-5"]
    whole, written = exports._write_file, []

    def once(export, file, *rest):
        if written:
            raise OSError("gone")
        written.append(file)
        whole(export, file, *rest)

    monkeypatch.setattr(exports, "_write_file", once)
    with pytest.raises(UserError, match="cannot be written: gone; fix that and run the same command again"):
        convert.main(command)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(exports, "_write_file", lambda *all: (written.append(all[1]), whole(*all)))
    assert convert.main(command) == ExitCode.FINISHED
    assert len(written) == len(set(written)), "no file is written twice"
    assert [path.name for path in tmp_path.iterdir() if "building" in path.name] == []
    with pytest.raises(ConfigError, match="out exists already; name a new folder"):
        convert.main(command)


def test_a_layer_larger_than_a_file_has_a_file_of_its_own():
    parts = {name: [Part(Tensor(name), (size,))] for name, size in (("a", 100), ("b", 10), ("c", 10), ("d", 30))}
    files = exports.divide_into_files(parts, 4, file_bytes=100)
    assert [[work.parameters for work in file] for file in files.values()] == [[("a",)], [("b",), ("c",)], [("d",)]]


def test_an_export_of_damaged_arrays_is_none(tmp_path):
    convert.main(["from-hf", str(REFERENCE / "llama-a"), str(tmp_path / "run")])
    checkpoint = find(str(tmp_path / "run"), "run")
    wrong = checkpoint.manifest.arrays["params/norm/scale"]
    checkpoint.manifest.arrays["params/norm/scale"] = type(wrong)(wrong.shape, wrong.dtype, "0" * 16)
    export = exports.plan_export(checkpoint, exports.CheckpointArrays(checkpoint), {}, None, None, 1 << 30)
    with pytest.raises(DamagedError, match="array params/norm/scale is not what was saved"):
        exports.write_export(export, tmp_path / "out")
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_a_run_begins_with_the_weights_of_a_folder(tiny, tmp_path):
    """Straight onto a mesh; what came with the model goes on with the run, and out of it."""
    source = tmp_path / "model"
    shutil.copytree(REFERENCE / "llama-a", source, ignore=shutil.ignore_patterns("expected*"))
    (source / "generation_config.json").write_text('{"temperature": 0.6}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    sections = read_config(tree("llama-a"), "config.json")
    chosen = {"data.path": "null", "data.synthetic": "53", "run.init_from": f"hf:{source}", "model.vocab_size": "53"}
    overrides = [f"{key}={value}" for key, value in chosen.items()]

    def config(*more):
        made = tiny(*overrides, "mesh.fsdp=2", "train.stop_after=1", "optimizer.learning_rate=1e-30", *more)
        return made.model_copy(update={"model": parse_config({"model": sections}).model})

    assert train(config(f"run.dir={tmp_path / 'run'}"), devices=jax.devices()[:2]) == ExitCode.STOPPED
    assert [event["source"] for event in events(tmp_path / "run", "restore")] == ["hf"]
    assert convert.main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == ExitCode.FINISHED
    after, before = (load_file(path / "model.safetensors") for path in (tmp_path / "out", source))
    for key, array in before.items():
        np.testing.assert_allclose(after[key], array, atol=1e-6)
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"temperature": 0.6}'
    assert (tmp_path / "out" / "chat_template.jinja").exists()
    other = config(f"run.dir={tmp_path / 'other'}")
    other = other.model_copy(update={"model": other.model.model_copy(update={"rope_theta": 1e4, "num_kv_heads": 6})})
    with pytest.raises(ConfigError, match=r"set model.num_kv_heads=3 model.rope_theta=500000.0, or take the section"):
        train(other, devices=jax.devices()[:2])


# -- what a config.json means


def test_rope_is_read_as_it_was_said_before():
    for name in ("llama-a", "qwen3-a", "gemma3-a", "llama-b"):
        new, old = tree(name), tree(name)
        parameters = old.pop("rope_parameters")
        full = dict(parameters.get("full_attention", parameters))
        if "sliding_attention" in parameters and name.startswith("gemma"):
            old["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        old |= {"rope_theta": full.pop("rope_theta"), "rope_scaling": full}
        if not name.startswith("gemma"):  # where transformers knows only the newer name
            full["type"] = full.pop("rope_type")
        assert read_config(old, "old") == read_config(new, "new"), name


def test_windows_are_read_from_a_list_or_a_number():
    listed, counted = tree("gemma3-a"), tree("gemma3-a")
    del counted["layer_types"]
    assert read_config(counted | {"sliding_window_pattern": 3}, "n") == read_config(listed, "l")
    shorter = listed | {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}
    assert read_config(shorter, "s")["sliding_window_pattern"] > 2


def test_the_text_model_of_a_larger_one_is_taken(folder):
    path = folder("gemma3-b")
    arrays = load_file(path / "model.safetensors")
    larger = {f"language_model.{key}": array for key, array in arrays.items()}
    save_file(larger | {"vision_tower.patch.weight": np.zeros((2, 2), np.float32)}, path / "model.safetensors")
    (path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": tree("gemma3-b"), "vision_config": {}})
    )
    near(logits(path), expected("gemma3-b")["logits"], 2e-5, "the text model")


def logits(path, **changes):
    """Of the first document, by the model in a folder."""
    settings = read_config(json.loads((path / "config.json").read_text()), "config.json") | changes
    config = parse_config({"model": settings, "data": {"sequence_length": 600}, "train": {"precision": "float32"}})
    spec = inference_spec(config, config.model.vocab_size)
    params = load_parameters(path, spec.definition, abstract_state(spec)["params"], Identity()).params
    buffers = spec.definition.initial_buffers()
    return np.asarray(jax.jit(functools.partial(row_logits, spec))(params, buffers, texts(path.name)[0][None, :-1]))[0]


@pytest.mark.parametrize("name", ["qwen3_moe-a", pytest.param("mixtral-a", marks=pytest.mark.slow)])
def test_experts_that_share_a_tensor_are_read(folder, name):
    """As transformers holds them in memory."""
    path = folder(name)
    arrays = load_file(path / "model.safetensors")
    names = ("w1", "w3", "w2") if name.startswith("mixtral") else ("gate_proj", "up_proj", "down_proj")
    for layer in range(2):
        prefix = f"model.layers.{layer}.{'block_sparse_moe' if 'w1' in names else 'mlp'}"
        experts = sum(key.startswith(f"{prefix}.experts.") for key in arrays) // 3
        take = lambda one, prefix=prefix, experts=experts: np.stack(
            [arrays.pop(f"{prefix}.experts.{expert}.{one}.weight") for expert in range(experts)]
        )
        gates, ups, downs = map(take, names)
        joined = f"model.layers.{layer}.mlp"
        arrays[f"{joined}.experts.gate_up_proj"] = np.concatenate([gates, ups], 1)
        arrays[f"{joined}.experts.down_proj"] = np.ascontiguousarray(downs)
        arrays[f"{joined}.gate.weight"] = arrays.pop(f"{prefix}.gate.weight")
    save_file(arrays, path / "model.safetensors")
    near(logits(path), expected(name)["logits"], 2e-5, name)
    part = f"{prefix}.experts.1.{names[2]}.weight"
    save_file(arrays | {part: downs[1].copy()}, path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"has {part} twice; remove one of them"):
        logits(path)


def test_a_host_with_other_files_is_named(folder, monkeypatch):
    monkeypatch.setattr("jaxmnt.huggingface.load.broadcast", lambda name, value, identity: value + " of process 0")
    with pytest.raises(ConfigError, match=r"the files in .*llama-a differ between process 0 and process 0; give all"):
        logits(folder("llama-a"))


@pytest.mark.parametrize("changes", [{}, {"rope_scaling": {}}, {"rope_theta": 400000.0}])
def test_a_fault_of_positions_would_show(folder, changes):
    """A permutation that is left out, as between halves and neighbours, and what scales or bases are wrong."""
    path = folder("llama-a")
    if not changes:
        arrays = load_file(path / "model.safetensors")
        for key in [key for key in arrays if "q_proj" in key or "k_proj" in key]:
            heads = arrays[key].reshape(-1, 2, 5, arrays[key].shape[1])
            arrays[key] = np.ascontiguousarray(heads.swapaxes(1, 2).reshape(arrays[key].shape))
        save_file(arrays, path / "model.safetensors")
    with pytest.raises(AssertionError, match="positions"):
        near(logits(path, **changes), expected("llama-a")["logits"], 2e-5, "positions")


RELEASED = {
    "google/gemma-3-27b": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
            "eos_token_id": [1, 106], "image_token_index": 262144, "mm_tokens_per_image": 256, "model_type": "gemma3",
            "text_config": {
                "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
                "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16,
                "query_pre_attn_scalar": 168, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "vision_config": {"hidden_size": 1152},
        },
        "gemma3-27b",
    ),
    "google/gemma-3-4b": (
        {
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
            },
            "vision_config": {},
        },
        "gemma3-4b",
    ),
    "meta-llama/Llama-3.2-1B": (
        {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
            "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
            "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
            "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
            "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
        },
        "llama3.2-1b",
    ),
    "Qwen/Qwen2.5-0.5B": (
        {
            "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
            "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
            "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
            "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False,
            "use_sliding_window": False, "vocab_size": 151936,
        },
        "qwen2.5-0.5b",
    ),
    "openai-community/gpt2-medium": (
        {
            "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
            "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 1024, "n_head": 16,
            "n_layer": 24, "n_positions": 1024, "n_special": 0, "predict_special_tokens": True, "resid_pdrop": 0.1,
            "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
            "summary_type": "cls_index", "summary_use_proj": True,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
        },
        "gpt2-medium",
    ),
}  # fmt: skip
"""The config.json of a release, and the preset of the same model."""


@pytest.mark.parametrize("released", RELEASED)
def test_a_config_that_was_released_means_its_preset(released):
    told, name = RELEASED[released]
    model = parse_config({"model": read_config(told, released)}).model
    assert different_settings(model, parse_config({"model": {"preset": name}}).model) == []


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "llama-a",
            {"rope_parameters": {"rope_type": ["yarn"], "factor": 2}},
            r'rope_type is \["yarn"\]; supported types are',
        ),
        ("llama-a", {"rope_parameters": 3}, "rope_parameters must be an object, not 3"),
        ("llama-a", {"rope_parameters": {"rope_type": "linear"}}, "factor is missing, but rope_type linear needs it"),
        (
            "llama-a",
            {"rope_parameters": {"rope_type": "linear", "factor": "4"}},
            'factor must be a number above 0, not "4"',
        ),
        ("llama-a", {"layer_types": 5}, "layer_types must be a list of 3"),
        ("llama-a", {"num_hidden_layers": 3.5}, "num_hidden_layers must be an integer of at least 1, not 3.5"),
        ("llama-a", {"rope_interleaved": True}, "rope_interleaved is not a key of the family llama"),
        (
            "gemma3-a",
            {"rope_parameters": {"full_attention": 3}},
            "full_attention must be an object, not 3",
        ),
        (
            "gemma3-a",
            {"layer_types": None, "sliding_window_pattern": "6"},
            'sliding_window_pattern must be an integer of at least 1, not "6"',
        ),
        ("llama-a", {"model_type": "lama"}, r'model_type is "lama", which is not known; did you mean llama\?$'),
        ("llama-a", {"model_type": "x"}, 'model_type is "x", which is not known; known: gemma2, [a-z0-9_, ]*$'),
        ("llama-a", {"model_type": None}, "model_type is missing"),
        ("llama-a", {"attention_bias": True}, "attention_bias is true, but the family llama supports only false"),
        ("llama-a", {"hidden_act": "gelu"}, 'hidden_act is "gelu", but the family llama supports only "silu"'),
        ("llama-a", {"clever_routing": 3}, "clever_routing is not a key of the family llama, and may change"),
        ("llama-a", {"quantization_config": {}}, "quantised weights are not supported"),
        ("llama-a", {"hidden_size": None}, "hidden_size is missing"),
        ("llama-a", {"hidden_size": "wide"}, 'hidden_size must be a number, not "wide"'),
        (
            "llama-a",
            {"rope_parameters": {"rope_type": "longrope"}},
            'rope_type is "longrope"; supported types are default, linear',
        ),
        (
            "llama-a",
            {"rope_parameters": {"rope_type": "linear", "factr": 2}},
            "factr is not a supported key",
        ),
        ("llama-a", {"rope_parameters": {"rope_theta": 0}}, "rope_theta must be a number above 1, not 0"),
        ("llama-a", {"layer_types": ["sliding_attention"] * 3}, "must be full_attention for all 3 layers"),
        ("qwen3_moe-a", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\], but the family qwen3_moe supports only"),
        ("qwen2-a", {"use_sliding_window": True}, "use_sliding_window is true, but the family qwen2 supports only f"),
        ("gemma3-a", {"layer_types": ["full_attention"] + ["sliding_attention"] * 6}, "must repeat a pattern of"),
        ("gemma3-a", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        ("gpt2-a", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true"),
    ],
)
def test_what_would_alter_the_maths_is_refused(name, change, words):
    with pytest.raises(ConfigError, match=words):
        read_config({key: value for key, value in (tree(name) | change).items() if value is not None}, "config.json")


# -- folders that are not what they say


def header_of(path):
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_file(path, header, data):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def spoil(path, how):
    weights = path / "model.safetensors"
    arrays, norm = load_file(weights), "model.layers.1.input_layernorm.weight"
    header, data = header_of(weights)
    index = {"weight_map": dict.fromkeys(arrays, "model.safetensors")}
    if how == "missing":
        del arrays[norm]
        save_file(arrays, weights)
    elif how == "extra":
        save_file(arrays | {"model.layers.0.self_attn.q_proj.bias": np.zeros(60, np.float32)}, weights)
    elif how == "misshapen":
        save_file(arrays | {norm: np.zeros(35, np.float32)}, weights)
    elif how == "type":
        save_file(arrays | {norm: np.zeros(36, np.int8)}, weights)
    elif how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "offsets":
        header[norm]["data_offsets"][1] += 4
        write_file(weights, header, data)
    elif how == "beyond":
        header[norm]["data_offsets"] = [1 << 40, (1 << 40) + 144]
        write_file(weights, header, data)
    elif how == "pickle":
        weights.unlink()
        (path / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    elif how == "nothing":
        weights.unlink()
    elif how == "no json":
        (path / "config.json").write_text("[1, 2")
    else:
        index["weight_map"][norm] = {
            "no shard": "model-00002.safetensors", "outside": "../other/model.safetensors",
            "not there": "model.safetensors", "a pickle": "pytorch_model.bin",
        }[how]  # fmt: skip
        if how == "not there":
            del arrays[norm]
            save_file(arrays, weights)
        (path / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", r"lacks the tensor model\.layers\.1\.input_layernorm\.weight"),
        (
            "extra",
            r"has the tensor model\.layers\.0\.self_attn\.q_proj\.bias, which the model of config.json does not have",
        ),
        ("misshapen", r"input_layernorm\.weight in .* has the shape \[35\], but config.json requires \[36\]"),
        ("type", r"input_layernorm\.weight in .* is of type I8; supported types are F32, BF16, F16"),
        ("truncated", "model.safetensors is not a complete safetensors file: .*; copy it again"),
        ("offsets", "model.safetensors is not a complete safetensors file"),
        ("beyond", "model.safetensors is not a complete safetensors file"),
        ("no shard", r"names model-00002\.safetensors, which is not there; copy it"),
        ("outside", r"names \.\./other/model\.safetensors, not a file of the folder"),
        ("not there", r"model\.safetensors lacks the tensor .*, which model.safetensors.index.json says is there"),
        ("a pickle", r"names pytorch_model\.bin; only safetensors are read"),
        ("pickle", r"has pytorch_model\.bin, a pickle, which may run code and is not read; convert it to safetensors"),
        ("nothing", r"has neither model.safetensors nor model.safetensors.index.json"),
        ("no json", r"config\.json cannot be read: .*; copy it again"),
    ],
)
def test_a_folder_that_is_not_what_it_says_is_named(folder, how, words, tmp_path):
    path = folder("llama-a")
    spoil(path, how)
    with pytest.raises(ConfigError, match=words):
        convert.main(["from-hf", str(path), str(tmp_path / "run")])
    assert not (tmp_path / "run").exists(), "nothing is left of it"


def test_copies_of_another_model_are_told_apart(folder, tmp_path):
    """Of the same shapes: on two hosts they would be mixed, row by row."""
    path = folder("llama-a")
    before = Folder(path, "hf").fingerprint()
    arrays = load_file(path / "model.safetensors")
    save_file(arrays, path / "model.safetensors", metadata={"format": "pt"})
    assert Folder(path, "hf").fingerprint() == before
    save_file({key: array + 1 for key, array in arrays.items()}, path / "model.safetensors", metadata={"format": "pt"})
    assert Folder(path, "hf").fingerprint() != before


@pytest.mark.parametrize("where", ["arrays", "companions"])
def test_a_full_disk_leaves_no_half_written_run(folder, tmp_path, monkeypatch, where):
    def fail(*_, **__):
        raise OSError(28, "No space left on device", str(tmp_path / "run" / "x"))

    name = {"arrays": "checkpoint.arrays.Writer.write", "companions": "huggingface.companions.publish_bytes"}[where]
    monkeypatch.setattr(f"jaxmnt.{name}", fail)
    with pytest.raises(UserError, match="No space left on device; fix that"):
        convert.main(["from-hf", str(folder("llama-a")), str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_another_vocabulary_is_refused(folder, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    path, data = folder("llama-a"), tmp_path / "data"
    data.mkdir()

    def save(where, words):
        made = tokenizers.Tokenizer(
            tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="?")
        )
        made.save(str(where / "tokenizer.json"))
        return HuggingFace(where / "tokenizer.json").description

    model = parse_config({"model": read_config(tree("llama-a"), "config.json")}).model

    def fits(description, where, intended=()):
        origin = folder_origin(Folder(path, "run.init_from"), "run.init_from")
        check_compatible(origin, model, tokenizer_of_data(description, 53, where), intended)

    fits({"name": "bytes"}, data)  # a model without a tokenizer.json: nobody can tell
    own = save(path, "?ab")
    for other in ({"name": "bytes"}, save(data, "?ba")):
        with pytest.raises(ConfigError, match="the data was not made with the tokenizer of the model"):
            fits(other, data)
        fits(other, data, ["tokenizer"])
    fits(own, path)
    save(data, "?ab")
    with (data / "tokenizer.json").open("a") as file:
        file.write("\n")  # the same vocabulary in another file
    fits(HuggingFace(data / "tokenizer.json").description, data)
    with pytest.raises(ConfigError, match=r"run\.init_from_changes: tokenizer is the same in"):
        fits(own, path, ["tokenizer"])


# -- published models

PUBLISHED = {
    # In Meta's, Mistral's, Qwen's, Google's, Ai2's and OpenAI's reports and model cards; those of Gemma without the
    # embedding, as its reports count.
    "llama2-7b": "6.74B", "llama2-13b": "13.02B", "llama2-70b": "68.98B", "llama3-8b": "8.03B",
    "llama3.1-405b": "405.85B", "llama3.2-1b": "1.23B", "llama3.2-3b": "3.21B", "mistral-7b-v0.1": "7.24B",
    "mistral-nemo-12b": "12.2B", "qwen2.5-0.5b": "0.49B", "qwen2.5-1.5b": "1.54B", "qwen2.5-3b": "3.09B",
    "qwen2.5-7b": "7.61B", "qwen2.5-72b": "72.7B", "qwen3-0.6b": "0.6B", "qwen3-1.7b": "1.7B", "qwen3-4b": "4.0B",
    "qwen3-8b": "8.2B", "qwen3-14b": "14.8B", "qwen3-32b": "32.8B", "gemma2-2b": 2024517888,
    "gemma2-9b": 8324201984, "gemma2-27b": 26047480320, "gemma3-1b": "698M", "gemma3-4b": "3209M",
    "gemma3-12b": "10759M", "gemma3-27b": "25600M", "gpt2": "124M", "gpt2-medium": "355M", "gpt2-large": "774M",
    "gpt2-xl": "1558M",
}  # fmt: skip


@pytest.mark.parametrize("name", in_tiers({10, 21, 25, 34, 44}, list(presets())))
def test_a_published_model_has_the_parameters_of_the_reference(name):
    model = parse_config({"model": {"preset": name}}).model
    written = json.loads((REFERENCE / "presets.json").read_text())[name]
    assert write_config(model, {}) == written["config"], "make tests/reference/presets.json again"
    definition = define(build_family(model, model.vocab_size))
    assert definition.parameter_count == written["parameters"]
    if name in PUBLISHED:
        check_published(PUBLISHED[name], definition, model)


def check_published(told, definition, model):
    """To every digit that was published, rounded or cut off."""
    count = definition.parameter_count
    if model.family.startswith("gemma"):
        count -= model.vocab_size * model.hidden_size
    if isinstance(told, int):
        assert count == told
        return
    digits, unit = told[:-1], {"B": 1e9, "M": 1e6}[told[-1]]
    places = len(digits.partition(".")[2])
    exact = count / unit
    assert float(digits) in (round(exact, places), int(exact * 10**places) / 10**places)


def test_settings_of_a_preset_count_where_none_are_given():
    model = parse_config({"model": {"preset": "llama3.2-1b", "num_layers": 2, "rope_scaling": {"factor": 4.0}}}).model
    assert (model.num_layers, model.hidden_size, model.tie_embeddings) == (2, 2048, True)
    assert (model.rope_scaling.type, model.rope_scaling.factor) == ("llama3", 4.0)
    again = parse_config({"model": model.model_dump()}).model
    assert again == model
    with pytest.raises(ConfigError, match=r"model.preset: llama4 is not known; did you mean llama"):
        parse_config({"model": {"preset": "llama4"}})


def test_the_settings_of_a_folder_are_printed(capsys):
    assert convert.main(["settings", str(REFERENCE / "qwen3_moe-a")]) == ExitCode.FINISHED
    assert "# model.balance_loss is 0.003, which is router_aux_loss_coef times" in capsys.readouterr().out
    assert convert.main(["settings", str(REFERENCE / "gemma2-a")]) == ExitCode.FINISHED
    text = capsys.readouterr().out
    assert "family: gemma2" in text and "logit_soft_cap: 4.0" in text


def test_a_family_of_ones_own_has_no_names_there():
    """Although it may be a subclass of one that has."""
    own = parse_config({"model": {"family": "routed_scales.RoutedLlama"}}).model
    with pytest.raises(
        ConfigError, match=r"routed_scales\.RoutedLlama has no format in files of Hugging Face; use one of"
    ):
        write_config(own, {})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-a", "gpt2-b"])
def test_processes_together_read_each_byte_once(tmp_path, name):
    tree = {
        "run": {"dir": str(tmp_path / "run"), "init_from": f"hf:{REFERENCE / name}"},
        "model": read_config(json.loads((REFERENCE / name / "config.json").read_text()), "config.json"),
        "data": {"synthetic": 53, "global_batch_size": 4, "sequence_length": 16},
        "train": {"steps": 2, "stop_after": 1, "precision": "float32"},
        "optimizer": {"learning_rate": 1e-30},
        "mesh": {"fsdp": 4},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(tree))
    done = launch(tmp_path / "config.yaml", processes=2, devices=2)
    assert done.returncode == ExitCode.STOPPED, done.stderr
    read = [event["bytes"] for process in range(2) for event in events(tmp_path / "run", "restore", process)]
    arrays = load_file(REFERENCE / name / "model.safetensors")
    assert len(read) == 2 and sum(read) == sum(array.nbytes for array in arrays.values())
    assert max(read) < 1.2 * min(read), "and each its share"
    assert convert.main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    for key, array in load_file(tmp_path / "out" / "model.safetensors").items():
        np.testing.assert_allclose(array, np.asarray(arrays[key], np.float32), atol=1e-6, err_msg=key)
