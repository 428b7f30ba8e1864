"""The search against known thresholds, LR50 against a known logistic, the ramp's rule, the door and its figure."""

import itertools
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, TINY, compose

import arms
import fig_lr_frontier
import figure
from normlab import composing, frontier, ramp
from normlab.frontier import Boundary, boundary, lr50
from normlab.results import load

COUNT = 25


def searched(verdict, hint=None, count=COUNT):
    """The verdicts, each place tried once."""
    places = []

    def trial(place: int) -> str:
        assert 0 <= place < count
        places.append(place)
        return verdict(place)

    tried = frontier.search(trial, count, hint)
    assert places == list(tried)
    assert len(set(places)) == len(places)
    return tried


@pytest.mark.parametrize("edge", range(COUNT))
@pytest.mark.parametrize("hint", [None, 0, 6, 12, 24])
def test_the_search_finds_any_threshold_and_looks_at_both_sides(edge, hint):
    tried = searched(lambda place: "stable" if place <= edge else "diverged", hint)
    assert max(p for p, v in tried.items() if v == "stable") == edge
    assert {p for p in (edge - 1, edge + 1, edge + 2) if 0 <= p < COUNT} <= set(tried)
    assert len(tried) <= 13


@pytest.mark.parametrize("edge", range(2, COUNT - 2))
def test_a_hint_from_another_seed_makes_it_cheap(edge):
    assert len(searched(lambda place: "stable" if place <= edge else "stalled", hint=edge)) == 4
    assert len(searched(lambda place: "stable" if place <= edge else "stalled", hint=edge - 1)) <= 5


def test_three_seeds_cost_less_than_a_third_of_the_grid_wherever_the_threshold_is():
    for edge in range(2, COUNT - 2):
        hint, cost = None, 0
        for seed, shift in enumerate((0, -1, 1)):
            tried = searched(lambda p, e=edge + shift: "stable" if p <= e else "stalled", hint)
            hint = max(p for p, v in tried.items() if v == "stable")
            assert hint == edge + shift, seed
            cost += len(tried)
        assert cost <= 3 * COUNT / 3, edge


@pytest.mark.parametrize("low", [0, 3, 8, 14, 20])
def test_rates_that_are_too_low_stall_and_do_not_hide_the_upper_boundary(low):
    """Stalled below `low` and from low + 4 on: the band of rates that trains is found wherever it is."""
    tried = searched(lambda place: "stable" if low <= place < low + 4 else "stalled")
    assert max(p for p, v in tried.items() if v == "stable") == low + 3
    assert boundary({float(p): v for p, v in tried.items()}) == Boundary(low + 3, low + 4, 0)


def test_where_nothing_trains_no_gap_is_left_and_nothing_is_tried_above_a_divergence():
    tried = searched(lambda place: "stalled")
    untried = sorted(set(range(COUNT)) - set(tried))
    assert all(b - a > 1 for a, b in itertools.pairwise(untried))
    assert boundary(dict.fromkeys(map(float, tried), "stalled")).flags == ["none stable"]
    tried = searched(lambda place: "diverged" if place >= 5 else "stalled")
    assert max(tried) <= COUNT // 2
    assert min(p for p, v in tried.items() if v == "diverged") <= 6


def test_where_everything_trains_the_top_is_reached():
    tried = searched(lambda place: "stable")
    assert COUNT - 1 in tried
    assert len(tried) <= 6
    assert boundary(dict.fromkeys(map(float, tried), "stable")).flags == ["stable to the top"]


def test_a_hole_below_the_boundary_is_seen_and_flagged():
    tried = searched(lambda place: "stable" if place <= 9 or 11 <= place <= 14 else "spiked", hint=9)
    found = boundary({float(p): v for p, v in tried.items()})
    assert found == Boundary(14.0, 15.0, 1)
    assert found.flags == ["non-monotone"]
    tried = searched(lambda place: "stable" if place <= 10 and place != 9 else "diverged", hint=10)
    assert boundary({float(p): v for p, v in tried.items()}) == Boundary(10.0, 11.0, 1)


