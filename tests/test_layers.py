"""Norms, attention, FFN and positions against independent references."""

import math

import numpy as np
import pytest
import torch
from conftest import compose

from normlab.attention import Attention
from normlab.ffn import ACTIVATIONS, FFN, MoE, ffn_width
from normlab.model import Decoder
from normlab.norm import NORMS
from normlab.position import RelativeBias, Rotary, sinusoid
from normlab.tensors import count_parameters

EPS = 1e-3


def _centred(x):
    return x - x.mean(-1, keepdims=True)


# The equation of every norm on a NumPy array, gain g and bias b as stored.
NORM_EQUATIONS = {
    "layernorm": lambda x, g, b: _centred(x) / np.sqrt((_centred(x) ** 2).mean(-1, keepdims=True) + EPS) * g + b,
    "layernorm_nobias": lambda x, g, b: _centred(x) / np.sqrt((_centred(x) ** 2).mean(-1, keepdims=True) + EPS) * g,
    "rmsnorm": lambda x, g, b: x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * g,
    "rmsnorm_nogain": lambda x, g, b: x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS),
    "rmsnorm_offset": lambda x, g, b: x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * (1 + g),
    "batchnorm": lambda x, g, b: (x - x.mean((0, 1))) / np.sqrt(x.var((0, 1)) + EPS) * g + b,
    "scalenorm": lambda x, g, b: g * x / np.maximum(np.sqrt((x**2).sum(-1, keepdims=True)), EPS),
    "dyt": lambda x, g, b: np.tanh(0.5 * x) * g + b,
    "none": lambda x, g, b: x,
}


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    for name, parameter in module.named_parameters():
        if not name.endswith("alpha"):
            torch.nn.init.normal_(parameter, mean=0.3, std=0.5)
    return module.double()


@torch.no_grad()
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])  # at 1e-3 eps decides
@pytest.mark.parametrize("name", NORMS)
def test_norm_is_its_equation_with_the_given_eps(name, scale):
    norm = randomised(NORMS[name].make(8, EPS))
    x = scale * torch.randn(3, 5, 8, dtype=torch.float64)
    gain, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    expected = NORM_EQUATIONS[name](x.numpy(), *(None if p is None else p.numpy() for p in (gain, bias)))
    np.testing.assert_allclose(norm(x).numpy(), expected, rtol=1e-12, atol=1e-14)


def test_norm_kinds_differ_by_their_parameters():
    counts = {name: count_parameters(norm.make(8, 1e-5)) for name, norm in NORMS.items()}
    assert counts == {
        **{"layernorm": 16, "layernorm_nobias": 8, "rmsnorm": 8, "rmsnorm_nogain": 0, "rmsnorm_offset": 8},
        **{"batchnorm": 16, "scalenorm": 1, "dyt": 17, "none": 0},
    }


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(set(NORMS) - {"none", "dyt"}))
def test_a_fresh_norm_gives_unit_rms(name):
    x = 7 * torch.randn(16, 64, 32)
    assert NORMS[name].make(32, NORMS[name].eps)(x).square().mean().item() == pytest.approx(1.0, rel=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NORMS)
def test_statistics_in_float32_under_half_precision(name, dtype):
    """Squares of 300 overflow float16, a sum of 4096 of them both; the result is that of float32, rounded once."""
    norm = NORMS[name].make(4096, 1e-5).eval()
    x = (300 + 10 * torch.randn(4, 4096)).to(dtype)
    for module in (norm, norm.to(dtype)):  # autocast has float32 weights, a half-precision model has not
        got = module(x)
        assert got.dtype == dtype
        torch.testing.assert_close(got, norm.float()(x.float()).to(dtype), rtol=0, atol=0)


def test_batchnorm_evaluates_with_running_statistics():
    norm = NORMS["batchnorm"].make(4, 1e-5)
    for _ in range(200):
        norm(3 + 2 * torch.randn(8, 16, 4))
    norm.eval()
    x = torch.full((1, 1, 4), 5.0)
    torch.testing.assert_close(norm(x), torch.ones(1, 1, 4), rtol=0.1, atol=0.1)


