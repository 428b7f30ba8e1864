"""What each architecture learns from a source: inputs and targets, and what the best simple predictors score.

A batch is a pure function of (seed, step), like the source's. Targets that are not predicted are IGNORED.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from normlab import cache, data, parallel
from normlab.buckets import Batches
from normlab.config import Config
from normlab.config_data import ParallelConfig, SineConfig
from normlab.explain import ConfigError
from normlab.files import write_atomically
from normlab.head import IGNORED
from normlab.model import Model
from normlab.parallel import Parallel, Split
from normlab.sine import Sine
from normlab.translation import corpus_bleu, translations

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


HYPOTHESES = "translations.txt"  # of the test files, in a run's folder


@final
class Translation(Task):
    """An encoder reads a sentence, a decoder predicts its translation token by token, EOS included."""

    def __init__(self, cfg: ParallelConfig, context: int) -> None:
        cache.extra("sacrebleu", "data=parallel")  # now, not after the training
        self.cfg, self.context = cfg, context
        self.source: Parallel = parallel.load(cfg)
        self.source.require(context)
        splits = self.source.splits
        self.batches = {name: Batches(splits[name], cfg.batch_tokens) for name in ("train", "valid")}

    def batch(self, seed: int, step: int) -> Batch:
        return self.batches["train"].train(seed, step)

    def held_out(self, count: int) -> list[Batch]:
        return self.batches["valid"].spread(count)

    def tokens_seen(self, seed: int, steps: int) -> int:
        return self.batches["train"].tokens(seed, steps)

    def reference_loss(self, batch: Batch, known: int) -> float:
        """Of the target's unigrams, or its bigrams from BOS on, as counted in the training files."""
        (_, inputs, _), targets = batch
        said = (targets != IGNORED).cpu().numpy()
        before, after = inputs.cpu().numpy()[said], targets.cpu().numpy()[said]
        bigrams = self.source.bigrams
        return float((bigrams.bigram_loss(before, after) if known else bigrams.unigram_loss(after)).mean())

    def scored(self, step: int) -> bool:
        return step > 0 and self.cfg.bleu_every > 0 and step % self.cfg.bleu_every == 0

    def scores(self, model: Model, device: torch.device, folder: Path | None = None) -> dict[str, Any]:
        """`bleu`, greedy, of some validation pairs; at the end test_bleu, by the beam, of all test pairs, kept too."""
        start, valid, test = time.perf_counter(), self.source.splits["valid"], self.source.splits.get("test")
        count = min(self.cfg.bleu_sentences, len(valid))
        some = np.linspace(0, len(valid) - 1, count).round().astype(int).tolist()
        said = self._said(model, device, valid, some, 1)
        bleu, signature = corpus_bleu(said, [valid.references[i] for i in some])
        found: dict[str, Any] = {"bleu": bleu}
        if folder is None:
            return found
        if test is not None:
            said = self._said(model, device, test, range(len(test)), self.cfg.beam)
            found["test_bleu"], _ = corpus_bleu(said, test.references)
            write_atomically(folder / HYPOTHESES, "".join(line + "\n" for line in said))
        return found | {"bleu_signature": signature, "bleu_seconds": time.perf_counter() - start}

    def _said(self, model: Model, device: torch.device, split: Split, pairs: Sequence[int], beam: int) -> list[str]:
        search = {"beam": beam, "length_penalty": self.cfg.length_penalty, "context": self.context}
        return translations(model, device, self.source, split, pairs, 2 * self.cfg.batch_tokens, **search)


TASKS: dict[str, type[Window]] = {"decoder": NextToken, "encoder": MaskedToken, "encoder_decoder": Continuation}
OBJECTIVES = {"lm": "decoder", "mlm": "encoder", "continuation": "encoder_decoder", "translation": "encoder_decoder"}


def make(cfg: Config) -> Task:
    """The task of a config. Raises ConfigError where data, model and objective do not fit."""
    if isinstance(cfg.data, SineConfig):
        return _of_numbers(cfg, cfg.data)
    wanted = OBJECTIVES.get(cfg.objective or "", cfg.model.arch)
    if wanted != cfg.model.arch:
        raise ConfigError(f"objective={cfg.objective}: model.arch={cfg.model.arch}; accepted: {wanted}")
    pairs = cfg.data.name == "parallel"
    if pairs != (cfg.objective == "translation") and cfg.objective in {"continuation", "translation"}:
        raise ConfigError(f"objective={cfg.objective}: data={cfg.data.name} has {'' if pairs else 'no '}sentence pairs")
    task = _of_pairs(cfg) if pairs else _of_windows(cfg)
    assert task.vocab is not None
    if cfg.model.vocab is not None and cfg.model.vocab < task.vocab:
        raise ConfigError(f"model.vocab={cfg.model.vocab}: the data has {task.vocab} symbols; accepted: at least those")
    if cfg.model.head == "pooler":
        raise ConfigError("model.head=pooler has no language-model loss to train; accepted: lm, mlm")
    return task


def _of_numbers(cfg: Config, numbers: SineConfig) -> Regression:
    """Raises ConfigError for a setting that has no meaning without a vocabulary."""
    for key, value, accepted in (
        ("model.arch", cfg.model.arch, ("decoder", "encoder")),
        ("model.head", cfg.model.head, ("lm", "mlm")),
        ("model.vocab", cfg.model.vocab, (None,)),
        ("model.tie", cfg.model.tie, (False,)),
        ("objective", cfg.objective, (None,)),
        ("label_smoothing", cfg.label_smoothing, (0,)),
    ):
        if value not in accepted:
            told = ", ".join(a if isinstance(a, str) else json.dumps(a) for a in accepted)
            raise ConfigError(f"{key}={value}: data=sine is a regression, without a vocabulary; accepted: {told}")
    return Regression(Sine(numbers.range), numbers.batch_size, cfg.model.context)


def _of_windows(cfg: Config) -> Task:
    assert not isinstance(cfg.data, ParallelConfig | SineConfig)
    task = TASKS[cfg.model.arch](data.load(cfg.data), cfg.data.batch_size, cfg.model.context)
    task.source.require(task.window)
    return task


def _of_pairs(cfg: Config) -> Task:
    assert cfg.data.name == "parallel"
    if cfg.model.arch != "encoder_decoder":
        raise ConfigError(f"data=parallel: model.arch={cfg.model.arch}; accepted: encoder_decoder")
    return Translation(cfg.data, cfg.model.context)


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
