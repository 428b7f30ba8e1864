"""The held-out batches of a run: its model's mean loss on them, and what the simplest predictors score there."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normlab.distributed import Ranks
from normlab.objective import Batch, Task, micro_batches, shares

Objective = Callable[[Any, Tensor], tuple[Tensor, Tensor]]  # what training descends, its cross-entropy


def cross_entropy(objective: Objective, batch: Batch, micro_batch: int | None) -> Tensor:
    """Mean over the batch's targets, micro-batch by micro-batch."""
    found = [objective(*part)[1] * share for part, share in micro_batches(batch, micro_batch)]
    return sum(found[1:], found[0])


class HeldOut:
    """Batches on the device, weighted so that a mean over them is one over their targets."""

    def __init__(
        self, learned: Task, batches: Sequence[Batch], *, device: torch.device, micro_batch: int | None, ranks: Ranks
    ) -> None:
        self._task, self._batches, self._micro_batch, self._ranks = learned, batches, micro_batch, ranks
        self._shares = torch.tensor(shares(batches)).to(device)

    def loss(self, objective: Objective) -> float:
        """Mean cross-entropy; the ranks share out the batches."""
        losses = torch.zeros_like(self._shares)
        for i in range(self._ranks.rank, len(losses), self._ranks.size):
            losses[i] = cross_entropy(objective, self._batches[i], self._micro_batch)
        if self._ranks.size > 1:  # on the host: a device would not wait as long as rank 0 may take for a profile
            losses = losses.cpu()
            self._ranks.add_up(losses)
        return (losses * self._shares.to(losses.device)).mean().item()

    def reference(self, known: int) -> float:
        """Mean loss of the best predictor that sees the last `known` true tokens."""
        return self._mean([self._task.reference_loss(batch, known) for batch in self._batches])

    def floor(self) -> float | None:
        """The least mean loss that any model could have, None where it is not known."""
        floors = [self._task.floor(batch) for batch in self._batches]
        return None if None in floors else self._mean(floors)

    @property
    def length(self) -> float:
        """Tokens of a sequence, padding included."""
        return sum(t.numel() for _, t in self._batches) / sum(len(t) for _, t in self._batches)

    def _mean(self, values: Sequence[float | None]) -> float:
        return float(np.average(np.array(values, float), weights=self._shares.tolist()))
