"""The door from the command line: Hydra composes, every job of a sweep is checked before the first one starts."""

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import hydra
import torch
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from normlab import composing, distributed, kernels, launch, store, task
from normlab.config import Config, load
from normlab.device import gpu_for, pick_device, workers
from normlab.explain import ConfigError
from normlab.isolation import isolated

Job = Callable[[Config], dict[str, Any]]

# conf/hydra/launcher/ sets values of the plugins' own configs, which remain their schema
warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")


def main(job: Job, root: Path, *, also: tuple[str, ...] = ()) -> NoReturn:
    """Run `job` on the config that sys.argv describes, once or as a multirun, and exit.

    root holds conf/ and sweeps/. `also` are overrides beside the user's. Exit status: 0 done (a diverged run is a
    result), 1 a job did not finish, 2 the user's mistake, told in one line before anything started, 130 or 143
    interrupted.
    """
    rank, ranks = distributed.world()
    if rank:  # rank 0 speaks for all
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    os.environ["NORMLAB_ROOT"] = str(root)  # what the YAML files find the project by
    os.environ["NORMLAB_CWD"] = str(Path.cwd())  # what relative paths start from, whatever hydra.job.chdir says
    os.environ.setdefault("NORMLAB_WORKERS", str(workers()))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions reach this function instead of being printed
    first = next((i for i, a in enumerate(sys.argv[1:], 1) if "=" in a and not a.startswith("-")), len(sys.argv))
    sys.argv[first:first] = also  # after leading flags: argparse takes the overrides in one piece

    @hydra.main(version_base="1.3", config_path=str(root / "conf"), config_name="config")
    def run(raw: DictConfig) -> float | None:
        return run_job(job, raw)

    try:
        plan = check(root, sys.argv[1:])
        if plan is None:  # --help and the like
            run()
            sys.exit(0)
    except (ValueError, HydraException, OmegaConfBaseException) as error:  # ValueError: ConfigError, flags that clash
        if not rank:
            print(f"{Path(sys.argv[0]).name}: {composing.one_line(error)}", file=sys.stderr)
        sys.exit(2)
    with launch.Launch(plan.runs_dir, plan.jobs, plan.configs, elsewhere=plan.elsewhere) as launched:
        status = _status_of(run, launched)
        if plan.multirun:
            print(launched.table(), flush=True)
    if ranks > 1 and status:  # without the interpreter's own end, which may wait for the ranks that were lost
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _status_of(run: Callable[[], Any], launched: launch.Launch) -> int:
    """The exit status of a launch, whatever it ends by."""
    try:
        run()
    except KeyboardInterrupt:
        if not distributed.world()[0]:
            print("interrupted; the unfinished runs are marked so in their run.json", file=sys.stderr)
        return 130
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except Exception as error:  # not of a job
        print(f"the launcher broke: {type(error).__name__}: {composing.one_line(error)}", file=sys.stderr)
        launched.wait(float("inf"))  # it may have left jobs running
        return 1
    return 0 if launched.whole() else 1


