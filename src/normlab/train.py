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

from normlab import data, optim, probe, spikes, store, verdict
from normlab.config import Config
from normlab.device import Clock, device_name, pick_device
from normlab.init import initialise
from normlab.log import Log
from normlab.model import Decoder, compile_blocks, count_parameters

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
    source = data.load(cfg.data)
    run_id = store.run_id(cfg, source.sha256, device.type)
    path = Path(cfg.runs_dir) / cfg.study / run_id
    with store.alone(path) as mine:
        earlier = store.read_record(path) or {}
        if not mine:
            return {"run_id": run_id, **earlier, "status": "running"}
        if earlier.get("status") == "finished" and not cfg.force:
            return earlier | {"reused": True}
        return _recorded(cfg, source, device, path)


def _recorded(cfg: Config, source: data.Source, device: torch.device, path: Path) -> dict[str, Any]:
    """Train, with the record kept whatever happens."""
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
            result = _Fit(cfg, source, device, folder, log).run()
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

    def __init__(
        self, cfg: Config, source: data.Source, device: torch.device, folder: store.RunFolder, log: Log
    ) -> None:
        torch.manual_seed(cfg.seed)
        self.cfg, self.source, self.device, self.folder, self.log = cfg, source, device, folder, log
        self.model = Decoder(cfg.model, source.vocab)
        initialise(self.model, cfg.model, cfg.seed)
        self.model.to(device)
        if cfg.compile:
            compile_blocks(self.model)
        self.optimizer = optim.make(self.model, cfg.optim)
        self.meter = probe.GradientMeter(self.model)
        self.batch_shape = (cfg.data.batch_size, cfg.model.context)
        self.held_out = [self.to_device(b) for b in source.held_out(cfg.eval.batches, *self.batch_shape)]
        self.probe_batches = [self.to_device(b) for b in source.held_out(cfg.probe.batches, *self.batch_shape)]
        self.clock = Clock()
        self.pending: list[tuple[dict[str, Any], Tensor, Tensor, Tensor]] = []
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.diverged = False  # a loss or gradient norm that was read was not finite
        self.layer_norms: deque[np.ndarray] = deque(maxlen=cfg.spikes.window)

    def run(self) -> dict[str, Any]:
        cfg, source = self.cfg, self.source
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

            loss = self.loss(*self.to_device(source.batch(cfg.seed, step, *self.batch_shape)))
            loss.backward()
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
            group["lr"] = lr
        self.meter.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        bf16 = self.cfg.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            return self.model.loss(inputs, targets)

    def to_device(self, batch: data.Batch) -> data.Batch:
        if self.device.type == "cuda":  # pinned, so that the copy does not wait for the device
            batch = (batch[0].pin_memory(), batch[1].pin_memory())
        return batch[0].to(self.device, non_blocking=True), batch[1].to(self.device, non_blocking=True)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the held-out batches."""
        with self.measuring():
            losses = [self.loss(*batch) for batch in self.held_out]
            return torch.stack(losses).mean().item()

    def profile(self, step: int) -> None:
        """Full per-layer profile of the weights before update `step`."""
        if self.cfg.probe.batches:
            with self.measuring():
                self.folder.layers(step, probe.profile(self.model, self.loss, self.probe_batches))

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
            each = {f"grad_norm/layer_{layer:03d}": norm for layer, norm in enumerate(layers.tolist())}
            self.log.row(row["step"], named | each)
        self.losses += loss_[:count]
        self.grad_norms += total[:count]
        self.layer_norms.extend(by_layer)
        self.log.progress(count, loss=loss_[count - 1], lr=rows[count - 1]["lr"], grad=total[count - 1])

    def by_layer(self, norms: np.ndarray) -> np.ndarray:
        """(steps, tensors) -> (steps, depth): L2 norm over the tensors of each block."""
        layers = np.array([-1 if i.layer is None else i.layer for i in self.meter.ids])
        per_layer = [np.linalg.norm(norms[:, layers == k], axis=1) for k in range(self.cfg.model.depth)]
        return np.stack(per_layer, axis=1)

    def result(self, init_val_loss: float, final_val_loss: float) -> dict[str, Any]:
        """The numbers of run.json. h1 and h2 are those of the evaluated tokens, as the verdict uses them."""
        cfg, source = self.cfg, self.source

        def reference(known: int) -> float:
            return float(np.mean([source.reference_loss(batch, known) for batch in self.held_out]))

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
            "excess_loss": None if source.entropy_rate is None else final_val_loss - reference(cfg.model.context),
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
        return result | {
            **asdict(judged),
            "tokens_per_second": len(self.losses) * cfg.data.batch_size * cfg.model.context / self.clock.total,
            "first_bad_lr": None if bad is None else optim.learning_rate(cfg.optim, bad, cfg.steps),
            "first_bad_layer": verdict.first_bad_layer(dict(enumerate(history))),
        }


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
