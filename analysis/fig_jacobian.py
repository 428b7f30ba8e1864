"""Jacobian of the stack at initialisation: its singular values at the deepest depth, its growth exponent by depth."""

import matplotlib.pyplot as plt
import pandas as pd

import arms
import figure
from arms import DEPTH, PLACEMENT, Missing
from figure import Drawn
from normlab.jacobian import NOISE
from normlab.results import Results

STEM = "jacobian"


def selected(data: Results) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """(runs of experiments/jacobian.py in the commonest setting, their rows, what was left out)."""
    rows = data.layers[data.layers.stat.astype(str).str.startswith("jacobian_")]
    if rows.empty:
        raise Missing("needs runs of experiments/jacobian.py")
    runs = data.runs[data.runs.run_id.isin(rows.run_id) & (data.runs.status == "finished")]
    if runs.empty:
        raise Missing("needs finished runs of experiments/jacobian.py")
    runs, note = arms.narrowed(runs, PLACEMENT)
    return runs, arms.joined(rows, runs, [PLACEMENT, DEPTH, "seed"]), note


def by_run(data: Results) -> pd.DataFrame:
    """One row per run: growth, log(RMS singular value) / blocks, and identity, the mean of the diagonal."""
    _, rows, _ = selected(data)
    growth = rows[rows.stat == "jacobian_growth"].rename(columns={"value": "growth"})
    last = rows[(rows.stat == "jacobian_identity") & (rows.layer == rows[DEPTH] - 1)]
    return growth.merge(last[["run_id", "value"]].rename(columns={"value": "identity"}), on="run_id")


def draw(data: Results) -> Drawn:
    runs, rows, note = selected(data)
    values = rows[rows.stat == "jacobian_singular_value"].assign(rank=lambda t: t.tensor.astype(str).astype(int))
    deepest = values[values[DEPTH] == values[DEPTH].max()]
    growth = by_run(data)
    fig, (left, right) = plt.subplots(1, 2, figsize=(8.6, 4.4))
    for placement in arms.in_order(values[PLACEMENT].unique()):
        colour, name = figure.colour(placement), arms.placement_name(placement)
        for _, run in deepest[deepest[PLACEMENT] == placement].groupby("run_id"):
            run = run[run.value >= NOISE * run.value.max()].sort_values("rank")
            left.plot((run["rank"] + 1), run.value, color=colour, linewidth=1.1, alpha=0.75)
        mine = growth[growth[PLACEMENT] == placement]
        mean = mine.groupby(DEPTH).growth.mean()
        right.plot(mean.index, mean, color=colour, label=name)
        right.plot(mine[DEPTH], mine.growth, "o", color=colour, markersize=3.5, alpha=0.6, markeredgewidth=0)
    n = int(deepest["rank"].max()) + 1
    left.axhline(1, color="#444444", linestyle=figure.LINES[2], linewidth=1.1)
    left.set_yscale("log")
    left.set_xlabel(f"rank of the singular value, 1 to {n}")
    left.set_ylabel("singular value of J")
    left.set_title(f"depth {deepest[DEPTH].iloc[0]}, one line per seed")
    right.axhline(0, color="#444444", linestyle=figure.LINES[2], linewidth=1.1)
    figure.depth_axis(right, sorted(growth[DEPTH].unique()))
    right.set_ylabel(r"$\lambda$ = log(RMS singular value) / blocks")
    right.set_title("growth exponent, dots are seeds")
    fig.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    model = runs.iloc[0]
    caption = (
        "Jacobian of the stream after the last block, before the final norm, with respect to the embeddings, for one "
        f"sequence of {model['model.context']} tokens at width {model['model.width']}, in float64. Left: its singular "
        "values, those below 1e-15 of the largest left out as rounding. Right: the logarithm of their root mean "
        f"square per block; dotted: the identity.{note}"
    )
    table = pd.concat([values, growth.assign(value=growth.growth)], ignore_index=True)
    return Drawn(fig, table[["study", "run_id", PLACEMENT, DEPTH, "seed", "stat", "rank", "value"]], caption)


if __name__ == "__main__":
    figure.main(draw, STEM)
