"""config.json of Hugging Face, to and from the section `model`. What alters the maths and is not known is refused."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxmnt.config.model import Model, RopeScaling
from jaxmnt.errors import ConfigError, nearest, printable
from jaxmnt.models.huggingface import HuggingFace
from jaxmnt.models.registry import FAMILIES, OPTIONAL, family_class
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
"""Keys of any config.json that say nothing about what a trained model computes: names, tokens, dropout and
initialisation of training, what generation does by default."""

TOKENIZER_KEY = "jaxmnt_tokenizer"
"""Names the tokenizer of a model whose tokens need no tokenizer.json: bytes. `to-hf` writes it."""

_IF_FALSE = frozenset({"use_mrope", "rope_interleaved", "gradient_checkpointing"})
"""Keys that say that nothing is done."""

_READ_TOGETHER = (
    "rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "layer_types", "sliding_window_pattern",
)  # fmt: skip
"""Keys of which several make a setting."""

SCALING = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_positions",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
}
"""Keys of a scaling there, and the settings of `model.rope_scaling` that they are."""
OF_TYPE = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor"
    ),
}  # fmt: skip
"""Keys that each type of scaling has."""

_REQUIRED = ("hidden_size", "num_layers", "num_heads", "vocab_size")

_WHOLE = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
"""Settings that are whole numbers."""

_SLIDING, _FULL = "sliding_attention", "full_attention"


def families() -> dict[str, tuple[str, HuggingFace]]:
    """By `model_type`: the name of the family here, and how it is written there."""
    found = {}
    for name in sorted(FAMILIES):
        written = family_class(name).hugging_face
        if written is not None:
            found[written.model_type] = (name, written)
    return found


def read_config(tree: Tree, where: str) -> dict[str, Any]:
    """The settings of `model` that a config.json asks for; `where` names it in errors.

    Raises `ConfigError` for a family that is not known, and for keys that alter the maths in a way that this family
    has not.
    """
    with _naming(where):
        return _settings_of(*_family_of(tree))


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Inside, a `ConfigError` says what is wrong; outside, also where."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _settings_of(family: str, written: HuggingFace, tree: Tree) -> dict[str, Any]:
    known = {"transformers.js_config", TOKENIZER_KEY, *_MEANINGLESS, *_READ_TOGETHER}
    known |= {*written.meaningless, *written.settings, *written.only}
    stray = sorted(key for key in tree if key not in known and (tree[key] or key not in _IF_FALSE))
    if stray:
        raise ConfigError(
            f"{printable(stray[0])} is not a key that the family {family} has, and may alter what the model "
            "computes; if it does not, remove it from the file"
        )
    for key, allowed in sorted(written.only.items()):
        if key in tree and tree[key] not in allowed:
            raise ConfigError(
                f"{key} is {_shown(tree[key])}, and the family {family} computes only "
                f"{' or '.join(map(_shown, allowed))}"
            )
    found: dict[str, Any] = {"family": family}
    for key, setting in written.settings.items():
        value = tree.get(key, written.assumed.get(key))
        if value is None and (setting.name in _REQUIRED or key == "intermediate_size"):
            raise ConfigError(f"{key} is missing; without it the model is not known")
        if value is not None:
            found[setting.name] = _number(setting.read, value, key)
            if setting.name in _WHOLE and not _is_positive_integer(value):
                raise ConfigError(f"{key} is {_shown(value)}, and must be 1 or more; correct it")
    found.setdefault("intermediate_size", 4 * found["hidden_size"])  # where GPT-2's n_inner says nothing
    found |= _read_rope(tree, written, "local_rope_theta" in family_class(family).settings)
    return found | _read_windows(tree, family, written.reads_pattern, found["num_layers"])


def write_config(model: Model, extra: Tree) -> dict[str, Any]:
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
    _check_can_be_written(model, written)
    tree = {key: value for key, value in extra.items() if key in _MEANINGLESS}
    if "max_positions" in kind.settings:
        tree.pop("max_position_embeddings", None)  # which has another name there
    tree |= {"architectures": [written.architecture], "model_type": written.model_type}
    tree |= {key: allowed[0] for key, allowed in written.only.items()}
    for key, setting in written.settings.items():
        value = getattr(model, setting.name)
        tree[key] = None if value is None else setting.write(value)
    if tree.get("query_pre_attn_scalar", ...) is None:
        tree["query_pre_attn_scalar"] = model.head_dim  # what no scale means
    return tree | _written_rope(model, kind.settings) | _written_windows(model, kind)


def _check_can_be_written(model: Model, written: HuggingFace) -> None:
    """Raises `ConfigError` if the model has a setting with which transformers does not compute in its family."""
    names = {setting.name for setting in written.settings.values()} | {"local_rope_theta", "sliding_window_pattern"}
    for name in OPTIONAL:
        if name not in names and getattr(model, name) is not None:
            raise ConfigError(
                f"model.{name}: a model with it cannot be written for {written.model_type}, which transformers "
                "computes without it"
            )


def _family_of(tree: Tree) -> tuple[str, HuggingFace, Tree]:
    """Returns the family, and the part of the config.json that is about it."""
    known, kind = families(), tree.get("model_type")
    if "quantization_config" in tree:
        raise ConfigError("quantization_config: quantised weights are not read; use the original ones")
    for family, written in known.values():
        outer, key = written.nested or (None, "")
        if kind == outer and isinstance(tree.get(key), dict):
            _check_agree(tree, key, written)
            return family, written, tree[key]
    if not kind:
        raise ConfigError(f"model_type is missing; known: {', '.join(sorted(known))}")
    if not isinstance(kind, str) or kind not in known:
        raise ConfigError(f"model_type is {_shown(kind)}, which is not known; {nearest(str(kind), sorted(known))}")
    return *known[kind], tree


def _check_agree(outer: Tree, key_of_inner: str, written: HuggingFace) -> None:
    """Raises `ConfigError` if the config of a larger model says something else of its text model than that says."""
    inner = outer[key_of_inner]
    for key in sorted(written.settings.keys() & outer.keys()):
        own = inner.get(key, written.assumed.get(key))
        if outer[key] != own:
            raise ConfigError(
                f"{key_of_inner}.{key} is {_shown(own)}, and {key} beside it {_shown(outer[key])}; "
                "write the same into both"
            )


def _number(read: Any, value: Any, key: str) -> Any:
    if isinstance(value, str | list | dict) or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(f"{key} is {_shown(value)}, and must be a number; correct it")
    try:
        return read(value)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{key} is {_shown(value)}, which cannot be: {error}; correct it") from error


def _is_positive_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


# -- rotary positions, in the two ways in which files say it


def _read_rope(tree: Tree, written: HuggingFace, nested: bool) -> dict[str, Any]:
    """Reads the settings of rotary positions, with the precedence that transformers 5 has.

    With one set of parameters, a `rope_scaling` that says something replaces `rope_parameters`, and a base that only
    the latter has is lost. With a set for each kind of layer, it overrides those of layers without a window.
    """
    if "n_positions" in written.settings:
        return {}  # learned positions
    parameters, scaling = _object(tree, "rope_parameters"), _object(tree, "rope_scaling")
    if not nested:
        full = scaling or parameters
        if kinds := sorted(full.keys() & {_SLIDING, _FULL}):
            raise ConfigError(
                f"rope_parameters.{kinds[0]} is for families with other rotary positions in layers with a "
                "window; write its keys directly into rope_parameters"
            )
        return _base_and_scaling(full, tree, written)
    if stray := sorted(parameters.keys() - {_SLIDING, _FULL}):
        raise ConfigError(
            f"rope_parameters.{printable(stray[0])} is not for a kind of layer, and transformers does not "
            f"read it in this family; write it into rope_parameters.{_FULL}"
        )
    with _naming("rope_parameters"):
        full, sliding = _object(parameters, _FULL), _object(parameters, _SLIDING)
    full = {**(full or {"rope_type": "default"}), **scaling}
    found = _base_and_scaling(full, tree, written)
    if full.get("truncate") is False:
        raise ConfigError(f"rope_parameters.{_FULL}.truncate is false, which transformers does not read here")
    with _naming(f"rope_parameters.{_SLIDING}"):
        scaled = _scaling(sliding, tree)
    if scaled:
        raise ConfigError(f"rope_parameters.{_SLIDING} is scaled, and layers with a window are not stretched here")
    return found | {"local_rope_theta": _local_theta(sliding, tree, written)}


def _base_and_scaling(parameters: Tree, tree: Tree, written: HuggingFace) -> dict[str, Any]:
    """Returns the settings of rotary positions in layers without a window."""
    default = written.assumed.get("rope_theta", 10000.0)
    theta = _above(1, "rope_theta", parameters.get("rope_theta", tree.get("rope_theta", default)))
    return {"rope_theta": theta, "rope_scaling": _scaling(parameters, tree)}


def _local_theta(sliding: Tree, tree: Tree, written: HuggingFace) -> float:
    """Returns the base of rotary positions in layers with a window."""
    older, default = "rope_local_base_freq", written.assumed.get("rope_theta", 10000.0)
    if older in written.assumed:
        return _above(1, older, sliding.get("rope_theta", tree.get(older, written.assumed[older])))
    local = _above(1, f"rope_parameters.{_SLIDING}.rope_theta", sliding.get("rope_theta", default))
    # Older versions of transformers took the base of all layers here, newer ones the family's default.
    others = [key for key in ("rope_theta", older) if "rope_theta" not in sliding and tree.get(key, local) != local]
    if others:
        raise ConfigError(
            f"{others[0]} is {_shown(tree[others[0]])}, and versions of transformers differ in "
            f"whether layers with a window have it or {local:g}; write rope_parameters.{_SLIDING}.rope_theta"
        )
    return local


def _shown(value: Any) -> str:
    """The value as the file writes it, so that a number in quotes is not taken for a number."""
    return printable(json_text(value, ensure_ascii=False))


def _object(tree: Tree, key: str) -> Tree:
    value = tree.get(key)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{key} is {_shown(value)}, and must be an object; correct it")
    return value or {}


def _above(least: float, key: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > least:
        raise ConfigError(f"{key} is {_shown(value)}, and must be a number above {least}; correct it")
    return float(value)


def _scaling(parameters: Tree, tree: Tree) -> dict[str, Any]:
    """Reads `model.rope_scaling`; empty for none."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if (older := parameters.get("type", kind)) != kind:
        raise ConfigError(
            f"rope_type is {_shown(kind)} (default where it is missing), and type is "
            f"{_shown(older)}; write rope_type alone"
        )
    if parameters.get("partial_rotary_factor") not in (None, 1.0):
        raise ConfigError("partial_rotary_factor must be 1: heads are rotated whole here")
    if kind == "default":
        return {}
    if not isinstance(kind, str) or kind not in OF_TYPE:
        raise ConfigError(f"rope_type is {_shown(kind)}; known are default, {', '.join(OF_TYPE)}")
    given = {key: value for key, value in parameters.items() if value is not None and key != "partial_rotary_factor"}
    known = {*OF_TYPE[kind], "rope_type", "type", "rope_theta", "finetuned"}
    scales = {key: given.pop(key) for key in ("mscale", "mscale_all_dim") if key in given and kind == "yarn"}
    if stray := sorted(set(given) - known):
        raise ConfigError(f"{printable(stray[0])} is not a key that rope_type {kind} has here")
    if "original_max_position_embeddings" in known and "max_position_embeddings" in tree:
        given.setdefault("original_max_position_embeddings", tree["max_position_embeddings"])
    if missing := [key for key in _ALWAYS if key in known and key not in given]:
        raise ConfigError(f"{missing[0]} is missing, which rope_type {kind} needs")
    for key, value in [*given.items(), *scales.items()]:
        if key in (*SCALING, *scales) and key != "truncate":
            _above(0, key, value)
    found = {SCALING[key]: given[key] for key in OF_TYPE[kind] if key in given}
    if "attention_factor" not in found and len(scales) == 2:
        factor = lambda scale: 0.1 * scale * math.log(found["factor"]) + 1
        found["attention_factor"] = factor(scales["mscale"]) / factor(scales["mscale_all_dim"])
    return {"type": kind, **found}


