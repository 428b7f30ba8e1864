"""Every placement against its equation written by hand, in float64, and against what the papers say follows."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import compose

from normlab import residual
from normlab.init import calibrate, initialise
from normlab.model import Block, Decoder, EncoderDecoder
from normlab.residual import PLACEMENTS, Keel, LayerScale
from normlab.tensors import tensors

DEPTH = 6

# One row per name, as in the paper. x the stream, s one sublayer: s.F itself, s.N and s.M its first and second norm,
# s.w its learned scale, s.l its block from 1. `each` applies a sublayer's equation to attention, then to the FFN.


def each(equation):
    return lambda x, attn, ffn: equation(equation(x, attn), ffn)


pre = each(lambda x, s: x + s.F(s.N(x)))
post = each(lambda x, s: s.N(x + s.F(x)))
sandwich = each(lambda x, s: x + s.M(s.F(s.N(x))))


def b2t(x, attn, ffn):
    h = attn.N(x + attn.F(x))
    return ffn.N(x + h + ffn.F(h))


def keel(x, attn, ffn):
    if attn.l == 1:
        h = x + attn.F(attn.N(x))
        return ffn.M(h + ffn.F(ffn.N(h)))
    return each(lambda x, s: s.M(12 * x + s.F(s.N(x))))(x, attn, ffn)


def resi_dual(x, attn, ffn):
    x, d = x
    for s in (attn, ffn):
        y = s.F(x)
        x, d = s.N(x + y), d + y
    return x, d


def hybrid_norm(x, attn, ffn):
    z = ffn.N(x + attn.F(x))
    return z + ffn.F(z)


EQUATIONS = {
    "pre": pre,
    "post": post,
    "deepnorm": each(lambda x, s: s.N(1.8612097182041991 * x + s.F(x))),  # (2 * 6)^(1/4)
    "sandwich": sandwich,
    "reordered": each(lambda x, s: x + s.N(s.F(x))),
    "res_post": each(lambda x, s: x + s.N(s.F(x))),
    "sub_ln": pre,  # and norms inside the sublayers
    "normformer": lambda x, a, f: (lambda h: f.w * h + f.F(f.N(h)))(x + a.M(a.F(a.N(x)))),  # and parts inside
    "admin": each(lambda x, s: s.N(s.w * x + s.F(x))),
    "admin_fixed": each(lambda x, s: s.N(math.sqrt(13 / math.log(13) - 1) * x + s.F(x))),
    "b2t": b2t,
    "resi_dual": resi_dual,
    "mix_ln": lambda x, a, f: (post if a.l <= 2 else pre)(x, a, f),  # a quarter of 6 blocks, rounded up
    "lns": each(lambda x, s: x + s.F(s.N(x) / math.sqrt(s.l))),
    "hybrid_norm": hybrid_norm,  # and norms of q, k, v
    "keel": keel,
    "rezero": each(lambda x, s: x + s.w * s.F(x)),
    "layerscale": each(lambda x, s: x + s.w * s.F(s.N(x))),
    "parallel": lambda x, a, f: x + a.F(f.N(x)) + f.F(f.N(x)),
    "none": each(lambda x, s: x + s.F(x)),
    "no_residual": each(lambda x, s: s.F(s.N(x))),
}


def layernorm(module):
    """(x - mean) / sqrt(var + eps) * g + b, spelt out."""

    def apply(x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.weight + module.bias

    return apply


def block(placement: str, layer: int = 0) -> Block:
    cfg = compose("model.width=8", "model.heads=2", f"model.depth={DEPTH}", f"model.placement={placement}").model
    made = Block(cfg, "decoder", layer).double()
    for parameter in made.parameters():  # norms away from gain 1, bias 0
        torch.nn.init.normal_(parameter, mean=0.3, std=0.5)
    return made


def part(made: Block, site: str, layer: int) -> SimpleNamespace:
    """One sublayer for the equations."""
    found = getattr(made, f"{site}_residual", None)
    norms = [layernorm(n) for n in found.children()] if found else []
    N, M = (*norms, None, None)[:2]
    return SimpleNamespace(F=getattr(made, site), N=N, M=M, w=getattr(found, "scale", None), l=layer + 1)


def model(*overrides: str, vocab: int = 11) -> Decoder:
    cfg = compose(*overrides).model
    made = Decoder(cfg, vocab)
    initialise(made, cfg, seed=0)
    return made


def test_every_placement_has_an_equation_here():
    assert set(EQUATIONS) == set(PLACEMENTS)


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("placement", EQUATIONS)
def test_block_is_the_equation(placement, layer):
    made = block(placement, layer)
    x = PLACEMENTS[placement].enter(torch.randn(2, 5, 8, dtype=torch.float64))
    expected = EQUATIONS[placement](x, part(made, "attn", layer), part(made, "ffn", layer))
    torch.testing.assert_close(made(x), expected, rtol=1e-12, atol=1e-12)


def test_resi_dual_ends_in_the_sum_of_its_streams():
    final = model("model.width=8", "model.placement=resi_dual").double().decoder.final_norm
    x, d = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(2, 3, 8, dtype=torch.float64)
    torch.testing.assert_close(final((x, d)), x + layernorm(final.norm)(d), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("placement", ["sub_ln", "normformer"])
def test_ffn_has_a_norm_before_w_out(placement):
    ffn, x = block(placement).ffn, torch.randn(2, 5, 8, dtype=torch.float64)
    expected = ffn.w_out(layernorm(ffn.inner_norm)(torch.nn.functional.gelu(ffn.w_in(x))))
    torch.testing.assert_close(ffn(x), expected, rtol=1e-12, atol=1e-12)


def heads_of(attn, x, *norms):
    """softmax(q k^T / sqrt(K)) v per head, (B, T, H, K), with norms on q, k and v."""
    q, k, v = (t.unflatten(-1, (2, 4)) for t in attn.w_qkv(x).chunk(3, -1))
    if norms:
        q, k, v = (layernorm(norm)(t) for norm, t in zip(norms, (q, k, v), strict=True))
    scores = torch.einsum("bthk,bshk->bhts", q, k) / 2
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    return torch.einsum("bhts,bshk->bthk", scores.softmax(-1), v)


@pytest.mark.parametrize("placement", ["sub_ln", "normformer", "hybrid_norm"])
def test_parts_inside_attention(placement):
    attn, x = block(placement).attn, torch.randn(2, 5, 8, dtype=torch.float64)
    norms = (attn.q_norm, attn.k_norm, attn.v_norm) if placement == "hybrid_norm" else ()
    heads = heads_of(attn, x, *norms)
    if placement == "sub_ln":
        heads = layernorm(attn.out_norm)(heads.flatten(2))
    if placement == "normformer":
        heads = heads * attn.head_scale[:, None]
    torch.testing.assert_close(attn(x), attn.w_out(heads.flatten(2) if heads.ndim == 4 else heads))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_later_token_never_changes_an_earlier_logit(placement):
    made = model("model.width=16", "model.heads=2", "model.depth=3", f"model.placement={placement}").double()
    tokens = torch.randint(11, (2, 9))
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 11
    before, after = made(tokens), made(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6], rtol=0, atol=0)
    assert not torch.allclose(before[:, 6:], after[:, 6:])


NORM_COUNTS = {  # (in a block, after the last)
    **{"pre": (2, 1), "post": (2, 0), "deepnorm": (2, 0), "sandwich": (4, 1), "reordered": (2, 1), "res_post": (2, 1)},
    **{"sub_ln": (4, 1), "normformer": (4, 1), "admin": (2, 0), "admin_fixed": (2, 0), "b2t": (2, 0)},
    **{"resi_dual": (2, 1), "mix_ln": (2, 1), "lns": (2, 1), "hybrid_norm": (4, 1), "rezero": (0, 0)},
    **{"layerscale": (2, 1), "parallel": (1, 1), "none": (0, 0), "no_residual": (2, 1)},
}


@pytest.mark.parametrize(("placement", "counts"), NORM_COUNTS.items())
def test_number_of_norms(placement, counts):
    made = model("model.depth=3", f"model.placement={placement}")
    norms = [m for m in made.modules() if isinstance(m, torch.nn.LayerNorm)]
    assert len(norms) == 3 * counts[0] + counts[1]


def test_an_alias_is_the_same_placement():
    assert compose("model.placement=peri") == compose("model.placement=sandwich")


def where(placement: str, depth: int, stack: str = "decoder", site: str = "ffn", **arch: int):
    named = {"encoder": "model.arch=encoder_decoder"} if "encoder" in arch else {}
    extra = [*named.values(), *(f"model.encoder_depth={n}" for n in arch.values())]
    cfg = compose(f"model.depth={depth}", f"model.placement={placement}", "model.width=8", "model.heads=1", *extra)
    return cfg.model.where(stack, cfg.model.blocks(stack) - 1, site)


TABLE = {  # blocks: DeepNorm alpha and beta, Sub-LN gain, fixed Admin weight, Keel alpha, LNS scale of the last block
    6: (1.8612, 0.3799, 1.5764, 2.0170, 12, 0.4082),
    12: (2.2134, 0.3195, 1.7827, 2.6013, 24, 0.2887),
    24: (2.6321, 0.2686, 1.9675, 3.4045, 48, 0.2041),
    48: (3.1302, 0.2259, 2.1364, 4.4948, 96, 0.1443),
    96: (3.7224, 0.1900, 2.2929, 5.9727, 192, 0.1021),
}


@pytest.mark.parametrize(("depth", "row"), TABLE.items())
def test_depth_constants(depth, row):
    """By what the blocks do: norms replaced by the identity, F by zero (skip) or by a constant (branch)."""
    alpha, beta, sub_ln, admin, keel_alpha, lns = (pytest.approx(v, abs=5e-5) for v in row)

    def skip(name: str, branch: float = 0.0, x: float = 1.0) -> float:
        at = where(name, depth)
        joined = PLACEMENTS[name].build("ffn")(torch.nn.Identity, at)
        return float(joined(torch.tensor(x), lambda z: branch * z))

    assert skip("deepnorm") == alpha
    assert skip("admin_fixed") == admin
    assert skip("keel") == keel_alpha
    assert skip("lns", branch=1.0) - 1 == lns
    assert PLACEMENTS["deepnorm"].gain(where("deepnorm", depth)) == beta
    assert PLACEMENTS["sub_ln"].gain(where("sub_ln", depth)) == sub_ln


def test_constants_of_an_encoder_decoder():
    """DeepNet's and Magneto's tables at N = 18 encoder, M = 12 decoder blocks; fixed Admin counts 3 M sublayers."""
    n, m = 18, 12
    encoder, decoder, cross = (
        where("deepnorm", m, stack, site, encoder=n)
        for stack, site in (("encoder", "ffn"), ("decoder", "ffn"), ("decoder", "cross"))
    )
    assert residual.deepnorm_alpha(encoder) == pytest.approx(0.81 * (n**4 * m) ** 0.0625)
    assert residual.deepnorm_beta(encoder) == pytest.approx(0.87 * (n**4 * m) ** -0.0625)
    assert residual.deepnorm_alpha(decoder) == pytest.approx(36**0.25)
    assert residual.deepnorm_beta(decoder) == residual.deepnorm_beta(cross) == pytest.approx(144**-0.25)
    assert residual.sub_ln_gain(encoder) == pytest.approx(math.sqrt(math.log(36) * math.log(36) / 3))
    assert residual.sub_ln_gain(decoder) == pytest.approx(math.sqrt(math.log(36)))
    assert residual.sub_ln_gain(cross) == 1
    assert (encoder.sublayers, decoder.sublayers) == (36, 36)


@pytest.mark.parametrize(("depth", "start"), [(18, 0.1), (24, 1e-5), (25, 1e-6)])
def test_layerscale_starts_smaller_in_deeper_stacks(depth, start):
    scale = LayerScale(torch.nn.Identity, where("layerscale", depth)).scale
    torch.testing.assert_close(scale, torch.full((8,), start))


@pytest.mark.parametrize("placement", ["deepnorm", "sub_ln"])
def test_gain_scales_v_out_and_ffn_only(placement):
    drawn = {}
    for name in ("pre", placement):
        made = model("model.depth=12", f"model.placement={name}", "model.activation=swiglu")
        drawn[name] = {str(e.id): e.value for e in tensors(made)}
    gain = {"deepnorm": 96**-0.25, "sub_ln": math.log(24) ** 0.5}[placement]
    for name, weight in drawn["pre"].items():
        site, tensor = name.split(".")[-2:]
        gained = site in {"attn", "ffn"} and tensor in {"v", "out", "in", "gate"}
        if name in drawn[placement]:
            torch.testing.assert_close(
                drawn[placement][name], weight * (gain if gained else 1.0), rtol=1e-6, atol=0, msg=name
            )


def test_admin_weights_follow_the_profiled_variances():
    """w_2^2 = Var x_0 + Var F_1, w_{i+1}^2 = w_i^2 + Var F_i, measured here by hand with every w at 1."""
    overrides = ["model.depth=3", "model.placement=admin", "model.width=16", "model.heads=2"]
    made, tokens = model(*overrides), torch.randint(11, (4, 32))
    squares, x = [], made.decoder.embed(tokens)
    total = x.var(correction=0).item()
    for layer in made.decoder.blocks:
        for site in ("attn", "ffn"):
            y = getattr(layer, site)(x)
            x = torch.nn.functional.layer_norm(x + y, (16,))
            squares.append(total)
            total += y.var(correction=0).item()
    calibrate(made, tokens)
    got = [getattr(b, f"{s}_residual").scale for b in made.decoder.blocks for s in ("attn", "ffn")]
    assert [w.std().item() for w in got] == [0.0] * 6
    assert [w[0].item() for w in got] == pytest.approx([1.0, *(math.sqrt(s) for s in squares[1:])], rel=1e-5)
    assert not any(m._forward_hooks for m in made.modules())


def test_calibration_leaves_other_placements_alone():
    made = model("model.depth=2")
    before = [p.clone() for p in made.parameters()]
    calibrate(made, torch.zeros(1, 4, dtype=torch.long))
    assert all(torch.equal(a, b) for a, b in zip(before, made.parameters(), strict=True))


def streams(*overrides: str) -> list[torch.Tensor]:
    """The stream at initialisation: of the embedding and after every sublayer, whole text at once."""
    made, seen = model(*overrides, vocab=64), []

    def record(_module, _args, output):
        seen.append(output[0] if isinstance(output, tuple) else output)

    for module in made.modules():
        if isinstance(module, residual.Residual):
            module.register_forward_hook(record)
    made.decoder.embed.register_forward_hook(record)
    with torch.no_grad():
        made(torch.randint(64, (8, 64)))
    return seen


@torch.no_grad()
@pytest.mark.parametrize("placement", ["rezero", "res_post"])
def test_block_is_the_identity_at_initialisation(placement):
    seen = streams("model.depth=4", f"model.placement={placement}")
    for x in seen[1:]:
        torch.testing.assert_close(x, seen[0], rtol=0, atol=0)


@pytest.mark.parametrize("norm", ["rmsnorm_offset", "scalenorm", "dyt", "rmsnorm"])
def test_res_post_starts_at_zero_gain_whatever_the_norm(norm):
    seen = streams("model.depth=2", "model.placement=res_post", f"model.norm={norm}")
    torch.testing.assert_close(seen[-1], seen[0], rtol=0, atol=0)


def test_gradient_of_a_stack_with_zeroed_branches_is_the_identity():
    """Claim B8: the residual path carries the identity. dx_L/dx_0 with W_out = 0 is I exactly."""
    made = model("model.depth=5", "model.width=8", "model.heads=2").double()
    for e in tensors(made):
        if e.id.tensor in {"out", "out_bias"} and e.id.layer is not None:
            e.value.zero_()

    def stack(x):
        for layer in made.decoder.blocks:
            x = layer(x)
        return x

    jacobian = torch.autograd.functional.jacobian(stack, torch.randn(1, 3, 8, dtype=torch.float64))
    torch.testing.assert_close(jacobian.reshape(24, 24), torch.eye(24, dtype=torch.float64), rtol=0, atol=0)


@pytest.mark.parametrize("placement", ["post", "deepnorm", "admin", "admin_fixed", "b2t", "keel", "resi_dual"])
def test_unit_rms_after_every_sublayer(placement):
    seen = streams("model.depth=12", f"model.placement={placement}")
    first = 2 if placement == "keel" else 1  # Keel's first attention is pre-norm
    for x in seen[first:]:
        assert x.square().mean().sqrt().item() == pytest.approx(1.0, abs=2e-3)


@pytest.mark.parametrize(("placement", "slope"), [("pre", None), ("reordered", 1.0), ("sandwich", 1.0)])
def test_stream_variance_grows_linearly(placement, slope):
    """One unit per sublayer where the branch ends in a norm and branches are uncorrelated (large vocabulary)."""
    rms2 = [
        x.square().mean().item() for x in streams("model.depth=24", "model.width=256", f"model.placement={placement}")
    ]
    index = torch.arange(len(rms2), dtype=torch.float64)
    values = torch.tensor(rms2, dtype=torch.float64)
    assert torch.corrcoef(torch.stack((index, values)))[0, 1] > 0.995
    if slope is not None:
        assert (rms2[-1] - rms2[0]) / 48 == pytest.approx(slope, rel=0.25)


def logits(monkeypatch, placement: str, row: residual.Placement | None = None, *overrides: str) -> torch.Tensor:
    if row is not None:
        monkeypatch.setitem(PLACEMENTS, placement, row)
    made = model(
        "model.depth=4", "model.width=16", "model.heads=2", f"model.placement={placement}", *overrides
    ).double()
    return made(torch.arange(11)[None])


def test_limits(monkeypatch):
    """Mix-LN 0 = pre, 1 = post with a final norm; LNS of 1 block = pre; DeepNorm 1, 1 = post; Keel 1, no N = post."""
    replace = dataclasses.replace
    plain = {name: logits(monkeypatch, name) for name in ("pre", "post")}

    def same(a, b):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)

    same(logits(monkeypatch, "mix_ln", replace(PLACEMENTS["mix_ln"], attn=residual.mix_ln(0.0))), plain["pre"])
    mixed = logits(monkeypatch, "mix_ln", replace(PLACEMENTS["mix_ln"], attn=residual.mix_ln(1.0)))
    same(mixed, logits(monkeypatch, "post", None, "model.final_norm=true"))
    same(*(logits(monkeypatch, name, None, "model.depth=1") for name in ("lns", "pre")))

    monkeypatch.setattr(residual, "deepnorm_alpha", lambda where: 1.0)
    same(logits(monkeypatch, "deepnorm", replace(PLACEMENTS["deepnorm"], gain=lambda where: 1.0)), plain["post"])

    def bare_keel(make, at):
        made = Keel(make, at)
        made.norm, made.alpha = torch.nn.Identity(), 1
        return made

    same(logits(monkeypatch, "keel", replace(PLACEMENTS["keel"], attn=bare_keel)), plain["post"])


def test_rezero_shares_one_scalar_and_moves_only_that_at_first():
    made = model("model.depth=3", "model.placement=rezero")
    for layer in made.decoder.blocks:
        assert layer.attn_residual.scale is layer.ffn_residual.scale
    made.loss(torch.randint(11, (2, 16)), torch.randint(11, (2, 16))).backward()
    for e in tensors(made):
        if e.id.layer is not None:
            assert e.parameter.grad.any().item() == (e.id.tensor == "scale"), e.id


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_encoder_decoder_blocks_of_every_placement(placement):
    """The source reaches every target token through every decoder block; a later target reaches no earlier one."""
    cfg = compose(
        *("model.arch=encoder_decoder", "model.depth=2", "model.encoder_depth=3", "model.width=16", "model.heads=2"),
        f"model.placement={placement}",
    ).model
    made = EncoderDecoder(cfg, vocab=11)
    initialise(made, cfg, seed=0)
    with torch.no_grad():
        for p in made.parameters():  # away from scales that start at 0
            p.add_(0.1 * torch.randn_like(p))
    made.double()
    source, tokens = torch.randint(11, (2, 7)), torch.randint(11, (2, 9))
    plain = made((source, tokens))
    other, later = source.clone(), tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % 11
    later[:, 5] = (later[:, 5] + 1) % 11
    assert (made((other, tokens)) - plain).abs().amax((0, 2)).min() > 1e-9
    torch.testing.assert_close(made((source, later))[:, :5], plain[:, :5], rtol=0, atol=0)
