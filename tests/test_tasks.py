"""What each architecture learns from a source: shapes, what is predicted, what the reference losses mean."""

import math

import pytest
import torch
from conftest import compose, tiny

from normlab import objective, task
from normlab.explain import ConfigError
from normlab.head import IGNORED
from normlab.model import build
from normlab.results import load
from normlab.train import train


def made(arch: str, *overrides: str) -> objective.Task:
    data = ["data=markov", "data.vocab=16", "data.batch_size=32", "model.context=64"]
    return task.make(compose(f"model.arch={arch}", *data, *overrides))


@pytest.mark.parametrize("arch", task.TASKS)
def test_a_batch_is_a_function_of_seed_and_step(arch):
    learned = made(arch)
    flat = [torch.cat([t.flatten() for t in (*_parts(learned.batch(seed, step)),)]) for seed, step in
            ((1, 2), (1, 2), (1, 3), (2, 2))]  # fmt: skip
    assert torch.equal(flat[0], flat[1])
    assert not torch.equal(flat[0], flat[2])
    assert not torch.equal(flat[0], flat[3])
    first, again = learned.held_out(2), learned.held_out(2)
    for one, two in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(_parts(one), _parts(two), strict=True))


def _parts(batch: objective.Batch) -> list[torch.Tensor]:
    inputs, targets = batch
    return [*inputs, targets] if isinstance(inputs, tuple) else [inputs, targets]


def test_masked_tokens_follow_bert_s_shares():
    """15 % of the tokens: 80 % of these masked, 10 % replaced by a random one, 10 % left."""
    learned = made("encoder", "data.batch_size=2000")
    inputs, targets = learned.batch(0, 0)
    assert learned.vocab == 17
    chosen = targets != IGNORED
    assert chosen.float().mean().item() == pytest.approx(0.15, abs=0.005)
    masked = (inputs == 16) & chosen
    left = (inputs == targets) & chosen
    assert (masked.sum() / chosen.sum()).item() == pytest.approx(0.8, abs=0.01)
    assert (left.sum() / chosen.sum()).item() == pytest.approx(0.1 + 0.1 / 16, abs=0.02)
    assert not (inputs == 16)[~chosen].any()
    assert chosen.any(1).all()


def test_a_short_sequence_has_a_target_too():
    _, targets = made("encoder", "model.context=2", "data.batch_size=500").batch(0, 0)
    assert (targets != IGNORED).any(1).all()


def test_a_continuation_follows_its_source():
    learned = made("encoder_decoder")
    (source, inputs), targets = learned.batch(0, 0)
    assert source.shape == inputs.shape == targets.shape == (32, 64)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    window, following = learned.source.batch(0, 0, 32, 128)
    assert torch.equal(torch.cat((source, inputs), 1), window)
    assert torch.equal(targets, following[:, 64:])


@pytest.mark.parametrize("arch", task.TASKS)
def test_reference_losses_are_the_entropies_of_what_is_predicted(arch):
    learned = made(arch, "data.batch_size=3000")
    batch = learned.batch(1, 0)
    assert learned.reference_loss(batch, 0) == pytest.approx(learned.source.h1, abs=3e-2)
    assert learned.reference_loss(batch, 1) == pytest.approx(learned.source.h2, abs=3e-2)


@pytest.mark.parametrize("arch", task.TASKS)
@pytest.mark.parametrize("ffn", ["dense", "moe"])
def test_every_architecture_learns_its_task(tmp_path, arch, ffn):
    """Below the unigram entropy within 150 steps on a chain of order 1; the mask is never a target."""
    size = ["data.batch_size=16", "eval.batches=8", "optim.lr=1e-2", "steps=200", f"model.ffn={ffn}"]
    record = train(tiny(tmp_path, f"model.arch={arch}", *size))
    assert (record["status"], record["verdict"]) == ("finished", "stable")
    assert record["final_val_loss"] < record["h1"] - 0.3
    assert record["init_val_loss"] == pytest.approx(math.log(16), abs=1.5)
    layers = load(tmp_path).layers
    stacks = {"encoder_decoder": {"encoder", "decoder"}}.get(arch, {arch})
    assert set(layers["stack"]) == stacks
    assert ("expert_load" in set(layers.stat)) == (ffn == "moe")
    if ffn == "moe":
        share = layers[(layers.stat == "expert_load")].groupby(["step", "stack", "layer"]).value.sum()
        assert share.tolist() == pytest.approx([2.0] * len(share))


def test_first_bad_layer_names_its_stack(tmp_path):
    cfg = tiny(tmp_path, "model.arch=encoder_decoder", "optim=sgd", "optim.lr=1e6", "model.placement=none", "steps=40")
    record = train(cfg)
    assert record["verdict"] == "diverged"
    assert record["first_bad_stack"] in {"encoder", "decoder"}
    assert record["first_bad_layer"] in {0, 1}


def test_the_vocabulary_of_a_model_may_exceed_the_data_s_not_fall_below():
    assert build(compose("model.vocab=300").model, 256).head.out.weight.shape == (300, 64)
    with pytest.raises(ConfigError, match=r"model\.vocab=16: the data has 17 symbols"):
        made("encoder", "model.vocab=16")


def test_a_pooler_cannot_train():
    with pytest.raises(ConfigError, match=r"model\.head=pooler has no language-model loss"):
        made("encoder", "model.head=pooler")
