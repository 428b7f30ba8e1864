"""The verdicts and the blamed block on curves whose answer is plain."""

import math
import warnings

import numpy as np
import pytest

from normlab import verdict
from normlab.spikes import Spike
from normlab.verdict import first_bad_layer

H1, H2 = 3.14, 2.40
LASTING = Spike(start=7, end=None, peak=6.0, height=2.0, z=20.0, limit=4.5, offset=None)


def judged(losses, final, *, grads=None, init=5.5, events=(), h1=H1, h2=H2, rise=0.01, patience=20):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return verdict.judge(
            losses=losses,
            grad_norms=grads if grads is not None else [1.0] * len(losses),
            init_val_loss=init,
            final_val_loss=final,
            h1=h1,
            h2=h2,
            spikes=events,
            spike_patience=32,
            stalled_below=0.1,
            rise=rise,
            patience=patience,
        )


def test_verdicts():
    assert judged([5.0, 3.0], 2.3).verdict == "stable"
    assert judged([5.0, 3.0], 3.13).verdict == "stalled"
    assert judged([5.0, 3.0], 3.14 - 0.1 * 0.74 + 1e-6).verdict == "stalled"
    assert judged([5.0, 3.0], 3.14 - 0.1 * 0.74 - 1e-6).verdict == "stable"
    told = judged([5.0, 3.0] * 30, 2.3, events=[LASTING])
    assert (told.verdict, told.first_bad_step) == ("spiked", 7)
    assert judged([5.0, 3.0] * 10, 2.3, events=[LASTING]).verdict == "stable"  # too late to tell
    assert judged([5.0, 3.0] * 30, 2.3, events=[Spike(7, 9, 6.0, 2.0, 20.0, 4.5, 0.0)]).verdict == "stable"


def test_weights_that_never_moved_are_stalled_and_a_final_loss_above_the_initial_one_has_diverged():
    assert judged([5.5] * 40, 5.5).verdict == "stalled"
    assert judged([5.5] * 40, 5.5).reason == "final loss 5.5 is not below the initial 5.5"
    assert judged([5.5] * 40, 5.509).verdict == "stalled"
    assert judged([5.5] * 40, 5.511).verdict == "diverged"
    assert judged([2.0] * 40, 2.0, init=2.0).verdict == "stalled"  # also where the initial loss was a good one
    for init in (3.0, 2.9):  # nothing to learn
        assert judged([init] * 40, init, init=init, h1=3.0, h2=3.0).verdict == "stalled"
        assert judged([init] * 40, init - 0.1, init=init, h1=3.0, h2=3.0).verdict == "stable"


def test_a_source_without_bigram_structure_is_judged_by_its_unigrams():
    assert judged([5.0], 3.1, init=5.0, h1=3.0, h2=3.0).verdict == "stable"
    assert judged([5.0], 3.3, init=5.0, h1=3.0, h2=3.0).verdict == "stalled"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_divergence_names_the_first_bad_step(bad):
    assert judged([5.0, 4.0, bad, bad], math.nan).first_bad_step == 2
    result = judged([5.0, 4.0, 3.0], math.nan, grads=[1.0, bad, 1.0])
    assert (result.verdict, result.first_bad_step) == ("diverged", 1)
    assert "gradient norm not finite at step 1" in result.reason
    # training that went on after it, and ended well
    assert judged([5.0, bad, 3.0], 2.3).verdict == "diverged"
    assert judged([5.0, 3.0], bad).reason == "final loss not finite"


def test_the_order_of_the_rules():
    """Everything at once: each rule in turn gives way to the next as its cause is taken away."""
    high = [5.0] * 10 + [7.0] * 30
    stuck = {"events": [LASTING]}
    assert judged([*high, math.nan], 6.0, **stuck, patience=40).first_bad_step == 40
    assert judged([*high, 7.0], 6.0, **stuck, patience=40).first_bad_step is None
    assert judged([*high, 7.0], 6.0, **stuck, patience=40).verdict == "diverged"
    assert judged([*high, 7.0], 5.5, **stuck, patience=40).verdict == "spiked"
    assert judged([*high, 7.0], 5.5, patience=40).verdict == "stalled"
    assert judged([*high, 7.0], 2.3, patience=40).verdict == "stable"


