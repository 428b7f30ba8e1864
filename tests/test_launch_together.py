"""Launches that begin at one instant: every run is whole, none is made twice."""

import shutil
import time
from collections import Counter
from pathlib import Path

from conftest import TINY
from launching import Launch, Starter, read_marks, rows, wandb_steps

from normlab.results import load


def at_once(starter: Starter, folder: Path, *commands: list[str]) -> list[Launch]:
    """Launch all of them at one instant, each with its outputs in a folder of its own, and wait for them."""
    instant = str(time.time() + 0.3)
    launches = [
        starter.start(
            ["-m", *TINY, f"runs_dir={folder / 'runs'}", *command],
            folder / str(number),
            MARKS=str(folder / "marks"),
            AT=instant,
        )
        for number, command in enumerate(commands)
    ]
    for launch in launches:
        launch.wait(120)
    return launches


def assert_whole(folder: Path, count: int, steps: int = 6) -> None:
    """So many finished runs, each made once, with every step and one W&B record."""
    runs, table, layers = load(folder / "runs")
    assert runs.attrs["skipped"] == []
    assert len(runs) == runs.run_id.nunique() == count
    assert set(runs.status) == {"finished"}
    begun = Counter((mark.run, mark.step) for mark in read_marks(folder / "marks") if mark.kind == "step")
    assert begun == Counter((run, step) for run in runs.run_id for step in range(steps))
    for run in map(Path, runs.path):
        assert rows(run) == list(range(steps))
        assert wandb_steps(run) == [list(range(steps))] * (run / "wandb").exists()
        assert not [file for file in run.rglob("*") if file.name.endswith(".tmp")]
    assert not layers.duplicated(["run_id", "step", "stack", "layer", "site", "tensor", "stat"]).any()
    assert (table.groupby("run_id").size() == steps).all()


def contents(folder: Path) -> dict[Path, bytes]:
    """Of every file of every run."""
    return {path: path.read_bytes() for path in folder.glob("runs/scratch/*/**/*") if path.is_file()}


def test_six_runs_at_one_instant(starter, tmp_path):
    commands = [["log=offline", f"seed={seed}"] for seed in range(6)]
    assert [launch.wait() for launch in at_once(starter, tmp_path, *commands)] == [0] * 6
    assert_whole(tmp_path, 6)
    assert len(list(tmp_path.glob("runs/scratch/*/wandb/offline-run-*"))) == 6
    assert sorted(load(tmp_path / "runs").runs.seed) == list(range(6))
    for number in range(6):
        assert (tmp_path / str(number) / "stdout").read_text().count("val loss") == 1
        assert (tmp_path / str(number) / "stderr").read_text() == ""


def test_one_study_launched_twice_at_one_instant(starter, tmp_path):
    command = ["log=offline", "seed=0,1", "model.placement=pre,post"]
    assert [launch.wait() for launch in at_once(starter, tmp_path, command, command)] == [0, 0]
    assert_whole(tmp_path, 4)
    told = [(tmp_path / str(number) / "stdout").read_text() for number in range(2)]
    made = [text.count("finished before") + text.count(":  left alone") for text in told]
    assert sum(4 - count for count in made) == 4
    assert any("left alone: another process runs it" in text for text in told)

    before = contents(tmp_path)
    (launch,) = at_once(starter, tmp_path, command)
    assert launch.wait() == 0
    assert before == contents(tmp_path)


def test_one_run_launched_three_times_at_one_instant(starter, tmp_path):
    """The losers leave with status 0 while the winner is in its first step."""
    assert [x.wait() for x in at_once(starter, tmp_path, *[["seed=0"]] * 3)] == [0] * 3
    assert_whole(tmp_path, 1)


def test_another_sweep_in_the_same_folder_changes_no_run(starter, tmp_path):
    """Runs are matched by what they are, not by their number in a sweep; a run that is missing is made again."""
    first = ["seed=0,1,2"]
    at_once(starter, tmp_path, first)
    assert_whole(tmp_path, 3)
    before = contents(tmp_path)
    at_once(starter, tmp_path, ["seed=3,4,5"])
    assert_whole(tmp_path, 6)
    assert before.items() <= contents(tmp_path).items()

    runs = load(tmp_path / "runs").runs.set_index("seed")
    lost = Path(runs.path[1])
    shutil.rmtree(lost)
    (tmp_path / "marks").unlink()
    at_once(starter, tmp_path, first)
    assert {mark.run for mark in read_marks(tmp_path / "marks") if mark.kind == "step"} == {lost.name}
    assert rows(lost) == list(range(6))
    kept = {path: content for path, content in before.items() if lost not in path.parents}
    assert kept.items() <= contents(tmp_path).items()
