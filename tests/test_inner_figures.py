"""Figures of what happens inside a network: which rows they take, and their numbers against the tables."""

import numpy as np
import pandas as pd
import pytest
from conftest import drawn, tiny

import arms
import estimates
import fig_activation_heatmap
import fig_angular_distance
import fig_attention_logits
import fig_gradient_profile
import fig_qk_norm
import fig_spikes
import fig_update_ratio
import figure
import inside
from arms import DEPTH, PLACEMENT, Missing
from estimates import LR
from normlab.results import Results
from normlab.train import train


@pytest.fixture(scope="module")
def data(study) -> Results:
    return arms.load([study])


@pytest.fixture(scope="module")
def qk(tmp_path_factory) -> Results:
    folder = tmp_path_factory.mktemp("qk")
    for on in ("true", "false"):
        for lr in ("1e-3", "1e-1"):
            train(tiny(folder, f"model.qk_norm={on}", f"optim.lr={lr}", "study=qk", "probe.every=2", "eval.every=0"))
    return arms.load([folder / "qk"])


def with_spikes(data: Results, spikes: dict[str, list[dict]]) -> Results:
    runs = data.runs.copy()
    runs["spikes"] = pd.Series([spikes.get(r, []) for r in runs.run_id], runs.index, dtype=object)
    return Results(runs, data.steps, data.layers)


def test_poisson_interval_is_exact():
    none = estimates.poisson_rate(0, 2.0)
    assert none.value == none.low == 0
    assert np.exp(-2.0 * none.high) == pytest.approx(0.025)  # no event is this unlikely at the upper limit
    ten = estimates.poisson_rate(10, 1.0)
    assert (ten.low, ten.high) == pytest.approx((4.795389, 18.390356), abs=1e-5)  # Garwood's table
    assert np.isnan(estimates.poisson_rate(0, 0.0).value)


def test_spikes_are_counted_per_thousand_steps_of_all_runs_of_a_cell(data):
    cell = data.runs[(data.runs[DEPTH] == 3) & (data.runs[PLACEMENT] == "post")]
    tall = [{"start": s, "end": None, "height": h} for s, h in ((2, 0.5), (4, np.inf))]
    found = drawn(fig_spikes, with_spikes(data, {cell.run_id.iloc[0]: tall, cell.run_id.iloc[1]: tall[:1]}))
    table = found.table
    assert set(table.run_id) == set(data.runs.run_id)
    assert len(table) == len(data.runs) + 1
    mine = table[(table[DEPTH] == 3) & (table[PLACEMENT] == "post")]
    steps = cell.steps_done.sum()
    assert mine.rate.unique() == pytest.approx([3000 / steps])
    assert mine.rate_low.iloc[0] < 3000 / steps < mine.rate_high.iloc[0]
    assert (table[(table[DEPTH] != 3)].rate == 0).all()
    assert "pooled over seed, warmup_steps" in found.caption
    assert "like for like" not in found.caption
    uneven = with_spikes(data, {})
    uneven.runs.loc[uneven.runs.run_id == cell.run_id.iloc[0], "optim.warmup_steps"] = 5
    assert "like for like" in drawn(fig_spikes, uneven).caption


def test_records_without_spikes_are_missing_not_zero(data):
    with pytest.raises(Missing, match="older version"):
        fig_spikes.draw(Results(data.runs.drop(columns="spikes"), data.steps, data.layers))


def test_one_rate_is_shown_and_said(data):
    runs = data.runs.copy()
    runs[LR] = np.where(runs["optim.warmup_steps"] == 3, 0.5, 0.25)
    runs["optim.warmup_steps"] = 0
    runs["final_val_loss"] = np.where(runs[LR] == 0.5, 1.0, 2.0)
    shown, note = inside.one_setting(Results(runs, data.steps, data.layers))
    assert shown[LR].unique() == [0.5]
    assert "Of 2 learning rates, 0.5 is shown" in note
    runs["verdict"] = np.where(runs[LR] == 0.5, "diverged", "stable")  # counts with its loss at initialisation
    shown, note = inside.one_setting(Results(runs, data.steps, data.layers))
    assert shown[LR].unique() == [0.25]
    assert len(shown) == len(runs) / 2


def test_a_diverged_run_ends_at_its_last_finite_step():
    runs = pd.DataFrame({"run_id": ["a", "b"], "steps": [200, 200]})
    rows = [(r, s, lay, float(s)) for r, n in (("a", 200), ("b", 60)) for s in range(n) for lay in (0, 1)]
    rows = pd.DataFrame(rows, columns=["run_id", "step", "layer", "value"])
    rows.loc[(rows.run_id == "b") & (rows.step >= 50) & (rows.layer == 1), "value"] = np.nan
    found = inside.at_times(rows, runs).set_index(["run_id", "time", "layer"]).value
    assert found["a", "start", 0] == 0
    assert found["a", "10 %", 1] == 20
    assert found["a", "50 %", 0] == pytest.approx(100, abs=1)
    assert found["a", "end", 0] == 195  # median of 191..199
    assert found["b", "end", 1] == 45
    assert ("b", "50 %", 0) not in found.index


def test_gradient_profile_starts_with_the_gradients_of_step_0(data):
    table = drawn(fig_gradient_profile, data).table
    start = table[table.time == "start"]
    assert set(start[DEPTH]) == {2, 3, 4}
    raw = data.layers[(data.layers.stat == "weight_grad_norm") & (data.layers.step == 0) & data.layers.layer.notna()]
    squares = (raw.value**2).groupby([raw.run_id, raw.layer]).sum()
    for _, row in start.iterrows():
        assert row.value == pytest.approx(squares[row.run_id, row.layer] ** 0.5)
        assert row.position == pytest.approx(row.layer / (row[DEPTH] - 1))


