"""The sections about speed: tokens per second over concurrency, and by K."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peagle.evaluation.report.charts import WIDE, Axis, Chart, Line, Point
from peagle.evaluation.report.parts import Group, Section, Table
from peagle.evaluation.report.series import Cast, Key, best_cells, k_runs, key_of, sets_of
from peagle.evaluation.report.text import (
    depth,
    rate,
    rates,
    set_name,
    times,
)
from peagle.results import Cell, ThroughputResults

_MOST_CHARTS = 12


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
    groups.append(Group("All cells, with latencies", tables=[("all_cells", file.cells)]))
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
    cells = [cell for found in best.values() for cell in found]
    table = "best_cells", {"several": len(loads) > 1, "set": name, "cells": cells}
    if len(loads) < 2:
        return Group(fold, tables=[table])
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
            speeds,
            ticks,
            Axis("tokens/s", log=True),
            small=f"Logarithmic{hero}",
            wide=WIDE,
            height=300,
        )
    ]
    if ups:
        charts.append(
            Chart(
                "Speed-up over plain decoding",
                ups,
                ticks,
                Axis("times plain decoding", low=0),
                small="At the same concurrency",
                level=(1.0, "plain decoding"),
                wide=WIDE,
                height=300,
            )
        )
    return Group(fold, charts=charts, data=[table])


def _tip(cell: Cell, cast: Cast) -> str:
    head = ", ".join(filter(None, [cast.name_of(cell), depth(cell.k)]))
    lines = [head, f"{rate(cell.median.output_tokens_per_s)} tokens/s at {cell.concurrency}"]
    if cell.spread.output_tokens_per_s:
        lines.append(f"runs: {rates(cell.spread.output_tokens_per_s)}")
    if cell.speed_up_over_plain is not None and cell.k:
        lines.append(f"{times(cell.speed_up_over_plain)} plain decoding")
    return "\n".join(lines)


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
    return "goodput", {"limits": ", ".join(limits), "rows": file.goodput}


# ---- by K -----------------------------------------------------------------------------------


def _by_k(cells: Sequence[Cell], cast: Cast, name: str, fold: str) -> Group:
    own = sorted((cell for cell in cells if cell.set == name), key=lambda cell: cell.concurrency)
    loads = sorted({cell.concurrency for cell in own if cell.k})
    charts = [_sweep_chart(own, cast, load) for load in loads[:_MOST_CHARTS]]
    return Group(fold, charts=charts, data=[("by_k", {"set": name, "cells": own})])


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
        lines,
        Axis(
            "K, draft tokens a step",
            [(k, str(k)) for k in ks[:: -(-len(ks) // 12)]],
            ks[0] - 0.35,
            ks[-1] + 0.35,
        ),
        Axis("tokens/s", low=0),
        f"Tokens per second by K at concurrency {load}",
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
