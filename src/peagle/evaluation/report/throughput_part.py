"""The sections about speed: tokens per second over concurrency, and by K."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peagle.evaluation.report.charts import WIDE, Axis, Chart, Line, Point
from peagle.evaluation.report.parts import Group, Section, Table
from peagle.evaluation.report.series import Cast, Key, best_cells, k_runs, key_of, sets_of
from peagle.evaluation.report.text import (
    depth,
    method_name,
    milliseconds,
    number,
    percent,
    rate,
    rates,
    set_name,
    times,
)
from peagle.results import Cell, ThroughputResults

_MOST_CHARTS = 12
_BEST_HEADER = (
    *("Method", "K", "Concurrency", "Tokens/s", "Least to most", "Over plain"),
    *("Over EAGLE-3", "Linearity"),
)
_CELLS_HEADER = (
    *("Method", "Set", "K", "Concurrency", "Tokens/s", "Least to most", "Requests/s"),
    *("Acceptance length", "TTFT p50, ms", "p99", "ITL p50, ms", "p90", "p99"),
    *("GPU busy", "Over plain", "Over EAGLE-3", "Objective", "Errors"),
)


def throughput_sections(file: ThroughputResults, cast: Cast) -> list[Section]:
    """Speed over concurrency, and by K where several were measured."""
    if not file.cells:
        return [Section("throughput", "Throughput", "Throughput", [Group()])]
    names = sets_of(file.cells)
    best = best_cells(file.cells, cast.hero, names[0]) if cast.hero else []
    ups = [cell for cell in best if cell.speed_up_over_plain is not None]
    facts: dict[str, Any] = {
        "set": set_name(names[0]),
        "hero": cast.name(cast.hero) if cast.hero else "",
    }
    facts |= {"first": ups[0] if len(ups) > 1 else None, "last": ups[-1] if ups else None}
    facts["runs"] = k_runs(best)
    groups = [_by_load(file.cells, cast, name, f"On {set_name(name)}" * (name != names[0]))
              for name in names]  # fmt: skip
    groups.append(Group("All cells, with latencies", tables=[_cells_table(file.cells, cast)]))
    if file.goodput:
        groups.append(Group(tables=[_goodput(file)]))
    sections = [
        Section("throughput", "Throughput over concurrency", "Throughput", groups, facts),
    ]
    if len({cell.k for cell in file.cells if cell.k}) > 1:
        found = [_by_k(file.cells, cast, name, f"On {set_name(name)}" * (name != names[0]))
                 for name in names]  # fmt: skip
        sweep = [group for group in found if group.charts]
        sections.append(Section("sweep", "Choosing K", "Choosing K", sweep, facts))
    return sections


def _by_load(cells: Sequence[Cell], cast: Cast, name: str, fold: str) -> Group:
    own = [cell for cell in cells if cell.set == name]
    best = {key: best_cells(own, key, name) for key in cast.among(own)}
    loads = sorted({cell.concurrency for cell in own})
    rows = [_best_row(cell, cast) for found in best.values() for cell in found]
    if len(loads) < 2:
        caption = f"Best K by method, {set_name(name)}"
        return Group(fold, tables=[Table(caption, _BEST_HEADER, rows)])
    ticks = Axis("requests in flight", [(load, str(load)) for load in loads], log=True)
    speeds, ups = [], []
    for key, found in best.items():
        points = [
            Point(
                cell.concurrency,
                max(cell.median.output_tokens_per_s, 0.01),
                cell.spread.output_tokens_per_s,
                _tip(cell, cast),
                str(cell.k) if cell.k and key == cast.hero else "",
            )
            for cell in found
        ]
        speeds.append(Line(cast.name(key), cast.styles[key], points))
        points = [
            Point(cell.concurrency, cell.speed_up_over_plain, tip=_tip(cell, cast))
            for cell in found
            if cell.speed_up_over_plain is not None and key[0] != "plain"
        ]
        ups += [Line(cast.name(key), cast.styles[key], points)] if points else []
    hero = f"; the numbers are the K of {cast.name(cast.hero)}" if cast.hero else ""
    charts = [
        Chart(
            "Output tokens per second",
            "Line chart of output tokens per second over concurrency; the table Data has the "
            "numbers.",
            speeds,
            ticks,
            Axis("tokens/s", log=True),
            f"Logarithmic{hero}",
            wide=WIDE,
            height=300,
        )
    ]
    if ups:
        charts.append(
            Chart(
                "Speed-up over plain decoding",
                "Line chart of the speed-up over plain decoding; the table Data has the numbers.",
                ups,
                ticks,
                Axis("times plain decoding", low=0),
                "At the same concurrency",
                level=(1.0, "plain decoding"),
                wide=WIDE,
                height=300,
            )
        )
    caption = f"Best K by method and concurrency, {set_name(name)}"
    return Group(fold, charts=charts, data=[Table(caption, _BEST_HEADER, rows)])


def _best_row(cell: Cell, cast: Cast) -> list[str]:
    return [
        cast.name_of(cell),
        str(cell.k) if cell.k is not None else "–",
        str(cell.concurrency),
        rate(cell.median.output_tokens_per_s),
        rates(cell.spread.output_tokens_per_s),
        times(cell.speed_up_over_plain),
        times(cell.speed_up_over_eagle3),
        number(cell.linearity),
    ]


def _tip(cell: Cell, cast: Cast) -> str:
    head = ", ".join(filter(None, [cast.name_of(cell), depth(cell.k)]))
    lines = [head, f"{rate(cell.median.output_tokens_per_s)} tokens/s at {cell.concurrency}"]
    if cell.spread.output_tokens_per_s:
        lines.append(f"runs: {rates(cell.spread.output_tokens_per_s)}")
    if cell.speed_up_over_plain is not None and cell.k:
        lines.append(f"{times(cell.speed_up_over_plain)} plain decoding")
    return "\n".join(lines)


def _cells_table(cells: Sequence[Cell], cast: Cast) -> Table:
    rows = []
    for cell in cells:
        median = cell.median
        met = {True: "met", False: "missed", None: "–"}[cell.meets_objective]
        rows.append(
            [
                *(cast.name_of(cell), set_name(cell.set), "–" if cell.k is None else str(cell.k)),
                *(str(cell.concurrency), rate(median.output_tokens_per_s)),
                *(rates(cell.spread.output_tokens_per_s), number(median.requests_per_s)),
                number(median.acceptance_length),
                *map(milliseconds, (median.ttft_s.p50, median.ttft_s.p99)),
                *map(milliseconds, (median.itl_s.p50, median.itl_s.p90, median.itl_s.p99)),
                *(percent(median.gpu_busy), times(cell.speed_up_over_plain)),
                *(times(cell.speed_up_over_eagle3), met, f"{median.errors:g}"),
            ]
        )
    caption = (
        "Medians of the repeats. TTFT is the time to the first token, ITL the time between tokens."
    )
    return Table(caption, _CELLS_HEADER, rows, texts=2)


def _goodput(file: ThroughputResults) -> Table:
    objective = file.settings.get("objective")
    limits = []
    if isinstance(objective, dict):
        for key, words in (
            ("ttft_ms", "first token within {:g} ms"),
            ("itl_ms", "between tokens within {:g} ms"),
            ("percentile", "for {:g}% of them"),
        ):
            if isinstance(objective.get(key), int | float):
                limits.append(words.format(objective[key]))
    caption = "Most requests per second at the latency objective"
    caption += f" ({', '.join(limits)})" if limits else ""
    rows = [
        [
            *(method_name(item.method), set_name(item.set)),
            "–" if item.k is None else str(item.k),
            number(item.requests_per_s),
            "–" if item.concurrency is None else str(item.concurrency),
        ]
        for item in file.goodput
    ]
    return Table(caption, ["Method", "Set", "K", "Requests/s", "Concurrency"], rows, texts=2)


# ---- by K -----------------------------------------------------------------------------------


def _by_k(cells: Sequence[Cell], cast: Cast, name: str, fold: str) -> Group:
    own = sorted((cell for cell in cells if cell.set == name), key=lambda cell: cell.concurrency)
    loads = sorted({cell.concurrency for cell in own if cell.k})
    charts = [_sweep_chart(own, cast, load) for load in loads[:_MOST_CHARTS]]
    rows = [
        [
            *(cast.name_of(cell), str(cell.concurrency), "–" if cell.k is None else str(cell.k)),
            *(rate(cell.median.output_tokens_per_s), number(cell.median.acceptance_length)),
        ]
        for cell in own
    ]
    header = ["Method", "Concurrency", "K", "Tokens/s", "Acceptance length"]
    table = Table(f"Tokens per second by K, {set_name(name)}", header, rows)
    return Group(fold, charts=charts, data=[table])


def _sweep_chart(cells: Sequence[Cell], cast: Cast, load: int) -> Chart:
    here = [cell for cell in cells if cell.concurrency == load]
    ks = sorted({cell.k for cell in here if cell.k})
    lines = []
    for key in cast.among(here):
        own = sorted((c for c in here if key_of(c) == key), key=lambda cell: cell.k or 0)
        if any(cell.k for cell in own):
            lines.append(_sweep_line([cell for cell in own if cell.k], cast, key))
        elif key[0] == "plain" and ks:
            # Plain decoding has no K: a level.
            speed = max(cell.median.output_tokens_per_s for cell in own)
            ends = [Point(k, speed, tip=_tip(own[0], cast)) for k in (ks[0], ks[-1])]
            lines.append(Line(cast.name(key), cast.styles[key], ends))
    return Chart(
        "One request" if load == 1 else f"{load} requests together",
        f"Tokens per second by K at concurrency {load}; the table Data has the numbers.",
        lines,
        Axis(
            "K, draft tokens a step",
            [(k, str(k)) for k in ks[:: -(-len(ks) // 12)]],
            ks[0] - 0.35,
            ks[-1] + 0.35,
        ),
        Axis("tokens/s", low=0),
    )


def _sweep_line(cells: Sequence[Cell], cast: Cast, key: Key) -> Line:
    top = max(cell.median.output_tokens_per_s for cell in cells)
    points = [
        Point(
            cell.k or 0,
            cell.median.output_tokens_per_s,
            cell.spread.output_tokens_per_s,
            _tip(cell, cast),
            rate(top) if cell.median.output_tokens_per_s == top else "",
        )
        for cell in cells
    ]
    return Line(cast.name(key), cast.styles[key], points)
