"""Where prepared data are kept between runs: files named by a hash of all that they are made from."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from normlab.explain import ConfigError

EXTRA = "pip install 'normlab[text]'"


def extra(module: str, wanted_by: str) -> Any:
    """An optional package, or one line on how to get it."""
    try:
        return import_module(module)
    except ImportError:
        told = f"{wanted_by} needs the package {module.split('.')[0]}, which is not installed: {EXTRA}"
        raise ConfigError(told) from None


def digest(*parts: bytes) -> str:
    """SHA-256 of the parts, their borders included."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big") + part)
    return found.hexdigest()


def kept(folder: str | None, name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` in the cache. Where it is missing, make(empty folder) fills it; a reader sees all or nothing.

    Two processes may make it at once: the first to finish is kept. Raises ConfigError where nothing can be written.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(folder) if folder else base / "normlab"
    target = root / name
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=root))
    except OSError as error:
        raise ConfigError(f"data.cache={str(root)!r}: {error.strerror}; accepted: a folder to write to") from None
    try:
        make(temporary)
        temporary.rename(target)
    except OSError as error:
        if not target.is_dir():
            told = f"data.cache={str(root)!r}: {error.strerror or error}; accepted: a folder to write to"
            raise ConfigError(told) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target
