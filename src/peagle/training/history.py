"""The records of a run: its reports, line by line, as curves, and for TensorBoard."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peagle.training.board import Board
from peagle.training.curves import draw_curves
from peagle.training.reporting import Report


class History:
    """The reports of a run: in memory, and in files of its output folder.

    metrics.jsonl has one a line, curves.png shows them, tensorboard/ is for TensorBoard.

    Args:
        folder: the run's output.
        tensorboard: write event files.
        write: write files at all; of several processes one does.

    Raises:
        UserError: TensorBoard is not installed.

    Attributes:
        earlier: those of the run that this one goes on.
        entries: those of this process.
    """

    def __init__(self, folder: Path, *, tensorboard: bool = False, write: bool = True) -> None:
        self._writes = write
        self._file = folder / "metrics.jsonl"
        self._picture = folder / "curves.png"
        self._board = Board(folder / "tensorboard") if tensorboard and write else None
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
        if self._board is not None:
            self._board.begin(step)

    def add(self, report: Report) -> None:
        """Keep a report."""
        self.entries.append(asdict(report))
        if not self._writes:
            return
        with self._file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(self.entries[-1]) + "\n")
        if self._board is not None:
            self._board.add(report)

    def draw(self, best: dict[str, Any] | None) -> None:
        """Draw the curves anew, the best head marked, where matplotlib is installed."""
        if self._writes:
            draw_curves(self.every(), self._picture, best)

    def close(self) -> None:
        """Nothing more is written."""
        if self._board is not None:
            self._board.close()

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
