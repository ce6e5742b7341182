"""Unique names for the arrays of a state, PART/KEY/KEY…, independent of the containers that hold them."""

import re
from typing import Any

import jax

Tree = dict[str, Any]

_KEY = re.compile(r"[A-Za-z0-9_-]+")


def arrays_by_name(state: Tree) -> dict[str, Any]:
    """Returns the leaves of a state by their names, in the order of these."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    by_name = {_name(path): leaf for path, leaf in leaves}
    assert len(by_name) == len(leaves), "two arrays of the state have the same name"
    return dict(sorted(by_name.items()))


def unflatten_like(state: Tree, arrays: dict[str, Any]) -> Tree:
    """Returns a tree with the structure of `state`, with the array that `arrays` has under the name of each leaf."""
    tree: Tree = jax.tree_util.tree_map_with_path(lambda path, _: arrays[_name(path)], state)
    return tree


def nested_arrays(arrays: dict[str, Any]) -> Tree:
    """Returns the arrays in nested dicts, with one level for each part of their names."""
    tree: Tree = {}
    for name, array in arrays.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        assert last not in node, f"{name} is both an array and a group of arrays"
        node[last] = array
    return tree


def stored_name(parameter: str) -> str:
    """Returns the name in a checkpoint of a parameter, such as params/norm/scale for norm.scale."""
    return f"params/{parameter.replace('.', '/')}"


def parameter_of(stored: str) -> str:
    """Returns the parameter whose name in a checkpoint is given."""
    return stored.removeprefix("params/").replace("/", ".")


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(map(_key_text, path))


def _key_text(entry: Any) -> str:
    """Returns a key as text. It has no dots, because Orbax joins keys by dots and would store "a.b" and a→b alike."""
    key = jax.tree_util.keystr((entry,), simple=True)
    assert _KEY.fullmatch(key), f"{key!r} cannot be part of an array's name"
    return key
