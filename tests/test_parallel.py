"""Sentence pairs: what is read and refused, batches without state, padding that changes nothing, reference losses."""

import math
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import ROOT
from pairs import REST, SIZE, config, write

from normlab import cli, objective, parallel, task
from normlab.buckets import Batches, assemble, buckets
from normlab.explain import ConfigError
from normlab.head import IGNORED
from normlab.init import initialise
from normlab.model import build
from normlab.ngram import Bigrams
from normlab.parallel import BOS, EOS, PAD
from normlab.position import key_mask


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "pairs")


def test_text_comes_back_from_its_pieces(folder):
    source = parallel.load(config(folder).data)
    for split in source.splits.values():
        lines = split.paths[1].read_text().splitlines()
        assert lines == split.references == [source.text(ids.tolist()) for ids in split.target]
        assert all(ids.min() >= parallel.SPECIAL and ids.max() < source.vocab for ids in split.source)


def test_special_tokens_cannot_be_spelt(folder):
    (folder / "test.en").write_text("<s> </s> <pad> [PAD]\n" * 9)
    source = parallel.load(config(folder).data)
    assert source.splits["test"].target[0].min() >= parallel.SPECIAL
    assert source.text(source.splits["test"].target[0].tolist()) == "<s> </s> <pad> [PAD]"


def test_the_bpe_is_kept_by_content_and_made_the_same_again(folder, tmp_path):
    first = parallel.load(config(folder).data)
    other = parallel.load(config(folder, f"data.cache={tmp_path / 'elsewhere'}").data)
    assert first.sha256 == other.sha256
    names = [[p.name for p in place.iterdir()] for place in (folder / "cache", tmp_path / "elsewhere")]
    assert len(names[0]) == 1
    assert names[0] == names[1]
    parallel.load(config(folder, "data.vocab=265").data)
    assert len(list((folder / "cache").iterdir())) == 2
    write(folder, seed=1)
    assert parallel.load(config(folder, "data.bleu_sentences=3").data).sha256 != first.sha256
    assert len(list((folder / "cache").iterdir())) == 3


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (
            "train.de",
            b"eins\n\nzwei\n" + b"x\n" * 57,
            r"train\.de: line 2 is empty; accepted: a sentence on every line",
        ),
        ("valid.en", b"one\n" * 3 + b" \t\n" + b"x\n" * 8, r"valid\.en: line 4 is empty"),
        ("valid.de", b"eins\n" * 11, r"valid\.de 11 and .*valid\.en 12 lines"),
        ("train.de", b"gut\n" * 9 + "schön\n".encode("latin-1"), r"train\.de: line 10 is not UTF-8: .* at byte 4"),
        ("test.en", b"", r"test\.en: empty"),
        ("test.en", b"one\n" * 8 + b"two " * 99 + b"\n", r"test\.en: line 9 takes \d+ tokens .*model\.context=48"),
        ("train.de", b"Stra\xdfe\n" + b"x\n" * 59, r"train\.de: line 1 is not UTF-8"),
        ("train.de", None, r"train\.de: No such file or directory; data\.path"),
    ],
)
def test_bad_files_are_refused_with_file_and_line_before_a_run_folder_is_made(folder, name, content, told):
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    where = [f"data.path={folder}", f"data.cache={folder / 'cache'}", f"runs_dir={folder / 'runs'}"]
    with pytest.raises(ConfigError, match=told) as caught:
        cli.check(ROOT, ["data=parallel", *SIZE, *REST, *where])
    assert "\n" not in str(caught.value)
    assert not (folder / "runs").exists()
    assert not list(folder.glob("cache/.*"))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.arch=decoder"], r"data=parallel: model\.arch=decoder; accepted: encoder_decoder"),
        (["objective=mlm"], r"objective=mlm: model\.arch=encoder_decoder; accepted: encoder"),
        (["objective=continuation"], r"objective=continuation: data=parallel has sentence pairs"),
        (["data.test_source=null"], r"data\.test_source and data\.test_target: one without the other"),
        (["data.cache=/proc/nowhere"], r"data\.cache='/proc/nowhere': .*accepted: a folder to write to"),
        (["model.vocab=100"], r"model\.vocab=100: the data has"),
    ],
)
def test_settings_that_do_not_fit_are_refused(folder, overrides, told):
    with pytest.raises(ConfigError, match=told):
        task.make(config(folder, *overrides))


