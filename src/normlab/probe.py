"""The full per-layer profile of a model, without an update and without a trace."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from normlab.activations import Key, Seen, merged, watching
from normlab.evaluation import cross_entropy
from normlab.model import Model
from normlab.norm import wide
from normlab.objective import micro_batches
from normlab.tensors import Entry, tensors

Loss = Callable[[Any, Tensor], Tensor]
Objective = Callable[[Any, Tensor], tuple[Tensor, Tensor]]  # what training descends, its cross-entropy
Batches = Iterable[tuple[Any, Tensor]]
COLUMNS = ["stack", "layer", "site", "tensor", "stat", "value"]


class Profile:
    """Profiles of one model on the same batches, each with how far the output moved since the one before."""

    def __init__(
        self,
        model: Model,
        objective: Objective,
        batches: list[tuple[Any, Tensor]],
        *,
        layer_drop: bool,
        scale: Callable[[], float] = lambda: 1.0,
        micro_batch: int | None = None,
    ) -> None:
        self._model, self._objective, self._batches, self._layer_drop = model, objective, batches, layer_drop
        self._scale, self._micro_batch = scale, micro_batch
        self.logits: Tensor | None = None  # of the first batch at the last call

    def __call__(self) -> pd.DataFrame:
        """profile's rows; output_change: RMS over the first batch's logits, in evaluation mode, of their change since
        the last call; layer_drop_loss: what leaving out a block adds to the cross-entropy, nats."""
        loss, size = (lambda *batch: self._objective(*batch)[0]), self._micro_batch
        table = profile(self._model, loss, self._batches, self._scale(), size)
        said = []
        with evaluating(self._model):
            for part, _ in micro_batches(self._batches[0], size):
                with watching(self._model) as seen:
                    self._objective(*part)
                assert seen.logits is not None
                said.append(seen.logits)
        logits = torch.cat(said)
        stack = list(self._model.stacks)[-1]
        extra: list[tuple] = []
        if self.logits is not None:
            change = (logits - self.logits).square().mean().sqrt().item()
            extra.append((stack, None, "head", None, "output_change", change))
        self.logits = logits
        if self._layer_drop:
            extra += layer_drop(self._model, lambda *b: cross_entropy(self._objective, b, size), self._batches)
        return pd.concat([table, frame(extra)], ignore_index=True) if extra else table


def profile(
    model: Model, loss: Loss, batches: Batches, scale: float = 1.0, micro_batch: int | None = None
) -> pd.DataFrame:
    """Per-layer gradients and activations over mini-batches. Tidy rows, columns COLUMNS.

    The model stays in the mode that it is in: training, where a step's own gradient is wanted. scale: of the loss in
    the backward pass, taken out of its gradients again, so that they do not vanish in float16; halved, down to 1, where
    they overflow. micro_batch: sequences at a time; of a batch in parts, gradients are those of the whole, and what is
    said of activations is merged over the parts as over batches.
    Weights: expected_weight_grad_norm, the Frobenius norm of the gradient averaged over the batches FIRST (Xiong et
    al. 2020, figure 3); mean_weight_grad_norm, the mean of the per-batch norms; weight_norm.
    Streams: stream_grad_norm, the mean over batches of the L2 norm of dL/d(stream) after each sublayer has joined.
    Activations: what normlab.activations defines, over all batches.
    """
    entries = list(tensors(model))
    parameters = list(dict.fromkeys(e.parameter for e in entries))
    dtype = torch.float32 if parameters[0].device.type == "mps" else torch.float64  # MPS has no float64
    total = [torch.zeros_like(p) for p in parameters]
    norms: list[Tensor] = []
    values: dict[Key, list[Tensor]] = {}
    for batch in batches:
        weight_grads: list[Tensor] = []
        streams: dict[Key, list[Tensor]] = {}  # norms of the parts
        for (inputs, targets), share in micro_batches(batch, micro_batch):
            seen, grads = _gradients(model, partial(_times, share, loss, inputs, targets), parameters, scale)
            if weight_grads:
                torch._foreach_add_(weight_grads, grads[: len(parameters)])
            else:
                weight_grads = grads[: len(parameters)]
            for key, grad in zip(seen.streams, grads[len(parameters) :], strict=True):
                streams.setdefault(key, []).append(torch.linalg.vector_norm(grad, dtype=dtype))
            for key, found in seen.values.items():
                values.setdefault(key, []).append(found.to(dtype))
        torch._foreach_add_(total, weight_grads)
        norms.append(_norms(entries, dict(zip(parameters, weight_grads, strict=True)), dtype))
        for key, found in streams.items():
            whole = found[0] if len(found) == 1 else torch.linalg.vector_norm(torch.stack(found))
            values.setdefault((*key[:-1], "stream_grad_norm"), []).append(whole)
    torch._foreach_div_(total, len(norms))

    by_stat = {
        "expected_weight_grad_norm": _norms(entries, dict(zip(parameters, total, strict=True)), dtype),
        "mean_weight_grad_norm": torch.stack(norms).mean(0),
        "weight_norm": torch.stack(torch._foreach_norm([e.value for e in entries], 2, dtype=dtype)),
    }
    rows = [
        (*astuple(entry.id), stat, value)
        for stat, found in by_stat.items()
        for entry, value in zip(entries, found.tolist(), strict=True)
    ]
    read = torch.stack([merged(key[-1], torch.stack(found)) for key, found in values.items()]).tolist()
    rows += [(*key, value) for key, value in zip(values, read, strict=True)]
    return frame(rows)


def _times(share: Tensor | float, loss: Loss, inputs: Any, targets: Tensor) -> Tensor:
    return loss(inputs, targets) * share


def _gradients(
    model: Model, loss: Callable[[], Tensor], parameters: list[nn.Parameter], scale: float
) -> tuple[Seen, list[Tensor]]:
    """What a forward pass showed, and the gradients of the parameters and of the streams that it showed."""
    while True:
        with watching(model) as seen:
            wanted = loss() * scale, parameters + list(seen.streams.values())
            grads = [g.detach() for g in torch.autograd.grad(*wanted)]  # before batch norms get their statistics back
        if scale <= 1 or all(grad.isfinite().all() for grad in grads):
            return seen, grads if scale == 1 else [wide(grad) / scale for grad in grads]
        scale /= 2


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, and the mode before again afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def layer_drop(model: Model, loss: Loss, batches: Batches) -> list[tuple]:
    """Rows of what the mean loss in evaluation mode gains when a block is left out: its output is its input (nats)."""
    batches = list(batches)

    def mean() -> Tensor:
        return torch.stack([loss(*batch) for batch in batches]).mean()

    with evaluating(model), torch.compiler.set_stance("force_eager"):
        whole, rows = mean(), []
        for name, stack in model.stacks.items():
            for layer, block in enumerate(stack.blocks):
                site = "ffn" if hasattr(block, "ffn_residual") else "attn"
                with _skipped(block):
                    rows.append((name, layer, site, None, "layer_drop_loss", (mean() - whole).item()))
    return rows


@contextmanager
def _skipped(block: nn.Module) -> Iterator[None]:
    """The block passes its stream on."""
    block.forward = lambda x, memory=None, bias=None, memory_bias=None: x
    try:
        yield
    finally:
        del block.forward


def frame(rows: Iterable[tuple]) -> pd.DataFrame:
    """Tidy rows as a table with a nullable integer layer."""
    return pd.DataFrame(rows, columns=COLUMNS).astype({"layer": "Int64", "value": "float64"})


def _norms(entries: list[Entry], values: dict, dtype: torch.dtype) -> Tensor:
    return torch.stack(torch._foreach_norm([e.of(values[e.parameter]) for e in entries], 2, dtype=dtype))
