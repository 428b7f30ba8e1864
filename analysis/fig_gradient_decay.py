"""Gradients by block of post-norm at initialisation, with the fitted factor per block beside appendix F's (2/3)^(1/2).

Xiong et al. 2020, appendix F, derives a factor (2/3)^((L-l)/2) between block l and the last one from an upper bound.
"""

from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy import stats

import arms
import figure
from arms import DEPTH, PLACEMENT, Missing
from fig_hidden_growth import deepest, model_of
from figure import Drawn
from normlab import theory
from normlab.results import Results

STEM = "gradient_decay"
MOST_PANELS = 4
APPENDIX_F = (2 / 3) ** 0.5
QUANTITIES = {"stream_grad_norm": "stream", "mean_weight_grad_norm": "FFN $W_2$"}
COLOURS = dict(zip(QUANTITIES, ("#D55E00", "#0072B2"), strict=True))


class Factor(NamedTuple):
    """r of gradient ~ r^(L - l): geometric mean over seeds of each one's least squares on logs.

    low, high: 95 % Student t interval over the seeds, since the blocks of one model are no independent points; NaN for
    one seed. ratio: first block over last, geometric mean. norm_alone, with_branch: theory.post_gradient_factor.
    """

    setting: str
    depth: int
    quantity: str
    factor: float
    low: float
    high: float
    n: int
    ratio: float
    norm_alone: float
    with_branch: float


def by_block(data: Results) -> pd.DataFrame:
    """The two gradients of every block of post-norm at step 0, of the deepest depth of each setting."""
    runs = arms.profiled(data)
    layers = data.layers[(data.layers.step == 0) & (data.layers.site == "ffn")]
    stream = (layers.stat == "stream_grad_norm") & layers.tensor.isna()
    weight = (layers.stat == "mean_weight_grad_norm") & (layers.tensor == "out")
    rows = arms.joined(layers[stream | weight], runs[runs[PLACEMENT] == "post"], [DEPTH, PLACEMENT, "seed", "setting"])
    rows = rows[(rows[DEPTH] > 2) & np.isfinite(rows.value) & (rows.value > 0)]
    if rows.empty:
        raise Missing("needs profiles of post-norm at step 0 (model.placement=post, probe.batches > 0)")
    rows = rows.assign(block=rows.layer.astype(int) + 1, stat=rows.stat.astype(str))
    return deepest(rows).sort_values(["setting", "stat", "run_id", "block"], ignore_index=True)


def factors(data: Results, rows: pd.DataFrame) -> list[Factor]:
    by_id = data.runs.drop_duplicates("run_id").set_index("run_id")
    found = []
    for (setting, stat), group in rows.groupby(["setting", "stat"], sort=False):
        logs = [(run.block, np.log(run.value)) for _, run in group.groupby("run_id", sort=False)]
        slopes = np.array([-np.polyfit(block, log, 1)[0] for block, log in logs])
        ratio = np.exp(np.mean([log.iloc[0] - log.iloc[-1] for _, log in logs]))
        n, mean = len(slopes), slopes.mean()
        reach = stats.t.ppf(0.975, n - 1) * slopes.std(ddof=1) / n**0.5 if n > 1 else np.nan
        model = model_of(by_id.loc[group.run_id.iloc[0]])
        expected = (model and theory.post_gradient_factor(model)) or (np.nan, np.nan)
        interval = np.exp(mean), np.exp(mean - reach), np.exp(mean + reach)
        found.append(Factor(str(setting), int(group[DEPTH].iloc[0]), str(stat), *interval, n, ratio, *expected))
    return found


def told(fit: Factor) -> str:
    interval = "one seed" if np.isnan(fit.low) else f"[{fit.low:.4f}, {fit.high:.4f}], {fit.n} seeds"
    return f"{fit.factor:.4f} {interval}"


def draw(data: Results) -> Drawn:
    rows = by_block(data)
    fitted = factors(data, rows)
    settings = arms.settings_in_order(rows.setting)
    left_out, settings = settings[MOST_PANELS:], settings[:MOST_PANELS]
    fig, panels = plt.subplots(1, len(settings), figsize=(4.1 * len(settings) + 0.3, 4.2), squeeze=False)
    for panel, setting in zip(panels[0], settings, strict=True):
        here = rows[rows.setting == setting]
        depth = here[DEPTH].iloc[0]
        blocks = np.arange(1, depth + 1)
        for fit in (f for f in fitted if f.setting == setting):
            mine = here[here.stat == fit.quantity]
            last = mine[mine.block == depth].set_index("run_id").value
            relative = mine.assign(relative=mine.value / mine.run_id.map(last))
            for _, run in relative.groupby("run_id"):
                panel.plot(run.block, run.relative, color=COLOURS[fit.quantity], linewidth=0.9, alpha=0.4)
            centre = np.exp(np.log(relative.relative).mean())
            line = centre * fit.factor ** (blocks.mean() - blocks)
            label = f"{QUANTITIES[fit.quantity]}: {told(fit)}"
            panel.plot(blocks, line, color=COLOURS[fit.quantity], linewidth=1.8, label=label)
        figure.decade_axis(panel.yaxis)
        limits = panel.get_ylim()  # of the measured: appendix F's line leaves them
        panel.plot(blocks, APPENDIX_F ** (depth - blocks), color="#444444", linestyle=figure.LINES[2],
                   label=f"appendix F: (2/3)$^{{1/2}}$ = {APPENDIX_F:.4f}")  # fmt: skip
        if not np.isnan(fit.norm_alone) and abs(fit.norm_alone - APPENDIX_F) > 1e-3:
            panel.plot(blocks, fit.norm_alone ** (depth - blocks), color="#444444", linestyle=figure.LINES[1],
                       linewidth=1.1, label=f"the same argument in this setting: {fit.norm_alone:.4f}")  # fmt: skip
        panel.set_ylim(limits)
        panel.set_title(f"{setting}, depth {depth}")
        panel.set_xlabel("block $l$ (1 = nearest the input)")
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), title="factor per block, last to first")
    panels[0, 0].set_ylabel("gradient norm / that of the last block")
    numbers = "; ".join(f"{QUANTITIES[f.quantity]} ({f.setting}): {told(f)}" for f in fitted)
    caption = (
        "Post-norm at initialisation: L2 norm of the gradient of the stream after each block and of its second FFN "
        "matrix (mean of the per-batch norms), over that of the last block; thin lines are seeds, thick ones fits. "
        f"Factor per block with its 95 % interval over seeds: {numbers}. Appendix F of Xiong et al. 2020 has "
        f"{APPENDIX_F:.4f}, from an upper bound that leaves out what the branches pass back."
        f"{f' Not drawn: {len(left_out)} further settings.' if left_out else ''}"
    )
    table = rows[["study", "run_id", "setting", PLACEMENT, DEPTH, "seed", "block", "stat", "value"]]
    columns = pd.DataFrame(fitted).rename(columns={"quantity": "stat"}).drop(columns="depth")
    return Drawn(fig, table.merge(columns, on=["setting", "stat"], how="left"), caption)


if __name__ == "__main__":
    figure.main(draw, STEM)
