"""AdamW with a learning-rate schedule, from optax."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmnt.config.schema import Config
from jaxmnt.config.schema import Optimizer as OptimizerConfig
from jaxmnt.parallel.sharding import is_axes


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


def build_optimizer(config: Config, axes: Any) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) without clipping, which the step does itself
    because it reports the norm. Norm scales are not decayed."""
    optimizer = config.optimizer
    schedule = build_lr_schedule(optimizer, config.train.steps)
    decayed = jax.tree.map(lambda names: "norm" not in names, axes, is_leaf=is_axes)
    adam = optax.scale_by_adam(b1=optimizer.beta1, b2=optimizer.beta2, eps=optimizer.epsilon)
    # Named, because the names are what a checkpoint knows the state by.
    transformation = optax.named_chain(
        ("adam", _stored_in(adam, jnp.dtype(optimizer.state_dtype))),
        ("weight_decay", optax.add_decayed_weights(optimizer.weight_decay, mask=decayed)),
        ("learning_rate", optax.scale_by_learning_rate(schedule)),
    )
    return transformation, schedule


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
