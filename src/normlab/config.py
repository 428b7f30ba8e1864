"""Types and limits of conf/. Values live in the YAML files; nothing here has a default.

Everything past `load` is frozen, typed and checked; an unknown key is an error.
"""

import difflib
import os
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from normlab.explain import ConfigError, explain
from normlab.ffn import ACTIVATIONS, ffn_width
from normlab.norm import NORMS
from normlab.residual import PLACEMENTS


def _one_of(names: Set[str] | Mapping[str, Any]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in names:
            close = difflib.get_close_matches(value, names, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"accepted: {', '.join(names)}{hint}")
        return value

    return AfterValidator(check)


def _absolute(path: str) -> str:
    """From the directory that the command was started in, also in a job that has left it."""
    if not path:
        raise ValueError("empty; accepted: a path")
    return str(Path(os.environ.get("NORMLAB_CWD", "."), Path(path).expanduser()).absolute())


def _existing(path: str | None) -> str | None:
    if path is None:
        return None
    if not Path(_absolute(path)).exists():
        raise ValueError("no such file or folder")
    return _absolute(path)


def _device(name: str) -> str:
    if name == "auto":
        return name
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = ""
    if kind not in {"cpu", "cuda", "mps"}:
        raise ValueError("accepted: auto, cpu, cuda, cuda:N, mps")
    if kind != "cpu" and not getattr(torch, kind).is_available():
        raise ValueError(f"this machine has no {kind} device; accepted here: auto, cpu")
    return name


# The tables in init.py and optim.py have these rows; norms, placements and activations are read off their own tables.
InitName = Literal["xavier", "xiong", "gpt2"]
OptimizerName = Literal["adam", "adamw", "radam", "sgd"]
ScheduleName = Literal["constant", "linear", "cosine", "inverse_sqrt"]

NonNegativeInt = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
FolderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)]


class Section(BaseModel):
    """A part of the config: immutable, no unknown key, no silent conversion of a value's type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelConfig(Section):
    depth: PositiveInt
    width: PositiveInt
    heads: PositiveInt
    ffn_ratio: PositiveFloat
    context: PositiveInt
    norm: Annotated[str, _one_of(NORMS)]
    norm_eps: NonNegativeFloat
    placement: Annotated[str, _one_of(PLACEMENTS)]
    activation: Annotated[str, _one_of(ACTIVATIONS)]
    init: InitName
    position: Literal["learned", "sinusoidal", "rotary", "none"]
    qk_norm: bool
    bias: bool
    tie: bool
    scale_embedding: bool

    @model_validator(mode="after")
    def _fits_together(self) -> "ModelConfig":
        if self.width % self.heads:
            raise ValueError(f"model.heads={self.heads} must divide model.width={self.width}")
        if self.position == "rotary" and self.width // self.heads % 2:
            raise ValueError(
                f"model.position=rotary rotates pairs: the head width model.width / model.heads = "
                f"{self.width // self.heads} must be even"
            )
        if self.qk_norm and self.norm == "none":
            raise ValueError("model.qk_norm=true needs a norm: model.norm=none has none to apply")
        if ffn_width(self.width, self.ffn_ratio, ACTIVATIONS[self.activation].gated) < 1:
            raise ValueError(f"model.ffn_ratio={self.ffn_ratio} leaves no FFN unit at model.width={self.width}")
        return self


class TextConfig(Section):
    name: Literal["text"]
    path: Annotated[str | None, AfterValidator(_existing)]
    glob: Annotated[str, Field(min_length=1)] | None
    val_fraction: Annotated[float, Field(gt=0, lt=1)]
    batch_size: PositiveInt


class MarkovConfig(Section):
    name: Literal["markov"]
    vocab: Annotated[int, Field(ge=2)]
    order: NonNegativeInt
    concentration: PositiveFloat
    source_seed: Seed
    batch_size: PositiveInt

    @model_validator(mode="after")
    def _table_fits(self) -> "MarkovConfig":
        if self.vocab ** (self.order + 1) > 2**24:
            raise ValueError(
                f"data.vocab={self.vocab} to the power data.order + 1 = {self.order + 1} is the size of the "
                f"transition table; accepted: at most 2^24"
            )
        return self


class OptimConfig(Section):
    name: OptimizerName
    lr: PositiveFloat
    warmup_steps: NonNegativeInt
    schedule: ScheduleName
    final_lr_ratio: Annotated[float, Field(ge=0, le=1)]
    clip: Annotated[float, Field(gt=0)] | None
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)]
    eps: PositiveFloat
    weight_decay: NonNegativeFloat
    momentum: Fraction


class LogConfig(Section):
    mode: Literal["offline", "online", "disabled"]
    project: str
    entity: str | None
    every: PositiveInt
    progress: bool


class EvalConfig(Section):
    every: NonNegativeInt
    batches: PositiveInt


class ProbeConfig(Section):
    every: NonNegativeInt
    batches: NonNegativeInt


class SpikesConfig(Section):
    kappa: PositiveFloat
    window: Annotated[int, Field(ge=2)]
    min_history: Annotated[int, Field(ge=2)]
    min_height: NonNegativeFloat


class VerdictConfig(Section):
    stalled_below: Annotated[float, Field(ge=0, le=1)]


class Config(Section):
    model: ModelConfig
    data: Annotated[TextConfig | MarkovConfig, Field(discriminator="name")]
    optim: OptimConfig
    log: LogConfig
    eval: EvalConfig
    probe: ProbeConfig
    spikes: SpikesConfig
    verdict: VerdictConfig
    study: FolderName
    seed: Seed
    steps: NonNegativeInt
    device: Annotated[str, AfterValidator(_device)]
    precision: Literal["fp32", "bf16"]
    compile: bool
    runs_dir: Annotated[str, AfterValidator(_absolute)]
    force: bool

    @model_validator(mode="after")
    def _warmup_fits(self) -> "Config":
        if self.steps and self.optim.warmup_steps > self.steps:
            raise ValueError(
                f"optim.warmup_steps={self.optim.warmup_steps} is longer than the run: at most steps={self.steps}"
            )
        return self

    def identity(self) -> dict[str, Any]:
        """Every setting that can change a number of the result; names, paths, logging and launching left out."""
        exclude = {"study", "runs_dir", "force", "log", "device"}
        settings = self.model_dump(mode="json", exclude=exclude)
        for key in ("path", "glob"):  # the content's hash stands for them
            settings["data"].pop(key, None)
        return settings


def load(raw: DictConfig | Mapping[str, Any]) -> Config:
    """The one door from Hydra to typed settings. Raises ConfigError with one line that names what is wrong."""
    try:
        tree = raw if isinstance(raw, DictConfig) else OmegaConf.create(dict(raw))
        plain = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(" ".join(str(error).split())) from None
    try:
        return Config.model_validate(plain)
    except ValidationError as error:
        raise ConfigError(explain(error, Config)) from None
