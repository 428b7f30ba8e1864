"""What training costs on this machine's device, by number format, compilation and attention kernel.

A decoder of GPT-2's shape on synthetic tokens, by the loop of a real run with its every-step statistics; step times are
medians after the first half. Called by gpu_check.sh, after the tests.

python benchmarks/gpu_check.py                          # on a card: writes benchmarks/gpu.md
python benchmarks/gpu_check.py --device cpu --quick     # that it works, in two minutes: writes nothing
"""

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from normlab import composing, flops, kernels, optim, store, task
from normlab.config import Config
from normlab.device import device_name, pick_device
from normlab.explain import ConfigError
from normlab.fit import Fit, alone
from normlab.init import initialise
from normlab.log import Log
from normlab.model import build
from normlab.signals import Postponed

ROOT = Path(__file__).resolve().parents[1]
FORMATS = {"fp32": [], "tf32": ["tf32=true"], "bf16": ["precision=bf16"], "fp16": ["precision=fp16"]}
MODES = {"eager": "false", "compile": "true", "reduce-overhead": "reduce-overhead"}
PLAIN = [
    *("data=markov", "model=gpt2", "log=disabled", "log.progress=false", "probe.batches=0", "eval.every=0"),
    *("eval.batches=1", "optim.warmup_steps=0"),
]
QUICK = ["model.depth=2", "model.width=64", "model.heads=2", "model.context=64", "model.vocab=512", "data.batch_size=2"]
RUN_COLUMNS = ("format", "mode", "attention", "step (ms)", "tokens/s", "MFU", "peak memory (MiB)", "built in (s)")


