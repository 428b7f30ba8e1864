"""Largest stable learning rate by depth: LR50 over seeds, each seed's own, and the ramp's estimate."""

import itertools
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

import arms
import figure
from arms import DATA, DEPTH, PLACEMENT, WARMUP, Missing
from figure import Drawn
from normlab import frontier, ramp
from normlab.frontier import LR
from normlab.results import Results

STEM = "lr_frontier"
RATES = 3  # of a cell, at the least
DODGE = 0.2  # of the way to the next depth, over all arms


class Cells(NamedTuple):
    """table: frontier.lr50 with `arm` and the seeds' boundaries; runs: those that it is of; ramps: with arm, max_lr."""

    table: pd.DataFrame
    runs: pd.DataFrame
    ramps: pd.DataFrame
    note: str


def draw(data: Results) -> Drawn:
    found = measured(data)
    table = found.table
    depths = sorted(table[DEPTH].unique())
    styles = figure.arm_styles(table)
    fig, axes = plt.subplots(figsize=(5.2, 4.2))
    near = min((b / a for a, b in itertools.pairwise(depths)), default=1.5)
    places = {arm: near ** (DODGE * ((i + 0.5) / len(styles) - 0.5)) for i, arm in enumerate(styles)}
    for arm, style in styles.items():
        mine = table[table.arm == arm].sort_values(DEPTH)
        _arm(axes, mine, found.ramps[found.ramps.arm == arm], places[arm], style)
    axes.margins(0.08, 0.1)
    figure.depth_axis(axes, depths)
    figure.decade_axis(axes.yaxis)
    axes.set_ylabel("peak learning rate")
    fig.legend(handles=_legend(styles, found), loc="outside lower center", ncols=3)
    bad = table["flags"].str.contains("non-monotone").sum()
    size = f"{len(found.runs)} runs (at most {table.rates.max()} rates, {table.seeds.max()} seeds in a cell)"
    caption = (
        f"LR50, the learning rate at which half of the runs train, by a logistic fit to the verdicts of {size}; "
        "95 % bootstrap over seeds, widened to the gap between the rates tried. Light dots: each seed's largest stable "
        "rate. An arrow starts at a bound: some or all seeds train up to the largest rate, or at none."
        f"{f' Ringed: {bad} cells where a rate failed below one that trains.' if bad else ''}"
        f"{f' Open diamonds: ramps. {ramp.CAVEAT}' if len(found.ramps) else ''}{found.note}"
    )
    return Drawn(fig, _rows(found), caption)


def measured(data: Results) -> Cells:
    """The cells of the study with the most rates."""
    runs = arms.trained(data)
    best: tuple[tuple[int, int], pd.DataFrame, list[str]] | None = None
    studies = 0
    for _, mine in runs.groupby("study", sort=True):
        known = frontier.trials(mine)
        by = list(dict.fromkeys([PLACEMENT, DEPTH, *frontier.settings(known)]))
        by = [DATA if key == "data_sha256" else key for key in by]
        kept = [cell for _, cell in frontier.cells(known, by) if cell[LR].nunique() >= RATES] if len(known) else []
        if not kept:
            continue
        studies += 1
        rank = (max(cell[LR].nunique() for cell in kept), len(kept))
        if best is None or rank > best[0]:
            best = rank, pd.concat(kept), by
    if best is None:
        raise Missing(f"needs {RATES} learning rates (optim.lr) or more in a cell of otherwise equal settings")
    _, known, by = best
    table = arms.with_arms(frontier.lr50(known, by))
    table["boundaries"] = [frontier.thresholds(cell) for _, cell in frontier.cells(known, by)]
    study = known.study.iloc[0]
    rest = [key for key in by if key != WARMUP]
    ramps = ramp.estimates(runs[runs.study == study], data.steps)
    named = table.assign(key=_key(table, rest))[["key", "arm"]]
    ramps = ramps.assign(key=_key(ramps, rest)).merge(named, on="key")
    note = f" Of {studies} studies with {RATES} rates or more, {study} has the most." if studies > 1 else ""
    arm = dict(zip(_key(table, by), table.arm, strict=True))
    return Cells(table, known.assign(arm=_key(known, by).map(arm)), ramps, note)


