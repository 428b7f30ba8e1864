"""Runs that train in one pack are the runs that train alone: ids, folders, numbers within a tolerance, verdicts.

Tolerance, float32 on a CPU: losses, gradient norms and every tensor's statistics over 12 steps to 1e-4, relative:
batched products and sums round otherwise, and training makes rounding grow. Where a gradient is zero but for rounding
(biases of k, which no softmax sees), Adam makes whole updates of it: those tensors are left out, and norms of whole
updates agree to 1e-3.
"""

import json
import math
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pairs
import pandas as pd
import pytest
import torch
from conftest import TINY, compose, tiny
from launching import start

from normlab import pack, store, train
from normlab.config import Config
from normlab.init import calibrate, initialise
from normlab.journal import Journal
from normlab.model import build
from normlab.results import load
from normlab.stacked import SCORES, Stacked, lacking
from normlab.task import make

RUN = ["steps=12", "log.every=5", "eval.every=6", "checkpoint.every=5"]
ARMS = [["seed=0"], ["seed=1", "optim.lr=2e-3"], ["seed=2", "optim.warmup_steps=4"], ["seed=3", "model.init=gpt2"]]
NORMS = ["layernorm_nobias", "rmsnorm_nogain", "rmsnorm_offset", "scalenorm", "none"]
PLACEMENTS = ["deepnorm", "hybrid_norm", "rezero", "lns", "parallel", "keel", "b2t"]
KINDS = {
    "decoder": [],
    "encoder": ["model.arch=encoder", "model.position=rotary", "micro_batch=3", "model.norm=rmsnorm", "optim=radam"],
    "encoder_decoder": ["model.arch=encoder_decoder", "model.placement=resi_dual", "optim.clip=0.1"],
    "post": ["model.placement=post", "label_smoothing=0.1", "optim=sgd", "optim.momentum=0.9", "optim.lr=0.1"],
    "scales": ["model.placement=admin", "model.qk_norm=true", "probe.sharpness=true", "model.embed_norm=true"],
    "numbers": ["model.tie=false", "model.norm=dyt", "probe.every=7"],
}


def folder_of(runs: Path, record: train.Record) -> Path:
    return runs / "scratch" / record["run_id"]


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def statistics(folder: Path) -> pd.DataFrame:
    """Of every step and weight tensor, one column for each statistic."""
    wanted = "tensor not in ('k_bias', 'k_norm_bias') and stat in ('weight_grad_norm', 'weight_norm', 'update_norm')"
    table = load(folder).layers.query(wanted)
    return table.set_index(["step", "stack", "layer", "site", "tensor", "stat"])[["value"]].sort_index()


def assert_alike(packed: Path, alone: Path) -> None:
    """Two folders of one run, but for rounding and timings."""
    ours, theirs = rows(packed), rows(alone)
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name in mine.keys() - {"seconds", "critical_sharpness"}:
            rel = 1e-3 if name == "update_norm" else 1e-4
            assert mine[name] == pytest.approx(other[name], rel=rel, nan_ok=True), (name, mine["step"])
    mine, other = statistics(packed), statistics(alone)
    assert len(mine) > 0
    pd.testing.assert_frame_equal(mine, other, rtol=1e-4, atol=1e-6)
    records = [store.read_record(path) or {} for path in (packed, alone)]
    for name in ("run_id", "status", "verdict", "stopped", "steps_done", "first_bad_step", "first_bad_layer"):
        assert records[0].get(name) == records[1].get(name), name
    assert sorted(p.name for p in packed.iterdir()) == sorted(p.name for p in alone.iterdir())


def together(cfgs: Sequence[Config]) -> list[train.Record]:
    """The records of a pack in which nothing fails."""
    ends = pack.together(cfgs)
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return ends


