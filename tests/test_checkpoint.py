"""The last checkpoint or the one before it is whole, whatever happens; what is not whole is refused with the reason."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from normlab import checkpoint

CPU = torch.device("cpu")
STATE = {"step": 3, "model": {"w": torch.arange(5000.0), "b": torch.ones(3)}, "why": None}


def read(folder: Path) -> dict | None:
    return checkpoint.read(folder, "abc", lambda _: None)


def write(folder: Path, step: int) -> None:
    checkpoint.write(folder, "abc", STATE | {"step": step}, CPU)


def test_round_trip_and_the_one_before(tmp_path):
    assert read(tmp_path) is None
    for step in (1, 2, 3):
        write(tmp_path, step)
    found = read(tmp_path)
    assert found["step"] == 3
    assert torch.equal(found["model"]["w"], STATE["model"]["w"])
    (tmp_path / checkpoint.LAST).unlink()
    assert read(tmp_path)["step"] == 2
    assert len(list(tmp_path.iterdir())) == 1
    checkpoint.clear(tmp_path)
    assert read(tmp_path) is None


def test_anyone_can_read_one_with_torch_alone(tmp_path):
    write(tmp_path, 1)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["model"]["b"].tolist() == [1, 1, 1]


def test_equal_states_are_equal_bytes(tmp_path):
    """Also when a string is the same object twice in one of them and two equal ones in the other."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    key = "".join(["st", "ep"])
    checkpoint.write(tmp_path / "one", "abc", {"step": 1, "of": {"step": 2, "x": (1, "step")}}, CPU)
    checkpoint.write(tmp_path / "two", "abc", {"step": 1, "of": {key: 2, "x": [1, key]}}, CPU)
    one, two = ((tmp_path / name / checkpoint.LAST).read_bytes() for name in ("one", "two"))
    assert one == two


def flipped(raw: bytes) -> bytes:
    at = raw.index(STATE["model"]["w"].numpy().tobytes()) + 999
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


DAMAGE = {
    "truncated": (lambda raw: raw[: len(raw) // 2], "not a whole checkpoint"),
    "empty": (lambda raw: b"", "not a whole checkpoint"),
    "one bit": (flipped, "checksum of its part archive/data/0 is wrong"),
    "text": (lambda raw: b"hello", "not a whole checkpoint"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_one_is_refused_and_the_one_before_is_used(tmp_path, capsys, kind):
    damage, why = DAMAGE[kind]
    write(tmp_path, 1)
    write(tmp_path, 2)
    last = tmp_path / checkpoint.LAST
    last.write_bytes(damage(last.read_bytes()))
    assert read(tmp_path)["step"] == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"{last}: refused: " in told
    assert why in told


def test_no_flipped_bit_goes_unseen_in_what_counts(tmp_path, capsys):
    """Padding between the parts may change; whatever is read is the state that was written."""
    write(tmp_path, 1)
    last = tmp_path / checkpoint.LAST
    raw = last.read_bytes()
    refused = 0
    for at in range(0, len(raw), 173):
        last.write_bytes(raw[:at] + bytes([raw[at] ^ 16]) + raw[at + 1 :])
        found = read(tmp_path)
        refused += found is None
        if found is not None:
            assert found["step"] == 1
            assert torch.equal(found["model"]["w"], STATE["model"]["w"])
    assert refused > 100
    capsys.readouterr()


class Unsafe:
    def __reduce__(self):
        return (print, ("run by a pickle",))


FOREIGN = {
    "another run's": ({"format": checkpoint.FORMAT, "run_id": "other"}, "it is run other's"),
    "another format": ({"format": 99, "run_id": "abc"}, "not a checkpoint of this program's format"),
    "a bare model": ({"w": torch.ones(2)}, "not a checkpoint of this program's format"),
    "not a dict": ([1, 2], "not a checkpoint of this program's format"),
    "unsafe": (Unsafe(), "not a whole checkpoint"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_one_is_refused(tmp_path, capsys, kind):
    content, why = FOREIGN[kind]
    torch.save(content, tmp_path / checkpoint.LAST)
    assert read(tmp_path) is None
    out, told = capsys.readouterr()
    assert why in told
    assert out == ""


def test_one_that_fails_the_callers_check_is_refused(tmp_path, capsys):
    write(tmp_path, 1)
    write(tmp_path, 2)

    def check(state):
        if state["step"] == 2:
            raise ValueError("rows are missing")

    assert checkpoint.read(tmp_path, "abc", check)["step"] == 1
    assert "refused: rows are missing" in capsys.readouterr().err


@pytest.mark.parametrize("broken_at", range(6))
def test_a_crash_while_writing_leaves_a_whole_one(tmp_path, monkeypatch, broken_at):
    """At any of the calls that touch the disk."""
    write(tmp_path, 1)
    write(tmp_path, 2)
    calls = []

    def crashing(real):
        def call(*arguments):
            if len(calls) == broken_at:
                raise KeyboardInterrupt
            calls.append(real)
            return real(*arguments)

        return call

    monkeypatch.setattr(torch, "save", crashing(torch.save))
    monkeypatch.setattr(checkpoint.os, "fsync", crashing(checkpoint.os.fsync))
    monkeypatch.setattr(Path, "replace", crashing(Path.replace))
    if broken_at < 5:
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, 3)
    else:
        write(tmp_path, 3)
    assert read(tmp_path)["step"] in ({2} if broken_at < 4 else {3})


def test_every_generator_goes_on_where_it_was(tmp_path):
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002
    torch.manual_seed(3)
    random.gauss(0, 1)
    np.random.standard_normal()  # noqa: NPY002
    write(tmp_path, 1)

    def draw() -> tuple:
        return random.gauss(0, 1), random.random(), np.random.standard_normal(3).tolist(), torch.rand(3).tolist()  # noqa: NPY002

    wanted = draw()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(99)
    checkpoint.restore_random(read(tmp_path), CPU)
    assert draw() == wanted
