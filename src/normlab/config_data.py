"""Types and limits of conf/data/: what is learned. Values live in the YAML files."""

import os
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from normlab.config_model import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


def absolute(path: str) -> str:
    """From the directory that the command was started in, also in a job that has left it."""
    if not path:
        raise ValueError("empty; accepted: a path")
    return str(Path(os.environ.get("NORMLAB_CWD", "."), Path(path).expanduser()).absolute())


def _existing(path: str | None) -> str | None:
    if path is None:
        return None
    if not Path(absolute(path)).exists():
        raise ValueError("no such file or folder")
    return absolute(path)


def _absolute_or_none(path: str | None) -> str | None:
    return None if path is None else absolute(path)


Name = Annotated[str, Field(min_length=1)]
Existing = Annotated[str | None, AfterValidator(_existing)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Share = Annotated[float, Field(gt=0, lt=1)]


class Windows(Section):
    """Sources of sequences of model.context tokens: windows of unbroken text, numbers."""

    PLACES: ClassVar[frozenset[str]] = frozenset()  # keys that lead to the content, whose hash stands for them
    batch_size: PositiveInt

    def sequences(self, context: int) -> int:
        """In a batch, were each as long as the context."""
        return self.batch_size


class TextConfig(Windows):
    PLACES = frozenset({"path", "glob"})
    name: Literal["text"]
    path: Existing
    glob: Name | None
    val_fraction: Share


class MarkovConfig(Windows):
    name: Literal["markov"]
    vocab: Annotated[int, Field(ge=2)]
    order: NonNegativeInt
    concentration: PositiveFloat
    source_seed: Seed

    @model_validator(mode="after")
    def _table_fits(self) -> "MarkovConfig":
        if self.vocab ** (self.order + 1) > 2**24:
            raise ValueError(
                f"data.vocab={self.vocab} to the power data.order + 1 = {self.order + 1} is the size of the "
                f"transition table; accepted: at most 2^24"
            )
        return self


class TokensConfig(Windows):
    PLACES = frozenset({"path"})
    name: Literal["tokens"]
    path: Existing
    vocab: Annotated[int, Field(ge=2, le=2**16)]


class HfConfig(Windows):
    PLACES = frozenset(
        {"dataset", "files", "subset", "revision", "train_split", "val_split", "val_fraction", "column"}
        | {"streaming", "max_documents", "separator", "tokenizer", "cache"}
    )
    name: Literal["hf"]
    dataset: Name | None
    files: Name | None
    subset: Name | None
    revision: Name | None
    train_split: Name
    val_split: Name | None
    val_fraction: Annotated[float, Field(gt=0, le=0.5)]
    column: Name
    streaming: bool
    max_documents: PositiveInt | None
    separator: str
    tokenizer: Name
    cache: Annotated[str | None, AfterValidator(_absolute_or_none)]


class SineConfig(Windows):
    name: Literal["sine"]
    range: Annotated[float, Field(ge=0.1, le=100)]  # below it, sin x is a straight line


_SPLITS = ("train", "valid", "test")


class ParallelConfig(Section):
    PLACES: ClassVar[frozenset[str]] = frozenset(
        {"path", "cache", *(f"{split}_{side}" for split in _SPLITS for side in ("source", "target"))}
    )
    name: Literal["parallel"]
    path: Existing
    train_source: Name
    train_target: Name
    valid_source: Name
    valid_target: Name
    test_source: Name | None
    test_target: Name | None
    vocab: Annotated[int, Field(ge=260, le=2**20)]
    batch_tokens: PositiveInt
    cache: Annotated[str | None, AfterValidator(_absolute_or_none)]
    bleu_every: NonNegativeInt
    bleu_sentences: PositiveInt
    beam: PositiveInt
    length_penalty: NonNegativeFloat

    def sequences(self, context: int) -> int:
        return max(1, self.batch_tokens // context)

    def pair(self, split: str) -> tuple[Path, Path] | None:
        """The files of a split, source and target; None where there are none."""
        names = (getattr(self, f"{split}_source"), getattr(self, f"{split}_target"))
        source, target = (None if n is None else Path(absolute(str(Path(self.path or "", n)))) for n in names)
        return None if source is None or target is None else (source, target)

    @model_validator(mode="after")
    def _files_come_in_pairs(self) -> "ParallelConfig":
        if (self.test_source is None) != (self.test_target is None):
            raise ValueError("data.test_source and data.test_target: one without the other; accepted: both, or neither")
        return self


DataConfig = Annotated[
    TextConfig | MarkovConfig | TokensConfig | HfConfig | ParallelConfig | SineConfig, Field(discriminator="name")
]
