"""Which device a run uses, and how its time is kept."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def pick_device(name: str) -> torch.device:
    """auto: CUDA, then MPS, then CPU."""
    if name != "auto":
        return torch.device(name)
    available: list[tuple[str, Callable[[], bool]]] = [
        ("cuda", torch.cuda.is_available),
        ("mps", torch.backends.mps.is_available),
    ]
    return torch.device(next((kind for kind, found in available if found()), "cpu"))


def gpu_for(name: str, worker: int | None, count: int) -> int | None:
    """Which of `count` CUDA devices a worker of a launch takes: one each, in turn. None: as the config says."""
    return worker % count if worker is not None and count > 1 and name in {"auto", "cuda"} else None


def workers() -> int:
    """How many runs this machine takes at the same time: one for each CUDA device, else for each CPU core."""
    return torch.cuda.device_count() or os.cpu_count() or 1


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class Clock:
    """Wall-clock seconds of the training steps, measurements left out."""

    def __init__(self) -> None:
        self.total = 0.0
        self._mark = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap, pauses left out."""
        now = time.perf_counter()
        lap, self._mark = now - self._mark, now
        self.total += lap
        return lap

    def skip(self, seconds: float) -> None:
        """Leave out seconds that went to something else."""
        self._mark += seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._mark += time.perf_counter() - start
