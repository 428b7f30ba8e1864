"""Validation loss with and without warm-up, per placement and depth.

The form of Xiong et al. 2020, figures 2 and 4.
"""

import pandas as pd

import arms
import figure
from arms import DEPTH, WARMUP, Missing
from fig_loss_curves import curves, readable
from figure import Drawn
from normlab.results import Results

STEM = "xiong_warmup"


def draw(data: Results) -> Drawn:
    runs, kept = readable(arms.trained(data))
    if runs[WARMUP].nunique() < 2:
        raise Missing(f"needs runs with and without warm-up; all have optim.warmup_steps={runs[WARMUP].iloc[0]}")
    final = pd.DataFrame({"run_id": runs.run_id, "step": runs.steps_done, "val_loss": runs.final_val_loss})
    first = pd.DataFrame({"run_id": runs.run_id, "step": 0, "val_loss": runs.init_val_loss})
    rows = pd.concat([data.steps[["run_id", "step", "val_loss"]], first, final]).dropna()
    rows = rows.drop_duplicates(["run_id", "step"])
    rows = arms.joined(rows, runs, ["study", "arm", "seed", DEPTH]).sort_values(["run_id", "step"])
    drawn = curves(runs, rows.assign(shown=rows.val_loss), f"validation loss ({arms.loss_unit(runs)})")
    return Drawn(drawn.figure, drawn.table, drawn.caption + kept)


if __name__ == "__main__":
    figure.main(draw, STEM)
