"""Claims about norm types, activations, precision and the parts around them."""

import numpy as np

import arms
import estimates
import fig_norm_cost
from arms import DEPTH, PLACEMENT, Missing
from comparisons import CLOSE, NORM, best, by_seed, paired, runs_of
from estimates import LR
from ledger import Claim, Finding, above, both, not_above, of_study, within
from normlab.results import Results

ACTIVATION = "model.activation"


def norm_cost(data: Results) -> Finding:
    """B12."""
    rows, _ = fig_norm_cost.alone(of_study(data, "norm_cost"))
    ratio = rows[(rows[NORM] == "rmsnorm") & (rows.stat == "norm_training_seconds")].ratio.dropna()
    if ratio.empty:
        raise Missing("needs experiments/norm_cost.py of layernorm and rmsnorm")
    number = estimates.median(1 - ratio)
    where = ", ".join(sorted(rows.device.astype(str).unique()))
    unit = f"share of LayerNorm's time that RMSNorm saves, norm alone, forward and backward, median, {where}"
    return Finding(number, unit, within(number, 0.15, 0.20), rows.run_id.nunique())


def rmsnorm(data: Results) -> Finding:
    """B13."""
    runs = runs_of(data, "norm_type", model__norm=("layernorm", "rmsnorm"))
    number = best(runs[runs[PLACEMENT] == "pre"], NORM, "layernorm", "rmsnorm")
    note = ""
    if (runs[PLACEMENT] == "post").any():
        note = f"Post-norm: {best(runs[runs[PLACEMENT] == 'post'], NORM, 'layernorm', 'rmsnorm').told()} nats."
    return Finding(
        number,
        "nats, RMSNorm less LayerNorm, best rate of each, pre-norm",
        within(number, -CLOSE, CLOSE),
        len(runs),
        note,
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
        not_above(number, 0.2),
        len(deep),
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
            paired(runs[runs["data.batch_size"] == size], NORM, "layernorm", "batchnorm", "gap").to_numpy()
        )
        for size in (sizes[0], sizes[-1])
    }
    return Finding(
        more[sizes[0]],
        f"nats, evaluation less training loss, batch norm's less layer norm's, batch of {sizes[0]}",
        above(more[sizes[0]], 0.0),
        len(runs),
        f"At a batch of {sizes[-1]}: {more[sizes[-1]].told()}.",
    )


def activations(data: Results) -> Finding:
    """B16."""
    runs = runs_of(data, "activation", model__activation=("relu", "gelu", "swiglu"))
    gelu, swiglu = (best(runs, ACTIVATION, worse, better) for worse, better in (("relu", "gelu"), ("gelu", "swiglu")))
    verdicts = [not_above(e, 0.0) for e in (gelu, swiglu)]
    return Finding(
        swiglu,
        "nats, SwiGLU less GELU, best rate of each, equal FFN parameters",
        both(*verdicts),
        len(runs),
        f"GELU less ReLU: {gelu.told()} nats.",
    )


def half_precision(data: Results) -> Finding:
    """B21: the arms have norms reduced in fp32, so that what fp16 does without is not seen here."""
    runs = runs_of(data, "precision", precision=("fp32", "fp16", "bf16"))
    told = {p: by_seed(paired(runs, "precision", "fp32", p)).told() for p in ("bf16", "fp16")}
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
        by_arm = at.pivot_table("value", "seed", "model.final_norm")
        ratio[when] = estimates.mean((by_arm[False] / by_arm[True]).dropna())
    loss = by_seed(paired(runs, "model.final_norm", True, False))
    return Finding(
        ratio["start"],
        f"logit RMS without over with the final norm, depth {deepest[DEPTH].iloc[0]}, at initialisation",
        above(ratio["start"], 2.0),
        len(runs),
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
    number = by_seed(by_arm[True] - by_arm[False])
    logits = data.layers[(data.layers.stat == "attn_logit_max") & data.layers.run_id.isin(runs.run_id)]
    largest = runs.run_id.map(logits.groupby("run_id").value.max())
    top = runs.assign(top=np.log10(largest)).pivot_table("top", keys, "on").dropna()
    lower = by_seed(top[True] - top[False])
    return Finding(
        number,
        "stable share over the rates, with less without QK-norm",
        both(above(number, 0.0), not_above(lower, 0.0)),
        len(runs),
        f"Largest attention logit of the run, decades, with less without: {lower.told('{:.2f}')}.",
    )


def sine(data: Results) -> Finding:
    """B24."""
    runs = runs_of(data, "sine", model__placement=("pre", "post"))
    runs = runs[runs["data.name"] == "sine"]
    if runs.empty:
        raise Missing("needs runs on data=sine (+sweeps=sine)")
    runs = runs.assign(final=np.log10(runs.loss.clip(lower=1e-12)))
    chosen = estimates.best_lr(runs, [PLACEMENT]).pivot_table("final", "seed", PLACEMENT)
    number = estimates.mean((chosen["post"] - chosen["pre"]).dropna())
    shares = ", ".join(f"{p} {runs.stable[runs[PLACEMENT] == p].mean():.0%}" for p in ("pre", "post"))
    unit = "decades of final error, post-norm less pre-norm, best rate of each"
    return Finding(number, unit, above(number, 0.0), len(runs), f"Stable: {shares}.")


def gpu_only(data: Results) -> Finding:
    """B20."""
    raise Missing("GPU only: needs a fused kernel on a CUDA device")


CLAIMS = (
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
