"""Signals at moments of our choosing: between steps, and never between writes that belong together."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PREEMPTING = signal.SIGUSR2  # submitit's, where it runs the job


class Postponed:
    """Signals that would stop the process wait until `deliver`; a second SIGINT does not. Use as a context manager."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # which alone gets them
            handled = {number: signal.getsignal(number) for number in (*STOPPING, PREEMPTING)}
            stops = {n: h for n, h in handled.items() if h != signal.SIG_IGN and (callable(h) or n in STOPPING)}
            self._before = {number: signal.signal(number, self._note) for number in stops}
        return self

    def deliver(self) -> None:
        """Hand what waits to the handlers that were there before, which may raise; exit where there was none."""
        while self.waiting:
            self._act(self.waiting.pop(0), None)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is None:
            self.deliver()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in self.waiting:
            self._act(number, frame)
        self.waiting.append(number)

    def _act(self, number: int, frame: FrameType | None) -> None:
        handler = self._before[number]
        if not callable(handler):
            raise SystemExit(128 + number)
        handler(number, frame)


@contextmanager
def unbroken() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until what belongs together is written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = {s: signal.signal(s, lambda number, _frame: held.append(number)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in held:
            signal.raise_signal(number)
