"""Claims about a model that has not been trained: gradients, hidden states, the Jacobian, parameter counts."""

import numpy as np
import pandas as pd
from scipy import stats

import arms
import estimates
import fig_hidden_growth
import fig_jacobian
import fig_xiong_depth
from arms import DEPTH, PLACEMENT, Missing
from estimates import Estimate
from ledger import Claim, Finding, above, both, of_study, within
from normlab.results import Results
from normlab.size import on_meta, parts

FLAT = 0.1  # an exponent of depth that counts as none
GPT2_WIDTHS = (768, 1024, 1280, 1600)


def one_setting(data: Results, study: str) -> Results:
    """The study's runs with LayerNorm and GELU, where it has others too."""
    data = of_study(data, study)
    runs = data.runs
    if runs.empty:
        raise Missing("needs profiles at step 0")
    chosen = (runs["model.norm"] == "layernorm") & (runs["model.activation"] == "gelu")
    return Results(runs[chosen] if chosen.any() else runs, data.steps, data.layers)


def at_start(data: Results, stat: str, **where: str) -> pd.DataFrame:
    """Rows of one statistic at step 0 with depth, placement, seed and setting of their runs. where: site, tensor."""
    layers = data.layers[(data.layers.step == 0) & (data.layers.stat == stat)]
    for column, value in where.items():
        layers = layers[layers[column] == value]
    rows = arms.joined(layers, arms.profiled(data), [DEPTH, PLACEMENT, "seed", "setting"])
    if rows.empty:
        raise Missing(f"needs {stat} at step 0")
    return rows


def _of(rows: pd.DataFrame, placement: str) -> pd.DataFrame:
    mine = rows[rows[PLACEMENT] == placement]
    if mine.empty:
        raise Missing(f"needs model.placement={placement} at initialisation")
    return mine


def gradient_and_depth(data: Results) -> Finding:
    """B3."""
    rows = fig_xiong_depth.last_ffn(one_setting(data, "init_gradients"))
    rows = rows[rows[PLACEMENT].isin(["pre", "post"])]
    fitted = fig_xiong_depth.slopes(rows)
    fits = {fit.placement: fit for fit in fitted}
    if not {"pre", "post"} <= set(fits):
        raise Missing("needs profiles of pre and post at three depths or more")
    exponents = {p: Estimate(fits[p].slope, fits[p].low, fits[p].high, fits[p].n) for p in ("pre", "post")}
    flat = {p: within(e, -FLAT, FLAT) for p, e in exponents.items()}
    opposite = {"supported": "contradicted", "contradicted": "supported", "inconclusive": "inconclusive"}
    verdict = both(flat["pre"], opposite[flat["post"]])  # type: ignore[arg-type]
    return Finding(
        exponents["pre"],
        "exponent of depth of pre-norm's last FFN gradient",
        verdict,
        rows.run_id.nunique(),
        f"Post-norm's: {exponents['post'].told()}. Theorem 1 of Xiong et al. 2020: pre -0.5, post 0.",
    )


def variance_and_depth(data: Results) -> Finding:
    """B4."""
    rows = fig_hidden_growth.measured(one_setting(data, "init_gradients"))
    rows = fig_hidden_growth.deepest(rows)
    growth = {}
    for placement in ("pre", "post"):
        by_run = _of(rows, placement).groupby(["run_id", "block"]).value.mean().unstack()
        growth[placement] = estimates.mean((by_run.iloc[:, -1] / by_run.iloc[:, 0]) ** 2)
    verdict = both(above(growth["post"], 2.0), within(growth["pre"], 0.5, 2.0))
    return Finding(
        growth["post"],
        f"mean square at the last block over the first, post-norm, depth {rows[DEPTH].max()}",
        verdict,
        rows[rows[PLACEMENT].isin(growth)].run_id.nunique(),
        f"Pre-norm's: {growth['pre'].told('{:.3g}')}; post-norm's is what enters a block's norm.",
    )


def plain_gradients(data: Results) -> Finding:
    """B6."""
    rows = _of(at_start(one_setting(data, "init_gradients"), "stream_grad_norm", site="ffn"), "no_residual")
    rows = rows[(rows[DEPTH] == rows[DEPTH].max()) & (rows.value > 0)]
    fits = [stats.linregress(run["layer"].astype(float), np.log(run.value)) for _, run in rows.groupby("run_id")]
    factor = estimates.mean([np.exp(-fit.slope) for fit in fits])
    straight = float(np.mean([fit.rvalue**2 for fit in fits]))
    geometric = "supported" if straight > 0.9 else "contradicted"
    apart = above(factor, 1.0)
    return Finding(
        factor,
        f"factor per block on the way back, no residual, depth {rows[DEPTH].max()}",
        both(geometric, "supported" if apart == "contradicted" else apart),
        rows.run_id.nunique(),
        f"A straight line in logarithms explains R^2 = {straight:.3f}.",
    )


