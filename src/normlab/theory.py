"""What the theory expects at initialisation, recomputed for the config's activation, FFN width, norm and init.

Sources: Xiong et al. 2020 (arXiv 2002.04745), lemmas 1-2 and theorem 1, in the setting of one head, ReLU, d x d Xavier
matrices; DeepNet (2203.00555) for the constants of deepnorm; Curse of Depth (2502.05795) for lns; Peri-LN (2502.02732)
for the linear growth of sandwich. All else is derived here by lemma 2's computation: a linear map with independent
zero-mean weights of variance v multiplies a mean square by v * fan-in, and what it writes is uncorrelated with what it
is added to, so that mean squares add up. No token is followed: attention, which averages values, keeps an unknown share
of their mean square, which is why what it adds comes as bounds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from normlab.config_model import ModelConfig
from normlab.ffn import ACTIVATIONS
from normlab.init import GAINED, INITS, ONTO_STREAM
from normlab.residual import PLACEMENTS, Where, deepnorm_alpha
from normlab.tensors import TensorId

# Exponent s of (last FFN W_out gradient norm) ~ depth^s at initialisation, theorem 1.
LAST_FFN_SLOPE = {"post": 0.0, "pre": -0.5}

# Norms whose output has unit mean square whatever enters; True: what enters is divided by sqrt(mean square + eps).
UNIT_NORMS = {
    "layernorm": True,
    "layernorm_nobias": True,
    "rmsnorm": True,
    "rmsnorm_nogain": True,
    "rmsnorm_offset": True,
    "scalenorm": False,  # eps is a floor of the length
}


@dataclass(frozen=True)
class Form:
    """A placement as the theory sees it: x <- [N](skip x + [N_out] F(shrink [N](x)))."""

    normed_input: bool = True
    normed_sum: bool = False
    normed_branch: bool = False
    skip: Callable[[Where], float] = lambda where: 1.0
    shrink: Callable[[Where], float] = lambda where: 1.0


FORMS = {
    "pre": Form(),
    "post": Form(normed_input=False, normed_sum=True),
    "deepnorm": Form(normed_input=False, normed_sum=True, skip=deepnorm_alpha),
    "sandwich": Form(normed_branch=True),
    "lns": Form(shrink=lambda where: (where.layer + 1) ** -0.5),
}


@dataclass(frozen=True)
class Growth:
    """Bounds on E||x_l||^2 / d for l = 0..depth: attention adds nothing, or all of its value path's mean square."""

    lower: np.ndarray
    upper: np.ndarray


class Bounds(NamedTuple):
    lower: float
    upper: float

    @property
    def middle(self) -> float:
        """Geometric."""
        return (self.lower * self.upper) ** 0.5


def covers(cfg: ModelConfig) -> bool:
    """Whether there is a theory of this model: a unit-RMS norm, one dense FFN a block, no dropout, a row in FORMS."""
    known = cfg.placement in FORMS and cfg.norm in UNIT_NORMS and cfg.ffn == "dense" and cfg.dropout == 0
    return known and not (cfg.encoder and cfg.decoder and cfg.final_norm is False)  # the memory is then not unit-RMS


def hidden_growth(cfg: ModelConfig) -> Growth | None:
    """Expected mean square of the hidden state, of the decoder, or of the encoder where there is no decoder.

    pre (lemma 2): the stream after block l; each FFN adds phi, each attention between 0 (values average out) and the
    gain of its value path (one token attended to): between 1 + l/2 and 1 + 3l/2 in the paper's setting.
    post (lemma 2): what enters the block's last norm, 1 + phi; the stream itself is 1.
    deepnorm (derived; alpha and beta of DeepNet, table 1): what enters the block's last norm, alpha^2 + phi(beta).
    sandwich (derived; Peri-LN): the stream; every sublayer adds 1, less what eps takes of a branch as small as eps.
    lns (derived; Curse of Depth bounds it by Theta(L) from above): the stream; as pre, of an input that is sqrt(l)
    times smaller: for ReLU phi / l, a harmonic sum.
    """
    if not covers(cfg):
        return None
    tracks = [_track(cfg, attends=attends) for attends in (False, True)]
    lower, upper = (np.array([_start(cfg), *(step.shown for step in track)]) for track in tracks)
    return Growth(lower, upper)