def test_lines_end_at_line_feeds_only(folder):
    """A line separator of Unicode, a form feed or a byte order mark is text, and a carriage return is not."""
    lines = ["a\u2028b c", "d\x0ce", "f\x85g"] + ["h"] * 6
    (folder / "test.en").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert parallel.load(config(folder).data).splits["test"].references == lines


def test_an_epoch_has_each_pair_once_and_a_batch_follows_from_seed_and_step(folder):
    learned = task.make(config(folder))
    batches = learned.batches["train"]
    for epoch in range(2):
        rows = []
        for step in range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch):
            (source, _, present), _ = learned.batch(3, step)
            rows += [tuple(s[p].tolist()) for s, p in zip(source, present, strict=True)]
        train = learned.source.splits["train"]
        assert Counter(rows) == Counter((*ids.tolist(), EOS) for ids in train.source)
    fresh = Batches(train, 128)  # nothing remembered
    for step in (7, 0, 3 * batches.per_epoch + 1):
        one, two, other = learned.batch(3, step), fresh.train(3, step), fresh.train(4, step)
        assert all(torch.equal(a, b) for a, b in zip((*one[0], one[1]), (*two[0], two[1]), strict=True))
        assert one[1].shape != other[1].shape or not torch.equal(one[1], other[1])


def test_batches_keep_to_the_budget_and_to_few_shapes(folder):
    learned = task.make(config(folder))
    shapes = set()
    for step in range(learned.batches["train"].per_epoch):
        (source, inputs, _), targets = learned.batch(0, step)
        assert len(source) * max(source.shape[1], inputs.shape[1]) <= 128
        assert targets.shape == inputs.shape
        shapes.add((source.shape[1], inputs.shape[1]))
    assert len(shapes) <= len(learned.batches["train"].buckets)
    lengths = np.array([[3, 300], [2, 2], [40, 41]])
    assert [b.rows for b in buckets(lengths, 100)] == [50, 2, 1]  # a pair longer than the budget comes alone


def test_tokens_seen_are_the_targets(folder):
    learned = task.make(config(folder))
    steps = 2 * learned.batches["train"].per_epoch + 3
    counted = sum((learned.batch(5, step)[1] != IGNORED).sum().item() for step in range(steps))
    assert learned.tokens_seen(5, steps) == counted
    assert learned.tokens_seen(5, 0) == 0


def test_a_batch_teaches_with_the_true_tokens(folder):
    train = task.make(config(folder)).source.splits["train"]
    (source, inputs, present), targets = assemble(train, [4], (30, 40))
    s, t = len(train.source[4]), len(train.target[4])
    assert source[0].tolist() == [*train.source[4], EOS, *[PAD] * (29 - s)]
    assert inputs[0].tolist() == [BOS, *train.target[4], *[PAD] * (39 - t)]
    assert targets[0].tolist() == [*train.target[4], EOS, *[IGNORED] * (39 - t)]
    assert present[0].tolist() == [True] * (s + 1) + [False] * (29 - s)


MODELS = [
    ["model.placement=post"],
    ["model.position=relative"],
    ["model.position=rotary", "model.qk_norm=true"],
    ["model.attn_softcap=5.0", "model.position=sinusoidal"],
    ["model.placement=parallel", "model.kv_heads=1"],
    ["model.placement=resi_dual", "model.norm=rmsnorm"],
]


