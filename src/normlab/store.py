"""What a run writes: runs/<study>/<run_id>/ with config.yaml, run.json, metrics.jsonl and layers/*.parquet."""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from normlab.config import Config
from normlab.tensors import TensorId

PART_ROWS = 200_000  # rows of layer statistics held in memory before a Parquet part is written
_ID_FIELDS = ("stack", "layer", "site", "tensor")
PACKAGES = ("torch", "hydra-core", "wandb", "numpy", "pandas")


def run_id(cfg: Config, data_sha256: str, device_type: str) -> str:
    """First 10 hex digits of the SHA-256 of the canonical JSON of all that can change a number of the result."""
    identity = {**cfg.identity(), "data_sha256": data_sha256, "device_type": device_type}
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:10]


def read_record(folder: Path) -> dict[str, Any] | None:
    """run.json of a run folder, None where there is none or it is torn."""
    try:
        return json.loads((folder / "run.json").read_text())
    except (OSError, ValueError):
        return None


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    write_atomically(folder / "run.json", json.dumps(record, indent=2) + "\n")


@contextmanager
def unbroken() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until what belongs together is written."""
    if threading.current_thread() is not threading.main_thread():  # which alone gets them
        yield
        return
    held: list[int] = []
    before = {s: signal.signal(s, lambda number, _frame: held.append(number)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in held[:1]:
            signal.raise_signal(number)


@contextmanager
def alone(path: Path) -> Iterator[bool]:
    """Hold the run folder against other processes; False if one of them holds it. A dead owner holds nothing."""
    path.mkdir(parents=True, exist_ok=True)
    with (path / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


class RunFolder:
    """Writer of one run. Opening it clears what an earlier attempt left."""

    def __init__(self, path: Path, cfg: Config, record: Mapping[str, Any]) -> None:
        self.path = path
        self.record = dict(record)
        self._parts: list[pa.Table] = []
        self._ids: dict[str, pa.Array] | None = None
        self._part_count = 0
        (path / "layers").mkdir(parents=True, exist_ok=True)
        for old in [*path.glob("layers/*.parquet"), path / "metrics.jsonl", path / "traceback.txt"]:
            old.unlink(missing_ok=True)
        shutil.rmtree(path / "wandb", ignore_errors=True)  # two offline records of one id would be merged by a sync
        self.update(status="running")
        write_atomically(path / "config.yaml", yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False))
        self._metrics = (path / "metrics.jsonl").open("w")

    def update(self, **fields: Any) -> None:
        """Set fields of run.json, on disk at once."""
        self.record |= fields
        write_record(self.path, self.record)

    def metrics(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows to metrics.jsonl and flush. Non-finite numbers are written as NaN and Infinity."""
        self._metrics.writelines(json.dumps(row) + "\n" for row in rows)
        self._metrics.flush()

    def layers(self, step: int, rows: pd.DataFrame) -> None:
        """Add tidy rows (probe.COLUMNS) that belong to one step."""
        rows = rows.assign(step=np.int64(step)).astype({"layer": "Int64"})
        self._add(pa.Table.from_pandas(rows, schema=LAYERS_SCHEMA, preserve_index=False))

    def step_statistics(self, first_step: int, ids: Sequence[TensorId], stats: Mapping[str, np.ndarray]) -> None:
        """Add every-step statistics of all tensors: each value of `stats` is (steps, len(ids))."""
        steps = len(next(iter(stats.values())))
        if self._ids is None:
            self._ids = {f: pa.array([getattr(i, f) for i in ids], LAYERS_SCHEMA.field(f).type) for f in _ID_FIELDS}
        step = pa.array(np.repeat(np.arange(first_step, first_step + steps), len(ids)))
        shared = {"step": step, **{f: pa.concat_arrays([column] * steps) for f, column in self._ids.items()}}
        for stat, values in stats.items():
            named = pa.repeat(stat, values.size)
            self._add(pa.table({**shared, "stat": named, "value": values.ravel()}, schema=LAYERS_SCHEMA))

    def close(self) -> None:
        self._write_part()
        self._metrics.close()

    def _add(self, rows: pa.Table) -> None:
        self._parts.append(rows)
        if sum(map(len, self._parts)) >= PART_ROWS:
            self._write_part()

    def _write_part(self) -> None:
        if not self._parts:
            return
        table = pa.concat_tables(self._parts)
        target = self.path / "layers" / f"part-{self._part_count:05d}.parquet"
        temporary = target.with_suffix(".tmp")
        pq.write_table(table, temporary, compression="zstd")
        temporary.replace(target)
        self._part_count += 1
        self._parts.clear()


LAYERS_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("stack", pa.string()),
        ("layer", pa.int64()),
        ("site", pa.string()),
        ("tensor", pa.string()),
        ("stat", pa.string()),
        ("value", pa.float64()),
    ]
)


def write_atomically(path: Path, text: str) -> None:
    """A reader or a crash sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def provenance(root: Path) -> dict[str, Any]:
    """Versions, machine and source revision (None outside a git checkout)."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    status = git("status", "--porcelain", "--untracked-files=no")
    return {
        "git_commit": git("rev-parse", "HEAD"),
        "git_dirty": None if status is None else bool(status),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }
