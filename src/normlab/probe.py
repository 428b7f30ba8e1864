"""Measurements from outside the model: nothing here leaves a gradient, an attribute, a hook or an RNG draw behind."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple

import pandas as pd
import torch
from torch import Tensor, nn

from normlab.model import Decoder, TensorId, tensors
from normlab.residual import Residual

Loss = Callable[[Tensor, Tensor], Tensor]
COLUMNS = ["stack", "layer", "site", "tensor", "stat", "value"]


class GradientMeter:
    """L2 norm of every weight tensor's gradient and of the whole update, on the device, at every step.

    One foreach call each. Sums run in float64: float32 squares overflow above 1e19 and vanish below 1e-23,
    where the norm of an exploding or a vanishing gradient would read inf or 0.
    """

    def __init__(self, model: Decoder) -> None:
        entries = list(tensors(model))
        self.ids = [tensor for tensor, _, _ in entries]
        self._views = [(p, None if rows == slice(0, p.shape[0]) else rows) for _, p, rows in entries]
        self._parameters = list(model.parameters())
        self._before = [torch.empty_like(p) for p in self._parameters]
        self._dtype = _sum_dtype(self._parameters[0].device)

    def gradients(self) -> Tensor:
        """(len(ids),) norms of the current .grad, before any clipping."""
        grads = [p.grad if rows is None else p.grad[rows] for p, rows in self._views if p.grad is not None]
        return torch.stack(torch._foreach_norm(grads, 2, dtype=self._dtype))

    def before_update(self) -> None:
        torch._foreach_copy_(self._before, [p.detach() for p in self._parameters])

    def update(self) -> Tensor:
        """Scalar: L2 norm of (weights now - weights at before_update), over the whole model."""
        torch._foreach_sub_(self._before, [p.detach() for p in self._parameters])
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self._before, 2, dtype=self._dtype)))


def profile(model: Decoder, loss: Loss, batches: Iterable[tuple[Tensor, Tensor]]) -> pd.DataFrame:
    """Per-layer gradients and activations over mini-batches, without an update. Tidy rows, columns COLUMNS.

    Weights: expected_weight_grad_norm, the Frobenius norm of the gradient averaged over the batches FIRST (Xiong et
    al. 2020, figure 3); mean_weight_grad_norm, the mean of the per-batch norms; weight_norm.
    Activations, RMS over batches, tokens and channels: stream_rms after each sublayer has joined; branch_rms of F's
    output; norm_input_rms. stream_grad_norm: mean over batches of the L2 norm of dL/d(stream).
    """
    entries = list(tensors(model))
    parameters = list(dict.fromkeys(p for _, p, _ in entries))
    dtype = _sum_dtype(parameters[0].device)
    total = [torch.zeros_like(p) for p in parameters]
    norms, activations, activation_keys, count = [], [], [], 0
    for inputs, targets in batches:
        with _watching(model) as seen:
            value = loss(inputs, targets)
        stream_keys = [key for key in seen if key[-1] == "stream_rms"]
        wanted = parameters + [seen[key] for key in stream_keys]
        grads = [g.detach() for g in torch.autograd.grad(value, wanted)]
        weight_grads, stream_grads = grads[: len(parameters)], grads[len(parameters) :]
        torch._foreach_add_(total, weight_grads)
        norms.append(_norms(entries, dict(zip(parameters, weight_grads, strict=True)), dtype))
        squares = [a.detach().to(dtype).square().mean() for a in seen.values()]
        lengths = [torch.linalg.vector_norm(g, dtype=dtype) for g in stream_grads]
        activations.append(torch.stack(squares + lengths))
        activation_keys = list(seen) + [(*key[:-1], "stream_grad_norm") for key in stream_keys]
        count += 1
    torch._foreach_div_(total, count)

    by_stat = {
        "expected_weight_grad_norm": _norms(entries, dict(zip(parameters, total, strict=True)), dtype),
        "mean_weight_grad_norm": torch.stack(norms).mean(0),
        "weight_norm": _norms(entries, {p: p.detach() for p in parameters}, dtype),
    }
    rows = [
        (*astuple(tensor), stat, value)
        for stat, values in by_stat.items()
        for (tensor, _, _), value in zip(entries, values.tolist(), strict=True)
    ]
    for key, value in zip(activation_keys, torch.stack(activations).mean(0).tolist(), strict=True):
        rows.append((*key, value**0.5 if key[-1].endswith("_rms") else value))
    return frame(rows)


def frame(rows: Iterable[tuple]) -> pd.DataFrame:
    """Tidy rows as a table with a nullable integer layer."""
    return pd.DataFrame(rows, columns=COLUMNS).astype({"layer": "Int64", "value": "float64"})


def _norms(entries: list[tuple[TensorId, nn.Parameter, slice]], values: dict, dtype: torch.dtype) -> Tensor:
    return torch.stack(torch._foreach_norm([values[p][rows] for _, p, rows in entries], 2, dtype=dtype))


def _sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


@contextmanager
def _watching(model: Decoder) -> Iterator[dict[tuple, Tensor]]:
    """Record the activations of one forward pass of the raw, uncompiled blocks: (stack, ..., stat) -> tensor."""
    seen: dict[tuple, Tensor] = {}
    handles, compiled = [], {}

    def watch(module: nn.Module, layer: int | None, site: str, tensor: str | None, stat: str) -> None:
        def hook(_module: nn.Module, args: tuple, output: Tensor) -> None:
            seen[("decoder", layer, site, tensor, stat)] = args[0] if stat == "norm_input_rms" else output

        handles.append(module.register_forward_hook(hook))

    try:
        watch(model.embed, None, "embed", None, "stream_rms")
        for layer, block in enumerate(model.blocks):
            if block._compiled_call_impl is not None:
                compiled[block], block._compiled_call_impl = block._compiled_call_impl, None
            for site, module in block.named_children():
                if isinstance(module, Residual):
                    site = site.removesuffix("_residual")
                    watch(module, layer, site, None, "stream_rms")
                    for name in module.norms:
                        watch(module.get_submodule(name), layer, site, name, "norm_input_rms")
                else:
                    watch(module, layer, site, None, "branch_rms")
        watch(model.final_norm, None, "final_norm", "norm", "norm_input_rms")
        yield seen
    finally:
        for handle in handles:
            handle.remove()
        for block, call in compiled.items():
            block._compiled_call_impl = call
