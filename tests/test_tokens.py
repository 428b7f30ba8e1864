"""Token files, text sets of `datasets`, and the script that writes them: what is read, refused, and the same."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ROOT, compose

from normlab import data, hf, task, tokens, windows
from normlab.explain import ConfigError
from normlab.model import build
from normlab.ngram import Bigrams
from normlab.train import train

SMALL = ["model.depth=1", "model.width=8", "model.heads=1", "model.context=8", "log=disabled", "steps=2"]


def written(folder: Path, vocab: int = 300, train: int = 3000, val: int = 500) -> Path:
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in (("train.bin", train), ("val.bin", val)):
        (rng.zipf(1.5, size).clip(max=vocab) - 1).astype("<u2").tofile(folder / name)
    return folder


def tokenized(*arguments: str | Path) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "experiments/tokenize_text.py", *arguments]
    return subprocess.run([str(a) for a in command], capture_output=True, text=True, check=False)


def made(folder: Path, vocab: int = 300) -> data.Text:
    source = data.load(compose("data=tokens", f"data.path={folder}", f"data.vocab={vocab}").data)
    assert isinstance(source, data.Text)
    return source


def test_windows_are_those_of_the_files(tmp_path):
    source = made(written(tmp_path))
    stored = np.fromfile(tmp_path / "train.bin", "<u2").tolist()
    text = ",".join(map(str, stored))
    inputs, targets = source.batch(0, 0, 5, 20)
    assert inputs.dtype == targets.dtype == torch.int64
    for row in torch.cat((inputs, targets[:, -1:]), 1).tolist():
        assert ",".join(map(str, row)) in text
    assert len(source.train) == 3000
    assert source.vocab == 300


def test_the_largest_id_that_uint16_holds_is_itself(tmp_path):
    for name in ("train.bin", "val.bin"):
        np.full(100, 65535, "<u2").tofile(tmp_path / name)
    inputs, _ = made(tmp_path, 65536).batch(0, 0, 1, 8)
    assert inputs[0].tolist() == [65535] * 8


def test_the_hash_follows_the_content(tmp_path):
    first = made(written(tmp_path / "a")).sha256
    assert made(written(tmp_path / "b")).sha256 == first
    changed = np.fromfile(tmp_path / "b/train.bin", "<u2")
    changed[-1] = changed[-1] // 2 + 1
    changed.tofile(tmp_path / "b/train.bin")
    data._load.cache_clear()
    assert made(tmp_path / "b").sha256 != first


def test_meta_pkl_is_never_opened(tmp_path):
    """One that would leave a mark if it were unpickled."""
    mark = tmp_path / "mark"

    class Trap:
        def __reduce__(self):
            return Path.touch, (mark,)

    written(tmp_path / "set")
    (tmp_path / "set/meta.pkl").write_bytes(pickle.dumps(Trap()))
    made(tmp_path / "set")
    assert not mark.exists()
    pickle.loads((tmp_path / "set/meta.pkl").read_bytes())
    assert mark.exists()


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda f: (f / "val.bin").unlink(), r"val\.bin: No such file or directory"),
        (lambda f: (f / "val.bin").write_bytes(b"abc"), r"val\.bin: 3 bytes; accepted: uint16"),
        (lambda f: np.full(9, 300, "<u2").tofile(f / "val.bin"), r"val\.bin: token 300 at place 0 .*data\.vocab=300"),
    ],
)
def test_bad_files_are_refused(tmp_path, spoil, told):
    spoil(written(tmp_path))
    with pytest.raises(ConfigError, match=told):
        made(tmp_path)


def test_the_place_of_a_bad_token_is_found_beyond_the_first_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "PIECE", 64)
    found = np.zeros(500, "<u2")
    found[[201, 300]] = 77
    for name in ("train.bin", "val.bin"):
        found.tofile(tmp_path / name)
    with pytest.raises(ConfigError, match=r"train\.bin: token 77 at place 201"):
        made(tmp_path, 77)


def test_a_folder_must_be_named():
    for name, key in (("tokens", "path"), ("hf", "dataset")):
        with pytest.raises(ConfigError, match=rf"data\.{key}: needed"):
            task.make(compose(f"data={name}"))


def test_reference_losses_of_a_large_vocabulary_are_sparse_ones(tmp_path):
    source = made(written(tmp_path))
    learned = windows.NextToken(source, 8, 16)
    text = np.fromfile(tmp_path / "train.bin", "<u2").astype(int)
    bigrams = Bigrams.count(300, text[1:], text[:-1], text[1:])
    batch = learned.held_out(1)[0]
    inputs, targets = (t.numpy() for t in batch)
    assert learned.reference_loss(batch, 0) == pytest.approx(bigrams.unigram_loss(targets).mean())
    assert learned.reference_loss(batch, 1) == pytest.approx(bigrams.bigram_loss(inputs, targets).mean())
    assert 0 < source.h1 < np.log(300)


def test_a_long_corpus_is_sampled_evenly(monkeypatch):
    every = torch.arange(60000, dtype=torch.int32).to(torch.uint16)
    assert np.array_equal(tokens.sample(every), np.arange(60000))
    monkeypatch.setattr(tokens, "SAMPLE", 400)
    assert tokens.sample(every).tolist() == [s + i for s in (0, 19966, 39933, 59900) for i in range(100)]


def test_text_and_tokens_give_equal_losses_on_equal_batches(tmp_path, shared_data):
    """Tiny Shakespeare by both roads: the same windows, entropies and losses of a whole run."""
    path = shared_data / "tinyshakespeare.txt"
    done = tokenized(path, tmp_path / "tokens")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"data=tokens data.path={tmp_path / 'tokens'} data.vocab=256\n")
    roads = ([f"data.path={path}"], ["data=tokens", f"data.path={tmp_path / 'tokens'}", "data.vocab=256"])
    sources = [data.load(compose(*road).data) for road in roads]
    for one, two in zip(sources[0].batch(3, 5, 4, 64), sources[1].batch(3, 5, 4, 64), strict=True):
        assert torch.equal(one, two)
    records = [train(compose(*road, *SMALL, f"runs_dir={tmp_path}", "probe.batches=0")) for road in roads]
    for key in ("h1", "h2", "unigram_entropy", "bigram_entropy", "init_val_loss", "final_loss", "final_val_loss"):
        assert records[0][key] == records[1][key]


def word_tokenizer(path: Path) -> Path:
    """A word-level tokenizer.json, written by hand."""
    vocab = {word: i for i, word in enumerate(["?", "a", "b", "c", "the", "cat"])}
    split = {"type": "WhitespaceSplit"}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "?"}
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "pre_tokenizer": split, "model": model, **empty}))
    return path


def test_a_tokenizer_file_writes_its_ids(tmp_path):
    (tmp_path / "t.txt").write_text("the cat a b c\n" * 10)
    done = tokenized(tmp_path / "t.txt", tmp_path / "out", "--tokenizer", word_tokenizer(tmp_path / "tok.json"))
    assert done.returncode == 0, done.stderr
    assert np.fromfile(tmp_path / "out/train.bin", "<u2").tolist() == [4, 5, 1, 2, 3] * 9
    assert np.fromfile(tmp_path / "out/val.bin", "<u2").tolist() == [4, 5, 1, 2, 3]
    assert "data.vocab=6" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["missing.txt", "out"], "missing.txt: no such file or folder"),
        (["t.txt", "out", "--tokenizer", "no.json"], "--tokenizer='no.json': No such file"),
        (["t.txt", "out", "--tokenizer", "t.txt"], "--tokenizer='t.txt': not a tokenizer.json"),
        (["bad.txt", "out", "--tokenizer", "tok.json"], "bad.txt: line 3 is not UTF-8"),
        (["one.txt", "out"], "1 tokens for val.bin"),
        (["t.txt", "out", "--val-fraction", "2"], "--val-fraction=2.0: accepted: between 0 and 1"),
    ],
)
def test_tokenizing_tells_a_mistake_in_one_line_and_writes_nothing(tmp_path, monkeypatch, arguments, told):
    monkeypatch.chdir(tmp_path)
    word_tokenizer(tmp_path / "tok.json")
    (tmp_path / "t.txt").write_text("the cat\n" * 10)
    (tmp_path / "bad.txt").write_bytes(b"the\ncat\n\xff\xfe\n")
    (tmp_path / "one.txt").write_bytes(b"12345")
    done = tokenized(*arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert told in done.stderr
    assert not list((tmp_path / "out").glob("*")) + list((tmp_path / "out").glob(".*"))


def test_gpt2_without_a_network_says_what_to_do(monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")

    def unreachable(name):
        raise ConnectionError("planted")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(ConfigError, match=r"gpt2: tiktoken could not download .*TIKTOKEN_CACHE_DIR"):
        hf.pieces("gpt2", "data.tokenizer")


# -- data=hf -----------------------------------------------------------------------------------------------------------

TEXTS = [f"document {i}: ä{'x' * (i % 7)}" for i in range(40)]


def local(folder: Path, kind: str) -> list[str]:
    """The documents as local files of one kind."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "parquet":
        pd.DataFrame({"text": TEXTS, "n": range(40)}).to_parquet(folder / "x.parquet")
    elif kind == "json":
        (folder / "x.json").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    else:
        (folder / "x.text").write_text("".join(t + "\n" for t in TEXTS))
    return ["data=hf", f"data.dataset={kind}", f"data.files={folder}/x.*", f"data.cache={folder / 'cache'}"]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("kind", ["parquet", "json", "text"])