def run_job(job: Job, raw: DictConfig) -> float | None:
    """One job, in whatever process. Its outcome goes to the launch's folder; only an interrupt leaves this function.

    Returns the final validation loss, for sweepers that want a number.
    """
    launch.enter()
    if launch.is_over():
        return None
    this = HydraConfig.get()
    number = 0 if OmegaConf.is_missing(this.job, "num") else this.job.num
    told = launch.Outcome(number, "", list(this.overrides.task), "running")
    told.leave()
    trace, old = Path(), 0
    try:
        cfg = load(raw)
        told = replace(told, what=f"{cfg.study}  {describe(cfg)}")
        if not launch.is_planned(cfg.model_dump_json()):
            raise ConfigError("conf/ or sweeps/ changed after this launch began; launch again to use what stands there")
        sha256, kind = task.make(cfg).source.sha256, pick_device(cfg.device).type
        run_id = store.run_id(cfg, sha256, kind, distributed.world()[1])
        trace = Path(cfg.runs_dir) / cfg.study / run_id / "traceback.txt"
        old = _written(trace)
        told = replace(told, what=f"{cfg.study}/{run_id}  {describe(cfg)}")
        told.leave()
        gpu = gpu_for(cfg.device, launch.worker(), torch.cuda.device_count())
        if gpu is not None:
            torch.cuda.set_device(gpu)
        with isolated(cfg):
            record = job(cfg)
    except Exception as error:
        reason = f"{type(error).__name__}: {composing.one_line(error)}"
        print(f"{told.what or ' '.join(told.overrides)}:  failed: {reason}", file=sys.stderr, flush=True)
        kept = _written(trace) > old
        if not kept and not isinstance(error, ConfigError | OSError):  # no run folder to keep it in
            traceback.print_exc()
        replace(told, status="failed", reason=reason, traceback=str(trace) if kept else None).leave()
        return None
    except (KeyboardInterrupt, SystemExit) as stop:
        replace(told, status="interrupted").leave()
        if isinstance(stop, KeyboardInterrupt) and not launch.is_parent():
            return None  # the parent was told too, and this process may be another's worker
        raise
    failed = record["status"] == "failed" and "packed_with" in record
    print(report(cfg, record), file=sys.stderr if failed else sys.stdout, flush=True)
    if failed:
        told = replace(told, traceback=str(trace))
    status = "left alone" if record["status"] == "running" else record["status"]
    replace(told, status=status, verdict=record.get("verdict"), reason=record.get("reason")).leave()
    loss = record.get("final_val_loss")
    return None if loss is None else float(loss)


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns if path.is_file() else 0


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
    packed = f", in the pack of {record['packed_with']}" if "packed_with" in record else ""
    if record["status"] == "running":
        return f"{who}  left alone: another process runs it"
    if record["status"] == "failed" and packed:
        return f"{who}  failed{packed}: {record['reason']}"
    if record["status"] != "finished":
        return f"{who}  left as it is: {record['status']} (relaunch.{record['status']}=resume goes on with it)"
    loss = record["final_val_loss"] if cfg.steps else record["init_val_loss"]
    again = " (finished before; relaunch.finished=restart repeats it)"
    took = again if record.get("reused") else f"  {record['seconds']:.1f} s{packed}"
    return f"{who}  {record['verdict'] or 'profiled'}  val loss {loss:.3f}{took if cfg.steps else ''}"


class Plan(NamedTuple):
    """What a command line starts."""

    jobs: list[list[str]]  # the overrides of each
    configs: list[str]  # which they give, as JSON
    runs_dir: Path
    multirun: bool
    elsewhere: bool  # in other processes


def check(root: Path, arguments: list[str]) -> Plan | None:
    """Compose and validate every job that these arguments start; None if they start none. Raises ConfigError."""
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
        return None
    name = args.config_name or "config"
    with composing.conf(root):
        whole = composing.whole(args.overrides, name)
        multirun = args.multirun or whole.hydra.mode == RunMode.MULTIRUN
        launcher = whole.hydra.launcher._target_
        if launcher.startswith("hydra_plugins."):
            _installed(launcher.split(".")[1])
        jobs = composing.jobs(args.overrides, whole, multirun=multirun)
        cfgs = [load(raw) for raw in composing.each(jobs, name)]
    here = not multirun or launcher.endswith((".BasicLauncher", ".JoblibLauncher"))
    for cfg in cfgs:
        distributed.check(cfg, multirun=multirun)
        task.make(cfg)
        if here:  # a cluster's nodes may have a device that its door has not
            kernels.check(cfg)
    for folder in {cfg.runs_dir for cfg in cfgs}:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"runs_dir={folder!r}: {error.strerror}") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"runs_dir={folder!r}: not writable")
    return Plan(
        jobs,
        [cfg.model_dump_json() for cfg in cfgs],
        Path(cfgs[0].runs_dir),
        multirun,
        multirun and not launcher.endswith(".BasicLauncher"),
    )


def _installed(plugin: str) -> None:
    if find_spec(f"hydra_plugins.{plugin}") is None:
        extra = {"hydra_joblib_launcher": "joblib", "hydra_submitit_launcher": "slurm"}.get(plugin, plugin)
        raise ConfigError(f"hydra/launcher: {plugin} is not installed; pip install 'normlab[{extra}]'")
