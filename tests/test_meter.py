"""Every-step statistics against plain loops in float64, whatever the layout, the optimizer and the precision."""

import math

import pytest
import torch
from conftest import compose, tiny

from normlab import meter as meter_module
from normlab import objective, optim, task
from normlab.init import initialise
from normlab.meter import STATS, StepMeter
from normlab.model import Model, build
from normlab.results import load
from normlab.tensors import tensors
from normlab.train import train

SHAPES = [
    ["model.activation=swiglu", "model.placement=sandwich", "model.width=16", "model.heads=2"],
    ["model.width=6", "model.heads=3", "model.kv_heads=1", "model.norm=scalenorm", "model.placement=rezero"],
    ["model.arch=encoder_decoder", "model.ffn=moe", "model.width=8", "model.heads=2", "model.position=relative"],
]


def made(*overrides: str) -> tuple[Model, torch.optim.Optimizer]:
    cfg = compose("model.depth=3", "model.context=8", *overrides)
    model = build(cfg.model, vocab=11)
    initialise(model, cfg.model, seed=0)
    return model, optim.make(model, cfg.optim, cfg.model)


def batch(model: Model) -> tuple:
    tokens = torch.randint(11, (4, 8))
    return ((tokens, tokens) if len(model.stacks) == 2 else tokens), torch.randint(11, (4, 8))


def norm(x: torch.Tensor) -> float:
    return math.sqrt(sum(v * v for v in x.double().flatten().tolist()))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", [2**22, 1])
def test_statistics_against_a_plain_loop(monkeypatch, shape, name, half, chunk):
    """Three steps, under bf16 autocast too, with two backward passes each and clipping after the measurement.

    1e-5 relative: sums of float32 rows run in float32 where that is safe."""
    monkeypatch.setitem(meter_module._CHUNK, "cpu", chunk)
    model, optimizer = made(*shape, f"optim.name={name}", "optim.lr=0.01", "optim.eps=1e-5")
    meter = StepMeter(model, optimizer)
    assert len(meter.flat) > (10 if chunk == 1 else 1)
    parameters = [p for c in meter._flat.chunks for p in c.parameters]
    for step in range(3):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = model.loss(*batch(model)) / 2
            loss.backward()
        grads = {str(e.id): norm(e.of(e.parameter.grad)) for e in tensors(model)}
        norms, bad = meter.gradients()
        torch.nn.utils.clip_grad_norm_(meter.flat, 0.1)
        assert not bad.any()
        before = {str(e.id): e.value.clone() for e in tensors(model)}
        others = meter.update()
        got = {stat: dict(zip(map(str, meter.ids), v.tolist(), strict=True))
               for stat, v in zip(STATS, (norms, *others), strict=True)}  # fmt: skip
        for entry in tensors(model):
            key = str(entry.id)
            moved, weight = norm(entry.value - before[key]), norm(before[key])
            assert got["weight_grad_norm"][key] == pytest.approx(grads[key], rel=1e-5), key
            assert got["weight_norm"][key] == pytest.approx(weight, rel=1e-5), key
            assert got["update_norm"][key] == pytest.approx(moved, rel=1e-5), key
            ratio = moved / weight if weight else math.nan
            assert got["update_ratio"][key] == pytest.approx(ratio, rel=1e-5, nan_ok=True), key
            if name == "sgd":
                assert math.isnan(got["below_eps"][key])
                continue
            seconds = meter._flat.views(torch.cat([optimizer.state[flat]["exp_avg_sq"] for flat in meter.flat]))
            mine = next(v for p, v in zip(parameters, seconds, strict=True) if p is entry.parameter)
            second = entry.of(mine) / (1 - 0.98 ** (step + 1))
            share = (second.double().sqrt() < 1e-5).double().mean().item()
            assert got["below_eps"][key] == pytest.approx(share, abs=1e-6), key
    if name == "adamw":
        assert 0 < sum(got["below_eps"].values()) < len(got["below_eps"])


@pytest.mark.parametrize("scale", [1e20, 1e-25])
def test_norms_neither_overflow_nor_vanish(scale):
    """float32 squares of these are inf and 0."""
    model, optimizer = made()
    meter = StepMeter(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, scale)
    norms, _ = meter.gradients()
    for entry, found in zip(tensors(model), norms.tolist(), strict=True):
        assert found == pytest.approx(scale * math.sqrt(entry.value.numel()), rel=1e-6)


