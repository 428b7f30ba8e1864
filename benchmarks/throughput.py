"""Training-step time of our GPT-2-shaped decoder and of what people would use instead, in turns in one process.

python benchmarks/throughput.py --nanogpt ../nanoGPT       # all shapes, 1 and 2 threads, some compiled too
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
OURS, MEASURED, NANOGPT = "normlab", "normlab, statistics", "nanoGPT"
PEERS = (NANOGPT, "transformers", "x-transformers")
COMPILED = (64, 2)  # context and threads of the shapes that are compiled too
REPEATS = 7
SECONDS = 0.4  # of one turn of one arm, at least one step
COMPILED_PEERS = 12  # blocks up to which every peer is compiled; beyond, for minutes, nanoGPT alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, help="a checkout of karpathy/nanoGPT")
    parser.add_argument("--shapes", nargs="+", type=shape, default=SHAPES)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled"])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(**json.loads(asked.one), nanogpt=asked.nanogpt)))
        return
    rows, memory = [], []
    for where in asked.shapes:
        for threads in asked.threads:
            modes = asked.modes or ["eager", *(["compiled"] if (where.context, threads) == COMPILED else [])]
            found = apart(asked.nanogpt, shape=_told(where), threads=threads, modes=modes)
            rows += [row(where, threads, mode, found) for mode in modes]
            print(*rows[-len(modes) :], sep="\n", flush=True)
        peaks = [apart(asked.nanogpt, shape=_told(where), peak_of=name)["MiB"] for name in (MEASURED, NANOGPT)]
        memory.append(
            (where.depth, where.width, where.context, *(f"{p:.0f}" for p in peaks), f"{peaks[0] / peaks[1]:.2f}")
        )
    page.write("Training step", told(asked.nanogpt, rows, memory))


def shape(text: str) -> Shape:
    return Shape(*map(int, text.split(",")))


def _told(where: Shape) -> str:
    return f"{where.depth},{where.width},{where.context}"


def apart(nanogpt: Path | None, **spec: Any) -> dict[str, Any]:
    """`measure` in a process of its own, where nothing is compiled yet."""
    command = [sys.executable, __file__, "--one", json.dumps(spec), *(["--nanogpt", str(nanogpt)] if nanogpt else [])]
    settings = {"OMP_NUM_THREADS": str(spec.get("threads", 1)), "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env={**os.environ, **settings})
    return json.loads(done.stdout.splitlines()[-1])


def measure(
    shape: str, nanogpt: Path | None, threads: int = 1, modes: Sequence[str] = (), peak_of: str = ""
) -> dict[str, Any]:
    """Either the peak memory of one arm, or the step times of all arms, seconds by `arm, mode`, a list over repeats."""
    where = globals()["shape"](shape)
    torch.set_num_threads(threads)
    if peak_of:
        return {"MiB": peak(peak_of, where, nanogpt)}
    arms: dict[str, Arm] = {}
    compiling: dict[str, float] = {}
    example = batch(where)
    for mode in modes:
        for name, make in ARMS.items():
            if mode == "compiled" and where.depth > COMPILED_PEERS and name in PEERS and name != NANOGPT:
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


def peak(name: str, where: Shape, nanogpt: Path | None) -> float:
    """MiB that three steps of an arm need at the most, beyond the imports. Linux."""

    def most() -> int:
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))

    warm = ARMS[name](Shape(1, 16, 16), nanogpt)  # what the libraries allocate once
    assert warm is not None
    warm.step(batch(Shape(1, 16, 16)))
    before = most()
    arm = ARMS[name](where, nanogpt)
    assert arm is not None
    for _ in range(3):
        arm.step(batch(where))
    return (most() - before) / 2**10


def row(where: Shape, threads: int, mode: str, found: dict[str, Any]) -> tuple[object, ...]:
    """One line of the table: ratios are theirs over ours, above 1 where ours is the faster."""
    times, first = found["times"], found["first"]
    ours = times[f"{OURS}, {mode}"]

    def ratio(theirs: Sequence[float] | None, mine: Sequence[float] = ours) -> str:
        return "" if theirs is None else f"{statistics.median(a / b for a, b in zip(theirs, mine, strict=True)):.2f}"

    def fastest(mode: str) -> Sequence[float] | None:
        theirs = [times[f"{peer}, {mode}"] for peer in PEERS if f"{peer}, {mode}" in times]
        return min(theirs, key=statistics.median, default=None)

    measured = times[f"{MEASURED}, {mode}"]
    took = statistics.median(ours)
    compiled = mode == "compiled"
    begun = [first.get(f"{name}, compiled") if compiled else None for name in (OURS, NANOGPT)]
    return (
        where.depth, where.width, where.context, threads, mode, f"{took * 1e3:.0f}", f"{TOKENS / took:,.0f}",
        *(ratio(times.get(f"{peer}, {mode}")) for peer in PEERS),
        ratio(fastest("eager")) if compiled else "",
        ratio(measured),
        ratio(fastest(mode), measured),
        *("" if time is None else f"{time:.0f}" for time in begun),
    )  # fmt: skip


def told(nanogpt: Path | None, rows: Sequence[Sequence[object]], memory: Sequence[Sequence[object]]) -> list[str]:
    """The section of the page."""
    commit = ["git", "-C", str(nanogpt), "rev-parse", "--short", "HEAD"]
    return [
        f"Forward, backward and fused AdamW on {TOKENS} tokens, fp32; GPT-2's form in every arm, vocabulary of 256. "
        f"Medians of {REPEATS} interleaved repeats of at least {SECONDS} s in one process per row; ratios: theirs over "
        "ours, paired, above 1 where ours is faster. Ours is compiled block by block, the others whole, beyond depth "
        f"{COMPILED_PEERS} nanoGPT alone. `statistics`: ours with every-step statistics of every weight tensor over "
        "ours without; the column after it: the fastest peer of the mode over ours with them. First step: cold, caches "
        "off.",
        "",
        f"{page.where()} nanoGPT {_output(commit)}, transformers {_version('transformers')}, "
        f"x-transformers {_version('x_transformers')}. Command: `python benchmarks/throughput.py --nanogpt PATH`.",
        "",
        *page.table(
            ["depth", "width", "context", "threads", "mode", "ours (ms)", "tokens/s", *PEERS, "fastest eager peer",
             "statistics", "fastest peer, statistics on", "first step (s)", "nanoGPT's (s)"], rows,
        ),
        "",
        "Peak memory of three eager steps beyond the imports, ours with statistics, each in a process of its own:",
        "",
        *page.table(["depth", "width", "context", "ours (MiB)", "nanoGPT (MiB)", "ratio"], memory),
    ]  # fmt: skip


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "of an unknown commit"


def _version(module: str) -> str:
    found = find_spec(module)
    folder = Path(found.origin).parent.parent if found and found.origin else Path("/nowhere")
    names = [p.name for p in folder.glob(f"{module}-*.dist-info")]
    return names[0].removeprefix(f"{module}-").removesuffix(".dist-info") if names else "not there"


if __name__ == "__main__":
    main()
