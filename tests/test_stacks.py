"""What is easy to get wrong inside a model: three sublayers, dropout's places, what training descends."""

import math

import pytest
import torch
from conftest import compose, tiny
from test_placements import part

from normlab.ffn import MoE
from normlab.init import calibrate, initialise
from normlab.model import Block, Model, build
from normlab.norm import BatchNorm
from normlab.residual import PLACEMENTS, Admin, AdminFixed, DeepNorm, Keel
from normlab.results import load
from normlab.task import make
from normlab.tensors import tensors
from normlab.train import train

TWO = ["model.arch=encoder_decoder", "model.width=8", "model.heads=2", "model.depth=6", "model.encoder_depth=4"]


def made(*overrides: str) -> Model:
    cfg = compose(*overrides).model
    model = build(cfg, vocab=11)
    initialise(model, cfg, seed=0)
    return model


def three(placement: str, x, attn, cross, ffn):
    """The block's equation with cross-attention between attention and FFN."""
    each = {"normformer": lambda x, s: x + s.M(s.F(s.N(x)))}
    if placement == "b2t":
        h = cross.N(attn.N(x + attn.F(x)) + cross.F(attn.N(x + attn.F(x))))
        return ffn.N(x + h + ffn.F(h))
    if placement == "parallel":
        z = ffn.N(x)
        return x + attn.F(z) + cross.F(z) + ffn.F(z)
    if placement == "deepnorm":
        for s in (attn, cross, ffn):
            x = s.N(18**0.25 * x + s.F(x))  # (3 M)^(1/4), M = 6
        return x
    if placement == "admin_fixed":
        for s in (attn, cross, ffn):
            x = s.N(math.sqrt(19 / math.log(19) - 1) * x + s.F(x))  # L = 18
        return x
    if placement == "keel":
        for s in (attn, cross, ffn):
            x = s.M(18 * x + s.F(s.N(x)))
        return x
    if placement == "normformer":
        x = each[placement](each[placement](x, attn), cross)
        return ffn.w * x + ffn.F(ffn.N(x))
    if placement == "hybrid_norm":
        z = ffn.N(x + attn.F(x) + cross.F(x + attn.F(x)))
        return z + ffn.F(z)
    if placement == "resi_dual":
        x, d = x
        for s in (attn, cross, ffn):
            y = s.F(x)
            x, d = s.N(x + y), d + y
        return x, d
    raise AssertionError(placement)


@pytest.mark.parametrize(
    "placement",
    ["deepnorm", "admin_fixed", "keel", "normformer", "hybrid_norm", "resi_dual", "b2t", "parallel"],
)
def test_a_block_with_cross_attention_is_its_equation(placement):
    cfg = compose(*TWO, f"model.placement={placement}").model
    block = Block(cfg, "decoder", 3).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, mean=0.3, std=0.5)
    memory = torch.randn(2, 7, 8, dtype=torch.float64)
    parts = [part(block, site, 3) for site in ("attn", "cross", "ffn")]
    parts[1].F = lambda x: block.cross(x, memory)
    x = PLACEMENTS[placement].enter(torch.randn(2, 5, 8, dtype=torch.float64))
    torch.testing.assert_close(block(x, memory), three(placement, x, *parts), rtol=1e-12, atol=1e-12)


def test_cross_attention_has_neither_sub_ln_s_norm_nor_positions():
    block = Block(compose(*TWO, "model.placement=sub_ln", "model.position=rotary").model, "decoder", 0)
    assert block.attn.out_norm is not None
    assert block.cross.out_norm is None
    assert block.cross.rotary is None


def test_depth_constants_count_cross_attention():
    found = {
        kind: next(m for m in made(*TWO, f"model.placement={name}").decoder.blocks[1].modules() if isinstance(m, kind))
        for name, kind in (("deepnorm", DeepNorm), ("admin_fixed", AdminFixed), ("keel", Keel))
    }
    assert found[DeepNorm].alpha == pytest.approx(18**0.25)
    assert found[AdminFixed].omega == pytest.approx(math.sqrt(19 / math.log(19) - 1))
    assert found[Keel].alpha == 18