def test_non_finite_numbers_are_counted_by_tensor():
    model, optimizer = made()
    meter = StepMeter(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    block = model.decoder.blocks[1]
    block.ffn.w_in.weight.grad[0, :3] = math.nan
    block.attn.w_qkv.weight.grad[-1, 0] = math.inf
    norms, bad = meter.gradients()
    counts = {str(i): int(n) for i, n in zip(meter.ids, bad.tolist(), strict=True) if n}
    assert counts == {"decoder.1.ffn.in": 3, "decoder.1.attn.v": 1}
    broken = [str(i) for i, n in zip(meter.ids, norms.tolist(), strict=True) if not math.isfinite(n)]
    assert sorted(broken) == sorted(counts)


def test_the_meter_changes_no_weight_and_keeps_ties():
    model, optimizer = made("model.tie=true")
    before = {name: p.clone() for name, p in model.named_parameters()}
    StepMeter(model, optimizer)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert model.head.out.weight is model.decoder.embed.token.weight
    with torch.no_grad():
        model.decoder.embed.token.weight[0, 0] = 7
    assert model.state_dict()["head.out.weight"][0, 0] == 7


@pytest.mark.parametrize("name", ["adam", "adamw", "radam", "sgd"])
def test_the_optimizer_steps_as_it_would_without_the_meter(monkeypatch, name):
    monkeypatch.setitem(meter_module._CHUNK, "cpu", 5000)
    found = []
    for watched in (False, True):
        torch.manual_seed(0)
        settings = (f"optim.name={name}", "optim.lr=0.01", "optim.momentum=0.9", "optim.weight_decay=0.1")
        model, optimizer = made("model.width=16", "model.heads=2", *settings)
        meter = StepMeter(model, optimizer) if watched else None
        for _ in range(4):
            model.loss(*batch(model)).backward()
            if meter is None:
                optimizer.step()
                optimizer.zero_grad()
            else:
                meter.gradients()
                meter.update()
        found.append([p.detach().clone() for p in model.parameters()])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


MICRO = [
    ["micro_batch=1"],
    ["micro_batch=3"],  # 3 + 3 + 3 + 3
    ["micro_batch=5"],  # 5 + 5 + 2
    ["micro_batch=5", "model.arch=encoder"],  # with targets in unequal numbers
    ["micro_batch=5", "optim.clip=0.1"],
]


@pytest.mark.parametrize("overrides", MICRO)
def test_accumulated_gradients_tell_the_same(tmp_path, overrides):
    """One row per update, loss and every norm that of the whole batch, before clipping."""
    rest = [o for o in overrides if "micro" not in o]
    train(tiny(tmp_path, "data.batch_size=12", "study=whole", "steps=3", *rest))
    train(tiny(tmp_path, "data.batch_size=12", "study=parts", "steps=3", *overrides))
    whole, parts = load(tmp_path / "whole"), load(tmp_path / "parts")
    for column in ("loss", "grad_norm", "update_norm"):
        assert parts.steps[column].tolist() == pytest.approx(whole.steps[column].tolist(), rel=1e-4), column
    one, two = (r.layers[r.layers.stat == "weight_grad_norm"] for r in (whole, parts))
    assert two.value.tolist() == pytest.approx(one.value.tolist(), rel=2e-3, abs=1e-6)


def test_micro_batches_of_a_pair_of_sequences():
    learned = task.make(compose("model.arch=encoder_decoder", "data=markov", "data.batch_size=5"))
    whole = learned.batch(0, 0)
    parts = list(objective.micro_batches(whole, 2))
    assert [len(targets) for (_, targets), _ in parts] == [2, 2, 1]
    assert sum(float(share) for _, share in parts) == pytest.approx(1)
    assert torch.equal(torch.cat([inputs[0] for (inputs, _), _ in parts]), whole[0][0])


def test_statistics_under_bf16_are_those_of_the_float32_weights(tmp_path):
    train(tiny(tmp_path, "precision=bf16", "steps=2", "study=half"))
    train(tiny(tmp_path, "steps=2", "study=full"))
    half, full = (load(tmp_path / s).layers for s in ("half", "full"))
    for stat, close in (("weight_grad_norm", 0.1), ("weight_norm", 1e-5), ("update_norm", 0.2)):
        one, two = (t[(t.stat == stat) & (t.step == 0) & (t.tensor == "out")].value for t in (half, full))
        assert one.tolist() == pytest.approx(two.tolist(), rel=close), stat


@pytest.mark.parametrize(
    "odd", ["model.norm=dyt", "model.norm=scalenorm", "model.placement=rezero", "model.head_bias=true"]
)
def test_a_tensor_of_odd_size_does_not_split_the_rows(odd):
    """Sums run row by row: of one element each, they took ten times as long as the step."""
    model, optimizer = made("model.width=64", "model.tie=false", odd)
    assert StepMeter(model, optimizer)._flat.row == 64
