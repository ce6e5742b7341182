"""Converts Hugging Face's config.json to and from the section `model`. An unknown key raises an error, because it may
change the maths."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jaxmnt.config.model import BALANCE_SETTINGS, Model, RopeScaling
from jaxmnt.errors import ConfigError, printable, suggest
from jaxmnt.models.huggingface import HuggingFace
from jaxmnt.models.registry import FAMILIES, OPTIONAL_SETTINGS, family_class
from jaxmnt.strict_json import json_text

Tree = Mapping[str, Any]
"""A JSON object."""

_KEYS_WITHOUT_EFFECT = frozenset(
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
"""Keys that have no effect on the function of any trained model. They are about names, tokens, dropout and
initialisation in training, and defaults for generation."""

TOKENIZER_KEY = "jaxmnt_tokenizer"
"""Key that names the tokenizer of a model whose tokens are bytes and need no tokenizer.json. `to-hf` writes it."""

_NO_EFFECT_IF_FALSE = frozenset({"use_mrope", "rope_interleaved", "gradient_checkpointing"})
"""Keys that have no effect if their value is false."""

_ROPE_AND_WINDOW_KEYS = (
    "rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "layer_types", "sliding_window_pattern",
)  # fmt: skip
"""Keys that are read together, because several of them determine one setting."""

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
"""Setting of `model.rope_scaling` for each key of config.json that describes the scaling of rotary positions."""
SCALING_KEYS_OF_TYPE = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor"
    ),
}  # fmt: skip
"""Keys of config.json that belong to each type of scaling."""

_REQUIRED_SETTINGS = ("hidden_size", "num_layers", "num_heads", "vocab_size")
"""Settings without which a model is not defined."""

_INTEGER_SETTINGS = (
    "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
    "num_experts", "experts_per_token", "expert_size",
)  # fmt: skip
"""Settings that must be integers."""

_SLIDING, _FULL = "sliding_attention", "full_attention"


def families_by_model_type() -> dict[str, tuple[str, HuggingFace]]:
    """Returns the name and the format of each family, by its `model_type` in config.json."""
    by_model_type = {}
    for name in sorted(FAMILIES):
        hf_format = family_class(name).hugging_face
        if hf_format is not None:
            by_model_type[hf_format.model_type] = (name, hf_format)
    return by_model_type


def read_config(tree: Tree, where: str) -> dict[str, Any]:
    """Returns the settings of `model` for a config.json, whose path `where` appears in error messages.

    Raises `ConfigError` for an unknown family, and for keys that change the maths in a way that the family does not
    support.
    """
    with _prefix_errors(where):
        return _settings_of(*_family_of(tree))


def scaled_settings(tree: Tree) -> list[str]:
    """Returns a sentence for each key of a config.json whose number differs from that of its setting."""
    _, hf_format, _ = _family_of(tree)
    model = read_config(tree, "config.json")
    return [
        f"model.{setting.name} is {model[setting.name]:g}, which is {key} times model.{setting.times} "
        f"({model[setting.times]}), because transformers does not divide by this number"
        for key, setting in hf_format.settings.items()
        if setting.times and setting.name in model
    ]


@contextmanager
def _prefix_errors(where: str) -> Iterator[None]:
    """Puts `where` in front of the message of a `ConfigError`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _settings_of(family: str, hf_format: HuggingFace, tree: Tree) -> dict[str, Any]:
    """Returns the settings of a family for a config.json."""
    known_keys = {"transformers.js_config", TOKENIZER_KEY, *_KEYS_WITHOUT_EFFECT, *_ROPE_AND_WINDOW_KEYS}
    known_keys |= {*hf_format.meaningless, *hf_format.settings, *hf_format.only}
    unknown = sorted(key for key in tree if key not in known_keys and (tree[key] or key not in _NO_EFFECT_IF_FALSE))
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
        # Several keys may stand for one setting.
        is_open = setting.name not in settings
        value = tree.get(key, hf_format.assumed.get(key) if is_open else None)
        if value is None and is_open and (setting.name in _REQUIRED_SETTINGS or key == "intermediate_size"):
            raise ConfigError(f"{key} is missing; add it, because it defines the model")
        if value is not None:
            converted = _convert_number(setting.read, value, key)
            if setting.times:
                converted *= settings.get(setting.times, 1)  # the family refuses a config without it
            if settings.setdefault(setting.name, converted) != converted:
                raise ConfigError(
                    f"{key} is {_as_json(value)}, but another key sets model.{setting.name} to "
                    f"{settings[setting.name]}; keep one of them"
                )
            if setting.name in _INTEGER_SETTINGS and not _is_positive_integer(value):
                raise ConfigError(f"{key} must be an integer of at least 1, not {_as_json(value)}")
    settings.setdefault("intermediate_size", 4 * settings["hidden_size"])  # the default of GPT-2's n_inner
    settings |= _read_rope(tree, hf_format, "local_rope_theta" in family_class(family).settings)
    return settings | _read_windows(tree, family, hf_format.reads_pattern, settings["num_layers"])