def test_local_files_become_tokens(tmp_path, monkeypatch, kind, streaming):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    cfg = compose(*local(tmp_path, kind), f"data.streaming={streaming}", "data.val_fraction=0.1")
    source = data.load(cfg.data)
    assert isinstance(source, data.Text)
    kept = [t for i, t in enumerate(TEXTS) if i % 10 != 9], [t for i, t in enumerate(TEXTS) if i % 10 == 9]
    for part, texts in zip((source.train, source.val), kept, strict=True):
        assert bytes(part.numpy().astype(np.uint8)).decode() == "".join(t + "\n" for t in texts)
    assert source.vocab == 256


def test_a_tokenised_set_is_kept_and_follows_its_files(tmp_path, monkeypatch):
    road = local(tmp_path, "json")
    cfg = compose(*road)
    folder, _ = hf.prepared(cfg.data)
    monkeypatch.setattr(hf, "_loaded", None)  # not to be called again
    assert hf.prepared(cfg.data)[0] == folder
    monkeypatch.undo()
    (tmp_path / "x.json").write_text("".join(json.dumps({"text": t + "!"}) + "\n" for t in TEXTS))
    assert hf.prepared(cfg.data)[0] != folder
    assert hf.prepared(compose(*road, "data.separator=' '").data)[0] != folder


