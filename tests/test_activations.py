"""Activation statistics against NumPy on the tensors themselves, recomputed layer by layer."""

import math

import numpy as np
import pytest
import torch
from conftest import compose, tiny

from normlab.activations import angular_distance, attention_statistics, stream_statistics
from normlab.init import initialise
from normlab.model import Model, build
from normlab.probe import Profile, layer_drop, profile
from normlab.residual import PLACEMENTS
from normlab.results import load
from normlab.sharpness import critical_sharpness
from normlab.train import train


def made(*overrides: str) -> Model:
    cfg = compose("model.depth=3", "model.width=16", "model.heads=2", "model.context=8", *overrides).model
    model = build(cfg, vocab=11)
    initialise(model, cfg, seed=0)
    return model


def batches(count: int) -> list[tuple]:
    return [(torch.randint(11, (4, 8)), torch.randint(11, (4, 8))) for _ in range(count)]


def test_stream_statistics_against_numpy():
    x = torch.randn(3, 5, 7, dtype=torch.float64) * torch.arange(1, 8)
    got, a = {k: v.item() for k, v in stream_statistics(x).items()}, x.numpy()
    cosines = []
    for sequence in a:
        for t in range(5):
            for s in range(5):
                if s != t:
                    u, v = sequence[t], sequence[s]
                    cosines.append(u @ v / np.linalg.norm(u) / np.linalg.norm(v))
    s = np.sqrt((a**2).mean((0, 1)))
    assert got["stream_rms"] == pytest.approx(np.sqrt((a**2).mean()))
    assert got["token_cosine"] == pytest.approx(np.mean(cosines))
    assert got["max_abs"] == np.abs(a).max()
    assert got["top1_over_median"] == pytest.approx(np.abs(a).max() / np.median(np.abs(a)))
    assert got["kurtosis"] == pytest.approx((s**4).mean() / (s**2).mean() ** 2)
    assert got["mean_over_std"] == pytest.approx(float((abs(x.mean(-1)) / x.std(-1, correction=0)).mean()))


def test_collapsed_tokens_have_cosine_1_and_one_channel_kurtosis_d():
    x = torch.zeros(2, 4, 8)
    x[..., 3] = 5.0
    got = stream_statistics(x)
    assert got["token_cosine"].item() == pytest.approx(1.0)
    assert got["kurtosis"].item() == pytest.approx(8.0)


def test_angular_distance():
    x = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]])
    y = torch.tensor([[[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]]])
    assert angular_distance(x, y).item() == pytest.approx((0 + 0.5 + 1) / 3)


def test_attention_statistics():
    scores = torch.full((2, 3, 4, 4), -math.inf).tril(-10)
    scores = torch.zeros(2, 3, 4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf)
    scores[:, 1, 3, 0] = 100.0
    largest, entropy = attention_statistics(scores)
    even = [math.log(n) for n in (1, 2, 3, 4)]
    assert largest.item() == 100
    assert entropy.tolist() == pytest.approx([sum(even) / 4, sum(even[:3]) / 4, sum(even) / 4], abs=1e-6)


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])
def test_profile_of_the_last_block_against_recomputation(placement):
    """Every statistic of block 2, from the tensors that the block's own modules give when called by hand."""
    model, (drawn,) = made(f"model.placement={placement}", "model.attn_softcap=30").eval(), batches(1)
    table = profile(model, model.loss, [drawn]).set_index(["layer", "site", "tensor", "stat"]).value
    with torch.no_grad():
        block, x = model.decoder.blocks[2], model.decoder.embed(drawn[0])
        for before in model.decoder.blocks[:2]:
            x = before(x)
        start = x
        for site in ("attn", "ffn"):
            residual, f = getattr(block, f"{site}_residual"), getattr(block, site)
            entering = x if placement == "post" else residual.norm(x)
            branch = f(entering)
            joined = residual(x, f)
            at = (2, site)
            assert table[(*at, None, "branch_rms")] == pytest.approx(branch.square().mean().sqrt().item(), rel=1e-5)
            joins = residual.norm_out(branch) if placement == "sandwich" else branch
            share = joins.var(correction=0) / (x + joins).var(correction=0)
            assert table[(*at, None, "branch_share")] == pytest.approx(share.item(), rel=1e-4)
            read = x + branch if placement == "post" else x
            assert table[(*at, "norm", "norm_input_rms")] == pytest.approx(read.square().mean().sqrt().item(), rel=1e-5)
            left = residual.norm(read).square().mean().sqrt().item()
            assert table[(*at, "norm", "norm_output_rms")] == pytest.approx(left, rel=1e-5)
            for stat, value in stream_statistics(joined).items():
                assert table[(*at, None, stat)] == pytest.approx(value.item(), rel=1e-4), stat
            x = joined
        turn = angular_distance(start, x).item()
        assert table[(2, "ffn", None, "angular_distance")] == pytest.approx(turn, rel=1e-5)
        z = start if placement == "post" else block.attn_residual.norm(start)
        q, k, _ = block.attn.w_qkv(z).chunk(3, -1)
        q, k = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q, k))
        scores = 30 * torch.tanh(q @ k.transpose(-1, -2) / math.sqrt(8) / 30)
        scores = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -math.inf)
        p = scores.softmax(-1)
        entropy = -(p * p.clamp_min(1e-30).log()).sum(-1).mean((0, 2))
        assert table[(2, "attn", None, "attn_logit_max")] == pytest.approx(scores.max().item(), rel=1e-4)
        found = [table[(2, "attn", f"head_{h}", "attn_entropy")] for h in range(2)]
        assert found == pytest.approx(entropy.tolist(), rel=1e-4)
        logits = model(drawn[0])
    flat = table.droplevel("layer")
    assert flat[("head", None, "logit_rms")] == pytest.approx(logits.square().mean().sqrt().item(), rel=1e-5)
    assert flat[("head", None, "log_z")] == pytest.approx(logits.exp().sum(-1).log().mean().item(), rel=1e-5)


