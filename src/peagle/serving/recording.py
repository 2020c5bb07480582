"""Recording of traffic: which requests are recorded, and the thread that writes the records.

The event loop hands finished answers over in a queue. Answers that find it full are dropped.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.data.recorded import (
    RecordFolder,
    began_s,
    line_of,
    new_record_file,
    read_cipher,
    record_files,
)
from peagle.disk import locked
from peagle.errors import UserError
from peagle.serving.metrics import RecordCounts

if TYPE_CHECKING:
    from peagle.engine.outputs import RequestOutput
    from peagle.serving.config import ServerConfig
    from peagle.serving.keys import ApiKeys

logger = logging.getLogger("peagle.serving")

# Tokens of answers that wait to be written: at most 32 MB of them.
_MOST_WAITING_TOKENS = 4_000_000
_FILE_BYTES = 8 << 20
_DAY_S = 86_400.0
_LOOK_S, _PRUNE_S = 1.0, 60.0  # between two looks at refused keys, and at old files
_GATHER_S = 0.1  # more records come before the first is written: each batch takes a lock
_Waiting = tuple[str | None, float, dict[str, Any]]  # id of the key, time, other fields


class Recorder:
    """Records a share of the answers of a server.

    Args:
        folder: where records go.
        key_ids: id of each API key, by its salt (`ApiKeys`).
        salts: salts of the keys that are recorded; None records all requests.
        share, max_bytes, days, cipher: the options --record-...
        clock: the time in seconds since 1970.
    """

    def __init__(
        self,
        folder: RecordFolder,
        *,
        key_ids: Mapping[bytes, str],
        salts: frozenset[bytes] | None,
        share: float,
        max_bytes: float,
        days: float,
        cipher: Any = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.counts = RecordCounts()
        self._folder, self._key_ids, self._salts = folder, key_ids, salts
        self._share = share * 2**64
        self._max_bytes, self._max_age_s = max_bytes, days * _DAY_S
        # A file is deleted as a whole, so it holds a small part of what is kept.
        self._file_bytes = min(_FILE_BYTES, max_bytes / 8)
        self._file_age_s = min(_DAY_S, self._max_age_s / 24)
        self._cipher, self._clock = cipher, clock
        self._facts: dict[str, Any] = {}
        self._refused = folder.refused()
        self._file: Path | None = None
        self._began_s = 0.0  # time of the file's first record
        self._pruned_s = -float("inf")
        self._waiting: deque[_Waiting] = deque()
        self._num_waiting_tokens = 0
        self._changed = threading.Condition()
        self._is_open = self._is_closing = self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="peagle-records", daemon=True)

    @classmethod
    def of(cls, config: ServerConfig, keys: ApiKeys) -> Recorder | None:
        """Return the recorder that the options ask for; None if they ask for none.

        Raises:
            UserError: the options, the folder or the key file are not usable.
        """
        if config.record is None:
            for one in fields(config):
                if one.name.startswith("record_") and getattr(config, one.name) != one.default:
                    flag = f"--{one.name.replace('_', '-')}"
                    raise UserError(
                        f"{flag} has no effect without --record; add --record DIR, or leave {flag} "
                        "out."
                    )
            return None
        names = {digest.hex() for digest in keys.digests}
        if bool(config.record_for) == config.record_all or not (names or config.record_all):
            reason = "" if names else "; the server has no keys, so --record-all is required"
            raise UserError(
                "--record needs one of --record-for SHA256 (for each API key that is recorded) and "
                "--record-all (for every request that does not say no)"
                + ("; both were given." if config.record_all else f"{reason}.")
            )
        if not {name.lower() for name in config.record_for} <= names:
            raise UserError(  # without the value, which may be a key
                "A value of --record-for is none of the server's keys; expected the SHA-256 of a "
                "key, as `printf %s KEY | sha256sum` prints it."
            )
        folder, salts = RecordFolder.create(Path(config.record)), keys.salts
        chosen = (salts[bytes.fromhex(name)] for name in config.record_for)
        return cls(
            folder,
            key_ids={salt: folder.key_id(digest) for digest, salt in salts.items()},
            salts=None if config.record_all else frozenset(chosen),
            share=config.record_share,
            max_bytes=config.record_max_gib * 2**30,
            days=config.record_days,
            cipher=read_cipher(config.record_key_file) if config.record_key_file else None,
        )

    def begin(self, model: str, target: dict[str, Any]) -> None:
        """Begin to record the answers of a model; `target` are the hashes of `identity_of`."""
        self._facts = {"model": model, **target}
        self._is_open = True
        self._thread.start()

    def wants(self, request_id: str, salt: bytes, store: bool | None) -> bool:
        """Return whether to record a request; `salt` is that of its key, b"" without keys."""
        if store is False or not self._is_open:
            return False
        if self._salts is not None and salt not in self._salts:
            return False
        if self._key_ids.get(salt) in self._refused:
            return False
        digest = hashlib.sha256(request_id.encode()).digest()
        return int.from_bytes(digest[:8]) < self._share

    def add(
        self, request_id: str, salt: bytes, temperature: float, outputs: Iterable[RequestOutput]
    ) -> None:
        """Record the outputs of a request, in time; this never waits."""
        now = self._clock()
        for output in outputs:
            fields = {
                "request_id": request_id,
                **self._facts,
                "temperature": temperature,
                "finish_reason": output.finish_reason,
                "prompt_token_ids": output.prompt_token_ids,
                "response_token_ids": output.token_ids,
            }
            size = len(output.prompt_token_ids) + len(output.token_ids)
            with self._changed:
                if not self._is_open or self._num_waiting_tokens + size > _MOST_WAITING_TOKENS:
                    self.counts.dropped += 1
                    continue
                self._num_waiting_tokens += size
                self._waiting.append((self._key_ids.get(salt), now, fields))
                if len(self._waiting) == 1:
                    self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Write what waits, for some seconds, and record nothing more."""
        with self._changed:
            self._is_open, self._is_closing = False, True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # ---- the thread ----

    def _run(self) -> None:
        is_last = False
        while not is_last:
            with self._changed:
                if self._changed.wait_for(lambda: self._waiting or self._is_closing, _LOOK_S):
                    self._changed.wait_for(lambda: self._is_closing, _GATHER_S)
                batch, self._waiting = self._waiting, deque()
                self._num_waiting_tokens = 0
                is_last = self._is_closing
            try:
                self._write(batch)
            except Exception as error:  # serving goes on, and old files are still deleted
                with self._changed:
                    self._is_open = False
                    self.counts.dropped += len(batch) + len(self._waiting)
                    self._waiting.clear()
                if not self._has_failed:
                    self._has_failed = True
                    text = type(error).__name__  # the text of other errors might quote a record
                    if isinstance(error, OSError | UserError):
                        text = getattr(error, "strerror", None) or str(error)
                    text += "; restart the server to record again"
                    logger.error("recording into %s has stopped: %s", self._folder.path, text)

    def _write(self, batch: deque[_Waiting]) -> None:
        """Write records, each of which then leaves the batch."""
        now = self._clock()
        if not self._folder.is_there():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        is_time = now - self._pruned_s >= _PRUNE_S
        if not batch and not is_time:
            self._refused = self._folder.refused()
            return
        with locked(self._folder.path, wait=True):
            # Under the lock: what is deleted must not come back.
            self._refused = self._folder.refused()
            if is_time:
                self._prune(now)
            while batch:
                key_id, time_s, fields = batch[0]
                if key_id not in self._refused:
                    self._append(line_of(key_id, time_s, fields, self._cipher), now)
                    self.counts.written += 1
                batch.popleft()

    def _append(self, line: bytes, now: float) -> None:
        file = self._file
        size = file.stat().st_size if file is not None and file.exists() else 0
        is_full = size > 0 and size + len(line) > self._file_bytes
        # A clock that was set back makes a new file: the old one would stay for too long.
        if file is None or is_full or not -_PRUNE_S <= now - self._began_s <= self._file_age_s:
            file, size = new_record_file(self._folder.path, now), 0
            self._file, self._began_s = file, now
            self._prune(now)
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            rest = line
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            os.ftruncate(descriptor, size)
            raise
        finally:
            os.close(descriptor)

    def _prune(self, now: float) -> None:
        """Delete files with records that are too old, then the oldest until a new one has room."""
        self._pruned_s = now
        self._folder.remove_partial()
        files = record_files(self._folder.path)
        sizes = {file: file.stat().st_size for file in files if file != self._file}
        total = sum(sizes.values()) + self._file_bytes
        for file in files:
            is_too_much = file in sizes and total > self._max_bytes
            if is_too_much or now - began_s(file) > self._max_age_s:
                file.unlink()
                total -= sizes.get(file, 0)
