"""Runs of one shape that train at once, each as if it were alone.

A run goes through `train.training` as it does alone, with its own folder, measurements, verdict and end; only its
updates are made together with the others'. No member's numbers enter another's.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from normlab import stacked, task, train
from normlab.config import Config
from normlab.device import pick_device
from normlab.fit import Asked
from normlab.learner import Made
from normlab.model import build
from normlab.objective import Batch, micro_batches
from normlab.signals import Postponed
from normlab.stacked_meter import StackedMeter
from normlab.train import Record

End = Record | BaseException
Ended = Callable[[Config, End], object]
_NARROW, _WIDEST = 32, 64  # widths up to which packs of any size, and small ones, pay on a CPU


def most(cfg: Config) -> int:
    """Runs of this shape that train at once: `pack`, or as many as pay on a CPU (benchmarks/packing.py)."""
    narrow = pick_device(cfg.device).type != "cpu" or cfg.model.width <= _NARROW
    return cfg.pack if narrow else min(cfg.pack, 4)


def alone(cfg: Config) -> str | None:
    """Why a run trains alone whatever `pack` says; None if it may share a pack."""
    if not cfg.steps:
        return "it makes no steps"
    if pick_device(cfg.device).type == "cpu" and cfg.model.width > _WIDEST:
        return f"model.width={cfg.model.width}; on a CPU packs pay up to {_WIDEST}"
    for key, value, packed in (
        ("precision", cfg.precision, "fp32"),
        ("model.dropout", cfg.model.dropout, 0),
        ("compile", cfg.compile, False),
        ("tf32", cfg.tf32, False),  # a switch of the process, as is the kernel of attention
        ("attention", cfg.attention, "auto"),
    ):
        if value != packed:
            return f"{key}={value}; in a pack: {packed}"
    vocab = task.make(cfg).vocab
    with torch.device("meta"):
        part = stacked.lacking(build(cfg.model, vocab))
    return part and f"a pack has no form for {part}"


def shape(cfg: Config) -> dict[str, Any]:
    """What runs of one pack have in common: all that a run id says but seed, rate, warm-up, schedule and init.

    The seed too where batches have shapes of their own, which follow from it.
    """
    settings, model = cfg.identity(), cfg.model
    del settings["model"]["init"]
    if cfg.data.name != "parallel":
        del settings["seed"]
    for key in ("lr", "warmup_steps", "schedule"):
        del settings["optim"][key]
    stacks = ("encoder", "decoder") if model.arch == "encoder_decoder" else (model.arch,)
    return settings | {
        "data": cfg.data.model_dump(),
        "device": cfg.device,
        "scales": [model.logit_scale, model.score_scale, *map(model.branch_scale, stacks)],  # init=completep's
    }


def together(cfgs: Sequence[Config], ended: Ended = lambda *_: None) -> list[Record | Exception]:
    """Train all of them at once; their records, or the exceptions that they ended by, in their order.

    ended: called with each as it ends. A signal stops every member after its step and is delivered then.
    """
    with Postponed() as signals:
        members = [Member(cfg, signals, ended) for cfg in cfgs]
        pack: Pack | None = None
        try:
            for member in members:
                member.advance()
            while live := [member for member in members if member.asked is not None]:
                if pack is None or pack.members != live:
                    pack = Pack(live)
                pack.step()
        except BaseException as error:
            for member in members:
                member.fail(error)
            if not isinstance(error, Exception):
                raise
    stopped = [m.end for m in members if isinstance(m.end, KeyboardInterrupt | SystemExit)]
    if stopped:
        raise stopped[0]
    return [member.end for member in members]  # pyright: ignore[reportReturnType]


class _Relay(Postponed):
    """What a member sees of the signals that wait for the whole pack: it ends by its own exception."""

    def __init__(self, whole: Postponed) -> None:
        super().__init__()
        self.waiting = whole.waiting
        self.raised: BaseException | None = None

    def __enter__(self) -> "_Relay":
        return self

    def __exit__(self, *_: object) -> None:
        """The pack's are delivered when all members have ended."""

    def deliver(self) -> None:
        if self.waiting:
            self.raised = KeyboardInterrupt()
            raise self.raised


class Member:
    """One run between its steps."""

    def __init__(self, cfg: Config, signals: Postponed, ended: Ended) -> None:
        self.cfg, self._signals, self._ended = cfg, _Relay(signals), ended
        self._run = train.training(cfg, self._signals)
        self.asked: Asked | None = None  # the update that it waits for
        self.end: End | None = None
        self._left = 0.0

    def advance(self, made: Made | None = None, share: float = 0.0) -> None:
        """On to the next update, or to the end. share: seconds of the last one that this run answers for."""
        if self.asked is not None:
            self.asked.fit.clock.skip(time.perf_counter() - self._left - share)
        self._go(lambda: next(self._run) if made is None else self._run.send(made))

    def fail(self, error: BaseException) -> None:
        """Let it end by an error of the pack, if it has not ended."""
        if self.end is None:
            with suppress(type(error)):
                self._go(lambda: self._run.throw(error))

    def _go(self, act: Callable[[], Asked]) -> None:
        try:
            self.asked = act()
        except StopIteration as end:
            self.end = end.value
        except BaseException as error:
            self.end = error
            if not isinstance(error, Exception) and error is not self._signals.raised:
                raise  # a second signal, at once
        finally:
            if self.end is not None:
                self.asked = None
                self._ended(self.cfg, self.end)
        self._left = time.perf_counter()


class Pack:
    """Members that make their updates together while their batches have one shape, else one after the other."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = list(members)
        fits = [member.asked.fit for member in members if member.asked is not None]
        self._meter = StackedMeter(fits)
        stacks: stacked.Stacks = dict(zip(self._meter.parameters, self._meter.stacks, strict=True))
        self._models = stacked.Stacked([fit.model for fit in fits], stacks)

    def step(self) -> None:
        """Every member on to its next update, or to its end."""
        start = time.perf_counter()
        asked = [member.asked for member in self.members if member.asked is not None]
        first = asked[0].fit
        if len(asked) > 1 and len({_shapes(each.batch) for each in asked}) == 1:
            losses, grads = self._gradients([each.batch for each in asked], first.cfg)
            made = self._meter.update(losses.to(first.device), grads, [each.lr for each in asked])
        else:
            made = [each.fit.made(each.batch, each.lr) for each in asked]
        share = (time.perf_counter() - start) / len(asked)
        for member, told in zip(self.members, made, strict=True):
            member.advance(told, share)

    def _gradients(self, batches: Sequence[Batch], cfg: Config) -> tuple[Tensor, list[Tensor | None]]:
        """Mean losses of the members' batches, (M,), and the stacks' gradients."""
        losses: list[Tensor] = []
        whole: list[Tensor | None] = [None] * len(self._meter.stacks)
        for parts in zip(*(micro_batches(batch, cfg.micro_batch) for batch in batches), strict=True):
            objective, loss = self._models.losses([part for part, _ in parts], cfg.label_smoothing)
            shares = torch.stack([torch.as_tensor(share) for _, share in parts]).to(loss.device)
            grads = torch.autograd.grad((objective * shares).sum(), self._meter.stacks, allow_unused=True)
            whole = [b if a is None else a if b is None else a + b for a, b in zip(whole, grads, strict=True)]
            losses.append(loss.detach() * shares)
        return sum(losses[1:], losses[0]), whole


def _shapes(batch: Batch) -> tuple[torch.Size, ...]:
    inputs, targets = batch
    return *(part.shape for part in (inputs if isinstance(inputs, tuple) else (inputs,))), targets.shape
