"""Gradients at initialisation by placement and depth, how they grow, and their spread over norms x activations."""

from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm

import arms
import choices
import estimates
import figure
from arms import DEPTH, PLACEMENT, Missing
from figure import Drawn
from normlab.norm import NORMS
from normlab.results import Results

STEM = "init_gradients"
NORM, ACTIVATION = "model.norm", "model.activation"
FREE = [PLACEMENT, NORM, ACTIVATION]
QUANTITIES = {"all": "all weights", "first": "$W_2$, first block", "last": "$W_2$, last block"}
COLOURS = dict(zip(QUANTITIES, ("#000000", "#009E73", "#D55E00"), strict=True))
MARKERS = dict(zip(QUANTITIES, ("s", "o", "D"), strict=True))


class Growth(NamedTuple):
    """s of gradient ~ depth^s: least squares on logs per norm, activation and seed; mean over the norms x activations.

    low, high: bootstrap interval over seeds, n of them. least, most: of the norms x activations, each over its seeds.
    """

    placement: str
    quantity: str
    exponent: float
    low: float
    high: float
    n: int
    least: float
    most: float
    settings: int


def by_run(data: Results) -> tuple[pd.DataFrame, str]:
    """One row per initialisation and quantity: the norm of the expected gradient at step 0, and what was left out."""
    layers = data.layers[(data.layers.step == 0) & (data.layers.stat == "expected_weight_grad_norm")]
    if layers.empty:
        raise Missing("needs profiles at step 0 (probe.batches > 0)")
    runs = arms.profiled(data)
    runs = runs[runs.run_id.isin(layers.run_id)]
    kept = ("model.", "data", "probe.batches", "precision", "tf32", "attention", "compile")
    keys = [k for k in arms.varying(runs) if k.startswith(kept)]
    runs, left_out = choices.commonest(runs, [k for k in keys if k not in FREE])
    runs = runs.drop_duplicates([*FREE, DEPTH, "seed"])
    layers = layers[layers.run_id.isin(runs.run_id)]
    total = layers.assign(value=layers.value**2).groupby("run_id").value.sum() ** 0.5
    out = layers[(layers.site == "ffn") & (layers.tensor == "out")]
    ends = out.groupby("run_id").layer.agg(["min", "max"])
    parts = [total.rename("value").reset_index().assign(quantity="all")]
    for name, end in (("first", "min"), ("last", "max")):
        mine = out[out.layer == out.run_id.map(ends[end])]
        parts.append(mine[["run_id", "value"]].assign(quantity=name))
    rows = arms.joined(pd.concat(parts), runs, ["study", *FREE, DEPTH, "seed"])
    return arms.sort_by_placement(rows, PLACEMENT, "quantity", DEPTH, NORM, ACTIVATION, "seed"), left_out


def growth(rows: pd.DataFrame) -> list[Growth]:
    """The exponents of every placement and quantity with positive gradients at three depths or more."""
    found = []
    rows = rows[np.isfinite(rows.value) & (rows.value > 0)]
    for (placement, quantity), group in rows.groupby([PLACEMENT, "quantity"], sort=False):
        slopes = []
        for setting, mine in group.groupby([NORM, ACTIVATION, "seed"]):
            if mine[DEPTH].nunique() >= 3:
                slopes.append((*setting, np.polyfit(np.log(mine[DEPTH].astype(float)), np.log(mine.value), 1)[0]))
        if not slopes:
            continue
        table = pd.DataFrame(slopes, columns=[NORM, ACTIVATION, "seed", "slope"])
        mean = estimates.mean(table.groupby("seed").slope.mean())
        each = table.groupby([NORM, ACTIVATION]).slope.mean()
        found.append(Growth(str(placement), str(quantity), *mean, each.min(), each.max(), len(each)))
    return found


def ranked(rows: pd.DataFrame, fits: list[Growth]) -> list[str]:
    """Placements by the growth of the whole gradient, fastest last; those without an exponent at the end."""
    by = {fit.placement: fit.exponent for fit in fits if fit.quantity == "all"}
    return sorted(arms.in_order(rows[PLACEMENT].unique()), key=lambda p: by.get(p, np.inf))


