"""The loop of one run: evaluate, profile, ask for an update, log and checkpoint, in this order, and sum up."""

import math
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from normlab import checkpoint, flops, optim, store
from normlab.config import Config
from normlab.device import Clock, device_name
from normlab.distributed import ALONE, Ranks
from normlab.evaluation import HeldOut
from normlab.journal import Journal
from normlab.learner import Learner, Made
from normlab.log import Log
from normlab.objective import Batch, Task
from normlab.probe import Profile, evaluating
from normlab.sharpness import critical_sharpness
from normlab.signals import Postponed
from normlab.tensors import count_parameters

Ended = TypeVar("Ended")  # what a run returns


class Asked(NamedTuple):
    """An update of a run's model that whoever drives the run shall make: on this batch, at this rate."""

    fit: "Fit"
    batch: Batch
    lr: float


def alone(run: Generator[Asked, Made, Ended]) -> Ended:
    """Make the updates that one run asks for, to its end; what it returns."""
    with closing(run):
        try:
            asked = next(run)
            while True:
                try:
                    made = asked.fit.made(asked.batch, asked.lr)
                except BaseException as error:
                    asked = run.throw(error)
                else:
                    asked = run.send(made)
        except StopIteration as end:
            return end.value


class Fit(Learner):
    """The state of one training run and its loop, which asks for updates: `made` makes one, normlab.pack several."""

    def __init__(
        self,
        cfg: Config,
        learned: Task,
        device: torch.device,
        folder: store.RunFolder,
        log: Log,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(cfg, learned, device, ranks)
        self.task, self.folder = learned, folder
        held_out = [self.to_device(b) for b in learned.held_out(cfg.eval.batches)]
        self.held_out = HeldOut(learned, held_out, device=device, micro_batch=cfg.micro_batch, ranks=ranks)
        batches = [self.to_device(b) for b in learned.held_out(cfg.probe.batches)]
        how: dict[str, Any] = {"scale": self.scaler.get_scale, "micro_batch": cfg.micro_batch}
        self.profile = Profile(self.model, self.objective, batches, layer_drop=cfg.probe.layer_drop, **how)
        blocks = [(name, i) for name, stack in self.model.stacks.items() for i in range(len(stack.blocks))]
        self.journal = Journal(cfg, folder, log, self.meter.ids, blocks)
        self.clock = Clock()
        self.start, self.init_val_loss, self.stopped = 0, math.nan, None
        self.saved = time.monotonic()

    def run(self, signals: Postponed) -> Generator[Asked, Made, dict[str, Any]]:
        if self.start == 0:
            self.init_val_loss = self.evaluate()
        with signals:
            yield from self.steps(signals)
        if self.journal.ended:
            return self.result(float("nan"), "not finite")
        self.write_profile(len(self.journal.losses), before_a_step=False)
        return self.result(self.evaluate() if self.cfg.steps else self.init_val_loss, self.stopped)

    def steps(self, signals: Postponed) -> Generator[Asked, Made, None]:
        """The training steps that are left; a checkpoint of the last one, unless it was not finite."""
        cfg, journal = self.cfg, self.journal
        for step in range(self.start, cfg.steps if self.stopped is None else 0):
            row: dict[str, Any] = {
                "step": step,
                "tokens": self.task.tokens_seen(cfg.seed, step + 1),
                "lr": optim.learning_rate(cfg.optim, step, cfg.steps),
            }
            if _due(step, cfg.eval.every):
                row["val_loss"] = self.init_val_loss if step == 0 else self.evaluate()
            if self.task.scored(step):
                row |= self.scores()
            if self.profiled(step):
                self.write_profile(step, before_a_step=True)
            if journal.ended:
                break
            self.ranks.draw_apart(cfg.seed, step)
            batch = self.to_device(self.task.batch(cfg.seed, step))
            made = yield Asked(self, batch, row["lr"])
            if cfg.probe.sharpness and self.profiled(step) and self.ranks.first:
                row["critical_sharpness"] = self.sharpness(batch, row["lr"])
            journal.add(row, made.loss, self.scaler.scale(self.one), made.norms, made.nonfinite, made.others)
            self.scaler.update()

            if (step + 1) % cfg.log.every == 0 or step + 1 == cfg.steps:
                journal.flush(self.clock.lap)
                if journal.ended:
                    break
                if cfg.stop.hopeless and journal.hopeless(self.init_val_loss):
                    self.stopped = "hopeless"
                    break
            asked = self.ranks.any_signal(signals.waiting)
            if asked or (step + 1 < cfg.steps and self.checkpoint_due(step + 1)):
                self.checkpoint(step + 1)
                signals.deliver()
                if asked:
                    self.ranks.stop(asked)
        if cfg.steps and self.start < len(journal.losses):
            self.checkpoint(len(journal.losses))

    def checkpoint_due(self, done: int) -> bool:
        every, seconds = self.cfg.checkpoint.every, self.cfg.checkpoint.seconds
        return _due(done, every) or (seconds > 0 and time.monotonic() - self.saved >= seconds)

    def checkpoint(self, done: int) -> None:
        """Write down all that the steps from `done` on need, but never weights that are not finite any more."""
        with self.measuring():
            if self.journal.ended or not self.ranks.first:
                return
            state = {
                "step": done,
                "stopped": self.stopped,
                "init_val_loss": self.init_val_loss,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "profiled_logits": self.profile.logits,
                "kept": self.folder.kept(),
            }
            checkpoint.write(self.folder.path, self.folder.path.name, state, self.device)
            self.saved = time.monotonic()

    def resume(self, state: Mapping[str, Any]) -> None:
        """Take up a run where its checkpoint left it."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state.get("scaler", {}))  # none before there was fp16
        logits = state["profiled_logits"]
        self.profile.logits = None if logits is None else logits.to(self.device)
        self.start, self.stopped, self.init_val_loss = state["step"], state["stopped"], state["init_val_loss"]
        self.clock.total = self.journal.replay()
        checkpoint.restore_random(state, self.device)

    def evaluate(self) -> float:
        """Mean loss over the targets of the held-out batches."""
        with self.measuring():
            if self.journal.ended:
                return float("nan")
            with evaluating(self.model):
                return self.held_out.loss(self.objective)

    def scores(self, folder: Path | None = None) -> dict[str, Any]:
        """What the task measures beside its loss; of the end, where a folder is given."""
        with self.measuring(), evaluating(self.model):
            if self.journal.ended or not self.ranks.first:
                return {}
            with self.autocast():
                return self.task.scores(self.model, self.device, folder)

    def profiled(self, step: int) -> bool:
        """Whether this step gets a full profile: the first, the one after warm-up, and each probe.every."""
        return step in {0, self.cfg.optim.warmup_steps} or _due(step, self.cfg.probe.every)

    def write_profile(self, step: int, *, before_a_step: bool) -> None:
        """Full per-layer profile of the weights before update `step`, or after the last one."""
        with self.measuring():
            if self.cfg.probe.batches and not self.journal.ended and self.ranks.first:
                table = self.profile()
                if before_a_step:  # which records these itself
                    table = table.query("stat != 'weight_norm'")
                self.folder.layers(step, table)

    def sharpness(self, batch: Batch, lr: float) -> float:
        """Along the update that was just made, on its own batch."""

        def loss() -> Tensor:
            return self.objective(*batch)[1]

        assert self.meter.last_update is not None
        with self.clock.paused(), evaluating(self.model):
            return critical_sharpness(loss, self.meter.weights, self.meter.last_update, lr)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Keep the time of a measurement out of the time of the steps, and its rows behind theirs."""
        self.journal.flush(self.clock.lap)
        with self.clock.paused():
            yield

    def result(self, final_val_loss: float, stopped: str | None) -> dict[str, Any]:
        """The numbers of run.json. h1 and h2 are those of the evaluated tokens, as the verdict uses them."""
        cfg, losses = self.cfg, self.journal.losses

        h1, h2, floor = self.held_out.reference(0), self.held_out.reference(1), self.held_out.floor()
        scores = self.scores(self.folder.path) if cfg.steps else {}
        judged = self.journal.judged(init_val_loss=self.init_val_loss, final_val_loss=final_val_loss, h1=h1, h2=h2)
        self.journal.close()
        tokens = self.task.tokens_seen(cfg.seed, len(losses))
        speed = tokens / self.clock.total if losses else None
        per_token = flops.per_token(self.model, self.held_out.length)
        return {
            "parameters": count_parameters(self.model),
            "steps_done": len(losses),
            "skipped_steps": self.journal.skipped,
            "stopped": stopped,
            "h1": h1,
            "h2": h2,
            "init_val_loss": self.init_val_loss,
            "final_val_loss": final_val_loss,
            "final_loss": losses[-1] if losses else None,
            "excess_loss": None if floor is None else final_val_loss - floor,
            "seconds": self.clock.total,
            "tokens_per_second": speed,
            "flops_per_token": per_token,
            "mfu": flops.utilisation(per_token, speed, device_name(self.device), cfg.number_format, self.ranks.size),
            "peak_memory_mb": flops.peak_memory_mb(self.device),
            "attention_backend": self.attention,
            **scores,
            **judged,
        }


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
