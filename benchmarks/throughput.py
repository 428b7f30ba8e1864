"""Training-step time of our GPT-2-shaped decoder and of what people would use instead, in turns in one process.

python benchmarks/throughput.py --nanogpt ../nanoGPT       # all shapes, 1 and 2 threads; compiled: context 64, 2
python benchmarks/throughput.py --nanogpt ../nanoGPT --shapes 12,256,64 --threads 1 --modes eager compiled

A shape is depth,width,context. Peers that are not there are left out. transformers is in the lock; x-transformers:
pip install --no-deps --target peers x-transformers einops einx loguru frozendict torch-einops-utils, PYTHONPATH=peers.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import page
from peers import ARMS, TOKENS, Arm, Shape, batch

SHAPES = [Shape(*size, context) for size in ((12, 256), (48, 64), (96, 64), (6, 512)) for context in (64, 256)]
OURS, MEASURED, WHOLE, NANOGPT = "normlab", "normlab, statistics", "normlab, whole", "nanoGPT"
PEERS = (NANOGPT, "transformers", "x-transformers")
COMPILED = (64, 2)  # context and threads of what is compiled
REPEATS = 7
SECONDS = 0.4  # of one turn of one arm, at least one step
COMPILED_PEERS = 12  # blocks up to which every peer is compiled; beyond, for minutes, nanoGPT alone
COLUMNS = ("ours (ms)", "tokens/s", *PEERS, "statistics", "fastest peer, statistics on")
COMPILED_COLUMNS = (
    "whole (ms)", *PEERS, "eager", "blocks (ms)", "nanoGPT over blocks", "eager over blocks", "statistics",
    "first step, whole (s)", "blocks (s)", "nanoGPT (s)",
)  # fmt: skip
ARMS_TOLD = (
    f"Forward, backward and fused AdamW on {TOKENS} tokens, fp32; GPT-2's form in every arm, vocabulary of 256. "
    f"Medians of {REPEATS} interleaved repeats of at least {SECONDS} s in one process per row."
)
RATIOS_TOLD = (
    "Ratios: theirs over ours, paired, above 1 where ours is faster. `statistics`: ours with every-step statistics of "
    "every weight tensor over ours without; the column after it: the fastest peer over ours with them."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, help="a checkout of karpathy/nanoGPT")
    parser.add_argument("--shapes", nargs="+", type=shape, default=SHAPES)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled"], default=["eager", "compiled"])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(**json.loads(asked.one), nanogpt=asked.nanogpt)))
        return
    if "eager" in asked.modes:
        eager(asked.nanogpt, asked.shapes, asked.threads)
    if "compiled" in asked.modes:
        shapes = [where for where in asked.shapes if where.context == COMPILED[0]]
        if shapes:
            compiled(asked.nanogpt, shapes, COMPILED[1])


def eager(nanogpt: Path | None, shapes: Sequence[Shape], threads: Sequence[int]) -> None:
    rows = []
    for where in shapes:
        for count in threads:
            found = apart(nanogpt, shape=str(where), threads=count, modes=["eager"])
            rows.append((where.depth, where.width, where.context, count, *row(found)))
            print(rows[-1], flush=True)
    told = f"{ARMS_TOLD} {RATIOS_TOLD} {versions(nanogpt)}"
    columns = ["depth", "width", "context", "threads", *COLUMNS]
    page.write("Training step", [told, "", *page.table(columns, rows)])


def compiled(nanogpt: Path | None, shapes: Sequence[Shape], threads: int) -> None:
    rows = []
    for where in shapes:
        found = apart(nanogpt, shape=str(where), threads=threads, modes=["eager", "compiled"])
        rows.append((where.depth, where.width, *compiled_row(found)))
        print(rows[-1], flush=True)
    lines = [
        f"{ARMS_TOLD} Context {COMPILED[0]}, {threads} threads. Ours compiled whole (compile=whole) and block by block "
        f"(compile=true), the others whole, beyond depth {COMPILED_PEERS} nanoGPT alone. Ratios as above; `eager`: the "
        f"fastest eager peer. First step: cold, caches off. {versions(nanogpt)}",
        "",
        *page.table(["depth", "width", *COMPILED_COLUMNS], rows),
    ]
    page.write("Compiled training step", lines)


def shape(text: str) -> Shape:
    return Shape(*map(int, text.split(",")))


def apart(nanogpt: Path | None, **spec: Any) -> dict[str, Any]:
    """`measure` in a process of its own, where nothing is compiled yet."""
    command = [sys.executable, __file__, "--one", json.dumps(spec), *(["--nanogpt", str(nanogpt)] if nanogpt else [])]
    settings = {"OMP_NUM_THREADS": str(spec.get("threads", 1)), "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env={**os.environ, **settings})
    return json.loads(done.stdout.splitlines()[-1])


def measure(shape: str, nanogpt: Path | None, threads: int = 1, modes: Sequence[str] = ()) -> dict[str, Any]:
    """The step times of all arms, seconds by `arm, mode`, a list over repeats, and of each arm's first step."""
    where = globals()["shape"](shape)
    torch.set_num_threads(threads)
    arms: dict[str, Arm] = {}
    compiling: dict[str, float] = {}
    example = batch(where)
    for mode in modes:
        for name, make in ARMS.items():
            if mode == "compiled" and where.depth > COMPILED_PEERS and name in PEERS and name != NANOGPT:
                continue
            if mode == "eager" and name == WHOLE:
                continue
            arm = make(where, nanogpt)
            if arm is None:
                continue
            if mode == "compiled":
                arm.compile()
            begun = time.perf_counter()
            arm.step(example)
            compiling[f"{name}, {mode}"] = time.perf_counter() - begun
            arms[f"{name}, {mode}"] = arm
    for arm in arms.values():  # what was compiled for an arm is given up as the next one of ours is compiled
        seconds(arm, example, 2)
    steps = {name: max(1, round(SECONDS / seconds(arm, example, 2))) for name, arm in arms.items()}
    rounds = [{name: seconds(arm, example, steps[name]) for name, arm in arms.items()} for _ in range(REPEATS)]
    return {"times": {name: [times[name] for times in rounds] for name in arms}, "first": compiling}


