"""Which task a config asks for: its data, architecture and objective together, or why they do not fit."""

import json

from normlab import data
from normlab.config import Config
from normlab.config_data import ParallelConfig, SineConfig
from normlab.explain import ConfigError
from normlab.objective import Task
from normlab.sine import Regression, Sine
from normlab.translation import Translation
from normlab.windows import Continuation, MaskedToken, NextToken, Window

TASKS: dict[str, type[Window]] = {"decoder": NextToken, "encoder": MaskedToken, "encoder_decoder": Continuation}
OBJECTIVES = {"lm": "decoder", "mlm": "encoder", "continuation": "encoder_decoder", "translation": "encoder_decoder"}


def make(cfg: Config) -> Task:
    """The task of a config. Raises ConfigError where data, model and objective do not fit."""
    if isinstance(cfg.data, SineConfig):
        return _of_numbers(cfg, cfg.data)
    wanted = OBJECTIVES.get(cfg.objective or "", cfg.model.arch)
    if wanted != cfg.model.arch:
        raise ConfigError(f"objective={cfg.objective}: model.arch={cfg.model.arch}; accepted: {wanted}")
    pairs = cfg.data.name == "parallel"
    if pairs != (cfg.objective == "translation") and cfg.objective in {"continuation", "translation"}:
        raise ConfigError(f"objective={cfg.objective}: data={cfg.data.name} has {'' if pairs else 'no '}sentence pairs")
    task = _of_pairs(cfg) if pairs else _of_windows(cfg)
    assert task.vocab is not None
    if cfg.model.vocab is not None and cfg.model.vocab < task.vocab:
        raise ConfigError(f"model.vocab={cfg.model.vocab}: the data has {task.vocab} symbols; accepted: at least those")
    if cfg.model.head == "pooler":
        raise ConfigError("model.head=pooler has no language-model loss to train; accepted: lm, mlm")
    return task


def _of_numbers(cfg: Config, numbers: SineConfig) -> Regression:
    """Raises ConfigError for a setting that has no meaning without a vocabulary."""
    for key, value, accepted in (
        ("model.arch", cfg.model.arch, ("decoder", "encoder")),
        ("model.head", cfg.model.head, ("lm", "mlm")),
        ("model.vocab", cfg.model.vocab, (None,)),
        ("model.tie", cfg.model.tie, (False,)),
        ("objective", cfg.objective, (None,)),
        ("label_smoothing", cfg.label_smoothing, (0,)),
    ):
        if value not in accepted:
            told = ", ".join(a if isinstance(a, str) else json.dumps(a) for a in accepted)
            raise ConfigError(f"{key}={value}: data=sine is a regression, without a vocabulary; accepted: {told}")
    return Regression(Sine(numbers.range), numbers.batch_size, cfg.model.context)


def _of_windows(cfg: Config) -> Task:
    assert not isinstance(cfg.data, ParallelConfig | SineConfig)
    task = TASKS[cfg.model.arch](data.load(cfg.data), cfg.data.batch_size, cfg.model.context)
    task.source.require(task.window)
    return task


def _of_pairs(cfg: Config) -> Task:
    assert cfg.data.name == "parallel"
    if cfg.model.arch != "encoder_decoder":
        raise ConfigError(f"data=parallel: model.arch={cfg.model.arch}; accepted: encoder_decoder")
    return Translation(cfg.data, cfg.model.context)
