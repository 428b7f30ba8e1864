"""One setting's values side by side: final losses at each one's best rate and at one rate, and paired differences."""

from collections.abc import Iterable
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import arms
import estimates
import figure
from arms import DEPTH, PLACEMENT, Missing
from estimates import LR
from figure import Drawn
from normlab.results import Results

ESTIMATED = ("study", "run_id", LR, "seed", "verdict", "loss", "mean", "low", "high", "n")  # a run and its cell
BEST, SAME = "best rate", "same rate"
COLOURS = {BEST: figure.PALETTE[0], SAME: figure.PALETTE[2]}
BAD = figure.PALETTE[1]  # diverged
LINEAR = 0.01  # nats on both sides of no difference that the difference axis shows linearly

CONTRAST = "right: paired by seed"
AXIS = f"linear within ±{LINEAR:g}, logarithmic beyond."
ESTIMATES = (
    "Diamonds: means with 95 % bootstrap intervals over seeds, too narrow for few seeds; dots: seeds. A run that "
    "diverged (cross) counts with its loss at initialisation."
)


def comparable(data: Results, key: str, reference: str, *free: str) -> tuple[pd.DataFrame, str]:
    """The training runs, with `loss`, of the setting in which most runs differ in `key`, and a sentence that names it.

    free: further settings that may differ. A cell of them without the reference and another value is left out.
    """
    runs = arms.trained(data)
    if key not in runs or reference not in set(runs[key]) or runs[key].nunique() < 2:
        raise Missing(f"needs training runs with {key}={reference} and another value of it")
    rest = [k for k in [DEPTH, *arms.varying(runs)] if k not in {key, *free}]
    cell = [named(runs, rest), *(runs[k].map(str) for k in free if k != LR)]
    both = (runs[key] == reference).groupby(cell).transform("any") & (runs[key].groupby(cell).transform("nunique") > 1)
    if not both.any():
        raise Missing(f"needs training runs with {key}={reference} and another value of it, the rest alike")
    kept, note = commonest(runs[both], rest)
    return kept.assign(loss=estimates.capped_loss(kept)), note


def commonest(runs: pd.DataFrame, keys: list[str]) -> tuple[pd.DataFrame, str]:
    """The runs of the setting of `keys` that most have, and a sentence that names it where there are several."""
    settings = named(runs, keys)
    counts = settings.value_counts()
    chosen = min(counts.index[counts == counts.max()])
    note = f" Of {len(counts)} settings, this one is shown: {chosen}." if len(counts) > 1 else ""
    return runs[settings == chosen], note


def named(runs: pd.DataFrame, keys: list[str]) -> pd.Series:
    return pd.Series([", ".join(f"{k}={run[k]}" for k in keys) for _, run in runs.iterrows()], runs.index, dtype=str)


def rates(runs: pd.DataFrame, key: str) -> pd.DataFrame:
    """The runs of a cell twice, `at` the best rate of each value and at the one that is the best for most values.

    Of rates that are equally often the best the lowest is taken, among those that most values were run at.
    """
    if runs[LR].nunique() == 1:
        return runs.assign(at=SAME)
    best = estimates.best_lr(runs, [key])
    votes = best.groupby(key)[LR].first().value_counts()
    whole = runs.groupby(LR)[key].nunique()
    votes = votes.reindex(whole.index[whole == whole.max()], fill_value=0).sort_index()
    same = runs[runs[LR] == votes.idxmax()]
    return pd.concat([best.assign(at=BEST), same.assign(at=SAME)])


def differences(runs: pd.DataFrame, key: str, reference: str) -> pd.DataFrame:
    """Rows of a cell at one `at`: each run's loss less that of the same seed's reference run, and the mean by value.

    difference_low, difference_high: its bootstrap interval; difference_n: pairs.
    """
    base = runs[runs[key] == reference].groupby("seed").loss.mean()
    rows = runs.assign(difference=runs.loss - runs.seed.map(base))
    parts = []
    for value, mine in rows.groupby(key, sort=False):
        mean = estimates.mean(mine.loss)
        paired = estimates.mean(mine.difference.dropna())
        if value == reference:
            mine = mine.assign(difference=np.nan)
            paired = estimates.Estimate(np.nan, np.nan, np.nan, 0)
        columns = dict(zip(("mean", "low", "high", "n"), mean, strict=True))
        columns |= {f"difference_{name}": part for name, part in zip(columns, paired, strict=True)}
        parts.append(mine.assign(**columns, diverged=int((mine.verdict == "diverged").sum())))
    return pd.concat(parts)


def table_of(runs: pd.DataFrame, key: str, reference: str, cell: list[str]) -> pd.DataFrame:
    """rates and differences of every cell, a row per run and `at`."""
    parts = []
    for _, mine in runs.groupby(cell, sort=False):
        chosen = rates(mine, key)
        parts += [differences(group, key, reference) for _, group in chosen.groupby("at", sort=False)]
    return pd.concat(parts, ignore_index=True)