def seconds(arm: Arm, example: tuple[torch.Tensor, torch.Tensor], steps: int) -> float:
    """Of one step, mean over `steps`."""
    begun = time.perf_counter()
    for _ in range(steps):
        arm.step(example)
    return (time.perf_counter() - begun) / steps


def row(found: dict[str, Any]) -> tuple[str, ...]:
    """COLUMNS."""
    times = found["times"]
    ours, measured = times[f"{OURS}, eager"], times[f"{MEASURED}, eager"]
    took = statistics.median(ours)
    peers = (ratio(times.get(f"{peer}, eager"), ours) for peer in PEERS)
    told = (ratio(measured, ours), ratio(fastest(times), measured))
    return f"{took * 1e3:.0f}", f"{TOKENS / took:,.0f}", *peers, *told


def compiled_row(found: dict[str, Any]) -> tuple[str, ...]:
    """COMPILED_COLUMNS."""
    times = found["times"]
    whole, blocks, measured = (times[f"{name}, compiled"] for name in (WHOLE, OURS, MEASURED))
    peers = [times.get(f"{peer}, compiled") for peer in PEERS]
    eager = fastest(times)
    first = [found["first"].get(f"{name}, compiled") for name in (WHOLE, OURS, NANOGPT)]
    return (
        f"{statistics.median(whole) * 1e3:.0f}", *(ratio(peer, whole) for peer in peers), ratio(eager, whole),
        f"{statistics.median(blocks) * 1e3:.0f}", ratio(peers[0], blocks), ratio(eager, blocks),
        ratio(measured, blocks), *("" if time is None else f"{time:.0f}" for time in first),
    )  # fmt: skip


def ratio(theirs: Sequence[float] | None, ours: Sequence[float]) -> str:
    """Median of the paired ratios, above 1 where ours is the faster; empty where there is none of theirs."""
    return "" if theirs is None else f"{statistics.median(a / b for a, b in zip(theirs, ours, strict=True)):.2f}"


def fastest(times: dict[str, list[float]]) -> list[float] | None:
    """Of the eager peers."""
    theirs = [times[f"{peer}, eager"] for peer in PEERS if f"{peer}, eager" in times]
    return min(theirs, key=statistics.median, default=None)


def versions(nanogpt: Path | None, script: str = Path(__file__).name) -> str:
    """The machine, all versions and the command."""
    commit = ["git", "-C", str(nanogpt), "rev-parse", "--short", "HEAD"]
    return (
        f"{page.where()} nanoGPT {_output(commit)}, transformers {_version('transformers')}, "
        f"x-transformers {_version('x_transformers')}. Command: `python benchmarks/{script} --nanogpt PATH`."
    )


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "of an unknown commit"


def _version(module: str) -> str:
    found = find_spec(module)
    folder = Path(found.origin).parent.parent if found and found.origin else Path("/nowhere")
    names = [p.name for p in folder.glob(f"{module}-*.dist-info")]
    return names[0].removeprefix(f"{module}-").removesuffix(".dist-info") if names else "not there"


if __name__ == "__main__":
    main()
