"""Converts config.json of Hugging Face to and from the section `model`. Unknown keys that may change the maths raise an
error."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxmnt.config.model import Model, RopeScaling
from jaxmnt.errors import ConfigError, nearest, printable
from jaxmnt.models.huggingface import HuggingFace
from jaxmnt.models.registry import FAMILIES, OPTIONAL_SETTINGS, family_class
from jaxmnt.strict_json import json_text

Tree = Mapping[str, Any]
"""An object of JSON."""

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
"""Keys of any config.json without effect on the function of a trained model: names, tokens, dropout and initialisation
of training, defaults of generation."""

TOKENIZER_KEY = "jaxmnt_tokenizer"
"""Key that names the tokenizer of a model whose tokens need no tokenizer.json: bytes. `to-hf` writes it."""

_IF_FALSE = frozenset({"use_mrope", "rope_interleaved", "gradient_checkpointing"})
"""Keys without effect if their value is false."""

_READ_TOGETHER = (
    "rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "layer_types", "sliding_window_pattern",
)  # fmt: skip
"""Keys that are read together: several of them determine one setting."""

SCALING_SETTINGS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_positions",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
}
"""Setting of `model.rope_scaling` for each key of a scaling in config.json."""
SCALING_KEYS_OF_TYPE = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor"
    ),
}  # fmt: skip
"""Keys of each type of scaling."""

_REQUIRED = ("hidden_size", "num_layers", "num_heads", "vocab_size")

_WHOLE = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
"""Settings that are whole numbers."""

_SLIDING, _FULL = "sliding_attention", "full_attention"


def families() -> dict[str, tuple[str, HuggingFace]]:
    """Returns the name and the format of each family, by `model_type`."""
    by_model_type = {}
    for name in sorted(FAMILIES):
        hf_format = family_class(name).hugging_face
        if hf_format is not None:
            by_model_type[hf_format.model_type] = (name, hf_format)
    return by_model_type


def read_config(tree: Tree, where: str) -> dict[str, Any]:
    """Returns the settings of `model` for a config.json; `where` is its path, for error messages.

    Raises `ConfigError` for an unknown family, and for keys that change the maths in a way that the family does not
    support.
    """
    with _prefix_errors(where):
        return _settings_of(*_family_of(tree))


@contextmanager
def _prefix_errors(where: str) -> Iterator[None]:
    """Prefixes the message of a `ConfigError` with the location."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _settings_of(family: str, hf_format: HuggingFace, tree: Tree) -> dict[str, Any]:
    """Returns the settings of a family for a config.json."""
    known_keys = {"transformers.js_config", TOKENIZER_KEY, *_MEANINGLESS, *_READ_TOGETHER}
    known_keys |= {*hf_format.meaningless, *hf_format.settings, *hf_format.only}
    unknown = sorted(key for key in tree if key not in known_keys and (tree[key] or key not in _IF_FALSE))
    if unknown:
        raise ConfigError(
            f"{printable(unknown[0])} is not a key of the family {family}, and may change what the model computes; if "
            "it does not, remove it from the file"
        )
    for key, allowed in sorted(hf_format.only.items()):
        if key in tree and tree[key] not in allowed:
            raise ConfigError(
                f"{key} is {_as_json(tree[key])}, but the family {family} supports only "
                f"{' or '.join(map(_as_json, allowed))}"
            )
    settings: dict[str, Any] = {"family": family}
    for key, setting in hf_format.settings.items():
        value = tree.get(key, hf_format.assumed.get(key))
        if value is None and (setting.name in _REQUIRED or key == "intermediate_size"):
            raise ConfigError(f"{key} is missing; add it, because it defines the model")
        if value is not None:
            settings[setting.name] = _number(setting.read, value, key)
            if setting.name in _WHOLE and not _is_positive_integer(value):
                raise ConfigError(f"{key} is {_as_json(value)}, but must be an integer of 1 or more; correct it")
    settings.setdefault("intermediate_size", 4 * settings["hidden_size"])  # the default of GPT-2's n_inner
    settings |= _read_rope(tree, hf_format, "local_rope_theta" in family_class(family).settings)
    return settings | _read_windows(tree, family, hf_format.reads_pattern, settings["num_layers"])


