"""cells.jsonl: every measurement of a sweep as it ends, so that an interrupted sweep goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from peagle.errors import UserError

FORMAT_VERSION = 1
NAME = "cells.jsonl"


class Keyed(Protocol):
    """Something that tells measurements apart, by its JSON object."""

    def to_json(self) -> dict[str, Any]:
        """Names and values."""
        ...


Key = TypeVar("Key", bound=Keyed)


class SweepLog(Generic[Key]):
    """The measurements made so far, each kept in a file as it ends.

    The first line has the settings, each further one a measurement. A last line that an
    interruption cut is dropped.

    Args:
        folder: of the file, made if it is not there; None keeps everything in memory alone.
        settings: what all measurements share.

    Raises:
        UserError: the folder or the file is not usable, or the file's settings are others; the
            message names the first difference.
    """

    def __init__(self, folder: Path | None, settings: Mapping[str, Any]) -> None:
        self._path = None if folder is None else folder / NAME
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        self._found: dict[str, Any] = {}
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            raw = self._path.read_bytes() if self._path.exists() else b""
            whole = raw[: raw.rfind(b"\n") + 1]
            self._read(whole.decode("utf-8", "replace").split("\n")[:-1])
            if not whole:
                whole = _line({"format_version": FORMAT_VERSION, "settings": self._settings})
            if whole != raw:
                partial = self._path.with_suffix(".partial")
                partial.write_bytes(whole)
                os.replace(partial, self._path)
        except OSError as error:
            raise UserError(
                f"{str(self._path)!r} cannot be written: {error.strerror}. Give another --output."
            ) from None

    def __len__(self) -> int:
        """Measurements there are."""
        return len(self._found)

    def get(self, key: Key, repeat: int) -> dict[str, Any] | None:
        """A measurement; None if it was not made yet."""
        return self._found.get(_name(key.to_json(), repeat))

    def add(self, key: Key, repeat: int, figures: Mapping[str, Any]) -> None:
        """Keep a measurement; it is on the disk when this returns."""
        self._found[_name(key.to_json(), repeat)] = dict(figures)
        if self._path is None:
            return
        with self._path.open("ab") as file:
            file.write(_line({"cell": key.to_json(), "repeat": repeat, "figures": dict(figures)}))
            file.flush()
            os.fsync(file.fileno())

    def _read(self, lines: list[str]) -> None:
        for number, text in enumerate(lines, 1):
            try:
                record = json.loads(text)
                if number == 1:
                    self._check(record["format_version"], record["settings"])
                else:
                    self._found[_name(record["cell"], record["repeat"])] = dict(record["figures"])
            except (ValueError, KeyError, TypeError) as error:
                if isinstance(error, UserError):
                    raise
                raise UserError(
                    f"{str(self._path)!r}, line {number}: no line of a sweep ({text[:60]!r}). "
                    "Remove the file, or give another --output."
                ) from None

    def _check(self, version: int, before: Mapping[str, Any]) -> None:
        if version != FORMAT_VERSION:
            raise UserError(
                f"{str(self._path)!r} has format_version {version}; this version of peagle reads "
                f"{FORMAT_VERSION}."
            )
        for name in dict.fromkeys([*before, *self._settings]):
            was, now = before.get(name), self._settings.get(name)
            if was != now:
                raise UserError(
                    f"{str(self._path)!r} is of a sweep whose {name} was {_shown(was)}; it is "
                    f"{_shown(now)} now. Give the same settings to go on with it, or another "
                    "--output."
                )


def _name(key: Mapping[str, Any], repeat: int) -> str:
    return json.dumps([key, repeat], sort_keys=True)


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
