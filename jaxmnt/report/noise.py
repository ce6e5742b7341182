"""The gradient noise scale of a run, from the squared gradient norms in its lines."""

from collections.abc import Sequence

import numpy as np

from jaxmnt.report.history import Record, number

STEPS = 100
"""Number of steps over which the squared norms are averaged: those of a single step are too noisy."""


def noise_scales(lines: Sequence[Record], small: float, rows: float) -> list[float | None]:
    """Returns the noise scale in rows at each line of a step, from the last `STEPS` steps; None where it is undefined.

    `small` is the number of rows b of a small batch, and `rows` the number of rows B of a whole one. From the mean
    squared norms |G_b|² and |G_B|² of their gradients, the squared norm of the true gradient is estimated as
    |G|² = (B |G_B|² − b |G_b|²) / (B − b), and the trace of the covariance of a row's gradient as
    (|G_b|² − |G_B|²) / (1 / b − 1 / B). The scale is the second over the first (McCandlish et al. 2018,
    arXiv:1812.06162, appendix A.1).
    """
    squares = [line.get("gradient_squares") for line in lines]
    if not 0 < small < rows or not any(squares):
        return [None] * len(lines)
    pairs = [
        (number(pair, "small"), number(pair, "large")) if isinstance(pair, dict) else (0.0, 0.0) for pair in squares
    ]
    # A step without a finite gradient counts for neither sum.
    finite = np.array([pair if min(pair) > 0 else (0.0, 0.0) for pair in pairs])
    sums_small, sums_large = _recent_sums(finite[:, 0]), _recent_sums(finite[:, 1])
    signal = (rows * sums_large - small * sums_small) / (rows - small)
    noise = (sums_small - sums_large) / (1 / small - 1 / rows)
    return [float(n / s) if n > 0 and s > 0 else None for n, s in zip(noise, signal, strict=True)]


def noise_scale(lines: Sequence[Record], small: float, rows: float) -> float | None:
    """Returns the noise scale in rows after the last line; None if it is undefined."""
    return (noise_scales(lines[-STEPS:], small, rows) or [None])[-1]


def _recent_sums(values: np.ndarray) -> np.ndarray:
    """Returns the sum of the last `STEPS` values at each index.

    Each sum is computed separately: with differences of a running sum, the rounding error of a spike would remain.
    """
    padded = np.concatenate([np.zeros(STEPS - 1), values])
    sums: np.ndarray = np.lib.stride_tricks.sliding_window_view(padded, STEPS).sum(axis=1)
    return sums
