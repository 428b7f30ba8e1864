"""What analysis reads: runs as three tables, from their folders or from W&B."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from normlab import wandb_runs
from normlab.store import LAYERS_SCHEMA, MIXED, of_every_step, read_record
from normlab.wandb_runs import WandbRun

_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # eight times faster, where PyYAML was built with libyaml
Whole = tuple[dict[str, Any], pd.DataFrame, Sequence[Path | pa.Table]]  # a run's row, steps, parts of its layers
_TEXT = ("stack", "site", "tensor", "stat")
_NO_LAYERS = LAYERS_SCHEMA.empty_table().cast(
    pa.schema([f.with_type(pa.dictionary(pa.int32(), f.type)) if f.name in _TEXT else f for f in LAYERS_SCHEMA])
)
STEP_COLUMNS = ("step", "tokens", "lr", "loss", "grad_norm", "update_norm", "seconds", "val_loss")

EARLIER = {"tf32": False, "attention": "auto", "world_size": 1}  # of runs from before these were written


class Results(NamedTuple):
    """runs: one row per run (settings as dotted columns, and run.json). steps: one row per optimizer step.
    layers: one row per layer statistic. All carry run_id and study."""

    runs: pd.DataFrame
    steps: pd.DataFrame
    layers: pd.DataFrame


def load(paths: str | Path | Iterable[str | Path], *, layers: bool = True, most_rows: int | None = None) -> Results:
    """Read every run below the given study or run folders, in the order of study and run id.

    A folder without run folders is searched for offline W&B logs (offline-run-*/), and wandb://ENTITY/PROJECT[/STUDY]
    is read from the W&B server; normlab.wandb_runs says what only a run folder has. These runs come last.

    What cannot be read whole is left out and named with the reason in runs.attrs["skipped"]. Runs of every status are
    returned; filter on `status` before drawing a conclusion. Raises FileNotFoundError naming a path that is not there,
    and ConnectionError where W&B does not answer. layers=False skips the layer tables (and returns an empty one).
    most_rows: where the layer tables have more, what they hold for every step (meter.STATS) is read at each k-th step
    alone, which runs.attrs["skipped"] says too.
    """
    whole: list[tuple[str, dict[str, Any], pd.DataFrame, Sequence[Path | pa.Table], str]] = []
    runs, steps, layer_counts = [], [], []
    tables: list[pa.Table] = []
    skipped: list[str] = []
    count = 0
    for where, read, note in _found([paths] if isinstance(paths, str | Path) else paths, layers):
        try:
            row, mine, parts = read()
            count += sum(pq.read_metadata(p).num_rows if isinstance(p, Path) else len(p) for p in parts)
            whole.append((where, row, mine, parts, note))
        except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
            skipped.append(_why(where, error))
    every = -(-count // most_rows) if most_rows else 1
    for where, row, mine, parts, note in whole:
        try:
            read_parts = [_read_layers(part, every) for part in parts]
        except (OSError, ValueError, KeyError, TypeError) as error:
            skipped.append(_why(where, error))
            continue
        runs.append(row)
        steps.append(mine)
        tables += read_parts
        layer_counts.append(sum(map(len, read_parts)))
        skipped += [f"{where}: {note}"] if note else []
    run_table = pd.DataFrame(runs)
    if every > 1:
        skipped.append(f"{count / 1e6:.0f} million layer rows: those of every step are shown at each {every}th step")
    run_table.attrs["skipped"] = skipped
    step_table = pd.concat(steps, ignore_index=True) if steps else pd.DataFrame(columns=list(STEP_COLUMNS))
    return Results(
        run_table,
        _of_runs(step_table, runs, list(map(len, steps))),
        _of_runs(_layer_table(tables), runs, layer_counts),
    )


def _of_runs(table: pd.DataFrame, runs: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> pd.DataFrame:
    """With the columns run_id and study; the rows are those of one run after the other, counts of them."""
    index = pa.array(np.repeat(np.arange(len(runs), dtype="int32"), counts))
    for name in ("run_id", "study"):
        names = pa.array([run[name] for run in runs], pa.large_string())
        table[name] = pd.Series(names.take(index), dtype="str")
    return table


def _why(where: str, error: Exception) -> str:
    return f"{where}: {' '.join(str(error).split()) or type(error).__name__}"


def _found(paths: Iterable[str | Path], layers: bool) -> Iterator[tuple[str, Callable[[], Whole], str]]:
    """Where a run is, what reads it, and what is known to be missing there."""
    addresses = [path for path in paths if wandb_runs.is_address(path)]
    roots = [Path(path) for path in paths if path not in addresses]
    folders: set[Path] = set()
    logs: set[Path] = set()
    for root in roots:
        if not root.is_dir() and not (root.suffix == ".wandb" and root.exists()):
            raise FileNotFoundError(
                f"{root}: no such folder; accepted: a study (runs/STUDY), one run's folder, "
                f"a folder of offline W&B logs, {wandb_runs.FORM}"
            )
        mine = _run_folders(root)
        folders |= mine
        logs |= set() if mine else {log.resolve() for log in wandb_runs.logs(root)}
    for folder in sorted(folders, key=lambda f: (f.parent.name, f.name, f)):
        yield str(folder), lambda folder=folder: _of_folder(folder, layers), ""
    from_wandb = [wandb_runs.from_logs(logs, layers=layers)] if logs else []
    from_wandb += [wandb_runs.from_server(address, layers=layers) for address in addresses]
    for run in chain.from_iterable(from_wandb):
        yield run.where, lambda run=run: _of_wandb(run), run.note if run.record else ""


def _run_folders(root: Path) -> set[Path]:
    """Folders that hold a run.json or a config.yaml, not those that W&B keeps inside a run."""
    found: set[Path] = set()
    for name in ("run.json", "config.yaml"):
        files = [root / name] if (root / name).exists() else root.rglob(name)
        found |= {
            f.parent.resolve()
            for f in files
            if "wandb" not in f.relative_to(root).parts and not any(f.parent.parent.glob("*.wandb"))
        }
    return found


def _of_folder(folder: Path, layers: bool) -> Whole:
    record = read_record(folder)
    if not isinstance(record, dict) or not {"run_id", "study", "status"} <= set(record):
        raise ValueError("no readable run.json")
    settings = yaml.load((folder / "config.yaml").read_text(), _YAML)
    if not isinstance(settings, dict):
        raise ValueError("no readable config.yaml")
    steps = _step_table(_read_metrics(folder / "metrics.jsonl"))
    return _run_row(settings, record, str(folder)), steps, sorted(folder.glob("layers/*.parquet")) if layers else []


def _of_wandb(run: WandbRun) -> Whole:
    if not run.record:
        raise ValueError(run.note)
    parts = [_read_part(part) for part in run.parts]  # which are gone once the next run is asked for
    return _run_row(run.settings, run.record, run.where), _step_table(run.rows), parts


def _run_row(settings: dict[str, Any], record: dict[str, Any], path: str) -> dict[str, Any]:
    # The record wins where both have a key: it holds the numbers that were measured.
    return {**EARLIER, **dict(_flat(settings)), **record, "path": path}


def _flat(settings: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values, plain ones before those of sections."""
    for key, value in sorted(settings.items(), key=lambda item: isinstance(item[1], dict)):
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl. A torn last line, left by a kill, is dropped."""
    rows = []
    lines = path.read_text().splitlines() if path.exists() else []
    with suppress(ValueError):  # whole, as mostly: read at once, which takes half the time
        return list(map(dict, json.loads(f"[{','.join(lines)}]")))
    for number, line in enumerate(lines):
        try:
            rows.append(dict(json.loads(line)))
        except ValueError:
            if number != len(lines) - 1:
                raise ValueError(f"{path}: line {number + 1} is not JSON") from None
    return rows


def _step_table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows as float columns; NaN and Infinity stay numbers."""
    columns = list(dict.fromkeys([*STEP_COLUMNS, *(key for row in rows for key in row)]))
    table = pd.DataFrame({c: np.array([row.get(c) for row in rows], dtype="float64") for c in columns})
    return table.astype({"step": "int64"})


