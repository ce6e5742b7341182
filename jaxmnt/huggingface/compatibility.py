"""Checks that a run can begin with the weights of another model. Both models must compute the same function, and ids
must stand for the same text in both."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.names import arrays_by_name
from jaxmnt.checkpoint.refs import roots_of, tokenizer_of
from jaxmnt.config.load import as_override, flatten_tree, parse_config
from jaxmnt.config.model import BALANCE_SETTINGS, Model
from jaxmnt.data.chat.template import ChatFormat, chat_of_files
from jaxmnt.data.manifest import BYTES, TOKENIZER_FILE
from jaxmnt.data.run_tokenizer import RunTokenizer, same_vocabulary, tokenizer_from_json
from jaxmnt.errors import ConfigError, printable, suggest
from jaxmnt.huggingface.companions import bytes_tokenizer, read_files, read_run_files
from jaxmnt.huggingface.config import SCALING_KEYS_OF_TYPE, SCALING_SETTINGS, read_config
from jaxmnt.huggingface.folder import CONFIG, Folder
from jaxmnt.models.contract import define
from jaxmnt.models.registry import OPTIONAL_SETTINGS, build_family, family_class

CHANGES_KEY = "run.init_from_changes"
"""Key of the config that lists intended changes to the model."""
_TOKENIZER = "tokenizer"
_CHAT_TEMPLATE = "chat_template"
"""Names of the tokenizer and the chat template in that list."""

_SETTINGS_WITHOUT_EFFECT = (
    "preset", "dropout", "attention", "overlap", "router_bias_rate", *BALANCE_SETTINGS,
)  # fmt: skip
"""Settings without effect on the model's function, because they name a preset, regularise training, or choose how the
function is computed."""

SHAPE_SETTINGS = (
    "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
    "tie_embeddings", "max_positions", "num_experts", "expert_size",
)  # fmt: skip
"""Settings that determine the shapes of parameters."""


@dataclass(frozen=True)
class Origin:
    """The source of a run's weights: another run, or a Hugging Face folder."""

    key: str
    """The setting that names the origin."""
    path: str
    model: Model
    settings: str
    """The file that has its section `model`, or the command that prints it."""
    tokenizer: RunTokenizer | None
    """None if the tokenizer is not known."""
    tokenizer_file: str
    """The argument of `prepare --tokenizer` for this tokenizer. Without meaning if the tokenizer is not known."""
    chat: ChatFormat | None = None
    """The format in which the model was trained on conversations; None if it has no chat template."""


def folder_origin(folder: Folder, key: str) -> Origin:
    """Returns a Hugging Face folder as an origin. Raises `ConfigError` if its files contradict each other."""
    where = str(folder.path / CONFIG)
    model = parse_config({"model": read_config(folder.config, where)}, where).model
    vocab_size = model.vocab_size or 0
    folder.check_tied_head(build_family(model, vocab_size))
    file = folder.path / TOKENIZER_FILE
    if file.is_file():
        tokenizer: RunTokenizer | None = tokenizer_from_json(file.read_text(encoding="utf-8"), vocab_size)
        tokenizer_file = str(file)
    else:
        tokenizer = bytes_tokenizer(folder, vocab_size)
        tokenizer_file = BYTES
    settings = f"python -m jaxmnt.convert settings {folder.path}"
    chat = chat_of_files(read_files(folder.path))
    return Origin(key, str(folder.path), model, settings, tokenizer, tokenizer_file, chat)


def run_origin(source: str, checkpoint: Committed, key: str) -> Origin:
    """Returns the run of the checkpoint that `source` names as an origin."""
    model = checkpoint.config.model
    root = checkpoint.path.parent.parent
    try:
        tokenizer = tokenizer_of(source, checkpoint)
    except ConfigError:
        # This is an old run that did not store its tokenizer, and its data is not here.
        tokenizer = None
    tokenizer_file = str(root / "tokenizer" / TOKENIZER_FILE)
    if tokenizer is not None and tokenizer.text is None:
        tokenizer_file = tokenizer.name
    chat = None if tokenizer is None else tokenizer.chat
    chat = chat or chat_of_files(read_run_files(roots_of(source, checkpoint)))
    return Origin(key, str(checkpoint.path), model, str(root / "config.yaml"), tokenizer, tokenizer_file, chat)


def check_compatible(origin: Origin, model: Model, tokenizer: RunTokenizer, intended: Sequence[str] = ()) -> list[str]:
    """Raises `ConfigError` if a run of this `model`, with data of this `tokenizer`, cannot begin with `origin`.

    `intended` lists the settings of the model that differ on purpose, and `tokenizer` and `chat_template` if they do.
    Each of these must indeed differ. Returns remarks for the user.
    """
    different_keys = different_settings(origin.model, model)
    changed_settings = {key.partition(".")[0] for key in different_keys}
    same_tokenizer = origin.tokenizer is None or same_vocabulary(origin.tokenizer, tokenizer)
    same_chat = origin.chat is None or tokenizer.chat is None or origin.chat.digest == tokenizer.chat.digest
    changes = set(changed_settings)
    changes |= set() if same_tokenizer else {_TOKENIZER}
    changes |= set() if same_chat else {_CHAT_TEMPLATE}
    _check_intended(origin, intended, model, changes)
    if not same_tokenizer and _TOKENIZER not in intended:
        raise ConfigError(
            f"{origin.key}: the data was not made with the tokenizer of the model, {origin.tokenizer_file}, so its ids "
            f"mean different text; prepare it again with --tokenizer {origin.tokenizer_file}, or, if this is intended, "
            f"set {CHANGES_KEY}=[{', '.join([*intended, _TOKENIZER])}]"
        )
    if not same_chat and _CHAT_TEMPLATE not in intended:
        assert tokenizer.chat is not None and origin.chat is not None
        raise ConfigError(
            f"{origin.key}: the conversations of the data were prepared with another chat template "
            f"({tokenizer.chat.source}) than the model in {origin.path} was trained with ({origin.chat.source}); "
            "prepare them again with the template that came with the model, or, if this is intended, set "
            f"{CHANGES_KEY}=[{', '.join([*intended, _CHAT_TEMPLATE])}]"
        )
    if unlisted := sorted(changed_settings - set(intended)):
        raise ConfigError(_message_for_different_model(origin, different_keys, unlisted))
    if origin.tokenizer is None and tokenizer.text is not None:
        return [f"{origin.path} does not name its tokenizer, so the data's tokenizer was not compared with it"]
    return []


