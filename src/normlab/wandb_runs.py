"""Runs as W&B holds them, on its server or in offline logs, in the form of the run folders.

W&B has every row of metrics.jsonl (the full history, never a sample), the settings (its config), run.json (its summary)
and the layer statistics (the artifact `layers`); figures drawn from these have the same CSV. Only the run folder has:

- the layer statistics of runs that did not finish, since they are uploaded once, when no part changes any more;
- `seconds` of steps that a resumed run made twice: an online run's history keeps their first time;
- the last rows of a run that was killed while W&B logged offline, which buffers;
- checkpoint.pt and translations.txt, which no figure reads.

An offline log names the layer statistics and does not hold them: they are read from the run folder that it lies in, or
from where it was written.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from normlab.config import Config
from normlab.journal import WANDB_NAMES

FORM = "wandb://ENTITY/PROJECT, wandb://ENTITY/PROJECT/STUDY or wandb://ENTITY/PROJECT/RUN_ID"
API_SECONDS = 60  # for one request
_COLUMNS = {name: column for column, name in WANDB_NAMES.items()}
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # W&B's JSON has them as text
_WANTED = re.compile(r'\{"num":\d+,"type":"(run|history|summary|artifact)"')


class WandbRun(NamedTuple):
    """settings: config.yaml. record: run.json. rows: metrics.jsonl. parts: layers/*.parquet. note: what is missing."""

    where: str
    settings: dict[str, Any]
    record: dict[str, Any]
    rows: list[dict[str, Any]]
    parts: list[Path]
    note: str = ""


def is_address(path: str | Path) -> bool:
    return str(path).startswith("wandb:")


def from_server(address: str | Path, *, layers: bool = True) -> Iterator[WandbRun]:
    """The runs of a project, of a study (a W&B group) or one run. A run's parts lie there until the next is asked for.

    Raises FileNotFoundError where the address leads to no run and ConnectionError where W&B does not answer.
    """
    match = re.fullmatch(r"wandb:/{0,2}([^/]+)/([^/]+)(?:/([^/]+))?/?", str(address))
    if match is None:
        raise FileNotFoundError(f"{address}: not an address of W&B; accepted: {FORM}")
    entity, project, name = match.groups()
    filters = {"$or": [{"group": name}, {"name": name}]} if name else {}  # W&B's `name` is the run's id
    import wandb

    try:
        api = wandb.Api(timeout=API_SECONDS)
        runs = list(api.runs(f"{entity}/{project}", filters=filters, lazy=False))
    except ValueError as error:  # an unknown project
        raise FileNotFoundError(f"{address}: {_one_line(error)}; accepted: {FORM}") from None
    except (wandb.Error, OSError) as error:
        raise ConnectionError(f"{address}: {_one_line(error)}") from None
    if not runs:
        raise FileNotFoundError(f"{address}: no run there; accepted: {FORM}")
    for run in sorted(runs, key=lambda run: (run.group or "", run.id)):
        with tempfile.TemporaryDirectory(prefix="normlab-") as folder:
            try:
                rows = {int(row["_step"]): row for row in run.scan_history()}
                wanted = layers and bool(run.config)
                parts = _downloaded(run, Path(folder)) if wanted else []
            except (wandb.Error, OSError, ValueError, KeyError) as error:
                yield WandbRun(run.url, {}, {}, [], [], f"not read from W&B: {_one_line(error)}")
                continue
            note = "" if parts or not wanted else "its layer statistics are not in W&B"
            yield _told(run.url, run.config, run.summary_metrics, rows, parts, note)


def _downloaded(run: Any, folder: Path) -> list[Path]:
    """The newest version of the run's layer statistics."""
    versions = [a for a in run.logged_artifacts() if a.type == "layers"]
    for artifact in [a for a in versions if "latest" in a.aliases] or versions[-1:]:
        return sorted(Path(artifact.download(root=str(folder))).glob("*.parquet"))
    return []


def logs(root: Path) -> list[Path]:
    """The W&B logs below a folder, or the one that is given."""
    return [root] if root.suffix == ".wandb" else sorted(root.rglob("*.wandb"))


def from_logs(paths: Iterable[Path], *, layers: bool = True) -> Iterator[WandbRun]:
    """The runs of these logs, in the order of study and run id. Several logs of one run are one run."""
    of_run: dict[str, list[Path]] = {}
    for path in sorted(paths, key=lambda path: path.parent.name):  # run-TIME-ID
        of_run.setdefault(path.stem, []).append(path)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(lambda mine: _from_log(mine, layers), of_run.values()))
    yield from sorted(found, key=lambda run: (str(run.record.get("study")), str(run.record.get("run_id"))))


def _from_log(paths: list[Path], layers: bool) -> WandbRun:
    where = str(paths[-1])
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    rows: dict[int, dict[str, Any]] = {}
    named: list[Path] = []
    try:
        for path in paths:
            for record in _records(path):
                told = record[record["type"]]
                if record["type"] == "run":
                    config |= told.get("config", {}).get("update", {})
                elif record["type"] == "summary":
                    summary |= told.get("update", {})
                elif record["type"] == "history":
                    row = told["item"]
                    rows.setdefault(int(row["_step"]), {}).update(row)
                elif told.get("type") == "layers":
                    named = [_part(path, content) for content in told["manifest"]["contents"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return WandbRun(where, {}, {}, [], [], f"not a readable W&B log: {_one_line(error)}")
    parts = [part for part in named if part.exists()] if layers else []
    note = ""
    if layers and (not named or len(parts) < len(named)):
        gone = [str(part) for part in named if not part.exists()]
        note = f"its layer statistics are not there: {', '.join(gone) or 'none in this log'}"
    return _told(where, config, summary, rows, parts if not note else [], note)


def _records(log: Path) -> Iterator[dict[str, Any]]:
    """The log's records that tell of the run, by W&B's own reader."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if _WANTED.match(line)]
    if done.returncode and not found:
        raise ValueError(done.stderr.strip() or f"wandb leet inspect ended with status {done.returncode}")
    yield from found


def _part(log: Path, content: Mapping[str, Any]) -> Path:
    """A file of an offline artifact: in the run folder around the log, else where it was logged from."""
    beside = log.absolute().parents[2] / "layers" / content["path"]
    return beside if beside.exists() else Path(content["local_path"])


def _told(
    where: str,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    rows: Mapping[int, Mapping[str, Any]],
    parts: list[Path],
    note: str,
) -> WandbRun:
    plain = {key: value for key, value in config.items() if not key.startswith("_")}
    ours = {key: plain.pop(key) for key in ("run_id", "data_sha256") if key in plain}
    told = {key: value for key, value in summary.items() if not key.startswith("_") and "/" not in key}
    if not {"run_id", "data_sha256"} <= set(ours) or "study" not in plain:
        return WandbRun(where, {}, {}, [], [], "not a run of normlab: no run_id, data_sha256 and study in its config")
    metrics = []
    for step, row in sorted(rows.items()):
        if WANDB_NAMES["loss"] in row:  # a step's row, not a picture's
            mine = {_COLUMNS[name]: _number(value) for name, value in row.items() if name in _COLUMNS}
            metrics.append({"step": step, **mine})
    # W&B has a summary from the first row on, and a run that was killed before told no status
    record = {"study": plain["study"], "status": "running", **ours, **_number(told)}
    return WandbRun(where, _typed(plain), record, metrics, parts, note)


def _number(value: Any) -> Any:
    """With the numbers that are not finite, at any depth, as numbers."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, Mapping):
        return {key: _number(inner) for key, inner in value.items()}
    return [_number(inner) for inner in value] if isinstance(value, list) else value


def _typed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as config.yaml holds them: in its order, and with 4.0 where W&B has made it 4.

    Settings of another version than this one stay as W&B has them.
    """
    tree: dict[str, Any] = {}
    for key, value in config.items():
        section, *rest = key.split(".")
        if isinstance(config.get(section), Mapping):  # beside it stand a sweep's parameters, under dotted keys
            tree[section] = config[section]
            continue
        inner = tree
        for name in rest:
            inner, section = inner.setdefault(section, {}), name
        inner[section] = value
    data = tree.get("data", {})
    away = {k: v for k, v in data.items() if isinstance(v, str) and v.startswith("/")}
    try:  # the data need not lie on this machine, but some path must
        typed = Config.model_validate(tree | {"data": data | dict.fromkeys(away, "/")}).model_dump(mode="json")
    except ValidationError:
        return tree
    return typed | {"data": typed["data"] | away}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
