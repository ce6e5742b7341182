"""Products of projections in float8, with the scale of each tensor as it is now.

Activations and weights are E4M3, gradients E5M2 (Micikevicius et al. 2022, arXiv:2209.05433). A tensor is multiplied by
the power of two that brings its largest number just within the format. So scaling is exact, and what a number is
rounded to depends on the scale only where it is tiny: the same numbers on any mesh, though each device scales what it
has. The product of two float8 matrices is asked for as such, since XLA finds only that form reliably; where a device
has none, the same numbers are multiplied in a wider dtype.

Shapes: T tokens, D inputs, F outputs.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2

_MULTIPLE = 16
"""Of all dimensions of a product, which cuBLAS asks for."""


class Float8(NamedTuple):
    """How products are made."""

    least: int
    """Those with fewer inputs or outputs stay in the compute dtype: quantising takes longer than it saves."""
    native: bool
    """Whether the device multiplies float8."""


_chosen: ContextVar[Float8 | None] = ContextVar("float8", default=None)
_noted: ContextVar[list["Noted"] | None] = ContextVar("noted", default=None)


@contextlib.contextmanager
def float8_products(chosen: Float8 | None) -> Iterator[None]:
    """Inside, `project` takes float8 where its shapes are fit for it. Routers, heads and norms do not use it."""
    token = _chosen.set(chosen)
    try:
        yield
    finally:
        _chosen.reset(token)


class Noted(NamedTuple):
    """A product of `project`."""

    weight: Array
    """As it is given."""
    in_float8: bool


@contextlib.contextmanager
def noting_products() -> Iterator[list[Noted]]:
    """Yields a list of the products that are made inside."""
    noted: list[Noted] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def note_product(weight: Array, *, in_float8: bool) -> None:
    """Adds a product to the list that is kept at the moment, if there is one."""
    noted = _noted.get()
    if noted is not None:
        noted.append(Noted(weight, in_float8))


def is_fit(tokens: int, inputs: int, outputs: int, least: int) -> bool:
    """Whether a product of [tokens, inputs] and [inputs, outputs] is made in float8 where a run wants that. `least`:
    `train.float8_least`."""
    return min(inputs, outputs) >= least and all(size % _MULTIPLE == 0 for size in (tokens, inputs, outputs))


def chosen_for(tokens: int, inputs: int, outputs: int) -> Float8 | None:
    """How a product of [tokens, inputs] and [inputs, outputs] is made; None: in the compute dtype."""
    chosen = _chosen.get()
    return chosen if chosen is not None and is_fit(tokens, inputs, outputs, chosen.least) else None


def product(how: Float8, x_TD: Array, weight_DF: Array) -> Array:
    """[T, F] in the dtype of x."""
    return _multiply(how, _quantised(x_TD, FORWARD), _quantised(weight_DF, FORWARD), x_TD.dtype)


def x_gradient(how: Float8, gradient_TF: Array, weight_DF: Array) -> Array:
    """[T, D] in the dtype of the gradient, from that of the product."""
    gradient, weight = _quantised(gradient_TF, BACKWARD), _quantised(weight_DF, FORWARD)
    return _multiply(how, gradient, weight.transposed(), gradient_TF.dtype)


def weight_gradient(how: Float8, x_TD: Array, gradient_TF: Array, dtype: jnp.dtype) -> Array:
    """[D, F] in the weight's dtype, from that of the product."""
    return _multiply(how, _quantised(x_TD, FORWARD).transposed(), _quantised(gradient_TF, BACKWARD), dtype)


def packed(weight: Array, scale: Array) -> Array:
    """A weight rounded to float8, as bytes, which every backend can send. `scale` is a power of two."""
    return jax.lax.bitcast_convert_type((weight.astype(jnp.float32) * scale).astype(FORWARD), jnp.uint8)


def unpacked(weight: Array, scale: Array, dtype: jnp.dtype) -> Array:
    """The rounded weight. What rounds it once more, for a product, gets the same numbers."""
    return (jax.lax.bitcast_convert_type(weight, FORWARD).astype(jnp.float32) / scale).astype(dtype)


class _Scaled(NamedTuple):
    """A matrix in float8, and what it has been multiplied by."""

    values: Array
    scale: Array

    def transposed(self) -> "_Scaled":
        return self._replace(values=self.values.T)


def _quantised(x: Array, dtype: jnp.dtype) -> _Scaled:
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    scale = power_of_two_scale(largest, dtype)
    return _Scaled((x.astype(jnp.float32) * scale).astype(dtype), scale)


def power_of_two_scale(largest: Array, dtype: jnp.dtype) -> Array:
    """The largest power of two by which `largest`, a float32 number, may be multiplied. 1 where that is 0 or no finite
    number, which then stays what it is."""
    most_mantissa, most_exponent = jnp.frexp(jnp.float32(jnp.finfo(dtype).max))
    mantissa, exponent = jnp.frexp(largest)
    power = jnp.clip(most_exponent - exponent - (mantissa > most_mantissa), -126, 126)
    usual = (largest > 0) & jnp.isfinite(largest)
    return jnp.ldexp(jnp.float32(1), jnp.where(usual, power, 0))


def _multiply(how: Float8, left: _Scaled, right: _Scaled, dtype: jnp.dtype) -> Array:
    """In `dtype`, added up in float32."""
    a, b = left.values, right.values
    if not how.native:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    whole = jax.lax.dot(a, b, preferred_element_type=dtype if how.native else jnp.float32)
    unscaled = whole * (1 / left.scale).astype(whole.dtype) * (1 / right.scale).astype(whole.dtype)
    return unscaled.astype(dtype)
