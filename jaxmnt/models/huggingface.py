"""How a family is written in the files of Hugging Face: names, layouts and settings. Data alone; `jaxmnt/huggingface`
reads and writes.

Shapes: D model, H query heads, G key/value heads, K head width, F MLP, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Tensor(NamedTuple):
    """A tensor, and how it lies there: as a matrix of a parameter's input dimensions and its others."""

    name: str
    """Of layers with {} for the layer's number."""
    inputs: int = 0
    """How many of the parameter's first dimensions are inputs; 0: it is a vector there, whatever its shape here."""
    transposed: bool = True
    """Whether it has outputs before inputs, as torch.nn.Linear does."""
    part: int = 0
    parts: int = 1
    """Which of so many equal parts of its outputs the parameter is."""


def linear(name: str, inputs: int = 1) -> Tensor:
    """The weight of a torch.nn.Linear."""
    return Tensor(f"{name}.weight", inputs)


class Setting(NamedTuple):
    """A setting of `model` that Hugging Face's config has under another name, or as another number."""

    name: str
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class HuggingFace:
    """A family as Hugging Face has it."""

    model_type: str
    architecture: str
    layer: Mapping[str, Tensor]
    """By parameter of a layer, such as attention.query."""
    ends: Mapping[str, Tensor]
    """By parameter outside of layers, such as embedding.table."""
    settings: Mapping[str, Setting]
    """By key of config.json."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that alter the maths, with the values for which this family computes it; the first is what is written."""
    assumed: Mapping[str, Any] = field(default_factory=dict)
    """What keys mean that a config.json leaves out."""
    meaningless: frozenset[str] = frozenset()
    """Keys that alter nothing here, besides those of every model."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of names in some files, and what they are called here."""
    left_out: tuple[str, ...] = ()
    """Patterns (re) of names of tensors that hold nothing learned, or parts of a larger model that are left out."""
    reads_pattern: bool = False
    """Whether `sliding_window_pattern` counts where `layer_types` is missing."""
    nested: tuple[str, str] | None = None
    """The `model_type` of a larger model, and the key of its config.json under which this one's is."""


def common_settings(**others: Setting) -> dict[str, Setting]:
    """Those that all families but GPT-2 have, and `others`."""
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
        **others,
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

SILU = {"hidden_act": ("silu",)}
UNBIASED = {"attention_bias": (False,)}
