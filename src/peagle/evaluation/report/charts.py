"""Charts, drawn by matplotlib: as SVG in the colours of the page, and as PNG."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from textwrap import wrap
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from markupsafe import Markup, escape

from peagle.evaluation.report.labels import Labels, Spot, spots_of_level, spots_of_point
from peagle.evaluation.report.text import cut, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NARROW, WIDE = 344, 520
# Light colours; the page replaces each by its variable, which has a dark value too.
_SERIES = ("#5f646b", "#0b6e63", "#b0560a", "#5648c7", "#a3246e", "#1d66a8", "#6b5a10", "#8c1d18")
_TEXT, _MUTED, _LINE, _PAGE = "#1b1d1f", "#5a5f66", "#e2e2dc", "#fbfbf9"
_VARIABLES = {colour: f"var(--s{i})" for i, colour in enumerate(_SERIES)} | {
    **{_TEXT: "var(--text)", _MUTED: "var(--muted)", _LINE: "var(--line)", _PAGE: "var(--page)"}
}
_MARKERS = "vosD^<PX>pdhH8"  # one a method
_DASHES: tuple[Any, ...] = (  # one an engine
    *("-", (0, (3, 1.5)), (0, (1, 1.5)), (0, (4, 1.5, 1, 1.5)), (0, (6, 1.5))),
    (0, (3, 1, 1, 1, 1, 1)),
)
_CHARACTER = 6.9  # pixels of width
_DPI, _PANEL_HEIGHT, _LINE_HEIGHT = 160, 3.85, 0.16  # PNGs; heights in inches
_ATTRIBUTES = {"fill", "fill-opacity", "opacity", "stroke", "stroke-width", "stroke-dasharray",
               "stroke-linejoin", "font-size", "font-weight", "text-anchor"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Look:
    """The look of a series: a method has a colour and a marker, an engine dashes and a filling.

    Attributes:
        method: number of the method; 0 is grey, and colours recur beyond 7 with other markers.
        engine: number of the engine; engine 0 has filled markers, the others hollow ones.
    """

    method: int
    engine: int = 0

    @property
    def colour(self) -> str:
        """Return the colour on a light page."""
        most = len(_SERIES)
        return _SERIES[self.method if self.method < most else 1 + (self.method - 1) % (most - 1)]


@dataclass(frozen=True, slots=True)
class ChartPoint:
    """A point of a line, with its interval, its tooltip, and a note above it."""

    x: float
    y: float
    interval: tuple[float, float] | None = None
    tip: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A series, with its name, its look, and its points from left to right."""

    name: str
    style: Look
    points: Sequence[ChartPoint]


