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
from jaxmnt.training.trained import matching


def build_lr_schedule(optimizer: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate of the update number i, from 0: linear warm-up, then `optimizer.schedule`.

    Update i of the warm-up has rate peak · (i + 1) / (warmup_steps + 1), so that no update is wasted on 0.
    """
    peak, warmup = optimizer.learning_rate, optimizer.warmup_steps
    main = _main_schedule(optimizer, steps - warmup)
    if warmup == 0:
        return main
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([rise, main], [warmup])


def _main_schedule(optimizer: OptimizerConfig, steps: int) -> optax.Schedule:
    peak, final = optimizer.learning_rate, optimizer.final_fraction
    if optimizer.schedule == "constant":
        return optax.constant_schedule(peak)
    if optimizer.schedule == "cosine":
        return optax.cosine_decay_schedule(peak, steps, alpha=final)
    # Warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395), with a linear decay.
    decay = max(1, min(steps, round(steps * optimizer.decay_fraction)))
    stable = optax.constant_schedule(peak)
    return optax.join_schedules([stable, optax.linear_schedule(peak, peak * final, decay)], [steps - decay])


def build_optimizer(
    config: Config, axes: Any, stacks: Collection[str]
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The optimizer of the parameters in a tree of logical axes, and its learning rate. `stacks` are the names of the
    groups of layers.

    AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) without clipping, which the step does itself because it
    reports the norm. Norm scales and biases are not decayed. Where `optimizer.rules` say so, Muon (Jordan et al. 2024,
    kellerjordan.github.io/posts/muon) with AdamW's decay: its updates are matrices whose singular values are near 1, to
    which `learning_rate_factor` fits the rate.
    """
    optimizer = config.optimizer
    schedule = build_lr_schedule(optimizer, config.train.steps)
    rules = optimizer.rules
    chosen = matching([rule.pattern for rule in rules], axes, "optimizer.rules")

    def of_rule(default: Callable[[Axes], Any], setting: str) -> Any:
        """A tree with what a setting is for each parameter."""

        def one(path: Any, names: Axes) -> Any:
            rule = chosen.get(parameter_name(path))
            value = None if rule is None else getattr(rules[rule], setting)
            return default(names) if value is None else value

        return jax.tree.map_with_path(one, axes, is_leaf=is_axes)

    kinds = of_rule(lambda _: "adamw", "kind")
    decays = of_rule(lambda names: 0.0 if SCALES_AND_BIASES & set(names) else optimizer.weight_decay, "weight_decay")
    factors = of_rule(lambda _: 1.0, "learning_rate_factor")
    used = set(jax.tree.leaves(kinds))
    # Named, because the names are what a checkpoint knows the state by.
    chain = [("weight_decay", _decayed(decays)), ("learning_rate", optax.scale_by_learning_rate(schedule))]
    if any(factor != 1 for factor in jax.tree.leaves(factors)):
        chain.append(("factor", optax.stateless(lambda updates, _: jax.tree.map(jnp.multiply, updates, factors))))
    adam = _stored_in(
        optax.scale_by_adam(b1=optimizer.beta1, b2=optimizer.beta2, eps=optimizer.epsilon),
        jnp.dtype(optimizer.state_dtype),
    )
    if used <= {"adamw"}:
        return optax.named_chain(("adam", adam), *chain), schedule
    muon = _muon(axes, kinds, stacks, jnp.dtype(optimizer.state_dtype))
    is_kind = lambda kind: jax.tree.map(lambda one: one == kind, kinds)
    parts = [("adam", optax.masked(adam, is_kind("adamw"))), ("muon", optax.masked(muon, is_kind("muon")))]
    return optax.named_chain(*parts, *chain), schedule


def _decayed(decays: Any) -> optax.GradientTransformation:
    """Adds each parameter times its decay."""
    one = lambda update, parameter, decay: update + decay * parameter if decay else update
    return optax.stateless(lambda updates, parameters: jax.tree.map(one, updates, parameters, decays))


def _muon(axes: Any, kinds: Any, stacks: Collection[str], dtype: jnp.dtype) -> optax.GradientTransformation:
    """Muon over matrices from the residual stream, or to it: each layer's by itself. Its moments are in `dtype`.

    Raises `ConfigError` for a parameter that is no matrix.
    """

    def one(path: Any, names: Axes, kind: str) -> Any:
        if kind != "muon":
            return optax.MaskedNode()  # as what is masked out of the parameters
        inside = [index for index, axis in enumerate(names) if axis in GATHERED]
        outside = [index for index in range(len(names)) if index not in inside]
        # The first axis is that of a group's stack. Of a parameter outside of layers it may have the parameter's name.
        outside = outside[1:] if path[0].key in stacks else outside
        if not (len(inside) == 1 and outside):
            raise ConfigError(
                f"optimizer.rules: {parameter_name(path)} must be a matrix for muon; give it another pattern, or adamw"
            )
        reduced, output = (inside, outside) if inside[0] < max(outside) else (outside, inside)
        return optax.contrib.MuonDimensionNumbers(tuple(reduced), tuple(output))

    dimensions = jax.tree.map_with_path(one, axes, kinds, is_leaf=is_axes)
    return optax.contrib.scale_by_muon(mu_dtype=dtype, weight_dimension_numbers=dimensions)


def _stored_in(transformation: optax.GradientTransformation, dtype: jnp.dtype) -> optax.GradientTransformation:
    """The transformation computed in float32 with its floating-point state kept in `dtype` between updates."""

    def cast(tree: Any, to: jnp.dtype) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(to) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)

    def init(params: Any) -> Any:
        return cast(transformation.init(params), dtype)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = transformation.update(updates, cast(state, jnp.dtype("float32")), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(init, update)
