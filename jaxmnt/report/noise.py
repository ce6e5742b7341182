"""Estimates the gradient noise scale of a run from the squared gradient norms in the lines of its steps."""

from collections.abc import Sequence

import numpy as np

from jaxmnt.report.history import Record, number

NOISE_STEPS = 100
"""Number of steps over which squared norms are averaged, because those of a single step are too noisy."""


def noise_scales(lines: Sequence[Record], small_rows: float, rows: float) -> list[float | None]:
    """Returns the gradient noise scale in rows after each step; None where it is undefined.

    `lines` has one line for each step, `small_rows` is the number of rows b of a small batch, and `rows` is the number
    of rows B of a full batch. Let |G_b|² and |G_B|² be the mean squared norms of their gradients over the last
    `NOISE_STEPS` steps. The squared norm of the true gradient is estimated as |G|² = (B |G_B|² − b |G_b|²) / (B − b),
    and the trace of the covariance of a row's gradient as (|G_b|² − |G_B|²) / (1 / b − 1 / B). The noise scale is this
    trace divided by |G|² (McCandlish et al. 2018, arXiv:1812.06162, appendix A.1).
    """
    squares = [line.get("gradient_squares") for line in lines]
    if not 0 < small_rows < rows or not any(squares):
        return [None] * len(lines)
    pairs = [
        (number(pair, "small"), number(pair, "large")) if isinstance(pair, dict) else (0.0, 0.0) for pair in squares
    ]
    # A step without a finite gradient counts in neither sum.
    finite = np.array([pair if min(pair) > 0 else (0.0, 0.0) for pair in pairs])
    small_sums = _recent_sums(finite[:, 0])
    large_sums = _recent_sums(finite[:, 1])
    signals = (rows * large_sums - small_rows * small_sums) / (rows - small_rows)
    noises = (small_sums - large_sums) / (1 / small_rows - 1 / rows)
    return [
        float(noise / signal) if noise > 0 and signal > 0 else None
        for noise, signal in zip(noises, signals, strict=True)
    ]


def noise_scale(lines: Sequence[Record], small_rows: float, rows: float) -> float | None:
    """Returns the gradient noise scale in rows after the last step; None if it is undefined.

    The arguments are those of `noise_scales`.
    """
    scales = noise_scales(lines[-NOISE_STEPS:], small_rows, rows)
    return scales[-1] if scales else None


def _recent_sums(values: np.ndarray) -> np.ndarray:
    """Returns the sum of the last `NOISE_STEPS` values at each index.

    Each sum is computed separately, because the rounding error of a spike would never leave a running sum.
    """
    padded = np.concatenate([np.zeros(NOISE_STEPS - 1), values])
    sums: np.ndarray = np.lib.stride_tricks.sliding_window_view(padded, NOISE_STEPS).sum(axis=1)
    return sums