def test_a_divergence_below_every_stable_rate_is_a_contradiction_and_a_stall_is_not():
    assert boundary({1e-3: "stalled", 1e-2: "stable", 1e-1: "diverged"}) == Boundary(1e-2, 1e-1, 0)
    assert boundary({1e-3: "diverged", 1e-2: "stable", 1e-1: "diverged"}) == Boundary(1e-2, 1e-1, 1)


def table(verdicts: dict[int, dict[float, str]], **settings) -> pd.DataFrame:
    rows = [
        {"seed": seed, "optim.lr": rate, "verdict": verdict}
        for seed, mine in verdicts.items()
        for rate, verdict in mine.items()
    ]
    named = {key.replace("__", "."): value for key, value in settings.items()}
    fixed = {"status": "finished", "steps": 100, "optim.warmup_steps": 0, "model.depth": 2}
    return pd.DataFrame(rows).assign(**fixed | named)


def test_lr50_of_a_known_logistic():
    """2,000 seeds of P = 1 / (1 + (lr / 0.01)^4), over rates that are not centred on it."""
    rng = np.random.default_rng(0)
    rates = np.geomspace(1e-3, 0.2, 12)
    P = 1 / (1 + (rates / 0.01) ** 4)
    drawn = {s: dict(zip(rates, np.where(rng.random(12) < P, "stable", "diverged"), strict=True)) for s in range(2000)}
    runs = table(drawn)
    x, y = np.log(runs["optim.lr"]), runs.verdict == "stable"
    value, low, high, slope = frontier.fit(x, y, np.ones(len(runs)))
    assert (low, high) == (value, value)
    assert value == pytest.approx(0.01, rel=0.03)
    assert slope == pytest.approx(4, rel=0.05)
    few = lr50(runs[runs.seed < 40]).iloc[0]
    assert few.low < 0.01 < few.high
    assert few.high / few.low < 1.6
    assert (few.seeds, few.rates, few.runs) == (40, 12, 480)


def test_separated_verdicts_give_the_middle_of_the_gap_and_its_width():
    seeds = {s: {0.01: "stable", 0.04: "diverged", 0.08: "diverged"} for s in range(3)}
    row = lr50(table(seeds)).iloc[0]
    assert (row.lr50, row.low, row.high) == pytest.approx((0.02, 0.01, 0.04))
    assert row.slope == math.inf
    assert row["flags"] == ""
    seeds[2] = {0.01: "stable", 0.02: "stable", 0.04: "stable", 0.08: "diverged"}
    row = lr50(table(seeds)).iloc[0]  # seeds differ at 0.04 alone
    assert (row.lr50, row.low, row.high) == pytest.approx((0.04, 0.01, 0.08))
    assert row.largest_stable == "0.01, 0.01, 0.04"


def test_the_middle_of_the_gap_is_the_limit_of_the_likelihood():
    """With one verdict made uncertain by ever less weight, the fit goes to the middle of the gap."""
    x, y = np.log([0.01, 0.04, 0.04, 0.08, 0.01]), np.array([1, 0, 0, 0, 1])
    both = np.append(x, np.log([0.01, 0.04])), np.append(y, [0, 1])
    fits = [frontier.fit(*both, np.append(np.ones(5), [share, share]))[0] for share in (1e-2, 1e-5)]
    assert abs(math.log(fits[1] / 0.02)) < abs(math.log(fits[0] / 0.02)) + 1e-6
    assert fits[1] == pytest.approx(0.02, rel=0.05)


