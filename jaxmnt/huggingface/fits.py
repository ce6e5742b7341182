"""Whether a run can begin with the weights of another: its model computes the same, and its ids mean the same text."""

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
from jaxmnt.huggingface.companions import bytes_of
from jaxmnt.huggingface.config import OF_TYPE, SCALING, read_config
from jaxmnt.huggingface.folder import CONFIG, Folder
from jaxmnt.models.contract import define
from jaxmnt.models.registry import OPTIONAL, build_family, family_class

SCHEME = "hf:"
"""How `run.init_from` names a folder of Hugging Face."""

LIST = "run.init_from_changes"
_TOKENIZER = "tokenizer"

_NOT_COMPUTED = ("preset", "dropout", "attention", "overlap")
"""Settings that name a source, regularise training, or choose between programs for the same function."""

SIZES = (
    "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
    "tie_embeddings", "max_positions",
)  # fmt: skip
"""Settings on which the shapes of parameters depend."""


@dataclass(frozen=True)
class Origin:
    """What a run begins with: another run, or a folder of Hugging Face."""

    key: str
    """The setting that names it."""
    path: str
    model: Model
    settings: str
    """Where a user finds its section `model`."""
    tokenizer: RunTokenizer | None
    """None if nothing says what it was."""
    tokenizer_file: str
    """What `prepare --tokenizer` takes for it."""


def folder_origin(folder: Folder, key: str) -> Origin:
    """Describes a folder of Hugging Face. Raises `ConfigError` if its files contradict each other."""
    where = str(folder.path / CONFIG)
    model = parse_config({"model": read_config(folder.config, where)}, where).model
    folder.refuse_another_head(build_family(model, model.vocab_size or 0))
    file = folder.path / TOKENIZER_FILE
    rows = model.vocab_size or 0
    tokenizer = tokenizer_of_file(file.read_text(encoding="utf-8"), rows) if file.is_file() else bytes_of(folder, rows)
    settings = f"python -m jaxmnt.convert settings {folder.path}"
    return Origin(key, str(folder.path), model, settings, tokenizer, str(file) if file.is_file() else BYTES)


def run_origin(source: str, checkpoint: Committed, key: str) -> Origin:
    """Describes the run of a checkpoint, which `source` names."""
    model = checkpoint.config.model
    root = checkpoint.path.parent.parent
    try:
        tokenizer = tokenizer_of(source, checkpoint)
    except ConfigError:
        # A run from before runs kept their tokenizer, whose data is not here.
        tokenizer = None
    file = str(root / "tokenizer" / TOKENIZER_FILE)
    if tokenizer is not None and tokenizer.text is None:
        file = tokenizer.name
    return Origin(key, str(checkpoint.path), model, str(root / "config.yaml"), tokenizer, file)


def refuse_what_does_not_fit(
    origin: Origin, model: Model, tokenizer: RunTokenizer, intended: Sequence[str] = ()
) -> list[str]:
    """Raises `ConfigError` if a run of this `model`, with data of this `tokenizer`, cannot begin with `origin`.

    `intended` lists settings of the model, and `tokenizer`, that differ on purpose; each must differ. Returns remarks
    for people.
    """
    different = different_settings(origin.model, model)
    changed = {key.partition(".")[0] for key in different}
    same = origin.tokenizer is None or same_vocabulary(origin.tokenizer, tokenizer)
    _check_intended(origin, intended, model, changed | (set() if same else {_TOKENIZER}))
    if not same and _TOKENIZER not in intended:
        raise ConfigError(
            f"{origin.key}: the data was not made with the tokenizer of the model, {origin.tokenizer_file}: its ids "
            f"mean other text; prepare it again with --tokenizer {origin.tokenizer_file}, or, if that is meant, set "
            f"{LIST}=[{', '.join([*intended, _TOKENIZER])}]"
        )
    if unlisted := sorted(changed - set(intended)):
        raise ConfigError(_other_model(origin, different, unlisted))
    if origin.tokenizer is None and tokenizer.text is not None:
        return [f"{origin.path} does not say with which tokenizer it was trained; the data's was not compared with it"]
    return []


