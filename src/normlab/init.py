"""Initial weights: one function per scheme, one generator per tensor.

Each tensor's draw depends on the seed and its own address only, so one seed gives every arm the same numbers for the
tensors that they share, whatever else the arm contains.
"""

import hashlib
from collections.abc import Callable

import torch

from normlab.config import InitName, ModelConfig
from normlab.model import Decoder, TensorId, tensors
from normlab.residual import PLACEMENTS

Scheme = Callable[[TensorId, int, int, int], float]
GAINED = {"v", "out", "in", "gate"}  # the tensors of a block that a placement's init gain multiplies


def _xavier(tensor: TensorId, fan_in: int, fan_out: int, depth: int) -> float:
    """sqrt(2 / (fan_in + fan_out)) (Glorot & Bengio 2010); embeddings width^-1/2 (Vaswani et al. 2017)."""
    return fan_in**-0.5 if tensor.site == "embed" else (2 / (fan_in + fan_out)) ** 0.5


def _xiong(tensor: TensorId, fan_in: int, fan_out: int, depth: int) -> float:
    """Xavier with W_q = W_k = 0: uniform attention, the theory setting of Xiong et al. 2020, section 3.3."""
    return 0.0 if tensor.tensor in {"q", "k"} else _xavier(tensor, fan_in, fan_out, depth)


def _gpt2(tensor: TensorId, fan_in: int, fan_out: int, depth: int) -> float:
    """0.02, and 0.02 / sqrt(2 depth) for the two projections onto the stream (Radford et al. 2019, section 2.3)."""
    return 0.02 / (2 * depth) ** 0.5 if tensor.layer is not None and tensor.tensor == "out" else 0.02


INITS: dict[InitName, Scheme] = {"xavier": _xavier, "xiong": _xiong, "gpt2": _gpt2}


@torch.no_grad()
def initialise(model: Decoder, cfg: ModelConfig, seed: int) -> None:
    """Fill every weight in place: matrices normal with the scheme's std, biases 0; norms keep gain 1 and bias 0."""
    gain = PLACEMENTS[cfg.placement].gain(cfg.depth)
    for tensor, parameter, rows in tensors(model):
        if tensor.tensor.endswith("_bias"):
            parameter[rows].zero_()
        elif parameter.ndim == 2:
            fan_out, fan_in = parameter[rows].shape
            std = INITS[cfg.init](tensor, fan_in, fan_out, cfg.depth)
            if tensor.layer is not None and tensor.tensor in GAINED:
                std *= gain
            draw = torch.randn(fan_out, fan_in, generator=_generator(seed, tensor))
            parameter[rows].copy_(std * draw)


def _generator(seed: int, tensor: TensorId) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{tensor}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
