"""Figures and report from a tiny real study."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, compose, tiny

import arms
import fig_gradient_decay
import fig_gradient_heatmap
import fig_hidden_growth
import fig_loss_curves
import fig_xiong_depth
import fig_xiong_gradients
import figure
import findings
import report
from arms import DEPTH, PLACEMENT, WARMUP, Missing
from normlab.residual import PLACEMENTS
from normlab.results import Results
from normlab.train import train

# figures that these runs cannot feed: the tests of their own kinds have them
OTHERS = {"jacobian", "translation_warmup", "warmup", "lr_sensitivity", "residual_ablation", "final_norm", "survival"}
OTHERS |= {"norm_type", "activation", "precision", "batchnorm", "sine", "norm_cost", "lr_frontier", "qk_norm"}
OF_TRAINING = [module for module in report.FIGURES if module.STEM not in OTHERS]


@pytest.fixture(scope="module")
def data(study) -> Results:
    return arms.load([study])


@pytest.mark.parametrize("module", OF_TRAINING, ids=lambda m: m.STEM)
def test_a_figure_is_written_with_its_data_and_the_same_bytes_twice(module, data, tmp_path):
    for folder in ("one", "two"):
        figure.save(module.draw(data), module.STEM, tmp_path / folder)
    for suffix in ("png", "pdf", "csv"):
        one, two = (tmp_path / f / f"{module.STEM}.{suffix}" for f in ("one", "two"))
        assert one.stat().st_size > 200
        assert one.read_bytes() == two.read_bytes()
    table = pd.read_csv(tmp_path / "one" / f"{module.STEM}.csv")
    assert len(table) > 3
    assert {"study", "run_id"} <= set(table.columns)


@pytest.mark.parametrize("module", report.FIGURES, ids=lambda m: m.STEM)
def test_a_figure_without_its_data_says_what_is_missing(module, data):
    with pytest.raises(Missing):
        module.draw(Results(data.runs.iloc[:0], data.steps.iloc[:0], data.layers.iloc[:0]))


def test_every_figure_script_is_part_of_the_report():
    scripts = {p.stem for p in (ROOT / "analysis").glob("fig_*.py")}
    assert scripts == {m.__name__ for m in report.FIGURES}
    assert all(m.__name__ == f"fig_{m.STEM}" for m in report.FIGURES)


def test_no_analysis_imports_the_training_loop():
    for path in (ROOT / "analysis").glob("*.py"):
        assert "normlab.train" not in path.read_text()
        assert "import train" not in path.read_text()


def test_a_script_runs_on_its_own(study, tmp_path):
    command = [sys.executable, str(ROOT / "analysis/fig_loss_curves.py"), str(study), "--out", str(tmp_path / "f")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "f" / "loss_curves.png")
    gone = subprocess.run([*command[:2], str(tmp_path / "none")], capture_output=True, text=True, check=False)
    assert gone.returncode == 2
    assert gone.stderr.startswith("loss_curves: ")
    assert gone.stderr.count("\n") == 1


def test_fitted_slope_is_the_exponent_of_a_power_law():
    rng = np.random.default_rng(0)
    rows = pd.DataFrame(
        [{"setting": "s", PLACEMENT: "pre", DEPTH: d, "value": 3 * d**-0.5} for d in (6, 12, 24, 48, 96)]
    )
    (exact,) = fig_xiong_depth.slopes(rows)
    assert exact.slope == pytest.approx(-0.5, abs=1e-12)
    assert exact.theory == -0.5
    noisy = pd.concat([rows.assign(value=rows.value * np.exp(0.1 * rng.standard_normal(5))) for _ in range(4)])
    (fit,) = fig_xiong_depth.slopes(noisy)
    assert fit.low < -0.5 < fit.high
    assert fit.n == 20


def test_layer_norm_of_the_heat_map_adds_up_to_the_global_one(data):
    rows = fig_gradient_heatmap.per_layer(data.layers)
    outside = data.layers[(data.layers.stat == "weight_grad_norm") & data.layers.layer.isna()]
    squares = pd.concat([rows, outside[["run_id", "step", "value"]]]).assign(value=lambda t: t.value**2)
    total = squares.groupby(["run_id", "step"]).value.sum() ** 0.5
    logged = data.steps.set_index(["run_id", "step"]).grad_norm.sort_index()
    np.testing.assert_allclose(total.sort_index(), logged, rtol=1e-9)


def test_hidden_growth_uses_the_lemma_s_quantity(data):
    rows = fig_hidden_growth.measured(data)
    post, pre = rows[rows[PLACEMENT] == "post"], rows[rows[PLACEMENT] == "pre"]
    assert set(post.stat) == {"norm_input_rms"}
    assert set(pre.stat) == {"stream_rms"}
    np.testing.assert_allclose(post.lower, post.upper, rtol=1e-4)
    assert (pre.lower < pre.upper).all()


def diverged(data: Results, run_id: str) -> Results:
    runs = data.runs.copy()
    mine = runs.run_id == run_id
    runs.loc[mine, ["verdict", "final_val_loss", "first_bad_step"]] = ["diverged", np.nan, 4.0]
    steps = data.steps.copy()
    steps.loc[(steps.run_id == run_id) & (steps.step >= 4), "loss"] = np.nan
    return Results(runs, steps, data.layers)


def test_a_diverged_seed_is_counted_beside_the_mean(data):
    whole = findings.summary(data.runs)
    assert len(whole) == 3 * 2 * 2
    assert (whole.runs == 2).all()
    assert whole.runs.sum() == len(data.runs)
    victim = data.runs.iloc[0]
    table = findings.summary(diverged(data, victim.run_id).runs)
    row = table[table.diverged == "1/2"]
    assert len(row) == 1
    assert "1 diverged" in row.verdict.iloc[0]
    other = data.runs[(data.runs.run_id != victim.run_id)]
    other = other[
        (other[[DEPTH, PLACEMENT, "optim.warmup_steps"]] == victim[[DEPTH, PLACEMENT, "optim.warmup_steps"]]).all(
            axis=1
        )
    ]
    capped = (other.final_val_loss.iloc[0] + victim.init_val_loss) / 2
    assert row["final val loss"].iloc[0] == f"{capped:.3f}"


def test_an_arm_of_which_all_diverged_is_shown(data):
    broken = data
    for run_id in data.runs[(data.runs[DEPTH] == 2) & (data.runs[PLACEMENT] == "post")].run_id:
        broken = diverged(broken, run_id)
    table = findings.summary(broken.runs)
    rows = table[(table.depth == 2) & (table.placement == "post")]
    assert rows["final val loss"].tolist() == ["diverged"] * 2
    assert rows.diverged.tolist() == ["2/2"] * 2
    figure.plt.close(fig_loss_curves.draw(broken).figure)
    assert any("none finite" in s for s in findings.sentences(broken))


def test_report_is_one_self_contained_page_that_says_what_it_left_out(study, tmp_path, capsys, monkeypatch):
    runs = tmp_path / "tiny"
    shutil.copytree(study, runs)
    broken = sorted(runs.glob("*/run.json"))[0]
    broken.write_text(json.dumps(json.loads(broken.read_text()) | {"status": "failed", "reason": "OSError: <gone>"}))
    arguments = [str(runs), "--figures", str(tmp_path / "f"), "--out", str(tmp_path / "r")]
    monkeypatch.setattr(sys, "argv", ["report.py", *arguments])
    assert report.main() == 0
    page = (tmp_path / "r/tiny/index.html").read_text()
    assert page.count("data:image/png;base64,") == len(OF_TRAINING)
    assert 'src="http' not in page
    assert "is failed: OSError: &lt;gone&gt;" in page
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == f"report: {tmp_path / 'r/tiny/index.html'}"
    assert any("placement" in line and "verdict" in line for line in out)


def test_report_of_nothing_is_refused(tmp_path, capsys, monkeypatch):
    for target in (tmp_path, Path("/no/such/folder")):
        monkeypatch.setattr(sys, "argv", ["report.py", str(target)])
        assert report.main() == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_null_setting_keeps_its_own_arm(data):
    """pandas drops missing keys from groups by default: no clipping would vanish from the table."""
    runs = data.runs.copy()
    runs["optim.clip"] = np.where(runs.seed == 0, 1.0, np.nan)
    table = findings.summary(runs)
    assert table.runs.sum() == len(runs)
    assert len(table) == 3 * 2 * 2 * 2


def raw(data: Results, stat: str, tensor: str | None) -> pd.DataFrame:
    """FFN rows of one statistic at step 0, by run and layer, straight from the layer table."""
    rows = data.layers[(data.layers.step == 0) & (data.layers.site == "ffn") & (data.layers.stat == stat)]
    rows = rows[rows.tensor.isna() if tensor is None else rows.tensor == tensor]
    return rows.set_index(["run_id", "layer"]).value


def test_numbers_of_the_depth_figure(data):
    drawn = fig_xiong_depth.draw(data)
    figure.plt.close(drawn.figure)
    expected = raw(data, "expected_weight_grad_norm", "out")
    for _, row in drawn.table.iterrows():
        assert row.value == expected[row.run_id, row[DEPTH] - 1]
    assert set(drawn.table[PLACEMENT]) == {"pre", "post"}
    assert dict(zip(drawn.table[PLACEMENT], drawn.table.theory, strict=True)) == {"pre": -0.5, "post": 0.0}
    # both warm-ups of a seed start from the same weights: one initialisation is one point
    assert len(drawn.table) == 3 * 2 * 2
    assert (drawn.table.n == 6).all()


def test_numbers_of_the_growth_figure(data):
    drawn = fig_hidden_growth.draw(data)
    figure.plt.close(drawn.figure)
    for _, row in drawn.table.iterrows():
        post = row[PLACEMENT] == "post"
        rms = raw(data, "norm_input_rms", "norm") if post else raw(data, "stream_rms", None)
        assert row.mean_square == pytest.approx(rms[row.run_id, row.block - 1] ** 2)


def test_numbers_of_the_gradients_figure(data):
    drawn = fig_xiong_gradients.draw(data)
    figure.plt.close(drawn.figure)
    table = drawn.table
    assert set(zip(table[PLACEMENT], table.step, strict=True)) == {("pre", 0), ("post", 0), ("post", 3)}
    for tensor in ("in", "out"):
        expected = raw(data, "expected_weight_grad_norm", tensor)
        for _, row in table[(table.tensor == tensor) & (table.step == 0)].iterrows():
            assert row.value == expected[row.run_id, row.layer]


def test_effect_of_warm_up_is_with_minus_without(data):
    runs = data.runs[(data.runs[DEPTH] == 2) & (data.runs[PLACEMENT] == "pre")]
    by = runs.groupby(WARMUP).final_val_loss.mean()
    (told,) = [s for s in findings.sentences(data) if s.startswith("Warm-up") and "pre-norm at depth 2" in s]
    assert f"by {by[3] - by[0]:+.3f} (paired, n = 2)" in told


def test_interval_of_a_mean_is_student_s(data):
    runs = data.runs[data.runs[WARMUP] == 0]
    three = pd.concat([runs, runs[runs.seed == 0].assign(seed=2, run_id=lambda t: t.run_id + "x")])
    row = findings.summary(three).iloc[0]
    losses = three[(three[DEPTH] == row.depth) & (three[PLACEMENT] == row.placement)].final_val_loss
    reach = 4.302653 * losses.std(ddof=1) / 3**0.5  # t quantile of 0.975 at 2 degrees of freedom
    assert row["final val loss"] == f"{losses.mean():.3f} ± {reach:.3f}"


def test_the_same_run_in_two_studies_counts_once(study, tmp_path, data):
    shutil.copytree(study, tmp_path / "again")
    for record in (tmp_path / "again").glob("*/run.json"):
        record.write_text(json.dumps(json.loads(record.read_text()) | {"study": "again"}))
    both = arms.load([study, tmp_path / "again"])
    assert len(both.runs) == len(data.runs)
    assert len(both.steps) == len(data.steps)
    assert len(both.layers) == len(data.layers)
    assert sum("counted once" in s for s in both.runs.attrs["skipped"]) == len(data.runs)
    assert findings.summary(both.runs).equals(findings.summary(data.runs))


def test_settings_are_told_apart_and_not_pooled(data):
    runs = data.runs.copy()
    runs.loc[runs.seed == 1, "model.norm"] = "rmsnorm"
    settings = arms.profiled(Results(runs, data.steps, data.layers)).setting.unique()
    assert sorted(s.split(", ")[-1] for s in settings) == ["layernorm", "rmsnorm"]
    runs["data_sha256"] = np.where(runs.seed == 0, "a" * 64, "b" * 64)
    runs["data"] = "text " + runs.data_sha256.str[:6]
    assert {"data", "model.norm"} == {k for k in arms.varying(runs) if k not in {PLACEMENT, WARMUP}}


@pytest.mark.parametrize(("key", "value"), [("model.norm", "none"), ("model.norm", "dyt"), ("model.dropout", 0.1)])
def test_bounds_are_drawn_only_where_the_theory_holds(data, key, value):
    assert fig_hidden_growth.measured(data).lower.notna().all()
    other = Results(data.runs.assign(**{key: value}), data.steps, data.layers)
    assert fig_hidden_growth.measured(other).lower.isna().all()
    assert fig_xiong_depth.last_ffn(other).expected.isna().all()


def test_bounds_start_from_the_embeddings(data):
    """0.5 more of sinusoids; without the factor sqrt(width) 1 / width of it."""
    pre = data.runs[PLACEMENT] == "pre"
    lowest = {}
    for key, value in (("model.position", "none"), ("model.position", "sinusoidal"), ("model.scale_embedding", False)):
        runs = data.runs[pre].assign(**{"model.position": "none", key: value})
        rows = fig_hidden_growth.measured(Results(runs, data.steps, data.layers))
        lowest[key, value] = rows.lower[rows.block == 1].iloc[0]
    scaled, sines, small = lowest.values()
    assert sines - scaled == pytest.approx(0.5, rel=1e-4)
    assert scaled - small == pytest.approx(1 - 1 / 16, rel=1e-2)


def test_theory_of_a_run_of_another_version_is_left_out(data):
    """A setting that this version does not know, or lacks: nothing is guessed."""
    other = Results(data.runs.assign(**{"model.unheard": 1}), data.steps, data.layers)
    assert fig_hidden_growth.measured(other).lower.isna().all()


def test_the_fitted_decay_is_the_factor_of_a_geometric_gradient(data):
    """Two seeds of known factors: their geometric mean, Student's interval on the logs."""
    rows = fig_gradient_decay.by_block(data)
    rows = rows[rows.stat == "stream_grad_norm"]
    factor = rows.seed.map({0: 0.8, 1: 0.9})
    (fit,) = fig_gradient_decay.factors(data, rows.assign(value=5 * factor ** (rows[DEPTH] - rows.block)))
    assert fit.n == 2
    assert fit.factor == pytest.approx((0.8 * 0.9) ** 0.5)
    reach = 12.7062047 * abs(np.log(0.9 / 0.8)) / 2  # t quantile of 0.975 at 1 degree of freedom, times the error
    assert np.log(fit.high / fit.factor) == pytest.approx(reach)
    assert fit.ratio == pytest.approx(fit.factor**3)
    (alone,) = fig_gradient_decay.factors(data, rows[rows.seed == 0].assign(value=0.8 ** (4 - rows.block)))
    assert alone.factor == pytest.approx(0.8)
    assert np.isnan(alone.low)
    assert sum("Appendix F" in s for s in findings.sentences(data)) == 2


