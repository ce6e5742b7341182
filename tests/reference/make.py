"""Makes what families are compared with, by the reference implementation: python tests/reference/make.py [FOLDER]
With check FOLDER it compares models that were converted there and back.

Needs the versions of tests/reference/requirements.txt, in an environment of their own. For each model a folder with
config.json and model.safetensors, as transformers writes them, and expected.safetensors:

tokens          int32, one document after the other; `lengths` are their tokens
logits          float32 [600, vocabulary], of the first document
losses          float32, the sum of -log p over each document
gradient.NAME   float32, of the mean of -log p over all documents
generated       int32 [3, 64], the likeliest continuations of 5, 17 and 40 tokens of the second document after `starts`

Some folders also have long.safetensors, of the same weights with other rotary positions (`LONG`):

tokens          int32 [4096], one document
logits_600      float32 [64, vocabulary], at `places_600` of its first 600 tokens
logits_4096     float32 [64, vocabulary], at `places_4096` of all

presets.json (tests/reference/presets.py) has the config.json of each preset; its parameters are counted here.

muon.safetensors has what three steps of torch.optim.Muon make of a matrix (tests/reference/muon.py).

NAME/lora has adapters that PEFT has trained beside some of the models (tests/reference/lora.py).

Weights are far from those of an initialisation: what is wrong with positions, windows or biases has to show.
"""

import copy
import json
import sys
from pathlib import Path

import lora
import muon
import peft
import safetensors
import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
LENGTHS = (600, 250, 350, 599, 100, 200, 299)
"""Inputs of the documents: each has one token more, the last target."""
PROMPTS = (5, 17, 40)
GENERATED = 64

SIZES = {
    "vocab_size": 53, "hidden_size": 36, "intermediate_size": 57, "num_hidden_layers": 3,
    "max_position_embeddings": 640, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10}
ALL_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 6}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 500000.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
GPT2 = {"vocab_size": 53, "n_embd": 64, "n_layer": 2, "n_positions": 602, "bos_token_id": None, "eos_token_id": None}


def pattern(layers, length):
    return ["full_attention" if (number + 1) % length == 0 else "sliding_attention" for number in range(layers)]


def nested(full, sliding=PLAIN):
    return {"full_attention": full, "sliding_attention": sliding}


