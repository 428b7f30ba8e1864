"""Claims about training: verdicts, final losses and spikes over depths, rates, placements, norms and activations."""

import numpy as np
import pandas as pd

import arms
import estimates
from arms import DEPTH, PLACEMENT, WARMUP, Missing
from estimates import LR, Estimate
from ledger import Claim, Finding, Name, above, both, of_study, within
from normlab.results import Results

CLOSE = 0.05  # nats within which two final losses count as equal
NORM, ACTIVATION = "model.norm", "model.activation"


def runs_of(data: Results, study: str, **need: tuple) -> pd.DataFrame:
    """The study's trained runs with their capped `loss` and `stable`. need: values that columns must show."""
    runs = arms.trained(of_study(data, study))
    for column, values in need.items():
        key = column.replace("__", ".")
        missing = [v for v in values if key not in runs or not (runs[key] == v).any()]
        if missing:
            raise Missing(f"needs trained runs with {key}={','.join(map(str, missing))} (+sweeps={study})")
    return runs.assign(loss=estimates.capped_loss(runs), stable=(runs.verdict == "stable").astype(float))


def _paired(runs: pd.DataFrame, key: str, first: object, second: object, value: str = "loss") -> pd.Series:
    """value(second) - value(first) over runs that differ in `key` alone, one number a pair; Missing without any."""
    rest = [DEPTH, "seed", *(k for k in arms.varying(runs) if k != key)]
    table = runs.assign(**{k: runs[k].map(str) for k in rest}).set_index(rest)
    one, two = table[value][table[key] == first], table[value][table[key] == second]
    both_there = (two - one).dropna()
    if both_there.empty:
        raise Missing(f"needs runs that differ in {key} alone: {first} and {second}")
    return both_there


def _by_seed(pairs: pd.Series) -> Estimate:
    """Mean over seeds of each seed's mean: the seed is what is drawn at random."""
    return estimates.mean(pairs.groupby(level="seed").mean())


def _best(runs: pd.DataFrame, key: str, first: object, second: object) -> Estimate:
    """Paired difference of capped losses, each arm at its own best rate."""
    chosen = estimates.best_lr(runs[runs[key].isin([first, second])], [key])
    by_seed = chosen.pivot_table(index="seed", columns=key, values="loss")
    if not {first, second} <= set(by_seed.columns):
        raise Missing(f"needs runs with {key}={first},{second}")
    return estimates.mean((by_seed[second] - by_seed[first]).dropna())


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
    number = _by_seed(more)
    shares = {p: [f"{drop[p, d].mean():.0%}" for d in (shallow, deep)] for p in ("pre", "post")}
    warmed = runs_of(data, "warmup", model__placement=("pre", "post"))
    warmed = warmed[warmed["optim.name"] == "adam"] if (warmed["optim.name"] == "adam").any() else warmed
    none, longest = 0, warmed[WARMUP].max()
    gain = {
        p: _paired(warmed[warmed[PLACEMENT] == p], WARMUP, none, longest, "stable").groupby(level="seed").mean()
        for p in ("pre", "post")
    }
    needs = estimates.mean((gain["post"] - gain["pre"]).dropna())
    return Finding(
        number,
        f"fall of the stable share from depth {shallow} to {deep}, post-norm's less pre-norm's",
        both(above(number, 0.0), above(needs, 0.0)),
        f"Stable at depth {shallow} and {deep}: pre {' and '.join(shares['pre'])}, post {' and '.join(shares['post'])}. "
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
        both(above(gain, 0.0), _not_above(costs, CLOSE)),
        f"Doing without costs pre-norm at its best rate {costs.told()} nats. Where no rate is stable, half a decade "
        f"below the grid is taken.",
    )


def _largest_stable(runs: pd.DataFrame) -> pd.Series:
    """seed -> log10 of its largest stable rate; half a decade below the grid where there is none."""
    floor = np.log10(runs[LR].min()) - 0.5
    stable = np.log10(runs[LR].where(runs.stable == 1)).groupby(runs.seed).max()
    return stable.fillna(floor)


def _not_above(number: Estimate, bound: float) -> Name:
    if np.isnan(number.high):
        return "inconclusive"
    return "supported" if number.high < bound else "contradicted" if number.low > bound else "inconclusive"


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
        "Mean of the last tenth of the steps, paired by seed.",
    )


