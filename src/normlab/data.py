"""Token sources. A batch is a pure function of (seed, step): a resumed run needs no state.

H1 is the unigram entropy and H2 the bigram conditional entropy H(x_t | x_{t-1}), in nats: the two reference lines
between which a run is judged (a stuck model sits at H1). `surprisal` gives the same two numbers, and the source's own
floor, for the very tokens that a run is evaluated on, which takes the sampling noise of those tokens out.
"""

import hashlib
import sysconfig
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from normlab import hf, tokens
from normlab.config_data import DataConfig, HfConfig, MarkovConfig, TextConfig, TokensConfig
from normlab.explain import ConfigError
from normlab.ngram import Bigrams

TRAIN, HELD_OUT, MASKS = range(3)  # streams of the batch generator
HELD_OUT_SEED = 2**63  # no run's seed
DENSE = 256  # the largest vocabulary of real text whose bigrams are a table of all of them
Batch = tuple[Tensor, Tensor]  # inputs and next-token targets, int64 (B, T) each


@dataclass(frozen=True, kw_only=True)
class Source(ABC):
    """Tokens 0..vocab-1. log_p[j] is the (V^j, V) table of log p(next | the last j tokens, oldest first)."""

    vocab: int
    sha256: str
    log_p: tuple[np.ndarray, ...] = field(repr=False)
    entropies: tuple[float, ...]  # of log_p[j], nats
    entropy_rate: float | None  # nats per token, None where it is not known

    @property
    def h1(self) -> float:
        return self.entropies[0]

    @property
    def h2(self) -> float:
        return self.entropies[min(1, len(self.entropies) - 1)]

    def surprisal(self, text: np.ndarray, known: int) -> np.ndarray:
        """-log p of each token of text (B, T) given at most the `known` tokens before it, (B, T), nats."""
        known = min(known, len(self.log_p) - 1)
        found = np.empty(text.shape)
        for t in range(text.shape[1]):
            j = min(known, t)
            state = np.zeros(len(text), dtype=np.int64)
            for i in range(t - j, t):
                state = state * self.vocab + text[:, i]
            found[:, t] = -self.log_p[j][state, text[:, t]]
        return found

    @abstractmethod
    def require(self, window: int) -> None:
        """Raise ConfigError if a window of tokens and the target after it does not fit."""

    @abstractmethod
    def batch(self, seed: int, step: int, size: int, context: int) -> Batch:
        """The training batch of a step."""

    @abstractmethod
    def held_out(self, count: int, size: int, context: int) -> list[Batch]:
        """`count` evaluation batches, the same for every run."""


@final
@dataclass(frozen=True, kw_only=True)
class Text(Source):
    """Tokens of real text, a training and a held-out part. `bigrams` in place of log_p for a large vocabulary."""

    train: Tensor = field(repr=False)  # uint8 or uint16, one dimension
    val: Tensor = field(repr=False)
    bigrams: Bigrams | None = field(repr=False)

    def surprisal(self, text: np.ndarray, known: int) -> np.ndarray:
        if self.bigrams is None:
            return super().surprisal(text, known)
        found = self.bigrams.unigram_loss(text)
        if known:
            found[:, 1:] = self.bigrams.bigram_loss(text[:, :-1], text[:, 1:])
        return found

    def require(self, window: int) -> None:
        shorter = min(len(self.train), len(self.val))
        if shorter <= window:
            told = f"model.context: a sequence takes {window} tokens, the text's shorter part has {shorter}"
            raise ConfigError(f"{told}; accepted: fewer")

    def batch(self, seed: int, step: int, size: int, context: int) -> Batch:
        """Windows that start anywhere, drawn uniformly with replacement."""
        starts = words(seed, TRAIN, step, size) % np.uint64(len(self.train) - context)
        return _windows(self.train, starts.astype(np.int64), context)

    def held_out(self, count: int, size: int, context: int) -> list[Batch]:
        """Windows spread evenly over the held-out part; batch i holds every count-th of them."""
        starts = np.linspace(0, len(self.val) - context - 1, count * size).astype(np.int64)
        return [_windows(self.val, starts[i::count], context) for i in range(count)]


