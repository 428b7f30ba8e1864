"""The scripts as a user starts them: from another directory, in their own process."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY, compose
from launching import environment

from normlab import composing
from normlab.config import load as load_config
from normlab.explain import ConfigError
from normlab.results import load

WANDB = Path(sys.executable).parent / "wandb"


def script(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / name), *arguments]
    env = environment() | {"PYTHONWARNINGS": "error::UserWarning"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False)


def test_a_mistake_exits_with_2_and_starts_nothing(tmp_path):
    runs, cwd = tmp_path / "runs", tmp_path / "here"
    cwd.mkdir()
    bad = ("-m", "model.depth=2,4", "model.placement=pre,pst", f"runs_dir={runs}")
    done = script("experiments/train.py", *bad, cwd=cwd)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("train.py: model.placement='pst': accepted: pre, post")
    assert done.stderr.count("\n") == 1
    assert not runs.exists()
    assert not list(cwd.iterdir())


def test_a_multirun_leaves_readable_runs_and_wandb_records(tmp_path):
    """The acceptance sweep: 2 x 2 x 2 x 2 runs of 5 steps, each with an offline W&B record of every layer."""
    runs, cwd = tmp_path / "runs", tmp_path / "here"
    cwd.mkdir()
    grid = [
        "model.depth=2,4",
        "model.placement=pre,post",
        "model.norm=layernorm,rmsnorm",
        "model.activation=gelu,swiglu",
    ]
    small = ["data=markov", "probe.batches=0", "eval.batches=1"]
    done = script("experiments/train.py", "-m", *grid, *small, "steps=5", f"runs_dir={runs}", cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("val loss") == 16
    assert not list(cwd.iterdir())  # nothing in the caller's folder
    table, steps, layers = load(runs / "scratch")
    assert len(table) == table.run_id.nunique() == 16
    assert (table.status == "finished").all()
    axes = ["model.depth", "model.placement", "model.norm", "model.activation"]
    assert (table.groupby(axes).size() == 1).all()
    assert len(steps) == 16 * 5
    for _, run in table.groupby("model.depth").head(1).iterrows():
        (record,) = Path(run.path).glob("wandb/offline-run-*/*.wandb")
        inspected = subprocess.run(
            [WANDB, "leet", "inspect", "--json", record], capture_output=True, text=True, check=True
        )
        for layer in range(run["model.depth"]):
            assert f"grad_norm/layer_{layer:03d}" in inspected.stdout
        assert run.run_id in inspected.stdout
        for name in ("train/loss", "train/lr", "val/loss", "verdict", "scratch"):
            assert name in inspected.stdout
        assert f"layer_{run['model.depth']:03d}" not in inspected.stdout
        mine = layers[(layers.run_id == run.run_id) & (layers.stat == "weight_grad_norm")]
        assert sorted(mine.layer.dropna().unique()) == list(range(run["model.depth"]))


def test_init_profile_trains_nothing(tmp_path):
    done = script("experiments/init_profile.py", *[t for t in TINY if not t.startswith("steps")], "model.depth=2,3",
                  "seed=0", f"runs_dir={tmp_path}", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    runs, steps, layers = load(tmp_path / "init_profile")
    assert len(runs) == 4  # depth x placement (of the sweep file)
    assert len(steps) == 0
    assert {"expected_weight_grad_norm", "stream_rms"} <= set(layers.stat)


def test_a_failing_job_fails_the_command_and_the_sweep_goes_on(tmp_path):
    """The second job's run folder cannot be made: a file stands in its place."""
    base = [*TINY, f"runs_dir={tmp_path / 'runs'}"]
    assert script("experiments/train.py", *base, "seed=1", cwd=tmp_path).returncode == 0
    (folder,) = (tmp_path / "runs/scratch").glob("*/run.json")
    record = json.loads(folder.read_text())
    for file in [*folder.parent.glob("layers/*"), *folder.parent.glob("*.*")]:
        file.unlink()
    (folder.parent / "layers").rmdir()
    folder.parent.rmdir()
    folder.parent.write_text("in the way")
    done = script("experiments/train.py", "-m", *base, "seed=0,1,2", cwd=tmp_path)
    assert done.returncode == 1
    assert record["run_id"] in done.stderr
    assert done.stderr.count("seed 1:  failed: ") == 1
    assert done.stdout.count("val loss") == 2
    folder.parent.unlink()
    assert sorted(load(tmp_path / "runs/scratch").runs.seed) == [0, 2]


