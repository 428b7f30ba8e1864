"""Batches of sentence pairs of like length under a token budget, in an order that needs no state."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normlab import data
from normlab.head import IGNORED
from normlab.parallel import BOS, EOS, PAD, Split

Batch = tuple[Any, Tensor]


@dataclass(frozen=True)
class Bucket:
    """Pairs whose longer side has at most `width` tokens, and the shape that every batch of them is padded to."""

    pairs: np.ndarray  # their places in the split
    shape: tuple[int, int]  # the longest source, the longest target
    rows: int  # of a batch, at most

    @property
    def batches(self) -> int:
        return -(-len(self.pairs) // self.rows)


def buckets(lengths: np.ndarray, budget: int) -> list[Bucket]:
    """Widths 4, 8, ... 32, then by an eighth further each; rows times width is at most the budget, or one row."""
    longest = lengths.max(1)
    edges = [0]
    while edges[-1] < longest.max():
        edges.append(edges[-1] + max(4, edges[-1] // 8))
    found = []
    for low, high in itertools.pairwise(edges):
        inside = np.flatnonzero((longest > low) & (longest <= high))
        if len(inside):
            source, target = lengths[inside].max(0).tolist()
            found.append(Bucket(inside, (source, target), max(1, budget // max(source, target))))
    return found


class Batches:
    """The batches of a split. In an epoch each pair comes once; an epoch's number and place follow from the step."""

    def __init__(self, split: Split, budget: int) -> None:
        self.split, self.buckets = split, buckets(split.lengths(), budget)
        self.per_epoch = sum(bucket.batches for bucket in self.buckets)
        self.tokens_per_epoch = int(split.lengths()[:, 1].sum())
        self._epoch = lru_cache(maxsize=2)(self._shuffled)  # of what a step computes, kept for the next one

    def train(self, seed: int, step: int) -> Batch:
        bucket, rows = self._epoch(seed, step // self.per_epoch)[0][step % self.per_epoch]
        return assemble(self.split, rows, bucket.shape)

    def tokens(self, seed: int, steps: int) -> int:
        """Targets in the first `steps` batches."""
        whole, rest = divmod(steps, self.per_epoch)
        return whole * self.tokens_per_epoch + int(self._epoch(seed, whole)[1][rest])

    def spread(self, count: int) -> list[Batch]:
        """`count` batches over short and long pairs alike, or all there are, the same every time."""
        every = [(b, rows) for b in self.buckets for rows in np.array_split(b.pairs, b.batches)]
        chosen = np.linspace(0, len(every) - 1, min(count, len(every))).round().astype(int)
        return [assemble(self.split, every[i][1], every[i][0].shape) for i in chosen]

    def _shuffled(self, seed: int, epoch: int) -> tuple[list[tuple[Bucket, np.ndarray]], np.ndarray]:
        """The batches of an epoch, and the targets before each and after the last."""
        drawn = data.words(seed, data.TRAIN, epoch, len(self.split) + self.per_epoch)
        order, keys = drawn[: len(self.split)], drawn[len(self.split) :]
        batches = []
        for bucket in self.buckets:
            mixed = bucket.pairs[np.argsort(order[bucket.pairs], kind="stable")]
            batches += [(bucket, rows) for rows in np.array_split(mixed, bucket.batches)]
        batches = [batches[i] for i in np.argsort(keys, kind="stable")]
        targets = [sum(len(self.split.target[i]) + 1 for i in rows) for _, rows in batches]
        return batches, np.concatenate(([0], np.cumsum(targets)))


def assemble(split: Split, rows: Sequence[int] | np.ndarray, shape: tuple[int, int]) -> Batch:
    """((source and EOS, BOS and target, where the source is), target and EOS), each padded to its shape at its end."""
    source_BS = np.full((len(rows), shape[0]), PAD)
    inputs_BT, targets_BT = np.full((len(rows), shape[1]), PAD), np.full((len(rows), shape[1]), IGNORED)
    for row, pair in enumerate(rows):
        read, said = split.source[pair], split.target[pair]
        source_BS[row, : len(read) + 1] = [*read, EOS]
        inputs_BT[row, : len(said) + 1] = [BOS, *said]
        targets_BT[row, : len(said) + 1] = [*said, EOS]
    source, inputs, targets = (torch.from_numpy(a) for a in (source_BS, inputs_BT, targets_BT))
    return (source, inputs, source != PAD), targets
