"""Critical sharpness: how far along its own update a step could have gone before the loss rose."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

LARGEST = 2.0**20  # multiples of the update that are tried


@torch.no_grad()
def critical_sharpness(loss: Callable[[], Tensor], weights: Tensor, update: Tensor, lr: float) -> float:
    """2 / eta_c: eta_c is the smallest rate along the last update that raises the loss, within 1/16 of itself.

    weights: the flat weights after the update, read by `loss`; update: the weights before it minus those after it; lr:
    the rate that it used. A run is at its edge of stability where 2 / eta_c = 2 / lr, and beyond it above that. 0.0
    where no multiple up to 2^20 raises the loss, inf where every one down to 2^-20 does, NaN where the loss before the
    update is not finite. Exponential and binary search, some ten forward passes (arXiv 2601.16979). The weights are the
    same bits afterwards.
    """
    after = weights.clone()
    before = after + update

    def raised(multiple: float) -> bool:
        weights.copy_(before - multiple * update)
        value = loss().item()
        return not value <= start  # NaN is no fall

    try:
        weights.copy_(before)
        start = loss().item()
        if not math.isfinite(start):
            return math.nan
        low, high = 0.0, 1.0
        while not raised(high):
            low, high = high, 2 * high
            if high > LARGEST:
                return 0.0
        while low == 0.0 and high > 1 / LARGEST:  # the update itself raises the loss: go down
            if raised(high / 2):
                high /= 2
            else:
                low = high / 2
        if low == 0.0:
            return math.inf
        while high - low > high / 16:
            middle = (low + high) / 2
            low, high = (low, middle) if raised(middle) else (middle, high)
        return 2 / (high * lr)
    finally:
        weights.copy_(after)
