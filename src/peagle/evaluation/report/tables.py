"""Results as tidy tables: one row a slice and position, one row a cell."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from peagle.results import (
    AcceptanceResults,
    Cell,
    Entry,
    Slice,
    ThroughputResults,
)

ACCEPTANCE_HEADER = (
    *("method", "source", "engine", "k", "temperature", "draft_sampling", "slice_kind", "slice"),
    *("num_requests", "num_tokens", "num_drafts", "num_accepted_tokens"),
    *("acceptance_length", "acceptance_length_low", "acceptance_length_high", "tokens_per_step"),
    *("loop_share", "acceptance_length_before_loop", "position", "num_accepted_at_position"),
    *("unconditional", "unconditional_low", "unconditional_high"),
    *("conditional", "conditional_low", "conditional_high"),
)
_PERCENTILES = ("p50", "p90", "p99", "mean")
THROUGHPUT_HEADER = (
    *("method", "source", "engine", "k", "set", "concurrency", "num_repeats"),
    *("output_tokens_per_s", "output_tokens_per_s_low", "output_tokens_per_s_high"),
    *(
        "requests_per_s",
        *(f"{time}_s_{p}" for time in ("ttft", "itl", "e2e") for p in _PERCENTILES),
    ),
    *("acceptance_length", "gpu_busy", "errors", "speed_up_over_plain", "speed_up_over_eagle3"),
    *("linearity", "meets_objective"),
)

Row = list[object]


def slices_of(entry: Entry) -> Iterator[tuple[str, str, Slice]]:
    """All slices of an entry: their kind, their name, and the slice."""
    yield "pooled", "", entry.pooled
    yield from (("set", name, piece) for name, piece in entry.by_set.items())
    yield from (("category", name, piece) for name, piece in entry.by_category.items())
    for kind, ranges in (
        ("context", entry.by_context),
        ("output_position", entry.by_output_position),
    ):
        yield from ((kind, f"{r.first:g}-{r.last:g}", r.slice) for r in ranges)


def acceptance_rows(file: AcceptanceResults) -> Iterator[Row]:
    """One row for each slice and draft position; one without a position where nothing is told."""
    for entry in file.entries:
        for kind, name, piece in slices_of(entry):
            head = [entry.method, entry.source, entry.engine, entry.k, entry.temperature]
            head += [entry.draft_sampling, kind, name]
            head += [piece.num_requests, piece.num_tokens, piece.num_drafts]
            head += [piece.num_accepted_tokens, piece.acceptance_length]
            head += [*(piece.acceptance_length_ci or (None, None)), piece.tokens_per_step]
            head += [piece.loop_share, piece.acceptance_length_before_loop]
            positions = list(
                zip_longest(
                    piece.num_accepted_tokens_per_pos,
                    piece.unconditional,
                    piece.unconditional_ci or [],
                    piece.conditional,
                    piece.conditional_ci or [],
                )
            )
            for number, (count, share, share_ci, given, given_ci) in enumerate(positions, 1):
                low_high = [*(share_ci or (None, None))]
                yield [*head, number, count, share, *low_high, given, *(given_ci or (None, None))]
            if not positions:
                yield [*head, *[None] * (len(ACCEPTANCE_HEADER) - len(head))]


def throughput_rows(file: ThroughputResults) -> Iterator[Row]:
    """One row for each cell, the medians of its repeats."""
    yield from map(_cell_row, file.cells)


def _cell_row(cell: Cell) -> Row:
    median = cell.median
    times = [
        getattr(time, name)
        for time in (median.ttft_s, median.itl_s, median.e2e_s)
        for name in _PERCENTILES
    ]
    return [
        *(cell.method, cell.source, cell.engine, cell.k, cell.set, cell.concurrency),
        *(len(cell.repeats), median.output_tokens_per_s),
        *(cell.spread.output_tokens_per_s or (None, None)),
        *(median.requests_per_s, *times, median.acceptance_length, median.gpu_busy),
        *(median.errors, cell.speed_up_over_plain, cell.speed_up_over_eagle3),
        *(cell.linearity, cell.meets_objective),
    ]
