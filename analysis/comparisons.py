"""Comparisons of trained runs that the rules of the claims are made of: pairs, best rates, means over seeds."""

import pandas as pd

import arms
import estimates
from arms import DEPTH, Missing
from estimates import Estimate
from ledger import of_study
from normlab.results import Results

CLOSE = 0.05  # nats within which two final losses count as equal
NORM = "model.norm"


def runs_of(data: Results, study: str, **need: tuple) -> pd.DataFrame:
    """The study's trained runs with their capped `loss` and `stable`. need: values that columns must show."""
    runs = arms.trained(of_study(data, study))
    for column, values in need.items():
        key = column.replace("__", ".")
        missing = [v for v in values if key not in runs or not (runs[key] == v).any()]
        if missing:
            raise Missing(f"needs trained runs with {key}={','.join(map(str, missing))} (+sweeps={study})")
    return runs.assign(loss=estimates.capped_loss(runs), stable=(runs.verdict == "stable").astype(float))


def paired(runs: pd.DataFrame, key: str, first: object, second: object, value: str = "loss") -> pd.Series:
    """value(second) - value(first) over runs that differ in `key` alone, one number a pair; Missing without any."""
    rest = [DEPTH, "seed", *(k for k in arms.varying(runs) if k != key)]
    table = runs.assign(**{k: runs[k].map(str) for k in rest}).set_index(rest)
    one, two = table[value][table[key] == first], table[value][table[key] == second]
    both_there = (two - one).dropna()
    if both_there.empty:
        raise Missing(f"needs runs that differ in {key} alone: {first} and {second}")
    return both_there


def by_seed(pairs: pd.Series) -> Estimate:
    """Mean over seeds of each seed's mean: the seed is what is drawn at random."""
    return estimates.mean(pairs.groupby(level="seed").mean())


def best(runs: pd.DataFrame, key: str, first: object, second: object) -> Estimate:
    """Paired difference of capped losses, each arm at its own best rate."""
    chosen = estimates.best_lr(runs[runs[key].isin([first, second])], [key])
    by_seed = chosen.pivot_table(index="seed", columns=key, values="loss")
    if not {first, second} <= set(by_seed.columns):
        raise Missing(f"needs runs with {key}={first},{second}")
    return estimates.mean((by_seed[second] - by_seed[first]).dropna())
