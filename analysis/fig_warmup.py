"""Final loss against learning rate, with and without warm-up, per optimizer."""

import itertools
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

import arms
import figure
import final_loss
from arms import DATA, DEPTH, PLACEMENT, WARMUP, Missing
from estimates import LR
from fig_loss_curves import references
from figure import Drawn
from normlab.results import Results

STEM = "warmup"
OPTIMIZER = "optim.name"


def draw(data: Results) -> Drawn:
    runs = arms.trained(data)
    for key in (LR, WARMUP):
        if runs[key].nunique() < 2:
            raise Missing(f"needs runs with several {key}; all have {key}={runs[key].iloc[0]}")
    runs, note = arms.narrowed(runs, PLACEMENT, WARMUP, LR, OPTIMIZER, *following(runs, OPTIMIZER))
    if runs[LR].nunique() < 2 or runs[WARMUP].nunique() < 2:
        raise Missing(f"no setting with both several learning rates and several warm-ups.{note}")
    optimizers, depths = sorted(runs[OPTIMIZER].unique()), sorted(runs[DEPTH].unique())
    size = (3.3 * len(optimizers) + 1.2, 2.7 * len(depths) + 1.0)
    looks = styles(runs)
    sideways = final_loss.shifts(len(looks), 1.06)
    fig, grid = plt.subplots(len(depths), len(optimizers), figsize=size, sharey="row", squeeze=False)
    rows = []
    for (depth, optimizer), panel in zip(itertools.product(depths, optimizers), grid.flat, strict=True):
        here = runs[(runs[DEPTH] == depth) & (runs[OPTIMIZER] == optimizer)]
        if here.empty:
            panel.set_visible(False)
            continue
        if runs[DATA].nunique() == 1:
            references(panel, here, label=optimizer == optimizers[-1])
        for shift, ((placement, warmup), style) in zip(sideways, looks.items(), strict=True):
            mine = here[(here[PLACEMENT] == placement) & (here[WARMUP] == warmup)]
            if len(mine):
                label = f"{arms.placement_name(placement)}, {f'warm-up {warmup}' if warmup else 'no warm-up'}"
                means = final_loss.line(panel, mine, LR, style, label, shift)
                rows.append(mine.assign(loss=final_loss.capped_loss(mine)).merge(means, on=LR))
        final_loss.lr_axis(panel, final_loss.rates(here))
        panel.set_title(optimizer if len(depths) == 1 else f"{optimizer}, depth {depth}")
    for shown in grid:
        shown[0].set_ylabel("final validation loss (nats)")
        final_loss.value_axis([panel for panel in shown if panel.get_visible()])
    final_loss.legend(fig, runs)
    caption = (
        f"Final validation loss by peak learning rate for {len(runs)} runs ({arms.seeds(runs)}); lines: means "
        f"over seeds; {final_loss.BARS}. {final_loss.CAP} Dashed: no warm-up. Grey: entropies of the evaluated tokens."
        f"{note}"
    )
    columns = ["study", "run_id", OPTIMIZER, PLACEMENT, WARMUP, DEPTH, LR, "seed", "verdict", "loss"]
    table = pd.concat(rows)[[*columns, "value", "low", "high", "n"]].rename(columns={"value": "mean"})
    return Drawn(fig, arms.sort_by_placement(table, OPTIMIZER, DEPTH, PLACEMENT, WARMUP, LR, "seed"), caption)


def following(runs: pd.DataFrame, key: str) -> list[str]:
    """The settings that another one decides: of one value wherever `key` is."""
    return [k for k in arms.varying(runs) if k != key and (runs[k].map(str).groupby(runs[key]).nunique() == 1).all()]


def styles(runs: pd.DataFrame) -> dict[tuple[str, int], dict[str, Any]]:
    """(placement, warm-up) -> style: dashed without, solid with the longest warm-up, other dashes between."""
    longest_first = sorted((w for w in runs[WARMUP].unique() if w), reverse=True)
    lines = [figure.LINES[0], *figure.LINES[2:]]
    dashes = {0: figure.LINES[1]} | dict(zip(longest_first, itertools.cycle(lines), strict=False))
    order = itertools.product(arms.in_order(runs[PLACEMENT].unique()), sorted(dashes))
    return {(p, w): {"color": figure.colour(p), "linestyle": dashes[w]} for p, w in order}


if __name__ == "__main__":
    figure.main(draw, STEM)
