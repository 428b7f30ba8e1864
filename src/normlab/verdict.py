"""The verdict on a finished run, and the block to blame, as pure functions of what was logged."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from normlab.spikes import Spike

Name = Literal["stable", "spiked", "stalled", "diverged"]
NAMES: tuple[Name, ...] = get_args(Name)

RULES_VERSION = 2  # of the rules here and in spikes.py; stored with every verdict
LEAST_LOSS_SCALE = (
    1.0  # a gradient that overflows at it is the model's own: min_loss_scale of DeepSpeed and Megatron-LM
)


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
    loss_scales: Sequence[float] | None = None,
    spikes: Sequence[Spike],
    spike_patience: int,
    stalled_below: float,
    rise: float,
    patience: int,
) -> Verdict:
    """The first rule that applies, in this order.

    diverged: a loss or gradient norm that is not finite (see first_nonfinite), or a training loss more than `rise`, in
    the unit of the loss, above the initial held-out loss for `patience` steps in a row, whichever was first; then a
    final held-out loss more than `rise` above the initial one. The first two end at a step, so that stopping there
    leaves the verdict as it would have been.
    spiked: a loss spike that was not recovered by the end, spike_patience steps or more after its start.
    stalled: a final loss that is not below the initial one (weights that never moved), or
    (h1 - final_val_loss) / (h1 - h2) < stalled_below, with h1, h2 the losses of the task's two simplest predictors: of
    text its unigrams and bigrams, whose entropies they are, of numbers the best constant and the best linear map. Where
    the second knows no more (h1 <= h2), h1 is all there is to learn: less than 1 - stalled_below of the way there.
    stable: none of these.
    """
    broken = first_nonfinite(losses, grad_norms, loss_scales)
    above = hopeless(losses, init_val_loss, rise, patience)
    if broken is not None and (above is None or broken < above):
        what = "loss" if not math.isfinite(losses[broken]) else "gradient norm"
        return Verdict("diverged", f"{what} not finite at step {broken}", broken)
    if above is not None:
        told = f"loss over the initial {init_val_loss:.4g} by more than {rise:g} for {patience} steps from step {above}"
        return Verdict("diverged", told, above)
    if not math.isfinite(final_val_loss):
        return Verdict("diverged", "final loss not finite")
    if not final_val_loss <= init_val_loss + rise:
        told = f"final loss {final_val_loss:.4g} is above the initial {init_val_loss:.4g} by more than {rise:g}"
        return Verdict("diverged", told)
    # A rise in the last steps may yet recover: a run that ends there cannot tell.
    lasting = [s for s in spikes if not s.recovered and len(losses) - s.start >= spike_patience]
    if lasting:
        start, height = lasting[0].start, lasting[0].height
        return Verdict("spiked", f"loss rose by {height:.3g} at step {start} and stayed up", start)
    if final_val_loss >= init_val_loss:
        return Verdict("stalled", f"final loss {final_val_loss:.4g} is not below the initial {init_val_loss:.4g}")
    if h1 > h2:
        progress, needed = (h1 - final_val_loss) / (h1 - h2), stalled_below
        told = f"{progress:.1%} of the way from h1 = {h1:.3f} to h2 = {h2:.3f}"
    elif init_val_loss > h1:
        progress, needed = (init_val_loss - final_val_loss) / (init_val_loss - h1), 1 - stalled_below
        told = f"{progress:.1%} of the way from the initial loss to h1 = {h1:.3f}"
    else:
        return Verdict("stable", f"the initial loss was not above h1 = {h1:.3f}: nothing to learn")
    return Verdict("stalled" if progress < needed else "stable", told)


def first_nonfinite(
    losses: Sequence[float], grad_norms: Sequence[float], loss_scales: Sequence[float] | None = None
) -> int | None:
    """Index of the first step whose loss or gradient norm is NaN or infinite.

    Not so a gradient of a loss scaled (fp16) by more than LEAST_LOSS_SCALE: it overflowed for its scale, that update
    was skipped and the scale halved.
    """
    scaled = np.asarray(1.0 if loss_scales is None else loss_scales) > LEAST_LOSS_SCALE
    return _first(~(np.isfinite(losses) & (np.isfinite(grad_norms) | scaled)))


def hopeless(losses: Sequence[float], init_val_loss: float, rise: float, patience: int) -> int | None:
    """First step of the first `patience` in a row whose loss is finite and more than `rise` above the initial one."""
    values = np.asarray(losses, dtype=float)
    above = np.isfinite(values) & (values > init_val_loss + rise)
    step = np.arange(len(above))
    run = step - np.maximum.accumulate(np.where(above, -1, step)) if len(above) else step
    last = _first(run >= patience)
    return None if last is None else last - patience + 1


@dataclass(frozen=True)
class BadLayer:
    """The block where it began: its place in order of flow, the step, and what was seen there."""

    index: int
    step: int
    statistic: Literal["weight_norm", "grad_norm"]
    why: str


def first_bad_layer(
    weight_norms: ArrayLike, grad_norms: ArrayLike, *, factor: float, window: int, first_step: int = 0
) -> BadLayer | None:
    """The block to blame, from norms (steps, blocks) up to and with the first bad step, blocks in order of flow.

    Weight norms are those before the update. `first_step` is the step of the first row. The first rule that applies:
    1. Some blocks' weights are not finite, the others' are: the first of them, as forward meets it first. Every
       gradient may be NaN there, and tells nothing.
    2. Some blocks' gradients are not finite in the last row, the others' are: the last of them, as backward meets it
       first and hands it on.
    3. The block whose gradient norm left its own range first: more than `factor` times the median of its up to `window`
       values before, in one of the last `window` steps. Of two at one step, the one further out.
    4. The same of the weight norms.
    None where no rule applies.
    """
    weights, grads = (np.asarray(norms, dtype=float) for norms in (weight_norms, grad_norms))
    if weights.size:
        broken = ~np.isfinite(weights)
        row = _first(broken.any(axis=1))
        if row is not None and (not broken[row].all() or broken.shape[1] == 1):
            index = int(np.flatnonzero(broken[row])[0])
            told = "its weights are the first in order of flow that are not finite"
            return BadLayer(index, first_step + row, "weight_norm", told)
    if grads.size:
        broken = np.flatnonzero(~np.isfinite(grads[-1]))
        if 0 < len(broken) < grads.shape[1]:
            told = "its gradient is not finite, those nearer the output are"
            return BadLayer(int(broken[-1]), first_step + len(grads) - 1, "grad_norm", told)
    statistics: tuple[tuple[Literal["weight_norm", "grad_norm"], NDArray[np.float64]], ...]
    statistics = ("grad_norm", grads), ("weight_norm", weights)
    for statistic, norms in statistics:
        for row in range(max(1, len(norms) - window), len(norms)):
            usual = np.median(norms[max(0, row - window) : row], axis=0)
            usual = np.where(np.isfinite(usual), np.maximum(usual, 1e-300), np.inf)
            grown = np.where(np.isfinite(norms[row]), norms[row], 0.0) / usual
            index = int(np.argmax(grown))
            if grown[index] > factor:
                told = f"its {statistic.replace('_', ' ')} rose to {grown[index]:.3g} times its median"
                return BadLayer(index, first_step + row, statistic, told)
    return None


def _first(flags: NDArray[np.bool_] | np.bool_) -> int | None:
    where = np.flatnonzero(flags)
    return int(where[0]) if len(where) else None
