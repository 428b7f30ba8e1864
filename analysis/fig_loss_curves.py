"""Training loss by step, one panel per depth, one line per arm."""

import itertools
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import arms
import figure
from arms import DATA, DEPTH, PLACEMENT
from estimates import LR, best_lr
from figure import Drawn
from normlab.results import Results

STEM = "loss_curves"
READABLE = 8  # arms in one figure; beyond, each shows its best learning rate alone
BAND = 3  # seeds from which on a band takes the place of thin lines


def draw(data: Results) -> Drawn:
    runs, kept = readable(arms.trained(data))
    steps = arms.joined(data.steps, runs, ["arm", "seed", DEPTH])
    # A light median over 9 steps takes batch noise out and keeps a lasting change where it is; gaps stay gaps.
    finite = steps.loss.where(np.isfinite(steps.loss))
    smooth = finite.groupby(steps.run_id).transform(lambda s: s.rolling(9, center=True, min_periods=1).median())
    steps = steps.assign(shown=smooth.where(finite.notna()))
    drawn = curves(runs, steps, f"training loss ({arms.loss_unit(runs)})", "running median of 9 steps; ")
    columns = ["study", "run_id", "arm", DEPTH, "seed", "step", "loss"]
    return Drawn(drawn.figure, pd.DataFrame(steps[columns]), drawn.caption + kept)


