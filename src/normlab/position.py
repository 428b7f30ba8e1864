"""Positions: fixed sinusoids, rotations of q and k, relative biases on the scores, masks of padding.

Shapes: B batch, H heads, T tokens (S of them as keys), K head width, D width.
"""

import math

import torch
from torch import Tensor, nn


def sinusoid(context: int, width: int) -> Tensor:
    """PE[t, 2i] = sin(t / 10000^(2i/D)), PE[t, 2i+1] = cos(same) (Vaswani et al. 2017, section 3.5). (T, D)."""
    angle = _angles(context, width, 10000.0)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)[:, :width].float()


class Rotary(nn.Module):
    """Rotates the pair (x_i, x_{i+R/2}) of position t by the angle t * base^(-2i/R). (B, H, T, K) -> same.

    R = the first `rotated` of the K channels; the others pass (Su et al. 2021, arXiv 2104.09864; GPT-NeoX halves).
    """

    cos_TR: Tensor
    sin_TR: Tensor

    def __init__(self, rotated: int, context: int, base: float) -> None:
        super().__init__()
        angle = _angles(context, rotated, base).repeat(1, 2)
        self.rotated = rotated
        self.register_buffer("cos_TR", angle.cos().float(), persistent=False)
        self.register_buffer("sin_TR", angle.sin().float(), persistent=False)

    def forward(self, x_BHTK: Tensor) -> Tensor:
        T = x_BHTK.shape[-2]
        x, rest = x_BHTK[..., : self.rotated], x_BHTK[..., self.rotated :]
        a, b = x.chunk(2, dim=-1)
        turned = x * self.cos_TR[:T] + torch.cat((-b, a), dim=-1) * self.sin_TR[:T]
        return (torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned).type_as(x_BHTK)


class RelativeBias(nn.Module):
    """A learned bias per head and bucketed distance, added to the scores of every block. -> (1, H, T, T).

    Raffel et al. 2020 (arXiv 1910.10683), section 2.1: exact up to a few tokens, then logarithmic up to 128, further
    ones share the last bucket. Causal: keys after the query get -inf, and all buckets serve the past.
    """

    bucket_TT: Tensor
    BUCKETS, FAR = 32, 128

    def __init__(self, heads: int, context: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.table = nn.Embedding(self.BUCKETS, heads)
        distance = torch.arange(context)[:, None] - torch.arange(context)  # query - key
        buckets = self.BUCKETS if causal else self.BUCKETS // 2
        side = torch.zeros_like(distance) if causal else buckets * (distance < 0)
        distance = distance.clamp(min=0) if causal else distance.abs()
        exact = buckets // 2
        ratio = distance.clamp(min=1).float() / exact  # float32, as in the published code: bucket edges depend on it
        far = exact + (ratio.log() / math.log(self.FAR / exact) * (buckets - exact)).long()
        bucket = side + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))
        self.register_buffer("bucket_TT", bucket, persistent=False)

    def forward(self, length: int) -> Tensor:
        bias_HTT = self.table(self.bucket_TT[:length, :length]).permute(2, 0, 1)
        if self.causal:
            future = torch.ones(length, length, dtype=torch.bool, device=bias_HTT.device).triu(1)
            bias_HTT = bias_HTT.masked_fill(future, -math.inf)
        return bias_HTT[None]


def key_mask(present_BS: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores so that no query sees padding: 0 where a key is present, else -inf. (B, 1, 1, S).

    A sequence of nothing but padding keeps its keys: its outputs are ignored, but a softmax over nothing is NaN.
    """
    present_BS = present_BS | ~present_BS.any(-1, keepdim=True)
    mask_BS = torch.zeros(present_BS.shape, dtype=dtype, device=present_BS.device)
    return mask_BS.masked_fill(~present_BS, -math.inf)[:, None, None]


def _angles(context: int, width: int, base: float) -> Tensor:
    """t * base^(-2i/width) in float64, (T, ceil(width / 2))."""
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    return torch.arange(context, dtype=torch.float64)[:, None] * frequency