def test_deepnorm_scales_cross_attention_s_v_and_out_too():
    plain, deep = (
        {str(e.id): e.value for e in tensors(made(*TWO, f"model.placement={p}"))} for p in ("post", "deepnorm")
    )
    for tensor, gain in (("q", 1.0), ("k", 1.0), ("v", 72**-0.25), ("out", 72**-0.25)):
        name = f"decoder.2.cross.{tensor}"
        torch.testing.assert_close(deep[name], gain * plain[name], rtol=1e-6, atol=0)


def test_admin_profiles_every_sublayer_of_both_stacks_without_dropout():
    model = made(*TWO, "model.placement=admin", "model.dropout=0.5")
    tokens = torch.randint(11, (4, 16))
    calibrate(model, (tokens, tokens))
    for stack in model.stacks.values():
        scales = [m.scale[0].item() for m in stack.modules() if isinstance(m, Admin)]
        assert scales == sorted(scales)
        assert len(set(scales)) == len(scales) == sum(len([m for m in b.children() if isinstance(m, Admin)])
                                                      for b in stack.blocks)  # fmt: skip
    again = made(*TWO, "model.placement=admin")
    calibrate(again, (tokens, tokens))
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    assert model.training


def test_resi_dual_s_second_stream_starts_as_the_first():
    """Blocks whose branches are 0 leave x + N(x) of the embedding."""
    model = made("model.placement=resi_dual", "model.width=8", "model.heads=2", "model.depth=1").double()
    for e in tensors(model):
        if e.id.layer is not None and e.id.tensor in {"out", "out_bias"}:
            e.value.zero_()
    tokens = torch.randint(11, (1, 5))
    x = model.decoder.embed(tokens)
    norm = torch.nn.functional.layer_norm
    torch.testing.assert_close(model.decoder(tokens), norm(x, (8,)) * 1.0 + norm(x, (8,)), rtol=1e-4, atol=1e-4)


SITES = ["embed", "blocks.0.attn", "blocks.0.ffn"]


@pytest.mark.parametrize("site", SITES)
def test_dropout_acts_on_each_output(site):
    """A share of the outputs is 0, the others are scaled up; none in evaluation."""
    model = made("model.dropout=0.4", "model.depth=1", "model.width=64")
    module = model.decoder.get_submodule(site)
    x = torch.randint(11, (8, 64)) if site == "embed" else torch.randn(8, 64, 64)
    assert (module(x) == 0).float().mean().item() == pytest.approx(0.4, abs=0.02)
    module.eval()
    assert not (module(x) == 0).any()


@pytest.mark.parametrize("softcap", ["null", "50.0"])
def test_dropout_acts_on_attention_weights(softcap):
    """With every value 1, an output is the sum of the weights that were kept, scaled up: 1 on average, not always."""
    model = made(
        "model.dropout=0.5", "model.depth=1", "model.width=8", "model.heads=2", f"model.attn_softcap={softcap}"
    )
    attn = model.decoder.blocks[0].attn
    q, k = torch.randn(64, 2, 32, 4), torch.randn(64, 2, 32, 4)
    kept = attn._mix(q, k, torch.ones(64, 2, 32, 4), None)
    assert kept.std() > 0.1
    assert kept.mean().item() == pytest.approx(1.0, abs=0.05)
    attn.eval()
    torch.testing.assert_close(attn._mix(q, k, torch.ones(64, 2, 32, 4), None), torch.ones(64, 2, 32, 4))


def test_training_descends_cross_entropy_plus_the_mean_balance():
    model = made("model.ffn=moe", "model.depth=3", "model.balance_loss=0.5")
    tokens, targets = torch.randint(11, (2, 8)), torch.randint(11, (2, 8))
    objective, loss = model.objective(tokens, targets)
    balances = [m.balance for m in model.modules() if isinstance(m, MoE)]
    assert len(balances) == 3
    assert loss.item() == pytest.approx(model.loss(tokens, targets).item(), rel=1e-6)
    assert (objective - loss).item() == pytest.approx(0.5 * sum(balances).item() / 3, rel=1e-5)
    plain, same = made("model.depth=3").objective(tokens, targets)
    assert plain is same


