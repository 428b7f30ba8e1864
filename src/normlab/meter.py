"""What every training step tells about every weight tensor, measured on the device without a wait for it.

Parameters, gradients and Adam's second moments are laid out in flat buffers, a fixed number of elements to a row, each
tensor from a row's start: a few passes over memory serve all tensors at once, however deep the model.
"""

import math
from itertools import groupby

import torch
from torch import Tensor

from normlab.model import Model
from normlab.tensors import TensorId, tensors

STATS = ("weight_grad_norm", "weight_norm", "update_norm", "update_ratio", "below_eps")
_ALIGNED = 64  # elements: rows start on cache lines, and parameters where vector instructions like them


class Flat:
    """Room for one number per weight, and sums over each logical tensor's part of it."""

    def __init__(self, model: Model) -> None:
        entries = list(tensors(model))
        self.ids: list[TensorId] = [entry.id for entry in entries]
        self.counts = [entry.value.numel() for entry in entries]
        self.parameters = list(dict.fromkeys(entry.parameter for entry in entries))
        # a parameter starts at a row whatever its size; the parts of a fused one do by the choice of it
        self.row = math.gcd(_ALIGNED, *(c for e, c in zip(entries, self.counts, strict=True) if e.rows is not None))
        self._sizes = [-(-p.numel() // _ALIGNED) * _ALIGNED for p in self.parameters]
        device = self.parameters[0].device
        self.wide = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        rows: list[int] = []
        for (_, parts), size in zip(groupby(entries, lambda e: id(e.parameter)), self._sizes, strict=True):
            own = [entry.value.numel() for entry in parts]
            own[-1] += size - sum(own)  # the gap behind a parameter, filled so that it does not count
            rows += [count // self.row for count in own]
        self._owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows)).to(device)

    def buffer(self, fill: float = 0.0) -> tuple[Tensor, list[Tensor]]:
        """A flat buffer and its views, shaped like the parameters."""
        first = self.parameters[0]
        whole = torch.full((sum(self._sizes),), fill, dtype=first.dtype, device=first.device)
        parts = zip(whole.split(self._sizes), self.parameters, strict=True)
        return whole, [part[: p.numel()].view_as(p) for part, p in parts]

    def sums(self, per_row: Tensor) -> Tensor:
        """(rows,) -> (tensors,), in float64."""
        total = torch.zeros(len(self.ids), dtype=self.wide, device=per_row.device)
        return total.index_add_(0, self._owner, per_row.to(self.wide))

    def norms(self, whole: Tensor) -> Tensor:
        """(tensors,) L2 norms. float32 squares overflow above 1e19 and vanish below 1e-23: where that could have
        happened, or on a device that would have to be waited for to know, the sums run in float64."""
        rows = whole.view(-1, self.row)
        if whole.device.type == "cpu":
            found = self.sums(torch.linalg.vector_norm(rows, dim=1).square_()).sqrt_()
            if bool(((found > 1e-12) & (found < 1e12)).all()):
                return found
        return self.sums(torch.linalg.vector_norm(rows, dim=1, dtype=self.wide).square_()).sqrt_()


class StepMeter:
    """Every-step statistics (STATS) of every weight tensor. Moves the model's parameters into a flat buffer.

    Call `gradients` after backward, `before_update` and `update` around the optimizer's step. below_eps is the share of
    a tensor's weights whose bias-corrected sqrt(v) lies below Adam's eps, where eps decides the update (Wortsman et al.
    2023, arXiv 2309.14322); NaN for optimizers other than Adam and AdamW. update_ratio is update norm / weight norm
    before the update, NaN for a tensor that is zero.
    """

    def __init__(self, model: Model) -> None:
        self._flat = Flat(model)
        self.ids = self._flat.ids
        self.weights, views = self._flat.buffer()
        for parameter, view in zip(self._flat.parameters, views, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.gradient, self._gradient_views = self._flat.buffer()
        self.last_update = torch.zeros_like(self.weights)  # weights before the last update - weights after it
        self._second: Tensor | None = None
        self._counts = torch.tensor(self._flat.counts, dtype=self._flat.wide, device=self.weights.device)
        self._room = self._flat.sums(torch.full_like(self.weights[:: self._flat.row], self._flat.row))  # with gaps
        self._weight_norms = self._nan = torch.full_like(self._counts, math.nan)

    @torch.no_grad()
    def gradients(self) -> tuple[Tensor, Tensor]:
        """(tensors,) norms of the current .grad, before any clipping, and counts of its non-finite numbers."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._flat.parameters]
        torch._foreach_copy_(self._gradient_views, grads)
        norms = self._flat.norms(self.gradient)
        if norms.device.type == "cpu" and bool(norms.isfinite().all()):
            return norms, torch.zeros_like(norms)
        bad = (~self.gradient.isfinite()).view(-1, self._flat.row)
        return norms, self._flat.sums(bad.sum(1))

    @torch.no_grad()
    def before_update(self) -> None:
        self._weight_norms = self._flat.norms(self.weights)
        self.last_update.copy_(self.weights)

    @torch.no_grad()
    def update(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """(4, tensors): STATS but the first, of the update that was just made."""
        self.last_update.sub_(self.weights)
        moved = self._flat.norms(self.last_update)
        ratio = torch.where(self._weight_norms > 0, moved / self._weight_norms, self._nan)
        return torch.stack((self._weight_norms, moved, ratio, self._below_eps(optimizer)))

    def _below_eps(self, optimizer: torch.optim.Optimizer) -> Tensor:
        state = optimizer.state
        first = state.get(self._flat.parameters[0], {})
        if "exp_avg_sq" not in first or not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            return self._nan
        if self._second is None or first["exp_avg_sq"].data_ptr() != self._second.data_ptr():
            self._second, views = self._flat.buffer(math.inf)  # the gaps are never below
            for parameter, view in zip(self._flat.parameters, views, strict=True):
                view.copy_(state[parameter]["exp_avg_sq"])
                state[parameter]["exp_avg_sq"] = view
        group = optimizer.param_groups[0]
        steps = float(first["step"]) if first["step"].device.type == "cpu" else first["step"]
        limit = group["eps"] ** 2 * (1 - group["betas"][1] ** steps)
        signs = (self._second - limit).sign_().view(-1, self._flat.row).sum(1)  # +1 above, -1 below
        return (self._room - self._flat.sums(signs)) / 2 / self._counts


def global_norm(norms: Tensor) -> Tensor:
    """L2 norm over all tensors from theirs, float32 as torch's clipping takes it."""
    return torch.linalg.vector_norm(norms).float()
