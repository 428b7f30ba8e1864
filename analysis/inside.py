"""What the figures of a network's inside share: which runs and rows they take, and panels over relative depth."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

import arms
import figure
from arms import DEPTH, PLACEMENT, Missing
from estimates import LR, capped_loss
from normlab.results import Results

MOST_PANELS = 8
WHEN = ("start", "10 %", "50 %", "end")
# From the start of training (dark) to its end (light), told apart in grey too.
SHADES = dict(zip(WHEN, ("#440154", "#31688e", "#35b779", "#e0a800"), strict=True))
_SITES = ("attn", "cross", "ffn")  # in the order in which a block's sublayers join the stream
WHO = ["study", "run_id", PLACEMENT, DEPTH, LR, "seed", "verdict"]


def one_setting(data: Results) -> tuple[pd.DataFrame, str]:
    """The training runs of the commonest setting at one learning rate, all placements and depths, and a note on it.

    The rate is the one that most cells (placement x depth) have, and of those the one of the lowest loss over them.
    """
    runs, note = arms.narrowed(arms.trained(data), PLACEMENT, LR)
    if runs[LR].nunique() > 1:
        losses = runs.assign(loss=capped_loss(runs)).groupby([PLACEMENT, DEPTH, LR]).loss.mean().unstack(LR)
        cells = losses.notna().sum()
        rate = losses.mean()[cells == cells.max()].fillna(np.inf).idxmin()
        note += f" Of {runs[LR].nunique()} learning rates, {rate:g} is shown: the lowest mean final loss over all arms."
        runs = runs[runs[LR] == rate]
    return runs, note


def few_placements(runs: pd.DataFrame) -> tuple[list[str], str]:
    """The placements that have a panel, and a note on those that have none."""
    placements = arms.in_order(runs[PLACEMENT].unique())
    rest = placements[MOST_PANELS:]
    return placements[:MOST_PANELS], f" Not drawn: {', '.join(rest)}." if rest else ""


def after_blocks(layers: pd.DataFrame, runs: pd.DataFrame, stat: str) -> pd.DataFrame:
    """run_id, step, layer, value of an activation statistic: of each block's last sublayer that has it.

    Raises Missing where none of these runs has it.
    """
    rows = layers[(layers.stat == stat) & layers.layer.notna() & layers.run_id.isin(runs.run_id)]
    if rows.empty:
        raise Missing(f"needs profiles with {stat} (probe.batches > 0)")
    order = rows.site.astype(str).map({site: i for i, site in enumerate(_SITES)})
    rows = rows.assign(order=order, layer=rows.layer.astype(int)).sort_values(["run_id", "step", "layer", "order"])
    return rows.drop_duplicates(["run_id", "step", "layer"], keep="last")[["run_id", "step", "layer", "value"]]


def with_runs(rows: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Rows that have a run_id, with what tells the runs apart (WHO) beside them."""
    return arms.joined(rows, runs, [c for c in WHO if c != "run_id"])


def last_finite(rows: pd.DataFrame) -> pd.Series:
    """run_id -> the last step of which every layer's value is finite."""
    finite = np.isfinite(rows.value).groupby([rows.run_id, rows.step]).all()
    return finite[finite].reset_index().groupby("run_id").step.max()


def spacing(rows: pd.DataFrame) -> int:
    """Steps from one row of a run to the next: 1, or more where a large study was thinned."""
    steps = np.sort(rows.step.unique())
    return int(np.median(np.diff(steps))) if len(steps) > 1 else 1