def test_censored_cells_are_bounds_and_stay_in_the_table():
    none = table({0: {0.01: "stalled", 0.1: "stalled"}, 1: {0.01: "spiked"}}, model__depth=24)
    every = table({0: {0.01: "stable", 0.1: "stable"}, 1: {0.1: "stable"}}, model__depth=6)
    found = lr50(pd.concat([none, every])).set_index("model.depth")
    assert found.index.tolist() == [6, 24]
    assert tuple(found.loc[24, ["lr50", "low", "high"]]) == pytest.approx((0.0, 0.0, 0.01))
    assert tuple(found.loc[6, ["lr50", "low", "high"]]) == pytest.approx((math.inf, 0.1, math.inf))
    assert found["flags"].tolist() == ["stable to the top", "none stable"]


def test_runs_too_slow_to_learn_do_not_lower_lr50():
    seeds = {s: {1e-4: "stalled", 1e-3: "stalled", 0.01: "stable", 0.04: "diverged"} for s in range(2)}
    assert lr50(table(seeds)).lr50.iloc[0] == pytest.approx(0.02)


def test_a_run_without_evidence_is_no_trial():
    runs = table({0: {0.01: "stable", 0.04: "diverged"}})
    ramps = runs.assign(**{"optim.warmup_steps": 100, "verdict": "diverged", "optim.lr": 0.01})
    failed = runs.assign(status="failed", verdict=None)
    assert lr50(pd.concat([runs, ramps, failed])).equals(lr50(runs))


def test_a_cell_is_every_setting_that_differs_null_too():
    runs = [table({0: {0.01: "stable", 0.1: "diverged"}}, optim__clip=clip) for clip in (1.0, np.nan, 0.5)]
    found = lr50(pd.concat(runs))
    assert found.columns[0] == "optim.clip"
    assert found["optim.clip"].tolist()[:2] == [0.5, 1.0]
    assert found.runs.tolist() == [2, 2, 2]


def falling(steps: int, seed: int = 0) -> np.ndarray:
    return 4 * np.exp(-np.arange(steps) / 40) + 1 + 0.05 * np.random.default_rng(seed).standard_normal(steps)