def cfgs(folder: Path, *overrides: str, arms: Sequence[list[str]] = ARMS, kind: str = "") -> list[Config]:
    if kind == "numbers":
        base = ["data=sine", *(setting for setting in TINY if not setting.startswith("data"))]
        return [compose(*base, f"runs_dir={folder}", *RUN, *overrides, *arm) for arm in arms]
    return [tiny(folder, *RUN, *overrides, *arm) for arm in arms]


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_run_is_the_run_alone(tmp_path, kind):
    alone = [train.train(cfg) for cfg in cfgs(tmp_path / "alone", *KINDS[kind], kind=kind)]
    packed = together(cfgs(tmp_path / "packed", *KINDS[kind], kind=kind))
    assert [record["run_id"] for record in packed] == [record["run_id"] for record in alone]
    for record in alone:
        assert_alike(folder_of(tmp_path / "packed", record), folder_of(tmp_path / "alone", record))
    assert set(load(tmp_path / "alone").layers.stat) == set(load(tmp_path / "packed").layers.stat)


def test_translations_of_one_seed_are_those_of_each_alone(tmp_path):
    pairs.write(tmp_path / "pairs")
    arms = (["optim.lr=1e-3"], ["optim.lr=3e-3"], ["optim.warmup_steps=5"])

    def of(name: str) -> list[Config]:
        return [pairs.config(tmp_path / "pairs", *RUN, f"runs_dir={tmp_path / name}", *arm) for arm in arms]

    assert pack.shape(of("packed")[0]) == pack.shape(of("packed")[2])
    assert pack.shape(of("packed")[0]) != pack.shape(of("packed")[0].model_copy(update={"seed": 1}))
    alone, packed = list(map(train.train, of("alone"))), together(of("packed"))
    for record, ours in zip(alone, packed, strict=True):
        assert_alike(folder_of(tmp_path / "packed", record), folder_of(tmp_path / "alone", record))
        assert {"test_bleu", "bleu"} <= ours.keys()


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize(
    "overrides",
    [
        *(["model.norm=" + norm] for norm in NORMS),
        *(["model.placement=" + name] for name in PLACEMENTS),
        ["model.placement=layerscale", "model.norm=scalenorm", "model.qk_norm=joint", "model.kv_heads=1"],
        ["model.attn_softcap=20", "model.activation=swiglu", "model.logit_softcap=30"],
        ["model.arch=encoder", "model.head=mlm", "model.position=sinusoidal", "model.heads=1"],
    ],
)
def test_gradients_of_stacked_models_are_those_of_each(tmp_path, monkeypatch, overrides, long):
    if long:  # attention in several pieces
        monkeypatch.setattr("normlab.stacked.SCORES", 2000)
        assert SCORES > 2000
    cfg = tiny(tmp_path, *overrides)
    learned = make(cfg)
    models, batches = [build(cfg.model, learned.vocab) for _ in range(3)], [learned.batch(s, 0) for s in range(3)]
    assert lacking(models[0]) is None
    for seed, model in enumerate(models):
        initialise(model, cfg.model, seed)
        calibrate(model, batches[seed][0])
    named = list(zip(*(model.parameters() for model in models), strict=True))
    stacks = {each[0]: torch.stack([p.detach() for p in each]).requires_grad_() for each in named}
    objective, loss = Stacked(models, stacks).losses(batches)
    objective.sum().backward()
    for seed, (model, batch) in enumerate(zip(models, batches, strict=True)):
        wanted = model.objective(*batch)
        wanted[0].backward()
        torch.testing.assert_close((objective[seed], loss[seed]), wanted)
        for each in named:
            ours, theirs = stacks[each[0]].grad, each[seed].grad
            if theirs is not None:
                assert ours is not None
                torch.testing.assert_close(ours[seed], theirs, atol=1e-6, rtol=1e-4)


