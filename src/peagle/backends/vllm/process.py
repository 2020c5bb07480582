"""A child process with what it prints, and an end that leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

_KEPT_LINES, _SHOWN_LINES = 400, 12
END_S = 10.0


class Child:
    """A process in a session of its own: a Ctrl-C comes to its parent alone.

    Args:
        argv: its command line.
        variables: its whole environment.
        on_line: gets every line that it prints, in another thread.
    """

    def __init__(
        self,
        argv: Sequence[str],
        variables: Mapping[str, str],
        on_line: Callable[[str], None],
    ) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._process = subprocess.Popen(
            argv,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.pid = self._process.pid

        def read() -> None:
            for line in self._process.stdout or ():
                self._lines.append(line.rstrip("\n"))
                on_line(self._lines[-1])

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        """Return its exit status, None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait for its end and return its exit status, -n where signal n ended it."""
        return self._process.wait()

    def terminate(self) -> None:
        """Ask it to end in order."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and everything of its session at once."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self, grace_s: float = END_S) -> None:
        """Ask it to end, wait so long, then end whatever is left of its session.

        Workers may outlive a parent that was killed.
        """
        self.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        self.kill()
        self._process.wait()
        self._reader.join(5)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()

    def tail(self) -> str:
        """Return the end of what it printed, up to the last error, for a message."""
        self._reader.join(0.5 if self.poll() is None else 5)
        lines = list(self._lines)
        if not lines:
            return "It printed nothing."
        errors = [at for at, line in enumerate(lines) if "Error" in line or "error:" in line]
        last = errors[-1] + 1 if errors else len(lines)
        return "It printed:\n  " + "\n  ".join(lines[max(0, last - _SHOWN_LINES) : last])