def _read_layers(part: Path | pa.Table, every: int) -> pa.Table:
    """A part of the layer table, text columns as dictionaries; of the statistics of every step each `every`th."""
    table = _read_part(part, every) if isinstance(part, Path) else part
    if every > 1:
        table = table.filter(pa.array(~of_every_step(table) | (table["step"].to_numpy() % every == 0)))
    return table


def _read_part(path: Path, every: int = 1) -> pa.Table:
    """A part, without the row groups that hold nothing but every-step statistics of other steps than each `every`th."""
    with pq.ParquetFile(path, read_dictionary=list(_TEXT)) as part:
        mixed = (part.metadata.metadata or {}).get(MIXED)
        if every == 1 or mixed is None:  # None: written by another version
            return part.read()
        wanted = set(json.loads(mixed))
        for group in range(part.num_row_groups):
            steps = part.metadata.row_group(group).column(LAYERS_SCHEMA.get_field_index("step")).statistics
            if steps is None or steps.max // every * every >= steps.min:
                wanted.add(group)
        return part.read_row_groups(sorted(wanted))


def _layer_table(parts: list[pa.Table]) -> pd.DataFrame:
    """All parts, which are given up column by column: there is not room for them twice."""
    whole = pa.concat_tables([_NO_LAYERS, *parts])
    parts.clear()
    columns: dict[str, Any] = {}
    for name in LAYERS_SCHEMA.names:
        column, whole = whole[name], whole.drop_columns(name)
        if name in _TEXT:
            text = column.unify_dictionaries().to_pandas()
            columns[name] = text.cat.set_categories(sorted(text.dropna().unique()))
        elif name == "layer":
            columns[name] = pd.Int64Dtype().__from_arrow__(column)
        else:
            columns[name] = column.to_numpy()
    return pd.DataFrame(columns, copy=False)
