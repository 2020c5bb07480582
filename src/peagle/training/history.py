"""The records of a run: its reports, line by line."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peagle.training.reporting import TrainingReport


class History:
    """The reports of a run: in memory, and in metrics.jsonl of its output folder, one a line.

    Args:
        folder: the run's output.
        write: write the file; of several processes one does.

    Attributes:
        earlier: those of the run that this one goes on.
        entries: those of this process.
    """

    def __init__(self, folder: Path, *, write: bool = True) -> None:
        self._writes = write
        self._file = folder / "metrics.jsonl"
        self.earlier: list[dict[str, Any]] = []
        self.entries: list[dict[str, Any]] = []

    def begin(self, step: int) -> None:
        """Go on from a step: reports beyond it, which this run will make again, are dropped."""
        self.earlier = []
        if self._file.is_file():
            found = (_entry(line) for line in self._file.read_text(encoding="utf-8").splitlines())
            self.earlier = [entry for entry in found if entry and entry["step"] <= step]
        if not self._writes:
            return
        partial = self._file.with_name(self._file.name + ".part")
        partial.write_text("".join(json.dumps(e) + "\n" for e in self.earlier), encoding="utf-8")
        os.replace(partial, self._file)

    def add(self, report: TrainingReport) -> None:
        """Keep a report."""
        self.entries.append(asdict(report))
        if self._writes:
            with self._file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(self.entries[-1]) + "\n")

    def every(self, kind: str | None = None) -> list[dict[str, Any]]:
        """All reports of the run, of a kind, in order."""
        return [e for e in (*self.earlier, *self.entries) if kind in (None, e["kind"])]

    def last(self, kind: str | None = None) -> dict[str, Any] | None:
        """The last report, of a kind."""
        return next(iter(reversed(self.every(kind))), None)


def _entry(line: str) -> dict[str, Any] | None:
    """A line of metrics.jsonl; None where the process died while writing it."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return None
    return entry if isinstance(entry, dict) and {"kind", "step"} <= entry.keys() else None
