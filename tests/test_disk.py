"""Disks that fail: one clear line, earlier results as they were, and the next launch goes on."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import TINY, tiny
from launching import differences, kill, read_marks, rows, until, until_step

from normlab.store import read_record
from normlab.train import train


def runs(runs_dir: Path) -> list[Path]:
    return [path.parent for path in runs_dir.glob("scratch/*/run.json")]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def one_line(out: Path) -> str:
    """What a failed launch says on stderr about its run."""
    text = (out / "stderr").read_text()
    assert "Traceback" not in text
    lines = [line for line in text.splitlines() if ":  failed: " in line]
    assert len(lines) == 1, text
    return lines[0]


def test_a_run_folder_that_is_deleted_is_missed_at_once(starter, tmp_path):
    """Within log.every steps: an open file would go on to be written, and be lost. The other runs stand."""
    command = ["-m", *TINY, "steps=60", "log.every=7", f"runs_dir={tmp_path / 'runs'}", "seed=0,1,2"]
    marks = tmp_path / "marks"
    assert starter.start([*command, "seed=0"], tmp_path / "first", MARKS=str(tmp_path / "first/marks")).wait(60) == 0
    (earlier,) = runs(tmp_path / "runs")
    before = contents(earlier)

    launch = starter.start(command, tmp_path / "deleted", MARKS=str(marks), HOLD="30:0.5")
    run = until_step(marks, 30, launch).run
    shutil.rmtree(tmp_path / "runs/scratch" / run)
    assert launch.wait(60) == 1
    assert max(mark.step for mark in read_marks(marks) if mark.run == run) < 30 + 7
    told = one_line(tmp_path / "deleted")
    assert str(tmp_path / "runs/scratch" / run) in told
    assert "deleted" in told or "No such file" in told
    assert before == contents(earlier)

    assert starter.start(command, tmp_path / "mended").wait(60) == 0
    folders = runs(tmp_path / "runs")
    assert len(folders) == 3
    assert all(rows(folder) == list(range(60)) for folder in folders)


@pytest.mark.parametrize("folder", ["", "new"])
def test_a_folder_that_may_not_be_written_is_refused(starter, tmp_path, folder):
    (tmp_path / "closed").mkdir(mode=0o555)
    runs = tmp_path / "closed" / folder
    assert starter.start([*TINY, f"runs_dir={runs}"], tmp_path, BOUND="1").wait(60) == 2
    told = (tmp_path / "stderr").read_text()
    assert str(runs) in told
    assert ("Permission denied" if folder else "not writable") in told
    assert "Traceback" not in told
    assert not list((tmp_path / "closed").iterdir())


@pytest.mark.parametrize("closed", [".", "metrics.jsonl"])
def test_a_run_that_may_not_be_written_is_left_as_it_is(starter, tmp_path, closed):
    """A run that broke off, then a closed folder or a closed file."""
    marks = tmp_path / "marks"
    command = [*TINY, "steps=30", "checkpoint.every=7", "log.every=3", f"runs_dir={tmp_path / 'runs'}"]
    launch = starter.start(command, tmp_path / "killed", MARKS=str(marks), HOLD="20:100")
    until_step(marks, 20, launch)
    kill(launch)
    (run,) = runs(tmp_path / "runs")
    before = contents(run)
    for path in [run, *run.rglob("*")] if closed == "." else [run / closed]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert starter.start(command, tmp_path / "refused", MARKS=str(marks), BOUND="1").wait(60) == 1
    assert read_marks(marks)[-1].kind == "launch"  # no step was made
    told = one_line(tmp_path / "refused")
    assert str(run) in told
    assert "Permission denied" in told
    for path in [run, *run.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    kept = {path: content for path, content in before.items() if path.suffix in {".pt", ".parquet", ".jsonl"}}
    assert kept.items() <= contents(run).items()
    assert starter.start(command, tmp_path / "mended", MARKS=str(marks)).wait(60) == 0
    assert [mark.step for mark in read_marks(marks) if mark.kind == "step"] == [*range(21), *range(14, 30)]
    assert rows(run) == list(range(30))


FULL = {  # file that no longer fits: bytes that do, and a run whose other files are smaller
    "metrics.jsonl": (20_000, ["steps=200"]),
    "checkpoint": (60_000, ["steps=40", "checkpoint.every=20"]),
    "layers": (200_000, ["steps=345", "model.depth=16", "model.width=8", "probe.batches=0", "log.every=50"]),
}


@pytest.mark.parametrize("file", FULL)
def test_a_full_disk_is_told_and_the_run_goes_on_when_there_is_room(starter, tmp_path, file):
    """EFBIG at a size in place of ENOSPC: the same exception at the same calls."""
    room, longer = FULL[file]
    command = ["-m", *TINY, *longer, f"runs_dir={tmp_path / 'runs'}"]
    assert starter.start([*command, "steps=6"], tmp_path / "first").wait(60) == 0
    (earlier,) = runs(tmp_path / "runs")
    before = contents(earlier)
    assert starter.start(command, tmp_path / "full", LARGEST=str(room)).wait(60) == 1
    told = one_line(tmp_path / "full")
    (run,) = set(runs(tmp_path / "runs")) - {earlier}
    assert f"{run}/" in told
    assert file in told.split(str(run))[1]
    assert "File too large" in told
    record = read_record(run)
    assert record is not None
    assert (record["status"], "File too large" in record["reason"]) == ("failed", True)
    assert not list(run.rglob("*.tmp"))
    assert before == contents(earlier)

    assert starter.start(command, tmp_path / "mended").wait(60) == 0
    whole = train(tiny(tmp_path / "whole", *longer))
    assert differences(run, tmp_path / "whole/scratch" / whole["run_id"]) == []


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A disk of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", disk], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no disk may be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_disk_that_is_full_to_the_last_byte(starter, small_disk, tmp_path):
    """Not even run.json can be written anew."""
    command = ["-m", *TINY, "steps=400", "log.every=5", "checkpoint.every=20", f"runs_dir={small_disk}"]
    assert starter.start([*command, "steps=6"], tmp_path / "first").wait(60) == 0
    (earlier,) = runs(small_disk)
    before = contents(earlier)
    launch = starter.start(command, tmp_path / "full", MARKS=str(tmp_path / "marks"), HOLD="50:0.5")
    until_step(tmp_path / "marks", 50, launch)
    with (small_disk / "filler").open("wb", buffering=0) as filler:
        until(lambda: _fill(filler))
    assert launch.wait(60) == 1
    assert "No space left on device" in one_line(tmp_path / "full")
    assert str(small_disk / "scratch") in one_line(tmp_path / "full")
    assert before == contents(earlier)
    (small_disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    assert starter.start(command, tmp_path / "mended", MARKS=str(tmp_path / "marks")).wait(60) == 0
    again = [mark.step for mark in read_marks(tmp_path / "marks") if mark.kind == "step"]
    assert again.count(39) == 1  # of the checkpoint before
    whole = train(tiny(tmp_path / "whole", "steps=400", "log.every=5", "checkpoint.every=20"))
    assert differences(small_disk / "scratch" / whole["run_id"], tmp_path / "whole/scratch" / whole["run_id"]) == []


def _fill(file) -> bool:
    try:
        while file.write(b"0" * 512):
            time.sleep(0)
    except OSError:
        return True
    return False
