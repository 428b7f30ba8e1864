"""One run on several processes of one machine, as torchrun starts them: the global batch is split by its sequences.

Each rank lives the whole run: the same weights, batches, losses and norms, and so the same decisions at the same step.
The gradients of its slice are added up over the ranks before anything is measured of them. Rank 0 alone writes.
"""

import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from normlab.config import Config
from normlab.device import pick_device
from normlab.explain import ConfigError
from normlab.store import RunFolder, tail_of

PATIENCE = timedelta(days=1)  # rank 0 profiles and translates alone; that a rank died shows at once


def world() -> tuple[int, int]:
    """(rank, ranks) of this process; (0, 1) where torchrun did not start it."""
    if not (dist.is_available() and dist.is_torchelastic_launched()):
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def check(cfg: Config, *, multirun: bool = False) -> None:
    """Raise ConfigError for what does not run on several ranks."""
    _, size = world()
    if size == 1:
        return
    if multirun:
        raise ConfigError(f"torchrun with {size} ranks makes one run: leave out -m and +sweeps, or torchrun")
    kind = pick_device(cfg.device).type
    if cfg.device not in {"auto", "cpu", "cuda"} or kind == "mps":
        raise ConfigError(f"device={cfg.device}: torchrun gives each of its ranks a device; accepted: auto, cpu, cuda")
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    if kind == "cuda" and here > torch.cuda.device_count():
        raise ConfigError(f"torchrun with {here} ranks: this machine has {torch.cuda.device_count()} CUDA devices")
    if here != size:
        raise ConfigError(f"torchrun with {size} ranks, {here} of them here; accepted: all on one machine")
    if cfg.model.norm == "batchnorm":
        raise ConfigError(
            f"model.norm=batchnorm takes statistics over a batch, of which each of {size} ranks has a part; "
            "accepted: another norm, or one process"
        )


class Ranks:
    """The ranks of a run as one of them sees them; all of them call the same methods in the same order."""

    def __init__(self, rank: int = 0, size: int = 1, store: dist.Store | None = None) -> None:
        self.rank, self.size, self._store = rank, size, store

    @property
    def first(self) -> bool:
        return self.rank == 0

    def rows(self, count: int) -> range:
        """This rank's sequences of `count`; none where there are more ranks than sequences."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def add_up(self, values: Tensor) -> None:
        """Replace `values` by their sum over the ranks, the same bits on each. On CUDA the host does not wait."""
        if self.size > 1:
            with self._peers():
                dist.all_reduce(values)

    def agreed(self, value: Any) -> Any:
        """What rank 0 has, plain data."""
        if self.size == 1:
            return value
        told = [value]
        with self._peers():
            dist.broadcast_object_list(told, device=torch.device("cpu"))
        return told[0]

    def any_signal(self, waiting: list[int]) -> int:
        """A signal that some rank waits to act upon, 0 for none."""
        number = torch.tensor(max(waiting, default=0))
        if self.size > 1:
            with self._peers():
                dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number)

    def wait(self) -> None:
        """Until every rank is here."""
        self.any_signal([])

    def stop(self, number: int) -> None:
        """End this rank as the signal would, which another one got."""
        if self.size > 1:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def draw_apart(self, seed: int, step: int) -> None:
        """Dropout of a step differs from rank to rank; rank 0 draws as a single process does."""
        if not self.first:
            torch.manual_seed(int(np.random.SeedSequence((seed, step, self.rank)).generate_state(1, np.uint64)[0]))

    @contextmanager
    def _peers(self) -> Iterator[None]:
        """The end of another rank is told by its reason, not by its broken connection."""
        try:
            yield
        except RuntimeError as error:
            self._why()
            raise RuntimeError(f"another rank was lost: {' '.join(str(error).split())[:200]}") from error

    def _why(self) -> None:
        """Raise what another rank left as it ended."""
        assert self._store is not None
        for rank in set(range(self.size)) - {self.rank}:
            try:
                if not self._store.check([_key(rank)]):
                    continue
                told = json.loads(self._store.get(_key(rank)))
            except RuntimeError:  # the store ended with rank 0
                return
            if told["stopped"]:
                self.stop(told["signal"])
            raise RuntimeError(f"rank {rank} ended: {told['error']}")

    def leave(self, error: BaseException) -> None:
        """Tell the others why this rank ends."""
        assert self._store is not None
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 130
        told = {
            "stopped": isinstance(error, KeyboardInterrupt | SystemExit),
            "signal": code - 128,
            "error": f"{type(error).__name__}: {error}",
        }
        try:
            self._store.set(_key(self.rank), json.dumps(told))
        except RuntimeError:
            return


def _key(rank: int) -> str:
    return f"normlab/ended/{rank}"


ALONE = Ranks()


@contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """The ranks that torchrun started this process with; one that ends by an exception ends them all."""
    if world()[1] == 1:
        yield ALONE
        return
    store, rank, size = next(dist.rendezvous("env://"))
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    ranks = Ranks(rank, size, store)
    try:
        yield ranks
        ranks.wait()
    except BaseException as error:
        ranks.leave(error)
        if device.type == "cpu":  # NCCL may wait for the others here; the process ends without it
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


class Mirror(RunFolder):
    """The run folder for the ranks behind the first: read where a run goes on, never written."""

    def __init__(self, path: Path, kept: Mapping[str, Any] | None) -> None:
        self.path, self.record = path, {"status": "running"}
        self._part_count = kept["parts"] if kept else 0
        self._tables = tail_of(kept) if kept else []

    def update(self, **fields: Any) -> None:
        self.record |= fields

    def metrics(self, *_: Any, **__: Any) -> None:
        """Rank 0 writes it; so for the others."""

    layers = step_statistics = close = metrics
