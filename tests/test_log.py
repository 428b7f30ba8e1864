"""W&B is a window: what it is told, and that its troubles are its own."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import ROOT, tiny

from normlab import probe, verdict
from normlab.fit import Fit
from normlab.heatmap import COLUMNS, HeatMap
from normlab.log import Log
from normlab.results import load
from normlab.store import read_record
from normlab.train import train

WANDB_KEYS_BESIDE_LAYERS = 15  # the README states it


class FakeWandb(types.ModuleType):
    """Records what W&B is told; raises in the named method, or never comes back from it."""

    id = "fake"

    def __init__(self, broken: str = "") -> None:
        super().__init__("wandb")
        self.broken, self.started, self.rows, self.exit_codes = broken, [], [], []
        self.summary: dict[str, Any] = {}
        self.alerts: list[tuple[str, str]] = []
        self.resumed, self.starting_step = False, 0
        self.files: dict[str, list[str]] = {}
        self.Settings = lambda **settings: settings
        self.setup = lambda: types.SimpleNamespace(settings=types.SimpleNamespace(sweep_id="from the environment"))
        self.Table = lambda columns, data: (columns, data)
        self.Image = lambda image: image.size
        self.released = threading.Event()

    def init(self, **arguments: Any) -> "FakeWandb":
        self._maybe_break("init" if arguments["mode"] == "online" else "init_" + arguments["mode"])
        self.started.append(arguments)
        return self

    def log(self, row: dict[str, float], step: int) -> None:
        self._maybe_break("log")
        self.rows.append((step, row))

    def Artifact(self, name: str, type: str) -> types.SimpleNamespace:
        files = self.files.setdefault(type, [])
        return types.SimpleNamespace(add_file=lambda path, **_: files.append(Path(path).name))

    def log_artifact(self, _artifact: types.SimpleNamespace) -> None:
        pass

    def teardown(self, exit_code: int) -> None:
        pass

    def alert(self, title: str, text: str) -> None:
        self.alerts.append((title, text))

    def finish(self, exit_code: int) -> None:
        self._maybe_break("finish")
        self.exit_codes.append(exit_code)

    def _maybe_break(self, method: str) -> None:
        if method == self.broken:
            raise RuntimeError(f"no {method}\ntoday")
        if f"hanging {method}" == self.broken:
            self.released.wait(60)


@pytest.fixture
def fake(request, monkeypatch) -> Iterator[FakeWandb]:
    module = FakeWandb(getattr(request, "param", ""))
    monkeypatch.setitem(sys.modules, "wandb", module)
    yield module
    module.released.set()


def test_what_wandb_is_told(fake, tmp_path):
    record = train(tiny(tmp_path, "log=offline", "study=named", "eval.every=3"))
    (started,) = fake.started
    assert (started["id"], started["group"], started["mode"]) == (record["run_id"], "named", "offline")
    assert started["config"]["model"]["placement"] == "pre"  # as W&B's panels and groups want it: nested
    assert started["config"]["optim"]["betas"] == [0.9, 0.98]
    assert started["config"]["data_sha256"] == record["data_sha256"]
    assert [step for step, _ in fake.rows] == [0, 1, 2, 3, 4, 5, 5]
    assert fake.rows.pop()[1] == {"grad_norm/heat_map": (800, 380)}
    assert fake.files == {"layers": [p.name for p in sorted(tmp_path.rglob("*.parquet"))]} != {"layers": []}
    steps = load(tmp_path).steps
    names = {"train/loss": "loss", "train/lr": "lr", "train/grad_norm": "grad_norm", "train/update_norm": "update_norm"}
    for step, row in fake.rows:
        assert {n: row[n] for n in names} == {n: steps[c][step] for n, c in names.items()}
        assert ("val/loss" in row) == (step in {0, 3})
        assert len([k for k in row if k.startswith("grad_norm/layer_")]) == 2
        assert row["grad_norm/layer_000"] > 0
    assert fake.rows[3][1]["val/loss"] == steps.val_loss[3]
    counted = {f"verdict/{name}": int(name == record["verdict"]) for name in verdict.NAMES}
    assert fake.summary == record | counted
    assert {"verdict", "final_val_loss", "spike_count", "status"} <= set(fake.summary)
    assert fake.exit_codes == [0]


def test_a_failed_run_is_closed_as_failed(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "profile", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(tiny(tmp_path, "log=offline"))
    assert fake.exit_codes == [1]
    assert (fake.summary["status"], fake.summary["reason"]) == ("failed", "ZeroDivisionError: division by zero")


@pytest.mark.parametrize("fake", ["log", "finish", "init_offline"], indirect=True)
def test_a_broken_wandb_leaves_the_run_whole(fake, tmp_path, capsys):
    record = train(tiny(tmp_path, "log=offline"))
    assert record["status"] == "finished"
    assert len(load(tmp_path).steps) == 6
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"(no {fake.broken} today)" in told


@pytest.mark.parametrize("fake", ["init"], indirect=True)
def test_online_falls_back_to_offline(fake, tmp_path, capsys):
    assert train(tiny(tmp_path, "log=online"))["status"] == "finished"
    assert [s["mode"] for s in fake.started] == ["offline"]
    assert {step for step, _ in fake.rows} == set(range(6))
    assert capsys.readouterr().err.count("\n") == 1


def test_disabled_never_imports_wandb(fake, tmp_path):
    train(tiny(tmp_path, "log=disabled"))
    assert fake.started == []


DIVERGING = {
    "not finite": ["optim=sgd", "optim.lr=1e6", "model.placement=none"],
    "is not below": ["optim.lr=1.0", "steps=30"],
}


@pytest.mark.parametrize("why", DIVERGING)
def test_divergence_is_alerted_once_and_online_only(fake, tmp_path, why):
    record = train(tiny(tmp_path, "log=online", *DIVERGING[why]))
    assert record["verdict"] == "diverged"
    ((title, text),) = fake.alerts
    assert title == "diverged"
    assert record["run_id"] in text
    train(tiny(tmp_path, "log=offline", "relaunch.finished=restart", *DIVERGING[why]))
    train(tiny(tmp_path, "log=online"))
    assert len(fake.alerts) == 1


@pytest.mark.parametrize("fake", ["hanging log", "hanging finish", "hanging init_offline"], indirect=True)
def test_a_hanging_wandb_is_left_behind(fake, tmp_path, capsys):
    started = time.monotonic()
    record = train(tiny(tmp_path, "log=offline", "log.timeout=0.2", "log.finish_timeout=0.4"))
    assert time.monotonic() - started < 10
    assert record["status"] == "finished"
    assert len(load(tmp_path).steps) == 6
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "no answer in 0." in told


def test_a_run_that_wandb_resumed_gets_no_row_twice(fake, tmp_path, capsys):
    fake.resumed, fake.starting_step = True, 4
    cfg = tiny(tmp_path, "log=online")
    train(cfg)
    assert [step for step, row in fake.rows if "train/loss" in row] == [4, 5]
    assert fake.started[0]["resume"] == "allow"
    with Log(cfg.log, tmp_path / "id", study="s", steps=1, settings={}) as log:
        assert log.continues
    assert capsys.readouterr().err == ""


def test_an_open_run_of_this_process_is_not_touched(fake, tmp_path):
    train(tiny(tmp_path, "log=offline"))
    assert fake.started[0]["reinit"] == "create_new"


def agent(monkeypatch, tmp_path) -> None:
    """The environment that `wandb agent` gives its command."""
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    monkeypatch.setenv("WANDB_RUN_ID", "fixed")
    monkeypatch.setenv("WANDB_SWEEP_PARAM_PATH", str(tmp_path / "config-fixed.yaml"))


def test_a_sweep_agent_names_the_first_run_of_its_command_only(fake, tmp_path, monkeypatch):
    agent(monkeypatch, tmp_path)
    records = [train(tiny(tmp_path / "runs", "log=offline", f"seed={seed}")) for seed in range(3)]
    assert [s.get("id") for s in fake.started] == [None, records[1]["run_id"], records[2]["run_id"]]
    assert [s["config"]["run_id"] for s in fake.started] == [r["run_id"] for r in records]
    with Log(tiny(tmp_path, "log=offline").log, tmp_path / records[0]["run_id"], study="s", steps=1, settings={}):
        assert "id" not in fake.started[-1]  # the first one, launched again


@pytest.mark.parametrize("arch", ["decoder", "encoder_decoder"])
def test_keys_are_bounded_by_layer_at_depth_96(fake, tmp_path, arch):
    small = ["model.depth=96", "model.width=8", "model.heads=1", f"model.arch={arch}", "probe.batches=0"]
    more = [
        "probe.sharpness=true",
        "spikes.olmo.min_history=2",
        "spikes.olmo_core.min_history=2",
        "spikes.mad.window=9",
    ]
    train(tiny(tmp_path, "log=offline", *small, *more, "spikes.mad.min_history=9", "steps=16", "eval.every=1"))
    blocks = 96 if arch == "decoder" else 192
    most = max(len(row) for _, row in fake.rows)
    assert blocks + 8 < most <= blocks + WANDB_KEYS_BESIDE_LAYERS
    assert f"at most {WANDB_KEYS_BESIDE_LAYERS} others" in (ROOT / "README.md").read_text()


def heat(steps: int, blocks: list[tuple[str, int]] | None = None) -> HeatMap:
    return HeatMap(blocks or [("decoder", 0), ("decoder", 1)], steps)


def test_a_long_run_has_a_bounded_picture_that_keeps_every_peak():
    found = heat(100_000)
    for step in range(100_000):
        found.push(step, np.array([1.0, 50.0 if step == 33_333 else 2.0]))
    assert found.grid.shape[1] <= COLUMNS
    assert (found.grid.max(axis=1) == [1, 50]).all()
    assert (found.grid[1] == 50).sum() == 1


def test_the_picture_marks_zero_and_non_finite_norms():
    from PIL import Image

    found = heat(10)
    for step, norms in enumerate([[1.0, 1e-25], [0.0, 1e20], [np.nan, 1.0], [np.inf, 1.0]]):
        found.push(step, np.array(norms))
    assert found.grid[0].tolist() == [1, 0, np.inf, np.inf]
    image = np.asarray(Image.open(io.BytesIO(found.png())).convert("RGB"))
    assert ((image == [255, 0, 0]).all(axis=2)).sum() > 1000
    assert ((image == [211, 211, 211]).all(axis=2)).sum() > 1000


@pytest.mark.parametrize("value", [1.0, 0.0, np.nan])
def test_one_step_of_two_stacks_can_be_drawn(value):
    found = heat(1, [("encoder", 0), ("decoder", 0), ("decoder", 1)])
    found.push(0, np.full(3, value))
    assert found.png().startswith(b"\x89PNG")


def inspect(record_file: Path) -> dict[str, list[Any]]:
    """What W&B's own reader finds in an offline record, by kind."""
    wandb = Path(sys.executable).with_name("wandb")
    command = [wandb, "leet", "inspect", "--json", record_file]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, list[Any]] = {}
    for line in out.splitlines():
        record = json.loads(line)
        found.setdefault(record["type"], []).append(record.get(record["type"]))
    return found