def at_times(rows: pd.DataFrame, runs: pd.DataFrame, when: Sequence[str] = WHEN) -> pd.DataFrame:
    """Every-step rows (run_id, step, layer, value) at some times of each run: run_id, time, layer, value.

    start: step 0. 10 %, 50 %: of the planned steps. end: up to the last finite step, so that a diverged run has one.
    Later times are medians over up to 9 steps, a single batch's gradient being noisy, or over those that are there. A
    run that ended before a time has no row there.
    """
    rows = rows.merge(runs[["run_id", "steps"]], on="run_id")
    end = rows.run_id.map(last_finite(rows))
    half = (rows.steps // 20).clip(upper=4).clip(lower=spacing(rows) // 2)
    parts = []
    for time in when:
        if time == "end":
            inside = (rows.step <= end) & (rows.step >= end - 2 * half)
        else:
            share = {"start": 0.0, "10 %": 0.1, "50 %": 0.5}[time]
            centre = (share * (rows.steps - 1)).round()
            inside = ((rows.step - centre).abs() <= half * (share > 0)) & (rows.step <= end) & (centre <= end)
        found = rows[inside].groupby(["run_id", "layer"], as_index=False).value.median()
        parts.append(found.assign(time=time))
    return pd.concat(parts, ignore_index=True)


def first_and_last(rows: pd.DataFrame) -> pd.DataFrame:
    """Profile rows at step 0 and at each run's last finite profile after it: run_id, time, step, layer, value."""
    end = rows.run_id.map(last_finite(rows))
    start, last = rows[rows.step == 0], rows[(rows.step == end) & (rows.step > 0)]
    return pd.concat([start.assign(time="start"), last.assign(time="end")], ignore_index=True)


def verdicts(runs: pd.DataFrame) -> str:
    """How many of these runs have which verdict: 4 stable, 2 diverged."""
    counts = runs.verdict.value_counts()
    return ", ".join(f"{counts[v]} {v}" for v in sorted(counts.index, key=str))


def relative_depth(layer: pd.Series, depth: pd.Series) -> pd.Series:
    """layer / (depth - 1): 0 is the block beside the embedding, 1 the last one."""
    return (layer / (depth - 1).clip(lower=1)).astype(float)


def profile_panels(rows: pd.DataFrame, runs: pd.DataFrame, placements: list[str], label: str, *, log: bool) -> Any:
    """A panel per placement: median over seeds against relative depth; colour says the time, dashes the depth."""
    columns = min(4, len(placements))
    lines = -(-len(placements) // columns)
    size = ((2.9 if columns < 4 else 2.5) * columns + 0.7, 2.6 * lines + 0.7)
    fig, panels = plt.subplots(lines, columns, figsize=size, sharex=True, sharey=True, squeeze=False)
    rows = rows[np.isfinite(rows.value) & ((rows.value > 0) | (not log))]
    depths = sorted(rows[DEPTH].unique(), reverse=True)
    dashes = {depth: figure.LINES[i % len(figure.LINES)] for i, depth in enumerate(depths)}
    for panel, placement in zip(panels.flat, placements, strict=False):
        for (depth, time), mine in rows[rows[PLACEMENT] == placement].groupby([DEPTH, "time"], sort=True):
            middle = mine.groupby("position").value.median()
            few = {"marker": "o", "markersize": 3} if len(middle) <= 3 else {}
            panel.plot(middle.index, middle, color=SHADES[str(time)], linestyle=dashes[depth], **few)
        panel.set_title(f"{arms.placement_name(placement)}: {verdicts(runs[runs[PLACEMENT] == placement])}")
    if log:
        figure.decade_axis(panels[0, 0].yaxis)
    for panel in panels[-1]:
        panel.set_xlabel("relative depth (0 = first block)")
    for line in panels:
        line[0].set_ylabel(label)
    hide_rest(panels, len(placements))
    handles = [Line2D([], [], color=SHADES[t], linewidth=3, label=t) for t in WHEN if (rows.time == t).any()]
    handles += [Line2D([], [], color="#444444", linestyle=dashes[d], label=f"depth {d}") for d in depths[::-1]]
    fig.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4 if columns == 1 else 8))
    return fig


def hide_rest(panels: np.ndarray, used: int) -> None:
    """Hide the panels that have nothing; the ones above them get their tick labels."""
    columns = panels.shape[1]
    for i, panel in enumerate(panels.flat):
        if i >= used:
            panel.set_visible(False)
            above = panels.flat[i - columns]
            above.tick_params(labelbottom=True)
            above.set_xlabel(panel.get_xlabel())
