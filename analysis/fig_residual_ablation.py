"""Final loss by depth with residual connections, norms and FFNs taken away."""

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

import arms
import estimates
import figure
import final_loss
from arms import DATA, DEPTH, PLACEMENT, Missing
from estimates import LR
from fig_loss_curves import references
from figure import Drawn
from normlab.results import Results

STEM = "residual_ablation"
NORM, FFN = "model.norm", "model.ffn"
NO_RESIDUAL = "no_residual"


def draw(data: Results) -> Drawn:
    runs = arms.trained(data)
    taken = {PLACEMENT: NO_RESIDUAL, NORM: "none", FFN: "none"}
    if not any((runs[key] == value).any() for key, value in taken.items()):
        raise Missing(f"needs runs with one of {', '.join(f'{k}={v}' for k, v in taken.items())}")
    runs, note = arms.narrowed(runs, PLACEMENT, NORM, FFN, LR)
    runs = runs.assign(arm=runs.apply(named, axis=1))
    if runs.arm.nunique() < 2:
        raise Missing(f"needs runs with and without residuals, norms or FFNs; all have {runs.arm.iloc[0]}")
    tried = runs[LR].nunique()
    if tried > 1:
        runs = estimates.best_lr(runs, ["arm", DEPTH])
        note += f" Each arm at each depth has its best of {tried} learning rates, by the mean loss over seeds."
    fig, panel = plt.subplots(figsize=(7.4, 5.2))
    if runs[DATA].nunique() == 1:
        references(panel, runs, label=True)
    looks, rows = styles(runs), []
    for shift, (arm, style) in zip(final_loss.shifts(len(looks), 1.015), looks.items(), strict=True):
        mine = runs[runs.arm == arm]
        means = final_loss.line(panel, mine, DEPTH, style, arm, shift)
        rows.append(mine.assign(loss=estimates.capped_loss(mine)).merge(means, on=DEPTH))
    figure.depth_axis(panel, sorted(runs[DEPTH].unique()))
    panel.set_ylabel("final validation loss (nats)")
    final_loss.value_axis([panel])
    final_loss.legend(fig, runs, ncols=3)
    caption = (
        f"Final validation loss by depth for {len(runs)} runs ({arms.seeds(runs)}); lines: means over seeds; "
        f"{final_loss.BARS}. {final_loss.CAP} Arms at one depth are drawn side by side. "
        f"Grey: entropies of the evaluated tokens.{note}"
    )
    columns = ["study", "run_id", "arm", PLACEMENT, NORM, FFN, DEPTH, LR, "seed", "verdict", "loss", "final_loss"]
    table = pd.concat(rows)[[*columns, "value", "low", "high", "n"]].rename(columns={"value": "mean"})
    return Drawn(fig, arms.sort_by_placement(table, PLACEMENT, NORM, FFN, DEPTH, "seed"), caption)


def named(run: pd.Series) -> str:
    """What is there: pre-norm, layernorm, FFN."""
    kinds = {NO_RESIDUAL: "no residual", "none": "residual"}
    placement = kinds.get(run[PLACEMENT], f"residual ({arms.placement_name(run[PLACEMENT])})")
    norm = "no norm" if "none" in {run[NORM], run[PLACEMENT]} else run[NORM]
    ffn = {"none": "no FFN", "dense": "FFN"}.get(run[FFN], run[FFN])
    return f"{placement}, {norm}, {ffn}"


def styles(runs: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """arm -> style: colour says placement and norm, dashes say that there is no FFN."""
    order = arms.sort_by_placement(runs, PLACEMENT, NORM, FFN).drop_duplicates("arm")
    pairs = list(dict.fromkeys(zip(order[PLACEMENT], order[NORM], strict=True)))
    colours = {pair: figure.PALETTE[i % len(figure.PALETTE)] for i, pair in enumerate(pairs)}
    return {
        run.arm: {
            "color": colours[(run[PLACEMENT], run[NORM])],
            "linestyle": figure.LINES[1 if run[FFN] == "none" else 0],
        }
        for _, run in order.iterrows()
    }


if __name__ == "__main__":
    figure.main(draw, STEM)
