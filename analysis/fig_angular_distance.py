"""How far each block turns the residual stream, at the start and at the end of training."""

import arms
import figure
import inside
from arms import DEPTH, PLACEMENT
from figure import Drawn
from normlab.results import Results

STEM = "angular_distance"


def draw(data: Results) -> Drawn:
    runs, note = inside.one_setting(data)
    placements, more = inside.few_placements(runs)
    runs = runs[runs[PLACEMENT].isin(placements)]
    profiles = inside.after_blocks(data.layers, runs, "angular_distance")
    rows = inside.with_runs(inside.first_and_last(profiles), runs)
    rows = rows.assign(position=inside.relative_depth(rows.layer, rows[DEPTH]))
    fig = inside.profile_panels(rows, runs, placements, r"angular distance, $\arccos(\cos)\,/\,\pi$", log=False)
    for panel in fig.axes:
        panel.set_ylim(bottom=0)
    caption = (
        "Angle between a token's stream before and after each block, as a share of half a turn (Gromov et al. 2024; "
        f"0: the block changes nothing but the length, 0.5: at right angles), mean over tokens, median over seeds, "
        f"{len(runs)} runs; the end of a diverged run is its last finite profile.{note}{more}"
    )
    table = arms.sort_by_placement(rows, PLACEMENT, DEPTH, "seed", "run_id", "step", "layer")
    return Drawn(fig, table[[*inside.WHO, "time", "step", "layer", "position", "value"]], caption)


if __name__ == "__main__":
    figure.main(draw, STEM)
