"""Further charts as SVG: bars, dots beside names, deviations, a strip of ranges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from peagle.evaluation.report.svg import Axis, ChartLine, ChartPoint, Frame, marker, spread, svg
from peagle.evaluation.report.text import h


@dataclass(frozen=True, slots=True)
class Row:
    """A name and a point for each series that has one: (style, point), the value in `point.x`."""

    name: str
    points: Sequence[tuple[int, ChartPoint]]
    strong: bool = False


def histogram(
    title: str,
    bins: Sequence[tuple[float, float, int]],
    style: int,
    x: Axis,
    y: Axis,
    size: tuple[float, float],
    mark: tuple[float, str] | None = None,
) -> str:
    """Bars from `low` to `high` of each (low, high, count), and a marked value with its name."""
    frame = Frame(*size, x=x, y=y)
    body = [frame.axes()]
    floor = frame.height - frame.bottom
    for low, high, count in bins:
        left, top = frame.at(low, count)
        wide = frame.at(high, count)[0] - left
        if count:
            tip = f"{low:g} to {high:g}: {count:,} requests"
            body.append(
                f'<rect class="bar s{style} hit" data-tip="{h(tip)}" x="{left + 0.75:.1f}" '
                f'y="{top:.1f}" width="{max(1.0, wide - 1.5):.1f}" height="{floor - top:.1f}"/>'
            )
    if mark is not None:
        at = frame.at(mark[0], 0)[0]
        beyond = x.share(mark[0]) > 0.6
        body.append(f'<path class="pin" d="M{at:.1f} {frame.top}V{floor}"/>')
        body.append(
            f'<text class="strong halo{" end" if beyond else ""}" '
            f'x="{at + (-6 if beyond else 6):.1f}" y="{frame.top + 10}">{h(mark[1])}</text>'
        )
    return svg(*size, title, "".join(body))


def dot_plot(title: str, rows: Sequence[Row], x: Axis, width: float) -> str:
    """One row a name, a dot a series, a line over each interval."""
    step = 26.0
    longest = min(max(len(row.name) for row in rows), int(width * 0.065))
    height = step * len(rows) + 52
    # Its ticks make room for the names.
    y = Axis("", 0, len(rows), [(0, "n" * longest)])
    frame = Frame(width, height, x=x, y=y, top=12)
    left = frame.left
    body = []
    for value, text in x.ticks:
        across = frame.at(value, 0)[0]
        body.append(f'<path class="grid" d="M{across:.1f} 12V{height - 40}"/>')
        body.append(f'<text class="middle" x="{across:.1f}" y="{height - 23}">{h(text)}</text>')
    middle = (left + width - frame.right) / 2
    body.append(f'<text class="axis middle" x="{middle:.1f}" y="{height - 5}">{h(x.title)}</text>')
    for i, row in enumerate(rows):
        down = 12 + step * (i + 0.5)
        kind = "strong end" if row.strong else "end"
        name = row.name if len(row.name) <= longest else row.name[: longest - 1] + "…"
        body.append(f'<text class="{kind}" x="{left - 10}" y="{down + 4:.1f}">{h(name)}</text>')
        body.append(f'<path class="rule" d="M{left} {down:.1f}H{width - frame.right}"/>')
        for style, point in row.points:
            if point.interval is not None:
                low, high = (frame.at(end, 0)[0] for end in point.interval)
                body.append(
                    f'<path class="whisker s{style}" d="M{low:.1f} {down:.1f}H{high:.1f}"/>'
                )
        for style, point in row.points:
            body.append(marker(style, frame.at(point.x, 0)[0], down, point.tip))
    return svg(width, height, title, "".join(body))


def deviations(
    title: str,
    lines: Sequence[ChartLine],
    x: Axis,
    y: Axis,
    size: tuple[float, float],
    within: float,
) -> str:
    """Points about zero, and the band in which they are at most `within` from it."""
    frame = Frame(*size, x=x, y=y)
    left, high = frame.at(x.low, within)
    right, low = frame.at(x.high, -within)
    middle = frame.at(x.low, 0)[1]
    body = [
        f'<rect class="band s1" x="{left:.1f}" y="{high:.1f}" width="{right - left:.1f}" '
        f'height="{low - high:.1f}"/>',
        frame.axes(),
        f'<path class="reference" d="M{left:.1f} {middle:.1f}H{right:.1f}"/>',
    ]
    for line in lines:
        body += [marker(line.style, *frame.at(p.x, p.y), p.tip, 3.5) for p in line.points]
    return svg(*size, title, "".join(body))


def strip(title: str, schedule: Sequence[tuple[int, int, int]], width: float) -> str:
    """Ranges of batch sizes side by side, each with its K, deeper ones darker."""
    height, top, tall = 84.0, 8.0, 44.0
    first, last = schedule[0][0], schedule[-1][1]
    whole = math.log2(last + 1) - math.log2(first)
    deepest = max(k for *_, k in schedule) or 1
    body, edges = [], []
    for low, high, k in schedule:
        start = width * (math.log2(low) - math.log2(first)) / whole
        end = width * (math.log2(high + 1) - math.log2(first)) / whole
        shade = 0.1 + 0.35 * k / deepest if k else 0.0
        text = f"K = {k}" if k else "no drafts"
        tip = f"{text} for {low} to {high} sequences together"
        body.append(
            f'<rect class="step hit" data-tip="{h(tip)}" x="{start + 1:.1f}" y="{top}" '
            f'width="{max(2.0, end - start - 2):.1f}" height="{tall}" rx="4" '
            f'fill-opacity="{shade:.2f}"/>'
        )
        if end - start > len(text) * 7.5:
            body.append(
                f'<text class="strong middle" x="{(start + end) / 2:.1f}" '
                f'y="{top + tall / 2 + 5}">{text}</text>'
            )
        edges.append((start, low))
    places = spread([x for x, _ in edges], 26, width - 50)
    body += [
        f'<text x="{x:.1f}" y="{top + tall + 16}">{low}</text>'
        for x, (_, low) in zip(places, edges, strict=True)
    ]
    body.append(f'<text class="end" x="{width}" y="{top + tall + 16}">{last}</text>')
    return svg(width, height, title, "".join(body))
