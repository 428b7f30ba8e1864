"""A model and one update of it: gradients of a batch, statistics, clipping, the optimizer's step."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from normlab import kernels, optim
from normlab.config import Config
from normlab.distributed import ALONE, Ranks
from normlab.init import calibrate, initialise
from normlab.isolation import seed_all
from normlab.meter import StepMeter, global_norm
from normlab.model import build, compile_blocks, compiled
from normlab.objective import Batch, Task, micro_batches


class Made(NamedTuple):
    """What an update told: the batch's loss, and of the tensors meter.STATS and counts of non-finite gradients."""

    loss: Tensor
    norms: Tensor  # (tensors,), of the gradients
    nonfinite: Tensor  # (tensors,)
    others: Tensor  # (4, tensors)


class Learner:
    """What is trained: the model, its optimizer, its meter, and the loss scaler of fp16."""

    def __init__(self, cfg: Config, learned: Task, device: torch.device, ranks: Ranks = ALONE) -> None:
        seed_all(cfg.seed)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.cfg, self.device, self.ranks = cfg, device, ranks
        self.model = build(cfg.model, learned.vocab)
        initialise(self.model, cfg.model, cfg.seed)
        self.model.to(device)
        first = self.to_device(learned.batch(cfg.seed, 0))[0]
        calibrate(self.model, first)
        self.attention = kernels.attention_used(self.model, first, self.autocast())
        self.optimizer = optim.make(self.model, cfg.optim, cfg.model)
        add_up = ranks.add_up if ranks.size > 1 else None
        self.meter = StepMeter(self.model, self.optimizer, keep_update=cfg.probe.sharpness, add_up=add_up)
        # float16 alone: bfloat16 has the exponents of float32 (Micikevicius et al. 2017, arXiv 1710.03740, section 3.2)
        self.scaler = torch.amp.GradScaler(device.type, enabled=cfg.precision == "fp16")
        self.one = torch.ones((), device=device)
        self.scaler.scale(self.one)  # begins it: a rank may have no sequence of the first batch
        self.graphs = cfg.compile == "reduce-overhead"
        self._objective = self.model.objective
        if cfg.compile == "whole":
            self._objective = compiled(self.model)
        elif cfg.compile:
            compile_blocks(self.model, "reduce-overhead" if self.graphs else None)

    def made(self, batch: Batch, lr: float) -> Made:
        """One update, on this batch at this rate, and what it told."""
        loss = self.backward(batch)
        norms, nonfinite = self.meter.gradients(self.scaler)
        return Made(loss, norms, nonfinite, self.update(lr, norms))

    def backward(self, batch: Batch) -> Tensor:
        """Gradients of the batch's mean objective, micro-batch by micro-batch; its mean cross-entropy.

        Of several ranks: their gradients, and these losses, are parts of sums.
        """
        losses = []
        for part, share in micro_batches(batch, self.cfg.micro_batch, self.ranks.rows(len(batch[1]))):
            if self.graphs and len(losses) == 1:
                self.keep_gradients()
            objective, loss = self.objective(*part)
            self.scaler.scale(objective * share).backward()
            losses.append(loss.detach() * share)
        loss = sum(losses[1:], losses[0]) if losses else torch.zeros((), device=self.device)
        self.ranks.add_up(loss)
        return loss

    def keep_gradients(self) -> None:
        """Take them out of the CUDA graphs' memory, which the next micro-batch's replay writes over."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def update(self, lr: float, norms: Tensor) -> Tensor:
        """Clip by the global norm if asked, then one optimizer step at rate lr; what the meter tells of it.

        fp16: no step where a gradient is not finite.
        """
        if self.cfg.optim.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.meter.flat, self.cfg.optim.clip, global_norm(norms))
        self.set_rate(lr)
        return self.meter.update((~norms.isfinite()).any().float() if self.scaler.is_enabled() else None)

    def set_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]

    def objective(self, inputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        """What the step descends, and its cross-entropy."""
        if self.graphs:  # what the graphs of all blocks gave for the last batch has been read
            torch.compiler.cudagraph_mark_step_begin()
        with self.autocast():
            return self._objective(inputs, targets, self.cfg.label_smoothing)

    def autocast(self) -> torch.autocast:
        narrow = kernels.NARROW.get(self.cfg.precision)
        return torch.autocast(self.device.type, narrow, enabled=narrow is not None)

    def to_device(self, batch: Batch) -> Batch:
        def move(tokens: Any) -> Any:
            if isinstance(tokens, tuple):
                return tuple(map(move, tokens))
            if self.device.type == "cuda":  # pinned, so that the copy does not wait for the device
                tokens = tokens.pin_memory()
            return tokens.to(self.device, non_blocking=True)

        return move(batch[0]), move(batch[1])
