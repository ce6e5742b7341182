"""Manifests as text that every reader takes for the same.

In YAML 1.1 `y`, `1e3` and `08` are a boolean, a number and perhaps a number, in YAML 1.2 not; so no text is left plain.
"""

import json
import re
from typing import Any

import yaml

Manifest = dict[str, Any]

_FIELD = re.compile(r"[a-z][A-Za-z]{2,}")
"""Names that are left plain, unless they are a word of YAML."""


class _Dumper(yaml.SafeDumper):
    """Puts all text into quotes, but for names of fields; text of several lines is shown line by line."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        node: yaml.MappingNode = super().represent_mapping(tag, mapping, flow_style)
        for name, _ in node.value:
            if _FIELD.fullmatch(name.value):
                name.style = None
        return node

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else '"')


_Dumper.add_representer(str, _text)


def to_yaml(*manifests: Manifest) -> str:
    """For people, and for `kubectl apply -f -`."""
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=float("inf"))


def to_json(manifest: Manifest) -> str:
    """For kubectl."""
    return json.dumps(manifest, allow_nan=False)
