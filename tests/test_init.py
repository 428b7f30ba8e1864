"""Initial weights: scale per scheme, and pairing across arms."""

import pytest
import torch
from conftest import compose

from normlab.init import initialise
from normlab.model import Decoder, tensors


def weights(*overrides: str, seed: int = 0) -> dict[str, torch.Tensor]:
    cfg = compose(*overrides).model
    model = Decoder(cfg, vocab=50)
    initialise(model, cfg, seed)
    return {str(t): p.detach()[rows] for t, p, rows in tensors(model)}


def test_every_parameter_is_covered_once():
    model = Decoder(compose("model.activation=swiglu", "model.tie=false", "model.qk_norm=true").model, vocab=50)
    covered = sum(p[rows].numel() for _, p, rows in tensors(model))
    assert covered == sum(p.numel() for p in model.parameters())
    names = [str(t) for t, _, _ in tensors(model)]
    assert len(names) == len(set(names))
    assert {"decoder.0.attn.q", "decoder.5.ffn.gate", "decoder.embed.token", "decoder.head.out"} <= set(names)


@pytest.mark.parametrize("other", ["model.placement=post", "model.norm=rmsnorm", "model.depth=9", "model.qk_norm=true"])
def test_arms_of_one_seed_share_the_weights_that_both_have(other):
    one, two = weights(), weights(other)
    shared = [k for k in one if k in two]
    assert len(shared) > 50
    for key in shared:
        torch.testing.assert_close(one[key], two[key], rtol=0, atol=0)


def test_seeds_differ_everywhere():
    one, two = weights(seed=0), weights(seed=1)
    assert not [k for k, w in one.items() if w.ndim == 2 and torch.equal(w, two[k])]


@pytest.mark.parametrize(
    ("init", "tensor", "std"),
    [
        ("xavier", "decoder.0.attn.q", (2 / 512) ** 0.5),
        ("xavier", "decoder.0.ffn.in", (2 / (256 + 1024)) ** 0.5),
        ("xavier", "decoder.embed.token", 256**-0.5),
        ("xiong", "decoder.0.attn.v", (2 / 512) ** 0.5),
        ("gpt2", "decoder.0.attn.q", 0.02),
        ("gpt2", "decoder.0.attn.out", 0.02 / 12**0.5),
        ("gpt2", "decoder.3.ffn.out", 0.02 / 12**0.5),
        ("gpt2", "decoder.embed.token", 0.02),
    ],
)
def test_standard_deviation(init, tensor, std):
    drawn = weights(f"model.init={init}", "model.width=256", "model.heads=4")[tensor]
    assert drawn.std().item() == pytest.approx(std, rel=0.03)
    assert abs(drawn.mean().item()) < 0.05 * std


def test_xiong_has_no_query_and_no_key():
    drawn = weights("model.init=xiong")
    assert not drawn["decoder.2.attn.q"].any()
    assert not drawn["decoder.2.attn.k"].any()


def test_biases_start_at_zero_and_gains_at_one():
    for name, value in weights("model.activation=geglu").items():
        if name.endswith("_bias"):
            assert not value.any()
        elif name.endswith("norm"):
            assert (value == 1).all()
