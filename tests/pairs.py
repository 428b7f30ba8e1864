"""A made-up language pair for tests: German-like words, translated word by word and reversed."""

from pathlib import Path

import numpy as np
from conftest import compose

from normlab.config import Config

WORDS = ["ein", "mann", "läuft", "über", "die", "straße", "hund", "rot", "haus", "kind", "spielt", "ball"]
SIZE = ["model.arch=encoder_decoder", "model.depth=2", "model.width=16", "model.heads=2", "model.context=48"]
REST = ["data.vocab=270", "data.batch_tokens=128", "data.bleu_sentences=7", "data.beam=2", "log=disabled"]
SHORT = ["steps=6", "eval.batches=3", "probe.batches=2"]


def write(folder: Path, train: int = 60, valid: int = 12, test: int = 9, seed: int = 0) -> Path:
    """train.de, train.en, ... in `folder`."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("valid", valid), ("test", test)):
        said = [[WORDS[i] for i in rng.integers(0, len(WORDS), rng.integers(1, 7))] for _ in range(count)]
        (folder / f"{name}.de").write_text("".join(" ".join(words) + "\n" for words in said))
        (folder / f"{name}.en").write_text("".join(" ".join(w[::-1] for w in words) + ".\n" for words in said))
    return folder


def config(folder: Path, *overrides: str) -> Config:
    """A tiny model on pairs that are written where there are none; its cache is in the folder too."""
    if not (folder / "train.de").exists():
        write(folder)
    where = [f"data.path={folder}", f"data.cache={folder / 'cache'}", f"runs_dir={folder / 'runs'}"]
    return compose("data=parallel", *SIZE, *REST, *SHORT, *where, *overrides)
