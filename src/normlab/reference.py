"""GPT-2 in NumPy float64, written from its equations: a forward pass that shares no code with what it checks.

Radford et al. 2019: pre-norm blocks, learned positions, causal attention, tanh GELU, output head tied to the embedding.
Names and layouts of the weights are the published checkpoint's: matrices are (in, out), used as x W + b.

Shapes: B batch, T queries, S keys, D width, V vocabulary, H heads, K = D / H head width.
"""

import math
from collections.abc import Mapping

import numpy as np

Weights = Mapping[str, np.ndarray]
EPS = 1e-5


def gpt2(weights: Weights, tokens: np.ndarray, heads: int) -> np.ndarray:
    """Logits LN_f(x_N) W_te^T, where x_0[t] = W_te[token_t] + W_pe[t] and x_{l+1} = block_l(x_l). (B, T) -> (B, T, V).

    As many blocks as `weights` holds; other entries, such as the checkpoint's masks, are not read. Raises KeyError for
    a missing weight, IndexError for a token beyond the vocabulary or a text beyond the context, ValueError where the
    heads do not divide the width.
    """
    w = {name: np.asarray(weight, dtype=np.float64) for name, weight in weights.items()}
    x_BTD = w["wte.weight"][tokens] + w["wpe.weight"][np.arange(tokens.shape[1])]
    depth = len({name.split(".")[1] for name in w if name.startswith("h.")})
    for layer in range(depth):
        x_BTD = block(_under(w, f"h.{layer}"), x_BTD, heads)
    return layer_norm(_under(w, "ln_f"), x_BTD) @ w["wte.weight"].T


def block(w: Weights, x_BTD: np.ndarray, heads: int) -> np.ndarray:
    """h = x + attention(LN_1(x)); h + mlp(LN_2(h)). (B, T, D) -> (B, T, D)."""
    h_BTD = x_BTD + attention(_under(w, "attn"), layer_norm(_under(w, "ln_1"), x_BTD), heads)
    return h_BTD + mlp(_under(w, "mlp"), layer_norm(_under(w, "ln_2"), h_BTD))


def attention(w: Weights, x_BTD: np.ndarray, heads: int) -> np.ndarray:
    """[q, k, v] = x W + b; concat over heads of softmax(q k^T / sqrt(K), keys up to t) v; then W_proj, b_proj.

    (B, T, D) -> (B, T, D).
    """
    B, T, D = x_BTD.shape
    q_BHTK, k_BHSK, v_BHSK = (
        part.reshape(B, T, heads, -1).transpose(0, 2, 1, 3)
        for part in np.split(linear(_under(w, "c_attn"), x_BTD), 3, axis=-1)
    )
    scores_BHTS = q_BHTK @ k_BHSK.swapaxes(-1, -2) / math.sqrt(D / heads)
    past_TS = np.arange(T)[:, None] >= np.arange(T)
    y_BHTK = softmax(np.where(past_TS, scores_BHTS, -np.inf)) @ v_BHSK
    return linear(_under(w, "c_proj"), y_BHTK.transpose(0, 2, 1, 3).reshape(B, T, D))


def mlp(w: Weights, x_BTD: np.ndarray) -> np.ndarray:
    """W_proj gelu(W_fc x + b_fc) + b_proj, token by token. (B, T, D) -> (B, T, D)."""
    return linear(_under(w, "c_proj"), gelu(linear(_under(w, "c_fc"), x_BTD)))


def linear(w: Weights, x: np.ndarray) -> np.ndarray:
    """x W + b. (..., in) -> (..., out)."""
    return x @ w["weight"] + w["bias"]


def layer_norm(w: Weights, x: np.ndarray) -> np.ndarray:
    """(x - mean) / sqrt(var + eps) * g + b over the last axis, biased variance (Ba et al. 2016). Shape kept."""
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPS) * w["weight"] + w["bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (Hendrycks & Gimpel 2016, arXiv 1606.08415). Shape kept."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x: np.ndarray) -> np.ndarray:
    """exp(x) / sum exp(x) over the last axis; less its maximum first, which cancels and avoids overflow. Shape kept."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _under(weights: Weights, prefix: str) -> Weights:
    """The weights named prefix.NAME, by NAME."""
    return {name.removeprefix(f"{prefix}."): w for name, w in weights.items() if name.startswith(f"{prefix}.")}
