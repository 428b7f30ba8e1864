"""Other rules on runs that are over: what changes, what is kept, and what is written."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from conftest import ROOT

from normlab import relabel, results, store, verdict

RULES = {
    "version": verdict.RULES_VERSION,
    "spikes": {
        "olmo": {"centre": "mean", "kappa": 7.0, "window": 1000, "min_history": 128, "min_height": 0.1},
        "olmo_core": {"centre": "mean", "kappa": 6.0, "window": 128, "min_history": 64, "min_height": 0.1},
        "mad": {"centre": "trend", "kappa": 8.0, "window": 128, "min_history": 32, "min_height": 0.1},
    },
    "judge": "mad",
    "verdict": {"stalled_below": 0.1, "rise": 0.01, "patience": 50, "out_of_range": 10.0},
}
NUMBERS = {"init_val_loss": 5.5, "final_val_loss": 2.9, "h1": 3.14, "h2": 2.40}


def losses(**planted: float) -> np.ndarray:
    series = 2.9 + 2.6 * np.exp(-np.arange(300) / 20) + 0.02 * np.random.default_rng(0).standard_normal(300)
    for step, height in planted.items():
        series[int(step[1:])] += height
    return series


def run(folder: Path, run_id: str, series, *, grads=None, judged=True, **record) -> Path:
    """A finished run's folder, with the labels of RULES or, judged=False, an older record's."""
    path = folder / "made" / run_id
    path.mkdir(parents=True)
    grads = np.ones(len(series)) if grads is None else grads
    rows = [
        {"step": i, "lr": 1e-3 * (i + 1), "loss": float(v), "grad_norm": float(g)}
        for i, (v, g) in enumerate(zip(series, grads, strict=True))
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "config.yaml").write_text(yaml.safe_dump({"steps": 300, "optim": {"warmup_steps": 40}}))
    numbers = NUMBERS | {k: record.pop(k) for k in list(record) if k in NUMBERS}
    labels = {"verdict": "stable", "reason": "as it was", "first_bad_step": None, "spike_count": 0, "detector": {}}
    if judged:
        kept = relabel.judged(RULES, losses=list(series), grad_norms=list(grads), steps=300, warmup_steps=40, **numbers)
        labels = kept | {"first_bad_lr": None, "first_bad_layer": 3}
    facts = {"run_id": run_id, "study": "made", "status": "finished", "steps_done": len(series)}
    (path / "run.json").write_text(json.dumps(facts | numbers | labels | record))
    return path


def table(folder: Path, *changes: str) -> pd.DataFrame:
    data = results.load(folder, layers=False)
    assert data.runs.attrs["skipped"] == []
    return relabel.relabel(data.runs, data.steps, relabel.parse(changes)).set_index("run_id")


def test_own_rules_give_the_same_label_back(tmp_path):
    run(tmp_path, "calm", losses())
    run(tmp_path, "spike", losses(s200=1.0))
    run(tmp_path, "broken", [*losses()[:80], math.nan], final_val_loss=math.nan)
    found = table(tmp_path)
    assert found.verdict.to_dict() == {"broken": "diverged", "calm": "stable", "spike": "stable"}
    assert (found.verdict == found.old_verdict).all()
    assert (found.note == "").all()
    assert found.spike_count.to_dict() == {"broken": 1, "calm": 0, "spike": 1}
    assert found.first_bad_step.dropna().to_dict() == {"broken": 80}
    assert found.fields["broken"]["first_bad_lr"] == pytest.approx(0.081)
    for path in (tmp_path / "made").iterdir():
        record = store.read_record(path)
        fields = found.fields[path.name]
        assert json.dumps({k: record[k] for k in fields if k != "first_bad_lr"}) == json.dumps(
            {k: v for k, v in fields.items() if k != "first_bad_lr"}
        )


def test_training_and_relabelling_agree(study):
    """What a real run recorded is what its own rules say of its logged steps."""
    data = results.load(study, layers=False)
    found = relabel.relabel(data.runs, data.steps)
    assert len(found) == len(data.runs)
    assert (found.note == "").all()
    for row in found.itertuples():
        record = store.read_record(Path(row.path))
        for key, value in row.fields.items():
            assert json.dumps(record[key]) == json.dumps(value), key


def test_changed_rules_change_the_label(tmp_path):
    half = np.where(np.arange(300) < 250, losses(), losses() + 0.3)
    run(tmp_path, "jump", half)
    run(tmp_path, "small", losses(s200=0.15))
    run(tmp_path, "learned", losses())
    assert table(tmp_path).verdict.to_dict() == {"jump": "spiked", "learned": "stable", "small": "stable"}

    strict = table(tmp_path, "verdict.stalled_below=0.9")
    assert strict.verdict.to_dict() == {"jump": "spiked", "learned": "stalled", "small": "stalled"}
    assert strict.old_verdict["learned"] == "stable"
    loose = table(tmp_path, "spikes.mad.kappa=40")
    assert loose.verdict["jump"] == "stable"
    assert (loose.old_spike_count["jump"], loose.spike_count["jump"]) == (1, 0)
    assert (loose.old_first_bad_step["jump"], loose.first_bad_step["jump"]) == (250, pd.NA)
    assert loose.fields["jump"]["first_bad_layer"] is None  # it belonged to the step that was bad before
    assert loose.fields["jump"]["detector"]["spikes"]["mad"]["kappa"] == 40.0
    assert table(tmp_path, "spikes.mad.min_height=0.2").spike_count["small"] == 0
    assert table(tmp_path, "spikes.judge=olmo", "spikes.olmo.min_height=1").spike_count["jump"] == 0


def test_counts_scores_and_leads_of_every_rule(tmp_path):
    grads = np.exp(0.1 * np.random.default_rng(1).standard_normal(300))
    grads[197] *= 30
    run(tmp_path, "spike", losses(s200=1.0), grads=grads)
    fields = table(tmp_path).fields["spike"]
    names = {f"{series}_{rule}" for series in ("loss", "grad_norm") for rule in ("olmo_w64", "olmo_core", "mad")}
    assert set(fields["spike_counts"]) == set(fields["spike_scores"]) == names
    assert set(fields["spike_counts"].values()) == {1}
    assert fields["spike_scores"]["loss_mad"] == pytest.approx(100 / 260)  # warm-up left out
    assert [s["lead"] for s in fields["spikes"]] == [3]


def test_what_cannot_be_judged_keeps_its_label_and_says_so(tmp_path):
    old = {"kappa": 6.0, "window": 128, "min_history": 32, "min_height": 0.1, "stalled_below": 0.1}
    run(tmp_path, "flat", losses(), judged=False, detector=old, verdict="stalled", first_bad_step=7)
    run(tmp_path, "none", losses(), judged=False, detector=None)
    run(tmp_path, "short", losses()[:200], steps_done=300)
    run(tmp_path, "failed", losses(), status="failed")
    found = table(tmp_path, "spikes.mad.kappa=6")
    assert set(found.index) == {"flat", "none", "short"}
    assert found.fields.isna().all()
    assert (found.verdict["flat"], found.first_bad_step["flat"]) == ("stalled", 7)
    assert found.note["flat"] == found.note["none"] == "older record, without rules of its own: keeps its label"
    assert found.note["short"] == "200 of 300 steps are logged: keeps its label"

    data = results.load(tmp_path, layers=False)
    whole = relabel.relabel(data.runs, data.steps, RULES).set_index("run_id")  # all rules given: judged by them
    assert whole.verdict["flat"] == "stable"
    assert whole.note["flat"] == "judged by rules of version 1, now of 2"


def test_nothing_gives_an_empty_table():
    empty = relabel.relabel(pd.DataFrame(), pd.DataFrame())
    assert empty.empty
    assert "old_verdict" in empty


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("spikes.mad.kapa=6", "spikes.mad.kapa: accepted: spikes.mad.centre, spikes.mad.kappa"),
        ("spikes.foo.kappa=6", "spikes.foo: accepted: olmo, olmo_core, mad"),
        ("spikes.mad.kappa=six", "spikes.mad.kappa=six: accepted: a number"),
        ("spikes.mad.window=6.5", "spikes.mad.window=6.5: accepted: a whole number"),
        ("spikes.judge=foo", "spikes.judge=foo: accepted: olmo, olmo_core, mad"),
        ("verdict.rise=-1", "verdict.rise=-1.0: accepted: 0 or more"),
        ("verdict.stalled_below=nan", "verdict.stalled_below=nan: accepted: 0 to 1"),
        ("verdict.out_of_range=5", "verdict.out_of_range: accepted: verdict.stalled_below, verdict.rise"),
        ("seed=1", "seed: accepted: spikes.NAME.KEY, spikes.judge, verdict.KEY"),
        ("spikes.mad.kappa=0", "spikes.mad.kappa=0.0; accepted: above 0"),
        ("spikes.mad.window=16", "spikes.mad.min_history=32; accepted: 9 to window=16"),
    ],
)
def test_rules_of_no_sense_are_refused_by_name(tmp_path, change, told):
    run(tmp_path, "calm", losses())
    with pytest.raises(ValueError, match=f"^{told}"):
        table(tmp_path, change)


def command(*arguments) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, str(ROOT / "analysis/relabel.py"), *map(str, arguments)]
    return subprocess.run(script, capture_output=True, text=True, check=False)


def test_the_command_prints_what_changes_and_writes_when_asked(tmp_path):
    path = run(tmp_path, "learned", losses())
    run(tmp_path, "old", losses(), judged=False)
    before = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    done = command(tmp_path, "verdict.stalled_below=0.9")
    assert (done.returncode, done.stderr) == (0, "")
    assert "stable -> stalled" in done.stdout
    assert "1 of 2 runs change their verdict, 1 their label or spikes" in done.stdout
    assert "1 runs: older record" in done.stdout
    assert {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()} == before

    assert "written: 1 of 1" in command(tmp_path, "verdict.stalled_below=0.9", "--write").stdout
    record = store.read_record(path)
    first = json.loads(before[path / "run.json"])
    assert (record["verdict"], record["relabelled_from"]["verdict"]) == ("stalled", "stable")
    assert record["detector"]["verdict"]["stalled_below"] == 0.9
    assert {k: v for k, v in record.items() if k in NUMBERS} == NUMBERS
    assert store.read_record(tmp_path / "made/old") == json.loads(before[tmp_path / "made/old/run.json"])

    assert "written: 0 of 1" in command(tmp_path, "--write").stdout  # its own rules are the new ones now
    assert "written: 1 of 1" in command(tmp_path, "verdict.stalled_below=0.1", "--write").stdout
    again = store.read_record(path)
    assert again["relabelled_from"] == record["relabelled_from"]  # the first label is kept
    assert {k: v for k, v in again.items() if k != "relabelled_from"} == first
    assert table(tmp_path).verdict["learned"] == "stable"


def test_a_run_that_another_process_holds_is_left_alone(tmp_path):
    path = run(tmp_path, "learned", losses())
    with store.alone(path) as mine:
        assert mine
        assert "written: 0 of 1" in command(tmp_path, "verdict.stalled_below=0.9", "--write").stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{}", "spikes.mad.kapa=6"], "spikes.mad.kapa: accepted"),
        (["{}", "spikes.mad.kappa=-1"], "spikes.mad.kappa=-1.0; accepted: above 0"),
        (["{}/none"], "no such folder"),
        (["spikes.mad.kappa=6"], "no folder of runs"),
        (["{}/empty"], "no finished training run below"),
    ],
)
def test_an_error_is_one_line_and_status_2(tmp_path, arguments, told):
    run(tmp_path, "calm", losses())
    (tmp_path / "empty").mkdir()
    done = command(*(a.format(tmp_path) for a in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("relabel.py: ")
    assert told in done.stderr
    assert done.stderr.count("\n") == 1
