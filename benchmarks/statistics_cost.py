"""What watching costs: step time with it over step time without, side by side in one process.

Arms: bare training; the every-step statistics of a run, read and written to disk as train() does; wandb.watch with
log_freq=1, the usual way to see gradients of every step. And the time of one full profile.

python benchmarks/statistics_cost.py            # writes its section of benchmarks/results.md
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch
import wandb

import page
from normlab import composing, data, optim, store
from normlab.config import Config
from normlab.init import initialise
from normlab.journal import Journal
from normlab.log import Log
from normlab.meter import StepMeter
from normlab.model import build
from normlab.probe import Profile

DEPTHS = (6, 24, 48, 96)
REPEATS = 7
STEPS = 10  # as log.every: one read of the device for each


class Bare:
    """One model that trains."""

    def __init__(self, cfg: Config) -> None:
        self.cfg, source = cfg, data.load(cfg.data)
        self.batch = source.batch(0, 0, cfg.sequences, cfg.model.context)
        self.model = build(cfg.model, source.vocab)
        initialise(self.model, cfg.model, seed=0)
        self.optimizer = optim.make(self.model, cfg.optim, cfg.model)
        self.step = 0

    def train(self) -> None:
        self.model.loss(*self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def finish(self) -> None:
        """What follows every STEPS steps."""

    def seconds(self) -> float:
        """Wall-clock seconds of one training step, mean over STEPS."""
        start = time.perf_counter()
        for _ in range(STEPS):
            self.train()
            self.step += 1
        self.finish()
        return (time.perf_counter() - start) / STEPS


class Watched(Bare):
    """With what every run measures at every step, on the way to its run folder."""

    def __init__(self, cfg: Config, folder: Path) -> None:
        super().__init__(cfg)
        self.meter = StepMeter(self.model, self.optimizer)
        self.folder = store.RunFolder(folder, cfg, {})
        log = Log(cfg.log, folder, study="bench", steps=1, settings={})
        blocks = [("decoder", i) for i in range(cfg.model.depth)]
        self.journal = Journal(cfg, self.folder, log, self.meter.ids, blocks)

    def train(self) -> None:
        loss = self.model.loss(*self.batch)
        loss.backward()
        norms, nonfinite = self.meter.gradients()
        row = {"step": self.step, "tokens": 0, "lr": 1e-3}
        self.journal.add(row, loss.detach(), torch.ones((), device=loss.device), norms, nonfinite, self.meter.update())

    def finish(self) -> None:
        self.journal.flush(lambda: 0.0)


class WandbWatch(Bare):
    """With wandb.watch at every step, offline."""

    def __init__(self, cfg: Config, folder: Path) -> None:
        super().__init__(cfg)
        settings = wandb.Settings(console="off", x_disable_stats=True, silent=True)
        self.run = wandb.init(  # wandb.watch logs to the process's one run
            mode="offline", dir=folder, project="bench", settings=settings
        )
        self.run.watch(self.model, log="gradients", log_freq=1)

    def train(self) -> None:
        loss = self.model.loss(*self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.run.log({"loss": loss.item()}, step=self.step)


def measure(depth: int, folder: Path) -> list[float]:
    """Median step seconds of the bare arm, then the medians of the paired ratios of the two others."""
    cfg = composing.config(page.ROOT, ["data=markov", f"model.depth={depth}", "log=disabled"])
    (folder / "own").mkdir(parents=True)
    (folder / "wandb").mkdir()
    arms = [Bare(cfg), Watched(cfg, folder / "own"), WandbWatch(cfg, folder / "wandb")]
    for arm in arms:
        arm.seconds()
    rounds = [[arm.seconds() for arm in arms] for _ in range(REPEATS)]
    arms[2].run.finish()
    median = statistics.median
    return [median(r[0] for r in rounds), *(median(r[i] / r[0] for r in rounds) for i in (1, 2))]


def profile_seconds(depth: int) -> float:
    """Of one full profile over the default number of batches."""
    cfg = composing.config(page.ROOT, ["data=markov", f"model.depth={depth}"])
    source = data.load(cfg.data)
    model = build(cfg.model, source.vocab)
    initialise(model, cfg.model, seed=0)
    batches: list = source.held_out(cfg.probe.batches, cfg.sequences, cfg.model.context)
    take = Profile(model, model.objective, batches, layer_drop=False)
    take()
    start = time.perf_counter()
    take()
    return time.perf_counter() - start


def main() -> None:
    torch.manual_seed(0)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for depth in DEPTHS:
            bare, watched, wandb_watch = measure(depth, Path(folder) / str(depth))
            took = profile_seconds(depth)
            rows.append((depth, f"{bare * 1e3:.1f}", f"{watched:.3f}", f"{wandb_watch:.3f}", f"{took:.2f}"))
            print(rows[-1], flush=True)
    columns = ["depth", "bare step (ms)", "every-step statistics", "wandb.watch(log_freq=1)", "profile (s)"]
    lines = [
        f"Width 64, context 64, batch 8, AdamW, fp32, {torch.get_num_threads()} threads; medians of {REPEATS} "
        f"interleaved repeats of {STEPS} steps, paired ratios to the bare step. {page.where()} Command: "
        "`python benchmarks/statistics_cost.py`.",
        "",
        "Every step: gradient, weight and update norm, update ratio and share below Adam's eps of every weight tensor, "
        "and the live spike detectors; read, judged and written to disk every 10 steps. The bare step has torch's "
        "optimizer on the model's parameters; a run's steps on one flat buffer, which is faster for small tensors.",
        "",
        *page.table(columns, rows),
    ]
    page.write("Cost of watching", lines)


if __name__ == "__main__":
    main()
