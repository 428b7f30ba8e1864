"""Size of the residual stream by layer and step of the deepest runs: one panel per placement."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm

import arms
import figure
import inside
from arms import DEPTH, PLACEMENT, WARMUP, Missing
from figure import Drawn
from normlab.results import Results

STEM = "activation_heatmap"
STAT = "stream_rms"
LEAST = 4  # profiles that make a map; fewer are drawn as lines


def measured(layers: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """RMS of the stream by run, step and block; block 0 is the embedding's output."""
    blocks = inside.after_blocks(layers, runs, STAT)
    start = layers[(layers.stat == STAT) & (layers.site == "embed") & layers.run_id.isin(runs.run_id)]
    rows = pd.concat([start[["run_id", "step", "value"]].assign(block=0), blocks.assign(block=blocks.layer + 1)])
    return rows[["run_id", "step", "block", "value"]].sort_values(["run_id", "step", "block"], ignore_index=True)


def draw(data: Results) -> Drawn:
    runs, note = inside.one_setting(data)
    runs = runs[runs[DEPTH] == arms.deepest(runs)]
    placements, more = inside.few_placements(runs)
    runs = arms.sort_by_placement(runs[runs[PLACEMENT].isin(placements)], PLACEMENT, "seed")
    rows = measured(data.layers, runs.drop_duplicates(PLACEMENT))
    good = rows[np.isfinite(rows.value) & (rows.value > 0)]
    if good.empty:
        raise Missing(f"no finite {STAT} in these runs")
    verdicts = {p: inside.verdicts(runs[runs[PLACEMENT] == p]) for p in placements}
    runs = runs.drop_duplicates(PLACEMENT)
    as_map = rows.groupby("run_id").step.nunique().max() >= LEAST
    columns = min(3 if as_map else 4, len(runs))
    lines = -(-len(runs) // columns)
    size = ((3.1 if columns < 4 else 2.5) * columns + 0.9, 2.5 * lines + 0.4)
    fig, panels = plt.subplots(lines, columns, figsize=size, sharex=True, sharey=True, squeeze=False)
    shown = []
    for panel, (_, run) in zip(panels.flat, runs.iterrows(), strict=False):
        panel.set_title(f"{arms.placement_name(run[PLACEMENT])}: {run.verdict}")
        shown.append((panel, run, rows[rows.run_id == run.run_id]))
    (draw_maps if as_map else draw_lines)(fig, panels, shown, good.value)
    inside.hide_rest(panels, len(runs))
    seeds = "; ".join(f"{arms.placement_name(p)} {v}" for p, v in verdicts.items())
    kind = "Each column is a profile, wide as the time to its neighbours; grey: none, or not finite." if as_map else ""
    caption = (
        f"Root mean square of the residual stream after each block (0: the embedding), depth {runs[DEPTH].iloc[0]}, "
        f"lowest seed of each placement. {kind}{' ' * bool(kind)}All seeds: {seeds}.{note}{more}"
    )
    table = inside.with_runs(rows, runs)
    table = arms.sort_by_placement(table, PLACEMENT, "run_id", "step", "block")
    return Drawn(fig, table[[*inside.WHO, "step", "block", "value"]], caption)


def draw_maps(fig: Any, panels: np.ndarray, shown: list[tuple[Any, pd.Series, pd.DataFrame]], values: Any) -> None:
    low, high = values.quantile(0.002), values.quantile(0.998)
    scale = LogNorm(low, high if high > low else 1.01 * low)
    colours = plt.get_cmap("viridis").with_extremes(bad="#bbbbbb")
    image = None
    for panel, run, mine in shown:
        grid = mine.pivot(index="block", columns="step", values="value")
        filled = np.where(np.isfinite(grid) & (grid > 0), grid, np.nan)
        y = np.append(grid.index - 0.5, grid.index[-1] + 0.5)
        panel.set_facecolor("#bbbbbb")
        image = panel.pcolormesh(edges(grid.columns.to_numpy(float), run.steps_done), y, np.ma.masked_invalid(filled),
                                 norm=scale, cmap=colours, rasterized=True)  # fmt: skip
        panel.grid(visible=False)
        panel.set_xlim(0, max(r.steps_done for _, r, _ in shown))
        panel.yaxis.get_major_locator().set_params(integer=True)
    for panel in panels[-1]:
        panel.set_xlabel("optimizer step")
    for line in panels:
        line[0].set_ylabel("block (0 = embedding)")
    fig.colorbar(image, ax=panels, label="RMS of the residual stream", extend="both", pad=0.015)


def edges(steps: np.ndarray, end: float) -> np.ndarray:
    """Borders halfway between the profiles; the first and last ones at the run's start and end."""
    return np.concatenate([[min(0.0, steps[0])], (steps[1:] + steps[:-1]) / 2, [max(end, steps[-1], 1.0)]])


def draw_lines(fig: Any, panels: np.ndarray, shown: list[tuple[Any, pd.Series, pd.DataFrame]], values: Any) -> None:
    for panel, run, mine in shown:
        steps = sorted(mine.step.unique())
        for step in steps:
            profile = mine[(mine.step == step) & np.isfinite(mine.value) & (mine.value > 0)]
            middle = "after warm-up" if step == run[WARMUP] else f"step {step}"
            when = "start" if step == 0 else "end" if step == steps[-1] else middle
            shade, dash = {"start": ("start", 0), "end": ("end", 2)}.get(when, ("10 %", 1))
            panel.plot(
                profile.block, profile.value, color=inside.SHADES[shade], linestyle=figure.LINES[dash], label=when
            )
        panel.xaxis.get_major_locator().set_params(integer=True)
    figure.decade_axis(panels[0, 0].yaxis)
    for panel in panels[-1]:
        panel.set_xlabel("block (0 = embedding)")
    for line in panels:
        line[0].set_ylabel("RMS of the residual stream")
    legend = {t: h for panel, *_ in shown for h, t in zip(*panel.get_legend_handles_labels(), strict=True)}
    fig.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3)


if __name__ == "__main__":
    figure.main(draw, STEM)