@dataclass(frozen=True, slots=True)
class Axis:
    """One side of a chart; without ticks and ends it has round numbers about the data."""

    title: str
    ticks: Sequence[tuple[float, str]] | None = None
    low: float | None = None
    high: float | None = None
    log: bool = False
    is_share: bool = False  # ticks are percentages


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart; matplotlib draws it as SVG and as PNG."""

    title: str
    lines: Sequence[ChartLine]
    x: Axis
    y: Axis
    about: str = ""  # the text alternative; "" takes the title
    small: str = ""  # a second line of the caption
    connected: bool = True  # lines join their points
    rows: bool = False  # y is a row; intervals lie along x
    bars: Sequence[tuple[float, float, int, str]] = ()  # low, high, count, tooltip
    level: tuple[float, str] | None = None  # a value of y to compare with, and its name
    pin: tuple[float, str] | None = None  # a marked value of x, and its name
    band: tuple[float, float] | None = None  # two values of y, shaded between
    wide: int = 0  # width on a large screen, pixels; 0 has one chart for all screens
    height: int = 260  # pixels

    @property
    def legend(self) -> list[tuple[Look, str]]:
        """Return the look and the name of each line."""
        return [] if self.bars else [(line.style, line.name) for line in self.lines]

    def svgs(self) -> list[tuple[str, Markup]]:
        """Return the chart as SVGs, each with the class of screens that it is for."""
        if not self.wide:
            return [("", _svg(self, NARROW))]
        return [("wide", _svg(self, self.wide)), ("narrow", _svg(self, NARROW))]


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def png(charts: Sequence[Chart], heading: str) -> bytes:
    """Return charts beside each other as a PNG, with one legend."""
    with _settings():
        buffer = io.BytesIO()
        figure = picture(charts, heading)
        figure.savefig(buffer, format="png", dpi=figure.dpi, metadata={"Software": None})
        return buffer.getvalue()


def picture(charts: Sequence[Chart], heading: str) -> Figure:
    """Draw charts beside each other, with a heading above and one legend below.

    The picture is as high as its titles and its legend need, and no text leaves it.
    """
    width = max(4.2, 3.5 * len(charts)) + 0.6
    with _settings():
        figure = _new_figure(width, _PANEL_HEIGHT, _DPI)
        figure.set_layout_engine("constrained")
        figure.set_facecolor("white")
        words = _wrapped(heading, figure, (width - 0.2) * _DPI, fontsize=9)
        figure.suptitle(words, x=0.012, ha="left", fontsize=9, color=_MUTED)
        panels = figure.subplots(1, len(charts), squeeze=False)[0]
        for chart, axes in zip(charts, panels, strict=True):
            _draw(chart, axes)
            axes.set_ylabel(_plain(chart.y.title), fontsize=9.5, color=_TEXT)
        more = _add_legend(figure, list(dict.fromkeys(one for c in charts for one in c.legend)))
        # Titles are as wide as the axes, whose width the first layout gives.
        engine: Any = figure.get_layout_engine()
        engine.execute(figure)
        more += _add_titles(charts, panels) + _LINE_HEIGHT * words.count("\n")
        figure.set_figheight(_PANEL_HEIGHT + more)
        engine.execute(figure)
        figure.set_layout_engine("none")
        for chart, axes in zip(charts, panels, strict=True):
            _annotate(chart, axes)
        return figure


def _add_legend(figure: Figure, styles: Sequence[tuple[Look, str]]) -> float:
    """Add a legend in as few rows as fit into the picture; return its height in inches."""
    from matplotlib.lines import Line2D

    room, place = (figure.get_figwidth() - 0.2) * _DPI, "outside lower center"
    handles = [Line2D([], [], **_look(style)) for style, _ in styles]
    names = [_wrapped(name, figure, room - _DPI, fontsize=9) for _, name in styles]
    for rows in range(1, len(styles) + 1):
        options: Any = {"loc": place, "frameon": False, "fontsize": 9, "handlelength": 3.2}
        legend = figure.legend(handles, names, ncols=-(-len(styles) // rows), **options)
        box = legend.get_window_extent()
        if box.width <= room or rows == len(styles):
            return box.height / _DPI
        legend.remove()
    return 0.0


def _add_titles(charts: Sequence[Chart], panels: Sequence[Axes]) -> float:
    """Write titles and small titles within the width of the axes; return their height in inches."""
    titles, smalls = [], []
    for chart, axes in zip(charts, panels, strict=True):
        figure: Any = axes.get_figure()
        room = axes.get_window_extent().width
        titles.append(_wrapped(chart.title, figure, room, fontsize=11, fontweight="bold"))
        smalls.append(_wrapped(chart.small, figure, room, fontsize=8))
    most = max(small.count("\n") + 1 if small else 0 for small in smalls)
    for title, small, axes in zip(titles, smalls, panels, strict=True):
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=11 + 11 * most)
        place: Any = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom"}
        line = axes.annotate(small, (0, 1), (0, 7), fontsize=8, color=_MUTED, **place)
        line.set_in_layout(False)
    return _LINE_HEIGHT * (most + max(title.count("\n") for title in titles))


def _wrapped(text: str, figure: Figure, room: float, **font: Any) -> str:
    """Break a text into lines of at most `room` pixels."""
    text = _plain(text)
    label = figure.text(0, 0, "", **font)
    for most in range(len(text), 0, -1):
        lines = "\n".join(wrap(text, most, break_on_hyphens=False))
        label.set_text(lines)
        if label.get_window_extent().width <= room:
            break
    else:
        lines = text
    label.remove()
    return lines


@cache
def key(style: Look) -> Markup:
    """Return the line and the marker of a look, for a legend."""
    with _settings():
        figure = _new_svg(34, 14)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set(xlim=(0, 2), ylim=(-1, 1))
        line: dict[str, Any] = _look(style) | {"marker": ""}
        axes.plot([0.05, 1.95], [0, 0], **line)
        axes.plot([1], [0], **_look(style))
        return _write(figure, {}, 'class="chart key" aria-hidden="true"')


def _svg(chart: Chart, width: int) -> Markup:
    with _settings():
        figure = _new_svg(width, chart.height)
        axes = figure.add_axes((0, 0, 1, 1))
        tips = _draw(chart, axes)
        labels = [label.get_text() for label in axes.get_yticklabels()]
        longest = max(map(len, labels), default=0)
        left = min(longest * _CHARACTER + 12, 0.5 * width)
        top = 26 if chart.y.title else 12
        x, y = left / width, 42 / chart.height
        axes.set_position((x, y, 1 - x - 16 / width, 1 - y - top / chart.height))
        figure.text(0, 1 - 12 / chart.height, _plain(chart.y.title), color=_TEXT, fontsize=12)
        _annotate(chart, axes)
        about = f"{chart.about or chart.title}: {chart.y.title or 'rows'} over {chart.x.title}"
        alt = escape(visible(f"Chart of {about}. The tables have the numbers."))
        return _write(figure, tips, f'class="chart" role="img" aria-label="{alt}"')


def _new_figure(width: float, height: float, dpi: int) -> Figure:
    """Return a figure of this size in inches, on a canvas that measures texts."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi)
    FigureCanvasAgg(figure)
    return figure


