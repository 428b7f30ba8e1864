"""Normalisation layers by name. Each maps (..., width) to the same shape.

Statistics and affine map are computed in float32 or wider, whatever the type of the input; the output has its type.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from normlab.config_model import ModelConfig

_NARROW = (torch.float16, torch.bfloat16)


def wide(x: Tensor) -> Tensor:
    """x in float32, or wider if it is."""
    return x.float() if x.dtype in _NARROW else x


class LayerNorm(nn.LayerNorm):
    """(x - mean) / sqrt(var + eps) * g + b, biased variance (Ba et al. 2016, arXiv 1607.06450)."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else wide(self.bias)
        return F.layer_norm(wide(input), self.normalized_shape, wide(self.weight), bias, self.eps).type_as(input)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (offset + w) (Zhang & Sennrich 2019, arXiv 1910.07467).

    offset 0: w starts at 1. offset 1: w starts at 0, so that weight decay pulls the gain to 1 (Gemma: 2403.08295).
    """

    def __init__(self, width: int, eps: float, gain: bool = True, offset: float = 0.0) -> None:
        super().__init__()
        self.width, self.eps, self.offset = (width,), eps, offset
        self.weight = nn.Parameter(torch.full(self.width, 1 - offset)) if gain else None

    def forward(self, x: Tensor) -> Tensor:
        gain = None if self.weight is None else wide(self.weight)
        if gain is not None and self.offset:
            gain = self.offset + gain
        return F.rms_norm(wide(x), self.width, gain, self.eps).type_as(x)


class BatchNorm(nn.BatchNorm1d):
    """(x - mean) / sqrt(var + eps) * g + b per channel, over all tokens of the batch, padding too.

    Training uses the batch's own statistics, which lets every token see every other (a causal model leaks its future);
    evaluation uses the running ones (Ioffe & Szegedy 2015, arXiv 1502.03167; Shen et al. 2020, arXiv 2003.07845).
    """

    def forward(self, input: Tensor) -> Tensor:
        assert self.running_mean is not None
        assert self.running_var is not None
        tokens, rate = wide(input).flatten(0, -2), self.momentum or 0.0
        mean, var = wide(self.running_mean), wide(self.running_var)
        out = F.batch_norm(tokens, mean, var, wide(self.weight), wide(self.bias), self.training, rate, self.eps)
        if mean is not self.running_mean:  # of a half-precision model: the update went to the float32 copies
            self.running_mean.copy_(mean)
            self.running_var.copy_(var)
        return out.view(input.shape).type_as(input)


class ScaleNorm(nn.Module):
    """g x / max(||x||_2, eps), one scalar g = sqrt(width) at first (Nguyen & Salazar 2019, arXiv 1910.05895)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.tensor(width**0.5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * F.normalize(wide(x), dim=-1, eps=self.eps)).type_as(x)


class DyT(nn.Module):
    """tanh(alpha x) * g + b, one scalar alpha = 0.5 at first (Zhu et al. 2025, arXiv 2503.10622)."""

    def __init__(self, width: int, alpha: float) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(alpha))
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.alpha * wide(x)) * self.weight + self.bias).type_as(x)


@dataclass(frozen=True)
class Norm:
    """A row of the table. make: (width, eps) -> module. zero: the stored weight that means gain 0; None: no gain."""

    make: Callable[[int, float], nn.Module]
    eps: float  # where the config leaves model.norm_eps null
    zero: float | None = 0.0


NORMS: dict[str, Norm] = {
    "layernorm": Norm(LayerNorm, eps=1e-5),
    "layernorm_nobias": Norm(lambda width, eps: LayerNorm(width, eps, bias=False), eps=1e-5),
    "rmsnorm": Norm(RMSNorm, eps=1e-5),
    "rmsnorm_nogain": Norm(partial(RMSNorm, gain=False), eps=1e-5, zero=None),
    "rmsnorm_offset": Norm(partial(RMSNorm, offset=1.0), eps=1e-6, zero=-1.0),
    "batchnorm": Norm(BatchNorm, eps=1e-5),
    "scalenorm": Norm(ScaleNorm, eps=1e-5),
    "dyt": Norm(lambda width, eps: DyT(width, alpha=0.5), eps=0.0),  # no eps in its equation
    "none": Norm(lambda width, eps: nn.Identity(), eps=0.0, zero=None),
}


def make_norm(cfg: "ModelConfig", width: int | None = None) -> nn.Module:
    """The model's norm, at its width or another."""
    return NORMS[cfg.norm].make(width or cfg.width, cfg.eps)
