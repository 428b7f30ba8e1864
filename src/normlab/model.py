"""The decoder-only Transformer over one shared block.

Shapes: B batch, T tokens, D width, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normlab.attention import Attention, Rotary, sinusoid
from normlab.config import ModelConfig
from normlab.ffn import FFN
from normlab.norm import NORMS
from normlab.residual import PLACEMENTS


def _make_norm(cfg: ModelConfig, width: int) -> nn.Module:
    return NORMS[cfg.norm](width, cfg.norm_eps, cfg.bias)


class Block(nn.Module):
    """Attention, then FFN; the placement says how each joins the stream. (B, T, D) -> (B, T, D)."""

    def __init__(self, cfg: ModelConfig, rotary: Rotary | None) -> None:
        super().__init__()
        make_norm = partial(_make_norm, cfg)
        residual = partial(PLACEMENTS[cfg.placement].residual, partial(make_norm, cfg.width), cfg.depth)
        self.attn = Attention(cfg.width, cfg.heads, cfg.bias, rotary, make_norm if cfg.qk_norm else None)
        self.ffn = FFN(cfg.width, cfg.ffn_ratio, cfg.activation, cfg.bias)
        self.attn_residual = residual()
        self.ffn_residual = residual()

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn_residual(x, self.attn)
        return self.ffn_residual(x, self.ffn)


class Embedding(nn.Module):
    """Token plus position embedding. (B, T) -> (B, T, D)."""

    fixed_TD: Tensor | None

    def __init__(self, cfg: ModelConfig, vocab: int) -> None:
        super().__init__()
        self.scale = cfg.width**0.5 if cfg.scale_embedding else 1.0
        self.token = nn.Embedding(vocab, cfg.width)
        self.position = nn.Embedding(cfg.context, cfg.width) if cfg.position == "learned" else None
        fixed_TD = sinusoid(cfg.context, cfg.width) if cfg.position == "sinusoidal" else None
        self.register_buffer("fixed_TD", fixed_TD, persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        T = tokens_BT.shape[1]
        x_BTD = self.token(tokens_BT) * self.scale
        if self.position is not None:
            x_BTD = x_BTD + self.position.weight[:T]
        if self.fixed_TD is not None:
            x_BTD = x_BTD + self.fixed_TD[:T]
        return x_BTD


class Decoder(nn.Module):
    """Decoder-only language model. tokens (B, T) -> logits (B, T, V)."""

    def __init__(self, cfg: ModelConfig, vocab: int) -> None:
        super().__init__()
        rotary = Rotary(cfg.width // cfg.heads, cfg.context) if cfg.position == "rotary" else None
        self.embed = Embedding(cfg, vocab)
        self.blocks = nn.ModuleList(Block(cfg, rotary) for _ in range(cfg.depth))
        self.final_norm = _make_norm(cfg, cfg.width) if PLACEMENTS[cfg.placement].final_norm else nn.Identity()
        self.head = nn.Linear(cfg.width, vocab, bias=False)
        if cfg.tie:
            self.head.weight = self.embed.token.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.final_norm(x_BTD))

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean cross-entropy in nats, in fp32 or better whatever the precision of the logits."""
        logits_BTV = self(tokens_BT)
        logits_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


@dataclass(frozen=True)
class TensorId:
    """The address of one weight tensor, the same in every arm that has it; layer is None outside the blocks."""

    stack: str
    layer: int | None
    site: str  # attn, ffn, embed, head, final_norm
    tensor: str  # q, k, v, out, in, gate, norm, norm_out, token, position, ... + _bias

    def __str__(self) -> str:
        layer = "" if self.layer is None else f".{self.layer}"
        return f"{self.stack}{layer}.{self.site}.{self.tensor}"


def tensors(model: Decoder) -> Iterator[tuple[TensorId, nn.Parameter, slice]]:
    """Every logical weight tensor once: its address, its parameter and its rows there. Tied weights are 'embed'."""
    for name, parameter in model.named_parameters():
        *path, owner, leaf = name.split(".")
        layer = int(path[1]) if path and path[0] == "blocks" else None
        site = (path[2] if layer is not None else (path or [owner])[0]).removesuffix("_residual")
        tensor = {"final_norm": "norm", "head": "out"}.get(owner, owner.removeprefix("w_"))
        suffix = "_bias" if leaf == "bias" else ""
        parts = Attention.parts if tensor == "qkv" else (tensor,)
        rows = parameter.shape[0] // len(parts)
        for i, part in enumerate(parts):
            yield TensorId("decoder", layer, site, part + suffix), parameter, slice(i * rows, (i + 1) * rows)


def count_parameters(model: nn.Module) -> int:
    """Trainable numbers, tied weights once."""
    return sum(p.numel() for p in model.parameters())


def compile_blocks(model: Decoder) -> None:
    """torch.compile each block in place: names, state and hooks of the raw modules stay as they are."""
    torch._dynamo.reset()  # a multirun in one process must not inherit another job's caches
    for block in model.blocks:
        block.compile()
