"""What the runs say, computed from their numbers: the summary table and the sentences of the report."""

import numpy as np
import pandas as pd
from scipy import stats

import estimates
import fig_gradient_decay
import fig_hidden_growth
import fig_jacobian
import fig_lr_frontier
import fig_xiong_depth
from arms import (
    DATA,
    DEPTH,
    PLACEMENT,
    WARMUP,
    Missing,
    in_order,
    loss_unit,
    placement_name,
    short_names,
    sort_by_placement,
    varying,
    with_arms,
)
from estimates import interquartile_mean
from normlab.results import Results
from normlab.theory import LAST_FFN_SLOPE


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per depth and arm of the trained runs, every run counted; of the initialisation profiles if none trained.

    Losses are means over all seeds, with a 95 % t interval from three seeds on. A diverged seed counts with its loss at
    initialisation (the cap of Wortsman et al. 2023, arXiv 2309.14322); how many did stands beside the mean.
    """
    finished = runs[runs.status == "finished"]
    if finished.empty:
        return pd.DataFrame({"runs": [0]})
    trained = finished[finished.steps > 0]
    if trained.empty:
        profiled = finished.groupby([DEPTH, PLACEMENT], sort=True)
        table = profiled.agg(runs=("run_id", "size"), init_loss=("init_val_loss", "mean")).reset_index()
        return table.rename(columns={DEPTH: "depth", PLACEMENT: "placement"}).round(3)
    named = with_arms(trained)
    rest = short_names([k for k in varying(trained) if k not in {PLACEMENT, WARMUP}])
    several = named.groupby([DEPTH, "arm"]).size().max() >= 4
    rows = []
    for (depth, _), group in named.groupby([DEPTH, "arm"], sort=True):
        diverged = group.verdict == "diverged"
        losses = group.final_val_loss.where(~diverged, group.init_val_loss)
        counts = group.verdict.value_counts()
        first = group.iloc[0]
        middle = interquartile_mean(losses).told().rpartition(",")[0] if len(group) >= 4 else ""
        scores = group.get("test_bleu", pd.Series(dtype=float)).dropna().astype(float)
        rows.append(
            {
                "depth": depth,
                "placement": first[PLACEMENT],
                "warm-up": first[WARMUP],
                **{name: first[key] for key, name in rest.items()},
                "verdict": counts.index[0] if len(counts) == 1 else ", ".join(f"{n} {v}" for v, n in counts.items()),
                "final val loss": "diverged" if diverged.all() else f"{losses.mean():.3f}{_interval(losses)}",
                **({"interquartile mean": middle} if several else {}),
                **({} if scores.empty else {"test BLEU": f"{scores.mean():.2f}{_interval(scores)}"}),
                "diverged": f"{diverged.sum()}/{len(group)}",
                "spikes": int(group.spike_count.sum()),
                "runs": len(group),
            }
        )
    return sort_by_placement(pd.DataFrame(rows), "depth", "placement", "warm-up", column="placement")


def _interval(values: pd.Series) -> str:
    if len(values) < 3:
        return ""
    reach = stats.t.ppf(0.975, len(values) - 1) * values.sem()
    return f" ± {reach:.3f}"


def sentences(data: Results) -> list[str]:
    """The findings that these runs support, each with its numbers and n."""
    found = _by_depth(data.runs) + _warmup(data.runs)
    for part in (frontier, _slopes, _growth, _decay, _jacobian):
        try:
            found += part(data)
        except Missing:
            continue
    return found


def _by_depth(runs: pd.DataFrame) -> list[str]:
    """Per depth: each placement's outcomes and losses over all its runs."""
    trained = runs[(runs.status == "finished") & (runs.steps > 0)]
    found = []
    for depth, here in trained.groupby(DEPTH):
        told = []
        for placement in in_order(here[PLACEMENT].unique()):
            group = here[here[PLACEMENT] == placement]
            stable = int((group.verdict == "stable").sum())
            losses = group.final_val_loss.dropna()
            others = ", ".join(f"{n} {v}" for v, n in group.verdict.value_counts().items() if v != "stable")
            span = f"{losses.min():.3f} to {losses.max():.3f}" if len(losses) else "none finite"
            told.append(
                f"{placement_name(placement)} is stable in {stable} of {len(group)} runs"
                f"{f' ({others})' if others else ''}, final validation loss {span}"
            )
        names = ("unigram entropy", "bigram entropy") if loss_unit(here) == "nats" else ("best constant", "best line")
        lines = f"{names[0]} {here.h1.iloc[0]:.3f}, {names[1]} {here.h2.iloc[0]:.3f}; "
        if here[DATA].nunique() > 1:
            lines = ""
        found.append(f"Depth {depth}: {'; '.join(told)} ({lines}seeds: {here.seed.nunique()}).")
    return found


