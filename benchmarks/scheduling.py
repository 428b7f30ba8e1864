"""A sweep of small models on two cores: two processes of one thread each against one process of two threads.

python benchmarks/scheduling.py                 # writes its section of benchmarks/results.md
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import page

TRAIN = page.ROOT / "experiments" / "train.py"
SWEEP = [
    *("-m", "seed=0,1,2,3", "steps=100", "data=markov", "log=disabled", "log.progress=false"),
    *("probe.batches=0", "eval.every=0"),
]
SHAPES = {"6": ["model.depth=6"], "24": ["model.depth=24"], "6, width 256": ["model.depth=6", "model.width=256"]}
WAYS = {
    "joblib, 1 thread each": ["hydra/launcher=joblib", "threads=1"],
    "basic, 1 thread": ["threads=1"],
    "basic, 2 threads": ["threads=2"],
}
REPEATS = 2


def seconds(arguments: list[str]) -> float:
    """Of a whole sweep, from the command to its end."""
    threads = arguments[-1].removeprefix("threads=")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(TRAIN), *SWEEP, f"runs_dir={folder}", "study=bench", *arguments]
        begun = time.perf_counter()
        settings = {**os.environ, "OMP_NUM_THREADS": threads}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=settings, cwd=Path(folder))
        return time.perf_counter() - begun


def main() -> None:
    rows = []
    for name, shape in SHAPES.items():
        rounds = [[seconds([*shape, *way]) for way in WAYS.values()] for _ in range(REPEATS)]
        first = statistics.median(times[0] for times in rounds)
        ratios = [statistics.median(times[i] / times[0] for times in rounds) for i in range(1, len(WAYS))]
        rows.append((name, f"{first:.1f}", *(f"{ratio:.2f}" for ratio in ratios)))
        print(rows[-1], flush=True)
    joblib, *others = WAYS
    lines = [
        "A multirun of 4 runs of 100 steps, default model but for what is named, from the command to its end; medians "
        f"of {REPEATS} interleaved repeats, ratios to the first way. {page.where()} "
        "Command: `python benchmarks/scheduling.py`.",
        "",
        *page.table(["depth", f"{joblib} (s)", *others], rows),
    ]
    page.write("Sweeps on two cores", lines)


if __name__ == "__main__":
    main()
