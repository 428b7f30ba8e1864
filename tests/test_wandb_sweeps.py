"""The studies in W&B sweep syntax start the very runs of the Hydra sweeps."""

import itertools
import math
import subprocess
import sys
from typing import Any

import pytest
import yaml
from conftest import ROOT, compose
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from normlab import composing
from normlab.config import Config, load
from normlab.explain import ConfigError

SILENT = {"jacobian", "norm_cost"}  # which log nothing
STUDIES = sorted(p.stem for p in (ROOT / "sweeps").glob("*.yaml") if p.stem not in SILENT)


def sweep(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "sweeps" / "wandb" / f"{name}.yaml").read_text())


def expand(spec: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """The command line that `wandb agent` starts for these values; the loop is that of its Agent._command_run."""
    parts = create_sweep_command_args({"args": {key: {"value": value} for key, value in values.items()}})
    parts |= {"interpreter": ["python"], "program": [spec["program"]], "env": ["/usr/bin/env"]}
    line: list[str] = []
    for word in create_sweep_command(spec["command"]):
        line += (parts.get(word[2:-1]) or []) if word.startswith("${") and word.endswith("}") else [word]
    return line


def resolve(line: list[str]) -> Config:
    """What the door at line[2] makes of it."""
    assert line[:2] == ["/usr/bin/env", "python"]
    assert (ROOT / line[2]).is_file()
    with composing.conf(ROOT):
        (job,) = composing.expand(line[3:])
        return load(composing.one(job))


def settings(cfg: Config) -> dict[str, Any]:
    return cfg.model_dump(exclude={"log": {"mode"}})


SOME = 8  # jobs of a large grid that are composed, evenly spaced; all are compared by their choices


def choices(job: list[str], keys: set[str]) -> frozenset[tuple[str, Any]]:
    """What a job chooses for the keys of the grid, numbers as numbers."""
    pairs = [override.lstrip("+").split("=", 1) for override in job]
    return frozenset((key, number(value)) for key, value in pairs if key in keys)


def number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text.lower()


@pytest.mark.parametrize("name", STUDIES)
def test_a_wandb_sweep_and_its_hydra_sweep_start_the_same_runs(name):
    spec = sweep(name)
    assert spec["method"] == "grid"
    grid = {key: parameter["values"] for key, parameter in spec["parameters"].items()}
    lines = [expand(spec, dict(zip(grid, job, strict=True))) for job in itertools.product(*grid.values())]
    assert all(line[:3] == ["/usr/bin/env", "python", spec["program"]] for line in lines)
    with composing.conf(ROOT):
        jobs = composing.expand([f"+sweeps={name}"])
        assert {key for key, _ in choices(jobs[0], set(grid))} == set(grid)
        by_choice = [{choices(job, set(grid)): job for job in some} for some in (jobs, [line[3:] for line in lines])]
        assert set(by_choice[0]) == set(by_choice[1])
        assert len(jobs) == len(lines) == len(by_choice[0])
        for chosen in sorted(by_choice[0], key=repr)[:: max(1, len(jobs) // SOME)]:
            wanted, found = (load(raw) for raw in composing.each([part[chosen] for part in by_choice]))
            assert found.log.mode == "online"
            assert settings(found) == settings(wanted)


def test_the_files_are_those_of_the_studies_and_the_search():
    assert sorted(p.stem for p in (ROOT / "sweeps" / "wandb").iterdir()) == sorted([*STUDIES, "lr_search"])


VALUES = {
    "float": ("optim.lr", 1e-05, 1e-05),
    "whole float": ("optim.lr", 1.0, 1.0),
    "bool": ("compile", True, True),
    "null": ("optim.clip", "null", None),
    "space": ("log.project", "two words", "two words"),
    "text": ("model.placement", "post", "post"),
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_reach_the_config_as_what_they_are(kind):
    key, value, wanted = VALUES[kind]
    cfg = resolve(expand(sweep("demo"), {key: value}))
    section, _, field = key.rpartition(".")
    found = getattr(getattr(cfg, section) if section else cfg, field)
    assert (found, type(found)) == (wanted, type(wanted))


def test_a_bare_null_of_a_sweep_file_is_refused_with_what_is_accepted():
    with pytest.raises(ConfigError, match=r"optim\.clip='None'.*null"):
        resolve(expand(sweep("demo"), {"optim.clip": None}))


def test_the_search_draws_accepted_rates_and_minimises_a_number_of_the_record():
    spec = sweep("lr_search")
    rates = spec["parameters"]["optim.lr"]
    assert rates["distribution"] == "log_uniform_values"
    for rate in (rates["min"], math.sqrt(rates["min"] * rates["max"]), rates["max"]):
        for placement in spec["parameters"]["model.placement"]["values"]:
            cfg = resolve(expand(spec, {"optim.lr": rate, "model.placement": placement, "seed": 0}))
            assert settings(cfg) == settings(
                compose(f"optim.lr={rate!r}", f"model.placement={placement}", "study=lr_search", "model.depth=24")
            )
    assert spec["metric"] == {"name": "final_val_loss", "goal": "minimize"}


def test_hyphens_before_a_setting_are_explained_in_one_line():
    door = [sys.executable, ROOT / "experiments" / "train.py"]
    done = subprocess.run([*door, "--optim.lr=1e-3", "seed=0"], capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert ": optim.lr=1e-3 (" in done.stderr
    assert "args_no_hyphens" in done.stderr
