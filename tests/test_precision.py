"""fp16 under a dynamic loss scale: the steps of torch.amp.GradScaler, what is logged of them, what is a divergence."""

import json
import math
from functools import partial

import pytest
import torch
from conftest import tiny
from test_resume import contents, interrupt, stop_at

from normlab import fit, optim, relabel, task, verdict
from normlab.config import Config
from normlab.device import pick_device
from normlab.fit import Fit
from normlab.init import initialise
from normlab.model import build
from normlab.results import load
from normlab.train import train

HALF = ["precision=fp16", "steps=30", "probe.batches=1"]
RESTLESS = {"init_scale": 2.0**30, "growth_interval": 3}  # overflows at once, and again and again


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit.torch.amp, "GradScaler", partial(torch.amp.GradScaler, **RESTLESS))


def plain_losses(cfg: Config) -> tuple[list[float], list[float]]:
    """Losses and loss scales of a bare loop: weights where torch has them, no fused optimizer, a skip by torch."""
    learned, device = task.make(cfg), pick_device(cfg.device)
    model = build(cfg.model, learned.vocab)
    initialise(model, cfg.model, cfg.seed)
    model.to(device)
    optimizer = optim.make(model, cfg.optim, cfg.model)
    optimizer._step_supports_amp_scaling = False
    scaler = torch.amp.GradScaler(device.type)
    losses, scales = [], []
    for step in range(cfg.steps):
        inputs, targets = (t.to(device) for t in learned.batch(cfg.seed, step))
        with torch.autocast(device.type, torch.float16):
            objective, loss = model.objective(inputs, targets)
        scales.append(scaler.get_scale())
        losses.append(loss.item())
        scaler.scale(objective).backward()
        scaler.unscale_(optimizer)
        if cfg.optim.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.clip)
        for group in optimizer.param_groups:
            group["lr"] = optim.learning_rate(cfg.optim, step, cfg.steps) * group["lr_scale"]
            group["fused"] = False
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses, scales


@pytest.mark.parametrize("settings", [["optim.clip=0.5"], ["optim=radam"], ["optim=sgd"], ["optim=adam", "seed=1"]])
@pytest.mark.usefixtures("restless")
def test_the_steps_are_those_of_torch(tmp_path, settings):
    cfg = tiny(tmp_path, *HALF, "optim.warmup_steps=3", *settings)
    record = train(cfg)
    _, steps, layers = load(tmp_path)
    losses, scales = plain_losses(cfg)
    assert steps.loss.tolist() == pytest.approx(losses, rel=1e-4)
    assert steps.loss_scale.tolist() == scales
    skipped = steps.skipped == 1
    assert record["skipped_steps"] == skipped.sum() > 7
    assert (~skipped[20:]).sum() > 5
    assert skipped[20:].any()
    assert (steps.grad_norm.isin([math.inf]) | steps.grad_norm.isna()).equals(skipped)
    assert (steps.update_norm == 0).equals(skipped)
    assert set(layers[layers.stat == "nonfinite"].step) == set(steps.step[skipped])
    assert record["first_bad_step"] is None
    assert record["verdict"] != "diverged"


def test_norms_are_those_of_the_loss_without_its_scale(tmp_path):
    """Of a step and of a profile, whose small gradients would vanish in float16."""
    deep = ["model.placement=post", "model.depth=6", "steps=2", "micro_batch=3"]
    full, half = (load_of(tmp_path / name, f"precision={name}", *deep) for name in ("fp32", "fp16"))
    assert "loss_scale" not in full.steps
    assert half.steps.loss_scale.tolist() == [2.0**16] * 2
    assert half.steps.grad_norm.tolist() == pytest.approx(full.steps.grad_norm.tolist(), rel=0.02)
    keys = ["step", "stack", "layer", "site", "tensor", "stat"]
    for stat in ("weight_grad_norm", "expected_weight_grad_norm", "mean_weight_grad_norm", "stream_grad_norm"):
        one, two = (data.layers[(data.layers.stat == stat) & (data.layers.step == 0)] for data in (full, half))
        assert one[keys].reset_index(drop=True).equals(two[keys].reset_index(drop=True))
        zero = one.tensor == "k_bias"  # whose true gradient is 0: rounding is all there is
        assert two.value[~zero.to_numpy()].tolist() == pytest.approx(one.value[~zero].tolist(), rel=0.05), stat


