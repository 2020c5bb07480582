"""Processor time of threads: the work that was done, however busy the machine is."""

import itertools
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

# The wall clock serves where a thread cannot read another thread's clock.
_HAS_THREAD_CLOCKS = hasattr(time, "pthread_getcpuclockid")
_TASKS = Path("/proc/self/task")
_numbers = itertools.count()

# Processor seconds of the calling thread.
own_seconds = time.thread_time if _HAS_THREAD_CLOCKS else time.perf_counter


def thread_seconds(ident: int) -> float:
    """Return the processor seconds that a thread has used, by the clock of `own_seconds`."""
    if _HAS_THREAD_CLOCKS:
        return time.clock_gettime(time.pthread_getcpuclockid(ident))
    return own_seconds()


class WorkClock:
    """Processor seconds of the work that a thread does inside `with`, and of the threads it starts.

    On Linux a new thread has the name of the thread that started it, so the work gets a name of its
    own. On other systems started threads are not counted.
    """

    def __init__(self) -> None:
        self._name = f"peagle-{next(_numbers) % 10**8}"
        self._thread: threading.Thread | None = None
        self._own_name: str | None = None
        self._start_s = 0.0

    def __enter__(self) -> Self:
        self._own_name = _rename(self._name)
        self._start_s = own_seconds()
        self._thread = threading.current_thread()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread = None
        if self._own_name is not None:
            _rename(self._own_name)

    def used_s(self) -> float:
        """Return the seconds used so far, in any thread; 0 before the work begins and after it."""
        thread = self._thread
        if thread is None or thread.ident is None:
            return 0.0
        used_s = thread_seconds(thread.ident) - self._start_s
        if self._own_name is None:
            return used_s
        others = (task for task in _tasks() if task != str(thread.native_id))
        return used_s + sum(_seconds_if_named(_TASKS / task, self._name) for task in others)


def _rename(name: str) -> str | None:
    """Give the calling thread a name in the system; return the old one, None if it has none."""
    file = _TASKS / str(threading.get_native_id()) / "comm"
    try:
        last = file.read_text().rstrip("\n")
        file.write_text(name)
    except OSError:
        return None
    return last


def _tasks() -> list[str]:
    try:
        return os.listdir(_TASKS)
    except OSError:
        return []


def _seconds_if_named(task: Path, name: str) -> float:
    """Return the processor seconds of a thread of this name; 0 for other and ended threads."""
    try:
        before, fields = (task / "stat").read_text().rsplit(")", 1)
    except OSError:
        return 0.0
    if before.split("(", 1)[1] != name:
        return 0.0
    user, system = fields.split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
