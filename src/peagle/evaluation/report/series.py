"""Who stands in the charts: series with their names and styles, and what each is judged by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from peagle.evaluation.best_k import Speed, best_k
from peagle.evaluation.report.files import Results
from peagle.evaluation.report.text import joined, method_name
from peagle.results import Cell, Entry

_STYLES = {"plain": 0, "peagle": 1, "eagle3": 2, "ngram": 3}
_FREE = (1, 4, 5, 6, 7, 2, 3)

Key = tuple[str, str]


class Measured(Protocol):
    """Something measured of a method on an engine."""

    @property
    def method(self) -> str: ...
    @property
    def engine(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Cast:
    """All series of a report.

    Attributes:
        styles: style of each (method, engine), in the order in which they are drawn: plain decoding
            first, the head that the report is about last.
        hero: the (method, engine) that the report is about; None where nothing is drafted.
        many_engines: names say the engine too.
    """

    styles: dict[Key, int]
    hero: Key | None
    many_engines: bool

    @classmethod
    def of(cls, results: Results) -> Cast:
        """The series of all files."""
        cells = results.throughput.cells if results.throughput else []
        entries = results.acceptance.entries if results.acceptance else []
        keys = list(dict.fromkeys((m.method, m.engine) for m in [*entries, *cells]))
        hero = _hero(keys, entries, cells)
        keys.sort(key=lambda key: (key == hero, key[0] != "plain", key[0] != "ngram"))
        styles: dict[Key, int] = {}
        for key in keys:
            wanted = _STYLES.get(key[0])
            if wanted is not None and wanted not in styles.values():
                styles[key] = wanted
        for key in keys:
            if key not in styles:
                taken = set(styles.values())
                unused = (style for style in _FREE if style not in taken)
                styles[key] = next(unused, _FREE[len(styles) % len(_FREE)])
        ordered = {key: styles[key] for key in keys}
        return cls(ordered, hero, len({engine for _, engine in keys}) > 1)

    def style(self, item: Measured) -> int:
        """The style of what was measured."""
        return self.styles[item.method, item.engine]

    def name(self, key: Key) -> str:
        """What a series is called."""
        method, engine = key
        if not self.many_engines or engine == "peagle":
            return method_name(method)
        return f"{method_name(method)} on {engine.partition('://')[2] or engine}"

    def name_of(self, item: Measured) -> str:
        """The name of what was measured."""
        return self.name((item.method, item.engine))

    def among(self, items: Iterable[Measured]) -> list[Key]:
        """The series that have one of `items`, in the order of drawing."""
        found = {(item.method, item.engine) for item in items}
        return [key for key in self.styles if key in found]


def _hero(keys: Sequence[Key], entries: Sequence[Entry], cells: Sequence[Cell]) -> Key | None:
    """P-EAGLE by name, else the method that accepts or writes most."""
    heads = [key for key in keys if key[0] not in ("plain", "ngram")]
    heads = heads or [key for key in keys if key[0] == "ngram"]
    if not heads:
        return None

    def merit(key: Key) -> tuple[bool, bool, float, float]:
        lengths = [e.pooled.length or 0 for e in entries if (e.method, e.engine) == key]
        rates = [c.median.output_tokens_per_s for c in cells if (c.method, c.engine) == key]
        most = (max(lengths, default=0.0), max(rates, default=0.0))
        return key[0] == "peagle", key[1] == "peagle", *most

    return max(heads, key=merit)


# ---- acceptance -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Condition:
    """Entries that may stand in one chart: one temperature and one way to draw drafts."""

    temperature: float
    draft_sampling: str
    entries: tuple[Entry, ...]

    def deepest(self, key: Key) -> Entry | None:
        """A series' entry with the largest K."""
        own = [e for e in self.entries if (e.method, e.engine) == key]
        return max(own, key=lambda e: e.depth, default=None)

    def deepest_of_all(self, cast: Cast) -> list[Entry]:
        """Each series' entry with the largest K, in the order of drawing."""
        found = (self.deepest(key) for key in cast.among(self.entries))
        return [entry for entry in found if entry is not None]


def conditions(entries: Iterable[Entry]) -> list[Condition]:
    """Entries that drafted something, by temperature, the lowest first."""
    groups: dict[tuple[float, str], list[Entry]] = {}
    for entry in entries:
        if entry.pooled.num_drafts:
            groups.setdefault((entry.temperature, entry.draft_sampling), []).append(entry)
    return [Condition(*key, tuple(groups[key])) for key in sorted(groups)]


# ---- throughput -----------------------------------------------------------------------------


def sets_of(cells: Iterable[Cell]) -> list[str]:
    """Prompt sets, the one with the most cells first."""
    counts: dict[str, int] = {}
    for cell in cells:
        counts[cell.set] = counts.get(cell.set, 0) + 1
    return sorted(counts, key=lambda name: -counts[name])


def best_cells(cells: Iterable[Cell], key: Key, name: str) -> list[Cell]:
    """The cell of a series with the best K on a prompt set at each concurrency, ascending."""
    loads: dict[int, dict[int, Cell]] = {}
    for cell in cells:
        if (cell.method, cell.engine, cell.set) == (*key, name):
            loads.setdefault(cell.concurrency, {})[cell.k or 0] = cell
    return [
        own[best_k({k: speed_of(c) for k, c in own.items()})] for _, own in sorted(loads.items())
    ]


def speed_of(cell: Cell) -> Speed:
    """The speeds of a cell, for the choice of K."""
    median = cell.median.output_tokens_per_s
    least, most = cell.spread.output_tokens_per_s or (median, median)
    return Speed(median, least, most)


def depth_runs(best: Iterable[Cell]) -> list[tuple[int, list[int]]]:
    """(K, the neighbouring concurrencies at which it is best), ascending."""
    drafted = [(cell.k, cell.concurrency) for cell in best if cell.k]
    return [
        (k, [load for _, load in group]) for k, group in groupby(drafted, key=lambda item: item[0])
    ]


def depths_by_load(best: Iterable[Cell]) -> str:
    """Like "7 from 1 to 16 and 3 at 64", as HTML; nothing where nothing is drafted."""
    runs = depth_runs(best)
    words = [
        f"<strong>{k}</strong> "
        + (f"at {loads[0]}" if len(loads) == 1 else f"from {loads[0]} to {loads[-1]}")
        for k, loads in runs
    ]
    return joined(words) if words else ""
