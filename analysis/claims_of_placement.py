"""Claims about where norms and residuals stand: depth, warm-up, learning rate, spikes, ablations."""

import numpy as np
import pandas as pd

import estimates
from arms import DEPTH, PLACEMENT, WARMUP, Missing
from comparisons import CLOSE, NORM, best, by_seed, paired, runs_of
from estimates import LR
from ledger import Claim, Finding, Name, above, both, not_above, within
from normlab.results import Results

PLACED, ABLATED = "fig_depth_placement", "fig_residual_ablation"


def depth_and_warmup(data: Results) -> Finding:
    """B1."""
    runs = runs_of(data, "depth_placement", model__placement=("pre", "post"))
    runs = _common_grid(runs[runs[PLACEMENT].isin(["pre", "post"])])
    if runs[DEPTH].nunique() < 2:
        raise Missing("needs two depths of pre and post (+sweeps=depth_placement)")
    shallow, deep = runs[DEPTH].min(), runs[DEPTH].max()
    ends = runs[runs[DEPTH].isin([shallow, deep])]
    drop = ends.pivot_table(index=["seed", LR], columns=[PLACEMENT, DEPTH], values="stable").dropna()
    more = (drop["post", shallow] - drop["post", deep]) - (drop["pre", shallow] - drop["pre", deep])
    number = by_seed(more)
    shares = {p: [f"{drop[p, d].mean():.0%}" for d in (shallow, deep)] for p in ("pre", "post")}
    warmed = runs_of(data, "warmup", model__placement=("pre", "post"))
    warmed = warmed[warmed["optim.name"] == "adam"] if (warmed["optim.name"] == "adam").any() else warmed
    none, longest = 0, warmed[WARMUP].max()
    gain = {
        p: paired(warmed[warmed[PLACEMENT] == p], WARMUP, none, longest, "stable").groupby(level="seed").mean()
        for p in ("pre", "post")
    }
    needs = estimates.mean((gain["post"] - gain["pre"]).dropna())
    return Finding(
        number,
        f"fall of the stable share from depth {shallow} to {deep}, post-norm's less pre-norm's",
        both(above(number, 0.0), above(needs, 0.0)),
        len(ends) + len(warmed),
        f"Stable at depth {shallow} and {deep}: pre {' and '.join(shares['pre'])}, "
        f"post {' and '.join(shares['post'])}. "
        f"Warm-up of {longest} steps (Adam) adds to the stable share, post's less pre's: {needs.told('{:.2f}')}.",
    )


