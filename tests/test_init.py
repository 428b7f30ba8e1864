"""Initial weights: scale per scheme, and pairing across arms."""

import math

import pytest
import torch
from conftest import compose

from normlab.init import GAINED, INITS, initialise
from normlab.model import Decoder, build
from normlab.residual import PLACEMENTS
from normlab.tensors import tensors


def weights(*overrides: str, seed: int = 0) -> dict[str, torch.Tensor]:
    cfg = compose(*overrides).model
    model = build(cfg, vocab=50)
    initialise(model, cfg, seed)
    return {str(e.id): e.value for e in tensors(model)}


def test_every_parameter_is_covered_once():
    model = Decoder(compose("model.activation=swiglu", "model.tie=false", "model.qk_norm=true").model, vocab=50)
    covered = sum(e.value.numel() for e in tensors(model))
    assert covered == sum(p.numel() for p in model.parameters())
    names = [str(e.id) for e in tensors(model)]
    assert len(names) == len(set(names))
    assert {"decoder.0.attn.q", "decoder.5.ffn.gate", "decoder.embed.token", "decoder.head.out"} <= set(names)


OTHERS = ["model.norm=rmsnorm", "model.depth=9", "model.qk_norm=true", "model.kv_heads=1", "model.arch=encoder_decoder"]


@pytest.mark.parametrize("other", [*OTHERS, *(f"model.placement={p}" for p in PLACEMENTS)])
def test_arms_of_one_seed_share_the_weights_that_both_have(other):
    """Bit for bit; where the placement's method is a gain on the initial weights, the same draw times that gain."""
    one, two = weights(), weights(other)
    gain = PLACEMENTS[other.split("=")[1]].gain if "placement" in other else None
    cfg = compose(other).model
    shared = [k for k in one if k in two and one[k].shape == two[k].shape and "norm" not in k]
    assert len(shared) > 35
    for key in shared:
        _, *layer, site, tensor = key.split(".")
        gained = gain is not None and layer and tensor in GAINED
        factor = gain(cfg.where("decoder", int(layer[0]), site)) if gained else 1.0
        torch.testing.assert_close(two[key], one[key] * factor, rtol=0 if factor == 1.0 else 1e-6, atol=0, msg=key)


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
        ("gpt2 model.init_depth_scale=false", "decoder.3.ffn.out", 0.02),
        ("xavier model.init_depth_scale=true", "decoder.3.ffn.out", (2 / (256 + 1024) / 12) ** 0.5),
        ("gpt2 model.placement=parallel", "decoder.3.ffn.out", 0.02 / 6**0.5),  # one residual sum per block
        ("small", "decoder.3.attn.k", (2 / (5 * 256)) ** 0.5),
        ("small", "decoder.embed.token", (2 / (5 * 256)) ** 0.5),
        ("torchtitan", "decoder.embed.token", 1.0),
        ("torchtitan", "decoder.2.attn.q", 0.02),
        ("torchtitan", "decoder.2.attn.out", 0.02 / 6**0.5),
        ("torchtitan", "decoder.2.ffn.in", 0.02),
        ("torchtitan model.activation=swiglu", "decoder.2.ffn.in", 0.02 / 6**0.5),
        ("torchtitan model.activation=swiglu", "decoder.2.ffn.gate", 0.02),
        ("torchtitan model.tie=false", "decoder.head.out", 256**-0.5),
        ("deepnorm", "decoder.2.attn.v", 48**-0.25 * (2 / 512) ** 0.5),
        ("deepnorm", "decoder.2.attn.q", (2 / 512) ** 0.5),
        ("deepnorm model.placement=deepnorm", "decoder.2.attn.v", 48**-0.25 * (2 / 512) ** 0.5),  # once
        ("sub_ln", "decoder.2.ffn.in", math.log(12) ** 0.5 * (2 / 1280) ** 0.5),
        ("completep", "decoder.2.attn.q", 0.02 / 2),  # four times the base width
        ("completep", "decoder.5.ffn.out", 0.02 / 2),
        ("completep", "decoder.embed.token", 0.02),
        ("xavier model.ffn=moe", "decoder.1.ffn.expert_in", (2 / 1280) ** 0.5),
    ],
)
def test_standard_deviation(init, tensor, std):
    drawn = weights(*f"model.init={init}".split(), "model.width=256", "model.heads=4")[tensor]
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


@pytest.mark.parametrize("init", INITS)
def test_every_init_fills_every_tensor(init):
    """Uninitialised memory is never trained: two models built apart agree in every weight."""
    overrides = [f"model.init={init}", "model.ffn=moe", "model.position=relative", "model.arch=encoder_decoder"]
    one, two = weights(*overrides), weights(*overrides)
    assert one.keys() == two.keys()
    for key, value in one.items():
        assert torch.equal(value, two[key]), key
        assert value.isfinite().all(), key


def test_gaussian_gpt2_depth_rule_against_the_table():
    """0.02 / sqrt(2 N) of 12 and 48 blocks: 0.004082 and 0.002041."""
    for depth, std in ((12, 0.004082), (48, 0.002041)):
        drawn = weights("model.init=gpt2", f"model.depth={depth}", "model.width=256")["decoder.0.ffn.out"]
        assert drawn.std().item() == pytest.approx(std, rel=0.01)


def test_completep_is_gpt2_without_the_depth_rule_at_the_base():
    base = weights("model.init=completep")
    for key, value in weights("model.init=gpt2", "model.init_depth_scale=false").items():
        torch.testing.assert_close(base[key], value, rtol=1e-6, atol=0, msg=key)


def test_completep_scales_branch_scores_and_logits():
    cfg = compose("model.init=completep", "model.width=256", "model.depth=24").model
    assert (cfg.branch_scale("decoder"), cfg.logit_scale, cfg.score_scale) == (6 / 24, 64 / 256, 16**0.5 / 64)
    model = Decoder(cfg, vocab=50)
    initialise(model, cfg, seed=0)
    block = model.decoder.blocks[0]
    x = torch.randn(1, 3, 256)
    bare = block.ffn.w_out(torch.nn.functional.gelu(block.ffn.w_in(x)))
    torch.testing.assert_close(block.ffn(x), bare / 4)
    assert block.attn.scale == 1 / 4
    both = compose(
        "model.init=completep", "model.arch=encoder_decoder", "model.encoder_depth=24", "model.ffn=moe"
    ).model
    made = build(both, vocab=50)
    scales = [getattr(made, s).blocks[0].ffn.scale for s in ("encoder", "decoder")]
    assert scales == [6 / 24, 1.0]
    assert [getattr(made, s).blocks[0].attn.scale for s in ("encoder", "decoder")] == scales
    assert both.depth_multiple == 4
    initialise(made, both, seed=0)
    moe, z = made.encoder.blocks[0].ffn, torch.randn(1, 3, 64)
    scaled, moe.scale = moe(z), 1.0
    torch.testing.assert_close(scaled, moe(z) / 4)
    torch.testing.assert_close(model.logits(x), model.head(x) / 4)
