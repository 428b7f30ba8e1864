"""One page from many studies: the ledger of claims, then each study's question, outcome and figures.

python analysis/studies.py runs docs/studies     # docs/studies.md, docs/studies/*.png and .csv

Each folder of the first argument is a study; its figure is the one of the same name, further ones are in ALSO.
"""

import argparse
import sys
from pathlib import Path

import pandas as pd

import arms
import claims
import figure
import findings
import report
from arms import Missing
from normlab.results import Results

TRAINING = ("loss_curves", "survival", "spikes", "gradient_heatmap", "gradient_profile", "update_ratio")
INSIDE = ("activation_heatmap", "attention_logits", "angular_distance")
ALSO = {
    "depth_placement": (*TRAINING, *INSIDE),
    "init_gradients": ("hidden_growth",),
    "warmup": ("xiong_warmup",),
}
CSV_LIMIT = 300_000  # bytes; a larger table stays with the runs that it came from


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, help="the folder of the studies")
    parser.add_argument("out", type=Path, help="folder of the figures; the page is OUT.md beside it")
    parser.add_argument("--only", nargs="*", help="names of studies; default: every folder with a sweep of its name")
    options = parser.parse_args()
    sweeps = {p.stem: p for p in sorted((figure.ROOT / "sweeps").glob("*.yaml"))}
    names = options.only or [n for n in sweeps if (options.runs / n).is_dir()]
    unknown = [n for n in names if not (options.runs / n).is_dir()]
    if unknown or not names:
        print(f"studies.py: {', '.join(unknown) or options.runs}: no such study's runs", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    everything = arms.load([options.runs / n for n in names], once=False)
    ledger = claims.ledger(everything)
    ledger.to_csv(options.out / "claims.csv", index=False, float_format="%.6g")
    parts = ["# What the studies found", report.provenance(everything.runs), ledger_table(ledger, options.out)]
    for name in names:
        mine = Results(*(table[table.study == name].reset_index(drop=True) for table in everything))
        parts += section(name, head(sweeps.get(name)), mine, options.out)
    page = options.out.with_suffix(".md")
    page.write_text("\n\n".join(parts) + "\n")
    print(page)
    return 0


def head(sweep: Path | None) -> list[str]:
    """The question and the command, the comment lines on top of a sweep."""
    lines = sweep.read_text().splitlines() if sweep else []
    return [line.removeprefix("# ") for line in lines if line.startswith("# ") and "@package" not in line][:2]


def ledger_table(ledger: pd.DataFrame, out: Path) -> str:
    """The claims as a Markdown table; a figure is linked where it was drawn."""
    counts = ", ".join(f"{n} {v}" for v, n in ledger.verdict.value_counts().items())
    where = f"[claims.csv]({out.name}/claims.csv)"
    told = f"{len(ledger)} claims: {counts}. Each verdict follows from the runs by its rule; all numbers: {where}."
    rows = ["## Claims", "", told, ""]
    rows += ["| | claim | verdict | number, 95 % interval | rule |", "|---|---|---|---|---|"]
    for _, row in ledger.iterrows():
        told = claims.number_told(row) or row.note
        note = f" {row.note}" if row.note and row.verdict != "not measured" else ""
        link = f"[{row.id}]({out.name}/{row.figure.removeprefix('fig_')}.png)" if row.figure else row.id
        cells = [link, row.claim, f"**{row.verdict}**", f"{told}{note}", row.rule]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def section(name: str, told: list[str], data: Results, out: Path) -> list[str]:
    """One study: question, command, how its runs ended, figures."""
    question, command = [*told, "", ""][:2]
    parts = [f"## {name}", question, f"`{command.split('  ')[0]}`: {outcome(data.runs)}"]
    if name == "lr_frontier":
        parts += ["\n".join(f"- {sentence}" for sentence in findings.frontier(data))]
    modules = {module.STEM: module for module in report.FIGURES}
    for stem in (name, *ALSO.get(name, ())):
        if stem not in modules:
            continue
        try:
            drawn = modules[stem].draw(data)
        except Missing as reason:
            parts.append(f"*{stem}: {reason}*")
            continue
        figure.save(drawn, stem, out)
        (out / f"{stem}.pdf").unlink()
        table = out / f"{stem}.csv"
        where = f" Data: [{stem}.csv]({out.name}/{stem}.csv)."
        if table.stat().st_size > CSV_LIMIT:
            table.unlink()
            where = ""
        parts += [f"![{stem}]({out.name}/{stem}.png)", f"{drawn.caption}{where}"]
    return parts


def outcome(runs: pd.DataFrame) -> str:
    """How many runs ended how, and the time that they took."""
    ends = runs.verdict.fillna("profiled").where(runs.status == "finished", runs.status)
    counts = ", ".join(f"{n} {end}" for end, n in ends.value_counts().items())
    seconds = pd.to_numeric(runs.get("seconds", pd.Series(dtype=float)), errors="coerce").sum()
    took = f"; {seconds / 60:.1f} minutes of training on one thread" if seconds else ""
    return f"{len(runs)} runs: {counts}{took}."


if __name__ == "__main__":
    sys.exit(main())