def _new_svg(width: float, height: float) -> Figure:
    """Return a figure of this size in pixels, without a background."""
    figure = _new_figure(width / 72, height / 72, 72)
    figure.patch.set_visible(False)
    return figure


@contextmanager
def _settings() -> Iterator[None]:
    from matplotlib import rc_context

    # Users choose the names: dollars in them are no formulas.
    own: Any = {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "peagle"}
    with rc_context(own), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


# ---- drawing ----


def _draw(chart: Chart, axes: Axes) -> dict[str, Sequence[str]]:
    """Draw a chart; return the tooltips by the id of their marker or bar."""
    tips: dict[str, Sequence[str]] = {}
    axes.patch.set_visible(False)
    axes.set_xscale("log" if chart.x.log else "linear")
    axes.set_yscale("log" if chart.y.log else "linear")
    axes.margins(x=0 if chart.bars else 0.05, y=0.1)
    if chart.band is not None:
        axes.axhspan(*chart.band, color=_SERIES[1], alpha=0.12, linewidth=0, clip_on=False)
    if chart.level is not None:
        axes.axhline(chart.level[0], color=_MUTED, linestyle=(0, (3, 4)), linewidth=1, zorder=1.5)
    for low, high, count, tip in chart.bars:
        name = f"bar{len(tips)}"
        tips[name] = [tip]
        colour = chart.lines[0].style.colour
        axes.bar(low, count, high - low, align="edge", color=colour, edgecolor=_PAGE, gid=name)
    for line in chart.lines:
        _draw_intervals(chart, axes, line)
    for line in chart.lines if not chart.bars else ():
        name = f"line{len(tips)}"
        tips[name] = [point.tip for point in line.points]
        look = _look(line.style)
        if chart.rows or not chart.connected:
            look["linestyle"] = ""
        xs, ys = [point.x for point in line.points], [point.y for point in line.points]
        axes.plot(xs, ys, label=_plain(line.name), gid=name, zorder=3, **look)
    if chart.pin is not None:
        axes.axvline(chart.pin[0], color=_TEXT, linewidth=1.5)
    _set_ticks(chart, axes)
    return tips


