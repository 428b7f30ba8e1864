"""Attention logits and final loss with and without QK-norm, by layer, step and learning rate."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

import arms
import figure
import inside
from arms import DEPTH, PLACEMENT, Missing
from estimates import LR, capped_loss, mean
from fig_attention_logits import STAT, UNSAFE
from figure import Drawn
from normlab.results import Results

STEM = "qk_norm"
KEY = "model.qk_norm"
NAMES = {False: "without QK-norm", True: "with QK-norm"}
# One hue each, darker with the learning rate; dashes and markers tell them apart in grey.
HUES = {False: "Oranges", True: "Blues"}
PLAIN = {False: figure.PALETTE[1], True: figure.PALETTE[0]}
DASHES = {False: figure.LINES[0], True: figure.LINES[1]}
MARKERS = {False: "o", True: "s"}


def compared(data: Results) -> tuple[pd.DataFrame, str]:
    """The training runs of one setting, of the deepest depth that has both, and a note on what was chosen."""
    runs = arms.trained(data)
    if KEY not in runs or runs[KEY].astype(bool).nunique() < 2:
        raise Missing(f"needs training runs with {KEY}=true and {KEY}=false")
    runs, note = arms.narrowed(runs.assign(**{KEY: runs[KEY].astype(bool)}), KEY, PLACEMENT, LR)
    both = runs.groupby([DEPTH, PLACEMENT])[KEY].transform("nunique") > 1
    if not both.any():
        raise Missing(f"needs training runs with {KEY}=true and {KEY}=false, the rest alike")
    runs = runs[both]
    deepest = runs[runs[DEPTH] == runs[DEPTH].max()]
    return deepest.assign(loss=capped_loss(deepest)), note


def measured(layers: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """The largest logit by run, step and layer, of finite ones."""
    rows = inside.after_blocks(layers[layers.site == "attn"], runs, STAT)
    rows = rows[np.isfinite(rows.value)]
    return arms.joined(rows, runs, [KEY, *(c for c in [*inside.WHO, "loss"] if c != "run_id")])


def shades(rates: list[float]) -> dict[tuple[bool, float], Any]:
    """(QK-norm or not, learning rate) -> colour."""
    depths = np.linspace(0.4, 0.95, len(rates)) if len(rates) > 1 else [0.8]
    return {(on, r): plt.get_cmap(h)(d) for on, h in HUES.items() for r, d in zip(rates, depths, strict=True)}


def draw(data: Results) -> Drawn:
    runs, note = compared(data)
    rows = measured(data.layers, runs)
    placements, more = inside.few_placements(runs)
    runs, rows = (t[t[PLACEMENT].isin(placements)] for t in (runs, rows))
    rates = sorted(runs[LR].unique())
    colours = shades(rates)
    size = (9.6, 2.4 * len(placements) + 1.1)
    fig, panels = plt.subplots(len(placements), 3, figsize=size, sharex="col", squeeze=False)
    for (left, middle, right), placement in zip(panels, placements, strict=True):
        mine = rows[(rows[PLACEMENT] == placement) & (rows.value > 0)]
        by_step(left, mine, colours)
        by_layer(middle, mine, colours)
        losses(right, runs[runs[PLACEMENT] == placement])
        for panel in (left, middle):
            panel.axhline(UNSAFE, color="#777777", linewidth=1)
            panel.sharey(panels[0, 0])
        left.set_ylabel(f"{arms.placement_name(placement)}\nlargest attention logit")
        right.sharey(panels[0, 2])
        right.set_ylabel("final validation loss (nats)")
        middle.tick_params(labelleft=False)
    dress(panels, rates)
    fig.legend(handles=entries(rates, colours, runs), loc="outside lower center", ncols=5)
    caption = (
        f"Depth {runs[DEPTH].iloc[0]}, {len(runs)} runs. Left: largest attention logit (score before the softmax) "
        "of any layer at each profile; middle: of each layer, the largest over the profiles; medians over seeds, "
        "darker at higher learning rates. Grey: 1e4, above which every run of Wortsman et al. 2023 diverged. Right: "
        "final loss of each run (marks) and mean over seeds (lines, 95 % bootstrap intervals from three seeds on); a "
        f"run that diverged (cross) counts with its loss at initialisation.{note}{more}"
    )
    top = rows.groupby("run_id").value.max().rename("largest_logit")
    table = runs.merge(top, left_on="run_id", right_index=True, how="left")
    table = arms.sort_by_placement(table, PLACEMENT, KEY, LR, "seed")
    wide = rows.groupby(["run_id", "layer"]).value.max().unstack("layer").add_prefix("layer_")
    table = table[[*inside.WHO, KEY, "loss", "largest_logit"]].merge(wide, on="run_id", how="left")
    return Drawn(fig, table, caption)


def by_step(panel: Any, rows: pd.DataFrame, colours: dict[tuple[bool, float], Any]) -> None:
    tops = rows.groupby([KEY, LR, "run_id", "step"]).value.max().reset_index()
    for (on, rate), mine in tops.groupby([KEY, LR]):
        middle = mine.groupby("step").value.median()
        panel.plot(middle.index, middle, color=colours[bool(on), rate], linestyle=DASHES[bool(on)], linewidth=1.4,
                   marker=MARKERS[bool(on)], markersize=2.8)  # fmt: skip


def by_layer(panel: Any, rows: pd.DataFrame, colours: dict[tuple[bool, float], Any]) -> None:
    tops = rows.groupby([KEY, LR, "run_id", "layer"]).value.max().reset_index()
    for (on, rate), mine in tops.groupby([KEY, LR]):
        middle = mine.groupby("layer").value.median()
        panel.plot(middle.index + 1, middle, color=colours[bool(on), rate], linestyle=DASHES[bool(on)], linewidth=1.4,
                   marker=MARKERS[bool(on)], markersize=2.8)  # fmt: skip


def losses(panel: Any, runs: pd.DataFrame) -> None:
    """Both arms stand a little apart, so that neither hides the other."""
    for on, shift in ((False, 0.95), (True, 1.05)):
        mine = runs[runs[KEY] == on]
        told = pd.DataFrame({rate: mean(group.loss)._asdict() for rate, group in mine.groupby(LR)}).T
        if told.empty:
            continue
        at = told.index.astype(float) * shift
        panel.plot(at, told.value, color=PLAIN[on], linestyle=DASHES[on], linewidth=1.4)
        known = told.low.notna().to_numpy()
        reach = np.maximum([told.value - told.low, told.high - told.value], 0)[:, known]
        panel.errorbar(at[known], told.value[known], reach, fmt="none", ecolor=PLAIN[on], capsize=2, linewidth=0.9)
        bad = mine.verdict == "diverged"
        panel.plot(mine[LR][~bad] * shift, mine.loss[~bad], MARKERS[on], color=PLAIN[on], markersize=3.5, alpha=0.8)
        panel.plot(mine[LR][bad] * shift, mine.loss[bad], "x", color=PLAIN[on], markersize=6, markeredgewidth=1.6)


def dress(panels: np.ndarray, rates: list[float]) -> None:
    figure.decade_axis(panels[0, 0].yaxis)
    for panel, title in zip(panels[0], ("over the run, any layer", "by layer, largest of the run", "final loss"),
                            strict=True):  # fmt: skip
        panel.set_title(title)
    for panel, label in zip(panels[-1], ("optimizer step", "layer (1 = input side)", "peak learning rate"),
                            strict=True):  # fmt: skip
        panel.set_xlabel(label)
    panels[-1, 1].xaxis.get_major_locator().set_params(integer=True)
    last = panels[-1, 2]
    last.set_xscale("log")
    last.xaxis.set_major_locator(FixedLocator(rates[:: 1 + len(rates) // 7]))
    last.xaxis.set_minor_locator(NullLocator())
    last.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def entries(rates: list[float], colours: dict[tuple[bool, float], Any], runs: pd.DataFrame) -> list[Line2D]:
    """Both arms at the lowest and highest rate, the limit, and the cross if there is one."""
    ends = [rates[0], rates[-1]] if len(rates) > 1 else rates
    found = [
        Line2D([], [], color=colours[on, rate], linestyle=DASHES[on], marker=MARKERS[on], markersize=3.5,
               label=f"{name}, lr {rate:g}") for on, name in NAMES.items() for rate in ends
    ]  # fmt: skip
    if (runs.verdict == "diverged").any():
        found.append(Line2D([], [], color="#444444", marker="x", linestyle="", label="diverged"))
    return found


if __name__ == "__main__":
    figure.main(draw, STEM)