def shallow_post(data: Results) -> Finding:
    """B9."""
    runs = runs_of(data, "depth_placement", model__placement=("pre", "post"))
    shallow = runs[DEPTH].min()
    number = _best(runs[runs[DEPTH] == shallow], PLACEMENT, "post", "pre")
    return Finding(
        number, f"nats, pre-norm less post-norm, best rate of each, depth {shallow}", above(number, 0.0),
        "" if shallow <= 6 else f"The shallowest depth is {shallow}.",
    )  # fmt: skip


def spikes(data: Results) -> Finding:
    """B10."""
    runs = runs_of(data, "depth_placement", model__placement=("pre", "post"))
    runs = _common_grid(runs[runs[PLACEMENT].isin(["pre", "post"])])
    runs = runs.assign(rate=1000 * runs.spike_count.astype(float) / runs.steps_done.clip(lower=1))
    number = _by_seed(_paired(runs, PLACEMENT, "pre", "post", "rate"))
    counts = {p: int(runs.spike_count[runs[PLACEMENT] == p].sum()) for p in ("pre", "post")}
    return Finding(
        number,
        "spikes per 1,000 steps, post-norm less pre-norm, same depth, rate and seed",
        above(number, 0.0),
        f"{counts['pre']} and {counts['post']} spikes in all, of models of width {runs['model.width'].max()}: no scale.",
    )


def deepnorm(data: Results) -> Finding:
    """B11."""
    runs = runs_of(data, "depth_placement", model__placement=("pre", "post", "deepnorm"))
    stable = _by_seed(_paired(runs[runs[PLACEMENT].isin(["pre", "deepnorm"])], PLACEMENT, "pre", "deepnorm", "stable"))
    shallow = runs[DEPTH].min()
    loss = _best(runs[runs[DEPTH] == shallow], PLACEMENT, "post", "deepnorm")
    return Finding(
        stable,
        "stable share, DeepNorm less pre-norm, same depth, rate and seed",
        both(within(stable, -0.1, 1.0), _not_above(loss, CLOSE)),
        f"Best loss less post-norm's at depth {shallow}: {loss.told()} nats.",
    )


def norm_cost(data: Results) -> Finding:
    """B12."""
    try:
        import fig_norm_cost

        table = fig_norm_cost.alone(of_study(data, "norm_cost"))
    except ImportError:
        raise Missing("needs runs of experiments/norm_cost.py") from None
    whole = table[table["pass"] == "forward_backward"].pivot_table("seconds", "repeat", "norm")
    if not {"layernorm", "rmsnorm"} <= set(whole.columns):
        raise Missing("needs experiments/norm_cost.py of layernorm and rmsnorm")
    number = estimates.mean((1 - whole.rmsnorm / whole.layernorm).dropna())
    return Finding(number, "share of LayerNorm's time that RMSNorm saves, norm alone", within(number, 0.15, 0.20))


def rmsnorm(data: Results) -> Finding:
    """B13."""
    runs = runs_of(data, "norm_type", model__norm=("layernorm", "rmsnorm"))
    number = _best(runs[runs[PLACEMENT] == "pre"], NORM, "layernorm", "rmsnorm")
    note = ""
    if (runs[PLACEMENT] == "post").any():
        note = f"Post-norm: {_best(runs[runs[PLACEMENT] == 'post'], NORM, 'layernorm', 'rmsnorm').told()} nats."
    return Finding(
        number, "nats, RMSNorm less LayerNorm, best rate of each, pre-norm", within(number, -CLOSE, CLOSE), note
    )


def feature_mean(data: Results) -> Finding:
    """B14."""
    runs = runs_of(data, "depth_placement", model__placement=("pre",))
    runs = runs[(runs[PLACEMENT] == "pre") & (runs.verdict == "stable")]
    deep = runs[runs[DEPTH] == runs[DEPTH].max()]
    rows = arms.joined(data.layers[data.layers.stat == "mean_over_std"], deep, ["seed"])
    if rows.empty:
        raise Missing("needs stable pre-norm runs with profiles (mean_over_std)")
    last = rows[rows.step == rows.groupby("run_id").step.transform("max")]
    number = estimates.mean(last.groupby("run_id").value.mean())
    # LN(x) and RMSNorm(x) meet at an angle whose cosine is std / rms
    angle = 1 - 1 / np.sqrt(1 + number.value**2)
    return Finding(
        number,
        f"|mean| / std of the stream over channels, trained pre-norm, depth {runs[DEPTH].max()}, mean over blocks",
        _not_above(number, 0.2),
        f"LayerNorm's and RMSNorm's outputs then differ by 1 - cosine = {angle:.2g}.",
    )


