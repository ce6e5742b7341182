"""Selection of the parameters that train. Trees of gradients and of optimizer state have None for frozen parameters."""

from collections.abc import Collection, Sequence
from typing import Any

import jax

from jaxmnt.models.contract import Definition
from jaxmnt.parallel.sharding import is_axes, match_names, parameter_name


def axes_by_name(axes: Any) -> dict[str, Any]:
    """Maps the name of each parameter, such as layers.attention.query, to its logical axes."""
    paths_and_axes = jax.tree.leaves_with_path(axes, is_leaf=is_axes)
    return {parameter_name(path): names for path, names in paths_and_axes}


def match_parameters(patterns: Sequence[str], axes: Any, key: str) -> dict[str, int]:
    """Maps the name of each parameter that a pattern matches to the index of the first such pattern. `*` in a pattern
    matches any text. `key` is the setting that error messages name.

    Raises `ConfigError` for a pattern that matches no parameter.
    """
    names, first_match = axes_by_name(axes), dict[str, int]()
    for index, pattern in enumerate(patterns):
        for name in match_names(pattern, names, key):
            first_match.setdefault(name, index)
    return first_match


def trained_axes(definition: Definition, frozen: Sequence[str]) -> Any:
    """Returns the tree of logical axes, with None for frozen parameters: those that the patterns `frozen` match, or in
    a model with adapters, all but the adapters and `lora.also_train`."""
    axes, adapters = definition.axes, definition.adapters
    frozen_names: Collection[str] = match_parameters(frozen, axes, "optimizer.frozen")
    if adapters is not None:
        frozen_names = {name for name in axes_by_name(axes) if not adapters.trains(name)}
    drop_frozen = lambda path, names: None if parameter_name(path) in frozen_names else names
    return jax.tree.map_with_path(drop_frozen, axes, is_leaf=is_axes)


def select_trained(tree: Any, axes: Any) -> Any:
    """Returns the tree with None for frozen parameters, which are those with None in the tree of axes."""
    return jax.tree.map(lambda names, leaf: None if names is None else leaf, axes, tree, is_leaf=_axes_or_none)


def select_frozen(tree: Any, axes: Any) -> Any:
    """Returns the tree with None for parameters that train, which are those with axes in the tree of axes."""
    return jax.tree.map(lambda names, leaf: leaf if names is None else None, axes, tree, is_leaf=_axes_or_none)


def fill_in(tree: Any, missing: Any) -> Any:
    """Returns the tree with the leaves of `missing` where the tree has None."""
    fill = lambda leaf, new: new if leaf is None else leaf
    return jax.tree.map(fill, tree, missing, is_leaf=lambda node: node is None)


def replace_trained(tree: Any, new: Any, axes: Any) -> Any:
    """Returns a tree of parameters with values from `new` for those that train."""
    pick = lambda names, old, new: old if names is None else new
    return jax.tree.map(pick, axes, tree, new, is_leaf=_axes_or_none)


def _axes_or_none(node: Any) -> bool:
    return node is None or is_axes(node)
