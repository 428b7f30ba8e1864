"""A run that was stopped and taken up again is, byte for byte, the run that was not."""

import json
import math
import os
import signal
from pathlib import Path

import pytest
from conftest import tiny

from normlab import checkpoint, store
from normlab.fit import Fit
from normlab.results import load
from normlab.train import train

RUN = ["steps=23", "log.every=7", "checkpoint.every=5", "eval.every=6", "probe.every=9", "model.dropout=0.1"]
KINDS = {
    "pre": [],
    "batch norm": ["model.norm=batchnorm", "model.placement=post"],
    "admin": ["model.placement=admin", "optim=sgd", "optim.momentum=0.9", "optim.clip=0.1"],
    "two stacks": ["model.arch=encoder_decoder", "model.placement=resi_dual", "optim=radam"],
    "masked": ["model.arch=encoder", "model.position=rotary", "micro_batch=3", "probe.layer_drop=true"],
    "bf16": ["precision=bf16", "model.ffn=moe", "model.position=rotary", "probe.sharpness=true"],
}


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, act) -> list[int]:
    """Run act() in the middle of one step; the steps that are made from now on."""
    backward, made = Fit.backward, []

    def planted(fit, batch):
        made.append(len(fit.journal.losses) + len(fit.journal._pending))
        if len(made) == step + 1:
            act()
        return backward(fit, batch)

    monkeypatch.setattr(Fit, "backward", planted)
    return made


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def fail() -> None:
    raise RuntimeError("planted")


def contents(folder: Path) -> dict[str, object]:
    """The files of a run, timings blanked."""
    rows = [json.loads(line) | {"seconds": 0} for line in (folder / "metrics.jsonl").read_text().splitlines()]
    record = json.loads((folder / "run.json").read_text())
    timed = ("started", "attempts", "from_step", "seconds", "tokens_per_second", "mfu")
    parts = {p.name: p.read_bytes() for p in (folder / "layers").iterdir()}
    return {
        "names": sorted(p.name for p in folder.iterdir()),
        "metrics": rows,
        "record": {key: str(value) for key, value in record.items() if key not in timed},
        "checkpoint": (folder / "checkpoint.pt").read_bytes(),
        **parts,
    }


