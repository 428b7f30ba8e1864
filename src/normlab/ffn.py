"""Position-wise feed-forward networks: plain or gated, dense or a mixture of experts.

Shapes: B batch, T tokens, D width, F hidden units, E experts.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normlab.norm import wide


@dataclass(frozen=True)
class Activation:
    """Elementwise function; gated = GLU variant, act(W_gate x) * W_in x (Shazeer 2020, arXiv 2002.05202)."""

    fn: Callable[[Tensor], Tensor]
    gated: bool = False


_gelu_tanh = partial(F.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(F.relu),
    "relu2": Activation(lambda x: F.relu(x).square()),  # So et al. 2021, arXiv 2109.08668
    "gelu": Activation(F.gelu),
    "gelu_tanh": Activation(_gelu_tanh),
    "silu": Activation(F.silu),
    "reglu": Activation(F.relu, gated=True),
    "geglu": Activation(F.gelu, gated=True),
    "geglu_tanh": Activation(_gelu_tanh, gated=True),
    "swiglu": Activation(F.silu, gated=True),
}


def ffn_width(width: int, ratio: float, gated: bool) -> int:
    """Hidden units. Gated: 2/3 of ratio * width, so that parameters match the plain one's within 0.5 %.

    Rounded to a multiple of 8, or of 4, 2 or 1 where a coarser one would miss that, with or without biases.
    """
    if not gated:
        return round(ratio * width)

    def off(units: int) -> float:
        weights, plain_weights = 3 * width * units, 2 * ratio * width**2
        biases, plain_biases = 2 * units + width, ratio * width + width
        ratios = weights / plain_weights, (weights + biases) / (plain_weights + plain_biases)
        return max(abs(r - 1) for r in ratios)

    rounded = [multiple * round(ratio * width * 2 / 3 / multiple) for multiple in (8, 4, 2, 1)]
    return next((units for units in rounded if off(units) < 0.005), rounded[-1])


def scaled(x: Tensor, factor: float) -> Tensor:
    """factor * x; x itself where that is 1, as it mostly is."""
    return x if factor == 1.0 else factor * x


def dropped(x: Tensor, rate: float, training: bool) -> Tensor:
    """Dropout; x itself at rate 0."""
    return F.dropout(x, rate, training) if rate else x


class FFN(nn.Module):
    """W_out act(W_in x), or W_out (act(W_gate x) * W_in x) when gated. (B, T, D) -> (B, T, D).

    inner_norm acts on the hidden units (Sub-LN, NormFormer); scale multiplies the output.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: str,
        bias: bool,
        *,
        inner_norm: nn.Module | None = None,
        dropout: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        act = ACTIVATIONS[activation]
        self.act, self.scale = act.fn, scale
        self.w_in = nn.Linear(width, hidden, bias)
        self.w_gate = nn.Linear(width, hidden, bias) if act.gated else None
        self.inner_norm = inner_norm
        self.w_out = nn.Linear(hidden, width, bias)
        self.dropout = dropout

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTF = self.w_in(x_BTD)
        h_BTF = self.act(h_BTF) if self.w_gate is None else self.act(self.w_gate(x_BTD)) * h_BTF
        if self.inner_norm is not None:
            h_BTF = self.inner_norm(h_BTF)
        return dropped(scaled(self.w_out(h_BTF), self.scale), self.dropout, self.training)


def _full_precision(device_type: str) -> AbstractContextManager:
    """Autocast off, where the device has it."""
    available = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if available else nullcontext()


class MoE(nn.Module):
    """sum over the top k experts e of p_e FFN_e(x), p = softmax(W_router x) renormalised over those k.

    (B, T, D) -> (B, T, D), no biases (Jiang et al. 2024, arXiv 2401.04088, section 2.1). The router runs in float32.
    Every expert computes every token and the unchosen ones get weight 0: experts / k times the arithmetic of a sparse
    kernel, but static shapes and no wait for the device.

    After a forward pass: `load`, the share of tokens sent to each expert, (E,), sums to k; `balance`, the auxiliary
    loss E sum_e load_e mean(p_e), k when even (Fedus et al. 2021, arXiv 2101.03961, equation 4).
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: str,
        experts: int,
        k: int,
        *,
        inner_norm: nn.Module | None = None,
        dropout: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        act = ACTIVATIONS[activation]
        self.act, self.scale, self.k = act.fn, scale, k
        self.w_router = nn.Linear(width, experts, bias=False)
        self.expert_in = nn.Parameter(torch.empty(experts, hidden, width))
        self.expert_gate = nn.Parameter(torch.empty(experts, hidden, width)) if act.gated else None
        self.inner_norm = inner_norm
        self.expert_out = nn.Parameter(torch.empty(experts, width, hidden))
        self.dropout = dropout
        self.load: Tensor | None = None
        self.balance: Tensor | None = None

    def forward(self, x_BTD: Tensor) -> Tensor:
        p_BTE = self._route(x_BTD)
        h_BTEF = torch.einsum("btd,efd->btef", x_BTD, self.expert_in)
        if self.expert_gate is None:
            h_BTEF = self.act(h_BTEF)
        else:
            h_BTEF = self.act(torch.einsum("btd,efd->btef", x_BTD, self.expert_gate)) * h_BTEF
        if self.inner_norm is not None:
            h_BTEF = self.inner_norm(h_BTEF)
        y_BTD = torch.einsum("btef,edf->btd", h_BTEF * p_BTE[..., None].type_as(h_BTEF), self.expert_out)
        return dropped(scaled(y_BTD, self.scale), self.dropout, self.training)

    def _route(self, x_BTD: Tensor) -> Tensor:
        """The weight of each expert for each token, 0 where it is not chosen."""
        with _full_precision(x_BTD.device.type):
            p_BTE = F.linear(wide(x_BTD), wide(self.w_router.weight)).softmax(-1)
        top, chosen = p_BTE.topk(self.k, dim=-1)
        picked_BTE = torch.zeros_like(p_BTE).scatter(-1, chosen, 1.0)
        load = picked_BTE.mean((0, 1))
        self.load, self.balance = load.detach(), len(load) * (load * p_BTE.mean((0, 1))).sum()
        return torch.zeros_like(p_BTE).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
