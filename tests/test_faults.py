"""Planted faults in real runs are found, named and placed; early stopping never changes what a run is called."""

import math
import os
import signal
import threading
import time

import pytest
import torch
from conftest import compose, tiny

from normlab import store
from normlab.fit import Fit
from normlab.relabel import relabel
from normlab.results import load
from normlab.signals import unbroken
from normlab.train import train

BASE = ["model.depth=4", "log.every=3"]


def plant(monkeypatch, at: int, act) -> None:
    """Run act(fit) just before the forward pass of step `at`."""
    backward, calls = Fit.backward, []

    def planted(fit, batch):
        if len(calls) == at:
            with torch.no_grad():
                act(fit)
        calls.append(1)
        return backward(fit, batch)

    monkeypatch.setattr(Fit, "backward", planted)


@pytest.mark.parametrize("layer", [0, 2, 3])
@pytest.mark.parametrize("tensor", ["attn.w_qkv", "ffn.w_out", "ffn_residual.norm"])
def test_a_nan_in_the_weights_of_a_layer_names_that_layer(tmp_path, monkeypatch, layer, tensor):
    """Every gradient is NaN, every weight after the update too: the weight norms before it tell."""

    def act(fit):
        fit.model.decoder.blocks[layer].get_submodule(tensor).weight.view(-1)[0] = math.nan

    plant(monkeypatch, 4, act)
    record = train(tiny(tmp_path, *BASE, "steps=12"))
    assert (record["verdict"], record["first_bad_step"], record["first_bad_layer"]) == ("diverged", 4, layer)
    assert record["steps_done"] == 5
    assert "weight" in record["first_bad_layer_why"]
    last = record["last_finite"]
    assert last["step"] == 3
    assert {"weight_grad_norm", "weight_norm", "update_norm"} <= set(last)
    assert all(len(values) == 4 and all(map(math.isfinite, values)) for k, values in last.items() if k != "step")
    layers = load(tmp_path).layers
    counted = layers[(layers.stat == "nonfinite") & (layers.value > 0)]
    assert set(counted.step) == {4}


def test_an_exploding_layer_is_named_when_its_gradient_left_its_range_first(tmp_path, monkeypatch):
    """Layer 1's W_out grows a thousandfold for two steps before layer 3's overflows the loss."""

    def grow(fit):
        fit.model.decoder.blocks[1].ffn.w_in.weight.grad = None

    plant(monkeypatch, 5, grow)
    measure = Fit.update
    steps = []

    def update(fit, lr, norms):
        steps.append(1)
        index = next(i for i, t in enumerate(fit.meter.ids) if t.layer == 1 and t.tensor == "in")
        if len(steps) in (7, 8):
            norms[index] *= 1e4
        if len(steps) == 9:
            norms.fill_(math.inf)
        return measure(fit, lr, norms)

    monkeypatch.setattr(Fit, "update", update)
    record = train(tiny(tmp_path, *BASE, "steps=12"))
    assert (record["verdict"], record["first_bad_step"], record["first_bad_layer"]) == ("diverged", 8, 1)


def test_a_rate_that_is_too_high_is_diverged_at_the_step_that_broke(tmp_path):
    overrides = [*BASE, "optim=sgd", "optim.lr=1e5", "model.placement=none", "steps=30"]
    record = train(tiny(tmp_path, *overrides))
    steps = load(tmp_path).steps
    assert record["verdict"] == "diverged"
    bad = record["first_bad_step"]
    assert not math.isfinite(steps.loss[bad]) or not math.isfinite(steps.grad_norm[bad])
    assert steps.loss[:bad].map(math.isfinite).all()
    assert steps.grad_norm[:bad].map(math.isfinite).all()


def test_a_rate_that_only_raises_the_loss_is_diverged_too(tmp_path):
    record = train(tiny(tmp_path, *BASE, "optim.lr=1.0", "steps=40", "model.placement=pre"))
    assert record["final_val_loss"] > record["init_val_loss"]
    assert record["verdict"] == "diverged"


@pytest.mark.parametrize("how", ["tiny rate", "no gradient"])
def test_frozen_weights_are_stalled(tmp_path, monkeypatch, how):
    if how == "no gradient":
        monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_a, **_k: None)
    record = train(tiny(tmp_path, *BASE, "optim.lr=1e-30" if how == "tiny rate" else "optim.lr=1e-3", "steps=20"))
    assert record["final_val_loss"] == record["init_val_loss"]
    assert record["verdict"] == "stalled"


LABEL = ["verdict", "first_bad_step", "first_bad_lr", "first_bad_layer", "last_finite"]


def test_stopping_at_a_non_finite_step_does_not_change_the_verdict(tmp_path):
    overrides = [*BASE, "optim=sgd", "optim.lr=1e6", "model.placement=none", "steps=20"]
    stopped = train(tiny(tmp_path, *overrides, "study=stopped"))
    through = train(tiny(tmp_path, *overrides, "stop.nonfinite=false", "study=through"))
    assert stopped["stopped"] == "not finite"
    assert (through["stopped"], through["steps_done"]) == (None, 20)
    assert stopped["steps_done"] < 20
    assert [stopped[k] for k in LABEL] == [through[k] for k in LABEL]
    assert len(load(tmp_path / "through").steps) == 20


