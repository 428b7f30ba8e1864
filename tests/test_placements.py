"""Every placement against its equation written by hand, in float64."""

import pytest
import torch
from conftest import compose

from normlab.init import initialise
from normlab.model import Block, Decoder, tensors
from normlab.residual import PLACEMENTS

DEPTH = 6

# x the stream, F the sublayer, N and M its first and second norm; one row per name, as in the paper.
EQUATIONS = {
    "pre": lambda x, F, N, M: x + F(N(x)),
    "post": lambda x, F, N, M: N(x + F(x)),
    "deepnorm": lambda x, F, N, M: N(1.8612097182041991 * x + F(x)),  # (2 * 6)^(1/4)
    "sandwich": lambda x, F, N, M: x + M(F(N(x))),
    "none": lambda x, F, N, M: x + F(x),
    "no_residual": lambda x, F, N, M: F(N(x)),
}


def layernorm(module):
    """(x - mean) / sqrt(var + eps) * g + b, spelt out."""

    def apply(x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.weight + module.bias

    return apply


def block(placement: str) -> Block:
    cfg = compose("model.width=8", "model.heads=2", f"model.depth={DEPTH}", f"model.placement={placement}").model
    made = Block(cfg, rotary=None).double()
    for parameter in made.parameters():  # norms away from gain 1, bias 0
        torch.nn.init.normal_(parameter, mean=0.3, std=0.5)
    return made


def test_every_placement_has_an_equation_here():
    assert set(EQUATIONS) == set(PLACEMENTS)


@pytest.mark.parametrize("placement", EQUATIONS)
def test_block_is_the_equation_applied_to_attention_then_ffn(placement):
    made, equation = block(placement), EQUATIONS[placement]
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    expected = x
    for residual, sublayer in ((made.attn_residual, made.attn), (made.ffn_residual, made.ffn)):
        norms = [layernorm(n) for n in residual.children()] + [None, None]
        expected = equation(expected, sublayer, norms[0], norms[1])
    torch.testing.assert_close(made(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_later_token_never_changes_an_earlier_logit(placement):
    cfg = compose("model.width=16", "model.heads=2", "model.depth=3", f"model.placement={placement}").model
    model = Decoder(cfg, vocab=11).double()
    initialise(model, cfg, seed=0)
    tokens = torch.randint(11, (2, 9))
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 11
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6], rtol=0, atol=0)
    assert not torch.allclose(before[:, 6:], after[:, 6:])


@pytest.mark.parametrize(
    ("placement", "norms_per_block", "final"),
    [("pre", 2, 1), ("post", 2, 0), ("deepnorm", 2, 0), ("sandwich", 4, 1), ("none", 0, 0), ("no_residual", 2, 1)],
)
def test_number_of_norms(placement, norms_per_block, final):
    cfg = compose("model.depth=3", f"model.placement={placement}").model
    norms = [m for m in Decoder(cfg, vocab=7).modules() if isinstance(m, torch.nn.LayerNorm)]
    assert len(norms) == 3 * norms_per_block + final


@pytest.mark.parametrize(
    ("depth", "alpha", "beta"),
    [
        (6, 1.8612, 0.3799),
        (12, 2.2134, 0.3195),
        (24, 2.6321, 0.2686),
        (48, 3.1302, 0.2259),
        (96, 3.7224, 0.1900),
    ],
)
def test_deepnorm_constants(depth, alpha, beta):
    """DeepNet's table for decoders: alpha = (2N)^(1/4) on the skip, beta = (8N)^(-1/4) in the init."""
    assert PLACEMENTS["deepnorm"].gain(depth) == pytest.approx(beta, abs=5e-5)
    cfg = compose(f"model.depth={depth}", "model.placement=deepnorm", "model.width=8", "model.heads=1").model
    residual = Block(cfg, rotary=None).attn_residual
    residual.norm = torch.nn.Identity()
    assert residual(torch.ones(1), lambda x: 0 * x).item() == pytest.approx(alpha, abs=5e-5)


def test_deepnorm_gain_scales_v_out_and_ffn_only():
    drawn = {}
    for placement in ("post", "deepnorm"):
        cfg = compose("model.depth=12", f"model.placement={placement}", "model.activation=swiglu").model
        model = Decoder(cfg, vocab=7)
        initialise(model, cfg, seed=0)
        drawn[placement] = {str(t): p.detach()[rows] for t, p, rows in tensors(model)}
    for name, weight in drawn["post"].items():
        site, tensor = name.split(".")[-2:]
        gained = site in {"attn", "ffn"} and tensor in {"v", "out", "in", "gate"}
        torch.testing.assert_close(drawn["deepnorm"][name], weight * (96**-0.25 if gained else 1.0), rtol=1e-6, atol=0)


def test_post_norm_keeps_unit_rms_and_pre_norm_grows():
    rms = {}
    for placement in ("pre", "post"):
        cfg = compose("model.depth=24", f"model.placement={placement}").model
        model = Decoder(cfg, vocab=64)
        initialise(model, cfg, seed=0)
        x = model.embed(torch.randint(64, (4, 64)))
        for layer in model.blocks:
            x = layer(x)
        rms[placement] = x.square().mean().sqrt().item()
    assert rms["post"] == pytest.approx(1.0, abs=1e-3)
    assert rms["pre"] > 3
