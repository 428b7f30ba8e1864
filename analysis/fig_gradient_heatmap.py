"""Gradient norm by layer and step of the deepest runs: one panel per arm."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm

import arms
import figure
import inside
from arms import DEPTH, PLACEMENT, WARMUP, Missing
from estimates import LR
from figure import Drawn
from normlab.results import Results

STEM = "gradient_heatmap"
MOST_PANELS = 9


def per_layer(layers: pd.DataFrame) -> pd.DataFrame:
    """L2 norm over all tensors of a block, by run, step and layer, from the every-step norms."""
    rows = layers[(layers.stat == "weight_grad_norm") & layers.layer.notna()]
    squared = rows.assign(value=rows.value**2).groupby(["run_id", "step", "layer"], observed=True).value.sum()
    return squared.pow(0.5).reset_index()


def draw(data: Results) -> Drawn:
    runs = arms.with_arms(arms.trained(data))
    runs = runs[runs[DEPTH] == arms.deepest(runs)]
    runs = runs.sort_values("seed").drop_duplicates("arm")
    runs = arms.sort_by_placement(runs, PLACEMENT, WARMUP, LR)
    left_out = max(0, len(runs) - MOST_PANELS)
    runs = runs.head(MOST_PANELS)
    rows = per_layer(data.layers[data.layers.run_id.isin(runs.run_id)])
    shown = rows.value[np.isfinite(rows.value) & (rows.value > 0)]
    if shown.empty:
        raise Missing("no per-layer gradient norms in these runs")
    scale = LogNorm(shown.quantile(0.001), shown.quantile(0.999))
    colours = plt.get_cmap("viridis").with_extremes(bad="#bbbbbb")
    columns = min(2 if len(runs) <= 4 else 3, len(runs))
    lines = -(-len(runs) // columns)
    size = ((3.7 if columns < 3 else 2.9) * columns + 0.9, 2.3 * lines + 0.2)
    fig, panels = plt.subplots(lines, columns, figsize=size, sharex=True, sharey=True, squeeze=False)
    image, gap = None, inside.spacing(rows)
    for panel, (_, run) in zip(panels.flat, runs.iterrows(), strict=False):
        table = rows[rows.run_id == run.run_id].pivot(index="layer", columns="step", values="value")
        grid, steps = table.to_numpy(float), table.columns
        grid = np.where(np.isfinite(grid) & (grid > 0), grid, np.nan)
        extent = (steps[0] - gap / 2, steps[-1] + gap / 2, 0.5, grid.shape[0] + 0.5)
        image = panel.imshow(grid, aspect="auto", origin="lower", norm=scale, cmap=colours, extent=extent,
                             interpolation="nearest")  # fmt: skip
        panel.set_title(f"{run.arm}: {run.verdict}")
        panel.grid(visible=False)
    for panel in panels[-1]:
        panel.set_xlabel("optimizer step")
    for line in panels:
        line[0].set_ylabel("layer (1 = input side)")
    for panel in panels.flat[len(runs) :]:
        panel.set_visible(False)
    fig.colorbar(image, ax=panels, label="weight-gradient norm of the block", extend="both", pad=0.015)
    more = f" {left_out} further arms are not shown." if left_out else ""
    often = "step" if gap == 1 else f"{gap}th step"
    caption = (
        f"Weight-gradient norm of each block (L2 over its tensors, before clipping) at every {often}, "
        f"depth {runs[DEPTH].iloc[0]}, lowest seed of each arm; grey: zero or not finite.{more}"
    )
    table = arms.joined(rows, runs, ["study", "arm"])[["study", "run_id", "arm", "layer", "step", "value"]]
    return Drawn(fig, table, caption)


if __name__ == "__main__":
    figure.main(draw, STEM)