def _look(style: Look) -> dict[str, Any]:
    colour, is_hollow = style.colour, style.engine > 0
    return {
        "color": colour,
        "marker": _MARKERS[style.method % len(_MARKERS)],
        "linestyle": _DASHES[style.engine % len(_DASHES)],
        "linewidth": 2.25,
        "markersize": 7,
        "markerfacecolor": _PAGE if is_hollow else colour,
        "markeredgecolor": colour if is_hollow else _PAGE,
        "markeredgewidth": 1.75 if is_hollow else 1,
        "clip_on": False,
    }


def _draw_intervals(chart: Chart, axes: Axes, line: ChartLine) -> None:
    """Draw a band where several neighbouring points have intervals, whiskers elsewhere."""
    held = [(point.x, point.y, *point.interval) for point in line.points if point.interval]
    if not held:
        return
    xs, ys, lows, highs = zip(*held, strict=True)
    floor, colour = (chart.x if chart.rows else chart.y).low, line.style.colour
    lows = lows if floor is None else [max(low, floor) for low in lows]
    if chart.rows:
        axes.hlines(ys, lows, highs, color=colour, linewidth=2, alpha=0.5)
    elif len(held) > 1 and chart.connected:
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.12, linewidth=0)
    else:
        axes.vlines(xs, lows, highs, color=colour, linewidth=2, alpha=0.5)


def _set_ticks(chart: Chart, axes: Axes) -> None:
    """Fix limits and ticks, and style axes and grid."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    for axis, own in ((chart.x, axes.xaxis), (chart.y, axes.yaxis)):
        low, high = sorted(own.get_view_interval())
        low = low if axis.low is None else axis.low
        high = high if axis.high is None else axis.high
        limits = (low, high) if high > low else (low, low + 1)
        (axes.set_xlim if own is axes.xaxis else axes.set_ylim)(*limits)
        ticks = axis.ticks
        if ticks is None:
            locators: list[Any] = [MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])]
            if axis.log:
                locators = [LogLocator(subs=subs) for subs in ((1, 2, 5), (1, 3), (1,))]
            slack, most = 1e-9 * (high - low), 8 if own is axes.yaxis else 6
            found: list[float] = []
            for locator in locators:
                if not found or len(found) > most:
                    values = map(float, locator.tick_values(low, high))
                    found = [tick for tick in values if low - slack <= tick <= high + slack]
            ticks = [(t, tick_label(t, axis, found)) for t in found]
        own.set_minor_locator(NullLocator())
        own.set_ticks([t for t, _ in ticks], [_plain(text) for _, text in ticks])
        own.set_tick_params(which="both", length=0, left=False, bottom=False, labelsize=12)
        own.set_tick_params(labelcolor=_MUTED, pad=6)
    if chart.rows:
        axes.invert_yaxis()
    axes.grid(axis="x" if chart.rows else "y", color=_LINE, linewidth=1)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_MUTED)
    axes.set_xlabel(_plain(chart.x.title), color=_TEXT, fontsize=12)


def tick_label(value: float, axis: Axis, ticks: Sequence[float]) -> str:
    """Return the text of a tick, with as many digits as tell the ticks apart."""
    if axis.is_share:
        return f"{100 * value:.0f}%"
    for digits in range(9):
        texts = [f"{tick:.{digits}f}" for tick in ticks]
        if axis.log and float(f"{value:.{digits}f}") == value:
            return f"{value:,.{digits}f}"
        if not axis.log and all(abs(float(t) - v) < 1e-9 for t, v in zip(texts, ticks)):
            return f"{value:,.{digits}f}"
    return f"{value:g}"


def _annotate(chart: Chart, axes: Axes) -> None:
    """Write the names of marked values, and notes at points where there is room."""
    labels = Labels(axes)
    if chart.pin is not None:
        x, name = chart.pin
        left, right = axes.get_xlim()
        spots = [
            Spot(x, axes.get_ylim()[1], dx, -7, side, "top")
            for dx, side in ((6, "left"), (-6, "right"))
        ]
        spots = spots[::-1] if x > (left + right) / 2 else spots
        labels.write(_plain(name), spots, _TEXT, is_needed=True)
    if chart.level is not None and chart.level[1]:
        labels.write(_plain(chart.level[1]), spots_of_level(chart.level[0]), _MUTED)
    # The line that is drawn last shows the head that the report is about.
    for line in reversed(chart.lines):
        for point in line.points:
            if point.note:
                spots = spots_of_point(point.x, point.y)
                labels.write(_plain(point.note), spots, line.style.colour)


def _plain(text: str) -> str:
    """Return a name as a chart can show it: on one line, not too long."""
    return cut(visible(text), 90).replace("\n", " ")


# ---- SVG ----


def _write(figure: Figure, tips: dict[str, Sequence[str]], attributes: str) -> Markup:
    """Return the figure as inline SVG of paths and texts alone: no style, id, link or clip."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(buffer.getvalue())
    shapes = {item.get("id"): item for item in root.iter() if _tag(item) == "path"}
    body = "".join(_elements(root, shapes, tips, []))
    width, height = (72 * side for side in figure.get_size_inches())
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    return Markup(f"<svg {attributes} {size}>{body}</svg>")


