"""Settings by the names that other programs give them, and by their own name in the wrong place."""

import functools
import json
from collections.abc import Iterable
from importlib.resources import files
from typing import Any, NamedTuple


class Meant(NamedTuple):
    """The key that somebody means."""

    key: str
    note: str = ""
    """How it differs from what was typed, if it does."""


@functools.cache
def table() -> dict[str, Any]:
    """Reads `synonyms.json`, when an error is worded.

    `sections` and `settings` have names of other programs, with spaces between them, by a section's name and in order.
    """
    return dict(json.loads(files("jaxmnt.config").joinpath("synonyms.json").read_text(encoding="utf-8")))


def section_for(name: str) -> str | None:
    """The section that is called `name` elsewhere."""
    return next((section for section, names in table()["sections"].items() if name in names.split()), None)


def setting_for(name: str, section: str = "") -> Meant | None:
    """The key that is called `name` elsewhere, or that has this name in another section than `section`.

    A key of the section itself comes before the same word's meaning in others.
    """
    plain = name.lower().replace("-", "_")
    entries = (entry for entry in table()["settings"] if plain in entry["names"].split())
    meant, own = next((Meant(entry["key"], entry.get("note", "")) for entry in entries), None), list(_places(plain))
    if meant and (meant.key.startswith(f"{section}.") or not own):
        return meant
    return Meant(" or ".join(own)) if own else None


def _places(name: str) -> Iterable[str]:
    """Every key of a section that has this name."""
    from jaxmnt.config.schema import Config

    for key, field in Config.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        if inner is None and key == name:
            yield key
        elif inner and name in inner:
            yield f"{key}.{name}"
