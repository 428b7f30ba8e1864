"""Unigrams and bigrams of a large vocabulary, counted sparsely: what the reference losses of such data are made of."""

from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True)
class Bigrams:
    """p(b) = (c(b) + 1) / (N + V) and, by Witten and Bell's interpolation (1991), with T(a) the followers of a,

    p(b | a) = (c(a, b) + T(a) p(b)) / (c(a) + T(a)); p(b) after a token that was never seen with a follower. Both sum
    to 1 over the vocabulary. Held-out losses of these are upper bounds of the source's entropies, as any model's are.
    """

    log_p: np.ndarray  # (V,) of single tokens
    pairs: np.ndarray  # a * V + b of every bigram seen, ascending
    counts: np.ndarray  # how often, float64
    totals: np.ndarray  # (V,) c(a)
    followers: np.ndarray  # (V,) T(a)

    @classmethod
    def count(cls, vocab: int, tokens: np.ndarray, before: np.ndarray, after: np.ndarray) -> Self:
        """tokens: all that count as unigrams. before, after: the bigrams, aligned."""
        single = np.bincount(tokens, minlength=vocab) + 1.0
        pairs, counts = np.unique(before.astype(np.int64) * vocab + after, return_counts=True)
        first = pairs // vocab
        totals = np.bincount(first, weights=counts, minlength=vocab)
        followers = np.bincount(first, minlength=vocab)
        return cls(np.log(single / single.sum()), pairs, counts.astype(float), totals, followers.astype(float))

    def unigram_loss(self, tokens: np.ndarray) -> np.ndarray:
        """-log p of each token, nats."""
        return -self.log_p[tokens]

    def bigram_loss(self, before: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """-log p of each token after the one before it, nats."""
        wanted = before.astype(np.int64) * len(self.log_p) + tokens
        place = np.searchsorted(self.pairs, wanted).clip(max=max(len(self.pairs) - 1, 0))
        seen = np.where(self.pairs[place] == wanted, self.counts[place], 0.0) if len(self.pairs) else 0.0
        total, spread = self.totals[before], self.followers[before]
        backed_off = np.exp(self.log_p[tokens])
        p = np.where(total > 0, (seen + spread * backed_off) / np.maximum(total + spread, 1), backed_off)
        return -np.log(p)
