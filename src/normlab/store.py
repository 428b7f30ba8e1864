"""What a run writes: runs/<study>/<run_id>/ with config.yaml, run.json, metrics.jsonl and layers/*.parquet."""

import fcntl
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
import yaml

from normlab.config import Config, RelaunchConfig
from normlab.files import naming, replacing, write_atomically
from normlab.meter import STATS
from normlab.tensors import TensorId

PART_ROWS = 200_000  # rows of layer statistics held in memory before a Parquet part is written
GROUP_ROWS = 2**14  # of a part, which a reader who wants some steps can read alone
MIXED = b"mixed_row_groups"  # Parquet metadata of a part: the row groups that hold more than every-step statistics
_ID_FIELDS = ("stack", "layer", "site", "tensor")
PACKAGES = ("torch", "hydra-core", "wandb", "numpy", "pandas")


def run_id(cfg: Config, data_sha256: str, device_type: str, world_size: int = 1) -> str:
    """First 10 hex digits of the SHA-256 of the canonical JSON of all that can change a number of the result.

    world_size: ranks of the run; like `threads`, they decide the order of sums, and so their last bits.
    """
    identity = {**cfg.identity(), "data_sha256": data_sha256, "device_type": device_type}
    if world_size > 1:
        identity["world_size"] = world_size
    if device_type != "cpu":
        del identity["threads"]
    if device_type != "cuda":
        identity.pop("tf32", None)
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


def relaunched(earlier: Mapping[str, Any], rules: RelaunchConfig) -> str:
    """skip, resume or restart: what to do with a run by the record that an earlier launch left, if one did.

    A run whose record says `running` while nobody holds its folder was killed.
    """
    status = earlier.get("status")
    if status == "finished":
        return rules.finished
    return rules.failed if status == "failed" else rules.interrupted if status else "resume"