def test_measured_and_derived_increments_per_block(data):
    fits = fig_hidden_growth.fits(fig_hidden_growth.measured(data))
    by = {fit.placement: fit for fit in fits}
    assert by["post"].lower == pytest.approx(0.0, abs=1e-6)
    assert 0 < by["pre"].lower < by["pre"].upper
    assert fig_hidden_growth.told(by["post"]).endswith("(theory +0.000)")


def test_keys_that_end_alike_keep_their_whole_name(data):
    runs = data.runs.assign(**{"eval.every": data.runs.seed, "probe.every": data.runs.seed + 1})
    assert {"eval.every", "probe.every"} <= set(findings.summary(runs).columns)


def test_divergence_shows_in_the_curves_and_their_numbers(data):
    victim = data.runs[(data.runs[DEPTH] == 4)].iloc[0]
    drawn = fig_loss_curves.draw(diverged(data, victim.run_id))
    mine = drawn.table[drawn.table.run_id == victim.run_id]
    assert mine.loss.isna().tolist() == [False] * 4 + [True] * 2
    (panel,) = [p for p in drawn.figure.axes if p.get_title() == "depth 4"]
    (cross,) = [line for line in panel.lines if line.get_marker() == "x"]
    assert cross.get_xdata()[0] == 3
    assert panel.get_ylim()[0] <= cross.get_ydata()[0] <= panel.get_ylim()[1]
    figure.plt.close(drawn.figure)


