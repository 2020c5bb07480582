"""The sections about acceptance: by position, by prompt set, along the text, over the requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from peagle.evaluation.report.charts import Axis, Chart, Line, Point
from peagle.evaluation.report.parts import Group, Section, Table, Text
from peagle.evaluation.report.series import Cast, Condition, conditions
from peagle.evaluation.report.text import (
    LONGEST_TEXT,
    cut,
    depth,
    number,
    percent,
    set_name,
    temperature,
    with_interval,
)
from peagle.results import AcceptanceResults, Entry, HardText, Interval, OutputSample, Slice

_MOST_ROWS, _MOST_SAMPLES, _MOST_HARD = 40, 3, 8


def acceptance_sections(file: AcceptanceResults, cast: Cast) -> list[Section]:
    """The sections that have something to show, in the order of the page."""
    found = conditions(file.entries)
    if not found:
        return [Section("acceptance", "Acceptance", "By position", [Group()])]
    facts = {"condition": condition_name(found[0]).capitalize()}
    sections = []
    for name, title, link, draw in (
        ("acceptance", "Acceptance by position", "By position", _by_position),
        ("sets", "Acceptance by prompt set", "By prompt set", _by_set),
        ("places", "Acceptance along the text", "Along the text", _along_text),
        ("requests", "Acceptance over the requests", "Requests", _histograms),
    ):
        groups = [_group(draw, one, cast, is_open=one is found[0]) for one in found]
        if groups := [group for group in groups if group is not None]:
            sections.append(Section(name, title, link, groups, facts))
    return sections


def condition_name(condition: Condition) -> str:
    """Greedy or the temperature, and how drafts are drawn where that matters."""
    name = temperature(condition.temperature)
    if condition.temperature and condition.draft_sampling:
        name += f", drafts by {condition.draft_sampling}"
    return name


Draw = Callable[[Condition, Cast], tuple[list[Chart], str, Table] | None]


def _group(draw: Draw, condition: Condition, cast: Cast, *, is_open: bool) -> Group | None:
    """The charts of a condition; the lowest temperature is open, the others are folded."""
    found = draw(condition, cast)
    if found is None:
        return None
    charts, note, table = found
    fold = "" if is_open else condition_name(condition).capitalize()
    return Group(fold, charts=charts, note=note, data=[table])


def _named(entry: Entry, cast: Cast) -> str:
    return ", ".join(filter(None, [cast.name_of(entry), depth(entry.k)]))


def _point(x: float, piece: Slice, what: str) -> Iterator[Point]:
    """The acceptance length of a slice as a point; none where nothing was drafted."""
    if piece.length is not None:
        tip = f"{what}\n{with_interval(piece.length, piece.acceptance_length_ci)} tokens a step"
        yield Point(x, piece.length, piece.acceptance_length_ci, tip)


# ---- by position ----------------------------------------------------------------------------


def _by_position(condition: Condition, cast: Cast) -> tuple[list[Chart], str, Table]:
    deepest = condition.deepest_of_all(cast)
    ks = sorted({entry.depth for entry in condition.entries})
    lengths = []
    for key in cast.among(condition.entries):
        own = sorted(condition.of(key), key=lambda entry: entry.depth)
        name = cast.name(key)
        points = [p for e in own for p in _point(e.depth, e.pooled, f"{name}, K = {e.depth}")]
        lengths.append(Line(name, cast.styles[key], points))
    charts = [
        Chart(
            "Acceptance length by K",
            lengths,
            _whole("K, draft tokens a step", ks),
            Axis("tokens a step", low=1),
        )
    ]
    positions = range(1, max([1, *(entry.depth for entry in deepest)]) + 1)
    for kind in ("unconditional", "conditional"):
        lines = [
            _position_line(
                entry,
                cast,
                getattr(entry.pooled, kind),
                getattr(entry.pooled, f"{kind}_ci") or [],
            )
            for entry in deepest
        ]
        title = f"{kind.capitalize()} acceptance"
        x = _whole("position in the draft", positions)
        charts.append(Chart(title, lines, x, _shares("share of drafts")))
    note = ", ".join(f"{cast.name_of(entry)} {depth(entry.k)}" for entry in deepest)
    facts = {
        "condition": condition_name(condition),
        "positions": list(positions),
        "rows": [
            (entry, kind, getattr(entry.pooled, kind))
            for entry in condition.entries
            for kind in ("unconditional", "conditional")
        ],
    }
    return charts, f"By position: {note}.", ("positions", facts)


def _whole(title: str, values: Sequence[int]) -> Axis:
    """An axis with a tick at each of some whole numbers."""
    ticks = [(value, str(value)) for value in values[:: -(-len(values) // 12)]]
    return Axis(title, ticks, values[0] - 0.35, values[-1] + 0.35)


def _shares(title: str) -> Axis:
    return Axis(title, [(i / 4, f"{25 * i}%") for i in range(5)], 0, 1, is_share=True)


def _position_line(
    entry: Entry,
    cast: Cast,
    values: Sequence[float | None],
    intervals: Sequence[Interval | None],
) -> Line:
    points = []
    for position, value in enumerate(values, 1):
        if value is None:
            continue
        low_high = intervals[position - 1] if position <= len(intervals) else None
        tip = f"{cast.name_of(entry)}, position {position}\n{percent(value)}"
        if low_high:
            tip += f" ({percent(low_high[0])} to {percent(low_high[1])})"
        points.append(Point(position, value, low_high, tip))
    return Line(cast.name_of(entry), cast.style(entry), points)


# ---- by prompt set --------------------------------------------------------------------------


def _by_set(condition: Condition, cast: Cast) -> tuple[list[Chart], str, Table] | None:
    entries = condition.deepest_of_all(cast)
    found = [_named_slices(entry) for entry in entries]
    names = list(dict.fromkeys(name for slices in found for name in slices))
    if len(names) < 3:  # all prompts, and the one set that they are
        return None
    sets = {name for entry in entries for name in entry.by_set}
    names.sort(key=lambda name: (name != "", name.partition("/")[0] not in sets))
    places = {name: number for number, name in enumerate(names[:_MOST_ROWS])}
    lines = []
    for entry, slices in zip(entries, found, strict=True):
        points = []
        for name in places:
            piece = slices.get(name)
            what = f"{cast.name_of(entry)}, {_row_name(name)}"
            for point in _point(places[name], piece, what) if piece else ():
                points.append(Point(point.y, point.x, point.interval, point.tip))
        lines.append(Line(_named(entry, cast), cast.style(entry), points))
    data = [
        (_row_name(name), entry, slices[name])
        for name in names
        for entry, slices in zip(entries, found, strict=True)
        if name in slices
    ]
    rows = [(place, _short_name(_row_name(name))) for name, place in places.items()]
    chart = Chart(
        "",
        lines,
        Axis("acceptance length, tokens a step", low=1),
        Axis("", rows, len(rows) - 0.5, -0.5),
        "Acceptance length by prompt set",
        rows=True,
        wide=1000,
        height=26 * len(rows) + 54,
    )
    note = f"The first {_MOST_ROWS} of {len(names)}; the table has all."
    facts = {"caption": "Acceptance length by prompt set", "rows": data}
    return [chart], note * (len(names) > _MOST_ROWS), ("slices", facts)


def _row_name(name: str) -> str:
    return set_name(name) if name else "All prompts"


def _short_name(name: str, most: int = 24) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


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


# ---- along the text -------------------------------------------------------------------------


def _along_text(condition: Condition, cast: Cast) -> tuple[list[Chart], str, Table] | None:
    entries = condition.deepest_of_all(cast)
    charts, rows = [], []
    for title, axis, name in (
        ("By context length", "tokens before the draft", "by_context"),
        ("By output position", "tokens of output before the draft", "by_output_position"),
    ):
        ranges = {id(entry): getattr(entry, name) for entry in entries}
        edges = sorted({(one.first, one.last) for own in ranges.values() for one in own})
        if len(edges) < 2:
            continue
        lines = []
        for entry in entries:
            own = sorted(ranges[id(entry)], key=lambda one: one.first)
            points = []
            for one in own:
                what = f"{cast.name_of(entry)}, {one.first:g} to {one.last:g} tokens"
                points += _point(edges.index((one.first, one.last)), one.slice, what)
                where = f"{title[3:]} {_tokens(one.first)} to {_tokens(one.last)}"
                rows.append((where, entry, one.slice))
            lines.append(Line(_named(entry, cast), cast.style(entry), points))
        ticks = [(i, f"{_tokens(low)}–{_tokens(high)}") for i, (low, high) in enumerate(edges)]
        charts.append(
            Chart(
                title,
                [line for line in lines if line.points],
                Axis(axis, ticks[:: -(-len(ticks) // 5)], -0.35, len(edges) - 0.65),
                Axis("tokens a step", low=1),
                f"Acceptance length {title.lower()}",
                wide=520,
            )
        )
    if not charts:
        return None
    return charts, "", ("slices", {"caption": "Acceptance length by place", "rows": rows})


def _tokens(count: float) -> str:
    return f"{count / 1024:g}K" if count >= 1024 and count % 1024 == 0 else f"{count:g}"


# ---- over the requests ----------------------------------------------------------------------


def _histograms(condition: Condition, cast: Cast) -> tuple[list[Chart], str, Table] | None:
    entries = [e for e in condition.deepest_of_all(cast) if any(b.count for b in e.histogram)]
    if not entries:
        return None
    end = max(b.last for e in entries for b in e.histogram if b.count)
    charts, rows = [], []
    for entry in reversed(entries):
        name, length = _named(entry, cast), entry.pooled.length or 1.0
        bars = [
            (b.first, b.last, b.count, f"{b.first:g} to {b.last:g}: {b.count:,} requests")
            for b in entry.histogram
            if b.count
        ]
        charts.append(
            Chart(
                name,
                [Line(cast.name_of(entry), cast.style(entry), [])],
                Axis("acceptance length", low=1, high=max(end, 2.0)),
                Axis("requests", low=0, high=1.15 * max(count for *_, count, _ in bars)),
                f"Requests by acceptance length, {name}",
                bars=bars,
                pin=(length, number(length)),
                height=220,
            )
        )
        rows += [(entry, one) for one in entry.histogram]
    return charts, "", ("histogram", rows)


# ---- texts ----------------------------------------------------------------------------------


def text_sections(file: AcceptanceResults, cast: Cast) -> list[Section]:
    """Outputs with accepted drafts marked, and stretches where few were accepted."""
    found = conditions(file.entries)
    entries = found[0].deepest_of_all(cast)[::-1] if found else []
    sections = []
    for name, title, link, texts_of in (
        ("samples", "Sample outputs", "Samples", _samples),
        ("hardest", "Hardest texts", "Hardest texts", _hardest),
    ):
        groups = {
            f"{_named(entry, cast)}, {temperature(entry.temperature)}": texts
            for entry in entries
            if (texts := texts_of(entry, cast.name_of(entry)))
        }
        if groups:
            first = next(iter(groups))
            parts = [Group(fold * (fold != first), texts=own) for fold, own in groups.items()]
            sections.append(Section(name, title, link, parts, {"name": first}))
    return sections


def _title(item: OutputSample | HardText) -> str:
    """Prompt set and id; the id alone where it begins with the set's name."""
    name = set_name(item.set) if item.set else ""
    parts = [item.id] if name and item.id.lower().startswith(name.lower()) else [name, item.id]
    return " · ".join(filter(None, parts)) or "Output"


def _samples(entry: Entry, name: str) -> list[Text]:
    texts = []
    for sample in entry.samples[:_MOST_SAMPLES]:
        pieces, left = [("before", cut(sample.prompt_tail.lstrip("\n")))], LONGEST_TEXT
        for kind, group in groupby(sample.pieces, key=lambda piece: piece[1]):
            tokens = []
            for text, _ in group:
                if left > 0:
                    tokens.append(cut(text, left))
                left -= len(text)
            # Each accepted token is marked by itself.
            is_accepted = kind == "accepted"
            pieces += [(kind, token) for token in (tokens if is_accepted else ["".join(tokens)])]
        small = f"acceptance length {number(sample.acceptance_length)}"
        texts.append(Text(_title(sample), f"{_title(sample)}, {name}", pieces, small))
    return texts


def _hardest(entry: Entry, name: str) -> list[Text]:
    return [
        Text(
            _title(item),
            f"{_title(item)}, {name}, hard text",
            [("before", item.text_before[-600:]), ("missed", cut(item.text, 2000))],
            f"acceptance length {number(item.acceptance_length)} over {item.num_drafts:,} drafts",
        )
        for item in entry.hardest[:_MOST_HARD]
    ]
