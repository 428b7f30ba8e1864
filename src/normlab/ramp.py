"""Keel's probe of the largest learning rate (arXiv 2601.19895): one run whose rate rises from 0 until it breaks."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from normlab.frontier import ramped

WINDOW = 9  # steps of the running median
MARGIN = 0.1  # nats above the best loss so far, at the least
ERRORS = 3 * 1.2533 / WINDOW**0.5  # three standard errors of a median of WINDOW, in deviations of what it is of
EARLY = 10  # steps below which the ramp's own slope decides

CAVEAT = (
    "The ramp's rate at a step is also its length of warm-up so far: a placement that needs warm-up breaks early on it "
    "whatever rate it bears later. It is one run, resolved to top / steps; read it beside LR50, not for it."
)


@dataclass(frozen=True)
class Ramp:
    """max_lr: the rate at the last step before `bad_step`; where nothing broke, the last rate, and no bad step."""

    max_lr: float
    bad_step: int | None
    learned: bool  # whether the loss ever got past the line below which a run has stalled

    @property
    def flag(self) -> str:
        if self.bad_step is None:
            return "not broken"
        early = ["too early to resolve"] if self.bad_step < EARLY else []
        return ", ".join(early + ([] if self.learned else ["never learned"]))


def estimate(rates: ArrayLike, losses: ArrayLike, *, stalled_at: float, first_bad_step: float | None = None) -> Ramp:
    """Of a ramp's logged rates and losses. The bad step is the first of:

    The verdict's first bad step, where it has one, and the first loss that is not finite.
    The step from which on the loss has risen and never comes back: after the last one at which the centred running
    median (WINDOW steps) was within max(MARGIN, ERRORS * 1.4826 * MAD of the losses about it) nats of its least value
    so far. A rise in the last WINDOW steps may yet come back.
    Where the running median never got below `stalled_at` (nats; a loss at which a run counts as stalled), the step at
    which it first came that near to its least value: the plateau of a run that never learned.
    """
    rates, values = np.asarray(rates, dtype=float), np.asarray(losses, dtype=float)
    bad = [] if first_bad_step is None or first_bad_step != first_bad_step else [int(first_bad_step)]
    broken = np.flatnonzero(~np.isfinite(values))
    if len(broken):
        bad.append(int(broken[0]))
        values = values[: broken[0]]
    smooth = pd.Series(values).rolling(WINDOW, center=True, min_periods=1).median().to_numpy()
    learned = bool((smooth < stalled_at).any())
    if len(values):
        margin = max(MARGIN, ERRORS * 1.4826 * float(np.median(np.abs(values - smooth))))
        near = np.flatnonzero(smooth <= np.minimum.accumulate(smooth) + margin)
        if len(values) - (risen := int(near[-1]) + 1) >= WINDOW:
            bad.append(risen)
        if not learned:
            bad.append(int(np.flatnonzero(smooth <= smooth.min() + margin)[0]))
    if not bad:
        return Ramp(float(rates[-1]), None, learned)
    return Ramp(float(rates[min(bad) - 1]) if min(bad) else 0.0, min(bad), learned)


def estimates(runs: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """The ramps among the finished runs, with max_lr, bad_step (missing where nothing broke) and flag beside them."""
    of_ramp = pd.DataFrame(runs[ramped(runs) & (runs.status == "finished")])
    found = []
    for _, run in of_ramp.iterrows():
        logged = pd.DataFrame(steps[steps.run_id == run.run_id]).sort_values(by="step")
        line = run.h1 - run["verdict.stalled_below"] * max(0.0, run.h1 - run.h2)
        found.append(estimate(logged.lr, logged.loss, stalled_at=line, first_bad_step=run.first_bad_step))
    return of_ramp.assign(
        max_lr=[one.max_lr for one in found],
        bad_step=pd.array([one.bad_step for one in found], dtype="Int64"),
        flag=[one.flag for one in found],
    )
