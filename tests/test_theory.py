"""Theory against the numbers of the papers, against plain sampling and against measured models."""

import numpy as np
import pytest
import torch
from conftest import compose

from normlab import theory
from normlab.config import ModelConfig
from normlab.ffn import FFN
from normlab.init import INITS, initialise
from normlab.model import build
from normlab.tensors import tensors

PAPER = ("experiment=xiong_theory", "model.scale_embedding=true")


def config(*overrides: str) -> ModelConfig:
    return compose(*overrides).model


def made(cfg: ModelConfig, seed: int = 0, vocab: int = 512):
    model = build(cfg, vocab)
    initialise(model, cfg, seed)
    return model


def measured(cfg: ModelConfig, batches: int = 2) -> np.ndarray:
    """Mean squares of the theory's quantity, block by block, of one initialisation."""
    model, text = made(cfg), torch.randint(512, (4 * batches, cfg.context))
    stack = model.stacks[model.stack_names[-1]]
    found = []
    for block in stack.blocks:
        if theory.FORMS[cfg.placement].normed_sum:
            block.ffn_residual.norm.register_forward_pre_hook(lambda _, args: found.append(args[0]))
        else:
            block.register_forward_hook(lambda _, __, stream: found.append(stream))
    with torch.no_grad():
        model((text, text) if cfg.arch == "encoder_decoder" else text)
    return np.array([x.square().mean().item() for x in found])


def test_lemma_1_and_2_in_the_paper_s_setting():
    """ReLU, d x d, Xavier: the FFN adds 1/2, attention up to 1; post 3/2; pre between 1 + l/2 and 1 + 3l/2."""
    cfg = config(*PAPER, "model.placement=pre", "model.depth=96")
    assert theory.ffn_gain(cfg) == pytest.approx(0.5, rel=1e-3)
    assert theory.attention_gain(cfg) == pytest.approx(1.0)
    pre = theory.hidden_growth(cfg)
    assert pre.lower == pytest.approx(1 + 0.5 * np.arange(97), rel=1e-3)
    assert pre.upper == pytest.approx(1 + 1.5 * np.arange(97), rel=1e-3)
    post = theory.hidden_growth(config(*PAPER, "model.placement=post", "model.depth=12"))
    assert post.lower[1:] == pytest.approx(1.5, rel=1e-3)
    assert post.upper[1:] == pytest.approx(1.5, rel=1e-3)


@pytest.mark.parametrize("depth", [12, 24, 48, 96])
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_lemma_2_holds_for_measured_models_in_the_paper_s_setting(placement, depth):
    cfg = config(*PAPER, f"model.placement={placement}", f"model.depth={depth}", "model.context=16")
    bounds, found = theory.hidden_growth(cfg), measured(cfg, batches=1)
    if placement == "pre":
        assert (found > 0.97 * bounds.lower[1:]).all()
        assert (found < 1.03 * bounds.upper[1:]).all()
    else:
        assert found == pytest.approx(bounds.lower[1:], rel=0.35)  # one model, 64 tokens that grow alike
        assert found.mean() == pytest.approx(1.5, rel=0.1)


def test_closed_forms_of_the_derived_placements():
    """In the paper's setting: deepnorm sqrt(2N) + beta^4 / 2, sandwich 1 + 2l, lns 1 + H_l / 2 to 1 + 3 H_l / 2."""
    depth = 24
    forms = {p: theory.hidden_growth(config(*PAPER, f"model.placement={p}", f"model.depth={depth}"))
             for p in ("deepnorm", "sandwich", "lns")}  # fmt: skip
    blocks = np.arange(1, depth + 1)
    harmonic = np.cumsum(1 / blocks)
    assert forms["deepnorm"].lower[1:] == pytest.approx((2 * depth) ** 0.5 + 1 / (8 * depth) / 2, rel=1e-4)
    assert forms["sandwich"].lower[1:] == pytest.approx(1 + 2 * blocks, rel=1e-3)
    assert forms["sandwich"].upper[1:] == pytest.approx(1 + 2 * blocks, rel=1e-3)
    assert forms["lns"].lower[1:] == pytest.approx(1 + harmonic / 2, rel=1e-3)
    assert forms["lns"].upper[1:] == pytest.approx(1 + 1.5 * harmonic, rel=1e-3)


@pytest.mark.parametrize("setting", [
    (),
    ("model.activation=swiglu",),
    ("model.activation=relu2", "model.ffn_ratio=2"),
    ("model.norm=rmsnorm", "model.init=deepnorm"),
    ("model.norm=scalenorm", "model.init=small", "model.scale_embedding=false"),
    ("model.init=gpt2",),
    ("model.init=gpt2", "model.init_depth_scale=false", "model.position=sinusoidal"),
    ("model.init=torchtitan", "model.activation=geglu"),
    ("model.init=completep", "model.kv_heads=2", "model.position=rotary", "model.embed_norm=true"),
    ("model.arch=encoder", "model.segments=2", "model.ffn_width=48"),
    ("model.arch=encoder_decoder", "model.norm=rmsnorm_offset"),
], ids=lambda s: "+".join(x.split(".")[1] for x in s) or "default")  # fmt: skip
@pytest.mark.parametrize("placement", theory.FORMS)
def test_growth_of_measured_models_lies_within_the_bounds(placement, setting):
    """Depth 6, width 96, one initialisation: within 12 % of the bounds on average, within 35 % at every block.

    An encoder's tokens grow alike within a few blocks: one block is then little more than one draw.
    """
    cfg = config("model.depth=6", "model.width=96", "model.context=12", f"model.placement={placement}", *setting)
    bounds, found = theory.hidden_growth(cfg), measured(cfg)
    lower, upper = bounds.lower[1:], bounds.upper[1:]
    assert (found > 0.65 * lower).all()
    assert (found < 1.35 * upper).all()
    assert 0.88 * lower.mean() < found.mean() < 1.12 * upper.mean()
    model = made(cfg)
    start = model.stacks[model.stack_names[-1]].embed(torch.arange(12)[None])
    assert start.square().mean().item() == pytest.approx(bounds.lower[0], rel=0.15)


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("placement", ["post", "deepnorm"])
def test_variances_are_those_of_the_drawn_weights(init, placement):
    cfg = config("model.depth=2", "model.width=96", "model.activation=swiglu", f"model.placement={placement}",
                 f"model.init={init}", "model.kv_heads=2")  # fmt: skip
    for entry in tensors(made(cfg)):
        site, tensor = entry.id.site, entry.id.tensor
        if entry.id.layer is not None and tensor in {"v", "out", "in", "gate"}:
            drawn = entry.value.square().mean().item()
            assert theory._variance(cfg, entry.id.layer, site, tensor) == pytest.approx(drawn, rel=0.1)


