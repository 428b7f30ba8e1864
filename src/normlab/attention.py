"""Multi-head attention: self or cross, causal or not, grouped queries.

Shapes: B batch, T queries, S keys, D width, H heads, G key/value heads (H a multiple of G), K head width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normlab.config_model import ModelConfig
from normlab.ffn import dropped, scaled
from normlab.norm import NORMS, wide
from normlab.position import Rotary


class Attention(nn.Module):
    """W_out concat_h softmax(s q_h k_h^T + bias) v_h, s = 1/sqrt(K); head h reads key/value head h // (H / G).

    Self: q, k, v from one fused projection of x. Cross: q of x, k and v of the memory. (B, T, D) -> (B, T, D).
    qk_norm: q and k are normalised, per head (Dehghani et al. 2023, arXiv 2302.05442) or over all heads jointly
    (OLMo 2), before positions rotate them. softcap c: scores become c tanh(score / c) (Gemma 2, arXiv 2408.00118).
    inner, what a placement adds: norms on q, k and v per head (qkv), a norm (attn_out) or a scale per head (head_scale)
    on the heads before W_out. scale multiplies the output.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        *,
        causal: bool,
        cross: bool = False,
        rotary: Rotary | None = None,
        inner: frozenset[str] = frozenset(),
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        H, G, K = cfg.heads, cfg.key_heads, cfg.head_size
        self.causal, self.rotary, self.head_size = causal, rotary, K
        self.softcap, self.score_scale, self.scale = cfg.attn_softcap, cfg.score_scale, scale
        self.dropout, self.groups = cfg.dropout, H // G
        # Rows of a fused weight that are one logical tensor each: own init, own gradient norm.
        sizes = {"q": H * K, "k": G * K, "v": G * K}
        if cross:
            self.w_q = nn.Linear(cfg.width, H * K, cfg.qkv_bias)
            self.w_kv = nn.Linear(cfg.width, 2 * G * K, cfg.qkv_bias)
            self.fused = {"w_kv": {part: sizes[part] for part in ("k", "v")}}
        else:
            self.w_qkv = nn.Linear(cfg.width, (H + 2 * G) * K, cfg.qkv_bias)
            self.fused = {"w_qkv": sizes}
        self._parts = next(list(parts.values()) for parts in self.fused.values())
        self.w_out = nn.Linear(H * K, cfg.width, cfg.out_bias)

        def make_norm(width: int, wanted: bool) -> nn.Module | None:
            return NORMS[cfg.norm].make(width, cfg.eps) if wanted else None

        self.joint = cfg.qk_norm == "joint"
        q_width, k_width = (H * K, G * K) if self.joint else (K, K)
        self.q_norm = make_norm(q_width, bool(cfg.qk_norm) or "qkv" in inner)
        self.k_norm = make_norm(k_width, bool(cfg.qk_norm) or "qkv" in inner)
        self.v_norm = make_norm(K, "qkv" in inner)
        self.out_norm = make_norm(H * K, "attn_out" in inner and not cross)
        self.head_scale = nn.Parameter(torch.ones(H)) if "head_scale" in inner else None

    def forward(self, x_BTD: Tensor, memory_BSD: Tensor | None = None, bias_BHTS: Tensor | None = None) -> Tensor:
        if memory_BSD is None:
            q, k, v = self.w_qkv(x_BTD).split(self._parts, dim=-1)
        else:
            q = self.w_q(x_BTD)
            k, v = self.w_kv(memory_BSD).split(self._parts, dim=-1)
        if self.joint and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q_BTHK, k_BSGK, v_BSGK = (t.view(*t.shape[:2], -1, self.head_size) for t in (q, k, v))
        if not self.joint and self.q_norm is not None and self.k_norm is not None:
            q_BTHK, k_BSGK = self.q_norm(q_BTHK), self.k_norm(k_BSGK)
        if self.v_norm is not None:
            v_BSGK = self.v_norm(v_BSGK)
        q_BHTK, k_BGSK, v_BGSK = (t.transpose(1, 2) for t in (q_BTHK, k_BSGK, v_BSGK))
        if self.rotary is not None:
            q_BHTK, k_BGSK = self.rotary(q_BHTK), self.rotary(k_BGSK)
        y_BHTK = self._mix(q_BHTK, k_BGSK, v_BGSK, bias_BHTS)
        if self.head_scale is not None:
            y_BHTK = y_BHTK * self.head_scale[:, None, None].type_as(y_BHTK)
        y_BTD = y_BHTK.transpose(1, 2).flatten(2)
        if self.out_norm is not None:
            y_BTD = self.out_norm(y_BTD)
        return dropped(scaled(self.w_out(y_BTD), self.scale), self.dropout, self.training)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """Softmax of the scores, weighted mean of the values. A bias of a causal stack masks the future itself.

        (B or 1, H or 1, T or 1, S), added to the scores.
        """
        rate = self.dropout if self.training else 0.0
        if self.softcap is None:
            causal = self.causal and bias is None
            mask = None if bias is None else bias.type_as(q)
            return F.scaled_dot_product_attention(
                q, k, v, mask, rate, is_causal=causal, scale=self.score_scale, enable_gqa=self.groups > 1
            )
        scores = self.scores(q, k, bias)
        weights = wide(scores).softmax(-1)
        return F.dropout(weights, rate).type_as(v) @ v.repeat_interleave(self.groups, dim=1)

    def scores(self, q_BHTK: Tensor, k_BGSK: Tensor, bias: Tensor | None) -> Tensor:
        """What the softmax reads, (B, H, T, S); -inf where a query may not look."""
        scores = self.score_scale * (q_BHTK @ k_BGSK.repeat_interleave(self.groups, dim=1).transpose(-2, -1))
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if bias is not None:
            return scores + bias
        if not self.causal:
            return scores
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return scores.masked_fill(future, -torch.inf)
