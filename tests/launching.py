"""experiments/train.py as a user starts it, in a process that a test may watch, hold up, signal and kill.

As a script: `launching.py SCRIPT ARGUMENTS` runs one, `launching.py` alone is a Starter's process. Both obey
    MARKS=file       a line for each launch (`launch - 0`), each step that is begun (`step RUN N`) and each checkpoint
                     that is in place (`checkpoint RUN N`, N steps in it)
    HOLD=N:seconds   sleep that long in step N
    BREAK=N          raise in step N
    AT=time          begin then (seconds of the epoch), so that several begin at one instant
    LARGEST=bytes    no file may grow beyond: a full disk for whoever writes it
    BOUND=1          the permissions of files bind the superuser too
"""

import ctypes
import json
import os
import re
import resource
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ROOT / "experiments" / "train.py"


class Mark(NamedTuple):
    kind: str
    run: str
    step: int


class Launch(Protocol):
    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...


def environment() -> dict[str, str]:
    """This process's, without what W&B left in it: a launch would else write to this process's W&B service."""
    return {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}


def start(arguments: Iterable[str], out: Path, *, script: Path = TRAIN, **more: str) -> Launch:
    """A new interpreter, in a session of its own. Its stdout goes to out/stdout, its stderr to out/stderr."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "stdout").open("ab") as stdout, (out / "stderr").open("ab") as stderr:
        return subprocess.Popen(
            [sys.executable, __file__, str(script), *arguments],
            env=environment() | more | {"OMP_NUM_THREADS": "1"},
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


class Starter:
    """A process that has imported everything and forks a launch on request: no four seconds of imports for each."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment() | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, arguments: Iterable[str], out: Path, *, script: Path = TRAIN, **more: str) -> Launch:
        out.mkdir(parents=True, exist_ok=True)
        return Forked(self, self.ask(argv=[str(script), *arguments], out=str(out), environment=more))

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


class Forked:
    """A launch of a Starter, with the part of Popen's interface that is used here."""

    def __init__(self, starter: Starter, pid: int) -> None:
        self.pid, self._starter = pid, starter
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            self._status = self._starter.ask(poll=self.pid)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or 600.0)
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} has not ended")
            time.sleep(0.005)
        return status


def kill(launch: Launch) -> None:
    """SIGKILL to the process and all below it, W&B's service too, which has a session of its own."""
    for pid in [launch.pid, *_below(launch.pid)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    launch.wait()


def _below(pid: int) -> Iterator[int]:
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in listed.read_text().split()]
        except OSError:
            continue
        for child in children:
            yield child
            yield from _below(child)


def until(found: Callable[[], Any], launch: Launch | None = None, seconds: float = 60.0, pause: float = 0.001) -> Any:
    """What found() is, once it is true or the launch has ended."""
    deadline = time.monotonic() + seconds
    while not (there := found()):
        if launch is not None and launch.poll() is not None:
            return found()
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(pause)
    return there


def until_step(marks: Path, step: int, launch: Launch) -> Mark:
    """Wait for a launch to begin that step."""

    def there() -> Mark | None:
        mark = (read_marks(marks) or [None])[-1]
        return mark if mark and mark.kind == "step" and mark.step == step else None

    mark = until(there, launch)
    assert mark, f"the launch ended before step {step}"
    return mark


def read_marks(path: Path) -> list[Mark]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [Mark(kind, run, int(step)) for kind, run, step in (line.split() for line in lines)]


def differences(ours: Path, undisturbed: Path) -> list[str]:
    """How two folders of one run differ, timings and the path of runs_dir aside. W&B's records are not compared."""
    files = [_content(folder) for folder in (ours, undisturbed)]
    names = sorted(files[0].keys() | files[1].keys())
    return [f"{ours.name}/{name}" for name in names if files[0].get(name) != files[1].get(name)]


