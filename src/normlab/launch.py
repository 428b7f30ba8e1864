"""A launch: its jobs, in whatever processes they run, leave their outcomes in one folder that the parent reads."""

import json
import multiprocessing
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

from normlab.config import Config
from normlab.files import write_atomically
from normlab.signals import STOPPING

FOLDER = "NORMLAB_LAUNCH"  # environment variable, which the processes of the jobs inherit
PATIENCE = (60.0, 5.0)  # seconds for jobs in other processes to stop after a step, and at once


@dataclass(frozen=True)
class Outcome:
    """What is known of one job: running, finished, failed, interrupted or left alone."""

    job: int
    what: str
    overrides: list[str]
    status: str
    verdict: str | None = None
    reason: str | None = None
    traceback: str | None = None
    host: str = field(default_factory=platform.node)
    pid: int = field(default_factory=os.getpid)

    @property
    def alive(self) -> bool:
        return self.status == "running" and self.host == platform.node() and _exists(self.pid)

    def leave(self) -> None:
        """Write it into the launch's folder, unless the launch is over."""
        folder = Path(os.environ[FOLDER])
        try:
            write_atomically(folder / f"job-{self.job:05d}.json", json.dumps(asdict(self)))
        except OSError as error:
            if folder.exists():
                print(f"this job's end cannot be noted: {error}", file=sys.stderr)


class Launch:
    """The parent's side. As a context manager it owns the folder and answers signals."""

    def __init__(self, runs_dir: Path, jobs: Sequence[Sequence[str]], plan: Sequence[str], *, elsewhere: bool) -> None:
        """jobs: the overrides of each. plan: the configs that were checked. elsewhere: in processes of their own."""
        self.jobs, self.elsewhere = [list(overrides) for overrides in jobs], elsewhere
        home = runs_dir / ".launches"
        home.mkdir(parents=True, exist_ok=True)
        for old in home.iterdir():  # left by launches that were killed
            host, _, pid = old.name.rpartition(".")[0].rpartition(".")
            if host == platform.node() and not _exists(int(pid)):
                shutil.rmtree(old, ignore_errors=True)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{platform.node()}.{os.getpid()}.", dir=home))
        write_atomically(self.folder / "plan.json", json.dumps(list(plan)))
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Launch":
        os.environ[FOLDER] = str(self.folder)
        heard = [number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._stop) for number in heard}
        if self.elsewhere:
            for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
                os.environ.setdefault(name, "1")
            # Processes started from here on inherit that SIGINT is blocked, so that Ctrl-C on a terminal reaches this
            # process alone, through a thread that does not block it.
            threading.Thread(target=threading.Event().wait, daemon=True).start()
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.elsewhere:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        shutil.rmtree(self.folder, ignore_errors=True)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        """Jobs in other processes get SIGINT, at which they finish their step, and at a second one stop at once."""
        again = (self.folder / "stop").exists()
        (self.folder / "stop").touch()
        others = self.others()
        for outcome in others:
            os.kill(outcome.pid, signal.SIGINT)
        if others and not again:
            print(f"stopping: {len(others)} runs finish their step; once more to stop at once", file=sys.stderr)
        self.wait(PATIENCE[again])
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    def others(self) -> list[Outcome]:
        """Jobs that run in other processes of this machine."""
        return [outcome for outcome in self.outcomes().values() if outcome.alive and outcome.pid != os.getpid()]

    def wait(self, seconds: float) -> None:
        """Until no job runs in another process of this machine."""
        end = time.monotonic() + seconds
        while self.others() and time.monotonic() < end:
            time.sleep(0.1)

    def outcomes(self) -> dict[int, Outcome]:
        """What the jobs left so far, by number."""
        read = (json.loads(path.read_text()) for path in sorted(self.folder.glob("job-*.json")))
        return {fields["job"]: Outcome(**fields) for fields in read}

    def whole(self) -> bool:
        """Whether every job came to an end that needs no second look."""
        done = self.outcomes()
        return len(done) >= len(self.jobs) and all(o.status in {"finished", "left alone"} for o in done.values())

    def table(self) -> str:
        """How many jobs came to what, and each one that did not finish."""
        found = self.outcomes()
        stopped = (self.folder / "stop").exists()
        shared = set.intersection(*map(set, self.jobs))
        ends: Counter[str] = Counter()
        told = []
        for number, overrides in enumerate(self.jobs):
            one = found.get(number) or Outcome(number, "", overrides, "not started")
            status, reason = one.status, one.reason
            if status == "running":
                status = "running" if one.alive or one.host != platform.node() else "killed"
                reason = f"on {one.host}" if status == "running" else "its process was killed (out of memory?)"
            ends[", ".join(filter(None, (status, one.verdict)))] += 1
            if status in {"finished", "left alone"} or (status == "not started" and stopped):
                continue
            own = " ".join(override for override in overrides if override not in shared)
            lines = [own, reason if status != "interrupted" else None, one.traceback]
            told += [f"{status}: {one.what or f'job {number}'}", *(f"  {line}" for line in lines if line)]
        width = max(map(len, ends))
        counts = [f"  {name:<{width}}  {count:>5}" for name, count in sorted(ends.items())]
        return "\n".join([f"{len(self.jobs)} jobs:", *counts, *told])


def worker() -> int | None:
    """The number of this process among joblib's workers, from 0."""
    name = re.fullmatch(r"LokyProcess-(\d+)", multiprocessing.current_process().name)
    return int(name[1]) - 1 if name else None


def is_parent() -> bool:
    """Whether this process launched the jobs itself."""
    return Path(os.environ[FOLDER]).name.startswith(f"{platform.node()}.{os.getpid()}.")


def is_over() -> bool:
    """Whether the launch has been stopped or has ended. What is in Slurm's queue goes on without its parent."""
    folder = Path(os.environ[FOLDER])
    return os.environ.get("SUBMITIT_EXECUTOR") != "slurm" and (not folder.exists() or (folder / "stop").exists())


def folder() -> Path | None:
    """The folder of the launch that this process works for, if there is one."""
    path = Path(os.environ.get(FOLDER, ""))
    return path if FOLDER in os.environ and path.is_dir() else None


@lru_cache(maxsize=1)
def planned(folder: Path) -> list[Config]:
    """The configs of a launch, in the order of its jobs."""
    return [Config.model_validate_json(cfg) for cfg in json.loads((folder / "plan.json").read_text())]


def is_planned(cfg: str) -> bool:
    """Whether this config was checked as the launch began. A job composes its own, from files that may have changed."""
    try:
        return cfg in json.loads((Path(os.environ[FOLDER]) / "plan.json").read_text())
    except FileNotFoundError:  # in Slurm's queue for longer than its parent lived
        return True


def enter() -> None:
    """In a process that was started for jobs: take signals from the parent, not from its terminal."""
    if is_parent() or threading.current_thread() is not threading.main_thread():
        return
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # forgets one that the terminal sent before
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
