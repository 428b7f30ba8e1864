"""The logical weight tensors of a model: one address each, the same in every arm that has the tensor."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from normlab.model import Model


@dataclass(frozen=True)
class TensorId:
    """The address of one weight tensor; layer is None outside the blocks."""

    stack: str  # encoder, decoder
    layer: int | None
    site: str  # attn, cross, ffn, embed, head, final_norm
    tensor: str  # q, k, v, out, in, gate, norm, norm_out, token, position, ... + _bias

    def __str__(self) -> str:
        layer = "" if self.layer is None else f".{self.layer}"
        return f"{self.stack}{layer}.{self.site}.{self.tensor}"


@dataclass(frozen=True)
class Entry:
    """A logical tensor: a parameter, or some rows of a fused one."""

    id: TensorId
    parameter: nn.Parameter
    rows: slice | None  # None: the whole parameter

    def of(self, whole: Tensor) -> Tensor:
        """This tensor's part of something shaped like the parameter: its values, its gradient."""
        return whole if self.rows is None else whole[self.rows]

    @property
    def value(self) -> Tensor:
        return self.of(self.parameter.detach())


def tensors(model: Model) -> Iterator[Entry]:
    """Every logical weight tensor once.

    A weight that several places share has the address of the first: a tied head is 'embed', ReZero's scalar 'attn'.
    """
    for name, parameter in model.named_parameters():
        stack, layer, owner, words = _parsed(name, list(model.stacks)[-1])
        site = {"relative": "embed"}.get(owner, owner.removesuffix("_residual"))
        module = model.get_submodule(name.split(f".{owner}.")[0] + f".{owner}") if layer is not None else model
        fused: dict[str, int] | None = getattr(module, "fused", {}).get(words[0])
        if fused is None:
            yield Entry(TensorId(stack, layer, site, _joined(words)), parameter, None)
            continue
        start = 0
        for part, rows in fused.items():
            yield Entry(
                TensorId(stack, layer, site, _joined([part, *words[1:]])), parameter, slice(start, start + rows)
            )
            start += rows


def _parsed(name: str, last_stack: str) -> tuple[str, int | None, str, list[str]]:
    """'decoder.blocks.3.attn.w_out.bias' -> (decoder, 3, attn, [w_out, bias]). The head belongs to the last stack."""
    stack, *path = name.split(".") if not name.startswith("head.") else [last_stack, *name.split(".")]
    if path[0] == "blocks":
        return stack, int(path[1]), path[2], path[3:]
    owner, *words = path
    if owner in {"final_norm", "relative"}:  # their module is the tensor itself, or holds just it
        words = [owner.removeprefix("final_"), *(w for w in words if w not in {"norm", "table"})]
    return stack, None, owner, words


def _joined(words: list[str]) -> str:
    return "_".join(w.removeprefix("w_") for w in words if w != "weight")


def count_parameters(model: nn.Module) -> int:
    """Trainable numbers, tied weights once."""
    return sum(p.numel() for p in model.parameters())
