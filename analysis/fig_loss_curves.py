"""Training loss by step, one panel per depth, one line per arm."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import arms
import figure
from arms import DATA, DEPTH
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
    drawn = curves(runs, steps, "training loss (nats)", "running median of 9 steps; ")
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
    """One panel per depth. Thick: the mean over seeds; a band from their least to their most, or thin lines for two."""
    depths = sorted(runs[DEPTH].unique())
    styles = figure.arm_styles(runs)
    columns = min(4, len(styles)) if len(depths) > 1 else min(2, len(styles))
    height = 3.1 + 0.19 * -(-len(styles) // columns)
    fig, panels = plt.subplots(1, len(depths), figsize=(3.4 * len(depths) + 1.0, height), sharey=True, squeeze=False)
    top = ceiling(runs, steps)
    one_text = runs[DATA].nunique() == 1
    for panel, depth in zip(panels[0], depths, strict=True):
        here = runs[runs[DEPTH] == depth]
        if one_text:
            references(panel, here, label=depth == depths[-1])
        for arm, style in styles.items():
            draw_arm(panel, here[here.arm == arm], steps, style, arm, top)
        panel.set_title(f"depth {depth}")
        panel.set_xlabel("optimizer step")
    panels[0, 0].set_ylabel(label)
    panels[0, 0].set_ylim(top=top)
    legend = {t: h for p in panels[0] for h, t in zip(*p.get_legend_handles_labels(), strict=True)}
    fig.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=columns)
    seeds = runs.seed.nunique()
    banded = (runs.groupby(["arm", DEPTH]).size() >= BAND).any()
    caption = (
        f"{label[0].upper()}{label[1:]} by step for {len(runs)} runs ({seeds} seed{'s' if seeds > 1 else ''}); "
        f"{note}{'bands: least to most over the seeds; ' if banded else ''}"
        f"a cross marks where a run that diverged was last seen"
        f"{', from where it enters its mean with its loss at initialisation' if seeds > 1 else ''}."
        f"{' Grey: entropies of the evaluated tokens.' if one_text else ''}"
    )
    table = steps.dropna(subset=["shown"])[["study", "run_id", "arm", DEPTH, "seed", "step", "shown"]]
    return Drawn(fig, table.rename(columns={"shown": "val_loss"}), caption)


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
    """Grey lines at the unigram and bigram entropy of the evaluated tokens."""
    for line, name in ((runs.h1.iloc[0], "unigram\nentropy"), (runs.h2.iloc[0], "bigram\nentropy")):
        panel.axhline(line, color="#888888", linewidth=0.8)
        if label:
            place = {"xycoords": ("axes fraction", "data"), "va": "center"}
            panel.annotate(name, (1.01, line), fontsize=7.5, color="#555555", **place)


if __name__ == "__main__":
    figure.main(draw, STEM)
