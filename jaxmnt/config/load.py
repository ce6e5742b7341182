"""Loads a config from a YAML file and from overrides such as train.steps=100, and reports any error in one message."""

import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count, starmap
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from jaxmnt.config.explain import COMMAND_LINE, explain, field_of, source_of
from jaxmnt.config.lora import PEFT_PREFIX
from jaxmnt.config.schema import CLUSTER_SECTIONS, Config
from jaxmnt.errors import ConfigError, listed, printable, shortened


class _DuplicateKeyError(yaml.YAMLError):
    """Raised if a mapping has the same key twice."""


class _Loader(yaml.SafeLoader):
    """Safe YAML loader that reads 3e-4 as a number and rejects duplicate keys.

    What is a number or date only in YAML 1.1 remains text, so 12:00 is not 720, and 010 is not 8.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        key_counts = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key, occurrences in key_counts.items():
            if occurrences > 1:
                raise _DuplicateKeyError(f"{printable(key)} is given twice; keep one")
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    character: [
        (tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("int", "float", "timestamp")
    ]
    for character, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+|0b[01]+)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(([0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)

_MAX_VALUES = 20_000
"""Maximum number of values in a YAML text, with those that its aliases repeat."""

EXTENDS = "extends"
"""Key of a config file that names a base config, whose keys it inherits unless it sets them."""

_RUN_CONFIG = "config.yaml"
"""Name of the config file in a run directory."""

_ANCHOR_PREFIX = "x-"
"""Prefix of top-level keys that only hold YAML anchors and are ignored."""

_YAML_ERRORS = (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
"""Errors that PyYAML raises, including those for a tag that does not fit its value and for deep nesting."""


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Reads `path`, applies `key.sub=value` overrides in order, and validates the result.

    Raises `ConfigError` with the file or argument, the key and the fix.
    """
    path = Path(path)
    tree, sources = _read(path)
    for key in apply_overrides(tree, overrides or []):
        # If an override sets a section, it replaces the keys of that section in the file.
        sources = {name: line for name, line in sources.items() if not name.startswith(f"{key}.")}
        sources[key] = COMMAND_LINE
    # The run directory defaults to the name of the config file.
    tree["run"] = tree.get("run") or {}
    if isinstance(tree["run"], dict) and tree["run"].setdefault("dir", f"runs/{path.stem}") in (None, ""):
        where = source_of("run.dir", sources) or path
        null = " (~ means null in YAML)" if tree["run"]["dir"] is None else ""
        raise ConfigError(f"{where}: run.dir: is empty; name a folder, or leave it out for runs/{path.stem}{null}")
    tree = _expand_homes(tree, "", lambda dotted: source_of(dotted, sources) or str(path))
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error, sources, str(path))) from error
    _check_checkpoint_folder(config, source_of("checkpoint.dir", sources) or str(path))
    return config


def _check_checkpoint_folder(config: Config, where: str) -> None:
    """Raises `ConfigError` if checkpoint.dir is inside run.dir/checkpoints, because --fresh would move it and its lock.

    `Config` itself does not check this, so that the configs of existing runs remain readable.
    """
    if not config.run.dir or not config.checkpoint.dir or "://" in config.checkpoint.dir:
        return
    default = Path(config.run.dir, "checkpoints")
    folder = Path(config.checkpoint.dir)
    if Path(os.path.normpath(Path.cwd() / folder)).is_relative_to(os.path.normpath(Path.cwd() / default)):
        raise ConfigError(
            f"{where}: checkpoint.dir: {printable(str(folder))} is where a run in run.dir "
            f"({printable(config.run.dir)}) keeps its checkpoints anyway; leave checkpoint.dir out, which means "
            f"{printable(str(default))}, or name a folder elsewhere"
        )


def apply_overrides(tree: dict[str, Any], overrides: list[str]) -> list[str]:
    """Sets each `key.sub=value` in the tree, in order, and returns the dotted keys."""
    for number, override in enumerate(overrides):
        if not re.match(r"[^\s=-][^\s=]*=", override):
            raise ConfigError(_invalid_setting_message(overrides, number))
    return [_apply_override(tree, override) for override in overrides]


