"""Last FFN's expected gradient at initialisation against depth, log-log, with fitted and theoretical slopes.

The form of Xiong et al. 2020, figure 3c-d, carried to depth 96; theory: theorem 1, slope 0 (post) and -1/2 (pre).
"""

from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy import stats

import arms
import figure
from arms import DEPTH, PLACEMENT, Missing
from figure import Drawn
from normlab import theory
from normlab.results import Results

STEM = "xiong_depth"
MOST_PANELS = 4


class Slope(NamedTuple):
    """Exponent s of gradient ~ depth^s, with its 95 % interval (least squares on logs, Student t), n points."""

    setting: str
    placement: str
    slope: float
    low: float
    high: float
    n: int
    theory: float | None


def last_ffn(data: Results) -> pd.DataFrame:
    """One row per run with a profile at step 0: the expected gradient norm of the last block's FFN W_out."""
    layers = data.layers
    rows = layers[
        (layers.step == 0)
        & (layers.stat == "expected_weight_grad_norm")
        & (layers.site == "ffn")
        & (layers.tensor == "out")
    ]
    rows = arms.joined(rows, arms.profiled(data), [DEPTH, PLACEMENT, "seed", "setting"])
    rows = rows[rows.layer == rows[DEPTH] - 1]
    enough = rows.groupby(["setting", PLACEMENT])[DEPTH].transform("nunique") >= 3
    if not enough.any():
        raise Missing("needs profiles at step 0 of at least three depths in one setting")
    return rows[enough]


def slopes(rows: pd.DataFrame) -> list[Slope]:
    """The fitted exponent of every setting and placement."""
    found = []
    rows = arms.sort_by_placement(rows, "setting", PLACEMENT)
    for (setting, placement), group in rows.groupby(["setting", PLACEMENT], sort=False):
        kept = group[np.isfinite(group.value) & (group.value > 0)]
        if kept[DEPTH].nunique() < 3:
            continue
        fit = stats.linregress(np.log(kept[DEPTH]), np.log(kept.value))
        reach = stats.t.ppf(0.975, len(kept) - 2) * fit.stderr
        expected = theory.LAST_FFN_SLOPE.get(str(placement))
        found.append(
            Slope(str(setting), str(placement), fit.slope, fit.slope - reach, fit.slope + reach, len(kept), expected)
        )
    return found


def draw(data: Results) -> Drawn:
    rows = last_ffn(data)
    fits = slopes(rows)
    settings = arms.settings_in_order(rows.setting)
    left_out, settings = settings[MOST_PANELS:], settings[:MOST_PANELS]
    fig, panels = plt.subplots(1, len(settings), figsize=(3.7 * len(settings) + 0.3, 3.6), squeeze=False)
    for panel, setting in zip(panels[0], settings, strict=True):
        here = rows[rows.setting == setting]
        for fit in (f for f in fits if f.setting == setting):
            mine = here[here[PLACEMENT] == fit.placement]
            colour = figure.colour(fit.placement)
            mean = mine.groupby(DEPTH).value.mean()
            panel.plot(mine[DEPTH], mine.value, "o", color=colour, markersize=3.5, alpha=0.45, markeredgewidth=0)
            name = f"{arms.placement_name(fit.placement)}: slope {fit.slope:+.2f} [{fit.low:+.2f}, {fit.high:+.2f}]"
            centre = np.exp(
                np.log(mean).mean() + fit.slope * (np.log(mean.index) - np.log(mean.index).to_numpy().mean())
            )
            panel.plot(mean.index, centre, color=colour, label=name)
            if fit.theory is not None:
                bound = mean.iloc[0] * (mean.index / mean.index[0]) ** fit.theory
                panel.plot(mean.index, bound, color=colour, linestyle=figure.LINES[2], linewidth=1.1,
                           label=f"theorem 1: slope {fit.theory:g}")  # fmt: skip
        figure.decade_axis(panel.yaxis)
        figure.depth_axis(panel, sorted(here[DEPTH].unique()))
        panel.set_title(setting)
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))
    panels[0, 0].set_ylabel("gradient norm, last FFN $W_2$")
    told = "; ".join(
        f"{f.placement} ({f.setting}): {f.slope:+.3f} [{f.low:+.3f}, {f.high:+.3f}], n = {f.n}" for f in fits
    )
    caption = (
        "Expected gradient norm of the last block's second FFN matrix at initialisation against depth; dots are seeds, "
        f"lines least-squares fits on logs. Exponents with 95 % intervals: {told}."
        f"{f' Not drawn: {len(left_out)} further settings.' if left_out else ''}"
    )
    table = rows[["study", "run_id", "setting", PLACEMENT, DEPTH, "seed", "value"]]
    fitted = pd.DataFrame(fits).rename(columns={"placement": PLACEMENT})
    return Drawn(fig, table.merge(fitted, on=["setting", PLACEMENT], how="left"), caption)


if __name__ == "__main__":
    figure.main(draw, STEM)
