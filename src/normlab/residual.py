"""Every norm placement: one class per equation, one row per name.

Notation: x the residual stream (B, T, D), F a sublayer (attention or FFN), N a norm, depth the number of blocks.
A class owns the norms of ONE sublayer; a block has one for attention and one for the FFN.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor, nn

Sublayer = Callable[[Tensor], Tensor]


class Residual(nn.Module, ABC):
    """How one sublayer F joins the stream. `norms` names the norms that the equation uses."""

    norms: ClassVar[tuple[str, ...]] = ("norm",)
    norm: nn.Module
    norm_out: nn.Module

    def __init__(self, make_norm: Callable[[], nn.Module], depth: int) -> None:
        super().__init__()
        self.depth = depth
        for name in self.norms:
            self.add_module(name, make_norm())

    @abstractmethod
    def forward(self, x: Tensor, f: Sublayer) -> Tensor: ...


@final
class Pre(Residual):
    def forward(self, x: Tensor, f: Sublayer) -> Tensor:
        """x + F(N(x))"""
        return x + f(self.norm(x))


@final
class Post(Residual):
    def forward(self, x: Tensor, f: Sublayer) -> Tensor:
        """N(x + F(x))"""
        return self.norm(x + f(x))


@final
class DeepNorm(Residual):
    def forward(self, x: Tensor, f: Sublayer) -> Tensor:
        """N(a x + F(x)), a = (2 depth)^(1/4)"""
        return self.norm((2 * self.depth) ** 0.25 * x + f(x))


@final
class Sandwich(Residual):
    norms = ("norm", "norm_out")

    def forward(self, x: Tensor, f: Sublayer) -> Tensor:
        """x + N_out(F(N(x)))"""
        return x + self.norm_out(f(self.norm(x)))


@final
class Plain(Residual):
    norms = ()

    def forward(self, x: Tensor, f: Sublayer) -> Tensor:
        """x + F(x)"""
        return x + f(x)


@final
class NoResidual(Residual):
    def forward(self, x: Tensor, f: Sublayer) -> Tensor:
        """F(N(x))"""
        return f(self.norm(x))


@dataclass(frozen=True)
class Placement:
    """A row of the table: the equation, the stack's final norm, the gain on the initial v, out, in, gate weights."""

    residual: type[Residual]
    final_norm: bool
    paper: str
    gain: Callable[[int], float] = lambda depth: 1.0


PLACEMENTS: dict[str, Placement] = {
    "pre": Placement(Pre, True, "Baevski & Auli 2018, arXiv 1809.10853; Xiong et al. 2020, arXiv 2002.04745"),
    "post": Placement(Post, False, "Vaswani et al. 2017, arXiv 1706.03762"),
    "deepnorm": Placement(
        DeepNorm, False, "Wang et al. 2022, arXiv 2203.00555", gain=lambda depth: (8 * depth) ** -0.25
    ),
    "sandwich": Placement(Sandwich, True, "Ding et al. 2021, arXiv 2105.13290"),
    "none": Placement(Plain, False, "ablation: no norm"),
    "no_residual": Placement(NoResidual, True, "ablation: Dong et al. 2021, arXiv 2103.03404"),
}
