"""Grouped matrix products by the Mosaic GPU kernels that JAX ships for Hopper GPUs.

JAX publishes these kernels under `jax.experimental.pallas.ops.gpu`. They have no gradient rule of their own. Rows must
be sorted by expert, and the rows of each expert must fill whole blocks of `BLOCK_ROWS`. Otherwise, a kernel would
multiply the ends of blocks by a mask, and the memory past the last row, which nobody has written, can hold NaN.

Shapes: M rows of all experts, E experts, D and F the sides of a weight.
"""

import importlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

BLOCK_ROWS = 128
"""Rows of a block."""
_WIDTHS = (128, 64)
"""Columns of a block. The first that divides the number of columns is used."""
_BLOCKS = {"block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 1}
"""Settings of both kernels. Four blocks of each operand fit into the shared memory of a multiprocessor."""
_MAX_EXPERTS = 128
"""The largest number of experts of a device. The kernels unroll a loop over the experts."""
_PACKAGE = "jax.experimental.pallas.ops.gpu"
_PARAMETERS = {
    "ragged_dot": {"lhs", "rhs", "group_sizes", "block_m", "block_n", "transpose_rhs", *_BLOCKS},
    "transposed_ragged_dot": {"lhs", "rhs", "group_sizes", "block_m", "block_n", *_BLOCKS},
}
"""The parameters that jaxmnt passes to each kernel."""


def obstacle(capability: float, dtype: jnp.dtype, experts: int, sizes: tuple[int, int]) -> str | None:
    """Returns the reason why the kernels cannot be used, as the end of a sentence, or None if they can be used.
    `capability` is the GPU's CUDA compute capability, and `sizes` are the sides of a weight."""
    if capability != 9.0:
        return "on this device, only on GPUs of compute capability 9.0 (Hopper)"
    if dtype != jnp.bfloat16:
        return f"in {dtype.name}, only in bfloat16"
    if any(size % _WIDTHS[-1] for size in sizes):
        return f"with weights of {sizes[0]} × {sizes[1]}, only with multiples of {_WIDTHS[-1]}"
    if experts > _MAX_EXPERTS:
        return f"with {experts} experts on a device, only with at most {_MAX_EXPERTS}"
    if not _has_kernels():
        return f"with JAX {jax.__version__}, which lacks these kernels, or has them with other parameters"
    return None


def multiply(x_MD: Array, weight_EDF: Array, rows_E: Array, *, transposed: bool = False) -> Array:
    """Returns [M, F], the product of each row with its expert's weight. If `transposed`, x is [M, F], and is multiplied
    by the transposed weights. Rows past the last expert's are undefined."""
    outputs = weight_EDF.shape[1 if transposed else 2]
    return _module("ragged_dot").ragged_dot(
        x_MD, weight_EDF, group_sizes=rows_E, block_m=BLOCK_ROWS, block_n=_width(outputs), transpose_rhs=transposed,
        **_BLOCKS,
    )  # fmt: skip


def weight_gradient(x_MD: Array, gradient_MF: Array, rows_E: Array, cores: int) -> Array:
    """Returns [E, D, F] in the dtype of x, the sum over each expert's rows of x transposed times the gradient. Each sum
    is float32. It is zero for an expert without rows. `cores` is the number of the GPU's multiprocessors."""
    module = _module("transposed_ragged_dot")
    # The kernel asks JAX's first device for its number of multiprocessors. A plan for GPUs runs where that is a CPU.
    module.jax = _JaxWithCores(cores)
    try:
        return module.transposed_ragged_dot(
            x_MD, gradient_MF, group_sizes=rows_E, block_m=_width(x_MD.shape[1]), block_n=_width(gradient_MF.shape[1]),
            **_BLOCKS,
        )  # fmt: skip
    finally:
        module.jax = jax


class _JaxWithCores:
    """The module `jax`, except that its first device has this number of multiprocessors."""

    def __init__(self, cores: int):
        self.core_count = cores

    def devices(self) -> list[Any]:
        return [self]

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)


def _width(columns: int) -> int:
    """Returns the number of columns of a block."""
    return next(width for width in _WIDTHS if columns % width == 0)


def _module(kernel: str) -> Any:
    """Returns the module of a kernel. It is imported only where it is used, because it imports JAX's tests."""
    return importlib.import_module(f"{_PACKAGE}.{kernel}_mgpu")


def _has_kernels() -> bool:
    """True if this JAX has both kernels, with the parameters that jaxmnt knows."""
    try:
        kernels = {name: getattr(_module(name), name) for name in _PARAMETERS}
    except (ImportError, AttributeError):
        return False
    return all(_PARAMETERS[name] <= set(inspect.signature(kernel).parameters) for name, kernel in kernels.items())
