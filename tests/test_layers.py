"""Norms, attention, FFN and positions against independent references."""

import math

import numpy as np
import pytest
import torch
from conftest import compose

from normlab.attention import Attention, Rotary, sinusoid
from normlab.ffn import ACTIVATIONS, FFN, ffn_width
from normlab.model import Decoder, count_parameters
from normlab.norm import NORMS


def test_rmsnorm_is_its_equation_with_the_given_eps():
    norm = NORMS["rmsnorm"](8, 1e-5, True).double()
    torch.nn.init.normal_(norm.weight)
    for scale in (1e-4, 1.0, 1e4):  # at 1e-4 eps decides
        x = scale * torch.randn(3, 8, dtype=torch.float64)
        expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
        torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=0)


def test_norm_kinds_differ_by_their_parameters():
    assert [count_parameters(NORMS[n](8, 1e-5, True)) for n in ("layernorm", "rmsnorm", "none")] == [16, 8, 0]
    assert count_parameters(NORMS["layernorm"](8, 1e-5, False)) == 8


@torch.no_grad()
@pytest.mark.parametrize("qk_norm", [False, True])
def test_attention_against_a_loop(qk_norm):
    """softmax(q_t . k_s / sqrt(K)) over s <= t, head by head, token by token."""
    T, D, H = 6, 8, 2
    K = D // H
    make_norm = (lambda width: NORMS["rmsnorm"](width, 1e-5, True)) if qk_norm else None
    attn = Attention(D, H, bias=True, make_norm=make_norm).double()
    x = torch.randn(1, T, D, dtype=torch.float64)
    q, k, v = (attn.w_qkv(x)[0, :, i * D : (i + 1) * D] for i in range(3))
    heads = torch.zeros(T, D, dtype=torch.float64)
    for h in range(H):
        part = slice(h * K, (h + 1) * K)
        qh, kh = q[:, part], k[:, part]
        if qk_norm:
            qh = qh / (qh.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            kh = kh / (kh.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        for t in range(T):
            scores = torch.tensor([math.exp(qh[t] @ kh[s] / math.sqrt(K)) for s in range(t + 1)], dtype=torch.float64)
            heads[t, part] = (scores / scores.sum()) @ v[: t + 1, part]
    torch.testing.assert_close(attn(x)[0], attn.w_out(heads), rtol=1e-10, atol=1e-12)


def test_rotary_is_a_complex_rotation():
    K, T = 8, 7
    x = torch.randn(1, 1, T, K, dtype=torch.float64)
    got = Rotary(K, T)(x)[0, 0].numpy()
    pairs = x[0, 0, :, : K // 2].numpy() + 1j * x[0, 0, :, K // 2 :].numpy()
    angles = np.arange(T)[:, None] * 10000.0 ** (-2 * np.arange(K // 2) / K)
    turned = pairs * np.exp(1j * angles)
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], 1), rtol=1e-5, atol=1e-6)


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
}
FORMULAS |= {"swiglu": FORMULAS["silu"], "geglu": FORMULAS["gelu"]}


@torch.no_grad()
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_ffn_is_its_equation(name):
    ffn = FFN(4, 4.0, name, bias=True).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    gate = ffn.w_gate or ffn.w_in
    act = torch.tensor([[FORMULAS[name](z) for z in row] for row in gate(x).tolist()], dtype=torch.float64)
    inner = act * ffn.w_in(x) if ACTIVATIONS[name].gated else act
    torch.testing.assert_close(ffn(x), ffn.w_out(inner), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("width", [64, 96, 128, 256, 512, 768, 1024])
def test_gated_ffn_has_the_plain_one_s_parameters(width):
    plain, gated = 2 * width * ffn_width(width, 4, False), 3 * width * ffn_width(width, 4, True)
    # a multiple of 8 is within 4 of the ideal 8/3 width
    assert abs(gated - plain) <= 3 * width * 4
    assert width < 512 or abs(gated / plain - 1) < 0.005


@pytest.mark.parametrize("position", ["learned", "sinusoidal", "rotary", "none"])
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
    assert tied.head.weight is tied.embed.token.weight


def test_no_bias_anywhere_when_bias_is_off():
    model = Decoder(compose("model.bias=false").model, vocab=10)
    assert not [name for name, _ in model.named_parameters() if "bias" in name]
