"""Share of runs that have not diverged by each step, per placement (Kaplan-Meier)."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import arms
import estimates
import figure
from arms import DEPTH, PLACEMENT, Missing
from figure import Drawn
from normlab.results import Results

STEM = "survival"


def draw(data: Results) -> Drawn:
    runs, note = alike(arms.trained(data))
    if not (runs.verdict == "diverged").any():
        raise Missing(f"none of the {len(runs)} runs diverged: every share stays at 1.{note}")
    runs = runs.assign(diverged=runs.verdict == "diverged", at=updates(runs))
    fig, panel = plt.subplots(figsize=(6.4, 3.9))
    placements = arms.in_order(runs[PLACEMENT].unique())
    for i, placement in enumerate(placements):
        mine = runs[runs[PLACEMENT] == placement]
        curve = estimates.survival(mine["at"], mine.diverged)
        start = pd.DataFrame({"step": [0.0], "share": [1.0], "low": [np.nan], "high": [np.nan]})
        curve = pd.concat([start, curve] if curve.step.min() > 0 else [curve])
        style = {"color": figure.colour(placement), "linestyle": figure.LINES[i % len(figure.LINES)]}
        label = f"{arms.placement_name(placement)}: {len(mine)} at risk, {mine.diverged.sum()} diverged"
        panel.step(curve.step, curve.share, where="post", label=label, **style)
        panel.fill_between(
            curve.step, curve.low, curve.high, step="post", color=style["color"], alpha=0.13, linewidth=0
        )
        censored = mine[~mine.diverged]["at"].unique()
        shares = [curve.share[curve.step <= step].iloc[-1] for step in censored]
        panel.plot(censored, shares, "|", color=style["color"], markersize=7, clip_on=False)
    if runs["at"].max() > 200:  # most divergences are early: equal room for each decade of steps
        panel.set_xscale("symlog", linthresh=10)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set_xlim(left=0)
    panel.set_ylim(-0.02, 1.03)
    panel.set_xlabel("optimizer step")
    panel.set_ylabel("share not diverged")
    fig.legend(loc="outside lower center", ncols=1 if len(placements) < 4 else 2)
    others = [k for k in [DEPTH, *arms.varying(runs)] if k != PLACEMENT and runs[k].map(str).nunique() > 1]
    pooled = f", pooled over {', '.join(arms.short_names(others).values())}" if others else ""
    caption = (
        f"Kaplan-Meier share of {len(runs)} runs ({arms.seeds(runs)}) that have not diverged by a step"
        f"{pooled}. Bands: 95 % log-log intervals, undefined at a share of 0 or 1; runs that differ in a seed alone "
        f"count as independent. Ticks: runs that ended without diverging.{note}"
    )
    columns = ["study", "run_id", PLACEMENT, *others, "seed", "verdict", "diverged", "at"]
    table = runs[columns].rename(columns={"at": "step"})
    return Drawn(fig, arms.sort_by_placement(table, PLACEMENT, "step", "run_id"), caption)


def updates(runs: pd.DataFrame) -> pd.Series:
    """The first bad step of a diverged run, or the step where a run ended: the last where only the end was bad."""
    bad = pd.to_numeric(runs.first_bad_step, errors="coerce")
    return bad.where((runs.verdict == "diverged") & bad.notna(), runs.steps_done).astype(float)


def alike(runs: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The runs of the settings that every placement has, where there are any, and a sentence that says so."""
    keys = [DEPTH, "seed", *(k for k in arms.varying(runs) if k != PLACEMENT)]
    settings = runs[keys].map(str).agg(" ".join, axis=1)
    shared = runs[PLACEMENT].groupby(settings).transform("nunique") == runs[PLACEMENT].nunique()
    if shared.all():
        return runs, ""
    if not shared.any():
        return runs, " The placements were run in different settings: their curves do not compare."
    return runs[shared], f" {(~shared).sum()} runs of settings that not every placement has are left out."


if __name__ == "__main__":
    figure.main(draw, STEM)
