"""The charts of a report: the points and lines of each, and the rows of its table."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median
from typing import TypeVar

from peagle.evaluation.report.charts import WIDE, Axis, Chart, ChartLine, ChartPoint, Look
from peagle.evaluation.report.series import Cast, Condition, best_cells, series_of
from peagle.evaluation.report.text import (
    depth,
    figure,
    percent,
    rate,
    rates,
    schedule_words,
    set_name,
    with_interval,
)
from peagle.evaluation.sources import by_source
from peagle.results import Cell, Entry, Slice, ThroughputResults, TuneResults

MAX_TABLE_ROWS = 40
_MAX_CHARTS, _MAX_PANELS = 12, 3
_PLAIN, _HEAD, _NEED = Look(0), Look(1), Look(2)  # looks of the charts of costs

Number = TypeVar("Number", int, float)
SliceRow = tuple[str, Entry, Slice]


def _spaced(values: Sequence[Number], most: int) -> list[Number]:
    """Return at most `most` of the values, ascending, with the first and the last."""
    own = sorted(set(values))
    if len(own) <= most:
        return own
    return [own[round(i * (len(own) - 1) / (most - 1))] for i in range(most)]


def _whole(title: str, values: Sequence[int]) -> Axis:
    """Return an axis with a tick at each of some whole numbers."""
    ticks = [(value, str(value)) for value in values[:: -(-len(values) // 12)]]
    return Axis(title, ticks, values[0] - 0.35, values[-1] + 0.35)


def _sizes(title: str, values: Sequence[Number]) -> Axis:
    """Return a logarithmic axis with at most five of the values as ticks."""
    ticks = [(value, f"{value:,g}") for value in _spaced(values, 5)]
    return Axis(title, ticks, min(values) / 1.1, max(values) * 1.1, log=True)


# ---- throughput ----


def load_charts(file: ThroughputResults, cast: Cast, name: str) -> list[Chart]:
    """Chart speed over concurrency on a prompt set; no chart for a single concurrency."""
    own = [cell for cell in file.cells if cell.set == name]
    loads = sorted({cell.concurrency for cell in own})
    if len(loads) < 2:
        return []
    x = Axis("requests in flight", [(load, str(load)) for load in loads], log=True)
    speeds, ups = [], []
    for key in cast.among(own):
        best = best_cells(own, key, name)
        points = [
            ChartPoint(
                cell.concurrency,
                max(cell.speed, 0.01),
                cell.spread.output_tokens_per_s,
                _cell_tip(cell, cast),
            )
            for cell in best
        ]
        speeds.append(ChartLine(cast.name(key), cast.styles[key], points))
        points = [
            ChartPoint(cell.concurrency, cell.speed_up_over_plain, tip=_cell_tip(cell, cast))
            for cell in best
            if cell.speed_up_over_plain is not None and key[0] != "plain"
        ]
        ups += [ChartLine(cast.name(key), cast.styles[key], points)] if points else []
    small = "Logarithmic"
    if file.has_many_k:
        small = "Each at the smallest K that ties with its fastest"
    charts = [
        Chart(
            "Output tokens per second",
            speeds,
            x,
            Axis("tokens/s", log=True),
            small=small,
            wide=WIDE,
            height=300,
        ),
        Chart(
            "Speed-up over plain decoding",
            ups,
            x,
            Axis("times plain decoding", low=0),
            small="At the same concurrency",
            level=(1.0, "plain decoding"),
            wide=WIDE,
            height=300,
        ),
    ]
    return charts if ups else charts[:1]


def _cell_tip(cell: Cell, cast: Cast) -> str:
    head = ", ".join(filter(None, [cast.name_of(cell), depth(cell.k)]))
    lines = [head, f"{rate(cell.speed)} tokens/s at {cell.concurrency}"]
    if cell.spread.output_tokens_per_s:
        lines.append(f"runs: {rates(cell.spread.output_tokens_per_s)}")
    if cell.speed_up_over_plain is not None and cell.k:
        lines.append(f"{figure(cell.speed_up_over_plain)}× plain decoding")
    return "\n".join(lines)


def k_charts(file: ThroughputResults, cast: Cast, name: str) -> list[Chart]:
    """Chart speed by K on a prompt set, once for each concurrency; plain decoding is a level."""
    own = [cell for cell in file.cells if cell.set == name]
    charts = []
    for load in sorted({cell.concurrency for cell in own if cell.k})[:_MAX_CHARTS]:
        here = [cell for cell in own if cell.concurrency == load]
        ks = sorted({cell.k for cell in here if cell.k})
        lines = []
        for key in cast.among(here):
            cells = sorted((c for c in here if series_of(c) == key), key=lambda cell: cell.k or 0)
            top = max(cell.speed for cell in cells)
            points = [
                ChartPoint(
                    cell.k,
                    cell.speed,
                    cell.spread.output_tokens_per_s,
                    _cell_tip(cell, cast),
                    rate(top) if cell.speed == max(c.speed for c in cells if c.k) else "",
                )
                for cell in cells
                if cell.k
            ]
            if not points and key[0] == "plain":
                points = [
                    ChartPoint(k, top, tip=_cell_tip(cells[0], cast)) for k in (ks[0], ks[-1])
                ]
            if points:
                lines.append(ChartLine(cast.name(key), cast.styles[key], points))
        charts.append(
            Chart(
                "One request" if load == 1 else f"{load} requests together",
                lines,
                _whole("K, draft tokens a step", ks),
                Axis("tokens/s", low=0),
                f"Tokens per second by K at concurrency {load}",
            )
        )
    return charts


# ---- acceptance ----


def _named(entry: Entry, cast: Cast) -> str:
    return ", ".join(filter(None, [cast.name_of(entry), depth(entry.k)]))


def _length_point(x: float, piece: Slice, name: str) -> Iterator[ChartPoint]:
    """Yield the acceptance length of a slice as a point; nothing for a slice without drafts."""
    if piece.length is not None:
        tip = f"{name}\n{with_interval(piece)} tokens a step"
        yield ChartPoint(x, piece.length, piece.acceptance_length_ci, tip)


def position_charts(condition: Condition, cast: Cast) -> list[Chart]:
    """Chart acceptance length by K, and acceptance by position at the largest K of each series."""
    lengths = []
    for key in cast.among(condition.entries):
        own = sorted(condition.of(key), key=lambda entry: entry.depth)
        points = [
            point
            for entry in own
            for point in _length_point(
                entry.depth, entry.pooled, f"{cast.name(key)}, K = {entry.depth}"
            )
        ]
        lengths.append(ChartLine(cast.name(key), cast.styles[key], points))
    ks = sorted({entry.depth for entry in condition.entries})
    x, y = _whole("K, draft tokens a step", ks), Axis("tokens a step", low=1)
    charts = [Chart("Acceptance length by K", lengths, x, y)]
    deepest = condition.deepest_of_all(cast)
    x = _whole("position in the draft", condition.positions(cast))
    ticks = [(i / 4, f"{25 * i}%") for i in range(5)]
    y = Axis("share of drafts", ticks, 0, 1, is_share=True)
    for kind in ("unconditional", "conditional"):
        lines = []
        for entry in deepest:
            points = []
            intervals = dict(enumerate(getattr(entry.pooled, f"{kind}_ci") or [], 1))
            for position, value in enumerate(getattr(entry.pooled, kind), 1):
                if value is None:
                    continue
                ends = intervals.get(position)
                tip = f"{cast.name_of(entry)}, position {position}\n{percent(value)}"
                if ends:
                    tip += f" ({percent(ends[0])} to {percent(ends[1])})"
                points.append(ChartPoint(position, value, ends, tip))
            lines.append(ChartLine(cast.name_of(entry), cast.style(entry), points))
        charts.append(Chart(f"{kind.capitalize()} acceptance", lines, x, y))
    lines = []
    for entry, source, shares in by_source(deepest):
        if source != "head":
            name = cast.name_of(entry)
            tips = (f"{name}, position {i}\n{percent(s)}" for i, s in enumerate(shares, 1))
            points = [ChartPoint(i, s, tip=tip) for i, (s, tip) in enumerate(zip(shares, tips), 1)]
            lines.append(ChartLine(name, cast.style(entry), points))
    if lines:
        charts.append(Chart("Accepted, and drafted by the text alone", lines, x, y))
    return charts


def set_charts(condition: Condition, cast: Cast) -> tuple[list[Chart], list[SliceRow]]:
    """Chart acceptance length by prompt set and category; no chart for a single set."""
    entries = condition.deepest_of_all(cast)
    slices = [_named_slices(entry) for entry in entries]
    names = list(dict.fromkeys(name for own in slices for name in own))
    if len(names) < 3:  # "" for all prompts, and a single set
        return [], []
    sets = {name for entry in entries for name in entry.by_set}
    names.sort(key=lambda name: (name != "", name.partition("/")[0] not in sets))
    titles = {name: set_name(name) if name else "All prompts" for name in names}
    lines = []
    for i, (entry, own) in enumerate(zip(entries, slices, strict=True)):
        # Entries stand side by side: on one line their intervals would hide each other.
        aside = 0.72 * ((i + 0.5) / len(entries) - 0.5)
        points = [
            ChartPoint(point.y, row + aside, point.interval, point.tip)
            for row, name in enumerate(names[:MAX_TABLE_ROWS])
            if name in own
            for point in _length_point(row, own[name], f"{cast.name_of(entry)}, {titles[name]}")
        ]
        lines.append(ChartLine(_named(entry, cast), cast.style(entry), points))
    rows = [
        (titles[name], entry, own[name])
        for name in names
        for entry, own in zip(entries, slices, strict=True)
        if name in own
    ]
    ticks = [
        (row, title if len(title) <= 24 else title[:23] + "…")
        for row, title in enumerate(_row_titles(names[:MAX_TABLE_ROWS]))
    ]
    chart = Chart(
        "",
        lines,
        Axis("acceptance length, tokens a step", low=1),
        Axis("", ticks, -0.5, len(ticks) - 0.5),
        "Acceptance length by prompt set",
        rows=True,
        wide=1000,
        height=max(26, 6 + 7 * len(entries)) * len(ticks) + 54,
    )
    return [chart], rows


def _row_titles(names: Sequence[str]) -> Iterator[str]:
    """Yield a short name for each row; a category below its set goes without the set's name."""
    above = ""
    for name in names:
        group, _, category = name.partition("/")
        if category and group == above:
            yield f"· {category.replace('_', ' ')}"
        else:
            yield set_name(name) if name else "All prompts"
        above = group