def batch_norm(data: Results) -> Finding:
    """B15."""
    runs = runs_of(data, "batchnorm", model__norm=("layernorm", "batchnorm"))
    steps = data.steps[data.steps.run_id.isin(runs.run_id)].drop_duplicates(["run_id", "step"])
    tail = steps[steps.step >= 0.9 * steps.groupby("run_id").step.transform("max")].groupby("run_id").loss.mean()
    runs = runs.assign(gap=runs.loss - runs.run_id.map(tail))
    sizes = sorted(runs["data.batch_size"].unique())
    if len(sizes) < 2:
        raise Missing("needs two batch sizes (+sweeps=batchnorm)")
    more = {
        size: estimates.mean(
            _paired(runs[runs["data.batch_size"] == size], NORM, "layernorm", "batchnorm", "gap").to_numpy()
        )
        for size in (sizes[0], sizes[-1])
    }
    return Finding(
        more[sizes[0]],
        f"nats, evaluation less training loss, batch norm's less layer norm's, batch of {sizes[0]}",
        above(more[sizes[0]], 0.0),
        f"At a batch of {sizes[-1]}: {more[sizes[-1]].told()}.",
    )


def activations(data: Results) -> Finding:
    """B16."""
    runs = runs_of(data, "activation", model__activation=("relu", "gelu", "swiglu"))
    gelu, swiglu = (_best(runs, ACTIVATION, worse, better) for worse, better in (("relu", "gelu"), ("gelu", "swiglu")))
    verdicts = [_not_above(e, 0.0) for e in (gelu, swiglu)]
    return Finding(
        swiglu,
        "nats, SwiGLU less GELU, best rate of each, equal FFN parameters",
        both(*verdicts),
        f"GELU less ReLU: {gelu.told()} nats.",
    )


def no_ffn(data: Results) -> Finding:
    """B18."""
    runs = runs_of(data, "residual_ablation", model__placement=("pre",), model__ffn=("dense", "none"))
    runs = runs[(runs[PLACEMENT] == "pre") & (runs[NORM] == "layernorm")]
    number = _by_seed(_paired(runs, "model.ffn", "dense", "none"))
    return Finding(
        number, "nats, attention alone less the whole block, pre-norm, mean over depths", above(number, 0.1),
        "At equal depth; attention alone has a third of the block's parameters.",
    )  # fmt: skip


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
    return Finding(number, f"stable share of pre-norm at one rate ({rates[0]:g}), depths {depths}", verdict)


def half_precision(data: Results) -> Finding:
    """B21: the arms have norms reduced in fp32, so that what fp16 does without is not seen here."""
    runs = runs_of(data, "precision", precision=("fp32", "fp16", "bf16"))
    told = {p: _by_seed(_paired(runs, "precision", "fp32", p)).told() for p in ("bf16", "fp16")}
    raise Missing(
        "every norm here reduces in fp32, so no run shows what half precision does without; with it the final loss "
        f"less fp32's is {told['bf16']} nats in bf16 and {told['fp16']} nats in fp16"
    )


def final_norm(data: Results) -> Finding:
    """B22."""
    runs = runs_of(data, "final_norm", model__final_norm=(True, False))
    deepest = runs[runs[DEPTH] == runs[DEPTH].max()]
    rows = arms.joined(data.layers[(data.layers.stat == "logit_rms")], deepest, ["seed", "model.final_norm"])
    if rows.empty:
        raise Missing("needs profiles (logit_rms)")
    ratio = {}
    for when, step in (("start", "min"), ("end", "max")):
        at = rows[rows.step == rows.groupby("run_id").step.transform(step)].drop_duplicates("run_id")
        by_seed = at.pivot_table("value", "seed", "model.final_norm")
        ratio[when] = estimates.mean((by_seed[False] / by_seed[True]).dropna())
    loss = _by_seed(_paired(runs, "model.final_norm", True, False))
    return Finding(
        ratio["start"],
        f"logit RMS without over with the final norm, depth {deepest[DEPTH].iloc[0]}, at initialisation",
        above(ratio["start"], 2.0),
        f"After training: {ratio['end'].told('{:.2f}')}. Final loss without less with: {loss.told()} nats.",
    )


