"""Ctrl-C and SIGTERM while resources are made and taken away: nothing is forgotten for them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# Of a terminal, of `kill` and of a terminal that is closed.
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


class Interrupted(KeyboardInterrupt):
    """A signal asked to stop."""


class Interrupts:
    """Within its block, a signal interrupts what waits, and lets a call that was sent come back.

    An answer that nobody waits for would leave open what was made. A second signal interrupts
    that too.
    """

    def __init__(self) -> None:
        self._asked = 0
        self._patience = 0
        self._warn: Callable[[], None] = lambda: None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        # Python lets only the main thread handle signals.
        if threading.current_thread() is threading.main_thread():
            numbers = (getattr(signal, name, None) for name in _SIGNALS)
            for number in filter(None, numbers):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked += 1
        if self._asked > self._patience:
            raise Interrupted
        self._warn()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within, a first signal takes effect at the end only, a second one at once."""
        self._asked, self._patience = 0, 1
        try:
            yield
        finally:
            asked, self._asked, self._patience = self._asked, 0, 0
        if asked:
            raise Interrupted

    @contextmanager
    def ignored_once(self, warn: Callable[[], None]) -> Iterator[None]:
        """Within, a first signal only calls `warn`, a second one interrupts."""
        self._asked, self._patience, self._warn = 0, 1, warn
        try:
            yield
        finally:
            self._asked, self._patience, self._warn = 0, 0, lambda: None
