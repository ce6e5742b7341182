"""The optimizer: a learning-rate schedule, the transformations of `optimizer.kind` and its rules, decay, and rate.

Optax computes all but Muon. The transformations turn a gradient into a direction; learning rate, weight decay and
clipping are the same for all of them.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmnt.config.schema import Config
from jaxmnt.config.schema import Optimizer as OptimizerConfig
from jaxmnt.errors import ConfigError
from jaxmnt.parallel.sharding import SCALES_AND_BIASES, Axes, Placement, is_axes, parameter_name
from jaxmnt.training.muon import MatrixForm, matrix_form, scale_by_muon
from jaxmnt.training.own_optimizer import check_transformation, load_transformation
from jaxmnt.training.trained import match_parameters


def build_lr_schedule(optimizer: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the update number i, which starts at 0. A linear warm-up comes first,
    and then `optimizer.schedule`.

    Update i of the warm-up has the rate peak · (i + 1) / (warmup_steps + 1), so that no update has rate 0.
    """
    peak, warmup_steps = optimizer.learning_rate, optimizer.warmup_steps
    main_schedule = _main_schedule(optimizer, steps - warmup_steps)
    if warmup_steps == 0:
        return main_schedule
    warmup = optax.linear_schedule(peak / (warmup_steps + 1), peak, warmup_steps)
    return optax.join_schedules([warmup, main_schedule], [warmup_steps])


