"""Which runs of a launch share a pack, and which of its processes trains them."""

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from normlab import launch, pack, store, task
from normlab import train as single
from normlab.config import Config
from normlab.device import pick_device
from normlab.pack import End
from normlab.train import Record


def train(cfg: Config) -> Record:
    """normlab.train.train; with pack=K in a launch, together with up to K - 1 of its other runs that share the shapes.

    The job that comes first trains its pack to the end of every member. The jobs of the others then find their runs
    made and return the records, with `packed_with`, the id of the run that came first; while theirs are in the making
    they train packs that nobody has begun.
    """
    folder = launch.folder()
    if cfg.pack == 1 or folder is None:
        return single.train(cfg)
    mine = _path(cfg)
    reason = "submitit gives each run its own task" if "SUBMITIT_EXECUTOR" in os.environ else pack.alone(cfg)
    if reason:
        print(f"{cfg.study}/{mine.name}: trains alone, not in a pack: {reason}", file=sys.stderr)
        return single.train(cfg)
    planned, others = launch.planned(folder), True
    while True:
        with _claimed(folder, cfg) as claim:
            if claim is not None:
                if told := claim.outcome():
                    return {"run_id": mine.name, **(store.read_record(mine) or {}), **told}
                end = _lead(folder, claim, planned)
                if isinstance(end, BaseException):
                    raise end
                return end
        others = others and _help(folder, planned)
        if not others:
            time.sleep(0.1)


@dataclass
class _Claim:
    """A run of this launch that this process trains, or sees that it is made."""

    cfg: Config
    path: Path
    file: TextIO

    def outcome(self) -> dict[str, Any]:
        """How it ended in a pack of this launch; empty if it did not."""
        self.file.seek(0)
        return json.loads(self.file.read() or "{}")

    def tell(self, end: End, first: str) -> None:
        told: dict[str, Any] = {"packed_with": first}
        if isinstance(end, Exception):
            told |= {"status": "failed", "reason": " ".join(f"{type(end).__name__}: {end}".split())}
        elif isinstance(end, BaseException) or end["status"] not in {"finished", "failed"}:
            return
        self.file.write(json.dumps(told))
        self.file.flush()


def _lead(folder: Path, first: _Claim, planned: Sequence[Config], *, helping: bool = False) -> End:
    """Train this run and what shares its shapes and waits; how this one ended. Helping, its own job is told too."""
    with ExitStack() as held:
        claims = {first.path: first}
        for other in _sharing(first.cfg, planned):
            if len(claims) == pack.most(first.cfg):
                break
            taken = held.enter_context(_claimed(folder, other)) if _path(other) not in claims else None
            if taken is not None and not taken.outcome():
                claims[taken.path] = taken
        if len(claims) == 1 and not helping:
            return single.train(first.cfg)

        def ended(cfg: Config, end: End) -> None:
            if cfg is not first.cfg or helping:
                claims[_path(cfg)].tell(end, first.path.name)

        return pack.together([claim.cfg for claim in claims.values()], ended)[0]


def _help(folder: Path, planned: Sequence[Config]) -> bool:
    """Train a pack that nobody has begun; False if there is none."""
    for cfg in planned:
        if cfg.pack == 1 or _is_skipped(cfg) or pack.alone(cfg):
            continue
        with _claimed(folder, cfg) as claim:
            if claim is not None and not claim.outcome():
                _lead(folder, claim, planned, helping=True)
                return True
    return False


def _sharing(cfg: Config, planned: Sequence[Config]) -> Iterator[Config]:
    wanted = pack.shape(cfg)
    return (other for other in planned if other.pack > 1 and pack.shape(other) == wanted and not _is_skipped(other))


def _path(cfg: Config) -> Path:
    run_id = store.run_id(cfg, task.make(cfg).source.sha256, pick_device(cfg.device).type)
    return Path(cfg.runs_dir) / cfg.study / run_id


def _is_skipped(cfg: Config) -> bool:
    """Whether a launch leaves this run as it is, by what is in its folder."""
    return store.relaunched(store.read_record(_path(cfg)) or {}, cfg.relaunch) == "skip"


@contextmanager
def _claimed(folder: Path, cfg: Config) -> Iterator[_Claim | None]:
    """Hold a run against the other processes of this launch, of which a dead one holds nothing; None: one has it."""
    path = _path(cfg)
    with (folder / f"claim-{path.parent.name}-{path.name}").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        yield _Claim(cfg, path, file)
