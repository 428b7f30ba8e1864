"""Training loss by step, one panel per depth, one line per arm."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import arms
import figure
from arms import DATA, DEPTH
from figure import Drawn
from normlab.results import Results

STEM = "loss_curves"


def draw(data: Results) -> Drawn:
    runs = arms.with_arms(arms.trained(data))
    steps = arms.joined(data.steps, runs, ["arm", "seed", DEPTH])
    # A light median over 9 steps takes batch noise out and keeps a lasting change where it is; gaps stay gaps.
    finite = steps.loss.where(np.isfinite(steps.loss))
    smooth = finite.groupby(steps.run_id).transform(lambda s: s.rolling(9, center=True, min_periods=1).median())
    steps = steps.assign(shown=smooth.where(finite.notna()))
    drawn = curves(runs, steps, "training loss (nats)", "running median of 9 steps; ")
    columns = ["study", "run_id", "arm", DEPTH, "seed", "step", "loss"]
    return Drawn(drawn.figure, pd.DataFrame(steps[columns]), drawn.caption)


def curves(runs: pd.DataFrame, steps: pd.DataFrame, label: str, note: str = "") -> Drawn:
    """One panel per depth. A thin line is one seed; the thick one is the mean over the seeds that reached the step."""
    depths = sorted(runs[DEPTH].unique())
    styles = figure.arm_styles(runs)
    fig, panels = plt.subplots(1, len(depths), figsize=(3.4 * len(depths) + 1.0, 3.3), sharey=True, squeeze=False)
    top = max(runs.h1.max() + 0.5, steps.shown.quantile(0.9))
    one_text = runs[DATA].nunique() == 1
    for panel, depth in zip(panels[0], depths, strict=True):
        here = runs[runs[DEPTH] == depth]
        if one_text:
            references(panel, here, label=depth == depths[-1])
        for arm, style in styles.items():
            mine = steps[(steps[DEPTH] == depth) & (steps.arm == arm)].dropna(subset=["shown"])
            if mine.empty:
                continue
            if mine.run_id.nunique() > 1:
                for _, seed in mine.groupby("run_id"):
                    panel.plot(seed.step, seed.shown, **style | {"linewidth": 0.5, "alpha": 0.4, "marker": ""})
            mean = mine.groupby("step").shown.mean()
            panel.plot(mean.index, mean, label=arm, **style)
        for _, run in here[here.verdict == "diverged"].iterrows():
            mine = steps[steps.run_id == run.run_id].dropna(subset=["shown"])
            if len(mine):
                height = min(mine.shown.iloc[-1], top)
                panel.plot(mine.step.iloc[-1], height, "x", color=styles[run.arm]["color"], markersize=7,
                           markeredgewidth=2, clip_on=False, zorder=5)  # fmt: skip
        panel.set_title(f"depth {depth}")
        panel.set_xlabel("optimizer step")
    panels[0, 0].set_ylabel(label)
    panels[0, 0].set_ylim(top=top)
    legend = {t: h for p in panels[0] for h, t in zip(*p.get_legend_handles_labels(), strict=True)}
    fig.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=min(4, max(1, len(legend))))
    seeds = runs.seed.nunique()
    caption = (
        f"{label[0].upper()}{label[1:]} by step for {len(runs)} runs ({seeds} seed{'s' if seeds > 1 else ''}); "
        f"{note}a cross marks where a run that diverged was last seen."
        f"{' Grey: entropies of the evaluated tokens.' if one_text else ''}"
    )
    table = steps.dropna(subset=["shown"])[["study", "run_id", "arm", DEPTH, "seed", "step", "shown"]]
    return Drawn(fig, table.rename(columns={"shown": "val_loss"}), caption)


def references(panel: Any, runs: pd.DataFrame, label: bool) -> None:
    """Grey lines at the unigram and bigram entropy of the evaluated tokens."""
    for line, name in ((runs.h1.iloc[0], "unigram\nentropy"), (runs.h2.iloc[0], "bigram\nentropy")):
        panel.axhline(line, color="#888888", linewidth=0.8)
        if label:
            place = {"xycoords": ("axes fraction", "data"), "va": "center"}
            panel.annotate(name, (1.01, line), fontsize=7.5, color="#555555", **place)


if __name__ == "__main__":
    figure.main(draw, STEM)