SKIPS = {  # what the branch is added to, where that is not x itself; s the residual, x what it gets
    "deepnorm": lambda s, x: s.alpha * x,
    "admin": lambda s, x: s.scale * x,
    "admin_fixed": lambda s, x: s.omega * x,
    "keel": lambda s, x: s.alpha * x,
    "hybrid_norm": lambda s, x: s.norm(x),
    "normformer": lambda s, x: s.scale * x,
    "no_residual": lambda s, x: 0 * x,
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_branch_share_is_that_of_what_joins(placement):
    """Var of what is added over Var of the sum, at the last FFN: of the output, or of what the outer norm reads."""
    model, (drawn,) = made(f"model.placement={placement}").eval(), batches(1)
    with torch.no_grad():
        for p in model.parameters():  # away from scales that start at 0
            p.add_(0.2 * torch.randn_like(p))
    residual, kept = model.decoder.blocks[2].ffn_residual, {}
    handles = [residual.register_forward_hook(lambda _m, args, out: kept.update(x=args[0], out=out))]
    outer = {"keel": "norm_out"}.get(placement, "norm")
    if placement in {"post", "deepnorm", "admin", "admin_fixed", "b2t", "resi_dual", "keel"}:
        norm = residual.get_submodule(outer)
        handles.append(norm.register_forward_hook(lambda _m, args, _out: kept.update(total=args[0])))
    with torch.no_grad():
        model(drawn[0])
    for handle in handles:
        handle.remove()
    x = kept["x"]
    if placement == "b2t":
        skip = x[0] + x[1]
    elif placement == "resi_dual":
        skip = x[0]
    else:
        skip = SKIPS.get(placement, lambda _s, x: x)(residual, x)
    total = kept.get("total", kept["out"])
    expected = ((total - skip).var(correction=0) / total.var(correction=0)).item()
    table = profile(model, model.loss, [drawn]).set_index(["layer", "site", "stat"]).value
    assert table[(2, "ffn", "branch_share")] == pytest.approx(expected, rel=1e-3)


def test_the_largest_logit_is_the_largest_of_all_batches():
    model, drawn = made(), batches(4)
    each = [profile(model, model.loss, [b]).set_index(["layer", "stat"]).value[(1, "attn_logit_max")] for b in drawn]
    whole = profile(model, model.loss, drawn).set_index(["layer", "stat"]).value[(1, "attn_logit_max")]
    assert whole == max(each) > sum(each) / 4


def test_a_norm_that_is_not_there_has_no_rows():
    model = made("model.placement=post")
    table = profile(model, model.loss, batches(1))
    assert "final_norm" not in set(table.site)
    bare = made("model.norm=none")
    assert not profile(bare, bare.loss, batches(1)).stat.str.startswith("norm_").any()


@pytest.mark.parametrize("arch", ["decoder", "encoder", "encoder_decoder"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_block_of_every_placement_has_its_statistics(placement, arch):
    model = made(f"model.placement={placement}", f"model.arch={arch}")
    tokens = torch.randint(11, (2, 8))
    inputs = (tokens, tokens) if arch == "encoder_decoder" else tokens
    table = profile(model, model.loss, [(inputs, tokens)])
    assert not table.duplicated(["stack", "layer", "site", "tensor", "stat"]).any()
    assert table.value.notna().all()
    everywhere = {(stack, i) for stack in model.stacks for i in range(3)}
    for stat in ("angular_distance", "attn_logit_max", "attn_entropy", "stream_grad_norm", "branch_share", "kurtosis"):
        seen = table[(table.stat == stat) & table.layer.notna()]
        assert set(zip(seen["stack"], seen.layer, strict=True)) == everywhere, stat


def test_output_change_is_that_of_the_fixed_batch():
    model, drawn = made(), batches(2)
    take = Profile(model, model.objective, drawn, layer_drop=False)
    assert "output_change" not in set(take().stat)
    before = model(drawn[0][0])
    with torch.no_grad():
        model.decoder.blocks[1].ffn.w_out.weight.mul_(1.5)
    again = take().set_index("stat").value
    expected = (model(drawn[0][0]) - before).square().mean().sqrt().item()
    assert again["output_change"] == pytest.approx(expected, rel=1e-5)
    assert take().set_index("stat").value["output_change"] == 0


def test_layer_drop_against_a_model_without_the_block():
    model, drawn = made(), batches(2)
    rows = {layer: value for _, layer, _, _, _, value in layer_drop(model, model.loss, drawn)}
    blocks = model.decoder.blocks
    with torch.no_grad():
        whole = sum(model.loss(*b).item() for b in drawn) / 2
        for layer in range(3):
            model.decoder.blocks = torch.nn.ModuleList(b for i, b in enumerate(blocks) if i != layer)
            without = sum(model.loss(*b).item() for b in drawn) / 2
            assert rows[layer] == pytest.approx(without - whole, abs=1e-5)
    assert not any("forward" in vars(block) for block in blocks)


@pytest.mark.parametrize("lr", [0.01, 0.1, 1.0])
def test_critical_sharpness_of_a_quadratic_is_its_curvature(lr):
    """L = h w^2 / 2, gradient descent: the loss rises beyond rate 2 / h, so 2 / eta_c = h."""
    for h in (0.5, 3.0, 50.0):
        weights = torch.tensor([2.0, -1.0], dtype=torch.float64)
        update = lr * h * weights.clone()
        weights -= update
        after = weights.clone()
        found = critical_sharpness(lambda w=weights, h=h: h / 2 * w.square().sum(), weights, update, lr)
        assert h * 15 / 16 <= found <= h * (1 + 1e-9)
        assert torch.equal(weights, after)


def test_critical_sharpness_of_what_is_broken_already():
    weights, update = torch.tensor([math.nan]), torch.tensor([1.0])
    assert math.isnan(critical_sharpness(weights.sum, weights, update, 0.1))
    weights = torch.tensor([0.0])
    calls = []

    def worse() -> torch.Tensor:
        calls.append(1)
        return torch.tensor(float(len(calls)))

    assert critical_sharpness(worse, weights, update, 0.1) == math.inf
    assert len(calls) < 60


def test_a_run_that_breaks_under_the_probes_is_diverged_all_the_same(tmp_path):
    asked = ["probe.sharpness=true", "probe.layer_drop=true", "probe.every=1"]
    record = train(tiny(tmp_path, *asked, "optim=sgd", "optim.lr=1e30", "stop.nonfinite=false"))
    assert (record["status"], record["verdict"]) == ("finished", "diverged")


def test_the_output_s_change_is_the_weights_not_dropout_s(tmp_path):
    train(tiny(tmp_path, "model.dropout=0.3", "optim.lr=1e-12", "probe.every=2"))
    layers = load(tmp_path).layers
    assert (layers[layers.stat == "output_change"].value < 1e-5).all()


def test_layer_drop_is_told_in_cross_entropy(tmp_path):
    for weight in ("0.0", "1000.0"):
        settings = ["model.ffn=moe", f"model.balance_loss={weight}", "probe.layer_drop=true", "steps=1"]
        train(tiny(tmp_path, *settings, f"study=w{weight[0]}"))
    one, two = (load(tmp_path / s).layers for s in ("w0", "w1"))
    dropped = [t[(t.stat == "layer_drop_loss") & (t.step == 0)].value.tolist() for t in (one, two)]
    assert dropped[0] == dropped[1]


def test_requested_probes_are_recorded_and_change_nothing(tmp_path):
    plain = train(tiny(tmp_path, "study=plain"))
    asked = train(tiny(tmp_path, "study=asked", "probe.layer_drop=true", "probe.sharpness=true", "probe.every=2"))
    assert asked["final_val_loss"] == plain["final_val_loss"]
    _, steps, layers = load(tmp_path / "asked")
    assert steps.critical_sharpness.notna().tolist() == [True, False] * 3
    assert (steps.critical_sharpness.dropna() >= 0).all()
    dropped = layers[layers.stat == "layer_drop_loss"]
    assert sorted(dropped.step.unique()) == [0, 2, 4, 6]
    assert sorted(dropped.layer.unique()) == [0, 1]
    assert (layers[layers.stat == "output_change"].step > 0).all()
