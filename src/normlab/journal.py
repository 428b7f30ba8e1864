"""What a run's steps told, read from the device now and then: written down, watched live, and summed up at the end."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normlab import meter, optim, relabel, store, verdict
from normlab.config import Config
from normlab.heatmap import HeatMap
from normlab.log import Log
from normlab.signals import unbroken
from normlab.spikes import Detector, log_norm
from normlab.tensors import TensorId

WANDB_NAMES = {
    "loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "update_norm": "train/update_norm",
    "tokens": "train/tokens",
    "seconds": "train/seconds_per_step",
    "critical_sharpness": "train/critical_sharpness",
    "loss_scale": "train/loss_scale",
    "val_loss": "val/loss",
    "bleu": "val/bleu",
}
Block = tuple[str, int]  # stack, layer


class Journal:
    """The rows of one run. Steps wait on the device until `flush`, which reads them all at once."""

    def __init__(
        self, cfg: Config, folder: store.RunFolder, log: Log, ids: list[TensorId], blocks: list[Block]
    ) -> None:
        self.cfg, self.folder, self.log, self.ids, self.blocks = cfg, folder, log, ids, blocks
        owner = [(tensor.stack, tensor.layer) for tensor in ids]
        self._columns = [[i for i, block in enumerate(owner) if block == wanted] for wanted in blocks]
        several = len({stack for stack, _ in blocks}) > 1
        self._names = [f"grad_norm/{f'{s}_' if several else ''}layer_{layer:03d}" for s, layer in blocks]
        # below_eps tells nothing of an optimizer without a second moment under its root
        self._stats = meter.STATS if cfg.optim.name in {"adam", "adamw"} else meter.STATS[:-1]
        self._heat = HeatMap(blocks, cfg.steps)
        self._pending: list[tuple[dict[str, Any], Tensor, Tensor, Tensor]] = []
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.loss_scales: list[float] = []
        self.skipped = 0
        self.first_bad: int | None = None
        # each block's norms up to and with the first non-finite step, newest last
        self._before: deque[Mapping[str, np.ndarray]] = deque(maxlen=128)
        self._labels = {name: rule.label(name, cfg.steps) for name, rule in cfg.spikes.rules.items()}
        self.detectors: dict[tuple[str, str], Detector] = {}
        for name, rule in cfg.spikes.rules.items():
            self.detectors["loss", name] = Detector(rule.for_run(cfg.steps))
            self.detectors["grad_norm", name] = Detector(rule.for_run(cfg.steps).for_norms())

    def add(
        self, row: dict[str, Any], loss: Tensor, scale: Tensor, norms: Tensor, nonfinite: Tensor, others: Tensor
    ) -> None:
        """One step: meter.STATS are `norms`, then `others`, each over the tensors. scale: the step's of its loss."""
        self._pending.append((row, torch.stack((loss, scale)), torch.cat((norms[None], others)), nonfinite))

    def flush(self, lap: Callable[[], float]) -> None:
        """Read what waits and write it; up to the first non-finite step if the run ends there.

        lap: the seconds of training since the last flush, asked for once the device has done them.
        """
        if not self._pending or self.ended:
            return
        rows, losses, stats, nonfinite = zip(*self._pending, strict=True)
        self._pending.clear()
        loss, scale = torch.stack(losses).double().cpu().numpy().T
        values = torch.stack(stats).double().cpu().numpy()  # (steps, stats, tensors)
        bad_counts = torch.stack(nonfinite).double().cpu().numpy()
        seconds = lap()
        total = np.linalg.norm(values[:, [0, 2]], axis=2)  # of gradients and updates
        count = self._watch_finite(loss.tolist(), total[:, 0].tolist(), scale.tolist())
        written = [
            row | {"loss": loss[i].item(), "grad_norm": total[i, 0].item(), "update_norm": total[i, 1].item(),
                   "seconds": seconds / len(rows)}
            for i, row in enumerate(rows[:count])
        ]  # fmt: skip
        if self.cfg.precision == "fp16":
            for i, row in enumerate(written):
                row |= {"loss_scale": scale[i].item(), "skipped": bool(bad_counts[i].any())}
        values = values[:count, : len(self._stats)]
        with unbroken():
            self.folder.metrics(written)
            done = 0
            for bad in np.flatnonzero(bad_counts[:count].any(axis=1)):
                self.folder.step_statistics(rows[done]["step"], self.ids, self._stats, values[done : bad + 1])
                self.folder.step_statistics(rows[bad]["step"], self.ids, ["nonfinite"], bad_counts[bad : bad + 1, None])
                done = bad + 1
            if done < count:
                self.folder.step_statistics(rows[done]["step"], self.ids, self._stats, values[done:])
        self._absorb(written, values)

    def replay(self) -> float:
        """Go on behind the rows that the run folder kept, as if they had just been made; their seconds of training."""
        rows = self.folder.rows()
        done = 0
        for values in self.folder.statistics(self._stats, len(self.ids)):
            chunk = rows[done : done + len(values)]
            scales = [row.get("loss_scale", 1.0) for row in chunk]
            self._watch_finite([row["loss"] for row in chunk], [row["grad_norm"] for row in chunk], scales, news=False)
            self._absorb(chunk, values)
            done += len(values)
        if done != len(rows):
            raise ValueError(f"{self.folder.path}: {len(rows)} steps in metrics.jsonl, {done} in layers/")
        return sum(row["seconds"] for row in rows)

    def _absorb(self, rows: list[dict[str, Any]], values: np.ndarray) -> None:
        """Remember and show the steps whose rows are on disk; values: (steps, stats, tensors)."""
        if not rows:
            return
        by_block = {stat: self._by_block(values[:, i]) for i, stat in enumerate(meter.STATS[:3])}
        count = len(rows)
        leading = count if self.first_bad is None else max(0, min(count, self.first_bad + 1 - len(self.losses)))
        self._before.extend({stat: found[i] for stat, found in by_block.items()} for i in range(leading))
        for i, row in enumerate(rows):
            self._show(row, by_block["weight_grad_norm"][i])
        self.losses += [row["loss"] for row in rows]
        self.grad_norms += [row["grad_norm"] for row in rows]
        self.loss_scales += [row.get("loss_scale", 1.0) for row in rows]
        self.skipped += sum(row.get("skipped", False) for row in rows)
        self.log.progress(count, loss=self.losses[-1], lr=rows[-1]["lr"], grad=self.grad_norms[-1])

    def _watch_finite(
        self, losses: list[float], grad_norms: list[float], scales: list[float], *, news: bool = True
    ) -> int:
        """How many of these steps are kept; notes the run's first non-finite one, with an alert if it is news."""
        bad = verdict.first_nonfinite(losses, grad_norms, scales)
        if bad is None or self.first_bad is not None:
            return len(losses)
        self.first_bad = len(self.losses) + bad
        if news:
            self.log.alert("diverged", f"{self.folder.path.name}: loss or gradient not finite at step {self.first_bad}")
        return bad + 1 if self.cfg.stop.nonfinite else len(losses)

    def _by_block(self, norms: np.ndarray) -> np.ndarray:
        """(steps, tensors) -> (steps, blocks): L2 norm over the tensors of each block."""
        # contiguous rows, so that a sum's order does not hang on how many steps came together
        parts = (np.ascontiguousarray(norms[:, columns]) for columns in self._columns)
        return np.stack([np.linalg.norm(part, axis=1) for part in parts], axis=1)

    def _show(self, row: Mapping[str, Any], layers: np.ndarray) -> None:
        """One W&B row: the metrics, the blocks' gradients, each detector's z, and a mark where the loss is a spike."""
        shown = {WANDB_NAMES[k]: v for k, v in row.items() if k in WANDB_NAMES}
        shown |= dict(zip(self._names, layers.tolist(), strict=True))
        for (series, name), detector in self.detectors.items():
            z = detector.push(log_norm(row[series]) if series == "grad_norm" else row[series])
            if math.isfinite(z):
                shown[f"spikes/{series}_{self._labels[name]}"] = z
            if series == "loss" and name == self.cfg.spikes.judge and detector.flagged:
                shown["train/loss_spike"] = row["loss"]
        self._heat.push(row["step"], layers)
        self.log.row(row["step"], shown)

    @property
    def ended(self) -> bool:
        """A non-finite step was read, and the run stops at those."""
        return self.first_bad is not None and self.cfg.stop.nonfinite

    def hopeless(self, init_val_loss: float) -> bool:
        rule, recent = self.cfg.verdict, self.losses[-(self.cfg.verdict.patience + self.cfg.log.every) :]
        return verdict.hopeless(recent, init_val_loss, rule.rise, rule.patience) is not None

    def judged(self, *, init_val_loss: float, final_val_loss: float, h1: float, h2: float) -> dict[str, Any]:
        """Spikes, verdict, and where it began: the part of run.json that the rules decide."""
        cfg = self.cfg
        found = relabel.judged(
            rules(cfg),
            losses=self.losses,
            grad_norms=self.grad_norms,
            loss_scales=self.loss_scales,
            steps=cfg.steps,
            warmup_steps=cfg.optim.warmup_steps,
            init_val_loss=init_val_loss,
            final_val_loss=final_val_loss,
            h1=h1,
            h2=h2,
        )
        if not cfg.steps:
            return {**found, "verdict": None, "reason": "no training: initialisation only", "first_bad_step": None}
        if found["verdict"] == "diverged" and self.first_bad is None:  # told at once where it was not finite
            self.log.alert("diverged", f"{self.folder.path.name}: {found['reason']}")
        bad = found["first_bad_step"]
        rate = None if bad is None else optim.learning_rate(cfg.optim, bad, cfg.steps)
        return found | {"first_bad_lr": rate} | self._first_bad_layer()

    def _first_bad_layer(self) -> dict[str, Any]:
        """The block to blame for the first non-finite step, and every block's last finite numbers."""
        told: dict[str, Any] = dict.fromkeys(
            ("first_bad_stack", "first_bad_layer", "first_bad_layer_why", "last_finite")
        )
        if self.first_bad is None:
            return told
        history = {stat: np.stack([step[stat] for step in self._before]) for stat in self._before[-1]}
        first = self.first_bad + 1 - len(self._before)
        blame = verdict.first_bad_layer(
            history["weight_norm"],
            history["weight_grad_norm"],
            factor=self.cfg.verdict.out_of_range,
            window=len(self._before),
            first_step=first,
        )
        finite = [i for i in range(len(self._before)) if all(np.isfinite(h[i]).all() for h in history.values())]
        if finite:
            last = {stat: norms[finite[-1]].tolist() for stat, norms in history.items()}
            told |= {"last_finite": {"step": first + finite[-1], **last}}
        if blame is not None:
            stack, layer = self.blocks[blame.index]
            told |= {"first_bad_stack": stack, "first_bad_layer": layer, "first_bad_layer_why": blame.why}
        return told | {"out_of_range": self.cfg.verdict.out_of_range}

    def close(self) -> None:
        """The spikes as a W&B table, the blocks' gradients as a picture."""
        columns = ["series", "detector", "start", "end", "duration", "peak", "height", "z", "offset"]
        rows = [
            [series, self._labels[name], s.start, s.end, s.duration, s.peak, s.height, s.z, s.offset]
            for (series, name), detector in self.detectors.items()
            for s in detector.events
        ]
        if rows:
            self.log.table("spikes/events", columns, rows)
        if self.log.shows and self._heat.steps:
            self.log.image("grad_norm/heat_map", self._heat.png())


def rules(cfg: Config) -> dict[str, Any]:
    """The rules that label a run, as its record keeps them and normlab.relabel takes them."""
    return {
        "version": verdict.RULES_VERSION,
        "spikes": cfg.spikes.model_dump(exclude={"judge"}),
        "judge": cfg.spikes.judge,
        "verdict": cfg.verdict.model_dump(exclude={"out_of_range"}),
    }


def verdict_counts(record: Mapping[str, Any]) -> dict[str, int]:
    """A one for the run's verdict and zeros for the others, which W&B can add up over runs: it cannot count texts."""
    if record["verdict"] is None:
        return {}
    return {f"verdict/{name}": int(name == record["verdict"]) for name in verdict.NAMES}
