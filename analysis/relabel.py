"""What finished runs would be called under other rules, from what they logged.

python analysis/relabel.py runs/demo spikes.mad.kappa=6 verdict.stalled_below=0.2

Each run's own stored rules hold where none is given. Prints the runs whose label changes; nothing is written without
--write, which keeps a run's first label under `relabelled_from` in its run.json.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from normlab import relabel, results, store


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="+", metavar="RUNS | KEY=VALUE", help="folders of runs, and changed rules")
    parser.add_argument("--write", action="store_true", help="update each run.json")
    options = parser.parse_args()
    changes = [a for a in options.arguments if "=" in a and not Path(a).exists()]
    folders = [a for a in options.arguments if a not in changes]
    try:
        if not folders:
            raise ValueError("no folder of runs; accepted: runs/STUDY or one run's folder")
        rules = relabel.parse(changes)
        data = results.load(folders, layers=False)
        for told in data.runs.attrs["skipped"]:
            print(f"skipped: {told}", file=sys.stderr)
        table = relabel.relabel(data.runs, data.steps, rules)
        if table.empty:
            raise ValueError(f"no finished training run below {', '.join(folders)}")
    except (ValueError, FileNotFoundError) as error:
        print(f"relabel.py: {error}", file=sys.stderr)
        return 2
    report(table)
    if options.write:
        written = [write(Path(row.path), row.fields) for row in table.itertuples() if row.fields is not None]
        print(f"written: {sum(written)} of {len(written)}")
    return 0


def report(table: pd.DataFrame) -> None:
    """The runs that change, those that could not be judged, and how many there are of each."""
    pairs = ("verdict", "first_bad_step", "spike_count")
    differs = pd.concat([changed(table[f"old_{key}"], table[key]) for key in pairs], axis=1).any(axis=1)
    shown = table[differs]
    if len(shown):
        columns = {"study": shown.study, "run": shown.run_id}
        for key in pairs:
            old, new = (c.astype(object).where(c.notna(), "-") for c in (shown[f"old_{key}"], shown[key]))
            columns[key.replace("_", " ")] = [a if a == b else f"{a} -> {b}" for a, b in zip(old, new, strict=True)]
        print(pd.DataFrame(columns | {"reason": shown.reason}).to_string(index=False))
    moved = changed(table.old_verdict, table.verdict).sum()
    print(f"{moved} of {len(table)} runs change their verdict, {len(shown)} their label or spikes")
    for note, count in table.note[table.note != ""].value_counts().items():
        print(f"{count} runs: {note}")


def changed(old: pd.Series, new: pd.Series) -> pd.Series:
    return ~((old == new).fillna(value=False) | (old.isna() & new.isna())).astype(bool)


def write(folder: Path, fields: dict[str, Any]) -> bool:
    """Update run.json; False where nothing in it changes or another process holds it."""
    with store.alone(folder) as mine:
        record = store.read_record(folder) if mine else None
        if record is None or all(same(record.get(key), value) for key, value in fields.items()):
            return False
        first = {"relabelled_from": {key: record.get(key) for key in fields}}
        store.write_record(folder, first | record | fields)
    return True


def same(old: Any, new: Any) -> bool:
    """As JSON: nan equals nan, a tuple its list."""
    return json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True)


if __name__ == "__main__":
    sys.exit(main())