def drop_overridden(settings: Iterable[str]) -> list[str]:
    """Returns the settings without those that a later setting of the same key replaces."""
    last_settings: dict[str, str] = {}
    for setting in settings:
        key = setting.partition("=")[0]
        last_settings.pop(key, None)  # so that the order is that of the last settings
        last_settings[key] = setting
    return list(last_settings.values())


def as_override(key: str, value: Any) -> str:
    """Returns the argument `key=value` that sets a key to this value, with YAML quotes if they are necessary."""
    return f"{key}={as_yaml(value)}"


def as_typed(key: str, value: Any) -> str:
    """Returns the argument that `as_override` returns, quoted for a shell."""
    return shlex.quote(as_override(key, value))


def as_yaml(value: Any) -> str:
    """Returns the line of YAML that our loader reads as this value."""
    if isinstance(value, str):
        return value if _is_plain(value) else _one_line(value, default_style='"')
    return _one_line(value, default_flow_style=True)


def _one_line(value: Any, **style: Any) -> str:
    return _dump_yaml(value, width=math.inf, allow_unicode=True, **style).removesuffix("\n").removesuffix("\n...")


def _is_plain(text: str) -> bool:
    """Returns True if YAML reads a text as itself, so that it needs no quotes."""
    try:
        return text.isprintable() and not _trailing_comment(text) and _parse_value(text, "") == text
    except (ConfigError, *_YAML_ERRORS):
        return False


def _trailing_comment(text: str) -> str:
    """Returns the comment at the end of a YAML value; empty if there is none."""
    end = 0
    for token in yaml.scan(text, Loader=_Loader):
        if not isinstance(token, yaml.StreamEndToken | yaml.BlockEndToken):
            end = token.end_mark.index
    return text[end:].strip()


def parse_config(tree: dict[str, Any], name: str = "config") -> Config:
    """Validates settings that `load_config` did not read, such as those in a run directory.

    Raises `ConfigError`, which begins with `name`, if they are invalid.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error, {}, name)) from error


def dump_config(config: Config) -> str:
    """Returns the complete config as YAML, without the sections that describe where a run executes."""
    return _dump_yaml(config.model_dump(exclude=CLUSTER_SECTIONS))


def dump_for_hosts(config: Config) -> str:
    """Returns the config as YAML for the processes of a run. Of the sections that describe where a run executes, the
    result has only `cluster`, with only those of its settings that are not null."""
    tree = config.model_dump(exclude=CLUSTER_SECTIONS - {"cluster"})
    tree["cluster"] = {name: value for name, value in tree["cluster"].items() if value is not None}
    return _dump_yaml(tree)


class _Dumper(yaml.SafeDumper):
    """Safe YAML dumper that quotes every text that our loader could read as a number."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style='"' if text[:1] in set("-+.0123456789") else None
    ),
)


def _dump_yaml(value: Any, **style: Any) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, **style)


def flatten(config: Config) -> dict[str, Any]:
    """Returns the value of each dotted key, and of each entry of a mapping. Omits the keys of `CLUSTER_SECTIONS`."""
    return flatten_tree(config.model_dump(exclude=CLUSTER_SECTIONS))


