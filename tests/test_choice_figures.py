"""Figures that compare the values of one setting, gradients at initialisation, and the cost of a norm."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, TINY, drawn, tiny

import arms
import choices
import estimates
import fig_activation
import fig_batchnorm
import fig_init_gradients
import fig_norm_cost
import fig_norm_type
import fig_precision
import fig_sine
import figure
import report
from arms import DEPTH, PLACEMENT, Missing
from estimates import LR
from normlab.results import Results
from normlab.train import train

NORM, ACTIVATION, BATCH = "model.norm", "model.activation", "data.batch_size"
SHORT = ("probe.batches=0", "eval.every=0")


def trained(folder: Path, study: str, **grid: tuple) -> Results:
    """A tiny study of every combination; a key's double underscore stands for its dot."""
    keys = [key.replace("__", ".") for key in grid]
    for values in product(*grid.values()):
        train(tiny(folder, *SHORT, f"study={study}", *(f"{k}={v}" for k, v in zip(keys, values, strict=True))))
    return arms.load([folder / study])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def norms(folder) -> Results:
    grid = {"model__norm": ("layernorm", "rmsnorm"), "model__placement": ("pre", "post"), "optim__lr": (1e-3, 1e-2)}
    return trained(folder, "norm_type", **grid, seed=(0, 1, 2))


@pytest.fixture(scope="module")
def activations(folder) -> Results:
    return trained(folder, "activation", model__activation=("gelu", "swiglu"), optim__lr=(1e-3, 1e-2), seed=(0, 1, 2))


@pytest.fixture(scope="module")
def precisions(folder) -> Results:
    return trained(
        folder, "precision", precision=("fp32", "bf16"), model__norm=("layernorm", "rmsnorm"), seed=(0, 1, 2)
    )


@pytest.fixture(scope="module")
def batches(folder) -> Results:
    grid = {"model__norm": ("layernorm", "batchnorm"), "data__batch_size": (1, 4), "steps": (20,)}
    return trained(folder, "batchnorm", **grid, seed=(0, 1, 2))


@pytest.fixture(scope="module")
def sine(norms) -> Results:
    """The losses of other runs under the name of the exercise."""
    kept = norms.runs[norms.runs[NORM] == "layernorm"]
    return norms._replace(runs=kept.assign(**{"data.name": "sine"}))


FEEDS = {
    fig_norm_type: "norms",
    fig_activation: "activations",
    fig_precision: "precisions",
    fig_batchnorm: "batches",
    fig_sine: "sine",
}


def diverged(data: Results, run_id: str) -> Results:
    runs, steps = data.runs.copy(), data.steps.copy()
    runs.loc[runs.run_id == run_id, ["verdict", "final_val_loss"]] = ["diverged", np.nan]
    steps.loc[(steps.run_id == run_id) & (steps.step >= 3), "loss"] = np.nan
    return Results(runs, steps, data.layers)


def texts(found: figure.Drawn) -> list[str]:
    return [text.get_text() for panel in found.figure.axes for text in panel.texts]


