"""Final loss against a setting: seeds as dots, their mean with its interval, and a mark on every failure."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

import figure
from estimates import LR, Estimate, capped_loss, mean

# Told apart by shape: a print without colour keeps them.
FAILURES: dict[str, dict[str, Any]] = {
    "stalled": {"marker": "s", "markerfacecolor": "none", "markersize": 5.5, "markeredgewidth": 1.0},
    "spiked": {"marker": "^", "markerfacecolor": "none", "markersize": 6.5, "markeredgewidth": 1.0},
    "diverged": {"marker": "x", "markersize": 6.5, "markeredgewidth": 1.8},
}
CAP = "A run counts with its loss at initialisation where it diverged or ended above that."
BARS = "bars: 95 % bootstrap intervals of the mean from three seeds on"


def lr_axis(panel: Any, rates: list[float]) -> None:
    """A logarithmic learning-rate axis whose ticks are the rates that were run, or some of them where they are many."""
    rates = sorted(rates)
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(FixedLocator(rates[:: 1 + len(rates) // 8]))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(lambda value, _: told_lr(value))
    panel.set_xlabel("peak learning rate")


def told_lr(rate: float) -> str:
    """3e-4 below 0.1 where that is exact, 0.3 else."""
    power = f"{rate:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return power if rate < 0.1 and float(power) == rate else f"{rate:g}"


def line(
    panel: Any,
    runs: pd.DataFrame,
    x: str,
    style: dict[str, Any],
    label: str,
    shift: float = 1.0,
    values: pd.Series | None = None,
) -> pd.DataFrame:
    """Draw one arm; returns a row per x: the mean capped loss (or mean of `values`), its interval and n.

    shift: multiplies x, so that arms do not hide each other.
    """
    losses = capped_loss(runs) if values is None else values
    rows = []
    for value, mine in losses.groupby(runs[x]):
        rows.append({x: value, **mean(mine)._asdict()})
    means = pd.DataFrame(rows, columns=[x, *Estimate._fields])
    at = means[x].astype(float) * shift
    panel.plot(at, means.value, label=label, **{"linewidth": 1.4, **style, "marker": ""})
    known = means.low.notna()
    if known.any():
        reach = np.maximum([means.value - means.low, means.high - means.value], 0)[:, known]
        panel.errorbar(
            at[known], means.value[known], reach, fmt="none", ecolor=style["color"], capsize=2, linewidth=0.9
        )
    for verdict, group in runs.groupby("verdict"):
        mark = FAILURES.get(str(verdict), {"marker": "o", "markersize": 3.2, "alpha": 0.7})
        y = losses[group.index]
        panel.plot(group[x].astype(float) * shift, y, linestyle="", color=style["color"], zorder=4, **mark)
    return means


def shifts(n: int, step: float) -> list[float]:
    """Factors that put n arms side by side on a logarithmic axis: many end at the same loss."""
    return [step ** (i - (n - 1) / 2) for i in range(n)]


def mark_legend(runs: pd.DataFrame) -> list[Line2D]:
    """Legend entries of the marks that occur."""
    marks = {"stable": {"marker": "o", "markersize": 3.2}} | FAILURES
    found = [v for v in marks if (runs.verdict == v).any()]
    return [Line2D([], [], linestyle="", color="#444444", label=f"one {v} run", **marks[v]) for v in found]


def legend(fig: Any, runs: pd.DataFrame, ncols: int = 4) -> None:
    """One legend below the panels: the arms, then the marks."""
    arms = {t: h for p in fig.axes for h, t in zip(*p.get_legend_handles_labels(), strict=True)}
    handles = [*arms.values(), *mark_legend(runs)]
    fig.legend(handles=handles, loc="outside lower center", ncols=max(1, min(ncols, len(handles))))


def value_axis(panels: Any) -> None:
    """Logarithmic where the values of these panels span more than a decade."""
    lows, highs = zip(*(panel.dataLim.intervaly for panel in panels), strict=True)
    if min(lows) > 0 and max(highs) > 10 * min(lows):
        for panel in panels:
            figure.decade_axis(panel.yaxis)


def rates(runs: pd.DataFrame) -> list[float]:
    return sorted(runs[LR].unique())
