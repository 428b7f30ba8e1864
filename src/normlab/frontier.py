"""Where training stops being stable as the learning rate grows: the search, its boundary, LR50, and the ramp.

A rate trains where its run's verdict is `stable`. Rates are places 0, 1, ... of a grid that rises by one factor.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import optimize

LR, STEPS, WARMUP = "optim.lr", "steps", "optim.warmup_steps"
RESAMPLES = 1000
LEVEL = 0.95
_OUTSIDE = (
    "log.",
    "spikes.",
    "verdict.",
    "checkpoint.",
    "relaunch.",
    "stop.",
    "probe.",
)  # they label, house, end or watch a run
_PLAIN = ("data_sha256", "label_smoothing", STEPS, "precision", "tf32", "attention", "compile", "device", "world_size")
_PLACES = ("data.path", "data.cache")


def search(trial: Callable[[int], str], count: int, hint: int | None = None) -> dict[int, str]:
    """The verdicts at the places that were tried, in order, to find the largest stable one of `count`.

    From a place that trains (`hint`, such as another seed's boundary, or the middle), steps that double go up to one
    that does not, and bisection closes in. The two places next to the boundary are tried too: where the one above
    trains, the search goes on from there. Where the first place does not train, one is sought in the widest gap of what
    was tried, the lower of two, until no gap is wider than a place; a rate that is too low stalls, so that nothing is
    sought above a run that spiked or diverged.
    """
    tried: dict[int, str] = {}

    def trains(place: int) -> bool:
        if place not in tried:
            tried[place] = trial(place)
        return tried[place] == "stable"

    low = next((place for place in _anchors(count, hint, tried) if trains(place)), None)
    stride = max(1, count // 4) if hint is None else 1
    while low is not None:
        high = min((place for place in tried if place > low and not trains(place)), default=None)
        while high is None and low < count - 1:
            place = min(low + stride, count - 1)
            low, high = (place, None) if trains(place) else (low, place)
            stride *= 2
        while high is not None and high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if trains(middle) else (low, middle)
        if low > 0:
            trains(low - 1)
        above = None if high is None or high + 1 >= count else high + 1
        low, stride = (above, 1) if above is not None and trains(above) else (None, 1)
    return tried


def _anchors(count: int, hint: int | None, tried: Mapping[int, str]) -> Iterator[int]:
    """Places at which to look for one that trains, given what came of the ones before."""
    yield min(count // 2 if hint is None else hint, count - 1)
    if hint is not None:
        yield from sorted({max(0, hint - step) for step in (1, 2, 4)} - {hint}, reverse=True)
    while True:
        top = min((place for place, verdict in tried.items() if verdict in {"spiked", "diverged"}), default=count)
        edges = sorted({-1, top, *(place for place in tried if place < top)})
        gaps = [(high - low - 1, -low) for low, high in itertools.pairwise(edges)]
        width, start = max(gaps)
        if width <= 1:
            break
        yield -start + (width + 1) // 2
    yield 0  # alone may train


@dataclass(frozen=True)
class Boundary:
    """One seed's largest stable rate, and the next larger rate tried, which did not train; None where there is none."""

    stable: float | None
    unstable: float | None
    contradictions: int  # rates below the largest stable one that did not train, but for those too low

    @property
    def flags(self) -> list[str]:
        found = ["none stable"] if self.stable is None else ["stable to the top"] if self.unstable is None else []
        return found + (["non-monotone"] if self.contradictions else [])


def boundary(verdicts: Mapping[float, str]) -> Boundary:
    """The upper boundary in one seed's verdicts by rate.

    A run that stalled below every rate that trains was too slow: the lower boundary, no contradiction.
    """
    stable = [rate for rate, verdict in verdicts.items() if verdict == "stable"]
    if not stable:
        return Boundary(None, min(verdicts), 0)
    top, bottom = max(stable), min(stable)
    failed = [rate for rate, verdict in verdicts.items() if verdict != "stable"]
    wrong = [r for r in failed if r < top and (r > bottom or verdicts[r] != "stalled")]
    return Boundary(top, min((r for r in failed if r > top), default=None), len(wrong))


def ramped(runs: pd.DataFrame) -> pd.Series:
    """Which runs warm up over all of their steps: ramps, whose peak rate is only where they end."""
    return pd.Series(runs[WARMUP].eq(runs[STEPS]) & runs[STEPS].gt(0))


def settings(runs: pd.DataFrame) -> list[str]:
    """The settings that differ among these runs, apart from learning rate and seed."""
    dotted = [c for c in runs if "." in c and c != LR and c not in _PLACES and not c.startswith(_OUTSIDE)]
    return [c for c in [*dotted, *(c for c in _PLAIN if c in runs)] if len(set(map(str, runs[c]))) > 1]


def cells(runs: pd.DataFrame, by: list[str]) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """The runs of each combination of the given settings, with it; null is a value as any other."""
    if not by:
        yield {}, runs
        return
    named: dict[tuple[str, ...], list[int]] = {}
    for place, values in enumerate(runs[by].itertuples(index=False)):
        named.setdefault(tuple(map(str, values)), []).append(place)
    found = [runs.iloc[places] for places in named.values()]
    for mine in sorted(found, key=lambda mine: [_rank(mine[key].iloc[0]) for key in by]):
        yield {key: mine[key].iloc[0] for key in by}, mine


def _rank(value: Any) -> tuple[bool, float, str]:
    number = isinstance(value, int | float | np.number)
    return not number, float(value) if number and value == value else math.inf, str(value)


def trials(runs: pd.DataFrame) -> pd.DataFrame:
    """The finished runs that are evidence about a rate: trained, at a rate of their own."""
    return pd.DataFrame(runs[(runs.status == "finished") & runs[STEPS].gt(0) & ~ramped(runs)])


def thresholds(cell: pd.DataFrame) -> dict[int, Boundary]:
    """seed -> boundary, of one cell's runs. Of runs that differ in nothing else, a single one that fails is enough."""
    found = {}
    for seed, mine in cell.groupby("seed"):
        worst = mine.sort_values("verdict", key=lambda v: v == "stable").drop_duplicates(LR)
        found[int(str(seed))] = boundary(dict(zip(worst[LR], worst.verdict, strict=True)))
    return found


def lr50(runs: pd.DataFrame, by: list[str] | None = None) -> pd.DataFrame:
    """Per cell the learning rate at which half of the runs train, with a 95 % interval over seeds.

    P(stable) = 1 / (1 + (lr / LR50)^slope), by maximum likelihood over all verdicts of the cell, LR50 within the rates
    tried; runs too slow to learn are left out (see boundary). Where the verdicts are separated, that is, no rate that
    trains is above one that does not, the likelihood only tells the gap; its limit as slope -> inf is the middle of the
    gap in log rate, which is taken, with slope inf. Where all rates train LR50 is inf, where none does 0; `low` and
    `high` then keep the end of what was tried.
    The interval is a percentile bootstrap over seeds, widened to the gap of each resample: the grid tells no more.
    by: the columns that make a cell; default: settings(runs).
    """
    known = trials(runs)
    by = settings(known) if by is None else by
    rows = []
    for name, cell in cells(known, by):
        found = thresholds(cell)
        flags = {flag for one in found.values() for flag in one.flags}
        fits = _resampled(cell)
        row = {"lr50": fits[0][0], "low": fits[0][1], "high": fits[0][2], "slope": fits[0][3]}
        row["low"] = min(row["low"], _quantile([low for _, low, _, _ in fits[1:]], (1 - LEVEL) / 2))
        row["high"] = max(row["high"], _quantile([high for _, _, high, _ in fits[1:]], (1 + LEVEL) / 2))
        largest = ", ".join("none" if one.stable is None else f"{one.stable:g}" for one in found.values())
        counts = {"rates": cell[LR].nunique(), "seeds": len(found), "runs": len(cell)}
        rows.append(name | row | counts | {"largest_stable": largest, "flags": ", ".join(sorted(flags))})
    return pd.DataFrame(rows)


def _resampled(cell: pd.DataFrame) -> list[tuple[float, float, float, float]]:
    """The fit to all seeds, and to each of RESAMPLES draws of them with replacement."""
    trained = cell[cell.verdict == "stable"]
    slow = (cell.verdict == "stalled") & (cell[LR] < trained[LR].min())
    kept = cell[~slow]
    log_lr, stable = np.log(np.asarray(kept[LR], float)), np.asarray(kept.verdict == "stable")
    seeds, of = np.unique(np.asarray(kept.seed), return_inverse=True)
    draws = np.random.default_rng(0).multinomial(len(seeds), np.full(len(seeds), 1 / len(seeds)), RESAMPLES)
    distinct, again = np.unique(draws, axis=0, return_inverse=True)
    fits = [fit(log_lr, stable, weights[of]) for weights in distinct]
    return [fit(log_lr, stable, np.ones(len(kept))), *(fits[i] for i in again.ravel())]


def _quantile(values: list[float], share: float) -> float:
    return float(np.quantile(values, share, method="inverted_cdf"))  # one of the values: they may be infinite


def fit(log_lr: ArrayLike, stable: ArrayLike, weights: ArrayLike) -> tuple[float, float, float, float]:
    """(LR50, lower and upper edge of what the verdicts leave open, slope), of weighted runs; see lr50."""
    x, y, w = (np.asarray(a, dtype=float) for a in (log_lr, stable, weights))
    x, y, w = x[w > 0], y[w > 0], w[w > 0]
    trained, failed = x[y > 0], x[y == 0]
    if not len(failed):
        return math.inf, math.exp(trained.max()), math.inf, math.nan
    if not len(trained):
        return 0.0, 0.0, math.exp(failed.min()), math.nan
    if trained.max() <= failed.min():
        low, high = trained.max(), failed.min()
        return math.exp((low + high) / 2), math.exp(low), math.exp(high), math.inf

    def loss(at: np.ndarray) -> float:
        z = math.exp(at[1]) * (x - at[0])
        return float(w @ (y * np.logaddexp(0, z) + (1 - y) * np.logaddexp(0, -z)))

    box = [(x.min(), x.max()), (math.log(0.05), math.log(500))]
    starts = [((trained.max() + failed.min()) / 2, math.log(slope)) for slope in (1.0, 10.0)]
    best = min((optimize.minimize(loss, start, bounds=box, method="L-BFGS-B") for start in starts), key=lambda r: r.fun)
    middle = math.exp(best.x[0])
    return middle, middle, middle, math.exp(best.x[1])
