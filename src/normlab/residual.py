"""Every norm placement: one class per equation, one row per name.

Notation: x the residual stream (B, T, D), F a sublayer (attention, cross-attention or FFN), N its norm. A class owns
the norms of ONE sublayer. "Layer" in the papers is a block in some and a sublayer in others: `Where` has both.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

MakeNorm = Callable[[], nn.Module]
Sublayer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Where:
    """The place of a sublayer: its stack's block `layer` (0-based), its `index` of the `per_block` ones there."""

    width: int
    stack: str  # encoder, decoder
    layer: int
    index: int
    per_block: int
    encoder: int  # blocks of the encoder, 0 where the model has none
    decoder: int  # blocks of the decoder, 0 where the model has none
    site: str = "attn"  # attn, cross, ffn
    first: "Residual | None" = None  # what the block's first sublayer has, for what they share

    @property
    def depth(self) -> int:
        """Blocks of this stack: N."""
        return self.encoder if self.stack == "encoder" else self.decoder

    @property
    def sublayers(self) -> int:
        """Residual sublayers of this stack: L = 2 N, or 3 N in a decoder that attends to an encoder."""
        return self.per_block * self.depth


class Residual(nn.Module, ABC):
    """How one sublayer F joins the stream. `norms` names the norms that the equation uses.

    The stream between two sublayers is x, or a pair where the equation carries a second one.
    """

    norms: ClassVar[tuple[str, ...]] = ("norm",)
    outer: ClassVar[str | None] = None  # the norm that takes the sum; None: the sum is the output
    treated: ClassVar[bool] = False  # F's output is normed or scaled before it joins
    norm: nn.Module
    norm_out: nn.Module

    def __init__(self, make_norm: MakeNorm, where: Where) -> None:
        super().__init__()
        for name in self.norms:
            self.add_module(name, make_norm())

    @abstractmethod
    def forward(self, x: Any, f: Sublayer) -> Any: ...


def first_stream(x: Any) -> Tensor:
    """The stream itself, or the first of a pair."""
    return x[0] if isinstance(x, tuple) else x


@final
class Pre(Residual):
    def forward(self, x: Tensor, f: Sublayer) -> Tensor:
        """x + F(N(x))"""
        return x + f(self.norm(x))


@final
class Post(Residual):
    outer = "norm"

    def forward(self, x: Tensor, f: Sublayer) -> Tensor:
        """N(x + F(x))"""
        return self.norm(x + f(x))


@final
class DeepNorm(Residual):
    outer = "norm"

    def __init__(self, make_norm: MakeNorm, where: Where) -> None:
        super().__init__(make_norm, where)
        self.alpha = deepnorm_alpha(where)

    def forward(self, x: Tensor, f: Sublayer) -> Tensor:
        """N(alpha x + F(x)), alpha = (2 N)^(1/4) in a stack of its own"""
        return self.norm(self.alpha * x + f(x))


@final
class Sandwich(Residual):
    norms, treated = ("norm", "norm_out"), True

    def forward(self, x: Tensor, f: Sublayer) -> Tensor:
        """x + N_out(F(N(x)))"""
        return x + self.norm_out(f(self.norm(x)))


@final
class Reordered(Residual):
    treated = True

    def forward(self, x: Tensor, f: Sublayer) -> Tensor:
        """x + N(F(x))"""
        return x + self.norm(f(x))


@final
class SkipScale(Residual):
    def __init__(self, make_norm: MakeNorm, where: Where) -> None:
        super().__init__(make_norm, where)
        self.scale = nn.Parameter(torch.ones(where.width))

    def forward(self, x: Tensor, f: Sublayer) -> Tensor:
        """lambda * x + F(N(x)), lambda a vector, 1 at first"""
        return self.scale * x + f(self.norm(x))


@final
class Admin(Residual):
    outer = "norm"

    def __init__(self, make_norm: MakeNorm, where: Where) -> None:
        super().__init__(make_norm, where)
        self.scale = nn.Parameter(torch.ones(where.width))

    def forward(self, x: Tensor, f: Sublayer) -> Tensor:
        """N(w * x + F(x)), w a vector that init.calibrate fills: w_{i+1}^2 = w_i^2 + Var F_i"""
        return self.norm(self.scale * x + f(x))


@final
class AdminFixed(Residual):
    outer = "norm"

    def __init__(self, make_norm: MakeNorm, where: Where) -> None:
        super().__init__(make_norm, where)
        self.omega = math.sqrt((where.sublayers + 1) / math.log(where.sublayers + 1) - 1)

    def forward(self, x: Tensor, f: Sublayer) -> Tensor:
        """N(w x + F(x)), w = sqrt((L + 1) / ln(L + 1) - 1)"""
        return self.norm(self.omega * x + f(x))


@final
class B2TOpen(Residual):
    outer = "norm"

    def forward(self, x: Tensor, f: Sublayer) -> tuple[Tensor, Tensor]:
        """h = N(x + F(x)); the block's input x goes along to its FFN"""
        return self.norm(x + f(x)), x


