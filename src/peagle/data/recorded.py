"""Folders of recorded traffic, which `peagle serve --record` writes: their form and deletion.

Its files, which the owner alone can read:

- records.json: a secret, which makes ids of API keys;
- TIME-XXXXXXXX.jsonl: records from that time on, one a line; each server appends to its own;
- refused: ids of keys of which nothing is recorded, one a line.

A line begins with the id of the key and the time, also where the rest is encrypted. Whoever changes
a file holds the lock of the folder. A killed server leaves at most a cut last line. Lines of spaces
were deleted on a full disk. Links are not followed: a deletion would leave the files that they
name.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

from peagle.disk import FULL_DISK_ERRORS, LOCK_NAME, locked, needing_room, put_in_place, sync
from peagle.errors import UserError
from peagle.extras import require_package

_INFO, _REFUSED, _ENCRYPTED = "records.json", "refused", "encrypted"
_TIME = "%Y%m%dT%H%M%S.%fZ"
_FILE = re.compile(r"\d{8}T\d{6}\.\d{6}Z-[0-9a-f]{8}\.jsonl")
# How every line begins, see `line_of`.
_HEAD = re.compile(rb'\{"key_id": (?:null|"([0-9a-f]{32})"), "time": "(\d{4}-\d\d-\d\d)')


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
    named = (one for one in folder.iterdir() if _FILE.fullmatch(one.name))
    return sorted(one for one in named if one.is_file() and not one.is_symlink())


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
        UserError: the file has no such key, or `cryptography` is missing.
    """
    require_package("cryptography", "records", "--record-key-file")
    from cryptography.fernet import Fernet

    expected = "expected 32 random bytes in base64, as `openssl rand -base64 32` prints them."
    try:
        with open(file, "rb") as opened:
            key = opened.read(1024).strip()
        return Fernet(key.translate(bytes.maketrans(b"+/", b"-_")))
    except OSError as error:
        text = f"The key file {str(file)!r} cannot be read ({error.strerror}): {expected}"
        raise UserError(text) from None
    except ValueError:  # from None: this error may carry the key
        raise UserError(f"The key file {str(file)!r} holds no key: {expected}") from None


