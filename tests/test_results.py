"""What is written is what is read."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from conftest import tiny

from normlab import probe, results, store
from normlab.meter import STATS
from normlab.tensors import TensorId


@pytest.fixture
def folder(tmp_path):
    record = {"run_id": "abc", "study": "scratch", "h1": 3.0}
    return store.RunFolder(tmp_path / "scratch" / "abc", tiny(tmp_path), record)


def test_round_trip(folder, tmp_path):
    ids = [TensorId("decoder", 0, "attn", "q"), TensorId("decoder", None, "embed", "token")]
    folder.metrics([{"step": 0, "tokens": 8, "loss": 2.5, "val_loss": 2.25}, {"step": 1, "tokens": 16, "loss": 1e-300}])
    folder.step_statistics(0, ids, ["weight_grad_norm"], np.array([[[0.1, 0.2]], [[0.3, math.inf]]]))
    folder.layers(2, probe.frame([("decoder", 1, "ffn", None, "stream_rms", 1.5)]))
    folder.close()
    folder.update(status="finished", verdict="stable", spikes=[])
    runs, steps, layers = results.load(tmp_path)
    assert runs[["run_id", "status", "model.depth", "h1"]].iloc[0].tolist() == ["abc", "finished", 2, 3.0]
    assert steps.loss.tolist() == [2.5, 1e-300]
    assert steps.val_loss.tolist()[0] == 2.25
    assert math.isnan(steps.val_loss[1])
    assert layers.value.tolist() == [0.1, 0.2, 0.3, math.inf, 1.5]
    assert layers.step.tolist() == [0, 0, 1, 1, 2]
    assert layers.layer.isna().tolist() == [False, True, False, True, False]
    assert layers.tensor.isna().tolist() == [False] * 4 + [True]
    assert (layers.run_id == "abc").all()


def test_non_finite_numbers_stay_numbers(folder, tmp_path):
    values = [1.0, math.nan, float(np.float32("nan")), math.inf, -math.inf]
    folder.metrics([{"step": i, "loss": v} for i, v in enumerate(values)])
    folder.close()
    loss = results.load(tmp_path).steps.loss
    assert loss.dtype == np.float64
    np.testing.assert_array_equal(loss.to_numpy(), np.array(values))


def test_every_row_is_read_and_a_short_spike_with_them(folder, tmp_path):
    rows = [{"step": i, "loss": 9.0 if i == 3333 else 2.0} for i in range(5000)]
    folder.metrics(rows)
    folder.close()
    steps = results.load(tmp_path).steps
    assert len(steps) == 5000
    assert steps.loss.idxmax() == 3333


def test_metrics_of_different_cadence_keep_every_row(folder, tmp_path):
    folder.metrics([{"step": i, "loss": 1.0} | ({"val_loss": 2.0} if i % 5 == 0 else {}) for i in range(20)])
    folder.close()
    steps = results.load(tmp_path).steps
    assert len(steps) == 20
    assert steps.val_loss.notna().sum() == 4


def test_a_torn_last_line_is_dropped_and_a_torn_middle_is_an_error(folder, tmp_path):
    folder.metrics([{"step": 0, "loss": 1.0}])
    folder.close()
    path = folder.path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 1, "lo')
    assert len(results.load(tmp_path).steps) == 1
    path.write_text('{"step": 0, "lo\n{"step": 1, "loss": 2.0}\n')
    runs = results.load(tmp_path).runs
    assert len(runs) == 0
    assert "metrics.jsonl: line 1 is not JSON" in runs.attrs["skipped"][0]


def test_a_folder_without_a_record_is_left_out_and_named(folder, tmp_path):
    folder.close()
    good = (folder.path / "run.json").read_text()
    (tmp_path / "scratch" / "phantom").mkdir()
    (tmp_path / "scratch" / "phantom" / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "scratch" / "torn").mkdir()
    (tmp_path / "scratch" / "torn" / "run.json").write_text('{"run_id": ')
    (tmp_path / "scratch" / "torn" / "config.yaml").write_text("seed: 0\n")
    for name, record, settings in (("list", "[]", "seed: 0\n"), ("bare", "{}", "seed: 0\n"), ("empty", good, "")):
        (tmp_path / "scratch" / name).mkdir()
        (tmp_path / "scratch" / name / "run.json").write_text(record)
        (tmp_path / "scratch" / name / "config.yaml").write_text(settings)
    (tmp_path / "scratch" / "no_config").mkdir()
    (tmp_path / "scratch" / "no_config" / "run.json").write_text(good)
    (tmp_path / "scratch" / "bad_part" / "layers").mkdir(parents=True)
    (tmp_path / "scratch" / "bad_part" / "run.json").write_text(good)
    (tmp_path / "scratch" / "bad_part" / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "scratch" / "bad_part" / "layers" / "part-00000.parquet").write_bytes(b"torn")
    kept_by_wandb = tmp_path / "scratch" / "abc" / "wandb" / "run-1" / "files"
    kept_by_wandb.mkdir(parents=True)
    (kept_by_wandb / "config.yaml").write_text("wandb: 1\n")
    runs = results.load(tmp_path).runs
    assert runs.run_id.tolist() == ["abc"]
    named = [s.split(":")[0].rsplit("/", 1)[-1] for s in runs.attrs["skipped"]]
    assert named == ["bad_part", "bare", "empty", "list", "no_config", "phantom", "torn"]


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing_here"):
        results.load(tmp_path / "nothing_here")


def test_an_empty_folder_gives_empty_tables(tmp_path):
    runs, steps, layers = results.load(tmp_path)
    assert len(runs) == len(steps) == len(layers) == 0
    assert "value" in layers


def test_a_record_is_never_seen_half_written(folder):
    for _ in range(20):
        folder.update(blob="x" * 100_000)
        assert len(json.loads((folder.path / "run.json").read_text())["blob"]) == 100_000
    assert [p.name for p in folder.path.iterdir() if p.name.startswith(".")] == []
    folder.close()


def test_loading_twice_gives_the_same_order(study):
    one, two = results.load(study), results.load([study])
    assert one.runs.run_id.tolist() == two.runs.run_id.tolist() == sorted(one.runs.run_id)
    pd.testing.assert_frame_equal(one.layers, two.layers)


def test_of_a_large_study_the_statistics_of_every_step_are_read_at_some_steps(study):
    whole = results.load(study)
    some = results.load(study, most_rows=len(whole.layers) // 3)
    (told,) = [note for note in some.runs.attrs["skipped"] if "layer rows" in note]
    every = int(told.split("at each ")[1].split("th")[0])
    assert every > 1
    often = whole.layers.stat.isin(STATS)
    kept = whole.layers[~often | (whole.layers.step % every == 0)]
    pd.testing.assert_frame_equal(some.layers.reset_index(drop=True), kept.reset_index(drop=True))
    pd.testing.assert_frame_equal(some.steps, whole.steps)
    assert results.load(study, most_rows=len(whole.layers)).runs.attrs["skipped"] == whole.runs.attrs["skipped"]


def test_row_groups_without_a_wanted_row_are_not_read(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "GROUP_ROWS", 10)
    ids = [TensorId("decoder", 0, "attn", "q"), TensorId("decoder", 0, "attn", "k")]
    values = np.arange(400.0).reshape(40, len(STATS), 2)  # ten rows, a group, to a step
    folder.step_statistics(0, ids, STATS, values[:25])
    folder.layers(25, probe.frame([("decoder", 1, "ffn", None, "stream_rms", 1.5)]))
    folder.step_statistics(25, ids, STATS, values[25:])
    folder.close()
    folder.update(status="finished")
    groups = []
    read = results.pq.ParquetFile.read_row_groups

    def watched(part, wanted):
        groups.extend(wanted)
        return read(part, wanted)

    monkeypatch.setattr(results.pq.ParquetFile, "read_row_groups", watched)
    some, whole = results.load(tmp_path, most_rows=41).layers, results.load(tmp_path).layers
    assert sorted(groups) == [0, 10, 20, 25, 30, 31]  # the profile's row at step 25 moved the later ones on by one
    kept = whole[(whole.stat == "stream_rms") | (whole.step % 10 == 0)]
    pd.testing.assert_frame_equal(some.reset_index(drop=True), kept.reset_index(drop=True))
