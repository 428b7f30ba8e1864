"""The benchmarks measure what they name."""

import math

import pytest

import page
import peak_memory
import throughput
from gpu_check import RUN_COLUMNS, Bench


def test_the_check_of_a_card_makes_steps():
    bench = Bench("cpu", quick=True, deadline=math.inf)
    told = dict(zip(RUN_COLUMNS[2:], bench.row(bench.run), strict=True))
    assert float(told["step (ms)"]) > 0
    assert told["attention"] == "flash"


def test_a_row_compares_arms_of_equal_shape(monkeypatch):
    monkeypatch.setattr(throughput, "REPEATS", 2)
    monkeypatch.setattr(throughput, "SECONDS", 0.01)
    found = throughput.measure("2,16,16", nanogpt=None, modes=["eager"])
    assert found["times"].keys() == {f"{name}, eager" for name in ("normlab", "normlab, statistics", "transformers")}
    assert all(len(times) == 2 and min(times) > 0 for times in found["times"].values())
    row = dict(zip(throughput.COLUMNS, throughput.row(found), strict=True))
    assert row["nanoGPT"] == ""  # no checkout was given
    assert float(row["transformers"]) > 0


def test_a_larger_model_needs_more_memory(monkeypatch):
    monkeypatch.setattr(peak_memory, "PROCESSES", 1)
    widths = (64, 512)
    small, large = (peak_memory.apart("normlab, statistics", throughput.Shape(2, w, 64), None) for w in widths)
    arm = throughput.ARMS["normlab"](throughput.Shape(2, widths[1], 64), None)
    assert arm is not None
    states = sum(p.numel() for p in arm.model.parameters())
    assert small < 0.5 * large
    assert large > 3 * 4 * states / 2**20  # weights and Adam's two moments, float32


def test_memory_is_told_without_a_peer_that_is_not_there():
    assert peak_memory.row([120.0, 100.0]) == ("120", "100", "1.20")
    assert peak_memory.row([120.0]) == ("120", "", "")


def test_a_section_of_the_page_takes_the_place_of_its_former_self(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(page, "PAGE", tmp_path / "results.md")
    page.write("One", ["first"])
    page.write("Two", page.table(["a", "b"], [(1, 2)]))
    page.write("One", ["second"])
    assert page.PAGE.read_text() == f"{page.HEAD}\n## One\n\nsecond\n\n## Two\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n"


def test_peers_are_models_of_as_many_parameters():
    where = throughput.Shape(2, 32, 16)
    counts = {}
    for name in ("normlab", "transformers"):
        arm = throughput.ARMS[name](where, None)
        assert arm is not None
        counts[name] = sum(p.numel() for p in arm.model.parameters())
    assert counts["normlab"] == pytest.approx(counts["transformers"], rel=0.01)
