"""Checks that a run can begin with the weights of another: its model must compute the same function, and its ids must
mean the same text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.names import named
from jaxmnt.checkpoint.refs import tokenizer_of
from jaxmnt.config.load import flatten_tree, parse_config
from jaxmnt.config.model import Model
from jaxmnt.data.run_tokenizer import RunTokenizer, same_vocabulary, tokenizer_of_file
from jaxmnt.data.tokenizer import BYTES, TOKENIZER_FILE
from jaxmnt.errors import ConfigError, nearest, printable
from jaxmnt.huggingface.companions import bytes_tokenizer
from jaxmnt.huggingface.config import SCALING_KEYS_OF_TYPE, SCALING_SETTINGS, read_config
from jaxmnt.huggingface.folder import CONFIG, Folder
from jaxmnt.models.contract import define
from jaxmnt.models.registry import OPTIONAL_SETTINGS, build_family, family_class

SCHEME = "hf:"
"""Prefix of a folder of Hugging Face in `run.init_from`."""

CHANGES_KEY = "run.init_from_changes"
_TOKENIZER = "tokenizer"

_NOT_COMPARED = ("preset", "dropout", "attention", "overlap")
"""Settings without effect on the model's function: they name a source, regularise training, or choose a program."""

SIZES = (
    "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
    "tie_embeddings", "max_positions",
)  # fmt: skip
"""Settings that determine the shapes of parameters."""


@dataclass(frozen=True)
class Origin:
    """The source of a run's weights: another run, or a folder of Hugging Face."""

    key: str
    """The setting that names the origin."""
    path: str
    model: Model
    settings: str
    """The file or command from which a user gets its section `model`."""
    tokenizer: RunTokenizer | None
    """None if the tokenizer is not known."""
    tokenizer_file: str
    """The argument of `prepare --tokenizer` for this tokenizer."""


def folder_origin(folder: Folder, key: str) -> Origin:
    """Describes a folder of Hugging Face. Raises `ConfigError` if its files contradict each other."""
    where = str(folder.path / CONFIG)
    model = parse_config({"model": read_config(folder.config, where)}, where).model
    folder.check_tied_head(build_family(model, model.vocab_size or 0))
    file = folder.path / TOKENIZER_FILE
    rows = model.vocab_size or 0
    tokenizer = (
        tokenizer_of_file(file.read_text(encoding="utf-8"), rows) if file.is_file() else bytes_tokenizer(folder, rows)
    )
    settings = f"python -m jaxmnt.convert settings {folder.path}"
    return Origin(key, str(folder.path), model, settings, tokenizer, str(file) if file.is_file() else BYTES)


def run_origin(source: str, checkpoint: Committed, key: str) -> Origin:
    """Describes the run of the checkpoint that `source` names."""
    model = checkpoint.config.model
    root = checkpoint.path.parent.parent
    try:
        tokenizer = tokenizer_of(source, checkpoint)
    except ConfigError:
        # An old run that did not store its tokenizer, and whose data is not here.
        tokenizer = None
    file = str(root / "tokenizer" / TOKENIZER_FILE)
    if tokenizer is not None and tokenizer.text is None:
        file = tokenizer.name
    return Origin(key, str(checkpoint.path), model, str(root / "config.yaml"), tokenizer, file)


def check_compatible(origin: Origin, model: Model, tokenizer: RunTokenizer, intended: Sequence[str] = ()) -> list[str]:
    """Raises `ConfigError` if a run of this `model`, with data of this `tokenizer`, cannot begin with `origin`.

    `intended` lists settings of the model, and `tokenizer`, that differ on purpose; each must differ. Returns remarks
    for the user.
    """
    different = different_settings(origin.model, model)
    changed = {key.partition(".")[0] for key in different}
    same_tokenizer = origin.tokenizer is None or same_vocabulary(origin.tokenizer, tokenizer)
    _check_intended(origin, intended, model, changed | (set() if same_tokenizer else {_TOKENIZER}))
    if not same_tokenizer and _TOKENIZER not in intended:
        raise ConfigError(
            f"{origin.key}: the data was not made with the tokenizer of the model, {origin.tokenizer_file}, so its ids "
            f"mean other text; prepare it again with --tokenizer {origin.tokenizer_file}, or, if this is intended, set "
            f"{CHANGES_KEY}=[{', '.join([*intended, _TOKENIZER])}]"
        )
    if unlisted := sorted(changed - set(intended)):
        raise ConfigError(_other_model(origin, different, unlisted))
    if origin.tokenizer is None and tokenizer.text is not None:
        return [f"{origin.path} does not name its tokenizer, so the data's tokenizer was not compared with it"]
    return []


