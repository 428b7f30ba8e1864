"""What all figures share: style, arms, saving, and the command line."""

import argparse
import sys
from collections.abc import Callable, Iterable
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

from normlab import results
from normlab.residual import PLACEMENTS
from normlab.results import Results

ROOT = Path(__file__).resolve().parents[1]
DEPTH, PLACEMENT, WARMUP = "model.depth", "model.placement", "optim.warmup_steps"

# Okabe & Ito's colour-blind-safe palette; a placement has the same colour in every figure.
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
COLOURS = {"pre": PALETTE[0], "post": PALETTE[1], "deepnorm": PALETTE[2], "sandwich": PALETTE[3]}
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


class Missing(Exception):
    """The runs cannot support this figure; the message says what is missing."""


@dataclass(frozen=True)
class Drawn:
    """A figure, the numbers that it shows, and one sentence that says what they are."""

    figure: Figure
    table: pd.DataFrame
    caption: str


_ORDER = {placement: i for i, placement in enumerate(PLACEMENTS)}

Draw = Callable[[Results], Drawn]

# Settings that name or house a run, or that a figure always shows on an axis of its own.
_NOT_AN_ARM = {DEPTH, "seed", "study", "runs_dir", "force", "data.path", "data.glob"}
_WORDS = {
    PLACEMENT: lambda v: f"{v}-norm" if v in {"pre", "post"} else str(v),
    WARMUP: lambda v: f"warm-up {v}" if v else "no warm-up",
    "optim.lr": lambda v: f"lr {v:g}",
    "optim.name": str,
    "model.norm": str,
    "model.activation": str,
}


def trained(data: Results) -> pd.DataFrame:
    """The finished training runs, with a verdict each. A diverged run is one of them; a failed run is not."""
    runs = data.runs
    if runs.empty or not ((runs.status == "finished") & (runs.steps > 0)).any():
        raise Missing("no finished training run (steps > 0) among these")
    return runs[(runs.status == "finished") & (runs.steps > 0)]


def varying(runs: pd.DataFrame) -> list[str]:
    """The settings that differ between these runs, apart from depth, seed and names."""
    settings = [c for c in runs.columns if "." in c and not c.startswith(("log.", "detector.", "packages."))]
    settings += ["steps", "precision"]
    return [c for c in settings if c not in _NOT_AN_ARM and runs[c].map(str).nunique() > 1]


def with_arms(runs: pd.DataFrame) -> pd.DataFrame:
    """`runs` with `arm`: a readable name of everything that differs but depth and seed."""
    keys = [PLACEMENT, *(k for k in varying(runs) if k != PLACEMENT)]

    def name(run: pd.Series) -> str:
        return ", ".join(_told(key, run[key]) for key in keys)

    return runs.assign(arm=runs.apply(name, axis=1))


def _told(key: str, value: Any) -> str:
    if value is None or value != value:  # null; NaN after pandas has had it
        return f"no {key.split('.')[-1]}"
    return _WORDS[key](value) if key in _WORDS else f"{key.split('.')[-1]} {value}"


def arm_styles(runs: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """arm -> matplotlib line style: colour says the placement, dashes say the rest."""
    styles: dict[str, dict[str, Any]] = {}
    for placement in in_order(runs[PLACEMENT].unique()):
        arms = runs.arm[runs[PLACEMENT] == placement].unique()
        for i, arm in enumerate(sorted(arms, reverse=True)):
            styles[arm] = {"color": colour(placement), "linestyle": LINES[i % len(LINES)]}
    return styles


def in_order(placements: Iterable[str]) -> list[str]:
    """Placements in the order of their table; unknown ones, of another version, last."""
    return sorted(placements, key=lambda p: (_ORDER.get(p, len(_ORDER)), p))


def sort_by_placement(table: pd.DataFrame, *keys: str, column: str = PLACEMENT) -> pd.DataFrame:
    """Rows by the given columns, where `column` among them sorts as in_order does."""
    rank = {p: i for i, p in enumerate(in_order(table[column].unique()))}
    return table.sort_values(list(keys), key=lambda c: c.map(rank) if c.name == column else c, ignore_index=True)


def colour(placement: str) -> str:
    return COLOURS.get(placement, PALETTE[4 + sum(map(ord, placement)) % 3])


def placement_name(placement: str) -> str:
    return _WORDS[PLACEMENT](placement)


def joined(rows: pd.DataFrame, runs: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """`rows` of these runs with some of the runs' columns beside them."""
    return rows.merge(runs[["run_id", *columns]], on="run_id", suffixes=("", "_run"))


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


def setting(runs: pd.DataFrame, study: str) -> str:
    """What a study ran, for a panel's title: init, activation, FFN ratio and width of its first run."""
    run = runs[runs.study == study].iloc[0]
    start = "theory setting" if run["model.init"] == "xiong" else f"{run['model.init']} init"
    return f"{start}, {run['model.activation']}, FFN ×{run['model.ffn_ratio']:g}, width {run['model.width']}"


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
    parser.add_argument("runs", nargs="+", type=Path, help="study folders (runs/STUDY) or run folders")
    parser.add_argument("--out", type=Path, default=ROOT / "figures", help="default: figures/")
    options = parser.parse_args()
    try:
        print(save(draw(results.load(options.runs)), stem, options.out))
    except (Missing, FileNotFoundError) as error:
        print(f"{stem}: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)
