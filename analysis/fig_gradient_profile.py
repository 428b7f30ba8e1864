"""Gradient norm over the depth of the network, at several times of training."""

import arms
import figure
import inside
from arms import DEPTH, PLACEMENT, Missing
from fig_gradient_heatmap import per_layer
from figure import Drawn
from normlab.results import Results

STEM = "gradient_profile"


def draw(data: Results) -> Drawn:
    runs, note = inside.one_setting(data)
    placements, more = inside.few_placements(runs)
    runs = runs[runs[PLACEMENT].isin(placements)]
    norms = per_layer(data.layers[data.layers.run_id.isin(runs.run_id)])
    if norms.empty:
        raise Missing("no per-layer gradient norms in these runs")
    rows = inside.with_runs(inside.at_times(norms, runs), runs)
    rows = rows.assign(position=inside.relative_depth(rows.layer, rows[DEPTH]))
    fig = inside.profile_panels(rows, runs, placements, "weight-gradient norm of the block", log=True)
    caption = (
        f"Weight-gradient norm of each block (L2 over its tensors, before clipping), median over seeds, {len(runs)} "
        "runs; 10 %, 50 % and end are medians over up to 9 steps, the end of a diverged run being its last finite "
        f"steps.{note}{more}"
    )
    table = arms.sort_by_placement(rows, PLACEMENT, DEPTH, "seed", "run_id", "time", "layer")
    return Drawn(fig, table[[*inside.WHO, "time", "layer", "position", "value"]], caption)


if __name__ == "__main__":
    figure.main(draw, STEM)
