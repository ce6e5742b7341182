"""Adapters against PEFT: five steps of AdamW from the same files, which tests/reference/lora.py wrote."""

import functools
import json

import jax
import numpy as np
import pytest
from conftest import in_tiers
from safetensors.numpy import load_file, save_file
from test_huggingface import LENGTH, REFERENCE, ROWS, expected, near, packed

from jaxmnt import convert
from jaxmnt.checkpoint.names import arrays_by_name
from jaxmnt.checkpoint.refs import find
from jaxmnt.config.load import parse_config
from jaxmnt.config.mesh import Mesh
from jaxmnt.data.feed import to_devices
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError
from jaxmnt.huggingface.config import read_config
from jaxmnt.huggingface.folder import Folder
from jaxmnt.lora.inference import restore_with_base
from jaxmnt.lora.peft_format import read_folder, settings_of, write_folder
from jaxmnt.models.registry import define_model
from jaxmnt.run.adapters import begin_with_adapters
from jaxmnt.run.starting_state import with_missing_parts
from jaxmnt.trained_model import restore_model
from jaxmnt.training.build import inference_spec
from jaxmnt.training.compile import compile_program
from jaxmnt.training.inference import row_logits
from jaxmnt.training.spec import ControlFlags
from jaxmnt.training.trained import select_frozen

NAMES = sorted(path.parent.parent.name for path in REFERENCE.glob("*/lora/expected.safetensors"))
STEPS = 5

ONE = {}
DENSE = [
    {"mesh": {"fsdp": 2, "model": 2}},
    {"mesh": {"pipeline": 2, "fsdp": 2, "model": 2}, "train": {"microbatch_size": 1}},
    {"mesh": {"context": 2, "model": 2}},
    {"mesh": {"data": 2, "fsdp": 2, "model": 2, "zero": 1}},
    {"mesh": {"fsdp": 2, "model": 2}, "model": {"overlap": "ring"}},
]
FAMILIES = [name for name in NAMES if name not in ("llama-a", "mixtral-a", "qwen3_moe-a")]
CASES = [
    *(("llama-a", sections) for sections in (ONE, *DENSE)),
    *((name, DENSE[number % len(DENSE)]) for number, name in enumerate(FAMILIES)),
    ("qwen3_moe-a", {"mesh": {"expert": 2, "fsdp": 2}}),
    ("mixtral-a", {"mesh": {"expert": 2, "context": 2}}),
]
QUICK = {CASES.index(("llama-a", DENSE[0]))}
ROUND_TRIPS = ("gpt2-a", "qwen2-a", "qwen3_moe-a", "llama-b")


def folder(name):
    return REFERENCE / name / "lora"


@functools.cache
def settings(name):
    """The sections `model` and `lora` of a config for the adapters in a folder."""
    model = read_config(Folder(REFERENCE / name, "test").config, "config.json")
    if "num_experts" in model:
        model["balance_loss"] = 0.0
    parsed = parse_config({"model": model}).model
    lora = settings_of(read_folder(folder(name), "test"), define_model(parsed), "test")
    return model, lora


def config_of(name, sections):
    model, lora = settings(name)
    base = {
        "model": model,
        "data": {"sequence_length": LENGTH, "global_batch_size": len(ROWS), "rows": "packed"},
        "train": {"precision": "float32"},
        "lora": lora.model_dump() | {"init_from": f"peft:{folder(name)}"},
        "optimizer": {
            "learning_rate": 1e-3, "schedule": "constant", "weight_decay": 0.1, "clip_norm": None,
            # torch.optim.AdamW decays all parameters.
            "rules": [{"pattern": "norm.scale", "weight_decay": 0.1}] if "norm.scale" in lora.also_train else [],
        },
    }  # fmt: skip
    return parse_config({key: base.get(key, {}) | sections.get(key, {}) for key in base | sections})


