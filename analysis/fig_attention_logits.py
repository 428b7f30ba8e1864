"""Growth of the largest attention logit over training: one panel per depth, one line per placement."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import arms
import figure
import inside
from arms import DEPTH, PLACEMENT, Missing
from figure import Drawn
from normlab.results import Results

STEM = "attention_logits"
STAT = "attn_logit_max"
UNSAFE = 1e4  # Wortsman et al. 2023, section 3.1.1: every run whose largest logit went above it diverged


def largest(layers: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """The largest attention logit of any layer by run and step, and the layer that has it."""
    rows = inside.after_blocks(layers[layers.site == "attn"], runs, STAT)
    rows = rows[np.isfinite(rows.value)].sort_values(["run_id", "step", "value"])
    return rows.drop_duplicates(["run_id", "step"], keep="last")


def draw(data: Results) -> Drawn:
    runs, note = inside.one_setting(data)
    rows = inside.with_runs(largest(data.layers, runs), runs)
    rows = rows[rows.groupby("run_id").step.transform("nunique") > 1]
    if not (rows.value > 0).any():
        raise Missing(f"needs runs with two finite profiles of {STAT} above zero or more (probe.every)")
    rows = arms.sort_by_placement(rows, DEPTH, PLACEMENT, "run_id", "step")
    depths = sorted(rows[DEPTH].unique())
    columns = min(4, len(depths))
    lines = -(-len(depths) // columns)
    size = ((2.9 if columns < 4 else 2.5) * columns + 0.7, 2.6 * lines + 0.7)
    fig, panels = plt.subplots(lines, columns, figsize=size, sharex=True, sharey=True, squeeze=False)
    placements = arms.in_order(rows[PLACEMENT].unique())
    for panel, depth in zip(panels.flat, depths, strict=False):
        for i, placement in enumerate(placements):
            mine = rows[(rows[DEPTH] == depth) & (rows[PLACEMENT] == placement) & (rows.value > 0)]
            draw_line(panel, mine, figure.colour(placement), figure.LINES[i % len(figure.LINES)], placement)
        panel.set_title(f"depth {depth}")
    unsafe_line(panels[0, 0], rows.value.max())
    figure.decade_axis(panels[0, 0].yaxis)
    for panel in panels[-1]:
        panel.set_xlabel("optimizer step")
    for line in panels:
        line[0].set_ylabel("largest attention logit")
    inside.hide_rest(panels, len(depths))
    legend = {t: h for panel in panels.flat for h, t in zip(*panel.get_legend_handles_labels(), strict=True)}
    fig.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=min(6, len(legend)))
    caption = (
        f"Largest attention logit (scaled score before the softmax) of any layer, head and token at each profile, "
        f"{rows.run_id.nunique()} runs: thin lines are seeds, thick ones their median, a cross the last finite profile "
        f"of a run that diverged. Above {UNSAFE:g}, every run of Wortsman et al. 2023 diverged.{note}"
    )
    return Drawn(fig, rows[[*inside.WHO, "step", "layer", "value"]], caption)


def draw_line(panel: Any, rows: pd.DataFrame, colour: str, dash: Any, placement: str) -> None:
    for _, seed in rows.groupby("run_id"):
        panel.plot(seed.step, seed.value, color=colour, linewidth=0.5, alpha=0.5)
        if seed.verdict.iloc[0] == "diverged":
            panel.plot(seed.step.iloc[-1], seed.value.iloc[-1], "x", color=colour, markersize=6, clip_on=False)
    middle = rows.groupby("step").value.median()
    few = {"marker": "o", "markersize": 3.5} if len(middle) < 20 else {}
    if len(middle):
        panel.plot(middle.index, middle, color=colour, linestyle=dash, label=arms.placement_name(placement), **few)


def unsafe_line(panel: Any, top: float) -> None:
    """The limit on every panel that shares this one's axis, where the values come near it."""
    if top > UNSAFE / 30:
        for shared in panel.get_shared_y_axes().get_siblings(panel):
            shared.axhline(UNSAFE, color="#999999", linewidth=1)


if __name__ == "__main__":
    figure.main(draw, STEM)