def test_what_is_logged_is_cross_entropy_and_what_is_profiled_is_the_objective(tmp_path):
    """A thousandfold balance loss changes the first gradient, not the first losses."""
    for weight in ("0.0", "1000.0"):
        train(tiny(tmp_path, "model.ffn=moe", f"model.balance_loss={weight}", "steps=2", f"study=w{weight[0]}"))
    one, two = load(tmp_path / "w0"), load(tmp_path / "w1")
    assert one.steps.loss[0] == two.steps.loss[0]
    assert one.runs.init_val_loss[0] == two.runs.init_val_loss[0]
    assert two.steps.grad_norm[0] > 2 * one.steps.grad_norm[0]
    routers = [r.layers[(r.layers.stat == "mean_weight_grad_norm") & (r.layers.tensor == "router")] for r in (one, two)]
    assert (routers[1].value.to_numpy() > 2 * routers[0].value.to_numpy()).all()


def test_evaluation_has_no_dropout(tmp_path):
    """The same weights, evaluated twice and at any rate of dropout, give the same loss."""
    plain = train(tiny(tmp_path, "steps=0"))
    for rate in ("0.1", "0.9"):
        assert train(tiny(tmp_path, "steps=0", f"model.dropout={rate}"))["init_val_loss"] == plain["init_val_loss"]


EXTRAS = [["model.dropout=0.2"], ["model.norm=batchnorm"], ["model.ffn=moe"], ["model.arch=encoder_decoder"],
          ["precision=bf16"], ["model.placement=resi_dual"], ["micro_batch=3"]]  # fmt: skip


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda e: e[0])
def test_losses_are_bit_equal_with_every_probe_on_and_off(tmp_path, extra):
    on = ["probe.every=1", "probe.layer_drop=true", "probe.sharpness=true", "eval.every=1", "study=on"]
    train(tiny(tmp_path, *extra, *on, "steps=8"))
    train(tiny(tmp_path, *extra, "probe.batches=0", "eval.every=0", "study=off", "steps=8"))
    steps = load(tmp_path).steps
    one, two = (steps[steps.study == s].loss.tolist() for s in ("on", "off"))
    assert len(one) == 8
    assert one == two


def test_batch_norms_are_evaluated_from_the_start_with_the_data_s_statistics(tmp_path):
    """Unset running statistics would leave a deep stack without norms: its first loss was 806 at depth 12."""
    record = train(tiny(tmp_path, "model.norm=batchnorm", "model.depth=12", "steps=10"))
    steps = load(tmp_path).steps
    assert record["init_val_loss"] == pytest.approx(steps.loss[0], abs=0.5)
    model = made("model.norm=batchnorm", "model.depth=2")
    calibrate(model, torch.randint(11, (8, 32)))
    norms = [m for m in model.modules() if isinstance(m, BatchNorm)]
    assert all(m.momentum == 0.1 and m.training for m in norms)
    assert any((m.running_mean.abs() > 0.01).any() for m in norms)


def test_the_steps_read_between_two_measurements_do_not_depend_on_the_log(tmp_path):
    overrides = ["model.placement=none", "optim=sgd", "optim.lr=1e6", "steps=20", "probe.every=2", "eval.every=3"]
    for every in (1, 10):
        train(tiny(tmp_path, *overrides, f"log.every={every}", f"study=every{every}"))
    one, ten = load(tmp_path / "every1"), load(tmp_path / "every10")
    for stat in ("stream_rms", "weight_grad_norm"):
        assert sorted(set(one.layers[one.layers.stat == stat].step)) == sorted(
            set(ten.layers[ten.layers.stat == stat].step)
        )
    assert one.steps.step.tolist() == ten.steps.step.tolist()


def test_excess_loss_knows_the_whole_window_and_is_none_for_an_encoder(tmp_path):
    markov = ["data.order=3", "data.vocab=4", "model.context=2"]
    cfg = tiny(tmp_path, "model.arch=encoder_decoder", *markov)
    record, learned = train(cfg), make(cfg)
    floor = sum(learned.reference_loss(b, 4) for b in learned.held_out(2)) / 2
    assert record["excess_loss"] == pytest.approx(record["final_val_loss"] - floor)
    assert train(tiny(tmp_path, "model.arch=encoder"))["excess_loss"] is None


def test_a_continuation_predicts_its_second_half_only():
    learned = make(compose("model.arch=encoder_decoder", "data=markov", "model.context=4", "data.batch_size=1"))
    text, predicted = learned.tokens(learned.batch(0, 0))
    assert text.shape == (1, 9)
    assert predicted[0].tolist() == [False] * 5 + [True] * 4
