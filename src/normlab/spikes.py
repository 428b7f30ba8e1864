"""Spikes of a series (losses, or logarithms of gradient norms): one step at a time, or over a whole series.

Published rules differ in centre, threshold and window, and the count depends on them more than on most interventions:
a Rule is stored with every count, and `sensitivity` counts under many.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from normlab.trend import parabola

Centre = Literal["mean", "trend"]

RESOLUTION = 1e-6  # share of the level that a number in single precision cannot tell from none: the least spread
SHORTEST = 64  # window of a run too short for its rule's own
LEAD_WITHIN = 32  # steps by which a gradient-norm spike may come before the loss spike that it announces
MEASURABLE = 8  # values after an event's end from which its lasting offset is told


@dataclass(frozen=True)
class Rule:
    """A value is flagged above centre + max(kappa * spread, min_height), both from the `window` values before it.

    mean: mean and standard deviation (OLMo 2: 7 over 1000; OLMo-core: 6 over 128, judging from 64 on).
    trend: the parabola through the medians of the window's three thirds, carried on by one step, and 1.4826 times the
    median absolute residual. It follows a falling curve, whose fall is no spread, and an outlier does not move it.

    A rise below min_height, in the series' unit (nats), is the noise of a flat curve. Norms have no such unit: they are
    judged in log, under for_norms(). Fewer than min_history values judge nothing.
    """

    centre: Centre
    kappa: float
    window: int
    min_history: int
    min_height: float

    def __post_init__(self) -> None:
        least = 9 if self.centre == "trend" else 2  # three values in each third
        accepted = {
            "centre": (self.centre in ("mean", "trend"), "mean, trend"),
            "kappa": (0 < self.kappa < math.inf, "above 0"),
            "window": (self.window >= least, f"{least} or more with centre={self.centre}"),
            "min_history": (least <= self.min_history <= self.window, f"{least} to window={self.window}"),
            "min_height": (0 <= self.min_height < math.inf, "0 or more"),
        }
        for key, (good, told) in accepted.items():
            if not good:
                raise ValueError(f"{key}={getattr(self, key)}; accepted: {told}")

    def for_run(self, steps: int) -> Self:
        """The same rule for a run of so many steps: below two windows' length, the window is a fifth of the run."""
        if steps >= 2 * self.window:
            return self
        window = min(self.window, max(SHORTEST, steps // 5))
        return replace(self, window=window, min_history=min(self.min_history, max(window // 2, 9)))

    def for_norms(self) -> Self:
        """The same rule for logarithms of norms (log_norm), where no height is too small."""
        return replace(self, min_height=0.0)

    def label(self, name: str, steps: int) -> str:
        """`name`, with the window where a run of so many steps scales it: olmo_w64."""
        scaled = self.for_run(steps)
        return name if scaled == self else f"{name}_w{scaled.window}"


@dataclass(frozen=True)
class Spike:
    """Merged consecutive flagged steps. `end` is the first step back in range; None = never."""

    start: int
    end: int | None
    peak: float  # largest value, inf when a step was not finite
    height: float  # peak - centre at the start, in the series' unit (nats for a loss)
    z: float  # largest (value - centre) / spread
    limit: float  # above which the start was flagged
    offset: float | None  # median of the window / 4 values from `end` on - centre at the start; None = too few yet

    @property
    def recovered(self) -> bool:
        return self.end is not None

    @property
    def duration(self) -> int | None:
        return None if self.end is None else self.end - self.start


@dataclass
class _Event:
    spike: Spike  # without its offset
    centre: float  # expected at the start
    after: list[float]  # values in range from the end on, at most window // 4


class Detector:
    """One rule, fed one value at a time.

    Flagged values never enter the window, so that a plateau cannot hide itself or its successor. After `window` flagged
    steps in a row the new level becomes the window, so that later events show against it; the event itself ends when a
    value is back at or below its limit, however late. A non-finite value is flagged and never enters the window.

    A slow climb counts as the centre sees it: one that starts with the series is followed and is no event; one that
    starts out of a quiet level is one event, at the step where it has left the range.
    """

    def __init__(self, rule: Rule, *, memo: dict[int, tuple[float, float]] | None = None) -> None:
        """`memo` holds, by step, the range after steps none of which is flagged: kappa does not change it, so that
        detectors of one series that differ in kappa may share it."""
        self.rule = rule
        self._memo = memo
        self._quiet = 0  # steps since a value was flagged
        self.flagged = False  # the last value was
        self._step = 0
        self._buffer = np.empty(2 * rule.window)  # the window, in order of time, is its part up to _end
        self._end = self._count = 0
        self._range: tuple[float, float] | None = None  # centre and spread for the next value, while they hold
        self._level: list[float] = []  # finite values of the present run of flagged steps
        self._merging = False  # a flagged value now would belong to the last event
        self._events: list[_Event] = []
        self._live: list[_Event] = []  # those that have not ended or whose offset is not complete

    def push(self, value: float) -> float:
        """Take the next value and return its signed z; nan while there is nothing to judge by, inf if not finite."""
        value = float(value)
        rule, step = self.rule, self._step
        self._step += 1
        if self._range is None:
            self._range = self._remembered(step)
        centre, spread = self._range
        judged = not math.isnan(centre)
        limit = centre + max(rule.kappa * spread, rule.min_height) if judged else math.inf
        finite = math.isfinite(value)
        z = (value - centre) / spread if finite else math.inf
        if finite and value <= limit:
            self.flagged = self._merging = False
            self._quiet += 1
            self._level.clear()
            self._keep([value])
            if self._live:
                self._follow(step, value)
            return z

        self.flagged, self._quiet = True, 0
        peak = value if finite else math.inf
        height = peak - centre if judged else math.inf
        if self._merging:
            event = self._events[-1]
            old = event.spike
            event.spike = replace(old, peak=max(old.peak, peak), height=max(old.height, height), z=max(old.z, z))
        else:
            event = _Event(Spike(step, None, peak, height, z, limit, None), centre, [])
            self._events.append(event)
            self._live.append(event)
            self._merging = True
        if finite:
            self._level.append(value)
        if len(self._level) >= rule.window:
            self._keep(self._level)
            self._level.clear()
            self._merging = False
        return z

    @property
    def events(self) -> list[Spike]:
        """All up to now; the last may still grow, and the offset of a recent one settle."""
        told = []
        for event in self._events:
            known = len(event.after) >= MEASURABLE and math.isfinite(event.centre)
            offset = float(np.median(event.after)) - event.centre if known else None
            told.append(replace(event.spike, offset=offset))
        return told

    @property
    def _window(self) -> NDArray[np.float64]:
        return self._buffer[self._end - self._count : self._end]

    def _keep(self, values: Sequence[float]) -> None:
        for value in values:
            if self._end == len(self._buffer):
                kept = self._window[-(self.rule.window - 1) :].copy()
                self._buffer[: len(kept)] = kept
                self._end = self._count = len(kept)
            self._buffer[self._end] = value
            self._end += 1
            self._count = min(self._count + 1, self.rule.window)
        self._range = None

    def _remembered(self, step: int) -> tuple[float, float]:
        if self._memo is None or self._quiet < self._count:
            return self._expect()
        if step not in self._memo:
            self._memo[step] = self._expect()
        return self._memo[step]

    def _expect(self) -> tuple[float, float]:
        """Centre and spread for the next value; nan without enough history."""
        if self._count < self.rule.min_history:
            return math.nan, math.nan
        window = self._window
        if self.rule.centre == "mean":
            centre = float(np.add.reduce(window)) / self._count
            spread = math.sqrt(float(np.add.reduce((window - centre) ** 2)) / self._count)
        else:
            centre, spread = parabola(window)
        return centre, max(spread, RESOLUTION * abs(centre), 1e-12)

    def _follow(self, step: int, value: float) -> None:
        """A value in range ends the events whose limit it respects, and counts towards the offset of ended ones."""
        for event in self._live:
            if not event.spike.recovered and value <= event.spike.limit:
                event.spike = replace(event.spike, end=step)
            if event.spike.recovered:
                event.after.append(value)
        self._live = [event for event in self._live if not self._settled(event)]

    def _settled(self, event: _Event) -> bool:
        return event.spike.recovered and len(event.after) >= max(self.rule.window // 4, MEASURABLE)


def read(series: Sequence[float], rule: Rule) -> tuple[list[Spike], NDArray[np.float64]]:
    """The events of a whole series, and the signed z of each value."""
    detector = Detector(rule)
    z = np.array([detector.push(value) for value in series], dtype=np.float64)
    return detector.events, z


def share_beyond(z: Sequence[float] | NDArray[np.float64], kappa: float) -> float:
    """% of the judged z (not nan) beyond kappa on either side; nan if none was judged: OLMo 2's spike score, but for
    flagged values, which do not widen the window here."""
    values = np.asarray(z, dtype=np.float64)
    judged = values[~np.isnan(values)]
    return 100.0 * float(np.mean(np.abs(judged) > kappa)) if len(judged) else math.nan


def log_norm(norm: float) -> float:
    """A norm's logarithm; that of zero is the one of the smallest number in single precision. nan and inf stay."""
    return math.log(max(norm, 1.4e-45)) if math.isfinite(norm) else norm


def leads(loss_spikes: Sequence[Spike], norm_spikes: Sequence[Spike], within: int = LEAD_WITHIN) -> list[int | None]:
    """Per loss spike, by how many steps the nearest norm spike at or before it came first; None = none `within`."""
    starts = np.array([s.start for s in norm_spikes])
    ahead = [spike.start - starts for spike in loss_spikes]
    return [int(a[near].min()) if (near := (a >= 0) & (a <= within)).any() else None for a in ahead]


def sensitivity(
    series: Sequence[float],
    *,
    centre: Centre,
    kappas: Sequence[float],
    windows: Sequence[int],
    min_history: int,
    min_height: float,
) -> pd.DataFrame:
    """Number of events under each kappa and window (columns kappa, window, events).

    One history for all windows, so that all judge the same steps; a window shorter than that is judged once full.
    """
    rows = []
    for window in windows:
        count: int | None = None
        memo: dict[int, tuple[float, float]] = {}
        for kappa in sorted(kappas):
            if count != 0:  # no event under one kappa: none under a larger one either
                detector = Detector(Rule(centre, kappa, window, min(min_history, window), min_height), memo=memo)
                for value in series:
                    detector.push(value)
                count = len(detector.events)
            rows.append({"kappa": kappa, "window": window, "events": count})
    return pd.DataFrame(rows, columns=["kappa", "window", "events"])
