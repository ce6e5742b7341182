"""config.json of Hugging Face, to and from the section `model`. What alters the maths and is not known is refused."""

import math
import re
from collections.abc import Mapping
from typing import Any

from jaxmnt.config.model import Model, RopeScaling
from jaxmnt.errors import ConfigError, nearest, printable
from jaxmnt.models.huggingface import HuggingFace
from jaxmnt.models.registry import FAMILIES, family_class

_MEANINGLESS = frozenset(
    re.findall(
        r"\w+",
        """
        architectures model_type dtype torch_dtype transformers_version _name_or_path name_or_path tokenizer_class
        prefix bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id mask_token_id
        decoder_start_token_id forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens
        use_cache cache_implementation initializer_range initializer_factor max_position_embeddings
        attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop
        return_dict return_dict_in_generate output_hidden_states output_attentions output_scores chunk_size_feed_forward
        id2label label2id num_labels problem_type task_specific_params finetuning_task torchscript use_bfloat16
        tf_legacy_loss is_decoder is_encoder_decoder cross_attention_hidden_size pruned_heads
        _attn_implementation_autoset _attn_implementation attn_implementation
        summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
        max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k
        top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
        bad_words_ids num_return_sequences remove_invalid_values exponential_decay_length_penalty
        _sliding_window_pattern
        """,
    )
)
"""Keys of any config.json that say nothing about what a trained model computes: names, tokens, dropout and
initialisation of training, what generation does by default."""

_ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq")
_WINDOWS = ("layer_types", "sliding_window_pattern")

_SCALING = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_positions",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
}
_OF_TYPE = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor"
    ),
}  # fmt: skip
"""Keys that each type of scaling has."""

_SLIDING, _FULL = "sliding_attention", "full_attention"


def families() -> dict[str, tuple[str, HuggingFace]]:
    """By `model_type`: the name of the family here, and how it is written there."""
    found = {}
    for name in sorted(FAMILIES):
        written = family_class(name).hugging_face
        if written is not None:
            found[written.model_type] = (name, written)
    return found


