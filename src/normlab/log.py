"""Console and W&B: windows on a run. Neither knows what a metric means; the record is in the run folder."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from normlab.config import LogConfig


class Log:
    """Progress bar and W&B run of one training run. Use as a context manager."""

    def __init__(self, cfg: LogConfig, folder: Path, *, study: str, steps: int, settings: Mapping[str, Any]) -> None:
        self._run = _start_wandb(cfg, folder, study, settings) if cfg.mode != "disabled" else None
        self._bar = tqdm(
            total=steps,
            desc=f"{study}/{folder.name}",
            unit="step",
            disable=None if cfg.progress else True,  # None: only on a terminal
            leave=False,
        )

    def row(self, step: int, values: Mapping[str, float]) -> None:
        """One W&B row."""
        if self._run is not None:
            self._run.log(dict(values), step=step)

    def progress(self, steps: int, **shown: float) -> None:
        """Advance the bar by `steps` and show the given numbers beside the time left."""
        self._bar.set_postfix({k: f"{v:.4g}" for k, v in shown.items()}, refresh=False)
        self._bar.update(steps)

    def summary(self, values: Mapping[str, Any]) -> None:
        if self._run is not None:
            self._run.summary.update({k: v for k, v in values.items() if v is not None})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        if self._run is not None:
            self._run.finish(exit_code=0 if error is None else 1)


def _start_wandb(cfg: LogConfig, folder: Path, study: str, settings: Mapping[str, Any]) -> Any:
    """A W&B run with the run folder's id. If W&B cannot start, one line says so and training goes on: recorded offline
    when the mode was online, else without W&B (None)."""
    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        import wandb

        return wandb.init(
            project=cfg.project,
            entity=cfg.entity,
            group=study,
            id=folder.name,
            name=folder.name,
            dir=folder,
            mode=cfg.mode,
            config=dict(settings),
            reinit="finish_previous",
            settings=wandb.Settings(console="off", x_disable_stats=True, init_timeout=30),
        )
    except Exception as error:
        line = " ".join(str(error).split()) or type(error).__name__
        online = cfg.mode == "online"
        print(f"W&B did not start ({line}); going on {'offline' if online else 'without it'}", file=sys.stderr)
        return _start_wandb(cfg.model_copy(update={"mode": "offline"}), folder, study, settings) if online else None
