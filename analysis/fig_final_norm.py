"""Size of the logits and loss by depth, with and without a final norm."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from torch import nn

import arms
import figure
import final_loss
from arms import DATA, DEPTH, PLACEMENT, Missing
from estimates import LR, best_lr, capped_loss
from fig_loss_curves import references
from figure import Drawn
from normlab.residual import PLACEMENTS
from normlab.results import Results

STEM = "final_norm"
FINAL_NORM = "model.final_norm"
WHEN = {"at initialisation": "--", "after training": "-"}
COLOUR = {True: figure.PALETTE[0], False: figure.PALETTE[1]}


def draw(data: Results) -> Drawn:
    runs = arms.trained(data)
    runs = runs.assign(normed=runs.apply(has_final_norm, axis=1)).dropna(subset=["normed"])
    if runs.empty or runs.normed.nunique() < 2:
        raise Missing(f"needs runs with and without a final norm ({FINAL_NORM}=true,false) of one placement")
    both = runs.groupby(PLACEMENT).normed.transform("nunique") == 2
    if not both.any():
        raise Missing(f"no placement has runs with and without a final norm ({FINAL_NORM}=true,false)")
    runs, note = arms.narrowed(runs[both], PLACEMENT, FINAL_NORM, LR)
    tried = runs[LR].nunique()
    if tried > 1:
        runs = best_lr(runs, [PLACEMENT, "normed", DEPTH])
        note += f" Each line has, at each depth, its best of {tried} learning rates, by the mean loss over seeds."
    rows = measured(data, runs)
    placements = arms.in_order(runs[PLACEMENT].unique())
    size = (3.6 * len(placements) + 1.6, 5.6)
    fig, grid = plt.subplots(2, len(placements), figsize=size, sharex=True, sharey="row", squeeze=False)
    for column, placement in zip(grid.T, placements, strict=True):
        mine = rows[rows[PLACEMENT] == placement]
        for panel, quantity in zip(column, ("logit_rms", "loss"), strict=True):
            lines(panel, mine, quantity)
        if runs[DATA].nunique() == 1:
            references(column[1], runs, label=placement == placements[-1])
        column[0].set_title(arms.placement_name(placement))
        figure.depth_axis(column[1], sorted(runs[DEPTH].unique()))
    grid[0, 0].set_ylabel("RMS of the logits")
    grid[1, 0].set_ylabel("validation loss (nats)")
    final_loss.value_axis(grid[0])
    final_loss.value_axis(grid[1])
    final_loss.legend(fig, runs, ncols=2 if len(placements) < 3 else 4)
    lost = int(rows[rows.when == "after training"].logit_rms.isna().sum())
    caption = (
        f"RMS of the logits on the probed batch and validation loss by depth, for {len(runs)} runs "
        f"({arms.seeds(runs)}); lines: means over seeds; {final_loss.BARS}. {final_loss.CAP}"
        f"{f' {lost} runs have no finite logits after training and are in the loss alone.' if lost else ''}{note}"
    )
    columns = ["study", "run_id", PLACEMENT, "normed", DEPTH, "seed", "verdict", "when", "logit_rms", "loss"]
    table = arms.sort_by_placement(rows[columns], PLACEMENT, "normed", DEPTH, "seed", "when")
    return Drawn(fig, table.rename(columns={"normed": "final_norm"}), caption)


def has_final_norm(run: pd.Series) -> bool | None:
    """What model.final_norm says, or where it is null the placement's rule; None for a placement of another version."""
    if run["model.norm"] == "none":
        return False
    said = run[FINAL_NORM]
    if said is None or said != said:
        known = PLACEMENTS.get(run[PLACEMENT])
        return None if known is None else not isinstance(known.final(lambda: nn.LayerNorm(1)), nn.Identity)
    return bool(said)


def measured(data: Results, runs: pd.DataFrame) -> pd.DataFrame:
    """Two rows per run, at initialisation and after training: logit_rms and the capped loss."""
    stats = data.layers[(data.layers.stat == "logit_rms") & data.layers.run_id.isin(runs.run_id)]
    if stats.empty:
        raise Missing("no logit_rms in layers/ (probe.batches=0 leaves it out)")
    first = stats[stats.step == 0].set_index("run_id").value
    ends = stats.merge(runs[["run_id", "steps_done"]], on="run_id")
    last = ends[ends.step == ends.steps_done].set_index("run_id").value
    losses = {"at initialisation": runs.init_val_loss, "after training": capped_loss(runs)}
    logits = {"at initialisation": first, "after training": last}
    rows = [runs.assign(when=when, loss=losses[when], logit_rms=runs.run_id.map(logits[when])) for when in WHEN]
    return pd.concat(rows).assign(logit_rms=lambda t: t.logit_rms.where(np.isfinite(t.logit_rms)))


def lines(panel, rows: pd.DataFrame, quantity: str) -> None:
    """One line per final norm and time; failures after training keep their marks."""
    looks = [(normed, when) for normed in (True, False) for when in WHEN]
    for shift, (normed, when) in zip(final_loss.shifts(len(looks), 1.012), looks, strict=True):
        mine = rows[(rows.normed == normed) & (rows.when == when)].dropna(subset=[quantity])
        style = {"color": COLOUR[normed], "linestyle": WHEN[when]}
        if when == "at initialisation":
            mine = mine.assign(verdict="stable")  # nothing has failed yet
        label = f"{'final norm' if normed else 'no final norm'}, {when}"
        final_loss.line(panel, mine, DEPTH, style, label, shift, values=mine[quantity])


if __name__ == "__main__":
    figure.main(draw, STEM)
