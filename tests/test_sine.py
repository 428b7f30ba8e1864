"""data=sine: what is drawn, what the reference losses are, that stacks learn it, and what has no meaning there."""

import math

import numpy as np
import pytest
import torch
from conftest import compose
from scipy import integrate
from test_resume import contents, interrupt, stop_at

from normlab import size, task
from normlab.config import Config
from normlab.explain import ConfigError
from normlab.head import squared_error
from normlab.model import build
from normlab.results import load
from normlab.sine import Sine
from normlab.train import train

SMALL = ["model.depth=2", "model.width=16", "model.heads=2", "model.context=16", "eval.batches=2", "probe.batches=1"]


def sine(folder, *overrides: str) -> Config:
    return compose("data=sine", *SMALL, "log=disabled", f"runs_dir={folder}", *overrides)


def test_targets_are_the_sine_of_uniform_inputs():
    drawn, targets = Sine(math.pi).batch(1, 2, 500, 64)
    assert (drawn.dtype, targets.dtype, drawn.shape) == (torch.float32, torch.float32, (500, 64))
    np.testing.assert_allclose(targets.numpy(), np.sin(drawn.double().numpy()), rtol=1e-6, atol=1e-9)
    assert -math.pi <= drawn.min() < -3.1
    assert 3.1 < drawn.max() <= math.pi
    counts = np.histogram(drawn.numpy(), bins=10, range=(-math.pi, math.pi))[0]
    assert counts == pytest.approx(3200, rel=0.07)


def test_first_numbers_stay_as_they_are():
    """Of seed 0, step 0."""
    drawn, targets = Sine(math.pi).batch(0, 0, 1, 3)
    assert drawn[0].tolist() == pytest.approx([-3.0690, -1.6239, -2.4415], abs=1e-4)
    assert targets[0].tolist() == pytest.approx([-0.0725, -0.9986, -0.6443], abs=1e-4)


def test_a_batch_is_a_function_of_seed_and_step_and_held_out_is_no_training_batch():
    source = Sine(2.0)
    first = source.batch(1, 2, 4, 8)[0]
    assert torch.equal(first, source.batch(1, 2, 4, 8)[0])
    others = [source.batch(1, 3, 4, 8)[0], source.batch(2, 2, 4, 8)[0], source.batch(0, 0, 4, 8)[0]]
    held_out = [x for x, _ in source.held_out(2, 4, 8)]
    assert all(torch.equal(x, y) for x, (y, _) in zip(held_out, source.held_out(2, 4, 8), strict=True))
    everything = [first, *others, *held_out]
    assert len({tuple(x.flatten().tolist()) for x in everything}) == len(everything)


@pytest.mark.parametrize("half_range", [0.1, math.pi, 30.0])
def test_reference_losses_are_those_of_the_best_constant_and_the_best_line(tmp_path, half_range):
    """Against quadrature, and against least squares on the very targets."""

    def mean(f) -> float:
        return integrate.quad(f, -half_range, half_range, limit=500)[0] / (2 * half_range)

    slope = Sine(half_range).slope
    assert slope == pytest.approx(mean(lambda x: x * math.sin(x)) / mean(lambda x: x * x), rel=1e-9)
    learned = task.make(sine(tmp_path, f"data.range={half_range}", "data.batch_size=4000"))
    batch = learned.batch(0, 0)
    constant, line = learned.reference_loss(batch, 0), learned.reference_loss(batch, 1)
    assert constant == pytest.approx(mean(lambda x: math.sin(x) ** 2), rel=0.03)
    x, y = (t.double().flatten().numpy() for t in batch)
    residual = np.linalg.lstsq(np.stack((x, np.ones_like(x)), 1), y, rcond=None)[1][0] / len(x)
    assert line == pytest.approx(residual, rel=0.01)
    assert line < constant
    assert learned.floor(batch) == 0.0


def test_another_range_is_another_data_set():
    assert Sine(1.0).sha256 != Sine(2.0).sha256


