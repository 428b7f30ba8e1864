"""From overrides to configs: Hydra composes, within `conf`; every mistake is one line."""

import itertools
import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from normlab.config import Config, load
from normlab.explain import ConfigError, known_keys, suggest


def config(root: Path, overrides: list[str]) -> Config:
    """The config of one run, for tests and notebooks."""
    with conf(root):
        return load(one(overrides))


@contextmanager
def conf(root: Path) -> Iterator[None]:
    """Hydra's compose API over root/conf."""
    os.environ["NORMLAB_ROOT"] = str(root)
    with hydra.initialize_config_dir(str(root / "conf"), version_base="1.3"):
        yield


def expand(overrides: list[str], *, multirun: bool = False) -> list[list[str]]:
    """The override list of every job that these start."""
    first = whole(overrides)
    return jobs(overrides, first, multirun=multirun or first.hydra.mode == RunMode.MULTIRUN)


def whole(overrides: list[str], name: str = "config") -> DictConfig:
    """The config of the first job, with Hydra's own part."""
    return one([choices[0] for choices in _choices(overrides).values()], name, with_hydra=True)


def jobs(overrides: list[str], first: DictConfig, *, multirun: bool) -> list[list[str]]:
    """As Hydra's basic sweeper expands them."""
    if not multirun:
        listed = [key for key, choices in _choices(overrides).items() if len(choices) > 1]
        if listed:
            raise ConfigError(f"{', '.join(listed)}: a list of choices; add -m to run one job for each")
        return [overrides]
    swept = [f"{key}={value}" for key, value in (first.hydra.sweeper.params or {}).items()]
    return [list(job) for job in itertools.product(*_choices(swept + overrides).values())]


def _choices(overrides: list[str]) -> dict[str, list[str]]:
    """key -> its override for each value; a later override of the same key replaces an earlier one."""
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    try:
        parsed = parser.parse_overrides(overrides)
    except HydraException as error:
        raise ConfigError(one_line(error)) from None
    choices: dict[str, list[str]] = {}
    for override in parsed:
        key = override.get_key_element()
        if override.is_sweep_override() and override.is_discrete_sweep():
            choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            choices[key] = [override.input_line or key]
    return choices


def each(wanted: list[list[str]], name: str = "config") -> Iterator[DictConfig]:
    """The config of each job. Hydra composes once for all that choose the same groups: that is what takes it long."""
    settings = set(known_keys(Config))
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    chosen: dict[tuple[str | None, ...], bytes] = {}  # pickled: a sixth of the time of a deep copy
    for overrides in wanted:
        parsed = parser.parse_overrides(overrides)
        plain = [o.type == OverrideType.CHANGE and o.key_or_group in settings and not o.package for o in parsed]
        groups = tuple(o.input_line for o, value in zip(parsed, plain, strict=True) if not value)
        if groups not in chosen:
            chosen[groups] = pickle.dumps(one([g for g in groups if g], name))
        found: DictConfig = pickle.loads(chosen[groups])
        try:
            ConfigLoaderImpl._apply_overrides_to_config(list(itertools.compress(parsed, plain)), found)
        except (HydraException, OmegaConfBaseException):
            found = one(overrides, name)  # tells what is wrong
        yield found


def one(overrides: list[str], name: str = "config", *, with_hydra: bool = False) -> DictConfig:
    """The config that these overrides give. Raises ConfigError with one line that names what is wrong."""
    try:
        composed = hydra.compose(name, overrides, return_hydra_config=with_hydra)
        _sized(composed)
        return composed
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError: model=null
        unknown = re.match(r"Could not (?:override|append|delete).*?'([^']+)'", str(error))
        if unknown and "is not in struct" in f"{error} {error.__cause__}":
            key = unknown[1].lstrip("+~").split("=")[0]
            if key in known_keys(Config):
                group = key.split(".")[0]
                chosen = "".join(f" ({o})" for o in overrides if o.startswith(f"{group}="))
                raise ConfigError(f"{key}: the chosen {group} has no such key{chosen}") from None
            raise ConfigError(f"{key}: unknown key{suggest(key, known_keys(Config))}") from None
        raise ConfigError(one_line(error)) from None


def _sized(composed: DictConfig) -> None:
    """Raise ConfigError where the chosen scale is none of the study's."""
    scale, sizes = composed.get("scale"), composed.get("scales")
    if sizes is None and scale == "gpu":
        raise ConfigError("scale=gpu: only a study that names its sizes has one; choose it by +sweeps=NAME")
    if scale not in (sizes or {"cpu": None, "gpu": None}):
        raise ConfigError(f"scale={scale}: accepted: {', '.join(sizes or ['cpu', 'gpu'])}")


def one_line(error: BaseException) -> str:
    """An error's text, or its cause's, without line breaks."""
    text = str(error) or str(error.__cause__ or type(error).__name__)
    return " ".join(line.strip() for line in text.splitlines() if line.strip())