@final
@dataclass(frozen=True, kw_only=True)
class Markov(Source):
    """A stationary chain of order k over V symbols, every entropy exact. State: the last k symbols, oldest first."""

    order: int
    stationary: np.ndarray = field(repr=False)  # (V^k,)
    transition: np.ndarray = field(repr=False)  # (V^k, V)

    def require(self, window: int) -> None:
        """A chain has windows of any length."""

    def batch(self, seed: int, step: int, size: int, context: int) -> Batch:
        return self._sample(words(seed, TRAIN, step, size * (context + 2)), size, context)

    def held_out(self, count: int, size: int, context: int) -> list[Batch]:
        return [self._sample(words(0, HELD_OUT, i, size * (context + 2)), size, context) for i in range(count)]

    def _sample(self, words: np.ndarray, size: int, context: int) -> Batch:
        """Sequences of context + 1 symbols that start in the stationary distribution."""
        uniform = ((words >> np.uint64(11)) * 2.0**-53).reshape(context + 2, size)
        start = np.searchsorted(self.stationary.cumsum(), uniform[0], side="right")
        state = start.clip(max=len(self.stationary) - 1)
        drawn = np.empty((size, context + 1), dtype=np.int64)
        for t in range(context + 1):
            if t < self.order:  # the starting state's own symbols
                drawn[:, t] = state // self.vocab ** (self.order - 1 - t) % self.vocab
            else:
                passed = self.transition[state].cumsum(1) <= uniform[t + 1, :, None]
                drawn[:, t] = passed.sum(1).clip(max=self.vocab - 1)
                state = (state * self.vocab + drawn[:, t]) % len(self.stationary)
        tokens = torch.from_numpy(drawn)
        return tokens[:, :-1], tokens[:, 1:]


def load(cfg: DataConfig) -> Source:
    """The configured source, kept between the jobs of a sweep. Raises ConfigError when the text is too short."""
    key: Any = cfg  # frozen, hence hashable
    return _load(key)


@lru_cache(maxsize=4)
def _load(cfg: DataConfig) -> Source:
    match cfg:
        case TextConfig():
            return _load_text(cfg)
        case MarkovConfig():
            return _make_markov(cfg)
        case TokensConfig():
            if cfg.path is None:
                raise ConfigError("data.path: needed; accepted: a folder of train.bin and val.bin")
            return _load_tokens(Path(cfg.path), cfg.vocab)
        case HfConfig():
            return _load_tokens(*hf.prepared(cfg))
    raise TypeError(f"data={cfg.name} is no source of text windows: see normlab.task")


def _load_text(cfg: TextConfig) -> Text:
    root = Path(cfg.path) if cfg.path else Path(sysconfig.get_paths()["stdlib"])
    try:
        contents = [f.read_bytes() for f in text_files(root, cfg.glob, library=cfg.path is None)]
    except OSError as error:
        raise ConfigError(f"data.path={str(root)!r}: {error.strerror}: {error.filename or root}") from None
    cuts = [round(len(c) * (1 - cfg.val_fraction)) for c in contents]
    train = b"".join(c[:cut] for c, cut in zip(contents, cuts, strict=True))
    val = b"".join(c[cut:] for c, cut in zip(contents, cuts, strict=True))
    if min(len(train), len(val)) < 1024:
        raise ConfigError(
            f"data.path={str(root)!r}: {len(train)} training and {len(val)} held-out bytes; accepted: 1024 of each"
        )
    digest = hashlib.sha256()
    for content in contents:  # lengths too, so that moving a file boundary changes the hash
        digest.update(len(content).to_bytes(8, "big") + content)
    log_p, entropies = _dense_entropies(np.frombuffer(train, np.uint8), np.frombuffer(val, np.uint8), 256)
    return Text(
        vocab=256,
        sha256=digest.hexdigest(),
        log_p=log_p,
        entropies=entropies,
        entropy_rate=None,
        train=torch.frombuffer(bytearray(train), dtype=torch.uint8),
        val=torch.frombuffer(bytearray(val), dtype=torch.uint8),
        bigrams=None,
    )


def _load_tokens(folder: Path, vocab: int) -> Text:
    train, val, sha256 = tokens.read(folder, vocab)
    counted, judged = tokens.sample(train), tokens.sample(val)
    log_p, bigrams = (), None
    if vocab <= DENSE:
        log_p, entropies = _dense_entropies(counted, judged, vocab)
    else:
        bigrams = Bigrams.count(vocab, counted[1:], counted[:-1], counted[1:])
        losses = bigrams.unigram_loss(judged[1:]), bigrams.bigram_loss(judged[:-1], judged[1:])
        entropies = tuple(float(loss.mean()) for loss in losses)
    return Text(
        vocab=vocab,
        sha256=sha256,
        log_p=log_p,
        entropies=entropies,
        entropy_rate=None,
        train=train,
        val=val,
        bigrams=bigrams,
    )


