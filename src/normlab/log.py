"""Console and W&B: windows on a run. Neither knows what a metric means; the record is in the run folder."""

import io
import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tqdm import tqdm

from normlab.config import LogConfig

T = TypeVar("T")
TEARDOWN_SECONDS = 5.0  # W&B's service is killed if it has not ended by then


class Log:
    """Progress bar and W&B run of one training run. Use as a context manager.

    Each call to W&B has a time limit; at the first that fails, one line says so and the run goes on without W&B.
    """

    def __init__(self, cfg: LogConfig, folder: Path, *, study: str, steps: int, settings: Mapping[str, Any]) -> None:
        self._cfg = cfg
        self._bar = tqdm(
            total=steps,
            desc=f"{study}/{folder.name}",
            unit="step",
            disable=None if cfg.progress else True,  # None: only on a terminal
            leave=False,
        )
        self._run = _start_wandb(cfg, folder, study, settings) if cfg.mode != "disabled" else None
        self.continues = bool(self._run and self._run.resumed)  # W&B already holds earlier rows of this run
        self._next = self._run.starting_step if self._run and self.continues else 0  # the first step it does not hold

    @property
    def shows(self) -> bool:
        """Whether W&B takes what is logged."""
        return self._run is not None

    def row(self, step: int, values: Mapping[str, float]) -> None:
        """One W&B row, in the order of steps; those that W&B holds from before a resume are left out."""
        if step >= self._next:
            self._wandb(lambda run, _: run.log(dict(values), step=step))
            self._next = step + 1

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A W&B table, beside the last row."""
        self._last(lambda wandb: {name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

    def image(self, name: str, png: bytes) -> None:
        """A picture, beside the last row."""
        from PIL import Image

        self._last(lambda wandb: {name: wandb.Image(Image.open(io.BytesIO(png)))})

    def files(self, name: str, kind: str, paths: Iterable[Path]) -> None:
        """These files, which change no more, as an artifact of the given type; W&B gets no copy in its own folders."""

        def add(run: Any, wandb: Any) -> None:
            artifact = wandb.Artifact(f"{name}-{run.id}", type=kind)
            for path in paths:
                artifact.add_file(str(path), policy="immutable", skip_cache=True)
            run.log_artifact(artifact)

        self._wandb(add, self._cfg.finish_timeout)

    def alert(self, title: str, text: str) -> None:
        """A W&B alert, which the user's account mails or posts; online only."""
        if self._cfg.mode == "online":
            self._wandb(lambda run, _: run.alert(title=title, text=text))

    def progress(self, steps: int, **shown: float) -> None:
        """Advance the bar by `steps` and show the given numbers beside the time left."""
        self._bar.set_postfix({k: f"{v:.4g}" for k, v in shown.items()}, refresh=False)
        self._bar.update(steps)

    def summary(self, values: Mapping[str, Any]) -> None:
        """These values, at any depth; a number that is not finite as the text that W&B makes of one in a row."""
        told = _as_in_rows(values)
        self._wandb(lambda run, _: run.summary.update(told))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        code = 0 if error is None else 1
        self._wandb(lambda run, _: run.finish(exit_code=code), self._cfg.finish_timeout)
        self._run = None

    def _last(self, values: Callable[[Any], dict[str, Any]]) -> None:
        self._wandb(lambda run, wandb: run.log(values(wandb), step=max(0, self._next - 1)))

    def _wandb(self, act: Callable[[Any, Any], object], seconds: float | None = None) -> None:
        """act(run, wandb), within log.timeout seconds if none are given."""
        if self._run is None:
            return
        run = self._run
        try:
            import wandb

            _within(seconds or self._cfg.timeout, lambda: act(run, wandb))
        except Exception as error:
            self._run = None
            print(f"W&B broke off ({_one_line(error)}); the run goes on without it", file=sys.stderr)
            _end_service()


def _start_wandb(cfg: LogConfig, folder: Path, study: str, settings: Mapping[str, Any]) -> Any:
    """A W&B run with the run folder's id. If W&B cannot start, one line says so and training goes on: recorded offline
    when the mode was online, else without W&B (None)."""
    os.environ.setdefault("WANDB_SILENT", "true")
    earlier = [*folder.glob("wandb/*run-*")]

    def start() -> Any:
        import wandb

        whose = {"id": folder.name, "project": cfg.project, "entity": cfg.entity}
        if _is_the_agents(folder.name):
            whose = {}  # the sweep's
        elif os.environ.get("WANDB_SWEEP_ID"):
            shared = wandb.setup()  # else W&B takes the agent's id and config once more
            shared.settings.sweep_id = shared.settings.sweep_param_path = shared._sweep_config = None
        return wandb.init(
            **whose,
            group=study,
            name=folder.name,
            dir=folder,
            mode=cfg.mode,
            config=dict(settings) | {"run_id": folder.name},
            resume="allow",
            reinit="create_new",  # whatever run is open in this process is neither ended nor written to
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, init_timeout=cfg.timeout),
        )

    try:
        run = _within(2 * cfg.timeout, start)  # W&B's own limit tells more
    except BaseException as error:
        _end_service()  # which else keeps the id in use
        if not isinstance(error, Exception):
            raise
        print(f"W&B did not start in mode {cfg.mode} ({_one_line(error)}); the run goes on", file=sys.stderr)
        if cfg.mode == "offline":
            return None
        return _start_wandb(cfg.model_copy(update={"mode": "offline"}), folder, study, settings)
    if not run.resumed:  # this one gets every row: two records of one id would be merged by a sync
        for old in earlier:
            shutil.rmtree(old, ignore_errors=True)
    return run


def _is_the_agents(run_id: str) -> bool:
    """Whether this is the run for which a W&B sweep agent chose an id: the first one that its command starts."""
    parameters = os.environ.get("WANDB_SWEEP_PARAM_PATH")
    if not (parameters and os.environ.get("WANDB_SWEEP_ID") and os.environ.get("WANDB_RUN_ID")):
        return False
    owner = Path(f"{parameters}.run_id")
    try:
        with owner.open("x") as file:
            file.write(run_id)
    except FileExistsError:
        return owner.read_text() == run_id
    except OSError:
        return False
    return True


def _as_in_rows(value: Any) -> Any:
    """W&B's summary makes null of NaN, its rows make "NaN"."""
    if isinstance(value, Mapping):
        return {key: _as_in_rows(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_in_rows(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _within(seconds: float, act: Callable[[], T]) -> T:
    """act() in a thread that is left behind if it takes longer: W&B waits without limit for a service that hangs."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(act())
        except SystemExit as error:
            future.set_exception(RuntimeError(f"W&B's service ended with status {error.code}"))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True, name="wandb").start()
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():
            raise
        raise TimeoutError(f"no answer in {seconds:g} s") from None


def _end_service() -> None:
    """End W&B's service, by force if it hangs: the next run starts a new one, and none is left behind."""
    process: subprocess.Popen[bytes] | None = None
    with suppress(Exception):
        import wandb
        from wandb.sdk import wandb_setup

        connection: Any = wandb_setup.singleton()._connection
        process = connection._proc._process  # W&B has no public name for it
        _within(TEARDOWN_SECONDS, lambda: wandb.teardown(exit_code=1))
    if process is not None:
        process.kill()
        process.wait()
    os.environ.pop("WANDB_SERVICE", None)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
