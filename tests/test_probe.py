"""Measurements against plain loops, and proof that watching changes nothing."""

import math

import pytest
import torch
from conftest import compose, tiny

from normlab.init import initialise
from normlab.model import Decoder
from normlab.probe import profile
from normlab.results import load
from normlab.train import train


def made(*overrides: str) -> Decoder:
    cfg = compose("model.depth=3", "model.width=16", "model.heads=2", "model.context=8", *overrides).model
    model = Decoder(cfg, vocab=11)
    initialise(model, cfg, seed=0)
    return model


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randint(11, (4, 8)), torch.randint(11, (4, 8))) for _ in range(count)]


@pytest.mark.parametrize("placement", ["pre", "post", "none"])
def test_profile_against_a_plain_loop(placement):
    model, drawn = made(f"model.placement={placement}"), batches(3)
    table = profile(model, model.loss, drawn).set_index(["layer", "site", "tensor", "stat"]).value

    weight, grads = model.decoder.blocks[2].ffn.w_out.weight, []
    squares, branch = [], []
    for inputs, targets in drawn:
        model.zero_grad()
        model.loss(inputs, targets).backward()
        grads.append(weight.grad.clone())
        with torch.no_grad():
            x = model.decoder.embed(inputs)
            for layer in model.decoder.blocks[:2]:
                x = layer(x)
            x = model.decoder.blocks[2].attn_residual(x, model.decoder.blocks[2].attn)
            entering = model.decoder.blocks[2].ffn_residual.norm(x) if placement == "pre" else x
            branch.append(model.decoder.blocks[2].ffn(entering).square().mean().item())
            squares.append(model.decoder.blocks[2].ffn_residual(x, model.decoder.blocks[2].ffn).square().mean().item())

    def value(tensor: str | None, stat: str) -> float:
        return table.loc[(2, "ffn", tensor, stat)]

    averaged = torch.stack(grads).mean(0).norm().item()
    assert value("out", "expected_weight_grad_norm") == pytest.approx(averaged, rel=1e-5)
    each = sum(g.norm().item() for g in grads) / 3
    assert value("out", "mean_weight_grad_norm") == pytest.approx(each, rel=1e-5)
    assert averaged < each
    assert value(None, "stream_rms") == pytest.approx(math.sqrt(sum(squares) / 3), rel=1e-5)
    assert value(None, "branch_rms") == pytest.approx(math.sqrt(sum(branch) / 3), rel=1e-5)


def test_stream_gradient_against_finite_differences():
    """dL/dx at the second block's output, probed along its own direction, in float64."""
    model, (drawn,) = made().double(), batches(1)
    table = profile(model, model.loss, [drawn]).set_index(["layer", "site", "stat"]).value
    found = {}

    def shifted(amount: float) -> float:
        def hook(_module, _args, output):
            if "grad" not in found:
                output.retain_grad()
                found["x"] = output
                return output
            return output + amount * found["grad"] / found["grad"].norm()

        handle = model.decoder.blocks[1].register_forward_hook(hook)
        loss = model.loss(*drawn)
        if "grad" not in found:
            loss.backward()
            found["grad"] = found["x"].grad
        handle.remove()
        return loss.item()

    shifted(0.0)
    slope = (shifted(1e-4) - shifted(-1e-4)) / 2e-4
    assert table.loc[(1, "ffn", "stream_grad_norm")] == pytest.approx(slope, rel=1e-6)


def test_profile_leaves_nothing_behind():
    model = made()
    before = {name: (len(m._forward_hooks), set(vars(m))) for name, m in model.named_modules()}
    state = torch.get_rng_state()
    profile(model, model.loss, [(torch.zeros(1, 8, dtype=torch.long),) * 2])
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: (len(m._forward_hooks), set(vars(m))) for name, m in model.named_modules()} == before
    assert all(p.grad is None for p in model.parameters())


def test_a_failing_forward_leaves_no_hook():
    model = made()
    with pytest.raises(IndexError):
        profile(model, model.loss, [(torch.full((1, 8), 99), torch.zeros(1, 8, dtype=torch.long))])
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_losses_are_bit_equal_with_every_probe_on_and_off(tmp_path, placement):
    overrides = [f"model.placement={placement}", "steps=12"]
    train(tiny(tmp_path, *overrides, "study=on", "probe.every=1", "probe.batches=2", "eval.every=1"))
    train(tiny(tmp_path, *overrides, "study=off", "probe.batches=0", "eval.every=0"))
    steps = load(tmp_path).steps
    on, off = (steps[steps.study == s].loss.tolist() for s in ("on", "off"))
    assert len(on) == 12
    assert on == off