class RunFolder:
    """Writer of one run. Opening it drops what an earlier attempt left, but for what a checkpoint `kept`."""

    def __init__(
        self, path: Path, cfg: Config, record: Mapping[str, Any], kept: Mapping[str, Any] | None = None
    ) -> None:
        self.path = path
        self.record = dict(record)
        self._tables: list[pa.Table] = []  # rows that are in no part yet
        self._waiting = 0
        self._ids: dict[tuple[str, ...], pa.Table] = {}
        self._part_count = 0
        (path / "layers").mkdir(parents=True, exist_ok=True)
        (path / "traceback.txt").unlink(missing_ok=True)
        for left in [*path.glob(".*.tmp"), *path.glob("layers/.*.tmp")]:  # by a kill
            left.unlink()
        if kept is None:
            kept = {"rows": 0, "parts": 0, "tail": torch.empty(0, dtype=torch.uint8)}
        for part in self._parts()[kept["parts"] :]:
            part.unlink()
        self._part_count = kept["parts"]
        for table in tail_of(kept):
            self._add(table)
        self.update(status="running")
        write_atomically(path / "config.yaml", yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False))
        self._metrics = (path / "metrics.jsonl").open("r+" if kept["rows"] else "w")
        self._rows = kept["rows"]
        self._metrics.truncate(sum(map(len, _lines(path)[: self._rows])))
        self._metrics.seek(0, os.SEEK_END)

    def update(self, **fields: Any) -> None:
        """Set fields of run.json, on disk at once."""
        self.record |= fields
        write_record(self.path, self.record)

    def metrics(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows to metrics.jsonl and flush. Non-finite numbers are written as NaN and Infinity.

        Raises FileNotFoundError if someone has deleted the file, which would else grow unseen.
        """
        path = self.path / "metrics.jsonl"
        with naming(path):
            self._metrics.writelines(json.dumps(row) + "\n" for row in rows)
            self._metrics.flush()
        self._rows += len(rows)
        if not os.path.samestat(os.fstat(self._metrics.fileno()), path.stat()):
            raise FileNotFoundError(f"{path} was replaced while its run was writing it")

    def layers(self, step: int, rows: pd.DataFrame) -> None:
        """Add tidy rows (probe.COLUMNS) that belong to one step."""
        rows = rows.assign(step=np.int64(step)).astype({"layer": "Int64"})
        self._add(pa.Table.from_pandas(rows, schema=LAYERS_SCHEMA, preserve_index=False))

    def step_statistics(
        self, first_step: int, ids: Sequence[TensorId], stats: Sequence[str], values: np.ndarray
    ) -> None:
        """Add every-step statistics of all tensors, values (steps, len(stats), len(ids)), a step after the other."""
        if tuple(stats) not in self._ids:
            columns = {f: [getattr(i, f) for i in ids] * len(stats) for f in _ID_FIELDS}
            columns["stat"] = [stat for stat in stats for _ in ids]
            fields = [LAYERS_SCHEMA.field(name) for name in columns]
            self._ids[tuple(stats)] = pa.table(columns, schema=pa.schema(fields))
        of_one_step = self._ids[tuple(stats)]
        table = pa.concat_tables([of_one_step] * len(values)).combine_chunks()
        step = np.repeat(np.arange(first_step, first_step + len(values)), len(of_one_step))
        table = table.add_column(0, LAYERS_SCHEMA.field("step"), pa.array(step))
        self._add(table.append_column(LAYERS_SCHEMA.field("value"), pa.array(values.ravel())))

    def kept(self) -> dict[str, Any]:
        """What the folder holds now, on disk for good, for a checkpoint to say how far its run had come."""
        self._metrics.flush()
        os.fsync(self._metrics.fileno())
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(sink, LAYERS_SCHEMA, options=options) as stream:
            stream.write_table(self._pending())
        tail = torch.from_numpy(np.frombuffer(sink.getvalue(), np.uint8).copy())
        return {"rows": self._rows, "parts": self._part_count, "tail": tail}

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl."""
        return [json.loads(line) for line in _lines(self.path)]

    def statistics(self, stats: Sequence[str], width: int) -> Iterator[np.ndarray]:
        """The every-step statistics that were added, as chunks of (steps, len(stats), width)."""
        size, rest = len(stats) * width, np.empty(0)
        for table in [*map(pq.read_table, self._parts()[: self._part_count]), self._pending()]:
            mine = table.filter(pc.field("stat").isin(list(stats)))
            rest = np.concatenate((rest, mine["value"].to_numpy()))
            whole = len(rest) // size * size
            yield rest[:whole].reshape(-1, len(stats), width)
            rest = rest[whole:]

    def close(self) -> None:
        try:
            if self._waiting:
                self._write_part(self._pending())
                self._tables, self._waiting = [], 0
        finally:
            self._metrics.close()

    def _parts(self) -> list[Path]:
        return sorted(self.path.glob("layers/part-*.parquet"))

    def _pending(self) -> pa.Table:
        return pa.concat_tables([LAYERS_SCHEMA.empty_table(), *self._tables]).combine_chunks()

    def _add(self, rows: pa.Table) -> None:
        """Parts are cut at a fixed number of rows, so that they do not tell when rows were added."""
        self._tables.append(rows)
        self._waiting += len(rows)
        if self._waiting < PART_ROWS:
            return
        table = self._pending()
        cut = self._waiting // PART_ROWS * PART_ROWS
        for start in range(0, cut, PART_ROWS):
            self._write_part(table.slice(start, PART_ROWS))
        self._tables, self._waiting = [table.slice(cut)], len(table) - cut

    def _write_part(self, table: pa.Table) -> None:
        target = self.path / "layers" / f"part-{self._part_count:05d}.parquet"
        others = np.flatnonzero(~of_every_step(table))
        mixed = sorted(set((others // GROUP_ROWS).tolist()))
        table = table.replace_schema_metadata({MIXED: json.dumps(mixed)})
        with replacing(target) as temporary:
            pq.write_table(table, temporary, compression="zstd", row_group_size=GROUP_ROWS)
        self._part_count += 1


def of_every_step(layers: pa.Table) -> np.ndarray:
    """(rows,) bool: which rows of a layer table hold a statistic of every step (meter.STATS)."""
    stat = layers["stat"].combine_chunks().dictionary_encode()
    return np.isin(stat.dictionary.to_pylist(), STATS)[stat.indices.to_numpy()]


def check_kept(path: Path, kept: Mapping[str, Any]) -> None:
    """Raise ValueError if the run folder lacks rows that a checkpoint counts on."""
    rows = len(_lines(path))
    if rows < kept["rows"]:
        raise ValueError(f"metrics.jsonl has {rows} of the {kept['rows']} steps before it")
    for number in range(kept["parts"]):
        part = path / "layers" / f"part-{number:05d}.parquet"
        try:
            rows = pq.read_metadata(part).num_rows
        except (OSError, pa.ArrowInvalid) as error:
            raise ValueError(" ".join(str(error).split())) from None
        if rows != PART_ROWS:
            raise ValueError(f"{part} has {rows} rows, not {PART_ROWS}")


def tail_of(kept: Mapping[str, Any]) -> list[pa.Table]:
    """The rows of layer statistics that are in no part yet."""
    return [pa.ipc.open_stream(kept["tail"].numpy()).read_all()] if len(kept["tail"]) else []


def _lines(path: Path) -> list[bytes]:
    """The whole lines of metrics.jsonl."""
    metrics = path / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True) if metrics.exists() else []
    return lines[:-1] if lines and not lines[-1].endswith(b"\n") else lines


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


@cache
def provenance(root: Path) -> dict[str, Any]:
    """Versions, machine and source revision (None outside a git checkout), as this process has loaded them."""

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
