"""A matrix product that each device computes alone. Only this shows which device is slow, because in a step all others
wait for it.

Legend: W width of a matrix.
"""

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

_REPEATS = 4
"""Number of times that the product is timed. The fastest time counts."""


class TimedProduct:
    """Times the product of two square matrices on each of these devices of this process, one device after the other.

    Nothing else should run on the devices in the meantime.
    """

    def __init__(self, devices: Sequence[jax.Device], width: int):
        self.flops = 2 * width**3
        dtype = jnp.float32 if devices[0].platform == "cpu" else jnp.bfloat16
        self._product = jax.jit(lambda x_WW: x_WW @ x_WW)
        self._matrices = [jax.device_put(np.ones((width, width), dtype), device) for device in devices]
        for x_WW in self._matrices:
            self._product(x_WW).block_until_ready()  # compiles it for each device

    def __call__(self) -> list[float]:
        """Returns the seconds that each device took."""
        return [min(self._time(x_WW) for _ in range(_REPEATS)) for x_WW in self._matrices]

    def _time(self, x_WW: Array) -> float:
        started = time.perf_counter()
        self._product(x_WW).block_until_ready()
        return time.perf_counter() - started
