"""Loading: YAML file, dotted overrides, and one message for whatever is wrong with them."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from jaxmnt.config.schema import NOT_OF_THE_RUN, Config
from jaxmnt.errors import ConfigError, nearest


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 3e-4 is a number and a key given twice is an error."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Reads `path`, applies `key.sub=value` overrides in order, and checks the whole.

    Raises `ConfigError` with the file or argument, the key and the fix.
    """
    path = Path(path)
    tree, lines = _read(path)
    sources = {key: f"{path}:{line}" for key, line in lines.items()}
    sources |= dict.fromkeys(apply_overrides(tree, overrides or []), "command line")
    tree.setdefault("run", None)
    tree["run"] = tree["run"] or {}
    if isinstance(tree["run"], dict):
        tree["run"].setdefault("dir", f"runs/{path.stem}")
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, sources, str(path))) from error


def apply_overrides(tree: dict[str, Any], overrides: list[str]) -> list[str]:
    """Sets each `key.sub=value` in the tree, in order, and returns the dotted keys."""
    return [_apply(tree, override) for override in overrides]


def parse_config(tree: dict[str, Any], name: str = "config") -> Config:
    """Checks a tree that did not come from a file, such as a run directory's or a test's."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, {}, name)) from error


def dump_config(config: Config) -> str:
    """The resolved config as YAML, without anything about this process."""
    return _dumped(config.model_dump(exclude=NOT_OF_THE_RUN))


def dump_for_hosts(config: Config) -> str:
    """The resolved config as YAML for the processes of a run, with what it says about their cluster."""
    tree = config.model_dump(exclude=NOT_OF_THE_RUN - {"cluster"})
    tree["cluster"] = {name: value for name, value in tree["cluster"].items() if value is not None}
    return _dumped(tree)


class _Dumper(yaml.SafeDumper):
    """Safe YAML in which no text is one of the numbers that only our loader knows."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style='"' if text[:1] in set("-+.0123456789") else None
    ),
)


def _dumped(tree: dict[str, Any]) -> str:
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False)


def flatten(config: Config) -> dict[str, Any]:
    """Dotted key → value for every key but the cluster's, those of mappings such as data.sources included."""
    flat: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for name, item in value.items():
                add(f"{prefix}.{name}" if prefix else name, item)
        else:
            flat[prefix] = value

    add("", config.model_dump(exclude=NOT_OF_THE_RUN))
    return flat


def field_of(dotted: str) -> FieldInfo | None:
    """The field that a dotted key names; any name will do for an entry of a mapping. None if there is none."""
    *parents, last = dotted.split(".")
    fields = section_fields(parents)
    return None if fields is None else fields.get(last)


def section_fields(parents: Sequence[str]) -> dict[str, FieldInfo] | None:
    """The fields of a section, given as the names on the way to it; None if that is no section."""
    section: Any = Config
    for parent in parents:
        if get_origin(section) in (dict, list):
            section = get_args(section)[-1]
        elif is_section(section) and parent in section.model_fields:
            section = section.model_fields[parent].annotation
        else:
            return None
    return dict(section.model_fields) if is_section(section) else None


def is_section(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The file's tree, and the line of each dotted key."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        siblings = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        hint = f"; in {path.parent}: {', '.join(siblings)}" if siblings else ""
        raise ConfigError(f"{path}: no such config file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        node = yaml.compose(text, Loader=_Loader)
        tree = yaml.load(text, Loader=_Loader) or {}  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise ConfigError(f"{path}{line}: not valid YAML: {problem}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a config is a mapping of sections such as 'train:', not a {_kind(tree)}")
    lines: dict[str, int] = {}
    if node is not None:
        _collect_lines(path, node, "", lines)
    return tree, lines


def _collect_lines(path: Path, node: yaml.Node, prefix: str, lines: dict[str, int]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        dotted = f"{prefix}{key_node.value}"
        line = key_node.start_mark.line + 1
        if dotted in lines:
            raise ConfigError(f"{path}:{line}: {dotted} is given twice (first on line {lines[dotted]}); keep one")
        lines[dotted] = line
        _collect_lines(path, value_node, f"{dotted}.", lines)


def _apply(tree: dict[str, Any], override: str) -> str:
    """Sets one `key.sub=value` in the tree and returns the dotted key."""
    dotted, equals, text = override.partition("=")
    if not equals or not dotted or dotted.startswith("-"):
        raise ConfigError(f"argument {override!r} is no override; write key.sub=value, such as train.steps=100")
    try:
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML") from error
    *parents, last = dotted.split(".")
    place = tree
    for parent in parents:
        if place.get(parent) is None:
            place[parent] = {}
        place = place[parent]
        if not isinstance(place, dict):
            raise ConfigError(f"override {override!r}: {parent} is a value, not a section")
    place[last] = value
    return dotted


def _explain(error: ValidationError, sources: dict[str, str], name: str) -> str:
    """One message for the first problem, and a count of the others."""
    problems = error.errors()
    first = problems[0]
    dotted = ".".join(str(part) for part in first["loc"])
    if first["type"] == "value_error":  # ours, from a rule over several keys: it names its key itself
        message = str(first["ctx"]["error"])
        dotted = message.partition(":")[0]
        text = message.partition(": ")[2]
    elif first["type"] == "extra_forbidden":
        text = f"unknown key; {_suggest(dotted)}"
    else:
        text = f"{first['msg'][0].lower()}{first['msg'][1:]}, not {first['input']!r}"
        text += f" ({_help_line(dotted)})" if _help_line(dotted) else ""
    where = sources.get(dotted) or next(
        (place for known, place in sources.items() if known.startswith(f"{dotted}.")), name
    )
    more = f" ({len(problems) - 1} more problems follow)" if len(problems) > 1 else ""
    return f"{where}: {dotted}: {text}{more}"


def _suggest(dotted: str) -> str:
    *parents, last = dotted.split(".")
    known = list(section_fields(parents) or {})
    elsewhere = [
        f"{name}.{last}"
        for name, field in Config.model_fields.items()
        if is_section(field.annotation) and last in (section_fields([name]) or {})
    ]
    if elsewhere and last not in known:
        return f"did you mean {elsewhere[0]}?"
    hint = nearest(last, known)
    prefix = ".".join(parents)
    return hint.replace("did you mean ", f"did you mean {prefix}.") if prefix else hint


def _help_line(dotted: str) -> str:
    """The key's line of help, or nothing for a section."""
    field = field_of(dotted)
    return "" if field is None or is_section(field.annotation) else field.description or ""


def _kind(value: Any) -> str:
    names: dict[type, str] = {list: "list", str: "string"}
    return names.get(type(value), type(value).__name__)