def write_config(model: Model, extra: Tree) -> dict[str, Any]:
    """Returns config.json for a model of a family that Hugging Face knows.

    `extra` is the config.json that the model came from. Its keys without effect, such as token ids, are copied.
    """
    family = family_class(model.family)
    hf_format = family.hugging_face
    if hf_format is None:
        raise ConfigError(
            f"model.family: {printable(model.family)} has no format in files of Hugging Face; use one of "
            f"{', '.join(sorted(name for name, _ in families_by_model_type().values()))}"
        )
    _check_can_be_written(model, hf_format)
    tree = {key: value for key, value in extra.items() if key in _KEYS_WITHOUT_EFFECT}
    if "max_positions" in family.settings:
        tree.pop("max_position_embeddings", None)  # these families use another key for it
    tree |= {"architectures": [hf_format.architecture], "model_type": hf_format.model_type}
    tree |= {key: allowed[0] for key, allowed in hf_format.only.items()}
    complete_model = family.with_defaults(model)
    for key, setting in hf_format.settings.items():
        value = getattr(complete_model, setting.name)
        tree[key] = None if value is None else setting.write(value)
        if setting.times and value is not None:
            tree[key] = value / getattr(complete_model, setting.times)
    if "query_pre_attn_scalar" in tree and tree["query_pre_attn_scalar"] is None:
        tree["query_pre_attn_scalar"] = model.head_dim  # the default scale
    return tree | _write_rope(model, family.settings) | _write_windows(model, family)


def _check_can_be_written(model: Model, hf_format: HuggingFace) -> None:
    """Raises `ConfigError` if the model has a setting that transformers ignores in its family."""
    writable = {setting.name for setting in hf_format.settings.values()}
    writable |= {"local_rope_theta", "sliding_window_pattern", *BALANCE_SETTINGS}
    defaults = dict.fromkeys(OPTIONAL_SETTINGS)
    default_model = family_class(model.family).with_defaults(model.model_copy(update=defaults))
    for name in OPTIONAL_SETTINGS:
        if name not in writable and getattr(model, name) not in (None, getattr(default_model, name)):
            raise ConfigError(
                f"model.{name}: a model with this setting cannot be exported, because transformers ignores it in "
                f"{hf_format.model_type}"
            )


def _family_of(tree: Tree) -> tuple[str, HuggingFace, Tree]:
    """Returns the family, its format, and the part of the config.json that describes it."""
    known_families = families_by_model_type()
    model_type = tree.get("model_type")
    if "quantization_config" in tree:
        raise ConfigError("quantization_config: quantised weights are not supported; use the original ones")
    for family, hf_format in known_families.values():
        outer_type, key = hf_format.nested or (None, "")
        if model_type == outer_type and isinstance(tree.get(key), dict):
            _check_configs_agree(tree, key, hf_format)
            return family, hf_format, tree[key]
    if not model_type:
        raise ConfigError(f"model_type is missing; set it to one of {', '.join(sorted(known_families))}")
    if not isinstance(model_type, str) or model_type not in known_families:
        suggestion = suggest(str(model_type), sorted(known_families))
        raise ConfigError(f"model_type is {_as_json(model_type)}, which is not known; {suggestion}")
    return *known_families[model_type], tree


