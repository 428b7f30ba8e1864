"""One run, top to bottom: build, train, measure, judge, record."""

import math
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normlab import optim, probe, spikes, store, task, verdict
from normlab.config import Config
from normlab.device import Clock, device_name, pick_device
from normlab.init import calibrate, initialise
from normlab.log import Log
from normlab.model import build, compile_blocks
from normlab.task import Batch, Task
from normlab.tensors import count_parameters

WANDB_NAMES = {
    "loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "update_norm": "train/update_norm",
    "tokens": "train/tokens",
    "seconds": "train/seconds_per_step",
    "val_loss": "val/loss",
}


def train(cfg: Config) -> dict[str, Any]:
    """Run one configuration and return run.json's content.

    A finished run with the same id is not repeated (cfg.force does): its record comes back with `reused`. One that
    another process is running is left alone: its record, status `running`. Divergence is a result. Any exception is
    recorded as `failed` with its traceback and raised again.
    """
    device = pick_device(cfg.device)
    learned = task.make(cfg)
    source = learned.source
    run_id = store.run_id(cfg, source.sha256, device.type)
    path = Path(cfg.runs_dir) / cfg.study / run_id
    with store.alone(path) as mine:
        earlier = store.read_record(path) or {}
        if not mine:
            return {"run_id": run_id, **earlier, "status": "running"}
        if earlier.get("status") == "finished" and not cfg.force:
            return earlier | {"reused": True}
        return _recorded(cfg, learned, device, path)


def _recorded(cfg: Config, learned: Task, device: torch.device, path: Path) -> dict[str, Any]:
    """Train, with the record kept whatever happens."""
    source = learned.source
    facts = {
        "run_id": path.name,
        "study": cfg.study,
        "data_sha256": source.sha256,
        "unigram_entropy": source.h1,
        "bigram_entropy": source.h2,
        "entropy_rate": source.entropy_rate,
        "device": device_name(device),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **store.provenance(Path(__file__).parent),
    }
    folder = store.RunFolder(path, cfg, facts)
    settings = cfg.model_dump(mode="json") | {"data_sha256": source.sha256}
    try:
        with Log(cfg.log, path, study=cfg.study, steps=cfg.steps, settings=settings) as log:
            result = _Fit(cfg, learned, device, folder, log).run()
            folder.close()
            folder.update(status="finished", **result)
            log.summary(result)
    except BaseException as error:
        folder.close()
        if folder.record["status"] == "running":
            interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
            (path / "traceback.txt").write_text(traceback.format_exc())
            folder.update(
                status="interrupted" if interrupted else "failed",
                reason=" ".join(f"{type(error).__name__}: {error}".split()),
            )
        raise
    return folder.record


