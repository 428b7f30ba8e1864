"""How much a learning rate that misses the best one costs, by depth.

LR sensitivity of Wortsman et al. 2023 (arXiv 2309.14322): the mean over the rates of the loss less the best one.
"""

import matplotlib.pyplot as plt
import pandas as pd

import arms
import estimates
import figure
import final_loss
from arms import DATA, DEPTH, PLACEMENT, Missing
from estimates import LR, Estimate
from fig_loss_curves import references
from figure import Drawn
from normlab.results import Results

STEM = "lr_sensitivity"
LEAST = 3  # rates that make a grid


def draw(data: Results) -> Drawn:
    runs = arms.with_arms(arms.trained(data), LR)
    tried = runs.groupby(["arm", DEPTH])[LR].transform("nunique")
    if tried.max() < LEAST:
        raise Missing(f"needs {LEAST} learning rates of one arm and depth; the most are {tried.max()} (optim.lr)")
    runs = runs[tried >= LEAST]
    runs = runs.assign(loss=final_loss.capped_loss(runs))
    found, shared = sensitivities(runs)
    depths = sorted(runs[DEPTH].unique())
    styles = figure.arm_styles(runs)
    fig, grid = plt.subplots(1, len(depths) + 1, figsize=(3.2 * len(depths) + 4.2, 4.2), squeeze=False)
    panels, last = grid[0, :-1], grid[0, -1]
    for panel, depth in zip(panels, depths, strict=True):
        here = runs[runs[DEPTH] == depth]
        if runs[DATA].nunique() == 1:
            references(panel, here, label=depth == depths[-1])
        for shift, (arm, style) in zip(final_loss.shifts(len(styles), 1.08), styles.items(), strict=True):
            if len(mine := here[here.arm == arm]):
                told = found[(arm, depth)].told("{:.2f}")
                final_loss.line(panel, mine, LR, style, f"{arm}: {told}", shift)
        final_loss.lr_axis(panel, final_loss.rates(here))
        panel.set_title(f"depth {depth}")
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), title="LR sensitivity (nats)", fontsize=7.5)
    for panel in panels[1:]:
        panel.sharey(panels[0])
        panel.tick_params(labelleft=False)
    panels[0].set_ylabel("final validation loss (nats)")
    final_loss.value_axis(panels)
    by_depth(last, found, depths, styles)
    fig.legend(handles=final_loss.mark_legend(runs), loc="outside lower center", ncols=4)
    grid_told = f"the {len(shared)} rates that all have" if shared else "each one's own rates, which differ"
    caption = (
        f"Final validation loss by peak learning rate for {len(runs)} runs, and LR sensitivity over {grid_told}: the "
        f"mean over seeds, in brackets its 95 % bootstrap interval from three seeds on. {final_loss.CAP} "
        f"Arms are drawn side by side."
    )
    table = runs.assign(sensitivity=[found[key].value for key in zip(runs.arm, runs[DEPTH], strict=True)])
    columns = ["study", "run_id", "arm", PLACEMENT, DEPTH, LR, "seed", "verdict", "loss", "sensitivity"]
    return Drawn(fig, arms.sort_by_placement(table[columns], PLACEMENT, "arm", DEPTH, LR, "seed"), caption)


def sensitivities(runs: pd.DataFrame) -> tuple[dict[tuple[str, int], Estimate], list[float]]:
    """(arm, depth) -> LR sensitivity over seeds, and the rates that all of them share, if those make a grid."""
    cells = runs.groupby(["arm", DEPTH])
    shared = sorted(set.intersection(*(set(cell[LR]) for _, cell in cells)))
    shared = shared if len(shared) >= LEAST else []
    of_seeds = {key: estimates.lr_sensitivities(cell, shared or cell[LR].unique()) for key, cell in cells}
    return {key: estimates.mean(values) for key, values in of_seeds.items()}, shared


def by_depth(panel, found: dict[tuple[str, int], Estimate], depths: list[int], styles: dict[str, dict]) -> None:
    """LR sensitivity against depth, one line per arm."""
    for shift, (arm, style) in zip(final_loss.shifts(len(styles), 1.015), styles.items(), strict=True):
        mine = pd.DataFrame([{DEPTH: d, **e._asdict()} for (a, d), e in found.items() if a == arm]).sort_values(DEPTH)
        panel.plot(
            mine[DEPTH] * shift, mine.value, **style | {"marker": style["marker"] or "o", "markevery": 1}, label=arm
        )
        known = mine[mine.low.notna()]
        reach = [(known.value - known.low).clip(lower=0), (known.high - known.value).clip(lower=0)]
        panel.errorbar(
            known[DEPTH] * shift, known.value, reach, fmt="none", ecolor=style["color"], capsize=2, linewidth=0.9
        )
    figure.depth_axis(panel, depths)
    panel.set_ylim(bottom=0)
    panel.set_ylabel("LR sensitivity (nats)")
    panel.set_title("LR sensitivity by depth")


if __name__ == "__main__":
    figure.main(draw, STEM)