def write_config(model: Model, extra: Tree) -> dict[str, Any]:
    """Returns config.json for a model of a family that Hugging Face knows.

    `extra` is the config.json that the model came from; its keys without effect, such as token ids, are copied.
    """
    kind = family_class(model.family)
    hf_format = kind.hugging_face
    if hf_format is None:
        raise ConfigError(
            f"model.family: {printable(model.family)} has no format in files of Hugging Face; use one of "
            f"{', '.join(sorted(name for name, _ in families().values()))}"
        )
    _check_can_be_written(model, hf_format)
    tree = {key: value for key, value in extra.items() if key in _MEANINGLESS}
    if "max_positions" in kind.settings:
        tree.pop("max_position_embeddings", None)  # these families have another key for it
    tree |= {"architectures": [hf_format.architecture], "model_type": hf_format.model_type}
    tree |= {key: allowed[0] for key, allowed in hf_format.only.items()}
    for key, setting in hf_format.settings.items():
        value = getattr(model, setting.name)
        tree[key] = None if value is None else setting.write(value)
    if tree.get("query_pre_attn_scalar", ...) is None:
        tree["query_pre_attn_scalar"] = model.head_dim  # the default scale
    return tree | _write_rope(model, kind.settings) | _write_windows(model, kind)


def _check_can_be_written(model: Model, hf_format: HuggingFace) -> None:
    """Raises `ConfigError` if the model has a setting that transformers ignores in its family."""
    names = {setting.name for setting in hf_format.settings.values()} | {"local_rope_theta", "sliding_window_pattern"}
    for name in OPTIONAL_SETTINGS:
        if name not in names and getattr(model, name) is not None:
            raise ConfigError(
                f"model.{name}: a model with this setting cannot be exported, because transformers ignores it in "
                f"{hf_format.model_type}"
            )


def _family_of(tree: Tree) -> tuple[str, HuggingFace, Tree]:
    """Returns the family, its format, and the part of the config.json that describes it."""
    known_families = families()
    model_type = tree.get("model_type")
    if "quantization_config" in tree:
        raise ConfigError("quantization_config: quantised weights are not supported; use the original ones")
    for family, hf_format in known_families.values():
        outer_type, key = hf_format.nested or (None, "")
        if model_type == outer_type and isinstance(tree.get(key), dict):
            _check_agree(tree, key, hf_format)
            return family, hf_format, tree[key]
    if not model_type:
        raise ConfigError(f"model_type is missing; set it to one of {', '.join(sorted(known_families))}")
    if not isinstance(model_type, str) or model_type not in known_families:
        suggestion = nearest(str(model_type), sorted(known_families))
        raise ConfigError(f"model_type is {_as_json(model_type)}, which is not known; {suggestion}")
    return *known_families[model_type], tree


def _check_agree(outer: Tree, inner_key: str, hf_format: HuggingFace) -> None:
    """Raises `ConfigError` if the config of a larger model contradicts the config of its text model."""
    inner = outer[inner_key]
    for key in sorted(hf_format.settings.keys() & outer.keys()):
        value = inner.get(key, hf_format.assumed.get(key))
        if outer[key] != value:
            raise ConfigError(
                f"{inner_key}.{key} is {_as_json(value)}, but {key} outside of {inner_key} is {_as_json(outer[key])}; "
                "set both to the same value"
            )


def _number(read: Any, value: Any, key: str) -> Any:
    """Returns the setting for a number in config.json. Raises `ConfigError` for other values."""
    if isinstance(value, str | list | dict) or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(f"{key} is {_as_json(value)}, but must be a number; correct it")
    try:
        return read(value)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{key} is {_as_json(value)}, which is not valid: {error}; correct it") from error


def _is_positive_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


# -- rotary positions, which files define by `rope_parameters` or by older keys


def _read_rope(tree: Tree, hf_format: HuggingFace, nested: bool) -> dict[str, Any]:
    """Reads the settings of rotary positions, with the precedence of transformers 5.

    With one set of parameters, a non-empty `rope_scaling` replaces `rope_parameters`, including a base that only the
    latter has. With a set for each kind of layer (`nested`), it overrides those of layers without a window.
    """
    if "n_positions" in hf_format.settings:
        return {}  # learned positions
    parameters, scaling = _object(tree, "rope_parameters"), _object(tree, "rope_scaling")
    if not nested:
        full = scaling or parameters
        if kinds := sorted(full.keys() & {_SLIDING, _FULL}):
            raise ConfigError(
                f"rope_parameters.{kinds[0]} is for families with other rotary positions in layers with a "
                "window; write its keys directly into rope_parameters"
            )
        return _base_and_scaling(full, tree, hf_format)
    if unexpected := sorted(parameters.keys() - {_SLIDING, _FULL}):
        raise ConfigError(
            f"rope_parameters.{printable(unexpected[0])} is not for a kind of layer, and transformers ignores it in "
            f"this family; write it into rope_parameters.{_FULL}"
        )
    with _prefix_errors("rope_parameters"):
        full, sliding = _object(parameters, _FULL), _object(parameters, _SLIDING)
    full = {**(full or {"rope_type": "default"}), **scaling}
    settings = _base_and_scaling(full, tree, hf_format)
    if full.get("truncate") is False:
        raise ConfigError(f"rope_parameters.{_FULL}.truncate is false, which transformers ignores here; remove it")
    with _prefix_errors(f"rope_parameters.{_SLIDING}"):
        local_scaling = _scaling(sliding, tree)
    if local_scaling:
        raise ConfigError(f"rope_parameters.{_SLIDING} is scaled, which is not supported for layers with a window")
    return settings | {"local_rope_theta": _local_theta(sliding, tree, hf_format)}


