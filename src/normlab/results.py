"""What analysis reads: run folders as three tables."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml

from normlab.store import LAYERS_SCHEMA, read_record


class Results(NamedTuple):
    """runs: one row per run (settings as dotted columns, and run.json). steps: one row per optimizer step.
    layers: one row per layer statistic. All carry run_id and study."""

    runs: pd.DataFrame
    steps: pd.DataFrame
    layers: pd.DataFrame


def load(paths: str | Path | Iterable[str | Path], *, layers: bool = True) -> Results:
    """Read every run below the given study or run folders, in the order of study and run id.

    A folder whose record is missing or torn is left out and named in runs.attrs["skipped"]. Runs of every status are
    returned; filter on `status` before drawing a conclusion. Raises FileNotFoundError naming a path that is not there.
    layers=False skips the layer tables (and returns an empty one).
    """
    roots = [paths] if isinstance(paths, str | Path) else list(paths)
    runs, steps, tables = [], [], []
    skipped: list[str] = []
    for folder in _run_folders(Path(root) for root in roots):
        record = read_record(folder)
        if record is None or not (folder / "config.yaml").exists():
            skipped.append(f"{folder}: no readable run.json and config.yaml")
            continue
        runs.append(_run_row(folder, record))
        who = {"run_id": record["run_id"], "study": record["study"]}
        steps.append(_read_metrics(folder / "metrics.jsonl").assign(**who))
        if layers:
            parts = sorted(folder.glob("layers/*.parquet"))
            tables += [pd.read_parquet(p).assign(**who) for p in parts]
    run_table = pd.DataFrame(runs)
    run_table.attrs["skipped"] = skipped
    empty_layers = pd.DataFrame(columns=[*LAYERS_SCHEMA.names, "run_id", "study"])
    return Results(
        run_table,
        pd.concat(steps, ignore_index=True) if steps else pd.DataFrame(columns=["run_id", "study", "step"]),
        _typed_layers(pd.concat(tables, ignore_index=True) if tables else empty_layers),
    )


def _run_folders(roots: Iterable[Path]) -> Iterator[Path]:
    found: dict[Path, None] = {}
    for root in roots:
        if not root.is_dir():
            raise FileNotFoundError(f"{root}: no such folder; accepted: a study (runs/STUDY) or one run's folder")
        records = [root / "run.json"] if (root / "run.json").exists() else sorted(root.rglob("config.yaml"))
        found |= dict.fromkeys(r.parent.resolve() for r in records)
    yield from sorted(found, key=lambda f: (f.parent.name, f.name))


def _run_row(folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    flat = pd.json_normalize(settings, sep=".").iloc[0].to_dict()
    # The record wins where both have a key: it holds the numbers that were measured.
    return {**flat, **record, "path": str(folder)}


def _read_metrics(path: Path) -> pd.DataFrame:
    """metrics.jsonl as float columns; NaN and Infinity stay numbers. A torn last line, left by a kill, is dropped."""
    rows = []
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number != len(lines) - 1:
                raise ValueError(f"{path}: line {number + 1} is not JSON") from None
    table = pd.DataFrame(rows, columns=None if rows else ["step"])
    return table.astype({c: "int64" if c in {"step", "tokens"} else "float64" for c in table.columns})


def _typed_layers(table: pd.DataFrame) -> pd.DataFrame:
    types = {"step": "int64", "layer": "Int64", "value": "float64"}
    return table.astype(types | dict.fromkeys(("stack", "site", "tensor", "stat"), "category"))
