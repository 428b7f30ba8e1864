"""Sentence pairs: two aligned files per split, read, checked and cut into the pieces of one BPE of both languages."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from normlab import cache
from normlab.config_data import ParallelConfig
from normlab.explain import ConfigError
from normlab.ngram import Bigrams

PAD, BOS, EOS, SPECIAL = 0, 1, 2, 3  # ids before the BPE's own, which no text can spell
Ids = list[np.ndarray]  # int32 pieces of each sentence, without BOS and EOS


@dataclass(frozen=True, kw_only=True)
class Split:
    """The pairs of one split, in the order of their files."""

    name: str
    paths: tuple[Path, Path] = field(repr=False)
    source: Ids = field(repr=False)
    target: Ids = field(repr=False)
    references: list[str] = field(repr=False)  # the target's lines

    def __len__(self) -> int:
        return len(self.source)

    def lengths(self) -> np.ndarray:
        """(pairs, 2): what the encoder reads, source and EOS, and what the decoder does, BOS and target."""
        return np.array([[len(s) + 1, len(t) + 1] for s, t in zip(self.source, self.target, strict=True)])


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Translation data. h1, h2: held-out losses of the target's unigrams and bigrams (ngram.Bigrams), EOS included."""

    vocab: int
    sha256: str
    splits: dict[str, Split] = field(repr=False)
    bigrams: Bigrams = field(repr=False)
    bpe: Any = field(repr=False)
    h1: float
    h2: float
    entropy_rate: None = None

    def text(self, ids: Iterable[int]) -> str:
        """What the pieces spell, on one line: a byte that ends lines, or half a character, becomes something else."""
        return " ".join(self.bpe.decode([i - SPECIAL for i in ids if i >= SPECIAL]).split())

    def require(self, context: int) -> None:
        """Raise ConfigError, naming file and line, for a sentence that does not fit the model."""
        for split in self.splits.values():
            lengths = split.lengths()
            for side in np.flatnonzero((lengths > context).any(0))[:1]:
                line = int(np.flatnonzero(lengths[:, side] > context)[0])
                told = f"{split.paths[side]}: line {line + 1} takes {lengths[line, side]} tokens with BOS or EOS"
                longest = f"the longest of its file {lengths[:, side].max()}"
                raise ConfigError(f"{told}, {longest}; accepted: at most model.context={context}")


def load(cfg: ParallelConfig) -> Parallel:
    """The configured pairs, kept between the jobs of a sweep.

    Raises ConfigError naming file and line before anything is written.
    """
    key: Any = cfg  # frozen, hence hashable
    return _load(key)


@lru_cache(maxsize=2)
def _load(cfg: ParallelConfig) -> Parallel:
    cache.extra("tokenizers", "data=parallel")
    pairs = {name: paths for name in ("train", "valid", "test") if (paths := cfg.pair(name))}
    read = {name: tuple(map(_lines, paths)) for name, paths in pairs.items()}
    for name, (source, target) in read.items():
        if len(source) != len(target):
            told = " and ".join(f"{path} {len(x)}" for path, x in zip(pairs[name], (source, target), strict=True))
            raise ConfigError(f"{told} lines; accepted: as many, a sentence a line")
    bpe = _bpe(cfg, read["train"])
    splits = {}
    for name, sides in read.items():
        source, target = (_encode(bpe, lines) for lines in sides)
        splits[name] = Split(name=name, paths=pairs[name], source=source, target=target, references=sides[1])
    content = ["\n".join(lines).encode() for sides in read.values() for lines in sides]
    vocab = SPECIAL + bpe.get_vocab_size()
    bigrams = Bigrams.count(vocab, *_decoded(splits["train"].target))
    tokens, before, after = _decoded(splits["valid"].target)
    return Parallel(
        vocab=vocab,
        sha256=cache.digest(bpe.to_str().encode(), *content),
        splits=splits,
        bigrams=bigrams,
        bpe=bpe,
        h1=float(bigrams.unigram_loss(tokens).mean()),
        h2=float(bigrams.bigram_loss(before, after).mean()),
    )


def _lines(path: Path) -> list[str]:
    """The sentences of a UTF-8 file. Only a line feed, with or without a carriage return, ends a line."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; data.path and the file names beside it lead there") from None
    raw = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if raw[-1] == b"":
        raw.pop()
    found = []
    for number, line in enumerate(raw, 1):
        try:
            text = line.removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: line {number} is not UTF-8: {error.reason} at byte {error.start + 1}") from None
        if not text.strip():
            raise ConfigError(f"{path}: line {number} is empty; accepted: a sentence on every line")
        found.append(text)
    if not found:
        raise ConfigError(f"{path}: empty; accepted: a sentence a line")
    return found


def _bpe(cfg: ParallelConfig, train: tuple[list[str], ...]) -> Any:
    """Byte-level BPE of both sides of the training files (Sennrich et al. 2016, arXiv 1508.07909): lossless.

    Kept in the cache under a hash of the text and of what else decides it; the same text gives the same merges.
    """
    tokenizers = cache.extra("tokenizers", "data=parallel")
    content = ["\n".join(lines).encode() for lines in train]
    made_by = f"bpe {cfg.vocab} {tokenizers.__version__}"

    def make(folder: Path) -> None:
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = tokenizers.decoders.ByteLevel()
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=cfg.vocab - SPECIAL, initial_alphabet=alphabet, special_tokens=[], show_progress=False
        )
        bpe.train_from_iterator((line for lines in train for line in lines), trainer)
        (folder / "bpe.json").write_text(bpe.to_str())

    folder = cache.kept(cfg.cache, f"bpe-{cache.digest(made_by.encode(), *content)[:32]}", make)
    try:
        return tokenizers.Tokenizer.from_file(str(folder / "bpe.json"))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{folder}: {error}; remove this folder, it is made again") from None


def _encode(bpe: Any, lines: list[str]) -> Ids:
    return [np.array(found.ids, dtype=np.int32) + SPECIAL for found in bpe.encode_batch(lines)]


def _decoded(target: Ids) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a decoder predicts, and the same as bigrams: before, from BOS, and after, to EOS."""
    before = np.concatenate([np.concatenate(([BOS], ids)) for ids in target])
    after = np.concatenate([np.concatenate((ids, [EOS])) for ids in target])
    return after, before, after