def _base_and_scaling(parameters: Tree, tree: Tree, hf_format: HuggingFace) -> dict[str, Any]:
    """Returns the settings of rotary positions in layers without a window."""
    default = hf_format.assumed.get("rope_theta", 10000.0)
    theta = _above(1, "rope_theta", parameters.get("rope_theta", tree.get("rope_theta", default)))
    return {"rope_theta": theta, "rope_scaling": _scaling(parameters, tree)}


def _local_theta(sliding: Tree, tree: Tree, hf_format: HuggingFace) -> float:
    """Returns the base of rotary positions in layers with a window."""
    older_key = "rope_local_base_freq"
    default = hf_format.assumed.get("rope_theta", 10000.0)
    if older_key in hf_format.assumed:
        return _above(1, older_key, sliding.get("rope_theta", tree.get(older_key, hf_format.assumed[older_key])))
    local = _above(1, f"rope_parameters.{_SLIDING}.rope_theta", sliding.get("rope_theta", default))
    # Older versions of transformers used the base of all layers here, newer ones use the family's default.
    ambiguous = [
        key for key in ("rope_theta", older_key) if "rope_theta" not in sliding and tree.get(key, local) != local
    ]
    if ambiguous:
        raise ConfigError(
            f"{ambiguous[0]} is {_as_json(tree[ambiguous[0]])}, and it depends on the version of transformers whether "
            f"layers with a window use it or {local:g}; write rope_parameters.{_SLIDING}.rope_theta"
        )
    return local


def _as_json(value: Any) -> str:
    """Returns the value as the file writes it, so that a number in quotes does not look like a number."""
    return printable(json_text(value, ensure_ascii=False))


def _object(tree: Tree, key: str) -> Tree:
    """Returns the object under a key; empty if it is missing."""
    value = tree.get(key)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{key} is {_as_json(value)}, but must be an object; correct it")
    return value or {}


