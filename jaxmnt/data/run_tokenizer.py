"""The tokenizer that a run keeps, so that its tokens are text on any machine, without the data.

tokenizer/manifest.json    which tokenizer it is, how many ids the data has, and the digest of the file; sealed
tokenizer/tokenizer.json   the data's, unless that is bytes, or token arrays, whose tokenizer nobody named
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmnt.config.data import Data
from jaxmnt.data.manifest import NAMELESS, sealed_text, unsealed
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
    """What is known of a run's tokens."""

    description: dict[str, Any]
    """As in the manifest of the data."""
    vocab_size: int
    """How many ids the data has."""
    text: str | None
    """Of tokenizer.json, if there is one."""

    @property
    def name(self) -> str:
        return str(self.description["name"])

    @property
    def end_of_document(self) -> int | None:
        """The id between documents, if there is one."""
        end = self.description.get("end_of_document")
        return None if end is None else int(end)

    def open(self) -> Tokenizer:
        """The tokenizer itself. Raises `ConfigError` if it turns no token into text."""
        return make_tokenizer(self.description, Path(FOLDER), self.text)


def of_data(description: dict[str, Any], vocab_size: int, folder: Path) -> RunTokenizer:
    """What prepared data says in its manifest, with the file in its folder."""
    path, text = folder / TOKENIZER_FILE, None
    if description["name"] == "huggingface":
        try:
            text = read(path).decode()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"data.path: {path} cannot be read ({error}); copy it again or prepare the data again"
            ) from error
    return RunTokenizer(description, vocab_size, text)


def write_to_run(home: StoragePath, tokenizer: RunTokenizer) -> None:
    """Writes it into a run's directory, unless it is there. By process 0. One that is cut off counts as none."""
    folder = home / FOLDER
    try:
        if read_from_run(home) == tokenizer:
            return
    except ConfigError:  # damaged, and now written anew
        pass
    if isinstance(folder, Path) and folder.is_symlink():
        raise ConfigError(f"{folder} is a link to something else than this run's tokenizer; remove the link")
    try:
        folder.mkdir(exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
        if tokenizer.text is not None:
            publish(folder / TOKENIZER_FILE, tokenizer.text)
        record = {
            "format": FORMAT,
            "version": VERSION,
            "tokenizer": tokenizer.description,
            "vocab_size": tokenizer.vocab_size,
            "file": None if tokenizer.text is None else hashlib.sha256(tokenizer.text.encode()).hexdigest(),
        }
        publish(folder / MANIFEST, sealed_text(record))
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{error.filename or folder} cannot be written: {error.strerror}; fix that") from error


def of_file(text: str, vocab_size: int) -> RunTokenizer:
    """Describes the tokenizer of a tokenizer.json by its content alone; nothing says what ends a document."""
    about = {"name": "huggingface", "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return RunTokenizer(about, vocab_size, text)


def same_vocabulary(first: RunTokenizer, second: RunTokenizer) -> bool:
    """Whether ids of both mean the same text. Of token arrays and random tokens nobody can tell: they pass.

    Files of `tokenizers` are the same with equal vocabulary, merges and added tokens, however they are written.
    """
    if first.name == second.name == NAMELESS:
        return first.end_of_document == second.end_of_document
    if {first.name, second.name} & {"synthetic", NAMELESS}:
        return True
    if first.name != second.name or first.text is None or second.text is None:
        return first.name == second.name
    if first.description["sha256"] == second.description["sha256"]:
        return True
    return _vocabulary_of(first.text) == _vocabulary_of(second.text)


def _vocabulary_of(text: str) -> Any:
    """Returns what of a tokenizer.json decides which text an id stands for, and how words become ids."""
    tree = json.loads(text)
    model = tree["model"]
    # Newer files write a merge as a pair, older ones as a text.
    merges = [
        tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model.get("merges") or []
    ]
    added = sorted((token["id"], token["content"], token.get("special")) for token in tree.get("added_tokens") or [])
    return model.get("vocab"), merges, added


def read_from_run(home: StoragePath) -> RunTokenizer | None:
    """What a run's directory keeps; None if that is nothing. Raises `ConfigError` if it is not what was written."""
    path = home / FOLDER / MANIFEST
    damaged = ConfigError(
        f"{path.parent} is damaged: it is not what the run has written there; remove it: the next start of the run "
        "writes it again, and until then the tokenizer of its data is used"
    )
    try:
        record = unsealed(json.loads(read(path).decode()))
        if (record["format"], record["version"]) != (FORMAT, VERSION):
            raise ConfigError(f"{path} is of version {record['version']}, this jaxmnt reads {VERSION}; use a newer one")
        text = None
        if record["file"] is not None:
            content = read(path.parent / TOKENIZER_FILE)
            if hashlib.sha256(content).hexdigest() != record["file"]:
                raise damaged
            text = content.decode()
        tokenizer = RunTokenizer(dict(record["tokenizer"]), int(record["vocab_size"]), text)
        if not _makes_sense(tokenizer):
            raise damaged
    except (FileNotFoundError, NotADirectoryError):
        if path.exists():
            raise damaged from None  # it names a file that is not there
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


def of_run(homes: Sequence[StoragePath], settings: Data, folders: Sequence[Path]) -> RunTokenizer:
    """What a run keeps in one of its places; of a run from before there was that, what its data says.

    Paths of the data that are not absolute are looked for in `folders`. Raises `ConfigError` if neither tells.
    """
    for home in homes:
        if tokenizer := read_from_run(home):
            return tokenizer
    if settings.synthetic is not None:
        data = SyntheticData(settings.synthetic)
        return of_data(data.tokenizer, data.vocab_size, Path())
    named = next((source.path for source in settings.named_sources.values() if source.path is not None), None)
    if named is None:
        raise ConfigError("its config names no prepared data")
    there = next((folder / named for folder in folders if (folder / named).is_dir()), Path(named))
    prepared = open_prepared(there)
    return of_data(prepared.tokenizer, prepared.vocab_size, prepared.path)


def _makes_sense(tokenizer: RunTokenizer) -> bool:
    end, named = tokenizer.end_of_document, isinstance(tokenizer.description["name"], str)
    whole = tokenizer.text is not None and isinstance(tokenizer.description.get("end_token"), str)
    return named and (end is None or 0 <= end < tokenizer.vocab_size) and (whole or tokenizer.name != "huggingface")