def load_of(folder, *overrides):
    train(tiny(folder, *overrides))
    return load(folder)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_precisions_skip_nothing(tmp_path, precision):
    record = train(tiny(tmp_path, f"precision={precision}"))
    assert record["skipped_steps"] == 0
    rows = (tmp_path / "scratch" / record["run_id"] / "metrics.jsonl").read_text()
    assert "loss_scale" not in rows
    assert "skipped" not in rows


@pytest.mark.parametrize("optimizer", ["adamw", "radam", "sgd"])
@pytest.mark.usefixtures("restless")
def test_a_resumed_run_goes_on_at_its_scale(tmp_path, monkeypatch, optimizer):
    run = [*HALF, f"optim={optimizer}", "checkpoint.every=5", "log.every=7", "micro_batch=3"]
    straight = train(tiny(tmp_path / "straight", *run))
    stop_at(monkeypatch, 22, interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(tmp_path / "stopped", *run))
    resumed = train(tiny(tmp_path / "stopped", *run))
    assert [a["from_step"] for a in resumed["attempts"]] == [0, 23]
    assert resumed["skipped_steps"] > 7
    paths = [tmp_path / name / "scratch" / straight["run_id"] for name in ("straight", "stopped")]
    assert contents(paths[0]) == contents(paths[1])


def test_a_gradient_that_no_scale_saves_is_a_divergence(tmp_path, monkeypatch):
    """It overflows at 2^16, 2^15, ... 2^0 too, where the overflow is the model's own."""
    objective = Fit.objective
    monkeypatch.setattr(
        Fit, "objective", lambda fit, *batch: (objective(fit, *batch)[0] * 1e30, objective(fit, *batch)[1])
    )
    record = train(tiny(tmp_path, *HALF, "probe.batches=0"))
    assert (record["verdict"], record["stopped"]) == ("diverged", "not finite")
    assert record["reason"] == "gradient norm not finite at step 16"
    assert (record["first_bad_step"], record["skipped_steps"], record["steps_done"]) == (16, 17, 17)
    found = load(tmp_path)
    assert found.steps.loss_scale.tolist() == [2.0 ** (16 - step) for step in range(17)]
    again = relabel.relabel(found.runs, found.steps)
    assert again[["verdict", "first_bad_step"]].iloc[0].tolist() == ["diverged", 16]


def test_a_loss_that_is_not_finite_is_one_at_once(tmp_path, monkeypatch):
    backward, made = Fit.backward, []

    def poisoned(fit, batch):
        made.append(fit)
        loss = backward(fit, batch)
        return loss * math.nan if len(made) == 5 else loss

    monkeypatch.setattr(Fit, "backward", poisoned)
    record = train(tiny(tmp_path, *HALF))
    assert record["reason"] == "loss not finite at step 4"


def test_a_scale_excuses_a_gradient_not_a_loss():
    fine, bad = 1.0, math.inf
    assert verdict.first_nonfinite([fine] * 3, [fine, bad, fine]) == 1
    assert verdict.first_nonfinite([fine] * 3, [fine, bad, fine], [2.0] * 3) is None
    assert verdict.first_nonfinite([fine] * 3, [bad, bad, fine], [2.0, 1.0, 0.5]) == 1
    assert verdict.first_nonfinite([fine, bad, fine], [fine] * 3, [2.0] * 3) == 1


def test_rows_say_what_was_skipped(tmp_path, restless):
    record = train(tiny(tmp_path, *HALF))
    lines = (tmp_path / "scratch" / record["run_id"] / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert (rows[0]["skipped"], rows[0]["loss_scale"], rows[1]["loss_scale"]) == (True, 2.0**30, 2.0**29)
    found = load(tmp_path)
    again = relabel.relabel(found.runs, found.steps).iloc[0]
    assert (again.verdict, again.reason) == (record["verdict"], record["reason"])


def test_a_profile_finds_a_scale_at_which_nothing_overflows(tmp_path, monkeypatch):
    """Of the initialisation, in two precisions, with a loss scale far too large for its gradients."""
    full = load_of(tmp_path / "full", "steps=0").layers
    monkeypatch.setattr(fit.torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**30))
    half = load_of(tmp_path / "half", "steps=0", "precision=fp16").layers
    stat = "mean_weight_grad_norm"
    one, two = (data[(data.stat == stat) & (data.tensor == "out")].value.to_numpy() for data in (full, half))
    assert two == pytest.approx(one, rel=0.02)
