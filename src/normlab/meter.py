"""What every training step tells about every weight tensor, measured on the device without a wait for it.

Parameters are laid out in one flat buffer, a fixed number of elements to a row, each tensor from a row's start: a few
passes over memory serve all tensors at once, however deep the model. The optimizer steps on that buffer too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from normlab.model import Model
from normlab.tensors import TensorId, tensors

STATS = ("weight_grad_norm", "weight_norm", "update_norm", "update_ratio", "below_eps")
_ALIGNED = 64  # elements: rows start on cache lines, and parameters where vector instructions like them
_CHUNK = {"cpu": 2**19}  # elements that are updated and measured at a time: what measuring needs beside the model
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
        zeros = torch.zeros(_ALIGNED, dtype=entries[0].parameter.dtype, device=self.device)
        gaps = {p: self.room(p) - p.numel() for p in self.parameters}
        self._gaps = {p: zeros[:gap] for p, gap in gaps.items() if gap}  # what fills them

    @property
    def size(self) -> int:
        return self.chunks[-1].stop

    def room(self, parameter: nn.Parameter) -> int:
        """Elements that it takes, the gap behind it included."""
        return -(-parameter.numel() // _ALIGNED) * _ALIGNED

    @property
    def parameters(self) -> list[nn.Parameter]:
        """As they lie in the buffer."""
        return [p for chunk in self.chunks for p in chunk.parameters]

    def views(self, whole: Tensor) -> list[Tensor]:
        """The parts of a buffer that hold the parameters' elements, shaped like them, chunk by chunk.

        (..., size) -> (..., *shape): several models may have a row each.
        """
        parts = zip(whole.split(list(map(self.room, self.parameters)), dim=-1), self.parameters, strict=True)
        return [part[..., : p.numel()].view((*whole.shape[:-1], *p.shape)) for part, p in parts]

    def flattened(self, parameters: Sequence[nn.Parameter], values: Sequence[Tensor | None], *lead: int) -> Tensor:
        """A value (*lead, *shape) for each of these parameters, None for zeros, as they lie in the buffer: a copy."""
        pieces: list[Tensor] = []
        for parameter, value in zip(parameters, values, strict=True):
            pieces.append(parameter.new_zeros(*lead, parameter.numel()) if value is None else value)
            gap = self._gaps.get(parameter)
            if gap is not None:
                pieces.append(gap.expand(*lead, len(gap)))
        if lead:
            return torch.cat([piece.reshape(*lead, -1) for piece in pieces], dim=-1)
        return _flatten_dense_tensors(pieces)

    def sums(self, chunk: Chunk, per_row: Tensor) -> Tensor:
        """(..., rows) -> (..., tensors of the chunk), in float64."""
        offsets, axis = chunk.offsets.expand(*per_row.shape[:-1], -1), per_row.ndim - 1
        return torch.segment_reduce(per_row.to(self.wide), "sum", offsets=offsets, axis=axis, unsafe=True)

    def norms(self, chunk: Chunk, values: Tensor) -> Tensor:
        """(..., elements) -> (..., tensors of the chunk) L2 norms.

        float32 squares overflow above 1e19 and vanish below 1e-23: where that could have happened, or on a device that
        would have to be waited for to know, the sums run in float64.
        """
        rows = values.view(*values.shape[:-1], -1, self.row)
        if values.device.type != "cpu":
            return self._wide_norms(chunk, rows)
        found = self.sums(chunk, torch.linalg.vector_norm(rows, dim=-1).square_()).sqrt_()
        extreme = ~((found > 1e-12) & (found < 1e12)).all(-1)
        if bool(extreme.any()):  # of several models each for itself: none hangs on another
            found[extreme] = self._wide_norms(chunk, rows[extreme])
        return found

    def _wide_norms(self, chunk: Chunk, rows: Tensor) -> Tensor:
        return self.sums(chunk, torch.linalg.vector_norm(rows, dim=-1, dtype=self.wide).square_()).sqrt_()

    def nonfinite(self, grads: Sequence[Tensor], norms: Tensor) -> Tensor:
        """(..., tensors) counts of numbers that are not finite, in the gradients (..., elements) of each chunk.

        norms: theirs, which tell a device that need not be waited for that there are none.
        """
        if norms.device.type == "cpu" and bool(norms.isfinite().all()):
            return torch.zeros_like(norms)
        bad = [(~grad.isfinite()).view(*grad.shape[:-1], -1, self.row).sum(-1) for grad in grads]
        return self.ordered(list(map(self.sums, self.chunks, bad)))

    def below(self, chunk: Chunk, second_moment: Tensor, limit: Tensor | float, out: Tensor) -> Tensor:
        """(..., elements) -> (..., tensors of the chunk): the share of elements below the limit. out: room for them."""
        low = torch.lt(second_moment, limit, out=out)  # 1.0 or 0.0
        counts = self.sums(chunk, low.view(*low.shape[:-1], -1, self.row).sum(-1))
        return (counts - chunk.padding) / chunk.counts  # padding is below

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
            self.weights = self._flat.flattened(self._flat.parameters, self._flat.parameters)
        self._show_weights()
        self.flat = [nn.Parameter(self.weights[chunk.start : chunk.stop]) for chunk in chunks]
        for i, group in enumerate(optimizer.param_groups):
            group["params"] = [flat for flat, chunk in zip(self.flat, chunks, strict=True) if chunk.group == i]
        self._scratch = torch.empty_like(self.weights[: max(map(len, self.flat))])
        self.last_update = torch.zeros_like(self.weights) if keep_update else None

    @property
    def layout(self) -> Flat:
        """Where each parameter lies."""
        return self._flat

    @torch.no_grad()
    def move(self, buffer: Tensor) -> None:
        """Keep the weights in another buffer of their size from now on."""
        self.weights = buffer.copy_(self.weights)
        self._show_weights()
        for flat, chunk in zip(self.flat, self._flat.chunks, strict=True):
            flat.data = buffer[chunk.start : chunk.stop]

    def _show_weights(self) -> None:
        for parameter, view in zip(self._flat.parameters, self._flat.views(self.weights), strict=True):
            parameter.data = view

    @torch.no_grad()
    def gradients(self, scaler: torch.amp.GradScaler | None = None) -> tuple[Tensor, Tensor]:
        """(tensors,) norms of the gradients, unscaled, before any clipping, and counts of their non-finite numbers."""
        grads, found = [], []
        for flat, chunk in zip(self.flat, self._flat.chunks, strict=True):
            flat.grad = self._flat.flattened(chunk.parameters, [p.grad for p in chunk.parameters])
            if self._add_up is not None:
                self._add_up(flat.grad)
            grads.append(flat.grad)
            for parameter in chunk.parameters:
                parameter.grad = None
            if scaler is None:  # while they are in the processor's cache
                found.append(self._flat.norms(chunk, flat.grad))
        if scaler is not None:
            scaler.unscale_(self._optimizer)
            found = list(map(self._flat.norms, self._flat.chunks, grads))
        norms = self._flat.ordered(found)
        return norms, self._flat.nonfinite(grads, norms)

    @torch.no_grad()
    def update(self, skip: Tensor | None = None) -> Tensor:
        """One step of the optimizer; (4, tensors): STATS but the first, of the update that it made.

        skip, a float: where it is 1, weights and the optimizer's state stay as they are.
        """
        grads = [flat.grad for flat in self.flat]
        for flat in self.flat:
            flat.grad = None  # and the optimizer leaves it alone
        found = []
        for i, (flat, chunk, grad) in enumerate(zip(self.flat, self._flat.chunks, grads, strict=True)):
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
            found.append(torch.stack((weight, moved, ratio, self._below_eps(i))))
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

    def _below_eps(self, i: int) -> Tensor:
        chunk, told = self._flat.chunks[i], self.second_moment(i)
        if told is None:
            return torch.full_like(chunk.counts, math.nan)
        return self._flat.below(chunk, *told, out=self._scratch[: len(self.flat[i])])

    def second_moment(self, i: int) -> tuple[Tensor, Tensor | float] | None:
        """Adam's v of chunk i, and the value below which its bias-corrected root is below eps; None without a v."""
        flat, group = self.flat[i], self._optimizer.param_groups[self._flat.chunks[i].group]
        state = self._optimizer.state.get(flat, {})
        if "exp_avg_sq" not in state or not isinstance(self._optimizer, torch.optim.Adam | torch.optim.AdamW):
            return None
        steps = float(state["step"]) if state["step"].device.type == "cpu" else state["step"]
        limit, tiny = group["eps"] ** 2 * (1 - group["betas"][1] ** steps), torch.finfo(flat.dtype).tiny
        limit = limit.clamp(min=tiny) if isinstance(limit, Tensor) else max(limit, tiny)  # no wait for the device
        return state["exp_avg_sq"], limit


def global_norm(norms: Tensor) -> Tensor:
    """L2 norm over all tensors from theirs, float32 as torch's clipping takes it."""
    return torch.linalg.vector_norm(norms).float()