@pytest.mark.parametrize("broken", ["draw", "save"])
def test_a_figure_that_breaks_is_named_and_the_page_is_whole(data, tmp_path, monkeypatch, broken):
    save = figure.save
    if broken == "draw":
        monkeypatch.setattr(fig_loss_curves, "draw", lambda _: 1 / 0)
    else:
        monkeypatch.setattr(figure, "save", lambda d, stem, f: 1 / 0 if stem == "loss_curves" else save(d, stem, f))
    page = report.write(data, "x", tmp_path)
    assert "loss_curves: could not be drawn: ZeroDivisionError" in page
    assert page.count("data:image/png;base64,") == len(OF_TRAINING) - 1


def test_a_study_of_failures_only_makes_a_page(data, tmp_path):
    runs = data.runs.assign(status="failed", reason="OSError: gone")
    runs.attrs["skipped"] = []
    page = report.write(Results(runs, data.steps, data.layers), "x", tmp_path)
    assert page.count("is failed: OSError: gone") == len(runs)


def test_list_settings_and_missing_evaluations_are_no_obstacle(data):
    runs = data.runs.copy()
    runs["optim.betas"] = [[0.9, 0.95] if s else [0.9, 0.999] for s in runs.seed]
    bare = Results(runs, data.steps.assign(val_loss=np.nan), data.layers)
    assert findings.sentences(bare)
    for module in OF_TRAINING:
        figure.plt.close(module.draw(bare).figure)


