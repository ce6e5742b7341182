"""The config as help text, as a JSON schema for editors, and as differences between two runs."""

from typing import Any, NamedTuple

from jaxmnt.config.explain import Schema, entries_of, field_of, plain, section_fields, takes
from jaxmnt.config.load import EXTENDS, as_yaml, flatten
from jaxmnt.config.schema import Config
from jaxmnt.config.section import Resume
from jaxmnt.errors import ConfigError, nearest, printable
from jaxmnt.strict_json import json_text

MEANING: dict[Resume, str] = {"harmless": "harmless", "maths": "changes the maths", "breaks": "breaks resume"}
"""The classes of a changed key, for people."""

PLANNED = ("train.steps", "data.skip", "data.weight_changes")
"""Keys of the maths that are there to be changed on the way. What else changes the maths has to be accepted."""


ORIGINS = ("run.fork_from", "run.init_from")
"""Keys of what a run began with, which it keeps. So to leave them out is no change of them."""
CHOSEN = ("mesh.zero", "train.eval_tokens")
"""Keys of which a run keeps what `auto` came to at its first start. So `auto` is no change of them."""


class Change(NamedTuple):
    """A key whose value differs between a run directory and the config at hand."""

    key: str
    before: Any
    now: Any
    resume: Resume

    @property
    def values(self) -> str:
        """Both values, as a config file writes them."""
        return f"{as_yaml(self.before)} → {as_yaml(self.now)}"


def help_text(topic: str = "") -> str:
    """Every key with what it takes, its default and its line of explanation, for a terminal to wrap.

    With a topic only that key, or the keys of that section. Raises `ConfigError` if there are none.
    """
    fields = fields_by_key(of_lists=True)
    keys = [name for name in fields if not topic or name == topic or name.startswith(f"{topic}.")]
    if not keys:
        topics = sorted({".".join(name.split(".")[:depth]) for name in fields for depth in (1, 2)})
        raise ConfigError(f"--help: no setting begins with {printable(topic)}; {nearest(topic, topics)}")
    line = lambda name, field: f"  {name}  {takes(field)}; {_default(field)}\n      {field['description']}"
    return "\n".join(line(name, fields[name]) for name in keys)


def json_schema() -> str:
    """A JSON schema of the config file, for editors."""
    schema = Config.model_json_schema()
    extends = {"type": "string", "description": "Another config file, whose keys this one has unless it sets them."}
    schema["properties"] = {EXTENDS: extends} | schema["properties"]
    schema["patternProperties"] = {"^x-": {"description": "A place for YAML anchors."}}
    return json_text(schema, indent=2) + "\n"


def fields_by_key(*, of_lists: bool = False) -> dict[str, Schema]:
    """Dotted key → schema, in the order of the config; NAME stands for any name in a mapping.

    `of_lists` adds the keys of a list's entries, with N for their place.
    """
    fields = {}

    def add(prefix: str, keys: dict[str, Schema]) -> None:
        for name, field in keys.items():
            key, inner = f"{prefix}{name}", plain(field)
            if "properties" in inner:
                add(f"{key}.", inner["properties"])
                continue
            fields[key] = field
            place = {"object": "NAME"} | ({"array": "N"} if of_lists else {})
            if (kind := inner.get("type")) in place and (entries := entries_of(inner)):
                add(f"{key}.{place[kind]}.", plain(entries).get("properties", {}))

    add("", section_fields([]))
    return fields


def changes(before: Config, now: Config) -> list[Change]:
    """Keys that differ, each with what that means for a resumed run. A key that one of them lacks counts as null."""
    old, new = flatten(before), flatten(now)
    pairs = [(key, old.get(key), new.get(key)) for key in new | old]
    return [
        Change(key, was, value, _resume_class(key))
        for key, was, value in pairs
        if was != value and not (key in CHOSEN and value == "auto") and not (key in ORIGINS and value is None)
    ]


def maths(config: Config) -> dict[str, Any]:
    """Every key that the numbers of a run depend on, and that can be changed on the way, with its value."""
    return {key: value for key, value in flatten(config).items() if _resume_class(key) == "maths"}


def _resume_class(dotted: str) -> Resume:
    """Of the key, or of the mapping that it is an entry of."""
    field = field_of(dotted)
    while field is None:
        dotted = dotted.rpartition(".")[0]
        field = field_of(dotted)
    return field["resume"]


def _default(field: Schema) -> str:
    if "default" not in field:
        return "required"
    value = field["default"]
    if value in (None, [], {}):
        return f"default {'null' if value is None else 'empty'}"
    return f"default {str(value).lower() if isinstance(value, bool) else value}"
