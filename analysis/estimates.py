"""Estimates with intervals over seeds: means, pairs, rates, survival, and comparisons at one rate or the best.

Every finished run counts. A diverged one enters with its loss at initialisation, the cap of Wortsman et al. 2023
(arXiv 2309.14322, section 2); a run that ended above that loss enters with it too.
"""

import warnings
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import stats

import arms
from arms import DEPTH

LR = "optim.lr"
LEVEL = 0.95
RESAMPLES = 2000


class Estimate(NamedTuple):
    """A number, its interval at LEVEL (NaN where there are too few values), and from how many values."""

    value: float
    low: float
    high: float
    n: int

    def told(self, form: str = "{:.3f}") -> str:
        """value [low, high], n = N."""
        interval = "" if np.isnan(self.low) else f" [{form.format(self.low)}, {form.format(self.high)}]"
        return f"{form.format(self.value)}{interval}, n = {self.n}"


def capped_loss(runs: pd.DataFrame) -> pd.Series:
    """Final validation loss, at most the one at initialisation, which a diverged run gets (nats)."""
    loss = pd.to_numeric(runs.final_val_loss, errors="coerce")
    bad = (runs.verdict == "diverged") | ~np.isfinite(loss)
    return loss.where(~bad, runs.init_val_loss).clip(upper=runs.init_val_loss).astype(float)


def mean(values: ArrayLike) -> Estimate:
    """Mean with a percentile bootstrap interval, too narrow for few seeds; of fewer than three values none."""
    return _bootstrap(values, np.mean)


def interquartile_mean(values: ArrayLike) -> Estimate:
    """Mean of the middle half (Agarwal et al. 2021, arXiv 2108.13264), with a bootstrap interval."""
    return _bootstrap(values, lambda x, axis=-1: stats.trim_mean(x, 0.25, axis=axis))


def median(values: ArrayLike) -> Estimate:
    """Median with a percentile bootstrap interval."""
    return _bootstrap(values, np.median)


def _bootstrap(values: ArrayLike, statistic) -> Estimate:
    x = np.asarray(values, dtype=float)
    if len(x) == 0:
        return Estimate(np.nan, np.nan, np.nan, 0)
    centre = float(statistic(x))
    if len(x) < 3:
        return Estimate(centre, np.nan, np.nan, len(x))
    drawn = np.random.default_rng(0).integers(0, len(x), (RESAMPLES, len(x)))
    low, high = np.quantile(statistic(x[drawn], axis=-1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(centre, float(low), float(high), len(x))


def rate(count: int, n: int) -> Estimate:
    """A share of n with its Clopper-Pearson interval."""
    if n == 0:
        return Estimate(np.nan, np.nan, np.nan, 0)
    interval = stats.binomtest(count, n).proportion_ci(LEVEL, method="exact")
    return Estimate(count / n, float(interval.low), float(interval.high), n)


def poisson_rate(count: int, exposure: float) -> Estimate:
    """Events per unit of exposure with Garwood's exact interval; n is the count. None without exposure.

    Takes events as independent: where they come in bursts or from few of the runs the interval is too narrow.
    """
    if exposure <= 0:
        return Estimate(np.nan, np.nan, np.nan, count)
    low = stats.chi2.ppf((1 - LEVEL) / 2, 2 * count) / 2 if count else 0.0
    high = stats.chi2.ppf((1 + LEVEL) / 2, 2 * count + 2) / 2
    return Estimate(count / exposure, float(low) / exposure, float(high) / exposure, count)


def survival(steps: ArrayLike, diverged: ArrayLike) -> pd.DataFrame:
    """Kaplan-Meier: the share of runs that have not diverged by each step, with Greenwood's log-log interval.

    steps: where a run diverged, or where it ended without.
    """
    at, event = np.asarray(steps, dtype=float), np.asarray(diverged, dtype=bool)
    found = stats.ecdf(stats.CensoredData(uncensored=at[event], right=at[~event])).sf
    table = pd.DataFrame({"step": found.quantiles, "share": found.probabilities})
    if event.any() and len(at) > 1:
        with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)  # no interval at a share of 0 or 1: NaN says so
            interval = found.confidence_interval(LEVEL, method="log-log")
        return table.assign(low=interval.low.probabilities, high=interval.high.probabilities)
    return table.assign(low=np.nan, high=np.nan)


def paired(runs: pd.DataFrame, key: str, first: object, second: object) -> pd.DataFrame:
    """Runs that differ in `key` alone, side by side: the seed, the other settings, loss_first, loss_second, difference.

    difference = loss(second) - loss(first), capped losses.
    """
    rest = [k for k in arms.varying(runs) if k != key]
    on = [DEPTH, "seed", *rest]
    values = runs.assign(loss=capped_loss(runs), **{k: runs[k].map(str) for k in rest})
    one, two = values[values[key] == first], values[values[key] == second]
    kept = [*on, "loss", "verdict"]
    both = one[kept].merge(two[kept], on=on, suffixes=("_first", "_second"), validate="one_to_one")
    return both.assign(difference=both.loss_second - both.loss_first)


def best_lr(runs: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """The runs of each cell's best learning rate: the one whose mean capped loss over seeds is least.

    by: the columns that make a cell. Only rates that every seed of the cell has are candidates, or, where there is no
    such rate, those that most seeds have; of equal means the lower rate is taken. The choice is made on the same seeds
    that it is judged on, so a best loss is a little too good.
    """
    kept = []
    cells = runs.assign(loss=capped_loss(runs))
    for _, cell in cells.groupby(by, sort=True, dropna=False) if by else [((), cells)] if len(cells) else []:
        seeds = cell.groupby(LR).seed.nunique()
        whole = cell[cell[LR].isin(seeds.index[seeds == seeds.max()])]
        means = whole.groupby(LR).loss.mean()
        kept.append(whole[whole[LR] == means.idxmin()])
    return pd.concat(kept) if kept else runs.iloc[:0].assign(loss=pd.Series(dtype=float))


def lr_sensitivity(cell: pd.DataFrame) -> float:
    """Wortsman et al. 2023, section 2: the mean over the rates of min(loss, loss at initialisation), less the best one.

    cell: one seed's runs over the learning rates.
    """
    losses = capped_loss(cell).groupby(cell[LR]).mean()
    return float(losses.mean() - losses.min())


def lr_sensitivities(runs: pd.DataFrame, grid: ArrayLike) -> pd.Series:
    """seed -> LR sensitivity over the rates of `grid`, of the seeds that were run at every one of them."""
    rates = np.unique(np.asarray(grid, dtype=float))
    found = {}
    for seed, mine in runs[runs[LR].isin(rates)].groupby("seed"):
        if mine[LR].nunique() == len(rates):
            found[seed] = lr_sensitivity(mine)
    return pd.Series(found, dtype=float).rename_axis("seed")