# What run.json tells of the launches and their times, not of the result.
LAUNCHES = ("started", "seconds", "tokens_per_second", "mfu", "from_step", "attempts", "git_commit", "git_dirty")


def _content(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if path.is_dir() or name.parts[0] == "wandb":
            continue
        content: Any = path.read_bytes()
        if path.name == "run.json":
            content = json.dumps({k: v for k, v in json.loads(content).items() if k not in LAUNCHES})
        elif path.name == "metrics.jsonl":
            content = re.sub(rb'"seconds": [^,}]+', b"", content)
        elif path.name == "config.yaml":
            content = re.sub(rb"(?m)^runs_dir: .*$", b"", content)
        found[str(name)] = content
    return found


def rows(folder: Path) -> list[int]:
    """The steps of metrics.jsonl."""
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def wandb_steps(folder: Path) -> list[list[int]]:
    """The steps of each W&B record of a run."""
    program = Path(sys.executable).with_name("wandb")
    found = []
    for record in sorted(folder.glob("wandb/*run-*/*.wandb")):
        told = subprocess.run(
            [program, "leet", "inspect", "--json", record], capture_output=True, text=True, check=True
        ).stdout
        history = [entry["history"] for entry in map(json.loads, told.splitlines()) if "history" in entry]
        found.append([int(row["step"]["num"]) if "num" in row["step"] else 0 for row in history])
    return found


def _plant() -> None:
    """What the environment asks for."""
    from normlab import fit

    marks = os.environ.get("MARKS")
    held, seconds = os.environ.get("HOLD", "-1:0").split(":")
    now: dict[str, int] = {}
    backward, replace = fit.Fit.backward, os.replace

    def mark(kind: str, run: str, step: int) -> None:
        if marks:
            with Path(marks).open("ab", buffering=0) as file:
                file.write(f"{kind} {run} {step}\n".encode())

    def begun(fit: Any, *arguments: Any) -> Any:
        run, asked = fit.folder.path.name, len(fit.journal.losses) + len(fit.journal._pending)
        now[run] = asked
        mark("step", run, asked)
        if os.environ.get("BREAK") == str(asked):
            raise ValueError(f"planted in step {asked}")
        if asked == int(held):
            end = time.monotonic() + float(seconds)
            while (left := end - time.monotonic()) > 0:
                time.sleep(min(left, 0.05))
        return backward(fit, *arguments)

    def replaced(source: Any, target: Any, **options: Any) -> None:
        replace(source, target, **options)
        if Path(target).name == "checkpoint.pt":
            run = Path(target).parent.name
            mark("checkpoint", run, now.get(run, -1) + 1)

    mark("launch", "-", 0)
    if limit := os.environ.get("LARGEST"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    if os.environ.get("BOUND"):
        _give_up_write_anywhere()
    time.sleep(max(0.0, float(os.environ.get("AT", "0")) - time.time()))
    fit.Fit.backward = begun  # type: ignore[method-assign]
    os.replace = replaced  # type: ignore[assignment]


def _give_up_write_anywhere() -> None:
    """Drop CAP_DAC_OVERRIDE, number 1: see capset(2). Who is not the superuser has it not."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then their upper halves
    libc.capget(header, sets)
    sets[0] &= ~(1 << 1)
    sets[1] &= ~(1 << 1)
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")


def _run(argv: list[str]) -> None:
    _plant()
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


def _serve() -> None:
    """Fork on request; tell how the children ended. W&B is left to them: it has one folder for each that imports it."""
    import normlab.cli
    import normlab.train  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif not (answer := os.fork()):
            _become(request)
        print(json.dumps(answer), flush=True)


def _become(request: dict[str, Any]) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(request["out"], name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.update(request["environment"])
    status = 0
    try:
        _run(request["argv"])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        # as at the end of an interpreter: W&B's service is told by an atexit function
        import atexit

        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _run(sys.argv[1:]) if len(sys.argv) > 1 else _serve()