@final
class B2TCarry(Residual):
    outer = "norm"

    def forward(self, x: tuple[Tensor, Tensor], f: Sublayer) -> tuple[Tensor, Tensor]:
        """h <- N(h + F(h)), x as it was"""
        h, bottom = x
        return self.norm(h + f(h)), bottom


@final
class B2TClose(Residual):
    outer = "norm"

    def forward(self, x: tuple[Tensor, Tensor], f: Sublayer) -> Tensor:
        """N(x + h + F(h)), x the block's input"""
        h, bottom = x
        return self.norm(bottom + h + f(h))


@final
class ResiDual(Residual):
    outer = "norm"

    def forward(self, x: tuple[Tensor, Tensor], f: Sublayer) -> tuple[Tensor, Tensor]:
        """x <- N(x + F(x)), d <- d + F(x); at the end x + N(d)"""
        post, dual = x
        y = f(post)
        return self.norm(post + y), dual + y


@final
class LNS(Residual):
    layer: Tensor  # a tensor, so that compiled blocks share one program

    def __init__(self, make_norm: MakeNorm, where: Where) -> None:
        super().__init__(make_norm, where)
        self.register_buffer("layer", torch.tensor(where.layer + 1.0), persistent=False)

    def forward(self, x: Tensor, f: Sublayer) -> Tensor:
        """x + F(N(x) / sqrt(l)), l the block, from 1"""
        return x + f(self.norm(x) * self.layer.rsqrt())


@final
class NormedSkip(Residual):
    def forward(self, x: Tensor, f: Sublayer) -> Tensor:
        """z + F(z), z = N(x)"""
        z = self.norm(x)
        return z + f(z)


@final
class Keel(Residual):
    norms, outer = ("norm", "norm_out"), "norm_out"

    def __init__(self, make_norm: MakeNorm, where: Where) -> None:
        super().__init__(make_norm, where)
        self.alpha = 1 if where.layer == 0 else where.sublayers

    def forward(self, x: Tensor, f: Sublayer) -> Tensor:
        """N_out(alpha x + F(N(x))), alpha = L, 1 in the first block"""
        return self.norm_out(self.alpha * x + f(self.norm(x)))


@final
class ReZero(Residual):
    norms, treated = (), True

    def __init__(self, make_norm: MakeNorm, where: Where) -> None:
        super().__init__(make_norm, where)
        self.scale = where.first.scale if isinstance(where.first, ReZero) else nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, f: Sublayer) -> Tensor:
        """x + g F(x), one scalar g per block, 0 at first"""
        return x + self.scale * f(x)


@final
class LayerScale(Residual):
    treated = True

    def __init__(self, make_norm: MakeNorm, where: Where) -> None:
        super().__init__(make_norm, where)
        start = 0.1 if where.depth <= 18 else 1e-5 if where.depth <= 24 else 1e-6
        self.scale = nn.Parameter(torch.full((where.width,), start))

    def forward(self, x: Tensor, f: Sublayer) -> Tensor:
        """x + lambda * F(N(x)), lambda a vector: 0.1 up to 18 blocks, 1e-5 up to 24, 1e-6 beyond, at first"""
        return x + self.scale * f(self.norm(x))


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


@final
class SumOfStreams(nn.Module):
    def __init__(self, make_norm: MakeNorm) -> None:
        super().__init__()
        self.norm = make_norm()

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        """x + N(d)"""
        return x[0] + self.norm(x[1])


def deepnorm_alpha(where: Where) -> float:
    """Weight of the skip (DeepNet, table 1): (2N)^(1/4), in a decoder with an encoder (3M)^(1/4), both L^(1/4)."""
    n, m = where.encoder, where.decoder
    if n and m and where.stack == "encoder":
        return 0.81 * (n**4 * m) ** (1 / 16)
    return where.sublayers**0.25


def deepnorm_beta(where: Where) -> float:
    """Gain on the initial v, out, in and gate weights (DeepNet, table 1): (8N)^(-1/4) or (12M)^(-1/4), (4L)^(-1/4)."""
    n, m = where.encoder, where.decoder
    if n and m and where.stack == "encoder":
        return 0.87 * (n**4 * m) ** (-1 / 16)
    return (4 * where.sublayers) ** -0.25


def sub_ln_gain(where: Where) -> float:
    """Gain on the initial v, out, in and gate weights, 1 in cross-attention (Magneto; natural logarithm)."""
    n, m = where.encoder, where.decoder
    if n and m and where.stack == "encoder":
        return math.sqrt(math.log(3 * m) * math.log(2 * n) / 3)
    return 1.0 if where.site == "cross" else math.sqrt(math.log(max(where.sublayers, 2)))


