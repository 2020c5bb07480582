"""Tables of results as text."""

from __future__ import annotations

from collections.abc import Sequence

from peagle.cli.terminal import printable
from peagle.evaluation.pivot import Pivot, PivotFigures

# Columns of a pivot, where rows differ in them.
_CONDITIONS = {"concurrency": "c", "temperature": "temperature", "draft_sampling": "drafts"}


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align names to the left and numbers to the right; leave out empty columns."""
    columns = [i for i in range(len(header)) if any(row[i] not in ("", "-") for row in rows)]
    every = [[row[i] for i in columns] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*every)]
    lines = (
        "  ".join(
            text.ljust(width) if number == 0 else text.rjust(width)
            for number, (text, width) in enumerate(zip(row, widths))
        )
        for row in every
    )
    return "\n".join(printable(f"  {line.rstrip()}") for line in lines)


def number(value: float | None) -> str:
    """Return a number with two digits behind the point, or - without one."""
    return "-" if value is None else f"{value:.2f}"


def pivot_table(pivot: Pivot) -> str:
    """Return the acceptance length and the speed-up of each method and K, by prompt set."""
    shown = [name for name in _CONDITIONS if pivot.varies(name)]
    header = ["method", "K", *(_CONDITIONS[name] for name in shown)]
    for name in pivot.sets:
        header += [f"{name} AL", "x plain"]
    rows = []
    for row, figures in pivot.rows.items():
        line = [row.method, str(row.k or "-"), *(str(getattr(row, name)) for name in shown)]
        for one in (figures.get(name, PivotFigures(None)) for name in pivot.sets):
            line += [number(one.acceptance_length), number(one.speed_up_over_plain)]
        rows.append(line)
    return text_table(header, rows)