def check_same_parameters(origin: Origin, checkpoint: Committed, model: Model) -> None:
    """Raises `ConfigError` if the parameters of a checkpoint are not those of `model`, whose family may differ."""
    if origin.model.family == model.family:
        return
    required = named({"params": define(build_family(model, model.vocab_size or 0)).abstract})
    arrays = checkpoint.manifest.arrays
    differing = {name for name in arrays if name.startswith("params/")} ^ required.keys()
    differing |= {
        name for name in required.keys() - differing if tuple(arrays[name].shape) != tuple(required[name].shape)
    }
    if differing:
        raise ConfigError(
            f"{origin.key}: the family {model.family} has other parameters than {origin.path}, of family "
            f"{origin.model.family}: {min(differing)}; set model.family={origin.model.family}"
        )


def _check_intended(origin: Origin, intended: Sequence[str], model: Model, changed: set[str]) -> None:
    """Raises `ConfigError` for intended changes that are impossible, unknown or not changes."""
    settings = {key.partition(".")[0] for key in computed_settings(model)} - set(SIZES)
    allowed = [*sorted(settings), _TOKENIZER]
    for name in intended:
        if name in SIZES:
            raise ConfigError(
                f"{CHANGES_KEY}: {name} decides the shapes of parameters, and must be that of {origin.path}"
            )
        if name not in allowed and name not in changed:
            raise ConfigError(
                f"{CHANGES_KEY}: {printable(name)} is not a setting that can be listed; {nearest(name, allowed)}"
            )
        if name not in changed:
            raise ConfigError(
                f"{CHANGES_KEY}: {name} is the same in {origin.path}; set it in the config, or remove it here"
            )


def _other_model(origin: Origin, different: list[str], unlisted: list[str]) -> str:
    """Returns a message with the settings that make the model that of the origin."""
    origin_settings = computed_settings(origin.model)
    keys = [key for key in different if key in origin_settings and key.partition(".")[0] in unlisted]
    required = " ".join(f"model.{key}={_yaml(origin_settings[key])}" for key in keys)
    text = (
        f"{origin.key}: the model in {origin.path} differs from that of the config; set {required}, or take "
        f"the section model from: {origin.settings}"
    )
    if set(unlisted) & set(SIZES):
        return text
    return f"{text}; if the change is intended, set {CHANGES_KEY}=[{', '.join(unlisted)}]"


def _yaml(value: object) -> str:
    """Returns a value as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def computed_settings(model: Model) -> dict[str, Any]:
    """Returns the settings that determine a model's function, by dotted key, with explicit defaults.

    The model must be complete (`complete_model`). Raises `ConfigError` for an unknown family.
    """
    family = family_class(model.family)
    settings = flatten_tree(model.model_dump(exclude={*_NOT_COMPARED, "rope_scaling"}))
    settings = {key: value for key, value in settings.items() if key not in OPTIONAL_SETTINGS or key in family.settings}
    if "max_positions" in family.settings:
        # Learned positions, so no rotary ones.
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

    Numbers are equal within a relative 10⁻⁶, because config.json stores some of them in another form.
    """
    settings = computed_settings(first)
    others = computed_settings(second)
    return sorted(key for key in settings.keys() | others.keys() if not _equal(settings.get(key), others.get(key)))


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, float) or isinstance(second, float):
        return first is not None and second is not None and math.isclose(first, second, rel_tol=1e-6)
    return first == second