@pytest.mark.parametrize(("name", "sections"), in_tiers(QUICK, CASES), ids=str)
def test_training_is_that_of_peft(name, sections, tmp_path):
    config = config_of(name, sections)
    devices = int(np.prod([*sections.get("mesh", {"one": 1}).values()])) if "zero" not in str(sections) else 8
    program = compile_program(config, config.model.vocab_size, jax.devices()[:devices])
    begun = begin_with_adapters(program, f"hf:{REFERENCE / name}", Identity())
    trained_axes = program.spec.trained_axes
    before = jax.device_get(arrays_by_name({"params": select_frozen(begun.params, trained_axes)}))
    state = with_missing_parts(program, program.from_canonical({"params": begun.params}))
    batch = to_devices(packed(name), list(range(len(ROWS))), len(ROWS), program.batch_sharding)
    batch |= {"control": ControlFlags(program.control_sharding).array()}
    losses = []
    for _ in range(STEPS):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))

    wanted = load_file(folder(name) / "expected.safetensors")
    np.testing.assert_allclose(losses, wanted["losses"], rtol=0, atol=1e-5)
    params = program.to_canonical(state)["params"]
    trained = arrays_by_name({"params": jax.tree.map(
        lambda names, leaf: None if names is None else leaf, trained_axes, params,
        is_leaf=lambda node: node is None or isinstance(node, tuple),
    )})  # fmt: skip
    write_folder(tmp_path, config.lora, program.spec.definition, jax.device_get(trained), None)
    written = load_file(tmp_path / "adapter_model.safetensors")
    after = {key.removeprefix("after."): tensor for key, tensor in wanted.items() if key.startswith("after.")}
    assert written.keys() == after.keys()
    for tensor_name, tensor in after.items():
        assert np.abs(written[tensor_name] - tensor).max() <= 2e-5, tensor_name
    # Nothing else has changed, or has any state.
    frozen = jax.device_get(arrays_by_name({"params": select_frozen(params, trained_axes)}))
    assert all(np.array_equal(frozen[key], before[key]) for key in before) and frozen.keys() == before.keys()
    moments = [leaf for leaf in jax.tree.leaves(state["optimizer"]) if leaf.ndim]
    assert len(moments) == 2 * len(trained)


@pytest.mark.parametrize("name", in_tiers(set(), ROUND_TRIPS))
def test_files_of_peft_become_a_run_and_back(name, tmp_path):
    """The same tensors come back, the logits are those of PEFT, and those of merged weights."""
    trained = tmp_path / "trained"
    trained.mkdir()
    wanted = load_file(folder(name) / "expected.safetensors")
    after = {key.removeprefix("after."): tensor for key, tensor in wanted.items() if key.startswith("after.")}
    save_file(after, trained / "adapter_model.safetensors")
    (trained / "adapter_config.json").write_bytes((folder(name) / "adapter_config.json").read_bytes())
    run = tmp_path / "run"
    assert convert.main(["from-peft", str(trained), str(run), "--base", str(REFERENCE / name)]) == 0
    checkpoint = find(str(run), "test")
    config = checkpoint.config
    tokens = np.split(expected(name)["tokens"], np.cumsum(expected(name)["lengths"])[:-1])[0][None, :-1]

    def logits(spec, state):
        return np.asarray(row_logits(spec, state["params"], state.get("buffers", {}), tokens)[0])

    spec = inference_spec(config, config.model.vocab_size)
    found = logits(spec, restore_with_base(checkpoint, spec, None))
    near(found, wanted["logits"], 2e-5, "adapters")

    assert convert.main(["to-peft", str(run), str(tmp_path / "peft")]) == 0
    written = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert written.keys() == after.keys()
    assert all(np.array_equal(written[key], after[key]) for key in after)
    theirs = json.loads((trained / "adapter_config.json").read_text())
    ours = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    for key in ("r", "lora_alpha", "use_rslora", "target_modules", "modules_to_save", "fan_in_fan_out", "task_type"):
        assert ours[key] == (sorted(theirs[key]) if isinstance(theirs[key], list) else theirs[key]), key

    assert convert.main(["to-hf", str(run), str(tmp_path / "merged"), "--dtype", "float32"]) == 0
    assert convert.main(["from-hf", str(tmp_path / "merged"), str(tmp_path / "merged-run")]) == 0
    merged = find(str(tmp_path / "merged-run"), "test")
    model = restore_model(merged, merged.config, config.model.vocab_size, Mesh(data=1), jax.devices()[:1])
    near(logits(*model), wanted["logits"], 2e-5, "merged")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, "sets use_dora, which changes what the adapters compute"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "sets target_parameters"),
        ({"rank_pattern": {"q_proj": 8}}, "sets rank_pattern"),
        ({"bias": "all"}, "sets bias=all, but biases cannot train here"),
        ({"init_lora_weights": "pissa"}, "sets init_lora_weights=pissa, which may change the base as well"),
        ({"peft_type": "LOHA"}, "has the peft_type LOHA; only LORA is supported"),
        ({"r": 0}, "is not valid: r: input should be greater than or equal to 1; copy it again"),
        ({"lora_alpha": 10**400}, "is not valid: lora_alpha"),
        ({"lora_dropout": "x"}, "is not valid: lora_dropout"),
        ({"use_rslora": "false"}, "is not valid: use_rslora"),
        ({"base_model_name_or_path": 5}, "is not valid: base_model_name_or_path"),
    ],
    ids=str,
)
def test_settings_of_peft_that_are_refused(change, words, tmp_path):
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(json.loads((folder("llama-a") / "adapter_config.json").read_text()) | change)
    )
    with pytest.raises(ConfigError, match=words):
        read_folder(tmp_path, "lora.init_from")
