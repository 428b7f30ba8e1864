"""What all figures share: style, arms, saving, and the command line."""

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axis import YAxis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

import arms
from arms import PLACEMENT, Missing
from normlab.residual import PLACEMENTS
from normlab.results import Results

ROOT = Path(__file__).resolve().parents[1]
RUNS = "study folders (runs/STUDY), run folders, folders of offline W&B logs, or wandb://ENTITY/PROJECT[/STUDY]"

# Okabe & Ito's colour-blind-safe palette; a placement has the same colour in every figure.
# After its seven, further ones as far from them and from each other as there is room for.
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
PALETTE += [
    "#7f3fbf",
    "#8c564b",
    "#bcbd22",
    "#e7298a",
    "#1b5e20",
    "#a6761d",
    "#6b6ecf",
    "#ff7f7f",
    "#17becf",
    "#ad494a",
]
PALETTE += ["#637939", "#b5a0e0", "#5f9ea0", "#d2b48c", "#4d4d4d", "#2ca02c"]
COLOURS = dict(zip(PLACEMENTS, itertools.cycle(PALETTE), strict=False))
MARKERS = ["", "o", "s", "^", "D"]
LINES: list[Any] = ["-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1))]

mpl.rcParams.update(
    {
        "figure.dpi": 100,
        "savefig.dpi": 160,
        "figure.constrained_layout.use": True,
        "font.size": 9,
        "axes.titlesize": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e6e6e6",
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "lines.linewidth": 1.6,
        "pdf.fonttype": 42,
    }
)


@dataclass(frozen=True)
class Drawn:
    """A figure, the numbers that it shows, and one sentence that says what they are."""

    figure: Figure
    table: pd.DataFrame
    caption: str


Draw = Callable[[Results], Drawn]


def arm_styles(runs: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """arm -> matplotlib line style: colour says the placement, dashes and then markers the rest."""
    styles: dict[str, dict[str, Any]] = {}
    for placement in arms.in_order(runs[PLACEMENT].unique()):
        mine = runs.arm[runs[PLACEMENT] == placement].unique()
        for i, arm in enumerate(sorted(mine, reverse=True)):
            marker = MARKERS[i // len(LINES) % len(MARKERS)]
            style = {"marker": marker, "markevery": 0.1, "markersize": 4}
            styles[arm] = {"color": colour(placement), "linestyle": LINES[i % len(LINES)], **style}
    return styles


def colour(placement: str) -> str:
    return COLOURS.get(placement, "#7f7f7f")


def depth_axis(axes: Any, depths: list[int]) -> None:
    """A logarithmic depth axis whose ticks are the depths that were run."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(depths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(d) for d in depths])
    axes.set_xlabel("depth (blocks)")


def decade_axis(axis: YAxis) -> None:
    """A logarithmic axis with plain numbers: at 1, 2 and 5 of each decade, or at 1 where it spans many."""
    axis.axes.set_yscale("log")
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 500 * low else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def save(drawn: Drawn, stem: str, folder: Path) -> Path:
    """Write STEM.png, STEM.pdf and STEM.csv; the same runs give the same bytes. Returns the PNG's path."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn.figure.savefig(folder / f"{stem}.png", metadata={"Software": None})
    drawn.figure.savefig(folder / f"{stem}.pdf", metadata={"CreationDate": None, "Producer": None, "Creator": None})
    drawn.table.to_csv(folder / f"{stem}.csv", index=False, float_format="%.8g")
    plt.close(drawn.figure)
    return folder / f"{stem}.png"


def main(draw: Draw, stem: str) -> NoReturn:
    """The command line of one figure script."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("runs", nargs="+", help=RUNS)
    parser.add_argument("--out", type=Path, default=ROOT / "figures", help="default: figures/")
    options = parser.parse_args()
    try:
        print(save(draw(arms.load(options.runs)), stem, options.out))
    except (Missing, FileNotFoundError, ConnectionError) as error:
        print(f"{stem}: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)