def refuse_other_arrays(origin: Origin, checkpoint: Committed, model: Model) -> None:
    """Raises `ConfigError` if the parameters of a checkpoint are not those of `model`, whose family may be another."""
    if origin.model.family == model.family:
        return
    wanted = named({"params": define(build_family(model, model.vocab_size or 0)).abstract})
    arrays = checkpoint.manifest.arrays
    names = {name for name in arrays if name.startswith("params/")} ^ wanted.keys()
    names |= {name for name in wanted.keys() - names if tuple(arrays[name].shape) != tuple(wanted[name].shape)}
    if names:
        raise ConfigError(
            f"{origin.key}: the family {model.family} has other parameters than {origin.path}, of family "
            f"{origin.model.family}: {min(names)}; set model.family={origin.model.family}"
        )


def _check_intended(origin: Origin, intended: Sequence[str], model: Model, changed: set[str]) -> None:
    settings = {key.partition(".")[0] for key in computed_settings(model)} - set(SIZES)
    known = [*sorted(settings), _TOKENIZER]
    for name in intended:
        if name in SIZES:
            raise ConfigError(f"{LIST}: {name} decides the shapes of parameters, and must be that of {origin.path}")
        if name not in known and name not in changed:
            raise ConfigError(f"{LIST}: {printable(name)} is not a setting that can be listed; {nearest(name, known)}")
        if name not in changed:
            raise ConfigError(f"{LIST}: {name} is the same in {origin.path}; set it in the config, or remove it here")


def _other_model(origin: Origin, different: list[str], unlisted: list[str]) -> str:
    """Returns a message that says what to set so that the model becomes that of the origin."""
    theirs = computed_settings(origin.model)
    keys = [key for key in different if key in theirs and key.partition(".")[0] in unlisted]
    wanted = " ".join(f"model.{key}={_yaml(theirs[key])}" for key in keys)
    text = (
        f"{origin.key}: the model in {origin.path} is another one than that of the config; set {wanted}, or take "
        f"the section model from: {origin.settings}"
    )
    if set(unlisted) & set(SIZES):
        return text
    return f"{text}; if the change is meant, set {LIST}=[{', '.join(unlisted)}]"


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def computed_settings(model: Model) -> dict[str, Any]:
    """Returns the settings that decide what a model computes, by dotted key, with defaults written out.

    The model must be complete (`complete_model`). Raises `ConfigError` for a family that is not known.
    """
    kind = family_class(model.family)
    settings = flatten_tree(model.model_dump(exclude={*_NOT_COMPUTED, "rope_scaling"}))
    settings = {key: value for key, value in settings.items() if key not in OPTIONAL or key in kind.settings}
    if "max_positions" in kind.settings:
        del settings["rope_theta"]
    else:
        scaling = model.rope_scaling
        settings["rope_scaling.type"] = scaling.type
        names = [SCALING[key] for key in OF_TYPE.get(scaling.type, ())]
        settings |= {f"rope_scaling.{name}": getattr(scaling, name) for name in names}
        if scaling.type == "yarn" and scaling.attention_factor is None:
            settings["rope_scaling.attention_factor"] = 0.1 * math.log(scaling.factor) + 1
    defaults = {
        "local_rope_theta": model.rope_theta,
        "sliding_window_pattern": getattr(kind, "pattern_length", None),
        "attention_scale": None if model.head_dim is None else model.head_dim**-0.5,
    }
    return settings | {key: default for key, default in defaults.items() if key in settings and settings[key] is None}


def different_settings(one: Model, other: Model) -> list[str]:
    """Returns the dotted keys, in order, of the settings in which two models compute something else.

    Numbers count as equal within 10⁻⁶, since config.json holds some of them in another form.
    """
    first, second = computed_settings(one), computed_settings(other)
    return sorted(key for key in first.keys() | second.keys() if not _equal(first.get(key), second.get(key)))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) or isinstance(other, float):
        return one is not None and other is not None and math.isclose(one, other, rel_tol=1e-6)
    return one == other
