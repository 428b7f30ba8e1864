"""Runs read back from W&B: the same tables and figures as from the run folders. No test reaches a real server."""

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import wandb
from conftest import ROOT, compose, tiny
from matplotlib.figure import Figure

import arms
import figure
import report
from arms import Missing
from normlab import results, wandb_runs
from normlab.train import train

RUNS = [
    *((f"model.placement={placement}", f"model.depth={depth}") for depth in (2, 3, 4) for placement in ("pre", "post")),
    *((f"model.placement={placement}", "model.depth=2", "optim.warmup_steps=3") for placement in ("pre", "post")),
    ("model.placement=pre", "model.depth=2", "model.ffn_ratio=2.0", "study=wild"),
    ("model.placement=none", "model.depth=2", "optim=sgd", "optim.lr=1e6", "study=wild"),  # diverges
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Tiny real runs of two studies, logged offline."""
    folder = tmp_path_factory.mktemp("runs")
    for overrides in RUNS:
        train(tiny(folder, "study=logged", "log=offline", "steps=40", "eval.every=10", "data.vocab=8", *overrides))
    return folder


@pytest.fixture(scope="module")
def logs(folder) -> list[Path]:
    return sorted(folder.glob("*/*/wandb"))


@pytest.fixture(scope="module")
def from_logs(logs) -> results.Results:
    return results.load(logs)


@pytest.fixture(scope="module")
def disk(folder) -> results.Results:
    return results.load(folder)


class Api:
    """Serves what the offline logs hold, in the form of wandb.Api's objects."""

    def __init__(self, served: list[SimpleNamespace]) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.served = served

    def __call__(self, timeout: int) -> "Api":
        return self

    def runs(self, path: str, filters: Any, lazy: bool) -> list[SimpleNamespace]:
        self.asked.append((path, filters))
        wanted = [next(iter(term.values())) for term in filters.get("$or", [])]
        return [run for run in self.served if not wanted or run.group in wanted or run.id in wanted]


def served(log: Path) -> SimpleNamespace:
    config, summary, rows, files = {}, {}, [], []
    for record in inspected(log):
        told = record[record["type"]]
        if record["type"] == "run":
            config |= told["config"]["update"]
            group, run_id = told["run_group"], told["run_id"]
        elif record["type"] == "summary":
            summary |= told["update"]
        elif record["type"] == "history":
            rows.append(told["item"])
        elif record["type"] == "artifact":
            files = [content["local_path"] for content in told["manifest"]["contents"]]

    def download(root: str) -> str:
        for file in files:
            shutil.copy(file, root)
        return root

    stale = SimpleNamespace(type="layers", aliases=["v0"], download=lambda root: 1 / 0)
    other = SimpleNamespace(type="code", aliases=["latest"], download=lambda root: 1 / 0)
    newest = SimpleNamespace(type="layers", aliases=["v1", "latest"], download=download)
    return SimpleNamespace(
        id=run_id,
        group=group,
        url=f"https://wandb.ai/us/normlab/runs/{run_id}",
        config=config,
        summary_metrics=summary,
        scan_history=lambda: iter(rows),
        logged_artifacts=lambda: [stale, other, newest] if files else [],
    )


def wandb_logs(folders: list[Path]) -> list[Path]:
    return [log for folder in folders for log in folder.glob("offline-run-*/*.wandb")]


def inspected(log: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    records = [json.loads(line) for line in lines]
    return [r for r in records if r["type"] in {"run", "summary", "history", "artifact"}]


@pytest.fixture(scope="module")
def on_the_server(logs) -> list[SimpleNamespace]:
    return [served(log) for log in wandb_logs(logs)]


@pytest.fixture
def api(on_the_server, monkeypatch) -> Api:
    api = Api([copy.copy(run) for run in on_the_server])
    monkeypatch.setattr(wandb, "Api", api)
    return api


def assert_same(found: results.Results, disk: results.Results) -> None:
    pd.testing.assert_frame_equal(found.steps, disk.steps)
    pd.testing.assert_frame_equal(found.layers, disk.layers)
    assert set(found.runs.columns) == set(disk.runs.columns)
    for one, two in zip(found.runs.to_dict("records"), disk.runs.to_dict("records"), strict=True):
        assert one.pop("path") != two.pop("path")
        assert {k: normal(v) for k, v in one.items()} == {k: normal(v) for k, v in two.items()}
    settings = [c for c in disk.runs if "." in c]
    assert [c for c in found.runs if "." in c] == settings  # their order names the arms
    assert found.runs[settings].map(str).equals(disk.runs[settings].map(str))  # 4.0, not 4


def normal(value: Any) -> Any:
    """NaN and null are one in a table that has either."""
    if isinstance(value, dict):
        return {key: normal(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [normal(inner) for inner in value]
    return None if value != value else value


@pytest.fixture
def csv_files(monkeypatch, tmp_path) -> Callable[[results.Results], dict[str, bytes]]:
    """The data beside every figure that these runs can feed."""
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)  # the pictures take most of the time

    def drawn(read: results.Results) -> dict[str, bytes]:
        files = {}
        with monkeypatch.context() as patch:
            patch.setattr(results, "load", lambda *_, **__: read)
            data = arms.load([])
        for module in report.FIGURES:
            try:
                figure.save(module.draw(data), module.STEM, tmp_path)
            except Missing:
                continue
            files[module.STEM] = (tmp_path / f"{module.STEM}.csv").read_bytes()
        return files

    return drawn


def of_study(data: results.Results, study: str) -> results.Results:
    return results.Results(*(table[table.study == study] for table in data))


def test_offline_logs_give_the_tables_of_the_run_folders(disk, from_logs):
    assert set(disk.runs.verdict) > {"diverged"}
    assert from_logs.runs.attrs["skipped"] == []
    assert_same(from_logs, disk)


def test_figures_from_offline_logs_have_the_same_data(disk, from_logs, csv_files):
    expected = csv_files(disk)
    assert len(expected) >= 4
    assert csv_files(from_logs) == expected
    expected = csv_files(of_study(disk, "logged"))
    assert len(expected) >= 8
    assert csv_files(of_study(from_logs, "logged")) == expected


def test_figures_from_the_server_have_the_same_data(disk, api, csv_files):
    found = results.load("wandb://us/normlab/logged")
    assert api.asked == [("us/normlab", {"$or": [{"group": "logged"}, {"name": "logged"}]})]
    assert csv_files(found) == csv_files(of_study(disk, "logged"))


def test_the_server_s_runs_are_those_of_the_project_the_study_or_one(folder, disk, api):
    assert_same(results.load("wandb://us/normlab"), disk)
    wild = results.load(Path("wandb://us/normlab/wild"))  # a Path has lost a slash
    assert_same(wild, results.load(folder / "wild"))
    one = disk.runs.run_id[0]
    assert results.load(f"wandb://us/normlab/{one}").runs.run_id.tolist() == [one]
    assert len(results.load(["wandb://us/normlab", folder]).runs) == 2 * len(RUNS)
    assert len(arms.load(["wandb://us/normlab", folder]).runs) == len(RUNS)
    quick = results.load("wandb://us/normlab", layers=False)
    assert (len(quick.layers), quick.runs.attrs["skipped"]) == (0, [])


def test_what_the_server_lacks_is_named(api):
    api.served[0].logged_artifacts = lambda: []
    api.served[1].config = {"lr": 0.1}
    api.served[2].scan_history = lambda: iter([{"train/loss": 1.0}])
    found = results.load("wandb://us/normlab/logged")
    told = {line.split(": ")[0].rsplit("/", 1)[-1]: line for line in found.runs.attrs["skipped"]}
    assert "layer statistics are not in W&B" in told[api.served[0].id]
    assert "not a run of normlab" in told[api.served[1].id]
    assert "not read from W&B" in told[api.served[2].id]
    named = {run.id for run in api.served[1:3]}
    assert set(found.runs.run_id) == {run.id for run in api.served if run.group == "logged"} - named


def test_an_address_that_leads_nowhere_is_named(api, monkeypatch):
    for wrong in ("wandb://us", "wandb://us/normlab/study/more", "wandb://us/normlab/none"):
        with pytest.raises(FileNotFoundError, match=f"^{wrong}: .*accepted: wandb://ENTITY/PROJECT"):
            results.load(wrong)

    def refuse(timeout: int) -> None:
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setattr(wandb, "Api", refuse)
    with pytest.raises(ConnectionError, match=r"^wandb://us/normlab: No API key configured. Use `wandb login`"):
        results.load("wandb://us/normlab")


def test_the_run_folder_goes_before_its_own_log(folder, disk):
    assert disk.runs.path.tolist() == [str(p.parent) for p in sorted(folder.glob("*/*/run.json"))]


def test_logs_without_their_run_folder_have_all_but_the_layers(disk, tmp_path):
    one = Path(disk.runs.path[0])
    shutil.copytree(one, tmp_path / "run")
    for name in ("run.json", "config.yaml", "metrics.jsonl"):
        (tmp_path / "run" / name).unlink()
    around = results.load(tmp_path)  # the layers beside the log are taken
    assert_same(around, results.load(one))
    (log,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    hidden = one.with_name("hidden")
    shutil.rmtree(tmp_path / "run" / "layers")
    (one / "layers").rename(hidden)
    try:
        bare = results.load(log)
    finally:
        hidden.rename(one / "layers")
    assert len(bare.layers) == 0
    pd.testing.assert_frame_equal(bare.steps, results.load(one).steps)
    (told,) = bare.runs.attrs["skipped"]
    assert "layer statistics are not there" in told
    assert str(one / "layers" / "part-00000.parquet") in told


def test_a_torn_log_is_named(tmp_path):
    (tmp_path / "offline-run-1").mkdir()
    (tmp_path / "offline-run-1" / "run-abc.wandb").write_bytes(b"no log")
    (told,) = results.load(tmp_path).runs.attrs["skipped"]
    assert "run-abc.wandb: not a" in told


def test_settings_of_another_version_stay_as_they_are(logs):
    (run, *_) = wandb_runs.from_logs(wandb_logs(logs[:1]), layers=False)
    flat = {"study": "s", "run_id": "r", "data_sha256": "h", "steps": 3, "model.depth": 2, "model.gone": 1}
    assert wandb_runs._told("x", flat, {}, {}, [], "").settings == {
        "study": "s",
        "steps": 3,
        "model": {"depth": 2, "gone": 1},
    }
    assert run.settings["model"]["ffn_ratio"].__class__ is float


@pytest.mark.parametrize("dotted", [False, True], ids=["nested", "dotted"])
def test_data_that_is_not_on_this_machine_keeps_the_types(dotted, tmp_path):
    (tmp_path / "corpus").mkdir()
    tree = compose("data=text", f"data.path={tmp_path / 'corpus'}", "model.ffn_ratio=2.0").model_dump(mode="json")
    (tmp_path / "corpus").rmdir()
    config = json.loads(
        json.dumps(tree), parse_float=lambda text: int(float(text)) if text.endswith(".0") else float(text)
    )
    assert isinstance(config["model"]["ffn_ratio"], int)  # as W&B has it
    config["optim.lr"] = 7.0  # a sweep's own, beside the section
    if dotted:
        config = pd.json_normalize(config).astype(object).iloc[0].to_dict() | {"optim.lr": tree["optim"]["lr"]}
    assert wandb_runs._typed(config) == tree
    assert isinstance(wandb_runs._typed(config)["model"]["ffn_ratio"], float)


def test_a_run_that_was_killed_is_no_finished_one():
    config = {"study": "s", "run_id": "abc", "data_sha256": "h"}
    told = wandb_runs._told("x", config, {"_step": 3, "train/loss": 2}, {0: {"_step": 0, "train/loss": "NaN"}}, [], "")
    assert told.record["status"] == "running"
    assert told.rows[0]["loss"] != told.rows[0]["loss"]


def test_every_number_of_the_metrics_has_a_name_in_wandb(disk):
    row = json.loads((Path(disk.runs.path[0]) / "metrics.jsonl").read_text().splitlines()[0])
    assert set(row) - {"step"} <= set(wandb_runs.WANDB_NAMES)


def test_scripts_take_the_same_forms(logs, tmp_path):
    command = [sys.executable, str(ROOT / "analysis" / "fig_loss_curves.py"), "--out", str(tmp_path)]
    done = subprocess.run([*command, *map(str, logs[:2])], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "loss_curves.png")
    for script in ("fig_loss_curves", "report"):
        command[1] = str(ROOT / "analysis" / f"{script}.py")
        done = subprocess.run([*command[:2], "wandb://us"], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "wandb://us: not an address of W&B; accepted: wandb://ENTITY/PROJECT" in done.stderr
