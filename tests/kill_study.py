"""A study that is killed again and again ends as if nothing had happened.

The study is launched as a multirun, killed with SIGKILL at random moments and relaunched with the same command each
time. At the end it is compared with an undisturbed study, byte by byte.

python tests/kill_study.py               # 12 runs, 30 kills: make test-faults
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from launching import (
    ROOT,
    Launch,
    Mark,
    Starter,
    differences,
    kill,
    read_marks,
    rows,
    start,
    until,
    wandb_steps,
)
from omegaconf import OmegaConf

BASE = [
    *("data.vocab=16", "data.order=1", "data.batch_size=4", "eval.batches=2", "probe.batches=2", "steps=48"),
    *("model.depth=2", "model.width=16", "model.heads=2", "model.context=16", "log.mode=disabled"),
    *("log.every=5", "checkpoint.every=7", "checkpoint.seconds=0", "eval.every=9", "probe.every=11", "study=killed"),
]
RUNS = {
    "dropout": ["model.dropout=0.1", "log.mode=offline", "optim.warmup_steps=10", "optim.schedule=cosine"],
    "clip": ["model.placement=post", "optim.clip=0.3", "optim.warmup_steps=13", "checkpoint.every=4", "log.every=3"],
    "sgd": ["model.placement=deepnorm", "optim.name=sgd", "optim.momentum=0.9", "optim.lr=0.1", "checkpoint.every=11"],
    "calibrated": ["model.placement=admin", "model.dropout=0.1", "steps=40", "log.every=7", "checkpoint.every=5"],
    "batchnorm": ["model.norm=batchnorm", "model.activation=swiglu", "probe.layer_drop=true"],
    "not_finite": [
        *("model.placement=post", "optim.name=sgd", "optim.lr=2", "optim.momentum=0.9", "optim.warmup_steps=48"),
        *("log.mode=offline", "log.every=10", "checkpoint.every=6"),
    ],
    "through": [
        *("model.placement=pre", "optim.name=sgd", "optim.lr=2", "optim.momentum=0.9", "optim.warmup_steps=45"),
        *("steps=45", "stop.nonfinite=false", "checkpoint.every=13"),
    ],
    "hopeless": ["optim.lr=1.0", "stop.hopeless=true", "verdict.patience=20", "checkpoint.every=8", "steps=60"],
    "encoder": ["model.arch=encoder", "model.dropout=0.2", "optim.name=adam", "micro_batch=2", "checkpoint.every=9"],
    "two_stacks": ["model.arch=encoder_decoder", "model.dropout=0.1", "model.placement=sub_ln", "log.mode=offline"],
    "sharpness": ["model.ffn=moe", "probe.sharpness=true", "optim.name=radam", "optim.weight_decay=0.1", "log.every=1"],
    "bf16": ["precision=bf16", "model.norm=rmsnorm", "model.position=rotary", "model.placement=mix_ln", "steps=41"],
}


@dataclass
class Counts:
    """What was done to a study, and what it cost."""

    kills: Counter[str] = field(default_factory=Counter)
    steps_needed: int = 0
    steps_made: int = 0
    most_repeated: int = 0  # by one kill, over the run's checkpoint.every: at most 1
    runs_resumed: int = 0  # by a launch, from a checkpoint, with steps left to make
    runs_restarted: int = 0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        again = self.steps_made - self.steps_needed
        hit = ", ".join(f"{count} {where}" for where, count in sorted(self.kills.items()))
        return (
            f"{self.kills.total()} kills: {hit}\n"
            f"steps made {self.steps_made}, needed {self.steps_needed}, repeated {again}, "
            f"by one kill at most {self.most_repeated:.0%} of checkpoint.every\n"
            f"runs resumed {self.runs_resumed} times from a checkpoint, begun again {self.runs_restarted} times\n"
            f"faults: {len(self.faults)}"
        )


class Study:
    """The same runs, disturbed or not, in a folder of their own."""

    def __init__(self, folder: Path, names: list[str], starter: Starter) -> None:
        self.folder, self.starter, self.names = folder, starter, names
        self.marks = folder / "marks"
        self.script = folder / "project/experiments/train.py"
        if not self.script.exists():  # the project with these runs among its experiments
            for part in ("conf", "sweeps", "experiments"):
                shutil.copytree(ROOT / part, folder / "project" / part)
            for name in names:
                delta = OmegaConf.to_yaml(OmegaConf.from_dotlist([*BASE, *RUNS[name]]))
                (folder / f"project/conf/experiment/{name}.yaml").write_text(f"# @package _global_\n{delta}")
        self.runs = folder / "runs/killed"

    def launch(self, *, fresh: bool) -> Launch:
        arguments = ["-m", "data=markov", f"experiment={','.join(self.names)}", f"runs_dir={self.folder / 'runs'}"]
        begin = start if fresh else self.starter.start
        return begin(arguments, self.folder, script=self.script, MARKS=str(self.marks))

    def finished(self) -> int:
        """How many runs say so."""
        return sum(b'"status": "finished"' in path.read_bytes() for path in self.runs.glob("*/run.json"))

    def being_written(self) -> list[Path]:
        return list(self.runs.glob("*/.checkpoint.pt.*"))


def disturb(study: Study, needed: dict[str, int], start_up: float, kills: int, chance: random.Random) -> Counts:
    """Kill the study `kills` times, then let it end. needed: the steps of each undisturbed run."""
    counts = Counts(steps_needed=sum(needed.values()))
    aims = ["start-up"] * max(1, kills // 10) + ["fresh"] * (kills // 10) + ["write"] * max(1, kills // 5)
    aims += ["end"] * (kills // 10)
    aims += ["step"] * (kills - len(aims))
    chance.shuffle(aims)
    for number, aim in enumerate(aims):
        before = len(read_marks(study.marks))
        launch = study.launch(fresh=aim in {"start-up", "fresh"})
        began = time.monotonic()
        if aim == "start-up":
            time.sleep(chance.uniform(0.1, start_up))
        elif aim == "end" and len(study.names) > (ended := study.finished()) + 2:
            until(lambda ended=ended: study.finished() > ended, launch, pause=0)
        else:
            left = counts.steps_needed - _kept(study, needed)
            target = _steps(study) + chance.randint(1, max(1, 2 * left // (len(aims) - number + 2)))
            until(lambda target=target: _steps(study) >= target, launch)
            if aim == "write":
                until(study.being_written, launch, pause=0)
            else:
                time.sleep(chance.uniform(0, 0.02 if left > 40 else 0))
        if launch.poll() is not None:
            counts.faults.append(f"launch {number} ended by itself with {launch.wait()} after {before} marks")
            break
        kill(launch)
        counts.kills[_where(study, before)] += 1
        took = time.monotonic() - began
        print(f"kill {number + 1}: {aim}, after {took:.2f} s, {_kept(study, needed)} steps kept", flush=True)
    status = study.launch(fresh=False).wait(600)
    if status != 0:
        counts.faults.append(f"the last launch ended with {status}")
    return counts


def _steps(study: Study) -> int:
    """Steps begun so far, by all launches."""
    return sum(mark.kind == "step" for mark in read_marks(study.marks))


def _kept(study: Study, needed: dict[str, int]) -> int:
    """Steps that are in checkpoints."""
    kept = dict.fromkeys(needed, 0)
    for mark in read_marks(study.marks):
        if mark.kind == "checkpoint":
            kept[mark.run] = max(kept.get(mark.run, 0), mark.step)
    return sum(kept.values())


def _where(study: Study, before: int) -> str:
    """What the process was at when it was killed."""
    if study.being_written():
        return "in a checkpoint write"
    marks = read_marks(study.marks)[before:]
    if not any(mark.kind == "step" for mark in marks):
        return "before the first step"
    return "just after a checkpoint" if marks[-1].kind == "checkpoint" else "in steps"


def audit(marks: list[Mark], every: dict[str, int], counts: Counts) -> None:
    """Nothing that a checkpoint held was made again, and no kill cost more than checkpoint.every steps."""
    on_disk: dict[str, int] = {}
    last: dict[str, int] = {}
    seen: set[str] = set()  # in this launch
    for mark in marks:
        if mark.kind == "launch":
            seen.clear()
            continue
        if mark.kind == "checkpoint":
            on_disk[mark.run] = max(on_disk.get(mark.run, 0), mark.step)
            continue
        counts.steps_made += 1
        kept, made = on_disk.get(mark.run, 0), last.get(mark.run, -1)
        if mark.step < kept:
            counts.faults.append(f"{mark.run}: step {mark.step} again, with {kept} in a checkpoint")
        if mark.step > made + 1:
            counts.faults.append(f"{mark.run}: from step {made} to {mark.step}")
        if mark.step <= made and mark.run not in seen:  # the first one after a kill
            repeated = made + 1 - mark.step
            counts.most_repeated = max(counts.most_repeated, repeated / every[mark.run])
            if repeated > every[mark.run]:
                counts.faults.append(f"{mark.run}: {repeated} steps again, checkpoint.every={every[mark.run]}")
        if mark.run not in seen and made >= 0:
            counts.runs_resumed += mark.step > 0
            counts.runs_restarted += mark.step == 0
        seen.add(mark.run)
        last[mark.run] = mark.step


def compare(study: Study, undisturbed: Study, counts: Counts) -> None:
    """Every file of every run, and W&B's records."""
    folders = sorted(folder.name for folder in undisturbed.runs.iterdir())
    if folders != sorted(folder.name for folder in study.runs.iterdir()) or len(folders) != len(study.names):
        counts.faults.append(f"{len(study.names)} runs, {len(folders)} folders undisturbed, or not the same ones")
        return
    for name in folders:
        ours, theirs = study.runs / name, undisturbed.runs / name
        counts.faults += [f"differs: {path}" for path in differences(ours, theirs)]
        steps = rows(ours)
        if steps != list(range(len(steps))):
            counts.faults.append(f"{name}: steps {steps}")
        left = [p.name for p in theirs.rglob("*") if ".tmp" in p.name or "previous" in p.name or "traceback" in p.name]
        counts.faults += [f"left over: {name}/{file}" for file in left]
        records = wandb_steps(ours)
        expected = [steps] if (theirs / "wandb").exists() else []
        if records != expected:
            counts.faults.append(f"{name}: W&B records {records}")


