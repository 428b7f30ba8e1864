"""The door from the command line: Hydra composes, every job of a sweep is checked before the first one starts."""

import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from normlab import data
from normlab.config import Config, ConfigError, load, suggest

Job = Callable[[Config], dict[str, Any]]


def main(job: Job, root: Path, *, always: tuple[str, ...] = ()) -> NoReturn:
    """Run `job` on the config that sys.argv describes, once or as a multirun, and exit.

    root holds conf/ and sweeps/. `always` are overrides put before the user's. Exit status: 0 done (a diverged run is a
    result), 1 a job failed, 2 the user's mistake, told in one line before anything started, 130 interrupted.
    """
    os.environ["NORMLAB_ROOT"] = str(root)  # what the YAML files find the project by
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions reach this function instead of being printed
    sys.argv[1:1] = always
    try:
        check(root, sys.argv[1:])
    except ConfigError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)

    @hydra.main(version_base="1.3", config_path=str(root / "conf"), config_name="config")
    def run(raw: DictConfig) -> None:
        cfg = load(raw)
        report(cfg, job(cfg))

    try:
        run()
    except KeyboardInterrupt:
        print("interrupted; the unfinished run is marked so in its run.json", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        print(f"failed: {type(error).__name__}: {error} (traceback.txt in the run's folder)", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


def report(cfg: Config, record: dict[str, Any]) -> None:
    """One line about a finished run."""
    model, optim = cfg.model, cfg.optim
    what = f"{model.placement} {model.norm} depth {model.depth} lr {optim.lr:g} warm-up {optim.warmup_steps}"
    loss = record["final_val_loss"] if cfg.steps else record["init_val_loss"]
    print(
        f"{cfg.study}/{record['run_id']}  {what} seed {cfg.seed}:  {record['verdict'] or 'profiled'}"
        f"  val loss {loss:.3f}  {record['seconds']:.1f} s",
        flush=True,
    )


def check(root: Path, arguments: list[str]) -> None:
    """Compose and validate every job that these arguments start. Raises ConfigError."""
    args = get_args_parser().parse_args(arguments)
    if args.cfg or args.info or args.help or args.hydra_help or args.shell_completion or args.config_dir:
        return
    with _conf(root):
        for overrides in _jobs(args.overrides, args.multirun):
            cfg = load(_compose(overrides))
            data.load(cfg.data).require(cfg.model.context)


def compose(root: Path, overrides: list[str]) -> Config:
    """The config of one run, for tests and notebooks."""
    with _conf(root):
        return load(_compose(overrides))


@contextmanager
def _conf(root: Path) -> Iterator[None]:
    """Hydra's compose API over root/conf."""
    os.environ["NORMLAB_ROOT"] = str(root)
    with hydra.initialize_config_dir(str(root / "conf"), version_base="1.3"):
        yield


def _jobs(overrides: list[str], multirun: bool) -> list[list[str]]:
    """The override list of every job, as Hydra's basic sweeper expands them."""
    first = [choices[0] for choices in _choices(overrides).values()]
    whole = _compose(first, with_hydra=True)
    if not (multirun or whole.hydra.mode == RunMode.MULTIRUN):
        listed = [key for key, choices in _choices(overrides).items() if len(choices) > 1]
        if listed:
            raise ConfigError(f"{', '.join(listed)}: a list of choices; add -m to run one job for each")
        return [overrides]
    swept = [f"{key}={value}" for key, value in (whole.hydra.sweeper.params or {}).items()]
    return [list(job) for job in itertools.product(*_choices(swept + overrides).values())]


def _choices(overrides: list[str]) -> dict[str, list[str]]:
    """key -> its override for each value; a later override of the same key replaces an earlier one."""
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise ConfigError(_one_line(error)) from None
    choices: dict[str, list[str]] = {}
    for override in parsed:
        key = override.get_key_element()
        if override.is_sweep_override() and override.is_discrete_sweep():
            choices[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            choices[key] = [override.input_line or key]
    return choices


def _compose(overrides: list[str], *, with_hydra: bool = False) -> DictConfig:
    try:
        return hydra.compose("config", overrides, return_hydra_config=with_hydra)
    except (HydraException, OmegaConfBaseException) as error:
        unknown = re.match(r"Could not (?:override|append|delete).*?'([^']+)'", str(error))
        if unknown and "is not in struct" in f"{error} {error.__cause__}":
            path = unknown[1].lstrip("+~").split("=")[0].split(".")
            raise ConfigError(f"{'.'.join(path)}: unknown key{suggest(path)}") from None
        raise ConfigError(_one_line(error)) from None


def _one_line(error: BaseException) -> str:
    text = str(error) or str(error.__cause__ or type(error).__name__)
    return " ".join(line.strip() for line in text.splitlines() if line.strip())