def _written_rope(model: Model, optional: Any) -> dict[str, Any]:
    """`rope_parameters`, and the keys before it, which other programs read."""
    if "max_positions" in optional:
        return {}
    scaling = model.rope_scaling
    stretched: dict[str, Any] = {"rope_type": "default" if scaling.type == "none" else scaling.type}
    for key in OF_TYPE.get(scaling.type, ()):
        value = getattr(scaling, SCALING[key])
        if (value is not None and value != RopeScaling.model_fields[SCALING[key]].default) or key in _ALWAYS:
            stretched[key] = value
    full = {"rope_theta": model.rope_theta, **stretched}
    old = {"rope_theta": model.rope_theta, "rope_scaling": None if scaling.type == "none" else stretched}
    if "local_rope_theta" not in optional:
        return {"rope_parameters": full, **old}
    local = model.local_rope_theta or model.rope_theta
    nested = {_FULL: full, _SLIDING: {"rope_type": "default", "rope_theta": local}}
    return {"rope_parameters": nested, **old, "rope_local_base_freq": local}


_ALWAYS = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")


# -- which layers have a window


def _read_windows(tree: Tree, family: str, reads_pattern: bool, layers: int) -> dict[str, Any]:
    kind, types = family_class(family), tree.get("layer_types")
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
        raise ConfigError(f"sliding_window_pattern is {_shown(length)}, and must be 1 or more")
    if types is None and length not in (None, getattr(kind, "pattern_length", None)) and not reads_pattern:
        raise ConfigError(
            f"sliding_window_pattern is {length}, which transformers does not read in the family {family}; "
            "write layer_types"
        )
    if types is not None:
        if _FULL in types:
            length = types.index(_FULL) + 1
        elif length is None or length <= layers:
            length = layers + 1
        if types != _layer_types(layers, length):
            raise ConfigError(
                f"layer_types must repeat a pattern of {_SLIDING} and at its end {_FULL} in the family {family}"
            )
    return {} if length is None else {"sliding_window_pattern": length}


def _layer_types(layers: int, length: int) -> list[str]:
    """Returns the type of each layer, where every `length`-th has no window."""
    return [_SLIDING if number % length else _FULL for number in range(1, layers + 1)]


def _written_windows(model: Model, kind: Any) -> dict[str, Any]:
    if "sliding_window_pattern" not in kind.settings:
        return {}
    length = model.sliding_window_pattern or kind.pattern_length
    return {"layer_types": _layer_types(model.num_layers, length), "sliding_window_pattern": length}
