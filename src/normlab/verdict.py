"""The verdict on a finished run, as a pure function of what it logged."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from normlab.spikes import Spike

Name = Literal["stable", "spiked", "stalled", "diverged"]


@dataclass(frozen=True)
class Verdict:
    verdict: Name
    reason: str
    first_bad_step: int | None = None


def judge(
    *,
    losses: Sequence[float],
    grad_norms: Sequence[float],
    init_val_loss: float,
    final_val_loss: float,
    h1: float,
    h2: float,
    spikes: Sequence[Spike],
    spike_patience: int,
    stalled_below: float,
) -> Verdict:
    """The first rule that applies, in this order.

    diverged: a non-finite loss or gradient norm, or a final held-out loss at or above the one at initialisation.
    spiked: a loss spike that was not recovered by the end, spike_patience steps or more after its start.
    stalled: (h1 - final_val_loss) / (h1 - h2) < stalled_below, with h1, h2 the unigram and bigram entropies. Where the
    previous token tells nothing (h1 <= h2), h1 is all there is to learn: less than 1 - stalled_below of the way there.
    stable: none of these.
    """
    bad = first_nonfinite(losses, grad_norms)
    if bad is not None:
        what = "loss" if not math.isfinite(losses[bad]) else "gradient norm"
        return Verdict("diverged", f"{what} not finite at step {bad}", bad)
    if not final_val_loss < init_val_loss:
        return Verdict(
            "diverged", f"final loss {final_val_loss:.4g} is not below the initial {init_val_loss:.4g}", None
        )
    # A rise in the last steps may yet recover: a run that ends there cannot tell.
    lasting = [s for s in spikes if not s.recovered and len(losses) - s.start >= spike_patience]
    if lasting:
        return Verdict(
            "spiked",
            f"loss rose by {lasting[0].height:.3g} nats at step {lasting[0].start} and stayed up",
            lasting[0].start,
        )
    if h1 > h2:
        progress, needed = (h1 - final_val_loss) / (h1 - h2), stalled_below
        told = f"{progress:.1%} of the way from unigram entropy {h1:.3f} to bigram entropy {h2:.3f}"
    else:
        progress, needed = (init_val_loss - final_val_loss) / (init_val_loss - h1), 1 - stalled_below
        told = f"{progress:.1%} of the way from the initial loss to unigram entropy {h1:.3f}"
    return Verdict("stalled" if progress < needed else "stable", told)


def first_nonfinite(losses: Sequence[float], grad_norms: Sequence[float]) -> int | None:
    """Index of the first step whose loss or gradient norm is NaN or infinite."""
    bad = np.flatnonzero(~(np.isfinite(losses) & np.isfinite(grad_norms)))
    return int(bad[0]) if len(bad) else None


def first_bad_layer(history: Mapping[int, Sequence[float]]) -> int | None:
    """The layer to blame for a non-finite step. `history`: layer -> its gradient norms up to and with that step.

    If only some layers are non-finite there, the one nearest the output: backward meets it first. If all are (the loss
    itself was not finite), the one whose norm had grown most against its own median one step earlier.
    """
    broken = [layer for layer, norms in history.items() if norms and not math.isfinite(norms[-1])]
    if not broken:
        return None
    if len(broken) < len(history):
        return max(broken)
    growth = {k: v[-2] / max(float(np.median(v[:-1])), 1e-300) for k, v in history.items() if len(v) > 1}
    finite = {k: g for k, g in growth.items() if math.isfinite(g)}
    return max(finite, key=lambda layer: finite[layer]) if finite else None
