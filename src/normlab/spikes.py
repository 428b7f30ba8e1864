"""Spikes of a series (loss or gradient norm), as a pure function of its values."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Spike:
    """Merged consecutive flagged steps. `end` is the first step back in range; None = never."""

    start: int
    end: int | None
    peak: float  # largest value, inf when a step was not finite
    height: float  # peak - mean of the window before the start, in the series' unit (nats for a loss)
    z: float  # largest (value - mean) / std
    limit: float  # mean + kappa * std of the window before the start

    @property
    def recovered(self) -> bool:
        return self.end is not None


def find(series: Sequence[float], *, kappa: float, window: int, min_history: int, min_height: float) -> list[Spike]:
    """Events where a value exceeds mean + kappa * std of the trailing window by at least min_height.

    The rule is OLMo-core's stability monitor (6 sigma over 128, current value excluded), upward only, so that a
    falling loss is no event. Flagged values never enter the window: a plateau cannot hide itself or its successor.
    After `window` flagged steps in a row the new level becomes the window, so that later events show against it; the
    event itself ends when a value is back at or below its limit, however late. A non-finite value is flagged and never
    enters the window. The first min_history finite values cannot be judged.
    """
    history: deque[float] = deque(maxlen=window)
    found: list[Spike] = []
    level: list[float] = []  # finite values of the present run of flagged steps
    present = False  # the last step was flagged and belongs to found[-1]

    for step, value in enumerate(series):
        mean = std = limit = math.inf
        if len(history) >= min_history:
            mean, std = float(np.mean(history)), float(np.std(history))
            limit = mean + max(kappa * std, min_height)
        if math.isfinite(value) and value <= limit:
            present = False
            level.clear()
            history.append(value)
            found = [replace(s, end=step) if not s.recovered and value <= s.limit else s for s in found]
            continue
        peak = value if math.isfinite(value) else math.inf
        height = peak - mean if math.isfinite(mean) else math.inf
        event = Spike(step, None, peak, height, height / max(std, 1e-12) if math.isfinite(height) else math.inf, limit)
        if present:
            last = found[-1]
            event = replace(last, peak=max(last.peak, peak), height=max(last.height, height), z=max(last.z, event.z))
            found.pop()
        found.append(event)
        present = True
        if math.isfinite(value):
            level.append(value)
        if len(level) >= window:
            history.extend(level)
            level.clear()
            present = False
    return found
