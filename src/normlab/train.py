"""One run, top to bottom: build, train, measure, judge, record."""

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normlab import optim, relabel, results, store, task
from normlab.config import Config
from normlab.device import Clock, device_name, pick_device
from normlab.init import calibrate, initialise
from normlab.journal import Journal, rules
from normlab.log import Log
from normlab.meter import StepMeter, global_norm
from normlab.model import build, compile_blocks
from normlab.probe import Profile, evaluating
from normlab.sharpness import critical_sharpness
from normlab.task import Batch, Task, micro_batches
from normlab.tensors import count_parameters


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
            return _judged_anew(path, earlier, cfg) | {"reused": True}
        return _recorded(cfg, learned, device, path)


def _judged_anew(path: Path, record: dict[str, Any], cfg: Config) -> dict[str, Any]:
    """A finished run's record; under this config's rules, where it was labelled by others."""
    wanted = rules(cfg)
    if not cfg.steps or record.get("detector") == wanted:
        return record
    found = results.load(path, layers=False)
    told = relabel.relabel(found.runs, found.steps, wanted).fields
    fields = told.iloc[0] if len(told) else None  # none where the folder cannot be read whole
    if fields is not None:
        record = record | fields
        store.write_record(path, record)
    return record


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
            fit = _Fit(cfg, learned, device, folder, log)
            try:
                result = fit.run()
            except (KeyboardInterrupt, SystemExit):
                fit.journal.flush(fit.clock.lap)  # the steps that were made
                raise
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
        self.cfg, self.task, self.device, self.folder = cfg, learned, device, folder
        self.model = build(cfg.model, learned.vocab)
        initialise(self.model, cfg.model, cfg.seed)
        self.model.to(device)
        calibrate(self.model, self.to_device(learned.batch(cfg.seed, 0))[0])
        self.meter = StepMeter(self.model)
        if cfg.compile:
            compile_blocks(self.model)
        self.optimizer = optim.make(self.model, cfg.optim, cfg.model)
        self.held_out = [self.to_device(b) for b in learned.held_out(cfg.eval.batches)]
        batches = [self.to_device(b) for b in learned.held_out(cfg.probe.batches)]
        self.profile = Profile(self.model, self.objective, batches, layer_drop=cfg.probe.layer_drop)
        blocks = [(name, i) for name, stack in self.model.stacks.items() for i in range(len(stack.blocks))]
        self.journal = Journal(cfg, folder, log, self.meter.ids, blocks)
        self.clock = Clock()

    def run(self) -> dict[str, Any]:
        cfg, stop, journal = self.cfg, self.cfg.stop, self.journal
        init_val_loss = self.evaluate()
        stopped = None
        for step in range(cfg.steps):
            row: dict[str, Any] = {
                "step": step,
                "tokens": (step + 1) * cfg.data.batch_size * cfg.model.context,
                "lr": optim.learning_rate(cfg.optim, step, cfg.steps),
            }
            if _due(step, cfg.eval.every):
                row["val_loss"] = init_val_loss if step == 0 else self.evaluate()
            if self.profiled(step):
                self.write_profile(step, before_a_step=True)
            if journal.ended:
                break
            batch = self.to_device(self.task.batch(cfg.seed, step))
            loss = self.backward(batch)
            norms, nonfinite = self.meter.gradients()
            self.update(row["lr"], norms)
            others = self.meter.update(self.optimizer)
            if cfg.probe.sharpness and self.profiled(step):
                row["critical_sharpness"] = self.sharpness(batch, row["lr"])
            journal.add(row, loss, norms, nonfinite, others)

            if (step + 1) % cfg.log.every == 0 or step + 1 == cfg.steps:
                journal.flush(self.clock.lap)
                if journal.ended:
                    break
                if stop.hopeless and journal.hopeless(init_val_loss):
                    stopped = "hopeless"
                    break
        if journal.ended:
            return self.result(init_val_loss, float("nan"), "not finite")
        self.write_profile(len(journal.losses), before_a_step=False)
        return self.result(init_val_loss, self.evaluate() if cfg.steps else init_val_loss, stopped)

    def backward(self, batch: Batch) -> Tensor:
        """Gradients of the batch's mean objective, micro-batch by micro-batch; its mean cross-entropy."""
        losses = []
        for part, share in micro_batches(batch, self.cfg.micro_batch):
            objective, loss = self.objective(*part)
            (objective * share).backward()
            losses.append(loss.detach() * share)
        return sum(losses[1:], losses[0])

    def update(self, lr: float, norms: Tensor) -> None:
        """Clip by the global norm if asked, then one optimizer step at rate lr."""
        if self.cfg.optim.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.cfg.optim.clip, global_norm(norms))
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

    def evaluate(self) -> float:
        """Mean loss over the held-out batches."""
        with self.measuring():
            if self.journal.ended:
                return float("nan")
            with evaluating(self.model):
                losses = [self.objective(*batch)[1] for batch in self.held_out]
            return torch.stack(losses).mean().item()

    def profiled(self, step: int) -> bool:
        """Whether this step gets a full profile: the first, the one after warm-up, and each probe.every."""
        return step in {0, self.cfg.optim.warmup_steps} or _due(step, self.cfg.probe.every)

    def write_profile(self, step: int, *, before_a_step: bool) -> None:
        """Full per-layer profile of the weights before update `step`, or after the last one."""
        with self.measuring():
            if self.cfg.probe.batches and not self.journal.ended:
                table = self.profile()
                if before_a_step:  # which records these itself
                    table = table.query("stat != 'weight_norm'")
                self.folder.layers(step, table)

    def sharpness(self, batch: Batch, lr: float) -> float:
        """Along the update that was just made, on its own batch."""

        def loss() -> Tensor:
            return self.objective(*batch)[1]

        with self.clock.paused(), evaluating(self.model):
            return critical_sharpness(loss, self.meter.weights, self.meter.last_update, lr)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Keep the time of a measurement out of the time of the steps, and its rows behind theirs."""
        self.journal.flush(self.clock.lap)
        with self.clock.paused():
            yield

    def result(self, init_val_loss: float, final_val_loss: float, stopped: str | None) -> dict[str, Any]:
        """The numbers of run.json. h1 and h2 are those of the evaluated tokens, as the verdict uses them."""
        cfg, losses = self.cfg, self.journal.losses

        def reference(known: int) -> float:
            return float(np.mean([self.task.reference_loss(batch, known) for batch in self.held_out]))

        h1, h2 = reference(0), reference(1)
        exact = self.task.source.entropy_rate is not None and cfg.model.arch != "encoder"  # which sees both sides
        judged = self.journal.judged(init_val_loss=init_val_loss, final_val_loss=final_val_loss, h1=h1, h2=h2)
        self.journal.close()
        tokens = len(losses) * cfg.data.batch_size * cfg.model.context
        return {
            "parameters": count_parameters(self.model),
            "steps_done": len(losses),
            "stopped": stopped,
            "h1": h1,
            "h2": h2,
            "init_val_loss": init_val_loss,
            "final_val_loss": final_val_loss,
            "final_loss": losses[-1] if losses else None,
            "excess_loss": final_val_loss - reference(self.task.window) if exact else None,
            "seconds": self.clock.total,
            "tokens_per_second": tokens / self.clock.total if losses else None,
            **judged,
        }


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
