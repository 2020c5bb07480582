"""Measurements kept in a file as they are finished, so that an interrupted command goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle.errors import UserError
from peagle.models.checkpoint.files import replace_file

FORMAT_VERSION = 1
_MOST_CHARACTERS = 100


class Journal:
    """Measurements by key: JSON, one a line behind a first line with the settings.

    A last line that an interruption cut is dropped.

    Args:
        path: of the file, whose folder is made if it is not there; None keeps everything in
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
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            raw = path.read_bytes() if path.exists() else b""
            whole = raw[: raw.rfind(b"\n") + 1]
            lines = whole.decode("utf-8", "replace").split("\n")[:-1]
            header = self._read(path, lines, settings, extensible)
            first = _line({"format_version": FORMAT_VERSION, "settings": header})
            whole = first + whole.partition(b"\n")[2]
            if whole != raw:
                replace_file(path, whole)
        except OSError as error:
            raise UserError(
                f"{str(path)!r} cannot be written: {error.strerror}. Give another --output."
            ) from None

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Any) -> Any:
        """Return a measurement; None if it was not made yet."""
        return self._values.get(_name(key))

    def add(self, key: Any, value: Any) -> None:
        """Keep a measurement; it is on the disk when this returns."""
        self._values[_name(key)] = value
        if self._path is None:
            return
        with self._path.open("ab") as file:
            file.write(_line({"key": key, "value": value}))
            file.flush()
            os.fsync(file.fileno())

    def _read(
        self,
        path: Path,
        lines: list[str],
        settings: Mapping[str, Any],
        extensible: Sequence[str],
    ) -> Mapping[str, Any]:
        """Read the measurements, and return the settings of the file with added keys."""
        header = settings
        for number, text in enumerate(lines, 1):
            try:
                record = json.loads(text)
                if number > 1:
                    self._values[_name(record["key"])] = record["value"]
                    continue
                version, before = record["format_version"], dict(record["settings"])
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"{str(path)!r}, line {number}: no line of measurements ({text[:60]!r}). "
                    "Remove the file, or give another --output."
                ) from None
            if version != FORMAT_VERSION:
                raise UserError(
                    f"{str(path)!r} has format_version {version!r}; this peagle reads "
                    f"{FORMAT_VERSION}. Use the peagle that wrote it, or give another --output."
                )
            header = before | {n: {**before.get(n, {}), **settings[n]} for n in extensible}
            require_same(
                path, before | {n: _shared(before, settings, n) for n in extensible}, settings
            )
        return header


def _shared(before: Mapping[str, Any], now: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object `now[name]` with the values that `before[name]` has for its keys."""
    return {key: before.get(name, {}).get(key, value) for key, value in now[name].items()}


def require_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with measurements that were made under other settings.

    Args:
        path: of the file that holds them.
        before: settings in the file.
        now: of this run; compared as JSON, in which a tuple is a list.

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


def _name(key: Any) -> str:
    return json.dumps(key, sort_keys=True)


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


def _excerpt(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."
