"""Decoding, BLEU, and whole translation runs."""

import subprocess
import sys

import pandas as pd
import pytest
import torch
from conftest import compose
from pairs import config, write
from torch.nn import functional as F

import arms
import fig_translation_warmup
import figure
from normlab import task
from normlab.decode import search, translate
from normlab.fit import Fit
from normlab.head import IGNORED
from normlab.init import initialise
from normlab.model import build
from normlab.parallel import BOS, EOS, PAD
from normlab.results import load
from normlab.store import read_record
from normlab.train import train
from normlab.translation import corpus_bleu, translations


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(config, task, a model that knows some of it): peaked enough to end sentences, not sure enough to be trivial."""
    folder = write(tmp_path_factory.mktemp("trained") / "pairs", train=400)
    cfg = config(folder, "steps=250", "optim.lr=1e-2", "data.batch_tokens=400", "data.bleu_every=125", "eval.every=50")
    train(cfg)
    learned = task.make(cfg)
    state = torch.load(next((folder / "runs/scratch").iterdir()) / "checkpoint.pt", weights_only=True)["model"]
    model = build(cfg.model, learned.vocab)
    model.load_state_dict(state)
    return cfg, learned, model.double().eval()


def valid_batch(learned, size=12):
    (source, _, present), _ = learned.held_out(1000)[-1]
    return source[:size], present[:size]


@torch.no_grad()
def log_p(model, source, prefix):
    """log p of every next token after one prefix, by the model's own forward; what may not be said left out."""
    found = model((source[None], torch.tensor([prefix])))[0, -1].log_softmax(-1)
    found[[PAD, BOS]] = -torch.inf
    return found


def beam_by_hand(model, source, beam, penalty, longest):
    """One sentence, lists of (log p, tokens): the best finished one and its score."""
    alive, finished = [(0.0, [BOS])], []
    for length in range(1, longest + 1):
        options = []
        for total, tokens in alive:
            for token, value in enumerate(log_p(model, source, tokens).tolist()):
                if value > -float("inf") and (length < longest or token == EOS):
                    options.append((total + value, [*tokens, token]))
        options.sort(key=lambda o: -o[0])
        options = options[: 2 * beam]
        finished += [(total / length**penalty, tokens[1:-1]) for total, tokens in options[:beam] if tokens[-1] == EOS]
        alive = [o for o in options if o[1][-1] != EOS][:beam]
        if len(finished) >= beam:
            break
    return max(finished, key=lambda f: f[0])


@pytest.mark.parametrize("penalty", [0.0, 1.2])
@pytest.mark.parametrize("beam", [1, 2, 4])
def test_search_is_the_one_by_hand(trained, beam, penalty):
    _, learned, model = trained
    source, present = valid_batch(learned)
    longest = 2 * present.sum(1) + 10
    found, scores = search(model, source, present, beam, penalty, longest)
    for row in range(len(source)):
        score, tokens = beam_by_hand(model, source[row][present[row]], beam, penalty, int(longest[row]))
        said = found[row].tolist()
        assert said[: said.index(EOS)] == tokens
        assert scores[row].item() == pytest.approx(score, rel=1e-9)


def test_a_beam_of_one_is_greedy(trained):
    _, learned, model = trained
    source, present = valid_batch(learned)
    said, _ = translate(model, source, present, beam=1, length_penalty=1.2, context=48)
    for row, tokens in enumerate(said):
        greedy = [BOS]
        while len(greedy) <= 2 * present[row].sum() + 9:
            greedy.append(int(log_p(model, source[row][present[row]], greedy).argmax()))
            if greedy[-1] == EOS:
                break
        assert tokens == [t for t in greedy[1:] if t != EOS]