@pytest.mark.parametrize("overrides", MODELS, ids=lambda o: o[0])
def test_more_padding_changes_neither_loss_nor_gradient(folder, overrides):
    """Three pairs of unlike length: alone, together, and with 11 more of padding; also with a row of padding alone."""
    cfg = config(folder, *overrides)
    learned = task.make(cfg)
    model = build(cfg.model, learned.vocab).double()
    initialise(model, cfg.model, 0)
    train = learned.source.splits["train"]
    order = np.argsort([len(s) for s in train.source])
    pairs = [order[0], order[30], order[-1]]
    longest = train.lengths()[pairs].max(0)

    def measured(inputs, targets):
        model.zero_grad()
        loss = model.loss(inputs, targets)
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters()]

    alone, count = torch.zeros((), dtype=torch.float64), 0
    for pair in pairs:
        n = len(train.target[pair]) + 1
        alone += n * measured(*assemble(train, [pair], tuple(train.lengths()[pair])))[0]
        count += n
    loss, grads = measured(*assemble(train, pairs, tuple(longest)))
    assert loss.item() == pytest.approx((alone / count).item(), rel=1e-12)
    more, more_grads = measured(*assemble(train, pairs, tuple(longest + 11)))
    assert more.item() == pytest.approx(loss.item(), rel=1e-12)
    for one, two in zip(grads, more_grads, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-9, atol=1e-12)

    (source, inputs, present), targets = assemble(train, pairs, tuple(longest))
    nothing = torch.zeros_like(source[:1])
    padded = (torch.cat((source, nothing)), torch.cat((inputs, inputs[:1])), torch.cat((present, nothing.bool())))
    beside, beside_grads = measured(padded, torch.cat((targets, torch.full_like(targets[:1], IGNORED))))
    assert beside.item() == pytest.approx(loss.item(), rel=1e-12)
    for one, two in zip(grads, beside_grads, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-9, atol=1e-12)


def test_a_mask_is_zero_and_minus_infinity():
    mask = key_mask(torch.tensor([[True, True, False], [False, False, False]]), torch.float64)
    assert mask.shape == (2, 1, 1, 3)
    assert mask[0, 0, 0].tolist() == [0, 0, -math.inf]
    assert mask[1, 0, 0].tolist() == [0, 0, 0]


def test_evaluation_is_a_mean_over_targets_whatever_the_batches(folder):
    """The whole validation set: one number for every token budget."""
    found = []
    for budget in (64, 300):
        cfg = config(folder, f"data.batch_tokens={budget}")
        learned = task.make(cfg)
        model = build(cfg.model, learned.vocab).double()
        initialise(model, cfg.model, 0)
        batches = learned.held_out(1000)
        assert sum(len(t) for _, t in batches) == 12
        losses = [model.loss(*b).item() for b in batches]
        found.append(np.average(losses, weights=objective.shares(batches)))
    assert found[0] == pytest.approx(found[1], rel=1e-10)


def test_bigrams_are_a_distribution_and_follow_their_formula():
    text = np.array([1, 2, 1, 3, 1, 2, 2, 0, 1, 2])
    model = Bigrams.count(5, text, text[:-1], text[1:])
    single = (np.bincount(text, minlength=5) + 1) / (len(text) + 5)
    follow = defaultdict(Counter)
    for a, b in pairwise(text):
        follow[int(a)][int(b)] += 1
    for a in range(5):
        seen = follow[a]
        p = [(seen[b] + len(seen) * single[b]) / (sum(seen.values()) + len(seen)) if seen else single[b]
             for b in range(5)]  # fmt: skip
        assert sum(p) == pytest.approx(1)
        np.testing.assert_allclose(model.bigram_loss(np.full(5, a), np.arange(5)), -np.log(p), rtol=1e-12)
    np.testing.assert_allclose(model.unigram_loss(np.arange(5)), -np.log(single), rtol=1e-12)


def test_reference_losses_are_those_of_the_evaluated_targets(folder):
    """By hand over the validation pairs, BOS as the first context, EOS predicted."""
    learned = task.make(config(folder))
    valid, bigrams = learned.source.splits["valid"], learned.source.bigrams
    batches = learned.held_out(1000)
    for known in (0, 1):
        total, count = 0.0, 0
        for ids in valid.target:
            before = BOS
            for token in [*ids.tolist(), EOS]:
                one = np.array([before]), np.array([token])
                total += (bigrams.bigram_loss(*one) if known else bigrams.unigram_loss(one[1])).item()
                before, count = token, count + 1
        found = np.average([learned.reference_loss(b, known) for b in batches], weights=objective.shares(batches))
        assert found == pytest.approx(total / count, rel=1e-10)
        assert found == pytest.approx((learned.source.h1, learned.source.h2)[known], rel=1e-10)
    assert learned.source.h2 < learned.source.h1
