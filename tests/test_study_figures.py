"""The numbers behind the figures of the stability studies, from small real runs and from ones set to fail."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import drawn, tiny

import arms
import estimates
import fig_depth_placement
import fig_final_norm
import fig_loss_curves
import fig_lr_sensitivity
import fig_residual_ablation
import fig_survival
import fig_warmup
import figure
from arms import DEPTH, PLACEMENT, WARMUP, Missing
from estimates import LR
from normlab.results import Results
from normlab.train import train


def trained(folder: Path, *grid: list[str]) -> Results:
    """Arms as lists of overrides, each with seeds 0, 1 and 2."""
    for overrides in grid:
        for seed in (0, 1, 2):
            train(tiny(folder, "study=s", "probe.batches=1", "eval.every=0", f"seed={seed}", *overrides))
    return arms.load([folder / "s"])


@pytest.fixture(scope="module")
def rates(tmp_path_factory) -> Results:
    """Placement x learning rate, warm-up with one of them; the seeds of the largest rate diverge."""
    cells = [
        [f"model.placement={p}", f"optim.lr={lr}", f"optim.warmup_steps={w}"]
        for p in ("pre", "post")
        for lr in (1e-3, 1e-2, 1e-1)
        for w in (0, 3)
    ]
    data = trained(tmp_path_factory.mktemp("rates"), *cells)
    return broken(data, data.runs[LR] == 0.1)


@pytest.fixture(scope="module")
def ablated(tmp_path_factory) -> Results:
    ways = [("pre", "layernorm", "dense"), ("no_residual", "layernorm", "dense"), ("pre", "none", "none")]
    cells = [
        [f"model.placement={p}", f"model.norm={n}", f"model.ffn={f}", f"model.depth={d}"]
        for p, n, f in ways
        for d in (1, 2)
    ]
    return trained(tmp_path_factory.mktemp("ablated"), *cells)


@pytest.fixture(scope="module")
def normed(tmp_path_factory) -> Results:
    cells = [[f"model.final_norm={v}", f"model.depth={d}"] for v in ("true", "false") for d in (1, 2)]
    return trained(tmp_path_factory.mktemp("normed"), *cells)


def broken(data: Results, which: pd.Series, step: float = 2.0) -> Results:
    """`data` where these runs diverged at a step."""
    runs = data.runs.copy()
    runs.loc[which, ["verdict", "final_val_loss", "first_bad_step"]] = ["diverged", np.nan, step]
    steps = data.steps.copy()
    steps.loc[steps.run_id.isin(runs.run_id[which]) & (steps.step >= step), "loss"] = np.nan
    return Results(runs, steps, data.layers)


def texts(found: figure.Drawn) -> list[str]:
    """What stands in the panels and legends."""
    legends = [legend for panel in found.figure.axes if (legend := panel.get_legend())] + found.figure.legends
    inside = [text.get_text() for panel in found.figure.axes for text in panel.texts]
    return inside + [text.get_text() for legend in legends for text in legend.get_texts()]


def test_a_cell_of_the_matrix_says_how_many_were_stable_and_how_most_of_the_others_failed():
    verdicts = ["stable", "stalled", "diverged", "stalled", "spiked", "diverged", "stable"]
    rates = [0.1, 0.1, 0.1, 0.1, 1.0, 1.0, 2.0]
    cells = fig_depth_placement.verdicts(pd.DataFrame({"arm": "a", DEPTH: 2, LR: rates, "verdict": verdicts}))
    assert cells[[LR, "stable", "n", "failure"]].values.tolist() == [
        [0.1, 1, 4, "stalled"],
        [1.0, 0, 2, "diverged"],  # of a tie the worse
        [2.0, 1, 1, ""],
    ]


def test_the_matrix_counts_every_run(rates):
    found = drawn(fig_depth_placement, rates)
    assert len(found.table) == len(rates.runs) == 36
    assert found.table.n.eq(3).all()
    assert (found.table[found.table[LR] == 0.1].stable == 0).all()
    stable = found.table[found.table.verdict == "stable"].groupby(["arm", LR]).size()
    told = found.table.groupby(["arm", LR]).stable.first()
    assert told[told > 0].to_dict() == stable.to_dict()
    assert texts(found).count("0/3") == (told == 0).sum()


def test_the_matrix_wraps_many_placements(rates):
    names = ["pre", "post", "sandwich", "deepnorm", "reordered", "lns", "keel"]
    runs = pd.concat([rates.runs.assign(**{PLACEMENT: p, "run_id": rates.runs.run_id + p}) for p in names])
    runs = runs[runs[WARMUP] == 0].drop_duplicates([PLACEMENT, LR, "seed"])
    found = drawn(fig_depth_placement, Results(runs, rates.steps, rates.layers))
    shown = [panel for panel in found.figure.axes if panel.get_title()]
    assert [panel.get_title() for panel in shown] == [arms.placement_name(p) for p in arms.in_order(names)]
    assert len({round(panel.get_position().y0, 2) for panel in shown}) == 2


def test_warm_up_figure_has_a_mean_with_the_diverged_at_their_cap(rates):
    found = drawn(fig_warmup, rates)
    assert len(found.table) == 36
    top = found.table[found.table[LR] == 0.1]
    inits = rates.runs.set_index("run_id").init_val_loss
    assert top.loss.tolist() == inits[top.run_id].tolist()
    for (_, _, _), cell in found.table.groupby([PLACEMENT, WARMUP, LR]):
        assert cell["mean"].iloc[0] == pytest.approx(cell.loss.mean())
        assert cell.low.iloc[0] <= cell.loss.mean() <= cell.high.iloc[0]
    dashed = {(p, w): s["linestyle"] for (p, w), s in fig_warmup.styles(rates.runs).items()}
    assert dashed["pre", 3] == dashed["post", 3] == "-"
    assert dashed["pre", 0] == dashed["post", 0] == figure.LINES[1]


def test_what_an_optimizer_decides_is_no_other_setting(rates):
    runs = pd.concat(
        [rates.runs.assign(**{"optim.name": n, "optim.eps": e, "optim.clip": c})
         for n, e, c in (("adam", 1e-8, 1.0), ("sgd", 1e-6, 1.0), ("sgd", 1e-6, 2.0))]
    )  # fmt: skip
    assert fig_warmup.following(runs, "optim.name") == ["optim.eps"]


def test_lr_sensitivity_in_the_legend_is_the_one_by_hand(rates):
    found = drawn(fig_lr_sensitivity, rates)
    runs = rates.runs[(rates.runs[PLACEMENT] == "post") & (rates.runs[WARMUP] == 3)]
    by_seed = []
    for _, mine in runs.groupby("seed"):
        losses = [*mine[mine[LR] < 0.1].final_val_loss.clip(upper=mine.init_val_loss), mine.init_val_loss.iloc[0]]
        by_seed.append(np.mean(losses) - min(losses))
    mine = found.table[(found.table.arm == "post-norm, warm-up 3")]
    assert mine.sensitivity.unique() == pytest.approx([np.mean(by_seed)])
    assert f"post-norm, warm-up 3: {estimates.mean(by_seed).told('{:.2f}')}" in texts(found)


def test_lr_sensitivity_compares_arms_on_the_rates_that_all_have(rates):
    more = rates.runs[rates.runs[PLACEMENT] == "pre"]
    more = more[more[LR] == 0.1].assign(**{LR: 1.0, "run_id": more.run_id + "x"})
    runs = arms.with_arms(pd.concat([rates.runs, more]), LR)
    found, shared = fig_lr_sensitivity.sensitivities(runs)
    assert shared == [1e-3, 1e-2, 1e-1]
    assert found == fig_lr_sensitivity.sensitivities(arms.with_arms(rates.runs, LR))[0]


def test_ablation_names_what_is_there(ablated):
    found = drawn(fig_residual_ablation, ablated)
    assert len(found.table) == len(ablated.runs) == 18
    names = [
        "residual (pre-norm), layernorm, FFN",
        "residual (pre-norm), no norm, no FFN",
        "no residual, layernorm, FFN",
    ]
    assert sorted(found.table.arm.unique()) == sorted(names)
    assert set(names) < set(texts(found))
    for _, cell in found.table.groupby(["arm", DEPTH]):
        assert cell["mean"].iloc[0] == pytest.approx(cell.loss.mean())


def test_ablation_takes_the_best_rate_of_each_arm_and_says_so(ablated):
    worse = ablated.runs.assign(**{LR: 5.0}, final_val_loss=ablated.runs.final_val_loss + 0.5)
    runs = pd.concat([ablated.runs, worse.assign(run_id=worse.run_id + "x")], ignore_index=True)
    found = drawn(fig_residual_ablation, Results(runs, ablated.steps, ablated.layers))
    assert set(found.table[LR]) == set(ablated.runs[LR])
    assert "its best of 2 learning rates" in found.caption


def test_final_norm_figure_has_both_ends_of_every_run(normed):
    victim = normed.runs.run_id.iloc[0]
    found = drawn(fig_final_norm, broken(normed, normed.runs.run_id == victim))
    assert len(found.table) == 2 * len(normed.runs)
    layers = normed.layers[normed.layers.stat == "logit_rms"].set_index(["run_id", "step"]).value
    ends = {"at initialisation": 0, "after training": 6}
    for _, row in found.table.iterrows():
        assert row.logit_rms == layers[row.run_id, ends[row.when]]
    losses = found.table.set_index(["run_id", "when"]).loss
    first = normed.runs.set_index("run_id").init_val_loss
    assert losses[victim, "after training"] == losses[victim, "at initialisation"] == first[victim]
    assert found.table.groupby(DEPTH).final_norm.sum().to_dict() == {1: 6, 2: 6}


@pytest.mark.parametrize(
    ("placement", "said", "norm", "expected"),
    [
        ("pre", None, "layernorm", True),
        ("post", np.nan, "layernorm", False),
        ("post", True, "rmsnorm", True),
        ("pre", False, "layernorm", False),
        ("pre", None, "none", False),
        ("resi_dual", None, "layernorm", True),
        ("of another version", None, "layernorm", None),
    ],
)
def test_a_final_norm_that_is_not_said_is_the_placement_s(placement, said, norm, expected):
    run = pd.Series({PLACEMENT: placement, "model.final_norm": said, "model.norm": norm})
    assert fig_final_norm.has_final_norm(run) is expected


def test_survival_counts_from_the_first_bad_step_to_the_end(rates):
    runs = rates.runs.copy()
    runs.loc[(runs[LR] == 0.1) & (runs[PLACEMENT] == "pre"), "first_bad_step"] = np.nan  # only the end was bad
    found = drawn(fig_survival, Results(runs, rates.steps, rates.layers))
    assert len(found.table) == 36
    bad = found.table[found.table.diverged]
    assert bad.groupby(PLACEMENT).step.unique().map(list).to_dict() == {"pre": [6.0], "post": [2.0]}
    assert (found.table[~found.table.diverged].step == 6).all()
    assert "post-norm: 18 at risk, 6 diverged" in texts(found)


def test_survival_compares_like_with_like(rates):
    runs = rates.runs[(rates.runs[PLACEMENT] == "pre") | (rates.runs[LR] == 0.1)]
    found = drawn(fig_survival, Results(runs, rates.steps, rates.layers))
    assert len(found.table) == 12
    assert "12 runs of settings that not every placement has are left out" in found.caption
    alone = fig_survival.alike(runs[(runs[PLACEMENT] == "post") | (runs[LR] < 0.1)])
    assert "do not compare" in alone[1]


def test_a_seed_that_diverged_stays_in_its_mean_with_its_first_loss():
    table = pd.DataFrame({"a": [4.0, 3.0, 2.0, 1.0], "b": [4.0, 9.0, np.nan, np.nan], "c": [4.0, 3.0, 20.0, 30.0]})
    runs = pd.DataFrame(
        {"verdict": ["stable", "diverged", "diverged"], "init_val_loss": 4.5, "first_bad_step": [np.nan, np.nan, 1.0]},
        index=["a", "b", "c"],
    )
    found = fig_loss_curves.capped(table, runs)
    assert found.a.tolist() == [4.0, 3.0, 2.0, 1.0]
    assert found.b.tolist() == [4.0, 4.5, 4.5, 4.5]
    assert found.c.tolist() == [4.0, 4.5, 4.5, 4.5]


def test_curves_of_many_arms_are_those_at_their_best_rates(rates):
    assert arms.with_arms(rates.runs).arm.nunique() == 12
    found = drawn(fig_loss_curves, rates)
    assert found.table.run_id.nunique() == 12
    best = estimates.best_lr(rates.runs, [PLACEMENT, WARMUP])
    assert set(found.table.run_id) == set(best.run_id)
    assert "24 runs at other rates are not shown" in found.caption
    assert "bands: least to most" in found.caption


def test_rows_of_curves_hold_few_arms_each():
    runs = pd.DataFrame(
        {"arm": [f"{p}{i}" for p in "abc" for i in range(6)], PLACEMENT: [p for p in "abc" for _ in range(6)]}
    )
    rows = fig_loss_curves.split(runs, list(runs.arm))
    assert [len(row) for row in rows] == [6, 6, 6]
    alone = pd.DataFrame({"arm": [f"p{i}" for i in range(19)], PLACEMENT: [f"p{i}" for i in range(19)]})
    assert [len(row) for row in fig_loss_curves.split(alone, list(alone.arm))] == [8, 8, 3]
    one = alone.assign(**{PLACEMENT: "pre"})
    assert [len(row) for row in fig_loss_curves.split(one, list(one.arm))] == [8, 8, 3]


@pytest.mark.parametrize(
    ("module", "word"),
    [
        (fig_depth_placement, "several depths or learning rates"),
        (fig_warmup, "several optim.lr"),
        (fig_lr_sensitivity, "3 learning rates"),
        (fig_residual_ablation, "model.ffn=none"),
        (fig_final_norm, "model.final_norm=true,false"),
        (fig_survival, "none of the"),
    ],
    ids=lambda v: getattr(v, "STEM", ""),
)
def test_runs_that_cannot_feed_a_figure_are_told_what_is_missing(module, word, rates):
    same = rates.runs[(rates.runs[LR] == 1e-2) & (rates.runs[WARMUP] == 0)]
    with pytest.raises(Missing, match=word):
        module.draw(Results(same.assign(verdict="stable"), rates.steps, rates.layers))