def draw(data: Results) -> Drawn:
    rows, left_out = by_run(data)
    fits = growth(rows)
    if not fits:
        raise Missing("needs profiles at step 0 of at least three depths in one setting")
    order, depths = ranked(rows, fits), sorted(rows[DEPTH].unique())
    wide = 0.3 * len(depths) + 0.5
    size = (3 * wide + 7.4, 0.235 * len(order) + 1.75)
    fig, panels = plt.subplots(1, 5, figsize=size, sharey=True, width_ratios=[wide, wide, wide, 2.6, 2.6])
    positive = rows[np.isfinite(rows.value) & (rows.value > 0)]
    means = np.exp(np.log(positive.value).groupby([positive.quantity, positive[PLACEMENT], positive[DEPTH]]).mean())
    scale = LogNorm(means.quantile(0.05), means.quantile(0.95))  # one placement that explodes must not hide the others
    colours = plt.get_cmap("viridis").with_extremes(bad="#bbbbbb")
    image = None
    for panel, (quantity, name) in zip(panels, QUANTITIES.items(), strict=False):
        mine = means[quantity] if quantity in means.index.get_level_values(0) else pd.Series(dtype=float)
        grid = mine.unstack().reindex(index=order, columns=depths).to_numpy(float)
        image = panel.imshow(grid, aspect="auto", norm=scale, cmap=colours, interpolation="nearest")
        panel.set_xticks(range(len(depths)), [str(d) for d in depths])
        panel.set_xlabel("depth (blocks)")
        panel.set_title(name)
        panel.grid(visible=False)
        panel.tick_params(axis="y", length=0)
    label = "gradient norm, geometric mean"
    fig.colorbar(image, ax=panels[:3], location="bottom", label=label, extend="both", aspect=40, pad=0.02)
    exponents(panels[3], fits, order)
    spread(panels[4], positive, order, depths[-1])
    legend = [part for panel in panels[3:] for part in zip(*panel.get_legend_handles_labels(), strict=True)]
    fig.legend(*zip(*legend, strict=True), loc="outside lower center", ncols=min(6, len(legend)))
    panels[0].set_yticks(range(len(order)), [arms.placement_name(p) for p in order])
    settings = rows[[NORM, ACTIVATION]].drop_duplicates()
    zero = rows[~(np.isfinite(rows.value) & (rows.value > 0))]
    nothing = (
        " Gradients that are zero or not finite are left out (grey where all are): "
        f"{zero.run_id.nunique()} models have one ({', '.join(arms.in_order(zero[PLACEMENT].unique()))})."
        if len(zero)
        else ""
    )
    caption = (
        f"L2 norm of the expected gradient at initialisation ({rows.run_id.nunique():,} models: {len(order)} "
        f"placements, {settings[NORM].nunique()} norms, {settings[ACTIVATION].nunique()} activations, "
        f"{arms.seeds(rows)}), averaged over seeds, norms and activations.{nothing} "
        "Exponents s of gradient ~ depth^s, least squares on logs, linear within ±1 and logarithmic beyond: mark and "
        "thick line are the mean and its 95 % bootstrap interval over seeds, the thin line spans norms x activations. "
        f"Right: each norm and activation at depth {depths[-1]}, mean over seeds.{left_out}"
    )
    columns = ["study", "run_id", PLACEMENT, NORM, ACTIVATION, DEPTH, "seed", "quantity", "value"]
    fitted = pd.DataFrame(fits).rename(columns={"placement": PLACEMENT})
    return Drawn(fig, rows[columns].merge(fitted, on=[PLACEMENT, "quantity"], how="left"), caption)


def exponents(panel: Any, fits: list[Growth], order: list[str]) -> None:
    shift = dict(zip(QUANTITIES, (-0.26, 0.0, 0.26), strict=True))
    for fit in fits:
        y, colour = order.index(fit.placement) + shift[fit.quantity], COLOURS[fit.quantity]
        panel.plot([fit.least, fit.most], [y, y], color=colour, linewidth=0.7, alpha=0.7)
        panel.plot([fit.low, fit.high], [y, y], color=colour, linewidth=2.4, solid_capstyle="butt")
        panel.plot(fit.exponent, y, MARKERS[fit.quantity], color=colour, markersize=3.5)
    for quantity, name in QUANTITIES.items():
        panel.plot([], [], MARKERS[quantity], color=COLOURS[quantity], markersize=4, label=name)
    panel.axvline(0, color="#444444", linewidth=0.9)
    panel.set_xscale("symlog", linthresh=1, linscale=1)
    far = max(abs(value) for fit in fits for value in (fit.least, fit.most))
    low = min(fit.least for fit in fits)
    ticks = [t for t in (-100, -30, -10, -3, -1, -0.5, 0, 0.5, 1, 3, 10, 30, 100) if low - 0.5 <= t <= far + 0.5]
    panel.set_xticks(ticks, [f"{t:g}" for t in ticks])
    panel.xaxis.set_minor_locator(plt.NullLocator())
    named(panel, "growth exponent s", "exponent of depth")


def spread(panel: Any, rows: pd.DataFrame, order: list[str], depth: int) -> None:
    here = rows[(rows[DEPTH] == depth) & (rows.quantity == "last")]
    each = np.exp(np.log(here.value).groupby([here[PLACEMENT], here[NORM], here[ACTIVATION]]).mean()).reset_index()
    rank = {norm: i for i, norm in enumerate(NORMS)}
    norms = sorted(each[NORM].unique(), key=lambda norm: (rank.get(norm, len(rank)), norm))
    for i, norm in enumerate(norms):
        mine = each[each[NORM] == norm]
        y = mine[PLACEMENT].map(order.index) + 0.6 * ((i + 0.5) / len(norms) - 0.5)
        panel.plot(mine.value, y, "o", color=figure.PALETTE[rank.get(norm, len(rank))], markersize=3, alpha=0.8,
                   markeredgewidth=0, label=norm)  # fmt: skip
    panel.set_xscale("log")
    named(panel, "gradient norm", f"$W_2$, last block, depth {depth}")


def named(panel: Any, label: str, title: str) -> None:
    panel.set_xlabel(label)
    panel.set_title(title)
    panel.tick_params(axis="y", length=0)


if __name__ == "__main__":
    figure.main(draw, STEM)
