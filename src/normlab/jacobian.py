"""How a stack at given weights passes a small change of its input on: the Jacobian from embeddings to the last block.

Shapes: T tokens, D width, n = T D.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from normlab.model import EncoderDecoder, Model
from normlab.residual import first_stream

NOISE = 1e-15  # singular values below this share of the largest are rounding


@dataclass(frozen=True)
class Jacobian:
    """J = d(stream after the last block) / d(embedding output), without the final norm, of one sequence.

    The rows of the three arrays are the partial products through block 1, 2, ...: identity, the mean of the diagonal
    <J, I> / n; distance, ||J - I||_F / sqrt(n); gain, sigma_rms = ||J||_F / sqrt(n).
    """

    identity: np.ndarray
    distance: np.ndarray
    gain: np.ndarray
    singular_values: np.ndarray  # of the whole stack, n of them, largest first; see NOISE

    @property
    def growth(self) -> float:
        """lambda = log(sigma_rms) / blocks."""
        return float(np.log(self.gain[-1]) / len(self.gain))

    @property
    def spread(self) -> float:
        """Largest over median singular value, at most 1 / NOISE: a larger one is not resolved."""
        largest = self.singular_values[0]
        return float(largest / max(np.median(self.singular_values), NOISE * largest))


def measure(model: Model, inputs: Any) -> Jacobian:
    """The Jacobian of the stack that ends in the head. inputs: what Model.forward takes, a batch of one sequence."""
    identity, distance, gain = [], [], []
    J_nn = torch.empty(0)
    for J_nn in partial_products(model, inputs):
        eye = torch.eye(len(J_nn), dtype=J_nn.dtype)
        identity.append(J_nn.diagonal().mean().item())
        distance.append(torch.linalg.matrix_norm(J_nn - eye).item() / len(J_nn) ** 0.5)
        gain.append(torch.linalg.matrix_norm(J_nn).item() / len(J_nn) ** 0.5)
    values = torch.linalg.svdvals(J_nn).numpy()
    return Jacobian(np.array(identity), np.array(distance), np.array(gain), values)


def partial_products(model: Model, inputs: Any) -> Iterator[Tensor]:
    """(n, n) Jacobian of the stream after block 1, 2, ... with respect to the embedding output.

    In float64 and evaluation mode (no dropout; BatchNorm with its running statistics), on a copy on the CPU: the model
    stays as it is. A stream of a pair (resi_dual) is its first, the post-norm stream, which the second does not enter.
    An encoder's memory is held fixed.
    """
    model = copy.deepcopy(model).cpu().double().eval()
    stack = model.stacks[model.stack_names[-1]]
    memory = None
    with torch.no_grad():
        tokens_1T = inputs
        if isinstance(model, EncoderDecoder):
            source_1S, tokens_1T = inputs
            memory = model.encoder(source_1S)
        if len(tokens_1T) != 1:
            raise ValueError(f"a batch of {len(tokens_1T)} sequences; accepted: one")
        x = stack.enter(stack.embed(tokens_1T))
        bias = None if stack.relative is None else stack.relative(tokens_1T.shape[1])
    J_nn = torch.eye(first_stream(x).numel(), dtype=torch.float64)
    for block in stack.blocks:
        x, step_nn = _block(block, x, memory, bias)
        J_nn = step_nn @ J_nn
        yield J_nn


def _block(block: nn.Module, x: Any, memory: Tensor | None, bias: Tensor | None) -> tuple[Any, Tensor]:
    """(the stream after the block, (n, n) Jacobian of its first stream with respect to its first stream before)."""
    leaf = first_stream(x).clone().requires_grad_()
    # the fused attention kernel has no rule for a batch of gradients
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        after = block((leaf, x[1]) if isinstance(x, tuple) else leaf, memory, bias)
        out = first_stream(after)
        rows = torch.eye(out.numel(), dtype=out.dtype).view(-1, *out.shape)
        (grad,) = torch.autograd.grad(out, leaf, rows, is_grads_batched=True)
    after = tuple(stream.detach() for stream in after) if isinstance(after, tuple) else after.detach()
    return after, grad.flatten(1)