def recorded_lines(file: Path, cipher: Any = None) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the records of a file with the numbers of their lines; None for a line that was cut.

    Raises:
        UserError: a record is encrypted, and not with the key of the cipher.
    """
    for number, line in enumerate(_lines_of(file), start=1):
        if line.isspace():  # it was deleted
            continue
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and _ENCRYPTED in record:
            record |= _decrypted(record.pop(_ENCRYPTED), cipher, file)
        yield number, record if isinstance(record, dict) else None


def _lines_of(file: Path) -> Iterator[bytes]:
    try:
        lines = file.open("rb")
    except FileNotFoundError:  # a server has deleted it since, as its limits ask
        return
    with lines:
        yield from lines


def _decrypted(secret: Any, cipher: Any, file: Path) -> dict[str, Any]:
    problem = "are encrypted"
    if cipher is not None:
        from cryptography.fernet import InvalidToken

        try:
            return dict(json.loads(cipher.decrypt(secret)))
        except (InvalidToken, ValueError, TypeError):
            problem = "were encrypted with another key"
    raise UserError(
        f"The records in {str(file)!r} {problem}; name the key file of the server that wrote them "
        "with --record-key-file."
    ) from None


class RecordFolder:
    """A folder of recorded traffic; `create` makes a new one.

    Raises:
        UserError: the path is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._info = (path / _INFO).read_bytes()
            self._secret = bytes.fromhex(json.loads(self._info)["secret"])
        except (OSError, ValueError, LookupError, TypeError):
            raise UserError(
                f"{str(path)!r} holds no records that this user can read; expected a folder that "
                "`peagle serve --record` has written."
            ) from None

    @classmethod
    def create(cls, path: Path) -> RecordFolder:
        """Return a folder, which is made if it is not there.

        Raises:
            UserError: others can read it, it holds other files, or it cannot be made.
        """
        problem = ""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = stat.S_IMODE(path.stat().st_mode)
            is_kept = is_recording(path) or not _others_in(path)
            if mode & 0o077 and is_kept:
                problem = f"others can enter it (mode {mode:o}; chmod 700 it)"
            elif not is_recording(path):
                with locked(path, wait=True):
                    if others := _others_in(path):
                        problem = f"it holds {others[0]!r}"
                    elif not is_recording(path):
                        info = {"format_version": 1, "secret": secrets.token_hex(32)}
                        _write_private(path / _INFO, [json.dumps(info).encode()])
        except FileExistsError:
            problem = "it is no folder"
        except OSError as error:
            problem = f"it cannot be written ({error.strerror})"
        if problem:
            raise UserError(
                f"--record is {str(path)!r}: {problem}. Expected a folder of records, or one that "
                "is empty or not there yet, for their owner alone."
            )
        return cls(path)

    def is_there(self) -> bool:
        """Return whether this folder is at its path, and no later one, whose ids are others."""
        return is_recording(self.path) and (self.path / _INFO).read_bytes() == self._info

    def key_id(self, digest: bytes) -> str:
        """Return the id of an API key in this folder, by the SHA-256 of the key."""
        return blake2b(digest, key=self._secret, digest_size=16).hexdigest()

    def ids_named(self, name: str) -> set[str]:
        """Return the ids that a key may have, named by itself, by its SHA-256 or by its id.

        An id is one of a record or of a refused key: a key of the same form is not among them.
        """
        ids, digits = {self.key_id(sha256(name.encode()).digest())}, name.lower()
        if re.fullmatch("[0-9a-f]{64}", digits):  # also the form of many keys
            ids.add(self.key_id(bytes.fromhex(digits)))
        elif re.fullmatch("[0-9a-f]{32}", digits):
            found = self.summary()
            ids |= {digits} & {*found["keys"], *found["refused"]}
        return ids

    def refused(self) -> frozenset[str]:
        """Return the ids of keys of which nothing is recorded.

        Raises:
            UserError: the file of these ids holds something else.
        """
        file = self.path / _REFUSED
        try:
            return frozenset(file.read_text(encoding="ascii").split())
        except FileNotFoundError:
            return frozenset()
        except UnicodeDecodeError:
            raise UserError(
                f"{str(file)!r} is damaged; expected ids of keys, one a line. Correct the file."
            ) from None

    def delete(self, ids: Iterable[str]) -> int:
        """Delete all records of keys, and refuse further ones; return the number of records.

        On a full disk the records are overwritten in their files, which keep their size.

        Raises:
            UserError: the disk has no room for the ids of the keys, and nothing was deleted; or its
                file system needs room to overwrite, and some records are left.
        """
        ids, count = set(ids), 0
        advice = "Nothing was deleted: free 64 KiB there, then run the command again."
        with needing_room(self.path, advice), locked(self.path, wait=True):
            self.remove_partial()
            refused = "".join(f"{one}\n" for one in sorted(self.refused() | ids))
            _write_private(self.path / _REFUSED, [refused.encode()])
            for file in record_files(self.path):
                lines = file.read_bytes().splitlines(keepends=True)
                deleted = sum(_id_of(line) in ids for line in lines)
                others = [line for line in lines if _id_of(line) not in ids and not line.isspace()]
                count += deleted
                if not others:
                    file.unlink()
                elif deleted:
                    try:
                        _write_private(file, others)
                    except OSError as error:
                        if error.errno not in FULL_DISK_ERRORS:
                            raise
                        with needing_room(
                            file, "Records of the key are left: make room, try again."
                        ):
                            _overwrite(file, lines, ids)
        return count

    def remove_partial(self) -> None:
        """Remove what killed processes were writing; the caller has the lock."""
        for stale in self.path.glob(".*.partial"):
            stale.unlink()

    def summary(self) -> dict[str, Any]:
        """Count what the folder holds; nothing is decrypted.

        `cut` counts half-written lines, `days` and `keys` the records by day (UTC) and by the id of
        the key ("" without one).
        """
        days: dict[str, int] = {}
        keys: dict[str, int] = {}
        files, num_bytes, cut = record_files(self.path), 0, 0
        for line in (line for file in files for line in _lines_of(file)):
            num_bytes += len(line)
            if line.isspace():
                continue
            head = _HEAD.match(line)
            if head is None or not line.endswith(b"\n"):
                cut += 1
                continue
            for counts, name in ((days, head[2].decode()), (keys, _id_of(line) or "")):
                counts[name] = counts.get(name, 0) + 1
        found = {"records": sum(days.values()), "files": len(files), "bytes": num_bytes, "cut": cut}
        return {**found, "days": days, "keys": keys, "refused": sorted(self.refused())}


def _others_in(path: Path) -> list[str]:
    """Return the names in a folder that a new folder of records does not have."""
    return sorted({one.name for one in path.iterdir()} - {LOCK_NAME, _INFO})


def _id_of(line: bytes) -> str | None:
    """Return the id of the key of a line, which may be cut."""
    head = _HEAD.match(line)
    return head[1].decode() if head is not None and head[1] is not None else None


def _overwrite(path: Path, lines: Iterable[bytes], ids: set[str]) -> None:
    """Overwrite the lines of keys with spaces, which needs no room.

    The key's id goes last: whatever a killed process leaves of a line is still found as the key's.
    """
    at = 0
    with path.open("r+b") as file:
        for line in lines:
            if (head := _HEAD.match(line)) is not None and _id_of(line) in ids:
                size, is_whole = head.end(), line.endswith(b"\n")
                for begin, end in ((size, len(line) - is_whole), (0, size)):
                    file.seek(at + begin)
                    file.write(b" " * (end - begin))
                    file.flush()
            at += len(line)
    sync(path)


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
