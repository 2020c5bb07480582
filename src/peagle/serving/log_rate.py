"""Log lines limited in rate, so that no client can fill a disk with them."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import TextIO

WINDOW_S = 10.0
MOST_IN_WINDOW = 50

_Kind = tuple[str, str, str]


class RateLimitedHandler(logging.StreamHandler[TextIO]):
    """Writes at most 50 records of a kind in 10 seconds, then how many it left out.

    Records are of one kind if logger, level, the first line of the message before its arguments
    are put in, and the HTTP status (where there is one) are the same. Records with status 200 are
    all written: the engines' work bounds how many there are.

    Args:
        stream: takes the lines.
        window_s: seconds that are looked at together.
    """

    def __init__(self, stream: TextIO, window_s: float = WINDOW_S) -> None:
        super().__init__(stream)
        self._window_s = window_s
        self._window_ends_s = 0.0
        self._counts: Counter[_Kind] = Counter()
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it; the handler's lock is held."""
        status = getattr(record, "status", None)
        if status == 200:
            return super().emit(record)
        if time.monotonic() >= self._window_ends_s:
            self._tell()
            self._window_ends_s = time.monotonic() + self._window_s
        first_line = str(record.msg).partition("\n")[0][:100]
        name = first_line if status is None else f"{first_line} (status {status})"
        kind = (record.name, record.levelname, name)
        self._counts[kind] += 1
        if self._counts[kind] <= MOST_IN_WINDOW:
            super().emit(record)
        elif self._timer is None:
            # Records of other kinds may not come for a long time.
            self._timer = threading.Timer(self._window_s, self.tell)
            self._timer.daemon = True
            self._timer.start()

    def tell(self) -> None:
        """Write how many records were left out so far."""
        self.acquire()
        try:
            self._tell()
        finally:
            self.release()

    def close(self) -> None:
        """Write what is left to tell."""
        self.tell()
        super().close()

    def _tell(self) -> None:
        counts, self._counts = self._counts, Counter()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for (name, level, first_line), count in counts.items():
            if count > MOST_IN_WINDOW:
                text = "left out %d more lines like: %s"
                arguments = (count - MOST_IN_WINDOW, first_line)
                number = logging.getLevelName(level)
                super().emit(logging.LogRecord(name, number, "", 0, text, arguments, None))
