"""Every module's gradient, to its inputs and to all its parameters, against central differences in float64."""

import pytest
import torch
from conftest import compose
from torch import nn
from torch.autograd.gradcheck import GradcheckError, gradcheck

from normlab.attention import Attention
from normlab.ffn import ACTIVATIONS, FFN, MoE
from normlab.head import HEADS, IGNORED
from normlab.model import Embedding, Stack, build
from normlab.norm import NORMS
from normlab.position import RelativeBias, Rotary
from normlab.residual import PLACEMENTS

# Heads that together are wider than the stream, so that no two sizes are equal by chance.
TINY = ["model.width=4", "model.heads=2", "model.head_width=3", "model.ffn_width=3", "model.context=5"]


def config(*overrides: str):
    return compose(*TINY, *overrides).model


def randomised(module: nn.Module) -> nn.Module:
    """In float64 and away from initial values: where they are 0 or 1, a wrong gradient can be right."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, mean=0.3, std=0.5)
    return module.double()


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def check(f, *inputs: torch.Tensor, of: nn.Module, whole: bool = True) -> None:
    """The gradient of f() to `inputs` and to the parameters of `of`, which gradcheck moves in place.

    whole: every entry of the Jacobian; otherwise, for what has many weights, one random projection of it per tensor.
    """
    variables = (*inputs, *of.parameters())
    assert gradcheck(lambda *_: f(), variables, eps=1e-6, atol=1e-7, rtol=1e-5, fast_mode=not whole)


@pytest.mark.parametrize("whole", [True, False])
def test_a_wrong_gradient_is_found(whole):
    module, x = randomised(nn.Linear(2, 2)), draw(3, 2)
    check(lambda: module(x), x, of=module, whole=whole)
    for wrong in (lambda: nn.functional.linear(x, module.weight.detach()), lambda: module(x.detach())):
        with pytest.raises(GradcheckError, match="Jacobian mismatch"):
            check(wrong, x, of=module, whole=whole)


@pytest.mark.parametrize("name", NORMS)
def test_norm(name):
    norm, x = randomised(NORMS[name].make(4, 1e-3)), draw(2, 3, 4)
    check(lambda: norm(x), x, of=norm)
    norm.eval()  # BatchNorm's running statistics have moved by now
    check(lambda: norm(x), x, of=norm)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_ffn(name):
    ffn = randomised(FFN(4, 3, name, bias=True, inner_norm=NORMS["rmsnorm"].make(3, 1e-5), scale=0.5))
    x = draw(2, 3, 4)
    assert (ffn.w_gate or ffn.w_in)(x).abs().min() > 1e-4  # no kink of a ReLU within reach of the differences
    check(lambda: ffn(x), x, of=ffn)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_mixture_of_experts_with_its_router_and_balance(activation, k):
    moe = randomised(MoE(4, 3, activation, experts=4, k=k, inner_norm=NORMS["rmsnorm"].make(3, 1e-5), scale=0.5))
    x = draw(2, 3, 4)
    ranked = moe.w_router(x).sort(-1, descending=True).values
    assert k == 4 or (ranked[..., k - 1] - ranked[..., k]).min() > 1e-4  # the choice stays as it is
    check(lambda: (moe(x), moe.balance), x, of=moe)


@pytest.mark.parametrize(
    ("inner", "overrides"),
    [
        *[("", []), ("", ["model.kv_heads=1"]), ("", ["model.qk_norm=head"]), ("head_scale", []), ("attn_out", [])],
        *[("qkv", ["model.kv_heads=1"]), ("", ["model.qk_norm=joint", "model.kv_heads=1"])],
        ("", ["model.attn_softcap=0.7", "model.kv_heads=1"]),
        ("", ["model.init=completep", "model.bias=false"]),  # its own scales of scores and branch
    ],
)
@pytest.mark.parametrize("kind", ["causal", "bidirectional", "cross"])
def test_attention(kind, inner, overrides):
    cfg = config(*overrides)
    attn = randomised(Attention(cfg, causal=kind == "causal", cross=kind == "cross", inner=frozenset({inner})))
    x, memory = draw(1, 3, 4), draw(1, 4, 4)
    inputs = (x, memory) if kind == "cross" else (x,)
    check(lambda: attn(*inputs), *inputs, of=attn)


@pytest.mark.parametrize("softcap", ["null", "0.7"])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_with_positions(causal, softcap):
    """Rotary and relative together, grouped queries: to the bias's table too."""
    cfg = config("model.head_width=4", "model.kv_heads=1", f"model.attn_softcap={softcap}")
    attn, relative = Attention(cfg, causal=causal, rotary=Rotary(2, 4, 100.0)), RelativeBias(2, 4, causal)
    both, x = randomised(nn.ModuleList([attn, relative])), draw(2, 4, 4)
    check(lambda: attn(x, None, relative(4)), x, of=both)


