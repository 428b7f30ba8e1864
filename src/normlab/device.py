"""Which device a run uses, and how its time is kept."""

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

    @contextmanager
    def paused(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._mark += time.perf_counter() - start
