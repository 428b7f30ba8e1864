"""Token files in nanoGPT's format: train.bin and val.bin, little-endian uint16, nothing else."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from normlab.explain import ConfigError

TRAIN, VAL = "train.bin", "val.bin"
PIECE = 2**22  # tokens that are looked at together
SAMPLE = 2**24  # tokens that bigrams are counted in


def read(folder: Path, vocab: int) -> tuple[Tensor, Tensor, str]:
    """(training, held-out) tokens as memory maps, uint16, and the SHA-256 of both. Every token is checked.

    Raises ConfigError naming file and place. No other file of the folder is opened, meta.pkl least of all.
    """
    digest, found = hashlib.sha256(), []
    for name in (TRAIN, VAL):
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; accepted: data.path, a folder of {TRAIN} and {VAL}") from None
        if size < 4 or size % 2:
            raise ConfigError(f"{path}: {size} bytes; accepted: uint16 tokens, 2 bytes each, at least two of them")
        tokens = np.memmap(path, dtype="<u2", mode="r")
        digest.update(size.to_bytes(8, "big"))
        for start in range(0, len(tokens), PIECE):
            piece = tokens[start : start + PIECE]
            if piece.max() >= vocab:
                place = start + int(np.argmax(piece >= vocab))
                told = f"{path}: token {tokens[place]} at place {place} (from 0)"
                raise ConfigError(f"{told}; accepted: below data.vocab={vocab}")
            digest.update(piece.tobytes())
        found.append(torch.from_file(str(path), shared=False, size=len(tokens), dtype=torch.uint16))
    return found[0], found[1], digest.hexdigest()


def write(path: Path, pieces: Iterable[np.ndarray]) -> int:
    """The pieces of a text as one file; the number of tokens. Raises ConfigError for an id that uint16 cannot hold."""
    count = 0
    with path.open("wb") as file:
        for piece in pieces:
            if len(piece) and not 0 <= piece.min() <= piece.max() < 2**16:
                raise ConfigError(f"{path}: token {piece.max()} does not fit uint16; accepted: a vocabulary to 65536")
            file.write(piece.astype("<u2").tobytes())
            count += len(piece)
    return count


def sample(tokens: Tensor) -> np.ndarray:
    """At most SAMPLE tokens, in four stretches spread evenly: enough to count bigrams of any corpus."""
    if len(tokens) <= SAMPLE:
        return tokens.numpy().astype(np.int64)
    stretch = SAMPLE // 4
    starts = np.linspace(0, len(tokens) - stretch, 4).astype(int)
    return np.concatenate([tokens[s : s + stretch].numpy() for s in starts]).astype(np.int64)
