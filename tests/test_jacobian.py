"""The stack's Jacobian against finite differences, known cases and NumPy, and its door and figure."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ROOT, TINY, compose

import arms
import fig_jacobian
import figure
import findings
from normlab import jacobian
from normlab.init import calibrate, initialise
from normlab.model import build
from normlab.residual import PLACEMENTS
from normlab.results import load

SMALL = ("model.depth=2", "model.width=8", "model.heads=2", "model.context=4")
TOKENS = torch.tensor([[3, 0, 5, 1]])


def made(*overrides: str):
    cfg = compose(*SMALL, *overrides).model
    model = build(cfg, 7)
    initialise(model, cfg, 0)
    calibrate(model, (TOKENS, TOKENS) if cfg.arch == "encoder_decoder" else TOKENS)
    return model


def finite_differences(model, step: float = 1e-6) -> np.ndarray:
    """Column by column, of what reaches the final norm."""
    model = model.double().eval()
    stack = model.stacks[model.stack_names[-1]]
    memory = model.encoder(TOKENS) if len(model.stacks) > 1 else None

    def last(x: torch.Tensor) -> torch.Tensor:
        bias = None if stack.relative is None else stack.relative(4)
        stream = stack.enter(x)
        for block in stack.blocks:
            stream = block(stream, memory, bias)
        return (stream[0] if isinstance(stream, tuple) else stream).flatten()

    with torch.no_grad():
        x = stack.embed(TOKENS)
        columns = []
        for i in range(x.numel()):
            shift = torch.zeros_like(x)
            shift.view(-1)[i] = step
            columns.append((last(x + shift) - last(x - shift)) / (2 * step))
    return torch.stack(columns, 1).numpy()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_against_finite_differences(placement):
    model = made(f"model.placement={placement}")
    exact = list(jacobian.partial_products(model, TOKENS))[-1].numpy()
    np.testing.assert_allclose(exact, finite_differences(model), atol=2e-7 * max(1, np.abs(exact).max()))


@pytest.mark.parametrize("setting", [
    ("model.arch=encoder",), ("model.arch=encoder_decoder",), ("model.position=relative",),
    ("model.position=rotary", "model.kv_heads=1"), ("model.ffn=moe", "model.experts=3"), ("model.norm=batchnorm",),
    ("model.activation=swiglu", "model.norm=rmsnorm_offset", "model.qk_norm=true"), ("model.attn_softcap=5",),
    ("model.dropout=0.5",),
], ids=lambda s: s[0].split(".")[1])  # fmt: skip
def test_other_parts_against_finite_differences(setting):
    model = made(*setting)
    inputs = (TOKENS, TOKENS) if len(model.stacks) > 1 else TOKENS
    exact = list(jacobian.partial_products(model, inputs))[-1].numpy()
    np.testing.assert_allclose(exact, finite_differences(model), atol=1e-6)


def test_the_model_stays_as_it_is():
    model = made()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    jacobian.measure(model, TOKENS)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.dtype == torch.float32 and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("placement", ["pre", "lns", "parallel", "rezero"])
def test_branches_that_write_nothing_leave_the_identity(placement):
    model = made(f"model.placement={placement}")
    with torch.no_grad():
        for block in model.stacks["decoder"].blocks:
            block.attn.w_out.weight.zero_()
            block.ffn.w_out.weight.zero_()
    found = jacobian.measure(model, TOKENS)
    assert found.identity.tolist() == [1.0, 1.0]
    assert found.distance.tolist() == [0.0, 0.0]
    assert found.singular_values.tolist() == [1.0] * 32
    assert (found.growth, found.spread) == (0.0, 1.0)


def test_numbers_against_numpy():
    model = made("model.placement=sandwich", "model.depth=3")
    products = [J.numpy() for J in jacobian.partial_products(model, TOKENS)]
    found = jacobian.measure(model, TOKENS)
    np.testing.assert_allclose(found.singular_values, np.linalg.svd(products[-1], compute_uv=False), atol=1e-12)
    assert (np.diff(found.singular_values) <= 0).all()
    for i, J in enumerate(products):
        assert found.identity[i] == pytest.approx(np.trace(J) / 32)
        assert found.distance[i] == pytest.approx(np.linalg.norm(J - np.eye(32)) / 32**0.5)
        assert found.gain[i] == pytest.approx(np.sqrt(np.mean(np.linalg.svd(J, compute_uv=False) ** 2)))
    assert found.growth == pytest.approx(np.log(found.gain[-1]) / 3)
    assert found.spread == pytest.approx(found.singular_values[0] / np.median(found.singular_values))


def test_without_a_residual_a_typical_change_dies_exponentially_and_with_one_it_does_not():
    """The geometric mean of the singular values, of the spectrum's resolved part: a fitted rate per block."""

    def rates(placement: str) -> tuple[float, float]:
        model = made(f"model.placement={placement}", "model.depth=8", "model.norm=rmsnorm", "model.width=16")
        logs = [
            np.log(torch.linalg.svdvals(J)[: len(J) // 2].numpy()).mean()
            for J in jacobian.partial_products(model, TOKENS)
        ]
        blocks = np.arange(1, len(logs) + 1)
        return np.polyfit(blocks, logs, 1)[0], np.corrcoef(blocks, logs)[0, 1] ** 2

    rate, explained = rates("no_residual")
    assert rate < -0.5
    assert explained > 0.98
    assert abs(rates("pre")[0]) < 0.2


def test_a_batch_is_refused():
    with pytest.raises(ValueError, match="a batch of 2 sequences; accepted: one"):
        jacobian.measure(made(), TOKENS.repeat(2, 1))


def door(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "experiments/jacobian.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("runs")
    small = [setting for setting in TINY if not setting.startswith("steps")]
    grid = ["model.depth=2,3", "model.placement=pre,no_residual", "seed=0,1"]
    done = door(*small, "model.context=4", *grid, f"runs_dir={folder}")
    assert done.returncode == 0, done.stderr
    return folder / "jacobian", done.stdout


def test_the_door_writes_runs_that_analysis_reads(measured):
    folder, printed = measured
    runs, steps, layers = load(folder)
    assert len(runs) == 2 * 2 * 2
    assert (runs.status == "finished").all()
    assert steps.empty
    assert printed.splitlines()[-1] == f"8 runs: {folder}"
    assert [line.split()[0] for line in printed.splitlines()[2:6]] == ["pre", "no_residual"] * 2
    by_run = layers[layers.stat == "jacobian_singular_value"].groupby("run_id", observed=True).value
    assert (by_run.size() == 64).all()
    gains = layers[layers.stat == "jacobian_gain"].set_index(["run_id", "layer"]).value
    for _, run in runs.iterrows():
        rms = np.sqrt((by_run.get_group(run.run_id) ** 2).mean())
        assert rms == pytest.approx(gains[run.run_id, run["model.depth"] - 1])
        assert run.growth == pytest.approx(np.log(rms) / run["model.depth"])


def test_the_figure_and_its_sentence(measured, tmp_path):
    data = arms.load([measured[0]])
    figure.save(fig_jacobian.draw(data), "jacobian", tmp_path)
    table = pd.read_csv(tmp_path / "jacobian.csv")
    assert (table.stat == "jacobian_singular_value").sum() == 8 * 64
    assert (table.stat == "jacobian_growth").sum() == 8
    (told,) = [s for s in findings.sentences(data) if s.startswith("Jacobian")]
    growth = data.runs[(data.runs["model.depth"] == 3) & (data.runs["model.placement"] == "pre")].growth.mean()
    assert f"pre-norm {growth:+.4f}" in told


@pytest.mark.parametrize(("arguments", "said"), [
    (["model.placement=pst"], "did you mean post?"),
    (["steps=3"], "steps: the Jacobian is taken at initialisation"),
    (["model.width=512", "model.depth=2", "model.placement=pre", "seed=0"], "accepted: at most 2048"),
    (["model.placement=pre,"], "jacobian.py: "),
])  # fmt: skip
def test_a_mistake_is_one_line(arguments, said, tmp_path):
    done = door(*arguments, f"runs_dir={tmp_path}")
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
