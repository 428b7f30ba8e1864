"""Translation with and without warm-up: validation loss and BLEU, a row per optimizer.

The form of Xiong et al. 2020, figures 2 and 4.
"""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import arms
import figure
from arms import DATA, Missing
from fig_loss_curves import references
from figure import Drawn
from normlab.results import Results

STEM = "translation_warmup"
OPTIMIZER = "optim.name"
_PANELS = (("val_loss", "validation loss (nats)"), ("bleu", "BLEU, greedy, validation"))


def draw(data: Results) -> Drawn:
    runs = arms.trained(data)
    runs = runs[runs["data.name"] == "parallel"]
    if runs.empty:
        raise Missing("no finished training run on sentence pairs (data=parallel) among these")
    names = sorted(runs[OPTIMIZER].unique())
    one_rate = runs.groupby(OPTIMIZER)["optim.lr"].nunique().max() == 1
    runs = arms.with_arms(runs, OPTIMIZER, *(["optim.lr"] if one_rate else []))  # told by the row's title
    styles = figure.arm_styles(runs)
    fig, rows = plt.subplots(len(names), 2, figsize=(10.5, 3.2 * len(names)), sharex=True, sharey="col", squeeze=False)
    shown = []
    for name, panels in zip(names, rows, strict=True):
        mine = runs[runs[OPTIMIZER] == name]
        curves = _curves(data.steps, mine)
        shown.append(curves)
        _draw_row(panels, mine, curves, styles, one_text=runs[DATA].nunique() == 1)
        panels[0].set_title(f"{name}, learning rate {', '.join(f'{lr:g}' for lr in sorted(mine['optim.lr'].unique()))}")
    everything = pd.concat(shown, ignore_index=True)
    low, high = everything.val_loss.min(), everything.val_loss.quantile(0.95)  # not to make room for a divergence
    rows[0][0].set_ylim(min(low, runs.h2.min()) - 0.1, max(high, runs.h1.max() + 0.5))
    rows[0][1].set_ylim(0, max(1.0, 1.05 * np.nanmax([0.0, *everything.bleu])))
    for panel in rows[-1]:
        panel.set_xlabel("optimizer step")
    signatures = ", ".join(sorted(runs.get("bleu_signature", pd.Series(dtype=str)).dropna().unique()))
    sizes = sorted({f"{r['model.depth']} blocks of width {r['model.width']}" for _, r in runs.iterrows()})
    seeds = arms.seeds(runs)
    caption = (
        f"Validation loss and BLEU by step for {len(runs)} runs of {seeds}, {', '.join(sizes)} a stack. The loss is "
        f"the plain cross-entropy, whatever training descends; grey: unigram and bigram entropy. The curve of BLEU is "
        f"greedy, of some validation pairs; in the legend: of all test pairs, by beam search, mean over seeds. A cross "
        f"marks where a run that diverged was last seen. sacrebleu {signatures or 'unknown'}."
    )
    columns = ["study", "run_id", OPTIMIZER, "arm", "seed", "step", "val_loss", "bleu", "test_bleu", "verdict"]
    return Drawn(fig, everything[columns], caption)


def _curves(steps: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """The evaluated steps of these runs, and their ends."""
    runs = runs.assign(**{c: runs.get(c, np.nan) for c in ("bleu", "test_bleu")})
    keys = ["run_id", "step", "val_loss", "bleu"]
    ends = runs[["run_id", "steps_done", "final_val_loss", "bleu"]].set_axis(keys, axis=1)
    seen = steps.assign(bleu=steps.get("bleu", np.nan))[keys]
    rows = pd.concat([seen[seen.run_id.isin(runs.run_id)], ends])
    rows = rows.dropna(subset=["val_loss", "bleu"], how="all")
    told = ["study", OPTIMIZER, "arm", "seed", "test_bleu", "verdict"]
    return arms.joined(rows, runs, told).sort_values(["arm", "run_id", "step"], ignore_index=True)


def _draw_row(
    panels: Any, runs: pd.DataFrame, curves: pd.DataFrame, styles: dict[str, dict[str, Any]], *, one_text: bool
) -> None:
    for panel, (column, label) in zip(panels, _PANELS, strict=True):
        for arm, style in styles.items():
            mine = curves[curves.arm == arm].dropna(subset=[column])
            if mine.empty:
                continue
            if mine.run_id.nunique() > 1:
                for _, seed in mine.groupby("run_id"):
                    panel.plot(seed.step, seed[column], **style | {"linewidth": 0.5, "alpha": 0.4, "marker": ""})
            mean = mine.groupby("step")[column].mean()
            score = curves[curves.arm == arm].test_bleu.mean()
            told = arm if np.isnan(score) else f"{arm}: BLEU {score:.1f}"
            panel.plot(mean.index, mean, label=told, **style)
            for _, run in mine[mine.verdict == "diverged"].groupby("run_id").tail(1).iterrows():
                panel.plot(run.step, run[column], "x", color=style["color"], markersize=7, markeredgewidth=2, zorder=5)
        panel.set_ylabel(label)
    if one_text:
        references(panels[0], runs, label=False)
        for line, name, side in ((runs.h1.iloc[0], "unigram", "bottom"), (runs.h2.iloc[0], "bigram", "top")):
            place = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": side}
            panels[0].annotate(f"{name} entropy", (0.99, line), color="#666666", size=7, **place)
    panels[1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))


if __name__ == "__main__":
    figure.main(draw, STEM)
