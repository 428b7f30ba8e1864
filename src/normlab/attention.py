"""Multi-head causal self-attention.

Shapes: B batch, T tokens, D width, H heads, K = D / H head width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """W_out concat_h softmax(q_h k_h^T / sqrt(K)) v_h, with q, k, v from one fused projection. (B, T, D) -> same.

    qk_norm: q and k are normalised per head before the product (Dehghani et al. 2023, arXiv 2302.05442).
    rotary: q and k are rotated by position (Su et al. 2021, arXiv 2104.09864).
    """

    # Rows of the fused weight that are one logical tensor each: own init, own gradient norm.
    parts = ("q", "k", "v")

    def __init__(
        self,
        width: int,
        heads: int,
        bias: bool,
        rotary: "Rotary | None" = None,
        make_norm: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.w_qkv = nn.Linear(width, 3 * width, bias)
        self.w_out = nn.Linear(width, width, bias)
        self.q_norm = make_norm(width // heads) if make_norm else None
        self.k_norm = make_norm(width // heads) if make_norm else None
        self.rotary = rotary

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        qkv_BTHK = (t.view(B, T, self.heads, -1) for t in self.w_qkv(x_BTD).split(D, dim=-1))
        q_BHTK, k_BHTK, v_BHTK = (t.transpose(1, 2) for t in qkv_BTHK)
        if self.q_norm is not None and self.k_norm is not None:
            q_BHTK, k_BHTK = self.q_norm(q_BHTK).type_as(v_BHTK), self.k_norm(k_BHTK).type_as(v_BHTK)
        if self.rotary is not None:
            q_BHTK, k_BHTK = self.rotary(q_BHTK), self.rotary(k_BHTK)
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        return self.w_out(y_BHTK.transpose(1, 2).reshape(B, T, D))


class Rotary(nn.Module):
    """Rotates the pair (x_i, x_{i+K/2}) of position t by the angle t * 10000^(-2i/K). (B, H, T, K) -> same."""

    cos_TK: Tensor
    sin_TK: Tensor

    def __init__(self, head_width: int, context: int) -> None:
        super().__init__()
        angle = _angles(context, head_width).repeat(1, 2)
        self.register_buffer("cos_TK", angle.cos().float(), persistent=False)
        self.register_buffer("sin_TK", angle.sin().float(), persistent=False)

    def forward(self, x_BHTK: Tensor) -> Tensor:
        T = x_BHTK.shape[-2]
        a, b = x_BHTK.chunk(2, dim=-1)
        rotated = torch.cat((-b, a), dim=-1)
        return (x_BHTK * self.cos_TK[:T] + rotated * self.sin_TK[:T]).type_as(x_BHTK)


def sinusoid(context: int, width: int) -> Tensor:
    """PE[t, 2i] = sin(t / 10000^(2i/D)), PE[t, 2i+1] = cos(same) (Vaswani et al. 2017, section 3.5). (T, D)."""
    angle = _angles(context, width)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)[:, :width].float()


def _angles(context: int, width: int) -> Tensor:
    """t * 10000^(-2i/width) in float64, (T, ceil(width / 2))."""
    frequency = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    return torch.arange(context, dtype=torch.float64)[:, None] * frequency
