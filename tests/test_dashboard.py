"""The W&B workspace and report as code: what they show is what a real run logs. No test reaches a server."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, tiny

import dashboard
from normlab.train import train

SCRIPT = [sys.executable, str(ROOT / "analysis" / "dashboard.py")]


@pytest.fixture(scope="module")
def logged(tmp_path_factory) -> dict[str, Any]:
    """config, summary and the rows' names of one real run with a spike."""
    folder = tmp_path_factory.mktemp("runs")
    spiky = ["spikes.mad.kappa=0.5", "spikes.mad.min_height=0", "eval.every=10", "steps=60"]
    train(tiny(folder, "log=offline", *spiky))
    (log,) = folder.rglob("*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found: dict[str, Any] = {"config": {}, "summary": {}, "rows": set()}
    for record in map(json.loads, lines):
        if record["type"] == "run":
            found["config"] |= record["run"]["config"]["update"]
        elif record["type"] == "summary":
            found["summary"] |= record["summary"]["update"]
        elif record["type"] == "history":
            found["rows"] |= set(record["history"]["item"])
    return found


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    done = subprocess.run([*SCRIPT, "--dry-run", "--study", "demo"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def under(tree: Any, key: str) -> Iterator[Any]:
    """Every value of this key, at any depth."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name == key:
                yield value
            yield from under(value, key)
    elif isinstance(tree, list):
        for inner in tree:
            yield from under(inner, key)


def views(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panels in under(spec, "panels") if isinstance(panels, list) for panel in panels]


def at(tree: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        tree = tree[name]
    return tree


@pytest.mark.parametrize("part", ["workspace", "report"])
def test_a_line_bar_or_picture_is_a_name_that_a_run_logs(part, spec, logged):
    flat = logged["rows"] | set(logged["summary"])
    lines = [name for panel in views(spec[part]) for name in panel["config"].get("metrics", [])]
    assert set(lines) - flat == set()
    assert {"train/loss", "train/loss_spike", "val/loss", "spike_count", "verdict/diverged"} <= set(lines)
    for key in [key for keys in under(spec[part], "mediaKeys") for key in keys]:
        assert f"{key}._type" in logged["rows"] or key in flat
    regexes = list(under(spec[part], "metricRegex"))
    assert len(regexes) == 2
    matched = [{name for name in logged["rows"] if re.search(regex, name)} for regex in regexes]
    assert matched[0] == {"grad_norm/layer_000", "grad_norm/layer_001"}
    assert {name.split("_w")[0] for name in matched[1]} == {
        f"spikes/{series}_{rule}" for series in ("loss", "grad_norm") for rule in ("olmo", "olmo_core", "mad")
    }
    assert re.search(regexes[0], "grad_norm/encoder_layer_003")


@pytest.mark.parametrize("part", ["workspace", "report"])
def test_an_axis_or_group_is_a_setting_or_a_number_of_the_summary(part, spec, logged):
    axes = [panel["config"][axis] for panel in views(spec[part]) for axis in ("xAxis", "yAxis") if
            panel["viewType"] == "Scatter Plot"]  # fmt: skip
    axes += list(under(spec[part], "accessor"))
    axes += [f"config:{key}" for key in under(spec[part], "groupBy")]
    assert len(axes) > 10
    for axis in axes:
        kind, key = axis.split(":")
        assert kind in {"config", "summary"}
        section, _, rest = key.partition(".value.")
        assert at(logged[kind], f"{section}.{rest}" if rest else key) is not None


def test_the_tables_and_columns_are_logged(spec, logged):
    assert '"spikes/events"' in json.dumps(spec["workspace"])
    assert "spikes/events._type" in logged["rows"] or "spikes/events" in logged["summary"]
    (pinned,) = [found for found in under(spec["workspace"], "columnPinned") if found]
    assert {c.removeprefix("summary:") for c in pinned if c.startswith("summary:")} <= set(logged["summary"])


def test_runs_are_grouped_by_study_and_placement(spec):
    for part in ("workspace", "report"):
        for runs in [runset for sets in under(spec[part], "runSets") for runset in sets]:
            assert [key["name"] for key in runs["grouping"]] == ["group", "model.value.placement"]
            (only,) = runs["filters"]["filters"]
            assert (only["key"]["name"], only["op"], only["value"]) == ("group", "=", "demo")
    every = dashboard.spec("us", "ours", None)
    assert (every["workspace"]["entity"], every["workspace"]["project"]) == ("us", "ours")
    assert [runs["filters"].get("filters") for runs in every["workspace"]["spec"]["section"]["runSets"]] == [[]]


def test_the_report_has_the_workspace_s_panels(spec):
    def shown(part: str) -> list[str]:
        return [panel["config"].get("chartTitle", panel["viewType"]) for panel in views(spec[part])]

    assert shown("report") == shown("workspace")
    headings = list(dashboard.panels())
    assert [s["name"] for s in spec["workspace"]["spec"]["section"]["panelBankConfig"]["sections"]] == headings


@pytest.mark.parametrize("login", [{}, {"WANDB_API_KEY": "a" * 40}], ids=["no login", "no network"])
def test_without_a_server_one_line_says_so(login, tmp_path):
    home = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "WANDB_BASE_URL": "http://127.0.0.1:9"}
    done = subprocess.run(
        [*SCRIPT, "--entity", "us"], env=home | login, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("dashboard.py: not saved to W&B: ")
    assert done.stderr.count("\n") == 1
    assert not [p for p in Path(tmp_path).iterdir() if p.name not in {".cache", ".config", ".netrc"}]