def draw(data: Results, key: str, reference: str, known: Iterable[str], about: str = "") -> Drawn:
    """A row of panels per placement: losses at the best rates, at the same rate, differences to the reference."""
    runs, left_out = comparable(data, key, reference, PLACEMENT, LR)
    table = table_of(runs, key, reference, [PLACEMENT])
    placements = arms.in_order(table[PLACEMENT].unique())
    rank = {value: i for i, value in enumerate(known)}
    order = sorted(table[key].unique(), key=lambda value: (value != reference, rank.get(value, len(rank)), value))
    ats = list(table["at"].unique())
    size = (3.1 * len(ats) + 4.6, (0.42 * len(order) + 0.75) * len(placements) + 0.4)
    widths = [1.0] * len(ats) + [1.1]
    fig, panels = plt.subplots(
        len(placements), len(widths), figsize=size, sharex="col", squeeze=False, width_ratios=widths
    )
    for line, placement in zip(panels, placements, strict=True):
        here = table[table[PLACEMENT] == placement]
        for panel, at in zip(line, ats, strict=False):
            mine = here[here["at"] == at]
            used = mine.groupby(key)[LR].first()
            names = [f"{value}, lr {used[value]:g}" if value in used and at == BEST else value for value in order]
            losses(panel, mine, key, order, COLOURS[at], names)
            panel.set_title(
                f"{arms.placement_name(placement)}, " + ("best rates" if at == BEST else f"lr {used.iloc[0]:g}")
            )
        contrasts(line[-1], here, key, order, reference, reach(table))
        line[-1].set_title(f"difference to {reference}, same seed")
        for panel in line[1:]:
            panel.tick_params(labelleft=False)
    for panel in panels[-1, :-1]:
        panel.set_xlabel("final validation loss (nats)")
    panels[-1, -1].set_xlabel("difference in loss (nats)")
    both = "at each one's best learning rate, chosen on the same seeds, and at the rate that is the best for most"
    caption = (
        f"Final validation loss by {key} {both if len(ats) > 1 else 'at one learning rate'}; {CONTRAST} with "
        f"{reference}, {AXIS} {ESTIMATES}{about}{left_out}"
    )
    columns = [*ESTIMATED[:2], "at", PLACEMENT, DEPTH, key, *ESTIMATED[2:]]
    columns += ["diverged", "difference", "difference_mean", "difference_low", "difference_high", "difference_n"]
    table = table.sort_values(["at", PLACEMENT, key, "seed"], ignore_index=True)
    return Drawn(fig, table[columns], caption)


def losses(
    panel: Any, rows: pd.DataFrame, key: str, order: list[str], colour: str, names: list[str] | None = None
) -> None:
    """A line per value: mean and interval, below it the seeds; crosses and the count on the right are diverged ones."""
    for y, value in enumerate(order):
        mine = rows[rows[key] == value]
        if mine.empty:
            continue
        bad = mine.verdict == "diverged"
        panel.plot(
            mine.loss[~bad], [y + 0.25] * (~bad).sum(), "o", color=colour, alpha=0.5, markersize=4, markeredgewidth=0
        )
        panel.plot(mine.loss[bad], [y + 0.25] * bad.sum(), "x", color=BAD, markersize=5, markeredgewidth=1.4)
        interval(panel, mine.iloc[0][["mean", "low", "high"]], y - 0.08, colour)
        if bad.any():
            note(panel, f"{bad.sum()}/{len(mine)} diverged", y, BAD)
    lines(panel, names or order)


def reach(table: pd.DataFrame) -> float:
    """How far the axis of the differences goes on both sides (nats)."""
    found = table[["difference_mean", "difference_low", "difference_high"]].abs().max().max()
    return max(2 * LINEAR, 2 * np.nan_to_num(found))


def contrasts(panel: Any, rows: pd.DataFrame, key: str, order: list[str], reference: str, far: float) -> None:
    """The mean paired difference of each value to the reference, at each `at`, with its numbers on the right."""
    ats = list(rows["at"].unique())
    for y, value in enumerate(order):
        for i, at in enumerate(ats):
            mine = rows[(rows[key] == value) & (rows["at"] == at)]
            if mine.empty or value == reference or not mine.difference_n.iloc[0]:
                continue
            height = y + 0.36 * (i - (len(ats) - 1) / 2)
            found = estimates.Estimate(
                *mine.iloc[0][["difference_mean", "difference_low", "difference_high", "difference_n"]]
            )
            interval(panel, found[:3], height, COLOURS[at])
            note(panel, found.told("{:+.3f}" if far > 0.05 else "{:+.4f}"), height, COLOURS[at])
    panel.axvline(0, color="#444444", linewidth=0.9)
    panel.set_xscale("symlog", linthresh=LINEAR)
    panel.set_xlim(-far, far)
    ticks = [t for t in (0.01, 0.1, 1.0, 10.0) if t <= far]
    ticks = [-t for t in reversed(ticks)] + [0.0, *ticks]
    panel.set_xticks(ticks, [f"{t:+g}" if t else "0" for t in ticks])
    panel.xaxis.set_minor_locator(plt.NullLocator())
    lines(panel, order)


def interval(panel: Any, found: Iterable[float], y: float, colour: str) -> None:
    value, low, high = found
    if not np.isnan(low):
        panel.plot([low, high], [y, y], color=colour, linewidth=1.8, solid_capstyle="butt")
    panel.plot([value], [y], "D", color=colour, markersize=4.5)


def note(panel: Any, text: str, y: float, colour: str) -> None:
    place = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
    panel.annotate(text, (1.02, y), fontsize=7.5, color=colour, **place)


def lines(panel: Any, order: list[str]) -> None:
    panel.set_ylim(len(order) - 0.5, -0.5)
    panel.set_yticks(range(len(order)), order)
    panel.tick_params(axis="y", length=0)
    for y in range(1, len(order)):
        panel.axhline(y - 0.5, color="#dddddd", linewidth=0.6)
    panel.grid(visible=False, axis="y")
