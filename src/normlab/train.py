"""One run and its record: skipped, resumed or begun; trained; and what came of it written down, whatever happens."""

import sys
import time
import traceback
from collections.abc import Generator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from normlab import checkpoint, distributed, journal, kernels, relabel, results, store, task
from normlab.config import Config
from normlab.device import device_name, pick_device
from normlab.distributed import Mirror, Ranks
from normlab.fit import Asked, Fit, alone
from normlab.learner import Made
from normlab.log import Log
from normlab.objective import Task
from normlab.signals import Postponed
from normlab.translation import HYPOTHESES

Record = dict[str, Any]  # run.json's content
Training = Generator[Asked, Made, Record]  # a run that asks for its updates, is sent what they told, returns its record


def train(cfg: Config) -> Record:
    """Run one configuration, on all ranks that torchrun started, and return run.json's content.

    A run that an earlier launch left is skipped, resumed from its last checkpoint or restarted, as cfg.relaunch says
    for its status; skipped, its record comes back with `reused`. One that another process is running is left alone: its
    record, status `running`. Divergence is a result. Any exception is recorded as `failed` with its traceback and
    raised again; a signal lets the step finish, writes a checkpoint and marks the run `interrupted`.
    """
    return alone(training(cfg, Postponed()))


def training(cfg: Config, signals: Postponed) -> Training:
    """`train`, but for the updates: whoever drives it makes them, one run's or those of several at once."""
    torch.set_num_threads(cfg.threads)
    device = pick_device(cfg.device)
    learned = task.make(cfg)
    run_id = store.run_id(cfg, learned.source.sha256, device.type, distributed.world()[1])
    path = Path(cfg.runs_dir) / cfg.study / run_id
    with distributed.joined(device) as ranks, store.alone(path) if ranks.first else nullcontext(True) as mine:
        earlier = ranks.agreed(store.read_record(path) or {})
        if not ranks.agreed(mine):
            return {"run_id": run_id, **earlier, "status": "running"}
        what = store.relaunched(earlier, cfg.relaunch)
        if what == "skip":
            again = ranks.first and earlier["status"] == "finished"
            return (_judged_anew(path, earlier, cfg) if again else earlier) | {"reused": True}
        state = None
        if what == "resume":
            state = checkpoint.read(path, run_id, lambda state: store.check_kept(path, state["kept"]))
        ranks.wait()  # until all have read what rank 0 will change
        if ranks.first:
            return (yield from _recorded(cfg, learned, device, path, earlier, state, ranks, signals))
        return (yield from _followed(cfg, learned, device, path, state, ranks, signals))


def _followed(
    cfg: Config,
    learned: Task,
    device: torch.device,
    path: Path,
    state: Mapping[str, Any] | None,
    ranks: Ranks,
    signals: Postponed,
) -> Training:
    """The part of a rank behind the first: all of the run, nothing of the record."""
    quiet = cfg.log.model_copy(update={"mode": "disabled", "progress": False})
    ranks.wait()  # until rank 0 has opened the folder
    folder = Mirror(path, state and state["kept"])
    with Log(quiet, path, study=cfg.study, steps=cfg.steps, settings={}) as log:
        result = yield from _fitted(cfg, learned, device, folder, log, state, ranks, signals)
    return {"run_id": path.name, "status": "finished", **result}


def _judged_anew(path: Path, record: dict[str, Any], cfg: Config) -> dict[str, Any]:
    """A finished run's record; under this config's rules, where it was labelled by others."""
    wanted = journal.rules(cfg)
    if not cfg.steps or record.get("detector") == wanted:
        return record
    found = results.load(path, layers=False)
    told = relabel.relabel(found.runs, found.steps, wanted).fields
    fields = told.iloc[0] if len(told) else None  # none where the folder cannot be read whole
    if fields is not None:
        record = record | fields
        store.write_record(path, record)
    return record


def _recorded(
    cfg: Config,
    learned: Task,
    device: torch.device,
    path: Path,
    earlier: Mapping[str, Any],
    state: Mapping[str, Any] | None,
    ranks: Ranks,
    signals: Postponed,
) -> Training:
    """Train, from a checkpoint's state if there is one, with the record kept whatever happens."""
    source = learned.source
    attempt = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "from_step": state["step"] if state else 0,
        **store.provenance(Path(__file__).parent),
    }
    facts = {
        "run_id": path.name,
        "study": cfg.study,
        "data_sha256": source.sha256,
        "unigram_entropy": source.h1,
        "bigram_entropy": source.h2,
        "entropy_rate": source.entropy_rate,
        "device": device_name(device),
        "world_size": ranks.size,
        "tf32": cfg.tf32 and device.type == "cuda",
        **attempt,
        "attempts": [*(earlier.get("attempts", []) if state else []), attempt],
    }
    if not state:
        checkpoint.clear(path)
        (path / HYPOTHESES).unlink(missing_ok=True)
    folder = store.RunFolder(path, cfg, facts, state and state["kept"])
    settings = cfg.model_dump(mode="json") | {"data_sha256": source.sha256}
    try:
        ranks.wait()  # the others open it now
        with Log(cfg.log, path, study=cfg.study, steps=cfg.steps, settings=settings) as log:
            log.summary(folder.record)  # what is known of a run that is killed
            try:
                result = yield from _fitted(cfg, learned, device, folder, log, state, ranks, signals)
                result["status"] = "finished"
            except BaseException as error:
                _record_end(folder, error)
                log.summary(folder.record)
                raise
            log.summary(folder.record | result | journal.verdict_counts(result))
        checkpoint.forget_previous(path)
        folder.update(**result)  # the last act: a run that is killed before it goes on, W&B's record included
    except BaseException as error:
        _record_end(folder, error)
        raise
    return folder.record


def _fitted(
    cfg: Config,
    learned: Task,
    device: torch.device,
    folder: store.RunFolder,
    log: Log,
    state: Mapping[str, Any] | None,
    ranks: Ranks,
    signals: Postponed,
) -> Training:
    """The numbers of run.json, once all rows are written."""
    with kernels.chosen(cfg, device):
        fit = Fit(cfg, learned, device, folder, log, ranks)
        if state:
            if ranks.first:
                told = f"goes on at step {state['step']} of {cfg.steps}"
                print(f"{cfg.study}/{folder.path.name}: {told}", file=sys.stderr)
            fit.resume(state)
        try:
            result = yield from fit.run(signals)
        except (KeyboardInterrupt, SystemExit):
            fit.journal.flush(fit.clock.lap)  # the steps that were made
            raise
    folder.close()
    log.files("layers", "layers", sorted(folder.path.glob("layers/*.parquet")))
    return result


def _record_end(folder: store.RunFolder, error: BaseException) -> None:
    """Why a run ended early, in its folder; on stderr where that cannot be written."""
    if folder.record["status"] != "running":
        return
    status = "interrupted" if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit) else "failed"
    try:
        folder.update(status=status, reason=" ".join(f"{type(error).__name__}: {error}".split()))
        (folder.path / "traceback.txt").write_text("".join(traceback.format_exception(error)))
        folder.close()
    except OSError as unwritten:
        print(f"{folder.path}: {status}, and its record is not whole: {unwritten}", file=sys.stderr)
        with suppress(OSError):
            folder.close()
