"""Which runs count, and what tells them apart: arms, settings, order."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from normlab import results
from normlab.residual import PLACEMENTS
from normlab.results import Results

DEPTH, PLACEMENT, WARMUP, DATA = "model.depth", "model.placement", "optim.warmup_steps", "data"

MOST_ROWS = 12_000_000  # of layer statistics: about 1 GB
_BATCH = ("data.batch_size", "data.batch_tokens")
_ARITHMETIC = ("tf32", "attention", "compile")
_ORDER = {placement: i for i, placement in enumerate(PLACEMENTS)}


class Missing(Exception):
    """The runs cannot support this figure; the message says what is missing."""


# Settings that name or house a run, or that a figure always shows on an axis of its own.
_NOT_AN_ARM = {DEPTH, "seed", "study", "runs_dir", "force"}
_WORDS = {
    PLACEMENT: lambda v: f"{v}-norm" if v in {"pre", "post"} else str(v),
    WARMUP: lambda v: f"warm-up {v}" if v else "no warm-up",
    "optim.lr": lambda v: f"lr {v:g}",
    "optim.name": str,
    "model.norm": str,
    "model.activation": str,
    "precision": str,
    DATA: str,
}


def load(paths: Iterable[str | Path], *, once: bool = True) -> Results:
    """results.load, with each run once: the same run in two studies is one measurement, not two.

    A layer's number means one block: of an encoder-decoder, the decoder's layers stay. Adds the column `data`: the
    source's name and the start of its hash, in place of the settings that lead to it. once=False keeps a run in every
    study that has it, for whoever looks at one study at a time.
    """
    data = results.load(paths, most_rows=MOST_ROWS)
    if data.runs.empty:
        return data
    runs = data.runs.copy()
    smoothing = runs.get("label_smoothing", pd.Series(0.0, runs.index))
    runs["label_smoothing"] = smoothing.astype(float).fillna(0.0)  # runs from before there was one
    runs[DATA] = runs["data.name"] + " " + runs.get("data_sha256", pd.Series("?", runs.index)).str[:6]
    two = runs[runs.get("model.arch", pd.Series("decoder", runs.index)) == "encoder_decoder"]
    halved = [f"{r.study}/{r.run_id}: an encoder-decoder; its decoder's layers are shown" for _, r in two.iterrows()]
    runs.attrs["skipped"] = data.runs.attrs["skipped"] + halved
    layers = data.layers
    if len(two):
        layers = layers[~(layers.run_id.isin(two.run_id) & (layers["stack"] == "encoder"))]
    found = Results(runs, data.steps, layers)
    return counted_once(found) if once else found


def counted_once(data: Results) -> Results:
    """Each run in the first study that has it."""
    if data.runs.empty or not (again := data.runs.run_id.duplicated()).any():
        return data
    runs = data.runs[~again].reset_index(drop=True)
    counted = [f"{r.study}/{r.run_id}: also in another study; counted once" for _, r in data.runs[again].iterrows()]
    runs.attrs["skipped"] = data.runs.attrs.get("skipped", []) + counted
    kept = pd.MultiIndex.from_frame(runs[["study", "run_id"]])

    def only(rows: pd.DataFrame) -> pd.DataFrame:
        return rows[pd.MultiIndex.from_frame(rows[["study", "run_id"]]).isin(kept)]

    return Results(runs, only(data.steps), only(data.layers))


def trained(data: Results) -> pd.DataFrame:
    """The finished training runs, with a verdict each. A diverged run is one of them; a failed run is not."""
    runs = data.runs
    if runs.empty or not ((runs.status == "finished") & (runs.steps > 0)).any():
        raise Missing("no finished training run (steps > 0) among these")
    return runs[(runs.status == "finished") & (runs.steps > 0)]


def profiled(data: Results) -> pd.DataFrame:
    """One run per initialisation: what cannot change step 0 (learning rate, warm-up, ...) does not count it again.

    Adds `setting`: the initialisation apart from depth, placement and seed, for a panel's title.
    """
    runs = data.runs
    if runs.empty or not (runs.status == "finished").any():
        raise Missing("no finished run among these")
    runs = runs[runs.status == "finished"]
    keys = [c for c in _settings(runs) if c.startswith("model.") and c not in {PLACEMENT, DEPTH}]
    keys += [k for k in (DATA, *_BATCH, "probe.batches", "precision", *_ARITHMETIC) if k in runs]
    named = runs.apply(_setting, axis=1)
    for base in named.unique():  # tell settings of one short name apart by what differs among them
        mine = runs[named == base]
        for key in keys:
            if mine[key].map(str).nunique() > 1:
                named[mine.index] += mine[key].map(lambda value, key=key: f", {_told(key, value)}")
    return runs.assign(setting=named).drop_duplicates(["setting", PLACEMENT, DEPTH, "seed"])


def _setting(run: pd.Series) -> str:
    start = "theory setting" if run["model.init"] == "xiong" else f"{run['model.init']} init"
    return f"{start}, {run['model.activation']}, FFN ×{run['model.ffn_ratio']:g}, width {run['model.width']}"


def settings_in_order(settings: Iterable[str]) -> list[str]:
    """The theory setting first."""
    return sorted(set(settings), key=lambda s: (not s.startswith("theory"), s))


def _settings(runs: pd.DataFrame) -> list[str]:
    """Columns that say what a run is, as opposed to where it lies and what came of it."""
    rules = ("spikes.", "verdict.")  # they label a run and can be changed afterwards
    launch = ("log.", "checkpoint.", "relaunch.")
    dotted = [c for c in runs.columns if "." in c and not c.startswith(("data.", *rules, *launch))]
    plain = (DATA, *_BATCH, "label_smoothing", "steps", "precision", *_ARITHMETIC, "device", "world_size")
    return [c for c in [*dotted, *plain] if c in runs]


def varying(runs: pd.DataFrame) -> list[str]:
    """The settings that differ between these runs, apart from depth, seed and names."""
    return [c for c in _settings(runs) if c not in _NOT_AN_ARM and runs[c].map(str).nunique() > 1]


def with_arms(runs: pd.DataFrame, *apart: str) -> pd.DataFrame:
    """`runs` with `arm`: a readable name of everything that differs but depth, seed and what is shown `apart`."""
    keys = [PLACEMENT, *(k for k in varying(runs) if k not in {PLACEMENT, *apart})]
    return runs.assign(arm=runs.apply(lambda run: ", ".join(_told(k, run[k]) for k in keys), axis=1))


def narrowed(runs: pd.DataFrame, *free: str) -> tuple[pd.DataFrame, str]:
    """The runs of the commonest setting, where more than the `free` keys vary, and a sentence that says so."""
    keys = [k for k in varying(runs) if k not in free]
    if not keys:
        return runs, ""
    names = runs.apply(lambda run: ", ".join(_told(k, run[k]) for k in keys), axis=1)
    counts = names.value_counts()
    chosen = min(counts.index[counts == counts.max()])
    return runs[names == chosen], f" Of {len(counts)} settings, this one is shown: {chosen}."


def short_names(keys: list[str]) -> dict[str, str]:
    """key -> its last part, or the whole key where two share it."""
    last = [k.split(".")[-1] for k in keys]
    return {k: part if last.count(part) == 1 else k for k, part in zip(keys, last, strict=True)}


def _told(key: str, value: Any) -> str:
    if value is None or value != value:  # null; NaN after pandas has had it
        return f"no {key.split('.')[-1]}"
    return _WORDS[key](value) if key in _WORDS else f"{key.split('.')[-1]} {value}"


def deepest(runs: pd.DataFrame) -> int:
    """The largest depth at which there are the most placements, so that one placement alone does not choose it."""
    placements = runs.groupby(DEPTH)[PLACEMENT].nunique()
    return int(placements.index[placements == placements.max()].max())


def loss_unit(runs: pd.DataFrame) -> str:
    """What losses of these runs are in."""
    return "mean squared error" if set(runs["data.name"]) == {"sine"} else "nats"


def seeds(runs: pd.DataFrame) -> str:
    """How many, in words."""
    count = runs.seed.nunique()
    return f"{count} seed{'s' if count != 1 else ''}"


def in_order(placements: Iterable[str]) -> list[str]:
    """Placements in the order of their table; unknown ones, of another version, last."""
    return sorted(placements, key=lambda p: (_ORDER.get(p, len(_ORDER)), p))


def sort_by_placement(table: pd.DataFrame, *keys: str, column: str = PLACEMENT) -> pd.DataFrame:
    """Rows by the given columns, where `column` among them sorts as in_order does."""
    rank = {p: i for i, p in enumerate(in_order(table[column].unique()))}
    return table.sort_values(list(keys), key=lambda c: c.map(rank) if c.name == column else c, ignore_index=True)


def placement_name(placement: str) -> str:
    return _WORDS[PLACEMENT](placement)


def joined(rows: pd.DataFrame, runs: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """`rows` of these runs with some of the runs' columns beside them."""
    return rows.merge(runs[["run_id", *columns]], on="run_id", suffixes=("", "_run"))