def last_ffn_gradient(cfg: ModelConfig) -> Bounds | None:
    """Size of the last FFN's W_out gradient, up to a factor that is the same at every depth.

    Theorem 1's argument for a gradient of fixed size at the head's input: ||h|| / (RMS of what each norm above reads),
    h the FFN's hidden units (lemma 3: a norm's Jacobian scales as 1 / RMS of its input).
    pre: ||h|| is fixed, the final norm reads the stream: (1 + c L)^-1/2. post: both fixed: theorem 1's 0.
    deepnorm (derived): beta ||h|| / alpha, near -1/2. sandwich (derived): the branch norm reads phi, fixed, the final
    norm 1 + 2 L: near -1/2. lns (derived): ||h|| falls as L^-1/2 for ReLU and the stream grows as log L: below -1/2.
    A depth's own attention lies anywhere between the bounds. Where tokens grow alike with depth, so that it goes from
    the one bound towards the other, the exponent of pre and lns is steeper than either's.
    """
    if not covers(cfg):
        return None
    lower, upper = sorted(_track(cfg, attends=attends)[-1].gradient for attends in (False, True))
    return Bounds(lower, upper)


def post_gradient_factor(cfg: ModelConfig) -> tuple[float, float] | None:
    """Factor per block on the way back through post-norm's FFNs: (the norm alone, with the FFN's own gain).

    The norm alone: (1 + phi)^-1/2, the (2/3)^(1/2) of Xiong et al. 2020, appendix F, a step of an upper bound. The
    branch adds b = E||J_F^T g||^2 / ||g||^2 to the skip's 1 (derived), so that ((1 + b) / (1 + phi))^(1/2) is left: 1
    for ReLU, where b = phi. What attention does to either is not counted.
    """
    if not covers(cfg) or cfg.placement != "post":
        return None
    phi, b = ffn_gain(cfg), ffn_backward_gain(cfg)
    return (1 + phi) ** -0.5, ((1 + b) / (1 + phi)) ** 0.5


class _Step(NamedTuple):
    shown: float  # the block's mean square: of what enters its last norm, else of the stream after it
    gradient: float  # last_ffn_gradient, were this the last block


def _track(cfg: ModelConfig, *, attends: bool) -> list[_Step]:
    """Every block's mean squares; attention passes all of its values' mean square on, or next to nothing.

    Next to nothing is 0, but to a branch norm, which restores any direction, the mean of `context` unrelated values.
    """
    form, stack, steps = FORMS[cfg.placement], _stack(cfg), []
    share = 1.0 if attends else 1 / cfg.context if form.normed_branch else 0.0
    final = not form.normed_sum if cfg.final_norm is None else cfg.final_norm
    stream = _start(cfg)
    for layer in range(cfg.blocks(stack)):
        entering = gradient = 0.0
        for site in cfg.sites(stack):
            where = cfg.where(stack, layer, site)
            read = (_normed(cfg, stream) if form.normed_input else stream) * form.shrink(where) ** 2
            if site == "ffn":
                branch = ffn_gain(cfg, layer, read)
                gradient = hidden_square(cfg, layer, read) ** 0.5 * cfg.branch_scale(_stack(cfg))
            else:  # the memory that cross-attention reads comes out of a norm
                branch = share * attention_gain(cfg, layer, site) * (1.0 if site == "cross" else read)
            if form.normed_branch:
                gradient /= _divisor(cfg, branch)
                branch = _normed(cfg, branch)
            entering = form.skip(where) ** 2 * stream + branch
            stream = _normed(cfg, entering) if form.normed_sum else entering
        if form.normed_sum:
            gradient /= _divisor(cfg, entering)
        steps.append(_Step(entering, gradient / (_divisor(cfg, stream) if final else 1.0)))
    return steps


def ffn_gain(cfg: ModelConfig, layer: int = 0, read: float = 1.0) -> float:
    """phi = E||F(z)||^2 / d of an FFN that reads z of mean square `read`; 1/2 in the paper's setting (lemma 1)."""
    return _variance(cfg, layer, "ffn", "out") * hidden_square(cfg, layer, read) * cfg.branch_scale(_stack(cfg)) ** 2


def hidden_square(cfg: ModelConfig, layer: int, read: float) -> float:
    """E||h||^2 of the FFN's hidden units, for an input of mean square `read`."""
    inner = cfg.width * _variance(cfg, layer, "ffn", "in") * read  # of each pre-activation
    if not cfg.gated:
        return cfg.hidden * second_moment(cfg.activation, inner**0.5)
    gate = cfg.width * _variance(cfg, layer, "ffn", "gate") * read
    return cfg.hidden * inner * second_moment(cfg.activation, gate**0.5)