class Bench:
    """Measurements with one shape, on one device, until the time is up."""

    def __init__(self, device: str, quick: bool, deadline: float) -> None:
        self.device, self.quick, self.deadline = pick_device(device), quick, deadline
        self.steps = 6 if quick else 40
        if quick:
            self.shape = [*PLAIN, *QUICK]
        else:
            room = torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else 0
            self.shape = [*PLAIN, f"data.batch_size={16 if room > 60e9 else 8 if room > 20e9 else 4}"]

    def config(self, *overrides: str) -> Config:
        run = [f"device={self.device.type}", f"steps={self.steps}", "log.every=2", *self.shape]
        return composing.config(ROOT, [*run, *overrides])

    def row(self, measure: Callable[[Config], Sequence[str]], *overrides: str) -> Sequence[str]:
        """What a measurement tells, or in one cell why there is none."""
        if time.monotonic() > self.deadline:
            return ["no time left"]
        try:
            cfg = self.config(*overrides)
            kernels.check(cfg)
            return measure(cfg)
        except ConfigError as error:
            return [str(error)]
        except torch.OutOfMemoryError:
            return ["out of memory"]
        except (RuntimeError, subprocess.SubprocessError) as error:  # of this cell alone: the others are still wanted
            return [f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"]
        finally:
            torch._dynamo.reset()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def watched(self, cfg: Config) -> tuple[Fit, float, float]:
        """A run's own loop, all of it but the checkpoint; median seconds of a step, and all others."""
        with tempfile.TemporaryDirectory() as temporary, kernels.chosen(cfg, self.device), Postponed() as signals:
            folder = store.RunFolder(Path(temporary) / "run", cfg, {})
            start = time.perf_counter()
            with Log(cfg.log, folder.path, study="bench", steps=cfg.steps, settings={}) as log:
                fit = Fit(cfg, task.make(cfg), self.device, folder, log)
                fit.checkpoint = lambda done: None
                alone(fit.steps(signals))
            rows = folder.rows()
            folder.close()
        seconds = [row["seconds"] for row in rows]
        typical = statistics.median(seconds[len(seconds) // 2 :])
        return fit, typical, max(0.0, time.perf_counter() - start - typical * len(rows))

    def run(self, cfg: Config) -> list[str]:
        """RUN_COLUMNS behind the first two."""
        fit, seconds, built = self.watched(cfg)
        speed = cfg.sequences * cfg.model.context / seconds
        per_token = flops.per_token(fit.model, cfg.model.context)
        mfu = flops.utilisation(per_token, speed, device_name(self.device), cfg.number_format, 1)
        memory = flops.peak_memory_mb(self.device)
        told = [f"{seconds * 1e3:.1f}", f"{speed:,.0f}", "-" if mfu is None else f"{mfu:.1%}"]
        return [fit.attention or "-", *told, "-" if memory is None else f"{memory:,.0f}", f"{built:.1f}"]

    def bare(self, cfg: Config) -> float:
        """Median seconds of a step of the plain loop that measures nothing."""
        learned = task.make(cfg)
        model = build(cfg.model, learned.vocab)
        initialise(model, cfg.model, seed=0)
        model.to(self.device)
        optimizer = optim.make(model, cfg.optim, cfg.model)
        inputs, targets = (t.to(self.device) for t in learned.batch(0, 0))
        narrow, seconds = kernels.NARROW.get(cfg.precision), []
        for _ in range(cfg.steps // 2):  # two steps between reads, as above
            start = time.perf_counter()
            loss = torch.zeros(())
            for _ in range(2):
                with torch.autocast(self.device.type, narrow, enabled=narrow is not None):
                    loss = model.loss(inputs, targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            loss.item()
            seconds.append((time.perf_counter() - start) / 2)
        return statistics.median(seconds[len(seconds) // 2 :])

    def cost(self, cfg: Config) -> list[str]:
        """Bare step, watched step, their ratio."""
        bare = self.bare(cfg)
        _, watched, _ = self.watched(cfg)
        return [f"{bare * 1e3:.1f}", f"{watched * 1e3:.1f}", f"{watched / bare:.3f}"]

    def ranks(self, device: str) -> list[str]:
        """One process and two at the same global batch: step times and how far their last gradient norms are apart."""
        found = []
        for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]):
            with tempfile.TemporaryDirectory() as runs:
                shape = self.shape if device == "cuda" else [*PLAIN, *QUICK]
                command = [sys.executable, *launcher, str(ROOT / "experiments" / "train.py"), *shape]
                command += [f"device={device}", "steps=20", "log.every=2", f"runs_dir={runs}"]
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=180)
                (metrics,) = Path(runs).glob("scratch/*/metrics.jsonl")
                rows = [json.loads(line) for line in metrics.read_text().splitlines()]
            found.append((statistics.median(row["seconds"] for row in rows[10:]), rows[-1]["grad_norm"]))
        (one, alone), (two, split) = found
        apart = abs(alone - split) / alone
        return [f"{one * 1e3:.1f}", f"{two * 1e3:.1f}", f"{one / two:.2f}", f"{apart:.1e}"]

    def report(self) -> Iterator[str]:
        """The lines of the tables, as they are found."""
        modes = {"eager": "false"} if self.quick else MODES
        yield from _head(RUN_COLUMNS)
        for number_format, how in FORMATS.items():
            for mode, compiled in (MODES if number_format == "fp32" else modes).items():
                told = self.row(self.run, *how, f"compile={compiled}")
                yield _line([number_format, mode, *told], len(RUN_COLUMNS))
        for name in kernels.ATTENTION:
            told = self.row(self.run, "precision=bf16", f"attention={name}")
            yield _line(["bf16", f"eager, attention={name}", *told], len(RUN_COLUMNS))
        columns = ("every-step statistics", "bare step (ms)", "step (ms)", "ratio")
        yield from ("", *_head(columns))
        for number_format in ("fp32", "bf16"):
            yield _line([number_format, *self.row(self.cost, *FORMATS[number_format])], len(columns))
        columns = ("two ranks", "one process (ms)", "two (ms)", "speed-up", "gradient norm apart, relative")
        yield from ("", *_head(columns))
        device = "cuda" if self.device.type == "cuda" and torch.cuda.device_count() > 1 else "cpu"
        where = "NCCL, two cards" if device == "cuda" else "gloo, CPU, tiny model"
        yield _line([where, *self.row(lambda _: self.ranks(device))], len(columns))


def _head(columns: Sequence[str]) -> list[str]:
    return [_line(columns, len(columns)), "|" + "---|" * len(columns)]


def _line(cells: Sequence[str], width: int) -> str:
    return "| " + " | ".join([*cells, *[""] * (width - len(cells))]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model, few steps")
    parser.add_argument("--seconds", type=float, default=270.0, help="no measurement begins later (default: 270)")
    parser.add_argument("--tests", default="not run", help="what the tests said, for the report")
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "gpu_check.py: this machine has no CUDA device; accepted here: --device cpu\n")
    bench = Bench(asked.device, asked.quick, time.monotonic() + asked.seconds)
    cfg = bench.config()
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    shape = f"depth {cfg.model.depth}, width {cfg.model.width}, context {cfg.model.context}"
    lines = [
        f"# Training on {device_name(bench.device)}",
        "",
        f"Decoder, {shape}, batch {cfg.sequences}, {bench.steps} steps, AdamW; torch {torch.__version__}, "
        f"CUDA {torch.version.cuda or 'none'}, {platform.machine()}, commit {commit}. "
        "Command: `benchmarks/gpu_check.sh`. MFU of the data sheet's dense peak (Chowdhery et al. 2022, appendix B).",
        "",
        f"Tests on this device: {asked.tests}.",
        "",
    ]
    print(*lines, sep="\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's notes on what it compiles
        for line in bench.report():
            print(line, flush=True)
            lines.append(line)
    if asked.device == "cuda" and not asked.quick:
        (ROOT / "benchmarks" / "gpu.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