def _check_configs_agree(outer: Tree, inner_key: str, hf_format: HuggingFace) -> None:
    """Raises `ConfigError` if the config of a larger model contradicts the config of the text model inside it."""
    inner = outer[inner_key]
    for key in sorted(hf_format.settings.keys() & outer.keys()):
        value = inner.get(key, hf_format.assumed.get(key))
        if outer[key] != value:
            raise ConfigError(
                f"{inner_key}.{key} is {_as_json(value)}, but {key} outside of {inner_key} is {_as_json(outer[key])}; "
                "set both to the same value"
            )


def _convert_number(read: Callable[[Any], Any], value: Any, key: str) -> Any:
    """Returns the setting that `read` makes from a number in config.json. Raises `ConfigError` for other values."""
    if isinstance(value, str | list | dict) or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(f"{key} must be a number, not {_as_json(value)}")
    try:
        return read(value)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{key} is {_as_json(value)}, which is not valid: {error}; correct it") from error


def _is_positive_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


# -- rotary positions, which files define with `rope_parameters` or with older keys


def _read_rope(tree: Tree, hf_format: HuggingFace, has_set_per_kind: bool) -> dict[str, Any]:
    """Returns the settings of rotary positions, with the precedence that keys have in transformers 5.

    If there is one set of parameters, a non-empty `rope_scaling` replaces `rope_parameters`, including a base that only
    `rope_parameters` has. If there is a set for each kind of layer (`has_set_per_kind`), `rope_scaling` overrides the
    parameters of layers without a window.
    """
    if "n_positions" in hf_format.settings:
        return {}  # learned positions
    parameters, scaling = _object(tree, "rope_parameters"), _object(tree, "rope_scaling")
    if not has_set_per_kind:
        full_parameters = scaling or parameters
        if kinds := sorted(full_parameters.keys() & {_SLIDING, _FULL}):
            raise ConfigError(
                f"rope_parameters.{kinds[0]} is for families whose layers with a window have different rotary "
                "positions; write its keys directly into rope_parameters"
            )
        return _base_and_scaling(full_parameters, tree, hf_format)
    if unexpected := sorted(parameters.keys() - {_SLIDING, _FULL}):
        raise ConfigError(
            f"rope_parameters.{printable(unexpected[0])} is not for a kind of layer, and transformers ignores it in "
            f"this family; write it into rope_parameters.{_FULL}"
        )
    with _prefix_errors("rope_parameters"):
        full_parameters = _object(parameters, _FULL)
        sliding_parameters = _object(parameters, _SLIDING)
    full_parameters = {**(full_parameters or {"rope_type": "default"}), **scaling}
    settings = _base_and_scaling(full_parameters, tree, hf_format)
    if full_parameters.get("truncate") is False:
        raise ConfigError(f"rope_parameters.{_FULL}.truncate is false, which transformers ignores here; remove it")
    with _prefix_errors(f"rope_parameters.{_SLIDING}"):
        local_scaling = _read_scaling(sliding_parameters, tree)
    if local_scaling:
        raise ConfigError(f"rope_parameters.{_SLIDING} is scaled, which is not supported for layers with a window")
    return settings | {"local_rope_theta": _local_theta(sliding_parameters, tree, hf_format)}


def _base_and_scaling(parameters: Tree, tree: Tree, hf_format: HuggingFace) -> dict[str, Any]:
    """Returns the settings of rotary positions in layers without a window."""
    default = hf_format.assumed.get("rope_theta", 10000.0)
    theta = _number_above(1, "rope_theta", parameters.get("rope_theta", tree.get("rope_theta", default)))
    return {"rope_theta": theta, "rope_scaling": _read_scaling(parameters, tree)}


