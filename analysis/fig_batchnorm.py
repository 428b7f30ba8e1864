"""Gap between training loss (batch statistics) and evaluation loss (running ones) of BatchNorm, by batch size."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import FixedLocator, NullLocator

import choices
import estimates
import figure
from arms import DEPTH, PLACEMENT
from figure import Drawn
from normlab.results import Results

STEM = "batchnorm"
NORM, BATCH = "model.norm", "data.batch_size"
SHOWN = {"layernorm": (figure.PALETTE[0], "o"), "batchnorm": (figure.PALETTE[1], "s")}
LAST = 0.1  # of the steps: their mean training loss


def gaps(data: Results) -> tuple[pd.DataFrame, str]:
    """One row per run: train, eval and gap = eval - train (nats), and what was left out.

    eval: the capped final loss. train: the mean loss of the last tenth of the steps, before each update; a run whose
    training loss is not finite there enters with its loss at initialisation, twice, and so without a gap.
    """
    known = data.runs[data.runs[NORM].isin(list(SHOWN))] if NORM in data.runs else data.runs
    runs, left_out = choices.comparable(data._replace(runs=known), NORM, "layernorm", BATCH)
    steps = data.steps[data.steps.run_id.isin(runs.run_id)]
    last = steps[steps.step >= (1 - LAST) * steps.run_id.map(runs.set_index("run_id").steps)]
    train = runs.run_id.map(last.groupby("run_id").loss.agg(lambda loss: loss.mean(skipna=False)))
    train = train.where(np.isfinite(train), runs.init_val_loss).clip(upper=runs.init_val_loss).astype(float)
    table = runs.assign(train=train, eval=runs.loss, gap=runs.loss - train)
    return table.sort_values([NORM, BATCH, "seed"], ignore_index=True), left_out


def means(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Mean and interval over seeds by norm and batch size."""
    rows = [(*cell, *estimates.mean(mine[column])) for cell, mine in table.groupby([NORM, BATCH])]
    return pd.DataFrame(rows, columns=[NORM, BATCH, column, "low", "high", "n"])


def draw(data: Results) -> Drawn:
    table, left_out = gaps(data)
    sizes = sorted(table[BATCH].unique())
    fig, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.9))
    for norm, (colour, marker) in SHOWN.items():
        mine = table[table[NORM] == norm]
        for column, dashes in (("train", figure.LINES[1]), ("eval", "-")):
            mean = means(mine, column)
            name = "training" if column == "train" else "evaluation"
            left.plot(mean[BATCH], mean[column], color=colour, linestyle=dashes, marker=marker, markersize=4,
                      label=f"{norm}, {name}")  # fmt: skip
        mean = means(mine, "gap")
        right.fill_between(mean[BATCH], mean.low, mean.high, color=colour, alpha=0.18, linewidth=0)
        right.plot(mean[BATCH], mean.gap, color=colour)
        bad = mine.verdict == "diverged"
        right.plot(mine[BATCH][~bad], mine.gap[~bad], marker, color=colour, markersize=4, alpha=0.6, markeredgewidth=0)
        for panel, column in ((left, "eval"), (right, "gap")):
            panel.plot(mine[BATCH][bad], mine[column][bad], "x", color=colour, markersize=7, markeredgewidth=1.8)
    right.axhline(0, color="#444444", linewidth=0.9)
    for panel in (left, right):
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_locator(FixedLocator(sizes))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_xticklabels([f"{size:g}" for size in sizes])
        panel.set_xlabel("batch size (sequences)")
    left.set_ylabel("loss (nats)")
    left.set_title("mean loss")
    right.set_ylabel("evaluation less training loss (nats)")
    right.set_title("gap, one mark per seed")
    fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, handlelength=3.5)
    first, counts = table.iloc[0], table[table.verdict == "diverged"].groupby(NORM).size()
    bad = ", ".join(f"{counts.get(norm, 0)} of {(table[NORM] == norm).sum()} {norm}" for norm in SHOWN)
    gap = means(table, "gap")
    told = "; ".join(
        f"{row[NORM]} at {row[BATCH]:g}: {estimates.Estimate(row.gap, row.low, row.high, row.n).told('{:+.3f}')}"
        for _, row in gap[gap[BATCH].isin([sizes[0], sizes[-1]])].iterrows()
    )
    caption = (
        f"Training loss, the mean of the last tenth of {int(first.steps):,} steps, in which BatchNorm uses the "
        f"statistics of the batch ({int(first['model.context'])} tokens per sequence, future ones among them), and "
        "final evaluation loss, in which it uses running ones. Band: 95 % bootstrap interval over seeds, too narrow "
        f"for few. Gap: {told}. Diverged (cross): {bad}; such a run counts with its loss at initialisation, so its "
        f"gap is a lower bound.{left_out}"
    )
    columns = ["study", "run_id", NORM, PLACEMENT, DEPTH, BATCH, "seed", "verdict", "train", "eval", "gap"]
    return Drawn(fig, table[columns], caption)


if __name__ == "__main__":
    figure.main(draw, STEM)