@pytest.mark.parametrize("flag", [["--cfg", "job"], ["--help"]])
def test_hydra_s_own_flags_work(flag, tmp_path):
    done = script("experiments/train.py", *flag, cwd=tmp_path)
    assert done.returncode == 0
    assert "placement: pre" in done.stdout


def test_sigterm_marks_the_run_and_keeps_its_rows(tmp_path):
    command = [sys.executable, str(ROOT / "experiments/train.py"), *TINY, "steps=1000000", f"runs_dir={tmp_path}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any(f.stat().st_size > 10_000 for f in tmp_path.glob("scratch/*/metrics.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    runs, steps, layers = load(tmp_path)
    assert runs.status.tolist() == ["interrupted"]
    assert len(steps) > 10
    assert layers[layers.stat == "weight_grad_norm"].step.max() == steps.step.max()


@pytest.mark.parametrize("arguments", [["-m", "seed=0,1", "model.depth=2"], ["model.depth=2"]])
def test_init_profile_takes_flags_and_overrides(arguments, tmp_path):
    small = [t for t in TINY if not t.startswith(("steps", "model.depth"))]
    done = script("experiments/init_profile.py", *arguments, *small, f"runs_dir={tmp_path / 'r'}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(load(tmp_path / "r").runs.steps_done) == {0}


def test_init_profile_refuses_to_train(tmp_path):
    done = script("experiments/init_profile.py", "steps=4", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_a_mistake_behind_a_flag_that_skips_the_check_is_one_line_too(tmp_path):
    done = script("experiments/train.py", "--cfg", "job", "model.dept=3", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "model.dept" in done.stderr


def test_relative_paths_start_where_the_command_was_given(tmp_path):
    (tmp_path / "text").write_bytes(b"some text " * 3000)
    small = [t for t in TINY if not t.startswith("data") or "batch" in t]
    paths = ["data.path=text", "runs_dir=here", "hydra.job.chdir=true"]
    done = script("experiments/train.py", *small, *paths, "steps=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(load(tmp_path / "here" / "scratch").runs) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here", "text"]


JOBS = [
    ["model.depth=2", "seed=1"],
    ["model.depth=4", "seed=2", "optim.lr=1e-2"],
    ["optim.lr=3e-3", "optim=sgd", "optim.clip=null", "experiment=xiong_theory"],
    ["optim=sgd", "data=markov", "data.order=2"],
    ["+sweeps=depth_placement", "model.depth=24", "scale=gpu"],
    ["+sweeps=depth_placement", "model.depth=24"],
]


def test_configs_composed_together_are_those_composed_alone():
    with composing.conf(ROOT):
        assert [load_config(raw) for raw in composing.each(JOBS)] == [load_config(composing.one(job)) for job in JOBS]


def test_a_study_takes_the_numbers_of_its_scale():
    small, large = (compose("+sweeps=depth_placement", f"scale={scale}") for scale in ("cpu", "gpu"))
    assert small.model.width < large.model.width
    assert small.steps < large.steps
    with composing.conf(ROOT):
        grids = [len(composing.expand(["+sweeps=depth_placement", f"scale={scale}"])) for scale in ("cpu", "gpu")]
    assert grids[0] < grids[1]


@pytest.mark.parametrize("study", [["+sweeps=depth_placement"], []])
def test_a_scale_that_a_study_does_not_have_is_named(study):
    scale = "tpu" if study else "gpu"
    with pytest.raises(ConfigError, match=f"^scale={scale}: .*(cpu, gpu|sweeps)"):
        compose(*study, f"scale={scale}")