def test_theorem_1_in_its_own_setting(tmp_path):
    """Depths 6, 24 and 96 in the setting of Xiong et al. 2020, section 3.3: slopes 0 (post) and -1/2 (pre)."""
    for depth in (6, 24, 96):
        for placement in ("pre", "post"):
            settings = ["experiment=xiong_theory", f"model.depth={depth}", f"model.placement={placement}"]
            train(compose(*settings, "steps=0", "log=disabled", "study=theory", f"runs_dir={tmp_path}"))
    theory = arms.load([tmp_path / "theory"])
    fits = {f.placement: f for f in fig_xiong_depth.slopes(fig_xiong_depth.last_ffn(theory))}
    assert fits["pre"].slope == pytest.approx(-0.5, abs=0.1)
    assert fits["post"].slope == pytest.approx(0.0, abs=0.1)


def test_every_architecture_and_placement_has_figures(tmp_path):
    """Of an encoder-decoder the decoder's layers; a colour of its own for every placement."""
    assert len({figure.colour(p) for p in PLACEMENTS}) == len(PLACEMENTS)
    for arch in ("encoder", "encoder_decoder"):
        for placement in ("parallel", "resi_dual"):
            settings = [f"model.arch={arch}", "model.encoder_depth=3"][: 1 + (arch == "encoder_decoder")]
            train(tiny(tmp_path, *settings, f"model.placement={placement}", "study=mixed", "optim.warmup_steps=2"))
    data = arms.load([tmp_path / "mixed"])
    assert not data.layers.duplicated(["run_id", "step", "layer", "site", "tensor", "stat"]).any()
    assert len([told for told in data.runs.attrs["skipped"] if "decoder's layers" in told]) == 2
    page = report.write(data, "mixed", tmp_path / "figures")
    assert "parallel" in page
    assert "resi_dual" in page
    assert "could not be drawn" not in page


def test_a_depth_of_one_placement_alone_is_not_the_one_to_show():
    depths = {"pre": [6, 24, 96], "post": [6, 24]}
    runs = pd.DataFrame([{PLACEMENT: p, DEPTH: d} for p, mine in depths.items() for d in mine])
    assert arms.deepest(runs) == 24
    assert arms.deepest(runs[runs[PLACEMENT] == "pre"]) == 96