def test_stream_is_taken_after_the_block_and_block_0_is_the_embedding(data):
    table = drawn(fig_activation_heatmap, data).table
    assert set(table[DEPTH]) == {4}
    assert sorted(table.block.unique()) == [0, 1, 2, 3, 4]
    raw = data.layers[data.layers.stat == "stream_rms"].set_index(["run_id", "step", "site", "layer"]).value
    for _, row in table[table.block > 0].iterrows():
        assert row.value == raw[row.run_id, row.step, "ffn", row.block - 1]
    embedded = data.layers[(data.layers.stat == "stream_rms") & (data.layers.site == "embed")]
    embedded = embedded.set_index(["run_id", "step"]).value
    first = table[table.block == 0]
    np.testing.assert_array_equal(first.value, [embedded[r, s] for r, s in zip(first.run_id, first.step, strict=True)])


def test_many_profiles_make_a_map_and_few_make_lines(data, qk):
    lines, maps = fig_activation_heatmap.draw(data), fig_activation_heatmap.draw(qk)
    assert lines.figure.axes[0].lines
    assert not maps.figure.axes[0].lines
    (mesh,) = maps.figure.axes[0].collections
    steps = sorted(maps.table.step.unique())
    assert len(steps) >= fig_activation_heatmap.LEAST
    assert mesh.get_array().shape == (3, len(steps))
    for found in (lines, maps):
        figure.plt.close(found.figure)


def test_columns_of_the_map_end_halfway_to_their_neighbours():
    assert fig_activation_heatmap.edges(np.array([0.0, 10, 40]), 60).tolist() == [0, 5, 25, 60]
    assert fig_activation_heatmap.edges(np.array([0.0]), 60).tolist() == [0, 60]


def test_update_ratio_is_the_median_over_weight_matrices(data):
    table = drawn(fig_update_ratio, data).table
    raw = data.layers[(data.layers.stat == "update_ratio") & data.layers.tensor.isin(["q", "k", "v", "out", "in"])]
    expected = raw.groupby(["run_id", "step", "layer"]).value.median()
    for _, row in table[table.step == 2].iterrows():
        assert row.value == expected[row.run_id, row.step, row.layer]


def test_angular_distance_at_the_start_and_the_end(data):
    table = drawn(fig_angular_distance, data).table
    raw = data.layers[data.layers.stat == "angular_distance"].set_index(["run_id", "step", "layer"]).value
    last = data.layers[data.layers.stat == "angular_distance"].step.max()
    assert dict(zip(table.time, table.step, strict=True)) == {"start": 0, "end": last}
    assert all(row.value == raw[row.run_id, row.step, row.layer] for _, row in table.iterrows())


def test_attention_logits_are_the_largest_of_any_layer(data):
    table = drawn(fig_attention_logits, data).table
    raw = data.layers[data.layers.stat == "attn_logit_max"]
    expected = raw.groupby(["run_id", "step"]).value.max()
    for _, row in table.iterrows():
        assert row.value == expected[row.run_id, row.step]
    once = Results(data.runs, data.steps, data.layers[data.layers.step == 0])
    with pytest.raises(Missing, match="two finite profiles"):
        fig_attention_logits.draw(once)


def test_qk_norm_is_compared_at_every_rate(qk, data):
    table = drawn(fig_qk_norm, qk).table
    assert sorted(zip(table[fig_qk_norm.KEY], table[LR], strict=True)) == [
        (False, 0.001), (False, 0.1), (True, 0.001), (True, 0.1)
    ]  # fmt: skip
    expected = qk.layers[qk.layers.stat == "attn_logit_max"].groupby("run_id").value.max()
    for _, row in table.iterrows():
        assert row.largest_logit == expected[row.run_id] == max(row.layer_0, row.layer_1)
    with pytest.raises(Missing, match=r"model\.qk_norm"):
        fig_qk_norm.draw(data)
    apart = qk.runs.copy()  # both values, but nowhere side by side
    apart[PLACEMENT] = np.where(apart[fig_qk_norm.KEY], "pre", "post")
    with pytest.raises(Missing, match="rest alike"):
        fig_qk_norm.draw(Results(apart, qk.steps, qk.layers))


def test_a_run_that_diverged_counts_with_its_initial_loss_and_is_marked(qk):
    runs = qk.runs.copy()
    victim = runs.index[0]
    runs.loc[victim, ["verdict", "final_val_loss"]] = ["diverged", np.nan]
    found = fig_qk_norm.draw(Results(runs, qk.steps, qk.layers))
    row = found.table[found.table.run_id == runs.run_id[victim]].iloc[0]
    assert row.loss == runs.init_val_loss[victim]
    assert any(line.get_marker() == "x" and len(line.get_xdata()) for line in found.figure.axes[2].lines)
    figure.plt.close(found.figure)


def test_many_placements_keep_their_panels_and_say_what_is_left_out(data):
    placements = ["pre", "post", "deepnorm", "sandwich", "sub_ln", "mix_ln", "lns", "keel", "parallel"]
    parts = [
        data.runs.assign(**{PLACEMENT: p}, run_id=data.runs.run_id + p)[data.runs[PLACEMENT] == "pre"]
        for p in placements
    ]
    layers = [data.layers.assign(run_id=data.layers.run_id + p) for p in placements]
    many = Results(pd.concat(parts, ignore_index=True), data.steps, pd.concat(layers, ignore_index=True))
    for module in (fig_gradient_profile, fig_angular_distance, fig_update_ratio, fig_activation_heatmap):
        found = drawn(module, many)
        assert found.table[PLACEMENT].nunique() == inside.MOST_PANELS
        assert "Not drawn: " in found.caption
