"""Console and W&B: windows on a run. Neither knows what a metric means; the record is in the run folder."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from normlab.config import LogConfig


class Log:
    """Progress bar and W&B run of one training run. Use as a context manager."""

    def __init__(self, cfg: LogConfig, folder: Path, *, study: str, steps: int, settings: Mapping[str, Any]) -> None:
        self._online = cfg.mode == "online"
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
        self._wandb(lambda run: run.log(dict(values), step=step))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A W&B table."""
        import wandb

        self._wandb(lambda run: run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])}))

    def alert(self, title: str, text: str) -> None:
        """A W&B alert, which the user's account mails or posts; online only."""
        if self._online:
            self._wandb(lambda run: run.alert(title=title, text=text))

    def progress(self, steps: int, **shown: float) -> None:
        """Advance the bar by `steps` and show the given numbers beside the time left."""
        self._bar.set_postfix({k: f"{v:.4g}" for k, v in shown.items()}, refresh=False)
        self._bar.update(steps)

    def summary(self, values: Mapping[str, Any]) -> None:
        self._wandb(lambda run: run.summary.update({k: v for k, v in values.items() if v is not None}))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        self._wandb(lambda run: run.finish(exit_code=0 if error is None else 1))

    def _wandb(self, act: Callable[[Any], object]) -> None:
        """W&B may break; the run does not: the first error is told in one line and W&B is left alone after it."""
        if self._run is None:
            return
        try:
            act(self._run)
        except Exception as error:
            self._run = None
            print(f"W&B broke off ({_one_line(error)}); the run goes on without it", file=sys.stderr)


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
        print(f"W&B did not start in mode {cfg.mode} ({_one_line(error)}); the run goes on", file=sys.stderr)
        if cfg.mode == "offline":
            return None
        return _start_wandb(cfg.model_copy(update={"mode": "offline"}), folder, study, settings)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