def readable(runs: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """`runs` with arms, of too many arms those at their best learning rate, and a sentence that says so."""
    named = arms.with_arms(runs)
    if named.arm.nunique() <= READABLE or runs[LR].nunique() < 2:
        return named, ""
    apart = arms.with_arms(runs, LR)
    best = best_lr(apart, ["arm", DEPTH]).sort_index()
    told = (
        f"Each arm has, at each depth, its best of {runs[LR].nunique()} learning rates, by its seeds' mean final loss."
    )
    return best, f" {told} {len(runs) - len(best)} runs at other rates are not shown."


def curves(runs: pd.DataFrame, steps: pd.DataFrame, label: str, note: str = "") -> Drawn:
    """One panel per depth. Thick: the mean over seeds; a band from their least to their most, or thin lines for two.

    More than READABLE arms take several rows of panels.
    """
    depths = sorted(runs[DEPTH].unique())
    styles = figure.arm_styles(runs)
    rows = split(runs, list(styles))
    width = max((3.4 if len(depths) < 4 else 2.5) * len(depths) + 1.0, 6.0)
    columns = min(len(styles), max(1, int(width * 13 / (8 + max(map(len, styles))))))
    size = (width, 2.7 * len(rows) + 0.4 + 0.19 * -(-len(styles) // columns))
    fig, panels = plt.subplots(len(rows), len(depths), figsize=size, sharex=True, sharey=True, squeeze=False)
    top = ceiling(runs, steps)
    one_text = runs[DATA].nunique() == 1
    for row, shown in zip(panels, rows, strict=True):
        for panel, depth in zip(row, depths, strict=True):
            here = runs[runs[DEPTH] == depth]
            if one_text:
                references(panel, here, label=depth == depths[-1])
            for arm in shown:
                draw_arm(panel, here[here.arm == arm], steps, styles[arm], arm, top)
        row[0].set_ylabel(label)
    for first, last, depth in zip(panels[0], panels[-1], depths, strict=True):
        first.set_title(f"depth {depth}")
        last.set_xlabel("optimizer step")
    floor = float(np.nanmin([steps.shown.min(), runs.h2.min() if one_text else np.nan]))
    panels[0, 0].set_ylim(floor - 0.05 * (top - floor), top)
    legend = {t: h for p in panels.flat for h, t in zip(*p.get_legend_handles_labels(), strict=True)}
    fig.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=columns)
    seeds = runs.seed.nunique()
    banded = (runs.groupby(["arm", DEPTH]).size() >= BAND).any()
    caption = (
        f"{label[0].upper()}{label[1:]} by step for {len(runs)} runs ({arms.seeds(runs)}); "
        f"{note}{'bands: least to most over the seeds; ' if banded else ''}"
        f"a cross marks where a run that diverged was last seen"
        f"{'; from its first bad step on it enters its mean with its loss at initialisation' if seeds > 1 else ''}."
        f"{' Grey: entropies of the evaluated tokens.' if one_text else ''}"
    )
    table = steps.dropna(subset=["shown"])[["study", "run_id", "arm", DEPTH, "seed", "step", "shown"]]
    return Drawn(fig, table.rename(columns={"shown": "val_loss"}), caption)


def split(runs: pd.DataFrame, order: list[str]) -> list[list[str]]:
    """Arms by rows of panels, READABLE at the most in each, a placement's together where they fit."""
    of_arm = dict(zip(runs.arm, runs[PLACEMENT], strict=True))
    rows: list[list[str]] = [[]]
    for _, group in itertools.groupby(order, of_arm.get):
        together = list(group)
        for mine in (together[i : i + READABLE] for i in range(0, len(together), READABLE)):
            if len(rows[-1]) + len(mine) > READABLE:
                rows.append([])
            rows[-1].extend(mine)
    return rows


def ceiling(runs: pd.DataFrame, steps: pd.DataFrame) -> float:
    """Where the panels end: what diverged may have gone anywhere, and does not set the scale."""
    sane = steps[steps.run_id.isin(runs.run_id[runs.verdict != "diverged"])].shown
    return float(np.nanmax([runs.h1.max() + 0.5, sane.quantile(0.9), 1.02 * runs.init_val_loss.median()]))


def draw_arm(panel: Any, runs: pd.DataFrame, steps: pd.DataFrame, style: dict[str, Any], arm: str, top: float) -> None:
    """The runs of one arm at one depth, one per seed."""
    table = steps[steps.run_id.isin(runs.run_id)].pivot(index="step", columns="run_id", values="shown")
    table = table.dropna(how="all")
    if table.empty:
        return
    counted = capped(table, runs.set_index("run_id"))
    mean = counted.mean(axis=1)
    panel.plot(mean.index, mean, label=arm, **style)
    band = len(runs) >= BAND
    if band:
        panel.fill_between(mean.index, counted.min(axis=1), counted.max(axis=1), color=style["color"], alpha=0.15,
                           linewidth=0)  # fmt: skip
    for _, run in runs.iterrows():
        mine = table.get(run.run_id, pd.Series(dtype=float)).dropna()
        diverged = run.verdict == "diverged"
        if mine.empty:
            continue
        if len(runs) > 1 and (diverged or not band):
            panel.plot(mine.index, mine, **style | {"linewidth": 0.5, "alpha": 0.6, "marker": ""})
        if diverged:
            panel.plot(mine.index[-1], min(mine.iloc[-1], top), "x", color=style["color"], markersize=7,
                       markeredgewidth=2, clip_on=False, zorder=5)  # fmt: skip


def capped(table: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Losses (step, run_id) as a mean counts them: a diverged run's are at most the one at initialisation, which it
    keeps from its first bad step, or its last one, to the end."""
    found = table.copy()
    for run_id in table.columns:
        if runs.verdict[run_id] != "diverged":
            continue
        cap, bad = runs.init_val_loss[run_id], runs.first_bad_step[run_id]
        last = table[run_id].last_valid_index()
        gone = table.index > last if last is not None else table.index >= 0
        if bad == bad and bad is not None:
            gone |= table.index >= bad
        found[run_id] = table[run_id].clip(upper=cap).mask(gone, cap)
    return found


def references(panel: Any, runs: pd.DataFrame, label: bool) -> None:
    """Grey lines at the unigram and bigram entropy of the evaluated tokens, of numbers at what a constant and a line
    come to."""
    names = ("unigram\nentropy", "bigram\nentropy") if arms.loss_unit(runs) == "nats" else ("constant", "line")
    for line, name in zip((runs.h1.iloc[0], runs.h2.iloc[0]), names, strict=True):
        panel.axhline(line, color="#888888", linewidth=0.8)
        if label:
            place = {"xycoords": ("axes fraction", "data"), "va": "bottom" if name == names[0] else "top"}
            panel.annotate(name, (1.01, line), fontsize=7.5, color="#555555", **place)


if __name__ == "__main__":
    figure.main(draw, STEM)
