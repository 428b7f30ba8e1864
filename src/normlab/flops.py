"""How much arithmetic a token of training takes, and how much a device could do."""

import re

import torch
from torch import nn

from normlab import size
from normlab.attention import Attention
from normlab.model import Model

# Peak dense TFLOP/s by device name, no sparsity, fp32 accumulation: NVIDIA's data sheets of each (their sparse numbers
# halved), GA102 and AD102 whitepapers for the GeForce cards. No entry: not a format of that device's matrix units.
_HOPPER_SXM = {"fp32": 67.0, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5}
_HOPPER_NVL = {"fp32": 60.0, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5}
PEAK_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"\bH[12]00 NVL\b", _HOPPER_NVL),
    (r"\bH100 PCIe\b", {"fp32": 51.0, "tf32": 378.0, "bf16": 756.5, "fp16": 756.5}),
    (r"\bH[12]00\b", _HOPPER_SXM),
    (r"\bA100\b", {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}),
    (r"\bA10\b", {"fp32": 31.2, "tf32": 62.5, "bf16": 125.0, "fp16": 125.0}),
    (r"\bL4\b", {"fp32": 30.3, "tf32": 60.0, "bf16": 121.0, "fp16": 121.0}),
    (r"\bV100-SXM\d", {"fp32": 15.7, "fp16": 125.0}),
    (r"\bV100-PCIE\b", {"fp32": 14.0, "fp16": 112.0}),
    (r"\bT4\b", {"fp32": 8.1, "fp16": 65.0}),
    (r"\bRTX 4090$", {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2}),
    (r"\bRTX 3090$", {"fp32": 35.6, "tf32": 35.6, "bf16": 71.0, "fp16": 71.0}),
)


def per_token(model: Model, length: float) -> float:
    """Operations of a training step by token: 6 N + 12 L H Q T (Chowdhery et al. 2022, PaLM, appendix B).

    N: parameters that a token is multiplied with, so without looked-up embeddings, and of experts those it is sent to.
    L: attention layers, cross-attention counted as one more; H heads of width Q; T = length, tokens that one looks at.
    Masked scores count, recomputation does not. Of two stacks: a token of the target with one of the source.
    """
    attentions = [m for m in model.modules() if isinstance(m, Attention)]
    scores = sum(12 * m.w_out.in_features * length for m in attentions)
    return 6 * (size.active(model) - _looked_up(model)) + scores


def _looked_up(model: Model) -> int:
    """Numbers of the embedding tables; not of one that is the head's matrix too."""
    tables = {t for stack in model.stacks.values() for m in stack.embed.modules() if isinstance(m, nn.Embedding)
              for t in m.parameters()}  # fmt: skip
    return sum(p.numel() for p in tables - set(model.head.parameters()))


def peak(name: str, precision: str) -> float | None:
    """FLOP/s of the device with this name at fp32, tf32, bf16 or fp16; None where it is not known, or a part (MIG)."""
    if "MIG" in name:
        return None
    found = next((numbers for pattern, numbers in PEAK_TFLOPS if re.search(pattern, name)), {})
    return found[precision] * 1e12 if precision in found else None


def utilisation(
    per_token: float, tokens_per_second: float | None, device: str, precision: str, count: int
) -> float | None:
    """Model FLOPs utilisation: what the model needs over what `count` such devices could do (PaLM, appendix B)."""
    most = peak(device, precision)
    return None if most is None or tokens_per_second is None else per_token * tokens_per_second / (count * most)


def peak_memory_mb(device: torch.device) -> float | None:
    """Largest memory of the run's tensors, MiB; None off CUDA: a process's own maximum is of all its runs."""
    return torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
