"""The spike rule and the verdicts on curves whose answer is plain."""

import math
import warnings

import numpy as np
import pytest

from normlab import spikes, verdict
from normlab.spikes import Spike

RULE = {"kappa": 6.0, "window": 128, "min_history": 32, "min_height": 0.1}


def curve(length: int = 400, start: float = 10.8, end: float = 3.0) -> np.ndarray:
    """A clean loss curve: exponential fall with small noise."""
    noise = 0.02 * np.random.default_rng(0).standard_normal(length)
    return end + (start - end) * np.exp(-np.arange(length) / 40) + noise


def found(series, **rule) -> list[Spike]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return spikes.find(list(series), **(RULE | rule))


def test_a_clean_curve_has_none():
    assert found(curve()) == []
    assert found(curve()[::-1][-31:]) == []  # rising, but shorter than the history that the rule needs


def test_one_step_is_one_event_at_its_place_with_its_height():
    series = curve()
    series[300] += 3.0
    (spike,) = found(series)
    assert (spike.start, spike.end, spike.recovered) == (300, 301, True)
    assert spike.peak == series[300]
    assert spike.height == pytest.approx(3.0, abs=0.1)


def test_a_plateau_is_one_event_with_its_length():
    series = curve()
    series[300:330] += 3.0
    (spike,) = found(series)
    assert (spike.start, spike.end) == (300, 330)


def test_a_lasting_jump_is_one_event_not_recovered():
    series = curve()
    series[250:] += 3.0
    assert [(s.start, s.recovered) for s in found(series)] == [(250, False)]


def test_a_bump_longer_than_the_window_is_recovered_when_it_returns():
    series = curve(700)
    series[250:390] += 3.0
    assert [(s.start, s.end) for s in found(series)] == [(250, 390)]


def test_a_new_level_can_have_spikes_of_its_own():
    series = curve(700)
    series[250:] += 3.0
    series[600] += 5.0
    assert [(s.start, s.end) for s in found(series)] == [(250, None), (600, 601)]


def test_a_second_spike_shows_after_a_first_one():
    series = curve()
    series[300] += 3.0
    series[310] += 3.0
    assert [s.start for s in found(series)] == [300, 310]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_step_is_an_event_and_blinds_nothing(bad):
    series = [2.0, 2.01] * 25 + [bad] + [2.0, 2.01] * 10 + [40.0] + [2.0, 2.01] * 10
    assert [(s.start, s.end) for s in found(series)] == [(50, 51), (71, 72)]
    assert [s.start for s in found([bad, *series])] == [0, 51, 72]


def test_the_rule_does_not_depend_on_the_unit():
    series = curve()
    series[300:303] += 3.0
    scaled = found(0.01 * series, min_height=0.001)
    assert [(s.start, s.end) for s in scaled] == [(s.start, s.end) for s in found(series)]


def judged(losses, final, *, grads=None, init=5.5, events=()):
    return verdict.judge(
        losses=losses,
        grad_norms=grads if grads is not None else [1.0] * len(losses),
        init_val_loss=init,
        final_val_loss=final,
        h1=3.14,
        h2=2.40,
        spikes=events,
        spike_patience=32,
        stalled_below=0.1,
    )


def test_verdicts():
    assert judged([5.0, 3.0], 2.3).verdict == "stable"
    assert judged([5.0, 3.0], 3.13).verdict == "stalled"
    assert judged([5.0, 3.0], 3.14 - 0.1 * 0.74 + 1e-6).verdict == "stalled"
    assert judged([5.0, 3.0], 3.14 - 0.1 * 0.74 - 1e-6).verdict == "stable"
    assert judged([5.0, 3.0], 5.5).verdict == "diverged"  # at the loss at initialisation
    lasting = Spike(start=7, end=None, peak=6.0, height=2.0, z=20.0, limit=4.5)
    told = judged([5.0, 3.0] * 30, 2.3, events=[lasting])
    assert (told.verdict, told.first_bad_step) == ("spiked", 7)
    assert judged([5.0, 3.0] * 10, 2.3, events=[lasting]).verdict == "stable"  # too late to tell
    assert judged([5.0, 3.0] * 30, 2.3, events=[Spike(7, 9, 6.0, 2.0, 20.0, 4.5)]).verdict == "stable"


def test_a_source_without_bigram_structure_is_judged_by_its_unigrams():
    def verdict_at(final):
        return verdict.judge(losses=[5.0], grad_norms=[1.0], init_val_loss=5.0, final_val_loss=final, h1=3.0, h2=3.0,
                             spikes=[], spike_patience=32, stalled_below=0.1)  # fmt: skip

    assert verdict_at(3.1).verdict == "stable"
    assert verdict_at(3.3).verdict == "stalled"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_divergence_names_the_first_bad_step(bad):
    assert judged([5.0, 4.0, bad, bad], math.nan).first_bad_step == 2
    result = judged([5.0, 4.0, 3.0], math.nan, grads=[1.0, bad, 1.0])
    assert (result.verdict, result.first_bad_step) == ("diverged", 1)
    assert "gradient norm not finite at step 1" in result.reason


def test_first_bad_layer():
    healthy = [1.0, 1.1, 1.0]
    assert verdict.first_bad_layer({0: [*healthy, 1.0], 1: [*healthy, math.inf], 2: [*healthy, 1.0]}) == 1
    # backward reaches layer 2 before layer 1
    assert verdict.first_bad_layer({0: [*healthy, 1.0], 1: [*healthy, math.nan], 2: [*healthy, math.inf]}) == 2
    # the loss itself was not finite: blame the layer that had grown most one step earlier
    assert verdict.first_bad_layer({0: [1, 1, 2, math.nan], 1: [1, 1, 50, math.nan], 2: [1, 1, 3, math.nan]}) == 1
    assert verdict.first_bad_layer({0: healthy, 1: healthy}) is None