def test_a_member_that_diverges_touches_no_other(tmp_path):
    """The others' numbers are the same to the bit as with a tame run in its place, and it ends as it does alone."""
    wild, tame = ["seed=9", "optim.lr=1e30"], ["seed=9", "optim.lr=1e-4"]
    records = together(cfgs(tmp_path / "packed", arms=[ARMS[0], wild, ARMS[1], ARMS[2]]))
    together(cfgs(tmp_path / "calm", arms=[ARMS[0], tame, ARMS[1], ARMS[2]]))
    alone = train.train(*cfgs(tmp_path / "alone", arms=[wild]))
    assert records[1]["stopped"] == "not finite"
    assert records[1]["verdict"] == "diverged"
    assert math.isnan(records[1]["final_val_loss"])
    assert_alike(folder_of(tmp_path / "packed", alone), folder_of(tmp_path / "alone", alone))
    for record in (records[0], *records[2:]):
        assert record["steps_done"] == 12
        beside, calm = (rows(folder_of(tmp_path / name, record)) for name in ("packed", "calm"))
        assert [row | {"seconds": 0} for row in beside[:5]] == [row | {"seconds": 0} for row in calm[:5]]


def test_a_hopeless_member_ends_early_and_the_last_one_goes_on_alone(tmp_path):
    rule = ["stop.hopeless=true", "verdict.patience=5", "model.placement=post", "log.every=1"]
    arms = [["seed=0"], ["seed=1", "optim=sgd", "optim.lr=3"]]
    settings = ["optim=sgd", "optim.lr=0.01", *rule]
    alone = [train.train(cfg) for cfg in cfgs(tmp_path / "alone", *settings, arms=arms)]
    packed = together(cfgs(tmp_path / "packed", *settings, arms=arms))
    assert [record["stopped"] for record in packed] == [None, "hopeless"]
    assert packed[1]["steps_done"] == alone[1]["steps_done"] < packed[0]["steps_done"] == 12
    assert_alike(folder_of(tmp_path / "packed", alone[0]), folder_of(tmp_path / "alone", alone[0]))


def test_a_member_that_fails_is_recorded_and_leaves(tmp_path, monkeypatch):
    add = Journal.add

    def broken(journal, *arguments):
        if journal.cfg.seed == 1 and arguments[0]["step"] == 8:
            shutil.rmtree(journal.folder.path)
        if journal.cfg.seed == 2 and arguments[0]["step"] == 5:
            raise RuntimeError("planted")
        add(journal, *arguments)

    alone = [train.train(cfg) for cfg in cfgs(tmp_path / "alone")]
    monkeypatch.setattr(Journal, "add", broken)
    ends = pack.together(cfgs(tmp_path / "packed"))
    assert isinstance(ends[1], FileNotFoundError)
    assert str(ends[2]) == "planted"
    record = store.read_record(folder_of(tmp_path / "packed", alone[2]))
    assert record["status"] == "failed"
    for number in (0, 3):
        assert ends[number]["status"] == "finished"
        assert_alike(folder_of(tmp_path / "packed", alone[number]), folder_of(tmp_path / "alone", alone[number]))
    monkeypatch.undo()
    assert train.train(cfgs(tmp_path / "packed")[2])["status"] == "finished"
    assert_alike(folder_of(tmp_path / "packed", alone[2]), folder_of(tmp_path / "alone", alone[2]))


@pytest.mark.parametrize("again", ["alone", "in a pack"])
def test_one_signal_stops_all_members_which_go_on_later(tmp_path, monkeypatch, again):
    alone = [train.train(cfg) for cfg in cfgs(tmp_path / "alone")]
    add = Journal.add

    def interrupted(journal, *arguments):
        add(journal, *arguments)
        if journal.cfg.seed == 2 and arguments[0]["step"] == 8:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Journal, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack.together(cfgs(tmp_path / "packed"))
    monkeypatch.undo()
    folders = [folder_of(tmp_path / "packed", record) for record in alone]
    assert [(store.read_record(folder) or {})["status"] for folder in folders] == ["interrupted"] * 4
    steps = [torch.load(folder / "checkpoint.pt", weights_only=True)["step"] for folder in folders]
    assert steps == list(map(len, map(rows, folders)))
    assert set(steps) <= {9, 10}
    if again == "alone":
        records = [train.train(cfg) for cfg in cfgs(tmp_path / "packed")]
    else:
        records = together(cfgs(tmp_path / "packed"))
    assert [record["attempts"][-1]["from_step"] for record in records] == steps
    for record in alone:
        assert_alike(folder_of(tmp_path / "packed", record), folder_of(tmp_path / "alone", record))


