"""Launches as a user starts them: what every launcher makes of jobs that fail, of signals and of killed processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from conftest import ROOT, TINY, tiny
from launching import environment

from normlab import cli, launch
from normlab.device import gpu_for
from normlab.explain import ConfigError
from normlab.isolation import isolated
from normlab.results import load

LAUNCHERS = ["basic", "joblib", "submitit_local"]
FINE, NO_MEMORY, BROKEN, STUCK, TOO_HIGH = "0.001", "0.002", "0.003", "0.004", "1e9"
# An optimizer that at one learning rate asks for more memory than any machine has, at others raises or gets stuck.
SITECUSTOMIZE = f"""
import importlib.abc, os, sys, time

class BeforeNormlab(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "normlab.train":
            sys.meta_path.remove(self)
            import torch
            step = torch.optim.AdamW.step
            def broken(self, *args, **kwargs):
                rate = self.param_groups[0]["lr"]
                if rate == {BROKEN}:
                    raise ValueError("no such thing\\n  as an update")
                if rate == {NO_MEMORY}:
                    torch.empty(2**55)
                self.calls = getattr(self, "calls", 0) + 1
                if rate == {STUCK} and self.calls == 120:
                    open(os.path.join(os.environ["MARKS"], f"stuck-{{os.getpid()}}"), "w").close()
                    time.sleep(100)
                return step(self, *args, **kwargs)
            torch.optim.AdamW.step = broken

sys.meta_path.insert(0, BeforeNormlab())
"""


@pytest.fixture(scope="module")
def broken_optimizer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which some learning rates break."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def command(*arguments: str, module: bool = False) -> list[str]:
    door = ["-m", "experiments.train"] if module else [str(ROOT / "experiments/train.py")]
    flags = [a for a in arguments if a.startswith("-")]
    return [sys.executable, *door, *flags, *TINY, *(a for a in arguments if not a.startswith("-"))]


def launched(
    cwd: Path, *arguments: str, env: dict[str, str] | None = None, module: bool = False
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments, module=module),
        cwd=cwd,
        env=environment() | {"PYTHONWARNINGS": "error::UserWarning"} | (env or {}),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def numbers(runs: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Steps and layers of a study, without what hangs on the clock."""
    found = load(runs)
    return found.steps.drop(columns="seconds"), found.layers


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, broken_optimizer: dict[str, str]) -> Callable[[str], Any]:
    """launcher -> folder, and the process that ran four jobs: fine, out of memory, raising, diverging."""
    done: dict[str, Any] = {}

    def run(launcher: str) -> Any:
        if launcher not in done:
            folder = tmp_path_factory.mktemp(launcher)
            rates = f"optim.lr={FINE},{NO_MEMORY},{BROKEN},{TOO_HIGH}"
            (folder / "here").mkdir()
            same = ["model.placement=post", "log=offline", f"hydra/launcher={launcher}", f"runs_dir={folder / 'r'}"]
            done[launcher] = folder / "r", launched(folder / "here", "-m", rates, *same, env=broken_optimizer)
            assert not list((folder / "here").iterdir())
        return done[launcher]

    return run


