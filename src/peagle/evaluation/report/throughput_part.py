"""The sections about speed: tokens per second over concurrency, and by K."""

from __future__ import annotations

from collections.abc import Sequence

from peagle.evaluation.report.html import NARROW, both, figure, fold, legend, panels, section, table
from peagle.evaluation.report.series import Cast, Key, best_cells, depths_by_load, sets_of
from peagle.evaluation.report.svg import (
    ChartLine,
    ChartPoint,
    line_chart,
    log_axis,
    step_axis,
    value_axis,
)
from peagle.evaluation.report.text import (
    depth,
    h,
    method_name,
    milliseconds,
    name_html,
    number,
    percent,
    rate,
    rates,
    set_name,
    times,
)
from peagle.results import Cell, ThroughputResults

_MANY = 12


def throughput_section(file: ThroughputResults, cast: Cast) -> str:
    """Tokens per second over concurrency, each method with its best K (`best_k`)."""
    if not file.cells:
        return section("throughput", "Throughput", say="Nothing was measured.")
    first, *others = sets_of(file.cells)
    parts = [_load_group(file.cells, cast, first)]
    parts += [fold(f"On {set_name(name)}", _load_group(file.cells, cast, name)) for name in others]
    parts.append(fold("All cells, with latencies", _cells_table(file.cells, cast)))
    if file.goodput:
        parts.append(_goodput(file))
    say = (
        f"On {h(set_name(first))}, every method with its best K at that load: the smallest K whose "
        "runs overlap those of the fastest. "
        f"{_says(file.cells, cast, first)}"
    )
    return section("throughput", "Throughput over concurrency", *parts, say=say)


def _says(cells: Sequence[Cell], cast: Cast, name: str) -> str:
    if cast.hero is None:
        return ""
    ups = [c for c in best_cells(cells, cast.hero, name) if c.speed_up_over_plain is not None]
    if len(ups) < 2:
        return ""
    first, last = ups[0], ups[-1]
    return (
        f"{name_html(cast.name(cast.hero))} over plain decoding: "
        f"<strong>{times(first.speed_up_over_plain)}</strong> at {first.concurrency}, "
        f"<strong>{times(last.speed_up_over_plain)}</strong> at {last.concurrency} together."
    )


def _load_group(cells: Sequence[Cell], cast: Cast, name: str) -> str:
    own = [cell for cell in cells if cell.set == name]
    keys, hero = cast.among(own), cast.hero
    loads = sorted({cell.concurrency for cell in own})
    if len(loads) < 2:
        return _one_load(own, cast, keys, name)
    best = {key: best_cells(own, key, name) for key in keys}
    series = [(cast.styles[key], cast.name(key)) for key in keys]
    figures = [
        figure(
            "Output tokens per second",
            both(lambda width, direct: _rates(cast, best, loads, width, direct)),
            "Logarithmic" + (f"; the numbers are the K of {cast.name(hero)}" if hero else ""),
        )
    ]
    if any(c.speed_up_over_plain is not None and k[0] != "plain" for k in keys for c in best[k]):
        figures.append(
            figure(
                "Speed-up over plain decoding",
                both(lambda width, direct: _speed_ups(cast, best, loads, width, direct)),
                "At the same concurrency",
            )
        )
    rows = [_best_row(cell, cast) for key in keys for cell in best[key]]
    caption = f"Best K by method and concurrency, {set_name(name)}"
    header = ["Method", "K", "Concurrency", "Tokens/s", "Least to most", "Over plain"]
    header += ["Over EAGLE-3", "Linearity"]
    data = table(caption, header, rows)
    return panels(figures) + legend(series, narrow=True) + fold("Data", data)


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


def _rates(
    cast: Cast, best: dict[Key, list[Cell]], loads: list[int], width: float, direct: bool
) -> str:
    lines = []
    for key, cells in best.items():
        points = [
            ChartPoint(
                cell.concurrency,
                max(cell.median.output_tokens_per_s, 0.01),
                cell.spread.output_tokens_per_s,
                _tip(cell, cast),
                str(cell.k) if cell.k and key == cast.hero else "",
            )
            for cell in cells
        ]
        lines.append(ChartLine(cast.name(key), cast.styles[key], points))
    values = [p.y for line in lines for p in line.points]
    return line_chart(
        "Line chart of output tokens per second over concurrency; the table Data has the numbers.",
        lines,
        log_axis("requests in flight", loads, loads),
        log_axis("tokens/s", values),
        (width, 320 if direct else 290),
        direct=direct,
    )


def _speed_ups(
    cast: Cast, best: dict[Key, list[Cell]], loads: list[int], width: float, direct: bool
) -> str:
    lines = []
    for key, cells in best.items():
        points = [
            ChartPoint(cell.concurrency, cell.speed_up_over_plain, tip=_tip(cell, cast))
            for cell in cells
            if cell.speed_up_over_plain is not None and key[0] != "plain"
        ]
        if points:
            lines.append(ChartLine(cast.name(key), cast.styles[key], points))
    values = [1.0, *(p.y for line in lines for p in line.points)]
    return line_chart(
        "Line chart of the speed-up over plain decoding; the table Data has the numbers.",
        lines,
        log_axis("requests in flight", loads, loads),
        value_axis("times plain decoding", values, low=0),
        (width, 320 if direct else 290),
        direct=direct,
        reference=(1.0, "plain decoding", False),
    )


