"""What the every-step statistics cost: step time with them over step time without, side by side in one process.

make bench                                      # prints the table and writes benchmarks/results.md
"""

import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch

from normlab import cli, data, optim
from normlab.init import initialise
from normlab.model import build
from normlab.probe import GradientMeter

ROOT = Path(__file__).resolve().parents[1]
DEPTHS = (6, 24, 48, 96)
REPEATS = 9
STEPS = 4


class Arm:
    """One model that trains, with or without the statistics."""

    def __init__(self, depth: int, statistics_on: bool) -> None:
        cfg = cli.compose(ROOT, ["data=markov", f"model.depth={depth}"])
        source = data.load(cfg.data)
        self.batch = source.batch(0, 0, cfg.data.batch_size, cfg.model.context)
        self.model = build(cfg.model, source.vocab)
        initialise(self.model, cfg.model, seed=0)
        self.optimizer = optim.make(self.model, cfg.optim, cfg.model)
        self.meter = GradientMeter(self.model) if statistics_on else None

    def seconds(self, steps: int) -> float:
        """Wall-clock seconds of one training step, mean over `steps`."""
        start = time.perf_counter()
        for _ in range(steps):
            self.model.loss(*self.batch).backward()
            if self.meter is not None:
                self.meter.gradients()
                self.meter.before_update()
            self.optimizer.step()
            if self.meter is not None:
                self.meter.update()
            self.optimizer.zero_grad(set_to_none=True)
        return (time.perf_counter() - start) / steps


def measure(depth: int) -> tuple[float, float, float]:
    """Median step seconds without and with, and the median of the paired ratios, of interleaved repeats."""
    without, with_ = Arm(depth, False), Arm(depth, True)
    for arm in (without, with_):
        arm.seconds(2)
    pairs = [(without.seconds(STEPS), with_.seconds(STEPS)) for _ in range(REPEATS)]
    median = statistics.median
    return median(a for a, _ in pairs), median(b for _, b in pairs), median(b / a for a, b in pairs)


def main() -> None:
    torch.manual_seed(0)
    commit = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    lines = [
        "# Cost of the every-step statistics",
        "",
        f"Width 64, context 64, batch 8, AdamW, fp32; {REPEATS} interleaved repeats of {STEPS} steps, medians. "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, "
        f"commit {commit.stdout.strip() or 'unknown'}. Command: `make bench`.",
        "",
        "| depth | step without (ms) | step with (ms) | ratio |",
        "|---|---|---|---|",
    ]
    print(lines[-2])
    for depth in DEPTHS:
        without, with_, ratio = measure(depth)
        lines.append(f"| {depth} | {without * 1e3:.1f} | {with_ * 1e3:.1f} | {ratio:.3f} |")
        print(lines[-1], flush=True)
    (ROOT / "benchmarks" / "results.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