class _Fit:
    """The state of one training run and its loop."""

    def __init__(self, cfg: Config, learned: Task, device: torch.device, folder: store.RunFolder, log: Log) -> None:
        torch.manual_seed(cfg.seed)
        self.cfg, self.task, self.device, self.folder, self.log = cfg, learned, device, folder, log
        self.model = build(cfg.model, learned.vocab)
        initialise(self.model, cfg.model, cfg.seed)
        self.model.to(device)
        calibrate(self.model, self.to_device(learned.batch(cfg.seed, 0))[0])
        if cfg.compile:
            compile_blocks(self.model)
        self.optimizer = optim.make(self.model, cfg.optim, cfg.model)
        self.meter = probe.GradientMeter(self.model)
        self.held_out = [self.to_device(b) for b in learned.held_out(cfg.eval.batches)]
        self.probe_batches = [self.to_device(b) for b in learned.held_out(cfg.probe.batches)]
        self.blocks = [(name, i) for name, stack in self.model.stacks.items() for i in range(len(stack.blocks))]
        prefix = {name: f"{name}_" if len(self.model.stacks) > 1 else "" for name in self.model.stacks}
        self.block_names = [f"grad_norm/{prefix[name]}layer_{layer:03d}" for name, layer in self.blocks]
        self.clock = Clock()
        self.pending: list[tuple[dict[str, Any], Tensor, Tensor, Tensor]] = []
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.diverged = False  # a loss or gradient norm that was read was not finite
        self.layer_norms: deque[np.ndarray] = deque(maxlen=cfg.spikes.window)

    def run(self) -> dict[str, Any]:
        cfg = self.cfg
        warm = cfg.optim.warmup_steps
        init_val_loss = self.evaluate()
        for step in range(cfg.steps):
            row: dict[str, Any] = {
                "step": step,
                "tokens": (step + 1) * cfg.data.batch_size * cfg.model.context,
                "lr": optim.learning_rate(cfg.optim, step, cfg.steps),
            }
            if _due(step, cfg.eval.every):
                row["val_loss"] = init_val_loss if step == 0 else self.evaluate()
            if step in {0, warm} or _due(step, cfg.probe.every):
                self.profile(step)

            objective, loss = self.objective(*self.to_device(self.task.batch(cfg.seed, step)))
            objective.backward()
            norms = self.meter.gradients()
            self.update(row["lr"], norms)
            self.pending.append((row, loss.detach(), norms, self.meter.update()))

            if (step + 1) % cfg.log.every == 0 or step + 1 == cfg.steps:
                self.flush()
            if self.diverged:
                return self.result(init_val_loss, math.nan)
        self.profile(cfg.steps)
        return self.result(init_val_loss, self.evaluate() if cfg.steps else init_val_loss)

    def update(self, lr: float, norms: Tensor) -> None:
        """Clip by the global norm if asked, then one optimizer step at rate lr."""
        if self.cfg.optim.clip is not None:
            total = torch.linalg.vector_norm(norms).float()
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.cfg.optim.clip, total)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        self.meter.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def objective(self, inputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        """What the step descends, and its cross-entropy."""
        bf16 = self.cfg.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            return self.model.objective(inputs, targets)

    def to_device(self, batch: Batch) -> Batch:
        def move(tokens: Any) -> Any:
            if isinstance(tokens, tuple):
                return tuple(map(move, tokens))
            if self.device.type == "cuda":  # pinned, so that the copy does not wait for the device
                tokens = tokens.pin_memory()
            return tokens.to(self.device, non_blocking=True)

        return move(batch[0]), move(batch[1])

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the held-out batches."""
        with self.measuring():
            self.model.eval()
            losses = [self.objective(*batch)[1] for batch in self.held_out]
            self.model.train()
            return torch.stack(losses).mean().item()

    def profile(self, step: int) -> None:
        """Full per-layer profile of the weights before update `step`."""
        if self.cfg.probe.batches:
            with self.measuring():
                table = probe.profile(self.model, lambda *batch: self.objective(*batch)[0], self.probe_batches)
                self.folder.layers(step, table)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Keep the time of a measurement out of the time of the steps."""
        self.flush()
        with self.clock.paused():
            yield

    def flush(self) -> None:
        """Read the device buffer once, and write its rows up to the first non-finite one of the run."""
        if self.diverged or not self.pending:
            return
        rows, losses, norms, updates = zip(*self.pending, strict=True)
        self.pending.clear()
        loss_ = torch.stack(losses).tolist()
        norms_ = torch.stack(norms).double().cpu().numpy()
        update_ = torch.stack(updates).tolist()
        total = np.linalg.norm(norms_, axis=1).tolist()
        seconds = self.clock.lap() / len(rows)
        bad = verdict.first_nonfinite(loss_, total)
        self.diverged = bad is not None
        count = len(rows) if bad is None else bad + 1
        written = [
            row | {"loss": loss_[i], "grad_norm": total[i], "update_norm": update_[i], "seconds": seconds}
            for i, row in enumerate(rows[:count])
        ]
        self.folder.metrics(written)
        self.folder.weight_grad_norms(rows[0]["step"], self.meter.ids, norms_[:count])
        by_layer = self.by_layer(norms_[:count])
        for row, layers in zip(written, by_layer, strict=True):
            named = {WANDB_NAMES[k]: v for k, v in row.items() if k in WANDB_NAMES}
            each = dict(zip(self.block_names, layers.tolist(), strict=True))
            self.log.row(row["step"], named | each)
        self.losses += loss_[:count]
        self.grad_norms += total[:count]
        self.layer_norms.extend(by_layer)
        self.log.progress(count, loss=loss_[count - 1], lr=rows[count - 1]["lr"], grad=total[count - 1])

    def by_layer(self, norms: np.ndarray) -> np.ndarray:
        """(steps, tensors) -> (steps, blocks): L2 norm over the tensors of each block, in the order of self.blocks."""
        owner = [(tensor.stack, tensor.layer) for tensor in self.meter.ids]
        mine = [[i for i, block in enumerate(owner) if block == wanted] for wanted in self.blocks]
        return np.stack([np.linalg.norm(norms[:, columns], axis=1) for columns in mine], axis=1)

    def result(self, init_val_loss: float, final_val_loss: float) -> dict[str, Any]:
        """The numbers of run.json. h1 and h2 are those of the evaluated tokens, as the verdict uses them."""
        cfg = self.cfg

        def reference(known: int) -> float:
            return float(np.mean([self.task.reference_loss(batch, known) for batch in self.held_out]))

        exact = self.task.source.entropy_rate is not None and cfg.model.arch != "encoder"  # which sees both sides
        found = spikes.find(self.losses, **cfg.spikes.model_dump())
        result: dict[str, Any] = {
            "verdict": None,
            "reason": "no training: initialisation only",
            "parameters": count_parameters(self.model),
            "steps_done": len(self.losses),
            "h1": reference(0),
            "h2": reference(1),
            "init_val_loss": init_val_loss,
            "final_val_loss": final_val_loss,
            "final_loss": self.losses[-1] if self.losses else None,
            "excess_loss": final_val_loss - reference(cfg.model.context) if exact else None,
            "seconds": self.clock.total,
            "tokens_per_second": None,
            "spike_count": len(found),
            "spikes": [asdict(s) for s in found],
            "detector": cfg.spikes.model_dump() | cfg.verdict.model_dump(),
        }
        if not cfg.steps:
            return result
        judged = verdict.judge(
            losses=self.losses,
            grad_norms=self.grad_norms,
            init_val_loss=init_val_loss,
            final_val_loss=final_val_loss,
            h1=result["h1"],
            h2=result["h2"],
            spikes=found,
            spike_patience=cfg.spikes.min_history,
            stalled_below=cfg.verdict.stalled_below,
        )
        bad = judged.first_bad_step
        history = np.array(self.layer_norms).T.tolist()
        broken = verdict.first_bad_layer(dict(enumerate(history)))
        stack, layer = (None, None) if broken is None else self.blocks[broken]
        return result | {
            **asdict(judged),
            "tokens_per_second": len(self.losses) * cfg.data.batch_size * cfg.model.context / self.clock.total,
            "first_bad_lr": None if bad is None else optim.learning_rate(cfg.optim, bad, cfg.steps),
            "first_bad_stack": stack,
            "first_bad_layer": layer,
        }


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