def _main_schedule(optimizer: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns the schedule after the warm-up."""
    peak, final_fraction = optimizer.learning_rate, optimizer.final_fraction
    if optimizer.schedule == "constant":
        return optax.constant_schedule(peak)
    if optimizer.schedule == "cosine":
        return optax.cosine_decay_schedule(peak, steps, alpha=final_fraction)
    # Warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395), with a linear decay.
    decay_steps = max(1, min(steps, round(steps * optimizer.decay_fraction)))
    constant = optax.constant_schedule(peak)
    decay = optax.linear_schedule(peak, peak * final_fraction, decay_steps)
    return optax.join_schedules([constant, decay], [steps - decay_steps])


@dataclass(frozen=True)
class Kind:
    """A transformation of gradients, as `optimizer.kind` or a rule sets it."""

    name: str
    """adamw, muon, or the dotted path of a function that returns an `optax.GradientTransformation`."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """The arguments of the function."""
    key: str = field(default="optimizer", compare=False)
    """The config section that sets it, for messages. Parameters with equal kinds share a transformation, whichever
    section sets it."""


ADAMW, MUON = Kind("adamw"), Kind("muon")


def _kind_of(name: str, arguments: Mapping[str, Any], key: str = "optimizer") -> Kind:
    """Returns a kind with these arguments, of which lists become tuples, because kinds are keys."""
    fixed = {name: tuple(setting) if isinstance(setting, list) else setting for name, setting in arguments.items()}
    return Kind(name, tuple(sorted(fixed.items())), key)


def parameter_kinds(config: Config, axes: Any, stacks: Collection[str]) -> dict[str, Kind]:
    """Returns the kind of optimizer of each parameter in a tree of logical axes, by name. `stacks` are the names of the
    groups of layers.

    With `optimizer.kind: muon`, matrices of layers use Muon, and all other parameters AdamW. Raises `ConfigError` for a
    rule that sets Muon for a parameter without matrices.
    """
    optimizer = config.optimizer
    rules = _rules_by_parameter(config, axes)
    default = _kind_of(optimizer.kind, optimizer.arguments)
    kinds = {}
    for path, names in jax.tree.leaves_with_path(axes, is_leaf=is_axes):
        name, is_stacked = parameter_name(path), path[0].key in stacks
        has_matrices = matrix_form(names, stacked=is_stacked) is not None
        index = rules.get(name)
        rule = None if index is None else optimizer.rules[index]
        if rule is not None and rule.kind is not None:
            kind = _kind_of(rule.kind, rule.arguments, f"optimizer.rules.{index}")
            if kind.name == "muon" and not has_matrices:
                raise ConfigError(
                    f"optimizer.rules: {name} must be a matrix for muon; change the pattern, or set adamw"
                )
        else:
            kind = default
            if kind.name == "muon" and not (has_matrices and is_stacked):
                kind = ADAMW
        kinds[name] = kind
    return kinds


def muon_forms(config: Config, axes: Any, stacks: Collection[str]) -> dict[str, MatrixForm]:
    """Returns the matrices in each parameter that Muon updates, by name."""
    kinds = parameter_kinds(config, axes, stacks)
    forms = {
        parameter_name(path): matrix_form(names, stacked=path[0].key in stacks)
        for path, names in jax.tree.leaves_with_path(axes, is_leaf=is_axes)
        if kinds[parameter_name(path)] == MUON
    }
    return {name: form for name, form in forms.items() if form is not None}


def build_optimizer(
    config: Config, axes: Any, shapes: Any, stacks: Collection[str], placement: Placement, dtype: jnp.dtype
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Returns the optimizer of the parameters in a tree of logical axes, and its learning-rate schedule.

    `shapes` has the shapes of the parameters in the checkpoint layout, `stacks` are the names of the groups of layers,
    and `dtype` is the compute dtype, in which Muon multiplies. The default is AdamW (Loshchilov and Hutter 2019,
    arXiv:1711.05101). The step itself clips, because it reports the norm. Norm scales and biases are not decayed. A
    `learning_rate_factor` does not change a parameter's decay.
    """
    optimizer = config.optimizer
    schedule = build_lr_schedule(optimizer, config.train.steps)
    kinds = parameter_kinds(config, axes, stacks)
    setting = _SettingsOfRules(config, axes)
    decay_of = lambda names: 0.0 if SCALES_AND_BIASES & set(names) else optimizer.weight_decay
    decays, factors = setting.tree("weight_decay", decay_of), setting.tree("learning_rate_factor", lambda _: 1.0)
    # The chain is named, because checkpoints store the optimizer state under these names.
    chain = []
    if any(factor != 1 for factor in jax.tree.leaves(factors)):
        chain.append(("factor", optax.stateless(lambda updates, _: jax.tree.map(jnp.multiply, updates, factors))))
    chain += [("weight_decay", _add_decay(decays)), ("learning_rate", optax.scale_by_learning_rate(schedule))]

    def transformation_of(kind: Kind) -> optax.GradientTransformation:
        if kind.name == "adamw":
            adam = optax.scale_by_adam(b1=optimizer.beta1, b2=optimizer.beta2, eps=optimizer.epsilon)
            return _with_state_dtype(adam, jnp.dtype(optimizer.state_dtype))
        if kind.name == "muon":
            muon = scale_by_muon(optimizer.muon, placement, axes, shapes, stacks, dtype)
            return _with_state_dtype(muon, jnp.dtype(optimizer.state_dtype))
        transformation = load_transformation(kind.name, dict(kind.arguments), kind.key)
        own_shapes = jax.tree.map_with_path(
            lambda path, shape: shape if kinds[parameter_name(path)] == kind else optax.MaskedNode(), shapes
        )
        check_transformation(transformation, kind.name, own_shapes, kind.key)
        return _with_state_dtype(transformation, jnp.dtype(optimizer.state_dtype))

    used_kinds = list(dict.fromkeys(kinds.values()))
    if set(used_kinds) <= {ADAMW}:
        return optax.named_chain(("adam", transformation_of(ADAMW)), *chain), schedule
    parts = []
    for kind, label in _labels(used_kinds).items():
        mask = jax.tree.map_with_path(
            lambda path, _, kind=kind: kinds[parameter_name(path)] == kind, axes, is_leaf=is_axes
        )
        parts.append((label, optax.masked(transformation_of(kind), mask)))
    return optax.named_chain(*parts, *chain), schedule


def _labels(kinds: Collection[Kind]) -> dict[Kind, str]:
    """Returns the name of the state of each kind in checkpoints."""
    labels: dict[Kind, str] = {}
    for kind in sorted(kinds, key=lambda kind: (kind.key, kind.name)):
        label = {"adamw": "adam"}.get(kind.name, kind.name.rpartition(".")[2])
        repeats = sum(used.split("-")[0] == label for used in labels.values())
        labels[kind] = f"{label}-{repeats + 1}" if repeats else label
    return labels


class _SettingsOfRules:
    """The settings of `optimizer.rules` as trees of the parameters."""

    def __init__(self, config: Config, axes: Any):
        self._config, self._axes = config, axes
        self._rules = _rules_by_parameter(config, axes)

    def tree(self, setting: str, default: Callable[[Axes], Any]) -> Any:
        """Returns a tree with the value of a setting for each parameter. `default` returns the value for a parameter
        with these logical axes that no rule sets."""

        def resolve(path: Any, names: Axes) -> Any:
            index = self._rules.get(parameter_name(path))
            value = None if index is None else getattr(self._config.optimizer.rules[index], setting)
            return default(names) if value is None else value

        return jax.tree.map_with_path(resolve, self._axes, is_leaf=is_axes)


def _rules_by_parameter(config: Config, axes: Any) -> dict[str, int]:
    """Returns the index of the rule that applies to each parameter, by the parameter's name."""
    return match_parameters([rule.pattern for rule in config.optimizer.rules], axes, "optimizer.rules")


def _add_decay(decays: Any) -> optax.GradientTransformation:
    """Returns a transformation that adds each parameter, times its decay, to the parameter's update."""
    add_decay = lambda update, parameter, decay: update + decay * parameter if decay else update
    return optax.stateless(lambda updates, parameters: jax.tree.map(add_decay, updates, parameters, decays))


def _with_state_dtype(transformation: optax.GradientTransformation, dtype: jnp.dtype) -> optax.GradientTransformation:
    """Returns the transformation, changed so that it computes in float32 and stores its floating-point state in `dtype`
    between updates."""

    def cast(tree: Any, new_dtype: jnp.dtype) -> Any:
        return jax.tree.map(
            lambda leaf: leaf.astype(new_dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree
        )

    def init(params: Any) -> Any:
        return cast(transformation.init(params), dtype)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = transformation.update(updates, cast(state, jnp.dtype("float32")), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(init, update)
