"""Which of torch's kernels a run uses: TensorFloat-32 products, the attention kernel; chosen and told."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from normlab.attention import Attention
from normlab.config import Config
from normlab.device import pick_device
from normlab.explain import ConfigError
from normlab.model import Model

ATTENTION = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_NAMES = {backend: name for name, backend in ATTENTION.items()}
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def chosen(cfg: Config, device: torch.device) -> Iterator[None]:
    """cfg.tf32 and cfg.attention are in force inside, what was before afterwards. Raises ConfigError as `check` does.

    tf32 through torch.set_float32_matmul_precision, which sets the old and the new switches alike: with
    torch.backends.cuda.matmul.fp32_precision alone, torch 2.13's compiler raises where it reads the old one.
    """
    check(cfg)  # a job may have another device than the machine that launched it
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("high" if cfg.tf32 else "highest")
        if cfg.attention != "auto":
            stack.enter_context(sdpa_kernel([ATTENTION[cfg.attention]]))
        yield


class _Asked(TorchFunctionMode):
    """Asks, before each attention of a forward pass, which kernel torch will take for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.found.add(_choice(*args, **kwargs))
        return func(*args, **kwargs)


def _choice(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *args: Any, **kwargs: Any) -> str:
    """What scaled_dot_product_attention will choose, of these inputs as autocast casts them."""
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        q, k, v = (t.to(dtype) for t in (q, k, v))
        mask = None if mask is None else mask.to(dtype)
    return _NAMES.get(SDPBackend(torch._fused_sdp_choice(q, k, v, mask, *args, **kwargs)), "other")


def attention_used(model: Model, inputs: Any, autocast: torch.autocast) -> str | None:
    """The kernels of the model's attentions in training, in one word, or several where they differ.

    math: torch's unfused operations, and this project's own where model.attn_softcap writes the scores out. One
    forward pass of the first sequence of `inputs` by the raw blocks, which leaves no trace. None: torch does not tell.
    """
    first = tuple(t[:1] for t in inputs) if isinstance(inputs, tuple) else inputs[:1]
    devices = {p.device for p in model.parameters()}
    if any(device.type not in {"cpu", "cuda"} for device in devices):
        return None
    was_training = model.training
    model.eval()  # norms keep their running statistics
    for module in model.modules():
        if isinstance(module, Attention):
            module.training = True  # dropout excludes kernels
    try:
        with torch.random.fork_rng(d for d in devices if d.type == "cuda"), autocast, _Asked() as asked:
            model(first)
    finally:
        model.train(was_training)
    return ", ".join(sorted(asked.found)) or "math"


def check(cfg: Config) -> None:
    """Raise ConfigError if this machine's device has not the CUDA graphs or the attention kernel that cfg asks for."""
    model, device = cfg.model, pick_device(cfg.device)
    if cfg.compile == "reduce-overhead" and device.type != "cuda":
        raise ConfigError(
            f"compile=reduce-overhead records CUDA graphs: the device is {device.type}; accepted: false, true, whole"
        )
    if cfg.attention == "auto":
        return
    if model.attn_softcap is not None and cfg.attention != "math":
        raise ConfigError(f"attention={cfg.attention}: model.attn_softcap writes the scores out; accepted: auto, math")
    possible = [name for name in ATTENTION if _serves(name, cfg, device)]
    if cfg.attention not in possible:
        raise ConfigError(
            f"attention={cfg.attention}: this model has no such kernel on {device.type} at precision={cfg.precision}; "
            f"accepted: {', '.join(['auto', *possible])}"
        )


def _serves(name: str, cfg: Config, device: torch.device) -> bool:
    """Whether this kernel takes a sequence of the context's length, forward and backward."""
    model, T = cfg.model, cfg.model.context
    how: dict[str, Any] = {"dtype": NARROW.get(cfg.precision, torch.float32), "device": device, "requires_grad": True}
    q = torch.zeros(1, T, model.heads, model.head_size, **how).transpose(1, 2)
    k = torch.zeros(1, T, model.key_heads, model.head_size, **how).transpose(1, 2)
    masks: list[Tensor | None] = [None]
    if model.position == "relative":
        masks = [torch.zeros(1, model.heads, T, T, **how)]
    elif cfg.data.name == "parallel":  # padding
        masks.append(torch.zeros(1, 1, 1, T, **how).detach())
    with sdpa_kernel([ATTENTION[name]]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reasons, a line each
        try:
            for mask in masks:
                causal = mask is None and model.arch != "encoder"
                grouped = model.heads != model.key_heads
                F.scaled_dot_product_attention(
                    q, k, k, mask, model.dropout, causal, enable_gqa=grouped
                ).sum().backward()
        except RuntimeError:
            return False
    return True
