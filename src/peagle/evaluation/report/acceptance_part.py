"""The sections about acceptance: by position, by prompt set, by place, over the requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from peagle.evaluation.report.html import (
    NARROW,
    WIDE,
    both,
    figure,
    fold,
    legend,
    panels,
    section,
    table,
)
from peagle.evaluation.report.plots import Row, dot_plot, histogram
from peagle.evaluation.report.series import Cast, Condition, conditions
from peagle.evaluation.report.svg import (
    Axis,
    ChartLine,
    ChartPoint,
    line_chart,
    step_axis,
    value_axis,
)
from peagle.evaluation.report.text import (
    depth,
    h,
    interval,
    number,
    percent,
    set_name,
    temperature,
    with_interval,
)
from peagle.results import AcceptanceResults, Entry, Interval, RangeSlice, Slice

_SIZE = (NARROW, 250.0)
_MOST_ROWS = 40


def condition_name(condition: Condition) -> str:
    """Greedy or the temperature, and how drafts are drawn where that matters."""
    said = temperature(condition.temperature)
    if condition.temperature and condition.draft_sampling:
        said += f", drafts by {condition.draft_sampling}"
    return said


def _by_condition(
    file: AcceptanceResults, draw: Callable[[Condition], str]
) -> tuple[Condition | None, list[str]]:
    """The lowest temperature open, the others folded."""
    found = conditions(file.entries)
    if not found:
        return None, []
    others = [fold(condition_name(c).capitalize(), draw(c)) for c in found[1:]]
    return found[0], [draw(found[0]), *others]


def decay_section(file: AcceptanceResults, cast: Cast) -> str:
    """Acceptance length by K, and acceptance by position, unconditional and conditional."""
    main, groups = _by_condition(file, lambda condition: _decay(condition, cast))
    if main is None:
        return section("acceptance", "Acceptance", say="Nothing was drafted.")
    say = (
        "The <b>acceptance length</b> is 1 + accepted draft tokens / drafts. <b>Unconditional</b> "
        "acceptance of position i is the share of drafts whose first i tokens are all accepted; "
        "<b>conditional</b> acceptance is the share that pass at i among those that reached it. "
        f"{h(condition_name(main).capitalize())}; bands are 95% intervals."
    )
    return section("acceptance", "Acceptance by position", *groups, say=say)


def _decay(condition: Condition, cast: Cast) -> str:
    deepest = condition.deepest_of_all(cast)
    depths = ", ".join(f"{cast.name_of(e)} {depth(e.k)}" for e in deepest)
    positions = list(range(1, max(1, *(e.depth for e in deepest)) + 1))
    ks = sorted({entry.depth for entry in condition.entries})
    lengths = [_length_line(condition, key, cast) for key in cast.among(condition.entries)]
    values = [p.interval[1] if p.interval else p.y for line in lengths for p in line.points]
    first = line_chart(
        "Line chart of the acceptance length by K; the table Data has the numbers.",
        lengths,
        step_axis("K, draft tokens a step", ks),
        value_axis("tokens a step", [1.0, *values], low=1),
        _SIZE,
    )
    share = Axis("share of drafts", 0, 1, [(i / 4, f"{25 * i}%") for i in range(5)])
    figures = [figure("Acceptance length by K", first)]
    for title, values_of, ci_of in (
        ("Unconditional acceptance", _unconditional, lambda s: s.unconditional_ci or []),
        ("Conditional acceptance", lambda s: s.conditional, lambda s: s.conditional_ci or []),
    ):
        lines = [_position_line(e, cast, values_of(e.pooled), ci_of(e.pooled)) for e in deepest]
        chart = line_chart(
            f"Line chart of {title.lower()} by position; the table Data has the numbers.",
            lines,
            step_axis("position in the draft", positions),
            share,
            _SIZE,
        )
        figures.append(figure(title, chart))
    names = [(cast.style(e), cast.name_of(e)) for e in deepest]
    note = f"By position: {depths}."
    return panels(figures) + legend(names, note) + fold("Data", _decay_table(condition, cast))


def _k(entry: Entry) -> str:
    return str(entry.k) if entry.k else "–"


def _unconditional(piece: Slice) -> list[float | None]:
    return list(piece.unconditional)


def _length_line(condition: Condition, key: tuple[str, str], cast: Cast) -> ChartLine:
    own = [e for e in condition.entries if (e.method, e.engine) == key]
    own.sort(key=lambda entry: entry.depth)
    points = [
        _point(
            e.depth,
            e.pooled.length,
            e.pooled.acceptance_length_ci,
            f"{cast.name(key)}, K = {e.depth}",
        )
        for e in own
    ]
    return ChartLine(cast.name(key), cast.styles[key], [p for p in points if p])


def _position_line(
    entry: Entry,
    cast: Cast,
    values: Sequence[float | None],
    intervals: Sequence[Interval | None],
) -> ChartLine:
    points = []
    for position, value in enumerate(values, 1):
        if value is None:
            continue
        low_high = intervals[position - 1] if position <= len(intervals) else None
        tip = f"{cast.name_of(entry)}, position {position}\n{percent(value)}"
        if low_high:
            tip += f" ({percent(low_high[0])} to {percent(low_high[1])})"
        points.append(ChartPoint(position, value, low_high, tip))
    return ChartLine(cast.name_of(entry), cast.style(entry), points)


def _point(
    x: float, length: float | None, low_high: Interval | None, what: str
) -> ChartPoint | None:
    if length is None:
        return None
    return ChartPoint(
        x, length, low_high, f"{what}\n{with_interval(length, low_high)} tokens a step"
    )


def _decay_table(condition: Condition, cast: Cast) -> str:
    deepest = max(len(_unconditional(entry.pooled)) for entry in condition.entries)
    header = ["Method", "K", "Acceptance length", "Tokens/step", "Drafts", "Acceptance"]
    header += [f"{i}" for i in range(1, deepest + 1)]
    rows = []
    for entry in condition.entries:
        pooled = entry.pooled
        length = with_interval(pooled.length, pooled.acceptance_length_ci)
        head = [cast.name_of(entry), _k(entry), length, number(pooled.tokens_per_step)]
        head.append(f"{pooled.num_drafts:,}")
        for kind, values in (
            ("unconditional", _unconditional(pooled)),
            ("conditional", pooled.conditional),
        ):
            shown = [percent(value) for value in values[:deepest]]
            rows.append([*head, kind, *shown, *[""] * (deepest - len(shown))])
    caption = f"Acceptance by position, {condition_name(condition)}"
    return table(caption, header, rows, sortable=False)


# ---- by prompt set --------------------------------------------------------------------------


def sets_section(file: AcceptanceResults, cast: Cast) -> str:
    """Acceptance length by prompt set and category; empty where there is one set."""
    main, groups = _by_condition(file, lambda condition: _by_set(condition, cast))
    if main is None or not any(groups):
        return ""
    say = f"Acceptance length of each method at its largest K, {h(condition_name(main))}, with 95% "
    say += "intervals. Heads accept most on text like their training data."
    return section("sets", "Acceptance by prompt set", *groups, say=say)


def _by_set(condition: Condition, cast: Cast) -> str:
    entries = condition.deepest_of_all(cast)
    found = [_named_slices(entry) for entry in entries]
    names = list(dict.fromkeys(name for slices in found for name in slices))
    if len(names) < 3:  # all prompts, and the one set that they are
        return ""
    names.sort(key=lambda name: (name != "", name.partition("/")[0] not in _sets(entries)))
    rows, values, data = [], [1.0], []
    for name in names:
        points = []
        for entry, slices in zip(entries, found, strict=True):
            piece = slices.get(name)
            if piece is None or piece.length is None:
                continue
            what = f"{cast.name_of(entry)}, {_row_name(name)}"
            point = _point(piece.length, piece.length, piece.acceptance_length_ci, what)
            assert point is not None
            points.append((cast.style(entry), point))
            values.append(point.interval[1] if point.interval else point.x)
            data.append(_slice_row(_row_name(name), entry, piece, cast))
        rows.append(Row(_row_name(name), points, strong="/" not in name))
    x = value_axis("acceptance length, tokens a step", values, low=1)
    title = "Dot plot of the acceptance length by prompt set; the table Data has the numbers."
    shown = rows[:_MOST_ROWS]
    chart = (
        f'<div class="wide">{dot_plot(title, shown, x, 2 * WIDE)}</div>'
        f'<div class="narrow">{dot_plot(title, shown, x, NARROW)}</div>'
    )
    cut = f"The first {_MOST_ROWS} of {len(rows)}; the table has all." * (len(rows) > _MOST_ROWS)
    names_of = [(cast.style(e), f"{cast.name_of(e)}, {depth(e.k)}") for e in entries]
    body = fold("Data", table("Acceptance length by prompt set", _SLICE_HEADER, data, texts=2))
    return f'<div class="group">{chart}{legend(names_of, cut)}</div>{body}'


def _sets(entries: Sequence[Entry]) -> set[str]:
    return {name for entry in entries for name in entry.by_set}


def _row_name(name: str) -> str:
    return set_name(name) if name else "All prompts"


def _named_slices(entry: Entry) -> dict[str, Slice]:
    """The pooled slice under "", then each set followed by its categories, then the rest."""
    ordered = {"": entry.pooled}
    for name, piece in entry.by_set.items():
        ordered[name] = piece
        inside = {k: v for k, v in entry.by_category.items() if k.startswith(f"{name}/")}
        ordered.update(inside if len(inside) > 1 else {})
    firsts = tuple(f"{name}/" for name in entry.by_set)
    rest = {k: v for k, v in entry.by_category.items() if not k.startswith(firsts)}
    return {**ordered, **rest}


_SLICE_HEADER = [
    *("Where", "Method", "K", "Acceptance length", "Requests", "Drafts", "Loops"),
    "Before a loop",
]


def _slice_row(where: str, entry: Entry, piece: Slice, cast: Cast) -> list[str]:
    return [
        *(where, cast.name_of(entry), _k(entry)),
        with_interval(piece.length, piece.acceptance_length_ci),
        *(f"{piece.num_requests:,}", f"{piece.num_drafts:,}", percent(piece.loop_share)),
        number(piece.acceptance_length_before_loop),
    ]


# ---- by place -------------------------------------------------------------------------------


def places_section(file: AcceptanceResults, cast: Cast) -> str:
    """Acceptance length by context length and by output position; empty if neither is told."""
    main, groups = _by_condition(file, lambda condition: _places(condition, cast))
    if main is None or not any(groups):
        return ""
    say = "Whether acceptance holds as texts grow: by the tokens before a draft, and by how far "
    say += f"into the output it stands. {h(condition_name(main).capitalize())}, largest K."
    return section("places", "Acceptance along the text", *groups, say=say)


def _places(condition: Condition, cast: Cast) -> str:
    entries = condition.deepest_of_all(cast)
    figures, rows = [], []
    for title, axis, ranges_of in (
        ("By context length", "tokens before the draft", lambda e: e.by_context),
        ("By output position", "tokens of output before the draft", lambda e: e.by_output_position),
    ):
        edges = sorted({(r.first, r.last) for e in entries for r in ranges_of(e)})
        if len(edges) < 2:
            continue
        place = {edge: i for i, edge in enumerate(edges)}
        lines = [_range_line(e, cast, ranges_of(e), place) for e in entries]
        lines = [line for line in lines if line.points]
        draw = partial(_along, title, axis, lines, list(place))
        chart = both(draw)
        figures.append(figure(title, chart))
        rows += [
            _slice_row(f"{title[3:]} {_short(r.first)} to {_short(r.last)}", e, r.slice, cast)
            for e in entries
            for r in ranges_of(e)
        ]
    if not figures:
        return ""
    names = [(cast.style(e), f"{cast.name_of(e)}, {depth(e.k)}") for e in entries]
    data = table("Acceptance length by place", _SLICE_HEADER, rows, texts=2)
    return panels(figures) + legend(names, narrow=True) + fold("Data", data)


def _along(
    title: str,
    axis: str,
    lines: Sequence[ChartLine],
    edges: Sequence[tuple[float, float]],
    width: float,
    direct: bool,
) -> str:
    values = [p.interval[1] if p.interval else p.y for line in lines for p in line.points]
    ticks = [(i, f"{_short(low)}–{_short(high)}") for i, (low, high) in enumerate(edges)]
    return line_chart(
        f"Line chart of the acceptance length {title.lower()}; the table Data has the numbers.",
        lines,
        Axis(axis, -0.35, len(edges) - 0.65, ticks[:: -(-len(ticks) // 5)]),
        value_axis("tokens a step", [1.0, *values], low=1),
        (width, 280 if direct else 250),
        direct=direct,
    )


def _short(tokens: float) -> str:
    return f"{tokens / 1024:g}K" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:g}"


def _range_line(
    entry: Entry,
    cast: Cast,
    ranges: Sequence[RangeSlice],
    place: dict[tuple[float, float], int],
) -> ChartLine:
    points = []
    for item in sorted(ranges, key=lambda item: item.first):
        what = f"{cast.name_of(entry)}, {item.first:g} to {item.last:g} tokens"
        at = place[item.first, item.last]
        points.append(_point(at, item.slice.length, item.slice.acceptance_length_ci, what))
    return ChartLine(cast.name_of(entry), cast.style(entry), [p for p in points if p])


# ---- over the requests ----------------------------------------------------------------------


def requests_section(file: AcceptanceResults, cast: Cast) -> str:
    """Histograms of the acceptance length of each request; empty where none is told."""
    main, groups = _by_condition(file, lambda condition: _histograms(condition, cast))
    if main is None or not any(groups):
        return ""
    say = "The acceptance length of every single request. The line is the pooled figure, which "
    say += f"counts drafts and not requests. {h(condition_name(main).capitalize())}, largest K."
    return section("requests", "Acceptance over the requests", *groups, say=say)


def _histograms(condition: Condition, cast: Cast) -> str:
    entries = [e for e in condition.deepest_of_all(cast) if any(b.count for b in e.histogram)]
    if not entries:
        return ""
    end = max(b.last for e in entries for b in e.histogram if b.count)
    figures, rows = [], []
    for entry in reversed(entries):
        most = max(b.count for b in entry.histogram)
        length = entry.pooled.length or 1.0
        name = f"{cast.name_of(entry)}, {depth(entry.k)}"
        chart = histogram(
            f"Histogram of the acceptance length of requests, {name}; see the table Data.",
            [(b.first, b.last, b.count) for b in entry.histogram],
            cast.style(entry),
            value_axis("acceptance length", [end], low=1, high=max(end, 2.0)),
            value_axis("requests", [most * 1.12], low=0, least_step=1),
            (NARROW, 220),
            (length, number(length)),
        )
        figures.append(figure(name, chart))
        rows += [[cast.name_of(entry), interval((b.first, b.last)), f"{b.count:,}"]
                 for b in entry.histogram]  # fmt: skip
    header = ["Method", "Acceptance length", "Requests"]
    return panels(figures) + fold("Data", table("Requests by acceptance length", header, rows))
