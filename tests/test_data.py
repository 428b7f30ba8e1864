"""Sources: batches, splits, and entropies against long samples."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import compose

from normlab import data
from normlab.explain import ConfigError
from normlab.windows import NextToken


def markov(*overrides: str) -> data.Markov:
    source = data.load(
        compose("data=markov", "data.vocab=5", "data.order=2", "data.concentration=0.3", *overrides).data
    )
    assert isinstance(source, data.Markov)
    return source


@pytest.mark.parametrize("name", ["text", "markov"])
def test_a_batch_is_a_pure_function_of_seed_and_step(name):
    source = data.load(compose(f"data={name}").data)
    one, again = source.batch(3, 7, 4, 16), source.batch(3, 7, 4, 16)
    assert torch.equal(one[0], again[0])
    assert torch.equal(one[1], again[1])
    assert torch.equal(one[0][:, 1:], one[1][:, :-1])
    for other in (source.batch(4, 7, 4, 16), source.batch(3, 8, 4, 16), source.held_out(1, 4, 16)[0]):
        assert not torch.equal(one[0], other[0])


def test_markov_entropy_rate_against_a_long_sample():
    """Plug-in conditional entropy of 400,000 symbols; its bias is below 1e-3 with 125 contexts x symbols."""
    source = markov()
    inputs, targets = source.batch(0, 0, 4000, 100)
    whole = torch.cat([inputs, targets[:, -1:]], 1).numpy()
    triples = Counter(map(tuple, np.stack([whole[:, i : i + 99] for i in range(3)], -1).reshape(-1, 3)))
    contexts: Counter = Counter()
    for (a, b, _), n in triples.items():
        contexts[a, b] += n
    total = sum(triples.values())
    sampled = -sum(n / total * math.log(n / contexts[a, b]) for (a, b, _), n in triples.items())
    assert sampled == pytest.approx(source.entropy_rate, abs=5e-3)
    symbols = np.bincount(whole.ravel(), minlength=5) / whole.size
    assert -(symbols * np.log(symbols)).sum() == pytest.approx(source.h1, abs=5e-3)


def test_markov_rate_is_the_text_book_formula():
    """sum_s pi(s) H(p(. | s)) with pi the left eigenvector of the state chain, by dense linear algebra."""
    source = markov()
    chain = np.zeros((25, 25))
    for state in range(25):
        for symbol in range(5):
            chain[state, state % 5 * 5 + symbol] = source.transition[state, symbol]
    values, vectors = np.linalg.eig(chain.T)
    pi = np.real(vectors[:, np.argmax(np.real(values))])
    pi /= pi.sum()
    np.testing.assert_allclose(source.stationary, pi, atol=1e-12)
    rows = -(source.transition * np.log(source.transition)).sum(1)
    assert source.entropy_rate == pytest.approx(float(pi @ rows), rel=1e-10)


def test_entropies_fall_with_the_known_history():
    source = markov()
    assert source.h1 > source.h2 > source.entropies[2] == source.entropy_rate
    assert math.log(5) >= source.h1


def test_reference_loss_tends_to_the_entropies():
    source = markov()
    task = NextToken(source, 3000, 64)
    batch = task.batch(1, 0)
    assert task.reference_loss(batch, 0) == pytest.approx(source.h1, abs=5e-3)
    assert task.reference_loss(batch, 1) == pytest.approx(source.h2, abs=5e-3)
    # the first target knows one token only, so the floor of a window lies a little above the rate
    floor = (source.h2 + 63 * source.entropy_rate) / 64
    assert task.reference_loss(batch, 64) == pytest.approx(floor, abs=5e-3)


def test_order_zero_is_independent_tokens():
    source = markov("data.order=0")
    assert source.h1 == source.h2 == source.entropy_rate
    inputs, _ = source.batch(0, 0, 2000, 20)
    assert np.bincount(inputs.numpy().ravel(), minlength=5) / inputs.numel() == pytest.approx(
        source.transition[0], abs=0.01
    )


def test_text_holds_out_the_tail_of_each_file(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"b" * 20000)
    (tmp_path / "a.txt").write_bytes(b"a" * 10000)
    source = data.load(compose(f"data.path={tmp_path}").data)
    assert isinstance(source, data.Text)
    assert bytes(source.train.numpy()) == b"a" * 9000 + b"b" * 18000
    assert bytes(source.val.numpy()) == b"a" * 1000 + b"b" * 2000


def test_text_entropies_are_those_of_counting(tmp_path):
    rng = np.random.default_rng(0)
    letters = rng.choice(4, size=60000, p=[0.4, 0.3, 0.2, 0.1]).astype(np.uint8)
    (tmp_path / "t").write_bytes(letters.tobytes())
    source = data.load(compose(f"data.path={tmp_path / 't'}").data)
    p = np.array([0.4, 0.3, 0.2, 0.1])
    assert source.h1 == pytest.approx(-(p * np.log(p)).sum(), abs=0.02)
    assert source.h2 == pytest.approx(source.h1, abs=0.05)  # independent draws: the previous byte does not help
    assert source.entropy_rate is None


def test_the_hash_follows_the_content(tmp_path):
    (tmp_path / "t").write_bytes(b"x" * 20000)
    one = data.load(compose(f"data.path={tmp_path}").data).sha256
    other = tmp_path / "other"
    other.mkdir()
    (other / "t").write_bytes(b"x" * 19999 + b"y")
    assert data.load(compose(f"data.path={other}").data).sha256 != one
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "renamed").write_bytes(b"x" * 20000)
    assert data.load(compose(f"data.path={tmp_path / 'copy'}").data).sha256 == one


def test_default_text_is_this_python_s_library():
    source = data.load(compose().data)
    assert isinstance(source, data.Text)
    assert len(source.train) > 1_000_000
    assert 2 < source.h2 < source.h1 < 4
    assert b"import " in bytes(source.train[:100_000].numpy())


def test_held_out_windows_cover_the_held_out_part():
    source = data.load(compose().data)
    assert isinstance(source, data.Text)
    task = NextToken(source, 8, 64)
    losses = [task.reference_loss(b, 0) for b in task.held_out(8)]
    assert np.mean(losses) == pytest.approx(source.h1, abs=0.15)


def test_real_text_trains_from_a_path(shared_data):
    source = data.load(compose(f"data.path={shared_data / 'tinyshakespeare.txt'}").data)
    assert isinstance(source, data.Text)
    assert len(source.train) + len(source.val) == 1_115_394
    assert source.h1 == pytest.approx(3.32, abs=0.05)


def test_too_short_a_text_is_refused(tmp_path):
    (tmp_path / "t").write_bytes(b"x" * 2000)
    with pytest.raises(ConfigError, match="1024"):
        data.load(compose(f"data.path={tmp_path / 't'}").data)
    (tmp_path / "long").write_bytes(b"x" * 20000)
    with pytest.raises(ConfigError, match=r"model\.context: a sequence takes 4096 tokens"):
        data.load(compose(f"data.path={tmp_path / 'long'}").data).require(4096)


def test_a_glob_without_a_match_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.glob"):
        data.load(compose(f"data.path={tmp_path}", "data.glob=*.nothing").data)