def test_a_member_writes_no_more_into_its_checkpoint_than_a_run_alone(tmp_path):
    record = train.train(cfgs(tmp_path / "alone")[0])
    together(cfgs(tmp_path / "packed"))
    sizes = [(folder_of(tmp_path / name, record) / "checkpoint.pt").stat().st_size for name in ("packed", "alone")]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)


def test_what_may_share_a_pack(tmp_path):
    shape = pack.shape(tiny(tmp_path))
    for same in ("seed=3", "optim.lr=0.1", "optim.warmup_steps=2", "optim.schedule=cosine", "model.init=small",
                 "study=other", "log.every=3"):  # fmt: skip
        assert pack.shape(tiny(tmp_path, same)) == shape, same
    for other in ("model.placement=post", "steps=7", "model.init=completep", "optim=sgd", "data.concentration=2.0"):
        assert pack.shape(tiny(tmp_path, other)) != shape, other
    assert tiny(tmp_path, "pack=4").identity() == tiny(tmp_path).identity()


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["precision=fp16"], "precision=fp16; in a pack: fp32"),
        (["model.dropout=0.1"], "model.dropout=0.1; in a pack: 0"),
        (["compile=true"], "compile=True; in a pack: False"),
        (["model.norm=batchnorm"], "BatchNorm"),
        (["model.ffn=moe"], "MoE"),
        (["model.placement=normformer"], "Attention"),
        (["model.position=relative"], "RelativeBias"),
        (["model.arch=encoder", "model.segments=2"], "segment"),
        (["model.width=128", "device=cpu"], "model.width=128; on a CPU packs pay up to 64"),
    ],
)
def test_what_trains_alone(tmp_path, overrides, reason):
    assert reason in (pack.alone(tiny(tmp_path, *overrides)) or "")
    assert pack.alone(tiny(tmp_path)) is None


@pytest.mark.parametrize(("width", "most"), [(16, 8), (32, 8), (64, 4)])
def test_no_more_train_at_once_than_pay(width, most):
    assert pack.most(compose("pack=8", f"model.width={width}", "device=cpu")) == most


@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_a_multirun_packs_what_shares_its_shape(tmp_path, launcher):
    """Pre and post are in packs of their own; each run is made once, and a second launch finds them made."""
    sweep = ["model.placement=pre,post", "seed=0,1", "optim.lr=1e-3,1e30", f"runs_dir={tmp_path / 'runs'}"]
    command = ["-m", *TINY, *sweep, "pack=3", f"hydra/launcher={launcher}"]
    command += ["log=offline"] * (launcher == "basic")
    assert start(command, tmp_path / "first").wait(120) == 0, (tmp_path / "first" / "stderr").read_text()
    told = (tmp_path / "first" / "stdout").read_text()
    assert "8 jobs:" in told
    assert "finished, diverged" in told
    assert told.count("in the pack of") >= 4
    assert "finished before" not in told
    assert "left alone" not in told
    runs = load(tmp_path / "runs").runs
    assert len(runs) == 8
    assert len(list(tmp_path.glob("runs/scratch/*/wandb/offline-run-*"))) == 8 * (launcher == "basic")
    assert start(command, tmp_path / "second").wait(120) == 0
    assert (tmp_path / "second" / "stdout").read_text().count("finished before") == 8


def test_a_run_that_no_pack_takes_says_so_and_trains(starter, tmp_path):
    command = ["-m", *TINY, "seed=0,1", "model.dropout=0.1", "pack=2", f"runs_dir={tmp_path / 'runs'}"]
    assert starter.start(command, tmp_path).wait(120) == 0
    assert (tmp_path / "stderr").read_text().count("trains alone, not in a pack: model.dropout=0.1; in a pack: 0") == 2
    assert set(load(tmp_path / "runs").runs.status) == {"finished"}
