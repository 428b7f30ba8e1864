"""Loss spikes per 1,000 steps, by threshold and window of the rule that counts them."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.colors import PowerNorm
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

import arms
import figure
from arms import DEPTH
from figure import Drawn
from normlab import spikes
from normlab.results import Results
from normlab.spikes import Rule

STEM = "spike_sensitivity"
KAPPAS = (4.0, 5.0, 6.0, 7.0, 8.0, 10.0)
WINDOWS = (32, 64, 128, 256, 512, 1000)
CENTRES = {"mean": "mean and standard deviation", "trend": "trend and median absolute residual"}


def counted(data: Results) -> pd.DataFrame:
    """Events of each run under each rule, with the number of its steps."""
    runs = arms.with_arms(arms.trained(data))
    losses = {key: mine.sort_values("step").loss for key, mine in data.steps.groupby("run_id", observed=True)}
    longest = max(map(len, losses.values()), default=0)
    windows = [w for w in WINDOWS if 2 * w <= longest] or [WINDOWS[0]]
    tables = []
    for _, run in runs.iterrows():
        series = losses.get(run.run_id)
        if series is None:
            continue
        least = stored(run)[-1]
        who = {key: run[key] for key in ("study", "run_id", "arm", DEPTH, "seed")}
        for centre in CENTRES:
            table = spikes.sensitivity(
                series.tolist(),
                centre=centre,
                kappas=KAPPAS,
                windows=windows,
                min_history=least["min_history"],
                min_height=least["min_height"],
            )
            tables.append(table.assign(**who, centre=centre, steps=len(series)))
    if not tables:
        raise arms.Missing("no logged step in these runs")
    return pd.concat(tables)[["study", "run_id", "arm", DEPTH, "seed", "centre", "kappa", "window", "events", "steps"]]


def stored(run: pd.Series) -> list[dict[str, Any]]:
    """The rules in the run's record, the one that judged it last; records of the first version hold one rule."""
    record = run.detector
    if "judge" not in record:
        return [{"centre": "mean"} | {k: record[k] for k in ("kappa", "window", "min_history", "min_height")}]
    judge = record["judge"]
    return [*(rule for name, rule in record["spikes"].items() if name != judge), record["spikes"][judge]]


def draw(data: Results) -> Drawn:
    table = counted(data)
    totals = table.groupby(["centre", "kappa", "window"])[["events", "steps"]].sum()
    rates = (1000 * totals.events / totals.steps).rename("rate")
    runs = arms.trained(data)
    used = {
        (rule.centre, rule.kappa, rule.window)
        for _, run in runs.iterrows()
        for rule in (Rule(**values).for_run(int(run.steps)) for values in stored(run))
    }
    windows = sorted(table.window.unique())
    wide = max(2.1, 0.62 * len(windows) + 0.5)
    fig, panels = plt.subplots(1, 2, figsize=(2 * wide + 1.5, 3.1), sharey=True)
    scale = PowerNorm(0.5, 0, max(rates.max(), 1e-9))  # most cells are near zero
    image = None
    for panel, (centre, name) in zip(panels, CENTRES.items(), strict=True):
        grid = rates[centre].unstack("window").loc[list(KAPPAS), windows].to_numpy(float)
        image = panel.imshow(grid, origin="lower", cmap="Blues", norm=scale, aspect="auto")
        for (i, j), rate in np.ndenumerate(grid):
            dark = scale(rate) > 0.62
            panel.text(j, i, _told(rate), ha="center", va="center", fontsize=8, color="white" if dark else "#222222")
            if (centre, KAPPAS[i], windows[j]) in used:
                box = {"fill": False, "edgecolor": figure.PALETTE[1], "linewidth": 2, "clip_on": False}
                panel.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, **box))
        panel.set_xticks(range(len(windows)), [str(w) for w in windows])
        panel.set_yticks(range(len(KAPPAS)), [f"{k:g}" for k in KAPPAS])
        panel.set_title(name)
        panel.set_xlabel("window (steps)")
        panel.tick_params(length=0)
        panel.grid(visible=False)
        panel.spines[["left", "bottom"]].set_color("#bbbbbb")
    panels[0].set_ylabel("threshold (spreads above the centre)")
    if rates.max() > 0:
        ticks = MaxNLocator(4, steps=[1, 2, 5, 10])
        fig.colorbar(image, ax=panels, label="loss spikes per 1,000 steps", pad=0.02, ticks=ticks)
    outlined = ""
    if used & set(rates.index):
        outlined = " Outlined: thresholds and windows of the runs' rules; every cell waits as long as the judging rule."
    caption = (
        f"Loss spikes (merged steps above the range of the steps before them) per 1,000 steps, {len(runs)} runs of "
        f"{int(table.drop_duplicates('run_id').steps.sum()):,} steps in all.{outlined}"
    )
    return Drawn(fig, table, caption)


def _told(rate: float) -> str:
    return "0" if rate == 0 else f"{rate:.2f}" if rate < 9.995 else f"{rate:.0f}"


if __name__ == "__main__":
    figure.main(draw, STEM)
