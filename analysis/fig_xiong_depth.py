"""Last FFN's expected gradient at initialisation against depth, log-log, with fitted and theoretical slopes.

The form of Xiong et al. 2020, figure 3c-d, carried to depth 96; theory: theorem 1, slope 0 (post) and -1/2 (pre), and
normlab.theory for the depths and the setting in use, which covers deepnorm, sandwich and lns too.
"""

from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy import stats

import arms
import figure
from arms import DEPTH, PLACEMENT, Missing
from fig_hidden_growth import model_of
from figure import Drawn
from normlab import theory
from normlab.results import Results

STEM = "xiong_depth"
MOST_PANELS = 4


class Slope(NamedTuple):
    """Exponent s of gradient ~ depth^s, with its 95 % interval (least squares on logs, Student t), n points.

    theory: theorem 1's limit of great depth. local: the theory's exponent over these depths in this setting.
    """

    setting: str
    placement: str
    slope: float
    low: float
    high: float
    n: int
    theory: float | None
    local: float | None


def last_ffn(data: Results) -> pd.DataFrame:
    """One row per run with a profile at step 0: the expected gradient norm of the last block's FFN W_out.

    expected: the theory's size, up to a factor of each setting and placement; NaN where it has none.
    """
    layers = data.layers
    rows = layers[
        (layers.step == 0)
        & (layers.stat == "expected_weight_grad_norm")
        & (layers.site == "ffn")
        & (layers.tensor == "out")
    ]
    runs = arms.profiled(data)
    rows = arms.joined(rows, runs, [DEPTH, PLACEMENT, "seed", "setting"])
    rows = rows[rows.layer == rows[DEPTH] - 1]
    enough = rows.groupby(["setting", PLACEMENT])[DEPTH].transform("nunique") >= 3
    if not enough.any():
        raise Missing("needs profiles at step 0 of at least three depths in one setting")
    by_id = runs.set_index("run_id")
    return rows[enough].assign(expected=rows[enough].run_id.map(lambda run_id: _expected(by_id.loc[run_id])))


def _expected(run: pd.Series) -> float:
    model = model_of(run)
    size = None if model is None else theory.last_ffn_gradient(model)
    return np.nan if size is None else size.middle


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
        interval = fit.slope - reach, fit.slope + reach, len(kept), theory.LAST_FFN_SLOPE.get(str(placement))
        sizes = kept.groupby(DEPTH)["expected"].first() if "expected" in kept else pd.Series([np.nan])
        known = sizes.notna().all()
        local = round(float(np.polyfit(np.log(sizes.index), np.log(sizes), 1)[0]), 9) + 0.0 if known else None
        found.append(Slope(str(setting), str(placement), fit.slope, *interval, local))
    return found


def draw(data: Results) -> Drawn:
    rows = last_ffn(data)
    fits = slopes(rows)
    settings = arms.settings_in_order(rows.setting)
    left_out, settings = settings[MOST_PANELS:], settings[:MOST_PANELS]
    most = rows.groupby("setting")[PLACEMENT].nunique().max()
    fig, panels = plt.subplots(1, len(settings), figsize=(4.1 * len(settings) + 0.3, 3.2 + 0.35 * most), squeeze=False)
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
            if fit.local is not None:
                curve = mine.groupby(DEPTH).expected.first()
                curve *= np.exp(np.log(mean).mean() - np.log(curve).mean())  # its size is not predicted
                limit = "" if fit.theory is None else f" (theorem 1: {fit.theory:g})"
                panel.plot(curve.index, curve, color=colour, linestyle=figure.LINES[2], linewidth=1.4,
                           label=f"theory: slope {fit.local:+.2f}{limit}")  # fmt: skip
        figure.decade_axis(panel.yaxis)
        figure.depth_axis(panel, sorted(here[DEPTH].unique()))
        panel.set_title(setting)
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))
    panels[0, 0].set_ylabel("gradient norm, last FFN $W_2$")
    told = "; ".join(
        f"{f.placement} ({f.setting}): {f.slope:+.3f} [{f.low:+.3f}, {f.high:+.3f}], n = {f.n}"
        f"{'' if f.local is None else f', theory {f.local:+.3f}'}"
        for f in fits
    )
    caption = (
        "Expected gradient norm of the last block's second FFN matrix at initialisation against depth; dots are seeds, "
        "lines least-squares fits on logs, dotted the theory at these depths, shifted to the same mean. "
        f"Exponents with 95 % intervals: {told}."
        f"{f' Not drawn: {len(left_out)} further settings.' if left_out else ''}"
    )
    table = rows[["study", "run_id", "setting", PLACEMENT, DEPTH, "seed", "value", "expected"]]
    fitted = pd.DataFrame(fits).rename(columns={"placement": PLACEMENT})
    return Drawn(fig, table.merge(fitted, on=["setting", PLACEMENT], how="left"), caption)


if __name__ == "__main__":
    figure.main(draw, STEM)