def test_a_hopeless_stretch_is_found_where_it_starts():
    def start(losses, patience=3):
        return verdict.hopeless(losses, 5.0, 0.01, patience)

    assert start([]) is None
    assert start([6, 6]) is None
    assert start([6, 6, 6]) == 0
    assert start([5.005] * 9) is None
    assert start([4, 6, 6, 4, 6, 6, 6, 4, 6, 6, 6]) == 4
    assert start([6, 6, math.nan, 6, 6, math.inf, 6, 6]) is None
    assert start([4, 6], patience=1) == 1
    assert verdict.hopeless([6.0] * 9, math.nan, 0.01, 3) is None


@pytest.mark.parametrize(
    "after", [[6.0] * 50, [2.5] * 50, [math.nan], [6.0, math.inf], []], ids=["up", "back", "nan", "inf", "end"]
)
def test_stopping_a_hopeless_run_does_not_change_its_verdict(after):
    losses = [5.0] * 10 + [7.0] * 20
    stopped = judged(losses, math.nan)
    assert (stopped.verdict, stopped.first_bad_step) == ("diverged", 10)
    late = judged(losses + [8.0] * 7, math.nan)  # the stop sees the stretch a few steps late
    gone_on = judged(losses + after, 2.3 if after else math.nan)
    assert stopped == late == gone_on
    # a step that is not finite ends it before the stretch is complete, whether or not a stop is asked for
    broken = [*losses[:20], math.nan]
    assert judged(broken, math.nan) == judged(broken + [7.0] * 60, math.nan)
    assert judged(broken, math.nan).first_bad_step == 20


def norms(steps=40, blocks=4, seed=0):
    return np.exp(0.1 * np.random.default_rng(seed).standard_normal((steps, blocks)))


def blamed(weights, grads, factor=10.0, window=16, first_step=0):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return first_bad_layer(weights, grads, factor=factor, window=window, first_step=first_step)


@pytest.mark.parametrize("layer", range(4))
def test_a_nan_planted_in_a_block_s_weights_names_it_although_every_gradient_is_nan(layer):
    weights, grads = norms(), norms(seed=1)
    weights[-1, layer] = math.nan
    grads[-1] = math.nan
    bad = blamed(weights, grads)
    assert (bad.index, bad.step, bad.statistic) == (layer, 39, "weight_norm")
    assert blamed(weights, grads, first_step=100).step == 139
    weights[-1, -1] = math.inf  # of several, the first that forward meets
    assert blamed(weights, grads).index == layer
    assert blamed(weights[:, [layer]], grads[:, [layer]]).index == 0


def test_of_gradients_alone_the_one_nearest_the_output():
    weights, grads = norms(), norms(seed=1)
    grads[-1, :3] = math.inf
    bad = blamed(weights, grads)
    assert (bad.index, bad.step, bad.statistic) == (2, 39, "grad_norm")
    assert "not finite" in bad.why


@pytest.mark.parametrize("last", [math.nan, 1.0])
def test_else_the_block_whose_gradient_left_its_range_first(last):
    weights, grads = norms(), norms(seed=1)
    grads[35, 2] *= 15
    grads[36:, :] *= 100
    grads[-1] *= last
    bad = blamed(weights, grads)
    assert (bad.index, bad.step, bad.statistic) == (2, 35, "grad_norm")
    assert "times its median" in bad.why
    grads[35, 1] *= 40  # at the same step and further out
    assert blamed(weights, grads).index == 1
    assert blamed(weights, grads, factor=200.0) is None


def test_an_outlier_long_before_is_not_to_blame():
    weights, grads = norms(), norms(seed=1)
    grads[10, 0] *= 100
    grads[38, 3] *= 20
    assert blamed(weights, grads).index == 3
    assert blamed(weights, grads, window=40).index == 0


def test_without_gradients_the_weights_that_jumped():
    """A learning rate of 1e6: the first update ends it, before a second gradient is seen."""
    weights, grads = norms(2), norms(2, seed=1)
    weights[1] *= [1e3, 1e5, 1e4, 1e3]
    grads[1] = math.nan
    bad = blamed(weights, grads)
    assert (bad.index, bad.step, bad.statistic) == (1, 1, "weight_norm")


def test_no_block_is_blamed_without_a_sign():
    assert blamed(norms(), norms(seed=1)) is None
    assert blamed(norms(1), norms(1) * math.nan) is None
    assert blamed(np.empty((0, 4)), np.empty((0, 4))) is None
    assert blamed(norms() * math.nan, norms() * math.nan) is None
    zeros = np.zeros((40, 4))
    assert blamed(zeros, zeros) is None
    grads = zeros.copy()
    grads[-1, 2] = 1.0
    assert blamed(zeros, grads).index == 2
