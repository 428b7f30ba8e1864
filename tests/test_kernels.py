"""TF32, the attention kernel, CUDA graphs: what is accepted, what is recorded, what enters the run id; MFU."""

import pytest
import torch
from conftest import ROOT, compose, tiny
from torch.nn import functional as F

import arms
from normlab import cli, flops, kernels, store
from normlab.config import load
from normlab.explain import ConfigError
from normlab.fit import Fit
from normlab.frontier import settings
from normlab.model import build
from normlab.residual import PLACEMENTS
from normlab.results import load as results
from normlab.tensors import count_parameters
from normlab.train import train

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]


def identity(*overrides: str, device: str) -> str:
    return store.run_id(compose(*overrides), "a", device)


def test_tf32_is_part_of_the_id_where_it_changes_numbers():
    assert identity("tf32=true", device="cpu") == identity(device="cpu")
    assert identity("tf32=true", device="cuda") != identity(device="cuda")


def test_ids_from_before_these_keys_stay():
    settings = compose().identity()
    assert {"tf32", "attention"}.isdisjoint(settings)
    assert compose("attention=math").identity()["attention"] == "math"


def test_tf32_is_in_force_inside_a_run_on_cuda_alone():
    before = torch.get_float32_matmul_precision()
    with kernels.chosen(compose("tf32=true"), torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before == "highest"
    with kernels.chosen(compose("tf32=true"), torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["compile=reduce-overhead", "device=cpu"],
            r"compile=reduce-overhead .*device is cpu; accepted: false, true, whole",
        ),
        (["compile=fast"], r"compile='fast': .*'reduce-overhead'"),
        (
            ["attention=cudnn", "device=cpu"],
            r"attention=cudnn: .* on cpu at precision=fp32; accepted: auto, flash, math",
        ),
        (["attention=flash", "model.dropout=0.1", "device=cpu"], r"attention=flash: .*accepted: auto, math"),
        (["attention=flash", "model.position=relative", "device=cpu"], r"attention=flash: .*accepted: auto, math"),
        (["attention=flash", "model.attn_softcap=5.0"], r"attention=flash: model\.attn_softcap .*accepted: auto, math"),
        (["attention=fast"], r"attention='fast': .*'auto', 'flash'"),
        (["tf32=yes"], r"tf32='yes': "),
    ],
)
def test_what_is_refused(overrides, told):
    with pytest.raises(ConfigError, match=told) as caught:
        cli.check(ROOT, overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine's device has graphs")
def test_a_cluster_s_door_leaves_its_device_to_the_job(tmp_path):
    graphs = "compile=reduce-overhead"
    plan = cli.check(ROOT, ["-m", "hydra/launcher=submitit_slurm", "data=markov", graphs, f"runs_dir={tmp_path}"])
    assert plan is not None
    assert plan.elsewhere
    for launcher in ("basic", "joblib"):
        with pytest.raises(ConfigError, match="reduce-overhead"):
            cli.check(ROOT, ["-m", f"hydra/launcher={launcher}", "data=markov", graphs])
    with pytest.raises(ConfigError, match="the device is cpu"):
        train(tiny(tmp_path, graphs, "device=cpu"))
    (record,) = (store.read_record(path) for path in (tmp_path / "scratch").iterdir())
    assert record is not None
    assert record["status"] == "failed"


@pytest.mark.parametrize(
    ("overrides", "backend"),
    [
        ([], "flash"),
        (["attention=math"], "math"),
        (["model.dropout=0.1"], "math"),
        (["model.position=relative"], "math"),
        (["model.attn_softcap=5.0"], "math"),
        (["precision=bf16", "model.qk_norm=true", "model.kv_heads=1"], "flash"),
        (["model.arch=encoder_decoder"], "flash"),
    ],
)
def test_the_recorded_kernel_is_the_one_that_runs(tmp_path, monkeypatch, overrides, backend):
    """Against the profiler's names of what the training steps called."""
    backward, seen = Fit.backward, set()

    def profiled(self, batch):
        with torch.profiler.profile() as profiler:
            loss = backward(self, batch)
        seen.update(event.key for event in profiler.key_averages())
        return loss

    monkeypatch.setattr(Fit, "backward", profiled)
    record = train(tiny(tmp_path, "steps=1", "probe.batches=0", "device=cpu", *overrides))
    assert record["attention_backend"] == backend
    assert any("flash_attention" in name for name in seen) == (backend == "flash")


def test_the_probe_leaves_no_trace(tmp_path, monkeypatch):
    """Dropout's draws and batch norm's statistics are those of a run that never asked."""
    run = ["model.dropout=0.1", "model.norm=batchnorm"]
    asked = train(tiny(tmp_path / "asked", *run))
    monkeypatch.setattr(kernels, "attention_used", lambda *_: "math")
    plain = train(tiny(tmp_path / "plain", *run))
    assert asked["final_val_loss"] == plain["final_val_loss"]


def test_math_attention_gives_the_same_losses(tmp_path):
    records = [train(tiny(tmp_path, f"attention={name}")) for name in ("auto", "math")]
    assert records[0]["run_id"] != records[1]["run_id"]
    assert records[0]["final_val_loss"] == pytest.approx(records[1]["final_val_loss"], rel=1e-5)


def test_the_kernel_is_an_arm_and_an_earlier_record_is_of_the_default(tmp_path):
    records = [train(tiny(tmp_path, *more)) for more in ([], ["seed=1"], ["attention=math", "seed=1"])]
    old = tmp_path / "scratch" / records[0]["run_id"] / "config.yaml"
    old.write_text("".join(x for x in old.read_text().splitlines(True) if not x.startswith(("tf32", "attention"))))
    runs = results(tmp_path, layers=False).runs
    assert runs.attention.tolist().count("auto") == 2
    assert [key for key in arms.varying(runs) if key != "run_id"] == ["attention"]
    assert settings(runs) == ["attention"]


def test_flops_of_gpt2_by_hand():
    """12 L D^2 in the matrices of L blocks, D V in the head: biases and norms are 0.1 % beside them."""
    cfg = compose("model=gpt2").model
    with torch.device("meta"):
        model = build(cfg, None)
    L, D, T, V = 12, 768, 1024, 50257
    assert flops.per_token(model, T) == pytest.approx(6 * (12 * L * D**2 + D * V) + 12 * L * D * T, rel=2e-3)
    assert flops.per_token(model, T) < 6 * count_parameters(model) + 12 * L * D * T  # positions are looked up


def test_flops_are_those_that_torch_counts(tmp_path):
    """Forward and backward of one batch under torch's own counter, an untied head."""
    from torch.utils.flop_counter import FlopCounterMode

    cfg = tiny(
        tmp_path,
        "model.tie=false",
        "attention=math",
        "model.arch=encoder_decoder",
        "model.width=64",
        "model.bias=false",
    )
    model = build(cfg.model, 16)
    tokens = torch.zeros(4, 16, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, kernels.chosen(cfg, torch.device("cpu")):
        model.loss((tokens, tokens), tokens).backward()
    assert flops.per_token(model, 16) * tokens.numel() == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize(
    ("name", "number_format", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.5),
        ("NVIDIA H100 PCIe", "fp16", 756.5),
        ("NVIDIA H200", "bf16", 989.5),
        ("NVIDIA A10", "tf32", 62.5),
        ("NVIDIA L4", "fp16", 121.0),
        ("Tesla V100-SXM2-16GB", "fp16", 125.0),
        ("Tesla T4", "fp32", 8.1),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("Tesla T4", "bf16", None),
        ("NVIDIA A10G", "fp16", None),
        ("NVIDIA L40S", "fp16", None),
        ("NVIDIA GH200 480GB", "fp16", None),
        ("NVIDIA GeForce RTX 3090 Ti", "fp16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("cpu", "fp32", None),
    ],
)
def test_peaks(name, number_format, tera):
    assert flops.peak(name, number_format) == (None if tera is None else tera * 1e12)


def test_utilisation_is_of_all_devices_together():
    assert flops.utilisation(1e9, 78e3, "NVIDIA A100-SXM4-80GB", "bf16", 1) == pytest.approx(0.25)
    assert flops.utilisation(1e9, 78e3, "NVIDIA A100-SXM4-80GB", "bf16", 2) == pytest.approx(0.125)
    assert flops.utilisation(1e9, None, "NVIDIA A100-SXM4-80GB", "bf16", 1) is None


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_run_tells_of_its_device(tmp_path, device):
    record = train(tiny(tmp_path, f"device={device}", "tf32=true"))
    assert record["flops_per_token"] > 0
    assert record["tf32"] == (device == "cuda")
    assert (record["peak_memory_mb"] is None) == (device == "cpu")
    assert device == "cuda" or record["mfu"] is None
    runs = results(tmp_path).runs
    assert {"mfu", "flops_per_token", "peak_memory_mb", "attention_backend"} <= set(runs)


@CUDA
@pytest.mark.parametrize(
    ("placement", "precision"), [*((name, "fp32") for name in PLACEMENTS), ("pre", "bf16"), ("post", "bf16")]
)
def test_a_device_gives_the_losses_of_the_cpu(tmp_path, placement, precision):
    """float32 to 1e-4 and bfloat16 to 2 % over six updates of two micro-batches each."""
    run = [f"model.placement={placement}", f"precision={precision}", "model.arch=encoder_decoder", "micro_batch=2"]
    cpu, cuda = (train(tiny(tmp_path / d, f"device={d}", "probe.batches=1", *run)) for d in ("cpu", "cuda"))
    tolerance = 0.02 if precision == "bf16" else 1e-4
    assert cuda["final_val_loss"] == pytest.approx(cpu["final_val_loss"], rel=tolerance)


@CUDA
@pytest.mark.filterwarnings("default")  # warnings inside the compiler are its own
@pytest.mark.parametrize(
    "overrides", [[], ["micro_batch=2", "eval.every=2", "model.arch=encoder_decoder"], ["model.ffn=moe"]]
)
def test_cuda_graphs_give_the_losses_of_eager(tmp_path, overrides):
    eager = train(tiny(tmp_path, "device=cuda", "steps=12", *overrides))
    graphs = train(tiny(tmp_path, "device=cuda", "steps=12", "compile=reduce-overhead", *overrides))
    assert graphs["final_val_loss"] == pytest.approx(eager["final_val_loss"], rel=1e-4)


def test_gradients_leave_the_memory_of_the_graphs_between_micro_batches(tmp_path, monkeypatch):
    """What a replay writes over is played by gradients that are spoilt as soon as the next batch begins."""
    straight = train(tiny(tmp_path / "straight", "micro_batch=2"))
    init, objective = Fit.__init__, Fit.objective

    def graphs(self, *args):
        init(self, *args)
        self.graphs = True

    def spoiling(self, *batch):
        for parameter in self.model.parameters():
            if parameter.grad is not None and not hasattr(self, "kept"):
                parameter.grad.fill_(torch.nan)
        return objective(self, *batch)

    keep = Fit.keep_gradients

    def kept(self):
        stale = [p.grad for p in self.model.parameters() if p.grad is not None]
        keep(self)
        for grad in stale:
            grad.fill_(torch.nan)
        self.kept = True

    monkeypatch.setattr(Fit, "__init__", graphs)
    monkeypatch.setattr(Fit, "keep_gradients", kept)
    monkeypatch.setattr(Fit, "objective", spoiling)
    assert train(tiny(tmp_path / "graphs", "micro_batch=2"))["final_val_loss"] == straight["final_val_loss"]


def test_evaluation_honours_the_micro_batch(tmp_path, monkeypatch):
    largest = []
    objective = Fit.objective

    def noted(self, inputs, targets):
        if not torch.is_grad_enabled():
            largest.append(len(targets))
        return objective(self, inputs, targets)

    monkeypatch.setattr(Fit, "objective", noted)
    whole = train(tiny(tmp_path, "steps=0", "probe.batches=0", "model.arch=encoder"))
    assert set(largest) == {4}
    largest.clear()
    parts = train(tiny(tmp_path, "steps=0", "probe.batches=0", "model.arch=encoder", "micro_batch=3"))
    assert set(largest) == {3, 1}
    assert parts["init_val_loss"] == pytest.approx(whole["init_val_loss"], rel=1e-6)


@pytest.mark.parametrize("arch", ["decoder", "encoder"])
def test_a_profile_honours_the_micro_batch(tmp_path, monkeypatch, arch):
    """Gradients are those of the whole batch, also where targets differ; so is the output's change."""
    largest = []
    objective = Fit.objective

    def noted(self, inputs, targets):
        largest.append(len(targets))
        return objective(self, inputs, targets)

    monkeypatch.setattr(Fit, "objective", noted)
    run = ["steps=3", "probe.every=2", f"model.arch={arch}", "probe.layer_drop=true"]
    train(tiny(tmp_path / "whole", *run))
    assert max(largest) == 4
    largest.clear()
    train(tiny(tmp_path / "parts", *run, "micro_batch=2"))
    assert set(largest) == {2}
    one, two = (results(tmp_path / name).layers for name in ("whole", "parts"))
    for stat in ("expected_weight_grad_norm", "mean_weight_grad_norm", "stream_grad_norm", "stream_rms", "max_abs"):
        values = [table[table.stat == stat].value.to_numpy() for table in (one, two)]
        assert len(values[0]) > 4
        assert values[1] == pytest.approx(values[0], rel=1e-3, abs=1e-6), stat
    for stat in ("output_change", "layer_drop_loss"):
        values = [table[table.stat == stat].value.to_numpy() for table in (one, two)]
        assert values[1] == pytest.approx(values[0], rel=2e-2, abs=1e-4), stat


def test_every_kernel_that_the_door_admits_serves():
    q = torch.zeros(1, 2, 8, 8)
    for name in ("flash", "math"):
        cfg = load(compose(f"attention={name}", "device=cpu").model_dump(mode="json"))
        kernels.check(cfg)
        with kernels.chosen(cfg, torch.device("cpu")):
            assert F.scaled_dot_product_attention(q, q, q).shape == q.shape
