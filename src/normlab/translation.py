"""Learning to translate: pairs of sentences in batches, what a model says to those of a split, and its BLEU."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from normlab import cache, parallel
from normlab.buckets import Batches, assemble
from normlab.config_data import ParallelConfig
from normlab.decode import translate
from normlab.files import write_atomically
from normlab.head import IGNORED
from normlab.model import EncoderDecoder, Model
from normlab.objective import Batch, Task
from normlab.parallel import Parallel, Split

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


def translations(
    model: Model,
    device: torch.device,
    spoken: Parallel,
    split: Split,
    pairs: Sequence[int],
    budget: int,
    *,
    beam: int,
    length_penalty: float,
    context: int,
) -> list[str]:
    """The translations of these pairs' sources, in their order; those of like length are searched together.

    budget: source tokens of all hypotheses that are searched at once, padding included.
    """
    assert isinstance(model, EncoderDecoder)
    lengths = {pair: len(split.source[pair]) + 1 for pair in pairs}
    order, said = sorted(lengths, key=lambda pair: (lengths[pair], pair)), {}
    while order:
        width = lengths[order[-1]]  # longest first: what needs the most memory fails at once
        rows = max(1, budget // (width * beam))
        part, order = order[-rows:], order[:-rows]
        (source, _, present), _ = assemble(split, part, (width, 1 + max(len(split.target[i]) for i in part)))
        where = source.to(device), present.to(device)
        with torch.compiler.set_stance("force_eager"):  # every step has another shape
            found, _ = translate(model, *where, beam=beam, length_penalty=length_penalty, context=context)
        said |= {pair: spoken.text(ids) for pair, ids in zip(part, found, strict=True)}
    return [said[pair] for pair in pairs]


def corpus_bleu(said: list[str], references: list[str]) -> tuple[float, str]:
    """BLEU (0 to 100) and the signature that says how it was computed (Post 2018, arXiv 1804.08771)."""
    metric = cache.extra("sacrebleu.metrics", "data=parallel").BLEU()
    return float(metric.corpus_score(said, [references]).score), str(metric.get_signature())
