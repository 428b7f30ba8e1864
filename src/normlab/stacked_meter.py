"""The meter's work for several models of one shape at once: their weights are the rows of one buffer.

Shapes: M members, P elements of the buffer that one takes.
"""

import math
from collections.abc import Sequence
from itertools import starmap

import torch
from torch import Tensor

from normlab.learner import Learner, Made
from normlab.meter import global_norm


class StackedMeter:
    """Statistics and updates of all members. Each one's weights stay its model's, each one's optimizer makes its step;
    what lies on either side of that step is one operation for all."""

    def __init__(self, fits: Sequence[Learner]) -> None:
        self._fits, self._layout = fits, fits[0].meter.layout
        self._weights = torch.stack([fit.meter.weights for fit in fits])
        self._scratch = torch.empty_like(self._weights)
        for fit, row in zip(fits, self._weights, strict=True):
            fit.meter.move(row)
        self.parameters = self._layout.parameters  # of the first member
        self.stacks = [view.detach().requires_grad_() for view in self._layout.views(self._weights)]  # (M, *shape)

    @torch.no_grad()
    def update(self, losses: Tensor, grads: Sequence[Tensor | None], rates: Sequence[float]) -> list[Made]:
        """A step of every member. losses (M,); grads (M, *shape), as the stacks are; rates: of the M members."""
        layout = self._layout
        grads_MP = layout.flattened(self.parameters, grads, len(self._fits))
        by_chunk = self._by_chunk(grads_MP)
        norms = layout.ordered(list(map(layout.norms, layout.chunks, by_chunk)))
        nonfinite = layout.nonfinite(by_chunk, norms)
        self._clip(grads_MP, norms)
        change_MP = self._scratch.copy_(self._weights)
        weight = list(map(layout.norms, layout.chunks, self._by_chunk(change_MP)))
        for fit, grad_P, lr in zip(self._fits, grads_MP, rates, strict=True):
            for flat, chunk in zip(fit.meter.flat, layout.chunks, strict=True):
                flat.grad = grad_P[chunk.start : chunk.stop]
            fit.set_rate(lr)
            fit.optimizer.step()
            for flat in fit.meter.flat:
                flat.grad = None
        change_MP.sub_(self._weights)
        moved = list(map(layout.norms, layout.chunks, self._by_chunk(change_MP)))
        for fit, change_P in zip(self._fits, change_MP, strict=True):
            if fit.meter.last_update is not None:
                fit.meter.last_update.copy_(change_P)
        ratio = [torch.where(w > 0, m / w, math.nan) for w, m in zip(weight, moved, strict=True)]
        others = torch.stack(list(map(layout.ordered, (weight, moved, ratio, self._below_eps()))), dim=1)
        return list(starmap(Made, zip(losses, norms, nonfinite, others, strict=True)))

    def _by_chunk(self, values_MP: Tensor) -> list[Tensor]:
        return [values_MP[:, chunk.start : chunk.stop] for chunk in self._layout.chunks]

    def _clip(self, grads_MP: Tensor, norms: Tensor) -> None:
        """As torch.nn.utils.clip_grads_with_norm_ does for each."""
        limit = self._fits[0].cfg.optim.clip
        if limit is not None:
            total = torch.stack(list(map(global_norm, norms)))
            grads_MP.mul_((limit / (total + 1e-6)).clamp(max=1.0)[:, None])

    def _below_eps(self) -> list[Tensor]:
        found = []
        for i, chunk in enumerate(self._layout.chunks):
            told = [fit.meter.second_moment(i) for fit in self._fits]
            known = [each for each in told if each is not None]
            if not known:
                found.append(torch.full_like(chunk.counts, math.nan).expand(len(told), -1))
                continue
            moments = torch.stack([moment for moment, _ in known])
            limits = torch.stack([torch.as_tensor(limit, dtype=moments.dtype) for _, limit in known])[:, None]
            found.append(self._layout.below(chunk, moments, limits.to(moments.device), out=moments))
        return found