def test_documents_are_counted_and_tokenised_by_a_file(tmp_path):
    tokenizer = word_tokenizer(tmp_path / "tok.json")
    (tmp_path / "d.json").write_text('{"body": "the cat a"}\n' * 8)
    road = ["data=hf", "data.dataset=json", f"data.files={tmp_path}/d.json", f"data.cache={tmp_path / 'c'}"]
    cut = [f"data.tokenizer={tokenizer}", "data.column=body", "data.max_documents=6", "data.val_fraction=0.5"]
    source = data.load(compose(*road, *cut).data)
    assert isinstance(source, data.Text)
    assert source.train.tolist() == source.val.tolist() == [4, 5, 1] * 3
    assert source.vocab == 6


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["data.column=body"], r"data\.column='body': accepted here: text"),
        (["data.files=/no/such/*.json"], r"data\.files='/no/such/\*\.json': no such file"),
        (["data.files=null"], r"files go with parquet, json, csv, text"),
        (["data.train_split=nope", "data.val_split=nope2"], None),
        (["data.max_documents=1"], r"training and 0 held-out tokens"),
        (["data.tokenizer=/no/file.json"], r"data\.tokenizer='/no/file\.json': No such file"),
    ],
)
def test_a_set_that_cannot_be_read_is_told_in_one_line_and_nothing_is_kept(tmp_path, overrides, told):
    road = local(tmp_path, "json")
    if told is None:  # any name goes for the split of a local file
        assert hf.prepared(compose(*road, *overrides).data)
        return
    with pytest.raises(ConfigError, match=told) as caught:
        hf.prepared(compose(*road, *overrides).data)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("cache/*")) + list(tmp_path.glob("cache/.*"))


def test_damaged_and_missing_documents_are_told(tmp_path):
    for content in ('{"text": "fine"}\n{"text": \n', '{"text": "fine"}\n{"text": null}\n'):
        road = local(tmp_path, "json")
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(ConfigError, match=r"data\.dataset=json"):
            hf.prepared(compose(*road).data)


def test_a_hub_out_of_reach_says_so(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def unreachable(*args, **kwargs):
        raise ConnectionError("planted: no route to the hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ConfigError, match=r"ConnectionError: planted.*out of reach: accepted: local files"):
        hf.prepared(compose("data=hf", "data.dataset=wikitext", f"data.cache={tmp_path}").data)


def test_tokens_train_every_architecture(tmp_path):
    written(tmp_path / "set")
    road = ["data=tokens", f"data.path={tmp_path / 'set'}", "data.vocab=300", f"runs_dir={tmp_path}", *SMALL]
    for arch in task.TASKS:
        assert train(compose(*road, f"model.arch={arch}"))["status"] == "finished"
    assert build(compose(*road).model, 300).head.out.weight.shape == (300, 8)
