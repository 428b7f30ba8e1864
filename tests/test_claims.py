"""The ledger: its rules, and what made runs make of each claim."""

import itertools
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT

import claims
import ledger as rules
import studies
from arms import DEPTH, PLACEMENT, WARMUP
from estimates import Estimate
from normlab.results import Results

PLAIN: dict[str, Any] = {
    DEPTH: 6,
    PLACEMENT: "pre",
    WARMUP: 0,
    "optim.lr": 1e-3,
    "optim.name": "adam",
    "model.norm": "layernorm",
    "model.activation": "gelu",
    "model.ffn": "dense",
    "model.final_norm": None,
    "model.qk_norm": False,
    "model.width": 32,
    "model.init": "xavier",
    "model.ffn_ratio": 4.0,
    "data.name": "text",
    "data.batch_size": 8,
    "data": "text abc",
    "precision": "fp32",
    "seed": 0,
    "status": "finished",
    "verdict": "stable",
    "steps": 300,
    "steps_done": 300,
    "spike_count": 0,
    "init_val_loss": 6.0,
    "final_val_loss": 2.5,
    "h1": 3.2,
    "h2": 2.3,
}


def made(study: str, grid: dict[str, list], loss, verdict=lambda run: "stable", rows=lambda run: []) -> Results:
    """A study whose runs end at loss(run) plus a little noise of the seed. rows: (step, stat, value) of each run."""
    runs, layers, steps = [], [], []
    for number, values in enumerate(itertools.product(*grid.values())):
        run = PLAIN | dict(zip(grid, values, strict=True)) | {"study": study, "run_id": f"{study}{number:04d}"}
        run["verdict"] = verdict(run)
        run["final_val_loss"] = loss(run) + 0.001 * run["seed"]
        runs.append(run)
        who = {"study": study, "run_id": run["run_id"]}
        steps += [{"step": s, "loss": run["final_val_loss"], **who} for s in (0, 299)]
        layers += [{"step": s, "stat": stat, "value": v, "layer": 0, "site": "ffn", **who} for s, stat, v in rows(run)]
    columns = ["step", "stat", "value", "layer", "site", "study", "run_id", "stack", "tensor"]
    return Results(pd.DataFrame(runs), pd.DataFrame(steps), pd.DataFrame(layers, columns=columns))


def together(*parts: Results) -> Results:
    return Results(*(pd.concat(tables, ignore_index=True) for tables in zip(*parts, strict=True)))


def row(data: Results, name: str) -> pd.Series:
    found = claims.ledger(data)
    return found.set_index("id").loc[name]


SEEDS = [0, 1, 2]
PLACED = {DEPTH: [6, 48, 96], PLACEMENT: ["pre", "post", "deepnorm"], "optim.lr": [1e-3, 1e-2], "seed": SEEDS}
WARMED = {PLACEMENT: ["pre", "post"], WARMUP: [0, 100], "optim.lr": [1e-3, 1e-2], "seed": SEEDS}
ABLATED = {
    PLACEMENT: ["pre", "no_residual"],
    "model.ffn": ["dense", "none"],
    "model.norm": ["layernorm", "none"],
    DEPTH: [2, 4, 6, 8, 12],
    "seed": SEEDS,
}


