"""Files that are on the disk before they appear, and locks between processes."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from peagle.disk import LOCK_NAME, locked, put_in_place, sync
from peagle.errors import UserError
from tests.crashes import disk_events

HOLD = """
import sys, time
from pathlib import Path
from peagle.disk import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
# Each of several processes counts up in a file, many times, alone each time.
COUNT = """
import sys, time
from pathlib import Path
from peagle.disk import locked
from peagle.errors import UserError
folder, done = Path(sys.argv[1]), 0
while done < 60:
    try:
        with locked(folder):
            count = int((folder / "count").read_text())
            time.sleep(0.0005)
            (folder / "count").write_text(str(count + 1))
            done += 1
    except UserError:
        time.sleep(0.0002)
"""


def start(code: str, folder: Path) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], **pipes)


def test_one_process_at_a_time_and_a_death_frees_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    holder = start(HOLD, folder)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"Another process is writing '{folder}'"), locked(folder):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert (folder / LOCK_NAME).exists(), "the dead process left it, which locks nothing"
    with locked(folder), pytest.raises(UserError), locked(folder):
        pass
    assert list(folder.iterdir()) == []


def test_no_two_processes_are_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("0")
    counters = [start(COUNT, tmp_path) for _ in range(3)]
    assert [counter.wait(timeout=120) for counter in counters] == [0, 0, 0]
    assert (tmp_path / "count").read_text() == "180"


def test_a_file_system_without_locks_brings_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.warns(UserWarning, match=f"'{tmp_path}' cannot be locked"), locked(tmp_path):
        (tmp_path / "file").touch()


def test_a_file_is_on_the_disk_before_it_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = disk_events(monkeypatch)
    (tmp_path / "a.part").write_text("x")
    put_in_place(tmp_path / "a.part", tmp_path / "a")
    assert done == ["a.part", "a.part to a", tmp_path.name]


def test_an_error_of_the_disk_is_raised_but_not_that_folders_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(number: int) -> None:
        def fsync(_: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fsync)

    (tmp_path / "file").touch()
    fails(errno.EINVAL)
    sync(tmp_path)
    with pytest.raises(OSError):
        sync(tmp_path / "file")
    fails(errno.EIO)
    with pytest.raises(OSError):
        sync(tmp_path)
