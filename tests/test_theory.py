"""Theory against the numbers of the paper and against plain sampling."""

import pytest
import torch
from conftest import compose

from normlab import theory
from normlab.ffn import FFN
from normlab.init import initialise
from normlab.model import Decoder


def test_lemma_1_and_2_in_the_paper_s_setting():
    """ReLU, d x d, Xavier: the FFN adds 1/2; post 3/2; pre between 1 + l/2 and 1 + 3l/2."""
    increment = theory.ffn_increment(128, 1.0, "relu")
    assert increment == pytest.approx(0.5, rel=1e-3)
    pre = theory.hidden_growth("pre", 12, increment)
    assert (pre.lower[12], pre.upper[12]) == pytest.approx((7.0, 19.0), rel=1e-3)
    assert theory.hidden_growth("post", 12, increment).upper[5] == pytest.approx(1.5, rel=1e-3)
    assert theory.hidden_growth("sandwich", 12, increment) is None


@pytest.mark.parametrize(("name", "moment"), [("relu", 0.500), ("gelu", 0.425), ("silu", 0.355)])
def test_second_moments(name, moment):
    assert theory.second_moment(name, 1.0) == pytest.approx(moment, abs=1e-3)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "swiglu", "geglu"])
@pytest.mark.parametrize("ratio", [1.0, 4.0])
def test_ffn_increment_against_sampling(activation, ratio):
    cfg = compose(
        "model.width=256", "model.depth=1", f"model.ffn_ratio={ratio}", f"model.activation={activation}"
    ).model
    model = Decoder(cfg, vocab=3)
    initialise(model, cfg, seed=0)
    ffn = model.decoder.blocks[0].ffn
    assert isinstance(ffn, FFN)
    with torch.no_grad():
        sampled = ffn(torch.randn(2000, 256)).square().mean().item()
    assert sampled == pytest.approx(theory.ffn_increment(256, ratio, activation), rel=0.1)
