"""Kill an action before each of its steps on files, as a crash of the machine's power might."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_STEPS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
_WRITES = os.O_WRONLY | os.O_RDWR


def kills(prepare: Callable[[], None], action: Callable[[], None]) -> Iterator[int]:
    """Prepare, let a child process begin `action`, and kill it before step 1; then 2, 3 and so on.

    A step makes, opens for writing, renames or removes a file or a folder. Yields the number of the
    step after each death, and ends when the child reaches the end of the action.
    """
    step = 0
    while True:
        step += 1
        prepare()
        child = os.fork()
        if child == 0:
            _die_at(step, action)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
            yield step
            continue
        assert os.WEXITSTATUS(status) == 0, "the action failed"
        return


def _die_at(step: int, action: Callable[[], None]) -> None:
    left = step

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in _STEPS or (event == "open" and arguments[2] & _WRITES):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(watch)
        action()
        os._exit(0)
    finally:
        os._exit(1)


def disk_events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that will hold the name of each file that is synced, and each renaming."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def watched_sync(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def watched_replace(source: Path, to: Path) -> None:
        done.append(f"{Path(source).name} to {Path(to).name}")
        replace(source, to)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(os, "replace", watched_replace)
    return done
