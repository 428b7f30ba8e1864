"""checkpoint.pt: all that a bit-identical resume needs. Of it and the one before it, one is always whole on disk."""

import os
import random
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from normlab.files import naming, sync_folder, temporary_name

FORMAT = 3
LAST, PREVIOUS = "checkpoint.pt", "checkpoint.previous.pt"


def write(folder: Path, run_id: str, state: Mapping[str, Any], device: torch.device) -> None:
    """Make `state` (tensors and plain values) the last checkpoint, with every random generator that `device` uses.

    A kill at any moment leaves a whole one: the file is complete on disk before it takes its name. Its checksums are
    the CRC-32 of each of its parts, as the zip format has them.
    """
    last, temporary = folder / LAST, temporary_name(folder / LAST)
    parts = {"format": FORMAT, "run_id": run_id, **state, "random": _random_state(device)}
    try:
        with naming(last), temporary.open("wb") as file:
            _save(_canonical(parts | {"parts": sorted(parts)}, {}), file)
            os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    if last.exists():
        last.replace(folder / PREVIOUS)
    temporary.replace(last)
    sync_folder(folder)


def read(folder: Path, run_id: str, check: Callable[[Mapping[str, Any]], None]) -> dict[str, Any] | None:
    """The state of the newest checkpoint that is whole, this run's, and passes `check` (which raises ValueError).

    None if there is none. One that is refused is named with the reason on stderr. The generators are not set yet: see
    `restore_random`.
    """
    refused = False
    for path in _present(folder):
        try:
            state = _whole(path, run_id)
            check(state)
            return state
        except ValueError as error:
            print(f"{path}: refused: {error}", file=sys.stderr)
            refused = True
    if refused:
        print(f"{folder}: no checkpoint is left, the run begins again", file=sys.stderr)
    return None


def forget_previous(folder: Path) -> None:
    (folder / PREVIOUS).unlink(missing_ok=True)


def clear(folder: Path) -> None:
    for path in _present(folder):
        path.unlink()


def restore_random(state: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators of Python, NumPy, torch and the CUDA device to a checkpoint's."""
    found = state["random"]
    version, words, gauss = found["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, *rest = found["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(found["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(found["cuda"], device)


class _Told:
    """A file that keeps the error of a write: torch's zip writer hides it behind one of its own."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.error = file, None

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _save(state: Any, file: BinaryIO) -> None:
    told = _Told(file)
    try:
        torch.save(state, told)  # pyright: ignore[reportArgumentType]
        file.flush()
    except RuntimeError:
        if told.error is None:
            raise
        raise told.error from None


def _random_state(device: torch.device) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "python": [version, torch.tensor(words), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def _canonical(value: Any, own: dict[tuple, torch.Tensor]) -> Any:
    """Equal states as equal bytes: pickle tells two equal strings from one string that comes twice, and keeps all of
    the memory that a tensor is a part of. own: of such tensors, each once, where several names share it."""
    if isinstance(value, Mapping):
        return {_canonical(key, own): _canonical(item, own) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item, own) for item in value]
    if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() != value.nbytes:
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        return own[place] if place in own else own.setdefault(place, value.clone())
    return sys.intern(value) if isinstance(value, str) else value


def _present(folder: Path) -> Iterator[Path]:
    yield from (path for name in (LAST, PREVIOUS) if (path := folder / name).exists())


def _whole(path: Path, run_id: str) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as parts:
            bad = parts.testzip()
        state = None if bad else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what torch raises for a damaged or unsafe pickle has no common class
        raise ValueError(f"not a whole checkpoint ({' '.join(str(error).split())[:200]})") from None
    if bad:
        raise ValueError(f"damaged: the checksum of its part {bad} is wrong")
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"not a checkpoint of this program's format {FORMAT}")
    if state.get("run_id") != run_id:
        raise ValueError(f"it is run {state.get('run_id')}'s")
    if missing := {"parts", *state.get("parts", ())} - state.keys():
        raise ValueError(f"lacks {', '.join(sorted(missing))}")
    return state