@pytest.mark.parametrize(("act", "error"), [(interrupt, KeyboardInterrupt), (fail, RuntimeError)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path, monkeypatch, kind, act, error):
    """An interrupt loses nothing; a failure the steps since the last checkpoint."""
    monkeypatch.setattr(store, "PART_ROWS", 1000)
    straight = train(tiny(tmp_path / "straight", *RUN, *KINDS[kind]))
    made = stop_at(monkeypatch, 12, act)
    with pytest.raises(error):
        train(tiny(tmp_path / "stopped", *RUN, *KINDS[kind]))
    folder = tmp_path / "stopped" / "scratch" / straight["run_id"]
    assert store.read_record(folder)["status"] == ("interrupted" if act is interrupt else "failed")
    resumed = train(tiny(tmp_path / "stopped", *RUN, *KINDS[kind]))
    assert [a["from_step"] for a in resumed["attempts"]] == [0, 13 if act is interrupt else 10]
    assert made == list(range(13)) + list(range(13 if act is interrupt else 10, 23))
    assert contents(folder) == contents(tmp_path / "straight" / "scratch" / straight["run_id"])
    assert len(list((folder / "layers").iterdir())) > 3


def test_a_run_that_failed_behind_its_last_step_is_not_trained_again(tmp_path, monkeypatch):
    straight = train(tiny(tmp_path / "straight", *RUN))
    monkeypatch.setattr(Fit, "result", lambda *_: fail())
    with pytest.raises(RuntimeError, match="planted"):
        train(tiny(tmp_path / "stopped", *RUN))
    monkeypatch.undo()
    made = stop_at(monkeypatch, 100, fail)
    train(tiny(tmp_path / "stopped", *RUN))
    assert made == []
    paths = [tmp_path / name / "scratch" / straight["run_id"] for name in ("straight", "stopped")]
    assert contents(paths[0]) == contents(paths[1])


def test_a_run_that_diverges_resumes_to_the_same_record_and_keeps_its_last_finite_checkpoint(tmp_path, monkeypatch):
    backward = Fit.backward

    def poisoned(fit, batch):
        if len(fit.journal.losses) + len(fit.journal._pending) == 17:
            fit.model.decoder.blocks[1].ffn.w_out.weight.data[0, 0] = math.nan
        return backward(fit, batch)

    monkeypatch.setattr(Fit, "backward", poisoned)
    straight = train(tiny(tmp_path / "straight", *RUN))
    assert (straight["verdict"], straight["stopped"]) == ("diverged", "not finite")
    assert (straight["first_bad_step"], straight["first_bad_layer"]) == (17, 1)
    stop_at(monkeypatch, 12, interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(tmp_path / "stopped", *RUN))
    resumed = train(tiny(tmp_path / "stopped", *RUN))
    assert resumed["last_finite"] == straight["last_finite"]
    paths = [tmp_path / name / "scratch" / straight["run_id"] for name in ("straight", "stopped")]
    assert contents(paths[0]) == contents(paths[1])
    kept = checkpoint.read(paths[0], straight["run_id"], lambda _: None)
    assert kept["step"] == 15
    assert all(weight.isfinite().all() for weight in kept["model"].values())


def test_a_hopeless_run_that_failed_at_its_end_makes_no_further_step(tmp_path, monkeypatch):
    hopeless = ["optim.lr=1.0", "steps=40", "verdict.patience=8", "stop.hopeless=true"]
    straight = train(tiny(tmp_path / "straight", *hopeless))
    assert straight["stopped"] == "hopeless"
    monkeypatch.setattr(Fit, "result", lambda *_: fail())
    with pytest.raises(RuntimeError, match="planted"):
        train(tiny(tmp_path / "stopped", *hopeless))
    monkeypatch.undo()
    assert train(tiny(tmp_path / "stopped", *hopeless))["steps_done"] == straight["steps_done"]


def test_checkpoints_by_time(tmp_path, monkeypatch):
    written = []
    write = checkpoint.write

    def noted(folder, run_id, state, device):
        written.append(state["step"])
        write(folder, run_id, state, device)

    monkeypatch.setattr(checkpoint, "write", noted)
    train(tiny(tmp_path / "often", "checkpoint.seconds=1e-9"))
    train(tiny(tmp_path / "never", "checkpoint.seconds=0"))
    assert written == [1, 2, 3, 4, 5, 6, 6]


@pytest.mark.parametrize("status", ["finished", "interrupted", "failed"])
def test_what_a_relaunch_does_with_a_run_is_the_users_choice(tmp_path, status):
    first = train(tiny(tmp_path))
    folder = tmp_path / "scratch" / first["run_id"]

    def again(choice: str) -> dict:
        store.write_record(folder, first | {"status": status})
        return train(tiny(tmp_path, f"relaunch.{status}={choice}"))

    skipped = again("skip")
    assert (skipped["status"], skipped["reused"]) == (status, True)
    restarted = again("restart")
    assert [a["from_step"] for a in restarted["attempts"]] == [0]
    assert restarted["final_val_loss"] == first["final_val_loss"]
    if status != "finished":
        resumed = again("resume")
        assert [a["from_step"] for a in resumed["attempts"]] == [0, 6]
        assert resumed["final_val_loss"] == first["final_val_loss"]


def test_a_run_killed_before_it_could_say_so_is_an_interrupted_one(tmp_path):
    first = train(tiny(tmp_path))
    folder = tmp_path / "scratch" / first["run_id"]
    store.write_record(folder, first | {"status": "running"})
    assert train(tiny(tmp_path, "relaunch.interrupted=skip"))["status"] == "running"
    assert train(tiny(tmp_path))["status"] == "finished"
    (folder / "run.json").unlink()
    assert train(tiny(tmp_path, "relaunch.interrupted=skip"))["status"] == "finished"


def test_rows_behind_the_checkpoint_are_dropped_and_those_before_it_are_needed(tmp_path, capsys):
    first = train(tiny(tmp_path / "a", "steps=9", "checkpoint.every=4", "log.every=1"))
    folder = tmp_path / "a" / "scratch" / first["run_id"]
    whole = contents(folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    store.write_record(folder, first | {"status": "interrupted"})
    (folder / "metrics.jsonl").write_text("".join(lines + lines[:3]) + '{"step": 1')
    assert train(tiny(tmp_path / "a", "steps=9"))["attempts"][-1]["from_step"] == 9
    assert contents(folder) == whole
    assert capsys.readouterr().err.count("\n") == 1
    store.write_record(folder, first | {"status": "interrupted"})
    (folder / "metrics.jsonl").write_text("".join(lines[:5]) + lines[5][:9])
    assert train(tiny(tmp_path / "a", "steps=9"))["attempts"][-1]["from_step"] == 0
    assert "refused: metrics.jsonl has 5 of the 9 steps before it" in capsys.readouterr().err
    assert contents(folder)["metrics"] == whole["metrics"]


def test_two_stops_in_one_run(tmp_path, monkeypatch):
    straight = train(tiny(tmp_path / "straight", *RUN))
    for step in (3, 8):
        stop_at(monkeypatch, step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(tiny(tmp_path / "stopped", *RUN))
        monkeypatch.undo()
    last = train(tiny(tmp_path / "stopped", *RUN))
    assert [a["from_step"] for a in last["attempts"]] == [0, 4, 13]
    paths = [tmp_path / name / "scratch" / straight["run_id"] for name in ("straight", "stopped")]
    assert contents(paths[0]) == contents(paths[1])
    assert load(paths[1]).steps.step.tolist() == list(range(23))
