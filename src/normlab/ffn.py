"""Position-wise feed-forward network, plain or gated, at equal parameter counts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Activation:
    """Elementwise function; gated = GLU variant, act(W_gate x) * W_in x (Shazeer 2020, arXiv 2002.05202)."""

    fn: Callable[[Tensor], Tensor]
    gated: bool = False


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(F.relu),
    "gelu": Activation(F.gelu),
    "gelu_tanh": Activation(partial(F.gelu, approximate="tanh")),
    "silu": Activation(F.silu),
    "swiglu": Activation(F.silu, gated=True),
    "geglu": Activation(F.gelu, gated=True),
}


def ffn_width(width: int, ratio: float, gated: bool) -> int:
    """Hidden units. Gated: 2/3 of ratio * width, to the nearest multiple of 8, so that parameters match."""
    return max(8, 8 * round(ratio * width * 2 / 3 / 8)) if gated else round(ratio * width)


class FFN(nn.Module):
    """W_out act(W_in x), or W_out (act(W_gate x) * W_in x) when gated. (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int, ratio: float, activation: str, bias: bool) -> None:
        super().__init__()
        act = ACTIVATIONS[activation]
        hidden = ffn_width(width, ratio, act.gated)
        self.act = act.fn
        self.w_in = nn.Linear(width, hidden, bias)
        self.w_gate = nn.Linear(width, hidden, bias) if act.gated else None
        self.w_out = nn.Linear(hidden, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.w_gate is None:
            return self.w_out(self.act(self.w_in(x)))
        return self.w_out(self.act(self.w_gate(x)) * self.w_in(x))
