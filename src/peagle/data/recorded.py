"""Folders of recorded traffic, which `peagle serve --record` writes: their form and deletion.

A folder has these files, which its owner alone can read:

- records.json: a secret, which makes ids of API keys, and the target whose traffic is recorded;
- TIME-XXXXXXXX.jsonl: records, one a line. TIME is that of the first, so the oldest file sorts
  first. A server appends to a file of its own until the file is full or old;
- refused: ids of keys of which nothing is recorded, one a line.

A line begins with the id of the key and the time, also where the rest is encrypted: listing and
deleting need no key file. Whoever changes a file holds the lock of the folder meanwhile. A killed
server leaves at most a cut last line.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

from peagle.disk import LOCK_NAME, locked, put_in_place
from peagle.errors import UserError
from peagle.extras import require_package

_INFO, _REFUSED = "records.json", "refused"
_VERSION = 1
_TIME = "%Y%m%dT%H%M%S.%fZ"
_FILE = re.compile(r"\d{8}T\d{6}\.\d{6}Z-[0-9a-f]{8}\.jsonl")
# How every line begins, see `line_of`.
_HEAD = re.compile(rb'\{"key_id": (?:null|"([0-9a-f]{32})"), "time": "(\d{4}-\d\d-\d\d)')
_DIGEST = re.compile("[0-9a-f]{64}")
_ID = re.compile("[0-9a-f]{32}")
_ENCRYPTED = "encrypted"

logger = logging.getLogger("peagle.serving")


def is_recording(path: Path) -> bool:
    """Return whether a path is a folder of recorded traffic."""
    return (path / _INFO).is_file()


def line_of(key_id: str | None, time_s: float, fields: Mapping[str, Any], cipher: Any) -> bytes:
    """Return a record as a line; a cipher hides all but the id of the key and the time."""
    rest = dict(fields)
    if cipher is not None:
        rest = {_ENCRYPTED: cipher.encrypt(json.dumps(rest).encode()).decode()}
    time = datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return json.dumps({"key_id": key_id, "time": time, **rest}).encode() + b"\n"


def record_files(folder: Path) -> list[Path]:
    """Return the files of records, the oldest first."""
    return sorted(one for one in folder.iterdir() if _FILE.fullmatch(one.name))


def new_record_file(folder: Path, time_s: float) -> Path:
    """Return the path of a new file whose first record is from a time."""
    time = datetime.fromtimestamp(time_s, UTC).strftime(_TIME)
    return folder / f"{time}-{secrets.token_hex(4)}.jsonl"


def began_s(file: Path) -> float:
    """Return the time of the first record of a file, by its name."""
    time = datetime.strptime(file.name.rpartition("-")[0], _TIME)
    return time.replace(tzinfo=UTC).timestamp()


def read_cipher(file: str | Path) -> Any:
    """Return the cipher (Fernet: AES-128 and HMAC) of the key in a file: 32 bytes in base64.

    Raises:
        UserError: the file cannot be read or has no such key, or `cryptography` is missing.
    """
    require_package("cryptography", "records", "--record-key-file")
    from cryptography.fernet import Fernet

    expected = "expected 32 random bytes in base64, as `openssl rand -base64 32` prints them."
    try:
        with open(file, "rb") as opened:
            if os.fstat(opened.fileno()).st_mode & stat.S_IROTH:
                text = "The key file %r can be read by every user of this machine: chmod 600 it."
                logger.warning(text, str(file))
            key = opened.read(1024).strip()
    except OSError as error:
        text = f"The key file {str(file)!r} cannot be read ({error.strerror}): {expected}"
        raise UserError(text) from None
    try:
        return Fernet(key.translate(bytes.maketrans(b"+/", b"-_")))
    except ValueError:  # from None: this error may carry the key
        raise UserError(f"The key file {str(file)!r} holds no key: {expected}") from None


def recorded_lines(file: Path, cipher: Any = None) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the records of a file with the numbers of their lines; None for a line that was cut.

    Raises:
        UserError: a record is encrypted, and there is no cipher, or one of another key.
    """
    for number, line in enumerate(_lines_of(file), start=1):
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            record = None
        if not isinstance(record, dict):
            yield number, None
            continue
        secret = record.pop(_ENCRYPTED, None)
        yield number, record if secret is None else record | _decrypted(secret, cipher, file)


def _lines_of(file: Path) -> Iterator[bytes]:
    try:
        lines = file.open("rb")
    except FileNotFoundError:  # a server has deleted it since, as its limits ask
        return
    with lines:
        yield from lines


def _decrypted(secret: str, cipher: Any, file: Path) -> dict[str, Any]:
    if cipher is None:
        raise UserError(
            f"The records in {str(file)!r} are encrypted; name the key file of the server that "
            "wrote them with --record-key-file."
        )
    from cryptography.fernet import InvalidToken

    try:
        return json.loads(cipher.decrypt(secret))
    except InvalidToken:
        raise UserError(
            f"The records in {str(file)!r} were encrypted with another key; name the key file of "
            "the server that wrote them with --record-key-file."
        ) from None


@dataclass(slots=True)
class RecordSummary:
    """Counts of the records in a folder.

    Attributes:
        bytes: size of all files.
        cut: lines that a killed server left half-written.
        days: records by day (UTC), keys: by the id of the key, "" for requests without one.
        refused: ids of keys of which nothing is recorded.
    """

    records: int = 0
    files: int = 0
    bytes: int = 0
    cut: int = 0
    days: dict[str, int] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


