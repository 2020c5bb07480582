"""Files that are on the disk before they appear, room for them, and locks between processes."""

import errno
import fcntl
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from peagle.errors import UserError

LOCK_NAME = ".lock"
FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HELD_ERRORS = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)


def sync(path: Path) -> None:
    """Wait until the contents of a file, or the names in a folder, are on the disk.

    Raises:
        OSError: the disk did not take them.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems sync files only.
        if not path.is_dir() or error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename a finished file to `path`, over an older one; contents and name are then on the disk.

    A crash at any moment leaves the older file or the whole new one.

    Raises:
        OSError: the disk did not take it.
    """
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def whole_lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file to which lines are appended, with their numbers from 1.

    Behind the last one, a line that a killed process left half-written is removed, and the file is
    at its end. Where the caller stops before, the file keeps all.

    Args:
        file: open for reading and appending.
    """
    file.seek(0)
    num_bytes = 0
    for number, line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            break
        num_bytes += len(line)
        yield number, line
    file.truncate(num_bytes)
    file.seek(0, os.SEEK_END)


@contextmanager
def needing_room(path: Path, advice: str) -> Iterator[None]:
    """Name a file in the error if the disk has no room for it.

    Files are opened within, since closing one writes too.

    Args:
        advice: what stays, and what to do.

    Raises:
        UserError: the disk, or the share of this user, is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK_ERRORS:
            raise
        raise UserError(f"{str(path)!r} cannot be written: {error.strerror}. {advice}") from None


def size_text(num_bytes: float) -> str:
    """Return a number of bytes as people write it."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:.0f} B"


def free_bytes(folder: Path) -> int:
    """Return the bytes that are free where a folder is, or where it would be made."""
    path = folder.absolute()
    return shutil.disk_usage(next(one for one in (path, *path.parents) if one.exists())).free


def cache_folder() -> Path:
    """Return the folder for files that can be made again: peagle/ in XDG_CACHE_HOME or ~/.cache."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The specification of XDG has relative paths ignored.
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "peagle"


def lock(descriptor: int, path: Path, *, wait: bool = False) -> None:
    """Keep `path` for this process alone, until the open file `descriptor` is closed.

    The lock of a process that was killed is gone with it. A file system without locks brings a
    warning.

    Args:
        descriptor: a file that is open for writing; NFS locks no other.
        path: the name of the locked thing, in messages.
        wait: wait until no other process has it.

    Raises:
        UserError: another process has it, and `wait` is False.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in _HELD_ERRORS:
            raise UserError(
                f"Another process is writing {str(path)!r}; wait for it, or choose another output."
            ) from None
        warnings.warn(
            f"{str(path)!r} cannot be locked ({error.strerror}): see that no other process writes "
            "there.",
            stacklevel=2,
        )


@contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Keep a folder, made if need be, for this process alone.

    The lock is on a file `LOCK_NAME` in the folder. A killed process leaves the file, which then
    locks nothing. With `wait`, other processes have it first.

    Raises:
        UserError: another process has it, and `wait` is False.
        OSError: it cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_NAME
    while True:
        with path.open("a") as file:
            lock(file.fileno(), folder, wait=wait)
            if not _is_open_file(path, file.fileno()):
                continue  # its last owner removed the file after it was opened here
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_open_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
