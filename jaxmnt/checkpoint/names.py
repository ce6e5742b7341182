"""Names for the arrays of a state: PART/KEY/KEY…, unique, the same whatever containers hold them."""

import re
from typing import Any

import jax

Tree = dict[str, Any]

_KEY = re.compile(r"[A-Za-z0-9_-]+")


def named(state: Tree) -> dict[str, Any]:
    """The leaves of a state by name, sorted."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    found = {_name(path): leaf for path, leaf in leaves}
    assert len(found) == len(leaves), "two arrays of the state have the same name"
    return dict(sorted(found.items()))


def like(state: Tree, arrays: dict[str, Any]) -> Tree:
    """The arrays, by name, in the containers of `state`."""
    tree: Tree = jax.tree_util.tree_map_with_path(lambda path, _: arrays[_name(path)], state)
    return tree


def nested(arrays: dict[str, Any]) -> Tree:
    """The arrays as dicts in dicts."""
    tree: Tree = {}
    for name, array in arrays.items():
        *parents, last = name.split("/")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        assert last not in place, f"{name} is an array and a group of arrays"
        place[last] = array
    return tree


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(map(_key, path))


def _key(entry: Any) -> str:
    """Orbax joins keys by dots and would store "a.b" and a→b in one place, so keys may not hold any."""
    key = jax.tree_util.keystr((entry,), simple=True)
    assert _KEY.fullmatch(key), f"{key!r} cannot be part of an array's name"
    return key