MODELS = {
    "llama-a": ("llama", torch.float32, {**SIZES, **HEADS, "rope_parameters": LLAMA3}),
    "llama-b": ("llama", torch.bfloat16, {
        **SIZES, **ALL_HEADS, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0},
    }),
    "mistral-a": ("mistral", torch.float32, {**SIZES, **HEADS, "sliding_window": 50, "rope_parameters": PLAIN}),
    "mistral-b": ("mistral", torch.bfloat16, {
        **SIZES, **ALL_HEADS, "sliding_window": 7, "tie_word_embeddings": True, "rope_parameters": YARN,
    }),
    "qwen2-a": ("qwen2", torch.float32, {
        **SIZES, "num_attention_heads": 6, "num_key_value_heads": 2, "rope_parameters": YARN,
    }),
    "qwen2-b": ("qwen2", torch.bfloat16, {
        **SIZES, "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }),
    "qwen3-a": ("qwen3", torch.float32, {
        **SIZES, **HEADS, "rope_parameters": YARN | {"attention_factor": 1.25, "beta_fast": 16.0, "truncate": False},
    }),
    "qwen3-b": ("qwen3", torch.bfloat16, {
        **SIZES, **ALL_HEADS, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }),
    "gemma2-a": ("gemma2", torch.float32, {
        **SIZES, **HEADS, "num_hidden_layers": 5, "sliding_window": 33, "query_pre_attn_scalar": 17,
        "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0, "rope_parameters": PLAIN,
    }),
    "gemma2-b": ("gemma2", torch.bfloat16, {
        **SIZES, **ALL_HEADS, "num_hidden_layers": 4, "sliding_window": 64, "query_pre_attn_scalar": 6,
        "tie_word_embeddings": False, "attn_logit_softcapping": None, "rope_parameters": PLAIN,
    }),
    "gemma3-a": ("gemma3_text", torch.float32, {
        **SIZES, **HEADS, "num_hidden_layers": 7, "layer_types": pattern(7, 3), "sliding_window": 20,
        "query_pre_attn_scalar": 10,
        "rope_parameters": nested({"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0}),
    }),
    "gemma3-b": ("gemma3_text", torch.bfloat16, {
        **SIZES, **ALL_HEADS, "num_hidden_layers": 4, "layer_types": pattern(4, 2), "sliding_window": 5,
        "query_pre_attn_scalar": 9, "tie_word_embeddings": False,
        "rope_parameters": nested({"rope_type": "default", "rope_theta": 500000.0}),
    }),
    "olmo2-a": ("olmo2", torch.float32, {
        **SIZES, "num_attention_heads": 6, "num_key_value_heads": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    }),
    "olmo2-b": ("olmo2", torch.bfloat16, {
        **SIZES, "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }),
    "olmo3-a": ("olmo3", torch.float32, {
        **SIZES, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 5,
        "layer_types": pattern(5, 2), "sliding_window": 40, "rope_parameters": nested(YARN),
    }),
    "olmo3-b": ("olmo3", torch.bfloat16, {
        **SIZES, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 4, "sliding_window": 11,
        "layer_types": pattern(4, 2), "tie_word_embeddings": True, "rope_parameters": nested(PLAIN),
    }),
    "gpt2-a": ("gpt2", torch.float32, {**GPT2, "n_head": 8}),
    "gpt2-b": ("gpt2", torch.bfloat16, {**GPT2, "n_head": 2, "n_inner": 135, "tie_word_embeddings": False}),
    "mixtral-a": ("mixtral", torch.float32, {
        **SIZES, **HEADS, "num_hidden_layers": 2, "intermediate_size": 29, "num_local_experts": 6,
        "num_experts_per_tok": 2, "rope_parameters": PLAIN,
    }),
    "qwen3_moe-a": ("qwen3_moe", torch.float32, {
        **SIZES, **HEADS, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 21, "norm_topk_prob": True, "rope_parameters": PLAIN,
    }),
    "olmoe-a": ("olmoe", torch.bfloat16, {
        **SIZES, "num_attention_heads": 6, "num_key_value_heads": 3, "num_experts": 8, "num_experts_per_tok": 4,
        "num_hidden_layers": 2, "intermediate_size": 21, "rope_parameters": PLAIN,
    }),
    "mixtral-b": ("mixtral", torch.bfloat16, {
        **SIZES, **ALL_HEADS, "num_hidden_layers": 2, "intermediate_size": 34, "num_local_experts": 5,
        "num_experts_per_tok": 3, "sliding_window": 100, "tie_word_embeddings": True, "rope_parameters": PLAIN,
    }),
    "qwen3_moe-b": ("qwen3_moe", torch.bfloat16, {
        **SIZES, **ALL_HEADS, "num_hidden_layers": 2, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 18, "norm_topk_prob": False, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
        "rope_parameters": YARN,
    }),
    "olmoe-b": ("olmoe", torch.float32, {
        **SIZES, "num_attention_heads": 6, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
        "num_hidden_layers": 2, "intermediate_size": 24, "norm_topk_prob": True, "tie_word_embeddings": True,
        "rope_parameters": PLAIN,
    }),
}  # fmt: skip

LONG = {
    "llama-b": {**LLAMA3, "original_max_position_embeddings": 640},
    "qwen3-b": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 640, "rope_theta": 2e6},
}
"""Rotary positions for rows of 4,096 tokens, of models whose rows had at most 640."""
LONG_LENGTHS, LONG_PLACES = (600, 4096), 64


def shaken(model, one_more, seed):
    """Weights of which each matters: `one_more` says that norms multiply by 1 + w."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if (parameter.ndim == 1 and "norm" in name) or (".ln_" in name and name.endswith("weight")):
            value = (0 if one_more else 1) + 0.2 * noise
        elif parameter.ndim == 1:
            value = 0.3 * noise
        elif any(part in name for part in ("embed_tokens", "wte", "wpe")):
            value = 0.5 * noise
        else:
            inputs = parameter.shape[0] if ".c_" in name else parameter.shape[-1]  # GPT-2's lie the other way
            value = 1.3 * noise / inputs**0.5
        parameter.data = value


def documents(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, SIZES["vocab_size"], (length + 1,), generator=generator) for length in LENGTHS]


def losses(model, text):
    logits = model(text[None, :-1]).logits[0].float()
    return logits, torch.nn.functional.cross_entropy(logits, text[1:], reduction="sum")


def generated(model, text, length):
    """Where a prompt of this length begins in the text, and what follows it greedily, without a cache. The likeliest
    token has to be so by far more than roundings: the first place where it always is."""
    for start in range(len(text) - length):
        row = text[start : start + length]
        for _ in range(GENERATED):
            best = torch.topk(model(row[None]).logits[0, -1], 2)
            if best.values[0] - best.values[1] < 5e-4:
                break
            row = torch.cat([row, best.indices[:1]])
        else:
            return start, row[length:]
    raise AssertionError("all are too close to call; choose another seed")


def make(name, folder, seed):
    kind, dtype, sizes = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **sizes)
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    shaken(model, "gemma" in kind, seed)
    model.to(dtype).save_pretrained(folder / name)
    (folder / name / "generation_config.json").unlink(missing_ok=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / name, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    texts = documents(seed)
    found = [losses(model, text) for text in texts]
    sum(loss for _, loss in found).div(sum(LENGTHS)).backward()
    with torch.no_grad():
        expected = {
            "tokens": torch.cat(texts).to(torch.int32),
            "lengths": torch.tensor([len(text) for text in texts], dtype=torch.int32),
            "logits": found[0][0].detach().clone(),
            "losses": torch.stack([loss for _, loss in found]).detach(),
        }
        prompts = [generated(model, texts[1], length) for length in PROMPTS]
        expected["starts"] = torch.tensor([start for start, _ in prompts], dtype=torch.int32)
        expected["generated"] = torch.stack([row for _, row in prompts]).to(torch.int32)
    for parameter_name, parameter in model.named_parameters():
        for tensor_name, gradient in released(kind, parameter_name, parameter.grad):
            expected[f"gradient.{tensor_name}"] = gradient.contiguous()
    save_file(expected, folder / name / "expected.safetensors")


def make_long(name, folder, seed):
    config = transformers.AutoConfig.from_pretrained(folder / name)
    config.rope_parameters, config.max_position_embeddings = dict(LONG[name]), max(LONG_LENGTHS)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / name, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, SIZES["vocab_size"], (max(LONG_LENGTHS),), generator=generator)
    expected = {"tokens": tokens.to(torch.int32)}
    for length in LONG_LENGTHS:
        places = torch.linspace(0, length - 1, LONG_PLACES).long()
        with torch.no_grad():
            logits = model(tokens[None, :length]).logits[0, places].float()
        expected |= {f"places_{length}": places.to(torch.int32), f"logits_{length}": logits.contiguous()}
    save_file(expected, folder / name / "long.safetensors")


def released(kind, name, array):
    """The tensors of a parameter, as released files have them: those of each expert apart."""
    layer, is_expert, parameter = name.partition("mlp.experts.")
    names = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}.get(parameter, [])
    if kind == "mixtral":
        names = [{"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[one] for one in names]
        layer, is_expert, name = (text.replace("mlp.", "block_sparse_moe.") for text in (layer, is_expert, name))
    if not names:
        return [(name, array)]
    return [
        (f"{layer}{is_expert}{expert}.{one}.weight", part)
        for expert, matrix in enumerate(array)
        for one, part in zip(names, matrix.chunk(len(names)), strict=True)
    ]


def count(config):
    """How many parameters a model of this config.json has, tied ones once."""
    config = copy.deepcopy(config)  # which transformers alters
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    return sum(parameter.numel() for parameter in model.parameters())


def check(folder):
    """Whether models in `folder`, converted there and back, still compute the same here."""
    for name in MODELS:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder / name, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        wanted = load_file(HERE / name / "expected.safetensors")
        with torch.no_grad():
            logits = model(wanted["tokens"][None, : LENGTHS[0]].long()).logits[0]
        error = (logits - wanted["logits"]).abs().max() / wanted["logits"].abs().max()
        assert error <= 2e-6, f"{name}: {error:.1e}"


def main():
    if sys.argv[1:2] == ["check"]:
        return check(Path(sys.argv[2]))
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for seed, name in enumerate(MODELS):
        (folder / name).mkdir(parents=True, exist_ok=True)
        make(name, folder, seed)
        if name in LONG:
            make_long(name, folder, seed)
        if name in lora.SETTINGS:
            lora.make(name, folder, seed)
        print(name)
    muon.make(folder)
    presets = json.loads((HERE / "presets.json").read_text()) if (HERE / "presets.json").exists() else {}
    counted = {name: {**one, "parameters": count(one["config"])} for name, one in presets.items()}
    if counted:
        (folder / "presets.json").write_text(json.dumps(counted, indent=1) + "\n")
    versions = {module.__name__: module.__version__ for module in (torch, transformers, safetensors, peft)}
    seeds = {name: seed for seed, name in enumerate(MODELS)}
    (folder / "about.json").write_text(json.dumps({"versions": versions, "seeds": seeds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
