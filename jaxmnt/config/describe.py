"""Renders the config as help text and as a JSON schema for editors, and lists the differences between two configs."""

from typing import Any, NamedTuple

from jaxmnt.config.explain import Schema, describe_values, entries_of, field_of, resolve_reference, section_fields
from jaxmnt.config.load import EXTENDS, as_yaml, flatten
from jaxmnt.config.schema import Config
from jaxmnt.config.section import Resume
from jaxmnt.errors import ConfigError, printable, suggest
from jaxmnt.strict_json import json_text

RESUME_LABELS: dict[Resume, str] = {"harmless": "harmless", "maths": "changes the maths", "breaks": "breaks resume"}
"""The text that the user sees for each resume class of a changed key."""

CHANGEABLE_MATHS = ("train.steps", "data.skip", "data.weight_changes")
"""Keys that change the maths but are meant to be changed during a run. All others need `--accept-changes`."""

ORIGIN_KEYS = ("run.fork_from", "run.init_from")
"""Keys that name the origin of a run. The run records them, so leaving them out later is not a change."""

RESOLVED_AUTO_KEYS = ("mesh.zero", "train.eval_tokens")
"""Keys for which a run stores the value that `auto` resolved to at its first start, so `auto` is not a change."""


class Change(NamedTuple):
    """A key whose value differs between a run directory and the current config."""

    key: str
    before: Any
    now: Any
    resume: Resume

    @property
    def values(self) -> str:
        """Both values in YAML, separated by an arrow."""
        return f"{as_yaml(self.before)} → {as_yaml(self.now)}"


def help_text(topic: str = "") -> str:
    """Returns the help for every key: its accepted values, its default and its description, not wrapped.

    A topic limits this to one key or section. Raises `ConfigError` if no key matches it.
    """
    fields = fields_by_key(of_lists=True)
    keys = [name for name in fields if not topic or name == topic or name.startswith(f"{topic}.")]
    if not keys:
        topics = sorted({".".join(name.split(".")[:depth]) for name in fields for depth in (1, 2)})
        raise ConfigError(f"--help: no setting begins with {printable(topic)}; {suggest(topic, topics)}")
    line = lambda name, field: f"  {name}  {describe_values(field)}; {_default(field)}\n      {field['description']}"
    return "\n".join(line(name, fields[name]) for name in keys)


def json_schema() -> str:
    """Returns the JSON schema of the config file, for editors."""
    schema = Config.model_json_schema()
    extends = {"type": "string", "description": "Another config file, whose keys this one has unless it sets them."}
    schema["properties"] = {EXTENDS: extends} | schema["properties"]
    schema["patternProperties"] = {"^x-": {"description": "A place for YAML anchors."}}
    return json_text(schema, indent=2) + "\n"


def fields_by_key(*, of_lists: bool = False) -> dict[str, Schema]:
    """Returns the schema of each dotted key, in config order; NAME stands for any name in a mapping.

    `of_lists` adds the keys of list entries, with N for the index.
    """
    fields = {}

    def add(prefix: str, keys: dict[str, Schema]) -> None:
        for name, field in keys.items():
            key, inner = f"{prefix}{name}", resolve_reference(field)
            if "properties" in inner:
                add(f"{key}.", inner["properties"])
                continue
            fields[key] = field
            placeholders = {"object": "NAME"} | ({"array": "N"} if of_lists else {})
            if (kind := inner.get("type")) in placeholders and (entries := entries_of(inner)):
                add(f"{key}.{placeholders[kind]}.", resolve_reference(entries).get("properties", {}))

    add("", section_fields([]))
    return fields


def changes(before: Config, now: Config) -> list[Change]:
    """Returns the keys that differ, each with its resume class. A key that one config lacks counts as null."""
    old, new = flatten(before), flatten(now)
    pairs = [(key, old.get(key), new.get(key)) for key in new | old]
    return [
        Change(key, was, value, _resume_class(key))
        for key, was, value in pairs
        if was != value
        and not (key in RESOLVED_AUTO_KEYS and value == "auto")
        and not (key in ORIGIN_KEYS and value is None)
    ]


def maths_settings(config: Config) -> dict[str, Any]:
    """Returns the keys of resume class "maths" with their values: they affect the numerics and may change on resume."""
    return {key: value for key, value in flatten(config).items() if _resume_class(key) == "maths"}


def _resume_class(dotted: str) -> Resume:
    """Returns the resume class of a key, or of the mapping that contains it."""
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
