"""Schedules by their values, optimizers by what they do to a weight."""

import math

import pytest
import torch
from conftest import compose, tiny

from normlab import optim
from normlab.explain import ConfigError
from normlab.model import Decoder
from normlab.results import load
from normlab.train import train


def rates(steps: int, *overrides: str) -> list[float]:
    cfg = compose("optim.lr=1.0", *(f"optim.{o}" for o in overrides)).optim
    return [optim.learning_rate(cfg, step, steps) for step in range(steps)]


def test_warm_up_reaches_the_peak_at_its_last_step_and_never_is_zero():
    assert rates(6, "warmup_steps=4") == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(3, "warmup_steps=0") == [1.0, 1.0, 1.0]
    assert rates(3, "warmup_steps=3") == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_linear():
    assert rates(6, "warmup_steps=2", "schedule=linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert rates(4, "schedule=linear", "final_lr_ratio=0.5") == [1.0, 0.875, 0.75, 0.625]


def test_cosine():
    got = rates(4, "schedule=cosine", "final_lr_ratio=0.2")
    assert got == pytest.approx([0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * n / 4)) for n in range(4)])


def test_inverse_square_root_is_vaswani_s_equation_3():
    got = rates(20, "schedule=inverse_sqrt", "warmup_steps=4")
    assert got == pytest.approx([min((n + 1) / 4, math.sqrt(4 / (n + 1))) for n in range(20)])
    assert rates(4, "schedule=inverse_sqrt") == pytest.approx([1 / math.sqrt(n + 1) for n in range(4)])


def test_step_falls_at_epoch_8_of_15():
    got = rates(15, "schedule=step", "final_lr_ratio=0.1")
    assert got == pytest.approx([1.0] * 8 + [0.1] * 7)


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_optimizer_is_torch_s_with_decay_on_matrices_only(name):
    cfg = compose(f"optim.name={name}", "optim.lr=0.01", "optim.weight_decay=0.1", "optim.momentum=0.5")
    made = optim.make(torch.nn.Linear(3, 2), cfg.optim, cfg.model)
    reference = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "radam": torch.optim.RAdam,
        "sgd": torch.optim.SGD,
    }
    assert type(made) is reference[name]
    assert [g["weight_decay"] for g in made.param_groups] == [0.1, 0.0]
    assert [[p.ndim for p in g["params"]] for g in made.param_groups] == [[2], [1]]
    if name == "sgd":
        assert made.param_groups[0]["momentum"] == 0.5
    else:
        assert made.param_groups[0]["betas"] == (0.9, 0.98)


def test_the_logged_rate_is_the_one_that_the_update_used(tmp_path):
    """Plain SGD: |update| = lr * |gradient| at every step of a warm-up."""
    cfg = tiny(tmp_path, "optim=sgd", "optim.lr=0.5", "optim.warmup_steps=5", "optim.schedule=linear")
    train(cfg)
    steps = load(tmp_path).steps
    assert steps.lr.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5])
    assert (steps.update_norm / steps.grad_norm).tolist() == pytest.approx(steps.lr.tolist(), rel=1e-3)


def test_completep_scales_rates_decay_and_eps():
    """Width 4 times and depth 2 times the base: rate / 4 and decay * 4 on the blocks' matrices, eps / 8."""
    cfg = compose(
        "model.init=completep", "model.width=256", "model.depth=12", "optim.weight_decay=0.1", "model.tie=false"
    )
    model = Decoder(cfg.model, vocab=7)
    hidden, outer, vectors = optim.make(model, cfg.optim, cfg.model).param_groups
    assert {id(p) for p in hidden["params"]} == {
        id(p) for name, p in model.named_parameters() if ".blocks." in name and p.ndim == 2
    }
    assert [g["lr_scale"] for g in (hidden, outer, vectors)] == [0.25, 1.0, 1.0]
    assert [g["weight_decay"] for g in (hidden, outer, vectors)] == [0.4, 0.1, 0.0]
    assert hidden["eps"] == pytest.approx(1e-8 / 8)


def test_the_scale_of_a_group_reaches_its_update(tmp_path):
    """Adam's first update is rate * sign: at 4 times the base width, blocks' matrices move by a quarter of the rate."""
    train(tiny(tmp_path, "optim.lr=1e-3", "optim.eps=1e-20", "model.init=completep", "model.base_width=4", "steps=1"))
    layers = load(tmp_path).layers
    moved = layers[(layers.stat == "update_norm") & (layers.step == 0) & (layers.layer == 1)].set_index("tensor").value
    assert moved["q"] == pytest.approx(1e-3 / 4 * 16, rel=1e-3)
    assert moved["norm"].tolist() == pytest.approx([1e-3 * 4] * 2, rel=1e-3)  # of attention and of the FFN


@pytest.mark.parametrize("overrides", [["optim=sgd"], ["optim.name=adam", "optim.weight_decay=0.1"]])
def test_completep_is_refused_where_its_rule_is_another(overrides):
    with pytest.raises(ConfigError, match=r"model\.init=completep .*optim\.name=(sgd|adam); accepted: adamw"):
        compose("model.init=completep", *overrides)