def textbook() -> Results:
    """Runs that do what the literature says."""
    post_fails = lambda run: "stalled" if run[PLACEMENT] == "post" and run[DEPTH] > 6 else "stable"  # noqa: E731
    placed = made(
        "depth_placement", PLACED, lambda run: 2.4 if run[PLACEMENT] != "pre" and run[DEPTH] == 6 else 2.5, post_fails,
        lambda run: [(0, "mean_over_std", 0.1), (300, "mean_over_std", 0.1)],
    )  # fmt: skip
    for_post = placed.runs[PLACEMENT] == "post"
    placed.runs.loc[for_post, "spike_count"] = 3 + placed.runs.seed[for_post]
    fails_cold = lambda run: (  # noqa: E731
        "diverged" if run[PLACEMENT] == "post" and (run[WARMUP] == 0 or run["optim.lr"] > 1e-3) else "stable"
    )
    return together(
        placed,
        made("warmup", WARMED, lambda run: 2.5, fails_cold),
        made(
            "residual_ablation", ABLATED,
            lambda run: 2.5 + 0.5 * (run["model.ffn"] == "none") + 0.1 * run[DEPTH] * (run[PLACEMENT] == "no_residual"),
            lambda run: "stalled" if run[PLACEMENT] == "no_residual" and run[DEPTH] > 6 else "stable",
        ),
        made("norm_type", {"model.norm": ["layernorm", "rmsnorm"], "optim.lr": [1e-3, 1e-2], "seed": SEEDS},
             lambda run: 2.5 + 0.001 * (run["model.norm"] == "rmsnorm")),
        made("activation", {"model.activation": ["relu", "gelu", "swiglu"], "optim.lr": [1e-3], "seed": SEEDS},
             lambda run: {"relu": 2.6, "gelu": 2.5, "swiglu": 2.4}[run["model.activation"]]),
        made("final_norm", {"model.final_norm": [True, False], DEPTH: [6, 12], "seed": SEEDS}, lambda run: 2.5,
             rows=lambda run: [(s, "logit_rms", 1.0 if run["model.final_norm"] else 9.0) for s in (0, 300)]),
        made("qk_norm", {"model.qk_norm": [False, True], "optim.lr": [1e-3, 1e-1], "seed": SEEDS}, lambda run: 2.5,
             lambda run: "diverged" if not run["model.qk_norm"] and run["optim.lr"] > 1e-2 else "stable",
             lambda run: [(0, "attn_logit_max", 1.0), (300, "attn_logit_max", 5.0 if run["model.qk_norm"] else 500.0)]),
        made("sine", {PLACEMENT: ["pre", "post"], "data.name": ["sine"], "optim.lr": [1e-3], "seed": SEEDS},
             lambda run: 0.001 if run[PLACEMENT] == "pre" else 0.1),
        _batch_norm(),
    )  # fmt: skip


def _batch_norm() -> Results:
    grid = {"model.norm": ["layernorm", "batchnorm"], "data.batch_size": [1, 32], "seed": SEEDS}
    data = made("batchnorm", grid, lambda run: 2.5)
    worse = (data.runs["model.norm"] == "batchnorm") & (data.runs["data.batch_size"] == 1)
    data.runs.loc[worse, "final_val_loss"] += 0.5  # evaluation alone: training losses stay
    return data


SUPPORTED = ["B1", "B2", "B5", "B7", "B9", "B10", "B11", "B13", "B14", "B15", "B16", "B18", "B19", "B22", "B23", "B24"]


@pytest.fixture(scope="module")
def agreed() -> pd.DataFrame:
    return claims.ledger(textbook()).set_index("id")


@pytest.mark.parametrize("name", SUPPORTED)
def test_runs_that_do_as_the_claim_says_support_it(agreed, name):
    found = agreed.loc[name]
    assert found.verdict == "supported", f"{found.number} [{found.low}, {found.high}] {found.note}"
    assert found.n > 0


def test_every_claim_has_a_row_a_rule_and_a_figure_that_exists():
    assert [c.id for c in claims.CLAIMS] == [f"B{i}" for i in range(1, 26)]
    assert all(c.rule and c.claim and set(c.source.split()) <= {"T", "N", "B"} for c in claims.CLAIMS)
    for claim in claims.CLAIMS:
        assert not claim.figure or (ROOT / "analysis" / f"{claim.figure}.py").is_file(), claim.figure


def test_without_runs_nothing_is_measured_and_the_reason_is_told():
    empty = Results(*(table.iloc[:0] for table in textbook()))
    found = claims.ledger(empty)
    assert set(found.verdict) == {"not measured"}
    assert found.note.str.len().min() > 5


