"""Files that are whole or not there, and errors that name theirs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """A reader or a crash sees the old file or the new one, never a part."""
    with replacing(path) as temporary:
        temporary.write_text(text)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write beside `path`, which it replaces once it is on disk."""
    temporary = temporary_name(path)
    try:
        with naming(path):
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in an OSError that does not, such as a full disk's."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def sync_folder(path: Path) -> None:
    """Put the names in a folder on disk, as os.replace alone does not."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
