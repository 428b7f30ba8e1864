"""What a run costs beside its training steps: from command to first step, and over a sweep of short runs.

python benchmarks/startup.py                    # writes its section of benchmarks/results.md
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import page

TRAIN = page.ROOT / "experiments" / "train.py"
COMMON = ["data=markov", "log=disabled", "log.progress=false", "log.every=1"]
UNMEASURED = ["probe.batches=0", "eval.every=0", "eval.batches=1"]
REPEATS = 5
RUNS, STEPS = 100, 20


class Sweep(NamedTuple):
    """Seconds of a whole sweep of RUNS runs of STEPS steps, and of its training steps, summed over runs."""

    wall: float
    steps: float


def main() -> None:
    firsts = [until_first_step() for _ in range(REPEATS)]
    jobs = between_jobs()
    lines = [
        f"Default model (depth 6, width 64, context 64, batch 8), one thread, log=disabled. {page.where()} "
        "Command: `python benchmarks/startup.py`.",
        "",
        f"From the command to the end of the first step, a fresh process each time: {statistics.median(firsts):.2f} s "
        f"(median of {REPEATS}). From one run's last step to the next run's first in a multirun, without evaluations "
        f"and profiles: {statistics.median(jobs):.2f} s (median of {len(jobs)}).",
        "",
        f"{RUNS} runs of {STEPS} steps in one multirun, start-up and the check of all jobs included:",
        "",
    ]
    rows = []
    for launcher, measurements in itertools.product(("basic", "joblib"), ("none", "default")):
        found = sweep([f"hydra/launcher={launcher}", *(UNMEASURED if measurements == "none" else [])])
        at_once = 1 if launcher == "basic" else os.cpu_count() or 1
        outside = 1 - found.steps / at_once / found.wall
        rows.append((launcher, measurements, f"{found.wall:.1f}", f"{found.steps / at_once:.1f}", f"{outside:.0%}"))
        print(rows[-1], flush=True)
    columns = ["launcher", "evaluations and profiles", "whole (s)", "training steps (s)", "outside the steps"]
    page.write("Start-up", [*lines, *page.table(columns, rows)])


def launch(folder: Path, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(TRAIN), *arguments, *COMMON, f"runs_dir={folder}", "study=bench"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})


def until_first_step() -> float:
    """Seconds; seen by the first row of metrics.jsonl, looked for each 5 ms."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        process = launch(Path(folder), ["steps=1", *UNMEASURED])
        while not any(path.stat().st_size for path in Path(folder).glob("bench/*/metrics.jsonl")):
            if process.poll() not in {None, 0}:
                raise RuntimeError("the run failed")
            time.sleep(0.005)
        took = time.perf_counter() - begun
        process.wait()
    return took


def between_jobs(jobs: int = 12) -> list[float]:
    """Seconds between the last write of one run's metrics and the first step of the next, by their files' times."""
    with tempfile.TemporaryDirectory() as folder:
        process = launch(Path(folder), ["-m", f"seed=range({jobs})", f"steps={STEPS}", *UNMEASURED])
        assert process.wait() == 0
        runs = sorted(Path(folder).glob("bench/*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
        ends = [path.stat().st_mtime for path in runs]
        seconds = [json.loads((path.parent / "run.json").read_text())["seconds"] for path in runs]
    return [later - earlier - took for earlier, later, took in zip(ends, ends[1:], seconds[1:], strict=False)]


def sweep(arguments: Sequence[str]) -> Sweep:
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        assert launch(Path(folder), ["-m", f"seed=range({RUNS})", f"steps={STEPS}", *arguments]).wait() == 0
        wall = time.perf_counter() - begun
        records = [json.loads(path.read_text()) for path in Path(folder).glob("bench/*/run.json")]
    assert len(records) == RUNS
    return Sweep(wall, sum(record["seconds"] for record in records))


if __name__ == "__main__":
    main()
