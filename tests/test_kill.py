"""A run that was killed goes on from its last whole checkpoint, and says which one it could not use."""

import random
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import TINY, tiny
from kill_study import study
from launching import differences, kill, rows, until, wandb_steps

from normlab.fit import Fit
from normlab.store import read_record
from normlab.train import train

KILLED = ["steps=30", "log.every=3", "checkpoint.every=4", "eval.every=7", "model.dropout=0.1", "optim.warmup_steps=6"]


def test_a_study_that_is_killed_again_and_again(tmp_path, starter):
    counts = study(tmp_path, ["dropout", "not_finite", "two_stacks"], kills=4, seed=0, starter=starter)
    print(counts)
    assert counts.faults == []
    assert counts.kills.total() == 4
    assert counts.steps_made >= counts.steps_needed > 100


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    return folder / "scratch" / train(tiny(folder, *KILLED))["run_id"]


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> Path:
    """A runs_dir with the same run broken off in step 14: checkpoints of 12 and 8 steps."""
    folder = tmp_path_factory.mktemp("broken")
    with pytest.MonkeyPatch.context() as patch:
        begun = count_steps(patch, stop_at=14)
        with pytest.raises(RuntimeError, match="planted"):
            train(tiny(folder, *KILLED))
    assert len(begun) == 15
    return folder


@pytest.fixture
def torn(broken, whole, tmp_path) -> Path:
    """A copy of that run's folder."""
    shutil.copytree(broken, tmp_path / "runs")
    return tmp_path / "runs/scratch" / whole.name


def count_steps(patch: pytest.MonkeyPatch, stop_at: int = -1) -> list[None]:
    """Grows by one for each step that is begun."""
    backward, begun = Fit.backward, []

    def counted(fit, batch):
        begun.append(None)
        if len(begun) == stop_at + 1:
            raise RuntimeError("planted")
        return backward(fit, batch)

    patch.setattr(Fit, "backward", counted)
    return begun


def relaunch(folder: Path, patch: pytest.MonkeyPatch) -> int:
    """Train again; how many steps that took."""
    begun = count_steps(patch)
    record = train(tiny(folder.parents[1], *KILLED))
    assert (record["status"], record.get("reused")) == ("finished", None)
    return len(begun)