def test_stopping_a_hopeless_run_does_not_change_the_verdict(tmp_path):
    overrides = [*BASE, "optim.lr=1.0", "steps=40", "verdict.patience=8"]
    stopped = train(tiny(tmp_path, *overrides, "stop.hopeless=true", "study=stopped"))
    through = train(tiny(tmp_path, *overrides, "study=through"))
    assert stopped["stopped"] == "hopeless"
    assert stopped["steps_done"] < through["steps_done"] == 40
    assert [stopped[k] for k in LABEL] == [through[k] for k in LABEL]
    assert stopped["verdict"] == "diverged"


def test_the_rules_are_stored_and_are_no_part_of_the_identity(tmp_path):
    record = train(tiny(tmp_path, "spikes.mad.kappa=5"))
    assert record["detector"]["spikes"]["mad"]["kappa"] == 5
    assert record["detector"]["version"] >= 2
    assert record["detector"]["verdict"]["stalled_below"] == 0.1

    def identity(*overrides):
        return store.run_id(compose(*overrides), "a", "cpu")

    same = ["spikes.mad.kappa=5", "spikes.judge=olmo", "verdict.rise=0.5", "verdict.stalled_below=0.2"]
    assert {identity(o) for o in same} == {identity()}
    assert identity("stop.hopeless=true") != identity()


def test_spikes_reach_wandb_as_they_happen(tmp_path, monkeypatch):
    """A planted jump of the output head: a z series per detector, a mark on the loss, a table at the end."""
    import json
    import subprocess
    import sys
    from pathlib import Path

    plant(monkeypatch, 100, lambda fit: fit.model.head.out.weight.mul_(30))
    record = train(tiny(tmp_path, "steps=130", "log=offline", "optim.lr=1e-3"))
    assert [s["start"] for s in record["spikes"]] == [100]
    assert record["spikes"][0]["lead"] == 0
    (log,) = Path(tmp_path).rglob("*.wandb")
    leet = Path(sys.executable).with_name("wandb")
    told = subprocess.run([leet, "leet", "inspect", "--json", log], capture_output=True, text=True, check=True).stdout
    assert "train/loss_spike" in told
    assert "spikes/loss_mad" in told
    assert "spikes/events" in json.dumps(told)


def test_other_rules_for_a_finished_run_reach_its_record(tmp_path):
    first = train(tiny(tmp_path, "optim.lr=1e-2", "steps=60"))
    again = train(tiny(tmp_path, "optim.lr=1e-2", "steps=60", "verdict.stalled_below=1.0"))
    assert again["reused"]
    assert (first["verdict"], again["verdict"]) == ("stable", "stalled")
    on_disk = store.read_record(tmp_path / "scratch" / first["run_id"])
    assert (on_disk["verdict"], on_disk["detector"]["verdict"]["stalled_below"]) == ("stalled", 1.0)
    assert on_disk["final_val_loss"] == first["final_val_loss"]


def test_rules_that_stop_a_run_are_part_of_its_identity(tmp_path):
    overrides = ["stop.hopeless=true", "optim.lr=0.3", "log.every=1", "steps=40", "model.placement=post"]
    strict = train(tiny(tmp_path, *overrides, "verdict.patience=1", "verdict.rise=0.0"))
    patient = train(tiny(tmp_path, *overrides, "verdict.patience=39", "verdict.rise=3.0"))
    assert strict["run_id"] != patient["run_id"]
    assert strict["steps_done"] < patient["steps_done"]
    runs, steps, _ = load(tmp_path)
    mine = runs[runs.run_id == strict["run_id"]]
    told = relabel(mine, steps, {"verdict": {"patience": 39, "rise": 3.0}})
    assert told.fields[0] is None
    assert "stopped early" in told.note[0]


def test_a_run_stopped_as_hopeless_ends_with_a_whole_profile(tmp_path):
    record = train(tiny(tmp_path, *BASE, "optim.lr=1.0", "steps=40", "verdict.patience=8", "stop.hopeless=true"))
    layers = load(tmp_path).layers
    last = layers[layers.step == record["steps_done"]]
    assert {"weight_norm", "stream_rms", "expected_weight_grad_norm"} <= set(last.stat)
    keys = ["step", "stack", "layer", "site", "tensor", "stat"]
    assert not layers.duplicated(keys).any()


def test_the_last_profile_has_weight_norms_and_the_seconds_add_up(tmp_path):
    record = train(tiny(tmp_path, "steps=9", "probe.every=3", "probe.sharpness=true", "eval.every=2"))
    _, steps, layers = load(tmp_path)
    assert sorted(layers[layers.stat == "weight_norm"].step.unique()) == list(range(10))
    assert steps.seconds.sum() == pytest.approx(record["seconds"], rel=1e-6)


def test_an_interrupted_run_keeps_the_steps_that_were_made(tmp_path, monkeypatch):
    def act(_fit):
        raise KeyboardInterrupt

    plant(monkeypatch, 15, act)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(tmp_path, "steps=30", "log.every=10"))
    runs, steps, layers = load(tmp_path)
    assert runs.status.tolist() == ["interrupted"]
    assert steps.step.tolist() == list(range(15))
    assert sorted(layers[layers.stat == "update_norm"].step.unique()) == list(range(15))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_what_belongs_together_is_written(number):
    """With another thread there, as W&B's and torch's are: a signal mask would hold this one back only."""
    idle = threading.Event()
    thread = threading.Thread(target=idle.wait)
    thread.start()
    before, written = signal.signal(number, signal.default_int_handler), []
    try:
        with pytest.raises(KeyboardInterrupt), unbroken():
            os.kill(os.getpid(), number)
            time.sleep(0.05)
            written.append(1)
        assert written == [1]
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
        idle.set()
        thread.join()
