"""Mean square of the hidden state by block at initialisation, against lemma 2 of Xiong et al. 2020 and its like."""

import textwrap
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator
from pydantic import ValidationError

import arms
import figure
from arms import DEPTH, PLACEMENT, Missing
from figure import Drawn
from normlab import theory
from normlab.config import ModelConfig
from normlab.results import Results

STEM = "hidden_growth"
MOST_PANELS = 4
MOST_LINES = 7  # placements in the panels; beyond, those that the theory covers come first


class Fit(NamedTuple):
    """Increment of the mean square per block, least squares over all blocks: measured, and of the theory's bounds."""

    setting: str
    placement: str
    increment: float
    lower: float
    upper: float


def model_of(run: pd.Series) -> ModelConfig | None:
    """The model section of a run; None if it was written by another version and does not fit this one's."""
    values: dict[str, Any] = {}
    for key, value in run.items():
        if str(key).startswith("model."):
            plain = value.item() if isinstance(value, np.generic) else value
            values[str(key).removeprefix("model.")] = None if plain != plain else plain  # NaN after pandas has had null
    try:
        return ModelConfig.model_validate(values, strict=False)
    except ValidationError:
        return None


def measured(data: Results) -> pd.DataFrame:
    """E||x_l||^2 / d of every block at step 0, with the theory's bounds where it has some.

    The quantity is lemma 2's: where a norm ends the block (post, deepnorm), what enters that norm (what leaves it is 1
    by construction), for the others the stream after the block.
    """
    runs = arms.profiled(data)
    step0 = data.layers[(data.layers.step == 0) & (data.layers.site == "ffn")]
    rows = arms.joined(step0, runs, [DEPTH, PLACEMENT, "seed", "setting"])
    ends = rows[PLACEMENT].isin([name for name, form in theory.FORMS.items() if form.normed_sum])
    entering = (rows.stat == "norm_input_rms") & (rows.tensor == "norm") & ends
    rows = rows[entering | ((rows.stat == "stream_rms") & ~ends)]
    if rows.empty:
        raise Missing("needs activation profiles at step 0 (probe.batches > 0)")
    rows = rows.assign(block=rows.layer.astype(int) + 1, mean_square=rows.value**2, lower=np.nan, upper=np.nan)
    by_id = runs.set_index("run_id")
    for index in rows.groupby(["setting", DEPTH, PLACEMENT]).groups.values():
        model = model_of(by_id.loc[rows.run_id[index[0]]])
        bounds = None if model is None else theory.hidden_growth(model)
        if bounds is not None:
            rows.loc[index, "lower"] = bounds.lower[rows.loc[index, "block"]]
            rows.loc[index, "upper"] = bounds.upper[rows.loc[index, "block"]]
    return rows


def deepest(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows[DEPTH] == rows.groupby("setting")[DEPTH].transform("max")]


def fits(rows: pd.DataFrame) -> list[Fit]:
    """The increments of every setting and placement, of the mean over seeds at the deepest depth."""
    found = []
    rows = arms.sort_by_placement(deepest(rows), "setting", PLACEMENT)
    for (setting, placement), group in rows.groupby(["setting", PLACEMENT], sort=False):
        mean = group.groupby("block")[["mean_square", "lower", "upper"]].mean()
        if len(mean) > 1:
            slopes = [np.polyfit(mean.index, mean[c], 1)[0] if mean[c].notna().all() else np.nan for c in mean]
            found.append(Fit(str(setting), str(placement), *slopes))
    return found


def readable(rows: pd.DataFrame) -> set[str]:
    """MOST_LINES of the placements, those with a theory first."""
    order = arms.in_order(rows[PLACEMENT].unique())
    covered = set(rows[PLACEMENT][rows.lower.notna()])
    return set(sorted(order, key=lambda placement: placement not in covered)[:MOST_LINES])


def told(fit: Fit) -> str:
    """The increments in words."""
    fitted, low, high = (f"{value:+.3f}".replace("-0.000", "+0.000") for value in fit[2:])
    expected = (
        ""
        if np.isnan(fit.lower)
        else f" (theory {high if np.isclose(fit.lower, fit.upper, rtol=0.01, atol=1e-3) else f'{low} to {high}'})"
    )
    return f"{fitted} per block{expected}"


def draw(data: Results) -> Drawn:
    rows = measured(data)
    fitted = {(fit.setting, fit.placement): fit for fit in fits(rows)}
    shown = deepest(rows)
    settings = arms.settings_in_order(shown.setting)
    left_out, settings = settings[MOST_PANELS:], settings[:MOST_PANELS]
    drawn = readable(shown)
    fig, panels = plt.subplots(1, len(settings), figsize=(4.1 * len(settings) + 0.3, 4.6), squeeze=False)
    for panel, setting in zip(panels[0], settings, strict=True):
        here = shown[shown.setting == setting]
        for placement in arms.in_order(set(here[PLACEMENT]) & drawn):
            mine = here[here[PLACEMENT] == placement]
            colour = figure.colour(placement)
            mean = mine.groupby("block")[["mean_square", "lower", "upper"]].mean()
            ends = (mine.stat == "norm_input_rms").any()
            name = f"{arms.placement_name(placement)}{', norm input' if ends else ''}"
            fit = fitted.get((setting, placement))
            label = f"{name}: {told(fit)}" if fit else name
            panel.plot(mean.index, mean.mean_square, color=colour, linewidth=3, alpha=0.45, label=label)
            for bound in ("lower", "upper"):
                panel.plot(mean.index, mean[bound], color=colour, linestyle=figure.LINES[2], linewidth=1.4)
        figure.decade_axis(panel.yaxis)
        panel.set_xscale("log")
        panel.set_title("\n".join(textwrap.wrap(f"{setting}, depth {here[DEPTH].iloc[0]}", 44)))
        panel.set_xlabel("block $l$")
        ticks = [t for t in (1, 3, 6, 12, 24, 48, 96) if t <= here[DEPTH].iloc[0]]
        panel.set_xticks(ticks, [str(t) for t in ticks])
        panel.xaxis.set_minor_locator(NullLocator())
        handles, _ = panel.get_legend_handles_labels()
        handles.append(
            Line2D([], [], color="#444444", linestyle=figure.LINES[2], linewidth=1.4, label="theory, bounds")
        )
        panel.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    panels[0, 0].set_ylabel(r"$E\|x_l\|^2 / d$ at initialisation")
    others = shown[PLACEMENT].nunique() - len(drawn)
    caption = (
        "Mean square of the hidden state by block at initialisation, mean over seeds: of the stream, or, where a norm "
        "ends the block, of what enters it. Dotted: lemma 2 of Xiong et al. 2020 (pre, post) and what the same "
        "computation gives for deepnorm, sandwich and lns, recomputed for the activation, FFN width, norm and init in "
        "use; attention adds between nothing and all of its value path. Increments: least squares over all blocks, of "
        f"the theory too.{f' Not drawn: {len(left_out)} further settings.' if left_out else ''}"
        f"{f' Not drawn: {others} further placements.' if others else ''}"
    )
    columns = ["study", "setting", "run_id", PLACEMENT, DEPTH, "seed", "block", "mean_square", "lower", "upper"]
    return Drawn(fig, pd.DataFrame(shown[columns]), caption)


if __name__ == "__main__":
    figure.main(draw, STEM)