def test_squared_error_is_the_mean_over_all_places():
    outputs, targets = torch.tensor([[[1.0], [3.0]]]), torch.tensor([[0.0, 1.0]])
    assert squared_error(outputs, targets).item() == 2.5
    assert squared_error(outputs.half(), targets).dtype == torch.float32


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["model.arch=encoder", "model.placement=post"],
        ["model.arch=encoder", "model.head=mlm", "model.position=none"],
        ["precision=fp16", "model.norm=rmsnorm", "model.position=rotary"],
        ["precision=bf16", "model.ffn=moe", "model.placement=resi_dual", "micro_batch=3"],
        ["model.norm=batchnorm", "model.placement=admin", "model.position=relative"],
    ],
)
def test_a_small_stack_learns_it(tmp_path, settings):
    """Below the best linear map in 200 steps, which takes the input's size, not its sign alone."""
    record = train(sine(tmp_path, "steps=200", "optim.lr=3e-3", "eval.batches=8", *settings))
    assert (record["status"], record["verdict"]) == ("finished", "stable")
    assert record["final_val_loss"] < record["h2"] / 2
    assert 0.4 < record["h1"] < 0.6
    assert record["excess_loss"] == record["final_val_loss"]
    assert record["unigram_entropy"] is None  # numbers have none
    found = load(tmp_path)
    assert found.steps.tokens.tolist() == [8 * 16 * (step + 1) for step in range(200)]
    assert {"embed", "head"} <= set(found.layers.site)


def test_a_stack_that_does_not_move_is_stalled(tmp_path):
    record = train(sine(tmp_path, "steps=20", "optim.lr=1e-8"))
    assert record["verdict"] == "stalled"
    assert record["final_val_loss"] == pytest.approx(record["init_val_loss"], rel=1e-3)


def test_a_rate_that_is_far_too_large_diverges(tmp_path):
    record = train(sine(tmp_path, "steps=40", "optim=sgd", "optim.lr=1e6", "model.placement=none"))
    assert record["verdict"] == "diverged"


def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path, monkeypatch):
    run = ["steps=23", "checkpoint.every=5", "eval.every=6", "probe.every=9", "model.dropout=0.1", "log.every=7"]
    straight = train(sine(tmp_path / "straight", *run))
    stop_at(monkeypatch, 12, interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(sine(tmp_path / "stopped", *run))
    resumed = train(sine(tmp_path / "stopped", *run))
    assert [a["from_step"] for a in resumed["attempts"]] == [0, 13]
    paths = [tmp_path / name / "scratch" / straight["run_id"] for name in ("straight", "stopped")]
    assert contents(paths[0]) == contents(paths[1])


def test_a_model_of_numbers_has_two_rows_in_and_one_out(tmp_path):
    model = build(sine(tmp_path).model, None)
    assert model.decoder.embed.token.weight.shape == (2, 16)
    assert model.head.out.weight.shape == (1, 16)
    assert model(torch.zeros(3, 16)).shape == (3, 16, 1)


def test_its_size_is_told(tmp_path):
    told = size.report(sine(tmp_path))
    assert "activations" in told
    assert size.vocabulary(sine(tmp_path)) is None


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.arch=encoder_decoder", r"^model\.arch=encoder_decoder: data=sine .*accepted: decoder, encoder$"),
        ("model.tie=true", r"^model\.tie=True: data=sine .*accepted: false$"),
        ("model.vocab=64", r"^model\.vocab=64: data=sine .*accepted: null$"),
        ("objective=lm", r"^objective=lm: data=sine .*accepted: null$"),
        ("objective=translation", r"^objective=translation: data=sine .*accepted: null$"),
        ("label_smoothing=0.1", r"^label_smoothing=0\.1: data=sine .*accepted: 0$"),
        ("data.range=0", r"data\.range=0.*0\.1"),
        ("data.vocab=9", r"data\.vocab: the chosen data has no such key"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(tmp_path, override, told):
    with pytest.raises(ConfigError, match=told):
        task.make(sine(tmp_path, override))


def test_a_pooler_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.head=pooler: data=sine"):
        task.make(sine(tmp_path, "model.arch=encoder", "model.head=pooler"))