def _one_load(cells: Sequence[Cell], cast: Cast, keys: Sequence[Key], name: str) -> str:
    rows = [_best_row(c, cast) for key in keys for c in best_cells(cells, key, name)]
    header = ["Method", "K", "Concurrency", "Tokens/s", "Least to most", "Over plain"]
    header += ["Over EAGLE-3", "Linearity"]
    return table(f"Best K by method, {set_name(name)}", header, rows)


def _cells_table(cells: Sequence[Cell], cast: Cast) -> str:
    header = ["Method", "Set", "K", "Concurrency", "Tokens/s", "Least to most", "Requests/s"]
    header += ["Acceptance length", "TTFT p50, ms", "p99", "ITL p50, ms", "p90", "p99"]
    header += ["GPU busy", "Over plain", "Over EAGLE-3", "Objective", "Errors"]
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
    return table(caption, header, rows, texts=2)


def _goodput(file: ThroughputResults) -> str:
    objective = file.settings.get("objective")
    limits = []
    if isinstance(objective, dict):
        for key, what in (("ttft_ms", "first token"), ("itl_ms", "between tokens")):
            if isinstance(objective.get(key), int | float):
                limits.append(f"{what} within {objective[key]:g} ms")
        if isinstance(objective.get("percentile"), int | float):
            limits.append(f"for {objective['percentile']:g}% of them")
    caption = "Most requests per second at the latency objective"
    caption += f" ({', '.join(limits)})" if limits else ""
    rows = [
        [
            method_name(item.method),
            set_name(item.set),
            "–" if item.k is None else str(item.k),
            number(item.requests_per_s),
            "–" if item.concurrency is None else str(item.concurrency),
        ]
        for item in file.goodput
    ]
    return table(caption, ["Method", "Set", "K", "Requests/s", "Concurrency"], rows, texts=2)


# ---- by K -----------------------------------------------------------------------------------


def sweep_section(file: ThroughputResults, cast: Cast) -> str:
    """Tokens per second by K at each concurrency; empty where only one K was measured."""
    if len({cell.k for cell in file.cells if cell.k}) < 2:
        return ""
    first, *others = sets_of(file.cells)
    parts = [_sweep_group(file.cells, cast, first)]
    groups = {name: _sweep_group(file.cells, cast, name) for name in others}
    parts += [fold(f"On {set_name(name)}", group) for name, group in groups.items() if group]
    say = f"How many tokens to draft a step, at each load, on {h(set_name(first))}. "
    say += _falls(file.cells, cast, first)
    return section("sweep", "Choosing K", *parts, say=say)


def _falls(cells: Sequence[Cell], cast: Cast, name: str) -> str:
    if cast.hero is None:
        return ""
    said = depths_by_load(best_cells(cells, cast.hero, name))
    if not said:
        return ""
    hero = name_html(cast.name(cast.hero))
    return f"The best K of {hero} is {said} together."


def _sweep_group(cells: Sequence[Cell], cast: Cast, name: str) -> str:
    own = [cell for cell in cells if cell.set == name]
    keys = [key for key in cast.among(own) if any(c.k for c in own if _key(c) == key)]
    loads = sorted({cell.concurrency for cell in own if cell.k})
    if not loads:
        return ""
    figures = [_sweep(own, cast, keys, load) for load in loads[:_MANY]]
    rows = [
        [*(cast.name_of(c), str(c.concurrency), "–" if c.k is None else str(c.k)),
         *(rate(c.median.output_tokens_per_s), number(c.median.acceptance_length))]
        for c in sorted(own, key=lambda c: c.concurrency)
    ]  # fmt: skip
    header = ["Method", "Concurrency", "K", "Tokens/s", "Acceptance length"]
    return (
        panels(figures)
        + legend(
            ((cast.styles[key], cast.name(key)) for key in cast.among(own)),
        )
        + fold("Data", table(f"Tokens per second by K, {set_name(name)}", header, rows))
    )


def _key(cell: Cell) -> Key:
    return cell.method, cell.engine


def _sweep(cells: Sequence[Cell], cast: Cast, keys: Sequence[Key], load: int) -> str:
    here = [cell for cell in cells if cell.concurrency == load]
    lines = []
    for key in keys:
        own = sorted((c for c in here if _key(c) == key and c.k), key=lambda c: c.k or 0)
        top = max((c.median.output_tokens_per_s for c in own), default=0.0)
        points = [
            ChartPoint(
                cell.k or 0,
                cell.median.output_tokens_per_s,
                cell.spread.output_tokens_per_s,
                _tip(cell, cast),
                rate(top) if cell.median.output_tokens_per_s == top else "",
            )
            for cell in own
        ]
        lines.append(ChartLine(cast.name(key), cast.styles[key], points))
    plain = [c for c in here if c.method == "plain"]
    level = max((c.median.output_tokens_per_s for c in plain), default=None)
    ks = sorted({c.k for c in here if c.k})
    values = [p.interval[1] if p.interval else p.y for line in lines for p in line.points]
    values += [level] if level is not None else []
    chart = line_chart(
        f"Tokens per second by K at concurrency {load}; the table Data has the numbers.",
        lines,
        step_axis("K, draft tokens a step", ks),
        value_axis("tokens/s", [value * 1.06 for value in values], low=0),
        (NARROW, 250),
        reference=None if level is None else (level, "", True),
    )
    return figure("One request" if load == 1 else f"{load} requests together", chart)