def merged(updates: list[Any]) -> dict[str, Any]:
    return {k: v for update in updates for k, v in (update.get("update") or {}).items()}


def offline_records(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.wandb"))


def fails_at(monkeypatch, seed: int) -> None:
    update = Fit.update

    def broken(fit, lr, norms):
        if fit.cfg.seed == seed and len(fit.journal.losses) >= 2:
            raise RuntimeError("planted")
        return update(fit, lr, norms)

    monkeypatch.setattr(Fit, "update", broken)


def test_three_jobs_in_one_process_leave_three_whole_wandb_records(tmp_path, monkeypatch):
    """The middle one raises, the last one diverges, and the shell exports what W&B reads; another run is open."""
    for name, value in {"RUN_ID": "fixed", "SWEEP_ID": "s1", "RUN_GROUP": "g", "MODE": "disabled"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    import wandb

    forget(wandb)  # so that it reads the environment again
    foreign = wandb.init(mode="offline", dir=tmp_path / "foreign", settings=wandb.Settings(console="off"))
    foreign.log({"mine": 1.0})
    fails_at(monkeypatch, 1)
    for seed in range(3):
        more = ["optim=sgd", "optim.lr=1e6", "model.placement=none", "stop.nonfinite=false"] if seed == 2 else []
        cfg = tiny(tmp_path / "runs", "log=offline", f"seed={seed}", "log.every=1", "study=three", *more)
        if seed == 1:
            with pytest.raises(RuntimeError, match="planted"):
                train(cfg)
        else:
            train(cfg)
    assert wandb.run is foreign
    foreign.log({"mine": 2.0})
    foreign.finish()
    forget(wandb)
    (others,) = offline_records(tmp_path / "foreign")
    assert [row["item"].get("mine") for row in inspect(others)["history"]] == [1, 2]
    runs = load(tmp_path / "runs").runs.set_index("run_id")
    assert len(runs) == 3
    records = offline_records(tmp_path / "runs")
    assert len(records) == 3
    for file in records:
        found = inspect(file)
        (started,) = found["run"][:1]
        record = read_record(tmp_path / "runs" / "three" / started["run_id"])
        settings = yaml.safe_load((file.parents[2] / "config.yaml").read_text())
        assert (started["run_id"], started["run_group"]) == (file.parents[2].name, "three")
        assert "sweep_id" not in started
        config = merged([started["config"]])
        assert config["seed"] == settings["seed"]
        assert config["optim"]["lr"] == settings["optim"]["lr"]
        assert config["model"]["placement"] == settings["model"]["placement"]
        assert not any("${" in str(value) for value in config.values())
        rows = [row["item"] for row in found["history"]]
        steps = load(file.parents[2]).steps
        assert [row["_step"] for row in rows] == steps.step.tolist() == list(range(record.get("steps_done", 2)))
        np.testing.assert_array_equal([float(row["train/loss"]) for row in rows], steps.loss)
        summary = merged(found["summary"])
        assert summary["status"] == record["status"]
        assert [end["exit_code"] for end in found["exit"]] == [int(record["status"] == "failed")]
        if record["status"] == "failed":
            assert summary["reason"] == "RuntimeError: planted"
        else:
            assert summary["verdict"] == record["verdict"]
            assert rows[-1]["grad_norm/heat_map._type"] == "image-file"
            assert "layers" in [artifact["type"] for artifact in found["artifact"]]
    assert sorted(runs.status) == ["failed", "finished", "finished"]
    assert "diverged" in set(runs.verdict)


@pytest.fixture
def fresh_wandb() -> Iterator[types.ModuleType]:
    """W&B that has not yet read the environment."""
    import wandb

    forget(wandb)
    yield wandb
    forget(wandb)


def forget(wandb: types.ModuleType) -> None:
    """End W&B in this process, whose service an earlier test may have killed."""
    with suppress(ConnectionError):
        wandb.teardown()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_service_that_dies_or_hangs_costs_its_run_the_wandb_record_only(
    fresh_wandb, tmp_path, monkeypatch, capsys, number
):
    from wandb.sdk import wandb_setup

    processes = []
    update = Fit.update

    def act(fit, lr, norms):
        if fit.cfg.seed == 0 and len(fit.journal.losses) == 3:
            processes.append(wandb_setup.singleton()._connection._proc._process)
            os.kill(processes[0].pid, number)
        return update(fit, lr, norms)

    monkeypatch.setattr(Fit, "update", act)
    limits = ["log=offline", "log.every=1", "log.timeout=3", "log.finish_timeout=2"]
    started = time.monotonic()
    assert train(tiny(tmp_path, *limits))["status"] == "finished"
    assert time.monotonic() - started < 20
    told = capsys.readouterr().err
    assert (told.count("\n"), "W&B broke off" in told) == (1, True)
    assert processes[0].poll() is not None
    second = train(tiny(tmp_path, *limits, "seed=1"))
    assert capsys.readouterr().err == ""
    (file,) = offline_records(tmp_path / "scratch" / second["run_id"])
    assert [row["step"]["num"] for row in inspect(file)["history"]] == list(range(6))
    assert len(load(tmp_path).steps) == 12


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # W&B leaves its parameter file open
def test_the_record_of_a_sweep_agents_run_has_its_id_and_the_whole_config(fresh_wandb, tmp_path, monkeypatch):
    agent(monkeypatch, tmp_path)
    (tmp_path / "config-fixed.yaml").write_text(yaml.safe_dump({"wandb_version": 1, "optim.lr": {"value": 0.002}}))
    records = [train(tiny(tmp_path, "log=offline", "optim.lr=2e-3", f"seed={seed}")) for seed in (0, 1)]
    told = {}
    for record in records:
        (file,) = offline_records(tmp_path / "scratch" / record["run_id"])
        told[record["run_id"]] = inspect(file)["run"][0]
    first, second = (told[r["run_id"]] for r in records)
    assert (first["run_id"], first["sweep_id"], first["display_name"]) == ("fixed", "s1", records[0]["run_id"])
    assert (second["run_id"], second.get("sweep_id")) == (records[1]["run_id"], None)
    for seed, run in enumerate((first, second)):
        config = merged([run["config"]])
        assert (config["optim"]["lr"], config["seed"], config["model"]["depth"]) == (0.002, seed, 2)


def test_a_start_that_breaks_half_way_leaves_nothing_open(fresh_wandb, tmp_path, monkeypatch, capsys):
    from wandb.sdk import wandb_run

    with monkeypatch.context() as broken:
        broken.setattr(wandb_run.Run, "_on_start", lambda _run: 1 / 0)
        first = train(tiny(tmp_path, "log=offline"))
    assert "did not start in mode offline (division by zero)" in capsys.readouterr().err
    second = train(tiny(tmp_path, "log=offline", "seed=1"))
    broken_records, (file,) = (offline_records(tmp_path / "scratch" / r["run_id"]) for r in (first, second))
    assert [row["step"]["num"] for row in inspect(file)["history"]] == list(range(6))
    assert not any(inspect(record).get("history") for record in broken_records)
    assert load(tmp_path).runs.status.tolist() == ["finished", "finished"]


def test_online_without_a_network_is_told_once_and_recorded_offline(fresh_wandb, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    started = time.monotonic()
    record = train(tiny(tmp_path, "log=online", "log.timeout=2"))
    assert time.monotonic() - started < 15
    told = capsys.readouterr().err
    assert (told.count("\n"), "did not start in mode online" in told) == (1, True)
    assert [p.name.startswith("offline-run-") for p in tmp_path.rglob("*run-2*") if p.is_dir()] == [True]
    (file,) = offline_records(tmp_path)
    assert inspect(file)["run"][0]["run_id"] == record["run_id"]
    assert [row["step"]["num"] for row in inspect(file)["history"]] == list(range(6))


def test_a_run_started_again_leaves_one_offline_record(tmp_path):
    cfg = tiny(tmp_path, "log=offline")
    for value in (1.0, 2.0):
        with Log(cfg.log, tmp_path / "id", study="s", steps=1, settings={"a": {"b": None}}) as log:
            assert not log.continues
            log.row(0, {"x": value, "y": float("nan")})
        time.sleep(1.1)  # W&B names its folders by the second
    (file,) = offline_records(tmp_path)
    found = inspect(file)
    assert [(row["item"]["x"], row["item"]["y"]) for row in found["history"]] == [(2, "NaN")]
    assert merged([found["run"][0]["config"]])["a"]["b"] is None