def attention_loop(attn, x, memory, heads, groups, K, causal, softcap, qk_norm, bias=None):
    """softmax(q_t . k_s / sqrt(K)) over the s that t may see, head by head, token by token."""
    kind = "w_qkv" if memory is None else "w_kv"
    if memory is None:
        q, k, v = attn.w_qkv(x).split(list(attn.fused[kind].values()), -1)
    else:
        q, (k, v) = attn.w_q(x), attn.w_kv(memory).split(list(attn.fused[kind].values()), -1)
    if qk_norm == "joint":
        q, k = (t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt() for t in (q, k))
    out = torch.zeros(len(x), heads * K, dtype=torch.float64)
    for h in range(heads):
        g = h // (heads // groups)
        qh, kh, vh = q[:, h * K : (h + 1) * K], k[:, g * K : (g + 1) * K], v[:, g * K : (g + 1) * K]
        if qk_norm == "head":
            qh, kh = (t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt() for t in (qh, kh))
        for t in range(len(x)):
            seen = range(t + 1) if causal else range(len(kh))
            scores = [float(qh[t] @ kh[s]) / math.sqrt(K) for s in seen]
            if softcap:
                scores = [softcap * math.tanh(score / softcap) for score in scores]
            if bias is not None:
                scores = [score + float(bias[h, t, s]) for s, score in zip(seen, scores, strict=True)]
            weights = torch.tensor([math.exp(score) for score in scores], dtype=torch.float64)
            out[t, h * K : (h + 1) * K] = (weights / weights.sum()) @ vh[: len(weights)]
    return attn.w_out(out)


@torch.no_grad()
@pytest.mark.parametrize("qk_norm", [False, "head", "joint"])
@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("kind", ["causal", "bidirectional", "cross"])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_attention_against_a_loop(qk_norm, heads, groups, kind, softcap):
    K = 6
    cfg = compose(
        *("model.width=8", "model.norm=rmsnorm", f"model.heads={heads}", f"model.kv_heads={groups}"),
        *(f"model.head_width={K}", f"model.qk_norm={str(qk_norm).lower()}", f"model.attn_softcap={softcap or 'null'}"),
    ).model
    attn = Attention(cfg, causal=kind == "causal", cross=kind == "cross").double()
    x, other = (torch.randn(1, n, 8, dtype=torch.float64) for n in (6, 9))
    memory = other if kind == "cross" else None
    got = attn(x, memory)[0]
    expected = attention_loop(
        attn, x[0], None if memory is None else memory[0], heads, groups, K, kind == "causal", softcap, qk_norm
    )
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_relative_bias_is_added_to_the_scores(causal, softcap):
    cfg = compose("model.width=8", "model.heads=2", f"model.attn_softcap={softcap or 'null'}").model
    attn, relative = Attention(cfg, causal=causal).double(), RelativeBias(2, 16, causal).double()
    x = torch.randn(1, 7, 8, dtype=torch.float64)
    bias = relative(7)
    got = attn(x, None, bias)[0]
    expected = attention_loop(attn, x[0], None, 2, 2, 4, causal, softcap, False, bias[0])
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_relative_buckets():
    """Exact near, logarithmic further, the last bucket beyond 128; the future has its own half where it is seen."""
    past = RelativeBias(1, 300, causal=True).bucket_TT[299].flip(0).tolist()  # by distance 0, 1, 2, ...
    assert past[:16] == list(range(16))
    assert past[16:40] == sorted(past[16:40])
    assert set(past[128:]) == {31}
    both = RelativeBias(1, 300, causal=False).bucket_TT
    assert both[50, 43:51].flip(0).tolist() == list(range(8))
    assert both[50, 51:58].tolist() == [16 + d for d in range(1, 8)]
    assert both[0, 299].item() == 31
    assert both[299, 0].item() == 15


def test_rotary_is_a_complex_rotation():
    K, T = 8, 7
    x = torch.randn(1, 1, T, K, dtype=torch.float64)
    got = Rotary(K, T, 10000.0)(x)[0, 0].numpy()
    pairs = x[0, 0, :, : K // 2].numpy() + 1j * x[0, 0, :, K // 2 :].numpy()
    angles = np.arange(T)[:, None] * 10000.0 ** (-2 * np.arange(K // 2) / K)
    turned = pairs * np.exp(1j * angles)
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], 1), rtol=1e-5, atol=1e-6)


def test_partial_rotary_leaves_the_other_channels():
    x = torch.randn(1, 2, 5, 10)
    got = Rotary(4, 5, 500.0)(x)
    assert torch.equal(got[..., 4:], x[..., 4:])
    torch.testing.assert_close(got[..., :4], Rotary(4, 5, 500.0)(x[..., :4]))


