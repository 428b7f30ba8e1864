"""Types and limits of conf/. Values live in the YAML files; nothing here has a default.

Models: config_model.py; data: config_data.py.

Everything past `load` is frozen, typed and checked; an unknown key is an error.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, Field, ValidationError, model_validator

from normlab.config_data import DataConfig, Seed, absolute
from normlab.config_model import (
    Fraction,
    ModelConfig,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from normlab.explain import ConfigError, explain
from normlab.spikes import Rule


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


# optim.py's tables have these rows.
OptimizerName = Literal["adam", "adamw", "radam", "sgd"]
ScheduleName = Literal["constant", "linear", "cosine", "inverse_sqrt", "step"]

SIZES = ("scale", "scales", "size")  # keys of a study's file, which has put their numbers in place by now

FolderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)]


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
    timeout: PositiveFloat
    finish_timeout: PositiveFloat


class EvalConfig(Section):
    every: NonNegativeInt
    batches: PositiveInt


class ProbeConfig(Section):
    every: NonNegativeInt
    batches: NonNegativeInt
    layer_drop: bool
    sharpness: bool


class DetectorConfig(Section):
    centre: Literal["mean", "trend"]
    kappa: PositiveFloat
    window: Annotated[int, Field(ge=2)]
    min_history: Annotated[int, Field(ge=2)]
    min_height: NonNegativeFloat

    @property
    def rule(self) -> Rule:
        return Rule(self.centre, self.kappa, self.window, self.min_history, self.min_height)

    @model_validator(mode="after")
    def _is_a_rule(self) -> "DetectorConfig":
        try:
            _ = self.rule
        except ValueError as error:
            raise ValueError(f"spikes: a detector's {error}") from None
        return self


class SpikesConfig(Section):
    judge: Literal["olmo", "olmo_core", "mad"]
    olmo: DetectorConfig
    olmo_core: DetectorConfig
    mad: DetectorConfig

    @property
    def rules(self) -> dict[str, Rule]:
        return {"olmo": self.olmo.rule, "olmo_core": self.olmo_core.rule, "mad": self.mad.rule}


class VerdictConfig(Section):
    stalled_below: Annotated[float, Field(ge=0, le=1)]
    rise: NonNegativeFloat
    patience: PositiveInt
    out_of_range: Annotated[float, Field(gt=1)]


class StopConfig(Section):
    nonfinite: bool
    hopeless: bool


class CheckpointConfig(Section):
    every: NonNegativeInt
    seconds: NonNegativeFloat


class RelaunchConfig(Section):
    finished: Literal["skip", "restart"]
    interrupted: Literal["resume", "restart", "skip"]
    failed: Literal["resume", "restart", "skip"]


class Config(Section):
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    log: LogConfig
    eval: EvalConfig
    probe: ProbeConfig
    spikes: SpikesConfig
    verdict: VerdictConfig
    stop: StopConfig
    checkpoint: CheckpointConfig
    relaunch: RelaunchConfig
    study: FolderName
    seed: Seed
    steps: NonNegativeInt
    objective: Literal["lm", "mlm", "continuation", "translation"] | None
    label_smoothing: Fraction
    micro_batch: PositiveInt | None
    device: Annotated[str, AfterValidator(_device)]
    precision: Literal["fp32", "bf16", "fp16"]
    tf32: bool
    attention: Literal["auto", "flash", "efficient", "cudnn", "math"]
    compile: Literal[False, True, "whole", "reduce-overhead"]
    pack: PositiveInt
    threads: PositiveInt
    runs_dir: Annotated[str, AfterValidator(absolute)]

    @model_validator(mode="after")
    def _warmup_fits(self) -> "Config":
        if self.steps and self.optim.warmup_steps > self.steps:
            raise ValueError(
                f"optim.warmup_steps={self.optim.warmup_steps} is longer than the run: at most steps={self.steps}"
            )
        return self

    @model_validator(mode="after")
    def _completep_has_its_optimizer(self) -> "Config":
        coupled = self.optim.name in {"adam", "radam"} and self.optim.weight_decay > 0
        if self.model.init == "completep" and (self.optim.name == "sgd" or coupled):
            raise ValueError(
                f"model.init=completep scales rates and decoupled decay as for Adam: optim.name={self.optim.name}; "
                f"accepted: adamw, or adam and radam with optim.weight_decay=0"
            )
        return self

    @model_validator(mode="after")
    def _a_batch_has_a_spread(self) -> "Config":
        if self.model.norm == "batchnorm" and self.model.context * (self.micro_batch or self.sequences) < 2:
            raise ValueError("model.norm=batchnorm needs two tokens in a batch: model.context=1 and data.batch_size=1")
        return self

    @property
    def number_format(self) -> str:
        """Of the matrix products: fp32, tf32, bf16 or fp16."""
        return "tf32" if self.tf32 and self.precision == "fp32" else self.precision

    @property
    def sequences(self) -> int:
        """In a batch; of data with sequences of many lengths, how many as long as the context would fit."""
        return self.data.sequences(self.model.context)

    def identity(self) -> dict[str, Any]:
        """Every setting that can change a measured number; names, paths, logging and launching left out.

        The rules that label a run are left out too: normlab.relabel applies others to what was measured.
        """
        exclude = {"study", "runs_dir", "log", "device", "spikes", "verdict", "checkpoint", "relaunch", "pack"}
        settings = self.model_dump(mode="json", exclude=exclude)
        if self.stop.hopeless:  # these then say how many steps are made
            settings["stop"] |= {"rise": self.verdict.rise, "patience": self.verdict.patience, "every": self.log.every}
        for key in self.data.PLACES:  # the content's hash stands for them
            del settings["data"][key]
        del settings["objective"]  # follows from model and data
        for key, absent in (("label_smoothing", 0), ("tf32", False), ("attention", "auto")):
            if settings[key] == absent:  # ids from before there was one stay
                del settings[key]
        return settings


def load(raw: DictConfig | Mapping[str, Any]) -> Config:
    """The one door from Hydra to typed settings. Raises ConfigError with one line that names what is wrong."""
    try:
        tree = raw if isinstance(raw, DictConfig) else OmegaConf.create(dict(raw))
        plain = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(" ".join(str(error).split())) from None
    if not isinstance(plain, dict):
        raise ConfigError("the config is no mapping")
    for key in SIZES:
        plain.pop(key, None)
    try:
        return Config.model_validate(plain)
    except ValidationError as error:
        raise ConfigError(explain(error, Config)) from None
