"""The Jacobian from embeddings to the last block at initialisation: how much of it is the identity, its spectrum.

python experiments/jacobian.py                                  # sweeps/jacobian.yaml: under two minutes on two cores
python experiments/jacobian.py model.placement=pre,keel model.depth=6,12 seed=0
python analysis/fig_jacobian.py runs/jacobian
"""

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from normlab import door, jacobian, store, task
from normlab.config import Config
from normlab.door import asked
from normlab.explain import ConfigError
from normlab.init import calibrate, initialise
from normlab.model import build
from normlab.objective import Task
from normlab.probe import frame

ROOT = Path(__file__).resolve().parents[1]
MOST = 2048  # rows of J
NUMBERS = ["identity", "distance", "growth", "spread"]


def main(arguments: list[str]) -> int:
    """Measure every config of the sweep and print a table. Exit status 2 for the user's mistake, told in one line."""
    cfgs = asked("jacobian.py", __doc__, arguments, configs)
    records = []
    spawn = multiprocessing.get_context("spawn")
    # models this small do best with one thread each
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(cfgs)), spawn, torch.set_num_threads, (1,)) as pool:
        try:
            for cfg, record in zip(cfgs, pool.map(run, cfgs), strict=True):
                records.append({"placement": cfg.model.placement, "depth": cfg.model.depth, **record})
        except Exception as error:
            pool.shutdown(cancel_futures=True)
            print(f"failed: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
    print(summary(pd.DataFrame(records)))
    print(f"\n{len(records)} runs: {Path(cfgs[0].runs_dir) / cfgs[0].study}")
    return 0


def configs(overrides: list[str]) -> list[Config]:
    """One config for each combination of the listed choices. Raises ConfigError."""
    cfgs = door.configs(ROOT, "jacobian", overrides, "the Jacobian is taken at initialisation")
    for cfg in cfgs:
        if cfg.data.name == "parallel":
            raise ConfigError("data=parallel: its sequences are padded; accepted: another source")
        task.make(cfg)
        rows = cfg.model.width * cfg.model.context
        if rows > MOST:
            raise ConfigError(
                f"model.width={cfg.model.width} times model.context={cfg.model.context} rows of the Jacobian: {rows}; "
                f"accepted: at most {MOST}"
            )
    return cfgs


def run(cfg: Config) -> dict[str, Any]:
    """Measure one config into its run folder and return run.json's content; a finished one is read instead."""
    learned = task.make(cfg)
    # not the id of a training run with these settings: another thing is measured
    run_id = store.run_id(cfg, f"jacobian, {learned.source.sha256}", "cpu")
    path = Path(cfg.runs_dir) / cfg.study / run_id
    with store.alone(path) as mine:
        earlier = store.read_record(path) or {}
        if not mine or store.relaunched(earlier, cfg.relaunch) == "skip":
            return {"run_id": run_id, **earlier}
        facts = {"run_id": run_id, "study": cfg.study, "data_sha256": learned.source.sha256, "device": "cpu"}
        folder = store.RunFolder(path, cfg, facts | store.provenance(ROOT))
        try:
            found, loss = measure(cfg, learned)
            folder.layers(0, rows(cfg, found))
            numbers = {name: float(getattr(found, name)) for name in ("growth", "spread")}
            numbers |= {"identity": float(found.identity[-1]), "distance": float(found.distance[-1])}
            folder.close()
            folder.update(status="finished", verdict=None, init_val_loss=loss, **numbers)
        except BaseException as error:
            folder.close()
            folder.update(status="failed", reason=f"{type(error).__name__}: {error}")
            raise
    return folder.record


def measure(cfg: Config, learned: Task) -> tuple[jacobian.Jacobian, float]:
    """The Jacobian for the first sequence of the seed's first batch, and the mean held-out loss."""
    model = build(cfg.model, learned.vocab)
    initialise(model, cfg.model, cfg.seed)
    inputs, _ = learned.batch(cfg.seed, 0)
    calibrate(model, inputs)
    one = tuple(part[:1] for part in inputs) if isinstance(inputs, tuple) else inputs[:1]
    with torch.no_grad():
        losses = [model.loss(*batch).item() for batch in learned.held_out(cfg.eval.batches)]
    return jacobian.measure(model, one), sum(losses) / len(losses)


def rows(cfg: Config, found: jacobian.Jacobian) -> pd.DataFrame:
    """Layer statistics: by block jacobian_identity, _distance and _gain (RMS singular value) of the product through it.

    Of the whole stack: jacobian_singular_value, whose rank from 0 is the row's tensor, and jacobian_growth.
    """
    stack = "decoder" if cfg.model.decoder else "encoder"
    by_block = [
        (stack, layer, "stream", None, f"jacobian_{name}", value)
        for name in ("identity", "distance", "gain")
        for layer, value in enumerate(getattr(found, name))
    ]
    spectrum = [
        (stack, None, "stream", f"{rank:04d}", "jacobian_singular_value", value)
        for rank, value in enumerate(found.singular_values)
    ]
    return frame([*by_block, *spectrum, (stack, None, "stream", None, "jacobian_growth", found.growth)])


def summary(records: pd.DataFrame) -> str:
    """Means over seeds, and how many."""
    done = records[records.status == "finished"]
    if done.empty:
        return "no finished run"
    heads = ["<J, I>/n", "|J-I|/sqrt(n)", "log(rms)/block", "max/median"]
    named = {head: (name, "mean") for head, name in zip(heads, NUMBERS, strict=True)}
    table = done.groupby(["placement", "depth"], sort=False).agg(**named, seeds=("run_id", "size"))
    return table.map("{:.4g}".format).to_string()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