def test_the_ramp_breaks_where_its_loss_rises_for_good():
    rates, losses = np.arange(1, 301) / 300, falling(300)
    assert ramp.estimate(rates, losses, stalled_at=3).bad_step is None
    losses[100:110] += 3  # comes back
    losses[200:] += 2
    found = ramp.estimate(rates, losses, stalled_at=3)
    assert found.bad_step == pytest.approx(200, abs=ramp.WINDOW // 2)
    assert found.max_lr == rates[found.bad_step - 1]
    assert found.flag == ""
    losses[150] = np.nan
    assert ramp.estimate(rates, losses, stalled_at=3).bad_step == 150
    assert ramp.estimate(rates, losses, stalled_at=3, first_bad_step=120.0).max_lr == rates[119]


def test_a_ramp_that_never_learned_broke_before_its_plateau():
    rates, losses = np.arange(1, 301) / 300, np.maximum(falling(300), 3.5)
    found = ramp.estimate(rates, losses, stalled_at=3)
    assert found.bad_step < 40
    assert found.flag == "never learned"


SMALL = [s for s in TINY if not s.startswith("steps")]
RATES = "optim.lr=1e-3,1e-2,1e-1,1,10"


def door(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "experiments/lr_frontier.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    study = ["model.placement=pre,post", "model.depth=2", "seed=0,1", RATES, "steps=20", "optim.warmup_steps=0"]
    command = [*SMALL, *study, f"runs_dir={folder}", "verdict.patience=5", "ramp=true"]
    done = door(*command)
    assert done.returncode == 0, done.stderr
    return folder / "lr_frontier", done.stdout, command


def test_the_door_makes_runs_of_the_grid_and_its_table_follows_from_them(found):
    folder, printed, command = found
    runs, steps, _ = load(folder)
    assert (runs.status == "finished").all()
    assert frontier.ramped(runs).sum() == 2 * 2
    trials = frontier.trials(runs)
    assert len(trials) < 2 * 2 * 5
    with composing.conf(ROOT):
        jobs = composing.expand(["+sweeps=lr_frontier", *command[:-1]])
    grid = {compose(*job).model_dump_json() for job in jobs}
    assert len(grid) == 2 * 2 * 5
    for _, run in trials.iterrows():
        fixed = [setting for setting in command[:-1] if "," not in setting]
        ours = ["+sweeps=lr_frontier", *fixed, f"model.placement={run['model.placement']}"]
        same = compose(*ours, f"optim.lr={run['optim.lr']}", f"seed={run.seed}").model_dump_json()
        assert same in grid
    share = f"search: {len(trials)} of the grid's 20 runs ({len(trials) / 20:.0%}; 0 read, not trained)"
    assert share in printed
    assert f"{trials.steps_done.sum():,} of its 400 training steps" in printed
    assert f"ramps: 4 runs, {runs[frontier.ramped(runs)].steps_done.sum():,} steps. {ramp.CAVEAT}" in printed
    for _, row in lr50(runs).iterrows():
        (line,) = [x for x in printed.splitlines() if x.split()[:1] == [row["model.placement"]]]
        assert row.largest_stable in line
    assert ramp.estimates(runs, steps).max_lr.between(0, 10).all()


def test_a_second_launch_reads_what_the_first_one_made(found):
    folder, printed, command = found
    written = {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.jsonl")}
    again = door(*command)
    trials = len(frontier.trials(load(folder).runs))
    assert f"{trials} read, not trained" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.jsonl")} == written
    table = [line for line in printed.splitlines() if line.split()[:1] in (["pre"], ["post"])]
    assert table
    assert all(line in again.stdout.splitlines() for line in table)


def test_the_figure_shows_every_run_and_the_same_bytes_twice(found, tmp_path):
    data = arms.load([found[0]])
    for name in ("one", "two"):
        figure.save(fig_lr_frontier.draw(data), "lr_frontier", tmp_path / name)
    for suffix in ("png", "pdf", "csv"):
        one, two = (tmp_path / name / f"lr_frontier.{suffix}" for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
    table = pd.read_csv(tmp_path / "one" / "lr_frontier.csv")
    assert set(table.run_id) == set(data.runs.run_id)
    assert table.kind.value_counts()["ramp"] == 4
    wanted = lr50(data.runs).set_index("model.placement").lr50
    shown = table[table.kind == "trial"].groupby("arm").lr50.first()
    for placement, value in wanted.items():
        assert shown[f"{placement}-norm"] == pytest.approx(value, rel=1e-7)


@pytest.mark.parametrize(("arguments", "said"), [
    (["ramp=soon"], "ramp=soon: accepted: true"),
    (["ramp=-1"], "ramp=-1: accepted: true"),
    (["optim.lr=1e-3,1e-2"], "optim.lr: 0.001, 0.01; a search needs three rates"),
    (["steps=0", "optim.warmup_steps=0"], "steps=0: nothing is trained"),
    (["model.placement=pst"], "did you mean post?"),
    (["optim.lr=1e-3,1e-2,fast"], "optim.lr"),
], ids=str)  # fmt: skip
def test_a_mistake_is_told_in_one_line(arguments, said):
    done = door(*arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_reaches_the_runs_and_none_is_left(number, tmp_path):
    command = [sys.executable, str(ROOT / "experiments/lr_frontier.py"), *SMALL, RATES, "steps=100000", "seed=0"]
    command += ["model.placement=pre", "model.depth=2", f"runs_dir={tmp_path}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 120
        while not [p for p in tmp_path.rglob("metrics.jsonl") if p.stat().st_size] and time.monotonic() < end:
            time.sleep(0.2)
        os.kill(process.pid, number)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert told.splitlines()[-1] == "interrupted; launch again to go on"
    assert load(tmp_path / "lr_frontier").runs.status.tolist() == ["interrupted"]
