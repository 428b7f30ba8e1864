"""Size of an update against the weights that it changes, over the steps and over the layers."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

import arms
import figure
import inside
from arms import DEPTH, PLACEMENT, Missing
from figure import Drawn
from normlab.results import Results

STEM = "update_ratio"
MATRICES = ("q", "k", "v", "out", "in", "gate")
RULE = 1e-3
MOST_LAYERS = 5


def per_layer(layers: pd.DataFrame) -> pd.DataFrame:
    """Update norm / weight norm of a step by run, step and layer: the median over the block's weight matrices.

    Biases and gains are left out: those that start at zero have ratios without meaning.
    """
    rows = layers[(layers.stat == "update_ratio") & layers.layer.notna() & layers.tensor.isin(MATRICES)]
    middle = rows.groupby(["run_id", "step", "layer"], observed=True).value.median().reset_index()
    return middle.astype({"layer": int})


def spread_out(depth: int) -> list[int]:
    """Some layers from the first to the last."""
    return sorted({round(x) for x in np.linspace(0, depth - 1, min(depth, MOST_LAYERS))})


def draw(data: Results) -> Drawn:
    runs, note = inside.one_setting(data)
    runs = runs[runs[DEPTH] == arms.deepest(runs)]
    placements, more = inside.few_placements(runs)
    runs = arms.sort_by_placement(runs[runs[PLACEMENT].isin(placements)], PLACEMENT, "seed")
    rows = per_layer(data.layers[data.layers.run_id.isin(runs.run_id)])
    if not (rows.value > 0).any():
        raise Missing("no update ratios of weight matrices in these runs")
    rows = inside.with_runs(rows, runs)
    times = arms.joined(inside.at_times(rows[["run_id", "step", "layer", "value"]], runs), runs, [PLACEMENT])
    depth = int(runs[DEPTH].iloc[0])
    layers = spread_out(depth)
    colours = dict(zip(layers, plt.get_cmap("cividis")(np.linspace(0, 0.92, len(layers))), strict=True))
    size = (7.6, 2.1 * len(placements) + 0.9)
    fig, panels = plt.subplots(len(placements), 2, figsize=size, sharex="col", sharey=True, squeeze=False)
    for (left, right), placement in zip(panels, placements, strict=True):
        mine = runs[runs[PLACEMENT] == placement]
        over_steps(left, rows[rows[PLACEMENT] == placement], colours)
        over_layers(right, times[times[PLACEMENT] == placement])
        left.set_title(f"{arms.placement_name(placement)}: {inside.verdicts(mine)}")
        left.set_ylabel("update norm / weight norm")
    figure.decade_axis(panels[0, 0].yaxis)
    panels[-1, 0].set_xlabel("optimizer step")
    panels[-1, 1].set_xlabel("layer (1 = input side)")
    panels[-1, 1].xaxis.get_major_locator().set_params(integer=True)
    handles = [Line2D([], [], color=c, linewidth=2, label=f"layer {layer + 1}") for layer, c in colours.items()]
    handles += [Line2D([], [], color=inside.SHADES[w], marker="o", markersize=4, linestyle=dash(w), label=w)
                for w in inside.WHEN if (times.time == w).any()]  # fmt: skip
    handles.append(Line2D([], [], color="#999999", linewidth=1, label="rule of thumb, 0.001"))
    fig.legend(handles=handles, loc="outside lower center", ncols=5)
    caption = (
        f"Update norm / weight norm of a step, median over the weight matrices of a block and over the seeds, depth "
        f"{depth}, {len(runs)} runs. Left: by step for some layers, running median of up to 9 steps; right: by layer, "
        "medians over up to 9 steps; the end of a diverged run is its last finite steps. Grey: the rule of thumb that "
        f"about 1e-3 is a healthy size.{note}{more}"
    )
    table = arms.sort_by_placement(rows, PLACEMENT, "run_id", "step", "layer")
    return Drawn(fig, table[[*inside.WHO, "step", "layer", "value"]], caption)


def dash(when: str) -> Any:
    return figure.LINES[inside.WHEN.index(when)]


def over_steps(panel: Any, rows: pd.DataFrame, colours: dict[int, Any]) -> None:
    panel.axhline(RULE, color="#999999", linewidth=1)
    for layer, colour in colours.items():
        mine = rows[(rows.layer == layer) & np.isfinite(rows.value) & (rows.value > 0)]
        middle = mine.groupby("step").value.median()
        window = max(1, 9 // inside.spacing(mine)) if len(mine) else 1
        smooth = middle.rolling(window, center=True, min_periods=1).median()
        panel.plot(middle.index, smooth, color=colour, linewidth=1.3)


def over_layers(panel: Any, times: pd.DataFrame) -> None:
    panel.axhline(RULE, color="#999999", linewidth=1)
    for when in inside.WHEN:
        mine = times[(times.time == when) & np.isfinite(times.value) & (times.value > 0)]
        middle = mine.groupby("layer").value.median()
        few = {"marker": "o", "markersize": 3} if len(middle) <= 12 else {}
        panel.plot(middle.index + 1, middle, color=inside.SHADES[when], linestyle=dash(when), **few)


if __name__ == "__main__":
    figure.main(draw, STEM)