def _key(table: pd.DataFrame, keys: list[str]) -> pd.Series:
    return pd.Series(["\0".join(map(str, row)) for row in table[keys].itertuples(index=False)], table.index, dtype=str)


def _arm(axes: Any, cells: pd.DataFrame, ramps: pd.DataFrame, shift: float, style: dict[str, Any]) -> None:
    colour = style["color"]
    whole = cells[np.isfinite(cells.lr50) & (cells.lr50 > 0)]
    axes.plot(whole[DEPTH] * shift, whole.lr50, **style | {"marker": "o", "markersize": 5, "markevery": 1}, zorder=4)
    for _, cell in cells.iterrows():
        x = cell[DEPTH] * shift
        for i, one in enumerate(cell.boundaries.values()):
            if one.stable is not None:
                spread = 1 + 0.008 * (i - (len(cell.boundaries) - 1) / 2)
                axes.plot(x * spread, one.stable, ".", color=colour, alpha=0.45, markersize=8, markeredgewidth=0)
        ends = [cell.low if cell.low > 0 else cell.lr50, cell.high if np.isfinite(cell.high) else cell.lr50]
        if 0 < cell.lr50 < np.inf:
            axes.plot([x, x], ends, color=colour, linewidth=1.2, zorder=3)
        if cell.low == 0:
            _arrow(axes, x, cell.lr50 or cell.high, 0.6, colour)
        if cell.high == np.inf:
            _arrow(axes, x, cell.lr50 if cell.lr50 < np.inf else cell.low, 1 / 0.6, colour)
        if "non-monotone" in cell["flags"]:
            middle = cell.lr50 if 0 < cell.lr50 < np.inf else max(cell.low, min(cell.high, cell.low or cell.high))
            axes.plot(x, middle, "o", markersize=11, fillstyle="none", color="#333333", markeredgewidth=1, zorder=5)
    known = ramps[ramps.max_lr > 0]
    axes.plot(known[DEPTH] * shift, known.max_lr, "D", fillstyle="none", color=colour, markersize=4.5, alpha=0.8)


def _arrow(axes: Any, x: float, start: float, factor: float, colour: str) -> None:
    """From a bound to where the value lies."""
    style = {"arrowstyle": "->", "color": colour, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (x, start * factor), (x, start), arrowprops=style, zorder=4)
    axes.plot(x, start, "_", color=colour, markersize=9, markeredgewidth=1.6, zorder=4)
    axes.update_datalim([(x, start * factor)])
    axes.autoscale_view()


def _legend(styles: dict[str, dict[str, Any]], found: Cells) -> list[Line2D]:
    handles = [Line2D([], [], label=arm, **style | {"marker": "o", "markersize": 5}) for arm, style in styles.items()]
    grey: dict[str, Any] = {"color": "#555555", "linestyle": ""}
    handles.append(Line2D([], [], label="one seed", marker=".", alpha=0.5, markersize=7, markeredgewidth=0, **grey))
    if len(found.ramps):
        handles.append(Line2D([], [], label="ramp", marker="D", fillstyle="none", markersize=4.5, **grey))
    if found.table["flags"].str.contains("non-monotone").any():
        handles.append(Line2D([], [], label="non-monotone", marker="o", fillstyle="none", markersize=10, **grey))
    return handles


def _rows(found: Cells) -> pd.DataFrame:
    """One row per run, with its cell's estimate beside it; a ramp's own."""
    key = ["arm", DEPTH]
    cells = found.table[[*key, "lr50", "low", "high", "slope", "flags"]]
    columns = ["study", "run_id", *key, "seed", LR, "verdict"]
    rows = found.runs[columns].merge(cells, on=key).assign(kind="trial")
    rises = found.ramps[[*columns, "max_lr", "bad_step", "flag"]].rename(columns={"flag": "flags"})
    return pd.concat([rows, rises.assign(kind="ramp")]) if len(rises) else rows


if __name__ == "__main__":
    figure.main(draw, STEM)