def qk_norm(data: Results) -> Finding:
    """B23."""
    runs = runs_of(data, "qk_norm")
    runs = runs.assign(on=runs["model.qk_norm"].map(lambda v: str(v) not in {"False", "false"}))
    if runs.on.nunique() < 2:
        raise Missing("needs runs with and without QK-norm (+sweeps=qk_norm)")
    keys = [PLACEMENT, LR, "seed", DEPTH]
    by_arm = runs.pivot_table("stable", keys, "on").dropna()
    number = _by_seed(by_arm[True] - by_arm[False])
    logits = data.layers[(data.layers.stat == "attn_logit_max") & data.layers.run_id.isin(runs.run_id)]
    largest = runs.run_id.map(logits.groupby("run_id").value.max())
    top = runs.assign(top=np.log10(largest)).pivot_table("top", keys, "on").dropna()
    lower = _by_seed(top[True] - top[False])
    return Finding(
        number, "stable share over the rates, with less without QK-norm", both(above(number, 0.0), _not_above(lower, 0.0)),
        f"Largest attention logit of the run, decades, with less without: {lower.told('{:.2f}')}.",
    )  # fmt: skip


def sine(data: Results) -> Finding:
    """B24."""
    runs = runs_of(data, "sine", model__placement=("pre", "post"))
    runs = runs[runs["data.name"] == "sine"]
    if runs.empty:
        raise Missing("needs runs on data=sine (+sweeps=sine)")
    runs = runs.assign(final=np.log10(runs.loss.clip(lower=1e-12)))
    best = estimates.best_lr(runs, [PLACEMENT]).pivot_table("final", "seed", PLACEMENT)
    number = estimates.mean((best["post"] - best["pre"]).dropna())
    shares = ", ".join(f"{p} {runs.stable[runs[PLACEMENT] == p].mean():.0%}" for p in ("pre", "post"))
    unit = "decades of final error, post-norm less pre-norm, best rate of each"
    return Finding(number, unit, above(number, 0.0), f"Stable: {shares}.")


def gpu_only(data: Results) -> Finding:
    """B20."""
    raise Missing("GPU only: needs a fused kernel on a CUDA device")


PLACED, ABLATED = "fig_depth_placement", "fig_residual_ablation"
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
        "B12", "RMSNorm costs 15-20 % less than LayerNorm", "T B",
        "share of time saved by the norm alone, forward and backward, within 0.15 to 0.20",
        "fig_norm_cost", norm_cost,
    ),
    Claim(
        "B13", "RMSNorm matches LayerNorm's loss", "T N B",
        f"best-rate losses within {CLOSE} nats, pre-norm",
        "fig_norm_type", rmsnorm,
    ),
    Claim(
        "B14", "The feature mean is near 0 in deep pre-norm stacks, so that RMSNorm and LayerNorm nearly agree",
        "N",
        "|mean| / std of the trained stream below 0.2 (outputs within 2 % in cosine)",
        "fig_norm_type", feature_mean,
    ),
    Claim(
        "B15", "BatchNorm suffers at small batch and between training and evaluation", "N",
        "gap between evaluation and training loss larger than layer norm's at the smallest batch",
        "fig_batchnorm", batch_norm,
    ),
    Claim(
        "B16", "GELU beats ReLU; SwiGLU beats GELU at equal parameters", "T B",
        "best-rate loss lower in both comparisons",
        "fig_activation", activations,
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
    Claim(
        "B20", "Fusing residual add and norm saves 5-10 % end to end", "N",
        "share of a step's time within 0.05 to 0.10",
        "", gpu_only,
    ),
    Claim(
        "B21", "fp16 norms overflow or cancel without fp32 accumulation; bf16 overflows less", "N",
        "runs with norms reduced in half precision fail more in fp16 than in bf16",
        "fig_precision", half_precision,
    ),
    Claim(
        "B22", "The final norm keeps pre-norm's logits in range", "N",
        "logit RMS without over with it above 2 at the largest depth",
        "fig_final_norm", final_norm,
    ),
    Claim(
        "B23", "QK-norm stabilises", "B",
        "larger stable share over the rates and smaller attention logits",
        "fig_qk_norm", qk_norm,
    ),
    Claim(
        "B24", "Ten pre-norm blocks learn the sine better than ten post-norm ones", "B",
        "final error of post-norm over pre-norm's, best rate of each, above 1",
        "fig_sine", sine,
    ),
)  # fmt: skip
