"""What packing saves: time of a step of a run in a pack of K over its time alone, side by side.

Everything that a step of a run does: batch, gradients, statistics, update, rows on disk. Evaluation and profiles, which
each run makes by itself in both cases, are left out. Each arm has a process of its own; they take turns.

python benchmarks/packing.py                    # writes its section of benchmarks/results.md
python benchmarks/packing.py --widths 32 --depths 6
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Generator
from contextlib import closing
from multiprocessing.connection import Connection

import torch

import page
from normlab import composing, pack, train
from normlab.config import Config
from normlab.signals import Postponed

WIDTHS, DEPTHS, SIZES = (16, 32, 64, 128), (6, 24), (2, 4, 8)
REPEATS = 7
SAMPLE = 24  # steps of runs: a pack of K makes SAMPLE / K of its own


def steps(cfgs: list[Config]) -> Generator[None]:
    """A step of every run each time."""
    if len(cfgs) == 1:
        with closing(train.training(cfgs[0], Postponed())) as run:
            asked = next(run)
            while True:
                asked = run.send(asked.fit.made(asked.batch, asked.lr))
                yield
    members = [pack.Member(cfg, Postponed(), lambda *_: None) for cfg in cfgs]
    for member in members:
        member.advance()
    packed = pack.Pack(members)
    try:
        while True:
            packed.step()
            yield
    finally:
        for member in members:
            member.fail(KeyboardInterrupt())


def arm(size: int, overrides: list[str], pipe: Connection) -> None:
    """A process: for each word from the pipe some steps, and the seconds that one took for one run."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cfgs = [composing.config(page.ROOT, [*overrides, f"runs_dir={folder}", f"seed={seed}"]) for seed in range(size)]
        with closing(steps(cfgs)) as stepping:
            while pipe.recv():
                start = time.process_time()  # other processes of the machine do not count
                for _ in range(SAMPLE // size):
                    next(stepping)
                pipe.send((time.process_time() - start) / SAMPLE)


def measure(overrides: list[str]) -> list[float]:
    """Median milliseconds of a step alone, then for each K the median of the ratios alone / packed, and both ends."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for size in (1, *SIZES):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=arm, args=(size, overrides, theirs), daemon=True))
        processes[-1].start()
        pipes.append(ours)

    def turn(pipe: Connection) -> float:
        pipe.send(True)
        return pipe.recv()

    for pipe in pipes:  # warm up
        turn(pipe)
    rounds = [[turn(pipe) for pipe in pipes] for _ in range(REPEATS)]
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(False)
        process.join()
    ratios = [statistics.median(r[0] / r[i] for r in rounds) for i in range(1, len(pipes))]
    return [statistics.median(r[0] for r in rounds) * 1e3, *ratios]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    chosen = parser.parse_args()
    rows = []
    for width in chosen.widths:
        for depth in chosen.depths:
            shape = [f"model.width={width}", f"model.depth={depth}"]
            step, *ratios = measure([*shape, "log=disabled", "eval.every=0", "probe.batches=0", "steps=100000"])
            rows.append((width, depth, f"{step:.1f}", *(f"{ratio:.2f}" for ratio in ratios)))
            print(rows[-1], flush=True)
    lines = [
        "How many times as fast a run's step is in a pack of K as alone (above 1: packing pays). Context 64, batch 8, "
        "AdamW, fp32, one thread, default model but for width and depth; CPU time, medians of paired ratios of "
        f"{REPEATS} rounds in which each arm, a process of its own, makes {SAMPLE} steps of runs. Part of what heads "
        f"of width 4 and 8 gain is the pack's own form of attention (`stacked.attend`). {page.where()} Command: "
        "`python benchmarks/packing.py`.",
        "",
        *page.table(["width", "depth", "alone (ms)", *(f"pack={size}" for size in SIZES)], rows),
    ]
    if (tuple(chosen.widths), tuple(chosen.depths)) == (WIDTHS, DEPTHS):
        page.write("Packed runs", lines)


if __name__ == "__main__":
    main()
