"""The ledger of the claims under test: what each says, the rule that judges it, the number, and the verdict.

python analysis/claims.py runs/depth_placement runs/warmup ...     # prints it, and writes report/claims.csv

A verdict follows from logged runs by the rule beside it: supported, contradicted, inconclusive (the interval covers
both), or not measured with what is missing. Intervals are at 95 % and over seeds; n counts the runs behind them.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd

import arms
import claims_at_init
import claims_of_parts
import claims_of_placement
from arms import Missing
from estimates import Estimate
from ledger import Claim, Finding
from normlab.results import Results

_LISTED = (*claims_at_init.CLAIMS, *claims_of_placement.CLAIMS, *claims_of_parts.CLAIMS)
CLAIMS = tuple(
    sorted(
        (*claims_at_init.CLAIMS, *claims_of_placement.CLAIMS, *claims_of_parts.CLAIMS),
        key=lambda claim: int(claim.id[1:]),
    )
)


def ledger(data: Results, claims: tuple[Claim, ...] = CLAIMS) -> pd.DataFrame:
    """One row per claim."""
    rows = []
    for claim in claims:
        try:
            found = claim.judge(data)
        except Missing as reason:
            found = Finding(Estimate(np.nan, np.nan, np.nan, 0), "", "not measured", 0, str(reason))
        number = found.number
        rows.append(
            {
                "id": claim.id,
                "claim": claim.claim,
                "source": claim.source,
                "rule": claim.rule,
                "number": number.value,
                "low": number.low,
                "high": number.high,
                "seeds": number.n,
                "n": found.runs,
                "unit": found.unit,
                "verdict": found.verdict,
                "figure": claim.figure,
                "note": found.note,
            }
        )
    return pd.DataFrame(rows)


def number_told(row: pd.Series) -> str:
    """The number, its interval and unit in a few words."""
    if row.verdict == "not measured":
        return ""
    interval = "" if np.isnan(row.low) else f" [{row.low:.3g}, {row.high:.3g}]"
    return f"{row.number:.3g}{interval} {row.unit}; n = {row.seeds}, {row.n} runs."


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="study folders (runs/STUDY)")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "report" / "claims.csv")
    options = parser.parse_args()
    try:
        found = ledger(arms.load(options.runs, once=False))
    except FileNotFoundError as error:
        print(f"claims.py: {error}", file=sys.stderr)
        return 2
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found.to_csv(options.out, index=False, float_format="%.6g")
    for _, row in found.iterrows():
        print(f"{row.id:>3}  {row.verdict:<13} {row.claim}\n     {number_told(row)} {row.note}".rstrip())
    print(f"\n{options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