def check_same_parameters(origin: Origin, checkpoint: Committed, model: Model) -> None:
    """Raises `ConfigError` if a checkpoint does not have the parameters of `model`, which may be of another family."""
    if origin.model.family == model.family:
        return
    required = arrays_by_name({"params": define(build_family(model, model.vocab_size or 0)).abstract})
    arrays = checkpoint.manifest.arrays
    differing = {name for name in arrays if name.startswith("params/")} ^ required.keys()
    for name in required.keys() - differing:
        if tuple(arrays[name].shape) != tuple(required[name].shape):
            differing.add(name)
    if differing:
        raise ConfigError(
            f"{origin.key}: the family {model.family} and {origin.path}, of the family {origin.model.family}, differ "
            f"in the parameter {min(differing)}; set model.family={origin.model.family}"
        )


def _check_intended(origin: Origin, intended: Sequence[str], model: Model, changes: set[str]) -> None:
    """Raises `ConfigError` for intended changes that are impossible or unknown, or that change nothing."""
    settings = {key.partition(".")[0] for key in explicit_settings(model)} - set(SHAPE_SETTINGS)
    allowed = [*sorted(settings), _TOKENIZER, _CHAT_TEMPLATE]
    for name in intended:
        if name in SHAPE_SETTINGS:
            raise ConfigError(
                f"{CHANGES_KEY}: {name} decides the shapes of parameters, so it must be the same as in {origin.path}"
            )
        if name not in allowed and name not in changes:
            raise ConfigError(
                f"{CHANGES_KEY}: {printable(name)} is not a setting that can be listed; {suggest(name, allowed)}"
            )
        if name not in changes:
            raise ConfigError(
                f"{CHANGES_KEY}: {name} is the same in {origin.path}; set it in the config, or remove it here"
            )


def _message_for_different_model(origin: Origin, different_keys: list[str], unlisted: list[str]) -> str:
    """Returns the error message for a model that is not the origin's, with the settings that would make it the same."""
    origin_settings = explicit_settings(origin.model)
    keys = [key for key in different_keys if key in origin_settings and key.partition(".")[0] in unlisted]
    required = " ".join(as_override(f"model.{key}", origin_settings[key]) for key in keys)
    text = (
        f"{origin.key}: the model in {origin.path} differs from that of the config; set {required}, or take "
        f"the section model from: {origin.settings}"
    )
    if set(unlisted) & set(SHAPE_SETTINGS):
        return text
    return f"{text}; if the change is intended, set {CHANGES_KEY}=[{', '.join(unlisted)}]"


def explicit_settings(model: Model) -> dict[str, Any]:
    """Returns the settings that determine a model's function, by dotted key. Defaults are explicit.

    The model must be complete (`complete_model`). Raises `ConfigError` for an unknown family.
    """
    family = family_class(model.family)
    model = family.with_defaults(model)
    settings = flatten_tree(model.model_dump(exclude={*_SETTINGS_WITHOUT_EFFECT, "rope_scaling"}))
    settings = {key: value for key, value in settings.items() if key not in OPTIONAL_SETTINGS or key in family.settings}
    if "max_positions" in family.settings:
        # The family has learned positions and no rotary ones.
        del settings["rope_theta"]
    else:
        scaling = model.rope_scaling
        settings["rope_scaling.type"] = scaling.type
        names = [SCALING_SETTINGS[key] for key in SCALING_KEYS_OF_TYPE.get(scaling.type, ())]
        settings |= {f"rope_scaling.{name}": getattr(scaling, name) for name in names}
        if scaling.type == "yarn" and scaling.attention_factor is None:
            # The default of YaRN (arXiv:2309.00071, section 3.4), as in `models.rotary`.
            settings["rope_scaling.attention_factor"] = 0.1 * math.log(scaling.factor) + 1
    defaults = {
        "local_rope_theta": model.rope_theta,
        "sliding_window_pattern": getattr(family, "pattern_length", None),
        "attention_scale": None if model.head_dim is None else model.head_dim**-0.5,
    }
    return settings | {key: default for key, default in defaults.items() if key in settings and settings[key] is None}


def different_settings(first: Model, second: Model) -> list[str]:
    """Returns the dotted keys, in order, of settings that make two models compute different functions.

    Numbers count as equal if they differ by a relative 10⁻⁶ at most, because config.json stores some of them in another
    form.
    """
    first_settings = explicit_settings(first)
    second_settings = explicit_settings(second)
    keys = first_settings.keys() | second_settings.keys()
    return sorted(key for key in keys if not _are_equal(first_settings.get(key), second_settings.get(key)))


def _are_equal(first: Any, second: Any) -> bool:
    if isinstance(first, float) or isinstance(second, float):
        return first is not None and second is not None and math.isclose(first, second, rel_tol=1e-6)
    return first == second
