"""Time of the norm alone, and of a whole training step, by norm type, as a ratio to LayerNorm's."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

import arms
import choices
import estimates
import figure
from arms import DEPTH, PLACEMENT, Missing
from figure import Drawn
from normlab.norm import NORMS
from normlab.results import Results

STEM = "norm_cost"
KEY, REFERENCE = "model.norm", "layernorm"
ALONE = {"norm_forward_seconds": "forward", "norm_training_seconds": "forward and backward"}
STEP = "step_seconds"
COLOURS = dict(zip((*ALONE, STEP), figure.PALETTE, strict=False))
SIZES = ["data.batch_size", "model.context", "model.width"]


def alone(data: Results) -> tuple[pd.DataFrame, str]:
    """One row per repeat of experiments/norm_cost.py: value, seconds; ratio, to layernorm's of the same repeat."""
    layers = data.layers[data.layers.stat.isin(list(ALONE))]
    if layers.empty:
        raise Missing("needs runs of experiments/norm_cost.py")
    runs = data.runs[data.runs.run_id.isin(layers.run_id) & (data.runs.status == "finished")]
    keys = [k for k in arms.varying(runs) if k not in {KEY, "model.norm_eps"}]
    runs, left_out = choices.commonest(runs, [k for k in [*keys, "seed", "device", "machine"] if k in runs])
    rows = arms.joined(layers, runs, ["study", KEY, "device", *SIZES])
    rows = rows.assign(stat=rows.stat.astype(str), repeat=rows.tensor.astype(str).astype(int))
    return with_ratio(rows, ["stat", "repeat"]), left_out


def steps(data: Results) -> pd.DataFrame:
    """One row per training run: value, its median step's seconds; ratio, to the run that differs in the norm alone."""
    try:
        runs = arms.trained(data)
    except Missing:
        return pd.DataFrame()
    medians = data.steps.groupby("run_id").seconds.median()
    rest = [DEPTH, "seed", *(k for k in [*arms.varying(runs), "machine"] if k != KEY)]
    rest = list(dict.fromkeys(k for k in rest if k in runs))
    rows = runs.assign(value=runs.run_id.map(medians), stat=STEP, setting=choices.named(runs, rest))
    return with_ratio(rows.dropna(subset=["value"]), ["stat", "setting"]).dropna(subset=["ratio"])


def with_ratio(rows: pd.DataFrame, on: list[str]) -> pd.DataFrame:
    """`rows` with value over the reference's of the same `on`, where it and another norm have one."""
    keys = pd.MultiIndex.from_frame(rows[on])
    base = rows[rows[KEY] == REFERENCE].groupby(on).value.median()
    several = rows.groupby(on)[KEY].nunique()
    ratio = pd.Series(rows.value.to_numpy() / base.reindex(keys).to_numpy(), rows.index)
    return rows.assign(ratio=ratio.where(several.reindex(keys).to_numpy() > 1))


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Medians with bootstrap intervals by norm and stat: seconds (value) and ratio."""
    found = []
    for (norm, stat), mine in rows.groupby([KEY, "stat"]):
        seconds, ratio = estimates.median(mine.value), estimates.median(mine.ratio.dropna())
        found.append((norm, stat, *seconds, *ratio))
    names = ["value", "low", "high", "n"]
    return pd.DataFrame(found, columns=[KEY, "stat", *names, *(f"ratio_{name}" for name in names)])


def draw(data: Results) -> Drawn:
    timed, left_out = alone(data)
    trained = steps(data)
    rows = pd.concat([timed, trained], ignore_index=True)
    table = summary(rows)
    rank = {norm: i for i, norm in enumerate(NORMS)}
    order = sorted(rows[KEY].unique(), key=lambda norm: (rank.get(norm, len(rank)), norm))
    columns = 3 if len(trained) else 2
    size = (8.6 if columns == 2 else 11.8, 0.46 * len(order) + 1.5)
    fig, panels = plt.subplots(1, columns, figsize=size, sharey=True)
    milliseconds = table[table.stat.isin(list(ALONE))].assign(
        **{name: lambda t, name=name: 1000 * t[name] for name in ("value", "low", "high")}
    )
    marks(panels[0], milliseconds, order, ["value", "low", "high"], None)
    marks(panels[1], table[table.stat.isin(list(ALONE))], order, ["ratio_value", "ratio_low", "ratio_high"], "ratio_n")
    panels[0].set_xlabel("time of the norm alone (ms)")
    panels[1].set_xlabel(f"time of the norm alone / {REFERENCE}'s")
    if len(trained):
        of_steps = table[table.stat == STEP]
        marks(panels[2], of_steps, order, ["ratio_value", "ratio_low", "ratio_high"], "ratio_n")
        panels[2].set_xlabel(f"time of a training step / {REFERENCE}'s")
    for panel in panels[1:]:
        panel.axvline(1, color="#444444", linewidth=0.9)
        panel.tick_params(labelleft=False)
    names = {**ALONE, **({STEP: "training step"} if len(trained) else {})}
    for stat, name in names.items():
        panels[0].plot([], [], "D", color=COLOURS[stat], label=name)
    fig.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    first = timed.iloc[0]
    whole = (
        f" Training steps: median seconds of each of {len(trained)} runs over that of the run that differs in the norm "
        "alone; n = pairs."
        if len(trained)
        else ""
    )
    caption = (
        f"Time of one norm on ({', '.join(f'{int(first[size]):,}' for size in SIZES)}) (batch, context, width), on "
        f"{first.device}, medians over {timed.repeat.nunique()} repeats in turns with 95 % bootstrap intervals; ratios "
        f"within a repeat.{whole}{left_out}"
    )
    columns = ["study", "run_id", KEY, "stat", "repeat", "device", PLACEMENT, DEPTH, "seed", "value", "ratio"]
    kept = rows.reindex(columns=columns).sort_values(["stat", KEY, "run_id", "repeat"], ignore_index=True)
    estimated = table.rename(columns={"value": "median", "ratio_value": "ratio_median"})
    return Drawn(fig, kept.merge(estimated, on=[KEY, "stat"]), caption)


def marks(panel: Any, table: pd.DataFrame, order: list[str], names: list[str], n: str | None) -> None:
    """Median and interval by norm, a line per stat, ratios in numbers on the right; a log axis if far apart."""
    stats = [stat for stat in COLOURS if stat in set(table.stat)]
    for _, row in table.dropna(subset=[names[0]]).iterrows():
        i = stats.index(row.stat)
        y = order.index(row[KEY]) + 0.36 * (i - (len(stats) - 1) / 2)
        choices.interval(panel, row[names], y, COLOURS[row.stat])
        if n and row[KEY] != REFERENCE:
            value, low, high = row[names]
            told = estimates.Estimate(value, low, high, int(row[n])).told("{:.3g}")
            choices.note(panel, told, y, COLOURS[row.stat])
    numbers = table[names].to_numpy(float)
    low, high = np.nanmin(numbers), np.nanmax(numbers)
    if high > 3 * low > 0:
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.xaxis.set_minor_formatter(NullFormatter())
    choices.lines(panel, order)


if __name__ == "__main__":
    figure.main(draw, STEM)
