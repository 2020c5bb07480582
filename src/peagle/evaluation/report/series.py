"""The series of a report, with their names and styles, and the entries and cells of each."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count, groupby
from typing import Self

from peagle.evaluation.report.charts import Look
from peagle.evaluation.report.files import Results
from peagle.evaluation.report.text import engine_name, method_name, temperature
from peagle.evaluation.throughput import best_k_cell
from peagle.results import Cell, Entry

_NUMBERS = {"plain": 0, "peagle": 1, "eagle3": 2, "ngram": 3}  # as in `Style.method`
_OTHERS = (1, 4, 5, 6, 7, 2, 3)  # for other methods, if free

Key = tuple[str, str]


def series_of(item: Entry | Cell) -> Key:
    """Return the series of an entry or a cell: its method and its engine."""
    return item.method, item.engine


@dataclass(frozen=True, slots=True)
class Cast:
    """All series of a report.

    Attributes:
        styles: look of each (method, engine), in the order of drawing: plain decoding first, the
            head that the report is about last. A method has one colour and marker on all engines;
            dashes and filling tell the engine.
        hero: the (method, engine) that the report is about; None without drafts.
        many_engines: whether names include the engine.
    """

    styles: dict[Key, Look]
    hero: Key | None
    many_engines: bool

    @classmethod
    def of(cls, results: Results) -> Self:
        """Collect the series of all files."""
        keys = list(dict.fromkeys(map(series_of, [*results.entries, *results.cells])))
        hero = _hero(keys, results.entries, results.cells)
        keys.sort(key=lambda key: (key == hero, key[0] != "plain", key[0] != "ngram"))
        methods = _numbers(list(dict.fromkeys(method for method, _ in keys)))
        engines = sorted(dict.fromkeys(engine for _, engine in keys), key=lambda e: e != "peagle")
        styles = {key: Look(methods[key[0]], engines.index(key[1])) for key in keys}
        return cls(styles, hero, len(engines) > 1)

    def style(self, item: Entry | Cell) -> Look:
        """Return the look of an entry or a cell."""
        return self.styles[series_of(item)]

    def name(self, key: Key) -> str:
        """Return the name of a series."""
        method, engine = key
        if not self.many_engines or engine == "peagle":
            return method_name(method)
        return f"{method_name(method)} on {engine_name(engine)}"

    def name_of(self, item: Entry | Cell) -> str:
        """Return the name of the series of an entry or a cell."""
        return self.name(series_of(item))

    def among(self, items: Iterable[Entry | Cell]) -> list[Key]:
        """Return the series of `items`, in the order of drawing."""
        found = set(map(series_of, items))
        return [key for key in self.styles if key in found]


def _numbers(methods: Sequence[str]) -> dict[str, int]:
    """Return the number of each method's style: known methods have their own, others a free one."""
    found = {method: _NUMBERS[method] for method in methods if method in _NUMBERS}
    free = (n for n in chain(_OTHERS, count(8)) if n not in {*found.values()})
    return found | {method: next(free) for method in methods if method not in found}


def _hero(keys: Sequence[Key], entries: Sequence[Entry], cells: Sequence[Cell]) -> Key | None:
    """Choose the head that the report is about: P-EAGLE by name, else the longest or fastest."""
    heads = [key for key in keys if key[0] not in ("plain", "ngram")]
    heads = heads or [key for key in keys if key[0] == "ngram"]

    def merit(key: Key) -> tuple[bool, bool, float, float]:
        lengths = [e.pooled.length or 0 for e in entries if series_of(e) == key]
        speeds = [c.speed for c in cells if series_of(c) == key]
        most = (max(lengths, default=0.0), max(speeds, default=0.0))
        return key[0] == "peagle", key[1] == "peagle", *most

    return max(heads, key=merit, default=None)


@dataclass(frozen=True, slots=True)
class Condition:
    """Entries that may share one chart: they have one temperature and one draft sampling."""

    temperature: float
    draft_sampling: str
    entries: tuple[Entry, ...]

    def __str__(self) -> str:
        drawn = self.temperature and self.draft_sampling
        return temperature(self.temperature) + (f", drafts by {drawn}" if drawn else "")

    def of(self, key: Key) -> list[Entry]:
        """Return the entries of a series."""
        return [entry for entry in self.entries if series_of(entry) == key]

    def deepest(self, key: Key) -> Entry | None:
        """Return the entry of a series with the largest K."""
        return max(self.of(key), key=lambda entry: entry.depth, default=None)

    def deepest_of_all(self, cast: Cast) -> list[Entry]:
        """Return each series' entry with the largest K, in the order of drawing."""
        found = (self.deepest(key) for key in cast.among(self.entries))
        return [entry for entry in found if entry is not None]

    def positions(self, cast: Cast) -> range:
        """Return the positions in the longest draft."""
        entries = self.deepest_of_all(cast)
        # Copies of the text go on deeper than K.
        most = (max(entry.depth, len(entry.pooled.unconditional)) for entry in entries)
        return range(1, max([1, *most]) + 1)

    def with_histogram(self, cast: Cast) -> list[Entry]:
        """Return the deepest entries with a histogram of requests, the report's head first."""
        entries = self.deepest_of_all(cast)[::-1]
        return [entry for entry in entries if any(one.count for one in entry.histogram)]


def conditions(entries: Iterable[Entry]) -> list[Condition]:
    """Group the entries with drafts by temperature and draft sampling, the lowest first."""
    groups: dict[tuple[float, str], list[Entry]] = {}
    for entry in entries:
        if entry.pooled.num_drafts:
            groups.setdefault((entry.temperature, entry.draft_sampling), []).append(entry)
    return [Condition(*key, tuple(groups[key])) for key in sorted(groups)]


def sets_of(cells: Iterable[Cell]) -> list[str]:
    """Return the prompt sets, the one with the most cells first."""
    return [name for name, _ in Counter(cell.set for cell in cells).most_common()]


def best_cells(cells: Iterable[Cell], key: Key | None, name: str) -> list[Cell]:
    """Return the cell with the best K of a series on a set, at each concurrency, ascending."""
    loads: dict[int, list[Cell]] = {}
    for cell in cells:
        if (series_of(cell), cell.set) == (key, name):
            loads.setdefault(cell.concurrency, []).append(cell)
    return [best_k_cell(own) for _, own in sorted(loads.items())]


def best_cells_of_all(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cell with the best K of every series, by set, then by concurrency."""
    sets = list(dict.fromkeys(cell.set for cell in cells))
    keys = dict.fromkeys((cell.set, series_of(cell)) for cell in cells)
    found = [cell for name, key in keys for cell in best_cells(cells, key, name)]
    return sorted(found, key=lambda cell: (sets.index(cell.set), cell.concurrency))


def k_runs(best: Iterable[Cell]) -> list[tuple[int, list[int]]]:
    """Return (K, the neighbouring concurrencies at which K is best), ascending."""
    drafted = [(cell.k, cell.concurrency) for cell in best if cell.k]
    return [
        (k, [load for _, load in group]) for k, group in groupby(drafted, key=lambda item: item[0])
    ]
