"""Two ranks under gloo: the numbers of one process, one record, a common end whatever ends one of them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, TINY, compose, tiny
from launching import TRAIN, differences, environment, kill, read_marks, rows, until_step
from pairs import REST, SIZE, write

from normlab import cli, distributed, store, task
from normlab.explain import ConfigError
from normlab.results import load
from normlab.store import read_record
from normlab.train import train

RUN = ["device=cpu", "steps=9", "eval.every=4", "probe.every=4", "log.every=3", "optim.clip=0.5"]


def ranks_of(starter, folder, overrides, *, base=TINY, size=2, **more):
    """Launches of the ranks, as torchrun's environment makes them, and the folders of what they say."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # of torchrun's agent
    launches = []
    for rank in range(size):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        place |= {"MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
        where = {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
        own = {name: values[rank] for name, values in more.items() if values[rank]}
        command = [*base, *overrides, f"runs_dir={folder / 'runs'}"]
        launches.append(starter.start(command, folder / str(rank), TORCHELASTIC_RUN_ID="test", **where, **own))
    launches[0].store = store  # which lives as long
    return launches


def the_run(folder: Path) -> Path:
    (path,) = (p.parent for p in (folder / "runs/scratch").glob("*/run.json"))
    return path


def measured(folder: Path) -> tuple[pd.DataFrame, pd.Series, pd.Series]:
    found = load(folder)
    columns = ["loss", "grad_norm", "update_norm", "lr", "tokens", "val_loss"]
    layers = found.layers.sort_values(["step", "stack", "layer", "site", "tensor", "stat"])
    return found.steps[columns], layers[layers.stat == "weight_grad_norm"].value, found.runs.iloc[0]


def sentences(folder: Path) -> list[str]:
    """In place of TINY."""
    where = [f"data.path={write(folder / 'pairs')}", f"data.cache={folder / 'cache'}"]
    return ["data=parallel", *SIZE, *REST, "eval.batches=3", "probe.batches=2", *where]


KINDS = {
    "lm": [],
    "three sequences": ["data.batch_size=3", "micro_batch=1"],
    "mlm": ["model.arch=encoder", "model.placement=post"],
    "a rank without sequences": ["precision=fp16", "data.batch_size=1"],
    "admin": ["model.placement=admin", "optim=sgd", "optim.momentum=0.9"],
}


@pytest.mark.parametrize("kind", [*KINDS, "translation"])
def test_two_ranks_have_the_numbers_of_one_process(starter, tmp_path, kind):
    """Relative 2e-5 in losses and 1e-4 in norms over nine updates (fp16: 2e-3); targets differ from rank to rank."""
    base, overrides = sentences(tmp_path) if kind == "translation" else TINY, [*RUN, *KINDS.get(kind, [])]
    cfg = compose(*base, *overrides, f"runs_dir={tmp_path / 'alone/runs'}")
    if kind in {"mlm", "translation"}:
        _, targets = task.make(cfg).batch(0, 0)
        parts = [(targets[list(distributed.Ranks(r, 2).rows(len(targets)))] >= 0).sum() for r in range(2)]
        assert parts[0] != parts[1]
    record = train(cfg)
    launches = ranks_of(starter, tmp_path, overrides, base=base)
    assert [launch.wait(120) for launch in launches] == [0, 0], (tmp_path / "0/stderr").read_text()
    one, two = measured(tmp_path / "alone/runs"), measured(tmp_path / "runs")
    close, closer = (2e-3, 2e-3) if "precision=fp16" in overrides else (1e-4, 2e-5)
    for column in one[0]:
        rel = closer if "loss" in column else close
        assert two[0][column].tolist() == pytest.approx(one[0][column].tolist(), rel=rel, nan_ok=True), column
    assert two[1].tolist() == pytest.approx(one[1].tolist(), rel=10 * close, abs=1e-5)
    assert two[0].val_loss[0] == one[0].val_loss[0]  # the batches are shared out whole
    assert (two[2].world_size, one[2].world_size) == (2, 1)
    assert two[2].run_id != record["run_id"]
    assert two[2].verdict == record["verdict"]
    assert (tmp_path / "1/stdout").read_text() == ""
    assert "val loss" in (tmp_path / "0/stdout").read_text()


def test_a_killed_run_goes_on_from_its_checkpoint(starter, tmp_path):
    overrides = ["device=cpu", "steps=30", "checkpoint.every=8", "eval.every=7", "model.dropout=0.1", "log.every=3"]
    assert [r.wait(60) for r in ranks_of(starter, tmp_path / "straight", overrides)] == [0, 0]
    marks = tmp_path / "marks"
    launches = ranks_of(starter, tmp_path, overrides, MARKS=[str(marks), None], HOLD=["20:60", None])
    until_step(marks, 20, launches[0])
    kill(launches[0])
    assert launches[1].wait(30) == 1
    assert "another rank was lost" in (tmp_path / "1/stderr").read_text()
    again = ranks_of(starter, tmp_path, overrides, MARKS=[str(marks), None])
    assert [r.wait(60) for r in again] == [0, 0], (tmp_path / "0/stderr").read_text()
    assert [m.step for m in read_marks(marks) if m.kind == "step"] == [*range(21), *range(16, 30)]
    assert differences(the_run(tmp_path), the_run(tmp_path / "straight")) == []
    assert (tmp_path / "1/stderr").read_text().count("goes on") == 0


@pytest.mark.parametrize("hit", [0, 1])
def test_a_signal_to_one_rank_ends_both_after_the_same_step(starter, tmp_path, hit):
    overrides = ["device=cpu", "steps=40", "log.every=7"]
    marks = tmp_path / "marks"
    launches = ranks_of(starter, tmp_path, overrides, MARKS=[str(marks), None], HOLD=["20:1", None])
    until_step(marks, 20, launches[0])
    os.kill(launches[hit].pid, signal.SIGTERM)
    assert [launch.wait(30) for launch in launches] == [143, 143]
    folder = the_run(tmp_path)
    assert read_record(folder)["status"] == "interrupted"
    assert rows(folder) == list(range(21))
    assert [r.wait(60) for r in ranks_of(starter, tmp_path, overrides, MARKS=[str(marks), None])] == [0, 0]
    assert [m.step for m in read_marks(marks) if m.kind == "step"] == list(range(40))


def test_a_divergence_ends_both(starter, tmp_path):
    overrides = [*RUN, "optim=sgd", "optim.lr=1e6", "model.placement=none", "steps=40", "optim.clip=null"]
    assert [r.wait(60) for r in ranks_of(starter, tmp_path, overrides)] == [0, 0]
    record = read_record(the_run(tmp_path))
    assert (record["status"], record["verdict"], record["stopped"]) == ("finished", "diverged", "not finite")
    again = ranks_of(starter, tmp_path, overrides)
    assert [r.wait(60) for r in again] == [0, 0]
    assert "finished before" in (tmp_path / "0/stdout").read_text()


@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_on_one_rank_ends_both(starter, tmp_path, bad):
    """Whichever it is, the record names the rank that broke and why."""
    launches = ranks_of(
        starter, tmp_path, ["device=cpu", "steps=4000"], BREAK=["7" if bad == r else None for r in (0, 1)]
    )
    start = time.monotonic()
    assert [launch.wait(60) for launch in launches] == [1, 1]
    assert time.monotonic() - start < 40
    record = read_record(the_run(tmp_path))
    assert record["status"] == "failed"
    planted = "ValueError: planted in step 7"
    assert record["reason"] == (planted if bad == 0 else f"RuntimeError: rank 1 ended: {planted}")
    assert f"rank {bad} ended: {planted}" in (tmp_path / str(1 - bad) / "stderr").read_text()


def test_torchrun_itself(tmp_path):
    """The launcher that users have, and one line of what is wrong from it."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(TRAIN)]
    how = {"env": environment() | {"OMP_NUM_THREADS": "1"}, "capture_output": True, "text": True}
    done = subprocess.run([*torchrun, *TINY, *RUN, f"runs_dir={tmp_path / 'runs'}"], check=False, timeout=200, **how)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("val loss") == 1
    record = json.loads((the_run(tmp_path) / "run.json").read_text())
    assert (record["status"], record["world_size"]) == ("finished", 2)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["model.norm=batchnorm", "device=cpu"],
            r"model\.norm=batchnorm takes .*accepted: another norm, or one process",
        ),
        (["-m", "seed=0,1", "device=cpu"], r"torchrun with 2 ranks makes one run: leave out -m"),
        (
            ["device=cuda"],
            r"device='cuda': this machine has no cuda device|torchrun with 2 ranks: this machine has 1 CUDA",
        ),
    ],
)
def test_what_is_refused(monkeypatch, arguments, told):
    if torch.cuda.device_count() > 1 and "device=cuda" in arguments:
        pytest.skip("enough devices")
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=told) as caught:
        cli.check(ROOT, arguments)
    assert "\n" not in str(caught.value)


def test_without_torchrun_there_is_one_rank(monkeypatch):
    """Whatever a cluster calls its own."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert distributed.world() == (0, 1)


def test_rows_are_a_partition():
    for count, size in ((8, 2), (7, 3), (2, 4)):
        parts = [distributed.Ranks(rank, size).rows(count) for rank in range(size)]
        assert [i for part in parts for i in part] == list(range(count))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_ranks_are_part_of_the_id_as_threads_are(tmp_path):
    cfg = tiny(tmp_path)
    ids = {store.run_id(cfg, "a", "cpu", size) for size in (1, 2, 3)}
    assert len(ids) == 3
    assert store.run_id(cfg, "a", "cpu") == store.run_id(cfg, "a", "cpu", 1)
