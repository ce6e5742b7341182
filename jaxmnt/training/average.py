"""An exponential moving average of the parameters that train (`optimizer.average`).

It is a part of the state, `average`, in float32, sharded like the parameters. In bfloat16 it would stand still, because
1 - decay is below half a unit in the last place.
"""

import jax
import jax.numpy as jnp
from jax import Array

from jaxmnt.models.contract import Params
from jaxmnt.training.spec import State, StepSpec
from jaxmnt.training.state import model_state
from jaxmnt.training.trained import replace_trained


def update_average(spec: StepSpec, average: Params, params: Params, step: Array) -> Params:
    """Returns the average after a step, from the parameters that train. Until `optimizer.average.from_step` it is equal
    to them. `step` counts from 1."""
    settings = spec.config.optimizer.average
    assert settings is not None
    kept_share = jnp.where(step > settings.from_step, settings.decay, 0.0)
    mix = lambda old, new: kept_share * old + (1 - kept_share) * new.astype(jnp.float32)
    return jax.tree.map(mix, average, params)


def averaged_model(spec: StepSpec, state: State) -> State:
    """Returns the model's parts of the state with the averaged parameters, in the dtype of the parameters."""
    average = jax.tree.map(lambda leaf: leaf.astype(spec.params_dtype), state["average"])
    return model_state(state) | {"params": replace_trained(state["params"], average, spec.trained_axes)}
