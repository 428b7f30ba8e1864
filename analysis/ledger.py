"""What a claim, its rule and its verdict are, and the rules that many claims share."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from arms import Missing
from estimates import Estimate
from normlab.results import Results

Name = Literal["supported", "contradicted", "inconclusive", "not measured"]


class Finding(NamedTuple):
    """What the runs say about one claim: the deciding number with its unit, the verdict, and what else was seen."""

    number: Estimate  # its n: the seeds, or what else the interval is over
    unit: str
    verdict: Name
    runs: int  # that it rests on
    note: str = ""


class Claim(NamedTuple):
    """One row of the ledger. `rule` says when it is supported; `judge` raises Missing where the runs do not tell.

    source: the documents that say so, T, N, B: on the block, on normalisation and depth, on block variants.
    """

    id: str
    claim: str
    source: str
    rule: str
    figure: str
    judge: Callable[[Results], Finding]


def above(number: Estimate, bound: float) -> Name:
    """Whether the whole interval lies above the bound, below it, or covers it."""
    if np.isnan(number.low):
        return "inconclusive"
    return "supported" if number.low > bound else "contradicted" if number.high < bound else "inconclusive"


def within(number: Estimate, low: float, high: float) -> Name:
    """Whether the interval lies within [low, high], wholly outside, or neither."""
    if np.isnan(number.low):
        return "inconclusive"
    if low <= number.low and number.high <= high:
        return "supported"
    return "contradicted" if number.low > high or number.high < low else "inconclusive"


def not_above(number: Estimate, bound: float) -> Name:
    """Whether the whole interval lies below the bound, above it, or covers it."""
    opposite: dict[Name, Name] = {"supported": "contradicted", "contradicted": "supported"}
    verdict = above(number, bound)
    return opposite.get(verdict, verdict)


def both(*verdicts: Name) -> Name:
    """Of a claim with parts: supported if all are, contradicted if any is."""
    if "contradicted" in verdicts:
        return "contradicted"
    return "supported" if all(v == "supported" for v in verdicts) else "inconclusive"


def of_study(data: Results, study: str) -> Results:
    """The runs of the named study alone: a rule is made for its grid, and others would confound it. Raises Missing."""
    if data.runs.empty or not (data.runs.study == study).any():
        raise Missing(f"needs runs of the study {study}")
    return Results(*(table[table.study == study] for table in data))