def read_config(tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of `model` that a config.json asks for; `where` names it in errors.

    Raises `ConfigError` for a family that is not known, and for keys that alter the maths in a way that this family
    has not.
    """
    family, written, tree = _family_of(tree, where)
    known = set(_MEANINGLESS) | set(written.meaningless) | set(_ROPE) | set(_WINDOWS)
    known |= set(written.settings) | set(written.only)
    stray = sorted(key for key in tree if key not in known)
    if stray:
        raise ConfigError(
            f"{where}: {printable(stray[0])} is not a key that the family {family} has, and may alter what the model "
            "computes; if it does not, remove it from the file"
        )
    for key, allowed in sorted(written.only.items()):
        if key in tree and not any(tree[key] is one or tree[key] == one for one in allowed):
            raise ConfigError(
                f"{where}: {key} is {printable(str(tree[key]))}, and the family {family} computes only "
                f"{' or '.join(map(str, allowed))}"
            )
    found: dict[str, Any] = {"family": family}
    for key, setting in written.settings.items():
        value = tree.get(key, written.assumed.get(key))
        if value is None and setting.name in ("hidden_size", "num_layers", "num_heads", "vocab_size"):
            raise ConfigError(f"{where}: {key} is missing; without it the model is not known")
        if value is not None:
            found[setting.name] = _number(setting.read, value, key, where)
    found.setdefault("intermediate_size", 4 * found["hidden_size"])  # where GPT-2 says nothing
    found |= _read_rope(tree, written, "local_rope_theta" in family_class(family).settings, where)
    return found | _read_windows(tree, family, found["num_layers"], where)


def write_config(model: Model, extra: Mapping[str, Any]) -> dict[str, Any]:
    """config.json for a model of a family that Hugging Face knows.

    `extra` has keys that alter nothing, such as token ids, of the config.json that the model came from.
    """
    kind = family_class(model.family)
    written = kind.hugging_face
    if written is None:
        raise ConfigError(
            f"model.family: {printable(model.family)} is not in the files of Hugging Face; those that are: "
            f"{', '.join(sorted(name for name, _ in families().values()))}"
        )
    tree = {key: value for key, value in extra.items() if key in _MEANINGLESS}
    if "max_positions" in kind.settings:
        tree.pop("max_position_embeddings", None)  # which has another name there
    tree |= {"architectures": [written.architecture], "model_type": written.model_type}
    tree |= {key: allowed[0] for key, allowed in written.only.items()}
    for key, setting in written.settings.items():
        value = getattr(model, setting.name)
        tree[key] = None if value is None else setting.write(value)
    if "query_pre_attn_scalar" in tree and tree["query_pre_attn_scalar"] is None:
        tree["query_pre_attn_scalar"] = model.head_dim  # what no scale means
    return tree | _written_rope(model, kind.settings) | _written_windows(model, kind)


def _family_of(tree: Mapping[str, Any], where: str) -> tuple[str, HuggingFace, Mapping[str, Any]]:
    """The family, and the part of the config.json that is about it."""
    known, kind = families(), tree.get("model_type")
    for family, written in known.values():
        if written.nested and isinstance(tree.get(written.nested), dict) and kind != written.model_type:
            inner = tree[written.nested]
            if inner.get("model_type", written.model_type) == written.model_type:
                return family, written, inner
    if not isinstance(kind, str) or kind not in known:
        said = f"{where}: model_type is {printable(str(kind))}" if kind else f"{where}: model_type is missing"
        raise ConfigError(f"{said}; known are {', '.join(sorted(known))}: {nearest(str(kind), sorted(known))}")
    if "quantization_config" in tree:
        raise ConfigError(f"{where}: quantization_config: quantised weights are not read; use the original ones")
    family, written = known[kind]
    return family, written, tree


def _number(read: Any, value: Any, key: str, where: str) -> Any:
    if isinstance(value, str | list | dict) or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(f"{where}: {key} is {printable(str(value))}, and must be a number; correct it")
    try:
        return read(value)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{where}: {key} is {printable(str(value))}, which cannot be: {error}; correct it") from error


# -- rotary positions, in the two ways in which files say it


def _read_rope(tree: Mapping[str, Any], written: HuggingFace, nested: bool, where: str) -> dict[str, Any]:
    if "rope_theta" not in tree and tree.get("rope_parameters") is None and "n_positions" in written.settings:
        return {}  # learned positions
    parameters, scaling = tree.get("rope_parameters"), tree.get("rope_scaling")
    theta = tree.get("rope_theta", written.assumed.get("rope_theta", 10000.0))
    local = tree.get("rope_local_base_freq", written.assumed.get("rope_local_base_freq", theta))
    full: Mapping[str, Any] = scaling if isinstance(scaling, dict) else {}
    if isinstance(parameters, dict):
        if nested and parameters.keys() <= {_SLIDING, _FULL}:
            sliding = parameters.get(_SLIDING) or {}
            full = parameters.get(_FULL) or {}
            local = sliding.get("rope_theta", local)
            if _scaling(sliding, tree, f"{where}: rope_parameters.{_SLIDING}"):
                raise ConfigError(
                    f"{where}: rope_parameters.{_SLIDING} is scaled, and layers with a window are not stretched here"
                )
        else:
            full = parameters
        theta = full.get("rope_theta", theta)
    elif parameters is not None or not isinstance(scaling, dict | None):
        raise ConfigError(f"{where}: rope_parameters and rope_scaling must be objects; correct them")
    for key, value in (("rope_theta", theta), ("rope_local_base_freq", local)):
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 1:
            raise ConfigError(f"{where}: {key} is {printable(str(value))}, and must be a number above 1; correct it")
    found: dict[str, Any] = {"rope_theta": float(theta), "rope_scaling": _scaling(full, tree, where)}
    return found | ({"local_rope_theta": float(local)} if nested else {})


def _scaling(parameters: Mapping[str, Any], tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`model.rope_scaling`; empty for none."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return {}
    if kind not in _OF_TYPE:
        raise ConfigError(f"{where}: rope_type is {printable(str(kind))}; known are default, {', '.join(_OF_TYPE)}")
    given = {key: value for key, value in parameters.items() if value is not None}
    scales = [given.pop(key, None) for key in ("mscale", "mscale_all_dim")]
    known = {*_OF_TYPE[kind], "rope_type", "type", "rope_theta", "finetuned"}
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"{where}: partial_rotary_factor must be 1: heads are rotated whole here")
    if stray := sorted(set(given) - known):
        raise ConfigError(f"{where}: {printable(stray[0])} is not a key that rope_type {kind} has here")
    found = {_SCALING[key]: given[key] for key in _OF_TYPE[kind] if key in given}
    longest = tree.get("max_position_embeddings")
    if "original_max_position_embeddings" in _OF_TYPE[kind] and "original_max_positions" not in found:
        if not isinstance(longest, int):
            raise ConfigError(f"{where}: original_max_position_embeddings is missing; without it rope is not known")
        found["original_max_positions"] = longest
    if kind == "yarn" and "attention_factor" not in found and all(scales):
        factor = lambda scale: 0.1 * scale * math.log(found.get("factor", 1.0)) + 1
        found["attention_factor"] = factor(scales[0]) / factor(scales[1])
    return {"type": kind, **found}


def _written_rope(model: Model, optional: Any) -> dict[str, Any]:
    """`rope_parameters`, and the keys before it, which other programs read."""
    if "max_positions" in optional:
        return {}
    scaling = model.rope_scaling
    stretched: dict[str, Any] = {"rope_type": "default" if scaling.type == "none" else scaling.type}
    for key in _OF_TYPE.get(scaling.type, ()):
        value = getattr(scaling, _SCALING[key])
        if (value is not None and value != RopeScaling.model_fields[_SCALING[key]].default) or key in _ALWAYS:
            stretched[key] = value
    full = {"rope_theta": model.rope_theta, **stretched}
    old: dict[str, Any] = {"rope_theta": model.rope_theta}
    old["rope_scaling"] = None if scaling.type == "none" else stretched
    if "local_rope_theta" not in optional:
        return {"rope_parameters": full, **old}
    local = model.local_rope_theta or model.rope_theta
    nested = {_FULL: full, _SLIDING: {"rope_type": "default", "rope_theta": local}}
    return {"rope_parameters": nested, **old, "rope_local_base_freq": local}


_ALWAYS = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")


# -- which layers have a window


def _read_windows(tree: Mapping[str, Any], family: str, layers: int, where: str) -> dict[str, Any]:
    kind = family_class(family)
    types = tree.get("layer_types")
    length = tree.get("sliding_window_pattern", tree.get("_sliding_window_pattern"))
    if "sliding_window_pattern" not in kind.settings:
        expected = _FULL
        if "sliding_window" in kind.settings and tree.get("sliding_window") is not None:
            expected = _SLIDING
        if types is not None and list(types) != [expected] * layers:
            raise ConfigError(f"{where}: layer_types must be {expected} for all {layers} layers in the family {family}")
        return {}
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise ConfigError(f"{where}: layer_types must be a list of {layers}, one for each layer; correct it")
        if _FULL in types:
            length = types.index(_FULL) + 1
        elif length is None or length <= layers:
            length = layers + 1
    if length is None:
        return {}
    if not isinstance(length, int) or length < 1:
        raise ConfigError(f"{where}: sliding_window_pattern is {printable(str(length))}, and must be 1 or more")
    if types is not None and types != [_layer_type(number, length) for number in range(layers)]:
        raise ConfigError(
            f"{where}: layer_types must repeat a pattern of {_SLIDING} and at its end {_FULL} in the family {family}"
        )
    return {"sliding_window_pattern": length}


def _layer_type(number: int, length: int) -> str:
    return _SLIDING if (number + 1) % length else _FULL


def _written_windows(model: Model, kind: Any) -> dict[str, Any]:
    if "sliding_window_pattern" not in kind.settings:
        return {}
    length = model.sliding_window_pattern or kind.pattern_length
    return {
        "layer_types": [_layer_type(number, length) for number in range(model.num_layers)],
        "sliding_window_pattern": length,
    }