def study(folder: Path, names: list[str], kills: int, seed: int, starter: Starter) -> Counts:
    """Run the study undisturbed and disturbed, and compare."""
    undisturbed = Study(folder / "undisturbed", names, starter)
    began = time.monotonic()
    launch = undisturbed.launch(fresh=True)
    until(lambda: read_marks(undisturbed.marks), launch)
    start_up = time.monotonic() - began
    if (status := launch.wait(600)) != 0:
        raise RuntimeError(f"undisturbed: exit status {status}: {(undisturbed.folder / 'stderr').read_text()}")
    needed = Counter(mark.run for mark in read_marks(undisturbed.marks) if mark.kind == "step")
    print(f"undisturbed: {len(needed)} runs, {needed.total()} steps, {time.monotonic() - began:.1f} s", flush=True)
    disturbed = Study(folder / "disturbed", names, starter)
    counts = disturb(disturbed, dict(needed), start_up, kills, random.Random(seed))
    every = {path.parent.name: OmegaConf.load(path).checkpoint.every for path in undisturbed.runs.glob("*/config.yaml")}
    audit(read_marks(disturbed.marks), every, counts)
    compare(disturbed, undisturbed, counts)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--folder", type=Path, help="keep the two studies here")
    asked = parser.parse_args()
    began = time.monotonic()
    starter = Starter()
    with tempfile.TemporaryDirectory() as temporary:
        counts = study(asked.folder or Path(temporary), asked.runs, asked.kills, asked.seed, starter)
    starter.close()
    print(f"\n{len(asked.runs)} runs, seed {asked.seed}, {time.monotonic() - began:.0f} s\n{counts}")
    print(*counts.faults, sep="\n", end="\n" if counts.faults else "")
    return 1 if counts.faults or counts.kills.total() != asked.kills else 0


if __name__ == "__main__":
    sys.exit(main())
