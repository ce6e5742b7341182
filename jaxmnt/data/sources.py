"""The sources of data that a config names: opened, checked against each other, and described."""

import functools
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxmnt.config.schema import Data
from jaxmnt.data.order import Phase
from jaxmnt.data.store import PreparedData, open_prepared
from jaxmnt.data.synthetic import SyntheticData
from jaxmnt.errors import ConfigError, UnreadableError

ONLY = "data"
"""The name of the source when there is one without a name."""


@dataclass(frozen=True)
class Sources:
    """Prepared data by name, in the order of the names."""

    parts: dict[str, PreparedData | SyntheticData]

    @property
    def vocab_size(self) -> int:
        return self._first.vocab_size

    @property
    def tokenizer(self) -> dict[str, Any]:
        return self._first.tokenizer

    @property
    def end_of_document(self) -> int | None:
        """The id that follows every document; None where none does."""
        end = self.tokenizer["end_of_document"]
        return None if end is None else int(end)

    @property
    def folder(self) -> Path:
        """Where the tokenizer lies."""
        return Path(self._first.path)

    @property
    def digests(self) -> dict[str, str]:
        """What each source holds; goes into checkpoints."""
        return {name: part.digest for name, part in self.parts.items()}

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.digests, sort_keys=True).encode()).hexdigest()

    def tokens(self, split: str) -> int:
        return sum(part.tokens(split) for part in self.parts.values())

    def at(self, paths: dict[str, Path]) -> "Sources":
        """The same data read from other folders."""
        return Sources(
            {
                name: replace(part, path=paths[name]) if isinstance(part, PreparedData) else part
                for name, part in self.parts.items()
            }
        )

    @property
    def _first(self) -> PreparedData | SyntheticData:
        return next(iter(self.parts.values()))


def open_sources(settings: Data) -> Sources:
    """Opens what `data` names. Raises `ConfigError` for data that is missing, damaged or of different vocabularies."""
    if settings.synthetic is not None:
        return Sources({ONLY: SyntheticData(settings.synthetic)})
    if settings.sources:
        parts = {
            name: _open(settings.sources[name].path, f"data.sources.{name}.path") for name in sorted(settings.sources)
        }
    else:
        parts = {ONLY: _open(settings.path, "data.path")}
    sources = Sources(dict(parts))
    for name, part in parts.items():
        if (part.vocab_size, part.tokenizer) != (sources.vocab_size, sources.tokenizer):
            first = next(iter(parts))
            raise ConfigError(
                f"data.sources: {first} and {name} were prepared with different tokenizers; "
                "prepare all sources with the same one"
            )
    for part in parts.values():
        with _reading(part.path):
            part.check()
    return sources


@contextmanager
def _reading(path: str | Path) -> Iterator[None]:
    """Inside, whatever is wrong with data is that it cannot be read, be it away, cut short or damaged."""
    try:
        yield
    except ConfigError as error:
        raise UnreadableError(str(error)) from error
    except OSError as error:
        raise UnreadableError(
            f"data.path: {error.filename or path} cannot be read ({error.strerror or error}); mend the access"
        ) from error


def phases(settings: Data) -> list[Phase]:
    """The weights of the sources, in the order of their names, and when they change."""
    names = sorted(settings.sources) or [ONLY]
    weights = {name: settings.sources[name].weight if settings.sources else 1.0 for name in names}
    found = [Phase(0, tuple(weights.values()))]
    for change in settings.weight_changes:
        weights = {name: change.weights.get(name, weights[name]) for name in names}
        found.append(Phase(change.from_step, tuple(weights.values())))
    return found


def on_end(settings: Data, name: str) -> str:
    """What happens after an epoch of this source."""
    own = settings.sources[name].on_end if settings.sources else None
    return own or settings.on_end


def _open(path: str | None, key: str) -> PreparedData:
    if path is None:
        raise ConfigError(
            f"{key}: not set; make prepared data with: python -m jaxmnt.prepare --input TEXT --output DIR, "
            "and give its folder"
        )
    with _reading(path):
        return open_prepared(path, key)
