"""The section about cost: what a step takes, which K pays at which batch size, and from when."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from statistics import median
from typing import TypeVar

from peagle.evaluation.report.charts import Axis, Chart, Line, Point
from peagle.evaluation.report.parts import Group, Section, Text
from peagle.evaluation.report.text import joined, number, rate
from peagle.evaluation.tuning.schedule import k_at
from peagle.results import Prediction, TuneResults

_PLAIN, _HEAD, _NEED = 0, 1, 2  # styles
_MOST_PANELS = 3
_CONFIGS = {
    "peagle": "peagle, as --speculative-config",
    "vllm": "vLLM, as --speculative-config",
    "vllm_single_k": "vLLM, one K for all loads",
}

Number = TypeVar("Number", int, float)


def tune_section(file: TuneResults) -> Section:
    """Schedule, costs, predictions and break-even."""
    facts = {"schedule": schedule_words(file.schedule), "check": file.check}
    parts = [*_schedule(file), *_costs(file), *_predictions(file), *_break_even(file)]
    return Section("cost", "Cost of a step and K by load", "Cost", parts or [Group()], facts)


def schedule_words(schedule: Sequence[tuple[int, int, int]]) -> str:
    """A K schedule in words; "" for none."""
    if not schedule:
        return ""
    words = [
        (f"K = {k}" if k else "no drafts")
        + (f" for {low}" if low == high else f" for {low} to {high}")
        for low, high, k in schedule
    ]
    return joined(words) + " sequences together"


def _sizes(title: str, values: Sequence[Number]) -> Axis:
    """A logarithmic axis with at most five of some values as ticks, the first and the last too."""
    ticks = [(value, f"{value:,g}") for value in _some(values, 5)]
    low, high = min(values), max(values)
    return Axis(title, ticks, low / 1.1, high * 1.1, log=True)


def _some(values: Sequence[Number], most: int) -> list[Number]:
    own = sorted(set(values))
    if len(own) <= most:
        return own
    return [own[round(i * (len(own) - 1) / (most - 1))] for i in range(most)]


def _schedule(file: TuneResults) -> list[Group]:
    if not file.schedule:
        return []
    points = []
    for low, high, k in file.schedule:
        tip = f"{f'K = {k}' if k else 'no drafts'} for {low} to {high} sequences together"
        points += [Point(low, k, tip=tip), Point(high, k, tip=tip)]
    chart = Chart(
        "K schedule",
        [Line("K of the schedule", _HEAD, points)],
        _sizes("sequences together", [*(low for low, *_ in file.schedule), file.schedule[-1][1]]),
        Axis("K", low=0),
        f"K schedule ({schedule_words(file.schedule)})",
        "By sequences decoding together",
        wide=1000,
        height=200,
    )
    configs = [
        Text(
            "", _CONFIGS.get(name, name), [("target", json.dumps(config))], _CONFIGS.get(name, name)
        )
        for name, config in file.speculative_config.items()
    ]
    groups = [Group(charts=[chart], data=[("schedule", file.schedule)])]
    return groups + ([Group("Configuration to paste", texts=configs)] if configs else [])


# ---- costs ----------------------------------------------------------------------------------


def _costs(file: TuneResults) -> list[Group]:
    charts, tables = [], []
    for title, axis, style, costs in (
        ("Target pass", "tokens in the pass", _PLAIN, file.costs.target_s),
        ("Drafter pass", "rows in the pass", _HEAD, file.costs.draft_s),
    ):
        measured = sorted((max(1, round(size)), 1000 * seconds) for size, seconds in costs)
        if not measured:
            continue
        points = [
            _cost_point(size, [ms for _, ms in same], axis.split()[0])
            for size, same in groupby(measured, key=lambda cost: cost[0])
        ]
        charts.append(
            Chart(
                title,
                [Line(title, style, points)],
                _sizes(axis, [point.x for point in points]),
                Axis("milliseconds", low=0),
            )
        )
        tables.append(("costs", {"title": title, "axis": axis, "rows": measured}))
    charts += _check(file.predictions)
    return [Group(charts=charts, data=tables)] if charts else []


def _cost_point(size: int, times: list[float], unit: str) -> Point:
    """The median of the steps of one size, and the least and most of several."""
    middle = median(times)
    ends = (min(times), max(times)) if len(times) > 1 else None
    return Point(size, middle, ends, f"{size:,} {unit}\n{middle:.3f} ms")


def _check(predictions: Sequence[Prediction]) -> list[Chart]:
    points: dict[bool, list[Point]] = {False: [], True: []}
    for one in predictions:
        predicted, measured = one.predicted_tokens_per_s, one.measured_tokens_per_s
        if measured and predicted:
            tip = (
                f"batch {one.batch}, K = {one.k}\npredicted {rate(predicted)}, measured "
                f"{rate(measured)} tokens/s"
            )
            points[one.fitted].append(Point(measured, predicted / measured - 1, tip=tip))
    if not any(points.values()):
        return []
    most = max(0.15, *(abs(point.y) * 1.1 for own in points.values() for point in own))
    lines = [
        Line("not fitted", _HEAD, points[False]),
        Line("fitted", _PLAIN, points[True]),
    ]
    return [
        Chart(
            "Errors of predictions",
            lines,
            Axis("measured tokens/s", log=True),
            Axis("prediction off by", low=-most, high=most, is_share=True),
            small="The band is 10% either way",
            connected=False,
            band=(-0.1, 0.1),
        )
    ]


# ---- predictions ----------------------------------------------------------------------------


def _predictions(file: TuneResults) -> list[Group]:
    if not file.predictions:
        return []
    speeds = {(p.batch, p.k): p.predicted_tokens_per_s for p in file.predictions}
    ks = sorted({k for _, k in speeds})
    rows = [
        (
            batch,
            k_at(file.schedule, batch) if file.schedule else None,
            [(k, speeds.get((batch, k))) for k in ks],
        )
        for batch in sorted({batch for batch, _ in speeds})
    ]
    header = ["Batch", *(f"K = {k}" if k else "No drafts" for k in ks)]
    groups = [Group(tables=[("speeds", {"header": header, "rows": rows})])]
    if measured := [one for one in file.predictions if one.measured_tokens_per_s]:
        groups.append(Group("Predictions", tables=[("predictions", measured)]))
    return groups


# ---- break-even -----------------------------------------------------------------------------


def _break_even(file: TuneResults) -> list[Group]:
    if not file.break_even:
        return []
    lengths = file.acceptance.acceptance_length
    charts = []
    for k in _some([item.k for item in file.break_even], _MOST_PANELS):
        own = sorted((item for item in file.break_even if item.k == k), key=lambda one: one.batch)
        points = [
            Point(
                item.batch,
                item.acceptance_length,
                tip=f"batch {item.batch}, K = {k}\nneeds {number(item.acceptance_length)}",
            )
            for item in own
        ]
        length = lengths.get(k)
        charts.append(
            Chart(
                f"K = {k}",
                [Line("acceptance length that is needed", _NEED, points)],
                _sizes("sequences together", [item.batch for item in own]),
                Axis("tokens a step", low=1),
                f"Acceptance length that is needed with K = {k}",
                level=None if length is None else (length, f"the head has {number(length)}"),
            )
        )
    table = "break_even", {"lengths": lengths, "rows": file.break_even}
    say = (
        "The acceptance length from which drafting so many tokens is faster than none. It pays "
        "where the needed line is below what the head has."
    )
    return [Group(heading="Break-even", say=say, charts=charts, data=[table])]