@pytest.mark.parametrize("module", FEEDS, ids=lambda m: m.STEM)
def test_a_figure_is_written_with_a_row_per_run_and_the_same_bytes_twice(module, request, tmp_path):
    data = request.getfixturevalue(FEEDS[module])
    for name in ("one", "two"):
        figure.save(module.draw(data), module.STEM, tmp_path / name)
    for suffix in ("png", "pdf", "csv"):
        one, two = (tmp_path / name / f"{module.STEM}.{suffix}" for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
    table = pd.read_csv(tmp_path / "one" / f"{module.STEM}.csv")
    assert len(table) > 3
    assert set(table.run_id) <= set(data.runs.run_id)
    assert table.study.unique().tolist() == data.runs.study.unique().tolist()


@pytest.mark.parametrize("module", FEEDS, ids=lambda m: m.STEM)
def test_a_diverged_seed_is_marked_and_does_not_break_the_figure(module, request):
    data = request.getfixturevalue(FEEDS[module])
    data = data._replace(runs=data.runs[data.runs[LR] == data.runs[LR].max()])
    lowest = data.runs.sort_values("seed").iloc[0]
    found = module.draw(diverged(data, lowest.run_id))
    crosses = [
        line
        for panel in found.figure.axes
        for line in panel.lines
        if line.get_marker() == "x" and len(line.get_xdata())
    ]
    figure.plt.close(found.figure)
    assert crosses
    assert (found.table[found.table.run_id == lowest.run_id].verdict == "diverged").all()


@pytest.mark.parametrize("module", FEEDS, ids=lambda m: m.STEM)
def test_runs_that_do_not_differ_are_refused(module, study):
    with pytest.raises(Missing, match="needs training runs with"):
        module.draw(arms.load([study]))


def cell(losses: dict[tuple[str, float], list[float]]) -> pd.DataFrame:
    rows = [
        {"arm": value, LR: lr, "seed": seed, "final_val_loss": loss, "init_val_loss": 4.0, "verdict": "stable"}
        for (value, lr), seeds in losses.items()
        for seed, loss in enumerate(seeds)
    ]
    table = pd.DataFrame(rows)
    return table.assign(loss=estimates.capped_loss(table))


def test_the_best_rate_is_each_value_s_own_and_the_same_one_is_best_for_most():
    runs = cell({
        ("a", 0.1): [2.0, 2.2], ("a", 1.0): [2.3, 2.4],
        ("b", 0.1): [3.0, 3.0], ("b", 1.0): [2.0, 2.0],
        ("c", 0.1): [2.5, 9.0], ("c", 1.0): [3.0, 3.0],  # 9 is capped at 4: a mean of 3.25
    })  # fmt: skip
    found = choices.rates(runs, "arm")
    best = found[found["at"] == choices.BEST].groupby("arm")[LR].unique()
    assert {arm: list(rates) for arm, rates in best.items()} == {"a": [0.1], "b": [1.0], "c": [1.0]}
    assert found[found["at"] == choices.SAME][LR].unique().tolist() == [1.0]
    assert choices.rates(runs[runs[LR] == 1.0], "arm")["at"].unique().tolist() == [choices.SAME]


def test_a_rate_that_not_all_were_run_at_is_not_the_same_one():
    runs = cell({("a", 0.1): [2.0], ("a", 1.0): [3.0], ("b", 1.0): [2.0], ("c", 0.1): [2.0], ("c", 1.0): [3.0]})
    found = choices.rates(runs, "arm")
    assert found[found["at"] == choices.SAME][LR].unique().tolist() == [1.0]


def test_differences_are_of_the_same_seed():
    runs = cell({("ref", 1.0): [2.0, 3.0, 2.5], ("new", 1.0): [2.1, 3.3, 2.7], ("few", 1.0): [1.5]})
    found = choices.differences(runs, "arm", "ref").set_index(["arm", "seed"])
    np.testing.assert_allclose(found.loc["new"].difference, [0.1, 0.3, 0.2])
    assert found.loc["new", "difference_mean"].iloc[0] == pytest.approx(0.2)
    assert 0.1 <= found.loc["new", "difference_low"].iloc[0] < 0.2 < found.loc["new", "difference_high"].iloc[0] <= 0.3
    assert found.loc[("few", 0), ["difference", "n", "difference_n"]].tolist() == [-0.5, 1, 1]
    assert found.loc["ref"].difference.isna().all()


def test_numbers_of_the_norm_figure(norms):
    table = drawn(fig_norm_type, norms).table
    same = table[(table["at"] == choices.SAME) & (table[PLACEMENT] == "pre")]
    losses = norms.runs.set_index([PLACEMENT, NORM, LR, "seed"]).final_val_loss
    rate = same[LR].unique()
    assert len(rate) == 1
    for seed in (0, 1, 2):
        row = same[(same[NORM] == "rmsnorm") & (same.seed == seed)].iloc[0]
        one, two = (losses["pre", norm, rate[0], seed] for norm in ("layernorm", "rmsnorm"))
        assert row.difference == pytest.approx(two - one)
    assert (table.difference_n[table[NORM] == "rmsnorm"] == 3).all()


def test_a_diverged_seed_counts_with_its_initial_loss_and_is_counted(norms):
    one_rate = norms._replace(runs=norms.runs[norms.runs[LR] == 1e-2])
    runs = one_rate.runs
    victim = runs[(runs[NORM] == "rmsnorm") & (runs[PLACEMENT] == "post") & (runs.seed == 1)].iloc[0]
    found = drawn(fig_norm_type, diverged(one_rate, victim.run_id))
    row = found.table[found.table.run_id == victim.run_id].iloc[0]
    assert (row.loss, row.n, row.diverged) == (victim.init_val_loss, 3, 1)
    assert texts(found).count("1/3 diverged") == 1


def test_the_setting_in_which_the_key_differs_is_found_among_other_studies(norms, study):
    data = arms.load([study, norms.runs.path.iloc[0].rsplit("/", 1)[0]])
    alone, mixed = (drawn(fig_norm_type, d) for d in (norms, data))
    assert sorted(alone.table.run_id) == sorted(mixed.table.run_id)


def test_parameter_counts_stand_in_the_caption(activations):
    caption = drawn(fig_activation, activations).caption
    for activation, count in activations.runs.groupby(ACTIVATION).parameters.first().items():
        assert f"{activation} {count:,}" in caption


def test_share_of_stable_runs_and_skipped_steps(precisions):
    runs = precisions.runs.copy()
    bf16 = (runs.precision == "bf16") & (runs[NORM] == "rmsnorm")
    runs["verdict"] = "stable"
    runs.loc[bf16 & (runs.seed == 0), "verdict"] = "spiked"
    table = drawn(fig_precision, precisions._replace(runs=runs)).table
    row = table[(table.precision == "bf16") & (table[NORM] == "rmsnorm")].iloc[0]
    assert (row.stable, row.stable_low, row.stable_high) == pytest.approx((2 / 3, 0.0943, 0.9916), abs=1e-4)
    assert "skipped_steps" not in table
    counted = drawn(fig_precision, precisions._replace(runs=runs.assign(skipped_steps=runs.seed)))
    assert counted.table.skipped_steps.tolist() == counted.table.seed.tolist()
    assert "skipped steps" in [panel.get_xlabel() for panel in counted.figure.axes]


def test_the_gap_is_evaluation_less_the_last_tenth_of_training(batches):
    table, _ = fig_batchnorm.gaps(batches)
    assert len(table) == 2 * 2 * 3
    losses = batches.steps.set_index(["run_id", "step"]).loss
    for _, row in table.iterrows():
        train = (losses[row.run_id, 18] + losses[row.run_id, 19]) / 2
        assert row.gap == pytest.approx(min(row.final_val_loss, row.init_val_loss) - min(train, row.init_val_loss))
    broken, _ = fig_batchnorm.gaps(diverged(batches, table.run_id.iloc[0]))
    row = broken[broken.run_id == table.run_id.iloc[0]].iloc[0]
    assert (row.train, row.eval, row.gap) == (row.init_val_loss, row.init_val_loss, 0)


def test_a_sine_run_that_diverged_keeps_its_place_in_the_band(sine):
    victim = sine.runs.iloc[0]
    runs, steps, _ = fig_sine.selected(diverged(sine, victim.run_id))
    assert len(steps) == 6 * len(runs)
    mine = steps[steps.run_id == victim.run_id].sort_values("step")
    assert mine.shown.tolist()[3:] == [victim.init_val_loss] * 3
    assert mine.loss.isna().tolist() == [False] * 3 + [True] * 3
    with pytest.raises(Missing, match="data=sine"):
        fig_sine.draw(sine._replace(runs=sine.runs.assign(**{"data.name": "markov"})))


def test_the_growth_exponent_is_that_of_a_power_law_over_seeds():
    rows = pd.DataFrame(
        {PLACEMENT: "pre", "quantity": "last", NORM: norm, ACTIVATION: "gelu", DEPTH: depth, "seed": seed,
         "value": 3.0 * depth ** (slope + 0.01 * seed)}
        for norm, slope in (("layernorm", -0.5), ("rmsnorm", -0.3)) for depth in (6, 12, 24) for seed in (0, 1, 2)
    )  # fmt: skip
    (fit,) = fig_init_gradients.growth(rows)
    assert fit.exponent == pytest.approx(-0.39)
    assert (fit.least, fit.most) == pytest.approx((-0.49, -0.29))
    assert -0.4001 < fit.low < fit.exponent < fit.high < -0.3799
    assert (fit.n, fit.settings) == (3, 2)
    assert not fig_init_gradients.growth(rows.assign(value=0.0))


def test_gradients_at_initialisation_are_those_of_the_profiles(study):
    data = arms.load([study])
    rows, _ = fig_init_gradients.by_run(data)
    assert rows.run_id.nunique() == 3 * 2 * 2  # both warm-ups start alike
    layers = data.layers[(data.layers.step == 0) & (data.layers.stat == "expected_weight_grad_norm")]
    for (run_id, quantity), mine in rows.groupby(["run_id", "quantity"]):
        here = layers[layers.run_id == run_id]
        out = here[(here.site == "ffn") & (here.tensor == "out")].sort_values("layer").value
        expected = {"all": np.sqrt((here.value**2).sum()), "first": out.iloc[0], "last": out.iloc[-1]}
        assert mine.value.item() == pytest.approx(expected[quantity])


def test_models_without_a_gradient_are_named(study):
    data = arms.load([study])
    post = data.runs.run_id[data.runs[PLACEMENT] == "post"]
    zero = data.layers.assign(value=data.layers.value.where(~data.layers.run_id.isin(post), 0.0))
    found = drawn(fig_init_gradients, data._replace(layers=zero))
    assert "6 models have one (post)" in found.caption
    assert set(found.table[PLACEMENT]) == {"pre", "post"}


COST = [setting for setting in TINY if not setting.startswith(("steps", "probe"))] + ["probe.batches=4", "threads=1"]


def door(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "experiments/norm_cost.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def timed(folder) -> Path:
    done = door(*COST, "model.norm=layernorm,rmsnorm,none", f"runs_dir={folder}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"3 runs: {folder / 'norm_cost'}"
    return folder / "norm_cost"


def test_every_norm_is_timed_into_its_run(timed):
    data = arms.load([timed])
    assert set(data.runs[NORM]) == {"layernorm", "rmsnorm", "none"}
    assert (data.runs.status == "finished").all()
    assert (data.layers.groupby(["run_id", "stat"], observed=True).size() == 4).all()
    assert (data.layers.value > 0).all()
    medians = data.layers.groupby(["run_id", "stat"], observed=True).value.median().unstack()
    for _, run in data.runs.iterrows():
        for stat in fig_norm_cost.ALONE:
            assert run[stat] == pytest.approx(medians.loc[run.run_id, stat])


def test_norms_that_are_timed_are_not_timed_again_and_are_together(timed, folder):
    def stamps() -> list[str]:
        return [path.read_text() for path in sorted(timed.glob("*/run.json"))]

    before = stamps()
    assert door(*COST, "model.norm=layernorm,rmsnorm,none", f"runs_dir={folder}").returncode == 0
    assert stamps() == before
    record = next(timed.glob("*/run.json"))
    record.write_text(json.dumps(json.loads(record.read_text()) | {"status": "failed"}))
    assert door(*COST, "model.norm=layernorm,rmsnorm,none", f"runs_dir={folder}").returncode == 0
    assert not set(stamps()) & set(before)


def test_the_figure_of_costs_has_ratios_within_a_repeat_and_of_steps(timed, norms, folder, tmp_path):
    alone = drawn(fig_norm_cost, arms.load([timed]))
    both = drawn(fig_norm_cost, arms.load([timed, folder / "norm_type"]))
    assert len(alone.figure.axes) + 1 == len(both.figure.axes) == 3
    seconds = alone.table[alone.table.stat == "norm_forward_seconds"].set_index([NORM, "repeat"])
    for repeat in range(4):
        ratio = seconds.value["rmsnorm", repeat] / seconds.value["layernorm", repeat]
        assert seconds.ratio["rmsnorm", repeat] == pytest.approx(ratio)
    steps = both.table[(both.table.stat == fig_norm_cost.STEP) & (both.table[NORM] == "rmsnorm")]
    assert len(steps) == steps.ratio_n.iloc[0] == 2 * 2 * 3
    medians = norms.steps.groupby("run_id").seconds.median()
    keys = [PLACEMENT, LR, "seed"]
    wide = norms.runs.assign(s=norms.runs.run_id.map(medians)).pivot_table(index=keys, columns=NORM, values="s")
    assert steps.ratio_median.iloc[0] == pytest.approx((wide.rmsnorm / wide.layernorm).median())


def test_a_report_of_costs_alone_is_whole(timed, tmp_path):
    page = report.write(arms.load([timed]), "cost", tmp_path)
    assert 'id="norm_cost"' in page
    assert "could not be drawn" not in page


@pytest.mark.parametrize(("arguments", "said"), [
    (["model.norm=layrnorm"], "did you mean layernorm?"),
    (["steps=3"], "steps: norms are timed without training"),
    (["probe.batches=0"], "accepted: 1 or more"),
    (["threads=1,2"], "accepted: one value"),
    (["data=text"], "accepted: markov"),
])  # fmt: skip
def test_a_mistake_is_one_line(arguments, said, tmp_path):
    done = door(*arguments, f"runs_dir={tmp_path}")
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_median_has_an_interval_over_resamples():
    found = estimates.median([1.0, 2.0, 3.0, 4.0, 100.0])
    assert found.value == 3.0
    assert 1.0 <= found.low < 3.0 < found.high <= 100.0
    assert np.isnan(estimates.median([1.0, 2.0]).low)
