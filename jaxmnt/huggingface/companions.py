"""The files of a Hugging Face model other than its weights, which a run directory has in `huggingface/`.

They are the model's config.json (for keys that do not change the maths, such as token ids), its tokenizer, its chat
template and its defaults for generation. An export of the run to Hugging Face includes them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.refs import HUGGING_FACE_SUBFOLDER, roots_of
from jaxmnt.data.chat.template import TEMPLATE_FILE, object_in
from jaxmnt.data.manifest import BYTES, TOKENIZER_FILE
from jaxmnt.data.run_tokenizer import RunTokenizer, same_vocabulary, tokenizer_from_json
from jaxmnt.data.tokenizer import Bytes, HuggingFace
from jaxmnt.errors import ConfigError, UserError
from jaxmnt.huggingface.config import TOKENIZER_KEY
from jaxmnt.huggingface.folder import COMPANIONS, CONFIG, Folder, json_bytes
from jaxmnt.storage import StoragePath, publish_bytes, read

GENERATION_CONFIG = "generation_config.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS_MAP = "special_tokens_map.json"

_BYTE_TOKENIZER = RunTokenizer(Bytes().description, Bytes.vocab_size, None)

Files = dict[str, bytes]
"""The contents of files, by file name."""


def read_files(folder: StoragePath) -> Files:
    """Returns a folder's config.json and companions; empty if the folder has no config.json."""
    files = {}
    for name in (CONFIG, *COMPANIONS):
        try:
            files[name] = read(folder / name)
        except (FileNotFoundError, NotADirectoryError):
            continue
    return files if CONFIG in files else {}


def read_run_files(roots: Sequence[StoragePath]) -> Files:
    """Returns the files of a run, from the first of its directories that has them; empty if none has."""
    for root in roots:
        files = read_files(root / HUGGING_FACE_SUBFOLDER)
        if files:
            return files
    return {}


def read_source_files(weights: Path | None, source: str | None, checkpoint: Committed | None) -> Files:
    """Returns the files of a run's source, which is the folder `weights` or the `checkpoint` that `source` names."""
    if weights is not None:
        return read_files(weights)
    return {} if source is None or checkpoint is None else read_run_files(roots_of(source, checkpoint))


def bytes_tokenizer(folder: Folder, vocab_size: int) -> RunTokenizer | None:
    """Returns the byte tokenizer if the folder's config.json, written by `to-hf`, says that tokens are bytes."""
    if folder.config.get(TOKENIZER_KEY) != BYTES:
        return None
    if vocab_size < Bytes.vocab_size:
        raise ConfigError(
            f"{folder.path / CONFIG}: {TOKENIZER_KEY} is {BYTES}, which has {Bytes.vocab_size} ids, but the "
            f"vocabulary of the model has {vocab_size} rows; remove the key"
        )
    return _BYTE_TOKENIZER


def match_tokenizer(files: Files, tokenizer: RunTokenizer) -> Files:
    """Returns the files for a run with this tokenizer. If they have a different tokenizer, they are reduced to configs
    without token ids, so that neither that tokenizer nor its template is left."""
    previous = _tokenizer_in(files)
    if previous is None or same_vocabulary(previous, tokenizer):
        return files
    names = sorted({CONFIG, GENERATION_CONFIG} & files.keys())
    return {name: json_bytes(_without_token_ids(json.loads(files[name]))) for name in names}


def _tokenizer_in(files: Files) -> RunTokenizer | None:
    text = files.get(TOKENIZER_FILE)
    if text is not None:
        return tokenizer_from_json(text.decode(), vocab_size=0)
    uses_byte_tokenizer = CONFIG in files and json.loads(files[CONFIG]).get(TOKENIZER_KEY) == BYTES
    return _BYTE_TOKENIZER if uses_byte_tokenizer else None


def with_end_token(files: Files, tokenizer: RunTokenizer) -> Files:
    """Returns the files, changed so that the data's end-of-document token also stops generation.

    Other ids that stop generation, such as the end of a turn, are preserved.
    """
    end_id = tokenizer.end_of_document
    end_token = tokenizer.description.get("end_token")
    updated = dict(files)
    if end_id is not None:
        for name in sorted({CONFIG, GENERATION_CONFIG} & files.keys()):
            tree = json.loads(files[name])
            if _add_end_id(tree, end_id):
                updated[name] = json_bytes(tree)
    if end_token:
        for name in sorted({"tokenizer_config.json", "special_tokens_map.json"} & files.keys()):
            tree = json.loads(files[name])
            previous = tree.get("eos_token")
            previous_token = previous.get("content") if isinstance(previous, dict) else previous
            if previous_token != end_token:
                tree["eos_token"] = end_token
                updated[name] = json_bytes(tree, ensure_ascii=False)
    return updated


def with_chat(files: Files, tokenizer: RunTokenizer) -> Files:
    """Returns the files, changed so that they have the chat template, the special tokens and the end tokens of the
    conversations on which the run was trained. Without conversations, returns the files as they are."""
    if tokenizer.chat is None:
        return files
    updated = {name: content for name, content in files.items() if name != "chat_template.json"}
    updated[TEMPLATE_FILE] = tokenizer.chat.template.encode()
    settings = object_in(files, _TOKENIZER_CONFIG)
    settings.pop("chat_template", None)
    if tokenizer.text is None:  # bytes have no tokenizer for which to configure special tokens
        return updated
    special_tokens = dict(tokenizer.chat.special_tokens)
    updated[_TOKENIZER_CONFIG] = json_bytes(settings | special_tokens, ensure_ascii=False)
    if _SPECIAL_TOKENS_MAP in files:
        updated[_SPECIAL_TOKENS_MAP] = json_bytes(
            object_in(files, _SPECIAL_TOKENS_MAP) | special_tokens, ensure_ascii=False
        )
    opened = tokenizer.open()
    ids = opened.ids if isinstance(opened, HuggingFace) else {}
    for token in tokenizer.chat.end_tokens:
        for name in sorted({CONFIG, GENERATION_CONFIG} & updated.keys()) if token in ids else ():
            tree = json.loads(updated[name])
            if _add_end_id(tree, ids[token]):
                updated[name] = json_bytes(tree)
    return updated


def _add_end_id(tree: dict[str, Any], end_id: int) -> bool:
    """Adds an id to those that stop generation according to a config. Returns False if the config has it already."""
    section = tree if "eos_token_id" in tree else tree.get("text_config", tree)
    previous = section.get("eos_token_id")
    if previous is None:
        section["eos_token_id"] = end_id
        return True
    ids = previous if isinstance(previous, list) else [previous]
    if end_id in ids:
        return False
    section["eos_token_id"] = [end_id, *ids] if ids else end_id
    return True


def _without_token_ids(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns a config without token ids, including those in nested objects."""
    return {
        key: _without_token_ids(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if not key.endswith("_token_id") and key != TOKENIZER_KEY
    }


def write_run_files(root: StoragePath, files: Files) -> None:
    """Writes the files into the run directory `root`. Only process 0 calls it."""
    try:
        (root / HUGGING_FACE_SUBFOLDER).mkdir(parents=True, exist_ok=True)
        for name, content in sorted(files.items()):
            publish_bytes(root / HUGGING_FACE_SUBFOLDER / name, content)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{root / HUGGING_FACE_SUBFOLDER} cannot be written: {error.strerror}; fix that") from error
