"""What the theory expects at initialisation, recomputed for the config's activation, FFN ratio and init.

Source: Xiong et al. 2020 (arXiv 2002.04745), lemmas 1-2 and theorem 1, generalised from its setting (ReLU, FFN ratio 1,
Xavier, unit-RMS norm outputs) by the same variance computation.
"""

from dataclasses import dataclass

import numpy as np
import torch

from normlab.ffn import ACTIVATIONS, ffn_width

# Exponent s of (last FFN W_out gradient norm) ~ depth^s at initialisation, theorem 1.
LAST_FFN_SLOPE = {"post": 0.0, "pre": -0.5}


@dataclass(frozen=True)
class Growth:
    """Bounds on E||x_l||^2 / d as start + slope * l for l = 0..depth."""

    lower: np.ndarray
    upper: np.ndarray


def hidden_growth(placement: str, depth: int, ffn_increment: float) -> Growth | None:
    """Lemma 2 for the placements that it covers, else None.

    pre: the stream after block l; each FFN adds ffn_increment, each attention between 0 (values average out) and 1
    (each token attends to one). post: the input of the second norm, 1 + ffn_increment at every l > 0.
    """
    blocks = np.arange(depth + 1)
    if placement == "pre":
        return Growth(1 + ffn_increment * blocks, 1 + (1 + ffn_increment) * blocks)
    if placement == "post":
        flat = np.full(depth + 1, 1 + ffn_increment)
        return Growth(flat, flat)
    return None


def ffn_increment(width: int, ratio: float, activation: str) -> float:
    """E||FFN(z)||^2 / d for z ~ N(0, I) and Xavier weights; 1/2 for ReLU at ratio 1 (lemma 1)."""
    gated = ACTIVATIONS[activation].gated
    hidden = ffn_width(width, ratio, gated)
    variance = 2 / (width + hidden)  # of each weight
    inner = width * variance  # of each pre-activation
    moment = second_moment(activation, inner**0.5)
    return hidden * variance * moment * (inner if gated else 1.0)


def second_moment(activation: str, std: float) -> float:
    """E[act(s z)^2], z ~ N(0, 1), by Gauss-Hermite quadrature (128 nodes; relative error below 1e-3 for ReLU)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(128)
    values = ACTIVATIONS[activation].fn(torch.from_numpy(std * nodes)).numpy()
    return float((weights * values**2).sum() / weights.sum())