@pytest.mark.parametrize("steps", [0, 250])
def test_a_beam_never_scores_below_greedy_and_scores_are_the_model_s(trained, steps):
    """Trained, and with random weights, where a plain beam does lose the greedy hypothesis."""
    cfg, learned, model = trained
    if steps == 0:
        model = build(cfg.model, learned.vocab).double().eval()
        initialise(model, cfg.model, 1)
        with torch.no_grad():
            model.encoder.embed.token.weight.mul_(3)  # peaked
    source, present = valid_batch(learned)
    _, greedy = translate(model, source, present, beam=1, length_penalty=1.0, context=24)
    for beam in (2, 3, 5):
        said, scores = translate(model, source, present, beam=beam, length_penalty=1.0, context=24)
        assert (scores >= greedy).all()
        for row, tokens in enumerate(said):
            whole, total = [*tokens, EOS], 0.0
            for i, token in enumerate(whole):
                total += log_p(model, source[row][present[row]], [BOS, *tokens[:i]])[token].item()
            assert scores[row].item() == pytest.approx(total / len(whole), rel=1e-9)


def test_a_translation_does_not_depend_on_what_is_searched_beside_it(trained):
    _, learned, model = trained
    split, how = learned.source.splits["valid"], {"beam": 3, "length_penalty": 1.2, "context": 48}
    device, pairs = torch.device("cpu"), [5, 0, 11, 3]
    together = translations(model, device, learned.source, split, pairs, 10**6, **how)
    alone = [translations(model, device, learned.source, split, [i], 1, **how)[0] for i in pairs]
    assert together == alone


def test_search_ends_on_a_model_that_never_stops(trained):
    """Bounded by twice the source and ten, and by the context."""
    cfg, learned, _ = trained
    model = build(cfg.model, learned.vocab).double().eval()
    initialise(model, cfg.model, 0)
    with torch.no_grad():
        for p in model.parameters():
            p[~torch.isfinite(p)] = 0
    source, present = valid_batch(learned)
    for context in (48, 7):
        said, scores = translate(model, source, present, beam=2, length_penalty=0.0, context=context)
        assert torch.isfinite(scores).all()
        bound = (2 * present.sum(1) + 10).clamp(max=context)
        assert all(len(tokens) + 1 <= most for tokens, most in zip(said, bound.tolist(), strict=True))


def test_bleu_is_that_of_sacrebleu_s_command_line(trained):
    """The kept translations of the test files, scored from files by the program itself."""
    cfg, learned, _ = trained
    run = next((learned.source.splits["test"].paths[0].parent / "runs/scratch").iterdir())
    record = read_record(run)
    command = ["-m", "sacrebleu", cfg.data.pair("test")[1], "-i", run / "translations.txt", "-b", "-w", "12"]
    printed = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=True).stdout
    assert float(printed) == pytest.approx(record["test_bleu"], abs=1e-9)
    assert record["bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert 0 < record["test_bleu"] < 100
    assert corpus_bleu(["the cat sat on the mat ."], ["the cat sat on the mat ."])[0] == pytest.approx(100)


def test_a_run_records_losses_bleu_and_three_kinds_of_layers(trained):
    """BLEU on its steps and at the end; gradients of encoder, decoder and cross-attention, block by block."""
    cfg, learned, _ = trained
    data = load(cfg.runs_dir)
    (run,) = data.runs.itertuples()
    assert (run.status, run.verdict) == ("finished", "stable")
    assert run.final_val_loss < run.h1
    scored = data.steps.dropna(subset=["bleu"])
    assert scored.step.tolist() == [125]
    assert {"bleu", "test_bleu", "bleu_seconds", "bleu_signature"} <= set(data.runs)
    assert data.steps.tokens.tolist()[-1] == learned.tokens_seen(0, 250)
    norms = data.layers[data.layers.stat == "weight_grad_norm"]
    found = norms[norms.layer.notna()].groupby(["stack", "site"], observed=True).layer.agg(lambda x: sorted(set(x)))
    assert found.to_dict() == {
        **{("encoder", site): [0, 1] for site in ("attn", "ffn")},
        **{("decoder", site): [0, 1] for site in ("attn", "cross", "ffn")},
    }
    assert set(norms.step) == set(range(250))
    profiled = data.layers[data.layers.stat == "expected_weight_grad_norm"]
    assert {("decoder", "cross", "q"), ("encoder", "attn", "q")} <= set(
        profiled[["stack", "site", "tensor"]].astype(str).itertuples(index=False, name=None)
    )


def test_layer_gradients_are_autograd_s(tmp_path):
    """Of the first step: by a model of its own, tensor by tensor, under label smoothing and padding."""
    cfg = config(tmp_path / "pairs", "steps=1", "label_smoothing=0.1")
    train(cfg)
    learned, layers = task.make(cfg), load(cfg.runs_dir).layers
    model = build(cfg.model, learned.vocab)
    initialise(model, cfg.model, cfg.seed)
    inputs, targets = learned.batch(cfg.seed, 0)
    logits = model(inputs).flatten(0, 1)
    F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, label_smoothing=0.1).backward()
    mine = layers[(layers.stat == "weight_grad_norm") & (layers.step == 0)]
    for stack, site, tensor, grad in (
        ("encoder", "ffn", "in", model.encoder.blocks[1].ffn.w_in.weight.grad),
        ("decoder", "cross", "out", model.decoder.blocks[1].cross.w_out.weight.grad),
        ("decoder", "cross", "k", model.decoder.blocks[1].cross.w_kv.weight.grad[:16]),
    ):
        row = mine[(mine["stack"] == stack) & (mine.site == site) & (mine.tensor == tensor) & (mine.layer == 1)]
        assert row.value.item() == pytest.approx(grad.norm().item(), rel=1e-5)


