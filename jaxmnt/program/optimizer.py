"""AdamW with a learning-rate schedule, from optax."""

from typing import Any

import jax
import optax

from jaxmnt.config.schema import Config
from jaxmnt.config.schema import Optimizer as OptimizerConfig
from jaxmnt.placement.rules import is_axes


def build_schedule(optimizer: OptimizerConfig, steps: int) -> optax.Schedule:
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
    schedule = build_schedule(optimizer, config.train.steps)
    decayed = jax.tree.map(lambda names: "norm" not in names, axes, is_leaf=is_axes)
    transformation = optax.chain(
        optax.scale_by_adam(b1=optimizer.beta1, b2=optimizer.beta2, eps=optimizer.epsilon),
        optax.add_decayed_weights(optimizer.weight_decay, mask=decayed),
        optax.scale_by_learning_rate(schedule),
    )
    return transformation, schedule
