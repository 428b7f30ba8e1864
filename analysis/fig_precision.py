"""Final loss and share of stable runs by precision, per placement and norm, with paired differences to fp32."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import arms
import choices
import estimates
import figure
from arms import DEPTH, PLACEMENT
from figure import Drawn
from normlab.results import Results

STEM = "precision"
NORM, KEY, REFERENCE = "model.norm", "precision", "fp32"
ORDER = ("fp32", "bf16", "fp16")
SKIPPED = "skipped_steps"


def table_of(data: Results) -> tuple[pd.DataFrame, str]:
    """A row per run, with the estimates of its placement, norm and precision beside it, and what was left out."""
    runs, left_out = choices.comparable(data, KEY, REFERENCE, PLACEMENT, NORM)
    cells = [choices.differences(mine, KEY, REFERENCE) for _, mine in runs.groupby([PLACEMENT, NORM], sort=False)]
    table = pd.concat(cells, ignore_index=True).assign(at=choices.SAME)
    stable = {}
    for cell, mine in table.groupby([PLACEMENT, NORM, KEY]):
        stable[cell] = estimates.rate(int((mine.verdict == "stable").sum()), len(mine))
    found = [stable[cell] for cell in table[[PLACEMENT, NORM, KEY]].itertuples(index=False, name=None)]
    table = table.assign(stable=[f.value for f in found], stable_low=[f.low for f in found])
    return table.assign(stable_high=[f.high for f in found]), left_out


def draw(data: Results) -> Drawn:
    table, left_out = table_of(data)
    skipped = SKIPPED in table and ("fp16" in set(table[KEY]) or (table[SKIPPED].astype(float) > 0).any())
    cells = table[[PLACEMENT, NORM]].drop_duplicates().sort_values(NORM)
    cells = arms.sort_by_placement(cells, PLACEMENT, NORM)
    order = [p for p in ORDER if p in set(table[KEY])] + sorted(set(table[KEY]) - set(ORDER))
    widths = [1.0, 0.75, *([0.6] if skipped else []), 1.1]
    size = (2.9 * sum(widths) + 2.4, (0.42 * len(order) + 0.6) * len(cells) + 0.5)
    fig, panels = plt.subplots(len(cells), len(widths), figsize=size, sharex="col", squeeze=False, width_ratios=widths)
    far = choices.reach(table)
    for line, (placement, norm) in zip(panels, cells.itertuples(index=False, name=None), strict=True):
        here = table[(table[PLACEMENT] == placement) & (table[NORM] == norm)]
        choices.losses(line[0], here, KEY, order, figure.PALETTE[0])
        line[0].set_title(f"{arms.placement_name(placement)}, {norm}")
        for y, precision in enumerate(order):
            mine = here[here[KEY] == precision]
            if mine.empty:
                continue
            first = mine.iloc[0]
            choices.interval(line[1], first[["stable", "stable_low", "stable_high"]], y, figure.PALETTE[0])
            choices.note(line[1], f"{(mine.verdict == 'stable').sum()}/{len(mine)}", y, figure.PALETTE[0])
            if skipped:
                counts = mine[SKIPPED].astype(float)
                line[2].plot(counts, np.full(len(counts), y), "o", color=figure.PALETTE[0], alpha=0.5, markersize=4)
                line[2].set_xlim(left=-0.5)
        for panel in line[1:-1]:
            choices.lines(panel, order)
        line[1].set_xlim(-0.05, 1.05)
        choices.contrasts(line[-1], here, KEY, order, REFERENCE, far)
        for panel in line[1:]:
            panel.tick_params(labelleft=False)
    panels[0, 1].set_title("stable runs")
    panels[0, -1].set_title(f"difference to {REFERENCE}, same seed")
    panels[-1, 0].set_xlabel("final validation loss (nats)")
    panels[-1, 1].set_xlabel("share of runs")
    if skipped:
        panels[0, 2].set_title("loss scaler")
        panels[-1, 2].set_xlabel("skipped steps")
    panels[-1, -1].set_xlabel("difference in loss (nats)")
    counted = (
        f" Skipped steps: updates that the loss scaler left out, of {int(table.steps.max()):,}." if skipped else ""
    )
    caption = (
        "Final validation loss by precision; share of runs with the verdict stable, with Clopper-Pearson's 95 % "
        f"interval; {choices.CONTRAST} with {REFERENCE}, {choices.AXIS} {choices.ESTIMATES}{counted}{left_out}"
    )
    columns = [*choices.ESTIMATED[:2], PLACEMENT, NORM, DEPTH, KEY, *choices.ESTIMATED[2:]]
    columns += ["diverged", "stable", "stable_low", "stable_high", "difference", "difference_mean", "difference_low"]
    columns += ["difference_high", "difference_n", *([SKIPPED] if skipped else [])]
    return Drawn(fig, table.sort_values([PLACEMENT, NORM, KEY, "seed"], ignore_index=True)[columns], caption)


if __name__ == "__main__":
    figure.main(draw, STEM)
