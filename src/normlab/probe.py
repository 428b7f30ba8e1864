"""Measurements from outside the model: nothing here leaves a gradient, an attribute, a hook or an RNG draw behind."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from normlab.ffn import MoE
from normlab.model import Model
from normlab.norm import BatchNorm
from normlab.residual import Residual
from normlab.tensors import Entry, tensors

Loss = Callable[[Any, Tensor], Tensor]
COLUMNS = ["stack", "layer", "site", "tensor", "stat", "value"]


class GradientMeter:
    """L2 norm of every weight tensor's gradient and of the whole update, on the device, at every step.

    One foreach call each. Sums run in float64: float32 squares overflow above 1e19 and vanish below 1e-23,
    where the norm of an exploding or a vanishing gradient would read inf or 0.
    """

    def __init__(self, model: Model) -> None:
        self._entries = list(tensors(model))
        self.ids = [entry.id for entry in self._entries]
        self._parameters = list(model.parameters())
        self._before = [torch.empty_like(p) for p in self._parameters]
        self._dtype = _sum_dtype(self._parameters[0].device)

    def gradients(self) -> Tensor:
        """(len(ids),) norms of the current .grad, before any clipping."""
        grads = [e.of(e.parameter.grad) for e in self._entries if e.parameter.grad is not None]
        return torch.stack(torch._foreach_norm(grads, 2, dtype=self._dtype))

    def before_update(self) -> None:
        torch._foreach_copy_(self._before, [p.detach() for p in self._parameters])

    def update(self) -> Tensor:
        """Scalar: L2 norm of (weights now - weights at before_update), over the whole model."""
        torch._foreach_sub_(self._before, [p.detach() for p in self._parameters])
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self._before, 2, dtype=self._dtype)))


def profile(model: Model, loss: Loss, batches: Iterable[tuple[Any, Tensor]]) -> pd.DataFrame:
    """Per-layer gradients and activations over mini-batches, without an update. Tidy rows, columns COLUMNS.

    The model stays in the mode that it is in: training, where a step's own gradient is wanted.
    Weights: expected_weight_grad_norm, the Frobenius norm of the gradient averaged over the batches FIRST (Xiong et
    al. 2020, figure 3); mean_weight_grad_norm, the mean of the per-batch norms; weight_norm.
    Activations, RMS over batches, tokens and channels: stream_rms after each sublayer has joined; branch_rms of F's
    output; norm_input_rms. stream_grad_norm: mean over batches of the L2 norm of dL/d(stream). expert_load: share of
    the tokens that each expert gets.
    """
    entries = list(tensors(model))
    parameters = list(dict.fromkeys(e.parameter for e in entries))
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
        loads = _expert_loads(model)
        activations.append(torch.stack(squares + lengths + [value.to(dtype) for value in loads.values()]))
        activation_keys = [*seen, *((*key[:-1], "stream_grad_norm") for key in stream_keys), *loads]
        count += 1
    torch._foreach_div_(total, count)

    by_stat = {
        "expected_weight_grad_norm": _norms(entries, dict(zip(parameters, total, strict=True)), dtype),
        "mean_weight_grad_norm": torch.stack(norms).mean(0),
        "weight_norm": torch.stack(torch._foreach_norm([e.value for e in entries], 2, dtype=dtype)),
    }
    rows = [
        (*astuple(entry.id), stat, value)
        for stat, values in by_stat.items()
        for entry, value in zip(entries, values.tolist(), strict=True)
    ]
    for key, value in zip(activation_keys, torch.stack(activations).mean(0).tolist(), strict=True):
        rows.append((*key, value**0.5 if key[-1].endswith("_rms") else value))
    return frame(rows)


def frame(rows: Iterable[tuple]) -> pd.DataFrame:
    """Tidy rows as a table with a nullable integer layer."""
    return pd.DataFrame(rows, columns=COLUMNS).astype({"layer": "Int64", "value": "float64"})


def _norms(entries: list[Entry], values: dict, dtype: torch.dtype) -> Tensor:
    return torch.stack(torch._foreach_norm([e.of(values[e.parameter]) for e in entries], 2, dtype=dtype))


def _sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


def _expert_loads(model: Model) -> dict[tuple, Tensor]:
    """The share of the last forward pass's tokens that each expert got; even is k / experts."""
    return {
        (name, layer, "ffn", f"expert_{e}", "expert_load"): share
        for name, stack in model.stacks.items()
        for layer, block in enumerate(stack.blocks)
        if isinstance(block.ffn, MoE) and block.ffn.load is not None
        for e, share in enumerate(block.ffn.load)
    }


@contextmanager
def _watching(model: Model) -> Iterator[dict[tuple, Tensor]]:
    """Record the activations of one forward pass of the raw, uncompiled blocks: (stack, ..., stat) -> tensor.

    Leaves the running statistics of norms and the random generator as they were.
    """
    seen: dict[tuple, Tensor] = {}
    handles, compiled = [], {}
    statistics = {b: b.clone() for m in model.modules() if isinstance(m, BatchNorm) for b in m.buffers()}

    def watch(module: nn.Module, key: tuple) -> None:
        def hook(_module: nn.Module, args: tuple, output: Any) -> None:
            if key[-1] == "norm_input_rms":
                seen[key] = args[0]
            else:  # of a pair of streams, the first
                seen[key] = output[0] if isinstance(output, tuple) else output

        handles.append(module.register_forward_hook(hook))

    try:
        for name, stack in model.stacks.items():
            watch(stack.embed, (name, None, "embed", None, "stream_rms"))
            for layer, block in enumerate(stack.blocks):
                if block._compiled_call_impl is not None:
                    compiled[block], block._compiled_call_impl = block._compiled_call_impl, None
                for site, module in block.named_children():
                    if isinstance(module, Residual):
                        site = site.removesuffix("_residual")
                        watch(module, (name, layer, site, None, "stream_rms"))
                        for norm in module.norms:
                            watch(module.get_submodule(norm), (name, layer, site, norm, "norm_input_rms"))
                    else:
                        watch(module, (name, layer, site, None, "branch_rms"))
            final = stack.final_norm
            watch(getattr(final, "norm", final), (name, None, "final_norm", "norm", "norm_input_rms"))
        devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
        with torch.random.fork_rng(devices):
            yield seen
    finally:
        for handle in handles:
            handle.remove()
        for block, call in compiled.items():
            block._compiled_call_impl = call
        with torch.no_grad():
            for buffer, before in statistics.items():
                buffer.copy_(before)
