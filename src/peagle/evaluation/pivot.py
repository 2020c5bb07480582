"""The pivot of results: a row for each method and K, and two figures for each prompt set.

Both figures of a row come from the same measurement: `peagle bench` has both, and `peagle eval`
runs no plain decoding to compare speeds with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peagle.results import AcceptanceResults, ThroughputResults


@dataclass(frozen=True, slots=True)
class PivotRow:
    """A method at one K under one condition.

    Attributes:
        command: the command that measured the row, "bench" or "eval".
        k: 0 for plain decoding, and for a server that does not report its K.
        temperature, concurrency: None if the file lacks them.
        draft_sampling: way to choose drafts; "" if the file lacks it.
    """

    command: str
    method: str
    source: str
    engine: str
    k: int
    temperature: float | None
    concurrency: int | None
    draft_sampling: str = ""


@dataclass(frozen=True, slots=True)
class PivotFigures:
    """The acceptance length and the speed-up over plain decoding; None where unknown."""

    acceptance_length: float | None
    speed_up_over_plain: float | None = None


@dataclass(frozen=True, slots=True)
class Pivot:
    """The figures of each row by prompt set."""

    rows: dict[PivotRow, dict[str, PivotFigures]]

    @property
    def sets(self) -> list[str]:
        """Return the prompt sets, in the order of their first figures."""
        return list(dict.fromkeys(name for figures in self.rows.values() for name in figures))

    @property
    def has_speed_ups(self) -> bool:
        """Return whether any speed-up is known."""
        every = (one for figures in self.rows.values() for one in figures.values())
        return any(one.speed_up_over_plain is not None for one in every)

    def varies(self, name: str) -> bool:
        """Return whether rows differ in a field, so that a table needs a column for it."""
        return len({getattr(row, name) for row in self.rows}) > 1


def bench_pivot(file: ThroughputResults) -> Pivot:
    """Return the figures of `peagle bench`, by concurrency, then in the order of the cells."""
    pivot = Pivot({})
    for cell in sorted(file.cells, key=lambda cell: cell.concurrency):
        arm = cell.method, cell.source, cell.engine, cell.k or 0
        row = PivotRow("bench", *arm, file.settings.get("temperature"), cell.concurrency)
        figures = PivotFigures(cell.median.acceptance_length, cell.speed_up_over_plain)
        pivot.rows.setdefault(row, {})[cell.set] = figures
    return pivot


def eval_pivot(file: AcceptanceResults) -> Pivot:
    """Return the figures of `peagle eval`, by temperature, then in the order of the entries."""
    pivot = Pivot({})
    concurrency = file.settings.get("concurrency")
    for entry in sorted(file.entries, key=lambda entry: entry.temperature):
        arm = entry.method, entry.source, entry.engine, entry.k
        row = PivotRow("eval", *arm, entry.temperature, concurrency, entry.draft_sampling)
        figures = {name: PivotFigures(piece.length) for name, piece in entry.by_set.items()}
        pivot.rows[row] = figures
    return pivot