def _warmup(runs: pd.DataFrame) -> list[str]:
    """The paired effect of warm-up: same settings and seed, longest warm-up against none."""
    trained = runs[(runs.status == "finished") & (runs.steps > 0)]
    if trained.empty or trained[WARMUP].nunique() < 2 or 0 not in set(trained[WARMUP]):
        return []
    longest = trained[WARMUP].max()
    rest = [k for k in varying(trained) if k not in {WARMUP, PLACEMENT}]
    keys = [DEPTH, PLACEMENT, "seed", "rest"]
    trained = trained.assign(rest=trained[rest].map(str).agg(" ".join, axis=1) if rest else "")
    pairs = trained[trained[WARMUP] == longest].merge(
        trained[trained[WARMUP] == 0], on=keys, suffixes=("_with", "_without")
    )
    found = []
    pairs = sort_by_placement(pairs, DEPTH, PLACEMENT)
    for (depth, placement), group in pairs.groupby([DEPTH, PLACEMENT], sort=False):
        change = (group.final_val_loss_with - group.final_val_loss_without).dropna()
        moved = group[group.verdict_with != group.verdict_without]
        verdicts = ", ".join(f"{r.verdict_without} to {r.verdict_with}" for _, r in moved.iterrows()) or "none"
        effect = f"changed the final validation loss by {change.mean():+.3f}" if len(change) else "left no finite pair"
        found.append(
            f"Warm-up of {longest} steps, {placement_name(str(placement))} at depth {depth}: {effect} "
            f"(paired, n = {len(change)}); verdicts changed: {verdicts}."
        )
    return found


def frontier(data: Results) -> list[str]:
    """How the largest stable learning rate goes with depth: LR50 by depth, and the exponent over each seed's rates."""
    table = fig_lr_frontier.measured(data).table
    found = []
    for arm, cells in table.groupby("arm", sort=False):
        cells = cells.sort_values(DEPTH)
        if len(cells) < 2:
            continue
        told = [f"{c.lr50:.3g} [{c.low:.3g}, {c.high:.3g}] at depth {c[DEPTH]}" for _, c in cells.iterrows()]
        rates = pd.DataFrame({c[DEPTH]: {s: b.stable for s, b in c.boundaries.items()} for _, c in cells.iterrows()})
        whole = np.log(rates.dropna().astype(float))
        fitted = [np.polyfit(np.log(whole.columns.astype(float)), row, 1)[0] for row in whole.to_numpy()]
        exponent = estimates.mean(fitted)
        power = f"; the seeds' largest stable rates go as depth^{exponent.told('{:+.2f}')}" if fitted else ""
        lost = len(rates) - len(whole)
        without = f" ({lost} of {len(rates)} seeds have a depth without a stable rate)" if lost else ""
        found.append(f"LR50 of {arm}: {', '.join(told)}{power}{without}.")
    return found


