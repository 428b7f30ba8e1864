"""What analysis reads: run folders as three tables."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from normlab.store import LAYERS_SCHEMA, read_record

_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # eight times faster, where PyYAML was built with libyaml
_TEXT = ("stack", "site", "tensor", "stat")
STEP_COLUMNS = ("step", "tokens", "lr", "loss", "grad_norm", "update_norm", "seconds", "val_loss")


class Results(NamedTuple):
    """runs: one row per run (settings as dotted columns, and run.json). steps: one row per optimizer step.
    layers: one row per layer statistic. All carry run_id and study."""

    runs: pd.DataFrame
    steps: pd.DataFrame
    layers: pd.DataFrame


def load(paths: str | Path | Iterable[str | Path], *, layers: bool = True) -> Results:
    """Read every run below the given study or run folders, in the order of study and run id.

    A folder that cannot be read whole is left out and named with the reason in runs.attrs["skipped"]. Runs of every
    status are returned; filter on `status` before drawing a conclusion. Raises FileNotFoundError naming a path that is
    not there. layers=False skips the layer tables (and returns an empty one).
    """
    roots = [paths] if isinstance(paths, str | Path) else list(paths)
    runs, steps, tables = [], [], []
    skipped: list[str] = []
    for folder in _run_folders(Path(root) for root in roots):
        try:
            row = _run_row(folder)
            who = {"run_id": row["run_id"], "study": row["study"]}
            mine = _read_metrics(folder / "metrics.jsonl").assign(**who)
            parts = [_read_layers(p, who) for p in sorted(folder.glob("layers/*.parquet")) if layers]
        except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
            skipped.append(f"{folder}: {' '.join(str(error).split()) or type(error).__name__}")
            continue
        runs.append(row)
        steps.append(mine)
        tables += parts
    run_table = pd.DataFrame(runs)
    run_table.attrs["skipped"] = skipped
    empty_layers = pd.DataFrame(columns=[*LAYERS_SCHEMA.names, "run_id", "study"])
    return Results(
        run_table,
        pd.concat(steps, ignore_index=True) if steps else pd.DataFrame(columns=[*STEP_COLUMNS, "run_id", "study"]),
        _typed_layers(pa.concat_tables(tables).unify_dictionaries().to_pandas() if tables else empty_layers),
    )


def _run_folders(roots: Iterable[Path]) -> Iterator[Path]:
    """Folders that hold a run.json or a config.yaml, not those that W&B keeps inside a run."""
    found: set[Path] = set()
    for root in roots:
        if not root.is_dir():
            raise FileNotFoundError(f"{root}: no such folder; accepted: a study (runs/STUDY) or one run's folder")
        for name in ("run.json", "config.yaml"):
            files = [root / name] if (root / name).exists() else root.rglob(name)
            found |= {f.parent.resolve() for f in files if "wandb" not in f.relative_to(root).parts}
    yield from sorted(found, key=lambda f: (f.parent.name, f.name, f))


def _run_row(folder: Path) -> dict[str, Any]:
    record = read_record(folder)
    if not isinstance(record, dict) or not {"run_id", "study", "status"} <= set(record):
        raise ValueError("no readable run.json")
    settings = yaml.load((folder / "config.yaml").read_text(), _YAML)
    if not isinstance(settings, dict):
        raise ValueError("no readable config.yaml")
    # The record wins where both have a key: it holds the numbers that were measured.
    return {**dict(_flat(settings)), **record, "path": str(folder)}


def _flat(settings: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values, plain ones before those of sections."""
    for key, value in sorted(settings.items(), key=lambda item: isinstance(item[1], dict)):
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _read_metrics(path: Path) -> pd.DataFrame:
    """metrics.jsonl as float columns; NaN and Infinity stay numbers. A torn last line, left by a kill, is dropped."""
    rows = []
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines):
        try:
            rows.append(dict(json.loads(line)))
        except ValueError:
            if number != len(lines) - 1:
                raise ValueError(f"{path}: line {number + 1} is not JSON") from None
    columns = list(dict.fromkeys([*STEP_COLUMNS, *(key for row in rows for key in row)]))
    table = pd.DataFrame({c: np.array([row.get(c) for row in rows], dtype="float64") for c in columns})
    return table.astype({"step": "int64"})


def _read_layers(path: Path, who: dict[str, str]) -> pa.Table:
    """A part of the layer table with the run's names beside it; text columns as dictionaries."""
    with pq.ParquetFile(path, read_dictionary=list(_TEXT)) as part:
        table = part.read()
    for name, value in who.items():
        table = table.append_column(name, pa.repeat(value, len(table)).dictionary_encode())
    return table


def _typed_layers(table: pd.DataFrame) -> pd.DataFrame:
    text = {name: pd.CategoricalDtype(sorted(table[name].dropna().unique())) for name in _TEXT}
    plain = {"step": "int64", "layer": "Int64", "value": "float64", "run_id": "str", "study": "str"}
    return table.astype(plain | text)
