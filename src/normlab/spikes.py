"""Spikes of a series (loss or gradient norm), as a pure function of its values."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Spike:
    """Merged consecutive flagged steps. `end` is the first step back in range; None = never recovered."""

    start: int
    end: int | None
    peak: float  # largest value, inf when a step was not finite
    height: float  # peak - mean of the window before the start, in the series' unit (nats for a loss)
    z: float  # largest (value - mean) / std

    @property
    def recovered(self) -> bool:
        return self.end is not None


def find(series: Sequence[float], *, kappa: float, window: int, min_history: int, min_height: float) -> list[Spike]:
    """Events where a value exceeds mean + kappa * std of the trailing window by at least min_height.

    The rule is OLMo-core's stability monitor (6 sigma over 128, current value excluded), upward only, so that a
    falling loss is no event. Flagged values never enter the window: a plateau cannot hide itself or its successor.
    After `window` flagged steps in a row the event is closed as not recovered and the new level becomes the window.
    A non-finite value is flagged and never enters the window either.
    """
    history: deque[float] = deque(maxlen=window)
    flagged: list[tuple[int, float, float, float]] = []  # (step, value, z, height)
    found: list[Spike] = []

    def close(end: int | None) -> None:
        peak = max(flagged, key=lambda f: f[3])
        found.append(Spike(flagged[0][0], end, peak[1], peak[3], max(f[2] for f in flagged)))
        flagged.clear()

    for step, value in enumerate(series):
        if not math.isfinite(value):
            flagged.append((step, math.inf, math.inf, math.inf))
            continue
        z = height = 0.0
        if len(history) >= min_history:
            values = np.fromiter(history, float)
            height = value - values.mean()
            z = height / max(values.std(), 1e-12)
        if z > kappa and height >= min_height:
            flagged.append((step, value, z, height))
            if len(flagged) >= window:
                level = [f[1] for f in flagged if math.isfinite(f[1])]
                close(None)
                history.extend(level)
            continue
        if flagged:
            close(step)
        history.append(value)
    if flagged:
        close(None)
    return found