@pytest.mark.parametrize("rotated", [2, 6])
def test_rotary(rotated):
    rotary, x = Rotary(rotated, 5, 100.0).double(), draw(1, 2, 4, 6)
    check(lambda: rotary(x), x, of=rotary)


@pytest.mark.parametrize("causal", [True, False])
def test_relative_bias(causal):
    relative = randomised(RelativeBias(2, 20, causal))  # 20: into the logarithmic buckets
    check(lambda: relative(20)[relative(20).isfinite()], of=relative)


@pytest.mark.parametrize("position", ["learned", "sinusoidal"])
def test_embedding(position):
    tokens, segments = torch.tensor([[1, 2, 1, 5]]), torch.tensor([[0, 0, 1, 1]])
    plain = randomised(Embedding(config(f"model.position={position}"), vocab=6))
    check(lambda: plain(tokens), of=plain)
    cfg = config(f"model.position={position}", "model.segments=2", "model.embed_norm=true")
    segmented = randomised(Embedding(cfg, vocab=6))
    check(lambda: segmented(tokens, segments), of=segmented)


@pytest.mark.parametrize("name", HEADS)
def test_head(name):
    head, x = randomised(HEADS[name](config(f"model.head_bias={name == 'lm'}", "model.arch=encoder"), 5)), draw(2, 3, 4)
    check(lambda: head(x), x, of=head)


@pytest.mark.parametrize("arch", ["decoder", "encoder_decoder"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placement(placement, arch):
    """A stack's blocks, with cross-attention where there is an encoder: the stream after them, and its final norm."""
    depth = 4 if placement == "mix_ln" else 2  # its first quarter is Post
    cfg = config(f"model.placement={placement}", f"model.arch={arch}", f"model.depth={depth}")
    stack = randomised(Stack(cfg, "decoder", vocab=1))
    x, memory = draw(1, 3, 4), draw(1, 2, 4)

    def run():
        stream = PLACEMENTS[placement].enter(x)
        for block in stack.blocks:
            stream = block(stream, memory)
        return (*(stream if isinstance(stream, tuple) else (stream,)), stack.final_norm(stream))

    inputs = (x, memory) if arch == "encoder_decoder" else (x,)
    check(run, *inputs, of=nn.ModuleList([stack.blocks, stack.final_norm]), whole=False)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.arch=decoder", "model.ffn=moe", "model.experts=3", "model.position=relative"],
        ["model.arch=decoder", "model.tie=false", "model.logit_softcap=2", "model.activation=swiglu"],
        ["model.arch=encoder", "model.head=mlm", "model.segments=2", "model.position=sinusoidal"],
        ["model.arch=encoder_decoder", "model.encoder_depth=1", "model.position=relative", "model.placement=resi_dual"],
    ],
)
def test_loss_of_a_model(overrides):
    cfg = config("model.depth=2", *overrides)
    model = randomised(build(cfg, vocab=5))
    tokens, targets = torch.tensor([[1, 2, 4], [0, 2, 2]]), torch.tensor([[2, 4, IGNORED], [2, 2, 3]])
    inputs = (torch.tensor([[3, 1], [4, 0]]), tokens) if cfg.arch == "encoder_decoder" else tokens
    check(lambda: model.objective(inputs, targets), of=model, whole=False)
