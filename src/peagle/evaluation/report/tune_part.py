"""The section about cost: what a step takes, which K pays at which batch size, and from when."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from statistics import median
from typing import TypeVar

from peagle.evaluation.report.html import NARROW, WIDE, figure, fold, legend, panels, section, table
from peagle.evaluation.report.plots import deviations, strip
from peagle.evaluation.report.svg import (
    Axis,
    ChartLine,
    ChartPoint,
    line_chart,
    log_axis,
    value_axis,
)
from peagle.evaluation.report.text import h, joined, number, percent, rate
from peagle.evaluation.tuning.schedule import k_at
from peagle.results import Prediction, TuneResults

_SIZE = (NARROW, 250.0)
_NEED, _TARGET, _DRAFT, _FITTED, _UNFITTED = 2, 0, 1, 0, 1
_MOST_PANELS = 3
_CONFIGS = {
    "peagle": "peagle, as --speculative-config",
    "vllm": "vLLM, as --speculative-config",
    "vllm_single_k": "vLLM, one K for all loads",
}

Number = TypeVar("Number", int, float)


def tune_section(file: TuneResults) -> str:
    """Cost table, K schedule, predictions and break-even."""
    parts = [_schedule(file), _costs(file), _predictions(file), _break_even(file)]
    return section("cost", "Cost of a step and K by load", *parts, say=_says(file))


def _says(file: TuneResults) -> str:
    said = []
    if file.schedule:
        said.append(f"The schedule for this machine: {h(schedule_words(file.schedule))}.")
    check = file.check
    if check.share is not None and check.num_unfitted:
        said.append(
            f"<strong>{percent(check.share)}</strong> of the {check.num_unfitted} measurements "
            "that nothing was fitted to lie within 10% of the prediction"
            + (f"; the worst is {percent(check.worst)} off." if check.worst is not None else ".")
        )
    return " ".join(said)


def schedule_words(schedule: Sequence[tuple[int, int, int]]) -> str:
    """A K schedule in words."""
    words = [
        (f"K = {k}" if k else "no drafts")
        + (f" for {low}" if low == high else f" for {low} to {high}")
        for low, high, k in schedule
    ]
    return joined(words) + " sequences together"


def _schedule(file: TuneResults) -> str:
    if not file.schedule:
        return ""
    title = "K by the number of sequences together: " + schedule_words(file.schedule)
    wide = strip(title, file.schedule, 2 * WIDE)
    narrow = strip(title, file.schedule, NARROW)
    rows = [[str(low), str(high), str(k)] for low, high, k in file.schedule]
    chart = f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'
    data = table("K schedule", ["From", "To", "K"], rows)
    head = figure("K schedule", chart, "By sequences decoding together")
    configs = "".join(
        f'<p class="note">{h(_CONFIGS.get(name, name))}</p>'
        f'<div class="text" role="region" tabindex="0" aria-label="{h(_CONFIGS.get(name, name))}">'
        f"{h(json.dumps(config))}</div>"
        for name, config in file.speculative_config.items()
    )
    paste = fold("Configuration to paste", configs) if configs else ""
    return f'<div class="group">{head}</div>{fold("Data", data)}{paste}'


# ---- costs ----------------------------------------------------------------------------------


def _costs(file: TuneResults) -> str:
    figures, tables = [], []
    for what, title, axis, style, costs in (
        ("target", "Target pass", "tokens in the pass", _TARGET, file.costs.target_s),
        ("drafter", "Drafter pass", "rows in the pass", _DRAFT, file.costs.draft_s),
    ):
        measured = sorted((max(1, round(n)), 1000 * s) for n, s in costs)
        if not measured:
            continue
        points = [
            _cost_point(n, [ms for _, ms in same], axis.split()[0])
            for n, same in groupby(measured, key=lambda cost: cost[0])
        ]
        sizes = [point.x for point in points]
        chart = line_chart(
            f"Line chart of the milliseconds of a {what} pass; the table Data has the numbers.",
            [ChartLine(title, style, points)],
            log_axis(axis, sizes, _some(sizes, 5)),
            value_axis("milliseconds", [ms for _, ms in measured], low=0),
            _SIZE,
        )
        figures.append(figure(title, chart))
        rows = [[f"{n:,}", number(ms, 3)] for n, ms in measured]
        tables.append(table(title, [axis.capitalize(), "Milliseconds"], rows))
    if check := _check(file):
        figures.append(check)
    return panels(figures) + (fold("Data", *tables) if tables else "") if figures else ""


def _cost_point(size: int, times: list[float], unit: str) -> ChartPoint:
    """The median of the steps of one size, and the least and most of several."""
    middle = median(times)
    ends = (min(times), max(times)) if len(times) > 1 else None
    return ChartPoint(size, middle, ends, f"{size:,} {unit}\n{middle:.3f} ms")


def _some(values: Sequence[Number], most: int) -> list[Number]:
    """At most so many of the values, the first and the last among them."""
    own = sorted(set(values))
    if len(own) <= most:
        return own
    return [own[round(i * (len(own) - 1) / (most - 1))] for i in range(most)]


def _check(file: TuneResults) -> str:
    found = [(p, p.measured_tokens_per_s) for p in file.predictions if p.measured_tokens_per_s]
    found = [(p, m) for p, m in found if p.predicted_tokens_per_s > 0]
    if not found:
        return ""
    fitted, others = [], []
    for p, m in found:
        predicted = p.predicted_tokens_per_s
        tip = (
            f"batch {p.batch}, K = {p.k}\npredicted {rate(predicted)}, measured {rate(m)} tokens/s"
        )
        (fitted if p.fitted else others).append(ChartPoint(m, predicted / m - 1, tip=tip))
    most = max(0.15, *(abs(p.y) * 1.1 for p in [*fitted, *others]))
    ends = [-most, 0.0, most] if most > 0.3 else [-0.1, 0.0, 0.1]
    chart = deviations(
        "How far predictions are off; the table Predictions has the numbers.",
        [ChartLine("fitted", _FITTED, fitted), ChartLine("not fitted", _UNFITTED, others)],
        log_axis("measured tokens/s", [m for _, m in found], most_ticks=5),
        Axis(
            "prediction off by",
            -most,
            most,
            [(end, f"{100 * end:+.0f}%" if end else "0%") for end in ends],
        ),
        _SIZE,
        0.1,
    )
    names = legend([(_UNFITTED, "not fitted"), (_FITTED, "fitted")])
    return figure("Predictions against measurements", chart + names, "The band is 10% either way")


# ---- predictions ----------------------------------------------------------------------------


def _predictions(file: TuneResults) -> str:
    if not file.predictions:
        return ""
    by_place = {(p.batch, p.k): p for p in file.predictions}
    batches = sorted({p.batch for p in file.predictions})
    ks = sorted({p.k for p in file.predictions})
    rows = []
    for batch in batches:
        cells = [by_place.get((batch, k)) for k in ks]
        chosen = k_at(file.schedule, batch) if file.schedule else None
        rows.append([str(batch), *(_predicted(cell, chosen) for cell in cells)])
    header = ["Batch", *(f"K = {k}" if k else "No drafts" for k in ks)]
    caption = "Predicted tokens per second by batch size and K; a star marks that of the schedule"
    measured = [
        [
            *(str(p.batch), str(p.k), rate(p.predicted_tokens_per_s)),
            rate(p.measured_tokens_per_s),
            percent(p.predicted_tokens_per_s / p.measured_tokens_per_s - 1),
            "yes" if p.fitted else "no",
        ]
        for p in file.predictions
        if p.measured_tokens_per_s
    ]
    beside = ["Batch", "K", "Predicted", "Measured", "Off by", "Fitted"]
    return table(caption, header, rows, sortable=False) + (
        fold("Predictions", table("Predicted and measured tokens per second", beside, measured))
        if measured
        else ""
    )


def _predicted(cell: Prediction | None, chosen: int | None) -> str:
    if cell is None:
        return "–"
    star = "★ " if cell.k == chosen else ""
    return star + rate(cell.predicted_tokens_per_s)


# ---- break-even -----------------------------------------------------------------------------


def _break_even(file: TuneResults) -> str:
    if not file.break_even:
        return ""
    had = file.acceptance.acceptance_length
    ks = sorted({item.k for item in file.break_even})
    figures = [_needed(file, k, had.get(k)) for k in _some(ks, _MOST_PANELS)]
    rows = [
        [
            *(str(item.batch), str(item.k), number(item.acceptance_length)),
            number(had.get(item.k)),
            ("yes" if had[item.k] > item.acceptance_length else "no") if item.k in had else "–",
        ]
        for item in file.break_even
    ]
    header = ["Batch", "K", "Needed", "Had", "Pays"]
    names = [(_NEED, "acceptance length that is needed")]
    return (
        '<h3 class="group">Break-even</h3><p class="say">The acceptance length from which drafting '
        "so many tokens is faster than none. It pays where the needed line is below what the head "
        "has.</p>"
        + panels(figures)
        + legend(names)
        + fold("Data", table("Acceptance length to break even", header, rows))
    )


def _needed(file: TuneResults, k: int, had: float | None) -> str:
    own = sorted((i for i in file.break_even if i.k == k), key=lambda item: item.batch)
    points = [
        ChartPoint(
            i.batch,
            i.acceptance_length,
            tip=f"batch {i.batch}, K = {k:g}\nneeds {number(i.acceptance_length)}",
        )
        for i in own
    ]
    batches = [float(item.batch) for item in own]
    values = [1.0, *(p.y for p in points), *([had] if had is not None else [])]
    chart = line_chart(
        f"Line chart of the acceptance length needed with K = {k:g}; the table Data has the "
        "numbers.",
        [ChartLine("needed", _NEED, points)],
        log_axis("sequences together", batches, _some(batches, 5)),
        value_axis("tokens a step", [value * 1.1 for value in values], low=1),
        _SIZE,
        reference=None if had is None else (had, f"the head has {number(had)}", True),
    )
    return figure(f"K = {k:g}", chart)
