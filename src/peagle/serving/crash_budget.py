"""The limit of how often an engine is restarted."""

from __future__ import annotations

import time
from collections import deque

MOST_CRASHES = 5
WINDOW_S = 600.0
MOST_FAILED_STARTS = 3
_FIRST_DELAY_S = 0.5


class CrashBudget:
    """Counts the crashes of one engine's processes.

    5 crashes in 10 minutes are allowed, and fewer than 3 failed starts in a row. The wait before a
    restart doubles with each crash in the window.
    """

    def __init__(self) -> None:
        self._crashes: deque[float] = deque()
        self._num_failed_starts = 0

    @property
    def num_recent(self) -> int:
        """Number of crashes in the window."""
        now = time.monotonic()
        while self._crashes and self._crashes[0] < now - WINDOW_S:
            self._crashes.popleft()
        return len(self._crashes)

    def started(self) -> None:
        """Note that a process has loaded."""
        self._num_failed_starts = 0

    def crashed(self, *, while_loading: bool) -> None:
        """Note that a process has ended, or was killed because it hung."""
        self._crashes.append(time.monotonic())
        self._num_failed_starts += while_loading

    @property
    def delay_s(self) -> float:
        """Number of seconds to wait before the next start."""
        return _FIRST_DELAY_S * 2 ** max(self.num_recent - 1, 0)

    @property
    def spent(self) -> str | None:
        """Why there is no further start; None if there is one."""
        if self._num_failed_starts >= MOST_FAILED_STARTS:
            return f"{self._num_failed_starts} starts in a row failed"
        if (crashes := self.num_recent) > MOST_CRASHES:
            limit = f"{MOST_CRASHES} are restarted"
            return f"it ended {crashes} times within {WINDOW_S / 60:g} minutes, of which {limit}"
        return None
