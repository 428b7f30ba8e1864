"""The published models: exact sizes, their narrow twins, and what the size command says of them."""

import resource
import runpy
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, compose
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from normlab import size
from normlab.init import initialise
from normlab.model import build
from normlab.optim import OPTIMIZERS
from normlab.tensors import count_parameters

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "gpt3": 174_604_259_328,
    "llama_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "mistral_7b": 7_241_732_096,
    "mixtral_8x7b": 46_702_792_704,
    "gemma_2b": 2_506_172_416,
    "gemma_7b": 8_537_680_896,
    "gemma2_9b": 9_241_705_984,
    "olmo2_7b": 7_298_617_344,
    "qwen2_7b": 7_615_616_512,
    "deepseek_7b": 6_910_365_696,
    "phi2": 2_779_683_840,
    "gptj_6b": 6_050_882_784,
    "bart_base": 139_420_416,
    "bart_large": 406_291_456,
    "t5_base": 222_903_552,
}
POOLED = {"bert_base": 109_482_240, "bert_large": 335_141_888}  # the bare encoder: model.head=pooler
PALM = {"palm_8b": 8.63e9, "palm_62b": 62.50e9, "palm_540b": 540.35e9}  # the paper's table 1
TWINS = {
    "gpt2_depth12": "gpt2",
    "gpt2_depth48": "gpt2_xl",
    "gpt3_depth96": "gpt3",
    "llama3_8b_depth32": "llama3_8b",
    "llama3_70b_depth80": "llama3_70b",
    "llama3_405b_depth126": "llama3_405b",
    "mixtral_depth32": "mixtral_8x7b",
    "gemma2_depth42": "gemma2_9b",
    "olmo2_depth32": "olmo2_7b",
    "palm_depth118": "palm_540b",
    "bert_depth24": "bert_large",
    "bart_depth12": "bart_large",
    "t5_depth12": "t5_base",
}


def preset(name: str, *overrides: str) -> nn.Module:
    cfg = compose(f"model={name}", "data=markov", *overrides)
    return size.on_meta(cfg.model, size.vocabulary(cfg))


