"""Loss spikes: when each run has them, and how many per 1,000 steps by depth and placement."""

import math
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

import arms
import figure
from arms import DEPTH, PLACEMENT, Missing
from estimates import LR, poisson_rate
from figure import Drawn
from normlab.results import Results

STEM = "spikes"
# How a run ended, at its last step; told apart by shape.
ENDS: dict[str, dict[str, Any]] = {
    "diverged": {"marker": "x"},
    "spiked": {"marker": "^", "facecolor": "none"},
    "stalled": {"marker": "s", "facecolor": "none"},
}
HEIGHTS = (0.1, 1.0, 10.0)  # nats, in the legend
WHO = ["study", "run_id", PLACEMENT, DEPTH, LR, "seed", "verdict", "steps_done"]


def events(runs: pd.DataFrame) -> pd.DataFrame:
    """A row per loss spike under the rule that judged its run; a run without has one row without a start."""
    rows = []
    for _, run in runs.iterrows():
        who = {key: run[key] for key in WHO}
        found = run.spikes if isinstance(run.spikes, list) else []
        rows += [{**who, **{k: s.get(k) for k in ("start", "end", "height")}} for s in found]
        if not found:
            rows.append({**who, "start": None, "end": None, "height": None})
    return pd.DataFrame(rows).astype(dict.fromkeys(("start", "end", "height"), float))


def rates(table: pd.DataFrame) -> pd.DataFrame:
    """Events per 1,000 steps with Poisson's interval, by depth and placement over everything else."""
    rows = []
    for (depth, placement), mine in table.groupby([DEPTH, PLACEMENT]):
        runs = mine.drop_duplicates("run_id")
        rate = poisson_rate(int(mine.start.notna().sum()), runs.steps_done.sum() / 1000)
        rows.append({DEPTH: depth, PLACEMENT: placement, "runs": len(runs), "events": rate.n, "rate": rate.value,
                     "rate_low": rate.low, "rate_high": rate.high})  # fmt: skip
    return pd.DataFrame(rows)


def draw(data: Results) -> Drawn:
    runs = arms.trained(data)
    if "spikes" not in runs or not runs.spikes.map(lambda found: isinstance(found, list)).any():
        raise Missing("no recorded loss spikes in these runs: their records are of an older version")
    runs = runs[runs.spikes.map(lambda found: isinstance(found, list))]
    keys = [DEPTH, PLACEMENT, LR, "seed", "run_id"]
    runs = arms.sort_by_placement(runs, *keys)
    table = events(runs)
    cells = rates(table)
    tall = min(9.0, max(3.2, 0.9 + 0.075 * len(runs)))
    fig, (raster, panel) = plt.subplots(1, 2, figsize=(9.4, tall), width_ratios=(1.7, 1))
    draw_raster(raster, runs, table)
    draw_rates(panel, cells)
    handles = list(panel.get_legend_handles_labels()[0])
    handles += [
        Line2D([], [], marker="|", linestyle="", color="#444444", markersize=8, markeredgewidth=mark_width(h),
               label=f"{h:g} nats high") for h in HEIGHTS
    ]  # fmt: skip
    for verdict, style in ENDS.items():
        if (runs.verdict == verdict).any():
            hollow = {"markerfacecolor": "none"} if "facecolor" in style else {}
            handles.append(Line2D([], [], marker=style["marker"], linestyle="", color="#444444", **hollow,
                                  markersize=5, label=f"ended {verdict}"))  # fmt: skip
    fig.legend(handles=handles, loc="outside lower center", ncols=6)
    others = [k for k in arms.varying(runs) if k != PLACEMENT]
    pooled = f" pooled over {', '.join(['seed', *arms.short_names(others).values()])}"
    uneven = unlike(runs, others)
    caption = (
        f"Left: a row per run ({len(runs)}), within a band by learning rate (upwards) and seed; a tick is the start of "
        "a loss spike under the rule that judged the run, its width the spike's height (widest: a loss that is not "
        f"finite). Right: spikes per 1,000 steps,{pooled}, with 95 % Poisson intervals, too narrow where spikes come "
        "from few of the runs."
        f"{' Cells differ in their settings, so that their rates are not like for like.' if uneven else ''}"
    )
    return Drawn(fig, table.merge(cells, on=[DEPTH, PLACEMENT], how="left"), caption)


