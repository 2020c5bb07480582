"""Measurements kept in a file as they are finished, so that an interrupted command can go on."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle.disk import needing_room
from peagle.errors import UserError

FORMAT_VERSION = 1
BENCH_LOG, TUNE_LOG = "cells.jsonl", "tune_cells.jsonl"  # in an output folder
_MAX_CHARACTERS = 100


class Journal:
    """Measurements by key: JSON, one a line behind a first line with the settings.

    A last line that an interruption cut is dropped.

    Args:
        path: path of the file, whose folder is made if it does not exist; None keeps everything in
            memory alone.
        settings: values that all measurements of one journal share.
        extensible: names of settings that are objects; a later run may add keys to them.

    Raises:
        UserError: the file or its folder is not usable, or its settings are others; the message
            names the first difference.
    """

    def __init__(
        self, path: Path | None, settings: Mapping[str, Any], extensible: Sequence[str] = ()
    ) -> None:
        self._path = path
        self._values: dict[str, Any] = {}
        if path is None:
            return
        # This import brings torch, before which the functions below are called.
        from peagle.models.checkpoint.files import replace_file

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            raw = path.read_bytes() if path.exists() else b""
            header, *lines = raw[: raw.rfind(b"\n") + 1].splitlines(keepends=True) or [b""]
            merged = self._read_header(path, header, settings, extensible) if header else settings
            for number, line in enumerate(lines, 2):
                record = _parse(path, number, line, "key", "value")
                self._values[_name(record["key"])] = record["value"]
            header = _line({"format_version": FORMAT_VERSION, "settings": merged})
            if (whole := b"".join([header, *lines])) != raw:
                replace_file(path, whole)
        except OSError as error:
            raise UserError(
                f"{str(path)!r} cannot be written: {error.strerror}. Give another --output."
            ) from None

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Any) -> Any:
        """Return a measurement; None if it is not made yet."""
        return self._values.get(_name(key))

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Yield every key with its measurement, in the order of measuring."""
        return ((json.loads(name), value) for name, value in self._values.items())

    def add(self, key: Any, value: Any) -> None:
        """Keep a measurement; it is on the disk when this returns.

        Raises:
            UserError: the disk is full.
        """
        self._values[_name(key)] = value
        if self._path is None:
            return
        advice = "All measurements before stay. Make room, then run the same command again."
        with needing_room(self._path, advice), self._path.open("ab") as file:
            file.write(_line({"key": key, "value": value}))
            file.flush()
            os.fsync(file.fileno())

    def _read_header(
        self, path: Path, line: bytes, settings: Mapping[str, Any], extensible: Sequence[str]
    ) -> Mapping[str, Any]:
        """Return the settings of the file with the keys that this run adds."""
        record = _parse(path, 1, line, "format_version", "settings")
        version, before = record["format_version"], record["settings"]
        if version != FORMAT_VERSION:
            raise UserError(
                f"{str(path)!r} has format_version {version!r}; this peagle reads "
                f"{FORMAT_VERSION}. Use the peagle that wrote it, or give another --output."
            )
        shared = {
            name: {key: before.get(name, {}).get(key, value) for key, value in own.items()}
            for name, own in settings.items()
            if name in extensible
        }
        require_same_settings(path, before | shared, settings)
        return before | {name: {**before.get(name, {}), **settings[name]} for name in extensible}


def read_settings(path: Path) -> Mapping[str, Any]:
    """Return the settings in the first line of a journal; {} for an empty file.

    Raises:
        UserError: the file is no journal, or is not readable.
    """
    try:
        with path.open("rb") as file:
            line = file.readline()
    except OSError as error:
        raise UserError(
            f"{str(path)!r} is not readable: {error.strerror}. Give another --output."
        ) from None
    return _parse(path, 1, line, "format_version", "settings")["settings"] if line else {}


def require_same_settings(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compare the settings of a file with the present ones, as JSON, in which a tuple is a list.

    Raises:
        UserError: they differ; it names the first difference.
    """
    now = json.loads(json.dumps(dict(now)))
    for name in dict.fromkeys([*now, *before]):
        if now.get(name) != before.get(name):
            raise UserError(
                f"{str(path)!r} was made with {name} {_excerpt(before.get(name))}, not "
                f"{_excerpt(now.get(name))}. Give the same settings to go on with it, or another "
                "--output."
            )


def weights_digest(folder: str | Path) -> str:
    """Return the SHA-256 of a model's configuration and weights; "" for no folder."""
    if not folder:
        return ""
    digest = hashlib.sha256()
    for pattern in ("config.json", "*.safetensors", "correction.st"):
        for file in sorted(Path(folder).glob(pattern)):
            with file.open("rb") as data:
                digest.update(hashlib.file_digest(data, "sha256").digest())
    return digest.hexdigest()


def make_folder(folder: Path) -> None:
    """Make an output folder, unless it exists.

    Raises:
        UserError: it cannot be made, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--output {str(folder)!r} cannot be made: {error.strerror}. Name a folder that can."
        ) from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"--output {str(folder)!r} is not writable. Name a folder that is.")


def _parse(path: Path, number: int, line: bytes, *keys: str) -> dict[str, Any]:
    """Read a line that is a JSON object with these keys; `settings` must be an object too."""
    try:
        record = json.loads(line.decode("utf-8", "replace"))
        if set(keys) <= set(record) and isinstance(record.get("settings", {}), dict):
            return record
    except (ValueError, TypeError, AttributeError):
        pass
    text = line.decode("utf-8", "replace").rstrip("\n")[:60]
    raise UserError(
        f"{str(path)!r}, line {number}: no line of measurements ({text!r}). "
        "Remove the file, or give another --output."
    )


def _name(key: Any) -> str:
    return json.dumps(key, sort_keys=True)


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


def _excerpt(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 3]}..."
