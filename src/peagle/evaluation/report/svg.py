"""Charts as SVG: axes, lines with bands, bars, dots. Colours come from the page's classes.

A chart is drawn in pixels for one width, because text that scales with a picture is too small on a
phone or too large on a desk. A series is told by its colour, its marker and its dashes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from peagle.evaluation.report.text import h

NUM_STYLES = 8
_CHARACTER = 6.7
_LINE = 15.0


@dataclass(frozen=True, slots=True)
class ChartPoint:
    """One point of a line: where it is, its interval, and what a tooltip says."""

    x: float
    y: float
    interval: tuple[float, float] | None = None
    tip: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A series: its name, its style (0 to NUM_STYLES - 1), and its points from left to right."""

    name: str
    style: int
    points: Sequence[ChartPoint]


@dataclass(frozen=True, slots=True)
class Axis:
    """From values to shares of a side.

    Attributes:
        title: what it shows, with the unit.
        low, high: values at its ends.
        ticks: values with their labels.
        log: equal factors have equal lengths.
    """

    title: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool = False

    def share(self, value: float) -> float:
        """0 at `low`, 1 at `high`; what lies beyond is moved to the end."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, self.low))
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5


def value_axis(
    title: str,
    values: Sequence[float],
    *,
    low: float | None = None,
    high: float | None = None,
    least_step: float = 0.0,
) -> Axis:
    """A linear axis with round ticks that holds `values`, between `low` and `high` if given."""
    least = low if low is not None else min(values)
    most = high if high is not None else max(values)
    if most <= least:
        most = least + 1
    step = max(least_step, _round_step((most - least) / 5))
    first = least if low is not None else math.floor(least / step) * step
    last = most if high is not None else first + math.ceil((most - first) / step - 1e-9) * step
    count = int((last - first) / step + 1e-6)
    ticks = [first + i * step for i in range(count + 1)]
    return Axis(title, first, last, [(t, label(t, step)) for t in ticks])


def log_axis(
    title: str, values: Sequence[float], ticks: Sequence[float] = (), most_ticks: int = 8
) -> Axis:
    """A logarithmic axis with 1, 2, 5, 10, ... for ticks, 1, 10, ... if many, or those given."""
    least, most = min(values), max(values)
    if ticks:
        low, high = least, most
        marks = list(ticks)
    else:
        powers = range(math.floor(math.log10(least)) - 1, math.ceil(math.log10(most)) + 1)
        marks = [m * 10.0**p for p in powers for m in (1, 2, 5)]
        low = max(m for m in marks if m <= least * 1.0001)
        high = min((m for m in marks if m >= most * 0.9999), default=most)
        marks = [m for m in marks if low <= m <= high]
        if len(marks) > most_ticks:
            marks = [m for m in marks if f"{m:e}"[0] == "1"]
    if high <= low:
        low, high = low / 2, high * 2
    return Axis(title, low, high, [(m, label(m, m)) for m in marks], log=True)


def step_axis(title: str, values: Sequence[int]) -> Axis:
    """An axis of whole numbers, a tick at each."""
    return Axis(title, values[0] - 0.35, values[-1] + 0.35, [(v, str(v)) for v in values])


def label(value: float, step: float) -> str:
    """A tick's text, with as many digits as its step needs."""
    digits = next((d for d in range(9) if abs(round(step, d) - step) <= 1e-6 * step), 9)
    return f"{value:,.{digits}f}"


def _round_step(raw: float) -> float:
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.9999)


