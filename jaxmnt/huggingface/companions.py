"""What belongs to a model of Hugging Face besides its weights, kept with a run: `huggingface/` in its directory.

Its config.json (for keys that alter nothing, such as token ids), its tokenizer, its chat template, and what generation
does by default. All of it comes along when the run is written for Hugging Face again.
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

KEPT = "huggingface"
GENERATION = "generation_config.json"

Files = dict[str, bytes]
"""Contents by name."""


def found_in(folder: StoragePath) -> Files:
    """The files of a folder by name; empty if it has no config.json."""
    found = {}
    for name in (CONFIG, *COMPANIONS):
        try:
            found[name] = read(folder / name)
        except (FileNotFoundError, NotADirectoryError):
            continue
    return found if CONFIG in found else {}


def kept_files(homes: Sequence[StoragePath]) -> Files:
    """The files that a run has in one of its places."""
    return next((found for home in homes if (found := found_in(home / KEPT))), {})


def of_source(weights: Path | None, source: str | None, checkpoint: Committed | None) -> Files:
    """The files that came with what a run begins with: a folder, or a checkpoint that `source` names."""
    if weights is not None:
        return found_in(weights)
    return {} if source is None or checkpoint is None else kept_files(roots_of(source, checkpoint))


def bytes_of(folder: Folder, rows: int) -> RunTokenizer | None:
    """The tokenizer of bytes, if the folder's config.json says that the model's tokens are bytes, as `to-hf` notes."""
    if folder.config.get(TOKENIZER_KEY) != BYTES:
        return None
    if rows < Bytes.vocab_size:
        raise ConfigError(
            f"{folder.path / CONFIG}: {TOKENIZER_KEY} is {BYTES}, which has {Bytes.vocab_size} ids, and the model has "
            f"{rows} rows; take out the key"
        )
    return RunTokenizer(Bytes().description, Bytes.vocab_size, None)


def fitting(files: Files, tokenizer: RunTokenizer) -> Files:
    """Returns the files for a run with this tokenizer: if theirs is another, without it, its template and its ids."""
    text = files.get(TOKENIZER_FILE)
    if text is None or same_vocabulary(tokenizer_of_file(text.decode(), 0), tokenizer):
        return files
    names = sorted({CONFIG, GENERATION} & files.keys())
    return {name: json_bytes(_without_ids(json.loads(files[name]))) for name in names}


def ended(files: Files, tokenizer: RunTokenizer) -> Files:
    """Returns the files so that they name what ended the documents of the data as an end of texts.

    Other ids that end a text for them, such as that of a turn, stay.
    """
    end, word = tokenizer.end_of_document, tokenizer.description.get("end_token")
    found = dict(files)
    for name in sorted({CONFIG, GENERATION} & files.keys()) if end is not None else []:
        tree = json.loads(files[name])
        inner = tree.get("text_config", tree) if "eos_token_id" not in tree else tree
        known = inner.get("eos_token_id")
        ids = [] if known is None else known if isinstance(known, list) else [known]
        if end not in ids:
            inner["eos_token_id"] = [end, *ids] if ids else end
            found[name] = json_bytes(tree)
    for name in sorted({"tokenizer_config.json", "special_tokens_map.json"} & files.keys()) if word else []:
        tree = json.loads(files[name])
        known = tree.get("eos_token")
        if (known.get("content") if isinstance(known, dict) else known) != word:
            tree["eos_token"] = word
            found[name] = json_bytes(tree, ensure_ascii=False)
    return found


def _without_ids(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns a config without the ids of tokens, in its inner objects neither."""
    return {
        key: _without_ids(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if not key.endswith("_token_id")
    }


def keep(home: StoragePath, files: Files) -> None:
    """Writes them into a run's directory. By process 0."""
    try:
        (home / KEPT).mkdir(parents=True, exist_ok=True)
        for name, content in sorted(files.items()):
            publish_bytes(home / KEPT / name, content)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{home / KEPT} cannot be written: {error.strerror}; fix that") from error
