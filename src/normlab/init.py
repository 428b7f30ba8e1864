"""Initial weights: one row per scheme, one generator per tensor.

Each tensor's draw depends on the seed and its own address only, so one seed gives every arm the same numbers for the
tensors that they share, whatever else the arm contains.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normlab.config_model import InitName, ModelConfig
from normlab.model import Model
from normlab.norm import BatchNorm
from normlab.residual import PLACEMENTS, Admin
from normlab.tensors import TensorId, tensors

# (tensor, fan in, fan out, the model) -> standard deviation
Scheme = Callable[[TensorId, int, int, ModelConfig], float]
# the tensors of a block that a placement's init gain multiplies
GAINED = {"v", "out", "in", "gate", "expert_in", "expert_gate", "expert_out"}
ONTO_STREAM = {"out", "expert_out"}


@dataclass(frozen=True)
class Init:
    """A row of the table. depth_scaled: the projections onto the stream are divided by sqrt(residual sublayers).

    gain_of: the placement whose init gain it takes instead of the run's own.
    """

    std: Scheme
    depth_scaled: bool = False
    gain_of: str | None = None


def _xavier(tensor: TensorId, fan_in: int, fan_out: int, cfg: ModelConfig) -> float:
    """sqrt(2 / (fan_in + fan_out)) (Glorot & Bengio 2010); embeddings width^-1/2 (Vaswani et al. 2017)."""
    return cfg.width**-0.5 if tensor.site == "embed" else (2 / (fan_in + fan_out)) ** 0.5


def _xiong(tensor: TensorId, fan_in: int, fan_out: int, cfg: ModelConfig) -> float:
    """Xavier with W_q = W_k = 0: uniform attention, the theory setting of Xiong et al. 2020, section 3.3."""
    return 0.0 if tensor.tensor in {"q", "k"} else _xavier(tensor, fan_in, fan_out, cfg)


def _gpt2(tensor: TensorId, fan_in: int, fan_out: int, cfg: ModelConfig) -> float:
    """0.02 (Radford et al. 2019, section 2.3)."""
    return 0.02


def _small(tensor: TensorId, fan_in: int, fan_out: int, cfg: ModelConfig) -> float:
    """sqrt(2 / (5 width)) (SmallInit: Nguyen & Salazar 2019, arXiv 1910.05895)."""
    return (2 / (5 * cfg.width)) ** 0.5


def _torchtitan(tensor: TensorId, fan_in: int, fan_out: int, cfg: ModelConfig) -> float:
    """0.02, of block l (from 1) 0.02 / sqrt(2 l) for out and the ungated in; embeddings 1, head width^-1/2."""
    if tensor.layer is None:
        return {"embed": 1.0, "head": cfg.width**-0.5}[tensor.site]
    deep = ONTO_STREAM | ({"in", "expert_in"} if cfg.gated else set())
    return 0.02 / (2 * (tensor.layer + 1)) ** 0.5 if tensor.tensor in deep else 0.02


def _completep(tensor: TensorId, fan_in: int, fan_out: int, cfg: ModelConfig) -> float:
    """0.02 at the base width, 0.02 / sqrt(width / base_width) in the blocks; the embeddings stay at 0.02.

    muP (Yang et al. 2022, arXiv 2203.03466) in width, CompleteP (Dey et al. 2025, arXiv 2505.01618, alpha = 1) in
    depth: ModelConfig scales branches, scores and logits, optim.make the learning rates.
    """
    return 0.02 if tensor.layer is None else 0.02 * cfg.width_multiple**-0.5


INITS: dict[InitName, Init] = {
    "xavier": Init(_xavier),
    "xiong": Init(_xiong),
    "gpt2": Init(_gpt2, depth_scaled=True),
    "small": Init(_small),
    "torchtitan": Init(_torchtitan),
    "deepnorm": Init(_xavier, gain_of="deepnorm"),
    "sub_ln": Init(_xavier, gain_of="sub_ln"),
    "completep": Init(_completep),
}


@torch.no_grad()
def initialise(model: Model, cfg: ModelConfig, seed: int) -> None:
    """Fill every weight in place: matrices normal with the scheme's std, biases 0.

    Norms and the scales of a residual keep what their class starts from.
    """
    scheme = INITS[cfg.init]
    gain = PLACEMENTS[scheme.gain_of or cfg.placement].gain
    scaled = scheme.depth_scaled if cfg.init_depth_scale is None else cfg.init_depth_scale
    for entry in tensors(model):
        tensor = entry.id
        if tensor.tensor.endswith("_bias"):
            entry.value.zero_()
        elif entry.parameter.ndim >= 2:
            fan_out, fan_in = entry.value.shape[-2:]
            std = scheme.std(tensor, fan_in, fan_out, cfg)
            if tensor.layer is not None and tensor.tensor in GAINED:
                where = cfg.where(tensor.stack, tensor.layer, tensor.site)
                std *= gain(where)
                if scaled and tensor.tensor in ONTO_STREAM:
                    std /= where.sublayers**0.5
            draw = torch.randn(entry.value.shape, generator=_generator(seed, tensor))
            entry.value.copy_(std * draw)


@torch.no_grad()
def calibrate(model: Model, inputs: Any) -> None:
    """What a model must know of its data before its first step; nothing for most.

    Batch norms: running statistics, those of this batch. Admin: its weights, by its profiling.
    """
    was_training = model.training
    model.eval()  # no dropout
    _settle_batch_norms(model, inputs)
    if _profile_admin(model, inputs):
        _settle_batch_norms(model, inputs)
    model.train(was_training)


def _settle_batch_norms(model: Model, inputs: Any) -> None:
    norms = [m for m in model.modules() if isinstance(m, BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    if norms:
        model(inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval()
        norm.momentum = momentum


def _profile_admin(model: Model, inputs: Any) -> bool:
    """Liu et al. 2020, section 4.2: one forward pass with every w = 1, then, stack by stack,

    w_1 = 1, w_2^2 = Var x_0 + Var F_1, w_{i+1}^2 = w_i^2 + Var F_i. Whether there was anything to profile.
    """
    chains = [
        (stack.embed, [(getattr(block, site), residual) for block in stack.blocks for site in ("attn", "cross", "ffn")
                       if isinstance(residual := getattr(block, f"{site}_residual", None), Admin)])
        for stack in model.stacks.values()
    ]  # fmt: skip
    variance: dict[nn.Module, Tensor] = {}

    def hook(module: nn.Module, _args: Any, output: Tensor) -> None:
        variance[module] = output.var(correction=0)

    watched = [module for embed, chain in chains if chain for module in (embed, *(f for f, _ in chain))]
    handles = [module.register_forward_hook(hook) for module in watched]
    try:
        if watched:
            model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    for embed, chain in chains:
        variances = [variance[module] for module in (embed, *(f for f, _ in chain[:-1])) if chain]
        for i, (_, residual) in enumerate(chain[1:], 1):
            residual.scale.fill_(sum(variances[: i + 1]) ** 0.5)
    return bool(watched)


def _generator(seed: int, tensor: TensorId) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{tensor}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
