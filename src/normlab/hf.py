"""Text sets of the `datasets` library, tokenised once into token files in the cache."""

import glob
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from normlab import cache, tokens
from normlab.config_data import HfConfig, absolute
from normlab.explain import ConfigError
from normlab.pieces import Pieces, pieces

LOCAL = ("parquet", "json", "csv", "text")  # builders of `datasets` that read files
_PLAIN = {"batch_size", "cache", "files", "tokenizer"}  # not part of what is cached, or by their content


def prepared(cfg: HfConfig) -> tuple[Path, int]:
    """(folder of the set's token files, vocabulary). Made where the cache lacks them.

    The cache knows local files by their content, a set of the hub by its name and revision.
    """
    if cfg.dataset is None:
        raise ConfigError(
            f"data.dataset: needed; accepted: a set's name on the hub, or {', '.join(LOCAL)} with data.files"
        )
    if (cfg.dataset in LOCAL) != (cfg.files is not None):
        raise ConfigError(f"data.dataset={cfg.dataset}, data.files={cfg.files}: files go with {', '.join(LOCAL)}")
    files = _files(cfg.files) if cfg.files else []
    name = cfg.tokenizer if cfg.tokenizer in {"bytes", "gpt2"} else absolute(cfg.tokenizer)
    cut = pieces(name, "data.tokenizer")
    settings = {k: v for k, v in cfg.model_dump(mode="json").items() if k not in _PLAIN}
    key = cache.digest(
        json.dumps(settings, sort_keys=True).encode(), cut.identity, *(Path(f).read_bytes() for f in files)
    )
    return cache.kept(cfg.cache, f"hf-{key[:32]}", lambda folder: _write(cfg, files, cut, folder)), cut.vocab


def _files(pattern: str) -> list[str]:
    path = absolute(pattern)
    found = sorted(f for f in glob.glob(path, recursive=True) if Path(f).is_file())  # noqa: PTH207  may be absolute
    if not found:
        raise ConfigError(f"data.files={pattern!r}: no such file")
    return found


def _write(cfg: HfConfig, files: list[str], cut: Pieces, folder: Path) -> None:
    counts = {}
    if cfg.val_split is None:
        every = round(1 / cfg.val_fraction)
        chosen: dict[str, Callable[[int], bool]] = {
            tokens.TRAIN: lambda i: i % every != every - 1,
            tokens.VAL: lambda i: i % every == every - 1,
        }
        for name, wanted in chosen.items():
            counts[name] = tokens.write(folder / name, _documents(cfg, files, cfg.train_split, cut, wanted))
    else:
        for name, split in ((tokens.TRAIN, cfg.train_split), (tokens.VAL, cfg.val_split)):
            counts[name] = tokens.write(folder / name, _documents(cfg, files, split, cut, lambda i: True))
    if min(counts.values()) < 2:
        told = f"{counts[tokens.TRAIN]} training and {counts[tokens.VAL]} held-out tokens"
        raise ConfigError(
            f"data.dataset={cfg.dataset}: {told}; accepted: more documents, or a larger data.val_fraction"
        )


def _documents(
    cfg: HfConfig, files: list[str], split: str, cut: Pieces, wanted: Callable[[int], bool]
) -> Iterator[np.ndarray]:
    """The tokens of one document after the other."""
    rows = _loaded(cfg, files, split)
    number = 0
    try:
        for number, row in enumerate(rows):
            if cfg.max_documents is not None and number >= cfg.max_documents:
                return
            if cfg.column not in row:
                raise ConfigError(f"data.column={cfg.column!r}: accepted here: {', '.join(row)}")
            if not isinstance(row[cfg.column], str):
                raise ConfigError(
                    f"data.dataset={cfg.dataset}: document {number} of {split} has no text in {cfg.column}"
                )
            if wanted(number):
                yield cut.encode(row[cfg.column] + cfg.separator)
    except ConfigError:
        raise
    except Exception as error:  # a stream breaks with whatever its HTTP library or parser raises
        raise ConfigError(f"data.dataset={cfg.dataset}: document {number} of {split}: {_short(error)}") from None


def _loaded(cfg: HfConfig, files: list[str], split: str) -> Any:
    datasets = cache.extra("datasets", "data=hf")
    where = {"revision": cfg.revision} | ({"data_files": {split: files}} if files else {})
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what is wrong is told below
    try:
        return datasets.load_dataset(cfg.dataset, cfg.subset, split=split, streaming=cfg.streaming, **where)
    except Exception as error:  # no network, no such set, no such split, a damaged file
        hub = (
            "" if files else "; a hub that is out of reach: accepted: local files with data.dataset=parquet, json, text"
        )
        raise ConfigError(f"data.dataset={cfg.dataset}, split {split}: {_short(error)}{hub}") from None


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
