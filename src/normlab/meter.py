"""What every training step tells about every weight tensor, measured on the device without a wait for it.

Parameters are laid out in one flat buffer, a fixed number of elements to a row, each tensor from a row's start: a few
passes over memory serve all tensors at once, however deep the model. The optimizer steps on that buffer too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normlab.model import Model
from normlab.tensors import TensorId, tensors

STATS = ("weight_grad_norm", "weight_norm", "update_norm", "update_ratio", "below_eps")
_ALIGNED = 64  # elements: rows start on cache lines, and parameters where vector instructions like them
_CHUNK = {"cpu": 2**20}  # elements that are updated and measured at a time: what measuring needs beside the model
_CHUNK_ELSEWHERE = 2**26


@dataclass(frozen=True)
class Chunk:
    """Parameters of one optimizer group, one after the other: elements start..stop of the flat buffer."""

    group: int
    parameters: list[nn.Parameter]
    start: int
    stop: int
    offsets: Tensor  # (tensors + 1,) the row where each tensor begins, counted within the chunk, and the end
    counts: Tensor  # (tensors,) elements
    padding: Tensor  # (tensors,) elements of their rows that are no weights


class Flat:
    """One place for every weight of a model: chunk by chunk, as an optimizer's groups order them."""

    def __init__(self, model: Model, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        entries = list(tensors(model))
        self.ids: list[TensorId] = [entry.id for entry in entries]
        self._counts = [entry.value.numel() for entry in entries]
        self._of: dict[nn.Parameter, list[int]] = {}  # its tensors
        for i, entry in enumerate(entries):
            self._of.setdefault(entry.parameter, []).append(i)
        # a parameter starts at a row whatever its size; the parts of a fused one do by the choice of it
        fused = (c for e, c in zip(entries, self._counts, strict=True) if e.rows is not None)
        self.row = math.gcd(_ALIGNED, *fused)
        self.device = entries[0].parameter.device
        self.wide = torch.float32 if self.device.type == "mps" else torch.float64  # MPS has no float64
        self.chunks: list[Chunk] = []
        order: list[int] = []
        limit = _CHUNK.get(self.device.type, _CHUNK_ELSEWHERE)
        for group, parameters in enumerate(groups):
            part: list[nn.Parameter] = []
            for parameter in parameters:
                if part and sum(map(self.room, part)) + self.room(parameter) > limit:
                    self._add(group, part)
                    part = []
                part.append(parameter)
                order += self._of[parameter]
            self._add(group, part)
        self._place = torch.tensor(order).argsort().to(self.device)
        self._zeros = torch.zeros(_ALIGNED, dtype=entries[0].parameter.dtype, device=self.device)

    @property
    def size(self) -> int:
        return self.chunks[-1].stop

    def room(self, parameter: nn.Parameter) -> int:
        """Elements that it takes, the gap behind it included."""
        return -(-parameter.numel() // _ALIGNED) * _ALIGNED

    def views(self, whole: Tensor) -> list[Tensor]:
        """The parts of a buffer that hold the parameters' elements, shaped like them, chunk by chunk."""
        parameters = [p for chunk in self.chunks for p in chunk.parameters]
        parts = zip(whole.split(list(map(self.room, parameters))), parameters, strict=True)
        return [part[: p.numel()].view_as(p) for part, p in parts]

    def flattened(self, chunk: Chunk, values: Sequence[Tensor | None]) -> Tensor:
        """A value for each parameter of the chunk, None for zeros, as a flat copy."""
        pieces: list[Tensor] = []
        for parameter, value in zip(chunk.parameters, values, strict=True):
            pieces.append(torch.zeros_like(parameter).view(-1) if value is None else value.reshape(-1))
            gap = self.room(parameter) - parameter.numel()
            if gap:
                pieces.append(self._zeros[:gap])
        return torch.cat(pieces)

    def sums(self, chunk: Chunk, per_row: Tensor) -> Tensor:
        """(rows,) -> (tensors of the chunk,), in float64."""
        return torch.segment_reduce(per_row.to(self.wide), "sum", offsets=chunk.offsets, unsafe=True)

    def norms(self, chunk: Chunk, values: Tensor) -> Tensor:
        """(tensors of the chunk,) L2 norms.

        float32 squares overflow above 1e19 and vanish below 1e-23: where that could have happened, or on a device that
        would have to be waited for to know, the sums run in float64.
        """
        rows = values.view(-1, self.row)
        if values.device.type == "cpu":
            found = self.sums(chunk, torch.linalg.vector_norm(rows, dim=1).square_()).sqrt_()
            if bool(((found > 1e-12) & (found < 1e12)).all()):
                return found
        return self.sums(chunk, torch.linalg.vector_norm(rows, dim=1, dtype=self.wide).square_()).sqrt_()

    def ordered(self, parts: Sequence[Tensor]) -> Tensor:
        """(..., tensors of each chunk) -> (..., tensors), as `ids` are."""
        return torch.cat(list(parts), dim=-1)[..., self._place]

    def _add(self, group: int, parameters: list[nn.Parameter]) -> None:
        start = self.chunks[-1].stop if self.chunks else 0
        counts, rows = [], []
        for parameter in parameters:
            own = [self._counts[i] for i in self._of[parameter]]
            counts += own
            own[-1] += self.room(parameter) - sum(own)
            rows += [count // self.row for count in own]
        offsets = torch.tensor([0, *rows]).cumsum(0)
        size = torch.tensor(counts, dtype=self.wide)
        padding = torch.tensor(rows, dtype=self.wide) * self.row - size
        stop = start + self.row * int(offsets[-1])
        on = (tensor.to(self.device) for tensor in (offsets, size, padding))
        self.chunks.append(Chunk(group, parameters, start, stop, *on))


class StepMeter:
    """Every-step statistics (STATS) of every weight tensor. Moves the model's parameters into a flat buffer and makes
    the optimizer, which has not stepped yet, step on it: `flat`, one parameter for each chunk.

    After backward, `gradients` takes the model's gradients into flat's .grad, where they may be clipped; `update`
    steps. below_eps is the share of a tensor's weights whose bias-corrected sqrt(v) lies below Adam's eps, where eps
    decides the update (Wortsman et al. 2023, arXiv 2309.14322); NaN for optimizers other than Adam and AdamW.
    update_ratio is update norm / weight norm before the update, NaN for a tensor that is zero. keep_update: `update`
    leaves weights before it - weights after it in `last_update`. add_up: makes of gradients their sum over ranks.
    """

    def __init__(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer,
        *,
        keep_update: bool = False,
        add_up: Callable[[Tensor], None] | None = None,
    ) -> None:
        self._add_up = add_up
        self._flat = Flat(model, [group["params"] for group in optimizer.param_groups])
        self._optimizer = optimizer
        self.ids = self._flat.ids
        chunks = self._flat.chunks
        with torch.no_grad():
            self.weights = torch.cat([self._flat.flattened(chunk, [*chunk.parameters]) for chunk in chunks])
        moved = [p for chunk in chunks for p in chunk.parameters]
        for parameter, view in zip(moved, self._flat.views(self.weights), strict=True):
            parameter.data = view
        self.flat = [nn.Parameter(self.weights[chunk.start : chunk.stop]) for chunk in chunks]
        for i, group in enumerate(optimizer.param_groups):
            group["params"] = [flat for flat, chunk in zip(self.flat, chunks, strict=True) if chunk.group == i]
        self._scratch = torch.empty_like(self.weights[: max(map(len, self.flat))])
        self.last_update = torch.zeros_like(self.weights) if keep_update else None

    @torch.no_grad()
    def gradients(self, scaler: torch.amp.GradScaler | None = None) -> tuple[Tensor, Tensor]:
        """(tensors,) norms of the gradients, unscaled, before any clipping, and counts of their non-finite numbers."""
        grads = []
        for flat, chunk in zip(self.flat, self._flat.chunks, strict=True):
            flat.grad = self._flat.flattened(chunk, [p.grad for p in chunk.parameters])
            if self._add_up is not None:
                self._add_up(flat.grad)
            grads.append(flat.grad)
            for parameter in chunk.parameters:
                parameter.grad = None
        if scaler is not None:
            scaler.unscale_(self._optimizer)
        found = self._flat.ordered(list(map(self._flat.norms, self._flat.chunks, grads)))
        if found.device.type == "cpu" and bool(found.isfinite().all()):
            return found, torch.zeros_like(found)
        return found, self._flat.ordered(
            [
                self._flat.sums(chunk, (~grad.isfinite()).view(-1, self._flat.row).sum(1))
                for grad, chunk in zip(grads, self._flat.chunks, strict=True)
            ]
        )

    @torch.no_grad()
    def update(self, skip: Tensor | None = None) -> Tensor:
        """One step of the optimizer; (4, tensors): STATS but the first, of the update that it made.

        skip, a float: where it is 1, weights and the optimizer's state stay as they are.
        """
        grads = [flat.grad for flat in self.flat]
        for flat in self.flat:
            flat.grad = None  # and the optimizer leaves it alone
        found = []
        for flat, chunk, grad in zip(self.flat, self._flat.chunks, grads, strict=True):
            change = self._scratch[: len(flat)].copy_(flat)
            weight = self._flat.norms(chunk, change)
            flat.grad = grad
            self._step(flat, skip)
            flat.grad = None
            change.sub_(flat)
            moved = self._flat.norms(chunk, change)
            ratio = torch.where(weight > 0, moved / weight, math.nan)
            if self.last_update is not None:
                self.last_update[chunk.start : chunk.stop] = change
            found.append(torch.stack((weight, moved, ratio, self._below_eps(flat, chunk))))
        return self._flat.ordered(found)

    def _step(self, flat: nn.Parameter, skip: Tensor | None) -> None:
        """As torch.amp.GradScaler does: a fused optimizer reads `skip` on the device, another one is waited for here.

        So is a fused one before its first step: torch leaves the momentum of a first step that is skipped unset.
        """
        if skip is None:
            self._optimizer.step()
        elif self._optimizer.defaults.get("fused") and self._optimizer.state.get(flat):
            self._optimizer.found_inf = skip  # pyright: ignore[reportAttributeAccessIssue]
            self._optimizer.step()
        elif not skip:
            self._optimizer.step()

    def _below_eps(self, flat: nn.Parameter, chunk: Chunk) -> Tensor:
        state, group = self._optimizer.state.get(flat, {}), self._optimizer.param_groups[chunk.group]
        if "exp_avg_sq" not in state or not isinstance(self._optimizer, torch.optim.Adam | torch.optim.AdamW):
            return torch.full_like(chunk.counts, math.nan)
        steps = float(state["step"]) if state["step"].device.type == "cpu" else state["step"]
        limit, tiny = group["eps"] ** 2 * (1 - group["betas"][1] ** steps), torch.finfo(flat.dtype).tiny
        limit = limit.clamp(min=tiny) if isinstance(limit, Tensor) else max(limit, tiny)  # no wait for the device
        above = torch.sub(state["exp_avg_sq"], limit, out=self._scratch[: len(flat)]).sign_()  # +1, or -1 below
        signs = above.view(-1, self._flat.row).sum(1)
        room = chunk.counts + chunk.padding
        return ((room - self._flat.sums(chunk, signs)) / 2 - chunk.padding) / chunk.counts  # padding is below


def global_norm(norms: Tensor) -> Tensor:
    """L2 norm over all tensors from theirs, float32 as torch's clipping takes it."""
    return torch.linalg.vector_norm(norms).float()
