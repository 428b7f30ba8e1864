"""Peak memory of training steps of our GPT-2-shaped decoder, statistics on, and of nanoGPT's, each by itself.

python benchmarks/peak_memory.py --nanogpt ../nanoGPT      # writes its section of benchmarks/results.md
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import page
import throughput
from many_runs import peak
from peers import ARMS, Shape, batch

STEPS = 3
PROCESSES = 5  # of one arm and shape: what the allocator does with the same steps differs by several percent
WARM = Shape(1, 16, 16)  # its step makes what the libraries allocate once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, help="a checkout of karpathy/nanoGPT; without it, ours alone")
    parser.add_argument("--shapes", nargs="+", type=throughput.shape, default=throughput.SHAPES)
    parser.add_argument("--one", nargs=2, metavar=("ARM", "SHAPE"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(beyond_imports(asked.one[0], throughput.shape(asked.one[1]), asked.nanogpt)))
        return
    names = [throughput.MEASURED, *([throughput.NANOGPT] if asked.nanogpt else [])]
    rows = []
    for where in asked.shapes:
        rows.append(
            (where.depth, where.width, where.context, *row([apart(name, where, asked.nanogpt) for name in names]))
        )
        print(rows[-1], flush=True)
    lines = [
        f"The most that {STEPS} eager steps on one thread need beyond the imports, ours with every-step statistics; "
        f"medians of {PROCESSES} processes. {throughput.versions(asked.nanogpt, Path(__file__).name)}",
        "",
        *page.table(["depth", "width", "context", "ours (MiB)", "nanoGPT (MiB)", "ratio"], rows),
    ]
    page.write("Peak memory", lines)


def row(found: Sequence[float]) -> tuple[str, str, str]:
    """MiB of ours and of nanoGPT, and ours over theirs; the last two empty where theirs was not measured."""
    ours, *theirs = found
    return (f"{ours:.0f}", f"{theirs[0]:.0f}", f"{ours / theirs[0]:.2f}") if theirs else (f"{ours:.0f}", "", "")


def apart(arm: str, where: Shape, nanogpt: Path | None) -> float:
    """MiB, median over processes."""
    command = [sys.executable, __file__, "--one", arm, str(where), *(["--nanogpt", str(nanogpt)] if nanogpt else [])]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = [subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=env) for _ in range(PROCESSES)]
    return statistics.median(json.loads(process.stdout.splitlines()[-1]) for process in done)


def beyond_imports(name: str, where: Shape, nanogpt: Path | None) -> float:
    """MiB of this process."""
    before = after = 0.0
    for shape, steps in ((WARM, 1), (where, STEPS)):
        arm = ARMS[name](shape, nanogpt)
        assert arm is not None
        for _ in range(steps):
            arm.step(batch(shape))
        before, after = after, peak()
    return after - before


if __name__ == "__main__":
    main()