class RecordFolder:
    """A folder of recorded traffic.

    Args:
        path: the folder; see `create` for a new one.

    Raises:
        UserError: it is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            info = json.loads((path / _INFO).read_bytes())
            if info["format_version"] != _VERSION:
                raise UserError(
                    f"The records in {str(path)!r} have format version {info['format_version']}; "
                    f"expected {_VERSION}. Use the version of peagle that wrote them."
                )
            self._secret = bytes.fromhex(info["secret"])
            self._target: dict[str, Any] | None = info["target"]
        except (OSError, ValueError, LookupError, TypeError):
            raise UserError(
                f"{str(path)!r} holds no records; expected a folder that `peagle serve --record` "
                "has written."
            ) from None

    @classmethod
    def create(cls, path: Path) -> RecordFolder:
        """Return a folder, which is made if it is not there.

        Raises:
            UserError: others can read it, it holds other files, or it cannot be made.
        """
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & 0o077:
                raise UserError(
                    f"--record is {str(path)!r}, a folder that others can enter (mode {mode:o}); "
                    "expected a folder of its own with mode 700. Name another, or chmod 700 it."
                )
            with locked(path, wait=True):
                names = sorted({one.name for one in path.iterdir()} - {LOCK_NAME})
                if names and _INFO not in names:
                    raise UserError(
                        f"--record is {str(path)!r}, a folder that holds {names[0]!r}; expected an "
                        "empty folder, or one of records. Name another."
                    )
                if not names:
                    _write_info(path, secrets.token_bytes(32), None)
        except OSError as error:
            raise UserError(
                f"--record is {str(path)!r}, which cannot be written ({error.strerror}); expected "
                "a folder for records. Name another."
            ) from None
        return cls(path)

    def bind(self, target: dict[str, Any]) -> None:
        """Note the target whose traffic is recorded here.

        Args:
            target: `tokenizer_sha256` and `lm_head_sha256`, None where it is not known.

        Raises:
            UserError: the folder has records of another target.
            OSError: it cannot be written.
        """
        if self._target is None:
            with locked(self.path, wait=True):
                _write_info(self.path, self._secret, target)
            self._target = target
        for name, given in target.items():
            kept = self._target.get(name)
            if given is not None and kept is not None and given != kept:
                raise UserError(
                    f"--record is {str(self.path)!r}, a folder with records of another target "
                    f"({name} is {kept[:12]}..., that of this target {given[:12]}...). Name a "
                    "folder for each target."
                )

    def key_id(self, digest: bytes) -> str:
        """Return the id of an API key in this folder, by the SHA-256 of the key."""
        return blake2b(digest, key=self._secret, digest_size=16).hexdigest()

    def ids_named(self, name: str) -> set[str]:
        """Return the ids that a key may have, named by itself, by its SHA-256 or by its id."""
        ids = {self.key_id(sha256(name.encode()).digest())}
        if _DIGEST.fullmatch(name):  # also the form of many keys
            ids.add(self.key_id(bytes.fromhex(name)))
        return ids | ({name} if _ID.fullmatch(name) else set())

    def refused(self) -> frozenset[str]:
        """Return the ids of keys of which nothing is recorded."""
        try:
            return frozenset((self.path / _REFUSED).read_text(encoding="ascii").split())
        except FileNotFoundError:
            return frozenset()

    def delete(self, ids: Iterable[str]) -> int:
        """Delete all records of keys, and refuse further ones; return the number of records.

        A server that writes here waits meanwhile, and records nothing of these keys afterwards.

        Raises:
            OSError: the disk did not take it; records that are left can be deleted again.
        """
        ids, count = set(ids), 0
        with locked(self.path, wait=True):
            for stale in self.path.glob(".*.partial"):  # of a process that was killed
                stale.unlink()
            refused = "".join(f"{one}\n" for one in sorted(self.refused() | ids))
            _write_private(self.path / _REFUSED, [refused.encode()])
            for file in record_files(self.path):
                lines = file.read_bytes().splitlines(keepends=True)
                others = [line for line in lines if _id_of(line) not in ids]
                count += len(lines) - len(others)
                if not others:
                    file.unlink()
                elif len(others) < len(lines):
                    _write_private(file, others)
        return count

    def summary(self) -> RecordSummary:
        """Count what the folder holds; nothing is decrypted."""
        found = RecordSummary(refused=sorted(self.refused()))
        for file in record_files(self.path):
            found.files += 1
            for line in _lines_of(file):
                found.bytes += len(line)
                head = _HEAD.match(line)
                if head is None or not line.endswith(b"\n"):
                    found.cut += 1
                    continue
                found.records += 1
                names = (found.days, head[2].decode()), (found.keys, _id_of(line) or "")
                for counts, name in names:
                    counts[name] = counts.get(name, 0) + 1
        return found


def _id_of(line: bytes) -> str | None:
    """Return the id of the key of a line, which may be cut."""
    head = _HEAD.match(line)
    return head[1].decode() if head is not None and head[1] is not None else None


def _write_info(path: Path, secret: bytes, target: dict[str, Any] | None) -> None:
    info = {"format_version": _VERSION, "secret": secret.hex(), "target": target}
    _write_private(path / _INFO, [json.dumps(info).encode()])


def _write_private(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file that its owner alone can read, in place of an older one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.writelines(pieces)
        put_in_place(partial, path)
    finally:
        partial.unlink(missing_ok=True)
