"""Training loss by step, one panel per depth, one line per arm."""

import matplotlib.pyplot as plt
import pandas as pd

import figure
from figure import DEPTH, Drawn
from normlab.results import Results

STEM = "loss_curves"


def draw(data: Results) -> Drawn:
    runs = figure.with_arms(figure.trained(data))
    steps = figure.joined(data.steps, runs, ["arm", "seed", DEPTH])
    # A light median over 9 steps takes batch noise out and keeps a lasting change where it is.
    smooth = steps.groupby("run_id").loss.transform(lambda s: s.rolling(9, center=True, min_periods=1).median())
    return curves(runs, steps.assign(shown=smooth), "training loss (nats)", "running median of 9 steps; ")


def curves(runs: pd.DataFrame, steps: pd.DataFrame, label: str, note: str = "") -> Drawn:
    """One panel per depth. A thin line is one seed; the thick one is the mean over the seeds that reached the step."""
    depths = sorted(runs[DEPTH].unique())
    styles = figure.arm_styles(runs)
    fig, panels = plt.subplots(1, len(depths), figsize=(3.4 * len(depths) + 1.0, 3.3), sharey=True, squeeze=False)
    for panel, depth in zip(panels[0], depths, strict=True):
        here = runs[runs[DEPTH] == depth]
        for line, name in ((here.h1.mean(), "unigram\nentropy"), (here.h2.mean(), "bigram\nentropy")):
            panel.axhline(line, color="#888888", linewidth=0.8)
            if depth == depths[-1]:
                panel.annotate(name, (1.01, line), xycoords=("axes fraction", "data"), fontsize=7.5, color="#555555",
                               va="center")  # fmt: skip
        for arm, style in styles.items():
            mine = steps[(steps[DEPTH] == depth) & (steps.arm == arm)].dropna(subset=["shown"])
            if mine.empty:
                continue
            for _, seed in mine.groupby("run_id"):
                panel.plot(seed.step, seed.shown, linewidth=0.5, alpha=0.4, **style)
            mean = mine.groupby("step").shown.mean()
            panel.plot(mean.index, mean, label=arm, **style)
            broken = here[(here.arm == arm) & here.first_bad_step.notna()]
            for step in broken.first_bad_step:
                panel.plot(step, mine.shown.iloc[-1], "x", color=style["color"], markersize=7, markeredgewidth=2)
        panel.set_title(f"depth {depth}")
        panel.set_xlabel("optimizer step")
    panels[0, 0].set_ylabel(label)
    panels[0, 0].set_ylim(top=max(runs.h1.max() + 0.5, steps.shown.quantile(0.9)))
    handles, labels = panels[0, -1].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
    seeds = runs.seed.nunique()
    caption = (
        f"{label[0].upper()}{label[1:]} by step for {len(runs)} runs ({seeds} seed{'s' if seeds > 1 else ''}); "
        f"{note}a cross marks the step at which a run diverged. Grey: entropies of the evaluated tokens."
    )
    table = steps.dropna(subset=["shown"])[["study", "run_id", "arm", DEPTH, "seed", "step", "shown"]]
    return Drawn(fig, table.rename(columns={"shown": "loss"}), caption)


if __name__ == "__main__":
    figure.main(draw, STEM)
