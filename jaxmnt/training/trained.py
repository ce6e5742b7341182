"""Which parameters train. For the others a tree of gradients or of optimizer state has None instead of a leaf."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax

from jaxmnt.errors import ConfigError
from jaxmnt.parallel.sharding import is_axes, parameter_name


def names_of(axes: Any) -> dict[str, Any]:
    """The axes of each parameter by its name, such as layers.attention.query."""
    leaves = jax.tree.leaves_with_path(axes, is_leaf=is_axes)
    return {parameter_name(path): names for path, names in leaves}


def matching(patterns: Sequence[str], axes: Any, key: str) -> dict[str, int]:
    """For each parameter that a pattern matches the index of the first one. `*` in a pattern matches any text.

    Raises `ConfigError` for a pattern that matches none.
    """
    names, found = names_of(axes), dict[str, int]()
    for index, pattern in enumerate(patterns):
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise ConfigError(f"{key}: {pattern!r} matches no parameter; the parameters are {', '.join(sorted(names))}")
        for name in matched:
            found.setdefault(name, index)
    return found


def trained_axes(axes: Any, frozen: Sequence[str]) -> Any:
    """The tree of axes without the parameters that are frozen."""
    stay = matching(frozen, axes, "optimizer.frozen")
    keep = lambda path, one: None if parameter_name(path) in stay else one
    return jax.tree.map_with_path(keep, axes, is_leaf=is_axes)


def select(tree: Any, axes: Any) -> Any:
    """The leaves of a tree of parameters that train."""
    return jax.tree.map(lambda one, leaf: None if one is None else leaf, axes, tree, is_leaf=_axes_or_none)


def replaced(tree: Any, new: Any, axes: Any) -> Any:
    """A tree of parameters with new ones for those that train."""
    pick = lambda one, old, new: old if one is None else new
    return jax.tree.map(pick, axes, tree, new, is_leaf=_axes_or_none)


def _axes_or_none(node: Any) -> bool:
    return node is None or is_axes(node)