def test_the_opposite_contradicts():
    better = lambda run: 2.5 - 0.3 * (run[PLACEMENT] == "pre")  # noqa: E731
    always = made("depth_placement", PLACED, better)
    assert row(always, "B9").verdict == "contradicted"
    assert row(together(always, made("warmup", WARMED, better)), "B1").verdict != "supported"
    grid = {"model.activation": ["relu", "gelu", "swiglu"], "optim.lr": [1e-3], "seed": SEEDS}
    relu_best = made("activation", grid, lambda run: 2.5 - 0.1 * (run["model.activation"] == "relu"))
    assert row(relu_best, "B16").verdict == "contradicted"


def test_noise_is_inconclusive():
    rng = np.random.default_rng(0)
    grid = {"model.norm": ["layernorm", "rmsnorm"], "optim.lr": [1e-3], "seed": list(range(5))}
    assert row(made("norm_type", grid, lambda run: 2.5 + rng.normal(0, 0.2)), "B13").verdict == "inconclusive"


def test_a_diverged_seed_stays_in_its_mean_at_the_loss_of_the_start():
    data = textbook()
    one = (data.runs.study == "norm_type") & (data.runs["model.norm"] == "rmsnorm") & (data.runs.seed == 0)
    data.runs.loc[one, ["verdict", "final_val_loss"]] = ["diverged", np.nan]
    found = row(data, "B13")
    assert found.number == pytest.approx((6.0 - 2.5 + 2 * 0.001) / 3, abs=0.01)
    assert found.verdict != "supported"


def test_leaving_out_any_one_run_changes_n_and_breaks_nothing(agreed):
    data = textbook()
    picked = data.runs.groupby("study").head(1)
    for _, gone in picked.iterrows():
        found = claims.ledger(Results(data.runs[data.runs.run_id != gone.run_id], data.steps, data.layers))
        found = found.set_index("id")
        affected = [i for i in found.index if found.n[i] != agreed.n[i] and i != "B17"]
        assert affected, gone.study
        assert all(found.n[i] == agreed.n[i] - 1 or found.verdict[i] == "not measured" for i in affected)


def test_runs_of_another_study_are_no_evidence():
    data = textbook()
    strangers = Results(*(table.assign(study="mine") for table in data))
    assert set(claims.ledger(strangers).verdict) - {"not measured"} <= {"supported"}  # B17, of counts
    found = claims.ledger(strangers).set_index("id")
    assert found.note["B9"] == "needs runs of the study depth_placement"


def test_an_interval_decides():
    wide, high, low = Estimate(0, -1, 1, 3), Estimate(2, 1, 3, 3), Estimate(-2, -3, -1, 3)
    assert [rules.above(e, 0) for e in (wide, high, low)] == ["inconclusive", "supported", "contradicted"]
    assert [rules.not_above(e, 0) for e in (wide, high, low)] == ["inconclusive", "contradicted", "supported"]
    assert [rules.within(e, -1.5, 1.5) for e in (wide, high, Estimate(5, 4, 6, 3))] == [
        "supported", "inconclusive", "contradicted",
    ]  # fmt: skip
    assert rules.above(Estimate(2, np.nan, np.nan, 1), 0) == "inconclusive"
    assert rules.both("supported", "contradicted", "inconclusive") == "contradicted"
    assert rules.both("supported", "inconclusive") == "inconclusive"


def test_every_study_has_a_question_and_a_figure_of_its_name():
    figures = {p.stem.removeprefix("fig_") for p in (ROOT / "analysis").glob("fig_*.py")}
    for sweep in (ROOT / "sweeps").glob("*.yaml"):
        question, command = studies.head(sweep)[:2]
        assert question.endswith(("?", "?)")) or "?" in question, sweep.stem
        assert command.startswith("python experiments/"), sweep.stem
        assert sweep.stem in figures or sweep.stem in {"demo", "init_profile"}, sweep.stem