@dataclass(frozen=True, slots=True)
class Frame:
    """The rectangle of a chart between its axes."""

    width: float
    height: float
    x: Axis
    y: Axis
    right: float = 16
    top: float = 26
    bottom: float = 40

    @property
    def left(self) -> float:
        """Room for the longest tick."""
        return max((len(text) for _, text in self.y.ticks), default=0) * _CHARACTER + 12

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Pixels of a point."""
        inner = self.width - self.left - self.right
        across = self.left + inner * self.x.share(x)
        down = self.height - self.bottom
        return across, down - (down - self.top) * self.y.share(y)

    def axes(self) -> str:
        """Grid, ticks and titles."""
        out = [f'<text class="axis" x="0" y="12">{h(self.y.title)}</text>']
        bottom, end = self.height - self.bottom, self.width - self.right
        for value, text in self.y.ticks:
            y = self.at(self.x.low, value)[1]
            kind = "base" if abs(y - bottom) < 0.5 else "grid"
            out.append(f'<path class="{kind}" d="M{self.left} {y:.1f}H{end}"/>')
            out.append(f'<text x="{self.left - 8}" y="{y + 4:.1f}" class="end">{h(text)}</text>')
        out.append(f'<path class="base" d="M{self.left} {bottom}H{end}"/>')
        for value, text in self.x.ticks:
            x = self.at(value, self.y.low)[0]
            out.append(f'<text x="{x:.1f}" y="{bottom + 17}" class="middle">{h(text)}</text>')
        middle = (self.left + end) / 2
        out.append(
            f'<text class="axis middle" x="{middle:.1f}" y="{self.height - 5}">'
            f"{h(self.x.title)}</text>"
        )
        return "".join(out)


def svg(width: float, height: float, title: str, body: str, extra: str = "") -> str:
    """A picture with a text alternative."""
    return (
        f'<svg class="chart {extra}" role="img" aria-label="{h(title)}" '
        f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">{body}</svg>'
    )


def line_chart(
    title: str,
    lines: Sequence[ChartLine],
    x: Axis,
    y: Axis,
    size: tuple[float, float],
    *,
    direct: bool = False,
    reference: tuple[float, str, bool] | None = None,
) -> str:
    """Lines with markers, and bands where points have intervals.

    Args:
        title: the text alternative.
        lines: drawn in this order, the last on top.
        x, y: axes.
        size: width and height.
        direct: names at the lines' ends instead of in a legend.
        reference: a level to compare with, its name, and whether that stands above it.
    """
    longest = max((len(line.name) for line in lines), default=0)
    right = longest * _CHARACTER + 22 if direct else 16
    frame = Frame(*size, x=x, y=y, right=right)
    body = [frame.axes()]
    if reference is not None:
        level, name, above = reference
        _, down = frame.at(x.low, level)
        end = frame.width - frame.right
        body.append(f'<path class="reference" d="M{frame.left} {down:.1f}H{end:.1f}"/>')
        down += -6 if above else 15
        body.append(f'<text class="halo" x="{frame.left + 8:.1f}" y="{down:.1f}">{h(name)}</text>')
    body += [_band(frame, line) for line in lines]
    body += [_curve(frame, line) for line in lines]
    taken = [frame.at(p.x, p.y) for line in lines for p in line.points]
    body += [_points(frame, line, taken) for line in lines]
    if direct:
        body.append(_end_labels(frame, lines))
    return svg(*size, title, "".join(body))


def _band(frame: Frame, line: ChartLine) -> str:
    held = [p for p in line.points if p.interval]
    if len(held) < 2:
        return "".join(_whisker(frame, line.style, p) for p in held)
    upper = [frame.at(p.x, p.interval[1]) for p in held if p.interval]
    lower = [frame.at(p.x, p.interval[0]) for p in reversed(held) if p.interval]
    corners = " ".join(f"{a:.1f},{b:.1f}" for a, b in [*upper, *lower])
    return f'<polygon class="band s{line.style}" points="{corners}"/>'


def _whisker(frame: Frame, style: int, point: ChartPoint) -> str:
    assert point.interval is not None
    across, low = frame.at(point.x, point.interval[0])
    high = frame.at(point.x, point.interval[1])[1]
    return f'<path class="whisker s{style}" d="M{across:.1f} {low:.1f}V{high:.1f}"/>'


def _curve(frame: Frame, line: ChartLine) -> str:
    places = [frame.at(p.x, p.y) for p in line.points]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    return f'<polyline class="curve s{line.style}" points="{path}"/>' if len(places) > 1 else ""


def _points(frame: Frame, line: ChartLine, taken: Sequence[tuple[float, float]]) -> str:
    """Markers, and notes above them where no other marker is in their way."""
    out = []
    for point in line.points:
        across, down = frame.at(point.x, point.y)
        out.append(marker(line.style, across, down, point.tip))
        is_free = not any(abs(x - across) < 24 and 0 < down - y < 26 for x, y in taken)
        if point.note and is_free:
            out.append(
                f'<text class="note halo middle s{line.style}" x="{across:.1f}" '
                f'y="{down - 10:.1f}">{h(point.note)}</text>'
            )
    return "".join(out)


def marker(style: int, x: float, y: float, tip: str = "", size: float = 4.5) -> str:
    """The marker of a style, with a tooltip."""
    shapes = {
        1: [(0, 0)],
        2: [(-1, -1), (1, -1), (1, 1), (-1, 1)],
        3: [(0, -1.35), (1.35, 0), (0, 1.35), (-1.35, 0)],
        4: [(0, -1.3), (1.25, 0.95), (-1.25, 0.95)],
        5: [(0, 1.3), (1.25, -0.95), (-1.25, -0.95)],
        6: [(-1.3, -0.5), (1.3, -0.5), (1.3, 0.5), (-1.3, 0.5)],
        7: [(-0.5, -1.3), (0.5, -1.3), (0.5, 1.3), (-0.5, 1.3)],
    }
    corners = shapes.get(style, [(0, 0)])
    if len(corners) == 1:
        shape = f'<circle class="mark s{style}" cx="{x:.1f}" cy="{y:.1f}" r="{size:g}"/>'
    else:
        places = " ".join(f"{x + a * size:.1f},{y + b * size:.1f}" for a, b in corners)
        shape = f'<polygon class="mark s{style}" points="{places}"/>'
    if not tip:
        return shape
    return (
        f'<g class="hit" data-tip="{h(tip)}"><circle class="area" cx="{x:.1f}" cy="{y:.1f}" '
        f'r="13"/>{shape}</g>'
    )


def _end_labels(frame: Frame, lines: Sequence[ChartLine]) -> str:
    """Names at the lines' ends, moved apart where they would touch."""
    ends = [(frame.at(x.points[-1].x, x.points[-1].y)[1], x) for x in lines if x.points]
    ends.sort(key=lambda end: end[0])
    heights = spread([down for down, _ in ends], _LINE, frame.height - frame.bottom)
    x = frame.width - frame.right + 12
    return "".join(
        f'<text class="direct s{line.style}" x="{x:.1f}" y="{down + 4:.1f}">{h(line.name)}</text>'
        for down, (_, line) in zip(heights, ends, strict=True)
    )


def spread(places: Sequence[float], gap: float, high: float) -> list[float]:
    """Ascending places moved apart to at least `gap`, the last no further than `high`."""
    out: list[float] = []
    for place in places:
        out.append(max(place, out[-1] + gap) if out else place)
    ceiling = high
    for i in reversed(range(len(out))):
        out[i] = min(out[i], ceiling)
        ceiling = out[i] - gap
    return out
