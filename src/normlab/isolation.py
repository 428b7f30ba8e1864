"""What one job could leave behind for the next one in its process, put back."""

import gc
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from normlab.config import Config


def seed_all(seed: int) -> None:
    """Every global generator."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)  # and every CUDA device's


@contextmanager
def isolated(cfg: Config) -> Iterator[None]:
    """A job inside gives the numbers that it gives alone: seeded, with torch's settings as a new process has them.

    What was there before it is out of the garbage collector's sight from here on, so that the end of each job looks
    through what the job made, not through every module of the process.
    """
    gc.collect()  # the earlier jobs' configs: cycles that would stay for good
    gc.freeze()
    dtype, benchmark = torch.get_default_dtype(), torch.backends.cudnn.benchmark
    deterministic, grad = torch.get_deterministic_debug_mode(), torch.is_grad_enabled()
    seed_all(cfg.seed)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.backends.cudnn.benchmark = benchmark
        if torch.get_deterministic_debug_mode() != deterministic:  # to set it imports much
            torch.set_deterministic_debug_mode(deterministic)
        torch.set_grad_enabled(grad)
        if cfg.compile:
            torch._dynamo.reset()  # the limit on recompilations counts over all jobs of a process
        wandb: Any = sys.modules.get("wandb")
        if getattr(wandb, "run", None) is not None:
            wandb.finish(exit_code=1)  # left open by a job that broke
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