def _above(bound: float, key: str, value: Any) -> float:
    """Returns a number that must be larger than `bound`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > bound:
        raise ConfigError(f"{key} is {_as_json(value)}, but must be a number above {bound}; correct it")
    return float(value)


def _scaling(parameters: Tree, tree: Tree) -> dict[str, Any]:
    """Reads `model.rope_scaling`; empty for none."""
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if (older_type := parameters.get("type", rope_type)) != rope_type:
        raise ConfigError(
            f"rope_type is {_as_json(rope_type)} (default if it is missing), but type is {_as_json(older_type)}; "
            "keep only rope_type"
        )
    if parameters.get("partial_rotary_factor") not in (None, 1.0):
        raise ConfigError("partial_rotary_factor must be 1: partly rotated heads are not supported")
    if rope_type == "default":
        return {}
    if not isinstance(rope_type, str) or rope_type not in SCALING_KEYS_OF_TYPE:
        raise ConfigError(
            f"rope_type is {_as_json(rope_type)}; supported types are default, {', '.join(SCALING_KEYS_OF_TYPE)}"
        )
    present = {key: value for key, value in parameters.items() if value is not None and key != "partial_rotary_factor"}
    supported = {*SCALING_KEYS_OF_TYPE[rope_type], "rope_type", "type", "rope_theta", "finetuned"}
    scales = {key: present.pop(key) for key in ("mscale", "mscale_all_dim") if key in present and rope_type == "yarn"}
    if unknown := sorted(set(present) - supported):
        raise ConfigError(f"{printable(unknown[0])} is not a supported key of rope_type {rope_type}; remove it")
    if "original_max_position_embeddings" in supported and "max_position_embeddings" in tree:
        present.setdefault("original_max_position_embeddings", tree["max_position_embeddings"])
    if missing := [key for key in _REQUIRED_SCALING_KEYS if key in supported and key not in present]:
        raise ConfigError(f"{missing[0]} is missing, but rope_type {rope_type} needs it; add it")
    for key, value in [*present.items(), *scales.items()]:
        if key in (*SCALING_SETTINGS, *scales) and key != "truncate":
            _above(0, key, value)
    settings = {SCALING_SETTINGS[key]: present[key] for key in SCALING_KEYS_OF_TYPE[rope_type] if key in present}
    if "attention_factor" not in settings and len(scales) == 2:
        # DeepSeek's form of yarn; transformers computes the same factor.
        factor = lambda scale: 0.1 * scale * math.log(settings["factor"]) + 1
        settings["attention_factor"] = factor(scales["mscale"]) / factor(scales["mscale_all_dim"])
    return {"type": rope_type, **settings}


def _write_rope(model: Model, optional: Any) -> dict[str, Any]:
    """Returns `rope_parameters`, and the older keys for it, which other programs read."""
    if "max_positions" in optional:
        return {}
    scaling = model.rope_scaling
    scaling_keys: dict[str, Any] = {"rope_type": "default" if scaling.type == "none" else scaling.type}
    for key in SCALING_KEYS_OF_TYPE.get(scaling.type, ()):
        name = SCALING_SETTINGS[key]
        value = getattr(scaling, name)
        is_default = value is None or value == RopeScaling.model_fields[name].default
        if not is_default or key in _REQUIRED_SCALING_KEYS:
            scaling_keys[key] = value
    full = {"rope_theta": model.rope_theta, **scaling_keys}
    older = {"rope_theta": model.rope_theta, "rope_scaling": None if scaling.type == "none" else scaling_keys}
    if "local_rope_theta" not in optional:
        return {"rope_parameters": full, **older}
    local = model.local_rope_theta or model.rope_theta
    nested = {_FULL: full, _SLIDING: {"rope_type": "default", "rope_theta": local}}
    return {"rope_parameters": nested, **older, "rope_local_base_freq": local}


_REQUIRED_SCALING_KEYS = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")


# -- the layers with a window


def _read_windows(tree: Tree, family: str, reads_pattern: bool, layers: int) -> dict[str, Any]:
    """Reads `model.sliding_window_pattern`. Raises `ConfigError` for windows that the family does not support."""
    kind = family_class(family)
    types = tree.get("layer_types")
    if types is not None and (not isinstance(types, list) or len(types) != layers):
        raise ConfigError(f"layer_types must be a list of {layers}, one for each layer; correct it")
    if "sliding_window_pattern" not in kind.settings:
        windowed = "sliding_window" in kind.settings and tree.get("sliding_window") is not None
        expected = _SLIDING if windowed else _FULL
        if types is not None and types != [expected] * layers:
            raise ConfigError(f"layer_types must be {expected} for all {layers} layers in the family {family}")
        return {}
    length = tree.get("sliding_window_pattern")
    if length is not None and not _is_positive_integer(length):
        raise ConfigError(f"sliding_window_pattern is {_as_json(length)}, but must be an integer of 1 or more")
    if types is None and length not in (None, getattr(kind, "pattern_length", None)) and not reads_pattern:
        raise ConfigError(
            f"sliding_window_pattern is {length}, but transformers ignores this key in the family {family}; "
            "write layer_types"
        )
    if types is not None:
        # The pattern ends with its first layer without a window; without any, it is longer than the model.
        if _FULL in types:
            length = types.index(_FULL) + 1
        elif length is None or length <= layers:
            length = layers + 1
        if types != _layer_types(layers, length):
            raise ConfigError(
                f"layer_types must repeat a pattern of {_SLIDING} that ends with {_FULL} in the family {family}"
            )
    return {} if length is None else {"sliding_window_pattern": length}


def _layer_types(layers: int, length: int) -> list[str]:
    """Returns the type of each layer: every `length`-th has no window."""
    return [_SLIDING if number % length else _FULL for number in range(1, layers + 1)]


def _write_windows(model: Model, kind: Any) -> dict[str, Any]:
    """Returns the keys of config.json that define the layers with a window."""
    if "sliding_window_pattern" not in kind.settings:
        return {}
    length = model.sliding_window_pattern or kind.pattern_length
    return {"layer_types": _layer_types(model.num_layers, length), "sliding_window_pattern": length}
