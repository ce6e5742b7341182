"""The files of a model of Hugging Face other than its weights, stored in `huggingface/` of a run directory.

They are its config.json (for keys that do not change the maths, such as token ids), its tokenizer, its chat template
and the defaults of generation. An export of the run to Hugging Face includes them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.refs import roots_of
from jaxmnt.data.run_tokenizer import RunTokenizer, same_vocabulary, tokenizer_of_file
from jaxmnt.data.tokenizer import BYTES, TOKENIZER_FILE, Bytes
from jaxmnt.errors import ConfigError, UserError
from jaxmnt.huggingface.config import TOKENIZER_KEY
from jaxmnt.huggingface.folder import COMPANIONS, CONFIG, Folder, json_bytes
from jaxmnt.storage import StoragePath, publish_bytes, read

SUBFOLDER = "huggingface"
GENERATION = "generation_config.json"

Files = dict[str, bytes]
"""Contents by name."""


def read_files(folder: StoragePath) -> Files:
    """Returns the files of a folder by name; empty if it has no config.json."""
    files = {}
    for name in (CONFIG, *COMPANIONS):
        try:
            files[name] = read(folder / name)
        except (FileNotFoundError, NotADirectoryError):
            continue
    return files if CONFIG in files else {}


def read_run_files(roots: Sequence[StoragePath]) -> Files:
    """Returns the files of a run from the first of its directories that has them."""
    return next((files for root in roots if (files := read_files(root / SUBFOLDER))), {})


def read_source_files(weights: Path | None, source: str | None, checkpoint: Committed | None) -> Files:
    """Returns the files of a run's source: the folder `weights`, or the `checkpoint` that `source` names."""
    if weights is not None:
        return read_files(weights)
    return {} if source is None or checkpoint is None else read_run_files(roots_of(source, checkpoint))


def bytes_tokenizer(folder: Folder, rows: int) -> RunTokenizer | None:
    """Returns the byte tokenizer if the folder's config.json says that tokens are bytes, as `to-hf` writes it."""
    if folder.config.get(TOKENIZER_KEY) != BYTES:
        return None
    if rows < Bytes.vocab_size:
        raise ConfigError(
            f"{folder.path / CONFIG}: {TOKENIZER_KEY} is {BYTES}, which has {Bytes.vocab_size} ids, but the model has "
            f"{rows} rows; remove the key"
        )
    return RunTokenizer(Bytes().description, Bytes.vocab_size, None)


def match_tokenizer(files: Files, tokenizer: RunTokenizer) -> Files:
    """Returns the files for a run with this tokenizer. If they have a different one, it is left out, with its template
    and its ids."""
    text = files.get(TOKENIZER_FILE)
    if text is None or same_vocabulary(tokenizer_of_file(text.decode(), 0), tokenizer):
        return files
    names = sorted({CONFIG, GENERATION} & files.keys())
    return {name: json_bytes(_without_ids(json.loads(files[name]))) for name in names}


def with_end_token(files: Files, tokenizer: RunTokenizer) -> Files:
    """Returns the files with the token that ended the documents of the data as an end of texts.

    Other ids that end a text, such as the end of a turn, are preserved.
    """
    end = tokenizer.end_of_document
    end_token = tokenizer.description.get("end_token")
    changed = dict(files)
    for name in sorted({CONFIG, GENERATION} & files.keys()) if end is not None else []:
        tree = json.loads(files[name])
        inner = tree.get("text_config", tree) if "eos_token_id" not in tree else tree
        previous = inner.get("eos_token_id")
        ids = [] if previous is None else previous if isinstance(previous, list) else [previous]
        if end not in ids:
            inner["eos_token_id"] = [end, *ids] if ids else end
            changed[name] = json_bytes(tree)
    for name in sorted({"tokenizer_config.json", "special_tokens_map.json"} & files.keys()) if end_token else []:
        tree = json.loads(files[name])
        previous = tree.get("eos_token")
        if (previous.get("content") if isinstance(previous, dict) else previous) != end_token:
            tree["eos_token"] = end_token
            changed[name] = json_bytes(tree, ensure_ascii=False)
    return changed


def _without_ids(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns a config without token ids, also in nested objects."""
    return {
        key: _without_ids(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if not key.endswith("_token_id")
    }


def write_to_run(root: StoragePath, files: Files) -> None:
    """Writes the files into the run directory `root`. Only process 0 calls it."""
    try:
        (root / SUBFOLDER).mkdir(parents=True, exist_ok=True)
        for name, content in sorted(files.items()):
            publish_bytes(root / SUBFOLDER / name, content)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{root / SUBFOLDER} cannot be written: {error.strerror}; fix that") from error
