"""Whether a run can begin with the weights of a folder: the same model, and a vocabulary that is the data's."""

from pathlib import Path
from typing import Any

from jaxmnt.config.load import flat, parse_config
from jaxmnt.config.model import Model
from jaxmnt.data.manifest import NAMELESS
from jaxmnt.data.tokenizer import TOKENIZER_FILE, HuggingFace
from jaxmnt.errors import ConfigError
from jaxmnt.huggingface.config import read_config, write_config
from jaxmnt.huggingface.folder import CONFIG, Folder

SCHEME = "hf:"
"""How `run.init_from` names a folder of Hugging Face."""


def refuse_what_does_not_fit(folder: Folder, model: Model, tokenizer: dict[str, Any], data: Path) -> None:
    """Raises `ConfigError` if a run of this `model` cannot begin with the weights of `folder`.

    `tokenizer` is what the data says of its tokenizer, whose file is in the folder `data`.
    """
    where = str(folder.path / CONFIG)
    theirs = as_told(parse_config({"model": read_config(folder.config, where)}, where).model)
    ours = as_told(model)
    if different := [key for key in sorted(theirs.keys() | ours.keys()) if theirs.get(key) != ours.get(key)]:
        wanted = " ".join(f"model.{key}={_yaml(theirs.get(key))}" for key in different)
        raise ConfigError(
            f"run.init_from: the model in {folder.path} is another one than that of the config; set {wanted}, or take "
            f"the section model from: python -m jaxmnt.convert settings {folder.path}"
        )
    path = folder.path / TOKENIZER_FILE
    if path.is_file() and not _same_vocabulary(path, tokenizer, data):
        raise ConfigError(
            f"run.init_from: the data was not made with the tokenizer of the model, {path}: its ids mean other text; "
            f"prepare it again with --tokenizer {path}"
        )


def as_told(model: Model) -> dict[str, Any]:
    """The settings that say what a model computes, with what is left out written out."""
    return flat(read_config(write_config(model, {"max_position_embeddings": 1}), "the config"))


def _same_vocabulary(path: Path, tokenizer: dict[str, Any], data: Path) -> bool:
    if tokenizer["name"] in ("synthetic", NAMELESS):
        return True  # nobody can tell
    if tokenizer["name"] != "huggingface":
        return False
    theirs = HuggingFace(path)
    if theirs.description["sha256"] == tokenizer["sha256"]:
        return True
    return (data / TOKENIZER_FILE).is_file() and theirs.ids == HuggingFace(data / TOKENIZER_FILE).ids


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
