"""W&B is a window: what it is told, and that its troubles are its own."""

import sys
import types
from typing import Any

import pytest
from conftest import tiny

from normlab import probe
from normlab.results import load
from normlab.train import train


class FakeWandb(types.ModuleType):
    """Records what W&B is told; raises in the named method."""

    def __init__(self, broken: str = "") -> None:
        super().__init__("wandb")
        self.broken, self.started, self.rows, self.exit_codes = broken, [], [], []
        self.summary: dict[str, Any] = {}
        self.alerts: list[tuple[str, str]] = []
        self.Settings = lambda **settings: settings

    def init(self, **arguments: Any) -> "FakeWandb":
        self._maybe_break("init" if arguments["mode"] == "online" else "init_" + arguments["mode"])
        self.started.append(arguments)
        return self

    def log(self, row: dict[str, float], step: int) -> None:
        self._maybe_break("log")
        self.rows.append((step, row))

    def alert(self, title: str, text: str) -> None:
        self.alerts.append((title, text))

    def finish(self, exit_code: int) -> None:
        self._maybe_break("finish")
        self.exit_codes.append(exit_code)

    def _maybe_break(self, method: str) -> None:
        if method == self.broken:
            raise RuntimeError(f"no {method}\ntoday")


@pytest.fixture
def fake(request, monkeypatch) -> FakeWandb:
    module = FakeWandb(getattr(request, "param", ""))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_what_wandb_is_told(fake, tmp_path):
    record = train(tiny(tmp_path, "log=offline", "study=named", "eval.every=3"))
    (started,) = fake.started
    assert (started["id"], started["group"], started["mode"]) == (record["run_id"], "named", "offline")
    assert started["config"]["model"]["placement"] == "pre"
    assert started["config"]["data_sha256"] == record["data_sha256"]
    assert [step for step, _ in fake.rows] == list(range(6))
    steps = load(tmp_path).steps
    names = {"train/loss": "loss", "train/lr": "lr", "train/grad_norm": "grad_norm", "train/update_norm": "update_norm"}
    for step, row in fake.rows:
        assert {n: row[n] for n in names} == {n: steps[c][step] for n, c in names.items()}
        assert ("val/loss" in row) == (step in {0, 3})
        assert len([k for k in row if k.startswith("grad_norm/layer_")]) == 2
        assert row["grad_norm/layer_000"] > 0
    assert fake.rows[3][1]["val/loss"] == steps.val_loss[3]
    told = {k: fake.summary[k] for k in ("verdict", "final_val_loss", "spike_count")}
    assert told == {k: record[k] for k in told}
    assert fake.exit_codes == [0]


def test_a_failed_run_is_closed_as_failed(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "profile", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(tiny(tmp_path, "log=offline"))
    assert fake.exit_codes == [1]


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
    assert len(fake.rows) == 6
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