def mix_ln(share: float) -> Callable[[MakeNorm, Where], Residual]:
    """Post in the first `share` of the blocks, rounded up, Pre in the rest."""
    return lambda make, where: (Post if where.layer < math.ceil(share * where.depth) else Pre)(make, where)


def keel(make: MakeNorm, where: Where) -> Residual:
    """The stack's first attention is plain pre-norm (Chen & Wei 2026, section 3.1)."""
    return (Pre if where.layer == where.index == 0 else Keel)(make, where)


Build = Callable[[MakeNorm, Where], Residual]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A row of the table: how attention and, where they differ, cross-attention and FFN join the stream."""

    paper: str
    attn: Build
    cross: Build | None = None
    ffn: Build | None = None
    # the stack's last step: pre-norm streams need a norm there, post-norm ones end with one
    final: Callable[[MakeNorm], nn.Module] = lambda make_norm: make_norm()
    inner: frozenset[str] = frozenset()  # parts inside a sublayer: attn_out, ffn_out, qkv (norms), head_scale
    joint: bool = False  # all sublayers of a block read one norm's output and join in one sum
    zero_norms: bool = False  # the norms' gains start at 0
    gain: Callable[[Where], float] = lambda where: 1.0  # on the initial v, out, in, gate weights
    enter: Callable[[Tensor], Any] = lambda x: x  # embeddings -> stream

    def build(self, site: str) -> Build:
        return {"attn": self.attn, "cross": self.cross or self.attn, "ffn": self.ffn or self.attn}[site]


def _no_norm(make_norm: MakeNorm) -> nn.Module:
    return nn.Identity()


PLACEMENTS: dict[str, Placement] = {
    "pre": Placement(attn=Pre, paper="Baevski & Auli 2018, arXiv 1809.10853; Xiong et al. 2020, arXiv 2002.04745"),
    "post": Placement(attn=Post, final=_no_norm, paper="Vaswani et al. 2017, arXiv 1706.03762"),
    "deepnorm": Placement(
        attn=DeepNorm, final=_no_norm, gain=deepnorm_beta, paper="DeepNet: Wang et al. 2022, arXiv 2203.00555"
    ),
    "sandwich": Placement(
        attn=Sandwich, paper="Ding et al. 2021, arXiv 2105.13290; Peri-LN: Kim et al. 2025, 2502.02732"
    ),
    "reordered": Placement(attn=Reordered, paper="OLMo 2, arXiv 2501.00656"),
    "res_post": Placement(attn=Reordered, zero_norms=True, paper="Swin v2: Liu et al. 2021, arXiv 2111.09883"),
    "sub_ln": Placement(
        attn=Pre,
        inner=frozenset({"attn_out", "ffn_out"}),
        gain=sub_ln_gain,
        paper="Magneto: Wang et al. 2022, arXiv 2210.06423",
    ),
    "normformer": Placement(
        attn=Sandwich,
        ffn=SkipScale,
        inner=frozenset({"head_scale", "ffn_out"}),
        paper="Shleifer et al. 2021, arXiv 2110.09456, with residual scaling",
    ),
    "admin": Placement(attn=Admin, final=_no_norm, paper="Liu et al. 2020, arXiv 2004.08249"),
    "admin_fixed": Placement(attn=AdminFixed, final=_no_norm, paper="admin-torch, by Admin's authors"),
    "b2t": Placement(
        attn=B2TOpen,
        cross=B2TCarry,
        ffn=B2TClose,
        final=_no_norm,
        paper="Takase et al. 2022, arXiv 2206.00330",
    ),
    "resi_dual": Placement(
        attn=ResiDual, final=SumOfStreams, enter=lambda x: (x, x), paper="Xie et al. 2023, arXiv 2304.14802"
    ),
    "mix_ln": Placement(attn=mix_ln(0.25), paper="Li et al. 2024, arXiv 2412.13795"),
    "lns": Placement(attn=LNS, paper="Sun et al. 2025, arXiv 2502.05795"),
    "hybrid_norm": Placement(
        attn=Plain, ffn=NormedSkip, inner=frozenset({"qkv"}), paper="Zhuo et al. 2025, arXiv 2503.04598"
    ),
    "keel": Placement(attn=keel, final=_no_norm, paper="Chen & Wei 2026, arXiv 2601.19895"),
    "rezero": Placement(attn=ReZero, final=_no_norm, paper="Bachlechner et al. 2020, arXiv 2003.04887"),
    "layerscale": Placement(attn=LayerScale, paper="CaiT: Touvron et al. 2021, arXiv 2103.17239"),
    "parallel": Placement(attn=Pre, joint=True, paper="GPT-J; PaLM: Chowdhery et al. 2022, arXiv 2204.02311"),
    "no_residual": Placement(attn=NoResidual, paper="ablation: Dong et al. 2021, arXiv 2103.03404"),
    "none": Placement(attn=Plain, final=_no_norm, paper="ablation: no norm"),
}

# Two names of one thing are one run.
ALIASES = {"peri": "sandwich"}