def test_the_figure_shows_both_curves_of_each_optimizer(tmp_path):
    folder = tmp_path / "pairs"
    for optimizer in ("adam", "sgd"):
        for warmup in (0, 2):
            arm = [f"optim={optimizer}", f"optim.warmup_steps={warmup}"]
            train(config(folder, *arm, "eval.every=2", "data.bleu_every=3"))
    data = arms.load([folder / "runs"])
    one, two = (figure.save(fig_translation_warmup.draw(data), "x", tmp_path / name) for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    table = pd.read_csv(tmp_path / "one" / "x.csv")
    assert len(table.groupby(["optim.name", "arm"])) == 4
    assert sorted(set(table.step[table.bleu.notna()])) == [3, 6]
    assert sorted(set(table.step[table.val_loss.notna()])) == [0, 2, 4, 6]
    other = data.runs.assign(**{"data.name": "text"})
    with pytest.raises(arms.Missing, match="data=parallel"):
        fig_translation_warmup.draw(data._replace(runs=other))


@torch.no_grad()
def test_training_descends_smoothed_targets_and_records_plain_ones(tmp_path):
    cfg = config(tmp_path / "pairs", "label_smoothing=0.2", "steps=1")
    learned = task.make(cfg)
    model = build(cfg.model, learned.vocab).double()
    initialise(model, cfg.model, cfg.seed)
    inputs, targets = learned.batch(cfg.seed, 0)
    descended, loss = model.objective(inputs, targets, 0.2)
    log = model(inputs).log_softmax(-1)
    plain, smoothed = [], []
    for row, column in (targets != IGNORED).nonzero().tolist():
        one = -log[row, column]
        plain.append(one[targets[row, column]])
        smoothed.append(0.8 * plain[-1] + 0.2 * one.mean())
    assert loss.item() == pytest.approx(torch.stack(plain).mean().item(), rel=1e-12)
    assert descended.item() == pytest.approx(torch.stack(smoothed).mean().item(), rel=1e-12)
    with torch.enable_grad():
        record = train(cfg)
        other = train(config(tmp_path / "pairs", "steps=1"))
    assert record["run_id"] != other["run_id"]
    assert record["init_val_loss"] == other["init_val_loss"]
    assert record["final_loss"] == other["final_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_micro_batches_of_pairs_give_the_same_step(tmp_path):
    records = [train(config(tmp_path / "pairs", "steps=3", f"micro_batch={size}")) for size in ("null", "2")]
    assert records[0]["final_loss"] == pytest.approx(records[1]["final_loss"], rel=1e-5)


def test_an_interrupted_translation_goes_on_as_if_it_had_not(tmp_path, monkeypatch):
    straight = train(config(tmp_path / "pairs", "steps=8", "study=straight", "data.bleu_every=3", "checkpoint.every=2"))
    backward, made = Fit.backward, []

    def planted(fit, batch):
        made.append(1)
        if len(made) == 6:
            raise RuntimeError("planted")
        return backward(fit, batch)

    monkeypatch.setattr(Fit, "backward", planted)
    cfg = config(tmp_path / "pairs", "steps=8", "study=stopped", "data.bleu_every=3", "checkpoint.every=2")
    with pytest.raises(RuntimeError, match="planted"):
        train(cfg)
    resumed = train(cfg)
    same = ("run_id", "final_val_loss", "final_loss", "bleu", "test_bleu", "h1", "h2")
    assert {key: straight[key] for key in same} == {key: resumed[key] for key in same}
    steps = load(tmp_path / "pairs" / "runs").steps.drop(columns=["seconds", "study"])
    one, two = (steps.iloc[i : i + 8].reset_index(drop=True) for i in (0, 8))
    pd.testing.assert_frame_equal(one, two)


def test_watching_changes_no_loss(tmp_path):
    on = ["probe.every=1", "probe.layer_drop=true", "eval.every=1", "data.bleu_every=1", "study=on"]
    train(config(tmp_path / "pairs", *on, "model.dropout=0.2"))
    train(config(tmp_path / "pairs", "probe.batches=0", "eval.every=0", "study=off", "model.dropout=0.2"))
    steps = load(tmp_path / "pairs" / "runs").steps
    one, two = (steps[steps.study == s].loss.tolist() for s in ("on", "off"))
    assert len(one) == 6
    assert one == two


def test_a_missing_extra_names_the_command(tmp_path, monkeypatch):
    folder = write(tmp_path / "pairs")
    for package in ("tokenizers", "sacrebleu"):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, package, None)
            with pytest.raises(ValueError, match=rf"needs the package {package}.*pip install 'normlab\[text\]'"):
                task.make(config(folder))


def test_the_paper_s_settings_are_the_paper_s():
    """Xiong et al. 2020, section 4.1 and appendix A."""
    cfg = compose("experiment=xiong_iwslt14")
    model, optim = cfg.model, cfg.optim
    assert (model.encoder, model.decoder, model.width, model.hidden, model.heads) == (6, 6, 512, 1024, 4)
    assert (model.dropout, cfg.label_smoothing, model.placement, model.activation) == (0.1, 0.1, "post", "relu")
    assert (cfg.data.vocab, cfg.data.batch_tokens, cfg.data.beam, cfg.data.length_penalty) == (10000, 4096, 5, 1.2)
    assert (optim.name, optim.betas, optim.lr, optim.warmup_steps) == ("adam", (0.9, 0.98), 1e-3, 4000)
    assert optim.schedule == "inverse_sqrt"
    bert = compose("experiment=xiong_bert")
    assert (bert.model.encoder, bert.model.width, bert.model.heads, bert.model.head) == (12, 768, 12, "mlm")
    assert (bert.model.placement, bert.optim.lr, bert.optim.warmup_steps) == ("pre", 3e-4, 0)


@pytest.mark.filterwarnings("default")  # of torch's compiler, about its own code
def test_compiled_translation_is_the_same_and_keeps_within_torch_s_limit(tmp_path):
    """Two stacks, training and evaluation, of one shape and of any: 8 programs; the search, of all shapes, has none."""
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        plain, compiled = (train(config(tmp_path / "pairs", f"compile={c}", "steps=12")) for c in ("false", "true"))
    for key in ("final_loss", "final_val_loss", "test_bleu"):
        assert compiled[key] == pytest.approx(plain[key], rel=1e-5)


def test_translation_trains_in_bf16(tmp_path):
    full, half = (train(config(tmp_path / "pairs", f"precision={p}", "steps=4")) for p in ("fp32", "bf16"))
    assert half["status"] == "finished"
    assert half["final_val_loss"] == pytest.approx(full["final_val_loss"], rel=0.02)