def flatten_tree(tree: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the value of each dotted key of nested mappings. An empty mapping counts as a value."""
    flattened: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            flattened |= flatten_tree(value, f"{prefix}{name}.")
        else:
            flattened[f"{prefix}{name}"] = value
    return flattened


def with_settings(path: Path, overrides: list[str], settings: Mapping[str, Any]) -> str:
    """Returns the text of a config file with the keys of the file `path`, changed by the overrides and then by the
    settings, which are values by dotted key."""
    tree, _ = _read(path)
    for override in (*overrides, *starmap(as_override, settings.items())):
        _apply_override(tree, override)
    return _dump_yaml(tree)


def config_bytes(path: Path) -> bytes:
    """Returns the bytes of a config file. If it extends another file, returns a file with the keys of both instead."""
    raw = path.read_bytes()
    tree, _ = _read_alone(path)
    return with_settings(path, [], {}).encode() if EXTENDS in tree else raw


def _read(path: Path, extending: tuple[Path, ...] = ()) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the settings of a file, merged with those of its base config, and where each dotted key was written.

    Keys that begin with `x-` hold anchors and are dropped. `extending` are the files that extend this file.
    """
    tree, lines = _read_alone(path)
    tree = {name: value for name, value in tree.items() if not str(name).startswith(_ANCHOR_PREFIX)}
    sources = {key: f"{path}:{line}" for key, line in lines.items() if not key.startswith(_ANCHOR_PREFIX)}
    base_name = tree.pop(EXTENDS, None)
    where = sources.pop(EXTENDS, str(path))
    if base_name is None:
        return tree, sources
    if not isinstance(base_name, str):
        raise ConfigError(f"{where}: {EXTENDS}: must be the path of a config file, not {shortened(repr(base_name))}")
    base = path.parent / Path(base_name).expanduser()
    if base.resolve() in (path.resolve(), *extending):
        raise ConfigError(
            f"{where}: {EXTENDS}: {printable(base_name)} extends this file in turn; remove one of the two extends keys"
        )
    try:
        base_tree, base_sources = _read(base, (path.resolve(), *extending))
    except ConfigError as error:
        raise ConfigError(f"{error} ({where} extends it)") from error
    # A key of the base config was written there, unless this file sets the key or replaces a section around it.
    leaves = [key for key in sources if _is_leaf(tree, key)]
    is_replaced = lambda key: any(key == leaf or key.startswith(f"{leaf}.") for leaf in leaves)
    inherited_sources = {key: line for key, line in base_sources.items() if not is_replaced(key)}
    return _merge(base_tree, tree), inherited_sources | sources


def _is_leaf(tree: dict[str, Any], dotted: str) -> bool:
    """Returns True if the value of this key is not a section. Sections are merged key by key."""
    value: Any = tree
    for name in dotted.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return not isinstance(value, dict)


def _merge(base: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of both trees. Common sections are merged; other values of `tree` replace those of `base`."""
    merged = dict(base)
    for name, value in tree.items():
        is_common_section = isinstance(base.get(name), dict) and isinstance(value, dict | None)
        merged[name] = _merge(base[name], value or {}) if is_common_section else value
    return merged


def _read_alone(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Returns the settings in a file, without those of its base config, and the line of each dotted key."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file{_configs_near(path)}") from None
    except IsADirectoryError:
        config_file = path / _RUN_CONFIG
        if config_file.is_file():
            advice = f"give the config in it: {config_file}"
        else:
            advice = f"give a file{_configs_near(config_file)}"
        raise ConfigError(f"{path}: is a folder, not a config file; {advice}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        node = yaml.compose(text, Loader=_Loader)
        lines: dict[str, int] = {}
        if node is not None:
            _collect_lines(path, node, "", lines)  # first, because it reports a recursive alias with its line
        tree = _parse_value(text, str(path)) or {}
    except _YAML_ERRORS as error:
        raise ConfigError(f"{path}{_yaml_problem(error, text)}") from error
    if not isinstance(tree, dict):
        kind = "string" if isinstance(tree, str) else type(tree).__name__
        raise ConfigError(f"{path}: a config is a mapping of sections such as 'train:', not a {kind}")
    return tree, lines


def _configs_near(path: Path) -> str:
    """Returns the end of a message, which lists the configs in configs/ and in the folder of a path."""
    folders = {folder.resolve(): folder for folder in (Path("configs"), path.parent)}
    listings = []
    for folder in reversed(folders.values()):
        files = folder.glob("*.y*ml") if folder.is_dir() else ()
        names = sorted(printable(file.name) for file in files if not file.name.startswith("."))
        listings += [f"; in {folder}: {listed(names)}"] if names else []
    return "".join(listings)


def _parse_value(text: str, where: str) -> Any:
    """Parses a YAML text.

    Raises `ConfigError`, which begins with `where`, if its aliases are recursive or expand to too many values, and one
    of `_YAML_ERRORS` if the text is invalid.
    """
    return _without_aliases(yaml.load(text, Loader=_Loader), where, count())  # noqa: S506 (a SafeLoader)


def _without_aliases(value: Any, where: str, counter: Iterator[int], containers: tuple[Any, ...] = ()) -> Any:
    """Returns a copy in which each alias is a copy of its own, so that setting a key changes only that key.

    `counter` counts the values copied so far; `containers` are the dicts and lists around this value.
    """
    if next(counter) > _MAX_VALUES or any(value is container for container in containers):
        raise ConfigError(
            f"{where}: its aliases contain themselves, or expand to over {_MAX_VALUES} values; write the values out"
        )
    if isinstance(value, dict):
        return {name: _without_aliases(entry, where, counter, (*containers, value)) for name, entry in value.items()}
    if isinstance(value, list):
        return [_without_aliases(entry, where, counter, (*containers, value)) for entry in value]
    return value


def _yaml_problem(error: Exception, text: str) -> str:
    """Returns the end of a message about a YAML error: its line, if that is known, and a description."""
    if isinstance(error, RecursionError):
        return ": not valid YAML: nested too deeply"
    problem = getattr(error, "problem", None) or next(iter(str(error).splitlines()), "")
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f": not valid YAML: {problem}"
    lines = text.splitlines()
    if mark.line < len(lines) and "\t" in lines[mark.line]:
        return f":{mark.line + 1}: this line contains a tab, and YAML requires spaces; replace it"
    return f":{mark.line + 1}: not valid YAML: {problem}"


def _collect_lines(
    path: Path, node: yaml.Node, prefix: str, lines: dict[str, int], parents: tuple[yaml.Node, ...] = ()
) -> None:
    """Adds to `lines` the line of each dotted key and of each list entry.

    Raises `ConfigError` for duplicate keys, recursive aliases, and aliases that expand to too many values.
    """
    if node in parents:
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: {prefix[:-1]} contains itself; write it out")
    if isinstance(node, yaml.SequenceNode):
        entries = [(str(number), entry, entry) for number, entry in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        entries = [(key.value, key, value) for key, value in node.value]
    else:
        return
    for name, line_node, value in entries:
        dotted = f"{prefix}{name}"
        line = line_node.start_mark.line + 1
        if dotted in lines:
            raise ConfigError(f"{path}:{line}: {dotted} is given twice (first on line {lines[dotted]}); keep one")
        lines[dotted] = line
        if len(lines) > _MAX_VALUES:
            raise ConfigError(
                f"{path}:{line}: the file's aliases expand to over {_MAX_VALUES} values; write the values out"
            )
        _collect_lines(path, value, f"{dotted}.", lines, (*parents, node))


def _invalid_value_message(value: str) -> str:
    """Describes why the value of an override is not valid YAML."""
    # Python decodes each byte of an argument that is not UTF-8 as a lone surrogate.
    surrogate = next((character for character in value if "\udc80" <= character <= "\udcff"), None)
    if surrogate is not None:
        return f"byte 0x{ord(surrogate) - 0xDC00:02x} of the value is not UTF-8; write the value in UTF-8"
    return "the value is not valid YAML; correct it, or put it in quotes"


def _apply_override(tree: dict[str, Any], override: str) -> str:
    """Sets one `key.sub=value` in the tree and returns the dotted key."""
    dotted, _, text = override.partition("=")
    where = f"override {shortened(repr(override))}"
    try:
        value = _parse_value(text, where)
        comment = _trailing_comment(text)
    except _DuplicateKeyError as error:
        raise ConfigError(f"{where}: {error}") from error
    except _YAML_ERRORS as error:
        raise ConfigError(f"{where}: {_invalid_value_message(text)}") from error
    if comment:
        raise ConfigError(
            f"{where}: {shortened(repr(comment))} is a comment in YAML; "
            f"for a text with # write {printable(as_typed(dotted, text))}"
        )
    if value is None and text.strip() == "~" and _is_path(dotted):
        raise ConfigError(f"command line: {dotted}: ~ is null in YAML; name a folder, such as ~/runs/a")
    # Create the sections around the key if they do not exist.
    *parents, last = dotted.split(".")
    section = tree
    for parent in parents:
        if section.get(parent) is None:
            section[parent] = {}
        section = section[parent]
        if not isinstance(section, dict):
            raise ConfigError(f"{where}: {parent} is a value, not a section; name a key of a section")
    section[last] = value
    return dotted


def _invalid_setting_message(overrides: list[str], number: int) -> str:
    """Returns the message for an argument that is not `key.sub=value`, with a correction if one can be guessed."""
    argument = overrides[number]
    previous = overrides[number - 1] if number else ""
    quoted = shortened(repr(argument))
    if argument.endswith((".yaml", ".yml")):
        return f"argument {quoted} is not a setting; pass a config file with --config {argument}"
    if colon := re.fullmatch(r"([a-z]\w*(?:\.\w+)+):(.*)", argument, re.DOTALL):
        return f"argument {quoted} is not a setting; write {colon[1]}={colon[2].strip() or 'VALUE'}"
    # Spaces around the = split a setting into two or three arguments, so join them again.
    follows_name = previous and (argument.startswith("=") or previous.endswith("="))
    first = number - 1 if follows_name else number
    pieces: list[str] = []
    for piece in overrides[first : first + 3]:
        if "=" in piece.strip("=") and pieces:
            break  # this argument is the next complete setting
        pieces.append(piece)
        if setting := re.fullmatch(r"\s*([^\s=]+)\s*=\s*([^=]+)", "".join(pieces)):
            text = shortened(repr(" ".join(pieces)))
            return f"argument {text}: a setting has no spaces around its =; write {setting[1]}={setting[2].strip()}"
    if re.fullmatch(r"[a-z]\w*(\.\w+)+", argument) and len(pieces) > 1:
        return f"argument {shortened(repr(' '.join(pieces[:2])))} is not a setting; write {argument}={pieces[1]}"
    return (
        f"argument {quoted} is not a setting; write key.sub=value, such as train.steps=100, in quotes if it "
        "contains spaces"
    )


# -- settings that are paths, in which `~` is expanded and shell variables are refused

HUGGING_FACE_PREFIX = "hf:"
"""Prefix of run.init_from that marks a Hugging Face folder."""


def _is_path(dotted: str) -> bool:
    """Returns True if a key takes a path or a list of paths."""
    return "path" in (field_of(dotted) or {})


MAX_PATH = 4096
"""Maximum length of a path, as in Linux."""


def _expand_homes(value: Any, dotted: str, source_of: Callable[[str], str]) -> Any:
    """Returns the value of a key, or nested settings, with `~` expanded in every path.

    `source_of` returns where a key was written. Values of the wrong type are unchanged, and the schema rejects them
    later. Raises `ConfigError` for shell variables, for a path that is too long, and for `~NAME` if there is no such
    user.
    """
    if isinstance(value, dict):
        return {
            name: _expand_homes(entry, f"{dotted}.{name}" if dotted else str(name), source_of)
            for name, entry in value.items()
        }
    if isinstance(value, list):
        return [_expand_homes(entry, dotted, source_of) for entry in value]
    # _is_path comes last, because its first call builds the schema.
    if not isinstance(value, str) or ({"~", "$"}.isdisjoint(value) and len(value) <= MAX_PATH) or not _is_path(dotted):
        return value
    where = f"{source_of(dotted)}: {dotted}: {shortened(repr(value))}"
    if len(value) > MAX_PATH:
        raise ConfigError(f"{where} has {len(value)} characters, but a path has at most {MAX_PATH}; shorten it")
    if "$" in value:
        raise ConfigError(
            f"{where} contains $, but settings do not expand variables; write the path out, or ~ for the home folder"
        )
    try:
        return expand_home(value)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def expand_home(path: str) -> str:
    """Returns the path with `~` or `~NAME` expanded. Raises `ValueError` if there is no such user."""
    prefix = next((prefix for prefix in (HUGGING_FACE_PREFIX, PEFT_PREFIX) if path.startswith(prefix)), "")
    expanded = os.path.expanduser(path.removeprefix(prefix))  # noqa: PTH111 (pathlib drops a slash at the end)
    if expanded.startswith("~"):
        user = expanded.partition("/")[0]
        raise ValueError(f"there is no user {user[1:]}; write the path out, or ./{user} for a folder of that name")
    return f"{prefix}{expanded}"