def _elements(
    parent: ElementTree.Element,
    shapes: dict[str | None, ElementTree.Element],
    tips: dict[str, Sequence[str]],
    own_tips: list[str],
    kind: str = "",
) -> Iterator[str]:
    """Yield paths and texts within an element; markers and bars take the tips of their group."""
    for item in parent:
        tag = _tag(item)
        if tag == "g":
            name = item.get("id", "")
            inner = list(tips[name]) if name in tips else own_tips
            yield from _elements(item, shapes, tips, inner, name if name in tips else kind or name)
        elif tag == "text":
            halo = ' class="halo"' if kind == "halo" else ""
            place = f'x="{float(item.get("x", 0)):.1f}" y="{float(item.get("y", 0)):.1f}"'
            yield f"<text{halo} {place}{_style(item)}>{escape(item.text or '')}</text>"
        elif tag == "path":
            path = f'<path d="{_path(item)}"{_style(item)}/>'
            yield _hit(path, own_tips, "") if kind.startswith("bar") else path
        elif tag == "use":
            shape = shapes[item.get(_LINK, "#").removeprefix("#")]
            x, y = float(item.get("x", 0)), float(item.get("y", 0))
            path = (
                f'<path d="{_path(shape)}" transform="translate({x:.1f} {y:.1f})"{_style(item)}/>'
            )
            yield _hit(path, own_tips, f'<circle class="area" cx="{x:.1f}" cy="{y:.1f}" r="13"/>')


_LINK = "{http://www.w3.org/1999/xlink}href"


def _tag(item: ElementTree.Element) -> str:
    return item.tag.rpartition("}")[2]


def _hit(shape: str, tips: list[str], area: str) -> str:
    """Return a shape with the next tooltip."""
    tip = tips.pop(0) if tips else ""
    if not tip:
        return shape
    return f'<g class="hit" data-tip="{escape(visible(tip))}">{area}{shape}</g>'


def _path(item: ElementTree.Element) -> str:
    words = item.get("d", "").split()
    return " ".join(word if word.isalpha() else f"{float(word):.1f}" for word in words)


def _style(item: ElementTree.Element) -> str:
    """Return declarations as attributes: the page's policy forbids inline styles."""
    pairs = (part.partition(":")[::2] for part in item.get("style", "").split(";"))
    found = {name.strip(): value.strip() for name, value in pairs}
    return "".join(
        f' {name}="{_VARIABLES.get(value, value)}"'
        for name, value in found.items()
        if name in _ATTRIBUTES
    )
