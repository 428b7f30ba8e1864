"""Several models of one shape as one: parameters stacked, sequences one member after the other.

Shapes: M members; N = M * B sequences; T tokens, S of them as keys; D width, I inputs and O outputs of a map,
V vocabulary, H heads, K head width, E = N * H.
"""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normlab import norm
from normlab.attention import Attention
from normlab.head import IGNORED
from normlab.model import Embedding, Model, NumberEmbedding
from normlab.norm import wide
from normlab.objective import Batch
from normlab.residual import Residual, first_stream

Stacks = dict[Tensor, Tensor]  # parameters of the first model -> those of all, (M, *shape), which want gradients
# Modules whose parameters multiply or shift their input, element by element.
ELEMENTWISE = (norm.ScaleNorm, norm.DyT, Residual)
NARROW = 8  # head width up to which, on a CPU, attention of bmm's beats torch's fused one: a pack's step by 9 to 16 %
LONG = 256  # tokens up to which it does: it keeps the scores ...
SCORES = 2**18  # ... which it computes so many at a time, within the cache


class Stacked:
    """Losses of all members at once. stacks: their parameters."""

    def __init__(self, models: Sequence[Model], stacks: Stacks) -> None:
        self._members, self._numbers = len(models), isinstance(_embedding(models[0]).token, NumberEmbedding)
        self._twin = copy.deepcopy(models[0], {id(p): p for p in models[0].parameters()})
        for module in list(self._twin.modules()):
            for name, child in list(module.named_children()):
                module.add_module(name, _of_all(child, stacks))
            if isinstance(module, Attention) and module.softcap is None:
                module._mix = partial(attend, module)

    def losses(self, batches: Sequence[Batch], smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
        """(M,) each: what a member's training descends, and its plain loss."""
        inputs, targets = zip(*batches, strict=True)
        joined = tuple(map(torch.cat, zip(*inputs, strict=True))) if isinstance(inputs[0], tuple) else torch.cat(inputs)
        outputs, wanted = wide(self._twin(joined)), torch.cat(targets)
        if self._numbers:
            loss = self._means((outputs.squeeze(-1) - wanted).square())
            return loss, loss
        given = (wanted != IGNORED).view(self._members, -1).sum(1)
        each = partial(F.cross_entropy, outputs.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="none")
        loss = each().view(self._members, -1).sum(1) / given
        if not smoothing:
            return loss, loss
        return each(label_smoothing=smoothing).view(self._members, -1).sum(1) / given, loss

    def _means(self, each: Tensor) -> Tensor:
        return each.view(self._members, -1).mean(1)


def lacking(model: Model) -> str | None:
    """What of the model has no form for several members, None if all has."""
    known = {nn.Linear, nn.Embedding, NumberEmbedding, norm.LayerNorm, norm.RMSNorm, norm.ScaleNorm, norm.DyT}
    for name, module in model.named_modules():
        if isinstance(module, Embedding) and module.segment is not None:
            return f"{name}.segment"
        own = any(True for _ in module.parameters(recurse=False))
        if (own and type(module) not in known and not isinstance(module, Residual)) or name.endswith(".relative"):
            return f"{name} ({type(module).__name__})"
    return None


def _embedding(model: Model) -> Embedding:
    return model.stacks[model.stack_names[0]].embed


def _of_all(one: nn.Module, stacks: Stacks) -> nn.Module:
    """What stands for this module of the first member in the twin; itself if it has no parameters of its own."""
    if isinstance(one, Embedding):
        return _Embedding(one, stacks)
    if isinstance(one, nn.Linear):
        return _Linear(one, stacks)
    if isinstance(one, norm.LayerNorm | norm.RMSNorm):
        return _Norm(one, stacks)
    if isinstance(one, ELEMENTWISE) and any(True for _ in one.parameters(recurse=False)):
        return _Elementwise(one, stacks)
    return one


@final
class _Linear(nn.Module):
    """W_m x + b_m. (N, ..., I) -> (N, ..., O)."""

    def __init__(self, one: nn.Linear, stacks: Stacks) -> None:
        super().__init__()
        self.weight_MIO = stacks[one.weight].transpose(1, 2)
        self.bias_M1O = None if one.bias is None else stacks[one.bias].unsqueeze(1)

    def forward(self, x: Tensor) -> Tensor:
        x_MNI, weight, bias = x.reshape(len(self.weight_MIO), -1, x.shape[-1]), self.weight_MIO, self.bias_M1O
        y_MNO = torch.bmm(x_MNI, weight) if bias is None else torch.baddbmm(bias, x_MNI, weight)
        return y_MNO.view(*x.shape[:-1], -1)


@final
class _Norm(nn.Module):
    """N(x) g_m + b_m. (N, ..., D) -> (N, ..., D)."""

    def __init__(self, one: norm.LayerNorm | norm.RMSNorm, stacks: Stacks) -> None:
        super().__init__()
        self.eps, self.centred = one.eps, isinstance(one, norm.LayerNorm)
        self.offset = 0.0 if isinstance(one, norm.LayerNorm) else one.offset
        self.gain_M1D = None if one.weight is None else stacks[one.weight].unsqueeze(1)
        bias = one.bias if isinstance(one, norm.LayerNorm) else None
        self.bias_M1D = None if bias is None else stacks[bias].unsqueeze(1)

    def forward(self, x: Tensor) -> Tensor:
        normed = F.layer_norm if self.centred else F.rms_norm
        y = normed(x, x.shape[-1:], eps=self.eps)
        if self.gain_M1D is None:
            return y
        gain = self.offset + self.gain_M1D if self.offset else self.gain_M1D
        y_MND = y.view(len(gain), -1, x.shape[-1])
        return (y_MND * gain if self.bias_M1D is None else torch.addcmul(self.bias_M1D, y_MND, gain)).view(x.shape)


@final
class _Elementwise(nn.Module):
    """One of ELEMENTWISE; each member's parameters meet its own sequences. (N, ..., D) -> (N, ..., D)."""

    def __init__(self, one: nn.Module, stacks: Stacks) -> None:
        super().__init__()
        self.one = one
        self.stacks = {name: stacks[p] for name, p in one.named_parameters(recurse=False)}
        for name in self.stacks:
            delattr(one, name)  # from here on a plain attribute

    def forward(self, x: Any, *others: Any) -> Any:
        stream = first_stream(x)
        for name, stack in self.stacks.items():
            each = stack.view(len(stack), 1, *(1,) * (stream.ndim - stack.ndim), *stack.shape[1:])
            setattr(self.one, name, each.expand(-1, len(stream) // len(stack), *each.shape[2:]).flatten(0, 1))
        return self.one(x, *others)


@final
class _Embedding(nn.Module):
    """normlab.model.Embedding of all members, without segments. (N, T) -> (N, T, D)."""

    def __init__(self, one: Embedding, stacks: Stacks) -> None:
        super().__init__()
        assert not one.dropout
        self.scale, self.fixed_TD, self.numbers = one.scale, one.fixed_TD, isinstance(one.token, NumberEmbedding)
        self.token, self.token_MVD = one.token, stacks[one.token.weight]  # the first for its type, which models ask
        self.position_MTD = None if one.position is None else stacks[one.position.weight]
        self.norm = None if one.norm is None else _of_all(one.norm, stacks)

    def forward(self, tokens_NT: Tensor, segments: None = None) -> Tensor:
        (M, V, _), T = self.token_MVD.shape, tokens_NT.shape[1]
        tokens_MBT = tokens_NT.view(M, -1, T)
        if self.numbers:
            slope_MBTD, shift_MBTD = self.token_MVD[:, None, None].unbind(-2)
            x_MBTD = tokens_MBT[..., None] * slope_MBTD + shift_MBTD
        else:
            first = torch.arange(0, M * V, V, device=tokens_NT.device).view(-1, 1, 1)
            x_MBTD = F.embedding(tokens_MBT + first, self.token_MVD.flatten(0, 1))
        x_MBTD = x_MBTD * self.scale
        if self.position_MTD is not None:
            x_MBTD = x_MBTD + self.position_MTD[:, None, :T]
        if self.fixed_TD is not None:
            x_MBTD = x_MBTD + self.fixed_TD[:T]
        x_NTD = x_MBTD.flatten(0, 1)
        return x_NTD if self.norm is None else self.norm(x_NTD)


def attend(one: Attention, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """As Attention._mix without a cap: softmax of the scores, weighted mean of the values. (N, H, T, K) -> same.

    On a CPU, torch's fused kernel multiplies matrices of head width columns slowly where that is small.
    """
    causal = one.causal and bias is None
    if q.device.type != "cpu" or q.shape[-1] > NARROW or k.shape[-2] > LONG:
        mask = None if bias is None else bias.type_as(q)
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, scale=one.score_scale, enable_gqa=one.groups > 1
        )
    k, v = (x.repeat_interleave(one.groups, dim=1) if one.groups > 1 else x for x in (k, v))
    if causal:
        bias = q.new_full((1, 1, q.shape[-2], k.shape[-2]), -torch.inf).triu(1)
    return _Narrow.apply(q, k, v, bias, one.score_scale)


@final
class _Narrow(torch.autograd.Function):
    """Attention whose products have the tokens, not the few channels of a head, as their last dimension.

    MKL takes a third of the time for (K, S) (S, T) as for (T, S) (S, K). q, k, v (N, H, tokens, K); bias, which wants
    no gradient, (1 or N, 1 or H, 1 or T, S).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        N, H, T, K = q.shape
        size = max(1, SCORES // (H * T * k.shape[2]))  # sequences at a time
        q_EKT, k_EKS, v_EKS = (x.transpose(2, 3).flatten(0, 1) for x in (q, k, v))
        y_EKT, weights = torch.empty_like(q_EKT), []
        parts = [slice(H * start, H * min(N, start + size)) for start in range(0, N, size)]
        for part in parts:
            scores_ETS = torch.bmm(q_EKT[part].mT, k_EKS[part]).mul_(scale)
            if bias is not None:
                own = bias if len(bias) == 1 else bias[part.start // H : part.stop // H]
                scores_ETS.unflatten(0, (-1, H)).add_(own)
            weights.append(torch.softmax(scores_ETS, -1))
            torch.bmm(v_EKS[part], weights[-1].mT, out=y_EKT[part])
        ctx.save_for_backward(q_EKT, k_EKS, v_EKS, *weights)
        ctx.scale, ctx.parts = scale, parts
        return y_EKT.view(N, H, K, T).transpose(2, 3)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q_EKT, k_EKS, v_EKS, *weights = ctx.saved_tensors
        y_EKT = grads[0].transpose(2, 3).flatten(0, 1)
        dq_EKT, dk_EKS, dv_EKS = map(torch.empty_like, (q_EKT, k_EKS, v_EKS))
        for part, p_ETS in zip(ctx.parts, weights, strict=True):
            torch.bmm(y_EKT[part], p_ETS, out=dv_EKS[part])
            dp_ETS = torch.bmm(y_EKT[part].mT, v_EKS[part])
            ds_ETS = torch._softmax_backward_data(dp_ETS, p_ETS, -1, p_ETS.dtype).mul_(ctx.scale)
            torch.bmm(k_EKS[part], ds_ETS.mT, out=dq_EKT[part])
            torch.bmm(q_EKT[part], ds_ETS, out=dk_EKS[part])
        shape = grads[0].shape[:2]
        return *(d.unflatten(0, shape).transpose(2, 3) for d in (dq_EKT, dk_EKS, dv_EKS)), None, None