def ffn_backward_gain(cfg: ModelConfig, layer: int = 0, read: float = 1.0) -> float:
    """b = E||J^T g||^2 / ||g||^2 of the FFN's Jacobian at an input of mean square `read`."""
    out, into = _variance(cfg, layer, "ffn", "out"), _variance(cfg, layer, "ffn", "in")
    if not cfg.gated:
        moment = into * second_moment(cfg.activation, (cfg.width * into * read) ** 0.5, slope=True)
    else:
        gate = _variance(cfg, layer, "ffn", "gate")
        std = (cfg.width * gate * read) ** 0.5
        moment = gate * cfg.width * into * read * second_moment(cfg.activation, std, slope=True)
        moment += into * second_moment(cfg.activation, std)
    return out * cfg.hidden * cfg.width * moment * cfg.branch_scale(_stack(cfg)) ** 2


def attention_gain(cfg: ModelConfig, layer: int = 0, site: str = "attn") -> float:
    """E||W_out W_v z||^2 / ||z||^2: all that a token can pass on; 1 in the paper's setting."""
    value, out = (_variance(cfg, layer, site, tensor) for tensor in ("v", "out"))
    return cfg.width * value * cfg.heads * cfg.head_size * out * cfg.branch_scale(_stack(cfg)) ** 2


@lru_cache(maxsize=4096)
def second_moment(activation: str, std: float, *, slope: bool = False) -> float:
    """E[act(s z)^2], or of act'(s z), z ~ N(0, 1), by Gauss-Hermite quadrature.

    128 nodes; relative error below 1e-3 for ReLU.
    """
    nodes, weights = _nodes()
    points = torch.from_numpy(std * nodes).requires_grad_(slope)
    with torch.enable_grad():
        values = ACTIVATIONS[activation].fn(points)
        if slope:
            (values,) = torch.autograd.grad(values.sum(), points)
    return float((weights * values.numpy() ** 2).sum() / weights.sum())


@lru_cache(maxsize=1)
def _nodes() -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.hermite_e.hermegauss(128)


def _stack(cfg: ModelConfig) -> str:
    return "decoder" if cfg.decoder else "encoder"


def _start(cfg: ModelConfig) -> float:
    """E||x_0||^2 / d of the embeddings."""
    token = _std(cfg, TensorId(_stack(cfg), None, "embed", "token"), cfg.width, cfg.width) ** 2
    square = token * (cfg.width if cfg.scale_embedding else 1)
    square += token * ((cfg.position == "learned") + (cfg.segments > 0)) + 0.5 * (cfg.position == "sinusoidal")
    return _normed(cfg, square) if cfg.embed_norm else square


def _divisor(cfg: ModelConfig, square: float) -> float:
    return (square + (cfg.eps if UNIT_NORMS[cfg.norm] else 0.0)) ** 0.5


def _normed(cfg: ModelConfig, square: float) -> float:
    """Mean square after a norm."""
    return square / _divisor(cfg, square) ** 2 if square else 0.0


def _variance(cfg: ModelConfig, layer: int, site: str, tensor: str) -> float:
    """Of each initial weight of a block's matrix."""
    heads = cfg.heads * cfg.head_size
    fan_in, fan_out = {
        ("attn", "v"): (cfg.width, cfg.key_heads * cfg.head_size),
        ("attn", "out"): (heads, cfg.width),
        ("ffn", "in"): (cfg.width, cfg.hidden),
        ("ffn", "gate"): (cfg.width, cfg.hidden),
        ("ffn", "out"): (cfg.hidden, cfg.width),
    }["attn" if site == "cross" else site, tensor]
    return _std(cfg, TensorId(_stack(cfg), layer, site, tensor), fan_in, fan_out) ** 2


def _std(cfg: ModelConfig, tensor: TensorId, fan_in: int, fan_out: int) -> float:
    """What init.initialise draws with."""
    scheme = INITS[cfg.init]
    std = scheme.std(tensor, fan_in, fan_out, cfg)
    if tensor.layer is not None and tensor.tensor in GAINED:
        where = cfg.where(tensor.stack, tensor.layer, tensor.site)
        std *= PLACEMENTS[scheme.gain_of or cfg.placement].gain(where)
        scaled = scheme.depth_scaled if cfg.init_depth_scale is None else cfg.init_depth_scale
        if scaled and tensor.tensor in ONTO_STREAM:
            std /= where.sublayers**0.5
    return std
