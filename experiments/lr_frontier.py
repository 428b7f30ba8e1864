"""The largest stable learning rate of each cell, by search over the rates that a study lists, and LR50 over seeds.

python experiments/lr_frontier.py                                  # sweeps/lr_frontier.yaml
python experiments/lr_frontier.py model.placement=pre,keel model.depth=6,12 seed=0,1 optim.lr=1e-3,3e-3,1e-2,3e-2,1e-1
python experiments/lr_frontier.py ramp=true    # and Keel's ramp to the largest rate; ramp=0.05: to 0.05
python analysis/fig_lr_frontier.py runs/lr_frontier

The choices of optim.lr are the grid, those of every other setting but seed make cells. A run is the ordinary one:
`experiments/train.py +sweeps=lr_frontier` fills in the rest of the grid, and what is finished is read, not trained.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from normlab import cli, composing, frontier, ramp, results, task
from normlab.config import Config, load
from normlab.device import gpu_for, workers
from normlab.door import asked
from normlab.explain import ConfigError
from normlab.frontier import LR, STEPS
from normlab.isolation import isolated
from normlab.signals import STOPPING
from normlab.train import train

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Cell:
    """One combination of settings, at every seed and rate; and its ramps, one for each seed."""

    settings: Config
    rates: list[float]
    seeds: list[int]
    ramps: list[Config] = field(default_factory=list)

    def at(self, rate: float, seed: int) -> Config:
        optim = self.settings.optim.model_copy(update={"lr": rate})
        return self.settings.model_copy(update={"optim": optim, "seed": seed})


def main(arguments: list[str]) -> int:
    """Search every cell and print a table. Exit status 2 for the user's mistake, in one line; 1: a cell is lost."""
    cells = asked("lr_frontier.py", __doc__, arguments, lambda overrides: plan(*ramp_of(overrides)))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for number in STOPPING:
        signal.signal(number, signal.default_int_handler)
    made: list[dict[str, Any]] = []
    ended: list[Cell] = []
    status = 0
    spawn = multiprocessing.get_context("spawn")
    longest_first = sorted(cells, key=lambda cell: -cell.settings.model.depth)
    numbers = spawn.Queue()
    for number in range(count := min(workers(), len(cells))):
        numbers.put(number)
    with ProcessPoolExecutor(count, spawn, begin, (numbers,)) as pool:
        waiting = {pool.submit(search, cell): cell for cell in longest_first}
        try:
            for done in as_completed(waiting):
                try:
                    made += done.result()
                    ended.append(waiting[done])
                except Exception as error:
                    told = f"{cli.describe(waiting[done].settings)}: {type(error).__name__}: {error}"
                    print(f"a cell is lost: {' '.join(told.split())}", file=sys.stderr)
                    status = 1
        except KeyboardInterrupt:
            for process in multiprocessing.active_children():  # they finish their step and write a checkpoint
                if process.pid is not None:
                    os.kill(process.pid, signal.SIGINT)
            pool.shutdown(cancel_futures=True)
            print("interrupted; launch again to go on", file=sys.stderr)
            return 130
    if made:
        print(report(made, ended))
    return status


def ramp_of(arguments: list[str]) -> tuple[float | None, list[str]]:
    """(top rate of the ramp: inf for the grid's, None for no ramp; the other arguments). Raises ConfigError."""
    top = None
    for argument in (a for a in arguments if a.startswith("ramp=")):
        value = argument.removeprefix("ramp=")
        try:
            top = {"true": float("inf"), "false": None}[value] if value in {"true", "false"} else float(value)
        except ValueError:
            top = -1.0
        if top is not None and not top > 0:
            raise ConfigError(f"{argument}: accepted: true (to the largest rate), false, or the rate that it rises to")
    return top, [a for a in arguments if not a.startswith("ramp=")]


def plan(top: float | None, overrides: list[str]) -> list[Cell]:
    """The cells, every setting checked before the first run starts. Raises ConfigError."""
    chosen = any(override.startswith("+sweeps=") for override in overrides)
    grid = {LR: {}, "seed": {}}  # key -> its overrides, in the order of the sweep
    groups: dict[tuple[str, ...], None] = {}
    with composing.conf(ROOT):
        for job in composing.expand([*([] if chosen else ["+sweeps=lr_frontier"]), *overrides], multirun=True):
            for override in job:
                if (key := override.split("=")[0].lstrip("+")) in grid:
                    grid[key][override] = None
            groups[tuple(o for o in job if o.split("=")[0].lstrip("+") not in grid)] = None
        first = next(iter(groups))
        values = {key: [load(composing.one([*first, one])) for one in grid[key]] for key in grid}
        rates = sorted({cfg.optim.lr for cfg in values[LR]})
        seeds = sorted({cfg.seed for cfg in values["seed"]}) or [load(composing.one([*first])).seed]
        settings = [load(composing.one([*group])) for group in groups]
    if len(rates) < 3:
        told = ", ".join(f"{rate:g}" for rate in rates) or "no list"
        raise ConfigError(f"optim.lr: {told}; a search needs three rates or more (optim.lr=1e-3,1e-2,1e-1)")
    if any(cfg.steps == 0 for cfg in settings):
        raise ConfigError("steps=0: nothing is trained; accepted: 1 or more")
    for cfg in settings:
        task.make(cfg)
    cells, ramps = [], set()
    for cfg in settings:
        cell = Cell(cfg, rates, seeds)
        if top is not None:
            for seed in seeds:
                one = rising(cell.at(rates[-1] if top == float("inf") else top, seed))
                if one.model_dump_json() not in ramps:  # cells that differ in their warm-up share it
                    ramps.add(one.model_dump_json())
                    cell.ramps.append(one)
        cells.append(cell)
    return cells