def refusals(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Each in one line of stderr, beside the one that says where the run goes on."""
    *refused, then = capsys.readouterr().err.splitlines()
    assert ": goes on at step " in then
    assert all(": refused: " in line for line in refused)
    return refused


def test_a_run_that_is_killed_as_it_finishes(starter, tmp_path):
    """It is not called finished before W&B's record is whole, or the next launch makes that one whole."""
    command = [*TINY, *KILLED, "log=offline", f"runs_dir={tmp_path / 'runs'}"]

    def finished() -> bool:
        return any(b'"status": "finished"' in path.read_bytes() for path in tmp_path.glob("runs/scratch/*/run.json"))

    launch = starter.start(command, tmp_path)
    until(finished, launch, pause=0)
    kill(launch)
    (run,) = (tmp_path / "runs/scratch").glob("*/")
    assert starter.start(command, tmp_path).wait(60) == 0
    assert rows(run) == list(range(30))
    assert wandb_steps(run) == [rows(run)]
    assert not (run / "checkpoint.previous.pt").exists()


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flipped(path: Path) -> None:
    """One bit of its largest tensor."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
        data = archive.read(largest)
    at = content.index(data) + len(data) // 2
    content[at] ^= 1
    path.write_bytes(content)


def no_torch_file(path: Path) -> None:
    path.write_text("not a checkpoint\n")


def another_program_s(path: Path) -> None:
    torch.save({"model": {"weight": torch.zeros(3)}, "epoch": 3}, path)


def code_to_run(path: Path) -> None:
    class Touch:
        def __reduce__(self):
            return Path.touch, (path.with_name("executed"),)

    torch.save({"step": Touch()}, path)


def another_run_s(path: Path) -> None:
    folder = path.parents[3] / "another"
    record = train(tiny(folder, *KILLED, "seed=1"))
    shutil.copy(folder / "scratch" / record["run_id"] / "checkpoint.pt", path)
    shutil.rmtree(folder)


DAMAGES = [half, empty, flipped, no_torch_file, another_program_s, code_to_run, another_run_s]


def test_the_next_launch_goes_on_from_the_last_checkpoint(torn, whole, monkeypatch, capsys):
    assert relaunch(torn, monkeypatch) == 18
    assert refusals(capsys) == []
    assert differences(torn, whole) == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_cannot_be_trusted_is_refused_and_the_one_before_it_used(
    torn, whole, monkeypatch, capsys, damage
):
    damage(torn / "checkpoint.pt")
    assert relaunch(torn, monkeypatch) == 22
    (told,) = refusals(capsys)
    assert str(torn / "checkpoint.pt") in told
    assert not (torn / "executed").exists()
    assert differences(torn, whole) == []


@pytest.mark.parametrize("damage", [half, another_program_s])
def test_without_a_checkpoint_to_trust_the_run_begins_again(torn, whole, monkeypatch, capsys, damage):
    damage(torn / "checkpoint.pt")
    damage(torn / "checkpoint.previous.pt")
    assert relaunch(torn, monkeypatch) == 30
    last, previous, then = capsys.readouterr().err.splitlines()
    assert last.startswith(f"{torn / 'checkpoint.pt'}: refused: ")
    assert previous.startswith(f"{torn / 'checkpoint.previous.pt'}: refused: ")
    assert "begins again" in then
    assert differences(torn, whole) == []


def test_a_checkpoint_without_one_of_its_parts_is_refused(torn, whole, monkeypatch, capsys, tmp_path):
    """No part is left at its first value in silence."""
    parts = torch.load(torn / "checkpoint.pt", weights_only=True)
    assert len(parts) > 3
    for number, name in enumerate(parts):
        copy = tmp_path / str(number) / "scratch" / torn.name
        shutil.copytree(torn, copy)
        torch.save({key: value for key, value in parts.items() if key != name}, copy / "checkpoint.pt")
        with monkeypatch.context() as patch:
            assert relaunch(copy, patch) == 22, name
        assert len(refusals(capsys)) == 1
        assert differences(copy, whole) == []


def test_no_flipped_bit_of_a_checkpoint_is_carried_on(torn, whole, monkeypatch, tmp_path):
    """One that no check sees lies between the parts of the file and changes nothing."""
    content = (torn / "checkpoint.pt").read_bytes()
    chance = random.Random(0)
    for number in range(12):
        copy = tmp_path / str(number) / "scratch" / torn.name
        shutil.copytree(torn, copy)
        changed = bytearray(content)
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        (copy / "checkpoint.pt").write_bytes(changed)
        with monkeypatch.context() as patch:
            assert relaunch(copy, patch) in {18, 22}
        assert differences(copy, whole) == []


def lost_rows(folder: Path) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:5]) + lines[5][:20])


def lost_metrics(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()


def lost_layers(folder: Path) -> None:
    shutil.rmtree(folder / "layers")


def half_a_part(folder: Path) -> None:
    for part in folder.glob("layers/*.parquet"):
        half(part)


@pytest.mark.parametrize("damage", [lost_rows, lost_metrics, lost_layers, half_a_part])
def test_a_checkpoint_whose_rows_are_lost_is_not_gone_on_from(torn, whole, monkeypatch, damage):
    """As after a power cut. The record ends whole whatever the disk kept."""
    damage(torn)
    relaunch(torn, monkeypatch)
    assert rows(torn) == list(range(30))
    assert differences(torn, whole) == []


@pytest.mark.parametrize("record", ["", "{", '{"run_id": "a"}'])
def test_a_torn_record_does_not_stop_the_next_launch(torn, whole, monkeypatch, record):
    (torn / "run.json").write_text(record)
    relaunch(torn, monkeypatch)
    assert differences(torn, whole) == []


def test_what_a_killed_writer_left_is_cleared(torn, whole, monkeypatch):
    for name in (".checkpoint.pt.99.tmp", ".run.json.99.tmp", "layers/.part-00000.parquet.99.tmp"):
        (torn / name).parent.mkdir(exist_ok=True)
        (torn / name).write_bytes(b"half")
    assert relaunch(torn, monkeypatch) == 18
    assert differences(torn, whole) == []


def test_a_run_that_fails_again_in_the_same_place_goes_on_all_the_same(torn, whole, monkeypatch):
    """Each launch keeps what it made: the second one does not begin at the state of the first."""
    for _ in range(2):
        with monkeypatch.context() as patch:
            count_steps(patch, stop_at=5)
            with pytest.raises(RuntimeError, match="planted"):
                train(tiny(torn.parents[1], *KILLED))
        record = read_record(torn)
        assert record is not None
        assert record["status"] == "failed"
    assert relaunch(torn, monkeypatch) == 30 - 20
    assert differences(torn, whole) == []
