"""Optimizers that a config names by a dotted path: functions that return an `optax.GradientTransformation`."""

import inspect
from typing import Any

import jax
import optax

from jaxmnt.config.own_code import import_dotted
from jaxmnt.errors import ConfigError, printable, suggest, summary
from jaxmnt.parallel.sharding import parameter_name

_MAX_OTHER_ELEMENTS = 4096
"""Maximum size of an array of the state that belongs to no parameter. Each device has such an array as a whole."""


def load_transformation(path: str, arguments: dict[str, Any], key: str) -> optax.GradientTransformation:
    """Calls the function at a dotted path with these arguments, and returns its transformation.

    `key` is the config section that names the function. Raises `ConfigError` if it is no such function, does not take
    the arguments, or has a learning rate of its own.
    """
    name = printable(path)
    function = import_dotted(path, f"{key}.kind", "a function that returns an optax.GradientTransformation")
    if not callable(function):
        raise ConfigError(f"{key}.kind: {name} must be a function, but is a {type(function).__name__}")
    parameters = inspect.signature(function).parameters
    if "learning_rate" in parameters:
        scaled = "scale_by_" + path.rpartition(".")[2]
        module = path.rpartition(".")[0]
        advice = f"use {module}.{scaled}" if _has(module, scaled) else "name a function that returns a direction only"
        raise ConfigError(f"{key}.kind: {name} has a learning rate of its own; {advice}")
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for argument in arguments:
        if argument not in parameters and not takes_any:
            names = sorted(parameters)
            raise ConfigError(
                f"{key}.arguments.{argument}: {name} has {', '.join(names) or 'no arguments'}; "
                f"{suggest(argument, names)}"
            )
    try:
        transformation = function(**arguments)
    except Exception as error:  # user code, which may raise anything
        raise ConfigError(f"{key}.arguments: {name} cannot be called with them: {printable(summary(error))}") from error
    if not isinstance(transformation, optax.GradientTransformation):
        raise ConfigError(
            f"{key}.kind: {name} must return an optax.GradientTransformation, but returns a "
            f"{type(transformation).__name__}"
        )
    return transformation


def _has(module: str, name: str) -> bool:
    try:
        import_dotted(f"{module}.{name}", "", "")
    except ConfigError:
        return False
    return True


def check_transformation(transformation: optax.GradientTransformation, path: str, shapes: Any, key: str) -> None:
    """Raises `ConfigError` if the state of a transformation cannot be sharded like the parameters, or if its update
    needs more than gradients and parameters.

    `shapes` has the shape of each parameter that it updates. The arrays of the state that belong to a parameter must
    have its shape, and all others must be small.
    """
    name = printable(path)
    refuse = lambda why: ConfigError(f"{key}.kind: {name} {why}")

    def check_leaf(leaf: Any, parameter: Any, parameter_path: str) -> None:
        if leaf.shape != parameter.shape:
            raise refuse(
                f"keeps {list(leaf.shape)} for {parameter_path} {list(parameter.shape)}; a state must have its "
                "parameter's shape; choose another optimizer"
            )

    def check_other(leaf: Any) -> None:
        if leaf.size > _MAX_OTHER_ELEMENTS:
            raise refuse(f"keeps an array {list(leaf.shape)} that belongs to no parameter; choose another optimizer")

    names = jax.tree.map_with_path(lambda leaf_path, _: parameter_name(leaf_path), shapes)
    try:
        state = jax.eval_shape(transformation.init, shapes)
        optax.tree_map_params(transformation, check_leaf, state, shapes, names, transform_non_params=check_other)
        updates, _ = jax.eval_shape(transformation.update, shapes, state, shapes)
    except ConfigError:
        raise
    except Exception as error:  # user code, which may raise anything
        raise refuse(
            f"does not compute an update from gradients, its state and parameters: {printable(summary(error))}; choose "
            "another optimizer"
        ) from error
    for leaf, shape in zip(jax.tree.leaves(updates), jax.tree.leaves(shapes), strict=True):
        if leaf.shape != shape.shape:
            raise refuse(f"returns an update {list(leaf.shape)} for a parameter {list(shape.shape)}; choose another")