@pytest.mark.parametrize("width", [6, 7])
def test_sinusoid_is_the_published_formula(width):
    table = sinusoid(5, width)
    for t in range(5):
        for j in range(width):
            angle = t / 10000 ** (2 * (j // 2) / width)
            assert table[t, j].item() == pytest.approx(math.cos(angle) if j % 2 else math.sin(angle), abs=1e-6)


FORMULAS = {
    "relu": lambda z: max(z, 0.0),
    "gelu": lambda z: z * 0.5 * (1 + math.erf(z / math.sqrt(2))),
    "gelu_tanh": lambda z: 0.5 * z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "silu": lambda z: z / (1 + math.exp(-z)),
    "relu2": lambda z: max(z, 0.0) ** 2,
}
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
FORMULAS |= {name: FORMULAS[act] for name, act in GATED.items()}


@torch.no_grad()
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_ffn_is_its_equation(name):
    ffn = FFN(4, 16, name, bias=True).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    gate = ffn.w_gate or ffn.w_in
    act = torch.tensor([[FORMULAS[name](z) for z in row] for row in gate(x).tolist()], dtype=torch.float64)
    assert ACTIVATIONS[name].gated == (name in GATED)
    inner = act * ffn.w_in(x) if name in GATED else act
    torch.testing.assert_close(ffn(x), ffn.w_out(inner), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
def test_gated_ffn_has_the_plain_one_s_parameters(bias):
    """Within 0.5 % at every width from 64; a multiple of 8 from width 352 on."""
    for width in range(64, 1030):
        hidden = ffn_width(width, 4.0, True)
        plain, gated = (
            2 * 4 * width * width + bias * 5 * width,
            3 * width * hidden + bias * (2 * hidden + width),
        )
        assert abs(gated / plain - 1) < 0.005, width
        assert width < 352 or hidden % 8 == 0, width


@torch.no_grad()
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_mixture_of_experts_against_a_loop(activation):
    E, k, D, F = 4, 2, 6, 5
    moe = randomised(MoE(D, F, activation, E, k))
    x = torch.randn(2, 3, D, dtype=torch.float64)
    expected, chosen_by, shares = torch.zeros_like(x), [0] * E, torch.zeros(E, dtype=torch.float64)
    for b in range(2):
        for t in range(3):
            scores = [math.exp(moe.w_router.weight[e] @ x[b, t]) for e in range(E)]
            p = [s / sum(scores) for s in scores]
            shares += torch.tensor(p, dtype=torch.float64) / 6
            top = sorted(range(E), key=lambda e: -p[e])[:k]
            for e in top:
                chosen_by[e] += 1
                h = moe.expert_in[e] @ x[b, t]
                if activation == "relu":
                    h = h.clamp(min=0)
                else:
                    gate = moe.expert_gate[e] @ x[b, t]
                    h = h * gate * torch.sigmoid(gate)
                expected[b, t] += p[e] / sum(p[i] for i in top) * (moe.expert_out[e] @ h)
    torch.testing.assert_close(moe(x), expected, rtol=1e-10, atol=1e-12)
    load = torch.tensor(chosen_by, dtype=torch.float64) / 6
    torch.testing.assert_close(moe.load.double(), load)
    torch.testing.assert_close(moe.balance, E * (load * shares).sum())


def test_an_even_router_has_balance_k():
    moe = MoE(4, 4, "relu", experts=8, k=3)
    torch.nn.init.zeros_(moe.w_router.weight)
    moe(torch.randn(2, 5, 4))
    assert moe.balance.item() == pytest.approx(3.0)


@pytest.mark.parametrize("position", ["learned", "sinusoidal", "rotary", "relative", "none"])
def test_position_decides_whether_order_matters(position):
    cfg = compose("model.depth=1", "model.width=8", "model.heads=2", f"model.position={position}").model
    model = Decoder(cfg, vocab=9).double()
    tokens = torch.tensor([[1, 2, 3, 4]])
    swapped = torch.tensor([[2, 1, 3, 4]])
    same = torch.allclose(model(tokens)[0, -1], model(swapped)[0, -1])
    assert same == (position == "none")


def test_tying_removes_exactly_one_matrix():
    tied, untied = (Decoder(compose(f"model.tie={t}").model, vocab=100) for t in ("true", "false"))
    assert count_parameters(untied) - count_parameters(tied) == 100 * 64
    assert tied.head.out.weight is tied.decoder.embed.token.weight


@pytest.mark.parametrize(
    ("bias", "owners"),
    [("true", {"w_qkv", "w_out", "w_in"}), ("false", set()), ("qkv", {"w_qkv"}), ("ffn", {"w_in", "w_out"})],
)
def test_where_biases_are(bias, owners):
    model = Decoder(compose(f"model.bias={bias}", "model.norm=layernorm_nobias").model, vocab=10)
    biased = [name.split(".")[3:5] for name, _ in model.named_parameters() if name.endswith("bias")]
    assert {owner for _, owner in biased} == owners
    assert bias != "ffn" or {site for site, _ in biased} == {"ffn"}


def test_dropout_acts_in_training_only():
    cfg = compose("model.depth=2", "model.dropout=0.5").model
    model = Decoder(cfg, vocab=9)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
