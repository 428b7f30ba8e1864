"""Training arms of equal shape: our decoder, and what people would use instead. No code of a peer is kept here.

Every arm is GPT-2's form (pre-norm, LayerNorm, GELU, learned positions, tied head, biases where the peer has them),
byte vocabulary, fp32, no dropout, AdamW in its fused form, one batch of TOKENS tokens.
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normlab import composing
from normlab.init import initialise
from normlab.meter import StepMeter
from normlab.model import Model, build, compile_blocks, compiled

VOCAB, TOKENS = 256, 512
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Shape:
    depth: int
    width: int
    context: int

    def __str__(self) -> str:
        return f"{self.depth},{self.width},{self.context}"

    @property
    def heads(self) -> int:
        return max(self.width // 64, 4)


Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Arm:
    """A model, the loss that its user would call, and how its user would compile it."""

    model: nn.Module
    loss: Loss
    compile: Callable[[], None]

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=True)

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.loss(*batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def batch(shape: Shape) -> tuple[Tensor, Tensor]:
    size = (TOKENS // shape.context, shape.context + 1)
    tokens = torch.randint(VOCAB, size, generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Measured(Arm):
    """Ours as a run trains: with every-step statistics of every weight tensor."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.model, Model)
        self.meter = StepMeter(self.model, self.optimizer)

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.loss(*batch).backward()
        self.meter.gradients()
        self.meter.update()


def ours(shape: Shape, nanogpt: Path | None, arm: type[Arm] = Arm) -> Arm:
    sizes = [f"model.{name}={getattr(shape, name)}" for name in ("depth", "width", "heads", "context")]
    cfg = composing.config(ROOT, [*sizes, "model.init=gpt2", "model.scale_embedding=false"])
    model = build(cfg.model, VOCAB)
    initialise(model, cfg.model, seed=0)
    return arm(model, model.loss, lambda: compile_blocks(model))


def ours_whole(shape: Shape, nanogpt: Path | None) -> Arm:
    """As compile=whole has it: the model and its loss are one program."""
    arm = ours(shape, nanogpt)

    def compile_whole() -> None:
        assert isinstance(arm.model, Model)
        objective = compiled(arm.model)
        arm.loss = lambda x, y: objective(x, y)[0]

    arm.compile = compile_whole
    return arm


def nanogpt(shape: Shape, path: Path | None) -> Arm | None:
    """karpathy/nanoGPT, from a checkout."""
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location("nanogpt_model", path / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    config = module.GPTConfig(
        block_size=shape.context, vocab_size=VOCAB, n_layer=shape.depth, n_head=shape.heads, n_embd=shape.width
    )
    return _whole(module.GPT(config), lambda model: lambda x, y: model(x, y)[1])


def transformers(shape: Shape, path: Path | None) -> Arm | None:
    """GPT2LMHeadModel of Hugging Face."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=shape.context, n_embd=shape.width, n_layer=shape.depth, n_head=shape.heads,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, activation_function="gelu", use_cache=False,
    )  # fmt: skip
    return _whole(GPT2LMHeadModel(config), lambda model: lambda x, y: _cross_entropy(model(x).logits, y))


def x_transformers(shape: Shape, path: Path | None) -> Arm | None:
    """TransformerWrapper with its flash attention."""
    if importlib.util.find_spec("x_transformers") is None:
        return None
    from x_transformers import Decoder, TransformerWrapper  # pyright: ignore[reportMissingImports]

    layers = Decoder(
        dim=shape.width, depth=shape.depth, heads=shape.heads, attn_dim_head=shape.width // shape.heads,
        attn_flash=True, rotary_pos_emb=False,
    )  # fmt: skip
    model = TransformerWrapper(num_tokens=VOCAB, max_seq_len=shape.context, attn_layers=layers, tie_embedding=True)
    return _whole(model, lambda model: lambda x, y: _cross_entropy(model(x), y))


def _whole(model: nn.Module, loss_of: Callable[[Any], Loss]) -> Arm:
    """A peer, which its users compile as one whole."""
    arm = Arm(model.train(), loss_of(model), lambda: None)

    def compile_whole() -> None:
        arm.loss = loss_of(torch.compile(model))

    arm.compile = compile_whole
    return arm


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


ARMS: dict[str, Callable[[Shape, Path | None], Arm | None]] = {
    "normlab": ours,
    "normlab, statistics": partial(ours, arm=Measured),
    "normlab, whole": ours_whole,
    "nanoGPT": nanogpt,
    "transformers": transformers,
    "x-transformers": x_transformers,
}
