"""A toy regression: f(x) = sin x of random numbers, whose best simple predictors are known in closed form."""

import hashlib
import math
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from normlab.data import HELD_OUT, TRAIN, words
from normlab.objective import Batch, Task

Numbers = tuple[Tensor, Tensor]  # x and sin x, float32 (B, T) each


@final
@dataclass(frozen=True)
class Sine:
    """x uniform in [-half_range, half_range]. Batches as normlab.data's sources give them."""

    half_range: float
    vocab: ClassVar[None] = None  # numbers: no symbols, and none of the entropies that a text has
    h1: ClassVar[None] = None
    h2: ClassVar[None] = None
    entropy_rate: ClassVar[None] = None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(f"sin x, x in +-{self.half_range!r}".encode()).hexdigest()

    @property
    def slope(self) -> float:
        """E[x sin x] / E[x^2] = 3 (sin r - r cos r) / r^3, r = half_range: a x is the best linear predictor."""
        r = self.half_range
        return 3 * (math.sin(r) - r * math.cos(r)) / r**3

    def batch(self, seed: int, step: int, size: int, context: int) -> Numbers:
        return self._sample(words(seed, TRAIN, step, size * context), size, context)

    def held_out(self, count: int, size: int, context: int) -> list[Numbers]:
        return [self._sample(words(0, HELD_OUT, i, size * context), size, context) for i in range(count)]

    def _sample(self, words: np.ndarray, size: int, context: int) -> Numbers:
        uniform = (words >> np.uint64(11)) * 2.0**-53
        x = torch.from_numpy((self.half_range * (2 * uniform - 1)).reshape(size, context)).float()
        return x, x.double().sin().float()


@final
@dataclass(frozen=True)
class Regression(Task):
    """sin x of each of `context` numbers x, `size` sequences at a time; the loss is the mean squared error."""

    source: Sine
    size: int
    context: int

    def batch(self, seed: int, step: int) -> Batch:
        return self.source.batch(seed, step, self.size, self.context)

    def held_out(self, count: int) -> list[Batch]:
        return self.source.held_out(count, self.size, self.context)

    def tokens_seen(self, seed: int, steps: int) -> int:
        return steps * self.size * self.context

    def reference_loss(self, batch: Batch, known: int) -> float:
        """Of the best constant, 0, and, where x is known, of the best linear map: the first thing that x tells, as a
        bigram is the first that a text does. A stack stuck at the constant has learned nothing of its input."""
        x, targets = (t.double() for t in batch)
        return (targets - self.source.slope * x if known else targets).square().mean().item()

    def floor(self, batch: Batch) -> float | None:
        return 0.0
