"""What a model ends in: heads that read the last stream, and the losses of their outputs.

Shapes: B batch, T tokens, D width, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normlab.config_model import ModelConfig
from normlab.ffn import ACTIVATIONS
from normlab.norm import make_norm, wide

IGNORED = -100  # a target that the loss leaves out


class Head(nn.Module):
    """W x (+ b), onto the vocabulary. (B, T, D) -> (B, T, V)."""

    def __init__(self, cfg: ModelConfig, vocab: int) -> None:
        super().__init__()
        self.out = nn.Linear(cfg.width, vocab, cfg.head_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.out(x_BTD)


class MaskedHead(nn.Module):
    """W N(act(W_d x + b_d)) + b: BERT's masked-LM head (Devlin et al. 2018, arXiv 1810.04805). (B, T, V)."""

    def __init__(self, cfg: ModelConfig, vocab: int) -> None:
        super().__init__()
        self.dense = nn.Linear(cfg.width, cfg.width)
        self.act = ACTIVATIONS[cfg.activation].fn
        self.norm = make_norm(cfg)
        self.out = nn.Linear(cfg.width, vocab)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.out(self.norm(self.act(self.dense(x_BTD))))


class Pooler(nn.Module):
    """tanh(W x_0 + b) of the first token: BERT's sentence feature, which no language-model loss reads. -> (B, D)."""

    def __init__(self, cfg: ModelConfig, vocab: int) -> None:
        super().__init__()
        self.dense = nn.Linear(cfg.width, cfg.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return torch.tanh(self.dense(x_BTD[:, 0]))


HEADS: dict[str, type[nn.Module]] = {"lm": Head, "mlm": MaskedHead, "pooler": Pooler}


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean in nats over the targets that are not IGNORED, in fp32 or better.

    Label smoothing e: the targets are 1 - e the true token, e uniform (Szegedy et al. 2015, section 7).
    """
    logits_NV, targets_N = wide(logits_BTV).flatten(0, 1), targets_BT.flatten()
    return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, label_smoothing=smoothing)


def squared_error(outputs_BT1: Tensor, targets_BT: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean over all targets, which are numbers, in fp32 or better. There are no labels to smooth."""
    return F.mse_loss(wide(outputs_BT1).squeeze(-1), targets_BT)
