"""Expected gradient of the FFN matrices by layer: pre at initialisation, post at initialisation and after warm-up.

The form of Xiong et al. 2020, figure 3a-b: average the gradient over mini-batches first, then take its Frobenius norm.
"""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.ticker import MaxNLocator

import arms
import figure
from arms import DEPTH, PLACEMENT, WARMUP, Missing
from figure import Drawn
from normlab.results import Results

STEM = "xiong_gradients"
TENSORS = {"in": "$W_1$ (in)", "out": "$W_2$ (out)"}


def draw(data: Results) -> Drawn:
    runs = arms.trained(data)
    runs = runs[runs[WARMUP] > 0]
    if runs.empty:
        raise Missing("needs training runs with warm-up (optim.warmup_steps > 0)")
    runs, note = arms.narrowed(runs, PLACEMENT)
    rows = data.layers[
        (data.layers.stat == "expected_weight_grad_norm")
        & (data.layers.site == "ffn")
        & data.layers.tensor.isin(TENSORS)
    ]
    rows = arms.joined(rows, runs, [PLACEMENT, DEPTH, WARMUP, "seed"])
    at_init, warm = rows.step == 0, rows.step == rows[WARMUP]
    rows = rows[at_init | (warm & (rows[PLACEMENT] == "post"))]
    if rows.empty:
        raise Missing("needs profiles at step 0 and after warm-up (probe.batches > 0)")
    when = rows.step.eq(0).map({True: "at initialisation", False: "after warm-up"})
    rows = rows.assign(curve=rows[PLACEMENT].map(arms.placement_name) + " " + when)
    rows = arms.sort_by_placement(rows, PLACEMENT, "step", "run_id", "tensor", "layer")

    depths = sorted(rows[DEPTH].unique())
    fig, panels = plt.subplots(
        len(depths), 2, figsize=(7.2, 2.3 * len(depths) + 0.6), sharex="row", sharey="row", squeeze=False
    )
    for line, depth in zip(panels, depths, strict=True):
        for panel, (tensor, title) in zip(line, TENSORS.items(), strict=True):
            here = rows[(rows[DEPTH] == depth) & (rows.tensor == tensor)]
            for (curve, placement), mine in here.groupby(["curve", PLACEMENT], sort=False):
                mean = mine.groupby("layer").value.agg(["mean", "min", "max"])
                after = str(curve).endswith("warm-up")
                style = {"color": figure.colour(str(placement)), "linestyle": figure.LINES[1] if after else "-"}
                marker = "o" if depth <= 12 else None
                panel.plot(mean.index + 1, mean["mean"], label=curve, marker=marker, markersize=3.5, **style)
                if mine.seed.nunique() > 1:
                    panel.fill_between(
                        mean.index.astype(int) + 1,
                        mean["min"],
                        mean["max"],
                        color=style["color"],
                        alpha=0.15,
                        linewidth=0,
                    )
            panel.set_title(f"{title}, depth {depth}")
            figure.decade_axis(panel.yaxis)
            panel.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 4, 5, 10]))
            panel.set_xlim(0.5, depth + 0.5)
        line[0].set_ylabel("expected gradient norm")
    for panel in panels[-1]:
        panel.set_xlabel("layer (1 = nearest the input)")
    handles, labels = panels[-1, -1].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=3)
    caption = (
        "Frobenius norm of the mini-batch-averaged weight gradient of the two FFN matrices by layer, before training "
        "and when warm-up ends (Xiong et al. 2020, figure 3a-b)." + note
    )
    columns = ["study", "run_id", PLACEMENT, DEPTH, "seed", "step", "layer", "tensor", "value"]
    return Drawn(fig, pd.DataFrame(rows[columns]), caption)


if __name__ == "__main__":
    figure.main(draw, STEM)