def unlike(runs: pd.DataFrame, keys: list[str]) -> bool:
    """Whether cells (depth x placement) were run at different settings of `keys`."""
    told = runs[keys].map(str).agg(", ".join, axis=1) if keys else pd.Series("", runs.index)
    return told.groupby([runs[DEPTH], runs[PLACEMENT]]).agg(lambda cell: tuple(sorted(cell.unique()))).nunique() > 1


def mark_width(height: float) -> float:
    """Width of a tick in points: it grows with the logarithm of the height, up to 100 nats."""
    known = 100.0 if not math.isfinite(height) else min(max(height, 0.1), 100.0)
    return 0.8 + 0.9 * math.log10(known / 0.1)


def draw_raster(panel: Any, runs: pd.DataFrame, table: pd.DataFrame) -> None:
    rows = {run_id: i for i, run_id in enumerate(runs.run_id)}
    colours = runs[PLACEMENT].map(figure.colour)
    panel.hlines(range(len(runs)), 0, runs.steps_done, color=colours, linewidth=0.8, alpha=0.35)
    seen = table.dropna(subset=["start"])
    row = seen.run_id.map(rows).astype(float)  # of no run at all it would be text
    panel.vlines(seen.start, row - 0.45, row + 0.45, color=seen[PLACEMENT].map(figure.colour), zorder=3,
                 linewidth=seen.height.map(mark_width).astype(float))  # fmt: skip
    for verdict, style in ENDS.items():
        mine = runs[runs.verdict == verdict]
        hollow = {"facecolor": "none", "edgecolor": mine[PLACEMENT].map(figure.colour)}
        painted = hollow if "facecolor" in style else {"color": mine[PLACEMENT].map(figure.colour)}
        panel.scatter(mine.steps_done, mine.run_id.map(rows), s=14, marker=style["marker"], linewidth=1.0,
                      clip_on=False, zorder=4, **painted)  # fmt: skip
    bands = runs.assign(row=range(len(runs))).groupby([DEPTH, PLACEMENT], sort=False).row.agg(["min", "max"])
    names = [f"{arms.placement_name(p)}, {d}" for d, p in bands.index]
    panel.set_yticks((bands["min"] + bands["max"]) / 2, names, fontsize=8 if len(bands) < 20 else 6)
    for edge in bands["min"].iloc[1:]:
        panel.axhline(edge - 0.5, color="#bbbbbb", linewidth=0.6)
    panel.tick_params(axis="y", length=0)
    panel.grid(visible=False)
    panel.set_ylim(-0.7, len(runs) - 0.3)
    panel.set_xlim(0, runs.steps_done.max() * 1.02)
    panel.set_xlabel("optimizer step")
    panel.set_ylabel("runs by placement, depth")


def draw_rates(panel: Any, cells: pd.DataFrame) -> None:
    """Depths side by side, placements next to each other within one."""
    depths = sorted(cells[DEPTH].unique())
    placements = arms.in_order(cells[PLACEMENT].unique())
    for i, placement in enumerate(placements):
        mine = cells[cells[PLACEMENT] == placement]
        shift = 0.7 * ((i + 0.5) / len(placements) - 0.5)
        x = mine[DEPTH].map({d: j for j, d in enumerate(depths)}) + shift
        reach = np.maximum([mine.rate - mine.rate_low, mine.rate_high - mine.rate], 0)
        colour = figure.colour(placement)
        panel.errorbar(x, mine.rate, reach, fmt="o", color=colour, capsize=2.5, markersize=4, linewidth=1.2,
                       clip_on=False, label=arms.placement_name(placement))  # fmt: skip
    for j in range(1, len(depths)):
        panel.axvline(j - 0.5, color="#dddddd", linewidth=0.6)
    panel.set_xticks(range(len(depths)), [str(d) for d in depths])
    panel.set_xlim(-0.5, len(depths) - 0.5)
    panel.grid(visible=False, axis="x")
    panel.set_ylim(bottom=0)
    panel.set_xlabel("depth (blocks)")
    panel.set_ylabel("loss spikes per 1,000 steps")


if __name__ == "__main__":
    figure.main(draw, STEM)