def _named_slices(entry: Entry) -> dict[str, Slice]:
    """Return the pooled slice under "", then each set followed by its categories, then the rest."""
    ordered = {"": entry.pooled}
    for name, piece in entry.by_set.items():
        ordered[name] = piece
        inside = {k: v for k, v in entry.by_category.items() if k.startswith(f"{name}/")}
        ordered.update(inside if len(inside) > 1 else {})
    firsts = tuple(f"{name}/" for name in entry.by_set)
    rest = {k: v for k, v in entry.by_category.items() if not k.startswith(firsts)}
    return {**ordered, **rest}


def place_charts(condition: Condition, cast: Cast) -> tuple[list[Chart], list[SliceRow]]:
    """Chart acceptance length by context length and by output position."""
    entries = condition.deepest_of_all(cast)
    charts, rows = [], []
    for title, axis, name in (
        ("By context length", "tokens before the draft", "by_context"),
        ("By output position", "tokens of output before the draft", "by_output_position"),
    ):
        ranges = [sorted(getattr(entry, name), key=lambda one: one.first) for entry in entries]
        edges = sorted({(one.first, one.last) for own in ranges for one in own})
        if len(edges) < 2:
            continue
        lines = []
        for entry, own in zip(entries, ranges, strict=True):
            points = []
            for one in own:
                what = f"{cast.name_of(entry)}, {one.first:g} to {one.last:g} tokens"
                points += _length_point(edges.index((one.first, one.last)), one.slice, what)
                where = f"{title[3:]} {_tokens(one.first)} to {_tokens(one.last)}"
                rows.append((where, entry, one.slice))
            if points:
                lines.append(ChartLine(_named(entry, cast), cast.style(entry), points))
        ticks = [(i, f"{_tokens(low)}–{_tokens(high)}") for i, (low, high) in enumerate(edges)]
        x = Axis(axis, ticks[:: -(-len(ticks) // 5)], -0.35, len(edges) - 0.65)
        y = Axis("tokens a step", low=1)
        charts.append(Chart(title, lines, x, y, f"Acceptance length {title.lower()}", wide=WIDE))
    return charts, rows


def _tokens(count: float) -> str:
    return f"{count / 1024:g}K" if count >= 1024 and count % 1024 == 0 else f"{count:g}"


def request_charts(condition: Condition, cast: Cast) -> list[Chart]:
    """Return histograms of the requests' acceptance lengths, first that of the report's head."""
    entries = condition.with_histogram(cast)
    end = max((b.last for e in entries for b in e.histogram if b.count), default=2.0)
    charts = []
    for entry in entries:
        name, length = _named(entry, cast), entry.pooled.length or 1.0
        bars = [
            (b.first, b.last, b.count, f"{b.first:g} to {b.last:g}: {b.count:,} requests")
            for b in entry.histogram
            if b.count
        ]
        charts.append(
            Chart(
                name,
                [ChartLine(cast.name_of(entry), cast.style(entry), [])],
                Axis("acceptance length", low=1, high=max(end, 2.0)),
                Axis("requests", low=0, high=1.15 * max(count for *_, count, _ in bars)),
                f"Requests by acceptance length, {name}",
                bars=bars,
                pin=(length, figure(length)),
                height=220,
            )
        )
    return charts


# ---- cost ----


def schedule_chart(file: TuneResults) -> Chart:
    """Chart K over the number of sequences that decode together."""
    points = []
    for low, high, k in file.schedule:
        tip = f"{f'K = {k}' if k else 'no drafts'} for {low} to {high} sequences together"
        points += [ChartPoint(low, k, tip=tip), ChartPoint(high, k, tip=tip)]
    return Chart(
        "K schedule",
        [ChartLine("K of the schedule", _HEAD, points)],
        _sizes("sequences together", [*(low for low, *_ in file.schedule), file.schedule[-1][1]]),
        Axis("K", low=0),
        f"K schedule ({schedule_words(file.schedule)})",
        "By sequences decoding together",
        wide=1000,
        height=200,
    )


def cost_charts(file: TuneResults) -> list[Chart]:
    """Chart milliseconds of the passes over their sizes, and the errors of predictions."""
    charts = []
    for title, axis, costs in file.costs.passes:
        points = []
        for size, group in groupby(costs, key=lambda cost: cost[0]):
            times = [milliseconds for _, milliseconds in group]
            ends = (min(times), max(times)) if len(times) > 1 else None
            tip = f"{size:,} {axis.split()[0]}\n{median(times):.3f} ms"
            points.append(ChartPoint(size, median(times), ends, tip))
        style = _HEAD if axis.startswith("rows") else _PLAIN
        x = _sizes(axis, [point.x for point in points])
        charts.append(
            Chart(title, [ChartLine(title, style, points)], x, Axis("milliseconds", low=0))
        )
    errors: dict[bool, list[ChartPoint]] = {False: [], True: []}
    for one in file.predictions:
        predicted, measured = one.predicted_tokens_per_s, one.measured_tokens_per_s
        if measured and predicted:
            speeds = f"predicted {rate(predicted)}, measured {rate(measured)} tokens/s"
            tip = f"batch {one.batch}, K = {one.k}\n{speeds}"
            errors[one.fitted].append(ChartPoint(measured, predicted / measured - 1, tip=tip))
    if any(errors.values()):
        most = max(0.15, *(abs(point.y) * 1.1 for own in errors.values() for point in own))
        charts.append(
            Chart(
                "Errors of predictions",
                [
                    ChartLine("not fitted", _HEAD, errors[False]),
                    ChartLine("fitted", _PLAIN, errors[True]),
                ],
                Axis("measured tokens/s", log=True),
                Axis("prediction off by", low=-most, high=most, is_share=True),
                small="The band is 10% either way",
                connected=False,
                band=(-0.1, 0.1),
            )
        )
    return charts


def break_even_charts(file: TuneResults) -> list[Chart]:
    """Chart the acceptance length at which drafting pays, over sequences decoding together."""
    charts = []
    for k in _spaced([item.k for item in file.break_even], _MAX_PANELS):
        own = sorted((item for item in file.break_even if item.k == k), key=lambda one: one.batch)
        points = [
            ChartPoint(
                item.batch,
                item.acceptance_length,
                tip=f"batch {item.batch}, K = {k}\nneeds {figure(item.acceptance_length)}",
            )
            for item in own
        ]
        length = file.acceptance.acceptance_length.get(k)
        charts.append(
            Chart(
                f"K = {k}",
                [ChartLine("acceptance length that is needed", _NEED, points)],
                _sizes("sequences together", [item.batch for item in own]),
                Axis("tokens a step", low=1),
                f"Acceptance length that is needed with K = {k}",
                level=None if length is None else (length, f"the head has {figure(length)}"),
            )
        )
    return charts
