"""The door from the command line: Hydra composes, every job of a sweep is checked before the first one starts."""

import itertools
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from normlab import task
from normlab.config import Config, load
from normlab.explain import ConfigError, known_keys, suggest

Job = Callable[[Config], dict[str, Any]]


def main(job: Job, root: Path, *, also: tuple[str, ...] = ()) -> NoReturn:
    """Run `job` on the config that sys.argv describes, once or as a multirun, and exit.

    root holds conf/ and sweeps/. `also` are overrides beside the user's. Exit status: 0 done (a diverged run is a
    result), 1 a job failed, 2 the user's mistake, told in one line before anything started, 130 or 143 interrupted.
    """
    os.environ["NORMLAB_ROOT"] = str(root)  # what the YAML files find the project by
    os.environ["NORMLAB_CWD"] = str(Path.cwd())  # what relative paths start from, whatever hydra.job.chdir says
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions reach this function instead of being printed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that the run is marked interrupted
    first = next((i for i, a in enumerate(sys.argv[1:], 1) if "=" in a and not a.startswith("-")), len(sys.argv))
    sys.argv[first:first] = also  # after leading flags: argparse takes the overrides in one piece
    failures: list[str] = []

    @hydra.main(version_base="1.3", config_path=str(root / "conf"), config_name="config")
    def run(raw: DictConfig) -> None:
        cfg = load(raw)
        try:
            print(report(cfg, job(cfg)), flush=True)
        except Exception as error:
            failures.append(f"{cfg.study}  {describe(cfg)}:  failed: {type(error).__name__}: {error}")
            print(failures[-1], file=sys.stderr, flush=True)
            raise

    try:
        check(root, sys.argv[1:])
        run()
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        print(f"{Path(sys.argv[0]).name}: {_one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; the unfinished run is marked so in its run.json", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if not failures:
            print(f"failed: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            print(f"{len(failures)} failed, told above; traceback.txt in the run's folder", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


def describe(cfg: Config) -> str:
    """What tells this run from others of a usual study."""
    model, optim = cfg.model, cfg.optim
    return (
        f"{model.placement} {model.norm} {model.activation} depth {model.depth} lr {optim.lr:g} "
        f"warm-up {optim.warmup_steps} seed {cfg.seed}"
    )


def report(cfg: Config, record: dict[str, Any]) -> str:
    """One line about a run: its outcome, or why it was left alone."""
    who = f"{cfg.study}/{record['run_id']}  {describe(cfg)}:"
    if record["status"] == "running":
        return f"{who}  left alone: another process runs it"
    loss = record["final_val_loss"] if cfg.steps else record["init_val_loss"]
    again = " (finished before; relaunch.finished=restart repeats it)"
    took = again if record.get("reused") else f"  {record['seconds']:.1f} s"
    return f"{who}  {record['verdict'] or 'profiled'}  val loss {loss:.3f}{took if cfg.steps else ''}"


def check(root: Path, arguments: list[str]) -> None:
    """Compose and validate every job that these arguments start. Raises ConfigError."""
    parser = get_args_parser()
    flags = {flag for action in parser._actions for flag in action.option_strings}
    for argument in arguments:
        name = argument.split("=")[0]
        if name.startswith("--") and name != argument and not any(flag.startswith(name) for flag in flags):
            raise ConfigError(
                f"{argument}: no such option; a setting has no hyphens: {argument.lstrip('-')} "
                "(in a W&B sweep's command: ${args_no_hyphens})"
            )
    args = parser.parse_args(arguments)
    if args.cfg or args.info or args.help or args.hydra_help or args.shell_completion or args.config_dir:
        return
    name = args.config_name or "config"
    with _conf(root):
        cfgs = [load(_compose(overrides, name)) for overrides in _jobs(args.overrides, args.multirun, name)]
    for cfg in cfgs:
        task.make(cfg)
    for folder in {cfg.runs_dir for cfg in cfgs}:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"runs_dir={folder!r}: {error.strerror}") from None


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


def _jobs(overrides: list[str], multirun: bool, name: str = "config") -> list[list[str]]:
    """The override list of every job, as Hydra's basic sweeper expands them."""
    first = [choices[0] for choices in _choices(overrides).values()]
    whole = _compose(first, name, with_hydra=True)
    if not (multirun or whole.hydra.mode == RunMode.MULTIRUN):
        listed = [key for key, choices in _choices(overrides).items() if len(choices) > 1]
        if listed:
            raise ConfigError(f"{', '.join(listed)}: a list of choices; add -m to run one job for each")
        return [overrides]
    swept = [f"{key}={value}" for key, value in (whole.hydra.sweeper.params or {}).items()]
    return [list(job) for job in itertools.product(*_choices(swept + overrides).values())]


def _choices(overrides: list[str]) -> dict[str, list[str]]:
    """key -> its override for each value; a later override of the same key replaces an earlier one."""
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    try:
        parsed = parser.parse_overrides(overrides)
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


def _compose(overrides: list[str], name: str = "config", *, with_hydra: bool = False) -> DictConfig:
    try:
        return hydra.compose(name, overrides, return_hydra_config=with_hydra)
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError: model=null
        unknown = re.match(r"Could not (?:override|append|delete).*?'([^']+)'", str(error))
        if unknown and "is not in struct" in f"{error} {error.__cause__}":
            key = unknown[1].lstrip("+~").split("=")[0]
            if key in known_keys(Config):
                raise ConfigError(f"{key}: the chosen {key.split('.')[0]} has no such key") from None
            raise ConfigError(f"{key}: unknown key{suggest(key, known_keys(Config))}") from None
        raise ConfigError(_one_line(error)) from None


def _one_line(error: BaseException) -> str:
    text = str(error) or str(error.__cause__ or type(error).__name__)
    return " ".join(line.strip() for line in text.splitlines() if line.strip())
