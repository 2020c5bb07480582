"""Tables of results as text."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from peagle.cli.terminal import printable
from peagle.evaluation.pivot import Pivot, PivotFigures

# Columns that a pivot has if its rows differ in them.
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


def short_share(value: float | None) -> str:
    """Return a share without its leading 0, or - if it is unknown."""
    return "-" if value is None else f"{value:.2f}".removeprefix("0")


def two_digits(value: float | None) -> str:
    """Return a number with two decimals; "-" for None."""
    return "-" if value is None else f"{value:.2f}"


class OnEngine(Protocol):
    """A row of a table: a method on an engine."""

    @property
    def method(self) -> str: ...
    @property
    def engine(self) -> str: ...


def names_of(rows: Iterable[OnEngine]) -> dict[tuple[str, str], str]:
    """Return names by method and engine; a method of several engines has the engine in its name."""
    keys = dict.fromkeys((row.method, row.engine) for row in rows)
    several = {method for method, n in Counter(method for method, _ in keys).items() if n > 1}
    return {(m, engine): f"{m} on {engine}" if m in several else m for m, engine in keys}


def pivot_table(pivot: Pivot) -> str:
    """Return the acceptance length and the speed-up of each method and K, by prompt set."""
    shown = [name for name in _CONDITIONS if pivot.varies(name)]
    header = ["method", "K", *(_CONDITIONS[name] for name in shown)]
    for name in pivot.sets:
        header += [f"{name} AL", "x plain"]
    names, rows = names_of(pivot.rows), []
    for row, figures in pivot.rows.items():
        line = [
            names[row.method, row.engine],
            str(row.k or "-"),
            *(str(getattr(row, name)) for name in shown),
        ]
        for one in (figures.get(name, PivotFigures(None)) for name in pivot.sets):
            line += [two_digits(one.acceptance_length), two_digits(one.speed_up_over_plain)]
        rows.append(line)
    return text_table(header, rows)
