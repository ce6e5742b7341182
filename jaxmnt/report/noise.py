"""The gradient noise scale of a run, by the squares of gradients that its lines have."""

from collections.abc import Sequence

import numpy as np

from jaxmnt.report.history import Record, number

STEPS = 100
"""Over so many the squares are averaged: those of one step say little."""


def noise_scales(lines: Sequence[Record], small: float, rows: float) -> list[float | None]:
    """In rows, at each of the lines of steps, by the last steps up to it; None where they do not tell.

    With the squared norm of the gradient of b rows on average, and of all B, |G|² is (B |G_B|² − b |G_b|²) / (B − b),
    the trace of the covariance of a row's gradient (|G_b|² − |G_B|²) / (1 / b − 1 / B), and the scale is the second
    over the first (McCandlish et al. 2018, arXiv:1812.06162, appendix A.1).
    """
    told = [line.get("gradient_squares") for line in lines]
    if not 0 < small < rows or not any(told):
        return [None] * len(lines)
    pairs = [(number(one, "small"), number(one, "large")) if isinstance(one, dict) else (0.0, 0.0) for one in told]
    # Of a step that is not finite neither counts.
    whole = np.array([pair if min(pair) > 0 else (0.0, 0.0) for pair in pairs])
    of_small, of_all = _recent_sums(whole[:, 0]), _recent_sums(whole[:, 1])
    signal = (rows * of_all - small * of_small) / (rows - small)
    noise = (of_small - of_all) / (1 / small - 1 / rows)
    return [float(n / s) if n > 0 and s > 0 else None for n, s in zip(noise, signal, strict=True)]


def noise_scale(lines: Sequence[Record], small: float, rows: float) -> float | None:
    """By the last steps."""
    return (noise_scales(lines[-STEPS:], small, rows) or [None])[-1]


def _recent_sums(values: np.ndarray) -> np.ndarray:
    """At each place, of the last `STEPS` values. Each anew: by differences of running sums, a spike would leave its
    rounding behind."""
    padded = np.concatenate([np.zeros(STEPS - 1), values])
    sums: np.ndarray = np.lib.stride_tricks.sliding_window_view(padded, STEPS).sum(axis=1)
    return sums