def _slopes(data: Results) -> list[str]:
    found = []
    for fit in fig_xiong_depth.slopes(fig_xiong_depth.last_ffn(data)):
        expected = "" if fit.theory is None else f"; theorem 1 says {fit.theory:g}"
        expected += "" if fit.local is None else f"; at these depths the theory has {fit.local:+.3f}"
        found.append(
            f"At initialisation the last FFN's expected gradient goes as depth^{fit.slope:.3f} for "
            f"{placement_name(fit.placement)} (95 % interval {fit.low:.3f} to {fit.high:.3f}, n = {fit.n}; "
            f"{fit.setting}{expected})."
        )
    return found


def _growth(data: Results) -> list[str]:
    """How the hidden state grows, and at how many blocks it is within the theory's bounds (one value: within 15 %)."""
    rows = fig_hidden_growth.measured(data)
    fitted = {(fit.setting, fit.placement): fit for fit in fig_hidden_growth.fits(rows)}
    found = []
    rows = sort_by_placement(rows, "setting", PLACEMENT)
    for (setting, placement), group in rows.groupby(["setting", PLACEMENT], sort=False):
        deepest = group[group[DEPTH] == group[DEPTH].max()]
        by_block = deepest.groupby("block")[["mean_square", "lower", "upper"]].mean()
        fit = fitted.get((setting, placement))
        if by_block.lower.isna().any() or deepest[DEPTH].iloc[0] < 48 or fit is None:
            continue
        slack = 0.15 if np.allclose(by_block.lower, by_block.upper, rtol=0.01) else 0.0
        inside = by_block.mean_square.between(by_block.lower * (1 - slack), by_block.upper * (1 + slack)).sum()
        start, end = by_block.mean_square.iloc[[0, -1]]
        bounds = "lemma 2" if placement in LAST_FFN_SLOPE else "the theory"
        found.append(
            f"Hidden state of {placement_name(str(placement))} at initialisation, depth {len(by_block)} "
            f"({setting}): mean square {start:.2f} at block 1, {end:.2f} at the last, {fig_hidden_growth.told(fit)}; "
            f"{'within 15 % of' if slack else 'inside'} the bounds of {bounds} at {inside} of {len(by_block)} blocks."
        )
    return found


def _decay(data: Results) -> list[str]:
    """The factor per block of post-norm's gradients at initialisation: fitted, beside appendix F's."""
    found = []
    for fit in fig_gradient_decay.factors(data, fig_gradient_decay.by_block(data)):
        what = {"stream_grad_norm": "stream's", "mean_weight_grad_norm": "second FFN matrix's"}[fit.quantity]
        derived = (
            f"; its argument has {fit.norm_alone:.4f} in this setting, {fit.with_branch:.4f} with the FFN's own part"
        )
        derived = "" if np.isnan(fit.norm_alone) else derived
        found.append(
            f"Post-norm at initialisation, depth {fit.depth} ({fit.setting}): the {what} gradient changes on the way "
            f"back by this factor per block: {fig_gradient_decay.told(fit)}; first over last block {fit.ratio:.3g}. "
            f"Appendix F of Xiong et al. 2020 has {fig_gradient_decay.APPENDIX_F:.4f}, first over last "
            f"{fig_gradient_decay.APPENDIX_F ** (fit.depth - 1):.2g}{derived}."
        )
    return found


def _jacobian(data: Results) -> list[str]:
    """How much of the deepest stack's Jacobian is the identity, and how it grows."""
    table = fig_jacobian.by_run(data)
    deepest = table[table[DEPTH] == table[DEPTH].max()]
    told = [
        f"{placement_name(p)} {mine.growth.mean():+.4f} (identity share {mine.identity.mean():.3g})"
        for p in in_order(deepest[PLACEMENT].unique())
        for mine in [deepest[deepest[PLACEMENT] == p]]
    ]
    return [
        f"Jacobian from the embeddings to block {table[DEPTH].max()} at initialisation: log of the RMS singular value "
        f"per block, mean over {deepest.seed.nunique()} seeds: {', '.join(told)}."
    ]
