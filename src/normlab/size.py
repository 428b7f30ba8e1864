"""How big a model is before any of it is allocated: its parameters by part, the memory of training it.

Weights lie on the meta device, activations are fake tensors of a CPU: both have shapes and no storage. Assumed: fp32,
eager, one device, nothing recomputed; the temporaries of single operations come on top.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from normlab import optim, task
from normlab.config import Config, ModelConfig
from normlab.ffn import MoE
from normlab.model import Model, build
from normlab.tensors import TensorId, count_parameters, tensors


def vocabulary(cfg: Config) -> int | None:
    """The preset's own, else the data's (numbers: None); a pooler has no task and reads what a masked-LM head would."""
    trained = cfg.model_copy(update={"model": cfg.model.model_copy(update={"head": "lm"})})
    return cfg.model.vocab or task.make(trained).vocab


def on_meta(cfg: ModelConfig, vocab: int | None) -> Model:
    """The model, without storage."""
    with torch.device("meta"):
        return build(cfg, vocab)


def parts(model: Model) -> dict[str, dict[int | None, int]]:
    """Part -> block, None outside them -> trainable numbers; a tied weight once, in the part that comes first."""
    found: dict[str, dict[int | None, int]] = defaultdict(lambda: defaultdict(int))
    for entry in tensors(model):
        found[_part(entry.id)][entry.id.layer] += entry.value.numel()
    return found


def _part(tensor: TensorId) -> str:
    if tensor.layer is not None:
        on_stream = "norm" in tensor.tensor or "scale" in tensor.tensor
        return f"{tensor.stack} {'norms and scales' if on_stream else tensor.site}"
    if tensor.site == "embed":
        return f"{tensor.stack} {'token' if tensor.tensor == 'token' else 'position and other'} embedding"
    return "head" if tensor.site == "head" else f"{tensor.stack} final norm"


def active(model: Model) -> int:
    """Parameters that one token meets: all but the experts that it is not sent to."""
    mixtures = [m for m in model.modules() if isinstance(m, MoE)]
    experts = [(p, m.k) for m in mixtures for name, p in m.named_parameters() if name.startswith("expert_")]
    return count_parameters(model) - sum(p[0].numel() * (len(p) - k) for p, k in experts)


def optimizer_bytes(model: Model, cfg: Config) -> int:
    """Bytes of the optimizer's state after one update, step counters included. Leaves gradients on the model."""
    optimizer = optim.make(model, cfg.optim, cfg.model)
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    optimizer.step()
    return sum(t.nbytes for kept in optimizer.state.values() for t in kept.values() if isinstance(t, Tensor))


def saved_bytes(module: nn.Module, run: Callable[[], Any]) -> int:
    """Bytes that autograd keeps for the backward pass of run(), each storage once, beside what the module holds."""
    held = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, Tensor] = {}  # by storage; holding the tensors, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(t.untyped_storage().nbytes() for storage, t in kept.items() if storage not in held)


def activation_bytes(cfg: Config, vocab: int | None, *, fused: bool = True) -> int:
    """Bytes kept from the forward pass of a batch of sequences of model.context tokens to its backward pass.

    fused: attention keeps no scores where torch's CPU kernel serves: no dropout, softcap or learned bias.
    """
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH] if fused else [SDPBackend.MATH]
    with FakeTensorMode(), sdpa_kernel(kernels):
        model = build(cfg.model, vocab)
        tokens = torch.zeros(cfg.sequences, cfg.model.context, dtype=torch.float if vocab is None else torch.long)
        inputs = (tokens, tokens) if cfg.model.arch == "encoder_decoder" else tokens
        return saved_bytes(model, lambda: model.objective(inputs, tokens))


def report(cfg: Config) -> str:
    """Two tables: parameters by part; memory of a training step."""
    vocab = vocabulary(cfg)
    model = on_meta(cfg.model, vocab)
    lines = [f"{'part':40}{'per block':>20}{'blocks':>8}{'parameters':>20}"]
    for part, by_block in parts(model).items():
        each = "" if None in by_block else " to ".join(f"{n:,}" for n in sorted(set(by_block.values())))
        lines.append(f"{part:40}{each:>20}{len(by_block) if each else '':>8}{sum(by_block.values()):>20,}")
    total = count_parameters(model)
    lines.append(f"{'total, tied weights once':68}{total:>20,}")
    lines += [f"{'active for a token':68}{active(model):>20,}"] if cfg.model.ffn == "moe" else []
    fixed = {"weights": 4 * total, "gradients": 4 * total, "optimizer state": optimizer_bytes(model, cfg)}
    setting = f"{cfg.optim.name}, fp32, eager, {cfg.sequences} x {cfg.model.context:,} tokens to each stack"
    lines += ["", setting, *(_row(name, size) for name, size in fixed.items())]
    if cfg.model.head == "pooler":
        return "\n".join([*lines, "activations: not measured, model.head=pooler has no loss"])
    for how, fused in (("", True), (", attention keeping its scores", False)):
        kept = activation_bytes(cfg, vocab, fused=fused)
        lines += [_row(f"activations{how}", kept), _row(f"total{how}", sum(fixed.values()) + kept)]
    return "\n".join(lines)


def _row(name: str, size: int) -> str:
    scale, unit = (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")
    return f"{name:68}{size / scale:>16,.2f} {unit}"
