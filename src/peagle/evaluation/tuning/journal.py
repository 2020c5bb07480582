"""tune_cells.jsonl: measurements as they are finished, so that none is lost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peagle.errors import UserError

FORMAT_VERSION = 1
NAME = "tune_cells.jsonl"


class Journal:
    """Measurements by key, one a line behind a first line with the settings.

    Args:
        folder: made if it is not there; None keeps nothing beyond this process.
        settings: what has to be the same for measurements to belong together; JSON throughout.

    Raises:
        UserError: the file there is not readable or newer, or was made with other settings.
    """

    def __init__(self, folder: Path | None, settings: Mapping[str, Any]) -> None:
        self._records: dict[str, Any] = {}
        self._path = None if folder is None else folder / NAME
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lines = self._lines()
            if lines:
                self._check(lines[0], settings)
                self._records = {line["key"]: line["value"] for line in lines[1:]}
            else:
                self._write({"format_version": FORMAT_VERSION, "settings": dict(settings)}, "w")
        except OSError as error:
            raise UserError(
                f"{str(self._path)!r} cannot be used: {error.strerror}. Name another --output."
            ) from None

    def __len__(self) -> int:
        return len(self._records)

    def find(self, key: str) -> Any:
        """The measurement of that key, None if it is still to be made."""
        return self._records.get(key)

    def add(self, key: str, value: Any) -> None:
        """Keep a measurement: the file has it when this returns."""
        self._records[key] = value
        self._write({"key": key, "value": value}, "a")

    def _write(self, line: Mapping[str, Any], mode: str) -> None:
        if self._path is not None:
            with self._path.open(mode, encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _lines(self) -> list[dict[str, Any]]:
        """What the file holds; a last line that was cut off is taken away."""
        assert self._path is not None
        if not self._path.exists():
            return []
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            self._path.write_bytes(whole)
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            ok = all({"key", "value"} <= set(line) for line in lines[1:])
            ok = ok and all(isinstance(line, dict) for line in lines)
        except (ValueError, TypeError):
            ok, lines = False, []
        if not ok or (lines and "settings" not in lines[0]):
            raise UserError(
                f"{str(self._path)!r} does not hold measurements of peagle tune. Remove it, or "
                "name another --output."
            )
        return lines

    def _check(self, head: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        version, before = head.get("format_version"), head["settings"]
        if version != FORMAT_VERSION:
            raise UserError(
                f"{str(self._path)!r} has format_version {version!r}; this peagle reads "
                f"{FORMAT_VERSION}. Use the peagle that wrote it, or name another --output."
            )
        # As JSON, in which a tuple is a list.
        now = json.loads(json.dumps(dict(settings)))
        for name in dict.fromkeys([*now, *before]):
            if now.get(name) != before.get(name):
                raise UserError(
                    f"{str(self._path)!r} was made with {name} {_shown(before.get(name))}, not "
                    f"{_shown(now.get(name))}. Run it as before to go on with it, or name another "
                    "--output."
                )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
