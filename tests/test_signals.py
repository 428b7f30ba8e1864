"""A run that is told to stop finishes its step, keeps it, and goes on from there when it is launched again."""

import os
import signal
import time

import pytest
from conftest import TINY, tiny
from launching import differences, kill, read_marks, rows, until, until_step

from normlab.store import read_record
from normlab.train import train

LONG = [
    *("steps=160", "log.every=7", "checkpoint.every=50", "eval.every=9", "probe.every=30"),
    *("model.dropout=0.1", "model.placement=post", "optim.warmup_steps=100", "optim.schedule=cosine"),
]
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder / "scratch" / train(tiny(folder, *LONG))["run_id"]


@pytest.mark.parametrize("number", STATUS)
def test_a_signal_ends_a_run_after_its_step_and_costs_nothing(starter, tmp_path, undisturbed, number):
    command = [*TINY, *LONG, f"runs_dir={tmp_path / 'runs'}"]
    marks, folder = tmp_path / "marks", tmp_path / "runs/scratch" / undisturbed.name
    for at in (23, 70, 151):
        launch = starter.start(command, tmp_path, MARKS=str(marks), HOLD=f"{at}:0.4")
        until_step(marks, at, launch)
        os.kill(launch.pid, number)
        assert launch.wait(60) == STATUS[number]
        record = read_record(folder)
        assert record is not None
        assert record["status"] == "interrupted"
        assert rows(folder) == list(range(at + 1))
        assert (folder / "checkpoint.pt").exists()
    assert "Traceback" not in (tmp_path / "stderr").read_text()
    assert starter.start(command, tmp_path, MARKS=str(marks)).wait(60) == 0
    assert [mark.step for mark in read_marks(marks) if mark.kind == "step"] == list(range(160))
    assert differences(folder, undisturbed) == []


def test_a_second_sigint_ends_a_run_at_once(starter, tmp_path, undisturbed):
    command = [*TINY, *LONG, f"runs_dir={tmp_path / 'runs'}"]
    marks, folder = tmp_path / "marks", tmp_path / "runs/scratch" / undisturbed.name
    launch = starter.start(command, tmp_path, MARKS=str(marks), HOLD="60:100")
    until_step(marks, 60, launch)
    os.kill(launch.pid, signal.SIGINT)
    time.sleep(0.3)
    assert launch.poll() is None  # its step is not finished
    os.kill(launch.pid, signal.SIGINT)
    assert launch.wait(20) == 130
    record = read_record(folder)
    assert record is not None
    assert record["status"] == "interrupted"
    assert starter.start(command, tmp_path, MARKS=str(marks)).wait(60) == 0
    again = [mark.step for mark in read_marks(marks) if mark.kind == "step"][61:]
    assert again == list(range(50, 160)) or again == list(range(60, 160))
    assert differences(folder, undisturbed) == []


def test_a_signal_ends_a_multirun(starter, tmp_path):
    """The jobs behind the one that was hit are not begun, and are made by the next launch."""
    command = ["-m", *TINY, "seed=0,1,2", "steps=20", f"runs_dir={tmp_path / 'runs'}"]
    marks = tmp_path / "marks"
    launch = starter.start(command, tmp_path, MARKS=str(marks), HOLD="11:0.3")
    first = until_step(marks, 11, launch).run
    until(lambda: until_step(marks, 11, launch).run != first, launch)
    os.kill(launch.pid, signal.SIGTERM)
    assert launch.wait(60) == 143
    folders = list((tmp_path / "runs/scratch").glob("*/run.json"))
    assert sorted(read_record(path.parent)["status"] for path in folders) == ["finished", "interrupted"]
    assert starter.start(command, tmp_path, MARKS=str(marks)).wait(60) == 0
    begun = [(mark.run, mark.step) for mark in read_marks(marks) if mark.kind == "step"]
    assert len(begun) == len(set(begun)) == 60


def test_a_held_run_is_killed_and_its_lock_dies_with_it(starter, tmp_path):
    """The next launch does not find the run busy."""
    command = [*TINY, "steps=12", "checkpoint.every=5", f"runs_dir={tmp_path / 'runs'}"]
    marks = tmp_path / "marks"
    launch = starter.start(command, tmp_path, MARKS=str(marks), HOLD="8:100")
    until_step(marks, 8, launch)
    assert starter.start(command, tmp_path / "other").wait(60) == 0
    assert "left alone" in (tmp_path / "other/stdout").read_text()
    kill(launch)
    assert starter.start(command, tmp_path, MARKS=str(marks)).wait(60) == 0
    assert [mark.step for mark in read_marks(marks) if mark.kind == "step"] == [*range(9), *range(5, 12)]