def wandb_record(run: Path) -> dict[str, Any]:
    """The offline record of a run, as W&B's own program reads it."""
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    read = [Path(sys.executable).parent / "wandb", "leet", "inspect", "--summary", "--json", file]
    return json.loads(subprocess.run(read, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_four_jobs_end_as_they_are_and_the_launch_tells(four, launcher):
    runs, process = four(launcher)
    assert process.returncode == 1, process.stderr
    records = {}
    for file in runs.glob("scratch/*/run.json"):
        settings = yaml.safe_load((file.parent / "config.yaml").read_text())
        records[settings["optim"]["lr"]] = file.parent, json.loads(file.read_text())
    statuses = {rate: record["status"] for rate, (_, record) in records.items()}
    assert statuses == {0.001: "finished", 0.002: "failed", 0.003: "failed", 1e9: "finished"}
    assert records[1e9][1]["verdict"] == "diverged"
    assert records[0.001][1]["verdict"] in {"stable", "stalled"}
    for rate, text in ((0.002, "allocate"), (0.003, "ValueError: no such thing")):
        folder, record = records[rate]
        assert text in record["reason"]
        assert text in (folder / "traceback.txt").read_text()
        assert str(folder / "traceback.txt") in process.stdout
        assert f"optim.lr={rate}" in process.stdout
        assert "\n" not in record["reason"]
    assert not (records[0.001][0] / "traceback.txt").exists()
    for rate, (folder, record) in records.items():
        told = wandb_record(folder)
        assert (told["run_id"], told["state"]) == (record["run_id"], record["status"])
        assert told["config"]["optim"]["lr"] == rate
        assert told["summary"].get("verdict") == record.get("verdict")
    verdict = records[0.001][1]["verdict"]
    for line in (r"4 jobs:", r"  failed +2", rf"  finished, {verdict} +1", r"  finished, diverged +1"):
        assert re.search(f"^{line}$", process.stdout, re.MULTILINE), process.stdout
    assert process.stdout.count("failed: scratch/") == 2
    assert "  ValueError: no such thing as an update" in process.stdout
    assert not list((runs / ".launches").iterdir())
    assert "Warning" not in process.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS[1:])
def test_every_launcher_gives_the_same_runs(four, launcher):
    for mine, basic in zip(numbers(four(launcher)[0]), numbers(four("basic")[0]), strict=True):
        pd.testing.assert_frame_equal(mine, basic)


def test_the_door_as_a_module_returns_plain_data_through_a_pickle(tmp_path):
    done = subprocess.run(
        command("-m", "seed=0", "hydra/launcher=submitit_local", f"runs_dir={tmp_path}", module=True),
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (pickled,) = tmp_path.glob("scratch/.submitit/*/*_result.pkl")
    read = "import pickle, sys; print(repr(pickle.load(open(sys.argv[1], 'rb'))[1].return_value))"
    value = subprocess.run([sys.executable, "-c", read, pickled], capture_output=True, text=True, check=True).stdout
    (run,) = load(tmp_path).runs.to_dict("records")
    assert float(value) == run["final_val_loss"]


def test_a_job_after_others_gives_the_numbers_that_it_gives_alone(tmp_path, broken_optimizer):
    """After compiled jobs and ones that raised and ran out of memory, in one process."""
    grid = ["compile=true,false", f"optim.lr={BROKEN},{NO_MEMORY},{FINE}", "model.placement=post"]
    together, alone = tmp_path / "together", tmp_path / "alone"
    quiet = {"PYTHONWARNINGS": "default"}  # torch.compile warns
    assert launched(tmp_path, "-m", *grid, f"runs_dir={together}", env=broken_optimizer | quiet).returncode == 1
    for compiled in ("true", "false"):
        done = launched(tmp_path, f"compile={compiled}", *grid[2:], f"runs_dir={alone}", env=quiet)
        assert done.returncode == 0, done.stderr
    found, expected = load(together), load(alone)
    finished = found.runs[found.runs.status == "finished"].run_id
    assert len(found.runs) == 6
    assert len(finished) == 2
    assert sorted(finished) == sorted(expected.runs.run_id)
    for mine, other in zip(numbers(together), numbers(alone), strict=True):
        mine = mine[mine.run_id.isin(finished)].reset_index(drop=True)
        pd.testing.assert_frame_equal(mine, other, check_categorical=False)


def test_isolation_puts_back_what_a_job_changed(tmp_path, monkeypatch):
    cfg = tiny(tmp_path, "seed=5")
    closed: list[int] = []
    wandb: Any = types.ModuleType("wandb")
    wandb.run, wandb.finish = object(), lambda *, exit_code: closed.append(exit_code)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(ValueError, match="this one"), isolated(cfg):
        first = torch.rand(1), np.random.rand()  # noqa: NPY002
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        torch.set_grad_enabled(False)
        raise ValueError("this one")
    assert torch.get_default_dtype() == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.is_grad_enabled()
    assert closed == [1]
    with isolated(cfg):
        assert (torch.rand(1), np.random.rand()) == first  # noqa: NPY002


@pytest.mark.parametrize("compiled", ["true", "false"])
def test_programs_compiled_for_one_job_are_dropped(tmp_path, monkeypatch, compiled):
    """torch stops compiling after eight variants, which a sweep over depth and norm soon has."""
    reset: list[bool] = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: reset.append(True))
    with isolated(tiny(tmp_path, f"compile={compiled}")):
        assert not reset
    assert reset == [True] * (compiled == "true")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a launch of three endless runs in a process group of its own, and wait until enough of them train."""
    started: list[subprocess.Popen[str]] = []

    def run(launcher: str, *arguments: str, training: int, env: dict[str, str] | None = None) -> Any:
        endless = ["-m", "seed=0,1,2", "steps=1000000", f"hydra/launcher={launcher}", f"runs_dir={tmp_path}"]
        process = subprocess.Popen(
            command(*endless, *arguments),
            env=environment() | {"NORMLAB_WORKERS": "2"} | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        deadline = time.monotonic() + 120
        while sum(f.stat().st_size > 2000 for f in tmp_path.glob("scratch/*/metrics.jsonl")) < training:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        return process

    yield run
    for process in started:
        for pid in [outcome["pid"] for outcome in outcomes(tmp_path)]:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def outcomes(runs: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(runs.glob(".launches/*/job-*.json"))]


@pytest.mark.parametrize(
    ("launcher", "to", "number", "status"),
    [
        ("basic", "group", signal.SIGINT, 130),
        ("basic", "parent", signal.SIGTERM, 143),
        ("joblib", "group", signal.SIGINT, 130),
        ("joblib", "parent", signal.SIGINT, 130),
        ("joblib", "parent", signal.SIGTERM, 143),
        ("submitit_local", "group", signal.SIGINT, 130),
    ],
)
def test_a_stopped_launch_stops_after_a_step(start, tmp_path, launcher, to, number, status):
    training = {"basic": 1, "joblib": 2, "submitit_local": 3}[launcher]
    process = start(launcher, training=training)
    os.killpg(process.pid, number) if to == "group" else process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == status, stderr
    runs, steps, _ = load(tmp_path)
    assert runs.status.tolist() == ["interrupted"] * training
    for _, run in runs.iterrows():  # the step was finished and a checkpoint written after it
        state = torch.load(Path(run.path) / "checkpoint.pt", weights_only=True)
        assert state["step"] == len(steps[steps.run_id == run.run_id])
    assert re.search(rf"^  interrupted +{training}$", stdout, re.MULTILINE), stdout
    assert launcher == "submitit_local" or re.search(rf"^  not started +{3 - training}$", stdout, re.MULTILINE)
    assert not list((tmp_path / ".launches").iterdir())


def test_a_second_signal_does_not_wait_for_the_step(start, tmp_path, broken_optimizer):
    process = start("joblib", f"optim.lr={STUCK}", training=2, env=broken_optimizer | {"MARKS": str(tmp_path)})
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("stuck-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=3)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=45)
    assert process.returncode == 130, stderr
    assert load(tmp_path).runs.status.tolist() == ["interrupted"] * 2
    assert re.search(r"^  interrupted +2$", stdout, re.MULTILINE), stdout


def test_a_killed_worker_is_told_with_the_jobs_that_it_took_along(start, tmp_path):
    process = start("joblib", training=2)
    os.kill(outcomes(tmp_path)[0]["pid"], signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the launcher broke: TerminatedWorkerError" in stderr
    assert "Traceback" not in stderr
    assert stdout.count("killed: scratch/") == 2
    assert "not started: job 2\n  seed=2\n" in stdout


def test_a_preempted_job_goes_on_from_its_checkpoint(start, tmp_path):
    """submitit requeues a job at SIGUSR2; twice here."""
    process = start("submitit_local", "seed=0", "steps=800", training=1)
    attempts = 0
    while attempts < 2:
        (one,) = outcomes(tmp_path)
        assert one["status"] == "running"
        os.kill(one["pid"], signal.SIGUSR2)
        attempts += 1
        deadline = time.monotonic() + 60
        while True:  # until the next attempt has started and makes steps
            (file,) = tmp_path.glob("scratch/*/run.json")
            begun = json.loads(file.read_text())["attempts"]
            rows = (file.parent / "metrics.jsonl").read_text().count("\n")
            if len(begun) > attempts and rows > begun[-1]["from_step"]:
                break
            assert time.monotonic() < deadline
            time.sleep(0.1)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    runs, steps, _ = load(tmp_path)
    assert runs.status.tolist() == ["finished"]
    assert steps.step.tolist() == list(range(800))
    begun = [attempt["from_step"] for attempt in runs.attempts[0]]
    assert begun[0] == 0 < begun[1] < begun[2]
    assert re.search(r"^  finished, \w+ +1$", stdout, re.MULTILINE)


def test_launches_at_once_and_again_leave_every_run_once(tmp_path):
    """Two sweeps started together; then one of them again after a run was deleted, and another in the same study."""
    started = [subprocess.Popen(command("-m", seeds, f"runs_dir={tmp_path}"), stdout=subprocess.DEVNULL)
               for seeds in ("seed=0,1", "seed=2,3")]  # fmt: skip
    assert [process.wait(timeout=100) for process in started] == [0, 0]
    runs = load(tmp_path).runs
    assert sorted(runs.seed) == [0, 1, 2, 3]
    before = {p: p.stat().st_mtime_ns for run in runs.path[runs.seed != 1] for p in Path(run).rglob("*") if p.is_file()}
    shutil.rmtree(runs.path[runs.seed == 1].item())
    done = launched(tmp_path, "-m", "seed=0,1,4", f"runs_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished before") == 1
    assert sorted(load(tmp_path).runs.seed) == [0, 1, 2, 3, 4]
    assert {path: path.stat().st_mtime_ns for path in before if path.name != ".lock"} == {
        path: at for path, at in before.items() if path.name != ".lock"
    }


@pytest.mark.parametrize("when", ["before the first job", "in the first job"])
def test_the_files_of_conf_may_change_while_a_launch_goes_on(tmp_path, when):
    """Jobs run what was checked: a process reads each file once, and a job refuses a config that was not checked."""
    project = tmp_path / "project"
    for folder in ("conf", "sweeps", "experiments"):
        shutil.copytree(ROOT / folder, project / folder)
    edit = (
        "def edit(result):\n"
        "    file = Path(__file__).resolve().parents[1] / 'conf/optim/adamw.yaml'\n"
        "    file.write_text(file.read_text().replace('lr: 1.0e-3', 'lr: 1.0e-2'))\n"
        "    return result\n\n"
    )
    if when == "before the first job":
        edit += "check = cli.check\ncli.check = lambda *arguments: edit(check(*arguments))\n"
    script = project / "experiments/train.py"
    text = script.read_text().replace("if __name__", edit + "if __name__")
    script.write_text(text.replace("main(train,", "main(lambda cfg: edit(train(cfg)),"))
    small = [*TINY, f"runs_dir={tmp_path / 'r'}"]
    done = subprocess.run(
        [sys.executable, str(script), "-m", *small, "seed=0,1"], capture_output=True, text=True, timeout=60, check=False
    )
    assert "lr: 1.0e-2" in (project / "conf/optim/adamw.yaml").read_text()
    reason = "failed: ConfigError: conf/ or sweeps/ changed after this launch began"
    refused = [f"seed {seed}:  {reason}" for seed in (0, 1)]
    if when == "before the first job":
        assert done.returncode == 1
        assert all(line in done.stderr for line in refused)
        return
    assert done.returncode == 0, done.stderr
    runs = load(tmp_path / "r").runs
    assert sorted(zip(runs.seed, runs["optim.lr"], strict=True)) == [(0, 1e-3), (1, 1e-3)]
    assert {"git_commit", "git_dirty"} <= set(runs)


@pytest.mark.parametrize("chdir", ["true", "false"])
def test_long_overrides_and_chdir_leave_files_only_in_the_run(tmp_path, chdir):
    """Names of runs hang on no override, and no character of theirs needs quoting in one."""
    cwd = tmp_path / "here"
    cwd.mkdir()
    longest = "x" * 100
    many = [f"optim.{key}" for key in ("eps=1e-8", "weight_decay=0.1", "momentum=0.9", "clip=1", "final_lr_ratio=0.5")]
    many += [f"model.{key}" for key in ("norm_eps=1e-5", "dropout=0", "ffn_ratio=4", "norm=layernorm", "init=xavier")]
    wide = ["optim.betas=[0.9,0.95],[0.9,0.999]", f"study={longest}", f"log.project={'p' * 128}"]
    done = launched(cwd, "-m", *many, *wide, "runs_dir=../out", f"hydra.job.chdir={chdir}")
    assert done.returncode == 0, done.stderr
    assert not list(cwd.iterdir())
    runs = load(tmp_path / "out").runs
    assert sorted(map(tuple, runs["optim.betas"])) == [(0.9, 0.95), (0.9, 0.999)]
    for path in runs.path:
        assert re.fullmatch(r"[A-Za-z0-9_./-]+", str(Path(path).relative_to(tmp_path)))
    text = Path(runs.path[0]) / "config.yaml"
    text.write_text("some text " * 3000)
    assert cli.check(ROOT, [f"data.path={text}"])


def test_a_list_is_a_value_and_a_comma_a_sweep():
    def betas(*overrides: str) -> list[list[float]]:
        plan = cli.check(ROOT, [*overrides, "data=markov"])
        assert plan is not None
        return [json.loads(cfg)["optim"]["betas"] for cfg in plan.configs]

    assert betas("optim.betas=[0.9,0.95]") == [[0.9, 0.95]]
    assert betas("-m", "optim.betas=[0.9,0.95],[0.9,0.999]") == [[0.9, 0.95], [0.9, 0.999]]
    with pytest.raises(ConfigError, match=r"optim\.lr: a list of choices; add -m"):
        cli.check(ROOT, ["optim.lr=1e-4,3e-4"])


def test_a_key_that_one_choice_lacks_is_named_with_it():
    assert cli.check(ROOT, ["-m", "model.norm=layernorm,rmsnorm,none", "model.norm_eps=1e-6", "data=markov"])
    with pytest.raises(ConfigError, match=r"data\.vocab: the chosen data has no such key \(data=text\)"):
        cli.check(ROOT, ["-m", "data=markov,text", "data.vocab=16"])


def test_a_launcher_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"hydra_submitit_launcher is not installed; pip install 'normlab\[slurm\]'"):
        cli.check(ROOT, ["-m", "hydra/launcher=submitit_slurm", "data=markov"])


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "conf/hydra/launcher").glob("*.yaml")))
def test_every_launcher_composes_and_its_values_fit_the_plugin(name, monkeypatch):
    monkeypatch.setenv("NORMLAB_WORKERS", "3")
    plan = cli.check(ROOT, ["-m", f"hydra/launcher={name}", "data=markov"])
    assert plan is not None
    assert plan.elsewhere


def test_each_worker_takes_one_gpu_in_turn():
    assert [gpu_for("auto", worker, 4) for worker in range(6)] == [0, 1, 2, 3, 0, 1]
    assert gpu_for("cuda", 5, 4) == 1
    assert {gpu_for("cuda:2", 5, 4), gpu_for("cpu", 5, 4), gpu_for("auto", None, 4), gpu_for("auto", 1, 1)} == {None}


def test_a_dead_launch_leaves_its_folder_to_the_next_one(tmp_path, monkeypatch):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    old = launch.Launch(tmp_path, [[]], ["{}"], elsewhere=False).folder
    left = old.rename(old.with_name(old.name.replace(f".{os.getpid()}.", f".{dead.pid}.")))
    new = launch.Launch(tmp_path, [[]], ["{}"], elsewhere=False).folder
    assert list((tmp_path / ".launches").iterdir()) == [new]
    assert not left.exists()
