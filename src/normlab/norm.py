"""Normalisation layers by name. Each maps (..., width) to the same shape."""

from collections.abc import Callable

from torch import nn


def _layernorm(width: int, eps: float, bias: bool) -> nn.Module:
    """(x - mean) / sqrt(var + eps) * g + b, biased variance (Ba et al. 2016)."""
    return nn.LayerNorm(width, eps=eps, bias=bias)


def _rmsnorm(width: int, eps: float, bias: bool) -> nn.Module:
    """x / sqrt(mean(x^2) + eps) * g (Zhang & Sennrich 2019); never has a bias."""
    return nn.RMSNorm(width, eps=eps)


def _none(width: int, eps: float, bias: bool) -> nn.Module:
    """x"""
    return nn.Identity()


NORMS: dict[str, Callable[[int, float, bool], nn.Module]] = {
    "layernorm": _layernorm,
    "rmsnorm": _rmsnorm,
    "none": _none,
}
