"""The tokenizer that a run stores, so that its tokens can be decoded on any machine, without the data.

tokenizer/manifest.json    description of the tokenizer, vocabulary size, and digest of tokenizer.json; sealed
tokenizer/tokenizer.json   the tokenizer of the data; missing if that is bytes, or unknown (token arrays)
tokenizer/chat_template.jinja   the chat template of the conversations on which the run was trained, if any
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmnt.config.data import Data
from jaxmnt.data.chat.template import ChatFormat
from jaxmnt.data.manifest import CHAT_TEMPLATE_FILE, HOW_TO_REPAIR, NAMELESS, sealed_text, unsealed
from jaxmnt.data.sources import SyntheticData
from jaxmnt.data.store import open_prepared
from jaxmnt.data.tokenizer import TOKENIZER_FILE, Tokenizer, make_tokenizer
from jaxmnt.errors import ConfigError, UserError
from jaxmnt.storage import StoragePath, publish, read

FOLDER = "tokenizer"
MANIFEST = "manifest.json"
FORMAT = "jaxmnt-tokenizer"
VERSION = 1


@dataclass(frozen=True)
class RunTokenizer:
    """The tokenizer and vocabulary size of a run."""

    description: dict[str, Any]
    """The entry `tokenizer` in the manifest of the data."""
    vocab_size: int
    """Vocabulary size of the data."""
    text: str | None
    """Contents of tokenizer.json; None if there is no such file."""
    chat: ChatFormat | None = None
    """The format of the conversations in the data; None if there are none."""

    @property
    def name(self) -> str:
        return str(self.description["name"])

    @property
    def end_of_document(self) -> int | None:
        """The id that ends each document, or None if there is no such id."""
        end_id = self.description.get("end_of_document")
        return None if end_id is None else int(end_id)

    def open(self) -> Tokenizer:
        """Returns an object that encodes and decodes text. Raises `ConfigError` if the tokenizer is unknown."""
        return make_tokenizer(self.description, Path(FOLDER), self.text)


def tokenizer_of_data(
    description: dict[str, Any], vocab_size: int, folder: Path, chat: ChatFormat | None = None
) -> RunTokenizer:
    """Returns the tokenizer of prepared data, given its description in the manifest and the folder of its file.

    Raises `ConfigError` if the file cannot be read.
    """
    path = folder / TOKENIZER_FILE
    text = None
    if description["name"] == "huggingface":
        try:
            text = read(path).decode()
        except (OSError, ValueError) as error:
            raise ConfigError(f"data.path: {path} cannot be read ({error}); {HOW_TO_REPAIR}") from error
    return RunTokenizer(description, vocab_size, text, chat)


def write_tokenizer(root: StoragePath, tokenizer: RunTokenizer) -> None:
    """Writes the tokenizer into a run's directory, unless the directory has it already. Only process 0 calls this.

    An incomplete tokenizer is replaced. Raises `UserError` if the tokenizer cannot be written.
    """
    folder = root / FOLDER
    try:
        if read_tokenizer(root) == tokenizer:
            return
    except ConfigError:  # the stored tokenizer is damaged, so replace it
        pass
    if isinstance(folder, Path) and folder.is_symlink():
        raise ConfigError(f"{folder} is a link to something other than this run's tokenizer; remove the link")
    try:
        folder.mkdir(exist_ok=True)
        # The manifest is removed first and written last, so that it never describes the tokenizer.json of another one.
        (folder / MANIFEST).unlink(missing_ok=True)
        if tokenizer.text is not None:
            publish(folder / TOKENIZER_FILE, tokenizer.text)
        chat = {}
        if tokenizer.chat is not None:
            publish(folder / CHAT_TEMPLATE_FILE, tokenizer.chat.template)
            chat["chat"] = tokenizer.chat.to_json() | {"file": _sha256(tokenizer.chat.template)}
        record = {
            "format": FORMAT,
            "version": VERSION,
            "tokenizer": tokenizer.description,
            "vocab_size": tokenizer.vocab_size,
            "file": None if tokenizer.text is None else _sha256(tokenizer.text),
        }
        publish(folder / MANIFEST, sealed_text(record | chat))
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{error.filename or folder} cannot be written: {error.strerror}; fix that") from error


def tokenizer_from_json(text: str, vocab_size: int) -> RunTokenizer:
    """Returns the tokenizer that a tokenizer.json contains. Its end of document is not known."""
    description = {"name": "huggingface", "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return RunTokenizer(description, vocab_size, text)


def same_vocabulary(first: RunTokenizer, second: RunTokenizer) -> bool:
    """Returns True if both tokenizers map ids to the same text. If one belongs to token arrays or random tokens, their
    text is unknown, so this also returns True.

    Two tokenizer.json files count as the same if their vocabularies, merges and added tokens are equal.
    """
    if first.name == second.name == NAMELESS:
        return first.end_of_document == second.end_of_document
    if {first.name, second.name} & {"synthetic", NAMELESS}:
        return True
    if first.name != second.name or first.text is None or second.text is None:
        return first.name == second.name
    if first.description["sha256"] == second.description["sha256"]:
        return True
    return _id_definition(first.text) == _id_definition(second.text)


def _id_definition(text: str) -> Any:
    """Returns the vocabulary, merges and added tokens of a tokenizer.json, which determine the ids of every text."""
    tree = json.loads(text)
    model = tree["model"]
    # Newer files store a merge as a pair, and older files as a string.
    merges = [
        tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model.get("merges") or []
    ]
    added = sorted((token["id"], token["content"], token.get("special")) for token in tree.get("added_tokens") or [])
    return model.get("vocab"), merges, added


def read_tokenizer(root: StoragePath) -> RunTokenizer | None:
    """Returns the tokenizer that a run's directory contains, or None if there is none.

    Raises `ConfigError` if the tokenizer is damaged, or if its files cannot be read.
    """
    path = root / FOLDER / MANIFEST
    damaged = ConfigError(
        f"{path.parent} is damaged: its contents have changed since the run wrote it; remove it, and the next start of "
        "the run writes it again; until then the tokenizer of the data is used"
    )
    try:
        record = unsealed(json.loads(read(path).decode()))
        if (record["format"], record["version"]) != (FORMAT, VERSION):
            raise ConfigError(
                f"{path} has version {record['version']}, but this jaxmnt reads {VERSION}; use a newer one"
            )
        text = chat = None
        if record["file"] is not None:
            text = read(path.parent / TOKENIZER_FILE).decode()
        if "chat" in record:
            chat = ChatFormat.from_json(record["chat"], read(path.parent / CHAT_TEMPLATE_FILE).decode())
        if text is not None and _sha256(text) != record["file"]:
            raise damaged
        if chat is not None and _sha256(chat.template) != record["chat"]["file"]:
            raise damaged
        tokenizer = RunTokenizer(dict(record["tokenizer"]), int(record["vocab_size"]), text, chat)
        if not _is_consistent(tokenizer):
            raise damaged
    except (FileNotFoundError, NotADirectoryError):
        if path.exists():
            raise damaged from None  # the manifest exists, but the tokenizer.json that it describes does not
        return None
    except UserError:
        raise
    except OSError as error:
        raise ConfigError(
            f"{path.parent} cannot be read: {error.strerror}; check that it is mounted and readable"
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise damaged from error
    return tokenizer


def tokenizer_of_run(roots: Sequence[StoragePath], settings: Data, folders: Sequence[Path]) -> RunTokenizer:
    """Returns the tokenizer of a run, from the first of its directories `roots` that stores one.

    Older runs store none, so their tokenizer is that of their data. If the path of the data is relative, it is searched
    for in `folders`. Raises `ConfigError` if no tokenizer is found.
    """
    for root in roots:
        if tokenizer := read_tokenizer(root):
            return tokenizer
    if settings.synthetic is not None:
        data = SyntheticData(settings.synthetic)
        return tokenizer_of_data(data.tokenizer, data.vocab_size, Path())
    path = next((source.path for source in settings.named_sources.values() if source.path is not None), None)
    if path is None:
        raise ConfigError("its config names no prepared data")
    data_folder = next((folder / path for folder in folders if (folder / path).is_dir()), Path(path))
    prepared = open_prepared(data_folder)
    return tokenizer_of_data(prepared.tokenizer, prepared.vocab_size, prepared.path, prepared.chat)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _is_consistent(tokenizer: RunTokenizer) -> bool:
    """Returns True if a stored description has the types and ranges that `open` requires."""
    end_id = tokenizer.end_of_document
    has_name = isinstance(tokenizer.description["name"], str)
    has_file_and_end = tokenizer.text is not None and isinstance(tokenizer.description.get("end_token"), str)
    has_valid_end = end_id is None or 0 <= end_id < tokenizer.vocab_size
    return has_name and has_valid_end and (has_file_and_end or tokenizer.name != "huggingface")
