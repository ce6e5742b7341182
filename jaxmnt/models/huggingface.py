"""A family's format in files of Hugging Face: names, layouts and settings. This module only describes formats;
`jaxmnt/huggingface` reads and writes the files.

Shapes: D model, H query heads, G key/value heads, K head width, F MLP, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Tensor(NamedTuple):
    """A tensor in a file, which stores a parameter as a matrix of its input dimensions and its output dimensions."""

    name: str
    """Name in the file. In the name of a layer's tensor, {} stands for the number of the layer. If the name has
    `{expert}`, the first dimension of the parameter is that of experts, and there is a tensor for each of them."""
    inputs: int = 0
    """Number of leading dimensions of the parameter that are inputs. If 0, the tensor is a vector in the file, whatever
    the shape of the parameter."""
    transposed: bool = True
    """True if outputs come before inputs in the file, as in torch.nn.Linear."""
    part: int = 0
    """Index of the parameter's part of the tensor among the `parts`."""
    parts: int = 1
    """Number of equal parts, one for each parameter, into which the tensor's outputs are divided."""


def linear(name: str, inputs: int = 1) -> Tensor:
    """Returns the weight of the torch.nn.Linear with this name."""
    return Tensor(f"{name}.weight", inputs)


class Setting(NamedTuple):
    """A setting of `model` for a key of Hugging Face's config, and the conversions of its value in both directions."""

    name: str
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], Any] = lambda value: value
    times: str = ""
    """Name of another setting by which the value of Hugging Face's key is multiplied; empty for none."""


@dataclass(frozen=True)
class HuggingFace:
    """A family's format in files of Hugging Face."""

    model_type: str
    architecture: str
    layer: Mapping[str, Tensor]
    """Tensor for each parameter of a layer, by the parameter's name, such as attention.query."""
    ends: Mapping[str, Tensor]
    """Tensor for each parameter outside of layers, by the parameter's name, such as embedding.table."""
    settings: Mapping[str, Setting]
    """Setting for each key of config.json."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that change the maths, with the values that this family supports. An export writes the first one."""
    assumed: Mapping[str, Any] = field(default_factory=dict)
    """Values that transformers assumes for keys that are missing from a config.json."""
    meaningless: frozenset[str] = frozenset()
    """Keys without effect in this family, in addition to those without effect in any model."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of tensor names that some files use, and the prefixes to replace them with."""
    left_out: tuple[str, ...] = ()
    """Regular expressions for the names of tensors to ignore, because they hold nothing learned or belong to other
    parts of a larger model."""
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of tensors, in some files, that hold several tensors of `layer` one after another, and the names of these.
    If the tensor has three dimensions, the first is that of experts."""
    reads_pattern: bool = False
    """True if transformers uses `sliding_window_pattern` where `layer_types` is missing."""
    nested: tuple[str, str] | None = None
    """The `model_type` of a larger model, and the key in its config.json under which this model's config is."""


def common_settings(**additional: Setting) -> dict[str, Setting]:
    """Returns the settings that all families except GPT-2 have, together with the `additional` ones."""
    return {
        "vocab_size": Setting("vocab_size"),
        "hidden_size": Setting("hidden_size"),
        "num_hidden_layers": Setting("num_layers"),
        "num_attention_heads": Setting("num_heads"),
        "num_key_value_heads": Setting("num_kv_heads"),
        "head_dim": Setting("head_dim"),
        "intermediate_size": Setting("intermediate_size"),
        "rms_norm_eps": Setting("norm_epsilon"),
        "tie_word_embeddings": Setting("tie_embeddings"),
        **additional,
    }


ENDS = {
    "embedding.table": Tensor("model.embed_tokens.weight", 1, transposed=False),
    "norm.scale": Tensor("model.norm.weight"),
    "head.kernel": linear("lm_head"),
}

ATTENTION = {
    "attention.query": linear("model.layers.{}.self_attn.q_proj"),
    "attention.key": linear("model.layers.{}.self_attn.k_proj"),
    "attention.value": linear("model.layers.{}.self_attn.v_proj"),
    "attention.output": linear("model.layers.{}.self_attn.o_proj", inputs=2),
}

NORMED_HEADS = {
    "attention.query_norm.scale": Tensor("model.layers.{}.self_attn.q_norm.weight"),
    "attention.key_norm.scale": Tensor("model.layers.{}.self_attn.k_norm.weight"),
}

MLP = {
    "mlp.gate": linear("model.layers.{}.mlp.gate_proj"),
    "mlp.up": linear("model.layers.{}.mlp.up_proj"),
    "mlp.down": linear("model.layers.{}.mlp.down_proj"),
}

PRE_NORMS = {
    "attention_norm.scale": Tensor("model.layers.{}.input_layernorm.weight"),
    "mlp_norm.scale": Tensor("model.layers.{}.post_attention_layernorm.weight"),
}

LLAMA = ATTENTION | MLP | PRE_NORMS

EXPERT = "{expert}"
"""Stands for the number of the expert in the name of a tensor that belongs to a single expert."""


def experts(router: str, gate: str, up: str, down: str) -> dict[str, Tensor]:
    """Returns the tensors of a layer of experts, from the names of the modules of its router and of each expert."""
    names = {"router": router, "gate": gate, "up": up, "down": down}
    return {f"experts.{parameter}": linear(name) for parameter, name in names.items()}


def joined_experts(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """Returns the tensors of experts in files that transformers 5 writes if it does not convert them back: those of all
    experts in one, and gates before ups."""
    name = lambda parameter: tensors[f"experts.{parameter}"].name
    return {
        "model.layers.{}.mlp.gate.weight": (name("router"),),
        "model.layers.{}.mlp.experts.gate_up_proj": (name("gate"), name("up")),
        "model.layers.{}.mlp.experts.down_proj": (name("down"),),
    }


SILU_ACTIVATION = {"hidden_act": ("silu",)}
NO_ATTENTION_BIAS = {"attention_bias": (False,)}