def _local_theta(sliding_parameters: Tree, tree: Tree, hf_format: HuggingFace) -> float:
    """Returns the base of rotary positions in layers with a window."""
    older_key = "rope_local_base_freq"
    default = hf_format.assumed.get("rope_theta", 10000.0)
    if older_key in hf_format.assumed:
        return _number_above(
            1, older_key, sliding_parameters.get("rope_theta", tree.get(older_key, hf_format.assumed[older_key]))
        )
    local = _number_above(1, f"rope_parameters.{_SLIDING}.rope_theta", sliding_parameters.get("rope_theta", default))
    # Older versions of transformers used the base of all layers here, whereas newer ones use the family's default.
    ambiguous = [
        key
        for key in ("rope_theta", older_key)
        if "rope_theta" not in sliding_parameters and tree.get(key, local) != local
    ]
    if ambiguous:
        raise ConfigError(
            f"{ambiguous[0]} is {_as_json(tree[ambiguous[0]])}, but it depends on the version of transformers whether "
            f"layers with a window use it or {local:g}; write rope_parameters.{_SLIDING}.rope_theta"
        )
    return local


def _as_json(value: Any) -> str:
    """Returns the value as JSON. A string is in quotes, so that "4" does not look like the number 4."""
    return printable(json_text(value, ensure_ascii=False))


def _object(tree: Tree, key: str) -> Tree:
    """Returns the object under a key; empty if the key is missing or null."""
    value = tree.get(key)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{key} must be an object, not {_as_json(value)}")
    return value or {}


