"""Mean square of the hidden state by layer at initialisation, against the bounds of Xiong et al. 2020, lemma 2."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import NullLocator

import arms
import figure
from arms import DEPTH, PLACEMENT, Missing
from figure import Drawn
from normlab import theory
from normlab.results import Results

STEM = "hidden_growth"
MOST_PANELS = 4


def measured(data: Results) -> pd.DataFrame:
    """E||x_l||^2 / d of every block at step 0, with the bounds where the theory has some.

    The quantity is the lemma's: for post-norm what enters the block's second norm (what leaves it is 1 by
    construction), for the others the stream after the block.
    """
    runs = arms.profiled(data)
    runs = runs[runs["model.init"].isin(["xavier", "xiong"])]
    if runs.empty:
        raise Missing("needs runs with a Xavier-type init (model.init=xavier or xiong)")
    keys = [DEPTH, PLACEMENT, "seed", "setting", "model.norm", "model.width", "model.ffn_ratio", "model.activation"]
    keys += ["model.position", "model.scale_embedding"]
    rows = arms.joined(data.layers[(data.layers.step == 0) & (data.layers.site == "ffn")], runs, keys)
    entering = (rows.stat == "norm_input_rms") & (rows.tensor == "norm") & (rows[PLACEMENT] == "post")
    leaving = (rows.stat == "stream_rms") & (rows[PLACEMENT] != "post")
    rows = rows[entering | leaving]
    if rows.empty:
        raise Missing("needs activation profiles at step 0 (probe.batches > 0)")
    rows = rows.assign(block=rows.layer.astype(int) + 1, mean_square=rows.value**2, lower=np.nan, upper=np.nan)
    for (_, depth, placement), index in rows.groupby(["setting", DEPTH, PLACEMENT]).groups.items():
        run = rows.loc[index[0]]
        # The lemma takes the embedding and every sublayer's input to have unit mean square.
        if run["model.norm"] == "none" or run["model.position"] == "sinusoidal" or not run["model.scale_embedding"]:
            continue
        increment = theory.ffn_increment(run["model.width"], run["model.ffn_ratio"], run["model.activation"])
        bounds = theory.hidden_growth(placement, depth, increment)
        if bounds is not None:
            rows.loc[index, "lower"] = bounds.lower[rows.loc[index, "block"]]
            rows.loc[index, "upper"] = bounds.upper[rows.loc[index, "block"]]
    return rows


def draw(data: Results) -> Drawn:
    rows = measured(data)
    deepest = rows[rows[DEPTH] == rows.groupby("setting")[DEPTH].transform("max")]
    settings = arms.settings_in_order(deepest.setting)
    left_out, settings = settings[MOST_PANELS:], settings[:MOST_PANELS]
    fig, panels = plt.subplots(1, len(settings), figsize=(3.5 * len(settings) + 0.3, 3.5), squeeze=False)
    for panel, setting in zip(panels[0], settings, strict=True):
        here = deepest[deepest.setting == setting]
        for placement in arms.in_order(here[PLACEMENT].unique()):
            mine = here[here[PLACEMENT] == placement]
            colour, name = figure.colour(placement), arms.placement_name(placement)
            by_block = mine.groupby("block")[["mean_square", "lower", "upper"]].mean()
            quantity = f"{name}, input of the 2nd norm" if placement == "post" else f"{name}, stream"
            panel.plot(by_block.index, by_block.mean_square, color=colour, label=quantity)
            if by_block.lower.notna().all():
                bound = {"color": colour, "linestyle": figure.LINES[2], "linewidth": 1.1}
                panel.plot(by_block.index, by_block.lower, label=f"{name}, lemma 2", **bound)
                panel.plot(by_block.index, by_block.upper, **bound)
        figure.decade_axis(panel.yaxis)
        panel.set_xscale("log")
        panel.set_title(f"{setting}, depth {here[DEPTH].iloc[0]}")
        panel.set_xlabel("block $l$")
        ticks = [t for t in (1, 3, 6, 12, 24, 48, 96) if t <= here[DEPTH].iloc[0]]
        panel.set_xticks(ticks, [str(t) for t in ticks])
        panel.xaxis.set_minor_locator(NullLocator())
    panels[0, 0].set_ylabel(r"$E\|x_l\|^2 / d$ at initialisation")
    handles, labels = panels[0, -1].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=2)
    caption = (
        "Mean square of the hidden state by block at initialisation, mean over seeds. Dotted: the bounds of lemma 2 of "
        "Xiong et al. 2020, recomputed for the activation and FFN ratio in use."
        f"{f' Not drawn: {len(left_out)} further settings.' if left_out else ''}"
    )
    columns = ["study", "setting", "run_id", PLACEMENT, DEPTH, "seed", "block", "mean_square", "lower", "upper"]
    return Drawn(fig, pd.DataFrame(deepest[columns]), caption)


if __name__ == "__main__":
    figure.main(draw, STEM)
