"""Decoder-only, encoder-only and encoder-decoder Transformers over one shared block.

Shapes: B batch, T tokens (S of them in the encoder), D width, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from normlab.attention import Attention
from normlab.config_model import ModelConfig
from normlab.ffn import FFN, MoE, dropped, scaled
from normlab.head import HEADS, Head, MaskedHead, cross_entropy, squared_error
from normlab.norm import NORMS, make_norm
from normlab.position import RelativeBias, Rotary, key_mask, sinusoid
from normlab.residual import PLACEMENTS, Residual


def _make_ffn(cfg: ModelConfig, inner_norm: nn.Module | None, scale: float) -> FFN | MoE:
    inside: dict[str, Any] = {"inner_norm": inner_norm, "dropout": cfg.dropout, "scale": scale}
    if cfg.ffn == "moe":
        return MoE(cfg.width, cfg.hidden, cfg.activation, cfg.experts, cfg.experts_per_token, **inside)
    return FFN(cfg.width, cfg.hidden, cfg.activation, cfg.ffn_bias, **inside)


class Block(nn.Module):
    """Attention, in a decoder with an encoder cross-attention, FFN; the placement says how each joins the stream."""

    attn_residual: Residual
    cross_residual: Residual
    ffn_residual: Residual

    def __init__(self, cfg: ModelConfig, stack: str, layer: int, rotary: Rotary | None = None) -> None:
        super().__init__()
        placement = PLACEMENTS[cfg.placement]
        causal = stack == "decoder"
        self.joint = placement.joint
        scale = cfg.branch_scale(stack)
        self.attn = Attention(cfg, causal=causal, rotary=rotary, inner=placement.inner, scale=scale)
        self.cross: Attention | None = None
        self.ffn: FFN | MoE | None = None
        if "cross" in cfg.sites(stack):
            self.cross = Attention(cfg, causal=False, cross=True, inner=placement.inner, scale=scale)
        if cfg.ffn != "none":
            self.ffn = _make_ffn(cfg, make_norm(cfg, cfg.hidden) if "ffn_out" in placement.inner else None, scale)
        first: Residual | None = None
        for site in cfg.residual_sites(stack):
            where = cfg.where(stack, layer, site, first)
            residual = placement.build(site)(partial(make_norm, cfg), where)
            if placement.zero_norms:
                for name in residual.norms:
                    nn.init.constant_(residual.get_parameter(f"{name}.weight"), NORMS[cfg.norm].zero or 0.0)
            self.add_module(f"{site}_residual", residual)
            first = first or residual

    def forward(
        self, x: Any, memory: Tensor | None = None, bias: Tensor | None = None, memory_bias: Tensor | None = None
    ) -> Any:
        """The biases are added to the scores of self- and of cross-attention."""
        if self.joint:
            return self.ffn_residual(x, lambda z: self._sum(z, memory, bias, memory_bias))
        x = self.attn_residual(x, lambda z: self.attn(z, None, bias))
        if self.cross is not None:
            x = self.cross_residual(x, partial(self.cross, memory_BSD=memory, bias_BHTS=memory_bias))
        return x if self.ffn is None else self.ffn_residual(x, self.ffn)

    def _sum(self, z: Tensor, memory: Tensor | None, bias: Tensor | None, memory_bias: Tensor | None) -> Tensor:
        y = self.attn(z, None, bias)
        if self.cross is not None:
            y = y + self.cross(z, memory, memory_bias)
        return y if self.ffn is None else y + self.ffn(z)


class NumberEmbedding(nn.Module):
    """x w_0 + w_1 for each number x: without w_1 a norm would keep nothing but its sign. (B, T) -> (B, T, D)."""

    weight: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, width))

    def forward(self, x_BT: Tensor) -> Tensor:
        return x_BT[..., None] * self.weight[0] + self.weight[1]


class Embedding(nn.Module):
    """Token, position and segment embedding, normalised if asked; tokens are numbers where there is no vocabulary.

    (B, T) -> (B, T, D).
    """

    fixed_TD: Tensor | None

    def __init__(self, cfg: ModelConfig, vocab: int | None) -> None:
        super().__init__()
        self.scale = cfg.width**0.5 if cfg.scale_embedding else 1.0
        self.token = NumberEmbedding(cfg.width) if vocab is None else nn.Embedding(vocab, cfg.width)
        self.position = nn.Embedding(cfg.context, cfg.width) if cfg.position == "learned" else None
        fixed_TD = sinusoid(cfg.context, cfg.width) if cfg.position == "sinusoidal" else None
        self.register_buffer("fixed_TD", fixed_TD, persistent=False)
        self.segment = nn.Embedding(cfg.segments, cfg.width) if cfg.segments else None
        self.norm = make_norm(cfg) if cfg.embed_norm else None
        self.dropout = cfg.dropout

    def forward(self, tokens_BT: Tensor, segments_BT: Tensor | None = None) -> Tensor:
        T = tokens_BT.shape[1]
        x_BTD = self.token(tokens_BT) * self.scale
        if self.position is not None:
            x_BTD = x_BTD + self.position.weight[:T]
        if self.fixed_TD is not None:
            x_BTD = x_BTD + self.fixed_TD[:T]
        if self.segment is not None:
            x_BTD = x_BTD + (self.segment.weight[0] if segments_BT is None else self.segment(segments_BT))
        if self.norm is not None:
            x_BTD = self.norm(x_BTD)
        return dropped(x_BTD, self.dropout, self.training)


class Stack(nn.Module):
    """Embedding, blocks, final norm: tokens (B, T) -> (B, T, D). name: encoder (sees both sides), decoder (causal)."""

    def __init__(self, cfg: ModelConfig, name: str, vocab: int | None) -> None:
        super().__init__()
        placement = PLACEMENTS[cfg.placement]
        rotary = None
        if cfg.position == "rotary":
            rotary = Rotary(cfg.rotated, cfg.context, cfg.rotary_base)
        self.embed = Embedding(cfg, vocab)
        self.relative = None
        if cfg.position == "relative":
            self.relative = RelativeBias(cfg.heads, cfg.context, causal=name == "decoder")
        self.enter = placement.enter
        self.blocks = nn.ModuleList(Block(cfg, name, i, rotary) for i in range(cfg.blocks(name)))
        own = placement.final(partial(make_norm, cfg))
        self.final_norm = own if cfg.final_norm is None else make_norm(cfg) if cfg.final_norm else nn.Identity()

    def forward(
        self,
        tokens_BT: Tensor,
        memory: Tensor | None = None,
        segments_BT: Tensor | None = None,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        """The masks (position.key_mask) keep an encoder's, and the memory's, padding from being attended to."""
        x = self.enter(self.embed(tokens_BT, segments_BT))
        bias = mask
        if self.relative is not None:
            bias = self.relative(tokens_BT.shape[1]) if mask is None else self.relative(tokens_BT.shape[1]) + mask
        for block in self.blocks:
            x = block(x, memory, bias, memory_mask)
        return self.final_norm(x)


class Model(nn.Module, ABC):
    """Stacks and a head. inputs: tokens (B, T), or a tuple of them where the architecture reads two sequences.

    vocab None: numbers (B, T) in, one number (B, T, 1) out for each, and the loss is their mean squared error.
    """

    stack_names: tuple[str, ...]

    def __init__(self, cfg: ModelConfig, vocab: int | None) -> None:
        super().__init__()
        for name in self.stack_names:
            self.add_module(name, Stack(cfg, name, vocab))
        self.head = HEADS[cfg.head](cfg, vocab or 1)
        self.criterion = squared_error if vocab is None else cross_entropy
        self._mixtures = [m for m in self.modules() if isinstance(m, MoE)]
        self.logit_scale, self.softcap, self.balance_loss = cfg.logit_scale, cfg.logit_softcap, cfg.balance_loss
        if cfg.tie:  # one matrix for every embedding and the head (Press & Wolf 2016; Vaswani et al. 2017, 3.4)
            shared = self.stacks[self.stack_names[0]].embed.token.weight
            for stack in self.stacks.values():
                stack.embed.token.weight = shared
            if isinstance(self.head, Head | MaskedHead):
                self.head.out.weight = shared

    @property
    def stacks(self) -> dict[str, Stack]:
        return {name: getattr(self, name) for name in self.stack_names}

    @abstractmethod
    def forward(self, inputs: Any) -> Tensor: ...

    def logits(self, x_BTD: Tensor) -> Tensor:
        """Scaled and soft-capped: c tanh(logit / c) (Gemma 2)."""
        logits_BTV = scaled(self.head(x_BTD), self.logit_scale)
        return logits_BTV if self.softcap is None else self.softcap * torch.tanh(logits_BTV / self.softcap)

    def loss(self, inputs: Any, targets_BT: Tensor) -> Tensor:
        return self.criterion(self(inputs), targets_BT)

    def objective(self, inputs: Any, targets_BT: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
        """(what training descends, its plain loss): they differ by the mean of the blocks' load-balance losses and by
        label smoothing."""
        outputs_BTV = self(inputs)
        descended = loss = self.criterion(outputs_BTV, targets_BT)
        if smoothing:
            descended = self.criterion(outputs_BTV, targets_BT, smoothing)
        balances = [m.balance for m in self._mixtures if m.balance is not None]
        if balances:
            descended = descended + self.balance_loss * torch.stack(balances).mean()
        return descended, loss


@final
class Decoder(Model):
    """Causal language model: tokens (B, T) -> next-token logits (B, T, V)."""

    stack_names = ("decoder",)
    decoder: Stack

    def forward(self, inputs: Tensor) -> Tensor:
        return self.logits(self.decoder(inputs))


@final
class Encoder(Model):
    """Bidirectional: tokens (B, T), segments (B, T) of 0.. or None -> logits of every token (B, T, V)."""

    stack_names = ("encoder",)
    encoder: Stack

    def forward(self, inputs: Tensor, segments_BT: Tensor | None = None) -> Tensor:
        return self.logits(self.encoder(inputs, segments_BT=segments_BT))


@final
class EncoderDecoder(Model):
    """(source (B, S), tokens (B, T)) -> next-token logits (B, T, V); every decoder block attends to the encoder.

    A third input (B, S) bool says where the source is no padding. Padded tokens come last, so that a causal decoder
    needs no mask of its own.
    """

    stack_names = ("encoder", "decoder")
    encoder: Stack
    decoder: Stack

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        source_BS, tokens_BT, *present = inputs
        mask = key_mask(present[0], self.encoder.embed.token.weight.dtype) if present else None
        memory_BSD = self.encoder(source_BS, mask=mask)
        return self.logits(self.decoder(tokens_BT, memory_BSD, memory_mask=mask))


ARCHITECTURES: dict[str, type[Model]] = {"decoder": Decoder, "encoder": Encoder, "encoder_decoder": EncoderDecoder}


def build(cfg: ModelConfig, vocab: int | None) -> Model:
    """The architecture that cfg names, with uninitialised weights; a vocabulary of cfg.vocab where that is set.

    vocab None: of numbers.
    """
    return ARCHITECTURES[cfg.arch](cfg, cfg.vocab or vocab)


def compiled(model: Model) -> Callable[..., tuple[Tensor, Tensor]]:
    """model.objective as one program: nothing is left between two blocks, and compiling takes longer with each."""
    torch._dynamo.reset()  # a multirun in one process must not inherit another job's caches
    return torch.compile(model.objective)


def compile_blocks(model: Model, mode: str | None = None) -> None:
    """torch.compile each block in place, one program for all of a kind; the raw modules keep names, state, hooks."""
    torch._dynamo.reset()
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    how: dict[str, Any] = {"options": {"cpp_wrapper": True}} if on_cpu else {"mode": mode}  # calls without Python
    for stack in model.stacks.values():
        for block in stack.blocks:
            block.compile(**how)
