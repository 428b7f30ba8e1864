"""Where a falling series goes next and how widely it scatters, whatever outliers it has: medians throughout."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def parabola(values: NDArray[np.float64]) -> tuple[float, float]:
    """The next value by the parabola through the medians of the thirds, and the spread around it."""
    third, at, ahead = _nodes(len(values))
    middle = (len(values) - third) // 2
    parts = values[:third], values[middle : middle + third], values[-third:]
    low, mid, high = (_median(part) for part in parts)
    slope, bend = (high - low) / 2, (high - 2 * mid + low) / 2
    spread = 1.4826 * _median(np.abs(values - (mid + at * (slope + at * bend))))
    return mid + ahead * (slope + ahead * bend), spread


@lru_cache(maxsize=4096)
def _nodes(count: int) -> tuple[int, NDArray[np.float64], float]:
    """Length of a third, the places of the values on an axis where the thirds lie at -1, 0 and 1, and the next place.

    The thirds may lie a value apart or overlap by one, so that the middle one lies in the middle.
    """
    third = count // 3 + (count - count // 3) % 2
    half = (count - third) / 2
    at = np.linspace(-(count - 1) / 2, (count - 1) / 2, count, dtype=np.float64) / half
    return third, at, ((count + 1) / 2) / half


def _median(values: NDArray[np.float64]) -> float:
    """np.median without its cost: a short array is sorted faster than it is split."""
    half, even = len(values) // 2, len(values) % 2 == 0
    ordered = values.copy()
    if len(values) <= 256:
        ordered.sort()
        below = ordered[half - 1]
    else:
        ordered.partition(half)
        below = ordered[:half].max() if even else 0.0
    return float((below + ordered[half]) / 2 if even else ordered[half])
