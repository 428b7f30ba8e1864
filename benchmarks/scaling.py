"""How the time and memory of a training step grow with depth, width and context, and those of reading with the runs.

python benchmarks/scaling.py                    # writes its section of benchmarks/results.md and docs/scaling.png

Each point is a process of its own. Exponents: least squares on logarithms over all points of a line.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch

import many_runs
import page
from normlab import composing, data, optim, results
from normlab.init import initialise
from normlab.meter import StepMeter
from normlab.model import build

sys.path.insert(0, str(page.ROOT / "analysis"))
import figure  # pyright: ignore[reportMissingImports]

POINTS = {
    "depth": [12, 24, 48, 96],
    "width": [32, 64, 128, 256],
    "context": [32, 64, 128, 256],
    "runs": [125, 250, 500, 1000],
}
LABELS = {"depth": "depth (blocks)", "width": "width", "context": "context (tokens)", "runs": "runs read"}
REPEATS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.point:
        name, value = asked.point
        print(json.dumps(read(Path(value)) if name == "runs" else step(name, int(value))))
        return
    found = {name: [apart(name, str(value)) for value in POINTS[name]] for name in POINTS if name != "runs"}
    with tempfile.TemporaryDirectory() as folder:
        found["runs"] = [reading(Path(folder) / str(n), n) for n in POINTS["runs"]]
    draw(found)
    rows = [
        (name, told(POINTS[name]), told(p["seconds"] * 1e3 for p in points), told(p["MiB"] for p in points),
         *(f"{exponent(POINTS[name], [p[key] for p in points]):.2f}" for key in ("seconds", "MiB")))
        for name, points in found.items()
    ]  # fmt: skip
    lines = [
        "A training step with every-step statistics (default model: depth 6, width 64, context 64, batch 8, fp32, one "
        f"thread; medians of {REPEATS}) and `results.load` of runs of {many_runs.STEPS} steps at depth 2; memory "
        f"beyond the imports. {page.where()} Command: `python benchmarks/scaling.py`. Figure: docs/scaling.png.",
        "",
        *page.table(["of", "at", "time (ms)", "memory (MiB)", "time ~ n^", "memory ~ n^"], rows),
    ]
    page.write("Scaling", lines)


def told(values: Any) -> str:
    return ", ".join(f"{value:.0f}" for value in values)


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def apart(name: str, value: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--point", name, value]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    print(name, value, done.stdout.strip(), flush=True)
    return json.loads(done.stdout)


def reading(folder: Path, runs: int) -> dict[str, float]:
    many_runs.make(folder, runs=runs)
    return apart("runs", str(folder))


def read(folder: Path) -> dict[str, float]:
    return _measured(lambda: results.load(folder))


def _measured(act: Callable[[], object]) -> dict[str, float]:
    before, begun = many_runs.peak(), time.perf_counter()
    act()
    return {"seconds": time.perf_counter() - begun, "MiB": many_runs.peak() - before}


def step(name: str, value: int) -> dict[str, float]:
    torch.set_num_threads(1)
    took: list[float] = []

    def train(*, times: int, overrides: Sequence[str]) -> None:
        cfg = composing.config(page.ROOT, ["data=markov", *overrides])
        source = data.load(cfg.data)
        batch = source.batch(0, 0, cfg.sequences, cfg.model.context)
        model = build(cfg.model, source.vocab)
        initialise(model, cfg.model, seed=0)
        meter = StepMeter(model, optim.make(model, cfg.optim, cfg.model))
        for _ in range(times):
            begun = time.perf_counter()
            model.loss(*batch).backward()
            meter.gradients()
            meter.update()
            took.append(time.perf_counter() - begun)

    train(times=1, overrides=["model.depth=1", "model.width=16", "model.context=16"])  # what is allocated once
    took.clear()
    found = _measured(lambda: train(times=REPEATS + 2, overrides=[f"model.{name}={value}"]))
    return found | {"seconds": statistics.median(took[2:])}


def draw(found: dict[str, list[dict[str, float]]]) -> None:
    """Two rows of panels, time above memory, with the fitted lines."""
    fig, panels = plt.subplots(2, len(found), figsize=(2.6 * len(found) + 0.6, 4.8), squeeze=False, sharex="col")
    for column, (name, points) in zip(panels.T, found.items(), strict=True):
        x = POINTS[name]
        for panel, key, unit in zip(column, ("seconds", "MiB"), (1e3 if name != "runs" else 1, 1), strict=True):
            y = [unit * point[key] for point in points]
            slope = exponent(x, y)
            middle = np.exp(np.mean(np.log(y)) + slope * (np.log(x) - np.mean(np.log(x))))
            panel.plot(x, middle, color="#888888", linewidth=1)
            panel.plot(x, y, "o", color=figure.PALETTE[0])
            panel.set_title(f"$n^{{{slope:.2f}}}$")
            panel.set_xscale("log")
            panel.set_yscale("log")
            panel.set_xticks(x, [str(value) for value in x])
            panel.minorticks_off()
            figure.decade_axis(panel.yaxis)
        column[0].set_ylabel("reading (s)" if name == "runs" else "training step (ms)")
        column[1].set_ylabel("memory (MiB)")
        column[1].set_xlabel(LABELS[name])
    fig.savefig(page.ROOT / "docs" / "scaling.png", dpi=160)


if __name__ == "__main__":
    main()
