"""What a large study costs to read: time and memory of results.load and of a summary, for 1,000 tiny runs.

A few runs are really trained; the others are copies under other ids and seeds, whose files are hard links but for what
names them: reading them is reading from memory.

python benchmarks/many_runs.py                  # writes its section of benchmarks/results.md
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

import page
from normlab import composing, results, store
from normlab.train import train

sys.path.insert(0, str(page.ROOT / "analysis"))
import arms  # pyright: ignore[reportMissingImports]

RUNS = 1_000
STEPS = 50
TINY = [
    *("data=markov", "data.vocab=16", "data.batch_size=4", "eval.batches=2", "eval.every=10", "probe.batches=2"),
    *("model.width=16", "model.heads=2", "model.context=16", "log=disabled"),
]
ARMS = [(placement, lr) for placement in ("pre", "post") for lr in ("1e-3", "1e-2")]
STUDIES = {"depth 2, 50 steps": (2, STEPS), "depth 24, 1,000 steps": (24, 1_000)}
LAYERS = {"all three": True, "runs and steps": False}
FIGURE = page.ROOT / "analysis" / "fig_depth_placement.py"


def make(folder: Path, depth: int = 2, steps: int = STEPS, runs: int = RUNS) -> None:
    """The study, as its runs would have left it."""
    real = []
    for placement, lr in ARMS:
        overrides = [*TINY, f"model.depth={depth}", f"steps={steps}", f"model.placement={placement}", f"optim.lr={lr}"]
        cfg = composing.config(page.ROOT, [*overrides, f"runs_dir={folder}", "study=many"])
        real.append(folder / "many" / train(cfg)["run_id"])
    for number in range(len(real), runs):
        original = real[number % len(real)]
        copy = folder / "many" / f"{number:010x}"
        shutil.copytree(original, copy, copy_function=os.link)
        for name in ("config.yaml", "run.json"):
            (copy / name).unlink()
            shutil.copy(original / name, copy)
        settings = yaml.safe_load((copy / "config.yaml").read_text()) | {"seed": number}
        (copy / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
        record = store.read_record(copy)
        assert record is not None
        store.write_record(copy, record | {"run_id": copy.name})


def summary(found: results.Results) -> pd.DataFrame:
    """What a figure reads: each arm's number of runs, its final loss, its typical and its largest gradients."""
    arms = ["model.placement", "optim.lr"]
    runs = found.runs.groupby(arms)
    table = runs.agg(runs=("run_id", "size"), loss=("final_val_loss", "mean"), spread=("final_val_loss", "std"))
    table["diverged"] = runs.verdict.agg(lambda verdicts: (verdicts == "diverged").sum())
    steps = found.steps.merge(found.runs[["run_id", *arms]], on="run_id")
    table["grad_norm"] = steps.groupby(arms).grad_norm.median()
    if len(found.layers):
        norms = found.layers[found.layers.stat == "weight_grad_norm"].groupby("run_id").value.max()
        table["largest"] = found.runs.set_index("run_id")[arms].join(norms).groupby(arms).value.max()
    return table


def measure(folder: Path, layers: bool) -> dict[str, Any]:
    """In this process, which has done nothing else. As the figures read: beyond arms.MOST_ROWS layer rows, thinned."""
    before = peak()
    start = time.perf_counter()
    found = results.load(folder, layers=layers, most_rows=arms.MOST_ROWS)
    loaded = time.perf_counter()
    table = summary(found)
    done = time.perf_counter()
    assert table.runs.sum() == RUNS
    return {
        "rows": [len(found.runs), len(found.steps), len(found.layers)],
        "load": loaded - start,
        "summary": done - loaded,
        "peak": peak() - before,
    }


def peak() -> float:
    """Memory of this process at the most so far, MiB. On Linux, getrusage counts the process that began this too."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if "VmHWM" in line) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tables", choices=list(LAYERS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.load:
        print(json.dumps(measure(asked.load, LAYERS[asked.tables])))
        return
    rows = []
    for study, (depth, steps) in STUDIES.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            make(folder, depth, steps)
            for name in LAYERS:
                command = [sys.executable, __file__, "--load", str(folder), "--tables", name]
                told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
                counts = " + ".join(f"{count:,}" for count in told["rows"])
                rows.append(
                    (study, name, counts, f"{told['load']:.1f}", f"{told['summary']:.1f}", f"{told['peak']:.0f}")
                )
                print(rows[-1], flush=True)
            begun = time.perf_counter()
            command = [sys.executable, str(FIGURE), str(folder / "many"), "--out", str(folder / "figures")]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            rows.append((study, f"one page: {FIGURE.name}", "", f"{time.perf_counter() - begun:.1f}", "", ""))
            print(rows[-1], flush=True)
    lines = [
        f"{RUNS:,} runs, four of them trained, the others hard links to their files, so that all is read from memory. "
        "`results.load` as the figures use it (at most "
        f"{arms.MOST_ROWS / 1e6:.0f} million rows of layer statistics: beyond, those of every step are read at each "
        "k-th step) and a summary by arm, each line in a fresh process; memory beyond the imports. "
        f"{page.where()} Command: `python benchmarks/many_runs.py`.",
        "",
        *page.table(["runs of", "tables read", "rows", "load (s)", "summary (s)", "peak memory (MiB)"], rows),
    ]
    page.write("Reading a large study", lines)


if __name__ == "__main__":
    main()
