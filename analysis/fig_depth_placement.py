"""Which depths and learning rates train stably, per placement."""

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.lines import Line2D

import arms
import figure
from arms import DEPTH, PLACEMENT, Missing
from estimates import LR
from figure import Drawn
from final_loss import FAILURES, rates, told_lr
from normlab.results import Results

STEM = "depth_placement"
PANELS = 24  # more arms than this are too many for a page
ROW = 4
SHARE = LinearSegmentedColormap.from_list(
    "share", ["#e0862f", "#f6dcbb", "#e6f1fa"]
)  # lighter = more stable, in grey too


def draw(data: Results) -> Drawn:
    runs = arms.trained(data)
    if runs[DEPTH].nunique() < 2 and runs[LR].nunique() < 2:
        raise Missing(
            f"needs several depths or learning rates; all have {DEPTH}={runs[DEPTH].iloc[0]} and one optim.lr"
        )
    note = ""
    named = arms.with_arms(runs, LR)
    if named.arm.nunique() > PANELS:
        runs, note = arms.narrowed(runs, PLACEMENT, LR)
        named = arms.with_arms(runs, LR)
    cells = verdicts(named)
    order = arms.sort_by_placement(named, PLACEMENT, "arm").arm.unique()
    depths, tried = sorted(runs[DEPTH].unique()), rates(runs)
    width = min(ROW, len(order))
    tall = -(-len(order) // width)
    size = (width * max(1.9, 0.2 + 0.52 * len(tried)) + 1.3, tall * (0.75 + 0.42 * len(depths)) + 0.7)
    fig, grid = plt.subplots(tall, width, figsize=size, sharex=True, sharey=True, squeeze=False)
    for panel, arm in zip(grid.flat, order, strict=False):
        matrix(panel, cells[cells.arm == arm], depths, tried)
        panel.set_title(arm)
    for panel in grid.flat[len(order) :]:
        panel.set_visible(False)
    for i, panel in enumerate(grid.flat[: len(order)]):
        last = i + width >= len(order)  # nothing below it
        panel.tick_params(labelbottom=last)
        panel.set_xlabel("peak learning rate" if last else "")
        panel.set_ylabel("" if i % width else "depth (blocks)")
    bar = fig.colorbar(ScalarMappable(Normalize(0, 1), SHARE), ax=grid, shrink=0.8, aspect=25, pad=0.02)
    bar.set_label("share stable")
    found = [v for v in FAILURES if (cells.failure == v).any()]
    if found:
        marks = [Line2D([], [], color="black", linestyle="", label=f"most failures {v}", **FAILURES[v]) for v in found]
        fig.legend(handles=marks, loc="outside lower center", ncols=3)
    caption = (
        f"Stable runs of all runs, by depth and peak learning rate, for {len(runs)} runs "
        f"({arms.seeds(runs)}). The mark is the commonest of the failures, the worse one of a tie.{note}"
    )
    columns = ["study", "run_id", "arm", PLACEMENT, DEPTH, LR, "seed", "verdict", "reason"]
    table = named[columns].merge(cells.drop(columns="failure"), on=["arm", DEPTH, LR])
    return Drawn(fig, arms.sort_by_placement(table, PLACEMENT, "arm", DEPTH, LR, "seed"), caption)


def verdicts(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per arm, depth and learning rate: stable of n, and the commonest failure (the worse of a tie)."""
    rows = []
    for (arm, depth, rate), cell in runs.groupby(["arm", DEPTH, LR], sort=True):
        counts = {verdict: int((cell.verdict == verdict).sum()) for verdict in FAILURES}
        worst = max(reversed(FAILURES), key=lambda verdict: counts[verdict])
        stable = int((cell.verdict == "stable").sum())
        failure = worst if counts[worst] else ""
        rows.append({"arm": arm, DEPTH: depth, LR: rate, "stable": stable, "n": len(cell), "failure": failure})
    return pd.DataFrame(rows)


def matrix(panel: Any, cells: pd.DataFrame, depths: list[int], tried: list[float]) -> None:
    """One arm's cells; a combination that was not run stays white."""
    for _, cell in cells.iterrows():
        x, y = tried.index(cell[LR]), depths.index(cell[DEPTH])
        panel.add_patch(
            plt.Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=SHARE(cell.stable / cell.n), edgecolor="white")
        )
        marked = bool(cell.failure)
        panel.text(x - 0.17 * marked, y, f"{cell.stable}/{cell.n}", ha="center", va="center", fontsize=8)
        if marked:
            panel.plot(x + 0.28, y, color="black", clip_on=False, **FAILURES[cell.failure] | {"markersize": 5.5})
    panel.set_xlim(-0.5, len(tried) - 0.5)
    panel.set_ylim(-0.5, len(depths) - 0.5)
    panel.set_xticks(range(len(tried)), [told_lr(rate) for rate in tried], rotation=45 if len(tried) > 4 else 0)
    panel.set_yticks(range(len(depths)), [str(depth) for depth in depths])
    panel.grid(visible=False)
    panel.tick_params(length=0)
    for side in panel.spines.values():
        side.set_visible(False)


if __name__ == "__main__":
    figure.main(draw, STEM)
