"""The time of each norm alone, forward and forward with backward, in turns so that a slow moment hits all alike.

python experiments/norm_cost.py                                            # sweeps/norm_cost.yaml
python experiments/norm_cost.py model.norm=layernorm,rmsnorm precision=bf16 device=cuda
python analysis/fig_norm_cost.py runs/norm_cost
"""

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from normlab import door, store
from normlab.config import Config
from normlab.config_data import MarkovConfig
from normlab.device import device_name, pick_device
from normlab.door import asked
from normlab.explain import ConfigError
from normlab.norm import NORMS
from normlab.probe import frame

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # of the stream; weights are float32
WARMUP = 3  # rounds that are not kept
CALLS = {"cuda": 20}  # calls that one GPU measurement spans: one alone may be too short for its launch to hide
STATS = ("norm_forward_seconds", "norm_training_seconds")


class Arm(NamedTuple):
    """A norm with an input (batch, context, width) and the gradient of its output."""

    norm: nn.Module
    x_BTD: Tensor
    grad_BTD: Tensor


def main(arguments: list[str]) -> int:
    """Time every config of the sweep and print a table. Exit status 2 for the user's mistake, told in one line."""
    cfgs = asked("norm_cost.py", __doc__, arguments, configs)
    try:
        records = run(cfgs)
    except Exception as error:
        print(f"failed: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(summary(cfgs, records))
    print(f"\n{len(records)} runs: {Path(cfgs[0].runs_dir) / cfgs[0].study}")
    return 0


def configs(overrides: list[str]) -> list[Config]:
    """One config for each combination of the listed choices. Raises ConfigError."""
    cfgs = door.configs(ROOT, "norm_cost", overrides, "norms are timed without training")
    for cfg in cfgs:
        if cfg.probe.batches < 1:
            raise ConfigError(f"probe.batches={cfg.probe.batches}: timed repeats; accepted: 1 or more")
        if not isinstance(cfg.data, MarkovConfig):
            raise ConfigError(f"data={cfg.data.name}: a norm is timed on noise, data.batch_size says how much; "
                              "accepted: markov")  # fmt: skip
    for key, values in {
        "device": {cfg.device for cfg in cfgs},
        "threads": {cfg.threads for cfg in cfgs},
        "probe.batches": {cfg.probe.batches for cfg in cfgs},
    }.items():
        if len(values) > 1:
            raise ConfigError(
                f"{key}={','.join(map(str, sorted(values)))}: norms are timed in turns; accepted: one value"
            )
    return cfgs


def run(cfgs: list[Config]) -> list[dict]:
    """Time the configs together into their run folders and return their records.

    Where all are finished their records are read instead; where one is not all are timed, to be compared alike.
    """
    device = pick_device(cfgs[0].device)
    name = device_name(device)
    # not the id of a training run with these settings: another thing is measured
    ids = [store.run_id(cfg, f"norm_cost, {name}", device.type) for cfg in cfgs]
    paths = [Path(cfg.runs_dir) / cfg.study / run_id for cfg, run_id in zip(cfgs, ids, strict=True)]
    with ExitStack() as stack:
        mine = [stack.enter_context(store.alone(path)) for path in paths]
        earlier = [store.read_record(path) or {} for path in paths]
        done = [store.relaunched(r, cfg.relaunch) == "skip" for r, cfg in zip(earlier, cfgs, strict=True)]
        if all(done):
            return earlier
        if not all(mine):
            raise RuntimeError(f"{paths[mine.index(False)]} is held by another process")
        facts = {"data_sha256": "", "device": name} | store.provenance(ROOT)
        folders = [
            store.RunFolder(path, cfg, {"run_id": path.name, "study": cfg.study} | facts)
            for path, cfg in zip(paths, cfgs, strict=True)
        ]
        try:
            torch.set_num_threads(cfgs[0].threads)
            seconds = measure([arm(cfg, device) for cfg in cfgs], cfgs[0].probe.batches, cfgs[0].seed)
        except BaseException as error:
            for folder in folders:
                folder.close()
                folder.update(status="failed", reason=f"{type(error).__name__}: {error}")
            raise
        for folder, found in zip(folders, seconds, strict=True):
            folder.layers(0, rows(found))
            folder.close()
            medians = dict(zip(STATS, np.median(found, axis=0).tolist(), strict=True))
            folder.update(status="finished", verdict=None, init_val_loss=None, **medians)
    return [folder.record for folder in folders]


def arm(cfg: Config, device: torch.device) -> Arm:
    norm = NORMS[cfg.model.norm].make(cfg.model.width, cfg.model.eps).to(device)
    assert isinstance(cfg.data, MarkovConfig)  # configs refuses others
    shape = (cfg.data.batch_size, cfg.model.context, cfg.model.width)
    generator = torch.Generator().manual_seed(cfg.seed)
    x, grad = (torch.randn(shape, generator=generator).to(device, DTYPES[cfg.precision]) for _ in range(2))
    return Arm(norm, x, grad)


def measure(arms: list[Arm], repeats: int, seed: int) -> np.ndarray:
    """Seconds (arms, repeats, forward and training): in every repeat each arm once, in an order of its own."""
    order = np.random.default_rng(seed)
    found = np.empty((len(arms), repeats, len(STATS)))
    for repeat in range(-WARMUP, repeats):
        for i in order.permutation(len(arms)):
            times = timed(arms[i], forward), timed(arms[i], training)
            if repeat >= 0:
                found[i, repeat] = times
    return found


def forward(arm: Arm) -> None:
    with torch.no_grad():
        arm.norm(arm.x_BTD)


def training(arm: Arm) -> None:
    """Forward, and backward to the input and the weights."""
    x = arm.x_BTD.requires_grad_()
    torch.autograd.grad(arm.norm(x), [x, *arm.norm.parameters()], arm.grad_BTD)


def timed(arm: Arm, work) -> float:
    """Seconds of one call; on a GPU between two events of its stream, over several calls in a row."""
    device = arm.x_BTD.device
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record(torch.cuda.current_stream(device))
        for _ in range(CALLS["cuda"]):
            work(arm)
        end.record(torch.cuda.current_stream(device))
        end.synchronize()
        return start.elapsed_time(end) / 1000 / CALLS["cuda"]
    if device.type == "mps":
        torch.mps.synchronize()
    begin = time.perf_counter()
    work(arm)
    if device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter() - begin


def rows(found: np.ndarray) -> pd.DataFrame:
    """Layer statistics norm_forward_seconds and norm_training_seconds, whose repeat from 0 is the row's tensor."""
    return frame(
        ("decoder", None, "norm", f"{repeat:04d}", stat, value)
        for i, stat in enumerate(STATS)
        for repeat, value in enumerate(found[:, i])
    )


def summary(cfgs: list[Config], records: list[dict]) -> str:
    """Medians over the repeats."""
    table = pd.DataFrame({"norm": [cfg.model.norm for cfg in cfgs], "precision": [cfg.precision for cfg in cfgs]})
    for stat in STATS:
        table[stat.split("_")[1] + " (ms)"] = [f"{1000 * record[stat]:.3f}" for record in records]
    return table.to_string(index=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
