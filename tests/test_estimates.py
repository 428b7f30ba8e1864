"""Estimates against SciPy, textbook values and numbers worked out by hand."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import estimates
from arms import DEPTH, PLACEMENT
from estimates import LR


def made(*rows: dict) -> pd.DataFrame:
    """Runs that differ in what is given."""
    usual = {PLACEMENT: "pre", DEPTH: 2, LR: 0.1, "seed": 0, "verdict": "stable", "init_val_loss": 4.0, "study": "s"}
    return pd.DataFrame([usual | row for row in rows])


def test_a_diverged_run_counts_with_its_first_loss_and_no_run_with_more():
    runs = made(
        {"final_val_loss": 1.5},
        {"final_val_loss": np.nan, "verdict": "diverged"},
        {"final_val_loss": 2.0, "verdict": "diverged"},  # a mean that took the 2.0 would reward its divergence
        {"final_val_loss": 9.0, "verdict": "stalled"},
        {"final_val_loss": 3.0, "verdict": "spiked", "init_val_loss": 3.5},
        {"final_val_loss": np.inf, "verdict": "diverged", "init_val_loss": 3.5},
        {"final_val_loss": None, "verdict": "diverged"},
    )
    assert estimates.capped_loss(runs).tolist() == [1.5, 4.0, 4.0, 4.0, 3.0, 3.5, 4.0]


@pytest.mark.parametrize(
    ("count", "n", "low", "high"),
    [(0, 3, 0.0, 0.7076), (3, 3, 0.2924, 1.0), (0, 5, 0.0, 0.5218), (1, 3, 0.0084, 0.9057), (5, 10, 0.1871, 0.8129)],
)
def test_rate_is_clopper_and_pearson_s(count, n, low, high):
    found = estimates.rate(count, n)
    assert found.value == count / n
    assert found.low == pytest.approx(low, abs=1e-4)
    assert found.high == pytest.approx(high, abs=1e-4)
    if 0 < count < n:  # its definition: quantiles of beta distributions
        assert found.low == pytest.approx(stats.beta.ppf(0.025, count, n - count + 1))
        assert found.high == pytest.approx(stats.beta.ppf(0.975, count + 1, n - count))


def test_rate_of_nothing_is_not_a_number():
    assert np.isnan(estimates.rate(0, 0).value)
    assert estimates.rate(0, 0).n == 0


def test_survival_of_the_textbook_s_leukaemia_patients():
    """The 21 of Gehan 1965 (Freireich et al. 1963) on 6-mercaptopurine; shares and intervals of Collett, table 2.5."""
    events, ended = [6, 6, 6, 7, 10, 13, 16, 22, 23], [6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
    table = estimates.survival(events + ended, [True] * 9 + [False] * 12).set_index("step")
    shares = {6: 0.857, 7: 0.807, 10: 0.753, 13: 0.690, 16: 0.627, 22: 0.538, 23: 0.448, 35: 0.448}
    assert table.share.loc[list(shares)].round(3).to_dict() == shares
    assert table.loc[6, ["low", "high"]].tolist() == pytest.approx([0.620, 0.952], abs=5e-4)
    assert table.loc[23, ["low", "high"]].tolist() == pytest.approx([0.188, 0.680], abs=5e-4)


@pytest.mark.filterwarnings("error")
def test_survival_without_an_interval_is_quiet():
    assert estimates.survival([3, 3], [True, True]).share.tolist() == [0.0]
    alive = estimates.survival([3, 5], [False, False])
    assert alive.share.tolist() == [1.0, 1.0]
    assert alive[["low", "high"]].isna().all(axis=None)
    assert estimates.survival([4], [True]).low.isna().all()


def test_mean_has_an_interval_from_three_values_on():
    assert estimates.mean([1.0, 2.0])[:1] == (1.5,)
    assert np.isnan(estimates.mean([1.0, 2.0]).low)
    assert estimates.mean([]).n == 0
    assert estimates.mean([1.0, 2.0]).told("{:.1f}") == "1.5, n = 2"
    values = np.random.default_rng(1).normal(5, 2, 200)
    found = estimates.mean(values)
    assert found.value == pytest.approx(values.mean())
    reach = 1.96 * values.std(ddof=1) / 200**0.5
    assert found.low == pytest.approx(values.mean() - reach, abs=0.05)
    assert found.high == pytest.approx(values.mean() + reach, abs=0.05)
    assert estimates.mean(values) == found
    # of three values 1/27 of the resamples are three times the least: more than 2.5 %
    assert estimates.mean([1.0, 2.0, 6.0])[1:] == (1.0, 6.0, 3)


def test_interquartile_mean_takes_the_middle_half():
    found = estimates.interquartile_mean([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1000.0])
    assert found.value == 3.5
    assert found.low < 3.5 < found.high
    assert estimates.interquartile_mean([1.0, 2.0, 6.0]).value == 3.0


def test_paired_puts_runs_that_differ_in_one_key_side_by_side():
    runs = made(
        {"seed": 0, "final_val_loss": 2.0},
        {"seed": 1, "final_val_loss": 2.5},
        {"seed": 2, "final_val_loss": 1.0},  # has no partner
        {"seed": 0, PLACEMENT: "post", "final_val_loss": 1.75},
        {"seed": 1, PLACEMENT: "post", "final_val_loss": np.nan, "verdict": "diverged"},
        {"seed": 1, PLACEMENT: "post", "final_val_loss": 0.1, LR: 0.2},  # another rate: no partner
    )
    pairs = estimates.paired(runs, PLACEMENT, "pre", "post").set_index("seed")
    assert pairs.difference.to_dict() == {0: -0.25, 1: 1.5}
    assert pairs.loc[1, ["loss_first", "loss_second", "verdict_second"]].tolist() == [2.5, 4.0, "diverged"]


def test_paired_matches_settings_that_are_null():
    clip = {"optim.clip": None}, {"optim.clip": 1.0}
    runs = made(*({PLACEMENT: p, **c, "final_val_loss": 2.0} for p in ("pre", "post") for c in clip))
    assert len(estimates.paired(runs, PLACEMENT, "pre", "post")) == 2


def test_best_rate_counts_the_diverged_and_the_lower_wins_a_tie():
    runs = made(
        {LR: 0.1, "seed": 0, "final_val_loss": 2.0},
        {LR: 0.1, "seed": 1, "final_val_loss": 3.0},
        {LR: 0.3, "seed": 0, "final_val_loss": 3.0},
        {LR: 0.3, "seed": 1, "final_val_loss": 2.0},
        {LR: 1.0, "seed": 0, "final_val_loss": 0.5},
        {LR: 1.0, "seed": 1, "final_val_loss": np.nan, "verdict": "diverged"},  # mean 2.25 beats 2.5 all the same
    )
    assert set(estimates.best_lr(runs, [DEPTH])[LR]) == {1.0}
    assert set(estimates.best_lr(runs[runs[LR] < 1], [DEPTH])[LR]) == {0.1}
    assert set(estimates.best_lr(runs[::-1], [])[LR]) == {1.0}
    assert estimates.best_lr(runs.iloc[:0], [DEPTH]).empty


def test_best_rate_lacks_no_seed():
    runs = made(
        {LR: 0.1, "seed": 0, "final_val_loss": 2.0},
        {LR: 0.1, "seed": 1, "final_val_loss": 3.0},
        {LR: 0.3, "seed": 0, "final_val_loss": 1.0},  # better, but of one seed
        {LR: 0.3, "seed": 0, "final_val_loss": 1.0, DEPTH: 4},
    )
    best = estimates.best_lr(runs, [DEPTH])
    assert best[[DEPTH, LR]].drop_duplicates().values.tolist() == [[2, 0.1], [4, 0.3]]
    assert best.loss.tolist() == [2.0, 3.0, 1.0]


def test_lr_sensitivity_by_hand():
    """Losses 3, 1, 2 and the cap 4: their mean 2.5 less the best 1."""
    rates, losses = (0.01, 0.1, 1.0, 10.0), (3.0, 1.0, 2.0, 50.0)
    seed = made(*({LR: rate, "final_val_loss": loss} for rate, loss in zip(rates, losses, strict=True)))
    assert estimates.lr_sensitivity(seed) == 1.5
    flat = seed.assign(final_val_loss=2.0)
    assert estimates.lr_sensitivity(flat) == 0.0


def test_lr_sensitivity_of_seeds_is_over_one_grid():
    rows = [{LR: r, "seed": s, "final_val_loss": v + s} for s in (0, 1) for r, v in ((0.1, 1.0), (1.0, 2.0))]
    runs = made(*rows, {LR: 10.0, "seed": 0, "final_val_loss": 3.5}, {LR: 0.1, "seed": 2, "final_val_loss": 1.0})
    assert estimates.lr_sensitivities(runs, [0.1, 1.0]).to_dict() == {0: 0.5, 1: 0.5}
    assert estimates.lr_sensitivities(runs, [0.1, 1.0, 10.0]).to_dict() == {0: pytest.approx(6.5 / 3 - 1)}
