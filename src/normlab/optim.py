"""Optimizers by name and learning-rate schedules as pure functions of the step."""

import math
from collections.abc import Callable

import torch
from torch import nn

from normlab.config import ModelConfig, OptimConfig, OptimizerName, ScheduleName

# (fraction of the decay phase done in [0, 1), warm-up steps, 1-based step) -> multiple of the peak
Decay = Callable[[float, int, int], float]

SCHEDULES: dict[ScheduleName, Decay] = {
    "constant": lambda done, warmup, n: 1.0,
    "linear": lambda done, warmup, n: 1 - done,
    "cosine": lambda done, warmup, n: 0.5 * (1 + math.cos(math.pi * done)),
    "inverse_sqrt": lambda done, warmup, n: math.sqrt(max(warmup, 1) / n),  # Vaswani et al. 2017, equation 3
    "step": lambda done, warmup, n: float(done < 8 / 15),  # at epoch 8 of 15 (Xiong et al. 2020, pre-norm on IWSLT14)
}

OPTIMIZERS: dict[OptimizerName, Callable[[list[dict], OptimConfig, bool], torch.optim.Optimizer]] = {
    "adam": lambda groups, cfg, fused: torch.optim.Adam(
        groups, cfg.lr, cfg.betas, cfg.eps, weight_decay=cfg.weight_decay, fused=fused
    ),
    "adamw": lambda groups, cfg, fused: torch.optim.AdamW(
        groups, cfg.lr, cfg.betas, cfg.eps, weight_decay=cfg.weight_decay, fused=fused
    ),
    "radam": lambda groups, cfg, fused: torch.optim.RAdam(
        groups, cfg.lr, cfg.betas, cfg.eps, weight_decay=cfg.weight_decay
    ),
    "sgd": lambda groups, cfg, fused: torch.optim.SGD(
        groups, cfg.lr, cfg.momentum, weight_decay=cfg.weight_decay, fused=fused
    ),
}


def learning_rate(cfg: OptimConfig, step: int, steps: int) -> float:
    """The rate that update `step` (0-based) of `steps` uses.

    Warm-up: lr * (step + 1) / warmup_steps, so the peak is reached at step warmup_steps - 1 and no update has rate 0.
    After it: the schedule; linear and cosine end at lr * final_lr_ratio, reached as step -> steps; step is
    there from 8/15 of the way on.
    """
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    done = (step - cfg.warmup_steps) / (steps - cfg.warmup_steps)
    shape = SCHEDULES[cfg.schedule](done, cfg.warmup_steps, step + 1)
    floor = cfg.final_lr_ratio if cfg.schedule in {"linear", "cosine", "step"} else 0.0
    return cfg.lr * (floor + (1 - floor) * shape)


def make(model: nn.Module, cfg: OptimConfig, shape: ModelConfig) -> torch.optim.Optimizer:
    """The named optimizer; weight decay on matrices and embeddings only, not on biases, norms and scales.

    Each group's rate is the schedule's times its `lr_scale`. init=completep (Dey et al. 2025, arXiv 2505.01618, alpha
    = 1): rate / m and decay * m on the blocks' matrices, eps / (m m_L), with m, m_L the multiples of the base.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    hidden = [p for name, p in named if p.ndim >= 2 and ".blocks." in name]
    outer = [p for name, p in named if p.ndim >= 2 and ".blocks." not in name]
    m = shape.width_multiple
    if m == 1:  # one group: each costs some calls of a step
        hidden, outer = [*hidden, *outer], []
    groups = [
        {"params": hidden, "lr_scale": 1 / m, "weight_decay": cfg.weight_decay * m},
        {"params": outer, "lr_scale": 1.0},
        {"params": [p for _, p in named if p.ndim < 2], "lr_scale": 1.0, "weight_decay": 0.0},
    ]
    cfg = cfg.model_copy(update={"eps": cfg.eps / (m * shape.depth_multiple)})
    return OPTIMIZERS[cfg.name]([g for g in groups if g["params"]], cfg, named[0][1].device.type in {"cpu", "cuda"})