@pytest.mark.parametrize("change", [
    "model.norm=none", "model.norm=dyt", "model.norm=batchnorm", "model.ffn=moe", "model.ffn=none",
    "model.dropout=0.1", *(f"model.placement={p}" for p in ("reordered", "none", "keel", "admin", "resi_dual")),
])  # fmt: skip
def test_no_theory_where_none_is_known(change):
    cfg = config(change)
    assert theory.hidden_growth(cfg) is None
    assert theory.last_ffn_gradient(cfg) is None
    assert theory.post_gradient_factor(cfg) is None


@pytest.mark.parametrize(("name", "moment"), [("relu", 0.500), ("gelu", 0.425), ("silu", 0.355)])
def test_second_moments(name, moment):
    assert theory.second_moment(name, 1.0) == pytest.approx(moment, abs=1e-3)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "swiglu", "geglu"])
@pytest.mark.parametrize("ratio", [1.0, 4.0])
def test_ffn_gains_against_sampling(activation, ratio):
    """Forward E||F(z)||^2 / d, and backward E||J^T g||^2 / ||g||^2."""
    cfg = config("model.width=256", "model.depth=1", f"model.ffn_ratio={ratio}", f"model.activation={activation}")
    ffn = made(cfg, vocab=3).stacks["decoder"].blocks[0].ffn
    assert isinstance(ffn, FFN)
    z = torch.randn(2000, 256, requires_grad=True)
    out, g = ffn(z), torch.randn(2000, 256)
    (back,) = torch.autograd.grad(out, z, g)
    assert out.square().mean().item() == pytest.approx(theory.ffn_gain(cfg), rel=0.1)
    assert (back.square().mean() / g.square().mean()).item() == pytest.approx(theory.ffn_backward_gain(cfg), rel=0.1)


def test_exponents_of_the_last_ffn():
    """Theorem 1's limits at great depth; DeepNet's beta / alpha; a branch norm and a stream 1 + 2 L; (L log L)^-1/2."""

    def exponent(placement: str) -> float:
        cfg = config(*PAPER, f"model.placement={placement}")
        sizes = [_gradient_at(cfg, depth) for depth in (1000, 2000)]
        return float(np.log(sizes[1] / sizes[0]) / np.log(2))

    for placement, limit in theory.LAST_FFN_SLOPE.items():
        assert exponent(placement) == pytest.approx(limit, abs=2e-3)
    assert exponent("deepnorm") == pytest.approx(-0.5, abs=1e-3)
    assert exponent("sandwich") == pytest.approx(-0.5, abs=1e-3)
    assert -0.6 < exponent("lns") < -0.5


def _at_depth(cfg: ModelConfig, depth: int) -> ModelConfig:
    return cfg.model_copy(update={"depth": depth})


def _gradient_at(cfg: ModelConfig, depth: int) -> float:
    return theory.last_ffn_gradient(_at_depth(cfg, depth)).middle


@pytest.mark.parametrize("placement", theory.FORMS)
def test_exponents_of_measured_models(placement):
    """Depths 4, 12 and 36 in the paper's setting at width 64, two seeds: within 0.12 of the theory's."""
    depths, logs = [4, 12, 36], []
    cfg = config(*PAPER, "model.width=64", "model.context=16", f"model.placement={placement}")
    text = torch.randint(512, (4, 4, 17))
    for depth in depths:
        here, sizes = _at_depth(cfg, depth), []
        for seed in (0, 1):
            model = made(here, seed)
            weight = model.stacks["decoder"].blocks[-1].ffn.w_out.weight
            loss = torch.stack([model.loss(t[:, :-1], t[:, 1:]) for t in text]).mean()
            sizes.append(torch.autograd.grad(loss, weight)[0].norm().log().item())
        logs.append(np.mean(sizes))
    fitted = np.polyfit(np.log(depths), logs, 1)[0]
    expected = np.polyfit(np.log(depths), np.log([_gradient_at(cfg, depth) for depth in depths]), 1)[0]
    assert fitted == pytest.approx(expected, abs=0.12)


def test_appendix_f_s_factor_and_what_the_ffn_passes_back():
    norm_alone, with_branch = theory.post_gradient_factor(config(*PAPER, "model.placement=post"))
    assert norm_alone == pytest.approx((2 / 3) ** 0.5, rel=1e-3)
    assert with_branch == pytest.approx(1.0, rel=1e-3)  # act(z) = z act'(z): phi = b
    assert theory.post_gradient_factor(config("model.placement=pre")) is None
