"""Products of projections in float8, with scales computed from the current tensors.

Activations and weights are E4M3, gradients E5M2 (Micikevicius et al. 2022, arXiv:2209.05433). A tensor is multiplied by
the largest power of two for which its largest number still fits into the format. Scaling is therefore exact, and the
scale affects only the rounding of tiny numbers. Results are the same on any mesh, although each device scales its own
piece. The dot product takes two float8 matrices, because XLA recognises only that form reliably. A device that cannot
multiply float8 multiplies the same numbers in a wider dtype.

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

_DIMENSION_MULTIPLE = 16
"""cuBLAS requires all dimensions of a product to be multiples of this number."""


class Float8(NamedTuple):
    """Settings of products in float8."""

    min_size: int
    """Products with fewer inputs or outputs stay in the compute dtype, because quantising takes longer than it
    saves."""
    native: bool
    """True if the device can multiply float8."""


_active_settings: ContextVar[Float8 | None] = ContextVar("float8", default=None)
_recorded_products: ContextVar[list["RecordedProduct"] | None] = ContextVar("recorded", default=None)


@contextlib.contextmanager
def float8_products(settings: Float8 | None) -> Iterator[None]:
    """Makes `project` use float8 inside the context where shapes allow it. Routers, heads and norms never use it."""
    token = _active_settings.set(settings)
    try:
        yield
    finally:
        _active_settings.reset(token)


class RecordedProduct(NamedTuple):
    """A product that `project` computed."""

    weight: Array
    """The weight that `project` was called with."""
    in_float8: bool


@contextlib.contextmanager
def record_products() -> Iterator[list[RecordedProduct]]:
    """Yields a list to which each product that `project` computes inside the context is added."""
    products: list[RecordedProduct] = []
    token = _recorded_products.set(products)
    try:
        yield products
    finally:
        _recorded_products.reset(token)


def record_product(weight: Array, *, in_float8: bool) -> None:
    """Adds a product to the list of the surrounding `record_products`, if any."""
    products = _recorded_products.get()
    if products is not None:
        products.append(RecordedProduct(weight, in_float8))


def is_eligible(tokens: int, inputs: int, outputs: int, min_size: int) -> bool:
    """Returns True if a run with float8 uses it for a product of [tokens, inputs] and [inputs, outputs]. `min_size` is
    `train.float8_least`."""
    return min(inputs, outputs) >= min_size and all(
        size % _DIMENSION_MULTIPLE == 0 for size in (tokens, inputs, outputs)
    )


def product_mode(tokens: int, inputs: int, outputs: int) -> Float8 | None:
    """Returns the float8 settings for a product of [tokens, inputs] and [inputs, outputs], or None if the product is in
    the compute dtype."""
    settings = _active_settings.get()
    if settings is None or not is_eligible(tokens, inputs, outputs, settings.min_size):
        return None
    return settings


def product(mode: Float8, x_TD: Array, weight_DF: Array) -> Array:
    """Returns x @ weight [T, F] in the dtype of x."""
    return _multiply(mode, _quantise(x_TD, FORWARD), _quantise(weight_DF, FORWARD), x_TD.dtype)


def x_gradient(mode: Float8, gradient_TF: Array, weight_DF: Array) -> Array:
    """Returns the gradient [T, D] of x, in the dtype of the product's gradient."""
    gradient, weight = _quantise(gradient_TF, BACKWARD), _quantise(weight_DF, FORWARD)
    return _multiply(mode, gradient, weight.transposed(), gradient_TF.dtype)


def weight_gradient(mode: Float8, x_TD: Array, gradient_TF: Array, dtype: jnp.dtype) -> Array:
    """Returns the gradient [D, F] of the weight in `dtype`, the weight's, from the gradient of the product."""
    return _multiply(mode, _quantise(x_TD, FORWARD).transposed(), _quantise(gradient_TF, BACKWARD), dtype)


def pack(weight: Array, scale: Array) -> Array:
    """Returns weight · `scale`, a power of two, rounded to float8, as bytes, which every backend can send."""
    return jax.lax.bitcast_convert_type((weight.astype(jnp.float32) * scale).astype(FORWARD), jnp.uint8)


def unpack(weight: Array, scale: Array, dtype: jnp.dtype) -> Array:
    """Returns a packed weight in `dtype`. Rounding it to float8 again, for a product, gives the same numbers."""
    return (jax.lax.bitcast_convert_type(weight, FORWARD).astype(jnp.float32) / scale).astype(dtype)


class _ScaledMatrix(NamedTuple):
    """A matrix in float8 and the factor that it has been multiplied by."""

    values: Array
    scale: Array

    def transposed(self) -> "_ScaledMatrix":
        return self._replace(values=self.values.T)


def _quantise(x: Array, dtype: jnp.dtype) -> _ScaledMatrix:
    """Returns x scaled and rounded to a float8 dtype."""
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    scale = power_of_two_scale(largest, dtype)
    return _ScaledMatrix((x.astype(jnp.float32) * scale).astype(dtype), scale)


def power_of_two_scale(largest: Array, dtype: jnp.dtype) -> Array:
    """Returns the largest power of two whose product with `largest`, a float32 number, fits into `dtype`. It is 1 if
    `largest` is 0 or not finite, so that such a number stays unchanged."""
    max_mantissa, max_exponent = jnp.frexp(jnp.float32(jnp.finfo(dtype).max))
    mantissa, exponent = jnp.frexp(largest)
    power = jnp.clip(max_exponent - exponent - (mantissa > max_mantissa), -126, 126)
    can_be_scaled = (largest > 0) & jnp.isfinite(largest)
    return jnp.ldexp(jnp.float32(1), jnp.where(can_be_scaled, power, 0))


def _multiply(mode: Float8, lhs: _ScaledMatrix, rhs: _ScaledMatrix, dtype: jnp.dtype) -> Array:
    """Returns the unscaled product in `dtype`, accumulated in float32."""
    a, b = lhs.values, rhs.values
    if not mode.native:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    scaled = jax.lax.dot(a, b, preferred_element_type=dtype if mode.native else jnp.float32)
    # The scales are undone one after the other, because the product of both can overflow.
    unscaled = scaled * (1 / lhs.scale).astype(scaled.dtype) * (1 / rhs.scale).astype(scaled.dtype)
    return unscaled.astype(dtype)
