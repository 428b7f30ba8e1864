"""What there is to learn, batch by batch: the interface that a run trains on, and how a batch is weighted in parts.

A batch is a pure function of (seed, step), like the source's. Targets that are not predicted are IGNORED.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normlab.head import IGNORED
from normlab.model import Model

Batch = tuple[Any, Tensor]  # (what Model.forward takes, targets (B, T))


class Task(ABC):
    """What a run learns, batch by batch."""

    source: Any  # a data.Source, a Parallel or a Sine: vocab, sha256, h1, h2, entropy_rate

    @property
    def vocab(self) -> int | None:
        """None where numbers are read and predicted."""
        return self.source.vocab

    @abstractmethod
    def batch(self, seed: int, step: int) -> Batch:
        """The training batch of a step."""

    @abstractmethod
    def held_out(self, count: int) -> list[Batch]:
        """`count` evaluation batches, the same for every run; fewer where there are no more."""

    @abstractmethod
    def tokens_seen(self, seed: int, steps: int) -> int:
        """Positions of the text that the first `steps` batches have, padding not counted."""

    @abstractmethod
    def reference_loss(self, batch: Batch, known: int) -> float:
        """Mean loss on these targets of the best predictor that sees the last `known` true tokens and no more."""

    def floor(self, batch: Batch) -> float | None:
        """The least mean loss that any model could have on these targets, None where it is not known."""
        return None

    def scored(self, step: int) -> bool:
        """Whether `scores` are wanted before this step."""
        return False

    def scores(self, model: Model, device: torch.device, folder: Path | None = None) -> dict[str, Any]:
        """What this task measures beside its loss, of a model in evaluation mode; the final ones, where a folder is
        given, which may keep what was scored."""
        return {}


def shares(batches: Sequence[Batch]) -> list[float]:
    """Each batch's number of targets over their mean: weights that make a mean over batches one over targets."""
    counts = [(targets != IGNORED).sum().item() for _, targets in batches]
    return [count * len(counts) / sum(counts) for count in counts]


def micro_batches(batch: Batch, size: int | None, rows: range | None = None) -> Iterator[tuple[Batch, Tensor | float]]:
    """Slices of `size` sequences, each with its share of the batch's targets: their weighted losses sum to the mean.

    rows: those of the batch that are wanted, all of them where it is None.
    """
    inputs, targets = batch
    rows = range(len(targets)) if rows is None else rows
    size = size or len(targets)
    if min(size, len(rows)) == len(targets):
        yield batch, 1.0
        return
    counted = (targets != IGNORED).sum()
    for start in range(rows.start, rows.stop, size):
        part = slice(start, min(start + size, rows.stop))
        cut = tuple(t[part] for t in inputs) if isinstance(inputs, tuple) else inputs[part]
        yield (cut, targets[part]), (targets[part] != IGNORED).sum() / counted
