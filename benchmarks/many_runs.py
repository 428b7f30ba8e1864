"""What a large study costs to read: time and memory of results.load and of a summary, for 1,000 tiny runs.

A few runs are really trained; the others are copies under other ids and seeds.

python benchmarks/many_runs.py                  # prints the table and writes benchmarks/many_runs.md
"""

import argparse
import json
import platform
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

from normlab import composing, results, store
from normlab.train import train

ROOT = Path(__file__).resolve().parents[1]
RUNS = 1_000
STEPS = 50
TINY = [
    *("data=markov", "data.vocab=16", "data.batch_size=4", "eval.batches=2", "eval.every=10", "probe.batches=2"),
    *("model.depth=2", "model.width=16", "model.heads=2", "model.context=16", f"steps={STEPS}", "log=disabled"),
]
ARMS = [(placement, lr) for placement in ("pre", "post") for lr in ("1e-3", "1e-2")]
LAYERS = {"all three": True, "runs and steps": False}


def make(folder: Path) -> None:
    """The study, as its runs would have left it."""
    real = []
    for placement, lr in ARMS:
        overrides = [*TINY, f"model.placement={placement}", f"optim.lr={lr}", f"runs_dir={folder}", "study=many"]
        real.append(folder / "many" / train(composing.config(ROOT, overrides))["run_id"])
    for number in range(len(real), RUNS):
        original = real[number % len(real)]
        copy = folder / "many" / f"{number:010x}"
        shutil.copytree(original, copy, ignore=shutil.ignore_patterns("checkpoint.pt"))
        (copy / "checkpoint.pt").hardlink_to(original / "checkpoint.pt")
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
    """In this process, which has done nothing else."""
    before = _peak()
    start = time.perf_counter()
    found = results.load(folder, layers=layers)
    loaded = time.perf_counter()
    table = summary(found)
    done = time.perf_counter()
    assert table.runs.sum() == RUNS
    return {
        "rows": [len(found.runs), len(found.steps), len(found.layers)],
        "load": loaded - start,
        "summary": done - loaded,
        "peak": _peak() - before,
    }


def _peak() -> float:
    """MiB. On Linux, getrusage would count the process that started this one too."""
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
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make(folder)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        lines = [
            "# Cost of reading a large study",
            "",
            f"{RUNS:,} runs of {STEPS} steps, depth 2: {size / 2**20:.0f} MiB on disk, {size / RUNS / 2**10:.0f} KiB a "
            f"run. `results.load` and a summary by arm, each line in a fresh process; memory beyond the imports. "
            f"{platform.machine()}, pandas {pd.__version__}. Command: `make bench`.",
            "",
            "| tables read | rows | load (s) | summary (s) | peak memory (MiB) |",
            "|---|---|---|---|---|",
        ]
        print(*lines[2:], sep="\n")
        for name in LAYERS:
            command = [sys.executable, __file__, "--load", str(folder), "--tables", name]
            told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
            rows = " + ".join(f"{count:,}" for count in told["rows"])
            lines.append(f"| {name} | {rows} | {told['load']:.2f} | {told['summary']:.2f} | {told['peak']:.0f} |")
            print(lines[-1], flush=True)
    (ROOT / "benchmarks" / "many_runs.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
