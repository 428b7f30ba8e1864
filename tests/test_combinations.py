"""Any two values of any two axes train together, or are refused with the reason; every placement compiles."""

import itertools

import pytest
import torch
from conftest import compose, tiny
from pydantic import ValidationError

from normlab import config, optim, task
from normlab.config import ModelConfig
from normlab.ffn import ACTIVATIONS
from normlab.init import INITS, calibrate, initialise
from normlab.model import ARCHITECTURES, build, compile_blocks
from normlab.norm import NORMS
from normlab.residual import PLACEMENTS

AXES = {
    "placement": list(PLACEMENTS),
    "norm": list(NORMS),
    "activation": list(ACTIVATIONS),
    "init": list(INITS),
    "position": ["learned", "sinusoidal", "rotary", "relative", "none"],
    "arch": list(ARCHITECTURES),
    "ffn": ["dense", "moe", "none"],
    "qk_norm": [False, "head", "joint"],
    "kv_heads": [None, 2, 1],
    "attn_softcap": [None, 5.0],
}
# What the config refuses, with a word of the reason.
REFUSED = {
    **{("qk_norm", value, "norm", "none"): "needs a norm" for value in ("head", "joint")},
    **{("qk_norm", value, "placement", "hybrid_norm"): "already normalises" for value in ("head", "joint")},
    **{("placement", "res_post", "norm", value): "has no gain" for value in ("rmsnorm_nogain", "none")},
    **{
        ("ffn", "none", "placement", value): "ends its block in the FFN" for value in ("parallel", "b2t", "hybrid_norm")
    },
}
REFUSED_PAIRS = {frozenset({(a, x), (b, y)}) for a, x, b, y in REFUSED}
Pair = frozenset[tuple[str, object]]


def pairs_of(row: dict[str, object]) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def cover() -> list[dict[str, object]]:
    """Rows that hold every allowed pair at least once, greedily: the value that adds most new pairs, axis by axis."""
    left = {
        frozenset({(a, x), (b, y)}) for a, b in itertools.combinations(AXES, 2) for x in AXES[a] for y in AXES[b]
    } - REFUSED_PAIRS
    rows = []
    order = {item: i for i, item in enumerate((axis, value) for axis in AXES for value in AXES[axis])}
    while left:
        seed = min(left, key=lambda pair: sorted(order[item] for item in pair))
        row = dict(sorted(seed, key=lambda item: order[item]))
        for axis in AXES:
            if axis not in row:
                allowed = [v for v in AXES[axis] if not pairs_of({**row, axis: v}) & REFUSED_PAIRS]
                row[axis] = max(allowed, key=lambda v: len({frozenset({(axis, v), i}) for i in row.items()} & left))
        rows.append(row)
        left -= pairs_of(row)
    return rows


def shape(**changes: object) -> ModelConfig:
    """A tiny model with these values. Embeddings are small: squares of a stream of unit size, gated units without a
    norm, leave the finite numbers within four blocks, and rightly so."""
    size = ["model.depth=4", "model.width=16", "model.heads=4", "model.context=8", "model.scale_embedding=false"]
    base = compose(*size).model
    return ModelConfig.model_validate(base.model_dump() | changes)


def losses(cfg: config.Config, steps: int, *, compiled: bool = False) -> list[float]:
    torch.manual_seed(0)
    learned = task.make(cfg)
    model = build(cfg.model, learned.vocab)
    initialise(model, cfg.model, seed=0)
    calibrate(model, learned.batch(0, 0)[0])
    if compiled:
        compile_blocks(model)
    optimizer = optim.make(model, cfg.optim, cfg.model)
    found = []
    for step in range(steps):
        objective, loss = model.objective(*learned.batch(0, step))
        objective.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_every_allowed_pair_of_values_trains(tmp_path):
    whole = tiny(tmp_path, "data.batch_size=2")
    rows = cover()
    assert len(set().union(*map(pairs_of, rows))) == sum(
        len(AXES[a]) * len(AXES[b]) for a, b in itertools.combinations(AXES, 2)
    ) - len(REFUSED)
    base = shape().model_dump()
    for row in rows:
        cfg = whole.model_copy(update={"model": ModelConfig.model_validate(base | row)})
        found = losses(cfg, 10)
        assert torch.tensor(found).isfinite().all(), (row, found)


@pytest.mark.parametrize("refused", REFUSED)
def test_refused_pairs_say_why(refused):
    a, x, b, y = refused
    with pytest.raises(ValidationError, match=REFUSED[refused]) as caught:
        shape(**{a: x, b: y})
    told = str(caught.value)
    assert f"model.{a}={x}" in told
    assert f"model.{b}={y}" in told


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"kv_heads": 3}, r"model\.kv_heads=3 must divide model\.heads=4"),
        ({"heads": 3}, r"model\.heads=3 must divide model\.width=16, or model\.head_width be set"),
        ({"position": "rotary", "head_width": 3}, r"3 of 3, must be even"),
        ({"position": "rotary", "rotary_fraction": 0.3}, r"1 of 4, must be even and at least 2"),
        (
            {"ffn": "moe", "experts": 2, "experts_per_token": 3},
            r"experts_per_token=3: accepted: at most model\.experts=2",
        ),
        ({"encoder_depth": 3}, r"encoder_depth=3: model\.arch=decoder has one stack"),
        ({"head": "mlm"}, r"head=mlm reads both sides of a token: model\.arch=decoder"),
        ({"head": "mlm", "arch": "encoder", "head_bias": True}, r"head_bias=true: model\.head=mlm has its own"),
        ({"placement": "resi_dual", "final_norm": True}, r"resi_dual ends in x \+ N\(d\)"),
        ({"norm": "layrnorm"}, r"did you mean layernorm"),
        ({"norm": "batchnorm", "norm_eps": 0.0}, r"norm_eps=0: model\.norm=batchnorm .*above 0"),
    ],
)
def test_other_refusals(overrides, told):
    with pytest.raises(ValidationError, match=told):
        shape(**overrides)


@pytest.mark.filterwarnings("default")  # warnings inside the compiler are its own
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_compiled_has_the_losses_of_eager(tmp_path, placement):
    """All blocks share one program, whatever differs between layers; two where the equation itself changes, or where
    the first block's two streams are one tensor."""
    cfg = tiny(tmp_path, f"model.placement={placement}", "model.depth=5", "model.context=8")
    eager = losses(cfg, 4)
    torch._dynamo.utils.counters.clear()
    compiled = losses(cfg, 4, compiled=True)
    assert compiled == pytest.approx(eager, rel=1e-5)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 1 <= graphs <= (2 if placement in {"mix_ln", "keel", "resi_dual"} else 1)
