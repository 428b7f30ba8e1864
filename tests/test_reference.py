"""The NumPy GPT-2 against normlab's model, against the published implementation, and on its own."""

import numpy as np
import pytest
import torch
import transformers
from conftest import compose

from normlab.model import build
from normlab.reference import gpt2
from normlab.tensors import tensors

VOCAB, DEPTH, WIDTH, HEADS, CONTEXT = 29, 3, 24, 4, 16
# normlab's name of a block's tensor -> GPT-2's; q, k and v stand for themselves
NAMES = {
    **{"attn.norm": "ln_1", "attn.qkv": "attn.c_attn", "attn.out": "attn.c_proj"},
    **{"ffn.norm": "ln_2", "ffn.in": "mlp.c_fc", "ffn.out": "mlp.c_proj"},
}


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (3, 13))


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """Gains and biases too: at 1 and 0 a wrong use of them would not show."""
    for name, parameter in model.named_parameters():
        gain = parameter.ndim == 1 and not name.endswith("bias")
        torch.nn.init.normal_(parameter, mean=float(gain), std=0.3)
    return model.double().eval()


def published(model) -> dict[str, np.ndarray]:
    """A normlab model's weights under GPT-2's names, matrices transposed to (in, out) and q, k, v fused again."""
    values = {(e.id.layer, f"{e.id.site}.{e.id.tensor}"): e.value.numpy() for e in tensors(model)}
    weights = {"wte.weight": values[None, "embed.token"], "wpe.weight": values[None, "embed.position"]}
    for kind, suffix in (("weight", ""), ("bias", "_bias")):
        weights[f"ln_f.{kind}"] = values[None, f"final_norm.norm{suffix}"]
        for layer in range(DEPTH):
            values[layer, f"attn.qkv{suffix}"] = np.concatenate([values[layer, f"attn.{t}{suffix}"] for t in "qkv"])
            for ours, theirs in NAMES.items():
                weights[f"h.{layer}.{theirs}.{kind}"] = values[layer, ours + suffix].T
    return weights


@torch.no_grad()
def test_normlab_s_gpt2_is_the_reference(tokens):
    cfg = compose(
        *("model=nano", "model.activation=gelu_tanh", "model.position=learned", "model.scale_embedding=false"),
        *("model.tie=true", f"model.depth={DEPTH}", f"model.width={WIDTH}", f"model.heads={HEADS}"),
        f"model.context={CONTEXT}",
    ).model
    model = randomised(build(cfg, VOCAB))
    got = gpt2(published(model), tokens.numpy(), HEADS)
    assert got.shape == (3, 13, VOCAB)
    np.testing.assert_allclose(model(tokens).numpy(), got, rtol=1e-9, atol=1e-12)


@torch.no_grad()
def test_the_published_implementation_is_the_reference(tokens):
    sizes = {"vocab_size": VOCAB, "n_layer": DEPTH, "n_embd": WIDTH, "n_head": HEADS, "n_positions": CONTEXT}
    special = {"bos_token_id": 0, "eos_token_id": 0}  # the defaults lie beyond this vocabulary
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **special, attn_implementation="eager"))
    randomised(model)
    weights = {name: w.numpy() for name, w in model.transformer.state_dict().items()}
    np.testing.assert_allclose(
        model(tokens).logits.numpy(), gpt2(weights, tokens.numpy(), HEADS), rtol=1e-9, atol=1e-12
    )


def small() -> dict[str, np.ndarray]:
    """One block of width 4, vocabulary 7, context 5."""
    block = {"ln_1": (4,), "attn.c_attn": (4, 12), "attn.c_proj": (4, 4), "ln_2": (4,)}
    block |= {"mlp.c_fc": (4, 9), "mlp.c_proj": (9, 4)}
    shapes = {"ln_f": (4,)} | {f"h.0.{name}": shape for name, shape in block.items()}
    shapes = {f"{name}.weight": shape for name, shape in shapes.items()} | {
        f"{name}.bias": shape[-1:] for name, shape in shapes.items()
    }
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=s) for name, s in ({"wte.weight": (7, 4), "wpe.weight": (5, 4)} | shapes).items()}


def test_a_future_token_never_changes_an_earlier_logit():
    tokens = np.array([[1, 2, 3, 4, 5]])
    before = gpt2(small(), tokens, heads=2)
    for t in range(5):
        changed = tokens.copy()
        changed[0, t] = 6
        after = gpt2(small(), changed, heads=2)
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t:] != before[:, t:]).any(-1).all()


def test_what_the_reference_refuses():
    with pytest.raises(KeyError, match=r"wpe\.weight"):
        gpt2({"wte.weight": np.ones((7, 4))}, np.array([[1]]), heads=2)
    for beyond in ([[7]], [[1] * 6]):
        with pytest.raises(IndexError):
            gpt2(small(), np.array(beyond), heads=2)
    with pytest.raises(ValueError, match="reshape"):
        gpt2(small(), np.array([[1]]), heads=3)
