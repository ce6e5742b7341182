"""Optimizers with a learning-rate schedule, from optax."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jaxmnt.config.schema import Config
from jaxmnt.config.schema import Optimizer as OptimizerConfig
from jaxmnt.errors import ConfigError
from jaxmnt.parallel.sharding import GATHERED, SCALES_AND_BIASES, Axes, is_axes, parameter_name
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


def build_optimizer(
    config: Config, axes: Any, stacks: Collection[str]
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Returns the optimizer of the parameters in a tree of logical axes, and its learning-rate schedule. `stacks` are
    the names of the groups of layers.

    The optimizer is AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) without clipping. The step itself clips,
    because it reports the norm. Norm scales and biases are not decayed. Parameters for which `optimizer.rules` set muon
    use Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) with AdamW's decay. The singular values of Muon's
    updates are near 1, and `learning_rate_factor` scales the learning rate accordingly.
    """
    optimizer = config.optimizer
    schedule = build_lr_schedule(optimizer, config.train.steps)
    rules = optimizer.rules
    rule_of_parameter = match_parameters([rule.pattern for rule in rules], axes, "optimizer.rules")

    def resolve(default: Callable[[Axes], Any], setting: str) -> Any:
        """Returns a tree with the value of a setting for each parameter. `default` returns the value for a parameter
        with these logical axes that no rule sets."""

        def resolve_parameter(path: Any, names: Axes) -> Any:
            rule = rule_of_parameter.get(parameter_name(path))
            value = None if rule is None else getattr(rules[rule], setting)
            return default(names) if value is None else value

        return jax.tree.map_with_path(resolve_parameter, axes, is_leaf=is_axes)

    kinds = resolve(lambda _: "adamw", "kind")
    decays = resolve(lambda names: 0.0 if SCALES_AND_BIASES & set(names) else optimizer.weight_decay, "weight_decay")
    factors = resolve(lambda _: 1.0, "learning_rate_factor")
    used_kinds = set(jax.tree.leaves(kinds))
    # The chain is named, because checkpoints store the optimizer state under these names.
    chain = [("weight_decay", _add_decay(decays)), ("learning_rate", optax.scale_by_learning_rate(schedule))]
    if any(factor != 1 for factor in jax.tree.leaves(factors)):
        chain.append(("factor", optax.stateless(lambda updates, _: jax.tree.map(jnp.multiply, updates, factors))))
    adam = _with_state_dtype(
        optax.scale_by_adam(b1=optimizer.beta1, b2=optimizer.beta2, eps=optimizer.epsilon),
        jnp.dtype(optimizer.state_dtype),
    )
    if used_kinds <= {"adamw"}:
        return optax.named_chain(("adam", adam), *chain), schedule
    muon = _muon(axes, kinds, stacks, jnp.dtype(optimizer.state_dtype))
    mask_of = lambda kind: jax.tree.map(lambda parameter_kind: parameter_kind == kind, kinds)
    parts = [("adam", optax.masked(adam, mask_of("adamw"))), ("muon", optax.masked(muon, mask_of("muon")))]
    return optax.named_chain(*parts, *chain), schedule


def _add_decay(decays: Any) -> optax.GradientTransformation:
    """Returns a transformation that adds each parameter, times its decay, to the parameter's update."""
    add_decay = lambda update, parameter, decay: update + decay * parameter if decay else update
    return optax.stateless(lambda updates, parameters: jax.tree.map(add_decay, updates, parameters, decays))


def _muon(axes: Any, kinds: Any, stacks: Collection[str], dtype: jnp.dtype) -> optax.GradientTransformation:
    """Returns Muon for matrices that read from or write to the residual stream, applied to each layer separately. Its
    moments are stored in `dtype`.

    Raises `ConfigError` for a parameter that is not a matrix.
    """

    def dimension_numbers(path: Any, names: Axes, kind: str) -> Any:
        if kind != "muon":
            return optax.MaskedNode()  # optax masks these parameters out in the same way
        residual_dimensions = [index for index, axis in enumerate(names) if axis in GATHERED]
        other_dimensions = [index for index in range(len(names)) if index not in residual_dimensions]
        # A layer's first axis is the group's stack. Outside of layers the first axis may have the parameter's own name.
        if path[0].key in stacks:
            other_dimensions = other_dimensions[1:]
        # Each expert has a matrix of its own.
        other_dimensions = [index for index in other_dimensions if names[index] != "experts"]
        if not (len(residual_dimensions) == 1 and other_dimensions):
            raise ConfigError(
                f"optimizer.rules: {parameter_name(path)} must be a matrix for muon; change the pattern, or set adamw"
            )
        reads_residual = residual_dimensions[0] < max(other_dimensions)
        reduction, output = (
            (residual_dimensions, other_dimensions) if reads_residual else (other_dimensions, residual_dimensions)
        )
        return optax.contrib.MuonDimensionNumbers(tuple(reduction), tuple(output))

    dimensions = jax.tree.map_with_path(dimension_numbers, axes, kinds, is_leaf=is_axes)
    return optax.contrib.scale_by_muon(mu_dtype=dtype, weight_dimension_numbers=dimensions)


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