def _number_above(bound: float, key: str, value: Any) -> float:
    """Returns the number under a key. Raises `ConfigError` if it is not larger than `bound`, or not a number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > bound:
        raise ConfigError(f"{key} must be a number above {bound}, not {_as_json(value)}")
    return float(value)


def _read_scaling(parameters: Tree, tree: Tree) -> dict[str, Any]:
    """Returns the settings of `model.rope_scaling`; empty if positions are not scaled. `parameters` is one set of
    parameters of rotary positions in the config.json `tree`."""
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if (older_type := parameters.get("type", rope_type)) != rope_type:
        raise ConfigError(
            f"rope_type is {_as_json(rope_type)} (default if it is missing), but type is {_as_json(older_type)}; "
            "keep only rope_type"
        )
    if parameters.get("partial_rotary_factor") not in (None, 1.0):
        raise ConfigError("partial_rotary_factor must be 1, because partly rotated heads are not supported")
    if rope_type == "default":
        return {}
    if not isinstance(rope_type, str) or rope_type not in SCALING_KEYS_OF_TYPE:
        raise ConfigError(
            f"rope_type is {_as_json(rope_type)}; supported types are default, {', '.join(SCALING_KEYS_OF_TYPE)}"
        )
    scaling = {key: value for key, value in parameters.items() if value is not None and key != "partial_rotary_factor"}
    supported_keys = {*SCALING_KEYS_OF_TYPE[rope_type], "rope_type", "type", "rope_theta", "finetuned"}
    mscale_keys = ("mscale", "mscale_all_dim") if rope_type == "yarn" else ()
    mscales = {key: scaling.pop(key) for key in mscale_keys if key in scaling}
    if unknown := sorted(set(scaling) - supported_keys):
        raise ConfigError(f"{printable(unknown[0])} is not a supported key of rope_type {rope_type}; remove it")
    if "original_max_position_embeddings" in supported_keys and "max_position_embeddings" in tree:
        scaling.setdefault("original_max_position_embeddings", tree["max_position_embeddings"])
    if missing := [key for key in _REQUIRED_SCALING_KEYS if key in supported_keys and key not in scaling]:
        raise ConfigError(f"{missing[0]} is missing, but rope_type {rope_type} needs it; add it")
    for key, value in [*scaling.items(), *mscales.items()]:
        if key in (*SCALING_SETTINGS, *mscales) and key != "truncate":
            _number_above(0, key, value)
    settings = {SCALING_SETTINGS[key]: scaling[key] for key in SCALING_KEYS_OF_TYPE[rope_type] if key in scaling}
    if "attention_factor" not in settings and len(mscales) == 2:
        # DeepSeek's form of yarn. transformers computes the same factor.
        factor = lambda mscale: 0.1 * mscale * math.log(settings["factor"]) + 1
        settings["attention_factor"] = factor(mscales["mscale"]) / factor(mscales["mscale_all_dim"])
    return {"type": rope_type, **settings}


def _write_rope(model: Model, family_settings: Sequence[str]) -> dict[str, Any]:
    """Returns `rope_parameters`, and the older keys with the same meaning, which other programs read."""
    if "max_positions" in family_settings:
        return {}
    scaling = model.rope_scaling
    scaling_keys: dict[str, Any] = {"rope_type": "default" if scaling.type == "none" else scaling.type}
    for key in SCALING_KEYS_OF_TYPE.get(scaling.type, ()):
        name = SCALING_SETTINGS[key]
        value = getattr(scaling, name)
        is_default = value is None or value == RopeScaling.model_fields[name].default
        if not is_default or key in _REQUIRED_SCALING_KEYS:
            scaling_keys[key] = value
    full_parameters = {"rope_theta": model.rope_theta, **scaling_keys}
    older_keys = {"rope_theta": model.rope_theta, "rope_scaling": None if scaling.type == "none" else scaling_keys}
    if "local_rope_theta" not in family_settings:
        return {"rope_parameters": full_parameters, **older_keys}
    local_theta = model.local_rope_theta or model.rope_theta
    parameters_by_kind = {_FULL: full_parameters, _SLIDING: {"rope_type": "default", "rope_theta": local_theta}}
    return {"rope_parameters": parameters_by_kind, **older_keys, "rope_local_base_freq": local_theta}


_REQUIRED_SCALING_KEYS = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
"""Keys that a type of scaling must have if they belong to it."""


# -- the layers with a window


def _read_windows(tree: Tree, family: str, reads_pattern: bool, layers: int) -> dict[str, Any]:
    """Returns `model.sliding_window_pattern`, if the config.json sets it. Raises `ConfigError` for windows that the
    family does not support."""
    family_type = family_class(family)
    types = tree.get("layer_types")
    if types is not None and (not isinstance(types, list) or len(types) != layers):
        raise ConfigError(f"layer_types must be a list of {layers}, one for each layer; correct it")
    if "sliding_window_pattern" not in family_type.settings:
        has_window = "sliding_window" in family_type.settings and tree.get("sliding_window") is not None
        expected = _SLIDING if has_window else _FULL
        if types is not None and types != [expected] * layers:
            raise ConfigError(f"layer_types must be {expected} for all {layers} layers in the family {family}")
        return {}
    length = tree.get("sliding_window_pattern")
    if length is not None and not _is_positive_integer(length):
        raise ConfigError(f"sliding_window_pattern must be an integer of at least 1, not {_as_json(length)}")
    if types is None and length not in (None, getattr(family_type, "pattern_length", None)) and not reads_pattern:
        raise ConfigError(
            f"sliding_window_pattern is {length}, but transformers ignores this key in the family {family}; "
            "write layer_types"
        )
    if types is not None:
        # The pattern ends with the first layer without a window. If there is none, it is longer than the model.
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
    """Returns the type of each layer. Every `length`-th layer has no window."""
    return [_SLIDING if number % length else _FULL for number in range(1, layers + 1)]


def _write_windows(model: Model, family: Any) -> dict[str, Any]:
    """Returns the keys of config.json that say which layers have a window."""
    if "sliding_window_pattern" not in family.settings:
        return {}
    length = model.sliding_window_pattern or family.pattern_length
    return {"layer_types": _layer_types(model.num_layers, length), "sliding_window_pattern": length}
