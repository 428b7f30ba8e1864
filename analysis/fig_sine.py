"""Mean squared error of the sine exercise by step, pre- against post-norm, one panel per learning rate."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import arms
import choices
import estimates
import figure
from arms import DEPTH, PLACEMENT, Missing
from estimates import LR
from figure import Drawn
from normlab.results import Results

STEM = "sine"
WINDOW = 9  # steps of the running median


def selected(data: Results) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """(runs on data=sine that differ in placement, their steps with `shown`, what was left out).

    shown: the running median of the loss; after a run's last finite one, its loss at initialisation.
    """
    on = data.runs[data.runs["data.name"] == "sine"] if "data.name" in data.runs else data.runs
    if on.empty:
        raise Missing("needs training runs with data=sine")
    runs, left_out = choices.comparable(data._replace(runs=on), PLACEMENT, "pre", LR)
    who = runs[["study", "run_id", PLACEMENT, LR, DEPTH, "seed", "verdict"]]
    every = who.merge(pd.DataFrame({"step": np.arange(int(runs.steps.max()))}), how="cross")
    steps = every.merge(data.steps[["run_id", "step", "loss"]], on=["run_id", "step"], how="left")
    finite = steps.loss.where(np.isfinite(steps.loss))
    smooth = finite.groupby(steps.run_id).transform(lambda s: s.rolling(WINDOW, center=True, min_periods=1).median())
    cap = steps.run_id.map(runs.set_index("run_id").init_val_loss)
    return runs, steps.assign(shown=smooth.where(finite.notna()).fillna(cap)), left_out


def draw(data: Results) -> Drawn:
    runs, steps, left_out = selected(data)
    rates = sorted(runs[LR].unique())
    fig, panels = plt.subplots(1, len(rates) + 1, figsize=(2.7 * len(rates) + 3.2, 3.5), sharey=True, squeeze=False)
    placements = arms.in_order(runs[PLACEMENT].unique())
    for panel, rate in zip(panels[0], rates, strict=False):
        panel.axhline(runs.h1.iloc[0], color="#888888", linewidth=0.9)
        for placement in placements:
            mine = steps[(steps[LR] == rate) & (steps[PLACEMENT] == placement)]
            by_step = mine.groupby("step").shown
            colour = figure.colour(placement)
            panel.fill_between(by_step.min().index, by_step.min(), by_step.max(), color=colour, alpha=0.2, linewidth=0)
            panel.plot(by_step.median(), color=colour, label=arms.placement_name(placement))
            for _, run in mine[mine.verdict == "diverged"].groupby("run_id"):
                panel.plot(run.step.iloc[-1], run.shown.iloc[-1], "x", color=colour, markersize=7, markeredgewidth=1.8,
                           clip_on=False, zorder=5)  # fmt: skip
        panel.set_title(f"lr {rate:g}")
        panel.set_xlabel("optimizer step")
    told = finals(panels[0, -1], runs, placements, rates)
    panels[0, 0].set_ylabel("mean squared error")
    figure.decade_axis(panels[0, 0].yaxis)
    place = {"xycoords": ("axes fraction", "data"), "va": "center"}
    panels[0, -1].annotate("variance of\nthe target", (1.01, runs.h1.iloc[0]), fontsize=7.5, color="#555555", **place)
    fig.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    caption = (
        f"Mean squared training error by step (running median of {WINDOW}), depth {runs[DEPTH].iloc[0]}: median over "
        f"{runs.seed.nunique()} seeds, band from the lowest seed to the highest; grey: the variance of the "
        "target. Right: final validation error by learning rate: seeds, and means with 95 % bootstrap intervals, too "
        f"narrow for few seeds. A run that diverged (cross) counts with its error at initialisation. {told}{left_out}"
    )
    columns = ["study", "run_id", PLACEMENT, LR, DEPTH, "seed", "verdict", "step", "loss"]
    return Drawn(fig, steps.dropna(subset=["loss"])[columns], caption)


def finals(panel: Any, runs: pd.DataFrame, placements: list[str], rates: list[float]) -> str:
    """Draw final errors by learning rate; returns a sentence with the paired differences of post- to pre-norm."""
    panel.axhline(runs.h1.iloc[0], color="#888888", linewidth=0.9)
    for i, placement in enumerate(placements):
        colour, shift = figure.colour(placement), 0.22 * (i - (len(placements) - 1) / 2)
        for x, rate in enumerate(rates):
            mine = runs[(runs[PLACEMENT] == placement) & (runs[LR] == rate)]
            if mine.empty:
                continue
            bad = mine.verdict == "diverged"
            for rows, marker in ((mine[~bad], "o"), (mine[bad], "x")):
                panel.plot([x + shift - 0.06] * len(rows), rows.loss, marker, color=colour, markersize=4, alpha=0.6)
            mean = estimates.mean(mine.loss)
            panel.plot([x + shift + 0.04] * 2, [mean.low, mean.high], color=colour, linewidth=1.8)
            panel.plot(x + shift + 0.04, mean.value, "D", color=colour, markersize=4.5)
    panel.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    panel.set_xlabel("learning rate")
    panel.set_title("final validation error")
    if "post" not in placements:
        return ""
    told = []
    for rate in rates:
        found = choices.differences(runs[runs[LR] == rate], PLACEMENT, "pre")
        post = found[found[PLACEMENT] == "post"]
        if len(post) and post.difference_n.iloc[0]:
            names = ["difference_mean", "difference_low", "difference_high", "difference_n"]
            told.append(f"{estimates.Estimate(*post.iloc[0][names]).told('{:+.2g}')} at lr {rate:g}")
    return f"Post-norm's less pre-norm's final error, paired by seed: {'; '.join(told)}." if told else ""


if __name__ == "__main__":
    figure.main(draw, STEM)
