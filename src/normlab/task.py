"""What each architecture learns from a token source: inputs and targets, and what the best simple predictors score.

A batch is a pure function of (seed, step), like the source's. Targets that are not predicted are IGNORED.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from normlab import data
from normlab.config import Config
from normlab.explain import ConfigError
from normlab.model import IGNORED

Batch = tuple[Any, Tensor]  # (what Model.forward takes, targets (B, T))


@dataclass(frozen=True)
class Task(ABC):
    """Windows of `context` tokens, `size` at a time."""

    source: data.Source
    size: int
    context: int

    @property
    def vocab(self) -> int:
        return self.source.vocab

    @property
    def window(self) -> int:
        """Tokens of the source that one sequence needs, beside the last target."""
        return self.context

    def batch(self, seed: int, step: int) -> Batch:
        """The training batch of a step."""
        return self.shape(self.source.batch(seed, step, self.size, self.window), seed, step)

    def held_out(self, count: int) -> list[Batch]:
        """`count` evaluation batches, the same for every run."""
        windows = self.source.held_out(count, self.size, self.window)
        return [self.shape(batch, data.HELD_OUT_SEED, i) for i, batch in enumerate(windows)]

    @abstractmethod
    def shape(self, batch: data.Batch, seed: int, step: int) -> Batch:
        """The task of a window of the source and its next tokens."""

    @abstractmethod
    def tokens(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The text behind a batch (B, S), and which of it is predicted (B, S) bool."""

    def reference_loss(self, batch: Batch, known: int) -> float:
        """Mean loss on these targets of the best predictor that sees the last `known` true tokens and no more."""
        text, predicted = (t.cpu().numpy() for t in self.tokens(batch))
        return float(self.source.surprisal(text, known)[predicted].mean())


@final
class NextToken(Task):
    """A decoder predicts each next token."""

    def shape(self, batch: data.Batch, seed: int, step: int) -> Batch:
        return batch

    def tokens(self, batch: Batch) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        text = torch.cat((inputs[:, :1], targets), dim=1)
        return text, torch.arange(text.shape[1]).expand(text.shape) > 0


@final
class MaskedToken(Task):
    """An encoder restores 15 % of the tokens: of these 80 % are masked, 10 % random, 10 % left (Devlin et al. 2018)."""

    @property
    def vocab(self) -> int:
        return self.source.vocab + 1  # the mask

    def shape(self, batch: data.Batch, seed: int, step: int) -> Batch:
        text, _ = batch
        words = data.words(seed, data.MASKS, step, 2 * text.numel()).reshape(2, *text.shape)
        draw, other = torch.from_numpy((words[0] >> np.uint64(11)) * 2.0**-53), words[1] % np.uint64(self.source.vocab)
        chosen = (draw < 0.15) | (draw == draw.amin(1, keepdim=True))  # at least one of a sequence
        inputs = torch.where(chosen & ((draw < 0.12) | (draw >= 0.15)), self.source.vocab, text)
        inputs = torch.where(chosen & (draw >= 0.12) & (draw < 0.135), torch.from_numpy(other.astype(np.int64)), inputs)
        return inputs, torch.where(chosen, text, IGNORED)

    def tokens(self, batch: Batch) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        return torch.where(targets == IGNORED, inputs, targets), targets != IGNORED


@final
class Continuation(Task):
    """An encoder reads `context` tokens, a decoder predicts those that follow."""

    @property
    def window(self) -> int:
        return 2 * self.context

    def shape(self, batch: data.Batch, seed: int, step: int) -> Batch:
        inputs, targets = batch
        return (inputs[:, : self.context], inputs[:, self.context :]), targets[:, self.context :]

    def tokens(self, batch: Batch) -> tuple[Tensor, Tensor]:
        (source, inputs), targets = batch
        text = torch.cat((source, inputs[:, :1], targets), dim=1)
        return text, torch.arange(text.shape[1]).expand(text.shape) > self.context


TASKS: dict[str, type[Task]] = {"decoder": NextToken, "encoder": MaskedToken, "encoder_decoder": Continuation}


def make(cfg: Config) -> Task:
    """The task of a config. Raises ConfigError where data and model do not fit."""
    task = TASKS[cfg.model.arch](data.load(cfg.data), cfg.data.batch_size, cfg.model.context)
    task.source.require(task.window)
    if cfg.model.vocab is not None and cfg.model.vocab < task.vocab:
        raise ConfigError(f"model.vocab={cfg.model.vocab}: the data has {task.vocab} symbols; accepted: at least those")
    if cfg.model.head == "pooler":
        raise ConfigError("model.head=pooler has no language-model loss to train; accepted: lm, mlm")
    return task


def micro_batches(batch: Batch, size: int | None) -> Iterator[tuple[Batch, Tensor | float]]:
    """Slices of `size` sequences, each with its share of the batch's targets: their weighted losses sum to the mean."""
    inputs, targets = batch
    if size is None or size >= len(targets):
        yield batch, 1.0
        return
    counted = (targets != IGNORED).sum()
    for start in range(0, len(targets), size):
        part = slice(start, start + size)
        cut = tuple(t[part] for t in inputs) if isinstance(inputs, tuple) else inputs[part]
        yield (cut, targets[part]), (targets[part] != IGNORED).sum() / counted