def text_files(root: Path, pattern: str | None, *, library: bool = False) -> list[Path]:
    """The files to read, in an order that does not depend on the machine. library: the standard library, less tests."""
    if root.is_file():
        return [root]
    pattern = pattern or ("**/*.py" if library else "**/*")
    skip = {"site-packages", "test", "tests", "__pycache__"} if library else set()
    if Path(pattern).is_absolute():
        raise ConfigError(f"data.glob={pattern!r}: accepted: a pattern relative to data.path, such as **/*.txt")
    relative = sorted(f.relative_to(root).as_posix() for f in root.glob(pattern) if f.is_file())
    chosen = [root / r for r in relative if not skip & set(r.split("/"))]
    if not chosen:
        raise ConfigError(f"data.path={str(root)!r}: no file there matches data.glob={pattern!r}")
    return chosen


def _dense_entropies(
    train: np.ndarray, val: np.ndarray, vocab: int
) -> tuple[tuple[np.ndarray, ...], tuple[float, ...]]:
    """log p of the training part's unigrams (1, V) and bigrams (V, V), add-one smoothed, and H1, H2.

    H1 and H2 of a text are the held-out cross-entropies of these: the losses of a model that learned only them.
    """
    counts = [_pair_counts(part, vocab) for part in (train, val)]
    learned = [counts[0].sum(0, keepdims=True) + 1, counts[0] + 1]
    log_p = tuple(np.log(c / c.sum(1, keepdims=True)) for c in learned)
    entropies = tuple(-float((counts[1] * log).sum() / counts[1].sum()) for log in log_p)
    return log_p, entropies


def _pair_counts(text: np.ndarray, vocab: int) -> np.ndarray:
    """(V, V) counts of adjacent tokens, in pieces so that a large text needs little memory."""
    counts = np.zeros(vocab**2)
    for start in range(0, len(text) - 1, 2**22):
        piece = text[start : start + 2**22 + 1].astype(np.int64)
        counts += np.bincount(piece[:-1] * vocab + piece[1:], minlength=vocab**2)
    return counts.reshape(vocab, vocab)


def _make_markov(cfg: MarkovConfig) -> Markov:
    rng = np.random.default_rng(cfg.source_seed)
    states = cfg.vocab**cfg.order
    transition = rng.dirichlet(np.full(cfg.vocab, cfg.concentration), size=states)
    # A small uniform share keeps the chain ergodic, so that its stationary distribution is unique.
    transition = 0.999 * transition + 0.001 / cfg.vocab
    transition /= transition.sum(1, keepdims=True)
    stationary = _stationary(transition, cfg.vocab)
    # p(the last j symbols and the next one): sum the joint over the older symbols
    joint = stationary[:, None] * transition
    joints = [joint.reshape(-1, cfg.vocab**j, cfg.vocab).sum(0) for j in range(cfg.order + 1)]
    log_p = tuple(np.log(p / p.sum(1, keepdims=True)) for p in joints)
    entropies = tuple(-float((p * log).sum()) for p, log in zip(joints, log_p, strict=True))
    return Markov(
        vocab=cfg.vocab,
        sha256=hashlib.sha256(transition.astype("<f8").tobytes()).hexdigest(),
        log_p=log_p,
        entropies=entropies,
        entropy_rate=entropies[-1],
        order=cfg.order,
        stationary=stationary,
        transition=transition,
    )


def _stationary(transition: np.ndarray, vocab: int) -> np.ndarray:
    """pi with pi(s') = sum_s pi(s) p(s -> s'), by power iteration to a change below 1e-14 (L1)."""
    states = len(transition)
    if states == 1:
        return np.ones(1)
    pi = np.full(states, 1 / states)
    for _ in range(100_000):
        # s = (oldest, rest) with symbol a goes to (rest, a)
        following = (pi[:, None] * transition).reshape(vocab, states // vocab, vocab).sum(0).reshape(states)
        change, pi = np.abs(following - pi).sum(), following / following.sum()
        if change < 1e-14:
            break
    return pi


def _windows(tokens: Tensor, starts: np.ndarray, context: int) -> Batch:
    drawn = tokens[torch.from_numpy(starts)[:, None] + torch.arange(context + 1)].long()
    return drawn[:, :-1], drawn[:, 1:]


def words(seed: int, stream: int, step: int, count: int) -> np.ndarray:
    """`count` random 64-bit words of the counter-based Philox generator; its raw stream is fixed across versions."""
    return np.random.Philox(key=[seed, stream], counter=[0, 0, 0, step]).random_raw(count)