def test_every_preset_is_counted_here_and_says_whose_it_is():
    files = {path.stem: path.read_text() for path in (ROOT / "conf/model").glob("*.yaml")}
    assert files.keys() - {"nano", "small"} == {*PUBLISHED, *POOLED, *PALM, *TWINS}
    assert all(text.startswith("# ") for text in files.values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_exactly_the_published_models(name):
    model = preset(name)
    assert count_parameters(model) == PUBLISHED[name]
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("name", POOLED)
def test_bert_with_its_pooler(name):
    assert count_parameters(preset(name, "model.head=pooler")) == POOLED[name]


def test_bert_with_its_masked_lm_head():
    assert count_parameters(preset("bert_base")) == 109_514_298


@pytest.mark.parametrize("name", PALM)
def test_palm_is_the_papers_to_its_digits(name):
    assert count_parameters(preset(name)) == pytest.approx(PALM[name], rel=1e-3)


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_keeps_everything_but_the_width(name):
    twin, whole = compose(f"model={name}").model, compose(f"model={TWINS[name]}").model
    scaled = {"width", "heads", "kv_heads", "head_width", "ffn_width", "context", "vocab"}
    assert twin.model_dump(exclude=scaled) == whole.model_dump(exclude=scaled)
    assert twin.vocab is None
    multi_query = whole.key_heads == twin.key_heads == 1
    assert multi_query or twin.heads // twin.key_heads == whole.heads // whole.key_heads
    assert twin.hidden / twin.width == pytest.approx(whole.hidden / whole.width)
    assert twin.heads * twin.head_size / twin.width == whole.heads * whole.head_size / whole.width
    assert count_parameters(preset(name)) < 60e6


def test_the_door_knows_the_presets():
    command = [sys.executable, str(ROOT / "experiments/train.py"), "--cfg", "job", "model=llama3_8b"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "kv_heads: 8" in done.stdout


SHAPES = [
    [],
    ["model.position=rotary", "model.kv_heads=2", "model.norm=rmsnorm", "model.activation=swiglu", "model.bias=false"],
    ["model.arch=encoder", "model.head=mlm", "model.segments=2", "model.embed_norm=true", "model.placement=post"],
    ["model.arch=encoder_decoder"],
    ["model.arch=encoder_decoder", "model.position=relative", "model.norm=rmsnorm"],
    ["model.ffn=moe", "model.activation=swiglu", "model.tie=false"],
    ["model.attn_softcap=5.0", "model.logit_softcap=5.0", "model.placement=sandwich", "model.norm=rmsnorm_offset"],
    ["model.dropout=0.1", "model.placement=parallel", "model.qk_norm=joint"],
    ["model.placement=normformer", "model.norm=dyt"],
]
SMALL = ["data=markov", "data.vocab=16", "data.batch_size=2", "model.width=32", "model.context=16", "model.depth=2"]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: " ".join(shape) or "nano")
def test_parts_add_up_and_the_activations_are_those_of_the_real_model(shape):
    cfg = compose(*SMALL, *shape)
    vocab = size.vocabulary(cfg)
    assert vocab == 16 + (cfg.model.arch == "encoder")
    model = build(cfg.model, vocab)
    initialise(model, cfg.model, 0)
    parts = size.parts(model)
    assert sum(sum(by_block.values()) for by_block in parts.values()) == count_parameters(model)
    tokens = torch.zeros(2, 16, dtype=torch.long)
    inputs = (tokens, tokens) if cfg.model.arch == "encoder_decoder" else tokens
    assert size.activation_bytes(cfg, vocab) == size.saved_bytes(model, lambda: model.objective(inputs, tokens))
    with sdpa_kernel(SDPBackend.MATH):
        scored = size.saved_bytes(model, lambda: model.objective(inputs, tokens))
    assert size.activation_bytes(cfg, vocab, fused=False) == scored


def test_parts_by_hand():
    """Width D = 8, FFN 32, vocabulary 5, context 4, keel: its first block has one norm fewer."""
    cfg = compose("model.width=8", "model.heads=2", "model.context=4", "model.depth=2", "model.placement=keel")
    assert size.parts(size.on_meta(cfg.model, 5)) == {
        "decoder token embedding": {None: 5 * 8},
        "decoder position and other embedding": {None: 4 * 8},
        "decoder attn": dict.fromkeys((0, 1), 4 * 8 * 8 + 4 * 8),
        "decoder ffn": dict.fromkeys((0, 1), 2 * 8 * 32 + 32 + 8),
        "decoder norms and scales": {0: 3 * 16, 1: 4 * 16},
    }


def test_a_token_of_mixtral_meets_two_of_its_eight_experts():
    assert size.active(preset("mixtral_8x7b")) == 46_702_792_704 - 32 * 6 * 3 * 4096 * 14336
    assert size.active(preset("mistral_7b")) == PUBLISHED["mistral_7b"]


def test_saved_activations_by_hand():
    """Kept: the input (4, 3) of one matrix, the ReLU's output (4, 5) for itself and for the next, y (4, 2) of y^2."""
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    x = torch.ones(4, 3)
    assert size.saved_bytes(net, lambda: net(x).square().sum()) == 4 * (4 * 3 + 4 * 5 + 4 * 2)
    with torch.no_grad():
        assert size.saved_bytes(net, lambda: net(x).square().sum()) == 0


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_optimizer_state(name, momentum):
    cfg = compose(f"optim.name={name}", f"optim.momentum={momentum}")
    model = size.on_meta(cfg.model, 5)
    tensors, numbers = len(list(model.parameters())), count_parameters(model)
    expected = 4 * (momentum > 0) * numbers if name == "sgd" else 4 * (2 * numbers + tensors)  # and a step counter each
    assert size.optimizer_bytes(model, cfg) == expected


def test_the_largest_model_is_measured_without_storage():
    cfg = compose("model=llama3_405b", "data.batch_size=1")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert size.optimizer_bytes(size.on_meta(cfg.model, 1), cfg) > 8 * 405e9
    assert size.activation_bytes(cfg, 1) > 1e12
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB: half a GiB of the terabytes


def test_the_command(capsys):
    main = runpy.run_path(str(ROOT / "experiments/model_size.py"))["main"]
    assert main(["-m", "model=nano,gpt2_depth12", "data=markov", "optim=sgd"]) == 0
    first, second = capsys.readouterr().out.split("model=gpt2_depth12")
    assert first.startswith("model=nano\n")
    # 12 blocks of 12 D^2 + 13 D, tokens, positions and the final norm at D = 128
    total = next(line for line in second.splitlines() if line.startswith("total, tied weights once"))
    assert total.split()[-1] == f"{12 * (12 * 128**2 + 13 * 128) + (64 + 128) * 128 + 2 * 128:,}"
    assert main(["model=bert_base", "model.head=pooler", "model.vocab=null", "data=markov"]) == 0
    assert "model.head=pooler has no loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["model=gpt2,gpt9"], "Could not find 'model/gpt9'"),
        (["model=gpt2", "model.dept=3"], "model.dept: unknown key; did you mean model.depth?"),
        (["model.heads=7"], "model.heads=7 must divide"),
        (["--nope"], "--nope"),
    ],
)
def test_a_mistake_is_one_line(arguments, told, capsys):
    main = runpy.run_path(str(ROOT / "experiments/model_size.py"))["main"]
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("model_size.py: ")
    assert told in err
    assert err.count("\n") == 1