def identity_term(data: Results) -> Finding:
    """B8."""
    table = fig_jacobian.by_run(of_study(data, "jacobian"))
    deepest = table[table[DEPTH] == table[DEPTH].max()]
    share = {p: estimates.mean(_of(deepest, p).identity) for p in ("pre", "post", "no_residual")}
    none = share["no_residual"]
    verdict = both(above(share["pre"], 0.5), within(none, -0.5, 0.5))
    return Finding(
        share["pre"],
        f"mean diagonal of the stack's Jacobian, pre-norm, depth {deepest[DEPTH].iloc[0]}",
        verdict,
        deepest[PLACEMENT].isin(share).sum(),
        f"Post-norm, whose norms scale the skip: {share['post'].told('{:.3g}')}; no residuals: {none.told('{:.3g}')}.",
    )


def block_parameters(data: Results) -> Finding:
    """B17, of the GPT-2 family's four widths, on the meta device."""
    runs = data.runs
    found = [m for m in map(fig_hidden_growth.model_of, (r for _, r in runs.iterrows())) if m and m.arch == "decoder"]
    if not found:
        raise Missing("needs a run of a decoder, whose block is counted at GPT-2's widths")
    base = found[0].model_copy(
        update={"depth": 1, "ffn": "dense", "activation": "gelu", "ffn_ratio": 4.0, "ffn_width": None, "bias": True,
                "kv_heads": None, "heads": 4, "head_width": None, "norm": "layernorm", "placement": "pre",
                "qk_norm": False}
    )  # fmt: skip
    ratios, shares = [], []
    for width in GPT2_WIDTHS:
        by_part = parts(on_meta(base.model_copy(update={"width": width}), 256))
        block = {name: blocks[0] for name, blocks in by_part.items() if 0 in blocks}
        ratios.append(sum(block.values()) / (12 * width**2))
        shares.append(block["decoder ffn"] / sum(block.values()))
    ratio = Estimate(float(np.mean(ratios)), min(ratios), max(ratios), len(ratios))
    share = Estimate(float(np.mean(shares)), min(shares), max(shares), len(shares))
    return Finding(
        ratio,
        "a GPT-2 block's parameters over 12 d^2; the interval is the range over its widths",
        both(within(ratio, 0.98, 1.02), within(share, 0.65, 0.68)),
        len(runs),
        f"FFN's share {share.value:.4f}.",
    )


def forty_eight_blocks(data: Results) -> Finding:
    """B25."""
    chosen = one_setting(data, "init_gradients")
    rows = at_start(chosen, "expected_weight_grad_norm", site="ffn", tensor="out")
    rows = rows[rows[DEPTH] == 48]
    ratio = {}
    for placement in ("pre", "post"):
        by_run = _of(rows, placement).groupby(["run_id", "layer"]).value.mean().unstack()
        ratio[placement] = np.log10(by_run.iloc[:, 0] / by_run.iloc[:, -1])
    less = estimates.mean(np.abs(ratio["post"].to_numpy()) - np.abs(ratio["pre"].to_numpy()))
    told = {p: estimates.mean(10**r).told("{:.3g}") for p, r in ratio.items()}
    return Finding(
        less,
        "decades by which post-norm's first and last block differ more than pre-norm's, depth 48",
        above(less, 0.0),
        rows[rows[PLACEMENT].isin(ratio)].run_id.nunique(),
        f"First over last block: pre {told['pre']}; post {told['post']}.",
    )


CLAIMS = (
    Claim(
        "B3", "Pre-norm's gradient size does not depend on depth; post-norm's does", "N B",
        f"exponent of depth of the last FFN's gradient at initialisation: pre's within {FLAT} of 0 and post's not",
        "fig_init_gradients", gradient_and_depth,
    ),
    Claim(
        "B4", "Post-norm's output variance grows linearly with depth at initialisation; pre-norm's stays stable", "N",
        "mean square, last block over first: post's above 2, pre's between 1/2 and 2",
        "fig_hidden_growth", variance_and_depth,
    ),
    Claim(
        "B6", "Without residuals gradients scale as sigma^L", "N",
        "log gradient against block is a line (R^2 > 0.9) whose factor per block is not 1",
        "fig_gradient_profile", plain_gradients,
    ),
    Claim(
        "B8", "The gradient through a residual block contains the identity", "T N B",
        "mean diagonal of the stack's Jacobian: above 1/2 for pre-norm, within 1/2 of 0 without residuals",
        "fig_jacobian", identity_term,
    ),
    Claim(
        "B17", "A block has about 12 d^2 parameters, the FFN two thirds of them", "T B",
        "within 2 % of 12 d^2, and the FFN's share between 0.65 and 0.68, at every width of GPT-2",
        "", block_parameters,
    ),
    Claim(
        "B25", "Over 48 blocks post-norm's gradient norms are less even than pre-norm's", "N",
        "|log10 of first over last block|, FFN out at initialisation: post's less pre's above 0",
        "fig_init_gradients", forty_eight_blocks,
    ),
)  # fmt: skip
