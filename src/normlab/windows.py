"""What the architectures learn from windows of a text: next tokens, masked ones, a continuation."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from normlab import data
from normlab.head import IGNORED
from normlab.objective import Batch, Task


@dataclass(frozen=True)
class Window(Task):
    """Windows of `context` tokens, `size` at a time."""

    source: data.Source
    size: int
    context: int

    @property
    def window(self) -> int:
        """Tokens of the source that one sequence needs, beside the last target."""
        return self.context

    def batch(self, seed: int, step: int) -> Batch:
        return self.shape(self.source.batch(seed, step, self.size, self.window), seed, step)

    def held_out(self, count: int) -> list[Batch]:
        windows = self.source.held_out(count, self.size, self.window)
        return [self.shape(batch, data.HELD_OUT_SEED, i) for i, batch in enumerate(windows)]

    def tokens_seen(self, seed: int, steps: int) -> int:
        return steps * self.size * self.context

    @abstractmethod
    def shape(self, batch: data.Batch, seed: int, step: int) -> Batch:
        """The task of a window of the source and its next tokens."""

    @abstractmethod
    def tokens(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The text behind a batch (B, S), and which of it is predicted (B, S) bool."""

    def reference_loss(self, batch: Batch, known: int) -> float:
        text, predicted = (t.cpu().numpy() for t in self.tokens(batch))
        return float(self.source.surprisal(text, known)[predicted].mean())

    def floor(self, batch: Batch) -> float | None:
        return None if self.source.entropy_rate is None else self.reference_loss(batch, self.window)


@final
class NextToken(Window):
    """A decoder predicts each next token."""

    def shape(self, batch: data.Batch, seed: int, step: int) -> Batch:
        return batch

    def tokens(self, batch: Batch) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        text = torch.cat((inputs[:, :1], targets), dim=1)
        return text, torch.arange(text.shape[1]).expand(text.shape) > 0


@final
class MaskedToken(Window):
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

    def floor(self, batch: Batch) -> float | None:
        """Unknown: the model sees both sides."""
        return None


@final
class Continuation(Window):
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