def _common_grid(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs whose depth and rate both placements have."""
    both_have = runs.groupby([DEPTH, LR])[PLACEMENT].transform("nunique") == runs[PLACEMENT].nunique()
    return runs[both_have]


def without_warmup(data: Results) -> Finding:
    """B2."""
    runs = runs_of(data, "warmup", model__placement=("pre", "post"))
    runs = runs[runs["optim.name"] == "adam"] if (runs["optim.name"] == "adam").any() else runs
    if runs[WARMUP].nunique() < 2:
        raise Missing("needs runs with and without warm-up (+sweeps=warmup)")
    longest = runs[WARMUP].max()
    pre = runs[runs[PLACEMENT] == "pre"]
    chosen = estimates.best_lr(pre, [WARMUP]).pivot_table(index="seed", columns=WARMUP, values="loss")
    costs = estimates.mean((chosen[0] - chosen[longest]).dropna())
    post = runs[(runs[PLACEMENT] == "post") & (runs[WARMUP] == longest)]
    bare, warmed = (_largest_stable(r) for r in (pre[pre[WARMUP] == 0], post))
    gain = estimates.mean((bare - warmed).dropna())
    return Finding(
        gain,
        "decades between the largest stable rates, pre-norm without warm-up less post-norm with",
        both(above(gain, 0.0), not_above(costs, CLOSE)),
        len(pre) + len(post),
        f"Doing without costs pre-norm at its best rate {costs.told()} nats. Where no rate is stable, half a decade "
        f"below the grid is taken.",
    )


def _largest_stable(runs: pd.DataFrame) -> pd.Series:
    """seed -> log10 of its largest stable rate; half a decade below the grid where there is none."""
    floor = np.log10(runs[LR].min()) - 0.5
    stable = np.log10(runs[LR].where(runs.stable == 1)).groupby(runs.seed).max()
    return stable.fillna(floor)


def residual_depth(data: Results) -> Finding:
    """B5."""
    runs = _ablated(data, "dense")
    without, kept = (runs[runs[PLACEMENT] == p] for p in ("no_residual", "pre"))
    deepest = without[DEPTH].where(without.stable == 1, 0).groupby(without.seed).max()
    number = estimates.mean(deepest)
    far = kept[kept[DEPTH] >= 12]
    if far.empty or without[DEPTH].max() < 8:
        raise Missing("needs depths of 8 and 12 or more (+sweeps=residual_ablation)")
    share = estimates.rate(int(far.stable.sum()), len(far))
    fine: Name = "supported" if share.value == 1 else "contradicted" if share.high < 1 else "inconclusive"
    return Finding(
        number,
        "largest depth that is stable without residuals, mean over seeds",
        both(within(number, 4.0, 6.0), fine),
        len(without) + len(far),
        f"With residuals, depth {far[DEPTH].min()} to {far[DEPTH].max()}: stable share {share.told('{:.2f}')}.",
    )


def _ablated(data: Results, ffn: str) -> pd.DataFrame:
    runs = runs_of(data, "residual_ablation", model__placement=("pre", "no_residual"), model__ffn=(ffn,))
    return runs[(runs["model.ffn"] == ffn) & (runs[NORM] == "layernorm")]


def degradation(data: Results) -> Finding:
    """B7."""
    runs = _ablated(data, "dense")
    runs = runs[runs[PLACEMENT] == "no_residual"]
    steps = data.steps[data.steps.run_id.isin(runs.run_id)].drop_duplicates(["run_id", "step"])
    tail = steps[steps.step >= 0.9 * steps.groupby("run_id").step.transform("max")].groupby("run_id").loss.mean()
    loss = runs.run_id.map(tail).where(np.isfinite(runs.run_id.map(tail)), runs.init_val_loss)
    by_depth = runs.assign(loss=loss.clip(upper=runs.init_val_loss)).pivot_table("loss", "seed", DEPTH)
    number = estimates.mean((by_depth.iloc[:, -1] - by_depth.iloc[:, 0]).dropna())
    return Finding(
        number,
        f"nats of training loss, depth {by_depth.columns[-1]} less {by_depth.columns[0]}, no residuals",
        above(number, 0.0),
        len(runs),
        "Mean of the last tenth of the steps, paired by seed.",
    )


def shallow_post(data: Results) -> Finding:
    """B9."""
    runs = runs_of(data, "depth_placement", model__placement=("pre", "post"))
    shallow = runs[DEPTH].min()
    arms_there = runs[(runs[DEPTH] == shallow) & runs[PLACEMENT].isin(["pre", "post"])]
    number = best(arms_there, PLACEMENT, "post", "pre")
    return Finding(
        number,
        f"nats, pre-norm less post-norm, best rate of each, depth {shallow}",
        above(number, 0.0),
        len(arms_there),
        "" if shallow <= 6 else f"The shallowest depth is {shallow}.",
    )


def spikes(data: Results) -> Finding:
    """B10."""
    runs = runs_of(data, "depth_placement", model__placement=("pre", "post"))
    runs = _common_grid(runs[runs[PLACEMENT].isin(["pre", "post"])])
    runs = runs.assign(rate=1000 * runs.spike_count.astype(float) / runs.steps_done.clip(lower=1))
    number = by_seed(paired(runs, PLACEMENT, "pre", "post", "rate"))
    counts = {p: int(runs.spike_count[runs[PLACEMENT] == p].sum()) for p in ("pre", "post")}
    return Finding(
        number,
        "spikes per 1,000 steps, post-norm less pre-norm, same depth, rate and seed",
        above(number, 0.0),
        len(runs),
        f"{counts['pre']} and {counts['post']} spikes in all, in models of width {runs['model.width'].max()}.",
    )


def deepnorm(data: Results) -> Finding:
    """B11."""
    runs = runs_of(data, "depth_placement", model__placement=("pre", "post", "deepnorm"))
    stable = by_seed(paired(runs[runs[PLACEMENT].isin(["pre", "deepnorm"])], PLACEMENT, "pre", "deepnorm", "stable"))
    shallow = runs[DEPTH].min()
    loss = best(runs[runs[DEPTH] == shallow], PLACEMENT, "post", "deepnorm")
    return Finding(
        stable,
        "stable share, DeepNorm less pre-norm, same depth, rate and seed",
        both(within(stable, -0.1, 1.0), not_above(loss, CLOSE)),
        len(runs),
        f"Best loss less post-norm's at depth {shallow}: {loss.told()} nats.",
    )


def no_ffn(data: Results) -> Finding:
    """B18."""
    runs = runs_of(data, "residual_ablation", model__placement=("pre",), model__ffn=("dense", "none"))
    runs = runs[(runs[PLACEMENT] == "pre") & (runs[NORM] == "layernorm")]
    number = by_seed(paired(runs, "model.ffn", "dense", "none"))
    return Finding(
        number,
        "nats, attention alone less the whole block, pre-norm, mean over depths",
        above(number, 0.1),
        len(runs),
        "At equal depth; attention alone has a third of the block's parameters.",
    )


def deep_pre(data: Results) -> Finding:
    """B19."""
    runs = runs_of(data, "depth_placement", model__placement=("pre",))
    runs = runs[runs[PLACEMENT] == "pre"]
    deepest = runs[runs[DEPTH] == runs[DEPTH].max()]
    if deepest[DEPTH].iloc[0] <= 50:
        raise Missing(f"needs more than 50 blocks; the deepest pre-norm has {deepest[DEPTH].iloc[0]}")
    rates = sorted(deepest[LR].unique())
    one = runs[(runs[LR] == rates[0]) & (runs[DEPTH] >= 12)]
    number = estimates.rate(int(one.stable.sum()), len(one))
    verdict: Name = "supported" if number.value == 1 else "contradicted" if number.high < 1 else "inconclusive"
    depths = ", ".join(map(str, sorted(one[DEPTH].unique())))
    return Finding(number, f"stable share of pre-norm at one rate ({rates[0]:g}), depths {depths}", verdict, len(one))


CLAIMS = (
    Claim(
        "B1", "Post-norm needs warm-up and diverges sooner as depth grows; pre-norm does not", "T N B",
        "the stable share falls more with depth, and gains more from warm-up, than pre-norm's",
        PLACED, depth_and_warmup,
    ),
    Claim(
        "B2", "Pre-norm can drop warm-up and use a larger learning rate", "N B",
        f"its largest stable rate without exceeds post-norm's with warm-up, at a cost below {CLOSE} nats",
        "fig_warmup", without_warmup,
    ),
    Claim(
        "B5", "Without residuals training fails after 5-6 layers; with them 12 and more train", "T",
        "largest stable depth without within 4 to 6, and all of 12 and more stable with them",
        ABLATED, residual_depth,
    ),
    Claim(
        "B7", "Deeper plain networks train worse than shallow ones", "N",
        "training loss without residuals higher at the largest than at the smallest depth",
        ABLATED, degradation,
    ),
    Claim(
        "B9", "Post-norm ends slightly better than pre-norm when shallow and tuned", "N B",
        "best-rate loss of pre-norm less post-norm's above 0 at the smallest depth",
        "fig_depth_placement", shallow_post,
    ),
    Claim(
        "B10", "Post-norm shows loss spikes", "N",
        "spike rate higher than pre-norm's, paired",
        "fig_spikes", spikes,
    ),
    Claim(
        "B11", "DeepNorm is nearly as stable as pre-norm and keeps post-norm's loss", "N",
        f"stable share within 0.1 of pre-norm's or above it, best loss at most {CLOSE} nats over post-norm's",
        PLACED, deepnorm,
    ),
    Claim(
        "B18", "Attention alone, without FFN, is much worse", "B",
        "final loss higher by more than 0.1 nats, paired",
        ABLATED, no_ffn,
    ),
    Claim(
        "B19", "Pre-norm trains 50 and more layers without tuning the learning rate", "B",
        "every run at one rate stable, depth 12 to more than 50",
        PLACED, deep_pre,
    ),
)  # fmt: skip
