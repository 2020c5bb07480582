"""The files of an output folder: results to read, and tables to write."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import Self

from peagle.errors import UserError
from peagle.evaluation.pivot import Pivot, PivotFigures, PivotRow, bench_pivot, eval_pivot
from peagle.evaluation.sources import by_source
from peagle.evaluation.turns import bench_with_turns, eval_with_turns
from peagle.models.checkpoint.files import replace_file
from peagle.results import (
    ACCEPTANCE,
    THROUGHPUT,
    TUNE,
    AcceptanceResults,
    AnyDocument,
    Cell,
    Document,
    Entry,
    Interval,
    Slice,
    ThroughputResults,
    TuneResults,
    read_document,
)

_TEXT = "num_accepted_of_text_at_position"
_EXPERTS = ("experts_touched", "num_experts")
_TIMES, _PERCENTILES = ("ttft_s", "itl_s", "e2e_s"), ("p50", "p90", "p99", "mean")

Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Results:
    """The results of eval, bench and tune in an output folder."""

    acceptance: AcceptanceResults | None = None
    throughput: ThroughputResults | None = None
    tune: TuneResults | None = None

    @property
    def documents(self) -> dict[str, Document]:
        """Return the results by the name of their file."""
        every = {ACCEPTANCE: self.acceptance, THROUGHPUT: self.throughput, TUNE: self.tune}
        return {name: document for name, document in every.items() if document is not None}

    @property
    def entries(self) -> list[Entry]:
        """Return the entries of acceptance.json; none without the file."""
        return self.acceptance.entries if self.acceptance else []

    @property
    def cells(self) -> list[Cell]:
        """Return the cells of throughput.json; none without the file."""
        return self.throughput.cells if self.throughput else []

    def with_turns(self) -> Self:
        """Return the results with the turns that were sent in the names of prompt sets."""
        return replace(
            self,
            acceptance=eval_with_turns(self.acceptance) if self.acceptance else None,
            throughput=bench_with_turns(self.throughput) if self.throughput else None,
        )

    @property
    def bench_pivot(self) -> Pivot:
        """Return the pivot of throughput.json; an empty one without the file."""
        return bench_pivot(self.throughput) if self.throughput else Pivot({})

    @property
    def eval_pivot(self) -> Pivot:
        """Return the pivot of acceptance.json; an empty one without the file."""
        return eval_pivot(self.acceptance) if self.acceptance else Pivot({})

    @property
    def first(self) -> Document:
        """Return the first of the results, for facts that all of them share."""
        return next(iter(self.documents.values()))


def read_results(folder: Path) -> Results:
    """Read those of acceptance.json, throughput.json and tune.json that a folder holds.

    Raises:
        UserError: the folder holds none of them, or one is malformed (file and key), or a newer
            peagle wrote one.
    """
    results = Results(
        _read(folder / ACCEPTANCE, AcceptanceResults),
        _read(folder / THROUGHPUT, ThroughputResults),
        _read(folder / TUNE, TuneResults),
    )
    if not results.documents:
        raise UserError(
            f"Nothing to report on in {str(folder)!r}: it has none of {ACCEPTANCE}, {THROUGHPUT} "
            f"and {TUNE}. Write them with peagle eval, bench or tune, each with --output."
        )
    return results


def _read(path: Path, model: type[AnyDocument]) -> AnyDocument | None:
    return read_document(path, model) if path.exists() else None


def write_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    try:
        replace_file(path, data)
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be written: {error.strerror}.") from None


# ---- CSV ----


def acceptance_csv(file: AcceptanceResults) -> bytes:
    """Write a row for each slice and position in its drafts; at least one for each slice."""
    header = (
        *(
            "method",
            "source",
            "engine",
            "k",
            "temperature",
            "draft_sampling",
            "slice_kind",
            "slice",
        ),
        *("num_requests", "num_tokens", "num_drafts", "num_accepted_tokens"),
        *("acceptance_length", "acceptance_length_low", "acceptance_length_high"),
        *("tokens_per_step", "loop_share", "acceptance_length_before_loop"),
        *("position", "num_accepted_at_position"),
        *([_TEXT] if any(by_source(file.entries)) else ()),
        *("unconditional", "unconditional_low", "unconditional_high"),
        *("conditional", "conditional_low", "conditional_high"),
    )
    return _csv(header, (row for entry in file.entries for row in _entry_rows(entry)))


def throughput_csv(file: ThroughputResults) -> bytes:
    """Write a row for each cell, with the medians of its repeats."""
    header = (
        *("method", "source", "engine", "k", "set", "concurrency", "num_repeats"),
        *("output_tokens_per_s", "output_tokens_per_s_low", "output_tokens_per_s_high"),
        *("requests_per_s", *(f"{time}_{p}" for time in _TIMES for p in _PERCENTILES)),
        *("acceptance_length", "gpu_busy", "errors", "speed_up_over_plain", "speed_up_over_eagle3"),
        *("linearity", "meets_objective"),
        *(["cost_per_million_tokens"] if file.price_per_hour else ()),
        *(["instances"] if file.requests_per_second else ()),
        *(_EXPERTS if any(cell.experts for cell in file.cells) else ()),
        *(["text_tokens_per_draft"] if any(by_source(file.cells)) else ()),
    )
    return _csv(header, map(_cell_row, file.cells))


def pivot_csv(results: Results) -> bytes:
    """Write a row for each method, K and condition, with two columns for each prompt set."""
    pivot = Pivot(results.bench_pivot.rows | results.eval_pivot.rows)
    header = [field.name for field in fields(PivotRow)]
    for name in pivot.sets:
        header += _set_columns(name)
    rows = []
    for row, figures in pivot.rows.items():
        rows.append(asdict(row))
        for name, one in figures.items():
            rows[-1] |= zip(_set_columns(name), astuple(one), strict=True)
    return _csv(header, rows)


def _set_columns(name: str) -> list[str]:
    return [f"{name} {field.name}" for field in fields(PivotFigures)]


def _csv(header: Sequence[str], rows: Iterable[Row]) -> bytes:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, header, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    # JSON can hold half of a character, which UTF-8 cannot.
    return buffer.getvalue().encode("utf-8", "replace")


def _slices(entry: Entry) -> Iterator[tuple[str, str, Slice]]:
    """Yield kind, name and slice of all slices of an entry."""
    yield "pooled", "", entry.pooled
    yield from (("set", name, piece) for name, piece in entry.by_set.items())
    yield from (("category", name, piece) for name, piece in entry.by_category.items())
    yield from (("context", f"{r.first:g}-{r.last:g}", r.slice) for r in entry.by_context)
    for r in entry.by_output_position:
        yield "output_position", f"{r.first:g}-{r.last:g}", r.slice


def _ends(name: str, interval: Interval | None) -> Row:
    return dict(zip((f"{name}_low", f"{name}_high"), interval or (None, None), strict=True))


def _entry_rows(entry: Entry) -> Iterator[Row]:
    for kind, name, piece in _slices(entry):
        shared = dict(entry) | dict(piece) | {"slice_kind": kind, "slice": name}
        shared |= _ends("acceptance_length", piece.acceptance_length_ci)
        # A row has the shares of its position, not the lists of all positions.
        shared |= {"unconditional": None, "conditional": None}
        positions = zip_longest(
            piece.num_accepted_tokens_per_pos,
            piece.unconditional,
            piece.unconditional_ci or [],
            piece.conditional,
            piece.conditional_ci or [],
        )
        of_text = dict(enumerate(piece.num_accepted_text_tokens_per_pos, 1))
        rows = [
            {"position": number, "num_accepted_at_position": count, _TEXT: of_text.get(number)}
            | {"unconditional": share, "conditional": given}
            | _ends("unconditional", share_ci)
            | _ends("conditional", given_ci)
            for number, (count, share, share_ci, given, given_ci) in enumerate(positions, 1)
        ]
        yield from (shared | row for row in rows or [{}])


def _cell_row(cell: Cell) -> Row:
    row = dict(cell.median) | dict(cell) | {"num_repeats": len(cell.repeats)}
    if shares := cell.median.text_per_pos:
        row["text_tokens_per_draft"] = sum(shares)
    for time in _TIMES:
        row |= {f"{time}_{name}": value for name, value in getattr(cell.median, time)}
    if cell.experts is not None:
        row |= zip(_EXPERTS, (cell.experts.mean, cell.experts.num_experts), strict=True)
    return row | _ends("output_tokens_per_s", cell.spread.output_tokens_per_s)
