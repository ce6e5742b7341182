"""Renders the config as help text and as a JSON schema for editors, and lists the differences between two configs."""

from typing import Any, NamedTuple

from jaxmnt.config.explain import Schema, describe_values, entries_of, field_of, resolve_reference, section_fields
from jaxmnt.config.load import EXTENDS, as_yaml, flatten
from jaxmnt.config.schema import Config
from jaxmnt.config.section import Resume
from jaxmnt.errors import ConfigError, printable, suggest
from jaxmnt.strict_json import json_text

RESUME_LABELS: dict[Resume, str] = {"harmless": "harmless", "maths": "changes the maths", "breaks": "breaks resume"}
"""Text that the user sees for each effect of a changed key on a resumed run."""

CHANGEABLE_MATHS = ("train.steps", "data.skip", "data.weight_changes")
"""Keys that change the maths but are meant to be changed during a run. Other such keys require `--accept-changes`."""

ORIGIN_KEYS = ("run.fork_from", "run.init_from")
"""Keys that name the origin of a run. The run records the origin, so a later config without them is no change."""

RESOLVED_AUTO_KEYS = ("mesh.zero", "train.eval_tokens")
"""Keys for which a run stores the value that `auto` meant at its first start, so that `auto` is no change later."""


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
    """Returns the help for every key: the values it accepts, its default and its description, without line wrapping.

    A topic limits the help to one key or section. Raises `ConfigError` if no key matches it.
    """
    fields = fields_by_key(of_lists=True)
    matches_topic = lambda name: not topic or name == topic or name.startswith(f"{topic}.")
    keys = [name for name in fields if matches_topic(name)]
    if not keys:
        topics = sorted({".".join(name.split(".")[:depth]) for name in fields for depth in (1, 2)})
        raise ConfigError(f"--help: no setting begins with {printable(topic)}; {suggest(topic, topics)}")
    lines = []
    for name in keys:
        field = fields[name]
        lines += [f"  {name}  {describe_values(field)}; {describe_default(field)}", f"      {field['description']}"]
    return "\n".join(lines)


def json_schema() -> str:
    """Returns the JSON schema of the config file, for editors."""
    schema = Config.model_json_schema()
    extends = {
        "type": "string",
        "description": "Another config file. This file inherits its keys, unless it sets them itself.",
    }
    schema["properties"] = {EXTENDS: extends} | schema["properties"]
    schema["patternProperties"] = {"^x-": {"description": "Ignored, so that it can hold YAML anchors."}}
    return json_text(schema, indent=2) + "\n"


def fields_by_key(*, of_lists: bool = False) -> dict[str, Schema]:
    """Returns the schema of each dotted key, in config order; NAME stands for any name in a mapping.

    `of_lists` adds the keys of list entries, with N for the index.
    """
    fields = {}
    placeholders = {"object": "NAME"} | ({"array": "N"} if of_lists else {})

    def add(prefix: str, keys: dict[str, Schema]) -> None:
        for name, field in keys.items():
            key = f"{prefix}{name}"
            schema = resolve_reference(field)
            if "properties" in schema:
                add(f"{key}.", schema["properties"])
                continue
            fields[key] = field
            placeholder = placeholders.get(schema.get("type", ""))
            entries = entries_of(schema)
            if placeholder and entries:
                add(f"{key}.{placeholder}.", resolve_reference(entries).get("properties", {}))

    add("", section_fields([]))
    return fields


def changes(before: Config, now: Config) -> list[Change]:
    """Returns the keys that differ, each with its effect on resume. A key that one config lacks counts as null."""
    old = flatten(before)
    new = flatten(now)
    pairs = [(key, old.get(key), new.get(key)) for key in new | old]
    return [
        Change(key, old_value, new_value, _resume_class(key))
        for key, old_value, new_value in pairs
        if old_value != new_value
        and not (key in RESOLVED_AUTO_KEYS and new_value == "auto")
        and not (key in ORIGIN_KEYS and new_value is None)
    ]


def maths_settings(config: Config) -> dict[str, Any]:
    """Returns the values of the keys that change the maths of a resumed run."""
    return {key: value for key, value in flatten(config).items() if _resume_class(key) == "maths"}


def _resume_class(dotted: str) -> Resume:
    """Returns the effect on resume of a key, or of the mapping that contains the key."""
    field = field_of(dotted)
    while field is None:
        dotted = dotted.rpartition(".")[0]
        field = field_of(dotted)
    return field["resume"]


def describe_default(field: Schema) -> str:
    """Describes the default of a key, such as default 64, or says that the key is required."""
    if "default" not in field:
        return "required"
    value = field["default"]
    if value in (None, [], {}):
        return f"default {'null' if value is None else 'empty'}"
    return f"default {str(value).lower() if isinstance(value, bool) else value}"