def rising(cfg: Config) -> Config:
    """The same run as a ramp: warm-up over all steps."""
    return cfg.model_copy(update={"optim": cfg.optim.model_copy(update={"warmup_steps": cfg.steps})})


def begin(numbers: Any) -> None:
    """In a process of the pool: models this small do best with one thread each, larger ones with a GPU each."""
    os.setpgrp()  # a terminal's Ctrl-C reaches the parent alone, which passes it on
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    gpu = gpu_for("auto", numbers.get(), torch.cuda.device_count())
    if gpu is not None:
        torch.cuda.set_device(gpu)


def search(cell: Cell) -> list[dict[str, Any]]:
    """The records of the runs that the search of one cell made or read, seed after seed, and of its ramps."""
    records = []

    def trial(cfg: Config) -> str:
        with isolated(cfg):
            record = train(cfg)
        if record["status"] != "finished":
            raise RuntimeError(f"{cfg.study}/{record['run_id']} is {record['status']}; launch again later")
        records.append(record)
        print(cli.report(cfg, record), flush=True)
        return record["verdict"]

    hint = None  # the seed before tells where to begin
    for seed in cell.seeds:
        tried = frontier.search(lambda place, s=seed: trial(cell.at(cell.rates[place], s)), len(cell.rates), hint)
        hint = max((place for place, verdict in tried.items() if verdict == "stable"), default=None)
    for cfg in cell.ramps:
        trial(cfg)
    return records


def report(made: Sequence[dict[str, Any]], cells: Sequence[Cell]) -> str:
    """The table, from the run folders; what the search cost beside the grid; and what the ramp cannot tell."""
    folder = Path(cells[0].settings.runs_dir) / cells[0].settings.study
    runs, steps, _ = results.load([folder / run["run_id"] for run in made], layers=False)
    ramps, ordinary = runs[frontier.ramped(runs)], pd.DataFrame(runs[~frontier.ramped(runs)])
    table = frontier.lr50(runs)
    by = list(table.columns[: table.columns.get_loc("lr50")])
    shown = pd.DataFrame({key.split(".")[-1]: table[key] for key in by})
    shown["LR50"] = [told(row) for _, row in table.iterrows()]
    shown["largest stable, by seed"], shown["flags"] = table.largest_stable, table["flags"]
    reused = {run["run_id"] for run in made if run.get("reused")}
    parts = [cost(ordinary, len(reused & set(ordinary.run_id)), cells)]
    if len(ramps):
        rest = [key for key in by if key != frontier.WARMUP]
        risen = ramp.estimates(runs, steps).sort_values("seed").assign(told=lambda t: t.apply(ramp_told, axis=1))
        found = {key: ", ".join(mine.told) for key, mine in risen.groupby(names(risen, rest))}
        shown["ramp, by seed"] = names(table, rest).map(found).fillna("")
        parts.append(f"ramps: {len(ramps)} runs, {sum(ramps.steps_done):,} steps. {ramp.CAVEAT}")
    return "\n".join([shown.to_string(index=False), "", *parts, f"runs: {folder}"])


def names(table: pd.DataFrame, keys: list[str]) -> pd.Series:
    """One text for each row, of the given settings."""
    return pd.Series(["\0".join(map(str, row)) for row in table[keys].itertuples(index=False)], table.index)


def told(row: pd.Series) -> str:
    """LR50 with its interval; a censored one as the bound that it is."""
    if row.lr50 == 0:
        return f"< {row.high:.2g}"
    return f"> {row.low:.2g}" if row.lr50 == float("inf") else f"{row.lr50:.2g} [{row.low:.2g}, {row.high:.2g}]"


def ramp_told(row: pd.Series) -> str:
    """The estimate, and after it in brackets why not to believe it."""
    if pd.isna(row.bad_step):
        return f"> {row.max_lr:.2g}"
    return f"{row.max_lr:.2g}{' (' + row.flag + ')' if row.flag else ''}"


def cost(runs: pd.DataFrame, reused: int, cells: Sequence[Cell]) -> str:
    """Training steps that the search took against those of the full grid at the same resolution."""
    early = pd.DataFrame(runs[runs.steps_done < runs[STEPS]])
    grid = sum(len(cell.rates) * len(cell.seeds) * cell.settings.steps for cell in cells)
    size = sum(len(cell.rates) * len(cell.seeds) for cell in cells)
    made, whole = sum(runs.steps_done), sum(runs[STEPS])
    return (
        f"search: {len(runs)} of the grid's {size} runs ({len(runs) / size:.0%}; {reused} read, not trained), "
        f"{made:,} of its {grid:,} training steps ({made / grid:.0%}); {len(early)} hopeless runs ended early, "
        f"after {sum(early.steps_done):,} of their {sum(early[STEPS]):,} steps "
        f"(without that: {whole:,} steps, {whole / grid:.0%})"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
