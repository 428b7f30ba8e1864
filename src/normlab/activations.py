"""Statistics of one forward pass, taken from outside the model: hooks and nothing else, all gone afterwards.

Every statistic is a scalar per (stack, layer, site, tensor, stat); `merged` says how batches combine.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normlab.attention import Attention
from normlab.ffn import MoE
from normlab.model import Block, Model
from normlab.norm import BatchNorm, wide
from normlab.residual import first_stream

Key = tuple[str, int | None, str, str | None, str]


@dataclass
class Seen:
    """What one forward pass showed."""

    values: dict[Key, Tensor] = field(default_factory=dict)
    streams: dict[Key, Tensor] = field(default_factory=dict)  # with their graph, for gradients
    logits: Tensor | None = None


def stream_statistics(x: Tensor) -> dict[str, Tensor]:
    """Of a residual stream (B, T, D).

    stream_rms: sqrt mean x^2. token_cosine: mean cosine of two tokens of a sequence (rank collapse: Dong et al. 2021).
    max_abs; top1_over_median: of |x| (massive activations: Sun et al. 2024). kurtosis of the channels' RMS s_j:
    mean s^4 / (mean s^2)^2, 1 to D (He et al. 2024, arXiv 2405.19279). mean_over_std: |mean| / std over a token's
    channels, mean over tokens; where it is 0, LayerNorm and RMSNorm are one.
    """
    x = wide(x.detach())
    size, T = x.abs(), x.shape[1]
    unit = x / x.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    pairs = (unit.sum(1).square().sum(-1) - T) / max(T * (T - 1), 1)
    channel = x.square().mean((0, 1))
    return {
        "stream_rms": x.square().mean().sqrt(),
        "token_cosine": pairs.mean(),
        "max_abs": size.max(),
        "top1_over_median": size.max() / size.median(),
        "mean_over_std": (x.mean(-1).abs() / x.std(-1, correction=0).clamp_min(1e-30)).mean(),
        "kurtosis": channel.square().mean() / channel.mean().square(),
    }


def angular_distance(x: Tensor, y: Tensor) -> Tensor:
    """arccos(cos(x_t, y_t)) / pi, mean over tokens, 0 to 1 (Gromov et al. 2024, arXiv 2403.17887)."""
    x, y = x.detach().double().flatten(0, 1), y.detach().double().flatten(0, 1)
    cosine = torch.nn.functional.cosine_similarity(x, y, dim=-1, eps=1e-30)
    return (cosine.clamp(-1, 1).arccos() / torch.pi).mean()


def attention_statistics(scores_BHTS: Tensor) -> tuple[Tensor, Tensor]:
    """(largest score, (H,) entropies): -sum_s p log p, nats, mean over queries (Zhai et al. 2023, arXiv 2303.06296)."""
    scores_BHTS = wide(scores_BHTS.detach())
    p = scores_BHTS.softmax(-1)
    return scores_BHTS.max(), torch.special.entr(p).sum(-1).mean((0, 2))


def merged(stat: str, values: Tensor) -> Tensor:
    """(batches,) of one statistic -> one number: the largest of largest ones, RMS of RMS, else the mean."""
    if stat in {"max_abs", "attn_logit_max"}:
        return values.max()
    return values.square().mean().sqrt() if stat.endswith("_rms") else values.mean()


@contextmanager
def watching(model: Model) -> Iterator[Seen]:
    """Record one forward pass, of the raw modules where the model is compiled.

    Leaves hooks, attributes, the running statistics of norms and the random generator as they were.
    """
    seen, handles, wrapped = Seen(), [], []
    statistics = {b: b.clone() for m in model.modules() if isinstance(m, BatchNorm) for b in m.buffers()}
    try:
        for name, stack in model.stacks.items():
            _watch_stream(seen, stack.embed, (name, None, "embed", None), handles)
            for layer, block in enumerate(stack.blocks):
                assert isinstance(block, Block)
                _watch_block(seen, block, name, layer, handles, wrapped)
            final = stack.final_norm
            _watch_norm(seen, getattr(final, "norm", final), (name, None, "final_norm", "norm"), handles)
        handles.append(model.register_forward_hook(_keep_logits(seen, list(model.stacks)[-1])))
        devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            yield seen
    finally:
        for handle in handles:
            handle.remove()
        for attention in wrapped:
            del attention._mix
        with torch.no_grad():
            for buffer, before in statistics.items():
                buffer.copy_(before)


def _mean_square(x: Tensor) -> Tensor:
    return wide(x.detach()).square().mean()


def _watch_stream(seen: Seen, module: nn.Module, place: tuple[str, int | None, str, None], handles: list) -> None:
    def hook(_module: nn.Module, _args: tuple, output: Any) -> None:
        x = first_stream(output)
        seen.streams[(*place, "stream_rms")] = x
        seen.values |= {(*place, stat): value for stat, value in stream_statistics(x).items()}

    handles.append(module.register_forward_hook(hook))


def _watch_norm(seen: Seen, module: nn.Module, place: tuple[str, int | None, str, str], handles: list) -> None:
    def hook(_module: nn.Module, args: tuple, output: Tensor) -> None:
        seen.values[(*place, "norm_input_rms")] = _mean_square(args[0]).sqrt()
        seen.values[(*place, "norm_output_rms")] = _mean_square(output).sqrt()

    if not isinstance(module, nn.Identity):  # where there is no norm
        handles.append(module.register_forward_hook(hook))


def _watch_block(seen: Seen, block: Block, name: str, layer: int, handles: list, wrapped: list) -> None:
    """Branches, the residuals that they join, the norms there, the scores, the turn from a block's start to its end."""
    branches: list[Tensor] = []
    residuals = [site for site in ("attn", "cross", "ffn") if hasattr(block, f"{site}_residual")]

    def watch_branch(site: str) -> None:
        def hook(_module: nn.Module, _args: tuple, output: Tensor) -> None:
            branches.append(output.detach())
            seen.values[(name, layer, site, None, "branch_rms")] = _mean_square(output).sqrt()

        handles.append(getattr(block, site).register_forward_hook(hook))

    def watch_residual(site: str) -> None:
        residual, sums = getattr(block, f"{site}_residual"), []

        def keep_sum(_module: nn.Module, args: tuple, _output: Tensor) -> None:
            sums.append(args[0].detach())

        def hook(_module: nn.Module, args: tuple, output: Any) -> None:
            total = wide(sums.pop() if sums else first_stream(output).detach())
            joining = wide(sum(branches[1:], branches[0]))
            branches.clear()
            if residual.treated:
                joining = total - wide(first_stream(args[0]).detach())
            share = joining.var(correction=0) / total.var(correction=0)
            seen.values[(name, layer, site, None, "branch_share")] = share

        if residual.outer is not None:
            handles.append(residual.get_submodule(residual.outer).register_forward_hook(keep_sum))
        handles.append(residual.register_forward_hook(hook))
        _watch_stream(seen, residual, (name, layer, site, None), handles)
        for norm in residual.norms:
            _watch_norm(seen, residual.get_submodule(norm), (name, layer, site, norm), handles)

    def turn(_module: nn.Module, args: tuple, output: Any) -> None:
        place = (name, layer, residuals[-1], None, "angular_distance")
        seen.values[place] = angular_distance(first_stream(args[0]), first_stream(output))
        if isinstance(block.ffn, MoE) and block.ffn.load is not None:
            for e, share in enumerate(block.ffn.load):
                seen.values[(name, layer, "ffn", f"expert_{e}", "expert_load")] = share

    for site in ("attn", "cross", "ffn"):
        module = getattr(block, site)
        if module is not None:
            watch_branch(site)
        if isinstance(module, Attention):
            _watch_scores(seen, module, (name, layer, site))
            wrapped.append(module)
    for site in residuals:
        watch_residual(site)
    handles.append(block.register_forward_hook(turn))


def _watch_scores(seen: Seen, attention: Attention, place: tuple[str, int, str]) -> None:
    mix = attention._mix

    def recorded(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        with torch.no_grad():
            largest, entropies = attention_statistics(attention.scores(q, k, bias))
        seen.values[(*place, None, "attn_logit_max")] = largest
        for head, entropy in enumerate(entropies):
            seen.values[(*place, f"head_{head}", "attn_entropy")] = entropy
        return mix(q, k, v, bias)

    attention._mix = recorded


def _keep_logits(seen: Seen, stack: str) -> Any:
    def hook(_module: nn.Module, _args: tuple, output: Tensor) -> None:
        seen.logits = wide(output.detach())
        seen.values[(stack, None, "head", None, "logit_rms")] = seen.logits.square().mean().sqrt()
        seen.values[(stack, None, "head", None, "log_z")] = seen.logits.logsumexp(-1).mean()

    return hook
